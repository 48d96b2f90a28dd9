#!/usr/bin/env bash
# make check-gpu-streamed: a Llama of 7.5 billion random parameters (15.0 GB in bf16) at half of its block parameters, through
# the whole job but its recovery, on a GPU that may hold 12 GiB of it: the parent is streamed block by block. Prints what each
# stage took; exits 0 only where the job ends with a verified checkpoint and the parent was never held whole.
# Needs a GPU (see gpu-ops.sh), 32 GB of disk and a Python with PyTorch and safetensors (PYTHON=FILE; python3). PROGRAM=FILE
# runs a built espalier, OUTPUT=DIR names another place than out/gpu-streamed. REHEARSAL=1 does the same on the processor with
# a small model.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=${OUTPUT:-out/gpu-streamed}
if [ -e "$output" ]; then
    echo "check-gpu-streamed: $output exists; remove it, or name another with OUTPUT=DIR" >&2
    exit 2
fi
program=${PROGRAM:-}
if [ -z "$program" ]; then
    "${CARGO:-cargo}" build --release --locked --bin espalier
    program=${CARGO_TARGET_DIR:-target}/release/espalier
fi
exec "${PYTHON:-python3}" tests/checks/gpu-streamed.py "$program" "$output" ${REHEARSAL:+--rehearsal}
