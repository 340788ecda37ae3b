"""Tree attention over vLLM's paged KV cache, as Triton kernels.

A program computes a block of rows of one request, packed with the query heads that share a KV head,
over a part of the keys: the context, which every row sees, and the rows' own keys behind it, of
which a row sees those that the bits of its ancestor mask name. Long contexts are split over several
programs, as Flash-Decoding does (https://crfm.stanford.edu/2023/10/12/flashdecoding.html); a second
kernel adds up the parts. What depends on lengths is read on the device and the grid is fixed by the
batch's shape, so both can be captured in CUDA graphs.
"""

from dataclasses import dataclass
from functools import cache

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv, next_power_of_2

from vllm_medusa.tree import MAX_ROWS

MAX_HEAD_SIZE = 256

MAX_SPLITS = 32
# Fewer keys than this are not worth a program of their own.
_MIN_KEYS_PER_SPLIT = 256
# Programs per compute unit that keep it busy while others wait for memory.
_PROGRAMS_PER_UNIT = 2

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The requests of a step whose rows the kernel computes; shared by all layers.

    Request b has the rows query_start_loc[b] to query_start_loc[b + 1]; its context is the
    seq_lens[b] tokens less those rows. With a tree they are the root, then the nodes, parents
    first; any prefix of the node list will do. Without one, row i sees the rows up to i. Requests
    with more than ``MAX_ROWS`` rows are left alone.

    Attributes:
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B], tokens of context and rows of this step together.
        block_table: int32 [B, max_blocks].
        tree_index: int32 [B], index into ``ancestors``; -1: no tree, the rows are causal.
        ancestors: int64 [trees, MAX_ROWS, 2], ``TreeBank.ancestors``: bit j of row i is set if row
            i sees row j.
        max_rows: at least the rows of each request, of those with up to ``MAX_ROWS``.
        max_seq_len: at least each of ``seq_lens``.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    tree_index: torch.Tensor
    ancestors: torch.Tensor
    max_rows: int
    max_seq_len: int


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    batch: TreeBatch,
    scale: float,
    *,
    lse: torch.Tensor | None = None,
    with_context: bool = True,
    num_splits: int | None = None,
) -> None:
    """Write the attention of the batch's rows into ``output``.

    The keys and values of the rows themselves are in the cache already, behind the context.

    Args:
        query: [tokens, heads, head_size], float32, bfloat16 or float16.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size] of any strides but the last, same
            dtype: keys, then values, as vLLM's Triton and FlashAttention backends share it.
        output: [tokens, heads, head_size]; rows of other requests are left alone.
        batch: which rows there are and what they see.
        scale: factor of the scores before the softmax.
        lse: float32 [heads, tokens], filled with the natural logarithm of each row's sum of
            exponentials, if given.
        with_context: False: over the rows' own keys only.
        num_splits: into how many parts to split each context, ``MAX_SPLITS`` at most; by default as
            many as keep the device busy.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    num_tokens, num_heads, head_size = query.shape
    _, num_kv_heads, block_size, width = kv_cache.shape
    if (
        width != 2 * head_size
        or head_size > MAX_HEAD_SIZE
        or num_heads % num_kv_heads
        or kv_cache.dtype != query.dtype
        or query.shape != output.shape
    ):
        raise ValueError(
            f"query {query.dtype} {tuple(query.shape)} and output {tuple(output.shape)} do not fit "
            f"a KV cache {kv_cache.dtype} {tuple(kv_cache.shape)}: it must hold keys and values of "
            f"the query's dtype and head size, {MAX_HEAD_SIZE} at most, and the query heads must "
            "be a multiple of the KV heads"
        )
    num_requests = batch.seq_lens.shape[0]
    if not num_requests or not num_tokens:
        return
    group = num_heads // num_kv_heads
    head_padded = max(16, next_power_of_2(head_size))
    block_m, tile = _block_sizes(batch.max_rows, group, head_padded, query.element_size())
    row_blocks = cdiv(batch.max_rows, block_m // group)
    programs = num_requests * row_blocks * num_kv_heads
    if not with_context:
        num_splits = 1
    elif num_splits is None:
        num_splits = choose_splits(programs, batch.max_seq_len, _compute_units(query.device))

    if num_splits == 1:
        parts, parts_strides = output, (output.stride(0), output.stride(1), 0)
        sums, sums_strides = lse, (0, 0, 0) if lse is None else (lse.stride(1), lse.stride(0), 0)
    else:
        shape = (num_tokens, num_heads, num_splits)
        parts = torch.empty((*shape, head_size), dtype=torch.float32, device=query.device)
        parts_strides = parts.stride()[:3]
        sums = torch.empty(shape, dtype=torch.float32, device=query.device)
        sums_strides = sums.stride()

    _attention_kernel[(num_requests * row_blocks, num_kv_heads, num_splits)](
        query,
        kv_cache,
        kv_cache[..., head_size:],
        parts,
        sums,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.tree_index,
        batch.ancestors,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        batch.block_table.stride(0),
        *parts_strides,
        *sums_strides,
        row_blocks,
        num_splits,
        MAX_ROWS=MAX_ROWS,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PADDED=head_padded,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=tile,
        WITH_CONTEXT=with_context,
        WRITE_LSE=sums is not None,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _merge_splits_kernel[(num_requests * batch.max_rows, num_heads)](
            output,
            lse,
            parts,
            sums,
            batch.query_start_loc,
            output.stride(0),
            output.stride(1),
            *((0, 0) if lse is None else (lse.stride(1), lse.stride(0))),
            *parts_strides,
            *sums_strides,
            batch.max_rows,
            num_splits,
            MAX_ROWS=MAX_ROWS,
            HEAD_SIZE=head_size,
            HEAD_PADDED=head_padded,
            MAX_SPLITS=MAX_SPLITS,
            WRITE_LSE=lse is not None,
        )


def choose_splits(programs: int, max_seq_len: int, compute_units: int) -> int:
    """Into how many parts to split each context, 1 to ``MAX_SPLITS``.

    Args:
        programs: of one split: requests, row blocks and KV heads multiplied.
        max_seq_len: the longest sequence that may come.
        compute_units: of the device.
    """
    wanted = min(_PROGRAMS_PER_UNIT * compute_units // programs, max_seq_len // _MIN_KEYS_PER_SPLIT)
    return max(1, min(wanted, MAX_SPLITS))


@cache
def _compute_units(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter runs one program after the other
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _block_sizes(max_rows: int, group: int, head_padded: int, element_size: int) -> tuple[int, int]:
    """Query rows times heads of a program, and keys of one of its steps.

    Small enough that two steps' keys and values and the queries fit in the 99 KiB of shared memory
    that GPUs of capability 8.6 and 8.9 give to a program.
    """
    most = 32 if head_padded * element_size > 256 else 64
    block_m = min(most, max(16, next_power_of_2(max_rows * group)))
    tile = min(64, 16384 // (head_padded * element_size))
    return max(block_m, next_power_of_2(group)), tile


# What changes from batch to batch is not compiled in: nobody waits for a compiler while serving.
@triton.jit(do_not_specialize=["row_blocks", "num_splits"])
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    tree_index_ptr,
    ancestors_ptr,
    score_scale,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    cache_block_stride: tl.int64,
    cache_head_stride: tl.int64,
    cache_slot_stride: tl.int64,
    block_table_stride: tl.int64,
    output_token_stride: tl.int64,
    output_head_stride: tl.int64,
    output_split_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    lse_split_stride: tl.int64,
    row_blocks,
    num_splits,
    MAX_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WITH_CONTEXT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Grid: (requests * row_blocks, kv_heads, num_splits).

    ``score_scale`` holds a factor log2(e): exponentials are powers of two here. TILE divides 64, so
    that a step's bits of a mask come from one word.
    """
    BLOCK_ROWS: tl.constexpr = BLOCK_M // GROUP
    request = tl.program_id(0) // row_blocks
    first_row = tl.program_id(0) % row_blocks * BLOCK_ROWS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    first_token = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first_token
    if (first_row >= num_rows) | (num_rows > MAX_ROWS):
        return
    # vLLM captures CUDA graphs with lengths that are no batch's: none must lead out of the table.
    context = tl.maximum(tl.load(seq_lens_ptr + request) - num_rows, 0)
    tree = tl.load(tree_index_ptr + request)

    offsets = tl.arange(0, BLOCK_M)
    row = first_row + offsets // GROUP
    head = kv_head * GROUP + offsets % GROUP
    is_row = (offsets < BLOCK_ROWS * GROUP) & (row < num_rows)
    token = first_token + row
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_SIZE
    query = tl.load(
        query_ptr
        + token[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    key_ptr += kv_head * cache_head_stride
    value_ptr += kv_head * cache_head_stride
    block_table_ptr += request * block_table_stride

    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD_PADDED], dtype=tl.float32)

    if WITH_CONTEXT:
        split_size = tl.cdiv(context, num_splits * TILE) * TILE
        begin = split * split_size
        end = tl.minimum(begin + split_size, context)
        for start in range(begin, end, TILE):
            position = start + tl.arange(0, TILE)
            is_key = position < end
            best, total, sums = _add_keys(
                best,
                total,
                sums,
                query,
                position,
                is_key,
                is_key[None, :],
                key_ptr,
                value_ptr,
                block_table_ptr,
                score_scale,
                cache_block_stride,
                cache_slot_stride,
                dims,
                is_dim,
                BLOCK_SIZE,
            )
    # The last split has the shortest part of the context, if any.
    if split == num_splits - 1:
        mask_ptr = ancestors_ptr + tl.maximum(tree, 0) * MAX_ROWS * 2 + row * 2
        for start in range(0, num_rows, TILE):
            column = start + tl.arange(0, TILE)
            is_key = column < num_rows
            word = tl.load(mask_ptr + start // 64, mask=is_row, other=0)
            is_ancestor = ((word[:, None] >> (column % 64)[None, :]) & 1) == 1
            is_earlier = column[None, :] <= row[:, None]
            sees = ((tree >= 0) & is_ancestor) | ((tree < 0) & is_earlier)
            best, total, sums = _add_keys(
                best,
                total,
                sums,
                query,
                context + column,
                is_key,
                is_key[None, :] & sees,
                key_ptr,
                value_ptr,
                block_table_ptr,
                score_scale,
                cache_block_stride,
                cache_slot_stride,
                dims,
                is_dim,
                BLOCK_SIZE,
            )

    # A split that holds no keys counts for nothing: zeros, and a sum whose logarithm is -inf.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    tl.store(
        output_ptr
        + token[:, None] * output_token_stride
        + head[:, None] * output_head_stride
        + split * output_split_stride
        + dims[None, :],
        (sums / total[:, None]).to(output_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
    if WRITE_LSE:
        tl.store(
            lse_ptr + token * lse_token_stride + head * lse_head_stride + split * lse_split_stride,
            tl.where(is_empty, float("-inf"), (best + tl.log2(total)) * _LN_2),
            mask=is_row,
        )


@triton.jit
def _add_keys(
    best,
    total,
    sums,
    query,
    position,
    is_key,
    sees,
    key_ptr,
    value_ptr,
    block_table_ptr,
    score_scale,
    cache_block_stride,
    cache_slot_stride,
    dims,
    is_dim,
    BLOCK_SIZE: tl.constexpr,
):
    """One step of the online softmax, over the keys at ``position`` [TILE] of the request.

    ``best`` and ``total``, [BLOCK_M], are the largest score so far and the sum of exponentials
    relative to it, ``sums``, [BLOCK_M, HEAD_PADDED], that of the values so weighted.
    """
    block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    slot = block * cache_block_stride + (position % BLOCK_SIZE) * cache_slot_stride
    key = tl.load(
        key_ptr + slot[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0
    )
    scores = tl.dot(query, key, input_precision="ieee") * score_scale
    scores = tl.where(sees, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # Of a row that has seen no key, -inf less -inf would be no number.
    origin = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(best - origin)
    value = tl.load(
        value_ptr + slot[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
    )
    total = total * decay + tl.sum(weights, axis=1)
    sums = sums * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new_best, total, sums


@triton.jit(do_not_specialize=["max_rows", "num_splits"])
def _merge_splits_kernel(
    output_ptr,
    lse_ptr,
    parts_ptr,
    sums_ptr,
    query_start_loc_ptr,
    output_token_stride: tl.int64,
    output_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    parts_token_stride: tl.int64,
    parts_head_stride: tl.int64,
    parts_split_stride: tl.int64,
    sums_token_stride: tl.int64,
    sums_head_stride: tl.int64,
    sums_split_stride: tl.int64,
    max_rows,
    num_splits,
    MAX_ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Add up the splits of a row and head. Grid: (requests * max_rows, heads)."""
    request = tl.program_id(0) // max_rows
    row = tl.program_id(0) % max_rows
    head = tl.program_id(1)
    first_token = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first_token
    if (row >= num_rows) | (num_rows > MAX_ROWS):
        return
    token = first_token + row
    splits = tl.arange(0, MAX_SPLITS)
    is_split = splits < num_splits
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_SIZE
    lse = tl.load(
        sums_ptr + token * sums_token_stride + head * sums_head_stride + splits * sums_split_stride,
        mask=is_split,
        other=float("-inf"),
    )
    parts = tl.load(
        parts_ptr
        + token * parts_token_stride
        + head * parts_head_stride
        + splits[:, None] * parts_split_stride
        + dims[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    best = tl.max(lse, axis=0)  # finite: the last split holds the row's own key
    weights = tl.exp(lse - best)
    total = tl.sum(weights, axis=0)
    tl.store(
        output_ptr + token * output_token_stride + head * output_head_stride + dims,
        (tl.sum(weights[:, None] * parts, axis=0) / total).to(output_ptr.dtype.element_ty),
        mask=is_dim,
    )
    if WRITE_LSE:
        tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, best + tl.log(total))
