"""``vllm-medusa calibrate MODEL HEADS``: choose the tree that pays on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_medusa.cli.chat_template import read_chat_template
from vllm_medusa.cli.errors import print_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the sub-command."""
    from vllm_medusa.calibration.schedule import MIN_GAIN

    parser.add_argument("model", metavar="MODEL", help="the target: a folder or a hub id")
    parser.add_argument("heads", metavar="HEADS", help="the heads: a folder or a hub id[@REVISION]")
    parser.add_argument("--revision", help="branch, tag or commit of the heads on the hub")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where medusa_tree.json goes (default: beside the heads, where serving finds it)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="JSONL of prompts not trained on: measure the heads on the target's answers to them "
        "(default: what training stored beside the heads)",
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="with --data, for a model without one"
    )
    parser.add_argument(
        "--max-prompts", type=_positive, default=200, help="of --data (default: %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_positive,
        default=64,
        help="largest batch size that is measured; no trees above it (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", type=_nodes, default=63, help="size of the tree, 1 to 127 (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=_positive,
        default=200,
        help="tokens that requests start with (default: %(default)s)",
    )
    parser.add_argument(
        "--min-gain",
        type=float,
        default=MIN_GAIN,
        help="a tree must promise as much over none to be used (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="as vllm serve --dtype (default: auto)")
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what a stopped run has measured"
    )


def run(args: argparse.Namespace) -> int:
    """Calibrate; 1 with a message on failure."""
    from rich.console import Console

    from vllm_medusa.calibration.cost import CostOptions
    from vllm_medusa.calibration.errors import CalibrationError
    from vllm_medusa.calibration.run import CalibrateOptions, calibrate
    from vllm_medusa.heads.checkpoint import HeadsError
    from vllm_medusa.stage_process import StageError
    from vllm_medusa.training.data import DataError
    from vllm_medusa.tree import TreeError

    try:
        options = CalibrateOptions(
            model=args.model,
            heads=args.heads,
            revision=args.revision,
            output=args.output,
            data=args.data,
            chat_template=read_chat_template(args.chat_template),
            max_prompts=args.max_prompts,
            num_nodes=args.nodes,
            min_gain=args.min_gain,
            fresh=args.fresh,
            cost=CostOptions(
                dtype=args.dtype,
                eager=args.eager,
                max_num_seqs=args.max_num_seqs,
                context=args.context,
            ),
        )
        calibrate(Console(), options)
    except (CalibrationError, DataError, HeadsError, OSError, StageError, TreeError) as error:
        print_error("calibrate", error)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the same command goes on where it was")
        return 130
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected a number from 1 on")
    return number


def _nodes(text: str) -> int:
    number = _positive(text)
    if number > 127:
        raise argparse.ArgumentTypeError(f"{number}: at most 127 nodes can be verified")
    return number
