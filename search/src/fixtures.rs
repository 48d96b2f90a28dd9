//! Small shapes that the tests of several modules share.

use espalier_arch::{Activation, Architecture, Attention, Block, BlockShape, Family, Mlp};

pub(crate) fn attention(kv_groups: usize) -> BlockShape {
    BlockShape::Attention(Attention {
        kv_groups,
        queries_per_group: 2,
        head_dim: 8,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    })
}

pub(crate) fn mlp(channels: usize) -> BlockShape {
    BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::SwiGlu,
        bias: false,
    })
}

/// Three layers of two KV groups and 64 channels.
pub(crate) fn small() -> Architecture {
    let blocks = (0..3)
        .flat_map(|layer| [attention(2), mlp(64)].map(|shape| Block { layer, shape }))
        .collect();
    Architecture {
        family: Family::Llama,
        vocab_size: 100,
        hidden: 32,
        layers: 3,
        blocks,
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 256,
    }
}
