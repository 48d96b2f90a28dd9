#!/usr/bin/env bash
# make check-vllm-gpu: jobs whose target is vLLM on this machine's GPU. SmolLM2-135M-Instruct from profile to verify by a
# limit on latency; then a Llama of the 1B class with random weights, by a throughput at 64 sequences, met by what is
# served. Models of its blocks that nobody timed are predicted within 3% of the GPU's own time at 1 and 64 sequences and
# for prompts, and a step's base is long enough to read the head; what the host needs is told apart. Two models of equally
# many parameters that the plan finds in that table differ by 35% in the GPU's time. Figures last; exits 0 only where every
# one holds.
#
# Needs an NVIDIA GPU that nobody else uses, and ESPALIER_VLLM_PYTHON: a Python with vLLM 0.26 or 0.32 for CUDA and the
# plugin (pip install ./serving). PARENT=DIR takes another parent than SmolLM2, OUTPUT=DIR another place than out/vllm-gpu,
# PARTS some of "small large unseen", PROGRAM=FILE a built espalier; unseen alone takes TABLE=FILE, the cost table of a large
# part that ran on the same kind of GPU. REHEARSAL=1 runs all on the processor with small models, in vLLM 0.32 for CPUs,
# and asserts limits only.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=${OUTPUT:-out/vllm-gpu}
if [ -e "$output" ]; then
    echo "check-vllm-gpu: $output exists; remove it, or name another with OUTPUT=DIR" >&2
    exit 2
fi
if [ -n "${REHEARSAL:-}" ]; then
    python=$(tests/checks/vllm-venv.sh)
    rehearsal=--rehearsal
elif [ -n "${ESPALIER_VLLM_PYTHON:-}" ]; then
    python=$ESPALIER_VLLM_PYTHON
    rehearsal=
else
    echo "check-vllm-gpu: give ESPALIER_VLLM_PYTHON, a Python that has vLLM for CUDA and the plugin" >&2
    exit 2
fi
parts=${PARTS:-small large unseen}
parent=${PARENT:-}
if [ -z "$parent" ] && [[ $parts == *small* ]]; then
    parent=$(tests/checks/fetch-smollm2.sh)
fi
program=${PROGRAM:-}
if [ -z "$program" ]; then
    "${CARGO:-cargo}" build --release --locked --bin espalier
    program=${CARGO_TARGET_DIR:-target}/release/espalier
fi
mkdir -p "$output"
HF_HOME=$(realpath "$output")/huggingface
export HF_HOME PYTHONDONTWRITEBYTECODE=1
# shellcheck disable=SC2086 # parts are words
exec "$python" tests/checks/vllm-gpu.py "$program" "$parent" "$output" $rehearsal --parts $parts ${TABLE:+--table "$TABLE"}
