"""Tiny random checkpoints of every odd shape, as the export writes them, and what transformers makes of them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

MODELLING = Path(__file__).resolve().parent.parent / "espalier_hf"
# Head size and hidden width are ones that vLLM's CPU attention takes (32, 64, 80, 96 and so on).
HEAD = 32
BASE = {
    "family": "llama",
    "vocab_size": 301,
    "hidden_size": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def attention(heads, kv_heads, **changes):
    plain = {
        "type": "attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "qkv_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "sliding_window": None,
    }
    return {**plain, **changes}


def mlp(width, bias=False):
    return {"type": "mlp", "intermediate_size": width, "bias": bias}


def stack(**changes):
    """Blocks that all differ."""
    biased = changes.pop("mlp_bias", False)
    return [
        attention(6, 2, **changes),
        mlp(160, biased),
        attention(3, 3, **changes),
        mlp(64, biased),
        attention(2, 1, **changes),
        mlp(96, biased),
    ]


# Name: what the config has beside or instead of BASE, and the blocks.
SHAPES = {
    "plain layers": ({}, [attention(3, 1), mlp(128)] * 2),
    "every block another size": ({}, stack()),
    "first block an MLP": ({}, [mlp(128), attention(3, 1), mlp(64)]),
    "first layer without attention, a later one without MLP": (
        {},
        [mlp(128), attention(3, 1), attention(6, 2), mlp(64)],
    ),
    "last layers absent": ({}, [attention(3, 1), mlp(128), attention(6, 3)]),
    "MLPs and a single attention block": ({}, [mlp(64), mlp(96), attention(2, 1), mlp(32), mlp(64)]),
    "one KV head everywhere": ({}, [attention(6, 1), mlp(128), attention(1, 1), mlp(64)]),
    "odd widths": ({}, [attention(5, 5), mlp(37), attention(3, 1), mlp(1), mlp(129)]),
    "untied": ({"tie_word_embeddings": False}, stack()),
    "query and key norms": ({"family": "qwen3"}, stack(qk_norm=True)),
    "biased projections": ({"family": "qwen2"}, stack(qkv_bias=True)),
    "biases everywhere": ({}, stack(qkv_bias=True, output_bias=True, mlp_bias=True)),
    "scaled RoPE": ({"rope_scaling": LLAMA3}, stack()),
    "sliding window": ({"family": "mistral"}, stack(sliding_window=16)),
}


def write(directory, changes, blocks, dtype=torch.float32, seed=0):
    """A checkpoint as `espalier` exports it; the model as transformers loads it."""
    directory.mkdir(parents=True)
    widest = max((b["num_attention_heads"], b["num_key_value_heads"]) for b in blocks if b["type"] == "attention")
    config = {
        **BASE,
        "model_type": "espalier",
        "architectures": ["EspalierForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_espalier.EspalierConfig",
            "AutoModel": "modeling_espalier.EspalierModel",
            "AutoModelForCausalLM": "modeling_espalier.EspalierForCausalLM",
        },
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": sum(block["type"] == "attention" for block in blocks),
        "num_attention_heads": widest[0],
        "num_key_value_heads": widest[1],
        "head_dim": HEAD,
        "blocks": blocks,
        **changes,
    }
    for file in MODELLING.glob("*_espalier.py"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(config))
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(tokens))
    loaded = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True, dtype=dtype).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (1.0 if "norm" in name else 0.0))
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def greedy(model, prompts, new_tokens):
    """The likeliest tokens after each prompt, one prompt at a time."""
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def log_probabilities(model, prompt):
    """Of each token but the first, given those before it."""
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
    return rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
