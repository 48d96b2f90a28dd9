//! What an engine measured of a whole model under a workload, or why it could not.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::statistics::{median, spread};
use crate::{Metric, Workload};

/// A model measured whole, and under which workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Whole<'a> {
    /// What was measured.
    pub measurement: &'a Measurement,
    /// Under which workload.
    pub workload: &'a Workload,
}

/// A job's parent as a whole: what was measured of it, or why nothing could be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a measurement, or needed_bytes and free_bytes of a device without room"
)]
pub enum WholeParent {
    /// It was measured.
    Measured(Measurement),
    /// The device has no room for all of it.
    TooLarge(Shortage),
}

impl WholeParent {
    /// What was measured, if anything was.
    pub fn measured(&self) -> Option<&Measurement> {
        match self {
            Self::Measured(measurement) => Some(measurement),
            Self::TooLarge(_) => None,
        }
    }

    /// Why nothing was measured; none where something was.
    pub fn shortage(&self) -> Option<Shortage> {
        match self {
            Self::Measured(_) => None,
            Self::TooLarge(shortage) => Some(*shortage),
        }
    }
}

/// What a model needs of a device that has no room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shortage {
    /// Bytes of weights and state, and of what runs through them as far as it can be counted.
    pub needed_bytes: u64,
    /// Bytes that it could have taken.
    pub free_bytes: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (needed, free) = (Size(self.needed_bytes), Size(self.free_bytes));
        // What an engine takes beside is found out by its running out of memory.
        match self.needed_bytes > self.free_bytes {
            true => write!(formatter, "needs {needed}, has {free}"),
            false => write!(formatter, "needs more than the {free} that it has"),
        }
    }
}

/// Bytes for people.
struct Size(u64);

impl fmt::Display for Size {
    #[allow(clippy::cast_precision_loss)] // for display
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = self.0 as f64 / 1024.0 / 1024.0;
        match mebibytes >= 1024.0 {
            true => write!(formatter, "{:.1} GiB", mebibytes / 1024.0),
            false => write!(formatter, "{mebibytes:.1} MiB"),
        }
    }
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

impl Summary {
    /// That of repeats, in the order taken.
    pub fn of(samples: Vec<f64>) -> Self {
        Self {
            median: median(&samples),
            spread: spread(&samples),
            samples,
        }
    }
}

impl Measurement {
    /// What was measured of a metric; none of what is not timed.
    pub fn timed(&self, metric: Metric) -> Option<&Summary> {
        match metric {
            Metric::Latency => Some(&self.latency_ms),
            Metric::FirstToken => Some(&self.first_token_ms),
            Metric::PerToken => Some(&self.per_token_ms),
            Metric::Throughput => Some(&self.throughput_tokens_per_second),
            Metric::Memory | Metric::BlockParameters => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn a_measured_parent_is_written_as_it_always_was_and_one_that_has_no_room_says_what_it_lacks() {
        let figure = r#"{"median":1.5,"spread":0.1,"samples":[1.5]}"#;
        let written = format!(
            r#"{{"latency_ms":{figure},"first_token_ms":{figure},"per_token_ms":{figure},"throughput_tokens_per_second":{figure},"memory_bytes":7}}"#
        );
        let read: WholeParent = serde_json::from_str(&written).unwrap();
        assert_eq!(read.measured().unwrap().memory_bytes, 7);
        assert_eq!(serde_json::to_string(&read).unwrap(), written);

        let text = r#"{"needed_bytes":150323855360,"free_bytes":84934656000}"#;
        let read: WholeParent = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert_eq!(
            read.shortage().unwrap().to_string(),
            "needs 140.0 GiB, has 79.1 GiB"
        );
        let nearly = Shortage {
            needed_bytes: 9 << 20,
            free_bytes: 10 << 20,
        };
        assert_eq!(nearly.to_string(), "needs more than the 10.0 MiB that it has");

        let neither = serde_json::from_str::<WholeParent>(r#"{"needed_bytes":1}"#);
        assert!(
            neither
                .unwrap_err()
                .to_string()
                .contains("a measurement, or needed_bytes")
        );
    }
}
