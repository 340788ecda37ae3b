"""Tree attention and compaction in plain torch: what the kernels compute, said slowly.

Used where there is no C++ compiler, and tested like the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_medusa.attention.kernels import TreeRows


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values by slot, for the layout that vLLM's ISAs "vec" and "vec16" write.

    A block of a KV head holds the keys transposed, [head_size, block_size], then the values,
    [block_size, head_size].

    Args:
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size].

    Returns:
        Keys and values, [blocks, block_size, kv_heads, head_size] both.
    """
    blocks, kv_heads, block_size, width = kv_cache.shape
    flat = kv_cache.view(blocks, kv_heads, block_size * width)
    keys, values = flat.chunk(2, dim=2)
    return (
        keys.unflatten(2, (width // 2, block_size)).permute(0, 3, 1, 2),
        values.unflatten(2, (block_size, width // 2)).permute(0, 2, 1, 3),
    )


def visible_rows(ancestors: torch.Tensor, num_rows: int) -> torch.Tensor:
    """bool [num_rows, num_rows] of a tree's masks, int64 [128, 2]: (i, j) says if i sees j."""
    columns = torch.arange(num_rows)
    words = ancestors.view(torch.int64)[:num_rows, columns // 64]
    return (words >> (columns % 64)) & 1 == 1


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    rows: TreeRows,
    scale: float,
) -> None:
    """``kernels.tree_attention``, computed in float32 (in float64 for a float64 query)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values = split_cache(kv_cache)
    block_size = kv_cache.shape[2]
    group = query.shape[1] // kv_cache.shape[1]
    starts = rows.query_start_loc.tolist()
    for request, tree in enumerate(rows.tree_index.tolist()):
        first, last = starts[request], starts[request + 1]
        if tree < 0 or first == last:
            continue
        num_rows, length = last - first, int(rows.seq_lens[request])
        tokens = torch.arange(length)
        blocks, places = rows.block_table[request, tokens // block_size], tokens % block_size
        # [kv_heads, length, head_size]
        k = keys[blocks.long(), places].to(dtype).transpose(0, 1)
        v = values[blocks.long(), places].to(dtype).transpose(0, 1)
        # [kv_heads, group, num_rows, head_size]
        q = query[first:last].to(dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        scores = q @ k.unsqueeze(1).transpose(2, 3) * scale
        hidden = ~visible_rows(rows.ancestors[tree], num_rows)
        scores[..., length - num_rows :].masked_fill_(hidden, float("-inf"))
        result = scores.softmax(dim=-1) @ v.unsqueeze(1)
        output[first:last] = result.permute(2, 0, 1, 3).flatten(1, 2).to(output.dtype)


def move_slots(
    kv_caches: Sequence[torch.Tensor], source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """``kernels.move_slots``."""
    for kv_cache in kv_caches:
        block_size = kv_cache.shape[2]
        for part in split_cache(kv_cache):
            for source, target in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
                part[divmod(target, block_size)] = part[divmod(source, block_size)]
