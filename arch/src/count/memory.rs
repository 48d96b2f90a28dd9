//! Bytes: weights by precision, and the state that each sequence keeps while it is generated.

use serde::{Deserialize, Serialize};

use super::sum;
use crate::{Architecture, Attention, BlockShape, Mamba2};

/// How a number is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// Eight bits, scales not counted.
    Fp8,
}

impl Precision {
    /// The name that people write.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8 => "fp8",
        }
    }

    /// Bytes of one number.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// Mamba's recurrent state is kept in f32 whatever the weights are in.
const STATE_PRECISION: Precision = Precision::F32;

impl Architecture {
    /// Bytes of all weights, every tensor in the same precision.
    pub fn weight_bytes(&self, precision: Precision) -> u64 {
        self.parameters().total.saturating_mul(precision.bytes())
    }

    /// Bytes that each token adds to the KV caches of a sequence, before any sliding window is full.
    pub fn kv_bytes_per_token(&self, precision: Precision) -> u64 {
        sum(self
            .blocks
            .iter()
            .map(|block| block.shape.kv_bytes_per_token(precision)))
    }

    /// Bytes of the KV caches of one sequence of `tokens`; a sliding window keeps no more than itself.
    pub fn kv_bytes(&self, precision: Precision, tokens: usize) -> u64 {
        sum(self
            .blocks
            .iter()
            .map(|block| block.shape.kv_bytes(precision, tokens)))
    }

    /// Bytes of recurrent state of one sequence, which do not grow with it: Mamba's SSM state in f32, the
    /// inputs that its convolution still needs in `precision`.
    pub fn state_bytes(&self, precision: Precision) -> u64 {
        sum(self.blocks.iter().map(|block| block.shape.state_bytes(precision)))
    }
}

impl BlockShape {
    /// Bytes that each token adds to the block's KV cache, before a sliding window is full.
    pub fn kv_bytes_per_token(&self, precision: Precision) -> u64 {
        match self {
            Self::Attention(attention) => cache_row(attention, precision),
            Self::Mlp(_) | Self::Mamba2(_) | Self::Moe(_) => 0,
        }
    }

    /// Bytes of the block's KV cache for one sequence of `tokens`.
    pub fn kv_bytes(&self, precision: Precision, tokens: usize) -> u64 {
        let kept = match self {
            Self::Attention(Attention {
                sliding_window: Some(window),
                ..
            }) => tokens.min(*window),
            _ => tokens,
        };
        self.kv_bytes_per_token(precision).saturating_mul(kept as u64)
    }

    /// Bytes of the block's recurrent state for one sequence.
    pub fn state_bytes(&self, precision: Precision) -> u64 {
        match self {
            Self::Mamba2(mamba) => mamba_state(mamba, precision),
            Self::Attention(_) | Self::Mlp(_) | Self::Moe(_) => 0,
        }
    }
}

/// A key and a value of every group.
fn cache_row(attention: &Attention, precision: Precision) -> u64 {
    (attention.kv_width() as u64).saturating_mul(2 * precision.bytes())
}

fn mamba_state(mamba: &Mamba2, precision: Precision) -> u64 {
    let ssm = (mamba.inner_width() as u64).saturating_mul(mamba.state as u64);
    let taps_behind = mamba.conv_kernel.saturating_sub(1) as u64;
    let convolution = (mamba.convolved_width() as u64).saturating_mul(taps_behind);
    ssm.saturating_mul(STATE_PRECISION.bytes())
        .saturating_add(convolution.saturating_mul(precision.bytes()))
}
