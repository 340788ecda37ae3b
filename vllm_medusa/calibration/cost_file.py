"""What is measured already, kept so that a killed calibration goes on where it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_medusa.calibration.cost import BatchCost, StepCost
from vllm_medusa.whole_file import write_whole

COSTS_FILE = "costs.json"


def save_costs(
    folder: Path, settings: dict[str, Any], engine: dict[str, Any], costs: Sequence[BatchCost]
) -> None:
    """Write all that is measured so far, whole or not at all.

    Args:
        folder: the work folder.
        settings: all that the costs depend on.
        engine: what the engine said it is.
        costs: one per batch size.
    """
    content = {"settings": settings, "engine": engine, "costs": [asdict(cost) for cost in costs]}
    write_whole(folder / COSTS_FILE, json.dumps(content, indent=1))


def read_costs(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], list[BatchCost]]:
    """What the engine is and the costs measured with these very settings; both empty if none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / COSTS_FILE).read_text())
        if content["settings"] == json.loads(json.dumps(settings)):
            costs = [
                BatchCost(
                    cost["batch_size"],
                    [StepCost(**size) for size in cost["sizes"]],
                    cost["others"],
                )
                for cost in content["costs"]
            ]
            return content["engine"], costs
    return {}, []
