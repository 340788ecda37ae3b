"""Files that are there whole or not at all, so that a run can be killed at any moment."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path to write to: at the end it becomes ``file``, after an error nothing is left of it."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        yield unfinished
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, file)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it never is there half."""
    with whole_file(file) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def read_whole_lines(file: Path) -> list[bytes]:
    """The lines of a file that grows line by line; none where it is not there.

    A last line that was cut off while it was being written is removed from the file.
    """
    if not file.exists():
        return []
    with file.open("r+b") as opened:
        content = opened.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            opened.truncate(complete)
    return content[:complete].splitlines()


def make_writable(folder: Path) -> None:
    """Make a folder and see that it can be written, before long work is done for what goes there.

    Raises:
        OSError: it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
