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

from measured import ROOT, Figures, block_bytes, candidates, check_limit, flat, rows, run, vllm_helper

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


def costs(table):
    """Milliseconds of a request by shape, as JSON of its entry, and of the base."""
    alone = WORKLOAD["concurrency"]
    found = {}
    for name, places in rows(table).items():
        points = {place[:2]: median for place, median in places.items() if place[2] == alone}
        found[name] = request_ms(points, WORKLOAD)
    return found


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
    """What blocks cost now, measured anew: milliseconds of a request by shape, and of the base."""
    path = given.output / f"{name}.yaml"
    path.write_text(spec)
    output = given.output / name
    command = [given.program, "profile", "run", path, "--output-dir", output, "--vllm-python", sys.executable]
    subprocess.run(command, check=True)
    return costs(json.loads((output / "cost-table.json").read_text()))


def predicted(price, blocks):
    return price["base"] + sum(price[block] for block in blocks)


def serve_in_turns(given, config, wanted, log):
    """Milliseconds of a request to each candidate, of every round, all of them open in one process."""
    times = [[] for _ in wanted]
    with vllm_helper(log) as helper:
        for number, blocks in enumerate(wanted):
            model = flat(config, blocks, "f32")
            bytes_of_block = block_bytes(model, BLOCK_TOKENS, "f32")
            opened(helper, f"candidate-{number}", WORKLOAD, blocks_needed(WORKLOAD), bytes_of_block, config=model)
        for turn in range(given.rounds + 1):
            for number, found in enumerate(times):
                engine, requests = f"candidate-{number}", WORKLOAD["concurrency"]
                served = helper.ask("serve", timeout=900, engine=engine, workload=WORKLOAD, requests=requests)
                if turn > 0:
                    found.append(statistics.median(served["end_to_end_ms"]))
    return times


def check_unseen(figures, given, spec, config, layers, log):
    """Candidates that were never measured as a whole are served between two tables of the same spec, and compared with
    what the tables' mean makes of them; between further tables, as long as those show that the machine's pace moves by
    more than the mean of so many windows makes up for. Whether there is another window is decided by the tables alone.
    """
    tables, windows, drifts = [profiled(given, "table-0", spec)], [], []
    wanted = list(candidates(sorted(name for name in tables[0] if name != "base"), layers, given.candidates))
    while len(windows) < MOST_WINDOWS:
        windows.append(serve_in_turns(given, config, wanted, log))
        before = tables[-1]
        tables.append(profiled(given, f"table-{len(windows)}", spec))
        moved = [predicted(tables[-1], blocks) / predicted(before, blocks) - 1 for blocks in wanted]
        drifts.append(max(moved, key=abs))
        # A window's pace is the mean of its two tables', give or take half of what is between them.
        doubt = math.sqrt(sum((drift / 2) ** 2 for drift in drifts)) / len(drifts)
        print(f"      window {len(windows)}: {drifts[-1]:+.1%} from table to table, in doubt by {doubt:.1%}", flush=True)
        if doubt <= MOST_DOUBT:
            compare(figures, wanted, tables, windows)
            return
    figures.add(f"too noisy: after {MOST_WINDOWS} windows the machine's pace is in doubt by {doubt:.1%}", False)


def compare(figures, wanted, tables, windows):
    errors = []
    for number, blocks in enumerate(wanted):
        prices = [(predicted(one, blocks) + predicted(after, blocks)) / 2 for one, after in zip(tables, tables[1:])]
        served = [statistics.median(rounds[number]) for rounds in windows]
        price, measured = statistics.mean(prices), statistics.mean(served)
        off = [abs(each - middle) / middle for rounds, middle in zip(windows, served) for each in rounds[number]]
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
    latency, memory = given.output / "latency", given.output / "memory"
    log = open(given.output / "helper.log", "wb")

    def spec(limits, recovery):
        data = ROOT / "examples" / "data"
        parent = given.parent.resolve()
        return SPEC.format(parent=parent, data=data, grid=given.grid, limits=limits, recovery=recovery)

    status, report = run(given.program, given.output, "latency", spec("{latency: 75%}", given.recovery))
    check_limit(figures, "latency", status, report)
    if report is None:
        return figures.end()
    config = json.loads((latency / "checkpoint" / "config.json").read_text())
    layers = len(report["parent"]["architecture"]["blocks"]) // 2
    check_unseen(figures, given, spec("{latency: 75%}", 0), config, layers, log)

    status, report = run(given.program, given.output, "memory", spec("{memory: 80%}", 0))
    check_limit(figures, "memory", status, report)
    if report is None:
        return figures.end()
    with vllm_helper(log) as helper:
        check_keys_and_values(figures, helper, memory / "checkpoint")

    served = subprocess.run([sys.executable, ROOT / "serving" / "tests" / "check_served.py", latency / "checkpoint"])
    text = "the export's 20 greedy texts are transformers', and perplexities agree to three digits"
    figures.add(text, served.returncode == 0)
    return figures.end()


if __name__ == "__main__":
    sys.exit(main())
