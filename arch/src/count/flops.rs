//! Floating-point operations of a forward pass, a multiply and an add counted as two.

use super::sum;
use crate::{Architecture, BlockShape, Mamba2};

impl Architecture {
    /// FLOPs of one token's forward pass with `context` tokens in sight, itself included, its logits with it.
    /// Norms, activations and the embedding look-up are left out: they are bandwidth, not arithmetic.
    pub fn forward_flops_per_token(&self, context: usize) -> u64 {
        let head = 2_u64
            .saturating_mul(self.vocab_size as u64)
            .saturating_mul(self.hidden as u64);
        let blocks = self
            .blocks
            .iter()
            .map(|block| block.shape.forward_flops_per_token(self.hidden, context));
        sum(blocks).saturating_add(head)
    }
}

impl BlockShape {
    /// FLOPs of one token's pass through the block, of a residual stream of width `hidden`, with `context`
    /// tokens in sight.
    pub fn forward_flops_per_token(&self, hidden: usize, context: usize) -> u64 {
        // Every tensor of more than one axis multiplies the token once: projections and the convolution's taps.
        let multiplied = self.parts(hidden);
        let multiplied = multiplied
            .iter()
            .filter(|part| part.shape.len() > 1 && self.is_active(part.role));
        let weights = sum(multiplied.map(crate::Part::elements)).saturating_mul(2);
        let mixing = match self {
            Self::Attention(attention) => {
                let seen = attention
                    .sliding_window
                    .map_or(context, |window| window.min(context));
                // Scores and the weighted sum of values, each 2 · width · tokens.
                4_u64
                    .saturating_mul(attention.query_width() as u64)
                    .saturating_mul(seen as u64)
            }
            Self::Mamba2(mamba) => scan(mamba),
            Self::Mlp(_) | Self::Moe(_) => 0,
        };
        weights.saturating_add(mixing)
    }
}

/// The recurrence `h = a·h + (dt·x)·B, y = C·h`: five operations for each number of the state.
fn scan(mamba: &Mamba2) -> u64 {
    5_u64
        .saturating_mul(mamba.inner_width() as u64)
        .saturating_mul(mamba.state as u64)
}
