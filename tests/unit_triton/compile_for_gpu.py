"""Compile the kernels for a GPU that is not there: python -m tests.unit_triton.compile_for_gpu 90

Calls ``tree_attention`` as a step does, but hands its launches to Triton's compiler alone. Prints a
JSON list of the shared memory that each kernel needs, bytes.
"""

import json
import sys
from typing import Any

from tests.triton_interpreter import register_placeholder

# What needs the most, at 16 bits; Triton takes seconds for each.
SHAPES = [("bfloat16", 128, 32), ("float16", 256, 32)]


def main(capability: int) -> None:
    register_placeholder(("cuda", capability, 32))
    import torch
    import triton.backends
    from triton.runtime.driver import driver

    from vllm_medusa.attention import triton_tree

    driver.set_active(triton.backends.backends.pop("cpu").driver())
    needs = []

    class Compiler:
        """Stands in for a kernel."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compile(*args: Any, **options: Any) -> None:
                compiled = self.kernel.warmup(*args, grid=grid, **options)
                needs.append(compiled.metadata.shared)

            return compile

    triton_tree._attention_kernel = Compiler(triton_tree._attention_kernel)
    triton_tree._merge_splits_kernel = Compiler(triton_tree._merge_splits_kernel)

    def int32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    for dtype, head_size, rows in SHAPES:
        query = torch.zeros((rows, 8, head_size), dtype=getattr(torch, dtype))
        kv_cache = torch.zeros((2, 2, 16, 2 * head_size), dtype=query.dtype)
        batch = triton_tree.TreeBatch(
            query_start_loc=int32(2),
            seq_lens=int32(1),
            block_table=int32(1, 16),
            tree_index=int32(1),
            ancestors=torch.zeros((1, 128, 2), dtype=torch.int64),
            max_rows=rows,
            max_seq_len=256,
        )
        lse = torch.zeros((8, rows))
        triton_tree.tree_attention(query, kv_cache, query, batch, 1.0, lse=lse, num_splits=2)
    print(json.dumps(needs))


if __name__ == "__main__":
    main(int(sys.argv[1]))
