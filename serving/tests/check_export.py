"""Loads an exported directory in transformers and compares its logits with expected ones.

    python check_export.py EXPORTED EXPECTED.safetensors [--tolerance 1e-3]

EXPECTED holds `tokens` (sequences, tokens), integers, and `logits`, f32, (sequences, tokens, vocabulary) or the same rows
as (sequences * tokens, vocabulary); where it holds `generated`, those are the likeliest tokens after the first 16. Exits 0
where every logit agrees, the tokenizer loads and encodes what it decodes, generation with a cache equals generation without
and what was expected, and a tied embedding is one tensor. The figures are printed last.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SAMPLE = "An espalier is a tree trained to a frame: 3 branches, 12 buds, naïve café.\n\n  def f(x):\n\treturn x  # ok"


def stored_names(directory):
    names = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names.extend(weights.keys())
    return names


def check(directory, expected, tolerance):
    """Every complaint, and the largest difference of a logit."""
    complaints = []
    # Only a heterogeneous export carries code; a plain one must load without.
    carries_code = (directory / "modeling_espalier.py").exists()
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=carries_code, dtype=torch.float32, output_loading_info=True
    )
    model.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            complaints.append(f"{kind}: {sorted(report[kind])}")

    wanted = load_file(expected)
    tokens = wanted["tokens"].long()
    with torch.no_grad():
        logits = model(tokens).logits
    difference = (logits - wanted["logits"].reshape(logits.shape)).abs().max().item()
    if not difference <= tolerance:
        complaints.append(f"logits differ by {difference:.3g}, expected at most {tolerance:g}")

    prompt = tokens[:1, : min(16, tokens.shape[1])]
    generated = wanted.get("generated", torch.zeros(16, dtype=torch.long))
    model.generation_config = GenerationConfig(max_new_tokens=len(generated), do_sample=False, pad_token_id=0)
    mask = torch.ones_like(prompt)
    cached = model.generate(prompt, attention_mask=mask, use_cache=True)[0, prompt.shape[1] :]
    plain = model.generate(prompt, attention_mask=mask, use_cache=False)[0, prompt.shape[1] :]
    if cached.tolist() != plain.tolist():
        complaints.append("greedy text differs with and without a cache")
    if "generated" in wanted and cached.tolist() != generated.tolist():
        complaints.append(f"greedy tokens are {cached.tolist()}, expected {generated.tolist()}")

    if json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            complaints.append("the embedding is tied by the config but not in the model")
        if "lm_head.weight" in stored_names(directory):
            complaints.append("a tied embedding is stored twice")
    if (directory / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=carries_code)
        decoded = tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False))
        if tokenizer.vocab_size > 1000 and decoded != SAMPLE:
            complaints.append(f"the tokenizer decodes {decoded!r}")
    return complaints, difference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    arguments = parser.parse_args()
    complaints, difference = check(arguments.exported, arguments.expected, arguments.tolerance)
    for complaint in complaints:
        print(f"{arguments.exported}: {complaint}", file=sys.stderr)
    print(f"largest difference of a logit: {difference:.3g}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
