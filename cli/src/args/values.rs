//! How values on the command line are read.

use std::time::Duration;

use espalier_arch::Precision;
use espalier_search::{Bound, Limit, Limits, Metric, Workload};

/// A number of threads: more than there are processors would only have them wait for each other.
pub(super) fn threads(text: &str) -> Result<usize, String> {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match text.parse() {
        Ok(threads) if threads <= processors => Ok(threads),
        _ => Err(format!(
            "expected 0 to {processors}, the processors of this machine"
        )),
    }
}

/// `512MiB`, `20GiB`, `4GB`.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no size; write it as 512MiB, 20GiB or 4GB");
    let read = Bound::parse(Metric::Memory, text).map_err(|_| wrong())?;
    match read {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 1 and 2^63
        Bound::Absolute(bytes) if (1.0..9.2e18).contains(&bytes) => Ok(bytes as u64),
        _ => Err(wrong()),
    }
}

/// `latency=75%,memory=3GiB`.
pub(super) fn limits(text: &str) -> Result<Limits, String> {
    let mut found = Vec::new();
    for part in text.split(',') {
        let wrong = || {
            format!(
                "`{}` is no limit; write it as latency=75%, with one of {}",
                part.trim(),
                Metric::NAMES
            )
        };
        let (name, value) = part.split_once('=').ok_or_else(wrong)?;
        let mut known = Metric::ALL.into_iter();
        let metric = known
            .find(|metric| metric.name() == name.trim())
            .ok_or_else(wrong)?;
        if found.iter().any(|limit: &Limit| limit.metric == metric) {
            return Err(format!(
                "{metric} is limited twice; give each limit once, several plans by several --limits"
            ));
        }
        found.push(Limit::parse(metric, value).map_err(|error| error.to_string())?);
    }
    Limits::new(found).map_err(|error| error.to_string())
}

/// `128x32` or `128x32x4`.
pub(super) fn workload(text: &str) -> Result<Workload, String> {
    let wrong =
        || format!("`{text}` is no workload; write it as PROMPTxOUTPUTxCONCURRENCY, for example 128x32x1");
    let numbers: Result<Vec<usize>, _> = text.split('x').map(|number| number.trim().parse()).collect();
    let (prompt_tokens, output_tokens, concurrency) = match numbers.map_err(|_| wrong())?[..] {
        [prompt, output] => (prompt, output, 1),
        [prompt, output, concurrency] => (prompt, output, concurrency),
        _ => return Err(wrong()),
    };
    Ok(Workload {
        prompt_tokens,
        output_tokens,
        concurrency,
    })
}

/// `bf16`, `fp8`.
pub(super) fn cache_precision(text: &str) -> Result<Precision, String> {
    let known = [Precision::F32, Precision::Bf16, Precision::F16, Precision::Fp8];
    let found = known.into_iter().find(|precision| precision.name() == text);
    found.ok_or_else(|| format!("`{text}` is no precision, expected f32, bf16, f16 or fp8"))
}

/// `250ms`, `30s`, `5m`, `2h`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no duration; write it as 250ms, 30s, 5m or 2h");
    let split = text
        .find(|character: char| !character.is_ascii_digit())
        .ok_or_else(wrong)?;
    let (digits, unit) = text.split_at(split);
    let amount: u64 = digits.parse().map_err(|_| wrong())?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    amount
        .checked_mul(milliseconds)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

/// A duration that is not nothing.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err(format!("`{text}` is no time at all; expected at least 1ms")),
        interval => Ok(interval),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_carry_their_unit() {
        assert_eq!(bytes("20GiB").unwrap(), 20 << 30);
        assert_eq!(bytes("4GB").unwrap(), 4_000_000_000);
        for wrong in ["75%", "-1GiB", "many"] {
            assert!(bytes(wrong).unwrap_err().contains("512MiB, 20GiB"), "{wrong}");
        }
    }

    #[test]
    fn limits_and_workloads_are_read_from_a_word_each() {
        let read = limits("latency=75%, memory=3GiB").unwrap();
        assert_eq!(read.get(Metric::Latency), Some(Bound::ShareOfParent(0.75)));
        assert_eq!(read.iter().count(), 2);
        assert!(
            limits("latency=75%,latency=50%")
                .unwrap_err()
                .contains("limited twice")
        );
        assert!(limits("latencie=75%").unwrap_err().contains("first_token"));
        assert!(
            limits("latency=fast")
                .unwrap_err()
                .contains("a time such as 900ms")
        );
        let read = workload("128x32x4").unwrap();
        assert_eq!(
            (read.prompt_tokens, read.output_tokens, read.concurrency),
            (128, 32, 4)
        );
        assert_eq!(workload("128x32").unwrap().concurrency, 1);
        assert!(workload("128").unwrap_err().contains("128x32x1"));
    }

    #[test]
    fn durations_carry_their_unit() {
        assert_eq!(duration("30s").unwrap(), Duration::from_secs(30));
        assert_eq!(duration("250ms").unwrap(), Duration::from_millis(250));
        assert!(duration("30").unwrap_err().contains("30s, 5m"));
        assert!(duration("99999999999999999999h").is_err());
        assert!(duration("0s").is_ok() && interval("0s").is_err());
    }
}
