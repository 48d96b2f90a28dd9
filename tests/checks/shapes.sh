#!/usr/bin/env bash
# make check-shapes: parameters say little of time. From a table measured in vLLM 0.32 on this machine's CPU, `espalier plan
# --shapes` finds two models of one parent with equally many parameters whose latencies differ by at least 35%, and two
# of equal latency (at one request at a time, of equal throughput) whose parameters differ 2.2 times; each keeps at least
# half of the parent's attention and half of its MLPs. Both are then served in turns: see shapes.py. Figures last; exits 0
# only where every one holds. Needs what check-vllm needs, and a machine with nothing else to do.
#
# OUTPUT=DIR names another place than out/shapes.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=${OUTPUT:-out/shapes}
if [ -e "$output" ]; then
    echo "check-shapes: $output exists; remove it, or name another with OUTPUT=DIR" >&2
    exit 2
fi
python=$(tests/checks/vllm-venv.sh)
"${CARGO:-cargo}" build --release --locked --bin espalier
mkdir -p "$output"
HF_HOME=$(realpath "$output")/huggingface
export HF_HOME PYTHONDONTWRITEBYTECODE=1
# Narrow and deep: a step of such a model is a walk through blocks, each with work of its own whatever its size.
"$python" tests/checks/random-parent.py "$output/parent" --hidden 256 --layers 24 --channels 2048 --heads 8 --kv-heads 4
exec "$python" tests/checks/shapes.py "${CARGO_TARGET_DIR:-target}/release/espalier" "$output/parent" "$output"
