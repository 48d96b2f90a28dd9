"""GGUF files that the gguf package writes from random models: names, biases, head norms, RoPE and quantised blocks.

The names come from the package's own table, quantised blocks are decoded by its own code, and the logits are those of the
transformers model that each file was made of.
"""

import gguf
import numpy as np
import ours
import torch
from families import random_model
from safetensors.torch import load_file

TOKENS = 160
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=3.0)
# The converter keeps factors alone, and every published model has these other numbers.
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
CASES = {
    "llama": ("llama", dict(head_dim=8)),
    "llama, linear": ("llama", dict(head_dim=8, rope_parameters=LINEAR)),
    "llama, llama3": ("llama", dict(head_dim=8, rope_parameters=LLAMA3, max_position_embeddings=16384)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2, yarn": ("qwen2", dict(tie_word_embeddings=False, head_dim=8, rope_parameters=YARN)),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
}
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, tie_word_embeddings=False)
ENCODED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Blocks that the package decodes but does not encode: any bytes are a block; each type with the places of its f16 scales.
RANDOM = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def interleaved(weight, heads):
    """Llama's query and key rows as its converter orders them: each head's halves in turn."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(config):
    """By how much each frequency is divided, as the converter stores it."""
    rope = config.rope_parameters
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    lengths = 2 * np.pi / frequencies
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    smooth = (original / lengths - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths < high, 1.0, np.where(lengths > low, rope["factor"], between))
    return factors.astype(np.float32)


def write(path, model, encode=None):
    """`encode` gives the bytes and the type of a matrix; none leaves it as it is."""
    config = model.config
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[
        config.model_type]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, value in model.named_parameters():
        value = value.detach().numpy()
        if config.model_type == "llama" and "q_proj" in name:
            value = interleaved(value, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            value = interleaved(value, config.num_key_value_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if encode is None or value.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(value))
        else:
            data, kind = encode(name, value)
            writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind, scales, shape, generator):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in scales:
        scale = generator.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = scale.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)


def compare_encoding(report, program, name, directory):
    kind = gguf.GGMLQuantizationType[name]
    generator = np.random.default_rng(7)
    expected = {}

    def encode(tensor, value):
        if name in RANDOM:
            data = random_blocks(kind, RANDOM[name], value.shape, generator)
        else:
            data = gguf.quantize(value, kind)
        expected[tensor] = gguf.dequantize(data, kind)
        return data, kind

    directory.mkdir(parents=True)
    write(directory / "model.gguf", random_model("qwen2", WIDE, 11), encode)
    ours.run(program, directory / "model.gguf", directory, {
        "tokens": list(range(8)), "sequences": 1, "sequence_tokens": 8, "export_tokens": 1,
        "exports": {"export": {"variants": {}, "bf16": False}},
    })
    found = load_file(directory / "export" / "model.safetensors")
    worst = max(
        float(np.abs(found[tensor].numpy() - value).max() / np.abs(value).max()) for tensor, value in expected.items())
    report.figure(f"GGUF {name}, {len(expected)} matrices against the gguf package, relative", worst, 1e-6)


def compare(report, program, directory):
    for seed, (name, (model_type, changes)) in enumerate(CASES.items()):
        case = directory / name.replace(", ", "-")
        case.mkdir(parents=True)
        model = random_model(model_type, {"max_position_embeddings": 256, **changes}, 50 + seed)
        write(case / "model.gguf", model)
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS))
        ours.run(program, case / "model.gguf", case, {
            "tokens": tokens[0].tolist(), "sequences": 1, "sequence_tokens": TOKENS, "export_tokens": 1,
        })
        with torch.no_grad():
            expected = model(tokens).logits[0]
        found = load_file(case / "whole.safetensors")["logits"]
        report.figure(f"GGUF of a random {name}, logits", (found - expected).abs().max().item(), 1e-3)
    for name in [*ENCODED, *RANDOM]:
        compare_encoding(report, program, name, directory / name)
