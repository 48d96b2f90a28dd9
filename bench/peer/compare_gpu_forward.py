"""Runs espalier-bench on a GPU and its PyTorch peer in turn and compares scoring and decoding.

usage: compare_gpu_forward.py ESPALIER_BENCH SMALL_CONFIG LARGE_CONFIG DIRECTORY ROUNDS [DEVICE]

Both sides run the same weights, which PyTorch makes in DIRECTORY.

- scoring, a forward with the loss of every token: at least PyTorch eager's tokens/s;
- decoding, one token of each sequence: the bytes that must be read (weights, keys and values) over the time, as a
  share of the bandwidth of a device copy in the same run, beside PyTorch's (bf16 weights, static cache).

The last line says what held. Exit codes: 0 scoring is as fast as eager, 1 it is not, 2 a program failed.
"""

import os
import sys

from sides import PEAK, Shape, Side, make, medians, peer

CHECK = "check-gpu-forward"
# Sequences, and tokens that each holds before.
DECODING = [(1, 512), (64, 1024)]
STEPS = 32
NAMES = ["ours", "PyTorch eager", "the same in a CUDA graph"]


def score(name, shape, layout, sides, rounds):
    """Ours over eager's tokens/s."""
    sequences, tokens = layout
    request = f"score {sequences} {tokens}"
    for side in sides:
        side.ask(f"{request} 3")
    seconds = medians(sides, f"{request} 10", rounds)
    print(f"{name}, scoring {sequences} x {tokens}")
    for who, time in zip(NAMES, seconds):
        rate = shape.forward_flops(*layout) / time / 1e12
        print(
            f"  {who:24} {time * 1e3:8.2f} ms {sequences * tokens / time:11,.0f} tokens/s {rate:5.0f} TFLOP/s "
            f"({rate / PEAK:4.0%} of {PEAK})",
            flush=True,
        )
    return seconds[1] / seconds[0]


def decode(name, shape, sides, rounds, bandwidth):
    """Our share of the bandwidth, and the best of PyTorch's, for each batch."""
    shares = []
    for sequences, cached in DECODING:
        request = f"decode {sequences} {cached} {STEPS}"
        for side in sides:
            side.ask(request)
        seconds = medians(sides, request, rounds)
        # The cache grows while it is timed.
        must = shape.decode_bytes(sequences, cached + STEPS // 2)
        print(f"{name}, decoding {sequences} x 1 after {cached}: {must / 2**30:.2f} GiB a step")
        for who, time in zip(NAMES, seconds):
            print(
                f"  {who:24} {time * 1e6:8.0f} us {sequences / time:9,.0f} tokens/s {must / time / 1e12:5.2f} TB/s "
                f"({must / time / bandwidth:4.0%} of the copy's {bandwidth / 1e12:.2f})",
                flush=True,
            )
        own, *theirs = (must / time / bandwidth for time in seconds)
        shares.append(f"{own:.0%} (PyTorch {max(theirs):.0%})")
    return shares


def main():
    bench, small_config, large_config, directory, rounds = sys.argv[1:6]
    device = sys.argv[6] if len(sys.argv) > 6 else "cuda:0"
    models = [("135M", small_config, "small", (8, 1024)), ("1.2B", large_config, "large", (4, 2048))]
    directories = [os.path.join(directory, model[2]) for model in models]
    configs = [small_config, large_config]
    make(*zip(configs, directories, (1, 3)))
    ratios, shares, bandwidth = [], [], None
    for (name, config, _, layout), path in zip(models, directories):
        shape = Shape(config)
        sides = [Side(CHECK, [bench, path, device]), peer(CHECK, "eager", path), peer(CHECK, "graph", path)]
        bandwidth = bandwidth or sides[1].ask("bandwidth")[0]
        ratios.append(score(name, shape, layout, sides, int(rounds)))
        shares.append(decode(name, shape, sides, int(rounds), bandwidth))
        for side in sides:
            side.close()
    batches = " and ".join(str(sequences) for sequences, _ in DECODING)
    result = "; ".join(
        f"{name} scoring {ratio:.2f} x eager's, decoding at {batches}: {' and '.join(share)} of the bandwidth"
        for (name, *_), ratio, share in zip(models, ratios, shares)
    )
    holds = min(ratios) >= 1
    print(f"{CHECK}: {'holds' if holds else 'does not hold'}: {result}")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
