//! Every tensor of a model: what it is for, its shape, and the name a Hugging Face checkpoint gives it.
//!
//! Sizes come from the block's shape alone ([`BlockShape::parts`]); names come from the family alone
//! ([`Family::block_tensor_name`]). Counting, loading and export all read [`Architecture::tensors`], so a
//! family is described once. No tensor data here, and no reading of files.

use serde::{Deserialize, Serialize};

use crate::{Activation, Architecture, Attention, BlockKind, BlockShape, Family, Mamba2, Mlp, Moe};

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Token embedding, (vocabulary, hidden).
    Embedding,
    /// Output head, (vocabulary, hidden); absent when tied.
    Head,
    /// The norm before the head, (hidden).
    FinalNorm,
    /// A block's own norm, applied to its input, (hidden).
    Norm,
    /// Query projection, (query heads · head size, hidden).
    Query,
    /// Key projection, (KV groups · head size, hidden).
    Key,
    /// Value projection, (KV groups · head size, hidden).
    Value,
    /// Attention's output projection, (hidden, query heads · head size).
    Output,
    /// Bias of the query projection.
    QueryBias,
    /// Bias of the key projection.
    KeyBias,
    /// Bias of the value projection.
    ValueBias,
    /// Bias of attention's output projection, (hidden).
    OutputBias,
    /// RMS norm of each query head, (head size).
    QueryNorm,
    /// RMS norm of each key head, (head size).
    KeyNorm,
    /// Gate projection of an MLP, (channels, hidden).
    Gate,
    /// Up projection of an MLP, (channels, hidden).
    Up,
    /// Down projection of an MLP, (hidden, channels).
    Down,
    /// Bias of the gate projection, (channels).
    GateBias,
    /// Bias of the up projection, (channels).
    UpBias,
    /// Bias of the down projection, (hidden).
    DownBias,
    /// Mamba-2 input projection, rows in the order z, x, B, C, dt: (2·inner + 2·groups·state + heads, hidden).
    MambaIn,
    /// Depthwise causal convolution over x, B, C: (inner + 2·groups·state, 1, taps).
    MambaConv,
    /// Bias of the convolution.
    MambaConvBias,
    /// Logarithm of the decay of each head, (heads).
    MambaALog,
    /// Skip from x to y of each head, (heads).
    MambaD,
    /// Bias of the time step of each head, (heads).
    MambaDtBias,
    /// Gated RMS norm of the inner width, (inner).
    MambaNorm,
    /// Mamba-2 output projection, (hidden, inner).
    MambaOut,
    /// Router of a mixture of experts, (experts, hidden).
    Router,
    /// Correction added to the router's scores when choosing, (experts).
    RouterBias,
    /// Gate projection of one routed expert.
    ExpertGate(usize),
    /// Up projection of one routed expert, (expert channels, latent or hidden).
    ExpertUp(usize),
    /// Down projection of one routed expert, (latent or hidden, expert channels).
    ExpertDown(usize),
    /// Gate projection of the shared experts.
    SharedGate,
    /// Up projection of the shared experts, (shared channels, hidden).
    SharedUp,
    /// Down projection of the shared experts, (hidden, shared channels).
    SharedDown,
    /// Projection into the latent width that routed experts work in, (latent, hidden).
    LatentIn,
    /// Projection back from the latent width, (hidden, latent).
    LatentOut,
}

/// One tensor of a model, as a Hugging Face checkpoint stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape; a projection is (outputs, inputs).
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// Index into [`Architecture::blocks`], not the layer number; none outside blocks.
    pub block: Option<usize>,
}

impl TensorSpec {
    /// How many numbers it holds.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }
}

/// One tensor of a block, before a family has named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it is for.
    pub role: Role,
    /// Its shape; a projection is (outputs, inputs).
    pub shape: Vec<usize>,
}

impl Part {
    /// How many numbers it holds.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape
        .iter()
        .fold(1_u64, |product, &axis| product.saturating_mul(axis as u64))
}

impl Architecture {
    /// Every tensor of the model, in checkpoint order: embedding, blocks, final norm, head (absent when tied).
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let outside = |name: &str, shape: Vec<usize>, role| TensorSpec {
            name: name.to_owned(),
            shape,
            role,
            block: None,
        };
        let table = vec![self.vocab_size, self.hidden];
        let mut tensors = vec![outside(
            self.family.embedding_name(),
            table.clone(),
            Role::Embedding,
        )];
        for (index, block) in self.blocks.iter().enumerate() {
            let kind = block.shape.kind();
            tensors.extend(block.shape.parts(self.hidden).into_iter().map(|part| TensorSpec {
                name: self.family.block_tensor_name(kind, block.layer, part.role),
                shape: part.shape,
                role: part.role,
                block: Some(index),
            }));
        }
        tensors.push(outside(
            self.family.final_norm_name(),
            vec![self.hidden],
            Role::FinalNorm,
        ));
        if !self.tied_embedding {
            tensors.push(outside(HEAD_NAME, table, Role::Head));
        }
        tensors
    }
}

impl BlockShape {
    /// The block's tensors, its norm first, for a residual stream of width `hidden`.
    pub fn parts(&self, hidden: usize) -> Vec<Part> {
        let mut parts = vec![part(Role::Norm, [hidden])];
        match self {
            Self::Attention(attention) => attention_parts(attention, hidden, &mut parts),
            Self::Mlp(mlp) => mlp_parts(mlp, hidden, &mut parts),
            Self::Mamba2(mamba) => mamba_parts(mamba, hidden, &mut parts),
            Self::Moe(moe) => moe_parts(moe, hidden, &mut parts),
        }
        parts
    }
}

fn part<const AXES: usize>(role: Role, shape: [usize; AXES]) -> Part {
    Part {
        role,
        shape: shape.to_vec(),
    }
}

fn attention_parts(attention: &Attention, hidden: usize, parts: &mut Vec<Part>) {
    let (query, kv) = (attention.query_width(), attention.kv_width());
    parts.extend([
        part(Role::Query, [query, hidden]),
        part(Role::Key, [kv, hidden]),
        part(Role::Value, [kv, hidden]),
        part(Role::Output, [hidden, query]),
    ]);
    if attention.qkv_bias {
        parts.extend([
            part(Role::QueryBias, [query]),
            part(Role::KeyBias, [kv]),
            part(Role::ValueBias, [kv]),
        ]);
    }
    if attention.output_bias {
        parts.push(part(Role::OutputBias, [hidden]));
    }
    if attention.qk_norm {
        parts.push(part(Role::QueryNorm, [attention.head_dim]));
        parts.push(part(Role::KeyNorm, [attention.head_dim]));
    }
}

fn mlp_parts(mlp: &Mlp, hidden: usize, parts: &mut Vec<Part>) {
    let gated = mlp.activation == Activation::SwiGlu;
    if gated {
        parts.push(part(Role::Gate, [mlp.channels, hidden]));
    }
    parts.push(part(Role::Up, [mlp.channels, hidden]));
    parts.push(part(Role::Down, [hidden, mlp.channels]));
    if mlp.bias {
        if gated {
            parts.push(part(Role::GateBias, [mlp.channels]));
        }
        parts.push(part(Role::UpBias, [mlp.channels]));
        parts.push(part(Role::DownBias, [hidden]));
    }
}

fn mamba_parts(mamba: &Mamba2, hidden: usize, parts: &mut Vec<Part>) {
    let (inner, convolved) = (mamba.inner_width(), mamba.convolved_width());
    parts.extend([
        part(
            Role::MambaIn,
            [
                inner.saturating_add(convolved).saturating_add(mamba.heads),
                hidden,
            ],
        ),
        part(Role::MambaConv, [convolved, 1, mamba.conv_kernel]),
        part(Role::MambaConvBias, [convolved]),
        part(Role::MambaALog, [mamba.heads]),
        part(Role::MambaD, [mamba.heads]),
        part(Role::MambaDtBias, [mamba.heads]),
        part(Role::MambaNorm, [inner]),
        part(Role::MambaOut, [hidden, inner]),
    ]);
}

fn moe_parts(moe: &Moe, hidden: usize, parts: &mut Vec<Part>) {
    let gated = moe.activation == Activation::SwiGlu;
    let width = moe.latent.unwrap_or(hidden);
    parts.push(part(Role::Router, [moe.experts, hidden]));
    parts.push(part(Role::RouterBias, [moe.experts]));
    if let Some(latent) = moe.latent {
        parts.push(part(Role::LatentIn, [latent, hidden]));
        parts.push(part(Role::LatentOut, [hidden, latent]));
    }
    for expert in 0..moe.experts {
        if gated {
            parts.push(part(Role::ExpertGate(expert), [moe.expert_channels, width]));
        }
        parts.push(part(Role::ExpertUp(expert), [moe.expert_channels, width]));
        parts.push(part(Role::ExpertDown(expert), [width, moe.expert_channels]));
    }
    if moe.shared_channels > 0 {
        if gated {
            parts.push(part(Role::SharedGate, [moe.shared_channels, hidden]));
        }
        parts.push(part(Role::SharedUp, [moe.shared_channels, hidden]));
        parts.push(part(Role::SharedDown, [hidden, moe.shared_channels]));
    }
}

const HEAD_NAME: &str = "lm_head.weight";

impl Family {
    fn embedding_name(self) -> &'static str {
        match self {
            Self::NemotronH => "backbone.embeddings.weight",
            Self::Llama | Self::Mistral | Self::Qwen2 | Self::Qwen3 => "model.embed_tokens.weight",
        }
    }

    fn final_norm_name(self) -> &'static str {
        match self {
            Self::NemotronH => "backbone.norm_f.weight",
            Self::Llama | Self::Mistral | Self::Qwen2 | Self::Qwen3 => "model.norm.weight",
        }
    }

    /// The name that a checkpoint of this family gives to the tensor `role` of a block of `kind` in `layer`.
    ///
    /// Llama's kin keep attention and MLP as two blocks of one layer, so each has its own module and norm;
    /// Nemotron-H has one block a layer, whose module is always `mixer`.
    pub fn block_tensor_name(self, kind: BlockKind, layer: usize, role: Role) -> String {
        let (layers, module, norm) = match (self, kind) {
            (Self::NemotronH, _) => ("backbone.layers", "mixer", "norm"),
            (_, BlockKind::Attention) => ("model.layers", "self_attn", "input_layernorm"),
            (_, BlockKind::Mamba2) => ("model.layers", "mamba", "input_layernorm"),
            (_, BlockKind::Mlp | BlockKind::Moe) => ("model.layers", "mlp", "post_attention_layernorm"),
        };
        match role {
            Role::Norm => format!("{layers}.{layer}.{norm}.weight"),
            Role::ExpertGate(expert) => {
                format!("{layers}.{layer}.{module}.experts.{expert}.gate_proj.weight")
            }
            Role::ExpertUp(expert) => format!("{layers}.{layer}.{module}.experts.{expert}.up_proj.weight"),
            Role::ExpertDown(expert) => {
                format!("{layers}.{layer}.{module}.experts.{expert}.down_proj.weight")
            }
            _ => format!("{layers}.{layer}.{module}.{}", role.suffix()),
        }
    }
}

impl Role {
    /// What follows the block's module in a tensor's name; the whole model's own tensors have fixed names.
    fn suffix(self) -> &'static str {
        match self {
            Self::Embedding => "embed_tokens.weight",
            Self::Head => HEAD_NAME,
            Self::FinalNorm | Self::Norm | Self::MambaNorm => "norm.weight",
            Self::Query => "q_proj.weight",
            Self::Key => "k_proj.weight",
            Self::Value => "v_proj.weight",
            Self::Output => "o_proj.weight",
            Self::QueryBias => "q_proj.bias",
            Self::KeyBias => "k_proj.bias",
            Self::ValueBias => "v_proj.bias",
            Self::OutputBias => "o_proj.bias",
            Self::QueryNorm => "q_norm.weight",
            Self::KeyNorm => "k_norm.weight",
            Self::Gate | Self::ExpertGate(_) => "gate_proj.weight",
            Self::Up | Self::ExpertUp(_) => "up_proj.weight",
            Self::Down | Self::ExpertDown(_) => "down_proj.weight",
            Self::GateBias => "gate_proj.bias",
            Self::UpBias => "up_proj.bias",
            Self::DownBias => "down_proj.bias",
            Self::MambaIn => "in_proj.weight",
            Self::MambaConv => "conv1d.weight",
            Self::MambaConvBias => "conv1d.bias",
            Self::MambaALog => "A_log",
            Self::MambaD => "D",
            Self::MambaDtBias => "dt_bias",
            Self::MambaOut => "out_proj.weight",
            Self::Router => "gate.weight",
            Self::RouterBias => "gate.e_score_correction_bias",
            Self::SharedGate => "shared_experts.gate_proj.weight",
            Self::SharedUp => "shared_experts.up_proj.weight",
            Self::SharedDown => "shared_experts.down_proj.weight",
            Self::LatentIn => "fc1_latent_proj.weight",
            Self::LatentOut => "fc2_latent_proj.weight",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Block;

    fn layer_of(family: Family, layer: usize, shape: BlockShape) -> Architecture {
        Architecture {
            family,
            vocab_size: 10,
            hidden: 8,
            layers: layer + 1,
            blocks: vec![Block { layer, shape }],
            tied_embedding: true,
            norm_epsilon: 1e-5,
            max_positions: 32,
        }
    }

    fn attention() -> Attention {
        Attention {
            kv_groups: 2,
            queries_per_group: 3,
            head_dim: 4,
            qkv_bias: true,
            output_bias: false,
            qk_norm: true,
            rope: None,
            sliding_window: None,
        }
    }

    fn names(architecture: &Architecture) -> Vec<String> {
        architecture
            .tensors()
            .into_iter()
            .map(|tensor| tensor.name)
            .collect()
    }

    #[test]
    fn names_follow_the_blocks_layer_not_its_place_in_the_list() {
        let names = names(&layer_of(Family::Qwen3, 5, BlockShape::Attention(attention())));
        assert!(
            names.contains(&"model.layers.5.self_attn.q_norm.weight".to_owned()),
            "{names:?}"
        );
        assert!(
            names.contains(&"model.layers.5.input_layernorm.weight".to_owned()),
            "{names:?}"
        );
    }

    #[test]
    fn an_mlp_block_takes_the_norm_after_attention_and_a_tied_head_is_absent() {
        let mlp = Mlp {
            channels: 16,
            activation: Activation::SwiGlu,
            bias: false,
        };
        let names = names(&layer_of(Family::Llama, 0, BlockShape::Mlp(mlp)));
        assert_eq!(
            names,
            [
                "model.embed_tokens.weight",
                "model.layers.0.post_attention_layernorm.weight",
                "model.layers.0.mlp.gate_proj.weight",
                "model.layers.0.mlp.up_proj.weight",
                "model.layers.0.mlp.down_proj.weight",
                "model.norm.weight",
            ]
        );
    }

    #[test]
    fn a_grouped_query_projection_is_wider_than_its_keys() {
        let architecture = layer_of(Family::Qwen2, 0, BlockShape::Attention(attention()));
        let shape_of = |role| {
            architecture
                .tensors()
                .into_iter()
                .find(|tensor| tensor.role == role)
                .map(|tensor| tensor.shape)
        };
        assert_eq!(shape_of(Role::Query), Some(vec![24, 8]));
        assert_eq!(shape_of(Role::Value), Some(vec![8, 8]));
        assert_eq!(shape_of(Role::Output), Some(vec![8, 24]));
        assert_eq!(shape_of(Role::KeyBias), Some(vec![8]));
        assert_eq!(shape_of(Role::OutputBias), None);
    }

    #[test]
    fn no_two_tensors_of_a_model_share_a_name() {
        let moe = Moe {
            experts: 3,
            experts_per_token: 2,
            expert_channels: 6,
            shared_channels: 5,
            latent: Some(4),
            activation: Activation::ReluSquared,
        };
        let architecture = layer_of(Family::NemotronH, 1, BlockShape::Moe(moe));
        let mut names = names(&architecture);
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.contains(&"backbone.layers.1.mixer.experts.2.down_proj.weight".to_owned()));
        assert!(names.contains(&"backbone.layers.1.mixer.shared_experts.up_proj.weight".to_owned()));
    }
}
