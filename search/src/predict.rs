//! What a candidate will cost, from the cost table of one target.
//!
//! The times of a request, as of a workload whose requests run together from start to end:
//!
//! - first token = prefill of `concurrency` prompts (its last position gives the first token);
//! - latency = first token + one decode step for each later token, at contexts `prompt`, `prompt + 1`, …,
//!   `prompt + output − 2`;
//! - per token = (latency − first token) / (output − 1).
//!
//! Throughput: the built-in engine does just that, so `concurrency` · output / latency. An engine that batches
//! continuously keeps b sequences running: each request takes a b-th of its decode steps at that batch, and its own
//! prompt's prefill, which joins one of the others' steps. So output / (decode(b) / b + prefill), one problem for each b
//! ([`CostModel::run_together`]), in which keys and values of b sequences at their longest have room, so that none is
//! preempted.
//!
//! Memory = weights as stored + keys, values and other state at the last context, in the engine's pages + what else the
//! parent was measured to need (activations and the engine's own), which no variant raises.
//!
//! Every one of them is a sum over blocks and a base: [`CostModel::block_costs`] gives the summands, and the
//! solver's coefficients and [`CostModel::predict`] both come from it, so that they cannot disagree. Where the table
//! tells the host's part apart, a step takes the longer of the device's sum and the host's (`host`): every combination of
//! both is a sum, and a limit holds where all of them do (`cone`).
//!
//! Between measured loads and sizes times lie on straight lines (`sampled`), with an error for the line. Blocks of one
//! shape share the same rows, so their errors add linearly; different shapes were timed apart, so theirs add in
//! quadrature. What a check has told of one model's errors is no doubt of another's (`checked`).

mod checked;
mod cone;
mod corrections;
mod host;
mod model;
mod priced;
mod rows;
mod sampled;
mod shapes;
#[cfg(test)]
mod tests;
mod timed;

pub use checked::Checked;
pub(crate) use cone::{Cone, Coordinate, Priced, Share};
pub use corrections::Corrections;
pub(crate) use model::Prices;
pub use model::{CostModel, Costs, Prediction, parameters};
pub(crate) use priced::priced;

use crate::{Error, Point, Result, Workload};

/// Contexts farther apart than this get another point between them: time is linear in context only as
/// long as caches behave the same.
const CONTEXT_STEP: usize = 1024;

/// The loads at which every shape has to be timed for a workload, each once.
///
/// # Errors
/// When the workload asks for nothing.
pub fn points(workload: &Workload) -> Result<Vec<Point>> {
    check(workload)?;
    let sequences = workload.concurrency;
    let mut points = vec![Point::Prefill {
        tokens: workload.prompt_tokens,
        sequences,
    }];
    let Some(steps) = decode_steps(workload) else {
        return Ok(points);
    };
    let first = workload.prompt_tokens;
    let last = first + steps - 1;
    let pieces = (last - first).div_ceil(CONTEXT_STEP);
    points.push(Point::Decode {
        context: first,
        sequences,
    });
    for piece in 1..=pieces {
        let context = first + (last - first) * piece / pieces;
        points.push(Point::Decode { context, sequences });
    }
    Ok(points)
}

/// The loads beside [`points`] at which every shape has to be timed for the throughput of an engine that batches
/// continuously: one prompt alone, and decoding at every power of two up to the concurrency.
///
/// # Errors
/// When the workload asks for nothing.
pub fn running_points(workload: &Workload) -> Result<Vec<Point>> {
    let together = points(workload)?;
    let mut found = Vec::new();
    let batches = (0..usize::BITS).map(|power| 1_usize << power);
    for batch in batches.take_while(|batch| *batch < workload.concurrency) {
        let alike = together.iter().filter_map(|point| match *point {
            Point::Prefill { tokens, .. } if batch == 1 => Some(Point::Prefill { tokens, sequences: 1 }),
            Point::Prefill { .. } => None,
            Point::Decode { context, .. } => Some(Point::Decode {
                context,
                sequences: batch,
            }),
        });
        found.extend(alike);
    }
    Ok(found)
}

/// Decode steps of each request: none when the first token is the only one.
fn decode_steps(workload: &Workload) -> Option<usize> {
    workload.output_tokens.checked_sub(1).filter(|&steps| steps > 0)
}

fn check(workload: &Workload) -> Result<()> {
    let fields = [
        ("prompt_tokens", workload.prompt_tokens),
        ("output_tokens", workload.output_tokens),
        ("concurrency", workload.concurrency),
    ];
    match fields.into_iter().find(|(_, value)| *value == 0) {
        Some((field, _)) => Err(Error::EmptyWorkload { field }),
        None => Ok(()),
    }
}
