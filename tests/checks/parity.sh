#!/usr/bin/env bash
# make check-parity: our numerics against PyTorch and transformers. Logits and every gradient of random models of
# each family (the golden set, made anew); exports of random models and of SmolLM2, whole layers and single blocks
# gone, in transformers; SmolLM2's logits, perplexity and greedy text; GGUF encodings against the gguf package.
# Needs Python 3.10 or later with venv, the network (PyPI), 6 GB of disk and 4 GB of memory.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.cache/venv-parity
requirements=tests/parity/requirements.txt
if ! cmp -s "$requirements" "$venv/installed.txt"; then
    echo "installing PyTorch and transformers into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --requirement "$requirements"
    cp "$requirements" "$venv/installed.txt"
fi
python=$PWD/$venv/bin/python
smollm2=$(tests/checks/fetch-smollm2.sh)
"${CARGO:-cargo}" build --release --locked --quiet --package espalier-model --example parity
program=$(realpath "${CARGO_TARGET_DIR:-target}")/release/examples/parity

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Nothing is fetched by name, and the modules of checkpoints that carry code stay out of the user's cache.
export HF_HOME=$work/huggingface HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1 TQDM_DISABLE=1

"$python" -m pytest --quiet -p no:cacheprovider serving/tests/test_modeling.py
"$python" tests/parity/golden.py "$work/golden" >/dev/null
ESPALIER_GOLDEN="$work/golden" "${CARGO:-cargo}" test --locked --quiet --package espalier-model --test golden \
    -- --nocapture >"$work/golden.txt" || {
    cat "$work/golden.txt"
    exit 1
}
"$python" tests/parity/compare.py "$program" "$smollm2" "$work/golden.txt" "$work"
