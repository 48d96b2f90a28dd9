//! Statistics of repeated timings: medians and median absolute deviations, which a few disturbed repeats
//! do not move.

use espalier_search::Summary;

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

/// Median, spread and the samples themselves.
pub fn summary(samples: Vec<f64>) -> Summary {
    Summary {
        median: median(&samples),
        spread: spread(&samples),
        samples,
    }
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
    fn a_machine_that_slows_down_half_way_drifts() {
        assert!(drift(&[1.0, 1.0, 1.0, 1.2, 1.2, 1.2]) > 0.1);
    }
}
