//! Measured time of each block shape on one target.

use std::fmt;

use espalier_arch::BlockShape;
use serde::{Deserialize, Serialize};

/// What a cost table is true for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostKey {
    /// For example `AMD EPYC, 2 threads`.
    pub device: String,
    /// `builtin` or `vllm`.
    pub engine: String,
    /// The engine's version.
    pub engine_version: String,
    /// For example `f32`.
    pub precision: String,
    /// Width of the residual stream that the blocks were measured at.
    pub hidden: usize,
}

/// What was timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Everything that is no block: embedding, final norm, head, sampling, the engine's own work.
    Base {
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// One block.
    Block(BlockShape),
}

/// Under which load it was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// `sequences` prompts of `tokens` each, at once, from an empty cache.
    Prefill {
        /// Tokens of each prompt.
        tokens: usize,
        /// Prompts.
        sequences: usize,
    },
    /// One new token for each of `sequences` sequences with `context` tokens in the cache.
    Decode {
        /// Tokens already in the cache, each.
        context: usize,
        /// Sequences.
        sequences: usize,
    },
}

/// One subject's time at one point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostRow {
    /// What was timed.
    pub subject: Subject,
    /// Under which load.
    pub point: Point,
    /// Median of the repeats.
    pub median_ms: f64,
    /// Median absolute deviation of the repeats.
    pub spread_ms: f64,
    /// How many repeats.
    pub repeats: usize,
}

/// Measured time of each block shape on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// What the table is true for.
    pub key: CostKey,
    /// Each subject at each point at most once.
    pub rows: Vec<CostRow>,
}

impl fmt::Display for Point {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { tokens, sequences } => {
                write!(formatter, "prefill of {sequences} × {tokens} tokens")
            }
            Self::Decode { context, sequences } => {
                write!(formatter, "decode of {sequences} sequences at context {context}")
            }
        }
    }
}
