//! How far inside a limit a prediction has to lie.

use crate::{AbsoluteLimit, Prediction};

/// A timed limit is aimed at with at least this share to spare.
pub const LEAST_MARGIN: f64 = 0.02;
/// However scattered the table, no more than this share is given away.
pub const MOST_MARGIN: f64 = 0.05;

/// Two standard errors of the worst timed limit, as a share of it, within the documented bounds; 0 when
/// nothing timed is limited. Limits that ask for a confidence are left out: theirs is their own.
pub fn margin(prediction: &Prediction, limits: &[AbsoluteLimit]) -> f64 {
    let timed = limits
        .iter()
        .filter(|limit| limit.metric.is_timed() && limit.confidence.is_none());
    let shares = timed.map(|limit| {
        let value = prediction.figures.get(limit.metric).unwrap_or(0.0);
        let error = prediction.errors.get(limit.metric).unwrap_or(0.0);
        if value > 0.0 { 2.0 * error / value } else { 0.0 }
    });
    shares
        .fold(None, |worst: Option<f64>, share| {
            Some(worst.unwrap_or(0.0).max(share))
        })
        .map_or(0.0, |worst| worst.clamp(LEAST_MARGIN, MOST_MARGIN))
}

/// The largest share of a limit that the doubt of a prediction takes, at the confidence that the limit asks for.
pub(super) fn doubt(prediction: &Prediction, limits: &[AbsoluteLimit]) -> f64 {
    let shares = limits.iter().map(|limit| {
        let value = prediction.figures.get(limit.metric).unwrap_or(0.0);
        let sure = limit.value_at_confidence(prediction).unwrap_or(value);
        (limit.use_of(sure) - limit.use_of(value)).max(0.0)
    });
    shares.fold(0.0, f64::max)
}
