#!/usr/bin/env bash
# Damage to journal, snapshots, archives and tables, at every offset of the last two frames and at random places
# elsewhere: starts, or refuses with a command that mends it. Prints what was tried, the figure last.
set -euo pipefail
cd "$(dirname "$0")/../.."

output=$(mktemp)
trap 'rm -f "$output"' EXIT
ESPALIER_CHECK_DAMAGE=1 "${CARGO:-cargo}" test --locked --package espalier-coordinator --test damage -- \
    --nocapture --test-threads 2 2>&1 | tee "$output" | grep -E '^(test |damage:|error|thread)' || true
figures() { sed -n "s/$1/\\1/p" "$output" | awk '{ sum += $1 } END { print sum + 0 }'; }
cases=$(figures '^damage: .*: \([0-9]*\) cases.*')
mended=$(figures '^damage: .* \([0-9]*\) \(refused and mended\|set aside\).*')
passed=$(figures '^test result: ok\. \([0-9]*\) passed.*')
failed=$(grep -c '^test .* FAILED$' "$output" || true)
panics=$(grep -c 'panicked at' "$output" || true)
echo "$cases cases of damage: $mended refused with a command that mended it or set aside, the others started;" \
    "$passed tests passed and $failed failed (each compares every case with what had been told), $panics panics"
grep -q '^test result: ok' "$output" && [ "$passed" -gt 0 ] && [ "$cases" -gt 0 ] && [ "$failed" -eq 0 ] && [ "$panics" -eq 0 ]
