"""Every option of a request, all side by side in one batch, on both model runners: each request
gets what vLLM gives it without speculation. docs/request-features.md lists what is served."""

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.integration.generation import (
    SMALL_BUSHY,
    assert_logprobs_agree,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    printable,
    sampling_params,
    some,
    to_come,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_byte_tokenizer
from tests.integration.watch import watching

PAGE = Path(__file__).parents[2] / "docs" / "request-features.md"
LENGTH = fewer(40, 18)
ASCII = 127  # prompts are of tokens below: broken UTF-8 at their end would show in the texts
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 999}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def asking(**spec):
    """The option of a structured output."""
    return {"structured_outputs": StructuredOutputsParams(**spec), "ignore_eos": False}


# The page's rows of what is served with trees: what each is asked for with, given the text without
# any option. Where no temperature is said, greedy and sampled.
ROWS = {
    "greedy (temperature 0)": [lambda text: {"temperature": 0.0}],
    "temperature, top-k, top-p, min-p": [
        lambda text: {"temperature": 0.5},
        lambda text: {"temperature": 1.2, "top_k": 9},
        lambda text: {"temperature": 1.0, "top_p": 0.8},
        lambda text: {"temperature": 1.2, "min_p": 0.05},
    ],
    "`seed`": [lambda text: {"temperature": 1.0, "seed": 12345}],
    "`n` > 1": [lambda text: {"temperature": 0.8, "n": 3}],
    "repetition, presence, frequency penalty": [
        lambda text: {"repetition_penalty": 1.4},
        lambda text: {"presence_penalty": 1.5},
        lambda text: {"frequency_penalty": 1.2},
    ],
    "`logit_bias`": [lambda text: {"logit_bias": {text[2]: -3.0, text[7]: 2.0}}],
    "`bad_words`, `allowed_token_ids`": [
        lambda text: {"bad_words": [*printable(text)[:3], "abc"]},
        lambda text: {"allowed_token_ids": sorted({*text[::2], *range(5, VOCAB, 9)})},
    ],
    "`min_tokens`": [lambda text: {"min_tokens": 11, "stop_token_ids": text[4:12]}],
    "`stop`, `stop_token_ids`, `max_tokens`, `ignore_eos`": [
        lambda text: {"stop": printable(text)[7:9]},
        lambda text: {"stop_token_ids": text[15:18]},
        lambda text: {"max_tokens": 17},
        lambda text: {"ignore_eos": False, "logit_bias": {2: 4.0}},
    ],
    "`logprobs`, also -1": [
        lambda text: {"logprobs": 0},
        lambda text: {"logprobs": 1},
        lambda text: {"logprobs": 20},
        # -1 is in test_sampled.py.
    ],
    "`prompt_logprobs`": [lambda text: {"prompt_logprobs": 2}],
    "structured outputs (JSON schema, regular expression, choice, grammar)": [
        lambda text: asking(json=SCHEMA),
        lambda text: asking(regex="[0-9]{3,12}(abc|xyz)+"),
        lambda text: asking(choice=["yes", "yes, of course", "no", "true", "truest"]),
        lambda text: asking(grammar='root ::= "[" [a-c]+ ("," [a-c]+)* "]"'),
    ],
}

# Other rows, and where they are tested.
ELSEWHERE = {
    "`logprob_token_ids`": "integration/test_matrix.py::test_logprob_token_ids",
    "streaming": "e2e/test_serving.py::test_streams_the_same_text",
    "`echo`, tool calls": "e2e/test_serving.py::test_echo_and_tool_calls",
    "reasoning parsers": "integration/test_structured_outputs.py::test_thinking_first",
    "thinking budgets (`thinking_token_budget`)": (
        "integration/test_thinking_budget.py::test_budgets_beside_trees"
    ),
    "custom logits processors": "integration/test_v2_runner.py::test_custom_logits_processors",
    "beam search": "integration/test_matrix.py::test_beam_search",
    "`priority`": "integration/test_matrix.py::test_priority",
    "prompt embeddings": "integration/test_prompt_embeds.py::test_beside_tokens",
    "malformed requests": (
        "e2e/test_serving.py::test_malformed_requests_get_an_error_and_disturb_nobody"
    ),
}


@pytest.fixture(scope="module")
def start(models, heads, module_engine):
    """Start an engine without or with trees."""
    model = add_byte_tokenizer(models("llama", seed=3))

    def engine(trees, **options):
        if trees:
            options |= medusa(heads(max(map(len, SMALL_BUSHY))), SMALL_BUSHY)
        return module_engine(
            model,
            skip_tokenizer_init=False,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            **options,
        )

    return engine


@pytest.fixture(scope="module")
def served(start):
    """All options in one batch: by row, what each request asked for, what it got, what it should
    have got, and the longest path that was accepted for it."""
    asked = [
        (row, option, temperature)
        for row, options in ROWS.items()
        for option in options
        for temperature in some([0.0, 0.7])
        if "temperature" not in option(range(5, 45)) or temperature
    ]
    prompts = make_prompts(len(asked), ASCII, longest=40, seed=51)
    each = [{"temperature": t, "seed": seed} for seed, (_, _, t) in enumerate(asked)]
    plain, trees = start(trees=False), start(trees=True)
    texts = tokens(generate(plain, prompts, each, max_tokens=LENGTH))
    for own, text, (_, option, _) in zip(each, texts, asked, strict=True):
        own |= option(text)
    params = {"max_tokens": LENGTH, "detokenize": True}
    expected = generate(plain, prompts, each, **params)
    known = continuations(prompts, to_come(each, texts, expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(trees, prompts, each, **params)
    rows = {row: [] for row in ROWS}
    for (row, *_), own, output, should in zip(asked, each, outputs, expected, strict=True):
        rows[row].append((own, output, should, watch.longest(output)))
    return rows


@pytest.mark.parametrize("row", ROWS)
def test_beside_all_others(row, served):
    for own, output, expected, _ in served[row]:
        for found, should in zip(output.outputs, expected.outputs, strict=True):
            assert found.text == should.text, own
            assert "stop" in own or found.token_ids == should.token_ids, own
            assert found.finish_reason == should.finish_reason
            assert found.stop_reason == should.stop_reason
            assert_logprobs_agree(found.logprobs, should.logprobs)
        assert_logprobs_agree(output.prompt_logprobs, expected.prompt_logprobs)
    assert max(longest for *_, longest in served[row]) > 1


def test_the_page_lists_them():
    """What the page says is served is tested, and what is tested stands there."""
    lines = PAGE.read_text().split("| feature | V1", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    served = {name for name, *runners, _ in rows if runners != ["refused", "refused"]}
    assert served == {*ROWS, *ELSEWHERE}
    for test in ELSEWHERE.values():
        file, name = test.split("::")
        assert f"def {name}" in (PAGE.parents[1] / "tests" / file).read_text()


def test_logprob_token_ids(start):
    """Beside requests without logprobs only: on V1, vLLM's sampler gives all requests of a step the
    tokens that some have named, in the place of the likeliest ones, also without speculation."""
    prompts = make_prompts(8, ASCII, longest=40, seed=55)
    each = [{"temperature": 0.7 * (number % 2), "seed": number} for number in range(8)]
    for number in range(0, 8, 3):
        each[number]["logprob_token_ids"] = [7, 200, 30 + number]
    expected = generate(start(trees=False), prompts, each, max_tokens=LENGTH)
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(start(trees=True), prompts, each, max_tokens=LENGTH)
    assert tokens(outputs) == tokens(expected)
    assert max(watch.lengths) > 1
    for own, output, should in zip(each, outputs, expected, strict=True):
        if "logprob_token_ids" in own:
            assert set(own["logprob_token_ids"]) <= set(output.outputs[0].logprobs[-1])
            assert_logprobs_agree(output.outputs[0].logprobs, should.outputs[0].logprobs)


def test_beam_search(start):
    """It asks for one token at a time: nothing is speculated, beside requests that are."""
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(3, ASCII, seed=52)]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    expected, found = (start(trees).beam_search(prompts, params) for trees in (False, True))
    for here, there in zip(found, expected, strict=True):
        assert [beam.tokens for beam in here.sequences] == [beam.tokens for beam in there.sequences]
        for mine, other in zip(here.sequences, there.sequences, strict=True):
            assert mine.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-3)


def test_priority(start):
    """Requests that matter more come first, and throw others out."""
    prompts = make_prompts(12, ASCII, longest=40, seed=53)
    expected = tokens(generate(start(trees=False), prompts, max_tokens=LENGTH))
    llm = start(
        trees=True, scheduling_policy="priority", block_size=32, num_gpu_blocks_override=9,
        max_model_len=128,
    )  # fmt: skip
    priorities = [(5 * number) % 12 for number in range(12)]
    ended = []
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts):
            own = sampling_params(max_tokens=LENGTH)
            engine.add_request(
                str(number), {"prompt_token_ids": prompt}, own, priority=priorities[number]
            )
        while engine.has_unfinished_requests():
            ended += [output for output in engine.step() if output.finished]
    for output in ended:
        assert list(output.outputs[0].token_ids) == expected[int(output.request_id)]
    assert len(ended) == 12
    assert watch.preemptions > 0
    order = [priorities[int(output.request_id)] for output in ended]
    assert sum(order[:4]) < sum(order[-4:])


@pytest.mark.v1_only(reason="the plugin meets a pooling model's process, not its runner")
def test_a_pooling_model_in_the_same_process(start, models, module_engine):
    """It is left alone: vectors are those from before there was an engine with trees."""
    prompts = make_prompts(3, ASCII, seed=54)
    model = add_byte_tokenizer(models("llama", seed=3))
    pooling = module_engine(model, runner="pooling", convert="embed", skip_tokenizer_init=False)

    def vectors():
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs.embedding for output in pooling.embed(asked, use_tqdm=False)]

    before = vectors()
    generate(start(trees=True), prompts, max_tokens=8)
    assert vectors() == before
    assert len(before[0]) > 1


def test_an_option_that_is_not_known_would_be_noticed():
    known = set(SamplingParams.__struct_fields__)
    for options in ROWS.values():
        for option in options:
            assert set(option(list(range(5, 45)))) <= known
