"""Llamas of any size with random weights in bf16, made with PyTorch; `random-parent.py` makes small ones without.

Not run by itself.
"""

import json
import shutil
from pathlib import Path

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny"
NORMS = ("input_layernorm", "post_attention_layernorm")


def config(sizes):
    """As `config.json` has it."""
    tiny = json.loads((TINY / "config.json").read_text())
    return {
        **tiny,
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["channels"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head"],
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }


def write(directory, sizes, device="cpu"):
    """The model with the tokenizer of examples/tiny; its numbers are made on `device`."""
    import torch
    from safetensors.torch import save_file

    hidden, width = sizes["hidden"], sizes["head"]
    torch.manual_seed(1)

    def matrix(rows, columns):
        return (torch.randn(rows, columns, device=device) / columns**0.5).to(torch.bfloat16).cpu()

    tensors = {"model.embed_tokens.weight": matrix(sizes["vocabulary"], hidden)}
    shapes = {
        "self_attn.q_proj": (sizes["heads"] * width, hidden),
        "self_attn.k_proj": (sizes["kv_heads"] * width, hidden),
        "self_attn.v_proj": (sizes["kv_heads"] * width, hidden),
        "self_attn.o_proj": (hidden, sizes["heads"] * width),
        "mlp.gate_proj": (sizes["channels"], hidden),
        "mlp.up_proj": (sizes["channels"], hidden),
        "mlp.down_proj": (hidden, sizes["channels"]),
    }
    norms = [f"model.layers.{layer}.{name}" for layer in range(sizes["layers"]) for name in NORMS]
    for name in [*norms, "model.norm"]:
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(sizes["layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config(sizes), indent=2))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    entries = tokenizer["model"]["vocab"]
    entries.update((f"<unused {number}>", number) for number in range(len(entries), sizes["vocabulary"]))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, directory)
