"""What the GPU checks share: processes that answer requests, turns, and what a shape costs."""

import json
import math
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
GIB = 2**30
# What an H200's matrix units reach on random bf16 data in a large product, TFLOP/s.
PEAK = 790
# What bf16 activations may change at an untrained model.
LOSS_BOUND = 1e-3
NORM_BOUND = 2e-2


class Side:
    """A process that answers requests with numbers. A peer that ended counts as one that takes forever."""

    def __init__(self, check, command, is_peer=False):
        self.check, self.is_peer = check, is_peer
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
            print(f"{self.check}: failed")
            sys.exit(2)
        return [math.inf, math.inf]

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait(timeout=60)


class Shape:
    """A Llama's config, and what it costs."""

    def __init__(self, path):
        with open(path) as file:
            config = json.load(file)
        self.hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim", self.hidden // self.heads)
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * config["intermediate_size"]
        # Every weight that a token meets in a product; the head is the embedding.
        self.weights = self.layers * layer + config["vocab_size"] * self.hidden

    def forward_flops(self, sequences, tokens):
        """Two a weight and token, and causal attention's two products, of which half is needed."""
        mixing = 2 * self.layers * self.heads * self.head_dim * tokens
        return sequences * tokens * (2 * self.weights + mixing)

    def step_flops(self, sequences, tokens):
        """The backward is two forwards; nothing is counted for what is computed again."""
        return 3 * self.forward_flops(sequences, tokens)

    def decode_bytes(self, sequences, cached):
        """What one token of each sequence must read: weights, and keys and values, all bf16."""
        cache = 2 * self.layers * self.kv_heads * self.head_dim * sequences * cached
        return 2 * (self.weights + cache)


def medians(sides, request, rounds):
    """Seconds of each side's answers to `request`, in turns. Nothing is quicker than a peer that did not run: the first
    one, eager, has to."""
    answers = [[side.ask(request)[0] for side in sides] for _ in range(rounds)]
    seconds = [statistics.median(column) for column in zip(*answers)]
    if math.isinf(seconds[1]):
        print(f"{sides[1].check}: failed, there is nothing to compare with")
        sys.exit(2)
    return seconds


def agree(ours, peer, request, loss_bound=LOSS_BOUND):
    """Whether both have one mean loss and gradient norm before any update."""
    (loss, norm), (their_loss, their_norm) = ours.ask(request), peer.ask(request)
    off = abs(loss / their_loss - 1), abs(norm / their_norm - 1)
    same = off[0] <= loss_bound and off[1] <= NORM_BOUND
    print(
        f"{request}: loss {loss:.6f} (PyTorch {their_loss:.6f}, {off[0]:.1e} off), gradient norm {norm:.5f} "
        f"(PyTorch {their_norm:.5f}, {off[1]:.1e} off){'' if same else ': DIFFERS'}",
        flush=True,
    )
    return same


def make(*models):
    """Writes checkpoints: of each a config, a directory and a seed."""
    command = [sys.executable, f"{HERE}/torch_gpu.py", "make"]
    subprocess.run([*command, *(str(word) for model in models for word in model)], check=True)


def peer(check, how, directory, *parent):
    return Side(check, [sys.executable, f"{HERE}/torch_gpu.py", how, directory, *parent], is_peer=True)
