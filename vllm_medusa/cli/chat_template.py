"""The option ``--chat-template FILE``, which several commands have."""

from __future__ import annotations

from pathlib import Path


def read_chat_template(file: Path | None) -> str | None:
    """The text of a template; None where no file is given.

    Raises:
        DataError: the file cannot be read.
    """
    from vllm_medusa.training.data import DataError

    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--chat-template {file} cannot be read: {error.strerror}") from error
