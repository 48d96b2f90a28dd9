#!/usr/bin/env bash
# make check-gpu-ops: every operation of the CUDA backend against float64, on random inputs at odd and aligned sizes,
# outputs poisoned first, everything twice for the same bits; then a few timings. Prints the seed (ESPALIER_SEED sets
# it), a line a comparison, the largest error of each operation, and the count last.
# Needs an NVIDIA GPU from Ampere on, a driver for CUDA 13, libnvrtc 13 and libcublasLt 13 (a toolkit, or the wheels
# nvidia-cuda-nvrtc and nvidia-cublas in VIRTUAL_ENV or ESPALIER_CUDA_LIBRARIES). PROGRAM=FILE runs a built cuda_ops.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -n "${PROGRAM:-}" ]; then
    exec "$PROGRAM" "$@"
fi
exec "${CARGO:-cargo}" run --release --locked --quiet --package espalier-model --example cuda_ops -- "$@"
