"""Requests with a thinking budget are served without trees, next to others that have them."""

from vllm import SamplingParams

from tests.integration.generation import TREES, continuations, make_prompts, medusa, tokens
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_tokenizer

START, END = ord("A"), ord("B")
OPTIONS = {
    "skip_tokenizer_init": False,
    "reasoning_config": {"reasoning_start_str": chr(START), "reasoning_end_str": chr(END)},
}


def test_budgets_beside_trees(models, heads, engine):
    model = add_tokenizer(models("llama", pad_token_id=0))
    prompts = make_prompts(8, VOCAB, longest=20)
    # Budgets at several places of the batch, in the first and behind requests with trees.
    budgets = [3, None, None, 5, 0, None, 7, 2]
    for index, budget in enumerate(budgets):
        if budget is not None:
            prompts[index] = [START, *(t for t in prompts[index] if t not in (START, END))]

    def run(llm):
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=40, ignore_eos=True, thinking_token_budget=budget
            )
            for budget in budgets
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return tokens(llm.generate(inputs, params, use_tqdm=False))

    expected = run(engine(model, **OPTIONS))
    for index, budget in enumerate(budgets):
        if budget is not None:
            assert expected[index].index(END) <= budget + 1  # the budgets do bite
    llm = engine(model, **OPTIONS, **medusa(heads(4), TREES["bushy63"]))
    with oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)) as oracle:
        assert run(llm) == expected
    assert max(oracle.lengths) == 4
