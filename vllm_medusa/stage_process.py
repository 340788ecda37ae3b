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
from pathlib import Path
from typing import Any

from vllm_medusa.cpu_setup import cpu_environment

Report = Callable[[Any], None]


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
    ours, theirs = multiprocessing.Pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = engine_environment() | (environment or {})
    process = multiprocessing.get_context("spawn").Process(
        target=_stage, args=(theirs, str(log), function, arguments), daemon=True
    )
    with environment_variables(variables):
        process.start()
    theirs.close()
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
        ours.close()
        process.join(timeout=20)
        if process.is_alive():
            process.kill()
            process.join()


def engine_environment() -> dict[str, str]:
    """Environment variables of a process with an engine in it."""
    # No worker process: the engine's steps happen in the process that asks for them.
    return cpu_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


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


def _stage(
    connection: Connection, log: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """What the process runs."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        function(lambda value: connection.send(("report", value)), *arguments)
        connection.send(("done", None))
    except BrokenPipeError:
        pass  # whoever started us is gone
    except (ValueError, OSError) as error:
        traceback.print_exc()
        connection.send(("error", str(error)))
    except BaseException:
        traceback.print_exc()
        raise
