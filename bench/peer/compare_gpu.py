"""Runs espalier-bench on a GPU and its PyTorch peer in turn and compares training steps.

usage: compare_gpu.py ESPALIER_BENCH SMALL_CONFIG LARGE_CONFIG DIRECTORY ROUNDS [DEVICE]

Both sides run the same weights, which PyTorch makes in DIRECTORY. For each shape: loss and gradient norm of the first
step beside PyTorch's, then, in each round, one side after the other.

- small, 8 x 1024: at least the peer's tokens/s, with at most 1.25 times the memory that it is known to take;
- large, 4 x 2048: at least 0.9 times eager's tokens/s;
- small, 8 x 1024, taught by a parent of the same shape and other weights: at least the peer's tokens/s, with at most
  1.25 times its memory.

The peer is the better of eager and eager in a CUDA graph. The last line says what held. Exit codes: 0 all of it, 1
not all, 2 a program failed, 4 void because the peer is slower than it is known to be.
"""

import math
import os
import sys

from sides import GIB, LOSS_BOUND, PEAK, Shape, Side, agree, make, medians, peer

CHECK = "check-gpu-train"
# The peer's, as known, of the small shape's step: below the first the comparison is void; GiB of tensors.
PEER_TOKENS = 95_000
PEER_GIB = 11.9
MEMORY_FACTOR = 1.25
LARGE_FACTOR = 0.9
# Terms of a divergence nearly cancel.
DIVERGENCE_BOUND = 1e-2


class Result:
    """What one kind of step came to."""

    def __init__(self, ours, eager, captured, memory, peer_memory, tokens):
        self.ours, self.eager, self.captured = (tokens / seconds for seconds in (ours, eager, captured))
        self.memory, self.peer_memory = memory, peer_memory
        self.peer = max(self.eager, self.captured)

    def summary(self, name):
        ratio = self.ours / self.peer if self.peer else math.inf
        return f"{name} {self.ours:,.0f} tokens/s ({ratio:.2f} x PyTorch's), {self.memory:.2f} GiB"


def measured(name, request, flops, tokens, sides, rounds, steps):
    """Times `request` on each side; `sides` are ours, eager and, perhaps, eager in a CUDA graph."""
    for side in sides:
        side.ask(f"{request} 3")
        side.ask("memory")
    seconds = medians(sides, f"{request} {steps}", rounds)
    tensors, held = (number / GIB for number in sides[0].ask("memory"))
    theirs = [side.ask("memory")[0] / GIB for side in sides[1:]]
    names = ["ours", "PyTorch eager", "the same in a CUDA graph"]
    memories = [f"{held:.2f} GiB of which {tensors:.2f} tensors", *(f"{gib:.2f} GiB" for gib in theirs)]
    print(name)
    for who, time, memory in zip(names, seconds, memories):
        rate = flops / time / 1e12
        print(
            f"  {who:24} {time * 1e3:8.2f} ms {tokens / time:11,.0f} tokens/s {rate:5.0f} TFLOP/s "
            f"({rate / PEAK:4.0%} of {PEAK}) {memory}",
            flush=True,
        )
    ours, eager, *captured = seconds
    return Result(ours, eager, captured[0] if captured else math.inf, held, min(theirs), tokens)


class Case:
    """A shape at a layout, on sides of its own: what one case leaves in memory and weights is no other's."""

    def __init__(self, bench, device, config, layout, directories, hows):
        self.shape, self.layout = Shape(config), layout
        ours = Side(CHECK, [bench, directories[0], device, *directories[1:]])
        self.sides = [ours, *(peer(CHECK, how, *directories) for how in hows)]

    def request(self, name):
        return "{} {} {}".format(name, *self.layout)

    def run(self, title, kind, rounds, steps):
        """What it came to, and whether the first step's loss and gradient are PyTorch's."""
        distils = kind == "distil"
        first = self.request("first-distil" if distils else "first")
        same = agree(*self.sides[:2], first, DIVERGENCE_BOUND if distils else LOSS_BOUND)
        flops = self.shape.step_flops(*self.layout)
        if distils:
            flops += self.shape.forward_flops(*self.layout)
        tokens = self.layout[0] * self.layout[1]
        result = measured(title, self.request(kind), flops, tokens, self.sides, rounds, steps)
        queued = self.sides[0].ask(self.request(kind) + " 1")[1]
        print(f"  queueing a step takes our host {queued * 1e3:.2f} ms")
        for side in self.sides:
            side.close()
        return result, same


def main():
    bench, small_config, large_config, directory, rounds = sys.argv[1:6]
    device = sys.argv[6] if len(sys.argv) > 6 else "cuda:0"
    directories = [os.path.join(directory, name) for name in ("small", "parent", "large")]
    configs = [small_config, small_config, large_config]
    make(*zip(configs, directories, (1, 2, 3)))
    rounds, both = int(rounds), ("eager", "graph")
    case = Case(bench, device, small_config, (8, 1024), directories[:1], both)
    step, same = case.run("135M, 8 x 1024", "step", rounds, 20)
    case = Case(bench, device, small_config, (8, 1024), directories[:2], both)
    distil, distil_same = case.run("135M taught by another, 8 x 1024", "distil", rounds, 20)
    case = Case(bench, device, large_config, (4, 2048), directories[2:], both[:1])
    big, big_same = case.run("1.2B, 4 x 2048", "step", rounds, 5)
    result = "; ".join([step.summary("135M"), big.summary("1.2B"), distil.summary("distillation")])
    wrong = [
        what
        for what, holds in [
            ("losses or gradients differ", same and distil_same and big_same),
            ("135M is slower", step.ours >= step.peer),
            (f"135M takes over {MEMORY_FACTOR * PEER_GIB:.2f} GiB", step.memory <= MEMORY_FACTOR * PEER_GIB),
            ("1.2B is slower", big.ours >= LARGE_FACTOR * big.eager),
            ("distillation is slower", distil.ours >= distil.peer),
            ("distillation takes more memory", distil.memory <= MEMORY_FACTOR * distil.peer_memory),
        ]
        if not holds
    ]
    if step.peer < PEER_TOKENS:
        print(f"{CHECK}: void, PyTorch reaches {step.peer:,.0f} tokens/s here: {result}")
        sys.exit(4)
    if wrong:
        print(f"{CHECK}: does not hold ({', '.join(wrong)}): {result}")
        sys.exit(1)
    print(f"{CHECK}: holds: {result}")


if __name__ == "__main__":
    main()
