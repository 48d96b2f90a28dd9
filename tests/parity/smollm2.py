"""SmolLM2 from its GGUF file: ours against transformers, which reads the same file with its own decoder."""

import json
import lzma
import math

import ours
import torch
from check_export import check
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

SEQUENCES, TOKENS, NEW = 8, 256, 32
DOCUMENTS = 24
LAYERS = 30
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "An espalier is a tree whose branches",
    "def fibonacci(n):\n    ",
    CHAT.format("Name three uses of copper."),
    CHAT.format("Was ist 17 + 25? Erkläre es in einem Satz."),
]


def uniform():
    """Every layer two KV groups and 1,024 channels, the last five layers gone: a plain Llama."""
    blocks = {}
    for layer in range(LAYERS):
        gone = layer >= LAYERS - 5
        blocks[2 * layer] = None if gone else ("attention", 2)
        blocks[2 * layer + 1] = None if gone else ("mlp", 1024)
    return ours.variants(blocks)


def mixed():
    """Two groups, one group, odd widths, a skipped attention, a skipped MLP, an absent layer."""
    return ours.variants({
        0: ("attention", 2), 1: ("mlp", 777), 4: ("attention", 1), 5: ("mlp", 1),
        14: None, 15: None, 20: None, 25: None, 29: ("mlp", 1535), 58: ("attention", 1), 59: ("mlp", 1023),
    })


def compare(report, program, file, documents, directory):
    with lzma.open(documents, "rt") as lines:
        text = "".join(json.loads(line)["text"] for line, _ in zip(lines, range(DOCUMENTS)))
    found = ours.run(program, file, directory, {
        "text": text, "sequences": SEQUENCES, "sequence_tokens": TOKENS, "prompts": PROMPTS, "new_tokens": NEW,
        "export_tokens": 16,
        "exports": {
            "uniform": {"variants": uniform(), "bf16": False},
            "mixed": {"variants": mixed(), "bf16": False},
            "mixed-bf16": {"variants": mixed(), "bf16": True},
        },
    })
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: SEQUENCES * TOKENS]
    report.holds("SmolLM2, tokens of the text equal", tokens == found["tokens"])

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=2)
    batch = torch.tensor(found["tokens"]).reshape(SEQUENCES, TOKENS)
    total = 0.0
    with torch.no_grad():
        for index, sequence in enumerate(batch):
            logits = model(sequence[None]).logits[0]
            if index == 0:
                expected = load_file(directory / "whole.safetensors")["logits"]
                report.figure("SmolLM2, logits", (logits - expected).abs().max().item(), 1e-3)
            total += torch.nn.functional.cross_entropy(
                logits[:-1].double(), sequence[1:], reduction="sum").item()
    perplexity = math.exp(total / (SEQUENCES * (TOKENS - 1)))
    print(f"SmolLM2, perplexity of {SEQUENCES} x {TOKENS} tokens: ours {found['perplexity']:.6f}, "
          f"transformers {perplexity:.6f}")
    # Four digits: half a unit of the fourth.
    unit = 10.0 ** (math.floor(math.log10(perplexity)) - 3)
    report.figure("SmolLM2, perplexity, difference", abs(found["perplexity"] - perplexity), unit / 2)
    for number, (text, mine) in enumerate(zip(PROMPTS, found["generated"]), 1):
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        new = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0, prompt["input_ids"].shape[1]:]
        same = prompt["input_ids"][0].tolist() == mine["prompt"] and new.tolist() == mine["new"]
        report.holds(f"SmolLM2, prompt {number}: greedy text identical over {len(new)} tokens", same and len(new) == NEW,
                     f"{tokenizer.decode(mine['new'])!r}, expected {tokenizer.decode(new)!r}")
    del model
    compare_exports(report, "SmolLM2", directory, ["uniform", "mixed", "mixed-bf16"], tied=True)


def compare_exports(report, name, directory, exports, tied):
    """Each export in transformers against the logits and the greedy tokens that ours gave."""
    for export in exports:
        complaints, difference = check(directory / export, directory / f"{export}.safetensors", 1e-3)
        plain = not (directory / export / "modeling_espalier.py").exists()
        # Qwen2's class in vLLM takes the width over the number of query heads for a head's size, and some are gone.
        expected = export.startswith("uniform") and "qwen2" not in name
        report.holds(f"{name} {export}, exported as {'the plain family' if plain else 'the flat form'}",
                     plain == expected, quiet=True)
        if json.loads((directory / export / "config.json").read_text()).get("tie_word_embeddings", False) != tied:
            complaints.append(f"expected tie_word_embeddings {tied}")
        report.figure(f"{name} {export}, logits", difference, 1e-3)
        report.holds(f"{name} {export}, loads whole, greedy tokens equal ours with and without cache, a tied embedding once",
                     not complaints, "; ".join(complaints), quiet=True)
