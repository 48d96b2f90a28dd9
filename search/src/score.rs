//! Quality lost when one variant stands in for its block.

use espalier_arch::Variant;
use serde::{Deserialize, Serialize};

/// Quality lost when one variant stands in for its block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// Index into the parent's list of blocks.
    pub block: usize,
    /// The variant that stood in.
    pub variant: Variant,
    /// Mean KL to the parent, in nats a token.
    pub divergence: f64,
    /// Standard error of the mean over sequences.
    pub standard_error: f64,
    /// Tokens it was measured on.
    pub tokens: u64,
}
