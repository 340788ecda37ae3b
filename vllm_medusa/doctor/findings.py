"""What the doctor finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OK: Literal["ok"] = "ok"
WARNING: Literal["warning"] = "warning"
ERROR: Literal["error"] = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: which part of the installation.
        name: what was looked at.
        found: what was found, in words.
        status: ``ok``; ``warning``: works, but slower or not as it could; ``error``: Medusa cannot
            be served before it is mended.
        remedy: the command that mends it; empty where nothing is wrong.
    """

    section: str
    name: str
    found: str
    status: Literal["ok", "warning", "error"] = OK
    remedy: str = ""
