"""A connector that writes the keys and values of prompts to disk: engines with trees read what
others have written, and write what decoding without speculation would have written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer import kv_transfer_state

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
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED

LENGTH = fewer(80, 36)
DEPTH = max(map(len, SMALL_BUSHY))
BLOCK = 32


@pytest.fixture
def start(models, heads, engine):
    """Start an engine with trees, or without, that shares a folder with others.

    vLLM keeps one connector per process: an engine's ends where the next one is started.
    """

    def connected(folder, trees=True, **options):
        kv_transfer_state.ensure_kv_transfer_shutdown()
        spec = medusa(heads(DEPTH), SMALL_BUSHY) if trees else {}
        return engine(
            models(),
            block_size=BLOCK,
            enable_chunked_prefill=False,  # with it, vLLM's example saves what was not read yet
            kv_transfer_config={
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(folder)},
            },
            **spec,
            **options,
        )

    yield connected
    kv_transfer_state.ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def prompts():
    """Of one to four whole blocks and some more: the connector looks for all of a prompt's blocks,
    by a count that is another one where a single token stands behind them."""
    made = make_prompts(20, VOCAB, longest=140, seed=71)
    return [own for own in made if len(own) > BLOCK + 1 and len(own) % BLOCK > 1][: fewer(12, 5)]


def whole_blocks(prompt):
    return (len(prompt) - 1) // BLOCK * BLOCK


def guided(llm, prompts, expected, **params):
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        outputs = generate(llm, prompts, max_tokens=LENGTH, **params)
    # Paths of every length were accepted; among so many some cross from one block into the next.
    assert set(watch.lengths) == set(range(DEPTH + 1))
    return outputs, watch


def saved(folder: Path):
    """What lies on disk: by prompt (a hash) and layer, [tokens, kv_heads, ...]."""
    files = sorted(folder.glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.name}": load_file(path)["kv_cache"] for path in files}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8, "seed": 7}, {"temperature": 0.0}][INTERPRETED:],
    ids=["seed", "greedy"][INTERPRETED:],
)
def test_prompts_from_disk(sampling, start, prompts, models, reference, tmp_path):
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH, **sampling))
    # Few at once: prompts are saved, or loaded, in steps that verify the trees of others.
    writer = start(tmp_path, max_num_seqs=4)
    outputs, watch = guided(writer, prompts, expected, **sampling)
    assert tokens(outputs) == expected
    assert watch.met("chunk", "tree")
    assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
    assert len(saved(tmp_path)) == 2 * len(prompts)  # layers
    reader = start(tmp_path, max_num_seqs=4, seed=1)
    outputs, watch = guided(reader, prompts, expected, **sampling)
    assert tokens(outputs) == expected
    assert watch.met("chunk", "tree")
    assert [output.num_cached_tokens for output in outputs] == list(map(whole_blocks, prompts))


def test_blocks_that_trees_have_filled(start, prompts, models, reference, tmp_path):
    """A conversation goes on: its new prompt begins with blocks of accepted paths, which the engine
    has cached. What is saved is what an engine without trees saves, and serves as well."""
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    longer = [
        prompt + text[:-2] if len(prompt + text[:-2]) % BLOCK > 1 else prompt + text[:-4]
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    further = tokens(reference(models(), longer, max_tokens=LENGTH))
    folders = {trees: tmp_path / str(trees) for trees in (False, True)}
    for trees, folder in folders.items():
        writer = start(folder, trees, enable_prefix_caching=True)
        if trees:
            guided(writer, prompts, expected)
            outputs, _ = guided(writer, longer, further)
            hits = [
                output.num_cached_tokens - whole_blocks(prompt)
                for output, prompt in zip(outputs, prompts, strict=True)
            ]
            assert min(hits) >= BLOCK
        else:
            generate(writer, prompts, max_tokens=1)
            outputs = generate(writer, longer, max_tokens=LENGTH)
        assert tokens(outputs) == further
    here, there = saved(folders[True]), saved(folders[False])
    assert here.keys() == there.keys()
    assert len(here) == 2 * 2 * len(prompts)
    assert max(float((here[name] - there[name]).abs().max()) for name in there) < 1e-4
    outputs, _ = guided(start(folders[True]), longer, further)
    assert tokens(outputs) == further
    assert [output.num_cached_tokens for output in outputs] == list(map(whole_blocks, longer))


def test_what_is_on_disk_is_used(start, prompts, models, reference, tmp_path):
    """Other keys and values there, another text: so the tests above show what they say."""
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    guided(start(tmp_path), prompts, expected)
    for path in tmp_path.glob("*/*.safetensors"):
        cache = load_file(path)["kv_cache"]
        save_file({"kv_cache": torch.zeros_like(cache)}, path)
    texts = tokens(generate(start(tmp_path, seed=1), prompts, max_tokens=8))
    pairs = zip(texts, expected, strict=True)
    assert sum(text != wanted[:8] for text, wanted in pairs) > 3
