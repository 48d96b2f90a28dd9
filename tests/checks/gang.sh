#!/usr/bin/env bash
# make check-gang: ranks that train one student together on the CPU, each a process, over TCP: two and four replicas, two
# stages, both, from text and from a parent, beside one rank alone; a rank that is killed and one that is stopped in the
# middle of a step, and other numbers of ranks that go on from the checkpoint. Losses of 20 steps within 1e-5 of one rank's.
# Then a job's recovery by two workers, of which one is killed, one stopped and the other one killed: formed again within
# 15 s, with the losses of one that was left alone. Before that every collective call against float64, and what a rank
# killed and one stopped are to the others.
# usage: gang.sh [SECONDS]    in which a rank that is gone is known to the others, and a gang has formed again: 15
# Without a Python for the workers' part exits 3, if the rest holds.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-15}
# Ranks share the machine: more threads than this only get into each other's way.
export RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-1}
"${CARGO:-cargo}" run --locked --quiet --package espalier-model --example collectives -- \
    --device cpu --ranks 3 --silence 8000 --limit "$seconds" --mib 4
"${CARGO:-cargo}" run --locked --quiet --package espalier-model --example gang -- cpu "$seconds"
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 7))' 2>/dev/null; then
    echo "no python3 of version 3.7 or later: the part with workers was not run" >&2
    exit 3
fi
"${CARGO:-cargo}" build --locked --quiet --bin espalier
python3 tests/checks/gang.py "${CARGO_TARGET_DIR:-target}/debug/espalier" cpu tests/checks/gang-job.yaml "$seconds"
