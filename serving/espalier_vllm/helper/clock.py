"""Time as a step takes it: by the clock, by this process's threads, and what others took of the processors."""

import os
import time
from typing import NamedTuple


class Moment(NamedTuple):
    wall: float
    cpu: float

    def since(self, earlier):
        return Moment(self.wall - earlier.wall, self.cpu - earlier.cpu)


class HostClock:
    """The machine's own clocks, seconds."""

    def now(self):
        return Moment(time.perf_counter(), time.process_time())

    def load(self):
        """Where `busy_share` counts from."""
        return self.now(), system_busy()

    def busy_share(self, load):
        """The share, 0 to 1, of all processors that other processes used since `load`; None where nothing says."""
        (start, before), after = load, system_busy()
        if before is None or after is None:
            return None
        took = self.now().since(start)
        others = (after - before) - took.cpu
        return round(min(1.0, max(0.0, others / (took.wall * (os.cpu_count() or 1)))), 4)


def system_busy():
    """Seconds for which processors were not idle since the system began, summed over all of them."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            name, *ticks = file.readline().split()
        user, nice, system, idle, waiting, irq, soft_irq, stolen = (int(tick) for tick in ticks[:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK") if name == "cpu" else None
