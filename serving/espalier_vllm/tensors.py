"""The tensors of a flat checkpoint: what its `blocks` ask for, by name."""

from . import Unsupported


def shapes(config):
    """Name and shape of every tensor that a checkpoint of this config has; a tied head is none."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    named = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        named["lm_head.weight"] = (vocabulary, hidden)
    for index, block in enumerate(config.blocks):
        of = attention if block["type"] == "attention" else mlp
        named.update({f"model.layers.{index}.{name}": shape for name, shape in of(block, hidden).items()})
    return named


def attention(block, hidden):
    head = block["head_dim"]
    query, kv = (block[f"num_{heads}_heads"] * head for heads in ("attention", "key_value"))
    named = {"input_layernorm.weight": (hidden,), "self_attn.o_proj.weight": (hidden, query)}
    for name, width in (("q", query), ("k", kv), ("v", kv)):
        named[f"self_attn.{name}_proj.weight"] = (width, hidden)
        if block["qkv_bias"]:
            named[f"self_attn.{name}_proj.bias"] = (width,)
    if block["output_bias"]:
        named["self_attn.o_proj.bias"] = (hidden,)
    if block["qk_norm"]:
        named.update({"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)})
    return named


def mlp(block, hidden):
    width = block["intermediate_size"]
    named = {"post_attention_layernorm.weight": (hidden,), "mlp.down_proj.weight": (hidden, width)}
    for name in ("gate", "up"):
        named[f"mlp.{name}_proj.weight"] = (width, hidden)
        if block["bias"]:
            named[f"mlp.{name}_proj.bias"] = (width,)
    if block["bias"]:
        named["mlp.down_proj.bias"] = (hidden,)
    return named


def check(name, found, asked):
    """Refuses a tensor that the blocks have no place for: vLLM itself cuts one that is too large."""
    if name not in asked:
        raise Unsupported(f"the checkpoint has {name}, which config blocks has no place for")
    if tuple(found) != asked[name]:
        raise Unsupported(f"the checkpoint's {name} is {tuple(found)}, expected {asked[name]} by config blocks")
