"""Runs our side, model/examples/parity.rs."""

import json
import subprocess
from pathlib import Path


def run(program, parent, directory: Path, request):
    """Writes `request` and gives what came of it; exports and expected logits lie in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "request.json").write_text(json.dumps(request))
    subprocess.run([program, str(parent), str(directory / "request.json"), str(directory)], check=True)
    return json.loads((directory / "result.json").read_text())


def variants(blocks):
    """{block: None | ("attention", groups) | ("mlp", channels)} as a request has it; none is skipped."""
    keys = {"attention": "kv_groups", "mlp": "channels"}
    return {
        str(block): "skip" if variant is None else {variant[0]: {keys[variant[0]]: variant[1]}}
        for block, variant in blocks.items()
    }
