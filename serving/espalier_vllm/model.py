"""The flat form built from vLLM's own layers: one module for each block of the config's list.

A block that is absent has no module, no weights and no keys and values; an attention block holds pages for its own KV
heads alone. Tensor names are those of the checkpoint (`model.layers.I` is block I), with query, key and value, and gate
and up, joined as vLLM joins them.
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from . import Unsupported, tensors

# Part of a checkpoint's tensor name: the part that stands for it here, and its place in the joined weight.
JOINED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def check_split(index, block, ranks):
    """Refuses a block that `ranks` tensor-parallel ranks cannot share, by its place in the config."""
    if block["type"] == "mlp":
        width = block["intermediate_size"]
        if width % ranks:
            raise Unsupported(
                f"config blocks[{index}].intermediate_size is {width}, "
                f"expected a multiple of tensor_parallel_size {ranks}"
            )
        return
    heads, kv_heads = block["num_attention_heads"], block["num_key_value_heads"]
    if heads % ranks:
        raise Unsupported(
            f"config blocks[{index}].num_attention_heads is {heads}, "
            f"expected a multiple of tensor_parallel_size {ranks}"
        )
    # Fewer KV heads than ranks: each is held by several.
    if kv_heads % ranks and ranks % kv_heads:
        raise Unsupported(
            f"config blocks[{index}].num_key_value_heads is {kv_heads}, expected a multiple or a divisor of "
            f"tensor_parallel_size {ranks}"
        )


class EspalierAttention(nn.Module):
    def __init__(self, vllm_config, config, block, prefix):
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.head_dim = block["head_dim"]
        heads = block["num_attention_heads"] // ranks
        kv_heads = max(1, block["num_key_value_heads"] // ranks)
        self.query_width, self.kv_width = heads * self.head_dim, kv_heads * self.head_dim
        quant_config = vllm_config.quant_config
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            block["num_attention_heads"],
            block["num_key_value_heads"],
            bias=block["qkv_bias"],
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            block["num_attention_heads"] * self.head_dim,
            config.hidden_size,
            bias=block["output_bias"],
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = self.k_norm = None
        if block["qk_norm"]:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=config.max_position_embeddings,
            is_neox_style=True,
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=block["sliding_window"],
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions, hidden_states):
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.query_width, self.kv_width, self.kv_width], dim=-1)
        if self.q_norm is not None:
            query = self.normed(self.q_norm, query)
            key = self.normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value))
        return output

    def normed(self, norm, states):
        by_head = states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)
        return norm(by_head).view(states.shape)


class EspalierMLP(nn.Module):
    def __init__(self, vllm_config, config, block, prefix):
        super().__init__()
        width = block["intermediate_size"]
        quant_config = vllm_config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [width] * 2,
            bias=block["bias"],
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            width,
            config.hidden_size,
            bias=block["bias"],
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden_states):
        joined, _ = self.gate_up_proj(hidden_states)
        output, _ = self.down_proj(self.act_fn(joined))
        return output


def with_residual(norm, hidden_states, residual):
    """The normed stream and the stream itself; the first block, whichever kind it is, begins it."""
    if residual is None:
        return norm(hidden_states), hidden_states
    return norm(hidden_states, residual)


class EspalierAttentionBlock(nn.Module):
    def __init__(self, vllm_config, config, block, prefix):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EspalierAttention(vllm_config, config, block, f"{prefix}.self_attn")

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = with_residual(self.input_layernorm, hidden_states, residual)
        return self.self_attn(positions, hidden_states), residual


class EspalierMLPBlock(nn.Module):
    def __init__(self, vllm_config, config, block, prefix):
        super().__init__()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = EspalierMLP(vllm_config, config, block, f"{prefix}.mlp")

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = with_residual(self.post_attention_layernorm, hidden_states, residual)
        return self.mlp(hidden_states), residual


BLOCKS = {"attention": EspalierAttentionBlock, "mlp": EspalierMLPBlock}


# Which dimensions vary from step to step is read from the annotations of `forward`.
@support_torch_compile
class EspalierModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        if config.hidden_act != "silu":
            raise Unsupported(f"config hidden_act is {config.hidden_act!r}, expected 'silu'")
        if not any(block["type"] == "attention" for block in config.blocks):
            raise Unsupported("config blocks has no attention, expected at least one block of it")
        ranks = get_tensor_model_parallel_world_size()
        for index, block in enumerate(config.blocks):
            check_split(index, block, ranks)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            BLOCKS[block["type"]](vllm_config, config, block, f"{prefix}.layers.{index}")
            for index, block in enumerate(config.blocks)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_states = inputs_embeds if inputs_embeds is not None else self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class EspalierForCausalLM(nn.Module):
    """Without `SupportsPP`: vLLM refuses pipeline parallelism by itself, with a clear line."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.model = EspalierModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=self.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Places each tensor of a checkpoint; gives the names filled, which vLLM holds against those it has."""
        # A quantised checkpoint has other tensors than the blocks say, which vLLM's own loaders know.
        asked = tensors.shapes(self.config) if self.quant_config is None else None
        parameters = dict(self.named_parameters())
        placed, filled = set(), set()
        for name, tensor in weights:
            if self.config.tie_word_embeddings and name.startswith("lm_head."):
                continue
            if asked is not None:
                tensors.check(name, tensor.shape, asked)
            *module, kind, leaf = name.split(".")
            joined, part = JOINED.get(kind, (kind, None))
            target = ".".join([*module, joined, leaf])
            if target not in parameters:
                raise Unsupported(f"the checkpoint has {name}, which config blocks has no place for")
            parameter = parameters[target]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor, *([] if part is None else [part]))
            placed.add(name)
            filled.add(target)
        # vLLM's own check leaves out every linear layer, and parts of a joined weight.
        missing = sorted(asked.keys() - placed) if asked is not None else []
        if missing:
            raise Unsupported(f"the checkpoint lacks {', '.join(missing)}, which config blocks asks for")
        return filled
