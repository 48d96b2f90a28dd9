//! One residual step, `x + f(norm(x))`, and the shapes it can have.

use serde::{Deserialize, Serialize};

use crate::{Rope, Variant};

/// One residual step of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// The layer number that the checkpoint's tensor names carry.
    pub layer: usize,
    /// What the block computes, and how large it is.
    pub shape: BlockShape,
}

/// What a block computes, without its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockKind {
    /// Causal self-attention.
    Attention,
    /// A multilayer perceptron.
    Mlp,
    /// A Mamba-2 state-space mixer.
    Mamba2,
    /// A mixture of expert MLPs.
    Moe,
}

/// What a block computes, and how large it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockShape {
    /// Causal self-attention.
    Attention(Attention),
    /// A multilayer perceptron.
    Mlp(Mlp),
    /// A Mamba-2 state-space mixer.
    Mamba2(Mamba2),
    /// A mixture of expert MLPs.
    Moe(Moe),
}

/// Grouped-query attention: `kv_groups` key/value heads, each serving `queries_per_group` query heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Key/value heads.
    pub kv_groups: usize,
    /// Query heads that share one key/value head.
    pub queries_per_group: usize,
    /// Width of one head; not always hidden / heads.
    pub head_dim: usize,
    /// Whether query, key and value projections carry a bias.
    pub qkv_bias: bool,
    /// Whether the output projection carries a bias.
    pub output_bias: bool,
    /// Whether each query and key head is RMS-normalised before RoPE.
    pub qk_norm: bool,
    /// Rotary positions; none in families without them.
    pub rope: Option<Rope>,
    /// A token attends to at most this many tokens, itself included; none means all before it.
    pub sliding_window: Option<usize>,
}

// Products saturate: a shape that a peer sent was never a config within bounds, and must not wrap into a small one.
impl Attention {
    /// Query heads in all.
    pub fn query_heads(&self) -> usize {
        self.kv_groups.saturating_mul(self.queries_per_group)
    }

    /// Columns of the query projection's output.
    pub fn query_width(&self) -> usize {
        self.query_heads().saturating_mul(self.head_dim)
    }

    /// Columns of the key (and of the value) projection's output.
    pub fn kv_width(&self) -> usize {
        self.kv_groups.saturating_mul(self.head_dim)
    }
}

/// The nonlinearity of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate(x)) · up(x)`: three matrices.
    SwiGlu,
    /// `relu(up(x))²`: two matrices.
    ReluSquared,
}

impl Activation {
    /// How many matrices an MLP with this activation has.
    pub fn matrices(self) -> usize {
        match self {
            Self::SwiGlu => 3,
            Self::ReluSquared => 2,
        }
    }
}

/// A multilayer perceptron.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Intermediate width.
    pub channels: usize,
    /// The nonlinearity, and whether there is a gate.
    pub activation: Activation,
    /// Whether the projections carry a bias.
    pub bias: bool,
}

/// A Mamba-2 mixer. The inner width is `heads · head_dim`, never `expand · hidden`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mamba2 {
    /// State-space heads.
    pub heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Size of the state per channel.
    pub state: usize,
    /// Groups that share B and C.
    pub groups: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl Mamba2 {
    /// Channels that carry x, z and y: `heads · head_dim`.
    pub fn inner_width(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Channels of the causal convolution, over x, B and C: `inner + 2 · groups · state`.
    pub fn convolved_width(&self) -> usize {
        self.inner_width()
            .saturating_add(self.groups.saturating_mul(self.state).saturating_mul(2))
    }
}

/// A mixture of expert MLPs with a router and shared experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Routed experts.
    pub experts: usize,
    /// Routed experts that each token uses.
    pub experts_per_token: usize,
    /// Intermediate width of a routed expert.
    pub expert_channels: usize,
    /// Intermediate width of the shared experts together.
    pub shared_channels: usize,
    /// Width the routed experts work in, when it is not the hidden width.
    pub latent: Option<usize>,
    /// The nonlinearity of every expert.
    pub activation: Activation,
}

impl BlockShape {
    /// What the block computes, without its size.
    pub fn kind(&self) -> BlockKind {
        match self {
            Self::Attention(_) => BlockKind::Attention,
            Self::Mlp(_) => BlockKind::Mlp,
            Self::Mamba2(_) => BlockKind::Mamba2,
            Self::Moe(_) => BlockKind::Moe,
        }
    }

    /// The shape that `variant` leaves of this block; none when it is skipped.
    ///
    /// # Errors
    /// The reason, when the variant is of another kind, empty, or larger than the block.
    pub fn with_variant(&self, variant: &Variant) -> std::result::Result<Option<Self>, String> {
        match (self, variant) {
            (_, Variant::Skip) => Ok(None),
            (_, Variant::Whole) => Ok(Some(self.clone())),
            (Self::Attention(whole), Variant::Attention { kv_groups }) => {
                within("kv_groups", *kv_groups, whole.kv_groups)?;
                Ok(Some(Self::Attention(Attention {
                    kv_groups: *kv_groups,
                    ..whole.clone()
                })))
            }
            (Self::Mlp(whole), Variant::Mlp { channels }) => {
                within("channels", *channels, whole.channels)?;
                Ok(Some(Self::Mlp(Mlp {
                    channels: *channels,
                    ..whole.clone()
                })))
            }
            (shape, variant) => Err(format!(
                "{variant} is not a variant of a {:?} block",
                shape.kind()
            )),
        }
    }
}

fn within(axis: &str, value: usize, whole: usize) -> std::result::Result<(), String> {
    if value == 0 || value > whole {
        return Err(format!(
            "{axis} is {value}, expected 1 to {whole} (use skip to remove the block)"
        ));
    }
    Ok(())
}
