"""Progress in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

Progress = Callable[[str], None]


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A line that changes with what is going on; where there is no terminal, lines."""
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield status.update
