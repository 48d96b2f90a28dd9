#!/usr/bin/env bash
# Installs the S3 server that the store's tests start. Says so and goes on where it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.cache/venv-moto
if [ -e "$venv/complete" ]; then
    exit 0
fi
rm -rf "$venv"
mkdir -p .cache
if python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --retries 1 --timeout 15 'moto[server]==5.2.5'; then
    touch "$venv/complete"
else
    rm -rf "$venv"
    echo "moto cannot be installed (no python3 or no package index): the tests against S3 are skipped" >&2
fi
