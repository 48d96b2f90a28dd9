"""Compresses a parent that is larger than what its device may hold: see gpu-streamed.sh.

    PYTHON gpu-streamed.py ESPALIER OUTPUT [--rehearsal]

PYTHON has PyTorch and safetensors.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import random_llama

ROOT = Path(__file__).resolve().parent.parent.parent
SPEC = """
parent: {parent}
data: {{train: [{data}/train.jsonl.xz], validation: [{data}/validation.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 128, output_tokens: 8, concurrency: 1}}
  limits: {{latency: 600s, block_parameters: 50%}}
search: {{mlp_grid: {grid}, kv_groups: [{kv_heads}, {fewer}], strategies: [heterogeneous]}}
budget: {{sequence_tokens: 256, calibration_tokens: 8192, scoring_tokens: 2048, recovery_tokens: 0, validation_tokens: 4096}}
"""
LARGE = {
    "sizes": {"hidden": 4096, "layers": 32, "channels": 14336, "heads": 32, "kv_heads": 8, "head": 128, "vocabulary": 128256},
    "memory": "12GiB",
    "device": "cuda",
}
REHEARSED = {
    "sizes": {"hidden": 256, "layers": 8, "channels": 1024, "heads": 8, "kv_heads": 4, "head": 32, "vocabulary": 1024},
    "memory": "20MiB",
    "device": "cpu",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("output", type=Path)
    parser.add_argument("--rehearsal", action="store_true", help="on the processor, small")
    given = parser.parse_args()
    setting = REHEARSED if given.rehearsal else LARGE
    sizes, parent = setting["sizes"], given.output / "parent"
    random_llama.write(parent, sizes, setting["device"])
    size = (parent / "model.safetensors").stat().st_size
    print(f"the parent has {size / 1e9:.2f} GB of weights; the device may hold {setting['memory']}", flush=True)
    kv_heads = sizes["kv_heads"]
    spec = given.output / "job.yaml"
    spec.write_text(
        SPEC.format(
            parent=parent.resolve(),
            data=ROOT / "examples" / "data",
            grid=sizes["channels"] // 2,
            kv_heads=kv_heads,
            fewer=max(1, kv_heads // 4),
        )
    )
    outcome = given.output / "outcome"
    command = [given.program, "run", spec, "--output-dir", outcome, "--device", setting["device"]]
    started = time.monotonic()
    status = subprocess.run([*command, "--device-memory", setting["memory"]], check=False).returncode
    print(f"\nthe job took {time.monotonic() - started:.0f} s and ended with {status}")
    if status != 0:
        return 1
    report = json.loads((outcome / "report.json").read_text())
    print(", ".join(f"{stage['stage']} {stage['seconds']:.1f} s" for stage in report["stages"]))
    shortage = report["parent"]["measurement"]
    held = "needed_bytes" not in shortage
    inside = all(limit["verified"]["inside"] for limit in report["limits"])
    print(f"{'FAIL' if held else 'ok  '}  the parent was not held whole: {shortage if not held else 'it was measured'}")
    print(f"{'ok  ' if inside else 'FAIL'}  every limit verified on the export")
    return 0 if inside and not held else 1


if __name__ == "__main__":
    sys.exit(main())
