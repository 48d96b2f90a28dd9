//! Two models measured in alternation, so that a machine that speeds up or slows down does both to both.

use espalier_proto::task::MeasuredPair;
use espalier_search::Workload;

use super::{Engine, Opened, Series, Subject, Surroundings};
use crate::Result;

/// The parent's own latency may drift this far within a series before it is taken again.
pub const DRIFT_LIMIT: f64 = 0.05;
/// Series taken at most.
const SERIES: usize = 3;

/// Measures parent and candidate, one run of each in turn, `repeats` times. Of the candidate `running` requests run
/// together, all where there is no number; of the parent always all, as when it was profiled. A series in which the parent
/// drifted by more than [`DRIFT_LIMIT`] is taken again; when none is quieter the quietest is told, with its drift,
/// for whoever asked to judge: a limit on memory needs no quiet machine.
///
/// # Errors
/// What either model refuses, and when the attempt should stop.
pub fn measure_pair(
    engine: &mut dyn Engine,
    [parent, candidate]: [Subject<'_>; 2],
    workload: &Workload,
    running: Option<usize>,
    repeats: usize,
    surroundings: &dyn Surroundings,
) -> Result<MeasuredPair> {
    let repeats = repeats.max(4);
    let all = workload.concurrency;
    let both = [
        engine.open(&parent, workload, all)?,
        engine.open(&candidate, workload, running.unwrap_or(all))?,
    ];
    let mut series = 0;
    let mut quietest: Option<MeasuredPair> = None;
    loop {
        series += 1;
        let pair = alternate(engine, both, workload, repeats, surroundings)?;
        let pair = match quietest.take() {
            Some(quieter) if quieter.parent_drift <= pair.parent_drift => quieter,
            _ => pair,
        };
        if pair.parent_drift <= DRIFT_LIMIT || series == SERIES {
            return Ok(pair);
        }
        tracing::warn!(
            series,
            parent_drift = pair.parent_drift,
            "the parent's own latency drifted; the series is taken again"
        );
        quietest = Some(pair);
    }
}

/// One series.
fn alternate(
    engine: &mut dyn Engine,
    [parent, candidate]: [Opened; 2],
    workload: &Workload,
    repeats: usize,
    surroundings: &dyn Surroundings,
) -> Result<MeasuredPair> {
    let (mut of_parent, mut of_candidate) = (Series::new(workload), Series::new(workload));
    for round in 0..repeats {
        // The order turns round each time, so that neither always follows the other.
        if round % 2 == 0 {
            of_parent.push(engine.run(parent)?);
            of_candidate.push(engine.run(candidate)?);
        } else {
            of_candidate.push(engine.run(candidate)?);
            of_parent.push(engine.run(parent)?);
        }
        surroundings.progress(round + 1, repeats, "alternations", &String::new)?;
    }
    Ok(MeasuredPair {
        parent: of_parent.measurement(engine.memory_bytes(parent)),
        candidate: of_candidate.measurement(engine.memory_bytes(candidate)),
        parent_drift: of_parent.drift(),
        disturbed: of_parent.disturbed().max(of_candidate.disturbed()),
        serving: engine.serving(candidate),
    })
}
