"""Runs espalier-bench and its PyTorch peer in turn and compares their times.

usage: compare.py ESPALIER_BENCH CONFIG_DIRECTORY ROUNDS

Both sides answer the same requests, one at a time, on the same two threads; who goes first alternates.
The last line says what held. Exit codes: 0 every ratio is within the limit, 1 one is not, 3 too noisy to
tell, 4 void because the peer is slower than it is known to be.
"""

import os
import statistics
import subprocess
import sys
import time

THREADS = "2"
LIMIT = 1.5
# A ratio whose quartiles lie further apart than this share of its median tells nothing.
NOISE = 0.35
# Request, and the seconds that PyTorch is known to need on two cores (none: not known).
CASES = [
    ("forward 1 128", 0.23),
    ("forward 8 256", None),
    ("train 1 128", 0.75),
    ("adamw", 0.21),
]
# How much slower than known the peer may be at its best before the comparison is void.
PEER_SLACK = 1.5


class Side:
    """A process that answers requests with seconds."""

    def __init__(self, command):
        threads = {"RAYON_NUM_THREADS": THREADS, "OMP_NUM_THREADS": THREADS, "MKL_NUM_THREADS": THREADS}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment = {**os.environ, **threads, **offline}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args[0]} ended without an answer to {request!r}")
        return float(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure(ours, peer, request, rounds):
    for side in (ours, peer):
        side.ask(request)
    pairs = []
    for index in range(rounds):
        seconds = {}
        for side in (ours, peer) if index % 2 == 0 else (peer, ours):
            # The other side's threads must have gone to sleep.
            time.sleep(0.05)
            seconds[side] = side.ask(request)
        pairs.append((seconds[ours], seconds[peer]))
    return pairs


def main():
    bench, directory, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ours = Side([bench, os.path.join(directory, "config.json")])
    here = os.path.dirname(os.path.abspath(__file__))
    peer = Side([sys.executable, os.path.join(here, "torch_peer.py"), directory, THREADS])
    verdicts = {"slow": [], "noisy": [], "void": []}
    lines = []
    for request, known in CASES:
        pairs = measure(ours, peer, request, rounds)
        our_median = statistics.median(pair[0] for pair in pairs)
        peer_median = statistics.median(pair[1] for pair in pairs)
        ratios = [pair[0] / pair[1] for pair in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = our_median / peer_median
        spread = (high - low) / statistics.median(ratios)
        lines.append(
            f"{request:14} ours {our_median:6.3f} s  PyTorch {peer_median:6.3f} s  "
            f"ratio {ratio:.2f} (limit {LIMIT}, spread {spread:.0%})"
        )
        print(lines[-1], file=sys.stderr, flush=True)
        if known and min(pair[1] for pair in pairs) > known * PEER_SLACK:
            verdicts["void"].append(request)
        if spread > NOISE:
            verdicts["noisy"].append(request)
        elif ratio > LIMIT:
            verdicts["slow"].append(request)
    ours.close()
    peer.close()
    print("\n".join(lines))
    for kind, message, code in (
        ("slow", "slower than allowed", 1),
        ("void", "void, PyTorch is slower here than it is known to be", 4),
        ("noisy", "too noisy", 3),
    ):
        if verdicts[kind]:
            print(f"check-cpu-speed: {message}: {', '.join(verdicts[kind])}")
            sys.exit(code)
    print(f"check-cpu-speed: holds, every ratio is at most {LIMIT}")


if __name__ == "__main__":
    main()
