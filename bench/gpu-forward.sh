#!/usr/bin/env bash
# make check-gpu-forward: scoring and decoding on a GPU, in turns with PyTorch, of SmolLM2-135M's shape and a 1.2B
# Llama. bench/peer/compare_gpu_forward.py says what must hold, and what is printed beside it.
# Needs, and takes from the environment, what bench/gpu-train.sh does.
set -euo pipefail
cd "$(dirname "$0")/.."

bench=${BENCH:-}
if [ -z "$bench" ]; then
    "${CARGO:-cargo}" build --release --locked --package espalier-bench
    bench=${CARGO_TARGET_DIR:-target}/release/espalier-bench
fi

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" bench/peer/compare_gpu_forward.py "$bench" arch/tests/configs/smollm2-135m.json \
    bench/peer/shapes/llama-1.2b.json "$directory" "${ROUNDS:-3}" "${DEVICE:-cuda:0}"
