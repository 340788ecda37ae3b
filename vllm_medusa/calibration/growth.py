"""From rank paths to accuracies, and to the tree that is best for them at every size.

A node's value is the chance that the true tokens run through it. Its estimate is a count, not a
product of the heads' accuracies: ranks along a path are not independent (where head 1 is sure of
itself, head 2 tends to be right too). Where few positions reach a node, the accuracies of its head
fill in, so that the value never becomes a matter of two or three positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_medusa.calibration.ranks_file import MISS, NUM_RANKS
from vllm_medusa.tree import TokenTree

# The accuracies of a head count as much as so many positions at a node.
PRIOR_POSITIONS = 30
# Jeffreys' prior for the share of each rank, so that an unseen one is rare but not impossible.
JEFFREYS = 0.5

Prefix = tuple[int, ...]
Counts = dict[Prefix, NDArray[np.int64]]


def rank_counts(paths: Sequence[NDArray[np.uint8]]) -> Counts:
    """How the true tokens went on from every path.

    Returns:
        Rank path (one that occurred, the root's is empty) -> int64 [11]: how often each rank came
        next, and last how often none of them did. Positions where the answer ended are not counted.
    """
    counts: Counts = {}
    for path in paths:
        length, num_heads = path.shape
        for depth in range(num_heads):
            # Rows that have a true token at this depth, and whose path to it is right.
            rows = path[: max(length - depth, 0)]
            rows = rows[(rows[:, :depth] != MISS).all(axis=1)]
            found, number = np.unique(rows[:, : depth + 1], axis=0, return_counts=True)
            for prefix, times in zip(found.tolist(), number.tolist(), strict=True):
                here = counts.setdefault(
                    tuple(prefix[:-1]), np.zeros(NUM_RANKS + 1, dtype=np.int64)
                )
                here[min(prefix[-1], NUM_RANKS)] += times
    return counts


def head_counts(counts: Counts, num_heads: int) -> NDArray[np.int64]:
    """int64 [K, 11]: how often each rank of each head was right where the path to it was, and how
    often none was."""
    total = np.zeros((num_heads, NUM_RANKS + 1), dtype=np.int64)
    for prefix, number in counts.items():
        total[len(prefix)] += number
    return total


def accuracies(by_head: NDArray[np.int64]) -> list[list[float]]:
    """[K][10], the chance that a rank is right given that the path to it is; 0 where no path is."""
    return [[float(hits) / max(int(row.sum()), 1) for hits in row[:NUM_RANKS]] for row in by_head]


def grow_tree(counts: Counts, num_heads: int, num_nodes: int, num_ranks: int) -> TokenTree:
    """Best-first growth: always add the node that the true tokens most often run through.

    Args:
        counts: of ``rank_counts``.
        num_heads: K, the largest depth.
        num_nodes: how many nodes; fewer come back where heads and ranks allow no more.
        num_ranks: use the first so many ranks only (at most 10): a small draft vocabulary holds no
            more.

    Every prefix of the result is the best tree of its size. Ties go to the shallower node, then to
    the lower ranks.
    """
    by_head = head_counts(counts, num_heads)
    usual = (by_head + JEFFREYS) / (by_head + JEFFREYS).sum(axis=1, keepdims=True)
    nothing = np.zeros(NUM_RANKS + 1, dtype=np.int64)

    def chances(path: Prefix) -> Sequence[float]:
        depth = len(path)
        if depth == num_heads:
            return []
        here = counts.get(path, nothing)
        chance = (here + PRIOR_POSITIONS * usual[depth]) / (here.sum() + PRIOR_POSITIONS)
        return chance[: min(num_ranks, NUM_RANKS)].tolist()

    return TokenTree.grow_by(chances, num_nodes)
