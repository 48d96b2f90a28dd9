//! Which smaller forms of each block are considered.

use std::collections::BTreeSet;

use espalier_arch::{Architecture, Attention, BlockShape, Mlp, Variant};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// KV counts considered when none are listed.
const MOST_KV_COUNTS: usize = 8;

/// Which smaller forms of each block are considered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Space {
    /// Key/value groups that an attention block may keep; none for every count, at most eight of them.
    pub kv_groups: Option<Vec<usize>>,
    /// MLP widths are multiples of this many channels; none for an eighth of the whole rounded up to 32.
    pub mlp_grid: Option<usize>,
    /// Whether a block may be left out.
    pub skip: bool,
}

impl Default for Space {
    fn default() -> Self {
        Self {
            kv_groups: None,
            mlp_grid: None,
            skip: true,
        }
    }
}

impl Space {
    /// The variants of one block: whole first, then ever smaller, skip last.
    ///
    /// # Errors
    /// When a listed size does not fit the block.
    pub fn variants(&self, shape: &BlockShape) -> Result<Vec<Variant>> {
        let mut variants = vec![Variant::Whole];
        match shape {
            BlockShape::Attention(attention) => {
                let counts = self.kv_counts(attention)?;
                variants.extend(
                    counts
                        .into_iter()
                        .map(|kv_groups| Variant::Attention { kv_groups }),
                );
            }
            BlockShape::Mlp(mlp) => {
                let widths = self.widths(mlp)?;
                variants.extend(widths.into_iter().map(|channels| Variant::Mlp { channels }));
            }
            BlockShape::Mamba2(_) | BlockShape::Moe(_) => {}
        }
        if self.skip {
            variants.push(Variant::Skip);
        }
        Ok(variants)
    }

    /// The variants of every block, in the parent's order.
    ///
    /// # Errors
    /// When a listed size does not fit a block.
    pub fn all_variants(&self, parent: &Architecture) -> Result<Vec<Vec<Variant>>> {
        parent
            .blocks
            .iter()
            .map(|block| self.variants(&block.shape))
            .collect()
    }

    /// The distinct shapes that the variants of every block have: what a profile has to time.
    ///
    /// # Errors
    /// When a listed size does not fit a block.
    pub fn shapes(&self, parent: &Architecture) -> Result<Vec<BlockShape>> {
        let mut seen: Vec<&BlockShape> = Vec::new();
        let mut shapes: Vec<BlockShape> = Vec::new();
        for block in &parent.blocks {
            if seen.contains(&&block.shape) {
                continue;
            }
            seen.push(&block.shape);
            for variant in self.variants(&block.shape)? {
                let shape = block
                    .shape
                    .with_variant(&variant)
                    .map_err(|reason| Error::Space {
                        field: "search",
                        reason,
                    })?;
                if let Some(shape) = shape
                    && !shapes.contains(&shape)
                {
                    shapes.push(shape);
                }
            }
        }
        Ok(shapes)
    }

    /// Proper KV counts below the whole, descending.
    pub(crate) fn kv_counts(&self, attention: &Attention) -> Result<Vec<usize>> {
        let whole = attention.kv_groups;
        let counts: BTreeSet<usize> = match &self.kv_groups {
            Some(counts) => {
                if let Some(wrong) = counts.iter().find(|&&count| count == 0 || count > whole) {
                    let reason = format!(
                        "{wrong} is listed, expected 1 to {whole}: the parent's attention has {whole} key/value \
                         groups (skip removes a block)"
                    );
                    return Err(Error::Space {
                        field: "search.kv_groups",
                        reason,
                    });
                }
                counts.iter().copied().collect()
            }
            None if whole <= MOST_KV_COUNTS => (1..=whole).collect(),
            None => (1..=MOST_KV_COUNTS)
                .map(|step| whole * step / MOST_KV_COUNTS)
                .collect(),
        };
        Ok(counts.into_iter().rev().filter(|&count| count < whole).collect())
    }

    /// Proper widths below the whole, descending.
    pub(crate) fn widths(&self, mlp: &Mlp) -> Result<Vec<usize>> {
        let whole = mlp.channels;
        let grid = self
            .mlp_grid
            .unwrap_or_else(|| whole.div_ceil(8).next_multiple_of(32));
        if grid == 0 {
            let reason = "is 0, expected at least 1".to_owned();
            return Err(Error::Space {
                field: "search.mlp_grid",
                reason,
            });
        }
        Ok((1..)
            .map(|step| step * grid)
            .take_while(|&width| width < whole)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::fixtures::{attention, mlp, small};

    #[test]
    fn whole_comes_first_and_skip_last() {
        let variants = Space::default().variants(&mlp(1536)).unwrap();
        assert_eq!(variants.first(), Some(&Variant::Whole));
        assert_eq!(variants.get(1), Some(&Variant::Mlp { channels: 1344 }));
        assert_eq!(variants.last(), Some(&Variant::Skip));
        assert_eq!(variants.len(), 9);
    }

    #[test]
    fn many_kv_groups_are_thinned_to_eight_counts() {
        let variants = Space::default().variants(&attention(32)).unwrap();
        let kept: Vec<_> = variants.iter().map(ToString::to_string).collect();
        assert_eq!(
            kept,
            [
                "whole", "kv28", "kv24", "kv20", "kv16", "kv12", "kv8", "kv4", "skip"
            ]
        );
    }

    #[test]
    fn a_listed_count_beyond_the_parents_is_refused_with_what_it_has() {
        let space = Space {
            kv_groups: Some(vec![4, 2]),
            ..Space::default()
        };
        let message = space.variants(&attention(3)).unwrap_err().to_string();
        assert!(message.contains("4 is listed, expected 1 to 3"), "{message}");
    }

    #[test]
    fn each_distinct_shape_is_profiled_once() {
        let shapes = Space {
            mlp_grid: Some(32),
            ..Space::default()
        }
        .shapes(&small())
        .unwrap();
        assert_eq!(shapes, [attention(2), attention(1), mlp(64), mlp(32)]);
    }
}
