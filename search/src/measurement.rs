//! What an engine measured of a whole model under a workload.

use serde::{Deserialize, Serialize};

use crate::Workload;

/// A model measured whole, and under which workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Whole<'a> {
    /// What was measured.
    pub measurement: &'a Measurement,
    /// Under which workload.
    pub workload: &'a Workload,
}

/// Repeated measurements of one figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle one.
    pub median: f64,
    /// Median absolute deviation from the median.
    pub spread: f64,
    /// Every repeat, in the order taken.
    pub samples: Vec<f64>,
}

/// What an engine measured of a whole model under a workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Milliseconds from the request to its last token.
    pub latency_ms: Summary,
    /// Milliseconds to the first token.
    pub first_token_ms: Summary,
    /// Milliseconds from one output token to the next, mean over a request.
    pub per_token_ms: Summary,
    /// Output tokens a second over all requests.
    pub throughput_tokens_per_second: Summary,
    /// Peak bytes of weights, state and activations.
    pub memory_bytes: u64,
}
