"""Entry point of ``vllm-medusa``.

A sub-command is a module with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code),
and a line in ``COMMANDS``. Only the one asked for is imported: torch alone takes seconds.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_medusa import __version__

COMMANDS = {
    "bench": ("vllm_medusa.cli.bench", "measure vLLM with and without Medusa, side by side"),
    "calibrate": ("vllm_medusa.cli.calibrate", "choose the tree that pays on this machine"),
    "convert": ("vllm_medusa.cli.convert", "write heads in another format, without loss"),
    "demo": ("vllm_medusa.cli.demo", "serve a small model with Medusa, chat, measure the gain"),
    "doctor": ("vllm_medusa.cli.doctor", "check the installation, and say what mends it"),
    "inspect": ("vllm_medusa.cli.inspect", "show what a checkpoint of heads holds and what is odd"),
    "train": ("vllm_medusa.cli.train", "train heads for a model on its own answers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: The arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 where the command failed with a message. A wrong command
        line exits with 2, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-medusa", description="Medusa heads with tree verification for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked_for = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked_for:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
