"""What a model's weights take, told from its config or its files before anything is loaded."""

import json
from pathlib import Path

from .failure import Failure

BYTES = {"bf16": 2, "f32": 4}


def read_config(directory):
    """The config of a checkpoint."""
    try:
        config = json.loads(Path(directory, "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Failure("unsupported", f"directory {directory} has no config.json that can be read: {error}") from None
    if not isinstance(config, dict):
        raise Failure("unsupported", f"config.json of {directory} is no object")
    return config


def weight_bytes(config, directory, precision):
    """Bytes of the weights: of a flat config from its sizes, of other checkpoints from their files; else 0."""
    try:
        return BYTES[precision] * parameters(config)
    except (KeyError, TypeError):
        return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")) if directory else 0


def parameters(config):
    hidden, tables = config["hidden_size"], 1 if config.get("tie_word_embeddings") else 2
    total = config["vocab_size"] * hidden * tables
    for block in config["blocks"]:
        if block["type"] == "mlp":
            total += 3 * hidden * block["intermediate_size"]
        else:
            heads = block["num_attention_heads"] + block["num_key_value_heads"]
            total += 2 * hidden * block["head_dim"] * heads
    return total
