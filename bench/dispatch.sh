#!/bin/bash
# make check-dispatch: what handing out and taking back a task costs a coordinator, beside HyperQueue for
# orientation. Journals lie in .cache, so that they are on a disk and not in memory.
# DISPATCH=program measures a build of your own; PEER=no leaves HyperQueue out.
set -euo pipefail
cd "$(dirname "$0")/.."

dispatch=${DISPATCH:-}
if [ -z "$dispatch" ]; then
    "${CARGO:-cargo}" build --release --locked --package espalier-dispatch
    dispatch=${CARGO_TARGET_DIR:-target}/release/espalier-dispatch
fi
mkdir -p .cache
if [ "${PEER:-yes}" != no ]; then
    bench/dispatch-peer.sh || echo "HyperQueue could not be measured: our own figures follow" >&2
fi
exec "$dispatch" check --directory .cache "$@"
