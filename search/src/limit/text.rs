//! How one bound is written: `75%`, `900ms`, `1.2s`, `3GiB`, or a plain number.

use super::{Bound, Metric};
use crate::{Error, Result};

/// More could not be told from a handful of repeats.
const MOST_CONFIDENCE: f64 = 0.999;
/// What any bound lies between, so that no sum, share or inverse of it leaves what a number can hold.
const LEAST: f64 = 1e-100;
const MOST: f64 = 1e100;
const TIMES: [(&str, f64); 5] = [
    ("us", 1e-3),
    ("ms", 1.0),
    ("s", 1e3),
    ("min", 60e3),
    ("minutes", 60e3),
];
const BYTES: [(&str, f64); 10] = [
    ("B", 1.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];

pub(super) fn parse(metric: Metric, value: &str) -> Result<Bound> {
    let refuse = |reason: String| Error::LimitText {
        metric,
        value: value.to_owned(),
        reason,
    };
    let trimmed = value.trim();
    let (number, unit) = split(trimmed);
    let number: f64 = number.parse().map_err(|_| {
        refuse(format!(
            "does not begin with a number, expected {}",
            example(metric)
        ))
    })?;
    if number.is_nan() || number <= 0.0 {
        return Err(refuse(format!("is not above 0, expected {}", example(metric))));
    }
    // After the unit, which may carry it out of range.
    let in_range = |value: f64| match value {
        value if value > MOST => Err(refuse(format!("is too large, expected {}", example(metric)))),
        value if value < LEAST => Err(refuse(format!("is too small, expected {}", example(metric)))),
        value => Ok(value),
    };
    if unit == "%" {
        return in_range(number / 100.0).map(Bound::ShareOfParent);
    }
    let units = units(metric);
    if units.is_empty() {
        let plain = unit.is_empty() || (metric == Metric::Throughput && unit == "tokens/s");
        return if plain {
            in_range(number).map(Bound::Absolute)
        } else {
            Err(refuse(format!(
                "has the unit `{unit}`, expected {}",
                example(metric)
            )))
        };
    }
    if unit.is_empty() {
        return Err(refuse(format!("has no unit, expected {}", example(metric))));
    }
    let factor = units
        .iter()
        .find(|(name, _)| *name == unit)
        .or_else(|| units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)))
        .map(|(_, factor)| *factor)
        .ok_or_else(|| {
            refuse(format!(
                "has the unknown unit `{unit}`, expected {}",
                example(metric)
            ))
        })?;
    in_range(number * factor).map(Bound::Absolute)
}

pub(super) fn format(bound: Bound, metric: Metric) -> String {
    match bound {
        Bound::ShareOfParent(share) => format!("{}%", percent(share)),
        Bound::Absolute(value) => match metric {
            Metric::Latency | Metric::FirstToken | Metric::PerToken => format!("{value}ms"),
            Metric::Memory => format!("{value}B"),
            Metric::Throughput | Metric::BlockParameters => format!("{value}"),
        },
    }
}

/// A bound, and what follows ` at ` where there is that.
pub(super) fn split_confidence(value: &str) -> (&str, Option<&str>) {
    match value.split_once(" at ") {
        Some((bound, confidence)) => (bound, Some(confidence)),
        None => (value, None),
    }
}

/// Reads a confidence; `value` is the whole text, for messages.
pub(super) fn confidence(metric: Metric, value: &str, share: &str) -> Result<f64> {
    let refuse = |reason: String| Error::LimitText {
        metric,
        value: value.to_owned(),
        reason,
    };
    if !metric.is_timed() {
        return Err(refuse(
            "asks for a confidence, expected none: it is counted, not timed".to_owned(),
        ));
    }
    let number = share
        .trim()
        .strip_suffix('%')
        .and_then(|number| number.trim().parse::<f64>().ok());
    match number.map(|percent| percent / 100.0) {
        Some(share) if (0.5..=MOST_CONFIDENCE).contains(&share) => Ok(share),
        _ => Err(refuse(format!(
            "asks for a confidence of `{}`, expected 50% to 99.9%",
            share.trim()
        ))),
    }
}

/// A share as `90%`.
pub(super) fn share(share: f64) -> String {
    format!("{}%", percent(share))
}

/// The shortest decimal that reads back as `share` after division by 100.
fn percent(share: f64) -> String {
    let plain = share * 100.0;
    for digits in 0..=15 {
        let text = format!("{plain:.digits$}");
        if text.parse::<f64>().is_ok_and(|number| number / 100.0 == share) {
            return text;
        }
    }
    plain.to_string()
}

/// Number and unit, apart; the number may have an exponent, the unit blanks before it.
fn split(text: &str) -> (&str, &str) {
    let bytes = text.as_bytes();
    let digit = |index: usize| bytes.get(index).is_some_and(u8::is_ascii_digit);
    let mut end = 0;
    while let Some(&byte) = bytes.get(end) {
        let sign = (byte == b'-' || byte == b'+') && end == 0;
        let exponent = (byte == b'e' || byte == b'E')
            && (digit(end + 1) || (matches!(bytes.get(end + 1), Some(b'+' | b'-')) && digit(end + 2)));
        if exponent {
            end += 2;
        } else if byte.is_ascii_digit() || byte == b'.' || sign {
            end += 1;
        } else {
            break;
        }
    }
    let (number, unit) = text.split_at_checked(end).unwrap_or((text, ""));
    (number, unit.trim())
}

fn units(metric: Metric) -> &'static [(&'static str, f64)] {
    match metric {
        Metric::Latency | Metric::FirstToken | Metric::PerToken => &TIMES,
        Metric::Memory => &BYTES,
        Metric::Throughput | Metric::BlockParameters => &[],
    }
}

fn example(metric: Metric) -> &'static str {
    match metric {
        Metric::Latency | Metric::FirstToken | Metric::PerToken => {
            "a time such as 900ms or 1.2s, or a share of the parent's own such as 75%"
        }
        Metric::Memory => "a size such as 3GiB, 512MiB or 4GB, or a share of the parent's own such as 75%",
        Metric::Throughput => "tokens a second such as 40, or a share of the parent's own such as 150%",
        Metric::BlockParameters => "a count such as 80000000, or a share of the parent's own such as 75%",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn each_unit_is_read() {
        let read = |metric, text| parse(metric, text).unwrap();
        assert_eq!(read(Metric::Latency, "75%"), Bound::ShareOfParent(0.75));
        assert_eq!(read(Metric::Latency, " 900 ms "), Bound::Absolute(900.0));
        assert_eq!(read(Metric::PerToken, "250us"), Bound::Absolute(0.25));
        assert_eq!(read(Metric::FirstToken, "1.2s"), Bound::Absolute(1200.0));
        assert_eq!(read(Metric::Memory, "512MiB"), Bound::Absolute(536_870_912.0));
        assert_eq!(read(Metric::Memory, "4GB"), Bound::Absolute(4e9));
        assert_eq!(read(Metric::Memory, "4gib"), Bound::Absolute(4_294_967_296.0));
        assert_eq!(read(Metric::BlockParameters, "8e7"), Bound::Absolute(8e7));
        assert_eq!(read(Metric::Throughput, "40 tokens/s"), Bound::Absolute(40.0));
    }

    #[test]
    fn a_wrong_bound_names_the_metric_the_text_and_what_would_be_right() {
        let cases = [
            (
                Metric::Latency,
                "900",
                "has no unit, expected a time such as 900ms",
            ),
            (Metric::Latency, "fast", "does not begin with a number"),
            (Metric::Latency, "-5ms", "is not above 0"),
            (Metric::Latency, "0%", "is not above 0"),
            (Metric::Latency, "3GiB", "unknown unit `GiB`"),
            (Metric::Memory, "3 potatoes", "unknown unit `potatoes`"),
            (
                Metric::Throughput,
                "40ms",
                "has the unit `ms`, expected tokens a second",
            ),
            (Metric::Memory, "1e999GiB", "is too large"),
            (Metric::Latency, "1e400%", "is too large"),
            (Metric::Memory, "1e300GiB", "is too large, expected a size"),
            (Metric::Latency, "1e305min", "is too large"),
            (Metric::Latency, "1e-323us", "is too small"),
            (Metric::Latency, "1e-323%", "is too small"),
            (Metric::Throughput, "1e-310", "is too small"),
            (Metric::Memory, "", "does not begin with a number"),
        ];
        for (metric, text, expected) in cases {
            let message = parse(metric, text).unwrap_err().to_string();
            assert!(
                message.contains(expected) && message.starts_with(metric.name()),
                "{text}: {message}"
            );
        }
    }

    #[test]
    fn a_confidence_follows_the_bound_and_is_for_what_is_timed() {
        let limit = crate::Limit::parse(Metric::Latency, "750 ms at 90%").unwrap();
        assert_eq!(
            (limit.bound, limit.confidence),
            (Bound::Absolute(750.0), Some(0.9))
        );
        assert_eq!(limit.to_text(), "750ms at 90%");
        assert_eq!(
            crate::Limit::parse(Metric::Latency, &limit.to_text()).unwrap(),
            limit
        );
        for (metric, text, expected) in [
            (Metric::Latency, "750ms at 20%", "expected 50% to 99.9%"),
            (Metric::Latency, "750ms at ninety", "expected 50% to 99.9%"),
            (Metric::Memory, "3GiB at 90%", "counted, not timed"),
        ] {
            let message = crate::Limit::parse(metric, text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn every_share_is_written_so_that_it_reads_back() {
        for share in [0.75, 0.1, 1.0 / 3.0, 0.999_999_9, 1.07, 0.07] {
            let text = format(Bound::ShareOfParent(share), Metric::Latency);
            let Bound::ShareOfParent(again) = parse(Metric::Latency, &text).unwrap() else {
                panic!("{text}")
            };
            assert!(
                (again - share).abs() <= f64::EPSILON * share,
                "{text} reads as {again}, not {share}"
            );
        }
    }
}
