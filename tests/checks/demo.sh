#!/usr/bin/env bash
# Fits SmolLM2-135M-Instruct to 75% of its own latency on this machine and asserts what was promised of it.
# Prints the figures last; exits 0 only where every one holds.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=${OUTPUT:-out/demo}
if [ -e "$output" ]; then
    echo "demo: $output exists; remove it, or name another with OUTPUT=DIR" >&2
    exit 2
fi
command -v python3 >/dev/null || {
    echo "demo: needs python3: apt-get install python3 python3-pip" >&2
    exit 2
}
tests/checks/fetch-smollm2.sh >/dev/null
"${CARGO:-cargo}" build --release --locked --bin espalier

mkdir -p "$(dirname "$output")"
exec python3 tests/checks/demo.py "${CARGO_TARGET_DIR:-target}/release/espalier" "$output"
