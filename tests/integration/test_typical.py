"""Typical acceptance: longer paths, never a token of probability 0, greedy requests exact."""

import re

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    generate,
    make_prompts,
    medusa,
    runner_of,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_tokenizer
from tests.integration.watch import watching
from vllm_medusa.drafter import MedusaDrafter
from vllm_medusa.runner import draft_sampler
from vllm_medusa.typical import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD

DEPTH = max(map(len, SMALL_BUSHY))
TYPICAL = {"rejection_sample_method": "typical"}


@pytest.fixture(scope="module")
def model(models):
    return add_tokenizer(models("llama", pad_token_id=0))


@pytest.fixture(scope="module")
def typical(model, heads, module_engine):
    options = medusa(heads(DEPTH), SMALL_BUSHY, **TYPICAL)
    return module_engine(model, skip_tokenizer_init=False, **options)


def anything_goes(probs, children, drawn, *bars):
    """A wrong rule: some child is taken, however unlikely."""
    return torch.where(children.amax(dim=1) >= 0, children.amax(dim=1), drawn)


# What is certain stays as it is: with top-k 1 one token has all of the probability.
CERTAIN = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1, "presence_penalty": 1.5},
    {"temperature": 0.7, "top_k": 1, "logprobs": 3},
    {"temperature": 1.0, "top_p": 1e-6, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 1, "min_tokens": 20, "stop_token_ids": list(range(0, VOCAB, 5))},
    {"temperature": 1.0, "top_k": 1, "allowed_token_ids": list(range(3, VOCAB, 4))},
    {"temperature": 1.0, "top_k": 1, "bad_words": ["a", "bc", "%"]},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


def generate_certain(llm, model, reference):
    """Generate with wrong drafts in most branches; what is said, and what should be."""
    prompts = make_prompts(3 * len(CERTAIN), VOCAB, seed=31)
    each = CERTAIN * 3
    expected = reference(model, prompts, each, max_tokens=40)
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(llm, prompts, each, max_tokens=40)
    assert set(watch.lengths) == set(range(DEPTH + 1))
    return outputs, expected


@pytest.fixture(scope="module")
def plain(module_engine):
    """Like ``reference``, with a tokenizer."""
    return lambda model, prompts, each, **params: generate(
        module_engine(model, skip_tokenizer_init=False), prompts, each, **params
    )


def test_what_is_certain_stays(typical, model, plain):
    outputs, expected = generate_certain(typical, model, plain)
    for own, output, should in zip(CERTAIN * 3, outputs, expected, strict=True):
        here, there = output.outputs[0], should.outputs[0]
        assert list(here.token_ids) == list(there.token_ids), own
        assert here.finish_reason == there.finish_reason
        for found, wanted in zip(here.logprobs or [], there.logprobs or [], strict=True):
            assert {token: value.rank for token, value in found.items()} == {
                token: value.rank for token, value in wanted.items()
            }


def test_a_wrong_rule_is_found(typical, model, plain, monkeypatch):
    monkeypatch.setattr(draft_sampler, "typical_tokens", anything_goes)
    outputs, expected = generate_certain(typical, model, plain)
    differ = [
        own
        for own, said, should in zip(CERTAIN * 3, tokens(outputs), tokens(expected), strict=True)
        if said != should
    ]
    assert all(own["temperature"] for own in differ)  # greedy requests ask no rule
    assert len(differ) > len(CERTAIN)


def test_grammars_hold(typical, model, plain):
    """Sampled requests with a grammar, drafts that are likely and drafts that break it."""
    prompts = make_prompts(12, VOCAB, seed=32)
    pattern = "[0-9]{3,12}(abc|xyz)+"
    asked = {
        "structured_outputs": StructuredOutputsParams(regex=pattern),
        "ignore_eos": False,
        "detokenize": True,
        "max_tokens": 60,
    }
    greedy = generate(typical, prompts, **asked)
    known = continuations(prompts, tokens(greedy))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(typical, prompts, temperature=1.0, seed=3, **asked)
    assert sum(length * count for length, count in watch.lengths.items()) > len(prompts)
    finished = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(finished) > len(prompts) / 2
    for output in finished:
        assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text


SMALL_VOCAB = 16
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def mean_length(llm, monkeypatch):
    """Mean length of accepted paths, and texts, with the same likely drafts for ever."""
    drafts = torch.tensor([3, 7, 5, 11, 2, 6, 9])

    def propose(self, hidden_states, roots, num_nodes):
        return drafts[:num_nodes].expand(hidden_states.shape[0], num_nodes)

    torch.manual_seed(1)
    with monkeypatch.context() as patch, watching() as watch:
        patch.setattr(MedusaDrafter, "propose", propose)
        outputs = generate(llm, [PROMPT] * 64, temperature=1.0, max_tokens=64)
    steps = sum(watch.lengths.values())
    return sum(length * count for length, count in watch.lengths.items()) / steps, outputs


def test_paths_get_longer(models, heads, module_engine, monkeypatch):
    small = models("llama", vocab_size=SMALL_VOCAB, initializer_range=0.15, eos_token_id=None)
    options = {"max_num_seqs": 64, "block_size": 32}
    exact_engine = module_engine(small, **medusa(heads(3), TREE), **options)
    exact, _ = mean_length(exact_engine, monkeypatch)
    lossy_engine = module_engine(small, **medusa(heads(3), TREE, **TYPICAL), **options)
    lossy, outputs = mean_length(lossy_engine, monkeypatch)
    print(f"accepted per step: exact {exact:.2f}, typical {lossy:.2f}")
    assert lossy > 1.5 * exact
    # With a bar of 1 nothing is typical, and what remains is the exact rule.
    sampler = runner_of(lossy_engine).draft_sampler
    assert (sampler.posterior_threshold, sampler.posterior_alpha) == (
        POSTERIOR_THRESHOLD,
        POSTERIOR_ALPHA,
    )
    monkeypatch.setattr(sampler, "posterior_threshold", 1.0)
    monkeypatch.setattr(sampler, "posterior_alpha", 1e9)
    as_exact, same = mean_length(lossy_engine, monkeypatch)
    assert as_exact == exact
    assert tokens(same) != tokens(outputs)
