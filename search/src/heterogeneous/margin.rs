//! How far inside a limit a prediction has to lie.

use crate::{AbsoluteLimit, Prediction};

/// A timed limit is aimed at with at least this share to spare.
pub const LEAST_MARGIN: f64 = 0.02;
/// However scattered the table, no more than this share is given away.
pub const MOST_MARGIN: f64 = 0.05;

/// Two standard errors of the worst timed limit, as a share of it, within the documented bounds; 0 when
/// nothing timed is limited. Limits that ask for a confidence are left out: theirs is [`share_of`].
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

/// The share of a limit that the doubt of a prediction takes, at the confidence that the limit asks for.
pub(super) fn share_of(prediction: &Prediction, limit: &AbsoluteLimit) -> f64 {
    let value = prediction.figures.get(limit.metric).unwrap_or(0.0);
    let doubt = limit.deviations() * prediction.errors.get(limit.metric).unwrap_or(0.0);
    if value <= 0.0 {
        return 0.0;
    }
    // A ceiling L is kept by v where v + d ≤ L: v ≤ L·(1 − d/(v + d)). A floor is kept where v − d ≥ L: the time that is
    // its inverse may be no more than L's, less d/v.
    if limit.metric.more_is_better() {
        doubt / value
    } else {
        doubt / (value + doubt)
    }
}
