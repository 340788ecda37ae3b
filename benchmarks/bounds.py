"""What bounds the gain: from the accuracies and the costs that `vllm-medusa calibrate` measured.

    make bounds      # or: python benchmarks/bounds.py HEADS --output FOLDER

Nothing is measured here: the same heads always give the same page.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from vllm_medusa.bench.calibration import Calibration, parse_calibration
from vllm_medusa.tree import MAX_NODES, TREE_FILE, TokenTree

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 31, 63)
# What was aimed at when the heads of the demo were trained: tokens per step by nodes, and how many
# times faster at batch size 1.
GOAL_TOKENS = {3: 1.75, 63: 2.5}
GOAL_SPEED = 1.45


HEADER = """# What bounds the gain

Made by `make bounds` (benchmarks/bounds.py) from what `vllm-medusa calibrate` stored beside the
shipped heads: accuracies on the target's own answers, held out from training, and the cost of a
step on {cpu}, {cores} cores, float32, batch size 1. The heads draft alone here; serving adds drafts
from the request's own text.
"""
BETWEEN = """
The cost is relative to a step without speculation, drafting included. "At most" is tokens per step
/ cost: no engine, however fast, gets more out of these heads on this machine.

## Better heads

What the heads would have to be for more tokens per step: how often each head's best guess is right,
if all ranks of all heads gained alike.
"""


def expected_tokens(accuracies: Sequence[Sequence[float]], nodes: int) -> float:
    """Tokens per step of the best tree, if ranks along a path were independent."""
    tree = TokenTree.grow(accuracies, nodes)
    return 1 + sum(
        math.prod(accuracies[depth][rank] for depth, rank in enumerate(path)) for path in tree.paths
    )


def better(accuracies: Sequence[Sequence[float]], share: float) -> list[list[float]]:
    """Heads that get right a share (0 to 1) of what all their ranks miss; ranks gain alike."""
    return [
        [rank * (1 + share * (1 - sum(ranks)) / sum(ranks)) for rank in ranks]
        for ranks in accuracies
    ]


def needed_accuracies(
    accuracies: Sequence[Sequence[float]], measured: float, goal: float, nodes: int
) -> list[list[float]]:
    """The least better heads that give ``goal`` tokens per step where these gave ``measured``."""
    dependence = measured / expected_tokens(accuracies, nodes)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        enough = dependence * expected_tokens(better(accuracies, middle), nodes) >= goal
        low, high = (low, middle) if enough else (middle, high)
    return better(accuracies, high)


def page(calibration: Calibration, machine: dict[str, str]) -> str:
    """The page, in Markdown."""
    rows = []
    for nodes in SIZES:
        tokens, cost = calibration.tokens_per_step(nodes), calibration.cost(nodes, batch_size=1)
        if tokens is not None:
            bound = "" if cost is None else f"{tokens / cost:.2f}"
            needed = "" if cost is None else f"{GOAL_SPEED * cost:.2f}"
            shown_cost = "not measured" if cost is None else f"{cost:.2f}"
            rows.append(f"| {nodes} | {tokens:.2f} | {shown_cost} | {bound} | {needed} |")
    heads = [f"head {head}" for head in range(1, len(calibration.accuracies) + 1)]
    lines = [
        HEADER.format(**machine),
        f"| nodes | tokens per step | cost of a step | at most | needed for {GOAL_SPEED} |",
        "|---|---|---|---|---|",
        *rows,
        BETWEEN,
        f"| nodes | tokens per step | goal | {' | '.join(heads)} |",
        "|---" * (3 + len(heads)) + "|",
    ]
    for nodes, goal in GOAL_TOKENS.items():
        measured = calibration.tokens_per_step(nodes)
        assert measured is not None and nodes <= MAX_NODES
        needed = needed_accuracies(calibration.accuracies, measured, goal, nodes)
        now = " | ".join(f"{ranks[0]:.2f}" for ranks in calibration.accuracies)
        then = " | ".join(f"{ranks[0]:.2f}" for ranks in needed)
        lines += [f"| {nodes} | {measured:.2f} | now | {now} |", f"| {nodes} | | {goal} | {then} |"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", type=Path, help="a folder with a calibrated tree")
    parser.add_argument("--output", type=Path, help="folder for bounds.md; default: print it")
    args = parser.parse_args()
    stored = json.loads((args.heads / TREE_FILE).read_text())
    text = page(parse_calibration(stored), stored["machine"])
    if args.output is None:
        print(text, end="")
    else:
        (args.output / "bounds.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
