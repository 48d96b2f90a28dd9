//! What one model has for each metric that can be limited.

use serde::{Deserialize, Serialize};

use crate::{Measurement, Metric, WholeParent};

/// What one model has for each metric, in the metric's unit; none where it is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Figures {
    /// Milliseconds from the request to its last token.
    pub latency_ms: Option<f64>,
    /// Milliseconds to the first token.
    pub first_token_ms: Option<f64>,
    /// Milliseconds from one output token to the next.
    pub per_token_ms: Option<f64>,
    /// Output tokens a second over all requests.
    pub throughput_tokens_per_second: Option<f64>,
    /// Peak bytes.
    pub memory_bytes: Option<f64>,
    /// Parameters of the blocks.
    pub block_parameters: Option<f64>,
}

impl Figures {
    /// The medians of a measurement, with the number of parameters of the blocks.
    #[allow(clippy::cast_precision_loss)] // bytes and parameters are far below 2^53
    pub fn measured(measurement: &Measurement, block_parameters: u64) -> Self {
        Self {
            latency_ms: Some(measurement.latency_ms.median),
            first_token_ms: Some(measurement.first_token_ms.median),
            per_token_ms: Some(measurement.per_token_ms.median),
            throughput_tokens_per_second: Some(measurement.throughput_tokens_per_second.median),
            memory_bytes: Some(measurement.memory_bytes as f64),
            block_parameters: Some(block_parameters as f64),
        }
    }

    /// What is known of a parent; of one that could not be measured only what is counted.
    #[allow(clippy::cast_precision_loss)] // parameters are far below 2^53
    pub fn of_parent(parent: &WholeParent, block_parameters: u64) -> Self {
        match parent {
            WholeParent::Measured(measurement) => Self::measured(measurement, block_parameters),
            WholeParent::TooLarge(_) => Self {
                block_parameters: Some(block_parameters as f64),
                ..Self::default()
            },
        }
    }

    /// The figure of one metric, in its unit.
    pub fn get(&self, metric: Metric) -> Option<f64> {
        match metric {
            Metric::Latency => self.latency_ms,
            Metric::FirstToken => self.first_token_ms,
            Metric::PerToken => self.per_token_ms,
            Metric::Throughput => self.throughput_tokens_per_second,
            Metric::Memory => self.memory_bytes,
            Metric::BlockParameters => self.block_parameters,
        }
    }
}
