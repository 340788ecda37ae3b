"""Typical acceptance: longer paths, never a token of probability 0, greedy requests exact."""

import re

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.certain import CERTAIN, differences, generate_certain, plain_and_medusa
from tests.integration.distribution import LIVELY, PROMPT
from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    runner_of,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa.drafter import MedusaDrafter
from vllm_medusa.runner import draft_rules, draft_sampler
from vllm_medusa.typical import TypicalBars

DEPTH = max(map(len, SMALL_BUSHY))
TYPICAL = {"rejection_sample_method": "typical"}


@pytest.fixture(scope="module")
def engines(models, heads, module_engine):
    """Without trees, and with typical acceptance."""
    return plain_and_medusa(models, heads, module_engine, **TYPICAL)


def test_what_is_certain_stays(engines):
    expected, outputs, watch = generate_certain(*engines)
    assert not differences(expected, outputs)
    assert set(watch.lengths) == set(range(DEPTH + 1))


def test_a_wrong_rule_is_found(engines, monkeypatch):
    def anything_goes(probs, children, drawn, bars):
        """Some child is taken, however unlikely."""
        child = children.amax(dim=1)
        return torch.where(child >= 0, child, drawn)

    for module in (draft_sampler, draft_rules):
        monkeypatch.setattr(module, "typical_tokens", anything_goes)
    expected, outputs, _ = generate_certain(*engines)
    differ = differences(expected, outputs)
    assert all(own["temperature"] for own in differ)  # greedy requests ask no rule
    assert len(differ) > len(CERTAIN) / 2


def test_grammars_hold(engines):
    """Sampled requests with a grammar, drafts that are likely and drafts that break it."""
    _, typical = engines
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


TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]


def mean_length(llm, monkeypatch):
    """Mean length of accepted paths, and texts, with the same likely drafts for ever."""
    drafts = torch.tensor([3, 7, 5, 11, 2, 6, 9])

    def propose(self, hidden_states, roots, num_nodes):
        return drafts[:num_nodes].expand(hidden_states.shape[0], num_nodes)

    number = fewer(64)
    each = [{"seed": seed} for seed in range(number)]
    with monkeypatch.context() as patch, watching() as watch:
        patch.setattr(MedusaDrafter, "propose", propose)
        outputs = generate(llm, [PROMPT] * number, each, temperature=1.0, max_tokens=fewer(64))
    steps = sum(watch.lengths.values())
    return sum(length * count for length, count in watch.lengths.items()) / steps, tokens(outputs)


def test_paths_get_longer(models, heads, module_engine, monkeypatch):
    small = models("llama", **LIVELY)
    options = {"max_num_seqs": 64, "block_size": 32}
    exact_engine = module_engine(small, **medusa(heads(3), TREE), **options)
    exact, exact_texts = mean_length(exact_engine, monkeypatch)
    lossy_engine = module_engine(small, **medusa(heads(3), TREE, **TYPICAL), **options)
    lossy, lossy_texts = mean_length(lossy_engine, monkeypatch)
    print(f"accepted per step: exact {exact:.2f}, typical {lossy:.2f}")
    assert lossy > 1.5 * exact
    assert lossy_texts != exact_texts
    runner = runner_of(lossy_engine)
    rule = runner.rejection_sampler.rule if INTERPRETED else runner.draft_sampler
    assert rule.bars == TypicalBars()
    # With a bar of 1 nothing is typical, and what remains is the exact rule.
    monkeypatch.setattr(rule, "bars", TypicalBars(1.0, 1e9))
    assert mean_length(lossy_engine, monkeypatch) == (exact, exact_texts)
