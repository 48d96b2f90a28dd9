//! Measurement against limit and prediction.
//!
//! A machine is not equally fast at all times, so every measurement alternates with the parent. A share of the
//! parent is a share of the parent *as measured there*; a prediction is scaled by how much the parent's own
//! figure differs from when it was profiled. An absolute limit stands as it is. Where the parent has no room, or none beside
//! the candidate, a prediction stands as it is too, and a share is of the parent as profiled, if that could be.

use espalier_proto::task::MeasuredPair;
use espalier_search::{
    Bound, Corrections, Figures, Limit, Limits, Measurement, Metric, Prediction, WholeParent,
};

use super::outcome::Reading;
use super::{MOST_MISPREDICTION, Stage};

/// Reads one metric of a measured pair. None when the metric has no figure.
pub(super) fn reading(
    limit: &Limit,
    pair: &MeasuredPair,
    block_parameters: (u64, u64),
    profiled: &WholeParent,
    prediction: &Prediction,
) -> Option<Reading> {
    let metric = limit.metric;
    let (parent_parameters, candidate_parameters) = block_parameters;
    let then = Figures::of_parent(profiled, parent_parameters);
    let now = Figures::of_parent(&pair.parent, parent_parameters);
    let value = Figures::measured(&pair.candidate, candidate_parameters).get(metric)?;
    let pace = match (now.get(metric), then.get(metric)) {
        (Some(now), Some(then)) if metric.is_timed() => ratio(now, then),
        _ => 1.0,
    };
    let predicted = prediction.figures.get(metric)? * pace;
    let absolute = limit.resolve(&now).or_else(|_| limit.resolve(&then)).ok()?;
    Some(Reading {
        value,
        spread: spread(&pair.candidate, metric),
        parent: now.get(metric),
        limit: absolute.value,
        predicted,
        error: ratio(value, predicted) - 1.0,
        inside: absolute.admits(value),
    })
}

/// What a check measured outside of a limit, or far from its prediction, in words.
pub(super) fn missed(stage: Stage, readings: &[(Metric, Reading)]) -> String {
    let wrong = readings
        .iter()
        .filter(|(_, reading)| !reading.inside || reading.error.abs() > MOST_MISPREDICTION);
    let each = wrong.map(|(metric, reading)| {
        format!(
            "{metric} was {}, predicted {}, the limit {}",
            metric.display(reading.value),
            metric.display(reading.predicted),
            metric.display(reading.limit)
        )
    });
    format!("{stage}: {}", each.collect::<Vec<_>>().join(", "))
}

/// What the next prediction has to be multiplied by, so that it would have met this measurement. `waits` is how many
/// courses of others a request of the candidate's waited for ([`espalier_search::running::waits`]); the parent's waited for
/// none.
///
/// With an absolute limit on time, how fast the machine is now matters too, and stays in the factor.
pub(super) fn corrections(
    before: Corrections,
    limits: &Limits,
    pair: &MeasuredPair,
    profiled: &WholeParent,
    prediction: &Prediction,
    waits: f64,
) -> Corrections {
    let absolute = limits
        .iter()
        .any(|limit| limit.metric.is_timed() && matches!(limit.bound, Bound::Absolute(_)));
    let first = |measurement: &Measurement| measurement.first_token_ms.median;
    let later = |measurement: &Measurement| (measurement.latency_ms.median - first(measurement)).max(0.0);
    let turnover = |measurement: &Measurement| 1.0 / measurement.throughput_tokens_per_second.median;
    let pace = |part: &dyn Fn(&Measurement) -> f64| match (pair.parent.measured(), profiled.measured()) {
        (Some(now), Some(then)) if !absolute => ratio(part(now), part(then)),
        _ => 1.0,
    };
    let figures = &prediction.figures;
    let predicted_first = figures.first_token_ms.unwrap_or(0.0);
    let predicted_later = figures.latency_ms.unwrap_or(0.0) - predicted_first;
    let predicted_turnover = 1.0 / figures.throughput_tokens_per_second.unwrap_or(0.0);
    let candidate = &pair.candidate;
    let own = |first: f64, later: f64| (first - waits * later) / (waits + 1.0);
    let first_own = own(first(candidate), later(candidate));
    let predicted_own = own(predicted_first, predicted_later) * pace(&first);
    #[allow(clippy::cast_precision_loss)] // bytes are far below 2^53
    let memory = candidate.memory_bytes as f64;
    Corrections {
        first_token: before.first_token * ratio(first_own, predicted_own),
        decode: before.decode * ratio(later(candidate), predicted_later * pace(&later)),
        turnover: before.turnover * ratio(turnover(candidate), predicted_turnover * pace(&turnover)),
        memory_bytes: before.memory_bytes + memory - figures.memory_bytes.unwrap_or(memory),
    }
}

/// a / b; 1 where that is no ratio.
fn ratio(a: f64, b: f64) -> f64 {
    let is_time = |value: f64| value > 0.0 && value.is_finite();
    if is_time(a) && is_time(b) { a / b } else { 1.0 }
}

fn spread(measurement: &Measurement, metric: Metric) -> f64 {
    match metric {
        Metric::Latency => measurement.latency_ms.spread,
        Metric::FirstToken => measurement.first_token_ms.spread,
        Metric::PerToken => measurement.per_token_ms.spread,
        Metric::Throughput => measurement.throughput_tokens_per_second.spread,
        Metric::Memory | Metric::BlockParameters => 0.0,
    }
}
