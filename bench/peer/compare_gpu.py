"""Runs espalier-bench on a GPU and its PyTorch peer in turn and compares training steps and scoring.

usage: compare_gpu.py ESPALIER_BENCH CONFIG_DIRECTORY ROUNDS [DEVICE]

First the loss and gradient norm of the untrained model beside those of our CPU backend; then, in each round, one
side after the other. The last line says what held. Exit codes: 0 the step is at least as fast as the peer's with at
most 1.25 times the peer's known memory, 1 it is not, 2 a program failed, 4 void because the peer is slower than it is
known to be.
"""

import math
import os
import statistics
import subprocess
import sys

LAYOUT = "8 1024"
TOKENS = 8 * 1024
STEPS = 20
# The peer's, as known: below the first a comparison is void; GiB of tensors in a step of this shape.
PEER_TOKENS = 95_000
PEER_GIB = 11.9
MEMORY_LIMIT = 1.25 * PEER_GIB
# What bf16 activations may change at an untrained model.
LOSS_BOUND = 1e-3
NORM_BOUND = 2e-2
GIB = 2**30


class Side:
    """A process that answers requests with numbers. A peer that ended counts as one that takes forever."""

    def __init__(self, command, is_peer=False):
        self.is_peer = is_peer
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **offline}
        )

    def ask(self, request):
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if answer:
            return [float(number) for number in answer.split()]
        command = " ".join(self.process.args)
        print(f"{command} ended with {self.process.wait()} at {request!r}", flush=True)
        if not self.is_peer:
            print("check-gpu-train: failed")
            sys.exit(2)
        return [math.inf]

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait(timeout=60)


def rate(seconds):
    return TOKENS / seconds


def equals_cpu(bench, config, ours):
    """Whether the untrained model's loss and gradient norm are those of the CPU backend."""
    cpu = Side([bench, config])
    (loss, norm), (cpu_loss, cpu_norm) = ours.ask("first 2 256"), cpu.ask("first 2 256")
    cpu.close()
    off = abs(loss / cpu_loss - 1), abs(norm / cpu_norm - 1)
    print(
        f"2 x 256, untrained: loss {loss:.6f} (CPU {cpu_loss:.6f}, {off[0]:.1e} off), "
        f"gradient norm {norm:.5f} (CPU {cpu_norm:.5f}, {off[1]:.1e} off)",
        flush=True,
    )
    return off[0] <= LOSS_BOUND and off[1] <= NORM_BOUND


def main():
    bench, directory, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    device = sys.argv[4] if len(sys.argv) > 4 else "cuda:0"
    config = os.path.join(directory, "config.json")
    here = os.path.dirname(os.path.abspath(__file__))
    ours = Side([bench, config, device])
    same = equals_cpu(bench, config, ours)
    torch = [sys.executable, os.path.join(here, "torch_gpu.py"), directory]
    peers = [Side([*torch, how], is_peer=True) for how in ("eager", "graph")]
    medians = {}
    for name in ("step", "score"):
        for side in (ours, *peers):
            side.ask(f"{name} {LAYOUT} 3")
        answers = [[side.ask(f"{name} {LAYOUT} {STEPS}")[0] for side in (ours, *peers)] for _ in range(rounds)]
        own, eager, captured = (statistics.median(column) for column in zip(*answers))
        medians[name] = own, min(eager, captured)
        print(
            f"{name} {LAYOUT.replace(' ', ' x ')}: ours {own * 1e3:.2f} ms, {rate(own):,.0f} tokens/s; PyTorch eager "
            f"{eager * 1e3:.2f} ms, {rate(eager):,.0f}; in a CUDA graph {captured * 1e3:.2f} ms, {rate(captured):,.0f}; "
            f"ratio {min(eager, captured) / own:.2f}",
            flush=True,
        )
    queued = ours.ask(f"step {LAYOUT} 1")[1]
    print(f"queueing a step takes our host {queued * 1e3:.2f} ms")
    tensors, held = (number / GIB for number in ours.ask("memory"))
    eager, captured = (peer.ask("memory")[0] / GIB for peer in peers)
    print(
        f"memory: ours {tensors:.2f} GiB of tensors, {held:.2f} taken from the device (limit {MEMORY_LIMIT:.2f}); "
        f"PyTorch's tensors {eager:.2f} eager, {captured:.2f} in a CUDA graph"
    )
    for side in (ours, *peers):
        side.close()
    own, theirs = medians["step"]
    result = f"{rate(own):,.0f} tokens/s, {held:.2f} GiB, ratio {theirs / own:.2f}"
    if rate(theirs) < PEER_TOKENS:
        print(f"check-gpu-train: void, PyTorch reaches {rate(theirs):,.0f} tokens/s here: {result}")
        sys.exit(4)
    if own > theirs or held > MEMORY_LIMIT or not same:
        print(f"check-gpu-train: does not hold: {result}")
        sys.exit(1)
    print(f"check-gpu-train: holds: {result}")


if __name__ == "__main__":
    main()
