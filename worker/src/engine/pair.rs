//! Two models measured in alternation, so that a machine that speeds up or slows down does both to both.

use std::sync::Arc;

use espalier_model::Model;
use espalier_model::ops::Operations;
use espalier_proto::task::MeasuredPair;
use espalier_search::Workload;

use super::builtin::Bench;
use crate::{Error, Result};

/// The parent's own latency may drift this far within a series before it is taken again.
pub const DRIFT_LIMIT: f64 = 0.05;
/// Series taken before the machine is called too noisy.
const SERIES: usize = 3;

/// Measures parent and candidate, one run of each in turn, `repeats` times. A series in which the parent
/// drifted by more than [`DRIFT_LIMIT`] is thrown away and taken again.
///
/// # Errors
/// [`Error::TooNoisy`] when every series drifted; else what either model refuses. `progress` is called after
/// each alternation with the number done and their total.
pub fn measure_pair(
    operations: &Arc<dyn Operations>,
    parent: &Arc<Model>,
    candidate: &Arc<Model>,
    workload: &Workload,
    repeats: usize,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<MeasuredPair> {
    let repeats = repeats.max(4);
    let mut parent_bench = Bench::new(operations, parent, workload)?;
    let mut candidate_bench = Bench::new(operations, candidate, workload)?;
    parent_bench.warm_up()?;
    candidate_bench.warm_up()?;
    let mut worst = 0.0_f64;
    for series in 1..=SERIES {
        for round in 0..repeats {
            // The order turns round each time, so that neither always follows the other.
            if round % 2 == 0 {
                parent_bench.run()?;
                candidate_bench.run()?;
            } else {
                candidate_bench.run()?;
                parent_bench.run()?;
            }
            progress(round + 1, repeats)?;
        }
        let parent_drift = parent_bench.drift();
        if parent_drift <= DRIFT_LIMIT {
            return Ok(MeasuredPair {
                parent: parent_bench.measurement(),
                candidate: candidate_bench.measurement(),
                parent_drift,
            });
        }
        tracing::warn!(
            series,
            parent_drift,
            "the parent's own latency drifted; the series is taken again"
        );
        worst = worst.max(parent_drift);
        parent_bench.reset();
        candidate_bench.reset();
    }
    Err(Error::TooNoisy {
        reason: format!(
            "the parent's own latency drifted by {:.1}% within each of {SERIES} series, expected at most {:.0}%; \
             run again on a quieter machine",
            worst * 100.0,
            DRIFT_LIMIT * 100.0
        ),
    })
}
