//! Measurement against limit and prediction.
//!
//! A machine is not equally fast at all times, so every measurement alternates with the parent. A share of the
//! parent is a share of the parent *as measured there*; a prediction is scaled by the [`pace`]: how much the parent's own
//! figure differs from when it was profiled. An absolute limit stands as it is. Where the parent has no room, or none beside
//! the candidate, a prediction stands as it is too, and a share is of the parent as profiled, if that could be.
//!
//! Predictions, corrections and the limits that choices are fitted to are of the machine as it was when profiled: what is
//! learnt is free of the pace, and an absolute limit on time is brought there by it.

use espalier_proto::task::MeasuredPair;
use espalier_search::running::waits;
use espalier_search::statistics::{ratio, ratios, relative_error};
use espalier_search::{
    Checked, Corrections, Figures, Limit, Measurement, Metric, Prediction, WholeParent, Workload,
};

use super::outcome::Reading;
use super::{Chosen, MOST_DRIFT, MOST_MISPREDICTION};

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
    let predicted = prediction.figures.get(metric)? * pace(metric, pair, profiled);
    let absolute = limit.resolve(&now).or_else(|_| limit.resolve(&then)).ok()?;
    // Memory without the device's context may be more than it seems.
    let hidden = metric == Metric::Memory && pair.without_context;
    Some(Reading {
        value,
        spread: pair.candidate.timed(metric).map_or(0.0, |summary| summary.spread),
        parent: now.get(metric),
        limit: absolute.value,
        predicted,
        error: ratio(value, predicted) - 1.0,
        inside: absolute.admits(value) && !hidden,
        noisy: hidden,
    })
}

/// What the parent has of a metric now, of what it had when it was profiled. 1 where nothing is timed, or not both were.
pub(super) fn pace(metric: Metric, pair: &MeasuredPair, profiled: &WholeParent) -> f64 {
    let timed = |parent: &WholeParent| Figures::of_parent(parent, 0).get(metric);
    match (timed(&pair.parent), timed(profiled)) {
        (Some(now), Some(then)) if metric.is_timed() => ratio(now, then),
        _ => 1.0,
    }
}

/// What a check measured outside of a limit, or far from its prediction, in words.
pub(super) fn missed(readings: &[(Metric, Reading)]) -> String {
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
    each.collect::<Vec<_>>().join(", ")
}

/// What the next prediction has to be multiplied by, so that it would have met this measurement of `chosen`, had the
/// machine been as fast as when it was profiled; and how well that is known.
pub(super) fn corrections(
    chosen: &Chosen,
    pair: &MeasuredPair,
    profiled: &WholeParent,
    workload: Workload,
) -> Corrections {
    let running = chosen.running.unwrap_or(workload.concurrency);
    // Courses of others that a request of the candidate's waited for; the parent's waited for none.
    let waits = waits(workload.concurrency, running);
    let first = |measurement: &Measurement| measurement.first_token_ms.median;
    let later = |measurement: &Measurement| (measurement.latency_ms.median - first(measurement)).max(0.0);
    let turnover = |measurement: &Measurement| 1.0 / measurement.throughput_tokens_per_second.median;
    let pace_of = |part: &dyn Fn(&Measurement) -> f64| match (pair.parent.measured(), profiled.measured()) {
        (Some(now), Some(then)) => ratio(part(now), part(then)),
        _ => 1.0,
    };
    let (before, figures) = (&chosen.corrections, &chosen.prediction.figures);
    let predicted_first = figures.first_token_ms.unwrap_or(0.0);
    let predicted_later = figures.latency_ms.unwrap_or(0.0) - predicted_first;
    let predicted_turnover = 1.0 / figures.throughput_tokens_per_second.unwrap_or(0.0);
    let candidate = &pair.candidate;
    let own = |first: f64, later: f64| (first - waits * later) / (waits + 1.0);
    let first_own = own(first(candidate), later(candidate));
    let predicted_own = own(predicted_first, predicted_later) * pace_of(&first);
    #[allow(clippy::cast_precision_loss)] // bytes are far below 2^53
    let memory = candidate.memory_bytes as f64;
    Corrections {
        first_token: before.first_token * ratio(first_own, predicted_own),
        decode: before.decode * ratio(later(candidate), predicted_later * pace_of(&later)),
        turnover: before.turnover * ratio(turnover(candidate), predicted_turnover * pace_of(&turnover)),
        memory_bytes: before.memory_bytes + memory - figures.memory_bytes.unwrap_or(memory),
        checked: Some(Checked {
            candidate: chosen.candidate.clone(),
            workload,
            running,
            first_token_error: error_of(
                pair,
                |measured, waits| {
                    let (first, later) = (&measured.first_token_ms.samples, laters(measured));
                    let each = first.iter().zip(later);
                    each.map(|(first, later)| (first - waits * later) / (waits + 1.0))
                        .collect()
                },
                waits,
            ),
            decode_error: error_of(pair, |measured, _| laters(measured), waits),
            turnover_error: error_of(
                pair,
                |measured, _| measured.throughput_tokens_per_second.samples.clone(),
                waits,
            ),
        }),
    }
}

/// However little a measurement scatters, another process with the same model may be so much faster or slower.
const LEAST_ERROR: f64 = 0.01;

/// Standard error of the candidate's times as a share of them: by turns with the parent's, which leaves the machine's pace
/// out. Where that moved, or there is no parent, medians are as uncertain as it moved. `samples` are of a measurement in
/// which each request waited for so many courses of others.
fn error_of(pair: &MeasuredPair, samples: impl Fn(&Measurement, f64) -> Vec<f64>, waits: f64) -> f64 {
    let own = samples(&pair.candidate, waits);
    let (error, steady) = match pair.parent.measured() {
        Some(parent) => {
            let by_turns = ratios(&own, &samples(parent, 0.0));
            (relative_error(&by_turns), pair.drift <= MOST_DRIFT)
        }
        None => (relative_error(&own), false),
    };
    let moved = if steady { 0.0 } else { pair.drift };
    error.max(moved).max(LEAST_ERROR)
}

/// From the first token to the last, request by request.
fn laters(measured: &Measurement) -> Vec<f64> {
    let each = measured.latency_ms.samples.iter();
    let each = each.zip(&measured.first_token_ms.samples);
    each.map(|(all, first)| all - first).collect()
}
