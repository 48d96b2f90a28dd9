"""PyTorch's side of the GPU checks: answers the requests that espalier-bench answers.

usage: torch_gpu.py CONFIG_DIRECTORY eager|graph

transformers' Llama with SDPA attention, bf16 autocast over f32 weights and moments, the fused AdamW, no
checkpointing; eager, or its eager work captured once in a CUDA graph, so that a slow host does not count against it.
`step SEQUENCES TOKENS STEPS` answers with the seconds of one step, `score SEQUENCES TOKENS TIMES` with those of one
forward with losses, `memory` with the most bytes that tensors took during steps.
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WARM_UP = 3


def token_ids(vocabulary, sequences, length):
    count = torch.arange(sequences * length)
    return ((count * 7919 + 13) % vocabulary).view(sequences, length).cuda()


class Peer:
    """A model with its optimiser, and the peak of its steps."""

    def __init__(self, config, captured):
        torch.manual_seed(1)
        self.config, self.captured = config, captured
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=captured
        )
        self.peak = 0
        # What runs each kind of work, and the tokens that it reads.
        self.works = {}

    def step(self, ids):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def score(self, ids):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )

    def ready(self, name, sequences, length):
        """What runs one `name`, warmed up and captured if this peer is."""
        key = name, sequences, length
        if key not in self.works:
            ids = token_ids(self.config.vocab_size, sequences, length)
            work = getattr(self, name)
            run = self.capture(lambda: work(ids)) if self.captured else lambda: work(ids)
            self.works[key] = run, ids
        return self.works[key][0]

    def capture(self, work):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, name, sequences, length, times):
        run = self.ready(name, sequences, length)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) / times
        if name == "step":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return taken


def main():
    peer = Peer(AutoConfig.from_pretrained(sys.argv[1]), captured=sys.argv[2] == "graph")
    for line in sys.stdin:
        name, *numbers = line.split()
        if name == "memory":
            print(peer.peak, flush=True)
        else:
            print(peer.seconds(name, *map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
