//! The pipeline as a [`Planner`]: JSON in, its types through, JSON out.

use std::path::Path;

use espalier_proto::task::TaskOutput;
use serde::Serialize;

use super::{Planned, Planner, StageSnapshot};
use crate::pipeline::{self, Decision, Finished, Outcome, PlannedStage, Results, Stage, StageResult};
use crate::report;
use crate::scheduler::{Payload, StagePlan, TaskPlan};
use crate::spec::JobSpec;

/// The pipeline of this build.
#[derive(Debug, Clone, Copy, Default)]
pub struct PipelinePlanner;

impl Planner for PipelinePlanner {
    fn plan(&self, spec: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        let spec: JobSpec = read("the job's spec", spec)?;
        let mut results = Results::default();
        for snapshot in stages {
            let stage: Stage = snapshot.name.parse()?;
            results.stages.insert(stage, result(snapshot)?);
        }
        let plan = pipeline::plan(&spec, &results).map_err(|error| error.to_string())?;
        if let Some(outcome) = plan.finished {
            return Ok(Planned::Outcome(write(outcome.as_ref())?));
        }
        let stages = plan.stages.iter().map(stage_plan);
        Ok(Planned::Stages(stages.collect::<Result<_, String>>()?))
    }

    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String> {
        let outcome: Outcome = read("the job's outcome", outcome)?;
        report::write(&outcome, directory)
            .map_err(|error| format!("cannot write the report to `{}`: {error}", directory.display()))
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
    let seconds = snapshot.seconds;
    let finished = outputs.transpose()?.map(|outputs| Finished { outputs, seconds });
    Ok(StageResult { decision, finished })
}

fn stage_plan(planned: &PlannedStage) -> Result<StagePlan, String> {
    let tasks = planned.tasks.iter().map(|task| {
        Ok(TaskPlan {
            name: task.name.clone(),
            payload: write(&task.spec)?,
            exclusive: planned.stage.is_exclusive(),
        })
    });
    Ok(StagePlan {
        name: planned.stage.to_string(),
        kind: planned.stage.kind().to_owned(),
        decision: planned.decision.as_ref().map(write).transpose()?,
        note: planned.decision.as_ref().map(describe).unwrap_or_default(),
        tasks: tasks.collect::<Result<_, String>>()?,
    })
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
