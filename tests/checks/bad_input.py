"""Gives espalier bad input and asserts on how it is refused. Standard library only."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading

TINY = os.path.abspath("examples/tiny")
TEXT = os.path.abspath("examples/data/train.jsonl.xz")
PARENT_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")
SECONDS = 300


def spec(parent=None, train=TEXT, latency="75%"):
    return f"""
parent: {parent or TINY}
data: {{train: [{train}]}}
target:
  workload: {{prompt_tokens: 32, output_tokens: 8}}
  limits: {{latency: {latency}}}
search: {{mlp_grid: 64}}
budget:
  sequence_tokens: 128
  calibration_tokens: 1024
  scoring_tokens: 1024
  depth_tokens: 1024
  recovery_tokens: 4096
  validation_tokens: 1024
recovery: {{batch_sequences: 4}}
"""


def tiny_with(directory, name, change):
    """A copy of the tiny parent whose `name` was changed."""
    parent = os.path.join(directory, "parent")
    os.mkdir(parent)
    for file in os.listdir(TINY):
        if file.endswith(PARENT_FILES):
            shutil.copy(os.path.join(TINY, file), parent)
    path = os.path.join(parent, name)
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    change(content)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
    return parent


def write(directory, name, content):
    path = os.path.join(directory, name)
    with open(path, "wb") as file:
        file.write(content)
    return path


def half(source, target):
    size = os.path.getsize(source) // 2
    with open(source, "rb") as whole, open(target, "wb") as part:
        while size > 0 and (chunk := whole.read(min(size, 1 << 20))):
            part.write(chunk)
            size -= len(chunk)
    return target


def fewer_entries(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    kept = sorted(vocabulary, key=vocabulary.get)[: len(vocabulary) // 2]
    tokenizer["model"]["vocab"] = {token: vocabulary[token] for token in kept}
    known = set(kept)

    def survives(merge):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return {left, right, left + right} <= known

    tokenizer["model"]["merges"] = [merge for merge in tokenizer["model"].get("merges", []) if survives(merge)]


def cases(gguf):
    """Name, what the error must mention, and how the spec is made within a directory."""
    noise = random.Random(0).randbytes(1 << 16)
    return [
        ("an empty data file", "empty", lambda d: spec(train=write(d, "empty.txt", b""))),
        ("a binary file as data", "noise.txt", lambda d: spec(train=write(d, "noise.txt", noise))),
        ("a GGUF cut in half", "half.gguf", lambda d: spec(parent=half(gguf, os.path.join(d, "half.gguf")))),
        ("a config with a negative size", "-64",
         lambda d: spec(parent=tiny_with(d, "config.json", lambda c: c.update(hidden_size=-64)))),
        ("an unknown family", "gpt9",
         lambda d: spec(parent=tiny_with(d, "config.json", lambda c: c.update(model_type="gpt9")))),
        ("a tokenizer with too few entries", "token",
         lambda d: spec(parent=tiny_with(d, "tokenizer.json", fewer_entries))),
        ("a limit that no variant can meet", "best that can be reached", lambda d: spec(latency="1us")),
        ("an output directory that exists", "exists", lambda d: os.mkdir(os.path.join(d, "out")) or spec()),
    ]


def listing(directory):
    found = []
    for root, directories, files in os.walk(directory):
        for name in directories + files:
            path = os.path.join(root, name)
            found.append((os.path.relpath(path, directory), os.path.isfile(path) and os.path.getsize(path)))
    return sorted(found)


def refused(program, directory, text, mention):
    """Why a bad spec was not refused as it should be; none when it was."""
    job = os.path.join(directory, "job.yaml")
    with open(job, "w", encoding="utf-8") as file:
        file.write(text)
    before = listing(directory)
    command = [program, "run", job, "--output-dir", os.path.join(directory, "out")]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"still running after {SECONDS} s"
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    if ended.returncode == 0:
        return "exit code 0"
    if ended.returncode < 0 or "panicked" in ended.stderr:
        return f"crashed ({ended.returncode}): {ended.stderr.strip()[-300:]}"
    if len(errors) != 1:
        return f"{len(errors)} error lines: {ended.stderr.strip()[-300:]}"
    print(f"      {errors[0][:200]}")
    if mention not in errors[0]:
        return f"the error does not mention {mention!r}"
    if ended.stdout:
        return f"standard output: {ended.stdout[:200]}"
    left = [entry for entry in listing(directory) if entry not in before]
    return f"left behind: {left}" if left else None


def waits_for_room(program, mount):
    """Why a job on a full disk did not say so, wait, and go on once there was room; none when it did."""
    job = os.path.join(mount, "job.yaml")
    with open(job, "w", encoding="utf-8") as file:
        file.write(spec())
    command = [program, "run", job, "--output-dir", os.path.join(mount, "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        # It is tried again at least once a minute.
        overdue = threading.Timer(SECONDS, running.kill)
        overdue.start()
        told, has_room = [], False
        for line in running.stderr:
            told.append(line)
            if not has_room and "No space left on device" in line:
                print(f"      {line[:200].rstrip()}")
                subprocess.run(["mount", "-o", "remount,size=200m", mount], check=True)
                has_room = True
        status = running.wait()
        overdue.cancel()
    if not has_room:
        return f"never said that there is no room (exit code {status}): {''.join(told)[-300:]}"
    report = os.path.join(mount, "out", "report.json")
    if status != 0 or not os.path.exists(report):
        return f"exit code {status} after there was room: {''.join(told)[-300:]}"
    return None


def full_disk(program):
    """A file system of two megabytes in a mount namespace of our own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    enter = ["unshare", *user, "--mount"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode != 0:
        return "no mount namespace can be made here; run as root or allow user namespaces"
    script = os.path.abspath(__file__)
    with tempfile.TemporaryDirectory() as mount:
        inside = f'mount -t tmpfs -o size=2m tmpfs "{mount}" && exec "{sys.executable}" "{script}" "{program}" --inside "{mount}"'
        ended = subprocess.run([*enter, "sh", "-c", inside], text=True, check=False, capture_output=True)
    print(ended.stdout, end="")
    return None if ended.returncode == 0 else (ended.stdout + ended.stderr).strip()[-300:]


def main():
    program = os.path.abspath(sys.argv[1])
    if sys.argv[2] == "--inside":
        sys.exit(waits_for_room(program, sys.argv[3]))
    failed = 0
    results = [(name, mention, make) for name, mention, make in cases(os.path.abspath(sys.argv[2]))]
    for name, mention, make in results:
        with tempfile.TemporaryDirectory() as directory:
            reason = refused(program, directory, make(directory), mention)
        print(f"{'FAIL' if reason else 'ok  '}  {name}{': ' + reason if reason else ''}", flush=True)
        failed += bool(reason)
    reason = full_disk(program)
    print(f"{'FAIL' if reason else 'ok  '}  a full disk{': ' + reason if reason else ''}")
    failed += bool(reason)
    count = len(results) + 1
    print(f"check-bad-input: {count - failed} of {count} as they should be")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
