"""PyTorch's side of the CPU speed check: answers the requests that espalier-bench answers.

transformers' Llama with SDPA attention, f32, random weights, the fused AdamW, two threads.
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def tokens(vocabulary, sequences, length):
    count = torch.arange(sequences * length)
    return ((count * 7919 + 13) % vocabulary).view(sequences, length)


def main():
    torch.set_num_threads(int(sys.argv[2]))
    config = AutoConfig.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def forward(sequences, length):
        ids = tokens(config.vocab_size, sequences, length)
        with torch.inference_mode():
            start = time.perf_counter()
            model(ids, use_cache=False)
            return time.perf_counter() - start

    def train(sequences, length):
        optimizer.zero_grad(set_to_none=False)
        ids = tokens(config.vocab_size, sequences, length)
        start = time.perf_counter()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return time.perf_counter() - start

    def adamw():
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    for line in sys.stdin:
        name, *sizes = line.split()
        seconds = {"forward": forward, "train": train, "adamw": adamw}[name](*map(int, sizes))
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
