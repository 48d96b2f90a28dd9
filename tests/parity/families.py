"""Tiny random models of each family, saved by transformers: loaded, cut, exported, and loaded there again."""

import ours
import torch
from smollm2 import compare_exports
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = dict(vocab_size=301, hidden_size=48, intermediate_size=83, num_hidden_layers=4, num_attention_heads=6,
             num_key_value_heads=3, max_position_embeddings=128, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
CASES = {
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=False)),
    "llama-llama3": ("llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama-biases": ("llama", dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(tie_word_embeddings=False, sliding_window=9)),
}
UNIFORM = {0: ("attention", 2), 1: ("mlp", 41), 2: ("attention", 2), 3: ("mlp", 41), 4: None, 5: None,
           6: ("attention", 2), 7: ("mlp", 41)}
# Layer 0 has no attention, layer 1 no MLP, layer 2 is absent.
MIXED = {0: None, 1: ("mlp", 37), 2: ("attention", 2), 3: None, 4: None, 5: None, 6: ("attention", 1), 7: ("mlp", 5)}
TOKENS, NEW = 48, 24


def random_model(model_type, changes, seed):
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.15)
    return model


def compare(report, program, directory):
    for seed, (name, (model_type, changes)) in enumerate(CASES.items()):
        model = random_model(model_type, changes, seed)
        model.save_pretrained(directory / name / "parent")
        tokens = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))
        ours.run(program, directory / name / "parent", directory / name, {
            "tokens": tokens[0].tolist(), "sequences": 1, "sequence_tokens": TOKENS, "export_tokens": NEW,
            "exports": {
                "uniform": {"variants": ours.variants(UNIFORM), "bf16": False},
                "uniform-bf16": {"variants": ours.variants(UNIFORM), "bf16": True},
                "mixed": {"variants": ours.variants(MIXED), "bf16": False},
                "mixed-bf16": {"variants": ours.variants(MIXED), "bf16": True},
            },
        })
        compare_exports(report, f"random {name}", directory / name,
                        ["uniform", "uniform-bf16", "mixed", "mixed-bf16"], changes["tie_word_embeddings"])
