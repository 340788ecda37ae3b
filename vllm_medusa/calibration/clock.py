"""Where the time of an engine's step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch


class StepClock:
    """Seconds of each part of the current step.

    A CUDA device works behind the CPU's back: there, events are recorded in the device's own order
    around a part, so nothing waits for it and the step is what it is without a clock. A part is
    counted in the step in which the device is through with it.
    """

    def __init__(self, on_cuda: bool = False) -> None:
        self.on_cuda = on_cuda
        self.spans: list[tuple[str, Any, Any]] = []

    def time(self, owner: Any, name: str, part: str) -> None:
        """Add the time spent in ``owner.name`` to a part from now on."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append((part, started, self._now()))

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """The parts of the step, and start anew."""
        seconds: dict[str, float] = defaultdict(float)
        spans, self.spans = self.spans, []
        for part, started, ended in spans:
            if not self.on_cuda:
                seconds[part] += ended - started
            elif ended.query():
                seconds[part] += started.elapsed_time(ended) / 1e3
            else:
                self.spans.append((part, started, ended))
        return dict(seconds)

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
