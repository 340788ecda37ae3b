"""What only vLLM's V2 runner does."""

import itertools

import pytest

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
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED

if not INTERPRETED:
    pytest.skip("needs Triton's interpreter: make test-v2", allow_module_level=True)

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_medusa.runner.tree_sampler import TreeSampler

DEPTH = max(map(len, SMALL_BUSHY))
LENGTH = 16


@pytest.fixture(scope="module")
def tree_engine(models, heads, module_engine):
    def start(**options):
        return module_engine(models(), **medusa(heads(DEPTH), SMALL_BUSHY), **options)

    return start


def test_warm_up(tree_engine):
    """vLLM's own warm-up, which GPU workers run before the first request."""
    llm = tree_engine(max_num_seqs=6)  # it fills every place
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    warmup_kernels(runner_of(llm), worker.execute_model, worker.sample_tokens)
    assert len(generate(llm, [[5, 6, 7]], max_tokens=3)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_beside_rules_that_look_back(mode, tree_engine, models, plain_engine, monkeypatch):
    """Only the requests that have such rules are walked by depth; values are those of decoding."""
    prompts = make_prompts(4, VOCAB, longest=20, seed=41)
    each = [{"temperature": 0.8, "seed": number, "logprobs": 2} for number in range(4)]
    each[1] |= {"presence_penalty": 1.5}
    each[2] |= {"logprob_token_ids": [7, 200]}
    each[3] |= {"repetition_penalty": 1.4, "temperature": 0.0}
    options = {"logprobs_mode": mode}
    expected = generate(plain_engine(models(), **options), prompts, each, max_tokens=LENGTH)
    walked = []
    walk_by_depth = TreeSampler._walk_by_depth

    def watched(self, logits, drafts, batch, requests_np, *others):
        names = {batch.req_ids[number] for number in requests_np}
        walked.append((len(names), batch.num_reqs))
        return walk_by_depth(self, logits, drafts, batch, requests_np, *others)

    monkeypatch.setattr(TreeSampler, "_walk_by_depth", watched)
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        found = generate(tree_engine(**options), prompts, each, max_tokens=LENGTH)
    assert len(watch.lengths) > 2
    assert (2, 4) in walked
    assert tokens(found) == tokens(expected)
    for here, there in zip(found, expected, strict=True):
        for mine, theirs in zip(here.outputs[0].logprobs, there.outputs[0].logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            for token, value in theirs.items():
                assert mine[token].logprob == pytest.approx(value.logprob, abs=1e-3)


class NeverTwice(LogitsProcessor):
    """A request that asks for it never says the token that it said last; looks at the text."""

    def __init__(self, vllm_config, req_states):
        self.texts, self.lengths = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self.asking = set()

    def add_request(self, req_idx, sampling_params):
        asks = bool((sampling_params.extra_args or {}).get("never_twice"))
        (self.asking.add if asks else self.asking.discard)(req_idx)
        return asks

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if slot in self.asking:
                logits[row, self.texts[slot, self.lengths[slot] - 1]] = -float("inf")
        return logits


def test_custom_logits_processors(tree_engine, models, plain_engine):
    """They see the text behind each node's path."""
    prompts = make_prompts(6, VOCAB, longest=20, seed=43)
    # The others would say the same token again and again.
    each = [{"logit_bias": {number + 5: 100.0}} for number in range(6)]
    for own in each[::2]:
        own["extra_args"] = {"never_twice": True}
    options = {"logits_processors": [NeverTwice]}
    expected = tokens(generate(plain_engine(models(), **options), prompts, each, max_tokens=LENGTH))
    for number, text in enumerate(expected):
        repeats = sum(one == other for one, other in itertools.pairwise(text))
        assert repeats == (LENGTH - 1) * (number % 2)
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        found = generate(tree_engine(**options), prompts, each, max_tokens=LENGTH)
    assert tokens(found) == expected
    assert max(watch.lengths) == DEPTH
