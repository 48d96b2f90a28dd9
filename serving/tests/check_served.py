"""Serves an exported directory in vLLM by the plugin and compares greedy text and perplexity with transformers'.

    python check_served.py EXPORTED [--new-tokens 32] [--text FILE]

Both compute in f32; vLLM runs all prompts together, with the export's own tokenizer, and trusts none of its code.
Exits 0 where every text is the same and the perplexities of FILE's first 1,024 tokens (or of the prompts) agree to
three digits. The figures are printed last.
"""

import argparse
import math
import sys
from pathlib import Path

import engine as engines  # Sets vLLM's environment, so it comes before vLLM.
import odd_shapes
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is",
    "An espalier is a tree",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The three primary colours are",
    "To make bread you need",
    "The theory of evolution says that",
    "In 1969, the first",
    "A prime number is",
    "My favourite season is",
    "The sun rises in",
    "Dear Sir or Madam,",
    "The largest planet is",
    "Photosynthesis is the process by which",
    "Question: what is 2 + 2? Answer:",
    "SELECT name FROM",
    "She opened the door and",
    "The opposite of hot is",
    "Computers were invented",
]
PERPLEXITY_TOKENS = 1024


def perplexity(logprobs):
    flat = [value for row in logprobs for value in row]
    return math.exp(-sum(flat) / len(flat))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()

    # Only a heterogeneous export carries code; the plugin stands in for it in vLLM, not in transformers.
    carries_code = (given.exported / "modeling_espalier.py").exists()
    tokenizer = AutoTokenizer.from_pretrained(given.exported, trust_remote_code=carries_code)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(
        given.exported, trust_remote_code=carries_code, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    longest = min(2 * PERPLEXITY_TOKENS, model.config.max_position_embeddings)
    # A token is made after what is read.
    read = prompts
    if given.text:
        read = [tokenizer.encode(given.text.read_text())[: min(PERPLEXITY_TOKENS, longest - 1)]]
    expected = odd_shapes.greedy(model, prompts, given.new_tokens)
    expected_perplexity = perplexity([odd_shapes.log_probabilities(model, prompt) for prompt in read])
    del model

    with engines.served(
        given.exported,
        skip_tokenizer_init=False,
        max_model_len=longest,
        max_num_seqs=32,
        kv_cache_memory_bytes=512 << 20,
    ) as served:
        found, _ = engines.answers(served, prompts, given.new_tokens)
        _, logprobs = engines.answers(served, read, 1)
        encoded = [served.get_tokenizer().encode(prompt) for prompt in PROMPTS]
        held = engines.cache_bytes_per_token(served)
    different = [index for index, tokens in enumerate(found) if tokens != expected[index]]
    for index in different:
        print(f"prompt {index}: {tokenizer.decode(found[index])!r}", file=sys.stderr)
        print(f"expected: {tokenizer.decode(expected[index])!r}", file=sys.stderr)
    found_perplexity = perplexity(logprobs)
    near = f"{found_perplexity:.3g}" == f"{expected_perplexity:.3g}"
    print(f"bytes of keys and values of a token: {sum(held.values())} in {len(held)} attention blocks")
    print(f"perplexity: vLLM {found_perplexity:.5g}, transformers {expected_perplexity:.5g}")
    print(f"greedy texts equal: {len(prompts) - len(different)} of {len(prompts)}, {given.new_tokens} tokens each")
    if encoded != prompts:
        print("vLLM's tokenizer encodes the prompts otherwise", file=sys.stderr)
    return 0 if near and not different and encoded == prompts else 1


if __name__ == "__main__":
    sys.exit(main())
