//! What a confidence means in standard errors.

/// The standard errors that a prediction is to stay clear of a limit, so that a normal error crosses it with a
/// probability of 1 − `confidence` only: the normal quantile, by Abramowitz and Stegun 26.2.23, within 4.5e-4.
pub(super) fn deviations(confidence: f64) -> f64 {
    let beyond = (1.0 - confidence).clamp(1e-6, 0.5);
    let t = (-2.0 * beyond.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    (t - above / below).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_confidences_have_their_usual_quantiles() {
        for (confidence, expected) in [
            (0.5, 0.0),
            (0.841_345, 1.0),
            (0.9, 1.281_55),
            (0.975, 1.959_96),
            (0.999, 3.090_23),
        ] {
            let found = deviations(confidence);
            assert!((found - expected).abs() < 1e-3, "{confidence}: {found}");
        }
    }
}
