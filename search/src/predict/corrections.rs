//! What measured whole models say of the sums that a table makes of them.

use serde::{Deserialize, Serialize};

use crate::{Figures, Measurement};

/// Factors by which times turned out larger than the table says, from checks of whole candidates. 1 at first.
///
/// In an engine that batches continuously a throughput is measured by itself, so it has a factor of its own, and the other
/// two leave it alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Corrections {
    /// Of the time to the first token.
    pub first_token: f64,
    /// Of every decode step.
    pub decode: f64,
    /// Of [`Costs::turnover_ms`](crate::Costs::turnover_ms), in an engine that batches continuously.
    #[serde(default = "unchanged")]
    pub turnover: f64,
    /// Bytes beside those counted.
    pub memory_bytes: f64,
}

fn unchanged() -> f64 {
    1.0
}

impl Default for Corrections {
    fn default() -> Self {
        Self {
            first_token: 1.0,
            decode: 1.0,
            turnover: unchanged(),
            memory_bytes: 0.0,
        }
    }
}

impl Corrections {
    /// What was measured of a model, as multiples of what was predicted; of memory nothing.
    pub(super) fn between(predicted: &Figures, measured: &Measurement) -> Self {
        let first = measured.first_token_ms.median;
        let predicted_first = predicted.first_token_ms.unwrap_or(0.0);
        let later = measured.latency_ms.median - first;
        let predicted_later = predicted.latency_ms.unwrap_or(0.0) - predicted_first;
        let each_second = measured.throughput_tokens_per_second.median;
        Self {
            first_token: ratio(first, predicted_first),
            decode: ratio(later, predicted_later),
            turnover: ratio(predicted.throughput_tokens_per_second.unwrap_or(0.0), each_second),
            memory_bytes: 0.0,
        }
    }

    /// Whether they change nothing.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

/// a / b; 1 where that is no ratio of times.
fn ratio(a: f64, b: f64) -> f64 {
    let is_time = |value: f64| value > 0.0 && value.is_finite();
    if is_time(a) && is_time(b) { a / b } else { 1.0 }
}
