"""The Triton tree kernel against dense float64 attention."""

import numpy as np
import pytest
import torch

from tests.unit_triton.steps import TOLERANCE, UNTOUCHED, Request, Step, random_request, random_tree
from vllm_medusa.attention import reference
from vllm_medusa.attention.kernels import TreeRows
from vllm_medusa.attention.triton_tree import MAX_SPLITS, choose_splits, tree_attention
from vllm_medusa.tree import MAX_ROWS, TokenTree

HEADS = [(4, 4), (3, 1), (8, 2), (7, 1), (9, 3)]


@pytest.mark.parametrize("seed", range(10))
def test_mixed_batches(device, seed):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, longest=24) for _ in range(rng.integers(2, 6))]
    step = Step(requests, heads=HEADS[seed % 5], device=device, seed=seed)
    step.check(step.run(num_splits=1 + seed // 2))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("head_size", "block_size"),
    [(32, 16), (64, 16), (64, 32), (64, 48), (80, 16), (96, 32), (128, 128), (128, 16), (256, 32)],
)
def test_shapes(device, dtype, head_size, block_size):
    rng = np.random.default_rng(head_size + block_size)
    requests = [
        Request(150, 9, random_tree(rng, 8)),
        Request(5, 3),
        Request(block_size - 1, 2, random_tree(rng, 4)),
        Request(2 * block_size, 1, random_tree(rng, 2)),
    ]
    step = Step(
        requests,
        heads=(6, 2),
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        device=device,
        heads_first=block_size % 32 == 0,
    )
    step.check(step.run(num_splits=2 if block_size == 16 else 1))


@pytest.mark.parametrize("nodes", [1, 2, 15, 16, 63, 64, 126, 127])
@pytest.mark.parametrize("context", [0, 1, 127, 300])
def test_sizes_of_trees(device, nodes, context):
    tree = random_tree(np.random.default_rng(nodes), nodes)
    step = Step([Request(context, nodes + 1, tree)], heads=(3, 1), head_size=32, device=device)
    step.check(step.run())


@pytest.mark.parametrize(
    ("num_splits", "with_context"), [(1, True), (2, True), (MAX_SPLITS, True), (4, False)]
)
def test_log_sum_exp(device, num_splits, with_context):
    rng = np.random.default_rng(5)
    requests = [
        Request(0, 9, random_tree(rng, 8)),
        Request(260, 5, random_tree(rng, 8)),
        Request(33, 1),
        Request(64, 12),
    ]
    step = Step(requests, heads=(4, 2), device=device)
    lse = torch.zeros(4, step.query.shape[0], device=device)
    output = step.run(lse=lse, with_context=with_context, num_splits=num_splits)
    expected, expected_lse = step.expected(with_context)
    torch.testing.assert_close(output.cpu().double(), expected, **TOLERANCE[torch.float32])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, **TOLERANCE[torch.float32])


def test_long_requests_are_left_alone(device):
    rng = np.random.default_rng(1)
    requests = [
        Request(20, MAX_ROWS + 1),
        Request(30, 6, random_tree(rng, 9)),
        Request(0, 200),
        Request(9, 1),
    ]
    step = Step(requests, heads=(2, 1), head_size=32, device=device)
    expected = step.expected()[0]
    expected[: MAX_ROWS + 1] = expected[MAX_ROWS + 7 : -1] = UNTOUCHED
    for num_splits in (1, 3):
        output = step.run(num_splits=num_splits).cpu().double()
        torch.testing.assert_close(output, expected, **TOLERANCE[torch.float32])


def test_lengths_that_are_no_batchs(device):
    # What vLLM's graphs see: requests of padding have no rows, and those of a capture may be
    # shorter than their rows.
    step = Step([Request(40, 5, TokenTree.chain(4)), Request(7, 5, TokenTree.chain(4))])
    start_loc = torch.tensor([0, 5, 10, 10, 10], dtype=torch.int32)
    seq_lens = torch.tensor([45, 1, 0, 1], dtype=torch.int32)
    batch = step.batch(
        query_start_loc=start_loc.to(device),
        seq_lens=seq_lens.to(device),
        block_table=torch.cat([step.block_table, step.block_table * 0]).to(device),
        tree_index=torch.tensor([0, 1, 77, -1], dtype=torch.int32, device=device),
        ancestors=step.ancestors.to(device),
        max_rows=9,
    )
    for num_splits in (1, 4):
        output = torch.full_like(step.query, UNTOUCHED, device=device)
        kv_cache = step.kv_cache.to(device)
        tree_attention(
            step.query.to(device), kv_cache, output, batch, step.scale, num_splits=num_splits
        )
        expected = step.expected()[0][:5]
        torch.testing.assert_close(output[:5].cpu().double(), expected, **TOLERANCE[torch.float32])


def test_bits_of_rows_that_do_not_run_are_ignored(device):
    step = Step([Request(37, 21, TokenTree.chain(20)), Request(60, 2, TokenTree.chain(30))])
    expected = step.expected()[0]
    step.ancestors[:, :, 1] = -1
    step.ancestors[0, :21, 0] |= -1 << 21
    step.ancestors[1, :2, 0] |= -1 << 2
    for name in ("query", "kv_cache", "block_table", "query_start_loc", "seq_lens"):
        setattr(step, name, getattr(step, name).to(device))
    step.ancestors, step.tree_index = step.ancestors.to(device), step.tree_index.to(device)
    torch.testing.assert_close(step.run().cpu().double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("rows", [1, 16, 65, 128])
def test_a_chain_is_causal(device, rows):
    requests = [Request(70, rows, TokenTree.chain(127))]
    step = Step(requests, device=device)
    chain = step.run()
    step.tree_index.fill_(-1)
    assert torch.equal(step.run(), chain)


def test_large_scores(device):
    # Scores of some thousands: the softmax is a hard maximum, and must not overflow on the way.
    step = Step([Request(200, 16, random_tree(np.random.default_rng(0), 15))], device=device)
    step.query *= 1000
    expected = step.expected()[0]
    torch.testing.assert_close(
        step.run(num_splits=3).cpu().double(), expected, rtol=1e-3, atol=1e-3
    )


def test_strided_query_and_output(device):
    requests = [Request(70, 5, TokenTree.chain(4)), Request(3, 8), Request(9, 2)]
    step = Step(requests, device=device)
    wide = torch.full((step.query.shape[0], 12, 64), UNTOUCHED, device=device)
    wide[:, 2:6] = step.query
    step.query = wide[:, 2:6]
    tree_attention(step.query, step.kv_cache, wide[:, 7:11], step.batch(), step.scale, num_splits=2)
    step.check(wide[:, 7:11])
    assert (wide[:, 6] == UNTOUCHED).all() and (wide[:, 11] == UNTOUCHED).all()


def test_as_the_cpu_reference():
    rng = np.random.default_rng(2)
    requests = [Request(90, 12, random_tree(rng, 30)), Request(200, 40, random_tree(rng, 39))]
    step = Step(requests, nan=False)
    rows = TreeRows(
        step.query_start_loc, step.seq_lens, step.block_table, step.tree_index, step.ancestors
    )
    keys, values = step.kv_cache.double().chunk(2, dim=3)
    blocks, kv_heads, block_size, head_size = keys.shape
    # A block of a KV head: keys [head_size, block_size], then values [block_size, head_size].
    cache = torch.cat([keys.transpose(2, 3).flatten(2), values.flatten(2)], dim=2)
    cache = cache.view(blocks, kv_heads, block_size, 2 * head_size)
    expected = torch.empty_like(step.query, dtype=torch.float64)
    reference.tree_attention(step.query.double(), cache, expected, rows, step.scale)
    torch.testing.assert_close(step.expected()[0], expected)


def test_splits_fill_the_device():
    assert choose_splits(programs=8, max_seq_len=32768, compute_units=132) == 32
    assert choose_splits(programs=32, max_seq_len=32768, compute_units=132) == 8
    assert choose_splits(programs=32, max_seq_len=1024, compute_units=132) == 4
    assert choose_splits(programs=32, max_seq_len=100, compute_units=132) == 1
    assert choose_splits(programs=1000, max_seq_len=32768, compute_units=132) == 1


def test_bad_input_is_named():
    step = Step([Request(10, 4, TokenTree.chain(3))])
    output = torch.empty_like(step.query)

    def run(query, kv_cache, output):
        tree_attention(query, kv_cache, output, step.batch(), 1.0)

    for query, kv_cache, result in (
        (step.query.bfloat16(), step.kv_cache, output),
        (step.query, step.kv_cache[..., :64], output),
        (step.query, step.kv_cache, output[:, :2]),
        (step.query[:, :3], step.kv_cache, output[:, :3]),
        (step.query.repeat(1, 1, 5), step.kv_cache.repeat(1, 1, 1, 5), output.repeat(1, 1, 5)),
    ):
        with pytest.raises(ValueError, match="do not fit a KV cache"):
            run(query, kv_cache, result)
