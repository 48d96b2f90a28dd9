//! What the stages need again and again, read once from the spec and the results.

use espalier_arch::{Architecture, Storage};
use espalier_proto::task::{Ingested, MeasuredPair, ParentRef, Profiled, TaskOutput};
use espalier_search::statistics::{median, ratios, relative_error};
use espalier_search::{
    AbsoluteLimit, Bound, Corrections, CostModel, CostTable, Figures, Limit, MemoryModel, Metric, Score,
    Shortage, Space, Whole, Workload, parameters,
};

use super::{MOST_DISTURBED, MOST_DRIFT, PlanError, Results, Stage};
use crate::spec::{CostTableFile, CostTableSource, JobSpec, KvGroups, Strategy};

/// Standard errors by which a value has to be off a limit to be clearly on one side of it.
const DOUBT: f64 = 2.0;
/// The least share that a value has to be off, however little repeats scatter.
const LEAST_DOUBT: f64 = 0.01;
/// Fewer repeats say nothing of how they scatter.
const LEAST_REPEATS: usize = 4;

/// The spec and the results, with the ways to read them.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) spec: &'a JobSpec,
    pub(super) results: &'a Results,
}

impl<'a> Context<'a> {
    /// The only output of a stage, as `read` takes it out; none while the stage is unfinished.
    fn single<T>(
        &self,
        stage: Stage,
        read: impl Fn(&'a TaskOutput) -> Option<T>,
    ) -> Result<Option<T>, PlanError> {
        let Some(all) = self.each(stage, read)? else {
            return Ok(None);
        };
        let count = all.len();
        match (all.into_iter().next(), count) {
            (Some(output), 1) => Ok(Some(output)),
            _ => Err(PlanError::Mismatch {
                stage,
                reason: format!("{count} outputs came, expected 1"),
            }),
        }
    }

    /// Every output of a stage, as `read` takes it out; none while the stage is unfinished.
    pub(super) fn each<T>(
        &self,
        stage: Stage,
        read: impl Fn(&'a TaskOutput) -> Option<T>,
    ) -> Result<Option<Vec<T>>, PlanError> {
        let Some(outputs) = self.results.outputs(stage) else {
            return Ok(None);
        };
        let wrong = || PlanError::Mismatch {
            stage,
            reason: "a task gave another kind of output".to_owned(),
        };
        outputs
            .iter()
            .map(|output| read(output).ok_or_else(wrong))
            .collect::<Result<Vec<T>, _>>()
            .map(Some)
    }

    pub(super) fn ingested(&self) -> Result<Option<&'a Ingested>, PlanError> {
        self.single(Stage::Ingest, |output| match output {
            TaskOutput::Ingest(ingested) => Some(ingested.as_ref()),
            _ => None,
        })
    }

    /// The cost table that stands in place of a profile; none where this machine is profiled.
    pub(super) fn imported(&self) -> Result<Option<&'a CostTableFile>, PlanError> {
        match &self.spec.target.cost_table {
            None => Ok(None),
            Some(CostTableSource::Table(table)) => Ok(Some(table)),
            Some(CostTableSource::File(file)) => Err(PlanError::Invalid(format!(
                "target.cost_table: {file} has not been read, expected its content; submit the job again"
            ))),
        }
    }

    /// What blocks cost: imported, or as profiled once that has ended.
    pub(super) fn profiled(&self) -> Result<Option<&'a Profiled>, PlanError> {
        if let Some(table) = self.imported()? {
            return Ok(Some(&table.profile));
        }
        self.single(Stage::Profile, |output| match output {
            TaskOutput::Profile(profiled) => Some(profiled),
            _ => None,
        })
    }

    /// Whether any device had no room for the parent when it was calibrated.
    pub(super) fn is_streamed(&self) -> Result<bool, PlanError> {
        let each = self.each(Stage::Calibrate, |output| match output {
            TaskOutput::Calibrate { streamed, .. } => Some(*streamed),
            _ => None,
        })?;
        Ok(each.is_some_and(|each| each.contains(&true)))
    }

    /// The parent with its permutation, once it is sorted.
    pub(super) fn sorted(&self) -> Result<Option<ParentRef>, PlanError> {
        let permutation = self.single(Stage::Sort, |output| match output {
            TaskOutput::Sort { permutation } => Some(permutation.clone()),
            _ => None,
        })?;
        let (Some(permutation), Some(ingested)) = (permutation, self.ingested()?) else {
            return Ok(None);
        };
        Ok(Some(ParentRef {
            permutation: Some(permutation),
            ..ingested.parent.clone()
        }))
    }

    pub(super) fn scores(&self) -> Result<Option<Vec<Score>>, PlanError> {
        let each = self.each(Stage::Score, |output| match output {
            TaskOutput::Score { scores } => Some(scores.clone()),
            _ => None,
        })?;
        Ok(each.map(|scores| scores.concat()))
    }

    /// Layers in the order in which they go; where none may, none.
    pub(super) fn depth_order(&self) -> Result<Option<&'a [usize]>, PlanError> {
        if !self.spec.search.skip {
            return Ok(Some(&[]));
        }
        self.single(Stage::DepthOrder, |output| match output {
            TaskOutput::DepthOrder { layers, .. } => Some(layers.as_slice()),
            _ => None,
        })
    }

    pub(super) fn ranked(&self, round: u32) -> Result<Option<&'a [f64]>, PlanError> {
        self.single(Stage::Rank { round }, |output| match output {
            TaskOutput::Rank { divergences } => Some(divergences.as_slice()),
            _ => None,
        })
    }

    pub(super) fn measured(&self, stage: Stage) -> Result<Option<&'a MeasuredPair>, PlanError> {
        self.single(stage, |output| match output {
            TaskOutput::Measured(pair) => Some(pair.as_ref()),
            _ => None,
        })
    }

    pub(super) fn workload(&self) -> Workload {
        self.spec.target.workload
    }

    /// How the target stores weights and state.
    pub(super) fn memory(&self) -> MemoryModel {
        MemoryModel::unpaged(Storage::all(self.spec.target.precision().into()))
    }

    pub(super) fn space(&self) -> Space {
        let search = &self.spec.search;
        let kv_groups = match &search.kv_groups {
            KvGroups::Auto => None,
            KvGroups::Counts(counts) => Some(counts.clone()),
        };
        Space {
            kv_groups,
            mlp_grid: search.mlp_grid,
            skip: search.skip,
        }
    }

    /// The strategies asked for, each once.
    pub(super) fn strategies(&self) -> Vec<Strategy> {
        let all = [Strategy::Heterogeneous, Strategy::Uniform];
        all.into_iter()
            .filter(|strategy| self.spec.search.strategies.contains(strategy))
            .collect()
    }

    /// Prices candidates by the profile, as corrected.
    pub(super) fn cost_model(
        &self,
        parent: &Architecture,
        profiled: &'a Profiled,
        corrections: &Corrections,
    ) -> Result<CostModel, PlanError> {
        let table = CostTable {
            key: profiled.key.clone(),
            rows: profiled.rows.clone(),
            memory: profiled.memory,
        };
        let model = CostModel::new(
            &table,
            &self.workload(),
            parent,
            self.memory(),
            self.whole(profiled),
        )?;
        Ok(model.corrected(corrections, parent)?)
    }

    /// The parent as profiled, under the job's workload; none where the device had no room for it.
    pub(super) fn whole(&self, profiled: &'a Profiled) -> Option<Whole<'a>> {
        let measurement = profiled.parent.measured()?;
        Some(Whole {
            measurement,
            workload: &self.spec.target.workload,
        })
    }

    /// Whether this measurement cannot say whether the limits are met.
    pub(super) fn too_noisy(&self, pair: &MeasuredPair) -> bool {
        self.noise(pair).is_some()
    }

    /// Why this measurement cannot say whether the limits are met: what is timed needs a quiet machine, or a candidate that is
    /// clearly on one side; and memory one whose context could be told from what others hold. Parameters are counted: where
    /// nothing else is limited, any will do.
    pub(super) fn noise(&self, pair: &MeasuredPair) -> Option<String> {
        let mut limits = self.spec.target.limits.iter();
        if limits.any(|limit| is_hidden_by_noise(&limit, pair)) {
            return Some(format!(
                "one model's own time drifted by {:.1}% within a measurement, at most {:.0}% allowed where a limit may be \
                 met or not, and {:.0}% of the times were taken while others used the processors, at most {:.0}% allowed; run \
                 on a quieter machine",
                pair.drift * 100.0,
                MOST_DRIFT * 100.0,
                pair.disturbed * 100.0,
                MOST_DISTURBED * 100.0
            ));
        }
        let mut limits = self.spec.target.limits.iter();
        (pair.without_context && limits.any(|limit| limit.metric == Metric::Memory)).then(|| {
            "others held memory of the device, so that nobody knows what its context takes beside what was counted of the \
             model; run while nobody else has memory of it"
                .to_owned()
        })
    }

    /// The error where this is the last of so many measurements that cannot say it.
    pub(super) fn noisy(&self, stage: Stage, pair: &MeasuredPair, measurements: u32) -> PlanError {
        PlanError::TooNoisy {
            stage,
            measurements,
            reason: self.noise(pair).unwrap_or_default(),
        }
    }

    /// The limits against the parent as profiled.
    ///
    /// # Errors
    /// When one is a share of what the parent measures, and it does not fit the device.
    pub(super) fn limits(
        &self,
        parent: &Architecture,
        profiled: &'a Profiled,
    ) -> Result<Vec<AbsoluteLimit>, PlanError> {
        let figures = Figures::of_parent(&profiled.parent, block_parameters(parent));
        let limits = self.spec.target.limits.iter();
        limits
            .map(
                |limit| match (limit.resolve(&figures), profiled.parent.shortage()) {
                    (Err(_), Some(shortage)) => Err(self.no_share(&limit, parent, profiled, shortage)),
                    (resolved, _) => Ok(resolved?),
                },
            )
            .collect()
    }

    /// Refuses a share of what could not be measured, and says what is predicted in its place.
    fn no_share(
        &self,
        limit: &Limit,
        parent: &Architecture,
        profiled: &'a Profiled,
        shortage: Shortage,
    ) -> PlanError {
        let metric = limit.metric;
        let model = self.cost_model(parent, profiled, &Corrections::default());
        let predicted = model.and_then(|model| Ok(model.predict(parent)?));
        let predicted = predicted
            .ok()
            .and_then(|prediction| prediction.figures.get(metric))
            .map_or_else(String::new, |value| {
                format!(" ({} is predicted of the parent)", metric.display(value))
            });
        PlanError::Invalid(format!(
            "target.limits.{metric}: {} is a share of what the parent measures, and the parent does not fit this device \
             ({shortage}); give an absolute limit{predicted}",
            limit.to_text()
        ))
    }
}

/// Whether the machine was too busy for this measurement to say whether the limit is met.
pub(super) fn is_hidden_by_noise(limit: &Limit, pair: &MeasuredPair) -> bool {
    let drifted = || pair.drift > MOST_DRIFT && !is_clear(limit, pair);
    limit.metric.is_timed() && (pair.disturbed > MOST_DISTURBED || drifted())
}

/// Whether what was measured is farther from the limit than its scatter and the machine's change of pace explain. A share
/// of the parent beside it knows no pace: that went by for both. Of a candidate by itself nobody knows what is its own and
/// what the machine's.
fn is_clear(limit: &Limit, pair: &MeasuredPair) -> bool {
    let parent = pair
        .parent
        .measured()
        .and_then(|parent| parent.timed(limit.metric));
    let (Some(parent), Some(own)) = (parent, pair.candidate.timed(limit.metric)) else {
        return false;
    };
    if own.samples.len() < LEAST_REPEATS {
        return false;
    }
    // The medians of both may be of different paces, the turns are not; the verdict, which is by those, has to agree.
    let (of_limit, by_medians, doubt) = match limit.bound {
        Bound::ShareOfParent(share) => {
            let ratios = ratios(&own.samples, &parent.samples);
            let by_medians = own.median / (share * parent.median);
            (
                median(&ratios) / share,
                by_medians,
                DOUBT * relative_error(&ratios),
            )
        }
        Bound::Absolute(value) => {
            let of_limit = own.median / value;
            (
                of_limit,
                of_limit,
                (DOUBT * relative_error(&own.samples)).max(pair.drift),
            )
        }
    };
    let off = of_limit - 1.0;
    off.abs() > doubt.max(LEAST_DOUBT) && off * (by_medians - 1.0) > 0.0
}

/// Parameters of the blocks.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // whole and not negative, below 2^53
pub(super) fn block_parameters(architecture: &Architecture) -> u64 {
    let each = architecture
        .blocks
        .iter()
        .map(|block| parameters(&block.shape, architecture.hidden));
    each.sum::<f64>() as u64
}

/// Parameters in all: blocks, embedding, head and final norm.
pub(super) fn all_parameters(architecture: &Architecture) -> u64 {
    architecture
        .tensors()
        .iter()
        .map(espalier_arch::TensorSpec::elements)
        .sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use espalier_search::{Measurement, Summary, WholeParent};

    use super::*;

    fn measured(latencies: &[f64]) -> Measurement {
        let summary = Summary::of(latencies.to_vec());
        Measurement {
            latency_ms: summary.clone(),
            first_token_ms: summary.clone(),
            per_token_ms: summary.clone(),
            throughput_tokens_per_second: summary,
            memory_bytes: 0,
        }
    }

    fn is_clear_of(limit: &str, parent: &[f64], candidate: &[f64], drift: f64) -> bool {
        let pair = MeasuredPair {
            parent: WholeParent::Measured(measured(parent)),
            candidate: measured(candidate),
            drift,
            disturbed: 0.0,
            without_context: false,
            serving: None,
        };
        is_clear(&Limit::parse(Metric::Latency, limit).unwrap(), &pair)
    }

    #[test]
    fn a_share_is_clear_by_turns_whatever_the_pace() {
        let parent: Vec<f64> = [10.0, 13.0].repeat(4);
        let times = |factor: f64| parent.iter().map(|time| factor * time).collect::<Vec<_>>();
        for (factor, clear) in [(0.7, true), (0.8, true), (0.755, false), (0.75, false)] {
            assert_eq!(
                is_clear_of("75%", &parent, &times(factor), 0.3),
                clear,
                "{factor}"
            );
        }
        // A pace that changes within a turn puts the medians on sides that the turns do not know.
        let parent = [[10.0; 10].as_slice(), &[13.0; 11]].concat();
        let candidate = [[8.0; 11].as_slice(), &[10.4; 10]].concat();
        assert!(!is_clear_of("75%", &parent, &candidate, 0.3));
    }

    #[test]
    fn milliseconds_are_clear_where_they_are_farther_off_than_the_drift_and_the_scatter() {
        let steady = [10.0; 8];
        for (limit, drift, clear) in [
            ("12ms", 0.1, true),
            ("8ms", 0.1, true),
            ("12ms", 0.2, false),
            ("11ms", 0.1, false),
        ] {
            assert_eq!(
                is_clear_of(limit, &steady, &steady, drift),
                clear,
                "{limit} {drift}"
            );
        }
        let scattered = [8.0, 12.0].repeat(4);
        assert!(!is_clear_of("12ms", &steady, &scattered, 0.1));
        assert!(!is_clear_of("12ms", &steady, &[10.0; 3], 0.0), "too few");
    }
}
