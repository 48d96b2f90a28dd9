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

#[cfg(test)]
mod tests {
    use crate::{Attention, BlockShape, Moe, Precision};

    fn attention(sliding_window: Option<usize>) -> BlockShape {
        BlockShape::Attention(Attention {
            kv_groups: 2,
            queries_per_group: 2,
            head_dim: 4,
            qkv_bias: true,
            output_bias: false,
            qk_norm: true,
            rope: None,
            sliding_window,
        })
    }

    #[test]
    fn attention_multiplies_its_matrices_once_and_every_token_in_sight_twice() {
        // Query and output 16 × 10, key and value 8 × 10; then 16 wide, 7 tokens, scores and values.
        let projections = 2 * (2 * 160 + 2 * 80);
        assert_eq!(
            attention(None).forward_flops_per_token(10, 7),
            projections + 2 * 2 * 16 * 7
        );
        assert_eq!(
            attention(Some(3)).forward_flops_per_token(10, 7),
            projections + 2 * 2 * 16 * 3
        );
    }

    #[test]
    fn a_sliding_window_bounds_the_cache() {
        let bytes = |window, tokens| attention(window).kv_bytes(Precision::F32, tokens);
        assert_eq!(bytes(None, 7), 2 * 8 * 4 * 7);
        assert_eq!(bytes(Some(3), 7), 2 * 8 * 4 * 3);
        assert_eq!(bytes(Some(3), 2), 2 * 8 * 4 * 2);
    }

    #[test]
    fn a_token_pays_for_the_experts_that_it_is_sent_to() {
        let mixture = |experts, experts_per_token| {
            BlockShape::Moe(Moe {
                experts,
                experts_per_token,
                expert_channels: 6,
                shared_channels: 0,
                latent: None,
                activation: crate::Activation::ReluSquared,
            })
        };
        let router = 2 * 10 * 8;
        assert_eq!(
            mixture(8, 3).forward_flops_per_token(10, 1),
            router + 3 * 2 * 2 * 10 * 6
        );
    }
}
