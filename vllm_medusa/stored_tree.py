"""The file ``medusa_tree.json`` beside the heads: a tree, and how much of it to use.

Written by hand it may be a list of rank paths, or an object with the key ``paths`` and perhaps
``num_speculative_tokens``. ``vllm-medusa calibrate`` adds vLLM's schedule by batch size
(``num_speculative_tokens_per_batch_size``), and on which ``machine`` and ``versions`` it was made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_medusa.tree import TokenTree, TreeError, read_tree, stored_num_nodes

SCHEDULE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class StoredTree:
    """What the file says.

    Attributes:
        tree: all its nodes.
        num_nodes: how many to use where no schedule is; None: all.
        schedule: [first batch size, last, nodes], no more nodes than the tree has; None: the same
            at every batch size.
        machine, versions: what it was made on; empty where the file does not say.
    """

    tree: TokenTree
    num_nodes: int | None
    schedule: list[list[int]] | None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def most_nodes(self) -> int:
        """Nodes at the batch size with the largest tree."""
        if self.schedule is not None:
            return max(nodes for _, _, nodes in self.schedule)
        return len(self.tree) if self.num_nodes is None else self.num_nodes


def read_stored_tree(file: Path, num_heads: int) -> StoredTree:
    """Read the file.

    Raises:
        TreeError: naming the file and the key that is wrong.
    """
    tree = read_tree(file, num_heads)
    num_nodes = stored_num_nodes(file)
    if num_nodes is not None and num_nodes > len(tree):
        raise TreeError(
            f"tree file {file}: num_speculative_tokens is {num_nodes}, but paths holds {len(tree)}"
        )
    data = json.loads(file.read_text())
    if not isinstance(data, dict):
        return StoredTree(tree, num_nodes, None)
    schedule = _read_schedule(data.get(SCHEDULE), len(tree), file)
    if schedule is None and num_nodes == 0:
        schedule = [[1, 1, 0]]
    for key in ("machine", "versions"):
        if not isinstance(data.get(key, {}), dict):
            raise TreeError(f"tree file {file}: {key} is {data[key]!r}, expected an object")
    return StoredTree(tree, num_nodes, schedule, data.get("machine", {}), data.get("versions", {}))


def _read_schedule(value: Any, num_nodes: int, file: Path) -> list[list[int]] | None:
    """The schedule, with no more nodes than there are."""
    if value is None:
        return None
    try:
        schedule = validate_and_normalize_dynamic_sd_schedule(value)
    except (TypeError, ValueError) as error:
        raise TreeError(f"tree file {file}: {SCHEDULE} is {value!r}: {error}") from error
    return [[first, last, min(nodes, num_nodes)] for first, last, nodes in schedule]
