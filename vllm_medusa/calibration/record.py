"""The outcome of a calibration as the file that serving reads, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from vllm_medusa.bench.rounds import DISTURBED
from vllm_medusa.calibration.cost import BatchCost
from vllm_medusa.calibration.schedule import choose_sizes, gains, to_schedule
from vllm_medusa.stored_tree import SCHEDULE
from vllm_medusa.tree import TokenTree


@dataclass(frozen=True)
class Calibration:
    """All that was measured and chosen.

    Attributes:
        tree: the whole tree.
        accuracies: [K][10], conditional on the path being right.
        tokens: tokens per step by number of nodes, from 0 on.
        num_answers, num_positions: how much text they were counted on.
        costs: cost curves, by rising batch size.
        about: machine, versions and settings, as they go into the file.
        min_gain: a tree must promise as much.
    """

    tree: TokenTree
    accuracies: list[list[float]]
    tokens: list[float]
    num_answers: int
    num_positions: int
    costs: Sequence[BatchCost]
    about: dict[str, Any]
    min_gain: float

    def sizes(self) -> dict[int, int]:
        """Batch size -> number of nodes."""
        costs = {cost.batch_size: cost.seconds() for cost in self.costs}
        return choose_sizes(self.tokens, costs, self.min_gain)

    def schedule(self) -> list[list[int]]:
        """vLLM's ``num_speculative_tokens_per_batch_size``."""
        return to_schedule(self.sizes())

    def disturbed(self) -> list[int]:
        """Batch sizes at which other processes were busy."""
        return [cost.batch_size for cost in self.costs if cost.others > DISTURBED]


def to_json(result: Calibration) -> str:
    """``medusa_tree.json``."""
    sizes = result.sizes()
    content = {
        "about": "Tree and sizes chosen by vllm-medusa calibrate. num_speculative_tokens is for "
        "batch size 1. accuracies: chance that rank r of head k is right given that the path to "
        "it is. tokens_per_step: by number of nodes, from 0 on. costs: batch size, nodes, median "
        "seconds of a decoding step.",
        "num_speculative_tokens": sizes[min(sizes)],
        SCHEDULE: result.schedule(),
        **result.about,
        "min_gain": result.min_gain,
        "answers": result.num_answers,
        "positions": result.num_positions,
        "accuracies": [[round(share, 4) for share in row] for row in result.accuracies],
        "tokens_per_step": [round(rate, 4) for rate in result.tokens],
        "costs": {
            str(cost.batch_size): {
                str(nodes): round(seconds, 7) for nodes, seconds in cost.seconds().items()
            }
            for cost in result.costs
        },
        "parts_of_a_step": [
            {
                "batch_size": cost.batch_size,
                "nodes": size.nodes,
                "forward_ms": round(1e3 * size.forward, 4),
                "drafting_ms": round(1e3 * size.drafting, 4),
                "steps": size.steps,
            }
            for cost in result.costs
            for size in cost.sizes
        ],
        "cores_kept_busy_by_others": {
            str(cost.batch_size): round(cost.others, 3) for cost in result.costs
        },
        "paths": [list(path) for path in result.tree.paths],
    }
    entries = (f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON with one line per entry of nested lists and objects, so that a change can be read."""
    if isinstance(value, dict) and any(isinstance(entry, dict) for entry in value.values()):
        entries = (f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
        return "{\n  " + ",\n  ".join(entries) + "\n }"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


def to_table(result: Calibration) -> Table:
    """What each number of nodes is expected to give at each batch size; the chosen ones marked."""
    table = Table("batch size", "nodes", "tokens per step", "step ms", "cost", "predicted gain", "")
    for column in table.columns[:-1]:
        column.justify = "right"
    sizes = result.sizes()
    for cost in result.costs:
        seconds = cost.seconds()
        gain = gains(result.tokens, seconds)
        chosen = sizes[cost.batch_size]
        for nodes in sorted({*seconds, chosen}):
            # A chosen size may lie between measured ones; its cost lies between theirs.
            relative = result.tokens[nodes] / gain[nodes]
            table.add_row(
                str(cost.batch_size),
                str(nodes),
                f"{result.tokens[nodes]:.3f}",
                f"{1e3 * seconds[nodes]:.2f}" if nodes in seconds else "",
                f"{relative:.3f}",
                f"{gain[nodes]:.3f}",
                "chosen" if nodes == chosen else "",
            )
        table.add_section()
    return table
