"""After a run with accepted paths the KV cache holds what decoding without speculation writes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from tests.integration.generation import (
    SMALL_BUSHY,
    TREES,
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
from vllm_medusa.attention import backends
from vllm_medusa.attention.reference import split_cache

LENGTH = fewer(60)


@contextmanager
def final_caches(llm) -> Iterator[dict[tuple[int, ...], torch.Tensor]]:
    """Keys and values of every request as they are when vLLM frees its blocks.

    Yields:
        All tokens of a request -> [layers, 2, committed tokens, kv_heads, head_size]. The last
        token is not committed: it was never read.
    """
    free = Scheduler._free_blocks
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def free_blocks(self, request):
        runner = runner_of(llm)
        blocks = torch.tensor(self.kv_cache_manager.get_block_ids(request.request_id)[0])
        places = torch.arange(request.num_tokens - 1)
        block_size = runner.kv_caches[0].shape[2]
        slots = blocks[places // block_size], places % block_size
        found[tuple(request.all_token_ids)] = torch.stack(
            [
                torch.stack([keys[slots], values[slots]])
                for keys, values in map(split_cache, runner.kv_caches)
            ]
        )
        return free(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_free_blocks", free_blocks)
        yield found


def largest_differences(found, expected):
    """The largest difference of each request's keys and values."""
    assert found.keys() == expected.keys()
    return [float((found[text] - cache).abs().max()) for text, cache in expected.items()]


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, VOCAB, longest=140, seed=21)


@pytest.fixture(scope="module")
def expected(models, plain_engine, prompts):
    """Texts and caches without speculation, by kind of model."""
    known = {}

    def get(kind):
        if kind not in known:
            llm = plain_engine(models(kind))
            with final_caches(llm) as caches:
                texts = tokens(generate(llm, prompts, max_tokens=LENGTH))
            assert all(cache.abs().amax(dim=(1, 3, 4)).min() > 0 for cache in caches.values())
            known[kind] = texts, caches
        return known[kind]

    return get


def caches_with_trees(llm, prompts, texts):
    with (
        final_caches(llm) as found,
        watching() as watch,
        oracle_drafts(Oracle(continuations(prompts, texts), VOCAB)),
    ):
        said = tokens(generate(llm, prompts, max_tokens=LENGTH))
    return said, found, watch


@pytest.mark.parametrize(
    ("kind", "tree", "options"),
    [
        ("llama", TREES["bushy63"], {}),
        ("qwen2", SMALL_BUSHY, {"block_size": 32}),
        # Pieces of prompts beside trees; requests that are preempted and read again; cut trees.
        ("llama", SMALL_BUSHY, {"block_size": 32, "max_num_batched_tokens": 80,
                                "max_model_len": 256, "num_gpu_blocks_override": 20}),
    ],
    ids=["bushy63", "qwen2", "chunks and preemptions"],
)  # fmt: skip
def test_cache_is_that_of_plain_decoding(
    kind, tree, options, expected, models, heads, module_engine, prompts
):
    texts, caches = expected(kind)
    llm = module_engine(models(kind), **medusa(heads(max(map(len, tree))), tree), **options)
    said, found, watch = caches_with_trees(llm, prompts, texts)
    assert said == texts
    assert set(watch.lengths) == set(range(max(map(len, tree)) + 1))
    assert (watch.preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert max(largest_differences(found, caches)) < 1e-4


def test_teeth(expected, models, heads, module_engine, prompts, monkeypatch):
    """Moved keys that are off by a thousandth in one layer are found, though no text changes."""
    texts, caches = expected("llama")
    llm = module_engine(models(), **medusa(heads(4), TREES["bushy63"]))
    move_slots = backends.move_slots

    def move_inexactly(kv_caches, source, target):
        move_slots(kv_caches, source, target)
        keys, _ = split_cache(kv_caches[-1])
        keys[target // keys.shape[1], target % keys.shape[1]] += 1e-3

    monkeypatch.setattr(backends, "move_slots", move_inexactly)
    said, found, _ = caches_with_trees(llm, prompts, texts)
    assert said == texts
    assert min(largest_differences(found, caches)) > 5e-4
