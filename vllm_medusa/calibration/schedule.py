"""From tokens per step and the cost of a step to the number of nodes at every batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# A tree is taken only if it promises so much more than none: speculation must never make a loaded
# server slower, and a server does more than decode. Through servers with 16 clients a promise of
# 1.07 came out as 0.95 to 1.01 (docs/load.md before it was raised from 1.03).
MIN_GAIN = 1.08

# Nodes -> seconds of a step, at one batch size; 0 nodes are always among them.
Costs = Mapping[int, float]


def rising(costs: Costs) -> dict[int, float]:
    """The costs with none above a larger tree's, by number of nodes, rising.

    More nodes cannot make a step cheaper. Where it was measured so, the smaller tree's time was
    disturbed, and the larger one's counts for both: above all, a slow moment without speculation
    must not make trees look good.
    """
    measured = sorted(costs)
    seconds = np.minimum.accumulate([costs[size] for size in reversed(measured)])[::-1]
    return dict(zip(measured, seconds.tolist(), strict=True))


def relative_cost(costs: Costs, sizes: Sequence[int]) -> list[float]:
    """A step's cost relative to one without speculation, by number of nodes.

    Args:
        costs: measured; between two measured numbers of nodes the line between them counts.
        sizes: numbers of nodes, none above the largest measured.
    """
    counted = rising(costs)
    seconds = np.interp(sizes, list(counted), list(counted.values()))
    return (seconds / counted[0]).tolist()


def gains(tokens: Sequence[float], costs: Costs) -> list[float]:
    """Predicted speed-up over no speculation by number of nodes, from 0 to the largest measured.

    Args:
        tokens: tokens per step, by number of nodes.
        costs: measured; see ``relative_cost``.
    """
    sizes = range(min(max(costs), len(tokens) - 1) + 1)
    relative = relative_cost(costs, sizes)
    return [tokens[size] / cost for size, cost in zip(sizes, relative, strict=True)]


def choose_sizes(
    tokens: Sequence[float], costs: Mapping[int, Costs], min_gain: float = MIN_GAIN
) -> dict[int, int]:
    """The number of nodes that promises most, for every measured batch size.

    Never more than at a smaller batch size; 0 where none promises ``min_gain``.
    """
    chosen: dict[int, int] = {}
    most = len(tokens) - 1
    for batch_size in sorted(costs):
        gain = gains(tokens, costs[batch_size])[: most + 1]
        best = max(range(len(gain)), key=lambda size: gain[size])
        most = chosen[batch_size] = best if gain[best] >= min_gain else 0
    return chosen


def to_schedule(sizes: Mapping[int, int]) -> list[list[int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: [first, last, nodes], neighbours merged.

    A batch size between two measured ones takes the nodes of the larger one, which never are too
    many. vLLM goes on with the last entry above the last batch size, so nodes there end in a 0.
    """
    schedule: list[list[int]] = []
    first = 1
    for last, nodes in sorted(sizes.items()):
        if schedule and schedule[-1][2] == nodes:
            schedule[-1][1] = last
        else:
            schedule.append([first, last, nodes])
        first = last + 1
    if schedule[-1][2]:
        schedule.append([first, first, 0])
    return schedule
