"""`vllm-medusa demo`: serve a real model with Medusa, chat with it, and measure what it gains."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_medusa.paths import repository

HEADS = "heads/smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the sub-command."""
    parser.add_argument(
        "--heads",
        type=Path,
        default=(repository() or Path()) / HEADS,
        help=f"folder of Medusa heads for SmolLM2-135M-Instruct (default: {HEADS})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-results"),
        help="folder for the table, the numbers and the picture (default: demo-results)",
    )
    parser.add_argument(
        "--chain-nodes", type=int, default=1, help="length of the chain (default: 1, the best)"
    )
    parser.add_argument(
        "--tree-nodes", type=int, help="take the first nodes of the tree (default: all of them)"
    )
    parser.add_argument("--no-serve", action="store_true", help="measure only")
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="also count tokens per step for 1, 3, 7, 15 and 63 nodes (some minutes more)",
    )
    parser.add_argument(
        "--sizes-tree", type=Path, help="JSON file of the tree for --sizes (default: the heads')"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 with a message on failure."""
    from rich.console import Console

    from vllm_medusa.demo.run import run_demo

    console = Console()
    if not args.heads.is_dir():
        console.print(f"no heads at {args.heads}: give their folder with --heads", style="red")
        return 1
    try:
        run_demo(
            console,
            heads=args.heads.resolve(),
            output=args.output,
            chain_nodes=args.chain_nodes,
            tree_nodes=args.tree_nodes,
            serve=not args.no_serve,
            sizes=args.sizes,
            sizes_tree=args.sizes_tree,
        )
    except (FileNotFoundError, RuntimeError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0
