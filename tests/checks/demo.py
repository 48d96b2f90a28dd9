"""Runs the demo job, samples the memory of its process tree, and asserts on its report. Standard library only."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

JOB = "examples/smollm2/job.yaml"
MOST_SECONDS = 15 * 60
MOST_BYTES = 4 << 30
MOST_ERROR = 0.10
LEAST_RECOVERED = 0.15


def children():
    """Parent of every process, by its id."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                # The command may hold spaces and parentheses; what follows its last one does not.
                parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return parents


def tree_pss_bytes(root):
    """Proportional set size of a process and all its descendants."""
    parents = children()
    tree, grew = {root}, True
    while grew:
        found = {child for child, parent in parents.items() if parent in tree} - tree
        tree |= found
        grew = bool(found)
    total = 0
    for process in tree:
        try:
            with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as rollup:
                total += sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def run(program, output):
    """Runs the job; gives its exit status, seconds, and peak bytes."""
    start = time.monotonic()
    process = subprocess.Popen([program, "run", JOB, "--output-dir", output])
    peak, done = [0], threading.Event()

    def sample():
        while not done.wait(1.0):
            peak[0] = max(peak[0], tree_pss_bytes(process.pid))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        status = process.wait()
    done.set()
    sampler.join()
    return status, time.monotonic() - start, peak[0]


def strategy(report, name):
    return next(each for each in report["strategies"] if each["strategy"] == name)


def main():
    program, output = sys.argv[1:]
    status, seconds, peak = run(program, output)
    if status != 0:
        sys.exit(f"demo: espalier run ended with {status}")
    with open(os.path.join(output, "report.json"), encoding="utf-8") as file:
        report = json.load(file)
    [limit] = [each for each in report["limits"] if each["metric"] == "latency"]
    reading = limit["verified"]
    own, uniform = strategy(report, "heterogeneous"), strategy(report, "uniform")
    before, after = own["before"]["divergence"], own["after"]["divergence"]
    beside = uniform["after"]["divergence"]
    checkpoint = os.listdir(report["export"]["directory"])
    figures = [
        (f"latency {reading['value']:.1f} ms, limit {reading['limit']:.1f} ms, parent in alternation "
         f"{reading['parent']:.1f} ms", reading["value"] <= reading["limit"]),
        (f"prediction {reading['predicted']:.1f} ms, off by {reading['error']:+.1%} (at most {MOST_ERROR:.0%})",
         abs(reading["error"]) <= MOST_ERROR),
        (f"KL {before:.4f} before recovery, {after:.4f} after: {1 - after / before:.1%} lower (at least "
         f"{LEAST_RECOVERED:.0%})", after <= (1 - LEAST_RECOVERED) * before),
        (f"KL {after:.4f}, uniform baseline {beside:.4f} at {uniform['recovery_tokens']} tokens each",
         after < beside and own["recovery_tokens"] == uniform["recovery_tokens"]),
        (f"peak memory of the process tree {peak / 2**30:.2f} GiB (under 4)", 0 < peak < MOST_BYTES),
        (f"wall time {seconds / 60:.1f} min on {os.cpu_count()} processors (under 15)", seconds < MOST_SECONDS),
        ("report.html, report.json and checkpoint written",
         os.path.getsize(os.path.join(output, "report.html")) > 0 and "config.json" in checkpoint),
    ]
    for text, holds in figures:
        print(f"{'ok  ' if holds else 'FAIL'}  {text}")
    failed = sum(not holds for _, holds in figures)
    print(f"demo: {len(figures) - failed} of {len(figures)} hold")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
