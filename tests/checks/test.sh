#!/usr/bin/env bash
# Everything that fits CI: format, lints, every test of the workspace. Names what it leaves to other targets.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo=${CARGO:-cargo}
"$cargo" fmt --all --check
"$cargo" clippy --workspace --all-targets --locked --quiet -- -D warnings
tests/checks/moto.sh
"$cargo" test --workspace --locked --features espalier-simulation/planted-bugs
# Times are check-gang's affair: these are the limits of a machine that is busy with something else as well.
gang=0
tests/checks/gang.sh 300 || gang=$?
case $gang in
0) ;;
3) echo "skipped: the part of check-gang with workers, which needs Python 3.7 or later" ;;
*) exit "$gang" ;;
esac
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    PYTHONDONTWRITEBYTECODE=1 python3 -m unittest discover --start-directory serving/tests --pattern test_helper.py
else
    echo "skipped: the tests of vLLM's helper, which need Python 3.10 or later"
fi
kernels=0
tests/checks/kernels.sh quick || kernels=$?
case $kernels in
0) ;;
3) echo "skipped: check-kernels, whose compiler is not there and could not be fetched from PyPI" ;;
*) exit "$kernels" ;;
esac

cat <<'SKIPPED'
skipped here, each a target of its own: check-simulation (a thousand seeds; six and the planted bugs run here),
check-damage (every offset; a sample runs here), check-chaos, check-kill and check-lost-coordinator (minutes of
killing), check-dispatch and check-restart (release builds and quiet), check-parity (PyTorch and transformers),
check-solver (HiGHS), check-scores (DATA=DIR), check-cpu-speed (PyTorch), check-bad-input and demo (fetch SmolLM2),
lint-deny (cargo-deny), check-kernels for every architecture (Hopper's commonest run here), check-gpu-ops,
check-gpu-train, check-gpu-forward, check-gpu-job and check-vllm-gpu (a GPU), check-gpu-gang (two), check-serving,
check-vllm and check-shapes (vLLM), check-plan (release build)
SKIPPED
