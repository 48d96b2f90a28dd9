//! The pipeline of a job: which stages are ready, what their tasks are asked, and what is decided between them.
//!
//! [`plan`] is a pure function of the spec and of what has been found out: no clock, no I/O. It may take a
//! second where it solves, so it is called off the scheduler's loop. Decisions come back with the stage that
//! they made ready and are handed in again, so that a restart never decides anew.
//!
//! ```text
//! ingest → {profile, calibrate}      calibrate → sort → score          {profile, sort} → depth_order
//! {profile, score} → check-heterogeneous-n       {profile, depth_order} → rank-n → check-uniform-n
//! every strategy checked → recover → evaluate → export → verify-n → outcome
//! ```
//!
//! An imported cost table stands in place of `profile`. What is chosen, trained and exported then depends on no
//! clock: checks and verifications are taken once, and what they miss is reported, not corrected.
//!
//! The uniform baseline is there for comparison: where only it cannot meet the limits, the job goes on without.

mod compare;
mod context;
mod error;
mod findings;
mod finish;
mod fit;
mod import;
pub mod outcome;
mod servable;
mod stage;
mod tasks;
#[cfg(test)]
mod tests;

pub use error::PlanError;
pub use findings::Findings;
pub use outcome::{Outcome, ProfileOutcome};
pub use stage::{
    Chosen, Decision, Finished, PlannedStage, PlannedTask, Results, SolverProof, Stage, StageResult, Winner,
};

use crate::spec::JobSpec;

/// Where a limit is timed, and the candidate is not clearly on one side of it, a measurement counts only when the time of one
/// model, the parent where it has room, drifted less than this within it.
pub const MOST_DRIFT: f64 = 0.05;
/// The share of times taken while others used the processors above which a measurement does not count.
pub const MOST_DISTURBED: f64 = 0.5;
/// A prediction farther than this from the measurement corrects the cost table.
pub const MOST_MISPREDICTION: f64 = 0.10;
/// The share of a limit that doubts of a prediction may take before a choice inside is made anew, by what its check told: so
/// much quality is worth a second check.
pub const MOST_DOUBT: f64 = espalier_search::heterogeneous::MOST_MARGIN;
/// How often a strategy may choose anew after a miss.
pub const MOST_CORRECTIONS: usize = 3;
/// How often one measurement is taken before it counts as too noisy.
pub const MOST_NOISY: u32 = 3;

/// What is ready, or what came of it all. With neither, stages that were planned before are still running.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Stages that may start now and that no earlier plan named.
    pub stages: Vec<PlannedStage>,
    /// The outcome, once everything has ended.
    pub finished: Option<Box<Outcome>>,
    /// What the target was measured to cost, where the job is asked for nothing else.
    pub profiled: Option<Box<ProfileOutcome>>,
}

/// Which stages are ready, given everything found out so far; the outcome once nothing is left to do.
///
/// # Errors
/// When the limits cannot be met, measurements stay too noisy, or results do not fit the spec. No retry of a
/// task mends these: the job has failed, and the message says what would be right.
pub fn plan(spec: &JobSpec, results: &Results) -> Result<Plan, PlanError> {
    tasks::plan(spec, results)
}
