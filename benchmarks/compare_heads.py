"""Kinds of heads side by side, on held-out text: what they get right, and tokens per step.

Training stores the rank of every held-out token beside the heads it makes; trees of several sizes
are grown for each and walked through them, as `vllm-medusa calibrate` does it. Nothing is timed.

    python benchmarks/compare_heads.py NAME=HEADS NAME=HEADS --output FOLDER
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from vllm_medusa.bench.report import markdown_table
from vllm_medusa.calibration.growth import accuracies, grow_tree, head_counts, rank_counts
from vllm_medusa.calibration.ranks_file import NUM_RANKS, read_ranks
from vllm_medusa.calibration.replay import tokens_per_step
from vllm_medusa.heads.checkpoint import inspect_heads

SIZES = (1, 3, 7, 15, 31, 63)


def table(heads: Mapping[str, Path]) -> str:
    """The comparison, in Markdown.

    Args:
        heads: folders by the name that they have in the table.
    """
    most = max(inspect_heads(folder).num_heads for folder in heads.values())
    columns = [
        "heads",
        "parameters",
        *(f"head {head}" for head in range(1, most + 1)),
        *(f"{size} nodes" for size in SIZES),
    ]
    rows = []
    for name, folder in heads.items():
        info, paths = inspect_heads(folder), read_ranks(folder)
        counts = rank_counts(paths)
        right = accuracies(head_counts(counts, info.num_heads))
        tree = grow_tree(counts, info.num_heads, max(SIZES), NUM_RANKS)
        rates = tokens_per_step(paths, tree)
        rows.append(
            [
                name,
                f"{info.num_parameters / 1e6:.1f} million",
                *(f"{ranks[0]:.2f}" for ranks in right),
                *[""] * (most - len(right)),
                *(f"{rates[size]:.2f}" for size in SIZES),
            ]
        )
    return "\n".join(markdown_table(columns, rows))


def page(heads: Mapping[str, Path]) -> str:
    """The page, in Markdown."""
    return f"""# Kinds of heads

Made by benchmarks/compare_heads.py from heads of the demo's target that were trained on the same
answers; those of as many blocks with the same recipe, those of more blocks further from them. On
answers that were held out. "Head 1" and so on: how often its best guess is right where the path to
it is. "3 nodes" and so on: tokens per step, counted by walking a tree of so many nodes through the
held-out answers.

{table(heads)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", metavar="NAME=HEADS", help="a name, and a folder")
    parser.add_argument("--output", type=Path, help="folder for head-kinds.md; default: print it")
    args = parser.parse_args()
    text = page({name: Path(folder) for name, folder in (one.split("=", 1) for one in args.heads)})
    if args.output is None:
        print(text, end="")
    else:
        (args.output / "head-kinds.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
