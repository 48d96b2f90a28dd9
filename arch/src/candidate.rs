//! A whole choice: one variant for every block.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A smaller form of one block: a prefix along each named axis of the sorted parent, or nothing at all.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Variant {
    /// The block as it is in the parent.
    Whole,
    /// The block is removed.
    Skip,
    /// The first `kv_groups` key/value heads, with all their query heads.
    Attention {
        /// Key/value heads kept.
        kv_groups: usize,
    },
    /// The first `channels` intermediate channels.
    Mlp {
        /// Intermediate channels kept.
        channels: usize,
    },
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => write!(formatter, "whole"),
            Self::Skip => write!(formatter, "skip"),
            Self::Attention { kv_groups } => write!(formatter, "kv{kv_groups}"),
            Self::Mlp { channels } => write!(formatter, "mlp{channels}"),
        }
    }
}

/// One variant for every block of the parent, in the parent's order: a whole architecture.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// As many as the parent has blocks.
    pub variants: Vec<Variant>,
}
