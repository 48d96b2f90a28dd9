//! What measured whole models say of the sums that a table makes of them.

use serde::{Deserialize, Serialize};

use super::checked::Checked;
use super::model::Prediction;
use crate::statistics::ratio;
use crate::{Figures, Measurement};

/// The share of a time that is the device's from which on it decides how long that is.
const DEVICE_DECIDES: f64 = 0.9;

/// Factors by which times turned out larger than predicted, from checks of whole candidates. 1 at first.
///
/// In an engine that batches continuously a throughput is measured by itself, so it has a factor of its own, and the other
/// two leave it alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// The model that the last check was of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checked: Option<Checked>,
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
            checked: None,
        }
    }
}

impl Corrections {
    /// Whether they change nothing.
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Factors that the parent has, as it was measured whole, of what is predicted of it by sums; at least 1, for a parent that
/// is faster than its sums makes no smaller model faster than its own. The device's are 1 where the host decides how long
/// the parent takes: how much longer says nothing of the device then.
#[derive(Debug, Default)]
pub(super) struct Anchor {
    /// Of the device's side, or of all where the table does not tell the host's apart.
    pub(super) device: Corrections,
    /// Of the host's.
    pub(super) host: Corrections,
}

impl Anchor {
    pub(super) fn of(predicted: &Prediction, measured: &Measurement) -> Self {
        let sums = parts(&predicted.figures);
        let measured = parts(&Figures::measured(measured, 0));
        let factors: [f64; 3] = std::array::from_fn(|part| ratio(measured[part], sums[part]).max(1.0));
        let decides = predicted.device.map(|device| {
            let own = parts(&device);
            std::array::from_fn(|part| own[part] >= DEVICE_DECIDES * sums[part])
        });
        let decides: [bool; 3] = decides.unwrap_or([true; 3]);
        let corrections = |[first_token, decode, turnover]: [f64; 3]| Corrections {
            first_token,
            decode,
            turnover,
            ..Corrections::default()
        };
        Self {
            device: corrections(std::array::from_fn(|part| {
                if decides[part] { factors[part] } else { 1.0 }
            })),
            host: corrections(factors),
        }
    }
}

/// Milliseconds to the first token and from there to the last, and the inverse of the throughput; 0 where one is missing.
fn parts(figures: &Figures) -> [f64; 3] {
    let first = figures.first_token_ms.unwrap_or(0.0);
    let turnover = figures.throughput_tokens_per_second.map_or(0.0, f64::recip);
    [first, figures.latency_ms.unwrap_or(0.0) - first, turnover]
}
