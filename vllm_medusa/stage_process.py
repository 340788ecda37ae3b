"""Runs one function in a fresh process with its own log, and hands on what it reports.

vLLM wants its environment set before Python starts, logs a lot, and frees its memory only when its
process ends; so everything that needs an engine for a while runs this way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm_medusa.cpu_setup import cpu_environment

Report = Callable[[Any], None]

LAUNCHER = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


class StageError(RuntimeError):
    """The process failed; the message is its error, or the end of its log."""


def run_stage(
    function: Callable[..., None],
    *arguments: Any,
    log: Path,
    environment: dict[str, str] | None = None,
) -> Iterator[Any]:
    """Run ``function(report, *arguments)`` in a spawned process; yield what it reports.

    Args:
        function: a module's function; it calls ``report(value)`` to tell how far it is.
        log: what the process prints goes there.
        environment: variables to set besides those a CPU engine needs.

    Raises:
        StageError: the function raised an error (its message), or the process died (its log's end).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process, ours = start_process(
        _stage, str(log), function, arguments, environment=environment or {}, daemon=True
    )
    try:
        while True:
            kind, value = ours.recv()
            if kind == "error":
                raise StageError(value)
            if kind == "done":
                process.join()
                return
            yield value
    except EOFError:
        process.join()
        raise StageError(
            f"the process ended with exit code {process.exitcode}; the end of {log}:\n{tail(log)}"
        ) from None
    finally:
        end_process(process, ours)


def start_process(
    function: Callable[..., None],
    *arguments: Any,
    environment: dict[str, str],
    daemon: bool = False,
) -> tuple[BaseProcess, Connection]:
    """Run ``function(connection, *arguments)`` in a spawned process; returns it and our end.

    Args:
        function: a module's function.
        environment: variables to set besides those a CPU engine needs.
        daemon: it ends with this process, and may start none itself.
    """
    ours, theirs = multiprocessing.Pipe()
    # spawn: the environment must be right before the process loads its first library.
    process = multiprocessing.get_context("spawn").Process(
        target=function, args=(theirs, *arguments), daemon=daemon
    )
    with environment_variables(engine_environment() | environment):
        forget_launcher()
        process.start()
    theirs.close()
    return process, ours


def end_process(process: BaseProcess, connection: Connection) -> None:
    """Close our end, which tells the process to end, and see to it that it does."""
    connection.close()
    process.join(timeout=20)
    if process.is_alive():
        process.kill()
        process.join()


def print_into(log: str) -> None:
    """From now on, all that this process and its libraries print goes into a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())


def engine_environment() -> dict[str, str]:
    """Environment variables of a process with an engine in it."""
    # No worker process: the engine's steps happen in the process that asks for them.
    return cpu_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def forget_launcher() -> None:
    """Remove what ``torchrun`` and ``accelerate launch`` tell their processes: one that such a
    process starts is none of theirs, and its engine would wait for the others."""
    for name in list(os.environ):
        if name in LAUNCHER or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


@contextlib.contextmanager
def environment_variables(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while: a spawned process takes over what is set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def memory_advice(error: BaseException) -> str:
    """What to do about a ``torch.OutOfMemoryError``."""
    first = str(error).splitlines()[0]
    return (
        f"the device has too little memory ({first}): end what else uses it, or give a smaller "
        "--max-num-seqs, --concurrency, --max-length, --max-model-len or --context, where the "
        "command has it; what was finished before is kept"
    )


def _stage(
    connection: Connection, log: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """What the process runs."""
    import torch

    print_into(log)
    try:
        function(lambda value: connection.send(("report", value)), *arguments)
        connection.send(("done", None))
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        connection.send(("error", memory_advice(error)))
    except BrokenPipeError:
        pass  # whoever started us is gone
    except (ValueError, OSError) as error:
        traceback.print_exc()
        connection.send(("error", str(error)))
    except BaseException:
        traceback.print_exc()
        raise
