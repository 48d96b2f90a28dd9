"""The shape of a model whose blocks each have their own size.

`blocks` lists the residual steps in order; each entry is attention or an MLP with its own sizes. `num_hidden_layers`
counts the attention blocks alone: caches and serving engines give one slot of keys and values to each layer that they
count, and `per_layer_config` holds the head counts of each.
"""

from transformers import PreTrainedConfig


# What a block says of itself, by its type.
KEYS = {
    "attention": {
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "qkv_bias",
        "output_bias",
        "qk_norm",
        "sliding_window",
    },
    "mlp": {"intermediate_size", "bias"},
}


def check_block(index, block):
    """Refuses a block that lacks something or says something unknown, by its place in the config."""
    kind = block.get("type")
    if kind not in KEYS:
        raise ValueError(f"config blocks[{index}].type is {kind!r}, expected 'attention' or 'mlp'")
    missing = sorted(KEYS[kind] - block.keys())
    if missing:
        raise ValueError(f"config blocks[{index}] lacks {', '.join(missing)}")
    unknown = sorted(block.keys() - KEYS[kind] - {"type"})
    if unknown:
        raise ValueError(f"config blocks[{index}] has {', '.join(unknown)}, expected {', '.join(sorted(KEYS[kind]))}")


def attention_kind(block):
    """What transformers calls a block's attention."""
    return "full_attention" if block["sliding_window"] is None else "sliding_attention"


class EspalierConfig(PreTrainedConfig):
    model_type = "espalier"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        r"layers.*.self_attn.q_proj": "colwise",
        r"layers.*.self_attn.k_proj": "colwise",
        r"layers.*.self_attn.v_proj": "colwise",
        r"layers.*.self_attn.o_proj": "rowwise",
        r"layers.*.mlp.gate_proj": "colwise",
        r"layers.*.mlp.up_proj": "colwise",
        r"layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(
        self,
        family="llama",
        vocab_size=32000,
        hidden_size=64,
        blocks=None,
        hidden_act="silu",
        head_dim=None,
        num_attention_heads=None,
        num_key_value_heads=None,
        intermediate_size=None,
        max_position_embeddings=2048,
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        use_cache=True,
        rope_parameters=None,
        sliding_window=None,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **kwargs,
    ):
        self.family = family
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.blocks = blocks or []
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_parameters = rope_parameters
        self.attention_dropout = attention_dropout

        for index, block in enumerate(self.blocks):
            check_block(index, block)
        attention = [block for block in self.blocks if block["type"] == "attention"]
        mlps = [block for block in self.blocks if block["type"] == "mlp"]
        head_dims = {block["head_dim"] for block in attention}
        if len(head_dims) > 1:
            raise ValueError(f"`blocks` has heads of sizes {sorted(head_dims)}, expected one size for all")
        self.num_hidden_layers = len(attention)
        self.head_dim = head_dims.pop() if head_dims else head_dim
        self.num_attention_heads = max((b["num_attention_heads"] for b in attention), default=num_attention_heads or 1)
        self.num_key_value_heads = max((b["num_key_value_heads"] for b in attention), default=num_key_value_heads or 1)
        self.intermediate_size = max((b["intermediate_size"] for b in mlps), default=intermediate_size or 0)
        windows = {b["sliding_window"] for b in attention if b["sliding_window"] is not None}
        if len(windows) > 1:
            raise ValueError(f"`blocks` has sliding windows {sorted(windows)}, expected one for all")
        self.sliding_window = windows.pop() if windows else None
        self.layer_types = [attention_kind(block) for block in attention]
        # Derived from `blocks` and therefore never read from a file.
        for derived in ("num_hidden_layers", "layer_types", "per_layer_config"):
            kwargs.pop(derived, None)
        sizes = ("num_attention_heads", "num_key_value_heads")
        varying = {size for size in sizes if len({block[size] for block in attention}) > 1}
        per_layer = {
            index: {size: block[size] for size in sizes if size in varying} for index, block in enumerate(attention)
        }
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **kwargs,
        )
        # After everything else: from now on these sizes are read layer by layer. Code that wants one value for the whole
        # model gets the largest, which is the safe bound for allocation.
        if varying:
            self.allow_global_per_layer_attribute_access = True
            self.per_layer_config = per_layer

    def to_dict(self):
        """Without what follows from `blocks`."""
        output = super().to_dict()
        output.pop("per_layer_config", None)
        output.pop("allow_global_per_layer_attribute_access", None)
        return output


__all__ = ["EspalierConfig"]
