//! Statistics of repeated timings: medians and median absolute deviations, which a few disturbed repeats
//! do not move.

/// For a normal distribution: σ is 1.4826 of the median absolute deviation, and the median of n has a standard error of
/// √(π/2)·σ/√n.
pub const ERROR_OF_MEDIAN: f64 = 1.4826 * 1.253_314_137_315_5;

/// The middle value, the mean of the middle two for an even count; 0 for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (
        sorted.len() % 2,
        sorted.get(middle),
        middle.checked_sub(1).and_then(|below| sorted.get(below)),
    ) {
        (1, Some(value), _) => *value,
        (0, Some(above), Some(below)) => f64::midpoint(*below, *above),
        _ => 0.0,
    }
}

/// Median absolute deviation from the median.
pub fn spread(values: &[f64]) -> f64 {
    let middle = median(values);
    median(
        &values
            .iter()
            .map(|value| (value - middle).abs())
            .collect::<Vec<_>>(),
    )
}

/// Standard error of the median.
#[allow(clippy::cast_precision_loss)] // repeats
pub fn standard_error(values: &[f64]) -> f64 {
    ERROR_OF_MEDIAN * spread(values) / (values.len().max(1) as f64).sqrt()
}

/// The same as a share of the median.
pub fn relative_error(values: &[f64]) -> f64 {
    standard_error(values) / median(values).abs().max(f64::MIN_POSITIVE)
}

/// Values divided by those that were taken beside them, each by its own.
pub fn ratios(values: &[f64], beside: &[f64]) -> Vec<f64> {
    let turns = values.iter().zip(beside);
    turns.map(|(value, beside)| value / beside).collect()
}

/// a / b of two times; 1 where that is no ratio.
pub fn ratio(a: f64, b: f64) -> f64 {
    let is_time = |value: f64| value > 0.0 && value.is_finite();
    if is_time(a) && is_time(b) { a / b } else { 1.0 }
}

/// How far the halves of a series lie apart, as a share of its median: what moved while it was taken.
/// Single disturbed repeats do not count, a lasting change does.
pub fn drift(samples: &[f64]) -> f64 {
    let (first, second) = samples.split_at(samples.len() / 2);
    let middle = median(samples);
    if first.is_empty() || middle <= 0.0 {
        return 0.0;
    }
    (median(first) - median(second)).abs() / middle
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_disturbed_repeat_moves_neither_median_nor_drift() {
        let samples = [1.0, 1.01, 0.99, 9.0, 1.0, 1.02, 0.98, 1.0];
        assert!((median(&samples) - 1.0).abs() < 0.01);
        assert!(spread(&samples) < 0.02);
        assert!(drift(&samples) < 0.02);
    }

    #[test]
    fn the_error_of_a_median_shrinks_with_the_root_of_their_number_and_what_both_share_is_in_no_ratio() {
        let scattered = |times: usize| [0.9, 1.1, 0.9, 1.1].repeat(times);
        // Half of the distance to either, over the root of four.
        let expected = 1.4826 * (std::f64::consts::PI / 2.0).sqrt() * 0.1 / 2.0;
        assert!((relative_error(&scattered(1)) - expected).abs() < 1e-12);
        assert!((relative_error(&scattered(4)) - expected / 2.0).abs() < 1e-12);
        let doubled: Vec<f64> = scattered(1).iter().map(|value| 2.0 * value).collect();
        assert!(relative_error(&ratios(&doubled, &scattered(1))) < 1e-12);
        assert!(relative_error(&[]).abs() < f64::EPSILON);
    }

    #[test]
    fn a_machine_that_slows_down_half_way_drifts() {
        assert!(drift(&[1.0, 1.0, 1.0, 1.2, 1.2, 1.2]) > 0.1);
    }
}
