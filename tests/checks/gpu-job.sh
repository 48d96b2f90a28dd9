#!/usr/bin/env bash
# make check-gpu-job DATA=DIR: the main job on a GPU. SmolLM2-135M-Instruct at 75% and at 50% of its block parameters,
# both strategies, 6.0M recovery tokens each (183 steps of 64 sequences of 512, 4e-4, 5% warm-up, cosine to 10%).
# Asserts that the heterogeneous model's KL to the parent after recovery is at most .205 and .44; prints the uniform
# baseline beside it, KL before, tokens/s of recovery, what each stage took, and the wall time.
# DIR holds distill/self-0.jsonl.xz to self-5 and distill/validation.jsonl.xz, text sampled from the parent itself, one
# {"text": …} a line. The KL is taken over the first 200 sequences of the first 600 validation documents.
# Needs a GPU (see tests/checks/gpu-ops.sh). PROGRAM=FILE runs a built espalier, PARENT=FILE another copy of the parent,
# DEVICE=cuda:1 another GPU, SHARES=75 one of the two. REHEARSAL=1 runs the same on the processor with examples/tiny and a few tokens, and asserts
# that both strategies win quality back.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -n "${REHEARSAL:-}" ]; then
    device=${DEVICE:-cpu}
    parent=${PARENT:-$PWD/examples/tiny}
    train=$PWD/examples/data/train.jsonl.xz
    validation=$PWD/examples/data/validation.jsonl.xz
    sizes="sequence_tokens: 128, calibration_tokens: 2048, scoring_tokens: 1024, depth_tokens: 512, recovery_tokens: 32768, validation_tokens: 4096"
    search="mlp_grid: 64"
    recovery="learning_rate: 0.001, batch_sequences: 16"
    bounds="75%:inf 50%:inf"
else
    data=${1:-}
    if [ ! -e "$data/distill/self-0.jsonl.xz" ]; then
        echo "check-gpu-job needs DATA=DIR, a directory with distill/self-0.jsonl.xz to self-5 and distill/validation.jsonl.xz" >&2
        exit 2
    fi
    data=$(realpath "$data")
    device=${DEVICE:-cuda}
    parent=${PARENT:-$(tests/checks/fetch-smollm2.sh)}
    train=$(printf "%s, " "$data"/distill/self-[0-5].jsonl.xz)
    validation=$data/distill/validation.jsonl.xz
    sizes="sequence_tokens: 512, calibration_tokens: 32768, scoring_tokens: 4096, recovery_tokens: 6000000, validation_tokens: 102400"
    search="kv_groups: [3, 2, 1], mlp_grid: 256"
    recovery="learning_rate: 0.0004, batch_sequences: 64, warmup: 0.05, final_share: 0.1, checkpoint_steps: 100"
    bounds="75%:0.205 50%:0.44"
fi

program=${PROGRAM:-}
if [ -z "$program" ]; then
    "${CARGO:-cargo}" build --release --locked --quiet --bin espalier
    program=${CARGO_TARGET_DIR:-target}/release/espalier
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 - "$validation" "$work/validation.jsonl" <<'PYTHON'
import itertools, lzma, sys
with lzma.open(sys.argv[1], "rt") as source, open(sys.argv[2], "w") as target:
    target.writelines(itertools.islice(source, 600))
PYTHON
"$program" device list >&2

reports=()
for bound in $bounds; do
    share=${bound%%:*}
    [[ " ${SHARES:-75 50} " == *" ${share%\%} "* ]] || continue
    cat >"$work/job.yaml" <<YAML
parent: $parent
data:
  train: [${train%, }]
  validation: [$work/validation.jsonl]
target:
  workload: {prompt_tokens: 128, output_tokens: 2, concurrency: 1}
  limits: {block_parameters: $share}
search: {$search}
budget: {$sizes}
recovery: {$recovery}
YAML
    started=$SECONDS
    "$program" run "$work/job.yaml" --device "$device" --output-dir "$work/outcome-${share%\%}" --log "${LOG:-warn}" >&2
    reports+=("$bound:$((SECONDS - started)):$work/outcome-${share%\%}/report.json")
done

python3 - "${reports[@]}" <<'PYTHON'
import json, sys

REFERENCE = {
    ("75%", "heterogeneous"): (0.515, 0.1969),
    ("75%", "uniform"): (0.6755, 0.2337),
    ("50%", "heterogeneous"): (1.389, 0.4246),
    ("50%", "uniform"): (1.780, 0.4626),
}
held = True
verdicts = []
for argument in sys.argv[1:]:
    share, bound, seconds, path = argument.split(":", 3)
    report = json.load(open(path))
    target = report["target"]
    print(f"\n{share} of block parameters on {target['device']}, {target['precision']}: {seconds} s")
    print("  " + ", ".join(f"{stage['stage']} {stage['seconds']:.1f} s" for stage in report["stages"]))
    for strategy in report["strategies"]:
        name = strategy["strategy"]
        before, after = strategy["before"]["divergence"], strategy["after"]["divergence"]
        rate = strategy["recovery_tokens"] / max(strategy["recovery_seconds"], 1e-9)
        known = REFERENCE.get((share, name)) if bound != "inf" else None
        beside = f" (PyTorch once: {known[0]} before, {known[1]} after)" if known else ""
        print(
            f"  {name}: KL {before:.4f} before, {after:.4f} after {strategy['recovery_tokens']} tokens at {rate:,.0f}"
            f" tokens/s; perplexity {strategy['after']['perplexity']:.2f}; {strategy['block_parameters']:,} in blocks"
            f"{beside}"
        )
        held &= after < before
        if name == "heterogeneous":
            held &= after <= float(bound)
            verdicts.append(f"{after:.4f} at {share} (at most {bound})")
    for note in report["notes"]:
        print(f"  note: {note}")
wall = sum(int(argument.split(":", 3)[2]) for argument in sys.argv[1:])
print(f"\nheterogeneous KL after recovery {', '.join(verdicts)}; {wall} s in all: {'holds' if held else 'FAILS'}")
sys.exit(0 if held else 1)
PYTHON
