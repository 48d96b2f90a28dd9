#!/usr/bin/env bash
# Builds the program and the stand-ins, then runs them: see tests/chaos/src/bin/check-kill.rs.
set -euo pipefail
cd "$(dirname "$0")/../.."

"${CARGO:-cargo}" build --release --locked --quiet -p espalier-cli -p espalier-chaos --bins
exec "${CARGO_TARGET_DIR:-target}/release/check-kill" "$@"
