//! How many sequences an engine runs together: which numbers are worth a try, and how long the other requests wait.

use espalier_arch::Architecture;

use crate::uniform::filled;
use crate::{AbsoluteLimit, CostModel, Error, Metric, Prediction, Result};

/// Numbers of sequences that may run together under limits on these metrics, the most first.
///
/// Throughput of an engine that batches continuously is another one at each number: more of them share a step, and need
/// more room for their keys and values. All up to eight are worth a try, then powers of two, and the concurrency. A limit on
/// latency or the first token is one for the workload's requests all together, so that none may wait for a place.
pub fn batches(model: &CostModel, limited: impl IntoIterator<Item = Metric>) -> Vec<usize> {
    let limited: Vec<Metric> = limited.into_iter().collect();
    let together = limited.contains(&Metric::Latency) || limited.contains(&Metric::FirstToken);
    if model.batches_continuously() && limited.contains(&Metric::Throughput) && !together {
        up_to(model.concurrency())
    } else {
        vec![model.concurrency()]
    }
}

fn up_to(concurrency: usize) -> Vec<usize> {
    const EVERY: usize = 8;
    let mut batches: Vec<usize> = (1..=concurrency.min(EVERY)).collect();
    let powers = (0..usize::BITS).map(|power| 1_usize << power);
    batches.extend(powers.filter(|batch| (EVERY + 1..concurrency).contains(batch)));
    if concurrency > EVERY {
        batches.push(concurrency);
    }
    batches.reverse();
    batches
}

/// The number of sequences at which `architecture` is inside every limit with most room to spare, and what it costs then;
/// none where it is inside at none. Numbers that the table did not measure are left out. `model` is left at any of them.
///
/// # Errors
/// When the table measured none of them, or the architecture is not one that it prices.
pub fn roomiest(
    model: &mut CostModel,
    architecture: &Architecture,
    limits: &[AbsoluteLimit],
) -> Result<Option<(usize, Prediction)>> {
    let mut best: Option<(f64, usize, Prediction)> = None;
    let (mut is_priced, mut unmeasured) = (false, None);
    for batch in batches(model, limits.iter().map(|limit| limit.metric)) {
        let predicted = model
            .run_together(batch)
            .and_then(|()| model.predict(architecture));
        let prediction = match predicted {
            Ok(prediction) => prediction,
            Err(error @ (Error::MissingRow { .. } | Error::Extrapolation { .. })) => {
                unmeasured = Some(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        is_priced = true;
        let Some(fill) = filled(&prediction, limits) else {
            continue;
        };
        if best.as_ref().is_none_or(|(least, ..)| fill < *least) {
            best = Some((fill, batch, prediction));
        }
    }
    match unmeasured {
        Some(error) if !is_priced => Err(error),
        _ => Ok(best.map(|(_, batch, prediction)| (batch, prediction))),
    }
}

/// Whole courses of others that the median request waits for before its own, where `concurrency` come at once, are of one
/// length, and `running` of them run together: 0 where all do.
#[allow(clippy::cast_precision_loss)] // far below 2^53
pub fn waits(concurrency: usize, running: usize) -> f64 {
    let running = running.max(1);
    // The middle one in the order of their ends, or the mean of the middle two.
    let before = |place: usize| (place / running) as f64;
    f64::midpoint(before(concurrency.saturating_sub(1) / 2), before(concurrency / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_request_waits_for_the_courses_before_its_own() {
        assert_eq!(waits(1, 1), 0.0);
        assert_eq!(waits(64, 64), 0.0);
        // Four courses of 16: the middle two are the last of the second and the first of the third.
        assert_eq!(waits(64, 16), 1.5);
        assert_eq!(waits(3, 2), 0.0);
        assert_eq!(waits(3, 1), 1.0);
    }

    #[test]
    fn every_number_up_to_eight_is_tried_then_powers_of_two_and_the_concurrency() {
        assert_eq!(up_to(3), [3, 2, 1]);
        assert_eq!(up_to(40), [40, 32, 16, 8, 7, 6, 5, 4, 3, 2, 1]);
    }
}
