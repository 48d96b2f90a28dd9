#!/usr/bin/env bash
# A coordinator with 1,000,000 past tasks, archived and in one job that goes on: seconds until it is ready. Each
# start is of its own process, three times; the slowest counts. Prints the figures last, fails from 5 s on.
set -euo pipefail
cd "$(dirname "$0")/../.."

limit=5
"${CARGO:-cargo}" build --release --locked --quiet --package espalier-coordinator --example restart
restart=${CARGO_TARGET_DIR:-target}/release/examples/restart
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

figures=
failed=
for kind in archived live; do
    "$restart" build "$kind" "$directory/$kind"
    slowest=0
    for _ in 1 2 3; do
        line=$("$restart" start "$directory/$kind")
        echo "$kind: $line"
        seconds=${line%% *}
        slowest=$(printf '%s\n%s\n' "$slowest" "$seconds" | sort -g | tail -1)
    done
    figures+="${figures:+, }$kind $slowest s"
    awk -v s="$slowest" -v l="$limit" 'BEGIN { exit !(s < l) }' || failed=1
done
echo "ready after a restart with 1,000,000 past tasks: $figures (limit $limit s)"
[[ -z $failed ]]
