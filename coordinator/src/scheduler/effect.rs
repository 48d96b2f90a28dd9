//! What has to be done in the world once an event is durable. Each may be done twice: after a restart
//! [`resume`] names them again.

use super::{AttemptId, Event, Gang, JobId, JobPhase, State, Task, TaskId, WorkerId};

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
    /// Tell a rank to begin: see [`State::release_of`].
    Release {
        /// The rank's attempt.
        attempt: AttemptId,
    },
    /// Ask the worker to hand back what it runs and to leave.
    Drain {
        /// Which worker.
        worker: WorkerId,
        /// One line.
        reason: String,
    },
    /// Ask the worker to replace its children.
    RestartWorker {
        /// Which worker.
        worker: WorkerId,
        /// One line.
        reason: String,
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
        Event::TermBegan { .. }
        | Event::WorkerJoined { .. }
        | Event::WorkerReturned { .. }
        | Event::WorkerForgotten { .. }
        | Event::WorkerCordoned { .. }
        | Event::WorkerUncordoned { .. }
        | Event::JobArchived { .. }
        | Event::TaskWentOn { .. }
        | Event::RankPrepared { .. } => Vec::new(),
        Event::WorkerLeaving { worker, drain } => drain
            .iter()
            .map(|reason| Effect::Drain {
                worker: *worker,
                reason: reason.clone(),
            })
            .collect(),
        Event::WorkerRestartAsked { worker, reason, .. } => vec![Effect::RestartWorker {
            worker: *worker,
            reason: reason.clone(),
        }],
        Event::WorkerLost { worker } | Event::WorkerLeft { worker } => {
            vec![Effect::Disconnect { worker: *worker }]
        }
        Event::JobPaused { job, .. } | Event::JobResumed { job, .. } => vec![Effect::Changed { job: *job }],
        Event::JobSubmitted { job, .. }
        | Event::JobRetried { job, .. }
        | Event::StagesPlanned { job, .. } => {
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
        Event::AttemptStarted { .. } | Event::GangFormed { .. } | Event::GangReleased { .. } => {
            to_workers(state, event)
        }
        Event::AttemptCompleted { task, .. }
        | Event::AttemptFailed { task, .. }
        | Event::AttemptLost { task, .. }
        | Event::AttemptHandedBack { task, .. }
        | Event::AttemptStopped { task, .. }
        | Event::RankCompleted { task, .. }
        | Event::RankLetGo { task, .. }
        | Event::GangLate { task, .. }
        | Event::GangEnded { task, .. } => after_an_end(state, *task),
    }
}

/// What a coordinator that starts on this state has to do. Assignments go out as workers come back, and so
/// do cancellations, releases and requests to leave.
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

fn to_workers(state: &State, event: &Event) -> Vec<Effect> {
    let task = match event {
        Event::AttemptStarted { task, .. }
        | Event::GangFormed { task, .. }
        | Event::GangReleased { task, .. } => *task,
        _ => return Vec::new(),
    };
    let mut effects: Vec<Effect> = match event {
        Event::AttemptStarted { attempt, .. } => vec![Effect::Assign { attempt: *attempt }],
        Event::GangFormed { ranks, .. } => {
            let assign = ranks.iter().map(|rank| Effect::Assign {
                attempt: rank.attempt,
            });
            assign.collect()
        }
        _ => {
            let gang = state.task(task).and_then(Task::gang);
            let live = gang.into_iter().flat_map(Gang::live);
            live.map(|attempt| Effect::Release { attempt }).collect()
        }
    };
    effects.extend(state.task(task).and_then(|task| changed(task.job)));
    effects
}

/// An attempt at the task is over: others of its gang may have to stop, and the job may have come on.
fn after_an_end(state: &State, task: TaskId) -> Vec<Effect> {
    let Some(task) = state.task(task) else {
        return Vec::new();
    };
    let job = task.job;
    let ending = task.gang().filter(|gang| gang.ending);
    let stop = ending.into_iter().flat_map(Gang::live);
    let mut effects: Vec<Effect> = stop.map(|attempt| Effect::StopAttempt { attempt }).collect();
    let job = [changed(job), plan(state, job), removal(state, job)];
    effects.extend(job.into_iter().flatten());
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
