//! What the compressed model must stay inside.

use serde::{Deserialize, Serialize};

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Milliseconds from the request to its last token, all requests of the workload together.
    Latency,
    /// Milliseconds to the first token.
    FirstToken,
    /// Milliseconds from one output token to the next, mean.
    PerToken,
    /// Output tokens a second over all requests; the only metric where more is better.
    Throughput,
    /// Peak bytes: weights, key/value and other state, activations.
    Memory,
    /// Parameters of the blocks; for baselines and tests only.
    BlockParameters,
}

/// How far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// In the metric's unit (milliseconds, tokens a second, bytes, parameters).
    Absolute(f64),
    /// A share of what the parent itself measures on the target: 0.75 is 75%.
    ShareOfParent(f64),
}

/// One limit; a job may have several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// What is limited.
    pub metric: Metric,
    /// How far.
    pub bound: Bound,
}
