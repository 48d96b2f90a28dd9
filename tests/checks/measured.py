"""What checks of jobs measured in vLLM share: jobs, tables read back, models that nobody measured, and figures.

Not run by itself. Of the environment that has vLLM and the plugin.
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "serving" / "tests"))

from client import Client  # noqa: E402
from espalier_vllm.helper.clock import HostClock  # noqa: E402


class Figures:
    """What was found, and whether it holds; printed at the end."""

    def __init__(self, check):
        self.check, self.lines = check, []

    def add(self, text, holds):
        self.lines.append((text, holds))
        print(f"{'ok  ' if holds else 'FAIL'}  {text}", flush=True)

    def end(self):
        print()
        for text, holds in self.lines:
            print(f"{'ok  ' if holds else 'FAIL'}  {text}")
        held = sum(holds for _, holds in self.lines)
        print(f"{self.check}: {held} of {len(self.lines)} hold")
        return 0 if held == len(self.lines) else 1


def run(program, output, name, spec, *more):
    """One command; its status and the report, None where the job failed."""
    path = output / f"{name}.yaml"
    path.write_text(spec)
    command = [program, "run", path, "--output-dir", output / name, "--vllm-python", sys.executable, *more]
    status = subprocess.run(command).returncode
    report = output / name / "report.json"
    if not report.exists():
        return status, None
    return status, json.loads(report.read_text())


def check_limit(figures, metric, status, report):
    if report is None:
        figures.add(f"{metric}: the job ended with {status}", False)
        return
    [limit] = [each for each in report["limits"] if each["metric"] == metric]
    reading = limit["verified"]
    figures.add(
        f"{metric}: the export measures {reading['value']:.6g}, limit {reading['limit']:.6g}, parent beside it "
        f"{reading['parent']:.6g}, predicted {reading['predicted']:.6g} ({reading['error']:+.1%})",
        status == 0 and reading["inside"],
    )


def entry(subject):
    """A cost row's block as an entry of a flat config."""
    if "attention" in subject:
        shape = subject["attention"]
        return {
            "type": "attention",
            "num_attention_heads": shape["kv_groups"] * shape["queries_per_group"],
            "num_key_value_heads": shape["kv_groups"],
            "head_dim": shape["head_dim"],
            "qkv_bias": shape["qkv_bias"],
            "output_bias": shape["output_bias"],
            "qk_norm": shape["qk_norm"],
            "sliding_window": shape["sliding_window"],
        }
    return {"type": "mlp", "intermediate_size": subject["mlp"]["channels"], "bias": subject["mlp"]["bias"]}


def rows(table):
    """Milliseconds of a cost table's rows: by subject (a block's entry as JSON, or a name), then by kind of point,
    tokens or context, and sequences."""
    found = {}
    for row in table["profile"]["rows"]:
        [(kind, load)] = row["point"].items()
        place = kind, load["tokens" if kind == "prefill" else "context"], load["sequences"]
        found.setdefault(name_of(row["subject"]), {})[place] = row["median_ms"]
    return found


def name_of(subject):
    if isinstance(subject, str):
        return subject
    return json.dumps(entry(subject["block"])) if "block" in subject else "base"


def candidates(shapes, layers, count):
    """Lists of blocks that nobody measured: sizes and absences at random, never without attention."""
    source = random.Random(20)
    attention = [shape for shape in shapes if json.loads(shape)["type"] == "attention"]
    mlp = [shape for shape in shapes if json.loads(shape)["type"] == "mlp"]
    for _ in range(count):
        keep = source.uniform(0.6, 1.0)
        blocks = [source.choice(attention)]
        for _ in range(layers):
            blocks += [source.choice(kind) for kind in (mlp, attention) if source.random() < keep]
        yield blocks


def flat(config, blocks, precision, positions=512):
    """The config of a model of these blocks, all else as `config` has it."""
    kept = "vocab_size hidden_size hidden_act rms_norm_eps tie_word_embeddings bos_token_id eos_token_id".split()
    return {
        **{key: config[key] for key in kept if key in config},
        "model_type": "espalier",
        "architectures": ["EspalierForCausalLM"],
        "family": config.get("family", config["model_type"]),
        "dtype": {"f32": "float32", "bf16": "bfloat16"}[precision],
        "rope_theta": 10000.0,
        "max_position_embeddings": max(positions, config["max_position_embeddings"]),
        "blocks": [json.loads(block) for block in blocks],
    }


def block_bytes(config, tokens, precision):
    """Bytes of keys and values of one block of so many tokens."""
    blocks = config.get("blocks")
    if blocks is None:
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        widths = [config.get("num_key_value_heads", heads) * head] * config["num_hidden_layers"]
    else:
        widths = [b["num_key_value_heads"] * b["head_dim"] for b in blocks if b["type"] == "attention"]
    return tokens * sum(2 * {"f32": 4, "bf16": 2}[precision] * width for width in widths)


def planned_shapes(program, parent, table, *more):
    """What `espalier plan --shapes` finds in a table."""
    command = [program, "plan", parent, "--shapes", "--table", table, *more, "-o", "json"]
    [shapes] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return shapes


def kinds(shape):
    """How many blocks of attention and how many MLPs a planned shape has."""
    attention = sum("attention" in block for block in shape["blocks"])
    return attention, len(shape["blocks"]) - attention


def counted(config, shape):
    """Every parameter of a planned shape, by the shapes alone."""
    hidden = config["hidden_size"]
    tables = 1 if config["tie_word_embeddings"] else 2
    total = tables * config["vocab_size"] * hidden + hidden
    for block in shape["blocks"]:
        if "attention" in block:
            one = block["attention"]
            heads = one["kv_groups"] * (2 * one["queries_per_group"] + 2)
            total += hidden * heads * one["head_dim"] + hidden
        else:
            total += 3 * hidden * block["mlp"]["channels"] + hidden
    return total


def quartiles(times):
    return statistics.quantiles(times, n=4, method="inclusive")


@contextlib.contextmanager
def vllm_helper(log):
    """A process of vLLM's, as a worker starts it: with as many threads as there are processors that it may use."""
    threads = max(1, int(HostClock().allowed()))
    with Client([sys.executable, "-m", "espalier_vllm.helper"], {"OMP_NUM_THREADS": str(threads)}, log) as helper:
        helper.ask("hello", protocol=1)
        yield helper
        helper.end(timeout=60)
