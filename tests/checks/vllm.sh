#!/usr/bin/env bash
# make check-vllm: a job whose target is vLLM 0.32 on this machine's CPU, end to end with one command each for a limit on
# latency and one on memory; candidates that were never measured as a whole, predicted from the job's table and measured;
# keys and values of exactly the predicted size, and of one block less; the export's texts against transformers'. Figures
# last; exits 0 only where every one holds. Needs Python 3.10 or later with venv, the network (PyPI), 8 GB of disk and
# 8 GB of memory, and a machine with nothing else to do.
#
# PARENT=DIR takes another parent than SmolLM2-135M-Instruct, OUTPUT=DIR another place than out/vllm.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=${OUTPUT:-out/vllm}
if [ -e "$output" ]; then
    echo "check-vllm: $output exists; remove it, or name another with OUTPUT=DIR" >&2
    exit 2
fi
parent=${PARENT:-$(tests/checks/fetch-smollm2.sh)}
python=$(tests/checks/vllm-venv.sh)
"${CARGO:-cargo}" build --release --locked --bin espalier
mkdir -p "$output"
HF_HOME=$(realpath "$output")/huggingface
export HF_HOME PYTHONDONTWRITEBYTECODE=1
exec "$python" tests/checks/vllm.py "${CARGO_TARGET_DIR:-target}/release/espalier" "$parent" "$output"
