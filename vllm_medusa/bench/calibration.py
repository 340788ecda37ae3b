"""What `vllm-medusa calibrate` stored beside the heads, as far as the benchmark compares with it.

Every part is optional: heads may come with a tree alone, or with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_medusa.calibration.schedule import relative_cost
from vllm_medusa.tree import TREE_FILE


@dataclass(frozen=True)
class Calibration:
    """The choice, and what it was made from.

    Attributes:
        nodes: of the tree at batch size 1, None if the file does not say.
        schedule: nodes by batch size, as [first, last, nodes]; the last entry goes on.
        accuracies: entry [k][r] is the chance that rank r of head k + 1 is right.
        tokens: tokens per step by number of nodes, from 0 on.
        costs: batch size -> nodes -> seconds of a step, drafting included.
    """

    nodes: int | None = None
    schedule: Sequence[Sequence[int]] = ()
    accuracies: Sequence[Sequence[float]] = ()
    tokens: Sequence[float] = ()
    costs: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    def nodes_at(self, batch_size: int) -> int | None:
        """How many nodes serving verifies at a batch size; None if the file does not say."""
        for first, _, nodes in reversed(self.schedule):
            if batch_size >= first:
                return nodes
        return self.nodes

    def cost(self, nodes: int, batch_size: int) -> float | None:
        """A step's cost relative to one without speculation; None where it was not measured.

        The cost that ``vllm-medusa calibrate`` chose by: ``relative_cost``. Between two measured
        batch sizes, the larger one.
        """
        sizes = [size for size in self.costs if size >= batch_size]
        costs = self.costs[min(sizes)] if sizes else {}
        if not costs or nodes > max(costs):
            return None
        return relative_cost(costs, [nodes])[0]

    def tokens_per_step(self, nodes: int) -> float | None:
        """Of the tree's first nodes on held-out text; None where it is not stored."""
        return self.tokens[nodes] if nodes < len(self.tokens) else None

    def best_chain(self) -> int:
        """The length of the chain that promises most at batch size 1; 1 if that is not known."""
        best, best_gain = 1, 0.0
        tokens = value = 1.0
        for length, ranks in enumerate(self.accuracies, start=1):
            value *= ranks[0]
            tokens += value
            cost = self.cost(length, batch_size=1)
            if cost is not None and tokens / cost > best_gain:
                best, best_gain = length, tokens / cost
        return best


def read_calibration(heads: Path) -> Calibration:
    """The calibration in the folder of the heads; an empty one where there is none."""
    file = heads / TREE_FILE
    stored = json.loads(file.read_text()) if file.is_file() else {}
    return parse_calibration(stored) if isinstance(stored, dict) else Calibration()


def parse_calibration(stored: Mapping[str, Any]) -> Calibration:
    """The calibration in the JSON object of a tree file."""
    costs = {
        int(batch_size): {int(nodes): seconds for nodes, seconds in by_nodes.items()}
        for batch_size, by_nodes in (stored.get("costs") or {}).items()
    }
    return Calibration(
        nodes=stored.get("num_speculative_tokens"),
        schedule=stored.get("num_speculative_tokens_per_batch_size") or (),
        accuracies=stored.get("accuracies") or (),
        tokens=stored.get("tokens_per_step") or (),
        costs=costs,
    )
