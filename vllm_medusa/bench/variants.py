"""The ways to run the target that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_medusa.bench.calibration import Calibration
from vllm_medusa.tree import read_tree, stored_num_nodes

# vLLM's own prompt lookup, with the lengths that are usual for it.
NGRAM_NAME = "ngram"
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


@dataclass(frozen=True)
class Variant:
    """A way to run the target.

    Attributes:
        name: as it stands in the tables.
        speculative_config: vLLM's option of that name; None for no speculation.
        nodes: of a step's tree, for a comparison with the calibrated cost; None for none.
        calibrated: the tree and its size are those that serving picks up by itself.
    """

    name: str
    speculative_config: dict[str, Any] | None
    nodes: int | None = None
    calibrated: bool = False


PLAIN = Variant("plain vLLM", None, nodes=0)


def chain_variant(heads: Path, length: int) -> Variant:
    """The best guess of each head, one below the other, and nothing else."""
    options = {"tree": "chain", "num_speculative_tokens": length, "lookup": False}
    return Variant(f"chain of {length}", medusa(heads) | options, length)


def tree_variant(heads: Path, calibration: Calibration, nodes: int | None = None) -> Variant:
    """The tree as serving picks it up by itself, or its first nodes if their number is given."""
    if nodes:
        return Variant(f"tree of {nodes}", medusa(heads) | {"num_speculative_tokens": nodes}, nodes)
    if calibration.schedule:
        name = "calibrated tree"
    else:
        name = f"tree of {calibration.nodes}" if calibration.nodes else "tree"
    return Variant(name, medusa(heads), calibration.nodes, calibrated=True)


def heads_only(variant: Variant) -> Variant:
    """The same without drafts from the request's own text."""
    options = (variant.speculative_config or {}) | {"lookup": False}
    return replace(variant, name=f"{variant.name}, heads only", speculative_config=options)


def is_heads_only(variant: Variant) -> bool:
    """The calibrated tree without anything else."""
    options = variant.speculative_config or {}
    return variant.calibrated and options.get("lookup") is False


def file_variants(heads: Path, trees: Sequence[Path]) -> list[Variant]:
    """Trees from JSON files.

    Raises:
        TreeError: a file cannot be used.
    """
    variants = []
    for file in trees:
        tree = read_tree(file, num_heads=0)
        nodes = stored_num_nodes(file) or len(tree)
        # The tree itself rather than its file, which may change during the measurement.
        options = {"tree": [list(path) for path in tree.prefix(nodes).paths]}
        variants.append(Variant(f"{file.stem} of {nodes}", medusa(heads) | options, nodes))
    return variants


def medusa(heads: Path) -> dict[str, Any]:
    """The options that ask for Medusa."""
    return {"method": "medusa", "model": str(heads)}
