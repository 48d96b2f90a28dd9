#!/usr/bin/env bash
# make check-gpu-gang: ranks with a GPU each. Every collective call over NCCL against float64 in f32 and bf16, at odd
# sizes; all-reduce of 256 MiB at least 0.9 times as fast as torch.distributed's; a rank killed, and one stopped: how
# long until the others know, and until a gang with another in its place is at work. Then training on two GPUs beside
# one: model/examples/gang/gpu.rs says what must hold.
# Needs two GPUs (RANKS=n for more), libnccl.so.2 (the wheel nvidia-nccl-cu13) where tests/checks/gpu-ops.sh says, and a
# python3 with torch for CUDA, which PYTHON names. COLLECTIVES=program and GANG=program take builds of
# your own; PARTS names some of gang's parts (all, unless it is set; none: PARTS=none).
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=${RANKS:-2}
python=${PYTHON:-python3}
collectives=${COLLECTIVES:-}
gang=${GANG:-}
if [ -z "$collectives" ] || [ -z "$gang" ]; then
    "${CARGO:-cargo}" build --release --locked --package espalier-model --example collectives --example gang
    examples=${CARGO_TARGET_DIR:-target}/release/examples
    collectives=${collectives:-$examples/collectives}
    gang=${gang:-$examples/gang}
fi

said=$(mktemp)
trap 'rm -f "$said"' EXIT
before=$("$python" bench/peer/torch_collectives.py "$ranks" 256 5)
status=0
"$collectives" --device cuda --ranks "$ranks" | tee "$said" || status=$?
after=$("$python" bench/peer/torch_collectives.py "$ranks" 256 5)
"$python" - "$said" "$before" "$after" <<'PYTHON'
import re, sys

said, *peers = sys.argv[1:]
ours = re.search(r"all_reduce of \d+ MiB bf16: ([\d.]+) GB/s", open(said).read())
if not ours:
    sys.exit("check-gpu-gang: no bandwidth was measured")
ours, peer = float(ours[1]), max(map(float, peers))
print(f"all-reduce of 256 MiB bf16: {ours:.1f} GB/s, torch.distributed {' and '.join(peers)} ({ours / peer:.2f} x)")
if ours < 0.9 * peer:
    sys.exit("check-gpu-gang: all-reduce is slower than 0.9 x torch.distributed's")
PYTHON
if [ "${PARTS:-}" != none ]; then
    # shellcheck disable=SC2086 # a list
    "$gang" gpu ${PARTS:-} || status=$?
fi
exit $status
