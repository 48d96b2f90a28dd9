#!/bin/bash
# make check-cpu-speed: forward, training step and AdamW of SmolLM2-135M's shape within 1.5 × of PyTorch's
# time, two threads each, in alternation. Installs the pinned peer into .cache/venv-peer once.
# ROUNDS=n repeats each measurement n times (default 9); BENCH=program times a build of your own.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.cache/venv-peer
requirements=bench/peer/requirements.txt
if ! cmp -s "$requirements" "$venv/installed.txt"; then
    echo "installing the PyTorch peer into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --requirement "$requirements"
    cp "$requirements" "$venv/installed.txt"
fi

bench=${BENCH:-}
if [ -z "$bench" ]; then
    "${CARGO:-cargo}" build --release --locked --package espalier-bench
    bench=${CARGO_TARGET_DIR:-target}/release/espalier-bench
fi

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cp arch/tests/configs/smollm2-135m.json "$directory/config.json"
"$venv/bin/python" bench/peer/compare.py "$bench" "$directory" "${ROUNDS:-9}"
