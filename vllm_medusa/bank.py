"""Trees as tensors, one row of the bank a tree.

The topology is a property of each request's rows (``tree_index``), so that one batch may mix trees.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_medusa.tree import MAX_NODES, MAX_ROWS, TokenTree


class TreeBank:
    """A few trees, padded to the same size, as tensors on one device.

    Attributes:
        parents: int64 [trees, MAX_NODES], row of each node's parent; -1 behind a tree's end.
        children: int64 [trees, MAX_ROWS, children], each row's nodes, in the order of the tree; -1
            behind the last.
        depth_offset: int64 [trees, MAX_ROWS], depth of a row minus its index: what turns the linear
            positions that vLLM computes into depth positions.
        ancestors: int64 [trees, MAX_ROWS, 2], 128-bit masks: bit j of row i is set if i sees j.
    """

    def __init__(self, trees: Sequence[TokenTree], device: torch.device | str = "cpu") -> None:
        parents = np.full((len(trees), MAX_NODES), -1, dtype=np.int64)
        depth_offset = np.zeros((len(trees), MAX_ROWS), dtype=np.int64)
        siblings = [tree.with_siblings_numbered().ranks() for tree in trees]
        most = 1 + max(int(ranks.max()) for ranks in siblings)
        children = np.full((len(trees), MAX_ROWS, most), -1, dtype=np.int64)
        bits = np.zeros((len(trees), MAX_ROWS, MAX_ROWS), dtype=bool)
        bits[:, :, 0] = True  # rows behind a tree's end never run; they see the root only
        for index, tree in enumerate(trees):
            rows = len(tree) + 1
            parents[index, : rows - 1] = tree.parent_rows()
            children[index, tree.parent_rows(), siblings[index]] = np.arange(rows - 1)
            depth_offset[index, :rows] = tree.row_depths() - np.arange(rows)
            bits[index, :rows, :rows] = tree.ancestor_mask()
        packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int64)
        self.parents = torch.from_numpy(parents).to(device)
        self.children = torch.from_numpy(children).to(device)
        self.depth_offset = torch.from_numpy(depth_offset).to(device)
        self.ancestors = torch.from_numpy(packed).to(device)
