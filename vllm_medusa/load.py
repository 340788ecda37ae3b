"""How busy everything else on the machine was while something was measured.

A memory-bound decode on two cores becomes several times slower beside one competing thread, so a
measurement says nothing without this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def busy_cpu_seconds() -> float:
    """CPU seconds that all processes have used since the machine started, or its host has taken.

    From the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class LoadMeter:
    """Measures the cores other processes kept busy from its making to `others`."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.busy = busy_cpu_seconds()

    def others(self, own_cpu_seconds: float) -> float:
        """Cores kept busy on average by anything but us.

        Args:
            own_cpu_seconds: what the measured process used in the meantime.
        """
        elapsed = time.monotonic() - self.started
        return max(0.0, busy_cpu_seconds() - self.busy - own_cpu_seconds) / elapsed
