//! What a candidate will cost, from the cost table of one target.
//!
//! For the built-in engine, which runs a workload's requests together from start to end:
//!
//! - first token = prefill of `concurrency` prompts (its last position gives the first token);
//! - latency = first token + one decode step for each later token, at contexts `prompt`, `prompt + 1`, …,
//!   `prompt + output − 2`; between measured contexts times are interpolated linearly, beyond them never;
//! - per token = (latency − first token) / (output − 1);
//! - throughput = concurrency · output / latency. An engine that batches continuously needs one problem
//!   for each running batch instead; each of those is again a sum over blocks, so that only the sums here change;
//! - memory = weights + key/value and other state at the last context + what else the parent was measured
//!   to need (activations and the engine's own), which no variant raises.
//!
//! Every one of them is a sum over blocks and a base: [`CostModel::block_costs`] gives the summands, and the
//! solver's coefficients and [`CostModel::predict`] both come from it, so that they cannot disagree.
//!
//! Spread: blocks of one shape share the same rows, so their errors add linearly; different shapes were
//! timed apart, so theirs add in quadrature.

mod model;
mod rows;
#[cfg(test)]
mod tests;

pub use model::{Corrections, CostModel, Costs, Prediction, parameters};

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
