"""Time as a step takes it: by the clock, by this process's threads, and what others took of the processors."""

import os
import time
from pathlib import Path
from typing import NamedTuple

TICK = 1 / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    wall: float
    cpu: float

    def since(self, earlier):
        return Moment(self.wall - earlier.wall, self.cpu - earlier.cpu)


class Load(NamedTuple):
    """What was used until a moment, seconds of processors; None where the system does not say."""

    moment: Moment
    # Of the processors that this process may use, by everybody.
    busy: float | None
    # Of the quota, by all processes that share it.
    shared: float | None
    # In which this process's threads had work and no processor.
    waited: float


class HostClock:
    """The machine's own clocks, seconds."""

    def __init__(self):
        self.processors = os.sched_getaffinity(0)
        self.quota = Quota.of_this_process()

    def now(self):
        return Moment(time.perf_counter(), time.process_time())

    def load(self):
        """Where `busy_share` counts from."""
        shared = self.quota.used() if self.quota else None
        return Load(self.now(), busy_seconds(self.processors), shared, waited_seconds())

    def busy_share(self, load):
        """The share, 0 to 1, of the processors that this process may use that others had since `load`, at the least;
        None where nothing says."""
        now = self.load()
        if load.busy is None or now.busy is None:
            return None
        took = now.moment.since(load.moment)
        shared = None if load.shared is None or now.shared is None else now.shared - load.shared
        quota = self.quota.processors if self.quota else None
        taken = taken_share(took, now.busy - load.busy, len(self.processors), quota, shared)
        waited = waiting_share(took, now.waited - load.waited, self.allowed())
        return round(max(taken, waited), 4)

    def allowed(self):
        """How many processors this process may use, a part of one too where a quota says so."""
        return min(len(self.processors), self.quota.processors if self.quota else len(self.processors))


def taken_share(took, busy, processors, quota=None, shared=None):
    """What others had of `processors`, or of the `quota` of them, by how long the processors were busy.

    The system counts whole ticks, so each processor may seem busy for one too many: that much is no sign of others.
    """
    if took.wall <= 0:
        return 0.0
    others = max(0.0, busy - took.cpu - processors * TICK)
    left = processors - others / took.wall
    allowed = processors
    if quota is not None:
        allowed = min(processors, quota)
        left = min(left, allowed - max(0.0, (shared or 0.0) - took.cpu) / took.wall)
    return min(1.0, max(0.0, 1 - left / allowed))


def waiting_share(took, waited, processors):
    """What others had by how long threads waited for a processor, which is exact for the shortest steps. Threads that
    wait for each other wait too: no more counts than this process left unused."""
    if took.wall <= 0 or waited <= 0:
        return 0.0
    unused = 1 - took.cpu / (took.wall * processors)
    return min(waited / (waited + took.cpu), max(0.0, unused))


def busy_seconds(processors):
    """Seconds for which these processors were not idle since the system began, summed; None where it does not say."""
    names = {f"cpu{number}" for number in processors}
    total = found = 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *ticks = line.split()
                if not name.startswith("cpu"):
                    break
                if name in names:
                    user, nice, system, _idle, _waiting, irq, soft_irq, stolen = (int(tick) for tick in ticks[:8])
                    total += user + nice + system + irq + soft_irq + stolen
                    found += 1
    except (OSError, ValueError):
        return None
    return total * TICK if found == len(names) else None


def waited_seconds():
    """Seconds in which this process's threads had work and waited for a processor; 0 where the system does not say."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            # It has ended meanwhile, or nothing is kept of it.
            continue
    return total / 1e9


class Quota:
    """A control group's quota of processor time, by either version of them."""

    def __init__(self, processors, used):
        self.processors = processors
        self.used = used

    @classmethod
    def of_this_process(cls, root=Path("/sys/fs/cgroup"), groups=Path("/proc/self/cgroup")):
        """The tightest of its group and those above it; None where there is none."""
        found = []
        for names, path in memberships(groups):
            if names == "":
                found += [cls.unified(place) for place in upwards(root, path)]
            elif "cpu" in names.split(","):
                found += [cls.divided(root, place) for place in upwards(root / "cpu", path)]
        return min(filter(None, found), key=lambda quota: quota.processors, default=None)

    @classmethod
    def unified(cls, place):
        try:
            most, period = (place / "cpu.max").read_text().split()
            processors = int(most) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            return None

        def used():
            try:
                statistics = dict(line.split() for line in (place / "cpu.stat").read_text().splitlines())
                return int(statistics["usage_usec"]) / 1e6
            except (OSError, ValueError, KeyError):
                return None

        return cls(processors, used)

    @classmethod
    def divided(cls, root, place):
        accounts = [root / each / place.relative_to(root / "cpu") for each in ("cpuacct", "cpu,cpuacct", "cpu")]
        try:
            most = int((place / "cpu.cfs_quota_us").read_text())
            processors = most / int((place / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError, ZeroDivisionError):
            return None

        def used():
            for account in accounts:
                try:
                    return int((account / "cpuacct.usage").read_text()) / 1e9
                except (OSError, ValueError):
                    continue
            return None

        return cls(processors, used) if most > 0 else None


def memberships(groups):
    """Of `/proc/self/cgroup`: controllers, none of the unified ones, and the path."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]


def upwards(root, path):
    """The group's directory and those above; a container may see its own as the root."""
    place = root / path.strip("/")
    while place != root and root in place.parents:
        yield place
        place = place.parent
    yield root


def group_seconds():
    """Processor time of the living others of this process's group, with that of children that they have waited for:
    compilers and what else it started."""
    own, group, total = os.getpid(), os.getpgrp(), 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == own:
            continue
        try:
            # The name before the last parenthesis may hold anything.
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += sum(int(field) for field in fields[11:15])
        except (OSError, ValueError, IndexError):
            continue
    return total * TICK
