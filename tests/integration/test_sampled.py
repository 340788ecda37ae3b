"""Sampled output has the target's distribution; with a seed it is the text without speculation."""

import itertools

import numpy as np
import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.certain import plain_and_medusa
from tests.integration.distribution import (
    LIVELY,
    PROMPT,
    SMALL_VOCAB,
    chi_square,
    exact_distribution,
    exact_logits,
)
from tests.integration.generation import (
    SMALL_BUSHY,
    assert_logprobs_agree,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    printable,
    some,
    to_come,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa.drafter import MedusaDrafter

# -- the distribution ------------------------------------------------------------------------------

NUM_SAMPLES = 200 if INTERPRETED else 20_000
# Several children at the root and below; the third generated token is drawn at a node, if the
# second is one.
TREE = [[0], [1], [0, 0], [2], [0, 1], [3], [1, 0], [4], [0, 2], [1, 1], [2, 0], [0, 0, 0]]

SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "top-k, top-p": {"temperature": 1.0, "top_k": 9, "top_p": 0.85},
    "min-p, top-k": {"temperature": 0.5, "min_p": 0.02, "top_k": 12},
}
if INTERPRETED:  # where a row takes milliseconds
    SETTINGS = {"top-k, top-p": SETTINGS["top-k, top-p"]}
    TREE = [[0], [1], [0, 0], [0, 1], [1, 0]]


@pytest.fixture(scope="module")
def small_model(models):
    return models("llama", **LIVELY)


@pytest.fixture(scope="module")
def logits(small_model):
    return exact_logits(small_model)


@pytest.fixture(scope="module")
def sample(small_model, heads, module_engine, logits):
    """Draw texts for all settings, by turns in the same batches, with fixed drafts."""
    llm = module_engine(
        small_model,
        **medusa(heads(3), TREE, draft_sample_method="greedy"),
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=32,
        block_size=32,
        num_gpu_blocks_override=600,
    )
    # The same tokens for ever: likely ones, so that much is accepted, in a fixed order.
    likely = exact_distribution(logits, {}).view(SMALL_VOCAB, SMALL_VOCAB, -1).sum(dim=(0, 2))
    order = likely.argsort(descending=True)
    drafts = order[torch.tensor([path[-1] + len(path) - 1 for path in TREE])]

    def propose(self, hidden_states, roots, num_nodes):
        return drafts[:num_nodes].expand(hidden_states.shape[0], num_nodes)

    def draw(settings, number, turn=NUM_SAMPLES // 40):
        texts = {name: [] for name in settings}
        # Requests without a seed draw from torch's generator; V2 gives them one of NumPy's.
        torch.manual_seed(1)
        np.random.seed(1)
        with pytest.MonkeyPatch.context() as patch, watching() as watch:
            patch.setattr(MedusaDrafter, "propose", propose)
            prompts = [PROMPT] * len(settings)
            each = [{**setting, "n": turn, "max_tokens": 4} for setting in settings.values()]
            # One queue for all: the settings stand side by side in the batches.
            outputs = generate(llm, prompts * (number // turn), each * (number // turn))
        for name, output in zip(itertools.cycle(settings), outputs, strict=False):
            texts[name] += [list(one.token_ids) for one in output.outputs]
        assert watch.lengths[0] and watch.lengths[1] and watch.lengths[2] > 0.1 * number
        return texts

    return draw


@pytest.fixture(scope="module")
def texts(sample):
    return sample(SETTINGS, NUM_SAMPLES)


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(name, texts, logits):
    expected = exact_distribution(logits, SETTINGS[name])
    assert len(texts[name]) >= NUM_SAMPLES
    chance = chi_square(texts[name], expected)
    print(f"{name}: {int((expected * NUM_SAMPLES >= 5).sum())} bins, p = {chance:.3g}")
    assert chance > 0.001


def second_try(draw):
    """A token that is no child is drawn again."""

    def broken(rows, active, step, children):
        token = draw(rows, active, step)
        again = draw(rows, active, step)
        return torch.where((children == token[:, None]).any(dim=1), token, again)

    return broken


def take_a_child(draw):
    """Every eighth time a child is taken, whatever was drawn."""

    def broken(rows, active, step, children):
        token = draw(rows, active, step)
        child = torch.nn.functional.pad(children, (0, 1), value=-1).amax(dim=1)
        chosen = (torch.rand(token.shape) < 0.125) & (child >= 0)
        return torch.where(chosen, child, token)

    return broken


@pytest.mark.v1_only(reason="one launch walks there, tests/unit_triton compares it with this walk")
@pytest.mark.parametrize("rule", [second_try, take_a_child])
def test_broken_rules_are_found(rule, sample, logits, monkeypatch):
    from vllm_medusa.runner import v1

    walk = v1.walk

    def broken_walk(draw, draft_tokens, parents, active, max_steps=None):
        broken = rule(draw)

        def draw_wrong(rows, active, step):
            children = draft_tokens.masked_fill(parents != rows[:, None], -1)
            return broken(rows, active, step, children)

        return walk(draw_wrong, draft_tokens, parents, active, max_steps)

    monkeypatch.setattr(v1, "walk", broken_walk)
    setting = {"temperature 1": SETTINGS["temperature 1"]}
    drawn = sample(setting, 5000)["temperature 1"]
    chance = chi_square(drawn, exact_distribution(logits, SETTINGS["temperature 1"]))
    print(f"{rule.__name__}: p = {chance:.3g}")
    assert chance < 1e-6


# -- seeds and rules -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree_engine(models, heads, module_engine):
    def start(**options):
        depth = max(map(len, SMALL_BUSHY))
        return module_engine(models(), **medusa(heads(depth), SMALL_BUSHY), **options)

    return start


def assert_same_with_trees(llm, prompts, each, expected, **params):
    """Generate with right drafts; every text is that without speculation."""
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(llm, prompts, each, **params)
    for own, said, should in zip(each, tokens(outputs), tokens(expected), strict=True):
        assert said == should, own
    assert len(watch.lengths) > 3
    return outputs, watch


LENGTH = fewer(40, 24)
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("budget", some([4096, 60]))
def test_seeds(budget, tree_engine, models, reference):
    """Requests with a seed, greedy ones and ones without a seed, in one batch.

    vLLM itself cannot read the prompt of a request with a seed in pieces on a CPU: it rewinds the
    generator for every piece ("CPU Generator does not use offset").
    """
    prompts = make_prompts(fewer(21, 7), VOCAB, seed=8)
    each = [{**SAMPLING[number % 7], "seed": number} for number in range(len(prompts))]
    expected = reference(models(), prompts, each, max_tokens=LENGTH)
    unseeded = make_prompts(3, VOCAB, seed=9)
    llm = tree_engine(max_num_batched_tokens=budget, max_num_seqs=24)
    known = continuations(prompts, tokens(expected)) | {tuple(prompt): [] for prompt in unseeded}
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(
            llm, unseeded + prompts, [{"temperature": 1.0}] * 3 + each, max_tokens=LENGTH
        )
    for own, said, should in zip(each, tokens(outputs[3:]), tokens(expected), strict=True):
        assert said == should, own
    assert len(watch.lengths) > 3
    assert watch.met("chunk", "tree") == (budget == 60)


def test_seeds_with_preemption(tree_engine, models, reference):
    prompts = [prompt[:60] for prompt in make_prompts(14, VOCAB, seed=10)]
    each = [{**SAMPLING[number % 7], "seed": number} for number in range(len(prompts))]
    expected = reference(models(), prompts, each, max_tokens=LENGTH)
    llm = tree_engine(block_size=32, num_gpu_blocks_override=15, max_model_len=128)
    _, watch = assert_same_with_trees(llm, prompts, each, expected, max_tokens=LENGTH)
    assert watch.preemptions > 3


RULES = {
    "none": lambda text: {},
    "repetition penalty": lambda text: {"repetition_penalty": 1.4},
    "presence penalty": lambda text: {"presence_penalty": 1.5},
    "frequency penalty": lambda text: {"frequency_penalty": 1.2},
    "logit bias": lambda text: {"logit_bias": {text[2]: -3.0, text[7]: 2.0}},
    "allowed tokens": lambda text: {"allowed_token_ids": sorted({*text[::2], *range(0, VOCAB, 9)})},
    "min tokens": lambda text: {"min_tokens": 20, "stop_token_ids": text[4:12]},
    "min tokens and penalty": lambda text: {
        "min_tokens": 11,
        "stop_token_ids": list(range(0, VOCAB, 5)),
        "presence_penalty": 1.0,
    },
    "stop token": lambda text: {"stop_token_ids": text[17:20]},
}


@pytest.mark.parametrize("temperature", some([0.0, 0.7]))
def test_rules(temperature, tree_engine, models, reference):
    """Each request has its own rule; all are in one batch."""
    prompts = make_prompts(fewer(3, 1) * len(RULES), VOCAB, seed=11)
    plain = [{"temperature": temperature, "seed": number} for number in range(len(prompts))]
    texts = tokens(reference(models(), prompts, plain, max_tokens=LENGTH))
    rules = itertools.cycle(RULES.values())
    each = [own | rule(text) for own, rule, text in zip(plain, rules, texts, strict=False)]
    expected = reference(models(), prompts, each, max_tokens=LENGTH)
    changed = [said != text for said, text in zip(tokens(expected), texts, strict=True)]
    assert sum(changed) > len(prompts) / 2
    outputs, _ = assert_same_with_trees(tree_engine(), prompts, each, expected, max_tokens=LENGTH)
    for output, should in zip(outputs, expected, strict=True):
        assert output.outputs[0].finish_reason == should.outputs[0].finish_reason


@pytest.fixture(scope="module")
def with_tokenizer(models, heads, module_engine):
    """Engines with a tokenizer, without and with trees."""
    return plain_and_medusa(models, heads, module_engine)


WORDS = {
    "none": lambda text: {},
    "bad words": lambda text: {
        "bad_words": [*printable(text)[:3], "".join(map(chr, range(97, 100)))]
    },
    "stop strings": lambda text: {"stop": printable(text)[4:6]},
    "regular expression": lambda text: {
        "structured_outputs": StructuredOutputsParams(regex="[0-9]{3,12}(abc|xyz)+"),
        "ignore_eos": False,
    },
}


@pytest.mark.parametrize("temperature", some([0.0, 0.7]))
def test_rules_in_words(temperature, with_tokenizer):
    """Rules that need a tokenizer."""
    plain, trees = with_tokenizer
    prompts = make_prompts(fewer(3, 1) * len(WORDS), VOCAB, seed=12)
    each = [{"temperature": temperature, "seed": number} for number in range(len(prompts))]
    texts = tokens(generate(plain, prompts, each, max_tokens=LENGTH))
    rules = itertools.cycle(WORDS.items())
    each = [own | rule(text) for own, (_, rule), text in zip(each, rules, texts, strict=False)]
    params = {"max_tokens": LENGTH, "detokenize": True}
    expected = generate(plain, prompts, each, **params)
    known = continuations(prompts, to_come(each, texts, expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(trees, prompts, each, **params)
    assert len(watch.lengths) > 3
    for own, output, should in zip(each, outputs, expected, strict=True):
        assert output.outputs[0].text == should.outputs[0].text, own
        assert output.outputs[0].finish_reason == should.outputs[0].finish_reason
        assert output.outputs[0].stop_reason == should.outputs[0].stop_reason
    for index, name in zip(range(len(prompts)), itertools.cycle(WORDS)):
        assert (tokens(expected)[index] != texts[index]) == (name != "none")


@pytest.mark.parametrize("temperature", some([0.0, 0.7]))
def test_logprobs(temperature, tree_engine, models, reference):
    prompts = make_prompts(fewer(12), VOCAB, seed=13)
    asked = [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 7, "presence_penalty": 1.0}]
    each = [
        {"temperature": temperature, "seed": number, **asked[number % len(asked)]}
        for number in range(len(prompts))
    ]
    each[-1]["prompt_logprobs"] = 2
    expected = reference(models(), prompts, each, max_tokens=fewer(30, 12))
    llm = tree_engine(max_num_batched_tokens=60, max_num_seqs=24)
    outputs, watch = assert_same_with_trees(llm, prompts, each, expected, max_tokens=fewer(30, 12))
    assert watch.met("chunk", "tree")
    for own, output, should in zip(each, outputs, expected, strict=True):
        assert_logprobs_agree(output.outputs[0].logprobs, should.outputs[0].logprobs)
        assert_logprobs_agree(output.prompt_logprobs, should.prompt_logprobs)
        assert (output.outputs[0].logprobs is None) == ("logprobs" not in own)


def test_all_logprobs(models, heads, module_engine, plain_engine):
    """``logprobs=-1``: the whole vocabulary, unsorted."""
    prompts = make_prompts(4, VOCAB, seed=14)
    options = {"max_logprobs": -1}
    plain = generate(plain_engine(models(), **options), prompts, logprobs=-1, max_tokens=20)
    llm = module_engine(models(), **medusa(heads(5), SMALL_BUSHY), **options)
    each = [{}] * len(prompts)
    outputs, _ = assert_same_with_trees(llm, prompts, each, plain, logprobs=-1, max_tokens=20)
    for output, should in zip(outputs, plain, strict=True):
        assert_logprobs_agree(output.outputs[0].logprobs, should.outputs[0].logprobs)
