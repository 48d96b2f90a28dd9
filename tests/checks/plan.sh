#!/usr/bin/env bash
# Answers a hundred plans from a table that was measured once, each with its front and what relaxing its limits buys.
# Prints the time last; exits 0 only where it is under two seconds in all. Where it is not, and the processor worked less
# than two seconds at it, the machine was too busy to tell.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo=${CARGO:-cargo}
"$cargo" build --release --locked --quiet -p espalier-search --example answer_plans
output=$(mktemp)
trap 'rm -f "$output"' EXIT
TIMEFORMAT='%U %S'
worked=$({ time "${CARGO_TARGET_DIR:-target}/release/examples/answer_plans" >"$output"; } 2>&1)
cat "$output"
figure=$(tail -n 1 "$output")
if ! [[ $figure =~ ^100\ plans\ in\ ([0-9.]+)\ s$ ]]; then
    echo "check-plan: not every plan was answered" >&2
    exit 1
fi
elapsed=${BASH_REMATCH[1]}
worked=$(awk '{ print $1 + $2 }' <<<"$worked")
if awk -v elapsed="$elapsed" 'BEGIN { exit !(elapsed >= 2) }'; then
    if awk -v worked="$worked" 'BEGIN { exit !(worked < 2) }'; then
        echo "check-plan: too noisy: $figure, of which the processor worked $worked s; run it on a quieter machine" >&2
    else
        echo "check-plan: $figure, expected less than 2 s" >&2
    fi
    exit 1
fi
echo "check-plan: $figure, $worked s of the processor"
