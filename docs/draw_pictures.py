"""The pictures of how-it-works.md, drawn from the tree of the shipped heads.

make pictures      # or: python docs/draw_pictures.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_medusa.picture import COLOURS, picture
from vllm_medusa.tree import TREE_FILE, TokenTree

ROOT = Path(__file__).parents[1]
HEADS = ROOT / "heads" / "smollm2-135m-instruct"

# Nodes that can still be read in a picture.
TREE_NODES = 15
STEP_NODES = 7


def read(heads: Path) -> tuple[TokenTree, list[list[float]]]:
    """The heads' tree, and how often each rank of each head is right."""
    data = json.loads((heads / TREE_FILE).read_text())
    return TokenTree.from_paths(data["paths"]), data["accuracies"]


def chance(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    """The chance that all tokens of a path are right."""
    product = 1.0
    for head, rank in enumerate(path):
        product *= accuracies[head][rank]
    return product


def places(tree: TokenTree) -> dict[tuple[int, ...], tuple[float, float]]:
    """Where each path's node is drawn; the root is the empty path.

    Leaves stand side by side in order of rank, parents above the middle of their children.
    """
    paths = [(), *tree.paths]
    children = {path: sorted(each for each in tree.paths if each[:-1] == path) for path in paths}
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    next_leaf = 0.0

    def place(path: tuple[int, ...]) -> float:
        nonlocal next_leaf
        if children[path]:
            across = [place(child) for child in children[path]]
            x = (across[0] + across[-1]) / 2
        else:
            x, next_leaf = next_leaf, next_leaf + 1
        found[path] = (x, -float(len(path)))
        return x

    place(())
    return found


def draw_tree(panel: Any, tree: TokenTree, accuracies: list[list[float]]) -> None:
    """The tree: a node shows its row, the line to it the rank of its token, below it its chance."""
    where = places(tree)
    for path, (x, y) in where.items():
        if path:
            parent_x, parent_y = where[path[:-1]]
            panel.plot([parent_x, x], [parent_y, y], color="grey", linewidth=0.8, zorder=1)
            panel.text(
                (parent_x + 2 * x) / 3, (parent_y + 2 * y) / 3, str(path[-1]), fontsize=7,
                ha="center", va="center", color="grey",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
            percent = f"{100 * chance(path, accuracies):.0f}%"
            panel.text(
                x, y - 0.21, percent, fontsize=7, ha="center", va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        row = 0 if not path else tree.paths.index(path) + 1
        colour = COLOURS[len(path) % len(COLOURS)]
        panel.scatter([x], [y], s=230, color=colour, zorder=2)
        panel.text(x, y, str(row), fontsize=8, color="white", ha="center", va="center", zorder=3)
    panel.set(ylim=(-tree.depth - 0.6, 0.4), title=f"The first {len(tree)} nodes")
    panel.set_yticks([-depth for depth in range(tree.depth + 1)], range(tree.depth + 1))
    panel.set(ylabel="depth", xticks=[])
    panel.spines["bottom"].set_visible(False)


def draw_mask(panel: Any, tree: TokenTree) -> None:
    """What each row of the step sees of the others."""
    mask = tree.ancestor_mask()
    panel.imshow(mask, cmap="Blues", vmin=0, vmax=1.4)
    ticks = range(len(tree) + 1)
    panel.set_xticks(ticks, ticks, fontsize=7)
    panel.set_yticks(ticks, ticks, fontsize=7)
    panel.set(xlabel="sees row", ylabel="row", title="Each row sees its ancestors and itself")


def draw_step(panel: Any, tree: TokenTree, accepted: tuple[int, ...]) -> None:
    """The slots behind the context in a step: written, then compacted.

    Args:
        accepted: the path that was accepted.
    """
    kept = {accepted[:depth] for depth in range(len(accepted) + 1)}
    paths = [(), *tree.paths]
    for slot, path in enumerate(paths):
        colour = COLOURS[2] if path in kept else "lightgrey"
        name = f"node {slot}" if path else "root"
        box(panel, slot, 1, colour, name, f"position +{len(path)}")
    for depth in range(len(accepted) + 1):
        path = accepted[:depth]
        slot = paths.index(path)
        name = f"node {slot}" if path else "root"
        box(panel, depth, 0, COLOURS[2], name, f"position +{depth}")
        panel.annotate(
            "", xy=(depth, 0.3), xytext=(slot, 0.7),
            arrowprops={"arrowstyle": "->", "color": COLOURS[0] if slot != depth else "grey"},
        )  # fmt: skip
    for slot in range(len(accepted) + 1, len(paths)):
        box(panel, slot, 0, "white", "free", "")
    panel.set_xticks(range(len(paths)), [f"slot +{slot}" for slot in range(len(paths))], fontsize=8)
    panel.set_yticks([0, 1], ["after compaction", "written by the step"])
    panel.set(xlim=(-0.6, len(paths) - 0.4), ylim=(-0.4, 1.4))
    rows = [str(paths.index(accepted[:depth])) for depth in range(1, len(accepted) + 1)]
    panel.set_title(f"Slots behind the context; the nodes {', '.join(rows)} were accepted")


def box(panel: Any, x: float, y: float, colour: str, name: str, below: str) -> None:
    """A slot with what is in it."""
    text = f"{name}\n{below}" if below else name
    panel.text(
        x, y, text, fontsize=8, ha="center", va="center",
        bbox={"facecolor": colour, "edgecolor": "grey", "boxstyle": "square,pad=0.5"},
    )  # fmt: skip


def longest(tree: TokenTree) -> tuple[int, ...]:
    """An accepted path that has something to compact: the deepest whose nodes are not all first."""
    return max(
        (path for path in tree.paths if tree.paths.index(path) + 1 != len(path)),
        key=lambda path: (len(path), tree.paths.index(path)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=Path, default=HEADS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    tree, accuracies = read(args.heads)
    shown = tree.prefix(TREE_NODES)
    widths = {"width_ratios": [3, 2]}
    with picture(args.output / "tree.png", columns=2, figsize=(13, 5), gridspec_kw=widths) as axes:
        draw_tree(axes[0, 0], shown, accuracies)
        draw_mask(axes[0, 1], shown)
    shown = tree.prefix(STEP_NODES)
    with picture(args.output / "step.png", figsize=(11, 2.8)) as axes:
        draw_step(axes[0, 0], shown, longest(shown))


if __name__ == "__main__":
    main()
