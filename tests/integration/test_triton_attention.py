"""What runs on a GPU, whole: the V2 runner with the Triton backend's attention over trees and
compaction in its cache layout. The text is that of vLLM without speculation and with its own
attention."""

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

from vllm_medusa.compaction_kernel import SlotMover

LENGTH = 12
DEPTH = max(map(len, SMALL_BUSHY))


@pytest.fixture(scope="module")
def prompts():
    # One long enough for a chunk of more rows than our kernel takes, and for prefix-cache hits.
    long = make_prompts(1, VOCAB, prefix=140, longest=9, seed=31)
    return [*long, *make_prompts(3, VOCAB, longest=12, seed=32)]


@pytest.fixture(scope="module")
def expected(models, plain_engine, prompts):
    return tokens(generate(plain_engine(models()), prompts, max_tokens=LENGTH))


@pytest.fixture(scope="module")
def llm(models, heads, module_engine):
    return module_engine(
        models(),
        **medusa(heads(DEPTH), SMALL_BUSHY),
        attention_config={"backend": "TRITON_ATTN"},
        block_size=32,
        enable_prefix_caching=True,
        max_num_batched_tokens=200,
        max_num_seqs=8,
    )


def guided(llm, prompts, expected):
    known = continuations(prompts, expected)
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        found = tokens(generate(llm, prompts, max_tokens=LENGTH))
    return found, watch


def test_identical(llm, prompts, expected):
    state = runner_of(llm).model_state
    assert isinstance(state.mover, SlotMover)
    for _ in range(2):  # the second time from the prefix cache
        found, watch = guided(llm, prompts, expected)
        assert found == expected
    assert len(watch.lengths) > 3


@pytest.mark.parametrize("fault", ["compaction", "mask"])
def test_teeth(fault, llm, prompts, expected, monkeypatch):
    bank = runner_of(llm).model_state.bank
    if fault == "compaction":
        monkeypatch.setattr(SlotMover, "move", lambda *args: None)
    else:
        monkeypatch.setattr(bank, "ancestors", bank.ancestors * 0 - 1)  # sees every earlier row
    found, _ = guided(llm, prompts[1:], expected[1:])
    assert sum(map(list.__eq__, found, expected[1:])) < 2
