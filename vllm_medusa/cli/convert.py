"""``vllm-medusa convert IN OUT --to FORMAT``: heads in another format, without loss."""

import argparse
import sys
from pathlib import Path

import torch

from vllm_medusa.cli.errors import print_error
from vllm_medusa.heads.convert import convert_heads
from vllm_medusa.heads.formats import FORMATS, HeadsError

DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the sub-command."""
    parser.add_argument("heads", metavar="IN", help="a folder, or a hub id[@REVISION]")
    parser.add_argument("output", metavar="OUT", type=Path, help="a new or empty folder")
    parser.add_argument("--to", required=True, choices=FORMATS, help="format to write")
    parser.add_argument("--revision", help="branch, tag or commit of the heads on the hub")
    parser.add_argument(
        "--lm-head",
        metavar="MODEL",
        help="the target, a folder or a hub id[@REVISION]: its LM head is written where the format "
        "wants one and the heads have none; with --to medusa-2, LM heads equal to it are left out",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of the weights (default: as they are stored)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert and say what was done. Returns 0, or 1 with a message where nothing was written."""
    try:
        done = convert_heads(
            args.heads,
            args.output.expanduser(),
            args.to,
            revision=args.revision,
            target=args.lm_head,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
        )
    except HeadsError as error:
        print_error("convert", error)
        return 1
    for warning in done.source.warnings:
        print(f"warning about {args.heads}: {warning}", file=sys.stderr)
    print(f"{args.heads} ({done.source.format}) -> {args.output} ({done.result.format})")
    for note in done.notes:
        print(note)
    print(f"read back: all {done.num_tensors} tensors are the same bit for bit")
    if done.carried:
        print(f"copied along: {', '.join(done.carried)}")
    return 0
