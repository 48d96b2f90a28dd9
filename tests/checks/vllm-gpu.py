"""Runs jobs measured in vLLM on a GPU and asserts what was promised of them: see vllm-gpu.sh.

    PYTHON vllm-gpu.py ESPALIER PARENT OUTPUT [--parts small large unseen] [--table FILE] [--rehearsal]
        [--candidates 8] [--rounds 3]

PYTHON is of the environment that has vLLM and the plugin.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import random_llama
from measured import (
    ROOT,
    Figures,
    block_bytes,
    candidates,
    check_limit,
    counted,
    entry,
    flat,
    kinds,
    planned_shapes,
    quartiles,
    rows,
    run,
    vllm_helper,
)

SPEC = """
parent: {parent}
data: {{train: [{data}/train.jsonl.xz], validation: [{data}/validation.jsonl.xz]}}
target:
  device: {device}
  engine: vllm
  precision: {precision}
  workload: {workload}
  limits: {limits}
search: {{{search}, strategies: [heterogeneous]}}
budget: {{sequence_tokens: 256, calibration_tokens: 8192, scoring_tokens: 1024, recovery_tokens: {recovery},
  validation_tokens: 4096}}
recovery: {{learning_rate: 0.0002, batch_sequences: 2}}
"""
# A Llama of the 1B class, and what stands for it in a rehearsal.
LARGE = {"hidden": 2048, "layers": 16, "channels": 8192, "heads": 32, "kv_heads": 8, "head": 64, "vocabulary": 32000}
REHEARSED = {"hidden": 192, "layers": 4, "channels": 512, "heads": 6, "kv_heads": 3, "head": 32, "vocabulary": 1024}
MOST_OF_DEVICE = 0.03
# A pace farther off than from one GPU of a kind to the next is no pace.
MOST_OF_PACE = 0.10
# Of equally many parameters, the slower model against the faster.
LEAST_SLOWER = 1.35
# A head is read from memory at each step, and no GPU reads faster than this: what a time of less has left out.
FASTEST_BYTES_PER_SECOND = 10e12
# Steps of decoding that are timed together, and room for those that look at the device.
REPEATS, MORE = 8, 12


class Setting:
    """The device, and what differs between a GPU and a rehearsal on the processor."""

    def __init__(self, rehearsal):
        self.rehearsal = rehearsal
        self.device, self.precision = ("cpu", "f32") if rehearsal else ("cuda", "bf16")
        self.block_tokens = 32 if rehearsal else 16
        self.large = REHEARSED if rehearsal else LARGE
        prompt, output, concurrency = (32, 8, 4) if rehearsal else (256, 64, 64)
        self.workload = {"prompt_tokens": prompt, "output_tokens": output, "concurrency": concurrency}

    def spec(self, parent, workload, limits, search, recovery):
        """A job as YAML, which JSON is too."""
        return SPEC.format(
            parent=parent.resolve(),
            data=ROOT / "examples" / "data",
            device=self.device,
            precision=self.precision,
            workload=json.dumps(workload),
            limits=json.dumps(limits),
            search=search,
            recovery=recovery,
        )


def small(figures, setting, given):
    """The parent's job from profile to verify, by a limit on a request's latency."""
    workload = {"prompt_tokens": 128, "output_tokens": 32, "concurrency": 1}
    search = "mlp_grid: 512, kv_groups: [3, 1]"
    spec = setting.spec(given.parent, workload, {"latency": "85%"}, search, given.recovery)
    status, report = run(given.program, given.output, "small", spec, "--device", setting.device)
    check_limit(figures, "latency", status, report)


def large(figures, setting, given):
    """A throughput at the concurrency, met by what is served."""
    parent, sizes = given.output / "large-parent", setting.large
    random_llama.write(parent, sizes)
    counts = [sizes["kv_heads"], max(1, sizes["kv_heads"] // 4)]
    # Fine enough for models of many small blocks beside few large ones.
    search = f"mlp_grid: {sizes['channels'] // 4}, kv_groups: {counts}"
    spec = setting.spec(parent, setting.workload, {"throughput": "115% at 90%"}, search, 0)
    status, report = run(given.program, given.output, "large", spec, "--device", setting.device)
    check_limit(figures, "throughput", status, report)


def unseen(figures, setting, given):
    """Models of the large parent's blocks that nobody timed, against its cost table."""
    table = given.table or given.output / "large" / "cost-table.json"
    if not table.exists():
        figures.add(f"there is a cost table at {table}", False)
        return
    sizes, known = setting.large, rows(json.loads(table.read_text()))
    check_head(figures, setting, known, sizes)
    config = random_llama.config(sizes)
    described = given.output / "unseen"
    described.mkdir()
    (described / "config.json").write_text(json.dumps(config))
    shapes = sorted(name for name in known if name.startswith("{"))
    one = "{prompt_tokens}x{output_tokens}x1".format(**setting.workload)
    shapes_of_one = planned_shapes(given.program, described, table, "--workload", one)
    pair = equal_parameters(known, shapes_of_one, setting.workload)
    # The parent comes first: what it is off by is the pace of the device, which all share.
    wanted = [parent_of(shapes, config["num_hidden_layers"])]
    wanted += candidates(shapes, config["num_hidden_layers"], given.candidates)
    times = timed(setting, config, wanted + [blocks_of(shape) for shape in pair], given)
    for point in points_of(setting.workload):
        check_point(figures, setting, known, wanted, point, times)
    check_equal_parameters(figures, setting, config, pair, times[len(wanted) :])


def blocks_of(shape):
    """A planned shape's blocks as JSON of a flat config's entries."""
    return [json.dumps(entry(block)) for block in shape["blocks"]]


def alone(workload):
    """A step for one sequence."""
    return "decode", workload["prompt_tokens"], 1


def equal_parameters(known, shapes, workload):
    """Of the plan's pairs of equal parameters the one farthest apart by the device's own time, the faster first."""
    point = alone(workload)

    def device(shape):
        return known["base"][point] + sum(known[block][point] for block in blocks_of(shape))

    pairs = [sorted((pair["less"], pair["more"]), key=device) for pair in shapes["equal_parameters"]]
    return max(pairs, key=lambda pair: device(pair[1]) / device(pair[0]), default=[])


def check_head(figures, setting, known, sizes):
    """Whether a step's base can have read the head."""
    head = sizes["vocabulary"] * sizes["hidden"] * 2
    least = 1e3 * head / FASTEST_BYTES_PER_SECOND
    for place, base in sorted(known["base"].items()):
        if place[0] == "decode" and not setting.rehearsal:
            figures.add(
                f"{place}: a base of {1e3 * base:.1f} us; to read a head of {head >> 20} MiB takes {1e3 * least:.1f}",
                base >= least,
            )


def points_of(workload):
    prompt, concurrency = workload["prompt_tokens"], workload["concurrency"]
    return [
        ("decode", prompt, 1),
        ("decode", prompt, concurrency),
        ("prefill", prompt, 1),
        ("prefill", prompt, concurrency),
    ]


def timed(setting, config, wanted, given):
    """What [`time_all`] finds of models of these blocks, all open in one process."""
    with open(given.output / "helper.log", "wb") as log, vllm_helper(log) as helper:
        for number, blocks in enumerate(wanted):
            open_candidate(helper, setting, f"c{number}", flat(config, blocks, setting.precision))
            print(f"opened {number + 1} of {len(wanted)}", flush=True)
        return time_all(helper, len(wanted), points_of(setting.workload), given.rounds)


def parent_of(shapes, layers):
    """The blocks of a parent whose layers are alike: of each kind the largest."""
    size = {"attention": "num_key_value_heads", "mlp": "intermediate_size"}
    blocks = [json.loads(shape) for shape in shapes]
    each = [max((b for b in blocks if b["type"] == kind), key=lambda b: b[size[kind]]) for kind in ("attention", "mlp")]
    return [json.dumps(block) for block in each] * layers


def open_candidate(helper, setting, name, config):
    workload = setting.workload
    context = workload["prompt_tokens"] + REPEATS + MORE
    blocks = workload["concurrency"] * math.ceil(context / setting.block_tokens) + 1
    helper.ask(
        "open",
        timeout=900,
        engine=name,
        config=config,
        precision=setting.precision,
        max_tokens=max(256, workload["prompt_tokens"] * workload["concurrency"]),
        max_sequences=workload["concurrency"],
        max_context=context,
        kv_bytes=blocks * block_bytes(config, setting.block_tokens, setting.precision),
        block_tokens=setting.block_tokens,
        compiled=not setting.rehearsal,
    )


def time_all(helper, count, points, rounds):
    """Milliseconds of every step, the models in turns: for each model by point and clock, device's or wall's."""
    found = [{} for _ in range(count)]
    for _ in range(rounds):
        for number, times in enumerate(found):
            for kind, length, sequences in points:
                point = {kind: {"context" if kind == "decode" else "tokens": length, "sequences": sequences}}
                answer = helper.ask("steps", timeout=600, engine=f"c{number}", point=point, repeats=REPEATS)
                for clock in ("device_ms", "wall_ms"):
                    times.setdefault(((kind, length, sequences), clock), []).extend(answer[clock] or [])
    return found


def check_point(figures, setting, known, wanted, point, times):
    """Predicted against measured at one point: the device's own time, and the clock's by the host's law. The device's
    pace moves between the profile and now, and with what is open beside: by so much as the parent is off its own.
    """
    clock = "wall_ms" if setting.rehearsal else "device_ms"
    host = [known.get(name, {}).get(point, 0.0) for name in ("host_floor", "host_block", "host_alone")]
    pace, errors, walls = 1.0, [], []
    for number, (blocks, own) in enumerate(zip(wanted, times)):
        predicted = known["base"][point] + sum(known[block][point] for block in blocks)
        measured, by_clock = (statistics.median(own[point, which]) for which in (clock, "wall_ms"))
        if number == 0:
            pace = measured / predicted
        wall = max(predicted + host[2], host[0] + host[1] * len(blocks))
        if number > 0:
            errors.append(abs(pace * predicted / measured - 1))
            walls.append(abs(wall / by_clock - 1))
        who = f"candidate {number}" if number > 0 else "the parent"
        print(
            f"      {point}, {who}, {len(blocks)} blocks: predicted {predicted:.4f} ms, measured "
            f"{measured:.4f} ms ({predicted / measured - 1:+.1%}, at the parent's pace "
            f"{pace * predicted / measured - 1:+.1%}); by the clock {wall:.3f} and {by_clock:.3f} ms"
        )
    told = f"host: {host[0]:.3f} ms, {1e3 * host[1]:.1f} us a block, {host[2]:.3f} ms that the device waits"
    figures.add(
        f"{point}: {len(errors)} candidates never measured as a whole: error of the device's time, at the "
        f"parent's pace ({pace - 1:+.1%}), {max(errors):.1%} at worst (at most {MOST_OF_DEVICE:.0%}), "
        f"{statistics.median(errors):.1%} in the middle; by the clock "
        f"{statistics.median(walls):.1%} in the middle ({told})",
        (max(errors) <= MOST_OF_DEVICE and abs(pace - 1) <= MOST_OF_PACE) or setting.rehearsal,
    )


def check_equal_parameters(figures, setting, config, pair, times):
    """Two models of equally many parameters, each with at least half of the parent's blocks of each kind."""
    if not pair:
        figures.add("the plan finds a pair of equally many parameters", False)
        return
    clock = "wall_ms" if setting.rehearsal else "device_ms"
    faster, slower = (quartiles(own[alone(setting.workload), clock]) for own in times)
    ratio = slower[1] / faster[1]
    fewer, more = sorted(counted(config, shape) for shape in pair)
    half = all(2 * count >= config["num_hidden_layers"] for shape in pair for count in kinds(shape))
    told = []
    for shape, times in zip(pair, (faster, slower)):
        attention, mlp = kinds(shape)
        low, middle, high = (1e3 * time for time in times)
        told.append(f"{attention} attention + {mlp} MLP, {middle:.0f} us (quartiles {low:.0f} to {high:.0f})")
    holds = ratio >= LEAST_SLOWER and faster[2] < slower[0] and half and more / fewer < 1.001
    figures.add(
        f"{fewer:,} and {more:,} parameters: a step for one sequence takes {told[0]}, or {told[1]}: {ratio:.2f} times "
        f"as long (at least {LEAST_SLOWER})",
        holds or setting.rehearsal,
    )


PARTS = {"small": small, "large": large, "unseen": unseen}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("parent", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--table", type=Path, help="the unseen part's, in place of the one that the large part leaves")
    parser.add_argument("--rehearsal", action="store_true", help="on the processor, small; asserts limits only")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recovery", type=int, default=32768)
    given = parser.parse_args()
    figures = Figures("check-vllm-gpu")
    setting = Setting(given.rehearsal)
    for part in given.parts:
        PARTS[part](figures, setting, given)
    return figures.end()


if __name__ == "__main__":
    sys.exit(main())
