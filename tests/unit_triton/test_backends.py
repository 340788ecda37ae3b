"""The GPU backends with trees: metadata and forward pass, against dense float64 attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.unit_triton.steps import UNTOUCHED, Request, Step, random_tree
from vllm_medusa.attention import triton_backend
from vllm_medusa.attention.flash_backend import TreeFlashBackend
from vllm_medusa.attention.short_requests import TreeMetadata
from vllm_medusa.attention.triton_backend import TreeTritonBackend
from vllm_medusa.tree import MAX_NODES, MAX_ROWS

HEADS, HEAD_SIZE, MAX_REQUESTS = (2, 1), 32, 8


def trees(*sizes):
    """Requests with trees of so many rows, cut here and there."""
    rng = np.random.default_rng(len(sizes))
    return [
        Request(30 * i, rows, random_tree(rng, min(rows + i % 3, MAX_NODES)))
        for i, rows in enumerate(sizes)
    ]


# The interpreter is slow: no longer than they must be.
LONG = [Request(0, MAX_ROWS + 1), Request(20, MAX_ROWS + 2)]
SHORT = [Request(90, 1), Request(300, 1), Request(50, 17), Request(0, 30)]
BATCHES = {
    "trees": trees(8, 8, 8),
    "trees of all sizes": trees(3, 1, MAX_ROWS, 20),
    "trees, decodes and short chunks": trees(9, 4) + SHORT,
    "everything": trees(9, 4) + SHORT + LONG,
    "not sorted": [SHORT[0], LONG[0], *trees(9, 4), LONG[1], SHORT[2]],
    "a long chunk first": [LONG[0], *trees(9)],
}


def launches(name):
    """Whether the stock kernel has work, and whether some requests are computed twice."""
    has_long = any(request in LONG for request in BATCHES[name])
    return has_long, name in ("not sorted", "a long chunk first")


def common_metadata(step, **changes):
    lengths = [request.length for request in step.requests]
    rows = [request.rows for request in step.requests]
    fields = {
        "query_start_loc": step.query_start_loc,
        "query_start_loc_cpu": step.query_start_loc_cpu,
        "seq_lens": step.seq_lens,
        "num_reqs": len(rows),
        "num_actual_tokens": sum(rows),
        "max_query_len": max(rows),
        "max_seq_len": max(lengths),
        "block_table_tensor": step.block_table,
        "slot_mapping": torch.zeros(sum(rows), dtype=torch.int64, device=step.query.device),
        "seq_lens_cpu_upper_bound": torch.tensor(lengths, dtype=torch.int32),
        "is_prefilling": torch.tensor([request.tree is None for request in step.requests]),
    }
    return CommonAttentionMetadata(**fields | changes)


def make_step(requests, **options):
    return Step(requests, heads=HEADS, head_size=HEAD_SIZE, **options)


def make_builder(backend, step):
    """A metadata builder, for a model of which it needs to know little."""
    device = step.query.device
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: HEADS[0],
            get_num_kv_heads=lambda parallel: HEADS[1],
            get_head_size=lambda: HEAD_SIZE,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.NONE,
            cudagraph_capture_sizes=[],
            max_cudagraph_capture_size=0,
            static_forward_context={},
        ),
    )
    spec = FullAttentionSpec(
        block_size=step.block_size,
        num_kv_heads=HEADS[1],
        head_size=HEAD_SIZE,
        dtype=step.dtype,
    )
    return backend.get_builder_cls()(spec, [], config, device)


def make_layer(backend, step):
    impl = backend.get_impl_cls()(
        HEADS[0], HEAD_SIZE, step.scale, HEADS[1], None, None, "auto", None
    )
    one = torch.ones((), device=step.query.device)
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)

    def forward(metadata):
        output = torch.full_like(step.query, UNTOUCHED)
        keys = torch.empty(0)  # in the cache already
        return impl.forward(layer, step.query, keys, keys, step.kv_cache, metadata, output)

    return impl, forward


def run(backend, step, **changes):
    builder = make_builder(backend, step)
    index = torch.full((MAX_REQUESTS,), -1, dtype=torch.int32, device=step.query.device)
    index[: len(step.requests)] = step.tree_index  # the runner's static buffer
    builder.set_trees(index, step.ancestors)
    metadata = builder.build(0, common_metadata(step, **changes))
    return metadata, make_layer(backend, step)[1](metadata)


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels that were launched, in order."""
    names = []

    def watch(module, name):
        stock = getattr(module, name)

        def watched(*args, **kwargs):
            names.append(name)
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(triton_attn, "unified_attention")
    watch(triton_backend, "tree_attention")
    return names


@pytest.mark.parametrize(
    ("name", "heads_first"), [*((name, True) for name in BATCHES), ("everything", False)]
)
def test_triton(device, calls, name, heads_first):
    # The stock kernel reads whole blocks: no traps there.
    step = make_step(BATCHES[name], device=device, heads_first=heads_first, nan=False)
    metadata, output = run(TreeTritonBackend, step)
    step.check(output)
    uses_stock, overlap = launches(name)
    assert calls == ["unified_attention"] * uses_stock + ["tree_attention"]
    assert metadata.is_sorted != overlap


def test_triton_in_sixteen_bits(device):
    step = make_step(BATCHES["everything"], device=device, dtype=torch.bfloat16, nan=False)
    step.check(run(TreeTritonBackend, step)[1])


def test_without_trees_all_is_stock(device, calls):
    requests = [Request(request.context, request.rows) for request in BATCHES["not sorted"]]
    step = make_step(requests, device=device, nan=False)
    builder = make_builder(TreeTritonBackend, step)
    builder.set_trees(None, step.ancestors)
    metadata = builder.build(0, common_metadata(step))
    assert not isinstance(metadata, TreeMetadata)
    step.check(make_layer(TreeTritonBackend, step)[1](metadata))
    assert calls == ["unified_attention"]


def test_long_chunks_alone_are_stock(device, calls):
    step = make_step(LONG[:1], device=device, nan=False)
    step.check(run(TreeTritonBackend, step)[1])
    assert calls == ["unified_attention"]


def test_profiling_run(device):
    step = make_step(BATCHES["trees"], device=device)
    assert not make_layer(TreeTritonBackend, step)[1](None).any()


# What FlashAttention says of an empty context: version 2 +inf, version 3 -inf.
@pytest.fixture(params=[float("inf"), float("-inf")], ids=["version 2", "version 3"])
def flash_attention(request, monkeypatch):
    """Stands in for FlashAttention's function, which needs a GPU: float64, over the same cache.

    Returns the sequence lengths that it was called with.
    """
    calls = []

    def flash_attn_varlen_func(
        *,
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        block_table,
        return_softmax_lse=False,
        **options,
    ):
        neutral = (None, 0, [-1, -1], 3)
        assert all(
            value in neutral for name, value in options.items() if not name.endswith("_descale")
        )
        calls.append((causal, seqused_k.tolist()))
        lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float32).t()
        starts = cu_seqlens_q.tolist()
        assert max(np.diff(starts)) <= max_seqlen_q and max(seqused_k) <= max_seqlen_k
        for row, length in enumerate(seqused_k.tolist()):
            rows = slice(starts[row], starts[row + 1])
            if length == 0:
                out[rows], lse[:, rows] = 0, request.param
                continue
            tokens = torch.arange(length)
            places = (block_table[row, tokens // k.shape[1]].long(), tokens % k.shape[1])
            group = q.shape[1] // k.shape[2]
            keys, values = (
                cache[places].double().repeat_interleave(group, dim=1) for cache in (k, v)
            )
            scores = torch.einsum("rhd,thd->hrt", q[rows].double(), keys) * softmax_scale
            if causal:
                count = rows.stop - rows.start
                hidden = torch.ones(count, length).triu(length - count + 1).bool()
                scores.masked_fill_(hidden, float("-inf"))
            out[rows] = torch.einsum("hrt,thd->rhd", scores.softmax(dim=-1), values).to(q.dtype)
            lse[:, rows] = scores.logsumexp(dim=-1).float()
        return (out, lse) if return_softmax_lse else out

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    stock = flash_attn.FlashAttentionImpl.__init__

    def init(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.vllm_flash_attn_version = 3

    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "__init__", init)
    return calls


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads_first", [True, False])
def test_flash_attention(flash_attention, name, heads_first):
    step = make_step(BATCHES[name], heads_first=heads_first)
    metadata, output = run(TreeFlashBackend, step)
    step.check(output)
    contexts = [request.context for request in step.requests]
    lengths = [request.length for request in step.requests]
    uses_stock, overlap = launches(name)
    num_short = sum(request not in LONG for request in step.requests)
    if overlap:
        assert flash_attention == [(True, lengths)]
    else:
        long = [(True, lengths[num_short:])] if uses_stock else []
        assert flash_attention == [*long, (False, contexts[:num_short])]
    assert (metadata.context is None) == overlap


def test_flash_attention_in_sixteen_bits(flash_attention):
    step = make_step(BATCHES["everything"], dtype=torch.bfloat16)
    step.check(run(TreeFlashBackend, step)[1])


def test_flash_attention_without_trees(flash_attention):
    step = make_step([Request(request.context, request.rows) for request in BATCHES["everything"]])
    builder = make_builder(TreeFlashBackend, step)
    metadata = builder.build(0, common_metadata(step))
    assert not isinstance(metadata, TreeMetadata)
    step.check(make_layer(TreeFlashBackend, step)[1](metadata))


def test_flash_attention_writes_what_graphs_read(flash_attention):
    """The forward pass of a step's metadata, over buffers that a later build has filled."""
    captured, later = make_step(trees(5, 5, 5)), make_step(trees(5, 5)[::-1], seed=1)
    builder = make_builder(TreeFlashBackend, captured)
    builder.set_trees(captured.tree_index, captured.ancestors)
    metadata = builder.build_for_cudagraph_capture(common_metadata(captured))
    assert metadata.context.seq_lens.tolist() == [0, 30, 60]
    captured.seq_lens[:] = torch.tensor([*later.seq_lens, 0])
    captured.query_start_loc[:] = torch.tensor([0, 5, 10, 10])
    builder.build(0, common_metadata(captured))
    assert metadata.context.seq_lens.tolist() == [30, 0, 0]


@pytest.mark.parametrize("backend", [TreeTritonBackend, TreeFlashBackend])
def test_graphs_of_decodes(backend):
    """A graph's launch is shaped by the longest request that may come, not by the dummy batch's."""
    step = make_step(trees(2, 2, 2))
    builder = make_builder(backend, step)
    builder.set_trees(step.tree_index, step.ancestors)
    lens = step.seq_lens.clone()
    metadata = builder.build_for_cudagraph_capture(common_metadata(step, max_query_len=6))
    assert metadata.short.max_rows == 6 and metadata.stock is None
    assert torch.equal(step.seq_lens, lens)
    assert metadata.short.tree_index.data_ptr() == step.tree_index.data_ptr()
    assert metadata.short.ancestors.data_ptr() == step.ancestors.data_ptr()
    support = type(builder).get_cudagraph_support(None, None)
    assert support == AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("backend", [TreeTritonBackend, TreeFlashBackend])
def test_what_was_not_tested_is_not_offered(backend):
    assert not backend.supports_kv_cache_dtype("fp8")
    assert not backend.supports_head_size(512)
    assert not backend.supports_batch_invariance()
    assert all(backend.supports_head_size(size) for size in (64, 80, 96, 128, 256))
