"""Structured outputs with trees: the text without speculation, and it fits."""

import random

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager

from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    endings,
    fewer,
    generate,
    make_prompts,
    medusa,
    some,
    tokens,
)
from tests.integration.grammars import fits, random_spec
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import END_OF_THINKING, THINK, VOCAB, add_byte_tokenizer
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED

DEPTH = max(map(len, SMALL_BUSHY))
# Prompts are made of these tokens: broken UTF-8 at their end would show in the texts behind them.
ASCII = 127
# Of the test of random grammars, in both backends together.
NUM_SPECS = 18 if INTERPRETED else 200


@pytest.fixture(scope="module")
def engines(models, heads, module_engine):
    """Engines without and with trees, by backend of structured outputs."""
    model = add_byte_tokenizer(models("llama", seed=3))

    def start(backend, trees, thinking=False, lookup=False, **options):
        grammars = {"backend": backend}
        if backend in ("xgrammar", "guidance"):
            grammars["disable_any_whitespace"] = True
        if thinking:
            options["reasoning_parser"] = "deepseek_r1"
        if trees:
            options |= medusa(heads(DEPTH), SMALL_BUSHY, lookup=lookup)
        return module_engine(
            model, skip_tokenizer_init=False, structured_outputs_config=grammars, **options
        )

    return start


def asking(spec, **params):
    """Sampling parameters that ask for a structured output."""
    return {
        "structured_outputs": StructuredOutputsParams(**spec),
        "ignore_eos": False,
        "detokenize": True,
        "skip_special_tokens": False,
        **params,
    }


def compare(plain, trees, prompts, each, **params):
    """Generate without and with trees that offer right drafts; the texts must be the same.

    Returns what was generated, and what vLLM's scheduler did with the trees.
    """
    expected = generate(plain, prompts, each, **params)
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(trees, prompts, each, **params)
    for own, said, should in zip(each, tokens(outputs), tokens(expected), strict=True):
        assert said == should, own
    assert endings(outputs) == endings(expected)
    return outputs, watch


def accepted(watch):
    """How many drafts were accepted."""
    return sum(length * count for length, count in watch.lengths.items())


OTHERS = [{}, {"temperature": 1.0}, {"logprobs": 2}, {"presence_penalty": 1.0, "temperature": 0.6}]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_random_grammars(backend, engines):
    """Greedy and seeded requests with a grammar of their own each, beside others without."""
    numbers = random.Random(backend)
    specs = [random_spec(numbers) for _ in range(NUM_SPECS // 2)]
    each = [
        asking(spec, temperature=0.8 * (number % 2), seed=number, presence_penalty=number % 5 // 4)
        for number, spec in enumerate(specs)
    ]
    others = [{"seed": number, **OTHERS[number % len(OTHERS)]} for number in range(fewer(20, 4))]
    prompts = make_prompts(len(each) + len(others), ASCII, longest=40, seed=21)
    outputs, watch = compare(
        engines(backend, trees=False), engines(backend, trees=True),
        prompts, each + others, max_tokens=fewer(100, 48),
    )  # fmt: skip
    finished = 0
    for spec, output in zip(specs, outputs, strict=False):
        if output.outputs[0].finish_reason == "stop":
            finished += 1
            assert fits(spec, output.outputs[0].text), (spec, output.outputs[0].text)
    assert finished > 0.8 * len(specs)
    assert set(watch.lengths) == set(range(DEPTH + 1))


@pytest.mark.parametrize(
    "options, met",
    some(
        [
            ({"block_size": 32, "num_gpu_blocks_override": 15, "max_model_len": 128}, ("tree",)),
            ({"max_num_batched_tokens": 60, "max_num_seqs": 24}, ("chunk", "tree")),
        ]
    ),
    ids=some(["preemption", "small budget"]),
)
def test_grammars_under_pressure(options, met, engines):
    """Prompts read in pieces beside trees, trees cut by the budget, requests thrown out."""
    numbers = random.Random(5)
    size = fewer(10)
    each = [asking(random_spec(numbers), temperature=0.7, seed=n) for n in range(3 * size)]
    each[::3] = [{"seed": n} for n in range(size)]
    prompts = make_prompts(len(each), ASCII, longest=40, seed=22)
    _, watch = compare(
        engines("xgrammar", trees=False), engines("xgrammar", trees=True, **options),
        prompts, each, max_tokens=fewer(60),
    )  # fmt: skip
    assert watch.met(*met)
    assert "num_gpu_blocks_override" not in options or watch.preemptions > 3


EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c]+ | "true" | root'
LARK = 'start: "[" item ("," item)* "]"\nitem: /[a-c]+/ | "true" | start'
CHOICE = {"choice": ["yes", "yes, of course", "no", "true", "truest"]}


@pytest.mark.parametrize(
    "backend, spec",
    some(
        [
            ("xgrammar", {"grammar": EBNF}),
            ("guidance", {"grammar": LARK}),
            ("xgrammar", {"json_object": True}),
            ("guidance", {"json_object": True}),
            ("xgrammar", CHOICE),
            ("guidance", CHOICE),
        ]
    ),
)
def test_other_kinds(backend, spec, engines):
    prompts = make_prompts(12, ASCII, longest=20, seed=23)
    each = [asking(spec, temperature=0.9 * (n % 2), seed=n) for n in range(len(prompts))]
    plain, trees = engines(backend, trees=False), engines(backend, trees=True)
    outputs, watch = compare(plain, trees, prompts, each, max_tokens=60)
    assert max(watch.lengths) >= 2
    if spec is CHOICE:
        assert all(fits(spec, output.outputs[0].text) for output in outputs)


@pytest.mark.v1_only(reason="a grammar's backend is not the runner's affair: two others are run")
def test_outlines(engines):
    specs = [{"regex": "(ab|[0-9]{2,9}x)+-[a-z]{3}"}, CHOICE]
    each = [asking(specs[n % 2], temperature=0.9 * (n % 3), seed=n) for n in range(12)]
    prompts = make_prompts(len(each), ASCII, longest=20, seed=24)
    plain, trees = engines("outlines", trees=False), engines("outlines", trees=True)
    _, watch = compare(plain, trees, prompts, each, max_tokens=40)
    assert max(watch.lengths) >= 2


@pytest.mark.parametrize("backend", some(["xgrammar", "guidance"]))
def test_free_text_behind_the_end(backend, engines):
    """With ``ignore_eos`` the text goes on, unmasked, behind the end of the grammar."""
    each = [asking(CHOICE, ignore_eos=True, temperature=0.9 * (n % 2), seed=n) for n in range(12)]
    each = each[: fewer(12)]
    prompts = make_prompts(len(each), ASCII, longest=20, seed=25)
    plain, trees = engines(backend, trees=False), engines(backend, trees=True)
    outputs, _ = compare(plain, trees, prompts, each, max_tokens=30)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 30
        assert fits(CHOICE, output.outputs[0].text.split("</s>")[0])


def test_thinking_first(engines):
    """The grammar begins behind the end of the thinking, wherever in a path that is."""
    numbers = random.Random(6)
    specs = [random_spec(numbers) for _ in range(fewer(24))]
    each = [
        asking(spec, temperature=0.7 * (n % 2), seed=n, logit_bias={END_OF_THINKING: 3.0 + n % 4})
        for n, spec in enumerate(specs)
    ]
    each += [{"seed": n} for n in range(4)]
    prompts = [
        [THINK, *(token for token in prompt if token not in (THINK, END_OF_THINKING))]
        for prompt in make_prompts(len(each), ASCII, longest=20, seed=26)
    ]
    plain = engines("xgrammar", trees=False, thinking=True)
    trees = engines("xgrammar", trees=True, thinking=True)
    outputs, watch = compare(plain, trees, prompts, each, max_tokens=80)
    thinking, checked = set(), 0
    for spec, output in zip(specs, outputs, strict=False):
        answer = output.outputs[0]
        if END_OF_THINKING in answer.token_ids and answer.finish_reason == "stop":
            thinking.add(list(answer.token_ids).index(END_OF_THINKING))
            text = answer.text.split("</think>", 1)[1].removesuffix("</s>")
            assert fits(spec, text), (spec, answer.text)
            checked += 1
    assert checked > len(specs) / 2
    assert len(thinking) > fewer(4, 1)
    assert max(watch.lengths) == DEPTH


@pytest.mark.v1_only(reason="V2 drafts with the heads only")
@pytest.mark.parametrize("budget", [4096, 60])
def test_chains_from_the_text(budget, engines):
    """Where a text repeats itself its drafts are a chain, beside others' trees."""
    numbers = random.Random(8)
    each = [asking({"regex": "(name: [a-c]{1,2}; ){9}"}, seed=n) for n in range(24)]
    each[1::4] = [asking(random_spec(numbers), temperature=0.7, seed=n) for n in range(6)]
    each[3::4] = [{"seed": n} for n in range(6)]
    prompts = make_prompts(len(each), ASCII, longest=20, seed=29)
    plain = engines("xgrammar", trees=False)
    trees = engines(
        "xgrammar", trees=True, lookup=True, max_num_batched_tokens=budget, max_num_seqs=24
    )
    expected = generate(plain, prompts, each, max_tokens=80)
    with watching() as watch:
        outputs = generate(trees, prompts, each, max_tokens=80)
    assert tokens(outputs) == tokens(expected)
    assert max(watch.lengths) > DEPTH  # no tree is as deep


def test_nodes_that_break_the_grammar_cost_no_row(engines):
    """Behind the last draft that the grammar allows, none is scheduled; on V2 only where it does
    not schedule ahead, before it knows the drafts."""
    spec = {"regex": "[abc]{40}"}
    prompts = make_prompts(8, ASCII, longest=20, seed=27)
    each = [asking(spec)] * len(prompts)
    plain = engines("xgrammar", trees=False)
    trees = engines("xgrammar", trees=True, async_scheduling=False)
    _, watch = compare(plain, trees, prompts, each, max_tokens=fewer(60))
    # Most of the oracle's wrong drafts break the grammar, right ones do not.
    scheduled = sum(number * count for number, count in watch.num_nodes.items())
    steps = sum(watch.lengths.values())
    assert len(watch.num_nodes) > 5
    assert scheduled < 0.75 * len(SMALL_BUSHY) * steps


@pytest.mark.parametrize("method", some(["validate_tokens", "grammar_bitmask"]))
def test_a_chain_is_not_enough(method, engines, monkeypatch):
    """With vLLM's own methods, which take drafts for a chain, the text is another or less is
    accepted: these tests would notice."""
    numbers = random.Random(7)
    each = [asking(random_spec(numbers), temperature=0.8, seed=n) for n in range(fewer(24))]
    prompts = make_prompts(len(each), ASCII, longest=20, seed=28)
    plain, trees = engines("xgrammar", trees=False), engines("xgrammar", trees=True)
    _, watch = compare(plain, trees, prompts, each, max_tokens=60)
    stock = getattr(StructuredOutputManager, method).__wrapped__
    monkeypatch.setattr(StructuredOutputManager, method, stock)
    if method == "grammar_bitmask":
        with pytest.raises(AssertionError):
            compare(plain, trees, prompts, each, max_tokens=60)
    else:
        _, chain = compare(plain, trees, prompts, each, max_tokens=60)
        assert accepted(chain) < 0.8 * accepted(watch)
