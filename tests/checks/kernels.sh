#!/usr/bin/env bash
# make check-kernels: every CUDA kernel through NVIDIA's run-time compiler, for Ampere, Ada and Hopper: none is
# refused, none spills more than 16 bytes, no warpgroup product is serialised. Needs no GPU and no driver; needs
# Python 3.10 or later with venv, and PyPI once (70 MB). Exits 3 where the compiler cannot be had. `quick`, as CI
# runs it: Hopper alone, and the commonest widths and heads.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=13.0.88
venv=.cache/venv-nvrtc
if [ "$(cat "$venv/installed.txt" 2>/dev/null)" != "$version" ]; then
    echo "installing nvidia-cuda-nvrtc $version into $venv" >&2
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet "nvidia-cuda-nvrtc==$version"; } >&2; then
        echo "check-kernels: the compiler's wheel could not be installed" >&2
        exit 3
    fi
    echo "$version" >"$venv/installed.txt"
fi
libraries=$(dirname "$(find "$PWD/$venv/lib" -name 'libnvrtc.so.13' -print -quit)")
ESPALIER_CUDA_LIBRARIES=$libraries "${CARGO:-cargo}" run --locked --quiet --package espalier-model \
    --example cuda_kernels -- "$@"
