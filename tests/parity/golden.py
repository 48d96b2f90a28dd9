"""Makes the golden set: tiny random models of each family, their logits and every gradient, in float64.

    golden.py DIRECTORY

For each case it writes NAME.config.json and NAME.safetensors (weights, tokens, logits and gradients as f32,
computed in f64 from weights rounded to f32). The loss is the mean cross-entropy of next tokens.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = dict(vocab_size=53, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
             attention_dropout=0.0, bos_token_id=1, eos_token_id=2)
THETA = 10000.0
CASES = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama_llama3": ("llama", dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=THETA, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16))),
    "llama_linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=THETA, factor=2.0))),
    "llama_dynamic": ("llama", dict(max_position_embeddings=8, rope_parameters=dict(
        rope_type="dynamic", rope_theta=THETA, factor=2.0))),
    "qwen2_yarn": ("qwen2", dict(head_dim=4, rope_parameters=dict(
        rope_type="yarn", rope_theta=THETA, factor=4.0, original_max_position_embeddings=16))),
    "mistral": ("mistral", dict(sliding_window=5)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", dict(head_dim=6, tie_word_embeddings=True)),
}
SEQUENCES, TOKENS = 2, 12


def make(name: str, directory: Path) -> None:
    model_type, changes = CASES[name]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sorted(CASES).index(name))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3)
    weights = {key: value.detach().float().contiguous().clone() for key, value in model.named_parameters()}
    model = model.double()
    # RoPE's tables stay what a float32 checkpoint would use, made in full precision.
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, TOKENS))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, SHAPE["vocab_size"]), tokens[:, 1:].reshape(-1))
    loss.backward()
    tensors = {f"weight/{key}": value for key, value in weights.items()}
    for key, parameter in model.named_parameters():
        tensors[f"gradient/{key}"] = parameter.grad.float().contiguous()
    tensors["logits"] = logits.detach().float().reshape(-1, SHAPE["vocab_size"]).contiguous()
    tensors["tokens"] = tokens.float().reshape(1, -1).contiguous()
    tensors["loss"] = loss.detach().float().reshape(1, 1)
    saved = config.to_dict()
    saved["architectures"] = [type(model).__name__]
    saved.pop("_attn_implementation", None)
    (directory / f"{name}.config.json").write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
    save_file(tensors, directory / f"{name}.safetensors")


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        make(name, directory)
        print(name)


if __name__ == "__main__":
    main()
