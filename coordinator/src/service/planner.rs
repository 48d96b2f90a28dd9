//! The seam between the loop and the pipeline: what a job has found out goes in, what comes next comes out.

use std::path::Path;

use super::outcome;
use crate::scheduler::{Payload, StagePlan};

/// A stage that was planned before.
#[derive(Debug, Clone)]
pub struct StageSnapshot {
    /// Its name.
    pub name: String,
    /// What the planner decided with it.
    pub decision: Option<Payload>,
    /// Outputs of its tasks in order; none while one is unfinished.
    pub outputs: Option<Vec<Payload>>,
    /// Seconds from its first task's start to its last one's end, those between a failure of its job and the retry aside.
    pub seconds: f64,
    /// Seconds from the start of the job's first task to its end.
    pub ended_seconds: f64,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Planned {
    /// Stages that are ready; none when some that were planned before still run.
    Stages(Vec<StagePlan>),
    /// The job is complete: JSON of its outcome.
    Outcome(Payload),
}

/// Decides what comes next. Called off the loop; may take seconds.
pub trait Planner: Send + Sync + 'static {
    /// What comes next, from the spec as JSON and all stages planned so far.
    ///
    /// # Errors
    /// Why the job cannot go on, one line.
    fn plan(&self, spec: &str, stages: &[StageSnapshot]) -> Result<Planned, String>;

    /// Writes the report files of an outcome into a directory, over what an interrupted try left.
    ///
    /// # Errors
    /// Why not, one line.
    fn write_report(&self, outcome: &str, directory: &Path) -> Result<(), String>;

    /// Writes the reports into the place where the outcome has grown and moves the whole into place. May be
    /// asked again after an interruption.
    ///
    /// # Errors
    /// Why not, one line.
    fn finish(&self, outcome: &str, output: &Path) -> Result<(), String> {
        let write = |directory: &Path| self.write_report(outcome, directory);
        outcome::finish(&write, output)
    }

    /// Removes what a job had half-written.
    ///
    /// # Errors
    /// Why not, one line.
    fn remove_partial(&self, output: &Path) -> Result<(), String> {
        outcome::remove_partial(output)
    }
}
