#!/usr/bin/env bash
# Compares our numerics with PyTorch and transformers: regenerates the golden set of tiny random models of
# every family and holds logits and every gradient against it.
# Not covered yet, so the check cannot pass: SmolLM2's logits, perplexity and greedy text, and an exported
# checkpoint's logits in transformers.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.cache/venv-parity
if ! "$venv/bin/python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet torch==2.13.0 transformers==5.17.0 numpy gguf accelerate
fi

golden=$(mktemp -d)
trap 'rm -rf "$golden"' EXIT
"$venv/bin/python" tests/parity/golden.py "$golden"
ESPALIER_GOLDEN="$golden" "${CARGO:-cargo}" test --locked -p espalier-model --test golden -- --nocapture

echo "tiny models of every family agree; SmolLM2 and the exported checkpoint are not compared yet" >&2
exit 1
