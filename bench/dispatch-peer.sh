#!/bin/bash
# HyperQueue on tasks that run `true`, for orientation only: installs the pinned peer into .cache/venv-hq once.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.cache/venv-hq
if [ ! -e "$venv/ready" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet hyperqueue==0.27.0
    touch "$venv/ready"
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
# It draws a progress bar, and its tasks leave files where they run; the last line is the figure.
here=$PWD
cd "$directory"
"$here/$venv/bin/python" "$here/bench/dispatch-peer.py" "$directory" "${PEER_TASKS:-2000}" 2>/dev/null | tail -n 1
