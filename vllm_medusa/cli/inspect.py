"""``vllm-medusa inspect HEADS``: what a checkpoint of heads holds, and what is odd about it."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_medusa.cli.errors import print_error
from vllm_medusa.heads.checkpoint import HeadsError, HeadsInfo, inspect_heads, non_finite_tensors
from vllm_medusa.tree import TREE_FILE, TreeError, read_tree

PATHS_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", metavar="HEADS", help="a folder, or a hub id[@REVISION]")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 where the heads can be used, else 1."""
    try:
        info = inspect_heads(args.heads, args.revision)
        errors = non_finite_tensors(args.heads, args.revision)
    except HeadsError as error:
        print_error("inspect", error)
        return 1
    tree, tree_errors = _tree(info)
    report = _report(info, tree, errors + tree_errors)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 1 if report["errors"] else 0


def _tree(info: HeadsInfo) -> tuple[dict[str, Any] | None, list[str]]:
    """The tree stored beside the heads, and what is wrong with it."""
    file = info.path / TREE_FILE
    if not file.is_file():
        return None, []
    try:
        tree = read_tree(file, info.num_heads)
        # The target's vocabulary is not known here; without a smaller one any rank may do.
        num_tokens = info.draft_vocab_size or info.vocab_size or sys.maxsize
        tree.check_fits(info.num_heads, num_tokens, "the checkpoint")
    except TreeError as error:
        return None, [f"{TREE_FILE}: {error}"]
    paths = [list(path) for path in tree.paths]
    return {"nodes": len(tree), "depth": tree.depth, "paths": paths}, []


def _report(info: HeadsInfo, tree: dict[str, Any] | None, errors: list[str]) -> dict[str, Any]:
    report = dataclasses.asdict(info)
    report["path"] = str(info.path)
    report["dtype"] = str(info.dtype).removeprefix("torch.")
    report["shapes"] = _shapes(info)
    report["tree"] = tree
    report["errors"] = errors
    return report


def _shapes(info: HeadsInfo) -> dict[str, list[int]]:
    """Shapes of the stacked weights, as ``load_heads`` returns them."""
    hidden = info.hidden_size
    shapes = {"block_weight": [info.num_heads, info.num_layers, hidden, hidden]}
    if info.has_bias:
        shapes["block_bias"] = [info.num_heads, info.num_layers, hidden]
    if info.is_sequential:
        shapes["path_weight of the last head"] = [hidden, info.num_heads * hidden]
    num_tokens = info.draft_vocab_size or info.vocab_size
    if info.own_lm_heads and num_tokens is not None:
        num_stored = 1 if info.shared_lm_head else info.num_heads
        shapes["lm_head"] = [num_stored, num_tokens, hidden]
    if info.draft_vocab_size is not None:
        shapes["token_map"] = [info.draft_vocab_size]
    return shapes


def _print_table(report: dict[str, Any]) -> None:
    if not report["own_lm_heads"]:
        lm_head = "the target's"
    elif report["shared_lm_head"]:
        lm_head = f"one of their own for all heads, {report['vocab_size']} tokens"
    else:
        lm_head = f"one of their own per head, {report['vocab_size']} tokens"
    tree = report["tree"]
    if tree is None:
        shown_tree = f"none (no usable {TREE_FILE})"
    else:
        paths = ", ".join(str(path) for path in tree["paths"][:PATHS_SHOWN])
        more = ", ..." if tree["nodes"] > PATHS_SHOWN else ""
        shown_tree = f"{tree['nodes']} nodes, depth {tree['depth']}: {paths}{more}"
    rows = [
        ("heads", report["source"]),
        ("folder", report["path"]),
        ("files", ", ".join(report["files"])),
        ("format", report["format"]),
        ("made for", report["base_model"] or "not said"),
        ("number of heads", report["num_heads"]),
        ("head type", "sequential" if report["is_sequential"] else "plain"),
        ("layers per head", report["num_layers"]),
        ("hidden size", report["hidden_size"]),
        ("bias", "yes" if report["has_bias"] else "no"),
        ("LM head", lm_head),
        ("draft vocabulary", report["draft_vocab_size"] or "the whole vocabulary"),
        ("logit scale", report["logit_scale"]),
        ("type", report["dtype"]),
        ("parameters", f"{report['num_parameters']:,}"),
        *((f"shape of {name}", shape) for name, shape in report["shapes"].items()),
        ("tree", shown_tree),
        *(("warning", warning) for warning in report["warnings"]),
        *(("ERROR", error) for error in report["errors"]),
    ]
    table = Table(show_header=False)
    for name, value in rows:
        # Text: in a str, rich takes [bold] for markup, and paths may hold that.
        table.add_row(Text(name), Text(str(value)))
    Console().print(table)
