"""What a model's weights take, told from its config or its files before anything is loaded."""

import json
import math
from pathlib import Path

from .failure import Failure

BYTES = {"bf16": 2, "f32": 4}
# The format's own bound of what a file says of its tensors.
HEADER_BYTES = 100_000_000


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
    """Bytes of the weights: of a flat config from its sizes, of other checkpoints from their files; else 0.

    Whatever type they are stored in, vLLM has them in the precision.
    """
    try:
        return BYTES[precision] * parameters(config)
    except (KeyError, TypeError):
        return BYTES[precision] * sum(map(stored, files(directory))) if directory else 0


def files(directory):
    """Those that the weights are in; others beside them may hold the same once more."""
    index, whole = (Path(directory, f"model.safetensors{end}") for end in (".index.json", ""))
    if index.is_file():
        try:
            return sorted({Path(directory, name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failure("unsupported", f"{index} has no weight_map that can be read: {error}") from None
    return [whole] if whole.is_file() else sorted(Path(directory).glob("*.safetensors"))


def stored(file):
    """How many numbers a file holds."""
    try:
        with open(file, "rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if length > HEADER_BYTES:
                raise ValueError(f"its header would take {length} bytes")
            header = json.loads(data.read(length))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Failure("unsupported", f"{file} is no safetensors file: {error}") from None


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
