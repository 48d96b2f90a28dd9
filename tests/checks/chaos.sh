#!/usr/bin/env bash
# Builds the program and the stand-ins, then runs them: see tests/chaos/src/bin/check-chaos.rs.
set -euo pipefail
cd "$(dirname "$0")/../.."

"${CARGO:-cargo}" build --release --locked --quiet -p espalier-cli -p espalier-chaos --bins
check=("${CARGO_TARGET_DIR:-target}/release/check-chaos" "$@")
# The disk that is filled has to be mounted, which takes root, or a namespace in which one is.
if [ "$(id -u)" != 0 ] && unshare --user --map-root-user --mount true 2>/dev/null; then
    exec unshare --user --map-root-user --mount "${check[@]}"
fi
exec "${check[@]}"
