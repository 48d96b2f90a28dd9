"""Finds models of equal size and unequal speed in a measured table, and serves them in turns: see shapes.sh.

    PYTHON shapes.py ESPALIER PARENT OUTPUT [--table FILE] [--rounds 15] [--plan-only]

PYTHON is of the environment that has vLLM and the plugin. With --table nothing is profiled.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from measured import (
    ROOT,
    Figures,
    block_bytes,
    counted,
    entry,
    flat,
    kinds,
    planned_shapes,
    quartiles,
    vllm_helper,
)

from client import Refused

WORKLOAD = {"prompt_tokens": 32, "output_tokens": 64, "concurrency": 1}
SPEC = """
parent: {parent}
data: {{train: [{data}/train.jsonl.xz], validation: [{data}/validation.jsonl.xz]}}
target:
  engine: vllm
  workload: {{prompt_tokens: 32, output_tokens: 64, concurrency: 1}}
  limits: {{latency: 75%}}
search: {{mlp_grid: 256}}
"""
LEAST_SLOWER, LEAST_LARGER = 1.35, 2.2
# Of equal latency: predictions are promised within 5% in the middle, so a pair may come out so far apart.
MOST_APART = 0.05
# So many pairs of equal latency are served, those that differ most in size.
TRIED = 3
BLOCK_TOKENS = 32


def profiled(given):
    """The table of the parent's shapes, measured here."""
    spec = given.output / "shapes.yaml"
    spec.write_text(SPEC.format(parent=given.parent.resolve(), data=ROOT / "examples" / "data"))
    command = [given.program, "profile", "run", spec, "--output-dir", given.output / "profile"]
    subprocess.run([*command, "--vllm-python", sys.executable], check=True)
    return given.output / "profile" / "cost-table.json"


def told(shape):
    attention, mlp = kinds(shape)
    predicted = shape["prediction"]["figures"]["latency_ms"]
    return f"{attention} attention + {mlp} MLP, {shape['parameters']:,} parameters, predicted {predicted:.1f} ms"


def opened(helper, name, config):
    context = WORKLOAD["prompt_tokens"] + WORKLOAD["output_tokens"]
    blocks = WORKLOAD["concurrency"] * math.ceil(context / BLOCK_TOKENS) + 1
    helper.ask(
        "open",
        timeout=900,
        engine=name,
        config=config,
        precision="f32",
        max_tokens=256,
        max_sequences=WORKLOAD["concurrency"],
        max_context=context,
        kv_bytes=blocks * block_bytes(config, BLOCK_TOKENS, "f32"),
        block_tokens=BLOCK_TOKENS,
    )


def served(given, config, shapes):
    """Milliseconds of a request for each of the shapes, in turns; a first round is not counted."""
    times = [[] for _ in shapes]
    with open(given.output / "helper.log", "wb") as log, vllm_helper(log) as helper:
        for number, shape in enumerate(shapes):
            blocks = [json.dumps(entry(block)) for block in shape["blocks"]]
            opened(helper, f"s{number}", flat(config, blocks, "f32"))
        for turn in range(given.rounds + 1):
            for step in range(len(shapes)):
                # Nobody is always the one after the slowest.
                number = (step + turn) % len(shapes)
                requests = WORKLOAD["concurrency"]
                answer = helper.ask("serve", timeout=900, engine=f"s{number}", workload=WORKLOAD, requests=requests)
                if turn > 0:
                    times[number].append(statistics.median(answer["end_to_end_ms"]))
    return times


def measured(times):
    low, middle, high = quartiles(times)
    tokens = WORKLOAD["concurrency"] * WORKLOAD["output_tokens"]
    return f"{middle:.1f} ms (quartiles {low:.1f} to {high:.1f}), {tokens / middle * 1000:.0f} tokens/s"


def check_found(figures, config, pairs, what, least):
    """The plan's part: far enough apart, half of each kind kept, every parameter counted."""
    layers = config["num_hidden_layers"]
    for pair in pairs:
        for shape in (pair["less"], pair["more"]):
            print(f"      {what}: {told(shape)}")
    shapes = [shape for pair in pairs for shape in (pair["less"], pair["more"])]
    kept = all(2 * count >= layers for shape in shapes for count in kinds(shape))
    right = all(counted(config, shape) == shape["parameters"] for shape in shapes)
    ratio = pairs[0]["ratio"] if pairs else 0.0
    figures.add(
        f"{what}: the plan finds a pair {ratio:.2f} times apart (at least {least}), half of the attention and of the MLPs "
        f"kept in each, parameters counted with embedding and head",
        ratio >= least and kept and right,
    )


def check_size(figures, pair, less, more):
    """Equal parameters, unequal latency."""
    slower = statistics.median(more) / statistics.median(less)
    disjoint = quartiles(less)[2] < quartiles(more)[0]
    few, many = sorted(shape["parameters"] for shape in (pair["less"], pair["more"]))
    figures.add(
        f"{few:,} and {many:,} parameters ({many / few - 1:.2%} apart): {measured(less)} against {measured(more)}, "
        f"{slower:.2f} times as long (at least {LEAST_SLOWER}), quartiles {'apart' if disjoint else 'overlap'}",
        slower >= LEAST_SLOWER and disjoint and many / few < 1.001,
    )


def check_latency(figures, pairs, times):
    """Equal latency, unequal parameters."""
    found = []
    for pair, (less, more) in zip(pairs, times):
        apart = statistics.median(more) / statistics.median(less) - 1
        larger = pair["more"]["parameters"] / pair["less"]["parameters"]
        found.append((abs(apart), larger))
        print(f"      {larger:.2f} times the parameters: {measured(less)} against {measured(more)} ({apart:+.1%})")
    apart, larger = min(found, default=(math.inf, 0.0))
    figures.add(
        f"of {len(found)} pairs of equal latency the nearest is {apart:.1%} apart (at most {MOST_APART:.0%}), with {larger:.2f} "
        f"times the parameters (at least {LEAST_LARGER})",
        apart <= MOST_APART and larger >= LEAST_LARGER,
    )


def check(figures, given):
    config = json.loads((given.parent / "config.json").read_text())
    shapes = planned_shapes(given.program, given.parent, given.table or profiled(given))
    sized = sorted(shapes["equal_parameters"], key=lambda pair: -pair["ratio"])[:1]
    timed = sorted(shapes["equal_latency"], key=lambda pair: -pair["ratio"])[:TRIED]
    check_found(figures, config, sized, "equal parameters", LEAST_SLOWER)
    check_found(figures, config, timed, "equal latency", LEAST_LARGER)
    timed = [pair for pair in timed if pair["ratio"] >= LEAST_LARGER]
    if not given.plan_only and sized and timed:
        models = [shape for pair in sized + timed for shape in (pair["less"], pair["more"])]
        times = served(given, config, models)
        check_size(figures, sized[0], *times[:2])
        check_latency(figures, timed, list(zip(times[2::2], times[3::2])))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("parent", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plan-only", action="store_true")
    given = parser.parse_args()
    figures = Figures("check-shapes")
    try:
        check(figures, given)
    except (EOFError, Refused, TimeoutError, subprocess.CalledProcessError) as error:
        figures.add(str(error), False)
    return figures.end()


if __name__ == "__main__":
    sys.exit(main())
