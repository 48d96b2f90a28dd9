#!/usr/bin/env bash
# make check-gpu-train: training steps on a GPU, in turns with PyTorch (transformers' Llama, SDPA, bf16 autocast, fused
# AdamW; the better of eager and eager in a CUDA graph): SmolLM2-135M's shape at 8 x 1024, the same taught by a parent
# of its shape, and a 1.2B Llama at 4 x 2048. bench/peer/compare_gpu.py says what must hold. Before that: small models
# trained on the GPU beside the CPU backend.
# Needs a GPU (see tests/checks/gpu-ops.sh) and a python3 with torch for CUDA and transformers, which PYTHON names.
# ROUNDS=n repeats each measurement (default 3); DEVICE=cuda:1 takes another; BENCH=program and
# TESTS=program (cuda_training) take builds of your own.
set -euo pipefail
cd "$(dirname "$0")/.."

bench=${BENCH:-}
if [ -z "$bench" ]; then
    "${CARGO:-cargo}" build --release --locked --package espalier-bench
    bench=${CARGO_TARGET_DIR:-target}/release/espalier-bench
fi

if [ -n "${TESTS:-}" ]; then
    "$TESTS" --nocapture --test-threads 1
elif [ -z "${BENCH:-}" ]; then
    "${CARGO:-cargo}" test --locked --quiet --package espalier-model --test cuda_training -- --nocapture --test-threads 1
fi

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" bench/peer/compare_gpu.py "$bench" arch/tests/configs/smollm2-135m.json \
    bench/peer/shapes/llama-1.2b.json "$directory" "${ROUNDS:-3}" "${DEVICE:-cuda:0}"
