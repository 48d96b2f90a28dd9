//! Two models measured in alternation, so that a machine that speeds up or slows down does both to both.

use std::sync::Arc;

use espalier_model::Model;
use espalier_model::ops::Operations;
use espalier_proto::task::MeasuredPair;
use espalier_search::Workload;

use super::builtin::Bench;
use super::quiet::Quiet;
use crate::Result;

/// The parent's own latency may drift this far within a series before it is taken again.
pub const DRIFT_LIMIT: f64 = 0.05;
/// Series taken at most.
const SERIES: usize = 3;

/// Measures parent and candidate, one run of each in turn, `repeats` times. A series in which the parent
/// drifted by more than [`DRIFT_LIMIT`] is taken again; when none is quieter the quietest is told, with its drift,
/// for whoever asked to judge: a limit on memory needs no quiet machine.
///
/// # Errors
/// What either model refuses. `progress` is called after each alternation with the number done and their total.
pub fn measure_pair(
    operations: &Arc<dyn Operations>,
    parent: &Arc<Model>,
    candidate: &Arc<Model>,
    workload: &Workload,
    repeats: usize,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<MeasuredPair> {
    let repeats = repeats.max(4);
    let quiet = Quiet::watch()?;
    let mut parent_bench = Bench::new(operations, parent, workload)?;
    let mut candidate_bench = Bench::new(operations, candidate, workload)?;
    parent_bench.warm_up()?;
    candidate_bench.warm_up()?;
    let mut series = 0;
    let mut quietest: Option<MeasuredPair> = None;
    loop {
        series += 1;
        for round in 0..repeats {
            // The order turns round each time, so that neither always follows the other.
            if round % 2 == 0 {
                parent_bench.run(&quiet)?;
                candidate_bench.run(&quiet)?;
            } else {
                candidate_bench.run(&quiet)?;
                parent_bench.run(&quiet)?;
            }
            progress(round + 1, repeats)?;
        }
        let parent_drift = parent_bench.drift();
        let pair = match quietest.take() {
            Some(quieter) if quieter.parent_drift <= parent_drift => quieter,
            _ => MeasuredPair {
                parent: parent_bench.measurement(),
                candidate: candidate_bench.measurement(),
                parent_drift,
            },
        };
        if pair.parent_drift <= DRIFT_LIMIT || series == SERIES {
            return Ok(pair);
        }
        quietest = Some(pair);
        tracing::warn!(
            series,
            parent_drift,
            "the parent's own latency drifted; the series is taken again"
        );
        parent_bench.reset();
        candidate_bench.reset();
    }
}
