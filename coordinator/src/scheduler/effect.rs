//! What has to be done in the world once an event is durable. Each may be done twice: after a restart
//! [`resume`] names them again.

use super::{AttemptId, Event, JobId, JobPhase, State, TaskId, WorkerId};

/// Something to do outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Send the worker its assignment.
    Assign {
        /// The attempt, as the state has it.
        attempt: AttemptId,
    },
    /// Tell the worker to stop an attempt.
    StopAttempt {
        /// The attempt, as the state has it.
        attempt: AttemptId,
    },
    /// Ask the planner what comes next.
    Plan {
        /// For which job.
        job: JobId,
    },
    /// Write reports and move the outcome into place.
    WriteOutcome {
        /// Of which job.
        job: JobId,
    },
    /// Remove what the job had half-written.
    RemovePartial {
        /// Of which job.
        job: JobId,
    },
    /// Close the worker's stream.
    Disconnect {
        /// Which worker.
        worker: WorkerId,
    },
    /// The job looks different to those who watch it.
    Changed {
        /// Which job.
        job: JobId,
    },
}

/// What an event, already applied, leads to.
pub fn effects(state: &State, event: &Event) -> Vec<Effect> {
    match event {
        Event::TermBegan { .. } | Event::WorkerJoined { .. } | Event::WorkerReturned { .. } => Vec::new(),
        Event::WorkerLeaving { .. } => Vec::new(),
        Event::WorkerLost { worker } => vec![Effect::Disconnect { worker: *worker }],
        Event::JobSubmitted { job, .. } | Event::StagesPlanned { job, .. } => {
            [changed(*job), plan(state, *job)].into_iter().flatten().collect()
        }
        Event::OutcomeReached { job, .. } => {
            vec![Effect::Changed { job: *job }, Effect::WriteOutcome { job: *job }]
        }
        Event::JobSucceeded { job, .. } | Event::PartialRemoved { job } => {
            vec![Effect::Changed { job: *job }]
        }
        Event::JobFailed { job, .. } | Event::JobCancelled { job, .. } => {
            let mut effects = vec![Effect::Changed { job: *job }];
            effects.extend(state.attempts_of(*job).map(|attempt| Effect::StopAttempt {
                attempt: attempt.lease.attempt,
            }));
            effects.extend(removal(state, *job));
            effects
        }
        Event::AttemptStarted { attempt, task, .. } => {
            let job = state.task(*task).and_then(|task| changed(task.job));
            [Some(Effect::Assign { attempt: *attempt }), job]
                .into_iter()
                .flatten()
                .collect()
        }
        Event::AttemptCompleted { attempt, .. }
        | Event::AttemptFailed { attempt, .. }
        | Event::AttemptLost { attempt, .. }
        | Event::AttemptStopped { attempt } => {
            let task: Option<TaskId> = state.task_of(*attempt);
            let Some(job) = task.and_then(|task| state.task(task)).map(|task| task.job) else {
                return Vec::new();
            };
            let effects = [changed(job), plan(state, job), removal(state, job)];
            effects.into_iter().flatten().collect()
        }
    }
}

/// What a coordinator that starts on this state has to do. Assignments go out as workers come back.
pub fn resume(state: &State) -> Vec<Effect> {
    let mut effects = Vec::new();
    for job in state.jobs() {
        effects.extend(plan(state, job.id));
        effects.extend(removal(state, job.id));
        if matches!(job.phase, JobPhase::Finishing { .. }) {
            effects.push(Effect::WriteOutcome { job: job.id });
        }
    }
    effects
}

fn changed(job: JobId) -> Option<Effect> {
    Some(Effect::Changed { job })
}

fn plan(state: &State, job: JobId) -> Option<Effect> {
    state
        .job(job)
        .filter(|job| job.wants_plan())
        .map(|job| Effect::Plan { job: job.id })
}

fn removal(state: &State, job: JobId) -> Option<Effect> {
    let wanted = state.job(job)?.wants_removal() && state.attempts_of(job).next().is_none();
    wanted.then_some(Effect::RemovePartial { job })
}
