"""Compaction on GPUs: the moves of compaction.py for all layers in one launch.

vLLM's cache of a layer is logically [blocks, kv_heads, block_size, 2 x head_size], a token's keys
and values side by side, whatever the order in memory (vllm/v1/kv_cache_interface.py).
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_medusa.acceptance import AcceptedPaths


class SlotMover:
    """Moves accepted paths right behind their contexts, in the caches of all layers."""

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        """
        Args:
            kv_caches: of every layer, [blocks, kv_heads, block_size, 2 x head_size].

        Raises:
            ValueError: layers whose caches differ in type or layout.
        """
        first = kv_caches[0]
        layouts = {(cache.dtype, cache.shape[1:], cache.stride()) for cache in kv_caches}
        if len(layouts) > 1 or first.ndim != 4 or first.stride(3) != 1:
            raise ValueError(
                "medusa needs the same KV cache layout in all layers, [blocks, kv_heads, "
                f"block_size, 2 x head_size]; found {sorted(map(str, layouts))}"
            )
        # Not a view of the caches: vLLM frees them while we are still there.
        self.dtype = first.new_empty(0)
        self.shape, self.strides = first.shape, first.stride()
        self.addresses = torch.tensor(
            [cache.data_ptr() for cache in kv_caches], dtype=torch.int64, device=first.device
        )

    def move(self, paths: AcceptedPaths, slots: torch.Tensor, first_rows: torch.Tensor) -> None:
        """Move the accepted nodes of B requests.

        Args:
            paths: the accepted paths.
            slots: int64 [tokens], the slot of every row of the step.
            first_rows: int64 [B], index into ``slots`` of each request's root.
        """
        num_requests, num_steps = paths.rows.shape
        _, num_heads, block_size, width = self.shape
        _move_kernel[(len(self.addresses), num_requests, num_heads)](
            self.addresses,
            self.dtype,
            paths.tokens,
            paths.rows,
            slots,
            first_rows,
            *self.strides[:3],
            BLOCK_SIZE=block_size,
            WIDTH=width,
            STEPS=num_steps,
            BLOCK=triton.next_power_of_2(width),
        )


@triton.jit
def _move_kernel(
    addresses_ptr,  # [layers]
    dtype_ptr,  # for its type
    tokens_ptr,  # [B, STEPS]
    rows_ptr,  # [B, STEPS]
    slots_ptr,  # [tokens]
    first_rows_ptr,  # [B]
    block_stride,
    head_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(1)
    head = tl.program_id(2)
    cache = tl.load(addresses_ptr + tl.program_id(0)).to(dtype_ptr.dtype)
    cache += head * head_stride
    first = tl.load(first_rows_ptr + request)
    column = tl.arange(0, BLOCK)
    # In order of depth: a node never moves behind where it lay, so no move overwrites what a later
    # one reads (compaction.py).
    for depth in range(1, STEPS):
        row = tl.load(rows_ptr + request * STEPS + depth)
        token = tl.load(tokens_ptr + request * STEPS + depth)
        moves = (token >= 0) & (row != depth)
        # Behind a path's end its root stands for both.
        source = tl.load(slots_ptr + first + tl.where(moves, row, 0))
        target = tl.load(slots_ptr + first + tl.where(moves, depth, 0))
        mask = column < tl.where(moves, WIDTH, 0)
        source_ptr = cache + source // BLOCK_SIZE * block_stride + source % BLOCK_SIZE * slot_stride
        target_ptr = cache + target // BLOCK_SIZE * block_stride + target % BLOCK_SIZE * slot_stride
        tl.store(target_ptr + column, tl.load(source_ptr + column, mask=mask), mask=mask)
