"""PyTorch's side of the GPU checks: answers the requests that espalier-bench answers.

usage: torch_gpu.py make CONFIG DIRECTORY SEED [CONFIG DIRECTORY SEED ..]
       torch_gpu.py eager|graph DIRECTORY [PARENT_DIRECTORY]

`make` writes checkpoints of random bf16 weights, so that every side runs the same model. The others read one and
answer requests: transformers' Llama with SDPA attention, bf16 autocast over f32 weights and moments, the fused AdamW,
no checkpointing; decoding with bf16 weights over a static cache. `eager` runs that as it stands, `graph` captures the
same work once in a CUDA graph, so that a slow host does not count against it.

`step SEQUENCES TOKENS STEPS` answers with the seconds of one training step, `distil ..` of one that learns from the
parent, the parent's forward included, `score SEQUENCES TOKENS TIMES` of one forward with losses, `decode SEQUENCES
CACHED STEPS` of one token of each sequence after so many cached ones; `first` and `first-distil SEQUENCES TOKENS`
with the mean loss and the gradient's norm before any update; `memory` with the most bytes that tensors took since it
was last asked (in a CUDA graph: ever); `bandwidth` with the bytes a second of a device copy, those read and those written.
"""

import os
import shutil
import sys
import time

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

WARM_UP = 3
WEIGHTS = "model.safetensors"


def new_model(directory, dtype):
    config = AutoConfig.from_pretrained(directory)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def load(directory, dtype):
    model = new_model(directory, dtype)
    missing, unexpected = model.load_state_dict(load_file(f"{directory}/{WEIGHTS}", device="cuda"), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"{directory}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def make(config, directory, seed):
    os.makedirs(directory, exist_ok=True)
    shutil.copy(config, f"{directory}/config.json")
    torch.manual_seed(seed)
    model = new_model(directory, torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    tensors = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, f"{directory}/{WEIGHTS}", metadata={"format": "pt"})


def token_ids(vocabulary, sequences, length):
    count = torch.arange(sequences * length)
    return ((count * 7919 + 13) % vocabulary).view(sequences, length).cuda()


class Peer:
    """A model, what runs it, and the peak of its memory."""

    def __init__(self, captured, directory, parent=None):
        self.captured, self.directory, self.parent_directory = captured, directory, parent
        self.vocabulary = AutoConfig.from_pretrained(directory).vocab_size
        self.model = self.optimizer = self.parent = self.decoder = None
        # What runs each kind of work, and what it reads.
        self.works = {}

    def ready_to_train(self):
        if self.model is None:
            self.model = load(self.directory, torch.float32)
            self.model.train()
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=4e-4,
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=True,
                capturable=self.captured,
            )

    def loss(self, ids):
        with torch.autocast("cuda", torch.bfloat16):
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def divergence(self, ids):
        """Forward KL from the parent, the mean over positions."""
        if self.parent is None:
            self.parent = load(self.parent_directory, torch.float32).requires_grad_(False).eval()
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad():
                theirs = torch.log_softmax(self.parent(input_ids=ids, use_cache=False).logits.float(), -1)
            own = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits.float(), -1)
        return torch.nn.functional.kl_div(
            own.flatten(0, 1), theirs.flatten(0, 1), log_target=True, reduction="batchmean"
        )

    def train(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, ids):
        self.train(self.loss(ids))

    def distil(self, ids):
        self.train(self.divergence(ids))

    def score(self, ids):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = self.model(input_ids=ids, use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )

    def first(self, loss, sequences, length):
        self.ready_to_train()
        loss = loss(token_ids(self.vocabulary, sequences, length))
        loss.backward()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.model.parameters()])
        answer = loss.item(), norm.item()
        self.optimizer.zero_grad(set_to_none=True)
        return answer

    def ready(self, name, sequences, length):
        """What runs one `name`, warmed up and captured if this peer is."""
        self.ready_to_train()
        key = name, sequences, length
        if key not in self.works:
            ids = token_ids(self.vocabulary, sequences, length)
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

    def decode(self, sequences, cached, steps):
        """Seconds a step; the cache is set back to `cached` tokens before."""
        if self.decoder is None:
            self.decoder = load(self.directory, torch.bfloat16).requires_grad_(False).eval()
        key = sequences, cached, steps
        if key not in self.works:
            cache = StaticCache(config=self.decoder.config, max_cache_len=cached + steps + WARM_UP + 1)
            next_ids = torch.zeros(sequences, 1, dtype=torch.long, device="cuda")

            def one():
                with torch.no_grad():
                    logits = self.decoder(input_ids=next_ids, past_key_values=cache, use_cache=True).logits
                    next_ids.copy_(logits[:, -1:].argmax(-1))

            with torch.no_grad():
                ids = token_ids(self.vocabulary, sequences, cached)
                self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self.works[key] = (self.capture(one) if self.captured else one), cache
        run, cache = self.works[key]
        for layer in cache.layers:
            layer.cumulative_length.fill_(cached)
        return timed(run, steps)


def timed(run, times):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def bandwidth():
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timed(lambda: target.copy_(source), WARM_UP)
    return 2 * source.numel() / timed(lambda: target.copy_(source), 20)


def answer(peer, name, numbers):
    if name == "memory":
        peak = torch.cuda.max_memory_allocated()
        # A graph took its memory when it was captured, and takes none when it is replayed.
        if not peer.captured:
            torch.cuda.reset_peak_memory_stats()
        return [peak]
    if name == "bandwidth":
        return [bandwidth()]
    if name == "decode":
        return [peer.decode(*numbers)]
    if name in ("first", "first-distil"):
        return peer.first(peer.loss if name == "first" else peer.divergence, *numbers)
    *layout, times = numbers
    return [timed(peer.ready(name, *layout), times)]


def main():
    how, *rest = sys.argv[1:]
    if how == "make":
        for config, directory, seed in zip(*[iter(rest)] * 3):
            make(config, directory, int(seed))
        return
    peer = Peer(how == "graph", *rest)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(*answer(peer, name, list(map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
