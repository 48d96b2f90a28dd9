"""Runs jobs measured in vLLM and asserts what was promised of them: see vllm.sh.

    PYTHON vllm.py ESPALIER PARENT OUTPUT [--candidates 8] [--rounds 15]

PYTHON is of the environment that has vLLM and the plugin.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from measured import ROOT, Figures, block_bytes, candidates, check_limit, entry, flat, rows, run, vllm_helper

from client import Refused

WORKLOAD = {"prompt_tokens": 128, "output_tokens": 32, "concurrency": 1}
SPEC = """
parent: {parent}
data: {{train: [{data}/train.jsonl.xz], validation: [{data}/validation.jsonl.xz]}}
target:
  engine: vllm
  workload: {{prompt_tokens: 128, output_tokens: 32, concurrency: 1}}
  limits: {limits}
search: {{mlp_grid: {grid}, strategies: [heterogeneous]}}
budget: {{sequence_tokens: 256, calibration_tokens: 8192, scoring_tokens: 1024, recovery_tokens: {recovery},
  validation_tokens: 4096}}
recovery: {{learning_rate: 0.0002, batch_sequences: 2}}
"""
MOST_MEDIAN, MOST_WORST = 0.05, 0.10
MOST_DOUBT, MOST_WINDOWS = 0.025, 6
# A window in which the parent was served at another pace than beside the tables shows the machine, not the prediction.
MOST_OF_PACE = 0.025
BLOCK_TOKENS = 32


def request_ms(points, workload):
    """A whole request by one subject's times at points: prefill, and each later token at its context."""
    prompt, steps = workload["prompt_tokens"], workload["output_tokens"] - 1
    contexts = sorted(context for kind, context in points if kind == "decode")
    total = points["prefill", prompt]
    for context in range(prompt, prompt + steps):
        above = next(each for each in contexts if each >= context)
        below = max((each for each in contexts if each <= context), default=above)
        share = (context - below) / (above - below) if above > below else 0.0
        total += (1 - share) * points["decode", below] + share * points["decode", above]
    return total


class Table(NamedTuple):
    """Milliseconds of a request: what each block adds, by JSON of its entry, and the base; and the parent's, served."""

    costs: dict
    parent: float

    @classmethod
    def read(cls, path):
        table = json.loads(path.read_text())
        alone = WORKLOAD["concurrency"]
        costs = {}
        for name, places in rows(table).items():
            points = {place[:2]: median for place, median in places.items() if place[2] == alone}
            costs[name] = request_ms(points, WORKLOAD)
        return cls(costs, table["profile"]["parent"]["latency_ms"]["median"])

    def predicted(self, blocks):
        return self.costs["base"] + sum(self.costs[block] for block in blocks)


class Window(NamedTuple):
    """Milliseconds of a request to the parent and to each candidate, of every round between two tables."""

    before: Table
    after: Table
    parent: list
    candidates: list

    def predicted(self, blocks):
        return (self.before.predicted(blocks) + self.after.predicted(blocks)) / 2

    def drift(self, wanted):
        """The most that a candidate's price moved from table to table."""
        return max((self.after.predicted(blocks) / self.before.predicted(blocks) - 1 for blocks in wanted), key=abs)

    def pace(self):
        """How much slower the parent was served than beside the tables."""
        return statistics.median(self.parent) / statistics.mean([self.before.parent, self.after.parent]) - 1


def blocks_needed(workload):
    each = math.ceil((workload["prompt_tokens"] + workload["output_tokens"]) / BLOCK_TOKENS)
    return workload["concurrency"] * each + 1


def opened(helper, name, workload, blocks, bytes_of_block, **model):
    return helper.ask(
        "open",
        timeout=900,
        engine=name,
        precision="f32",
        max_tokens=max(256, workload["prompt_tokens"] * workload["concurrency"]),
        max_sequences=workload["concurrency"],
        max_context=workload["prompt_tokens"] + workload["output_tokens"],
        kv_bytes=blocks * bytes_of_block,
        block_tokens=BLOCK_TOKENS,
        **model,
    )


def profiled(given, name, spec):
    """What blocks cost now, measured anew; none where the job failed, as it does when others use the machine."""
    path = given.output / f"{name}.yaml"
    path.write_text(spec)
    output = given.output / name
    command = [given.program, "profile", "run", path, "--output-dir", output, "--vllm-python", sys.executable]
    if subprocess.run(command).returncode != 0:
        return None
    return Table.read(output / "cost-table.json")


def serve_in_turns(given, config, models, log):
    """Milliseconds of a request to each of the models, of every round, all of them open in one process."""
    times = [[] for _ in models]
    with vllm_helper(log) as helper:
        for number, blocks in enumerate(models):
            model = flat(config, blocks, "f32")
            bytes_of_block = block_bytes(model, BLOCK_TOKENS, "f32")
            opened(helper, f"model-{number}", WORKLOAD, blocks_needed(WORKLOAD), bytes_of_block, config=model)
        for turn in range(given.rounds + 1):
            for number, found in enumerate(times):
                engine, requests = f"model-{number}", WORKLOAD["concurrency"]
                served = helper.ask("serve", timeout=900, engine=engine, workload=WORKLOAD, requests=requests)
                if turn > 0:
                    found.append(statistics.median(served["end_to_end_ms"]))
    return times


def check_unseen(figures, given, spec, config, parent, log):
    """Candidates that were never measured as a whole are served in turns with the parent between two tables of the same
    spec, and compared with what the tables' mean makes of them; between further tables, as long as those and the parent
    show that the machine's pace moves by more than the mean of so many windows makes up for. Whether there is another
    window, and whether one counts, is decided by the tables and the parent alone.
    """
    before, kept, doubt = None, [], math.inf
    for number in range(1, MOST_WINDOWS + 1):
        before = before or profiled(given, f"before-{number}", spec)
        if before is None:
            continue
        shapes = sorted(name for name in before.costs if name != "base")
        wanted = list(candidates(shapes, len(parent) // 2, given.candidates))
        of_parent, *times = serve_in_turns(given, config, [parent, *wanted], log)
        after = profiled(given, f"after-{number}", spec)
        if after is None:
            before = None
            continue
        window, before = Window(before, after, of_parent, times), after
        counts = abs(window.pace()) <= MOST_OF_PACE
        if counts:
            kept.append(window)
        doubt = doubt_of(kept, wanted)
        priced = window.predicted(parent) / statistics.median(of_parent) - 1
        print(
            f"      window {number}: {window.drift(wanted):+.1%} from table to table, the parent {window.pace():+.1%} "
            f"off its own time beside them, its price {priced:+.1%} off: {'counts' if counts else 'left out'}; "
            f"in doubt by {doubt:.1%}",
            flush=True,
        )
        if doubt <= MOST_DOUBT:
            compare(figures, wanted, kept)
            return
    figures.add(f"too noisy: after {MOST_WINDOWS} windows, {len(kept)} of which count, in doubt by {doubt:.1%}", False)


def doubt_of(windows, wanted):
    """A window's pace is the mean of its two tables', give or take half of what is between them."""
    if not windows:
        return math.inf
    return math.sqrt(sum((window.drift(wanted) / 2) ** 2 for window in windows)) / len(windows)


def compare(figures, wanted, windows):
    errors = []
    for number, blocks in enumerate(wanted):
        rounds = [window.candidates[number] for window in windows]
        served = [statistics.median(times) for times in rounds]
        price = statistics.mean(window.predicted(blocks) for window in windows)
        measured = statistics.mean(served)
        off = [abs(each - middle) / middle for times, middle in zip(rounds, served) for each in times]
        errors.append(abs(price / measured - 1))
        print(
            f"      candidate {number}, {len(blocks)} blocks: predicted {price:.2f} ms, measured {measured:.2f} ms "
            f"({price / measured - 1:+.1%}), its repeats scatter by {statistics.median(off):.1%}"
        )
    median, worst = statistics.median(errors), max(errors)
    figures.add(
        f"{len(errors)} candidates never measured as a whole: error of end-to-end latency {median:.1%} in the middle "
        f"(at most {MOST_MEDIAN:.0%}), {worst:.1%} at worst (at most {MOST_WORST:.0%})",
        median <= MOST_MEDIAN and worst <= MOST_WORST,
    )


def check_keys_and_values(figures, helper, directory):
    """The workload runs in exactly as many blocks as predicted, and not in one less."""
    workload = {**WORKLOAD, "concurrency": 4}
    config = json.loads((directory / "config.json").read_text())
    for less, expected in [(0, "finishes without preemption"), (1, "is preempted or refused")]:
        blocks = blocks_needed(workload) - less
        name = f"kv{less}"
        try:
            each = block_bytes(config, BLOCK_TOKENS, "f32")
            told = opened(helper, name, workload, blocks, each, directory=str(directory.resolve()))
            served = helper.ask("serve", timeout=900, engine=name, workload=workload, requests=4)
            suffices = served["preemptions"] == 0 and served["peak_running"] == 4
            found = f"{told['kv_blocks']} made, {served['preemptions']} preemptions, {served['peak_running']} at once"
            helper.ask("close", engine=name)
        except Refused as refused:
            suffices, found = False, str(refused)
        text = f"in {blocks} blocks of keys and values a workload of 4 requests {expected} ({found})"
        figures.add(text, suffices == (less == 0))


def check(figures, given, log):
    latency, memory = given.output / "latency", given.output / "memory"

    def spec(limits, recovery):
        data = ROOT / "examples" / "data"
        parent = given.parent.resolve()
        return SPEC.format(parent=parent, data=data, grid=given.grid, limits=limits, recovery=recovery)

    status, report = run(given.program, given.output, "latency", spec("{latency: 75%}", given.recovery))
    check_limit(figures, "latency", status, report)
    if report is None:
        return
    config = json.loads((latency / "checkpoint" / "config.json").read_text())
    parent = [json.dumps(entry(block["shape"])) for block in report["parent"]["architecture"]["blocks"]]
    check_unseen(figures, given, spec("{latency: 75%}", 0), config, parent, log)

    status, report = run(given.program, given.output, "memory", spec("{memory: 80%}", 0))
    check_limit(figures, "memory", status, report)
    if report is None:
        return
    with vllm_helper(log) as helper:
        check_keys_and_values(figures, helper, memory / "checkpoint")

    served = subprocess.run([sys.executable, ROOT / "serving" / "tests" / "check_served.py", latency / "checkpoint"])
    text = "the export's 20 greedy texts are transformers', and perplexities agree to three digits"
    figures.add(text, served.returncode == 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("parent", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--grid", type=int, default=256)
    parser.add_argument("--recovery", type=int, default=32768)
    given = parser.parse_args()
    figures = Figures("check-vllm")
    try:
        with open(given.output / "helper.log", "wb") as log:
            check(figures, given, log)
    except (EOFError, Refused, TimeoutError) as error:
        figures.add(f"vLLM's process: {error} (its words are in {given.output / 'helper.log'})", False)
    return figures.end()


if __name__ == "__main__":
    sys.exit(main())
