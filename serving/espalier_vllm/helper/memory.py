"""Memory of this process and of the machine, bytes."""

import ctypes
import os
import threading
import time
from pathlib import Path

LOOK_EVERY = 0.02


def held():
    """What this process holds beside pages of files, which are others' as well: libraries, mapped checkpoints.

    Anonymous pages count whole, whoever shares them: by its share a page would weigh more or less whenever another
    process ends or begins. Older systems do not tell what is shared memory.
    """
    found = {}
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith(("Anonymous:", "Pss_Shmem:")):
                name, kilobytes, _ = line.split()
                found[name] = int(kilobytes) << 10
    if "Anonymous:" not in found:
        raise OSError("/proc/self/smaps_rollup has no line 'Anonymous:'")
    return sum(found.values())


def resident():
    """Resident pages now and at most since this was last forgotten; None where the system does not say."""
    found = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("VmRSS:", "VmHWM:")):
                found[line[:5]] = int(line.split()[1]) << 10
    return (found["VmRSS"], found["VmHWM"]) if len(found) == 2 else None


def forget_peak():
    """Lets the system's own mark of the most that was resident begin again; whether it did."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


class Peak:
    """The most that the process held since it was last asked.

    The system keeps a mark of the most that was ever resident, which misses nothing and costs no time; what of it are
    pages of files is taken to have been then as it is now. Where there is no such mark, or it cannot begin again, a thread
    looks now and then.
    """

    def __init__(self):
        self.marked = resident() is not None and forget_peak()
        self.seen = held()
        self.lock = threading.Lock()

    def start(self):
        if not self.marked:
            threading.Thread(target=self.look, name="memory", daemon=True).start()

    def look(self):
        while True:
            start = time.thread_time()
            with self.lock:
                self.seen = max(self.seen, held())
            # To sum up many mappings takes long: no more than a fiftieth of a processor goes into looking. What was
            # spent waiting for a processor or for the interpreter is no such work and must not lengthen the pause.
            time.sleep(max(LOOK_EVERY, 50 * (time.thread_time() - start)))

    def take(self):
        """Held now, and at most since this was last asked."""
        if self.marked:
            holds = held()
            now, most = resident()
            forget_peak()
            return holds, holds + max(0, most - now)
        # A look that is under way has ended before what was seen is forgotten, or it would be told once more.
        with self.lock:
            holds = held()
            peak, self.seen = max(self.seen, holds), holds
        return holds, peak


def number_in(file):
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


class ControlGroup:
    """What the control group allows and uses, by either version of them; None where it says nothing."""

    def __init__(self, root=Path("/sys/fs/cgroup")):
        old = root / "memory"
        self.most = number_in(root / "memory.max") or number_in(old / "memory.limit_in_bytes")
        self.used = number_in(root / "memory.current") or number_in(old / "memory.usage_in_bytes")
        # Files that were read lately and can be dropped are no use of memory.
        for file, key in ((root / "memory.stat", "inactive_file"), (old / "memory.stat", "total_inactive_file")):
            if self.used is not None and file.exists():
                kept = dict(line.split() for line in file.read_text().splitlines())
                self.used -= int(kept.get(key, 0))


def limit():
    """The control group's limit, or the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, ControlGroup().most or machine)


def available():
    """What can still be had, in the machine and in the control group; None where nothing says."""
    free = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass
    group = ControlGroup()
    if group.most is not None and group.used is not None:
        free.append(max(0, group.most - group.used))
    return min(free, default=None)


def processor_name():
    """As /proc/cpuinfo says, with the number of processors that this process may use."""
    found = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    found = line.partition(":")[2].strip()
                    break
    except OSError:
        pass
    return f"{found}, {len(os.sched_getaffinity(0))} threads"


def trim():
    """Asks the allocators to give free pages back to the system: the C library's, and tcmalloc where it is preloaded."""
    for name, arguments in (("malloc_trim", (0,)), ("MallocExtension_ReleaseFreeMemory", ())):
        release = getattr(ctypes.CDLL(None), name, None)
        if release is not None:
            release(*arguments)
