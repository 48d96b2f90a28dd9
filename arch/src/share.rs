//! What one of several tensor-parallel ranks holds of a model, as serving engines share it out.
//!
//! Query heads, MLP and expert channels and Mamba heads are divided; key/value heads and Mamba groups too, and where
//! there are fewer of them than ranks, each rank has one and they are held several times. Norms, routers and
//! projections of a latent width are on every rank. The vocabulary is padded to a multiple of 64 and divided.

use crate::{Architecture, Attention, Block, BlockShape, Error, Mamba2, Mlp, Moe, Result};

/// Serving engines pad the vocabulary to a multiple of this many entries.
const VOCABULARY_MULTIPLE: usize = 64;

impl Architecture {
    /// What each of `ranks` tensor-parallel ranks holds, as an architecture of its own.
    ///
    /// # Errors
    /// When a block, or the vocabulary, cannot be shared out evenly: which, and its size.
    pub fn rank_share(&self, ranks: usize) -> Result<Self> {
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let uneven = |(field, size)| Error::Uneven {
                place: format!("block {index}"),
                field,
                size,
                ranks,
            };
            blocks.push(Block {
                layer: block.layer,
                shape: share_block(&block.shape, ranks).map_err(uneven)?,
            });
        }
        let padded = self.vocab_size.next_multiple_of(VOCABULARY_MULTIPLE);
        let vocab_size =
            divided("padded vocabulary", padded, ranks).map_err(|(field, size)| Error::Uneven {
                place: "the model".to_owned(),
                field,
                size,
                ranks,
            })?;
        Ok(Self {
            vocab_size,
            blocks,
            ..self.clone()
        })
    }
}

impl BlockShape {
    /// What each of `ranks` tensor-parallel ranks holds of the block.
    ///
    /// # Errors
    /// When it cannot be shared out evenly.
    pub fn rank_share(&self, ranks: usize) -> Result<Self> {
        share_block(self, ranks).map_err(|(field, size)| Error::Uneven {
            place: "a block".to_owned(),
            field,
            size,
            ranks,
        })
    }
}

type Shared<T> = std::result::Result<T, (&'static str, usize)>;

fn share_block(shape: &BlockShape, ranks: usize) -> Shared<BlockShape> {
    Ok(match shape {
        BlockShape::Attention(attention) => {
            let queries = divided("query heads", attention.query_heads(), ranks)?;
            let kv_groups = divided_or_held("key/value heads", attention.kv_groups, ranks)?;
            BlockShape::Attention(Attention {
                kv_groups,
                queries_per_group: divided("query heads", queries, kv_groups)?,
                ..attention.clone()
            })
        }
        BlockShape::Mlp(mlp) => BlockShape::Mlp(Mlp {
            channels: divided("channels", mlp.channels, ranks)?,
            ..mlp.clone()
        }),
        BlockShape::Mamba2(mamba) => BlockShape::Mamba2(Mamba2 {
            heads: divided("Mamba heads", mamba.heads, ranks)?,
            groups: divided_or_held("Mamba groups", mamba.groups, ranks)?,
            ..mamba.clone()
        }),
        BlockShape::Moe(moe) => BlockShape::Moe(Moe {
            expert_channels: divided("expert channels", moe.expert_channels, ranks)?,
            shared_channels: divided("shared channels", moe.shared_channels, ranks)?,
            ..moe.clone()
        }),
    })
}

fn divided(field: &'static str, size: usize, ranks: usize) -> Shared<usize> {
    match size.checked_rem(ranks) {
        Some(0) => Ok(size / ranks),
        _ => Err((field, size)),
    }
}

/// One where there are fewer than ranks, and the ranks divide evenly among them.
fn divided_or_held(field: &'static str, size: usize, ranks: usize) -> Shared<usize> {
    if size < ranks && ranks.checked_rem(size) == Some(0) {
        return Ok(1);
    }
    divided(field, size, ranks)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::{Activation, Family, Precision};

    fn model() -> Architecture {
        let attention = BlockShape::Attention(Attention {
            kv_groups: 2,
            queries_per_group: 4,
            head_dim: 8,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            rope: None,
            sliding_window: None,
        });
        let mlp = BlockShape::Mlp(Mlp {
            channels: 96,
            activation: Activation::SwiGlu,
            bias: false,
        });
        Architecture {
            family: Family::Llama,
            vocab_size: 100,
            hidden: 32,
            layers: 1,
            blocks: [attention, mlp].map(|shape| Block { layer: 0, shape }).to_vec(),
            tied_embedding: true,
            norm_epsilon: 1e-5,
            max_positions: 64,
        }
    }

    #[test]
    fn key_value_heads_fewer_than_ranks_are_held_several_times() {
        let share = model().rank_share(4).unwrap();
        assert_eq!(share.vocab_size, 32);
        let BlockShape::Attention(attention) = &share.blocks[0].shape else {
            panic!("it was attention")
        };
        assert_eq!((attention.kv_groups, attention.queries_per_group), (1, 2));
        let bytes = |model: &Architecture| model.kv_bytes_per_token(Precision::Bf16);
        assert_eq!(4 * bytes(&share), 2 * bytes(&model()));
        assert_eq!(2 * bytes(&model().rank_share(2).unwrap()), bytes(&model()));
    }

    #[test]
    fn what_cannot_be_shared_out_is_named() {
        let message = |ranks| model().rank_share(ranks).unwrap_err().to_string();
        assert!(message(3).contains("block 0 has 8 query heads"), "{}", message(3));
        assert!(message(0).contains("0 ranks"), "{}", message(0));
        let mut odd = model();
        odd.blocks.remove(0);
        let message = odd.rank_share(5).unwrap_err().to_string();
        assert!(message.contains("block 0 has 96 channels"), "{message}");
    }
}
