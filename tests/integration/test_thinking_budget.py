"""Requests with a thinking budget, next to others: on V1 without trees, on V2 with them."""

from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_tokenizer
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED

START, END = ord("A"), ord("B")
OPTIONS = {
    "skip_tokenizer_init": False,
    "reasoning_config": {"reasoning_start_str": chr(START), "reasoning_end_str": chr(END)},
}
DEPTH = max(map(len, SMALL_BUSHY))


def test_budgets_beside_trees(models, heads, engine):
    model = add_tokenizer(models("llama", pad_token_id=0))
    prompts = make_prompts(8, VOCAB, longest=20)
    # Budgets at several places of the batch, in the first and behind requests with trees.
    budgets = [3, None, None, 5, 0, None, 7, 2]
    for index, budget in enumerate(budgets):
        if budget is not None:
            prompts[index] = [START, *(t for t in prompts[index] if t not in (START, END))]
    each = [{"thinking_token_budget": budget} for budget in budgets]
    length = fewer(40, at_least=20)

    expected = tokens(generate(engine(model, **OPTIONS), prompts, each, max_tokens=length))
    for index, budget in enumerate(budgets):
        if budget is not None:
            assert expected[index].index(END) <= budget + 1  # the budgets do bite
    llm = engine(model, **OPTIONS, **medusa(heads(DEPTH), SMALL_BUSHY))
    known = continuations(prompts, expected)
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)) as oracle:
        assert tokens(generate(llm, prompts, each, max_tokens=length)) == expected
    assert max(oracle.lengths) == DEPTH
    assert any(step["decode"] for step in watch.steps) != INTERPRETED
