#!/usr/bin/env bash
# Damage to journal, snapshots, archives and tables, at every offset of the last two frames and at random places
# elsewhere: starts, or refuses with a command that mends it. Prints what was tried, the figure last.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=$(mktemp)
trap 'rm -f "$output"' EXIT
ESPALIER_CHECK_DAMAGE=1 "${CARGO:-cargo}" test --locked --package espalier-coordinator --test damage -- \
    --nocapture --test-threads 2 2>&1 | tee "$output" | grep -E '^(test |damage:|error|thread)' || true
grep -q '^test result: ok' "$output"
cases=$(sed -n 's/^damage: .*: \([0-9]*\) cases.*/\1/p' "$output" | awk '{ sum += $1 } END { print sum }')
echo "$cases cases of damage: every one started or was mended, 0 panics, 0 events invented"
