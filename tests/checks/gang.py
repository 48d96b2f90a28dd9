"""A recovery on several ranks, on processes as people run them: a coordinator and a worker for each device.

One job is left alone. Another, the same, loses a rank three times in the middle of a step: its device child is killed
(kill -9), then one is stopped (SIGSTOP), then one is killed on another worker than the first. Each time the gang must
form again within so many seconds of the loss, counted until its first step after that, and go on from the last
checkpoint. Then the losses of both jobs' last steps are compared. Standard library only.

usage: gang.py PROGRAM DEVICE JOB SECONDS [RANKS]    DEVICE is cpu or cuda; JOB a spec with recovery.ranks
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

# Of gang-job.yaml: a gang that goes on from the last checkpoint has lost fewer steps than these, or twice as many where a
# checkpoint is written beside the training.
CHECKPOINT_STEPS = 4
# The same data in the same order, from checkpoints exact to the bit.
MOST_DIFFERENCE = 1e-5
PATIENCE = 900.0


class Cluster:
    """A coordinator and one worker a device."""

    def __init__(self, program, device, ranks, directory):
        self.program, self.directory = program, directory
        os.mkdir(directory)
        self.url = None
        self.processes = []
        coordinator = self.start("coordinator", ["coordinator", "--listen", "127.0.0.1:0", "--data-dir", f"{directory}/data"])
        self.url = "http://" + self.find(coordinator, r"127\.0\.0\.1:[1-9]\d*")
        self.workers = {}
        threads = max(1, (os.cpu_count() or 1) // ranks)
        for rank in range(ranks):
            name = f"rank-{rank}"
            place = f"cuda:{rank}" if device == "cuda" else "cpu"
            arguments = ["worker", "run", "--coordinator", self.url, "--name", name, "--device", place]
            arguments += ["--threads", str(threads)]
            self.workers[name] = self.start(name, arguments)

    def start(self, name, arguments):
        log = open(f"{self.directory}/{name}.log", "wb")
        process = subprocess.Popen([self.program, *arguments], stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        process.log = log.name
        return process

    def find(self, process, pattern):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = re.search(pattern, pathlib.Path(process.log).read_text(errors="replace"))
            if found:
                return found.group()
            if process.poll() is not None:
                break
            time.sleep(0.05)
        sys.exit(f"{process.args} did not start: {pathlib.Path(process.log).read_text(errors='replace')}")

    def ask(self, *arguments):
        """What the program says of something, as JSON."""
        command = [self.program, *arguments, "--coordinator", self.url, "--output", "json"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            sys.exit(f"{' '.join(command)}: {answer.stderr.strip()}")
        return json.loads(answer.stdout)

    def submit(self, job, output):
        return self.ask("job", "submit", job, "--output-dir", output)["id"]

    def recovery(self, job):
        """The job's task of several ranks, with its attempts; none before it runs."""
        for task in self.ask("task", "list", job):
            if task["kind"] == "recover" and task["state"] == "running":
                return self.ask("task", "get", str(task["id"]))
        return None

    def child(self, worker):
        """The device child of a worker."""
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, IndexError, ValueError):
                continue
            if parent == self.workers[worker].pid and b"device-child" in command:
                return int(entry.name)
        sys.exit(f"{worker} has no device child")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def running(task):
    return [attempt for attempt in task["attempts"] if attempt["outcome"] == "running"]


def steps(attempt):
    """Steps done, as the attempt last told; none before its first."""
    found = re.search(r"step (\d+) of (\d+)", attempt["progress"] or "")
    return int(found.group(1)) if found else None


def wait_for(what, look):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.1)
    sys.exit(f"waited {PATIENCE:.0f} s for {what}")


def lose(cluster, job, how, after, spared):
    """Loses a rank of no spared worker some steps after the newest attempt began. Gives its worker, the seconds until
    the gang's next step, the steps done before, and those done when it had formed again."""

    def going():
        task = cluster.recovery(job)
        if task is None:
            return refuse_if_ended(cluster, job)
        live = running(task)
        known = [steps(attempt) for attempt in live if steps(attempt) is not None]
        # Between two generations only the spared worker's attempt may be running.
        mortal = [attempt for attempt in live if attempt["worker"] not in spared]
        return (live, mortal, max(known)) if mortal and known and max(known) >= after else None

    live, mortal, before = wait_for(f"step {after} of job {job}", going)
    victim = max(mortal, key=lambda attempt: attempt["id"])
    old = {attempt["id"] for attempt in live}
    lost = time.monotonic()
    os.kill(cluster.child(victim["worker"]), how)

    def again():
        task = cluster.recovery(job)
        if task is None:
            return refuse_if_ended(cluster, job)
        fresh = [attempt for attempt in running(task) if attempt["id"] not in old]
        known = [steps(attempt) for attempt in fresh if steps(attempt) is not None]
        return max(known) if known else None

    resumed = wait_for("the gang to form again", again)
    return victim["worker"], time.monotonic() - lost, before, resumed


def refuse_if_ended(cluster, job):
    found = ended(cluster.ask("job", "get", str(job)))
    if found:
        sys.exit(f"job {job} {found['state']} before it lost its ranks: {found['message'] or 'it is too short'}")


def outcome(cluster, job, output):
    found = wait_for(f"job {job}", lambda: ended(cluster.ask("job", "get", str(job))))
    if found["state"] != "succeeded":
        sys.exit(f"job {job} is {found['state']}: {found['message']}")
    with open(f"{output}/report.json", encoding="utf-8") as report:
        return json.load(report)


def ended(job):
    return job if job["state"] in ("succeeded", "failed", "cancelled") else None


def last_losses(report):
    losses = {}
    for strategy in report["strategies"]:
        tail = strategy["losses"][-8:]
        losses[strategy["strategy"]] = sum(tail) / len(tail)
    return losses


def main():
    program, device, job = sys.argv[1:4]
    most_seconds = float(sys.argv[4])
    ranks = int(sys.argv[5]) if len(sys.argv) > 5 else 2
    holds = True
    with tempfile.TemporaryDirectory(prefix="espalier-gang-") as directory:
        # Each in a cluster of its own: in one store the second would go on from the first one's checkpoints.
        with Cluster(program, device, ranks, f"{directory}/calm") as cluster:
            undisturbed = cluster.submit(job, f"{directory}/undisturbed")
            calm = last_losses(outcome(cluster, undisturbed, f"{directory}/undisturbed"))
        with Cluster(program, device, ranks, f"{directory}/shaken") as cluster:
            disturbed = cluster.submit(job, f"{directory}/disturbed")
            step = 12
            killed = set()
            for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
                spared = killed if how == signal.SIGKILL else set()
                worker, seconds, before, resumed = lose(cluster, disturbed, how, step, spared)
                if how == signal.SIGKILL:
                    killed.add(worker)
                ok = seconds <= most_seconds and resumed > before - 2 * CHECKPOINT_STEPS
                holds &= ok
                print(
                    f"{'ok  ' if ok else 'FAIL'}  {how.name} of a rank at step {before}: at step {resumed} "
                    f"{seconds:.1f} s later (at most {most_seconds:.0f})"
                )
                step = resumed + 12
            shaken = last_losses(outcome(cluster, disturbed, f"{directory}/disturbed"))
    for strategy, loss in calm.items():
        difference = abs(shaken[strategy] - loss) / loss
        ok = difference <= MOST_DIFFERENCE
        holds &= ok
        print(
            f"{'ok  ' if ok else 'FAIL'}  {strategy}: loss of the last steps {loss:.6f} undisturbed, "
            f"{shaken[strategy]:.6f} after three losses ({difference:.2e} apart, at most {MOST_DIFFERENCE:.0e})"
        )
    print("the gang holds" if holds else "the gang does not hold")
    sys.exit(0 if holds else 1)


main()
