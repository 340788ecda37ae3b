"""Progress of a long stage: a bar with the time left in a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Seconds between two lines where there is no terminal.
LINE_EVERY = 30.0


@contextlib.contextmanager
def stage_progress(console: Console, name: str, unit: str) -> Iterator[Callable[..., None]]:
    """Shows how far a stage is.

    Yields:
        A function of (done, total) and a note that may stand behind them.
    """
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(name, total=None, note="")
            yield lambda done, total, note="": bar.update(
                task, completed=done, total=total, note=note
            )
        return
    started = last = time.monotonic()
    first: int | None = None

    def line(done: int, total: int, note: str = "") -> None:
        nonlocal last, first
        first = done if first is None else first
        now = time.monotonic()
        if now - last < LINE_EVERY and done < total:
            return
        last = now
        text = f"{name}: {done} of {total} {unit}"
        if first < done < total:
            left = (now - started) / (done - first) * (total - done)
            text += f", {left / 60:.0f} min left"
        console.print(f"{text}  {note}".rstrip(), highlight=False)

    console.print(f"{name} ...", highlight=False)
    yield line
