//! What scoring is asked.

use espalier_arch::Variant;
use serde::{Deserialize, Serialize};

use super::{ParentRef, Shard};

/// Asks what each variant of some blocks costs in quality, all other blocks whole.
// Of one block it is written as before there could be several: a worker that knows no others takes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreBlocks {
    /// The sorted parent.
    pub parent: ParentRef,
    /// The first block: an index into the parent's list of blocks.
    pub block: usize,
    /// Its variants that stand in, one at a time.
    pub variants: Vec<Variant>,
    /// Later blocks, in their order, which are scored with it where that costs less than to score each for itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further: Vec<BlockVariants>,
    /// The tokens.
    pub shard: Shard,
}

/// A block and what may stand in for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockVariants {
    /// Index into the parent's list of blocks.
    pub block: usize,
    /// The variants that stand in, one at a time.
    pub variants: Vec<Variant>,
}

impl ScoreBlocks {
    /// Every block with its variants, in order.
    pub fn blocks(&self) -> Vec<(usize, &[Variant])> {
        let first = (self.block, self.variants.as_slice());
        let further = self.further.iter();
        let further = further.map(|further| (further.block, further.variants.as_slice()));
        std::iter::once(first).chain(further).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn scores_of_one_block_are_asked_for_as_before_there_could_be_several() {
        let before = r#"{"parent":{"source":"p","fingerprint":"f","permutation":"s"},"block":3,"variants":["skip"],"shard":{"artifact":"a","sequences":1,"sequence_tokens":2}}"#;
        let one: ScoreBlocks = serde_json::from_str(before).unwrap();
        assert_eq!(one.blocks(), [(3, &[Variant::Skip][..])]);
        assert_eq!(serde_json::to_string(&one).unwrap(), before);
        let several = ScoreBlocks {
            further: vec![BlockVariants {
                block: 5,
                variants: vec![Variant::Mlp { channels: 8 }, Variant::Skip],
            }],
            ..one
        };
        let written = serde_json::to_string(&several).unwrap();
        let read: ScoreBlocks = serde_json::from_str(&written).unwrap();
        assert_eq!(read, several);
        let (numbers, counts): (Vec<usize>, Vec<usize>) = read
            .blocks()
            .into_iter()
            .map(|(block, variants)| (block, variants.len()))
            .unzip();
        assert_eq!((numbers, counts), (vec![3, 5], vec![1, 2]));
    }
}
