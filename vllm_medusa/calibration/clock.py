"""Where the time of an engine's step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any


class StepClock:
    """Seconds of each part of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, owner: Any, name: str, part: str) -> None:
        """Add the time spent in ``owner.name`` to a part from now on."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - started

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """The parts of the step, and start anew."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds
