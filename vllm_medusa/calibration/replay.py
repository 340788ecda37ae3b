"""Tokens per step of a tree on held-out text, counted rather than estimated.

The walk that a greedy request takes through each answer is repeated on its rank paths. A product of
accuracies overstates it by some per cent: the walk goes on behind a miss, at the harder places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_medusa.calibration.ranks_file import MISS
from vllm_medusa.tree import TokenTree


def tokens_per_step(paths: Sequence[NDArray[np.uint8]], tree: TokenTree) -> list[float]:
    """Tokens per step with the first n nodes of a tree, for n = 0 to all of them.

    Args:
        paths: rank paths (``ranks_file``).
        tree: the tree; nested, so that its prefixes are trees.

    The last step of an answer gives what is left of it, which may be less than it accepted.
    """
    nodes = _nodes_on_path(np.concatenate(paths), tree)
    lengths = np.array([len(path) for path in paths])
    ends = np.repeat(np.cumsum(lengths), lengths)
    positions = np.arange(len(ends))
    rates = []
    for size in range(len(tree) + 1):
        accepted = (nodes < size).sum(axis=1)
        following = np.minimum(positions + accepted + 1, ends).tolist()
        position = steps = 0
        while position < len(following):
            position = following[position]
            steps += 1
        rates.append(len(following) / steps)
    return rates


def _nodes_on_path(ranks: NDArray[np.uint8], tree: TokenTree) -> NDArray[np.int64]:
    """int64 [positions, K]: the tree's node at each depth of a rank path, ``len(tree)`` where the
    path has left the tree. A node's ancestors stand before it, so a row never falls."""
    outside = len(tree)
    # Row 0 is the root, row i + 1 node i, and the last row what lies outside: no way leads back.
    child = np.full((outside + 2, MISS + 1), outside, dtype=np.int64)
    rows = zip(tree.parent_rows().tolist(), tree.ranks().tolist(), strict=True)
    for node, (parent, rank) in enumerate(rows):
        child[parent, rank] = node
    nodes = np.empty(ranks.shape, dtype=np.int64)
    row = np.zeros(len(ranks), dtype=np.int64)
    for depth in range(ranks.shape[1]):
        nodes[:, depth] = child[row, ranks[:, depth]]
        row = nodes[:, depth] + 1
    return nodes
