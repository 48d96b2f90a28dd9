//! A planner that sends workers on errands: stages one after another, each of so many errands.

use std::path::Path;

use espalier_coordinator::scheduler::{Needs, Payload, StagePlan, TaskPlan};
use espalier_coordinator::service::{Planned, Planner, StageSnapshot};
use serde::{Deserialize, Serialize};

use crate::errand::{Ending, Errand};

/// What a coordinator of a run plans, whatever is submitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Story {
    /// Stages of a job.
    pub stages: usize,
    /// Errands of a stage.
    pub errands: usize,
    /// The longest errand; the others are shorter, by their number.
    pub millis: u64,
    /// Whether they keep every processor busy.
    pub busy: bool,
    /// Whether each starts a process of its own.
    pub brings_process: bool,
    /// A job whose output's name ends in this has one errand more in its first stage, which always crashes.
    pub doomed: String,
}

impl Story {
    fn stage(&self, number: usize, job: &str) -> Result<StagePlan, String> {
        let mut tasks = Vec::new();
        for errand in 0..self.errands {
            let share = u64::try_from(errand % 7).unwrap_or(0) + 1;
            tasks.push(task(Errand {
                name: format!("{job}/{number}/{errand}"),
                millis: (self.millis * share / 7).max(1),
                busy: self.busy,
                brings_process: self.brings_process,
                ending: Ending::Well,
            })?);
        }
        if number == 0 && job.ends_with(&self.doomed) {
            tasks.push(task(Errand {
                name: format!("{job}/doomed"),
                millis: self.millis,
                busy: false,
                brings_process: false,
                ending: Ending::Crash,
            })?);
        }
        let name = format!("calibrate-{number}");
        Ok(StagePlan {
            name,
            kind: "calibrate".to_owned(),
            decision: None,
            note: String::new(),
            in_output: false,
            tasks,
        })
    }
}

fn task(errand: Errand) -> Result<TaskPlan, String> {
    let spec = errand.to_spec().map_err(|error| error.to_string())?;
    let payload = serde_json::to_string(&spec).map_err(|error| error.to_string())?;
    Ok(TaskPlan {
        name: errand.name,
        payload: Payload::from(payload),
        exclusive: false,
        needs: Needs::default(),
    })
}

#[derive(Deserialize)]
struct Submitted {
    output: String,
}

impl Planner for Story {
    fn plan(&self, spec: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        let submitted: Submitted = serde_json::from_str(spec).map_err(|error| error.to_string())?;
        if stages.iter().any(|stage| stage.outputs.is_none()) {
            return Ok(Planned::Stages(Vec::new()));
        }
        if stages.len() >= self.stages {
            // A checkpoint would lie here by now.
            let partial = format!("{}.partial", submitted.output);
            std::fs::create_dir_all(partial).map_err(|error| error.to_string())?;
            return Ok(Planned::Outcome("{}".into()));
        }
        let job = Path::new(&submitted.output).file_name().unwrap_or_default();
        Ok(Planned::Stages(vec![
            self.stage(stages.len(), &job.to_string_lossy())?,
        ]))
    }

    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String> {
        std::fs::write(directory.join("report.json"), outcome).map_err(|error| error.to_string())
    }
}
