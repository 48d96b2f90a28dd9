"""Whether costs of vLLM's steps add up block by block on this machine: stacks timed by the helper, mixes predicted.

    python bench/vllm-additive.py SHAPE [--processes 1] [--rounds 4] [--repeats 16] [--compiled] [--out FILE.json]

SHAPE is `small` (hidden 576) or `large` (hidden 2048). Two depths of each block and some mixes are open at once, shared
out over helper processes that start together; they are timed in turns, one after another. Block costs and a base come
from all stacks by least squares of T = base + sum of copies × cost; mixes, which the fit has not seen, are then
predicted. Run with the Python that has vLLM; needs numpy.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "serving" / "tests"))

from client import Client  # noqa: E402


def attention(heads, kv_heads, head_dim=64):
    return {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "sliding_window": None,
    }


def mlp(width):
    return {"type": "mlp", "intermediate_size": width, "bias": False}


def alternating(layers, attentions, mlps):
    """As many layers of attention and MLP, whose shapes take turns; None leaves the block out."""
    found = []
    for layer in range(layers):
        found += [attentions[layer % len(attentions)], mlps[layer % len(mlps)]]
    return [name for name in found if name is not None]


# Names of blocks and of stacks; a stack is a list of names. Every one has attention, since vLLM knows no other models.
SHAPES = {
    "small": {
        "hidden": 576,
        "vocabulary": 49152,
        "blocks": {
            "attention 9/3": attention(9, 3),
            "attention 3/1": attention(3, 1),
            "mlp 1536": mlp(1536),
            "mlp 512": mlp(512),
        },
        "mixes": {
            "SmolLM2": alternating(30, ["attention 9/3"], ["mlp 1536"]),
            "every other": alternating(20, ["attention 9/3", "attention 3/1"], ["mlp 1536", "mlp 1536", "mlp 512"]),
            "gaps": alternating(20, ["attention 9/3", None, "attention 3/1"], ["mlp 512", "mlp 1536", None, "mlp 512"]),
        },
    },
    "large": {
        "hidden": 2048,
        "vocabulary": 32000,
        "blocks": {
            "attention 32/8": attention(32, 8),
            "attention 16/4": attention(16, 4),
            "mlp 8192": mlp(8192),
            "mlp 2048": mlp(2048),
        },
        "mixes": {
            "uniform": alternating(16, ["attention 32/8"], ["mlp 8192"]),
            "every other": alternating(16, ["attention 32/8", "attention 16/4"], ["mlp 8192", "mlp 8192", "mlp 2048"]),
            "gaps": alternating(16, ["attention 32/8", None, "attention 16/4"], ["mlp 2048", "mlp 8192", None]),
        },
    },
}
DEPTHS = (4, 12)


def stacks_of(shape):
    [carrier, *_] = shape["blocks"]
    found = {}
    for name, block in shape["blocks"].items():
        for depth in DEPTHS:
            found[f"{name} × {depth}"] = ([] if block["type"] == "attention" else [carrier]) + [name] * depth
    return found


def config(shape, names):
    return {
        "model_type": "espalier",
        "architectures": ["EspalierForCausalLM"],
        "family": "llama",
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["hidden"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "blocks": [shape["blocks"][name] for name in names],
    }


def point(text):
    """`decode:512x64`: context and sequences; `prefill:2048x1`: tokens and sequences."""
    phase, sizes = text.split(":")
    length, sequences = (int(size) for size in sizes.split("x"))
    key = {"decode": "context", "prefill": "tokens"}[phase]
    return {phase: {key: length, "sequences": sequences}}


def start(index, given, work):
    """A helper with caches of its own: they are not made to be shared while they are written."""
    caches = {
        name: f"{work}/{index}/{name}" for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    log = open(given.logs / f"helper-{index}.log", "wb")
    client = Client([sys.executable, "-m", "espalier_vllm.helper"], {**caches, "HF_HOME": f"{work}/{index}/hf"}, log)
    return client, client.ask("hello", 300, protocol=1)


def open_all(given, shape, wanted, work):
    """Every stack in one of the helpers: by name, the client that has it and what was answered."""
    found, hello, failed = {}, {}, []

    def run(index):
        try:
            client, hello[index] = start(index, given, work)
            for name in list(wanted)[index :: given.processes]:
                options = {
                    "precision": given.precision,
                    "max_tokens": given.max_tokens,
                    "max_sequences": given.max_sequences,
                    "max_context": given.max_context,
                    "kv_bytes": given.kv_bytes,
                    "compiled": given.compiled,
                }
                if given.graph_sizes:
                    options["graph_sizes"] = given.graph_sizes
                opened = client.ask("open", 600, engine=name, config=config(shape, wanted[name]), **options)
                print(f"opened {name} in {opened['seconds']:.1f} s", flush=True)
                found[name] = (client, opened)
        except Exception as error:
            failed.append(error)
            print(f"helper {index}: {error}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(given.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(f"{len(failed)} helpers failed")
    return found, hello[0]


def low(values):
    """The lower quartile: what the machine does when least disturbed, without trusting one lucky step."""
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def time_all(given, opened):
    """`{point: {clock: {stack: [ms]}}}`, and what each stack's steps said beside."""
    times = {text: {} for text in given.points}
    notes = {text: {} for text in given.points}
    for number in range(given.rounds):
        for name, (client, _) in opened.items():
            for text in given.points:
                answer = client.ask("steps", 600, engine=name, point=point(text), repeats=given.repeats, warm_ups=2)
                for clock in ("wall_ms", "cpu_ms", "device_ms"):
                    if answer[clock] is not None:
                        times[text].setdefault(clock, {}).setdefault(name, []).extend(answer[clock])
                notes[text][name] = {key: answer[key] for key in ("busy", "context", "device_source", "captured")}
        print(f"round {number + 1} of {given.rounds}", flush=True)
    return times, notes


def fit(shape, stacks, times):
    """The base and each block's cost, by least squares over all stacks, each weighed by its own time."""
    names = list(shape["blocks"])
    rows = [[1.0, *(blocks.count(name) for name in names)] for blocks in stacks.values()]
    values = numpy.array([low(times[name]) for name in stacks])
    weights = 1 / values
    solution, *_ = numpy.linalg.lstsq(numpy.array(rows) * weights[:, None], values * weights, rcond=None)
    left = numpy.array(rows) @ solution / values - 1
    return float(solution[0]), dict(zip(names, map(float, solution[1:]))), float(numpy.abs(left).max())


def report(shape, stacks, mixes, times):
    found = {}
    for text, clocks in times.items():
        for clock, measured in clocks.items():
            base, costs, left = fit(shape, stacks, measured)
            each = ", ".join(f"{name} {1e3 * cost:.1f}" for name, cost in costs.items())
            print(f"{text} {clock}: base {1e3 * base:.1f} us, {each} us; stacks within {100 * left:.1f}%")
            found[f"{text} {clock}"] = {"base_ms": base, "costs_ms": costs, "worst_stack": left, "mixes": {}}
            for name, blocks in mixes.items():
                predicted, known = base + sum(costs[block] for block in blocks), low(measured[name])
                quartiles = statistics.quantiles(measured[name], n=4)
                found[f"{text} {clock}"]["mixes"][name] = {
                    "predicted": predicted,
                    "measured": known,
                    "quartiles": quartiles,
                }
                difference = 100 * (predicted / known - 1)
                print(f"    {name}: predicted {predicted:.4f} ms, measured {known:.4f} ms, {difference:+.1f}%")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--points", nargs="+", default=["decode:128x1", "prefill:256x1"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--max-sequences", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=2560)
    parser.add_argument("--kv-bytes", type=int, default=256 << 20)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--graph-sizes", type=int, nargs="*")
    parser.add_argument("--lock", type=Path, help="a file to hold locked while steps are timed")
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    stacks, mixes = stacks_of(shape), shape["mixes"]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        opened, hello = open_all(given, shape, {**stacks, **mixes}, work)
        print(
            f"{len(opened)} engines open after {time.monotonic() - begun:.0f} s: "
            f"vLLM {hello['vllm']} on {hello['device']}"
        )
        with open(given.lock or os.devnull, "a") as lock:
            if given.lock is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            times, notes = time_all(given, opened)
        memory = {id(client): client.ask("memory") for client, _ in opened.values()}
        for client in {id(client): client for client, _ in opened.values()}.values():
            client.end(30)
    found = report(shape, stacks, mixes, times)
    print(f"{time.monotonic() - begun:.0f} s in all")
    if given.out is not None:
        answers = {name: answer for name, (_, answer) in opened.items()}
        given.out.write_text(
            json.dumps(
                {
                    "hello": hello,
                    "report": found,
                    "times": times,
                    "notes": notes,
                    "opened": answers,
                    "memory": list(memory.values()),
                }
            )
        )


if __name__ == "__main__":
    main()
