#!/usr/bin/env bash
# Counts parameters, weights, KV and state from config files alone and compares them with published totals.
# Prints a line a count, the figure last; exits 0 only where every count holds.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
"${CARGO:-cargo}" test --locked --quiet -p espalier-arch --test counts -- --nocapture --test-threads 1 >"$output" 2>&1 || status=$?
cat "$output"
if [ "$status" -ne 0 ]; then
    echo "check-counts: failed" >&2
    exit 1
fi
figure=$(grep -E '^[0-9]+ of [0-9]+ counts hold$' "$output" || true)
if [ -z "$figure" ]; then
    echo "check-counts: the test printed no figure" >&2
    exit 1
fi
echo "check-counts: $figure"
