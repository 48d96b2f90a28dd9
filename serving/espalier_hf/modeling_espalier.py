"""A decoder of residual blocks, each attention or an MLP of its own size.

Layer `i` of `model.layers` is block `i` of the config: one norm and one attention or MLP. Attention blocks are numbered
among themselves (`layer_idx`), so that a cache has one slot for each of them and none for the rest.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_espalier import EspalierConfig, attention_kind


class EspalierRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class EspalierRotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        init = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config, None)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs):
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return (1.0 / config.rope_parameters["rope_theta"] ** exponents).to(device), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        frequencies = self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = position_ids[:, :, None].float() * frequencies[None, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        cos = angles.cos() * self.attention_scaling
        sin = angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(states, times):
    """(batch, kv heads, tokens, head) -> (batch, query heads, tokens, head)."""
    if times == 1:
        return states
    batch, heads, tokens, size = states.shape
    return states[:, :, None].expand(batch, heads, times, tokens, size).reshape(batch, heads * times, tokens, size)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class EspalierAttention(nn.Module):
    def __init__(self, config, block, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = block["head_dim"]
        self.num_heads = block["num_attention_heads"]
        self.num_key_value_heads = block["num_key_value_heads"]
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = block["sliding_window"]

        query_width = self.num_heads * self.head_dim
        kv_width = self.num_key_value_heads * self.head_dim
        bias = block["qkv_bias"]
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=block["output_bias"])
        # Qwen3 norms each query and key head; the other families do not.
        self.q_norm = EspalierRMSNorm(self.head_dim, config.rms_norm_eps) if block["qk_norm"] else nn.Identity()
        self.k_norm = EspalierRMSNorm(self.head_dim, config.rms_norm_eps) if block["qk_norm"] else nn.Identity()

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        if past_key_values is not None:
            key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class EspalierMLP(nn.Module):
    def __init__(self, config, block):
        super().__init__()
        bias = block["bias"]
        self.gate_proj = nn.Linear(config.hidden_size, block["intermediate_size"], bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, block["intermediate_size"], bias=bias)
        self.down_proj = nn.Linear(block["intermediate_size"], config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class EspalierAttentionLayer(GradientCheckpointingLayer):
    def __init__(self, config, block, layer_idx):
        super().__init__()
        self.self_attn = EspalierAttention(config, block, layer_idx)
        self.input_layernorm = EspalierRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states, attention_mask=None, position_embeddings=None, past_key_values=None, **kwargs
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            **kwargs,
        )
        return residual + hidden_states


class EspalierMLPLayer(GradientCheckpointingLayer):
    def __init__(self, config, block):
        super().__init__()
        self.mlp = EspalierMLP(config, block)
        self.post_attention_layernorm = EspalierRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class EspalierPreTrainedModel(PreTrainedModel):
    config_class = EspalierConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EspalierAttentionLayer", "EspalierMLPLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class EspalierModel(EspalierPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = []
        attention_blocks = 0
        for block in config.blocks:
            if block["type"] == "attention":
                layers.append(EspalierAttentionLayer(config, block, attention_blocks))
                attention_blocks += 1
            else:
                layers.append(EspalierMLPLayer(config, block))
        self.layers = nn.ModuleList(layers)
        self.norm = EspalierRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = EspalierRotaryEmbedding(config) if attention_blocks else None
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and self.config.num_hidden_layers > 0:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)

        masks = self.attention_masks(inputs_embeds, attention_mask, past_key_values, position_ids)
        hidden_states = inputs_embeds
        position_embeddings = None
        if self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        every_state = () if output_hidden_states else None
        for layer, block in zip(self.layers, self.config.blocks):
            if output_hidden_states:
                every_state += (hidden_states,)
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[attention_kind(block)] if block["type"] == "attention" else None,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if output_hidden_states:
            every_state += (hidden_states,)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states, past_key_values=past_key_values, hidden_states=every_state
        )
        return output if return_dict is not False else output.to_tuple()

    def attention_masks(self, inputs_embeds, attention_mask, past_key_values, position_ids):
        """A mask for each kind of attention that the blocks have, by transformers' names for them."""
        # `generate` makes them itself for a cache of a fixed size.
        if isinstance(attention_mask, dict):
            return attention_mask
        given = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        masks = {}
        if "full_attention" in self.config.layer_types:
            masks["full_attention"] = create_causal_mask(**given)
        if "sliding_attention" in self.config.layer_types:
            masks["sliding_attention"] = create_sliding_window_causal_mask(**given)
        return masks


class EspalierForCausalLM(EspalierPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config):
        super().__init__(config)
        self.model = EspalierModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output if return_dict is not False else output.to_tuple()


__all__ = ["EspalierForCausalLM", "EspalierModel", "EspalierPreTrainedModel"]
