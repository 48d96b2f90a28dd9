#!/usr/bin/env bash
# Adds up memory from config files alone, component by component, for three published totals, each under a precision,
# context and concurrency that it states (the publication states none: they are one consistent reading). Prints every
# component, the figure last; exits 0 only where every sum is within 2%.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
"${CARGO:-cargo}" test --locked --quiet -p espalier-search --test estimate -- --nocapture --test-threads 1 >"$output" 2>&1 || status=$?
cat "$output"
if [ "$status" -ne 0 ]; then
    echo "check-estimate: failed" >&2
    exit 1
fi
figure=$(grep -E '^[0-9]+ memory cases within [0-9.]+%$' "$output" || true)
if [ -z "$figure" ]; then
    echo "check-estimate: the test printed no figure" >&2
    exit 1
fi
echo "check-estimate: $figure"
