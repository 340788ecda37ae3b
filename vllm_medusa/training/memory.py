"""What to do when a device has too little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def advise_on_memory(option: str, value: int) -> Iterator[None]:
    """Turn torch's out-of-memory error into advice; everything finished is on disk by then.

    Args:
        option: the option that needs less memory when it is smaller.
        value: what it is.

    Raises:
        ValueError: the device has too little memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"the device has too little memory ({first}): run the same command with a smaller "
            f"{option} than {value}; what was finished before is kept"
        ) from error
