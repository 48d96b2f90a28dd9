//! Measured time of each block shape on one target.

use std::collections::BTreeMap;
use std::fmt;

use espalier_arch::BlockShape;
use serde::{Deserialize, Serialize};

use crate::statistics::ERROR_OF_MEDIAN;

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
    /// Tensor-parallel ranks that shared each block.
    #[serde(default = "one")]
    pub parallelism: usize,
    /// How the engine ran its operations.
    #[serde(default)]
    pub mode: Mode,
    /// What else times depend on, each by its name: the versions of torch, of the plugin and of a GPU's driver, libraries
    /// that were preloaded, settings of the engine. Empty for the built-in engine on a processor, and in tables from
    /// before it was told.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
}

impl CostKey {
    /// Whether the engine takes a new sequence in as soon as one has ended. The built-in one runs a workload's requests
    /// together from start to end.
    pub fn batches_continuously(&self) -> bool {
        self.engine != "builtin"
    }

    /// Whether the engine serves no model without attention: vLLM generates only where there are keys and values.
    pub fn needs_attention(&self) -> bool {
        self.engine == "vllm"
    }
}

/// How an engine runs its operations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One after another, as the model is written; and the built-in engine, which has one way only.
    #[default]
    Eager,
    /// Compiled before the first step.
    Compiled,
    /// Compiled, and steps replayed from captured graphs.
    Graphs,
}

impl Mode {
    /// The name that files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Compiled => "compiled",
            Self::Graphs => "graphs",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

fn one() -> usize {
    1
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
    /// The host's own time for a step of no blocks. A table that has it is of a device beside a host: every row of a base
    /// or a block is then the device's time alone, and a step of n blocks takes
    /// max(Σ device + alone, floor + n · block) by the clock. In a table without, rows are what the clock said, and add
    /// up by themselves.
    HostFloor,
    /// The host's own time for each block of a step. Older tables have none: their floor is one whatever the blocks.
    HostBlock,
    /// What the device waits for the host in each step: before it is launched and after it has ended. Older tables have
    /// none.
    HostAlone,
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

impl CostRow {
    /// Standard error of the median, milliseconds.
    pub fn error_ms(&self) -> f64 {
        #[allow(clippy::cast_precision_loss)] // a handful of repeats
        let repeats = self.repeats.max(1) as f64;
        ERROR_OF_MEDIAN * self.spread_ms / repeats.sqrt()
    }
}

/// Measured time of each block shape on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// What the table is true for.
    pub key: CostKey,
    /// Each subject at each point at most once.
    pub rows: Vec<CostRow>,
    /// What the engine needs and rounds, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<EngineMemory>,
}

/// What an engine needs beside weights and state, and how it hands out room for keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineMemory {
    /// Bytes that running took on top of weights, keys and values, at the peak of the profiled parent under the profile's
    /// workload: its activations. Another model or workload of the same table takes another amount; where it is used for
    /// one, it is the nearest thing known.
    pub overhead_bytes: u64,
    /// Tokens of one page of keys and values; 1 where nothing is rounded.
    pub block_tokens: usize,
    /// Pages that the engine keeps back for itself.
    pub spare_blocks: usize,
    /// Steps that may be under way at a time, whose tokens are all held: an engine may prepare the next one meanwhile.
    #[serde(default = "one")]
    pub steps_under_way: usize,
}

impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base { vocab_size } => write!(formatter, "the base with {vocab_size} vocabulary entries"),
            Self::HostFloor => formatter.write_str("the host's floor"),
            Self::HostBlock => formatter.write_str("the host's time for each block"),
            Self::HostAlone => formatter.write_str("the host's time that the device waits for"),
            Self::Block(shape) => match shape {
                BlockShape::Attention(attention) => write!(
                    formatter,
                    "attention of {} key/value groups with {} queries each, head size {}",
                    attention.kv_groups, attention.queries_per_group, attention.head_dim
                ),
                BlockShape::Mlp(mlp) => write!(formatter, "an MLP of {} channels", mlp.channels),
                BlockShape::Mamba2(mamba) => write!(formatter, "a Mamba-2 block of {} heads", mamba.heads),
                BlockShape::Moe(moe) => write!(formatter, "a mixture of {} experts", moe.experts),
            },
        }
    }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_key_from_before_ranks_and_modes_is_one_rank_run_eagerly() {
        let old =
            r#"{"device": "d", "engine": "builtin", "engine_version": "0", "precision": "f32", "hidden": 8}"#;
        let key: CostKey = serde_json::from_str(old).unwrap();
        assert_eq!((key.parallelism, key.mode), (1, Mode::Eager));
        let graphs = CostKey {
            parallelism: 2,
            mode: Mode::Graphs,
            ..key
        };
        let again: CostKey = serde_json::from_str(&serde_json::to_string(&graphs).unwrap()).unwrap();
        assert_eq!(again, graphs);
    }
}
