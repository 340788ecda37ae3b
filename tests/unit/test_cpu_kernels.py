"""Tree attention and compaction on CPUs, compiled and in plain torch, against dense float64.

The caches are filled by vLLM's own operator, so the tests also hold the layout to vLLM's.
"""

import ctypes
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from vllm_medusa.attention import kernels, reference
from vllm_medusa.attention.kernels import TreeRows

MAX_ROWS = kernels.MAX_TREE_ROWS
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-3, "atol": 1e-3},  # half a unit in the last place is 2e-3
    torch.float16: {"rtol": 7e-4, "atol": 2e-4},  # and 2.5e-4
}

current_platform.import_kernels()


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads would only wait for each other. Some tests ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "reference"])
def implementation(request):
    if request.param == "reference":
        return reference
    if kernels.load_library() is None:
        pytest.skip("no C++ compiler")
    return kernels


@dataclass
class Request:
    """A request of a step: tokens of context, rows, and the parents of rows 1.. (no tree: None)."""

    context: int
    rows: int
    parents: list[int] | None


def random_parents(rng, rows):
    """Parents of rows 1.. of a random tree; row 0 is the root."""
    return [int(rng.integers(0, row)) for row in range(1, rows)]


def chain(rows):
    return list(range(rows - 1))


def seen_rows(parents):
    """bool [rows, rows], by walking up from each row."""
    rows = len(parents) + 1
    seen = np.zeros((rows, rows), dtype=bool)
    for row in range(rows):
        ancestor = row
        while ancestor:
            seen[row, ancestor] = True
            ancestor = parents[ancestor - 1]
        seen[row, 0] = True
    return seen


def pack(trees):
    bits = np.zeros((len(trees), MAX_ROWS, MAX_ROWS), dtype=bool)
    for bank, parents in zip(bits, trees, strict=True):
        rows = len(parents) + 1
        bank[:rows, :rows] = seen_rows(parents)
    return torch.from_numpy(np.packbits(bits, axis=2, bitorder="little").view(np.int64))


def write(kv_cache, keys, values, slots, isa="vec"):
    blocks, kv_heads, block_size, _ = kv_cache.shape
    key_cache, value_cache = kv_cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


class Step:
    """A batch of requests with random queries, keys and values, and the cache that holds them."""

    def __init__(
        self, requests, *, heads=(4, 2), head_size=64, block_size=32, dtype=torch.float32, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        num_heads, kv_heads = heads
        lengths = [request.context + request.rows for request in requests]
        blocks = [-(-length // block_size) for length in lengths]
        self.requests, self.scale, self.dtype = requests, head_size**-0.5, dtype
        # Every second block of a wider tensor, and NaN wherever no token is: reading beside the
        # tokens of a request shows.
        shape = (sum(blocks) + 1, 2, kv_heads, block_size, 2 * head_size)
        self.kv_cache = torch.full(shape, float("nan"), dtype=dtype)[:, 1]
        table = torch.full((len(requests), max(blocks) + 2), -1, dtype=torch.int32)
        order = torch.randperm(shape[0], generator=generator).to(torch.int32)
        starts = itertools.accumulate(blocks, initial=0)
        for row, (first, count) in enumerate(zip(starts, blocks, strict=False)):
            table[row, :count] = order[first : first + count]
        self.keys, self.values = [], []
        for row, length in enumerate(lengths):
            k, v = torch.randn(2, length, kv_heads, head_size, generator=generator).to(dtype)
            position = torch.arange(length)
            slots = table[row, position // block_size] * block_size + position % block_size
            write(self.kv_cache, k, v, slots.long(), "vec" if block_size % 32 == 0 else "vec16")
            self.keys.append(k)
            self.values.append(v)
        counts = [request.rows for request in requests]
        starts = list(itertools.accumulate(counts, initial=0))
        self.query = torch.randn(starts[-1], num_heads, head_size, generator=generator).to(dtype)
        trees, tree_index = [], []
        for request in requests:
            if request.parents is not None and request.parents not in trees:
                trees.append(request.parents)
            tree_index.append(-1 if request.parents is None else trees.index(request.parents))
        self.rows = TreeRows(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=table[:, : max(blocks)],
            tree_index=torch.tensor(tree_index, dtype=torch.int32),
            ancestors=pack(trees or [[]]),
        )

    def run(self, implementation):
        output = torch.full_like(self.query, 7.0)
        implementation.tree_attention(self.query, self.kv_cache, output, self.rows, self.scale)
        return output

    def expected(self):
        """float64, one row and head at a time: nothing in common with what is tested."""
        result = torch.full(self.query.shape, 7.0, dtype=torch.float64)
        group = self.query.shape[1] // self.kv_cache.shape[1]
        token = 0
        for request, keys, values in zip(self.requests, self.keys, self.values, strict=True):
            seen = None if request.parents is None else seen_rows(request.parents)
            for row in range(request.rows):
                if seen is not None:
                    rows = [request.context + j for j in range(request.rows) if seen[row, j]]
                    visible = list(range(request.context)) + rows
                    k = keys[visible].double().repeat_interleave(group, dim=1)
                    v = values[visible].double().repeat_interleave(group, dim=1)
                    scores = torch.einsum("hd,thd->ht", self.query[token].double(), k) * self.scale
                    result[token] = torch.einsum("ht,thd->hd", scores.softmax(dim=1), v)
                token += 1
        return result

    def check(self, implementation, threads=1):
        torch.set_num_threads(threads)
        output = self.run(implementation)
        torch.set_num_threads(1)
        torch.testing.assert_close(output.double(), self.expected(), **TOLERANCE[self.dtype])


def random_request(rng):
    context = int(rng.integers(0, 301))
    kind = rng.choice(["tree", "tree", "cut tree", "decode", "prefill"])
    if kind == "decode":
        return Request(context, 1, [])
    rows = int(rng.integers(1, 40))
    if kind == "prefill":
        return Request(context, rows, None)
    nodes = rows + int(rng.integers(0, 20)) if kind == "cut tree" else rows
    return Request(context, rows, random_parents(rng, nodes))


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches(implementation, seed):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(rng.integers(1, 6))]
    heads = [(4, 4), (3, 1), (8, 2), (7, 1), (9, 3)][seed % 5]
    Step(requests, heads=heads, seed=seed).check(implementation, threads=1 + seed % 4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_shapes(implementation, dtype, head_size, block_size):
    rng = np.random.default_rng(head_size + block_size)
    requests = [
        Request(150, 9, random_parents(rng, 9)),
        Request(5, 3, None),
        Request(block_size - 1, 2, chain(2)),
        Request(2 * block_size, 1, []),
    ]
    step = Step(requests, heads=(6, 2), head_size=head_size, block_size=block_size, dtype=dtype)
    step.check(implementation)


@pytest.mark.parametrize("nodes", [1, 2, 15, 16, 63, 64, 126, 127])
@pytest.mark.parametrize("context", [0, 1, 127, 300])
def test_sizes_of_trees(implementation, nodes, context):
    parents = random_parents(np.random.default_rng(nodes), nodes + 1)
    Step([Request(context, nodes + 1, parents)], heads=(3, 1), head_size=32).check(implementation)


def test_bits_of_rows_that_do_not_run_are_ignored(implementation):
    step = Step([Request(37, 21, chain(21)), Request(60, 2, [0])])
    behind = torch.full((MAX_ROWS, 2), -1, dtype=torch.int64)
    behind[:, 0] <<= 21
    step.rows.ancestors[0] |= behind
    step.rows.ancestors[1] |= behind
    step.check(implementation)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_long_context_cut_into_chunks(implementation, threads):
    rng = np.random.default_rng(3)
    requests = [Request(1500, 21, random_parents(rng, 21)), Request(40, 4, chain(4))]
    step = Step(requests, heads=(9, 3), block_size=128)
    step.check(implementation, threads)
    # The merge has a fixed order: the same bits, whichever thread was first.
    torch.set_num_threads(threads)
    outputs = [step.run(implementation) for _ in range(5)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_large_scores(implementation):
    # Scores of some thousands: the softmax is a hard maximum, and must not overflow on the way.
    step = Step([Request(200, 16, random_parents(np.random.default_rng(0), 16))])
    step.query *= 1000
    output, expected = step.run(implementation), step.expected()
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-3)


def test_strided_query_and_output(implementation):
    step = Step([Request(70, 5, chain(5)), Request(3, 8, None), Request(9, 2, chain(2))])
    expected = step.expected()
    wide = torch.full((step.query.shape[0], 12, 64), 7.0)
    wide[:, 2:6] = step.query
    step.query, output = wide[:, 2:6], wide[:, 7:11]
    implementation.tree_attention(step.query, step.kv_cache, output, step.rows, step.scale)
    torch.testing.assert_close(output.double(), expected, **TOLERANCE[torch.float32])
    assert (wide[:, 6] == 7).all() and (wide[:, 11] == 7).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chain_is_the_stock_causal_kernel(implementation, dtype):
    requests = [Request(200, 12, chain(12)), Request(31, 1, []), Request(0, 20, chain(20))]
    step = Step(requests, heads=(9, 3), dtype=dtype)
    rows = step.rows
    blocks, kv_heads, block_size, _ = step.kv_cache.shape
    # The stock kernel reads whole blocks.
    step.kv_cache.nan_to_num_(0)
    key_cache, value_cache = step.kv_cache.view(blocks, kv_heads, 2 * block_size, 64).chunk(2, 2)
    stock = torch.empty_like(step.query)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(requests),
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seq_lens=rows.seq_lens,
        dtype=dtype,
        query_start_loc=rows.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa="vec",
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=step.query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=stock,
        query_start_loc=rows.query_start_loc,
        seq_lens=rows.seq_lens,
        scale=step.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=rows.block_table,
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    ours = step.run(implementation)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # it rounds the softmax to 16 bits
    torch.testing.assert_close(ours, stock, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("block_size", "isa"), [(32, "vec"), (128, "vec"), (16, "vec16")])
def test_move_slots(implementation, dtype, block_size, isa):
    layers, blocks, kv_heads, head_size = 3, 9, 2, 64
    source = torch.tensor([20, 37, 40, 3 * block_size + 5, 8 * block_size])
    target = torch.tensor([19, 20, 37, 4 * block_size, 8 * block_size])
    caches, expected = [], []
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        shape = (2, blocks * block_size, kv_heads, head_size)
        keys, values = torch.randn(shape, generator=generator).to(dtype)
        slots = torch.arange(blocks * block_size)
        cache = torch.zeros((blocks, 2, kv_heads, block_size, 2 * head_size), dtype=dtype)[:, 1]
        write(cache, keys, values, slots, isa)
        caches.append(cache)
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            keys[t], values[t] = keys[s].clone(), values[s].clone()
        moved = torch.zeros_like(cache)
        write(moved, keys, values, slots, isa)
        expected.append(moved)
    implementation.move_slots(caches, source, target)
    for cache, moved in zip(caches, expected, strict=True):
        assert torch.equal(cache, moved)


def test_no_moves(implementation):
    none = torch.empty(0, dtype=torch.int64)
    implementation.move_slots([torch.zeros(1, 1, 32, 64)], none, none)


def test_rows_are_reused_over_layers():
    if kernels.load_library() is None:
        pytest.skip("no C++ compiler")
    step = Step([Request(50, 6, chain(6))])
    first = step.run(kernels)
    other = Step([Request(50, 6, chain(6))], seed=1)
    output = torch.empty_like(step.query)
    other_cache = torch.empty_like(step.kv_cache)  # contiguous: other strides than step's
    table, other_table = step.rows.block_table[0].long(), other.rows.block_table[0].long()
    other_cache[table] = other.kv_cache[other_table]
    kernels.tree_attention(other.query, other_cache, output, step.rows, step.scale)
    torch.testing.assert_close(output.double(), other.expected(), **TOLERANCE[torch.float32])
    assert torch.equal(step.run(kernels), first)
    assert len(step.rows._calls) == 2


def test_bad_input_is_named():
    if kernels.load_library() is None:
        pytest.skip("no C++ compiler")
    step = Step([Request(10, 4, chain(4))])
    rows, query, cache = step.rows, step.query, step.kv_cache
    fields = {
        "query_start_loc": rows.query_start_loc,
        "seq_lens": rows.seq_lens,
        "block_table": rows.block_table,
        "tree_index": rows.tree_index,
        "ancestors": rows.ancestors,
    }
    with pytest.raises(ValueError, match="seq_lens must be int32"):
        TreeRows(**fields | {"seq_lens": rows.seq_lens.long()})
    with pytest.raises(ValueError, match="ancestors must be"):
        TreeRows(**fields | {"ancestors": rows.ancestors[:, :64]})
    with pytest.raises(ValueError, match="tree_index names 2 requests"):
        TreeRows(**fields | {"tree_index": torch.zeros(2, dtype=torch.int32)})

    def run(query, cache, **changed):
        kernels.tree_attention(
            query, cache, torch.empty_like(query), TreeRows(**fields | changed), 1.0
        )

    with pytest.raises(ValueError, match="must agree"):
        run(query.bfloat16(), cache)
    with pytest.raises(ValueError, match="does not fit"):
        run(query[:, :3], cache)
    with pytest.raises(ValueError, match="fewer than query_start_loc says"):
        run(query[:3], cache)
    with pytest.raises(ValueError, match="must be contiguous"):
        run(query, cache.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="tree_index names a tree"):
        run(query, cache, tree_index=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="more rows than"):
        run(query, cache, seq_lens=torch.full((1,), 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="call once per kind"):
        slots = torch.zeros(1, dtype=torch.int64)
        kernels.move_slots([cache, cache.bfloat16()], slots, slots)


def test_without_a_compiler(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.load_library.cache_clear()
    try:
        Step([Request(40, 5, chain(5)), Request(40, 5, None)]).check(kernels)
        assert "apt-get install g++" in caplog.text and "no-such-compiler" in caplog.text
        ours = [record for record in caplog.records if record.name.endswith("attention.kernels")]
        assert len(ours) == 1
    finally:
        kernels.load_library.cache_clear()


def test_a_failing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"false .* failed"):
        kernels.build()
    assert list((tmp_path / "vllm-medusa").iterdir()) == []


SHARED_POOL = """
import os, torch
from vllm_medusa.attention import kernels

def runtimes():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if line.rstrip().endswith((".so", ".so.1"))}
    return {path for path in paths if os.path.basename(path).startswith(("libgomp", "libiomp"))}

torch.set_num_threads(3)
torch.randn(1000, 1000).exp_().sum()  # starts torch's pool
before, threads = runtimes(), len(os.listdir("/proc/self/task"))
assert before and threads >= 3
assert kernels.load_library() is not None
caches = [torch.zeros(1, 1, 32, 64) for _ in range(6)]
slots = torch.arange(2)
kernels.move_slots(caches, slots, slots.flip(0))
assert runtimes() == before, runtimes() - before
assert len(os.listdir("/proc/self/task")) == threads
"""


@pytest.mark.parametrize("preload", ["", "libiomp5.so"])
def test_shares_the_openmp_pool_of_the_process(preload):
    if kernels.load_library() is None:
        pytest.skip("no C++ compiler")
    library = Path(sys.prefix) / "lib" / preload
    if not library.exists():
        pytest.skip(f"no {preload} in the environment")
    environment = os.environ | {"LD_PRELOAD": str(library) if preload else ""}
    result = subprocess.run(
        [sys.executable, "-c", SHARED_POOL], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_structs_fit_the_source():
    # Fields of 8 bytes each, as in the source; guards against adding one on one side only.
    source = kernels._SOURCE.read_text()
    for struct, name in ((kernels._RowsStruct, "TreeRows"), (kernels._ShapeStruct, "LayerShape")):
        body = source.split(f"struct {name} {{")[1].split("};")[0]
        code = "".join(line.split("//")[0] for line in body.splitlines())
        fields = [
            field.split()[-1].lstrip("*")
            for declaration in code.split(";")
            for field in declaration.split(",")
            if field.strip()
        ]
        assert [name for name, _ in struct._fields_] == fields
        assert ctypes.sizeof(struct) == 8 * len(fields)
