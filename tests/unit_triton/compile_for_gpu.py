"""Compile the kernels for a GPU that is not there: python -m tests.unit_triton.compile_for_gpu 90

Calls what launches them as a step does, but hands the launches to Triton's compiler alone. Prints
as JSON the shared memory that each compilation of each kernel needs, bytes.
"""

import json
import sys
from collections import defaultdict
from typing import Any

from tests.triton_interpreter import register_placeholder

# Of attention what needs the most, at 16 bits; Triton takes seconds for each.
SHAPES = [("bfloat16", 128, 32), ("float16", 256, 32)]


def main(capability: int) -> None:
    register_placeholder(("cuda", capability, 32))
    import torch
    import triton.backends
    from triton.runtime.driver import driver

    from vllm_medusa import acceptance_kernel, compaction_kernel, keyed_noise
    from vllm_medusa.attention import triton_tree
    from vllm_medusa.tree import MAX_ROWS

    driver.set_active(triton.backends.backends.pop("cpu").driver())
    needs: defaultdict[str, list[int]] = defaultdict(list)

    class Compiler:
        """Stands in for a kernel."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compile(*args: Any, **options: Any) -> None:
                compiled = self.kernel.warmup(*args, grid=grid, **options)
                needs[self.kernel.__name__].append(compiled.metadata.shared)

            return compile

    for module, name in (
        (triton_tree, "_attention_kernel"),
        (triton_tree, "_merge_splits_kernel"),
        (acceptance_kernel, "_walk_kernel"),
        (compaction_kernel, "_move_kernel"),
        (keyed_noise, "_uniform_kernel"),
    ):
        setattr(module, name, Compiler(getattr(module, name)))

    def int32(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def int64(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    nodes = MAX_ROWS - 1
    paths = acceptance_kernel.walk_drawn_tokens(
        int64(nodes + 1), int32(nodes + 1), int32(2), int64(1), int64(1, nodes), num_steps=9
    )
    for dtype, head_size, rows in SHAPES:
        query = torch.zeros((rows, 8, head_size), dtype=getattr(torch, dtype))
        kv_cache = torch.zeros((2, 2, 16, 2 * head_size), dtype=query.dtype)
        batch = triton_tree.TreeBatch(
            query_start_loc=int32(2),
            seq_lens=int32(1),
            block_table=int32(1, 16),
            tree_index=int32(1),
            ancestors=int64(1, 128, 2),
            max_rows=rows,
            max_seq_len=256,
        )
        lse = torch.zeros((8, rows))
        triton_tree.tree_attention(query, kv_cache, query, batch, 1.0, lse=lse, num_splits=2)
        compaction_kernel.SlotMover([kv_cache]).move(paths, int64(rows), int64(1))
    keyed_noise.keyed_uniform(int64(3), int32(3), stream=1, count=128)
    print(json.dumps(needs))


if __name__ == "__main__":
    main(int(sys.argv[1]))
