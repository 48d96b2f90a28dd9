#!/usr/bin/env bash
# make check-scores DATA=DIR: SmolLM2 at 75% of its block parameters, chosen from at most 4,096 scoring tokens,
# has a KL to the parent of at most 0.53 before any recovery. DIR holds distill/self-0.jsonl.xz and
# distill/validation.jsonl.xz, text sampled from the parent itself, one {"text": …} a line.
# The KL is taken over the first 200 sequences of 512 tokens of the first 600 validation documents.
set -euo pipefail
cd "$(dirname "$0")/../.."

data=${1:-}
if [ -z "$data" ]; then
    echo "check-scores needs DATA=DIR, a directory with distill/self-0.jsonl.xz and distill/validation.jsonl.xz" >&2
    exit 2
fi
data=$(realpath "$data")
parent=$(tests/checks/fetch-smollm2.sh)
cargo build --release --locked --quiet --bin espalier
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 - "$data/distill/validation.jsonl.xz" "$work/validation.jsonl" <<'PYTHON'
import itertools, lzma, sys
with lzma.open(sys.argv[1], "rt") as source, open(sys.argv[2], "w") as target:
    target.writelines(itertools.islice(source, 600))
PYTHON
cat > "$work/job.yaml" <<YAML
parent: $parent
data:
  train: [$data/distill/self-0.jsonl.xz]
  validation: [$work/validation.jsonl]
target:
  workload: {prompt_tokens: 128, output_tokens: 2, concurrency: 1}
  limits: {block_parameters: 75%}
search:
  kv_groups: [3, 2, 1]
  mlp_grid: 256
  strategies: [heterogeneous]
budget:
  sequence_tokens: 512
  calibration_tokens: 32768
  scoring_tokens: 4096
  recovery_tokens: 0
  validation_tokens: 102400
YAML
started=$SECONDS
${CARGO_TARGET_DIR:-target}/release/espalier run "$work/job.yaml" --output-dir "$work/outcome" >&2
python3 - "$work/outcome/report.json" "$((SECONDS - started))" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
seconds = int(sys.argv[2])
before = report["strategies"][0]["before"]["divergence"]
print(f"KL to the parent before recovery {before:.4f} nats a token (at most 0.53), {seconds} s (at most 3600)")
sys.exit(0 if before <= 0.53 and seconds <= 3600 else 1)
PYTHON
