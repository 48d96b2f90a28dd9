#!/usr/bin/env bash
# Bad input, one case after another: each must give exactly one error line on standard error and a code that is
# not zero, and leave nothing behind. A full disk is no bad input: a job says that it waits for room, and goes on once there
# is. Prints a line a case, the figure last.
set -euo pipefail
cd "$(dirname "$0")/../.."

"${CARGO:-cargo}" build --release --locked --bin espalier
gguf=$(tests/checks/fetch-smollm2.sh)
exec python3 tests/checks/bad_input.py "${CARGO_TARGET_DIR:-target}/release/espalier" "$gguf"
