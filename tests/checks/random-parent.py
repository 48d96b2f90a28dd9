#!/usr/bin/env python3
"""Writes a small Llama with random weights and heads that vLLM takes, and the tokenizer of examples/tiny.

    python3 random-parent.py DIRECTORY [--hidden 192] [--layers 4] [--channels 512]
                                       [--heads 6] [--kv-heads 3] [--head 32]

Needs nothing beside Python. The same numbers give the same weights.
"""

import argparse
import array
import json
import random
import shutil
import struct
from pathlib import Path

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny"
VOCABULARY = 1024


def tensors(given):
    hidden, width = given.hidden, given.head
    yield "model.embed_tokens.weight", [VOCABULARY, hidden]
    for layer in range(given.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", [hidden]
        yield f"{name}.self_attn.q_proj.weight", [given.heads * width, hidden]
        yield f"{name}.self_attn.k_proj.weight", [given.kv_heads * width, hidden]
        yield f"{name}.self_attn.v_proj.weight", [given.kv_heads * width, hidden]
        yield f"{name}.self_attn.o_proj.weight", [hidden, given.heads * width]
        yield f"{name}.post_attention_layernorm.weight", [hidden]
        yield f"{name}.mlp.gate_proj.weight", [given.channels, hidden]
        yield f"{name}.mlp.up_proj.weight", [given.channels, hidden]
        yield f"{name}.mlp.down_proj.weight", [hidden, given.channels]
    yield "model.norm.weight", [hidden]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    for name, size in [("hidden", 192), ("layers", 4), ("channels", 512), ("heads", 6), ("kv-heads", 3), ("head", 32)]:
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    given.directory.mkdir(parents=True)
    source = random.Random(1)
    header, data, offset = {}, [], 0
    for name, shape in tensors(given):
        if len(shape) == 1:
            values = array.array("f", [1.0] * shape[0])
        else:
            scale = (3 / shape[1]) ** 0.5
            values = array.array("f", (source.uniform(-scale, scale) for _ in range(shape[0] * shape[1])))
        end = offset + 4 * len(values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        data.append(values.tobytes())
        offset = end
    text = json.dumps(header).encode()
    with open(given.directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(data)
    config = json.loads((TINY / "config.json").read_text())
    config.update(
        vocab_size=VOCABULARY,
        hidden_size=given.hidden,
        intermediate_size=given.channels,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        head_dim=given.head,
        torch_dtype="float32",
    )
    (given.directory / "config.json").write_text(json.dumps(config, indent=2))
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        shutil.copy(TINY / name, given.directory)


if __name__ == "__main__":
    main()
