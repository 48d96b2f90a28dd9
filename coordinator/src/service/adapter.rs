//! The pipeline as a [`Planner`]: JSON in, its types through, JSON out.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use espalier_arch::{Architecture, Precision};
use espalier_proto::task::{TaskOutput, TaskSpec};
use serde::Serialize;

use super::{Planned, Planner, StageSnapshot, outcome};
use crate::cost_tables::{CostTables, KeptTable};
use crate::pipeline::{
    self, Decision, Findings, Finished, Outcome, Plan, PlannedStage, ProfileOutcome, Results, Stage,
    StageResult,
};
use crate::report;
use crate::scheduler::{Needs, Payload, StagePlan, TaskPlan};
use crate::spec::{JobSpec, word};

/// The pipeline of this build.
#[derive(Debug, Clone, Default)]
pub struct PipelinePlanner {
    /// What earlier jobs measured, and where what is measured is kept; none keeps nothing.
    pub cost_tables: Option<CostTables>,
}

impl PipelinePlanner {
    /// Tells a profile what is known already.
    fn tell_known(&self, spec: &JobSpec, plan: &mut Plan) {
        let Some(tables) = self.cost_tables.as_ref().filter(|_| !spec.target.measure_anew) else {
            return;
        };
        let tasks = plan.stages.iter_mut().flat_map(|stage| stage.tasks.iter_mut());
        for task in tasks {
            if let TaskSpec::Profile(profile) = &mut task.spec {
                profile.kept = tables.known(
                    profile,
                    &word(&spec.target.precision()),
                    &word(&spec.target.engine),
                );
            }
        }
    }

    /// Keeps what a profile found out, the first time that it is told.
    fn keep(&self, spec: &JobSpec, results: &Results) {
        let Some(tables) = &self.cost_tables else { return };
        let (Some([TaskOutput::Profile(profiled)]), Some([TaskOutput::Ingest(ingested)])) =
            (results.outputs(Stage::Profile), results.outputs(Stage::Ingest))
        else {
            return;
        };
        let measured = KeptTable::of(profiled, spec.target.workload, &ingested.architecture);
        let taken = measured.map_or(Ok(false), |table| tables.take(&table));
        if let Err(error) = taken {
            tracing::warn!(%error, "what was measured cannot be kept for later jobs");
        }
    }
}

/// What a job that has not ended has found out.
///
/// # Errors
/// What is missing, one line.
pub(super) fn findings(spec: &str, stages: &[StageSnapshot]) -> Result<Findings, String> {
    let spec: JobSpec = read("the job's spec", spec)?;
    Findings::of_results(&spec, &results(stages)?)
}

fn results(stages: &[StageSnapshot]) -> Result<Results, String> {
    let mut results = Results::default();
    for snapshot in stages {
        let stage: Stage = snapshot.name.parse()?;
        results.stages.insert(stage, result(snapshot)?);
    }
    Ok(results)
}

impl Planner for PipelinePlanner {
    fn plan(&self, spec: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        let spec: JobSpec = read("the job's spec", spec)?;
        let results = results(stages)?;
        self.keep(&spec, &results);
        let mut plan = pipeline::plan(&spec, &results).map_err(|error| error.to_string())?;
        self.tell_known(&spec, &mut plan);
        let place = Place::of(&spec);
        if let Some(mut outcome) = plan.finished {
            outcome.settle(place.settled(&outcome.export.directory));
            return Ok(Planned::Outcome(write(outcome.as_ref())?));
        }
        if let Some(outcome) = plan.profiled {
            return Ok(Planned::Outcome(write(outcome.as_ref())?));
        }
        let weights = Weights::of(&spec, &results);
        let stages = plan.stages.iter().map(|stage| stage_plan(stage, &place, weights));
        Ok(Planned::Stages(stages.collect::<Result<_, String>>()?))
    }

    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String> {
        let cannot = |error| format!("cannot write the report to `{}`: {error}", directory.display());
        if let Some(profiled) = ProfileOutcome::read(outcome) {
            return report::write_profile(&profiled, directory).map_err(cannot);
        }
        let mut outcome: Outcome = read("the job's outcome", outcome)?;
        outcome::promote(&outcome.export, directory)?;
        outcome.export.attempt = 0;
        report::write(&outcome, directory).map_err(cannot)
    }

    fn finish(&self, outcome: &str, output: &Path) -> Result<(), String> {
        // Nothing was exported, so nothing has grown there yet.
        if ProfileOutcome::read(outcome).is_some() && !output.exists() {
            let partial = outcome::partial(output);
            std::fs::create_dir_all(&partial)
                .map_err(|error| format!("cannot make `{}`: {error}", partial.display()))?;
        }
        let write = |directory: &Path| self.write_report(outcome, directory);
        outcome::finish(&write, output)
    }
}

fn result(snapshot: &StageSnapshot) -> Result<StageResult, String> {
    let decision = snapshot.decision.as_ref();
    let decision = decision
        .map(|decision| read::<Decision>("a decision", decision.as_str()))
        .transpose()?;
    let outputs = snapshot.outputs.as_ref().map(|outputs| {
        let read_output = |output: &Payload| read::<TaskOutput>("an output", output.as_str());
        outputs
            .iter()
            .map(read_output)
            .collect::<Result<Vec<_>, String>>()
    });
    let finished = outputs.transpose()?.map(|outputs| Finished {
        outputs,
        seconds: snapshot.seconds,
        ended_seconds: Some(snapshot.ended_seconds),
    });
    Ok(StageResult { decision, finished })
}

/// The pipeline names the place where a checkpoint will be; until all is done it grows beside it.
struct Place {
    output: PathBuf,
    partial: PathBuf,
}

impl Place {
    fn of(spec: &JobSpec) -> Self {
        let output = PathBuf::from(spec.output.clone().unwrap_or_default());
        let partial = outcome::partial(&output);
        Self { output, partial }
    }

    /// A path below the output, while the job runs.
    fn growing(&self, path: &str) -> String {
        moved(path, &self.output, &self.partial)
    }

    /// A path below the partial output, once the job has ended.
    fn settled(&self, path: &str) -> String {
        moved(path, &self.partial, &self.output)
    }
}

fn moved(path: &str, from: &Path, to: &Path) -> String {
    match Path::new(path).strip_prefix(from) {
        Ok(below) => to.join(below).to_string_lossy().into_owned(),
        Err(_) => path.to_owned(),
    }
}

/// Weights as children hold them: where a model is timed in the target's precision, elsewhere in that of the device.
#[derive(Debug, Clone, Copy)]
struct Weights {
    /// Bytes of one that is timed.
    each: u64,
    /// Bytes of the parent's where it is timed; 0 before it is known.
    timed: u64,
    /// Bytes of the exported model's where it is timed; 0 before there is one.
    exported: u64,
    /// Bytes of the parent's elsewhere; 0 before it is known.
    parent: u64,
    /// Bytes of them that a child holds at the least when it streams the parent's blocks.
    streamed: u64,
}

impl Weights {
    fn of(spec: &JobSpec, results: &Results) -> Self {
        let each = Precision::from(spec.target.precision()).bytes();
        let held = Precision::from(spec.target.device.precision()).bytes();
        let ingest = results.stages.get(&Stage::Ingest);
        let outputs = ingest.and_then(|stage| stage.finished.as_ref());
        match outputs.and_then(|finished| finished.outputs.first()) {
            Some(TaskOutput::Ingest(ingested)) => Self {
                each,
                timed: weight_bytes(&ingested.architecture, each),
                exported: exported_parameters(results).saturating_mul(each),
                parent: weight_bytes(&ingested.architecture, held),
                streamed: streamed_bytes(&ingested.architecture, held),
            },
            _ => Self {
                each,
                timed: 0,
                exported: 0,
                parent: 0,
                streamed: 0,
            },
        }
    }
}

fn exported_parameters(results: &Results) -> u64 {
    match results.outputs(Stage::Export).and_then(<[TaskOutput]>::first) {
        Some(TaskOutput::Export(exported)) => exported.parameters,
        _ => 0,
    }
}

fn weight_bytes(architecture: &Architecture, each: u64) -> u64 {
    architecture.parameters().total.saturating_mul(each)
}

/// What stands around the blocks, and the largest of them twice: one runs while the next is on its way. No more than the
/// whole.
fn streamed_bytes(architecture: &Architecture, each: u64) -> u64 {
    let parameters = architecture.parameters();
    let largest = parameters.blocks.iter().max().copied().unwrap_or(0);
    let around = [parameters.embedding, parameters.final_norm, parameters.head];
    let held = around
        .into_iter()
        .fold(largest.saturating_mul(2), u64::saturating_add);
    held.min(parameters.total).saturating_mul(each)
}

/// What a device has to have for a task: the least that its child holds, whatever it computes.
fn needs(spec: &TaskSpec, weights: Weights) -> Needs {
    let mut ample_bytes = 0;
    let memory_bytes = match spec {
        // They have no weights on a device.
        TaskSpec::Ingest(_) | TaskSpec::Export(_) => 0,
        // It reads a tensor at a time, in a child that goes on with the parent.
        TaskSpec::Sort(_) => {
            ample_bytes = weights.parent;
            0
        }
        // Where the parent has no room, blocks and candidates are measured without it.
        TaskSpec::Profile(_) => {
            ample_bytes = weights.timed;
            0
        }
        TaskSpec::Check(check) => {
            ample_bytes = weight_bytes(&check.parent, weights.each);
            weight_bytes(&check.architecture, weights.each)
        }
        TaskSpec::Verify(_) => {
            ample_bytes = weights.timed;
            weights.exported
        }
        TaskSpec::Calibrate(_)
        | TaskSpec::Score(_)
        | TaskSpec::DepthOrder(_)
        | TaskSpec::Rank(_)
        | TaskSpec::Evaluate(_) => {
            ample_bytes = weights.parent;
            weights.streamed
        }
        // A rank holds its stage alone; a gang of fewer ranks has as many stages.
        TaskSpec::Recover(recover) => weights
            .parent
            .div_ceil(u64::from(recover.recipe.pipeline_stages).max(1)),
    };
    let (ranks, rank_multiple) = match spec {
        TaskSpec::Recover(recover) => (recover.recipe.ranks, recover.recipe.pipeline_stages),
        _ => (1, 1),
    };
    Needs {
        memory_bytes,
        ample_bytes,
        ranks,
        rank_multiple,
        engine: Some(spec.engine())
            .filter(|engine| !engine.is_builtin())
            .map(|engine| engine.name().into()),
        ..Needs::default()
    }
}

fn stage_plan(planned: &PlannedStage, place: &Place, weights: Weights) -> Result<StagePlan, String> {
    let tasks = planned.tasks.iter().map(|task| {
        let mut spec = task.spec.clone();
        match &mut spec {
            TaskSpec::Export(export) => export.directory = place.growing(&export.directory),
            TaskSpec::Verify(verify) => verify.directory = place.growing(&verify.directory),
            _ => {}
        }
        Ok(TaskPlan {
            name: task.name.clone(),
            payload: write(&spec)?,
            exclusive: planned.stage.is_exclusive(),
            needs: needs(&spec, weights),
        })
    });
    Ok(StagePlan {
        name: planned.stage.to_string(),
        kind: planned.stage.kind().to_owned(),
        decision: planned.decision.as_ref().map(write).transpose()?,
        note: note(planned),
        in_output: planned.tasks.iter().any(|task| writes_output(&task.spec)),
        tasks: tasks.collect::<Result<_, String>>()?,
    })
}

/// Whether the task's product grows where the outcome will be, and so goes with a failed job.
fn writes_output(spec: &TaskSpec) -> bool {
    matches!(spec, TaskSpec::Export(_))
}

fn note(planned: &PlannedStage) -> String {
    let decided = planned.decision.as_ref().map(describe).unwrap_or_default();
    match &planned.reason {
        Some(reason) => format!("{decided}; {reason}"),
        None => decided,
    }
}

fn describe(decision: &Decision) -> String {
    match decision {
        Decision::Grid(points) => format!("{} candidates of the uniform grid are ranked", points.len()),
        Decision::Chosen(chosen) => {
            let gap = chosen
                .solved
                .map(|proof| format!(", proven gap {:.1e}", proof.gap));
            format!(
                "the {} choice is measured{}",
                chosen.strategy,
                gap.unwrap_or_default()
            )
        }
        Decision::Winner(winner) => {
            let weights = if winner.recovered {
                "recovered"
            } else {
                "untrained"
            };
            format!("the {} model is exported with {weights} weights", winner.strategy)
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(what: &str, text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("{what} cannot be read: {error}"))
}

fn write<T: Serialize + ?Sized>(value: &T) -> Result<Payload, String> {
    let text = serde_json::to_string(value);
    text.map(Payload::from)
        .map_err(|error| format!("cannot be written as JSON: {error}"))
}
