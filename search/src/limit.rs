//! What the compressed model must stay inside: how limits are written, read and made absolute.
//!
//! What a model *has* for each metric is a [`Figures`]; whether it is inside is [`AbsoluteLimit::admits`].

mod confidence;
mod text;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Figures, Prediction, Result};

/// A prediction is a sum, and comes out a little different in another order: so much of a limit is no excess. The solver
/// allows itself as much.
const ROUNDING: f64 = 1e-9;

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
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

impl Metric {
    /// Every metric, in order.
    pub const ALL: [Self; 6] = [
        Self::Latency,
        Self::FirstToken,
        Self::PerToken,
        Self::Throughput,
        Self::Memory,
        Self::BlockParameters,
    ];

    /// The names of every metric, for messages.
    pub const NAMES: &'static str = "latency, first_token, per_token, throughput, memory, block_parameters";

    /// The name that specs and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::FirstToken => "first_token",
            Self::PerToken => "per_token",
            Self::Throughput => "throughput",
            Self::Memory => "memory",
            Self::BlockParameters => "block_parameters",
        }
    }

    /// Whether more is better.
    pub fn more_is_better(self) -> bool {
        self == Self::Throughput
    }

    /// Whether it is measured by a clock, and so has spread.
    pub fn is_timed(self) -> bool {
        !matches!(self, Self::Memory | Self::BlockParameters)
    }

    /// A value of this metric for people, with its unit.
    pub fn display(self, value: f64) -> String {
        match self {
            Self::Latency | Self::FirstToken | Self::PerToken if value >= 10_000.0 => {
                format!("{:.2} s", value / 1000.0)
            }
            Self::Latency | Self::FirstToken | Self::PerToken if value < 10.0 => format!("{value:.3} ms"),
            Self::Latency | Self::FirstToken | Self::PerToken => format!("{value:.1} ms"),
            Self::Throughput => format!("{value:.1} tokens/s"),
            Self::Memory => format!("{:.1} MiB", value / 1024.0 / 1024.0),
            Self::BlockParameters => format!("{value:.0} parameters"),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
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

impl Bound {
    /// Reads `75%`, `900ms`, `1.2s`, `3GiB`, `512MiB`, `4GB`, or a plain number of tokens a second or of
    /// parameters.
    ///
    /// # Errors
    /// Names the metric, the text and what would be right.
    pub fn parse(metric: Metric, value: &str) -> Result<Self> {
        text::parse(metric, value)
    }

    /// The text that [`Bound::parse`] reads back as the same bound.
    pub fn to_text(self, metric: Metric) -> String {
        text::format(self, metric)
    }
}

/// One limit; a job may have several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// What is limited.
    pub metric: Metric,
    /// How far.
    pub bound: Bound,
    /// How sure a prediction has to be that it is kept, from one half to below 1; none leaves it to a margin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
}

impl Limit {
    /// Reads a bound, as [`Bound::parse`] does, or a bound and a confidence: `750ms at 90%`.
    ///
    /// # Errors
    /// Names the metric, the text and what would be right.
    pub fn parse(metric: Metric, value: &str) -> Result<Self> {
        let (bound, confidence) = text::split_confidence(value);
        Ok(Self {
            metric,
            bound: Bound::parse(metric, bound)?,
            confidence: confidence
                .map(|share| text::confidence(metric, value, share))
                .transpose()?,
        })
    }

    /// The text that [`Limit::parse`] reads back as the same limit.
    pub fn to_text(&self) -> String {
        let bound = self.bound.to_text(self.metric);
        match self.confidence {
            Some(confidence) => format!("{bound} at {}", text::share(confidence)),
            None => bound,
        }
    }

    /// The limit in the metric's unit, against what the parent itself has.
    ///
    /// # Errors
    /// When it is a share of a figure that `parent` does not have.
    pub fn resolve(&self, parent: &Figures) -> Result<AbsoluteLimit> {
        let value = match self.bound {
            Bound::Absolute(value) => value,
            Bound::ShareOfParent(share) => {
                let own = parent
                    .get(self.metric)
                    .ok_or(Error::NoParentFigure { metric: self.metric })?;
                share * own
            }
        };
        Ok(AbsoluteLimit {
            metric: self.metric,
            value,
            confidence: self.confidence,
        })
    }
}

/// A limit in its metric's unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbsoluteLimit {
    /// What is limited.
    pub metric: Metric,
    /// Milliseconds, tokens a second, bytes or parameters: the most allowed, or for throughput the least.
    pub value: f64,
    /// As [`Limit::confidence`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
}

impl AbsoluteLimit {
    /// A limit that asks for no confidence.
    pub fn new(metric: Metric, value: f64) -> Self {
        Self {
            metric,
            value,
            confidence: None,
        }
    }

    /// Whether what is predicted is inside, with the confidence asked for. False where the metric is not predicted.
    pub fn admits_prediction(&self, prediction: &Prediction) -> bool {
        self.value_at_confidence(prediction)
            .is_some_and(|value| self.use_of(value) <= 1.0 + ROUNDING)
    }

    /// What is predicted, worse by as many standard errors as the confidence asks for: of a throughput, the time that it
    /// is the inverse of is longer by these.
    pub(crate) fn value_at_confidence(&self, prediction: &Prediction) -> Option<f64> {
        let value = prediction.figures.get(self.metric)?;
        let doubt = self.deviations() * prediction.errors.get(self.metric).unwrap_or(0.0);
        Some(if self.metric.more_is_better() {
            value / (1.0 + doubt / value)
        } else {
            value + doubt
        })
    }

    /// Standard errors that lie between a prediction and the limit, at the least.
    pub(crate) fn deviations(&self) -> f64 {
        self.confidence.map_or(0.0, confidence::deviations)
    }

    /// Whether `value` is inside the limit.
    pub fn admits(&self, value: f64) -> bool {
        if self.metric.more_is_better() {
            value >= self.value
        } else {
            value <= self.value
        }
    }

    /// How much of the limit `value` uses: 1 is exactly at it, more is outside, whichever way the metric runs.
    pub fn use_of(&self, value: f64) -> f64 {
        if self.metric.more_is_better() {
            self.value / value
        } else {
            value / self.value
        }
    }
}

/// The limits of a job: at least one, each metric at most once. In a spec a map of metric to bound,
/// `{latency: 75%, memory: 3GiB}`.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits(BTreeMap<Metric, Limit>);

impl Limits {
    /// These limits; a later one of the same metric replaces an earlier one.
    ///
    /// # Errors
    /// When there is none.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Result<Self> {
        let limits: BTreeMap<_, _> = limits.into_iter().map(|limit| (limit.metric, limit)).collect();
        if limits.is_empty() {
            return Err(Error::NoLimit);
        }
        Ok(Self(limits))
    }

    /// Every limit, in the order of [`Metric::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = Limit> + '_ {
        self.0.values().copied()
    }

    /// The bound of one metric, if it is limited.
    pub fn get(&self, metric: Metric) -> Option<Bound> {
        self.0.get(&metric).map(|limit| limit.bound)
    }

    /// Every limit in its metric's unit, against what the parent itself has.
    ///
    /// # Errors
    /// When one is a share of a figure that `parent` does not have.
    pub fn resolve(&self, parent: &Figures) -> Result<Vec<AbsoluteLimit>> {
        self.iter().map(|limit| limit.resolve(parent)).collect()
    }
}

impl Serialize for Limits {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (metric, limit) in &self.0 {
            map.serialize_entry(metric, &limit.to_text())?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(LimitsVisitor)
    }
}

struct LimitsVisitor;

impl<'de> Visitor<'de> for LimitsVisitor {
    type Value = Limits;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "a map of limits, such as {{latency: 75%}}, with one or more of {}",
            Metric::NAMES
        )
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Limits, A::Error> {
        let mut limits = BTreeMap::new();
        while let Some(metric) = map.next_key::<Metric>()? {
            let Written(value) = map.next_value()?;
            let limit = Limit::parse(metric, &value).map_err(A::Error::custom)?;
            if limits.insert(metric, limit).is_some() {
                return Err(A::Error::custom(format!(
                    "{metric} is limited twice, expected once"
                )));
            }
        }
        if limits.is_empty() {
            return Err(A::Error::custom(Error::NoLimit));
        }
        Ok(Limits(limits))
    }
}

/// A bound as it stands in the spec: text or a number.
struct Written(String);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct WrittenVisitor;
        impl Visitor<'_> for WrittenVisitor {
            type Value = Written;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a bound such as 75%, 900ms, 3GiB or a number")
            }
            fn visit_str<E: serde::de::Error>(self, value: &str) -> std::result::Result<Written, E> {
                Ok(Written(value.to_owned()))
            }
            fn visit_u64<E: serde::de::Error>(self, value: u64) -> std::result::Result<Written, E> {
                Ok(Written(value.to_string()))
            }
            fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<Written, E> {
                Ok(Written(value.to_string()))
            }
            fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<Written, E> {
                Ok(Written(value.to_string()))
            }
        }
        deserializer.deserialize_any(WrittenVisitor)
    }
}

impl JsonSchema for Limits {
    fn schema_name() -> Cow<'static, str> {
        "Limits".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let share = r"[0-9]+(\.[0-9]+)?\s*%";
        let pattern = |absolute: &str| format!(r"^\s*({share}|{absolute})\s*$");
        let timed = |absolute: &str| format!(r"^\s*({share}|{absolute})(\s+at\s+{share})?\s*$");
        let time = timed(r"[0-9]+(\.[0-9]+)?\s*(us|ms|s|min)");
        let bytes = pattern(r"[0-9]+(\.[0-9]+)?\s*(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)");
        let plain = timed(r"[0-9]+(\.[0-9]+)?([eE][0-9]+)?");
        let number = |description: &str| {
            json_schema!({
                "description": description,
                "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": plain}]
            })
        };
        let text = |description: &str, pattern: &str| json_schema!({"description": description, "type": "string", "pattern": pattern});
        json_schema!({
            "description": "What the result must stay inside: a share of what the parent itself measures (75%), or absolute.",
            "type": "object",
            "minProperties": 1,
            "additionalProperties": false,
            "properties": {
                "latency": text("From the request to its last token: 75% or 900ms or 1.2s; 900ms at 90% has predictions be so sure.", &time),
                "first_token": text("From the request to its first token: 75% or 900ms or 1.2s.", &time),
                "per_token": text("From one output token to the next: 75% or 20ms.", &time),
                "throughput": number("Output tokens a second at the least: 150% or 40."),
                "memory": text("Peak memory: 75% or 3GiB or 512MiB.", &bytes),
                "block_parameters": number("Parameters of the blocks, for baselines and tests: 75% or 80000000.")
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn limits_read_from_a_map_and_write_back_the_same() {
        let json = r#"{"latency": "75%", "memory": "3GiB", "throughput": 40, "first_token": "1.2s"}"#;
        let limits: Limits = serde_json::from_str(json).unwrap();
        assert_eq!(limits.get(Metric::Latency), Some(Bound::ShareOfParent(0.75)));
        assert_eq!(
            limits.get(Metric::Memory),
            Some(Bound::Absolute(3.0 * 1024.0 * 1024.0 * 1024.0))
        );
        assert_eq!(limits.get(Metric::Throughput), Some(Bound::Absolute(40.0)));
        assert_eq!(limits.get(Metric::FirstToken), Some(Bound::Absolute(1200.0)));
        let again: Limits = serde_json::from_str(&serde_json::to_string(&limits).unwrap()).unwrap();
        assert_eq!(again, limits);
    }

    #[test]
    fn a_map_without_limits_or_with_an_unknown_metric_is_refused_with_the_known_ones() {
        let empty = serde_json::from_str::<Limits>("{}").unwrap_err().to_string();
        assert!(empty.contains("block_parameters"), "{empty}");
        let unknown = serde_json::from_str::<Limits>(r#"{"latencie": "75%"}"#)
            .unwrap_err()
            .to_string();
        assert!(unknown.contains("latency"), "{unknown}");
    }

    #[test]
    fn a_share_is_of_the_parents_own_figure_and_throughput_is_a_floor() {
        let parent = Figures {
            latency_ms: Some(800.0),
            throughput_tokens_per_second: Some(40.0),
            ..Figures::default()
        };
        let latency = Limit {
            metric: Metric::Latency,
            bound: Bound::ShareOfParent(0.75),
            confidence: None,
        };
        let latency = latency.resolve(&parent).unwrap();
        assert!(latency.admits(600.0) && !latency.admits(600.1));
        let throughput = Limit {
            metric: Metric::Throughput,
            bound: Bound::ShareOfParent(1.5),
            confidence: None,
        };
        let throughput = throughput.resolve(&parent).unwrap();
        assert!(throughput.admits(60.0) && !throughput.admits(59.9));
        let memory = Limit {
            metric: Metric::Memory,
            bound: Bound::ShareOfParent(0.5),
            confidence: None,
        };
        assert_eq!(
            memory.resolve(&parent),
            Err(Error::NoParentFigure {
                metric: Metric::Memory
            })
        );
    }

    #[test]
    fn a_time_is_shown_with_digits_enough_to_tell_it_from_its_limit() {
        let shown = |value: f64| Metric::PerToken.display(value);
        assert_eq!(
            (shown(2.12), shown(0.04)),
            ("2.120 ms".to_owned(), "0.040 ms".to_owned())
        );
        assert_eq!(
            (shown(768.04), shown(12_340.0)),
            ("768.0 ms".to_owned(), "12.34 s".to_owned())
        );
    }
}
