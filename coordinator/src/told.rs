//! What people are told of an event: the line that `job events` shows, whether its job is live or archived.

use std::borrow::Cow;

use crate::scheduler::{AttemptId, Event, JobId, TaskId, WorkerId};

/// One line. The job of what is about a task is that task's; the worker of what ends an attempt is where it ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told<'a> {
    /// The journal's word for it.
    pub kind: &'static str,
    /// Whom it is about.
    pub about: About,
    /// Where an attempt began.
    pub worker: Option<WorkerId>,
    /// Empty when the kind says all.
    pub message: Cow<'a, str>,
    /// Milliseconds since 1970; 0 in journals of builds that did not note it.
    pub at: i64,
}

/// Whom an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// A job.
    Job(JobId),
    /// All ranks of a task.
    Task(TaskId),
    /// One attempt at a task.
    Attempt(TaskId, AttemptId),
}

impl About {
    /// The task.
    pub fn task(self) -> Option<TaskId> {
        match self {
            Self::Job(_) => None,
            Self::Task(task) | Self::Attempt(task, _) => Some(task),
        }
    }

    /// The attempt.
    pub fn attempt(self) -> Option<AttemptId> {
        match self {
            Self::Job(_) | Self::Task(_) => None,
            Self::Attempt(_, attempt) => Some(attempt),
        }
    }
}

/// What is told of this event; none for what is not shown.
pub fn told(event: &Event) -> Option<Told<'_>> {
    of_job(event)
        .or_else(|| of_attempt(event))
        .or_else(|| of_gang(event))
}

fn of_job(event: &Event) -> Option<Told<'_>> {
    let (kind, job, message, at): (_, _, Cow<'_, str>, _) = match event {
        Event::JobSubmitted { job, parent, at, .. } => ("job_submitted", job, parent.into(), at),
        Event::JobPaused { job, reason, at } => ("job_paused", job, reason.into(), at),
        Event::JobResumed { job, at } => ("job_resumed", job, "".into(), at),
        Event::JobRetried { job, at, .. } => ("job_retried", job, "".into(), at),
        Event::StagesPlanned { job, stages, at, .. } if !stages.is_empty() => {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            ("stages_planned", job, names.join(", ").into(), at)
        }
        Event::OutcomeReached { job, at, .. } => ("outcome_reached", job, "".into(), at),
        Event::JobSucceeded { job, at } => ("job_succeeded", job, "".into(), at),
        Event::JobFailed { job, message, at } => ("job_failed", job, message.into(), at),
        Event::JobCancelled { job, reason, at } => ("job_cancelled", job, reason.into(), at),
        _ => return None,
    };
    Some(Told {
        kind,
        about: About::Job(*job),
        worker: None,
        message,
        at: *at,
    })
}

fn of_attempt(event: &Event) -> Option<Told<'_>> {
    let (kind, task, attempt, message, at) = match event {
        Event::AttemptStarted {
            attempt, task, at, ..
        } => ("attempt_started", task, attempt, "", at),
        Event::AttemptCompleted {
            attempt, task, at, ..
        } => ("attempt_completed", task, attempt, "", at),
        Event::AttemptFailed {
            attempt,
            task,
            failure,
            at,
            ..
        } => ("attempt_failed", task, attempt, failure.message.as_str(), at),
        Event::AttemptLost {
            attempt, task, at, ..
        } => ("attempt_lost", task, attempt, "the worker was lost", at),
        Event::AttemptHandedBack { attempt, task, at } => ("attempt_handed_back", task, attempt, "", at),
        Event::AttemptStopped { attempt, task, at } => ("attempt_stopped", task, attempt, "", at),
        Event::TaskWentOn {
            attempt, task, at, ..
        } => {
            let message = "from further than any before: what was held against the task is forgotten";
            ("task_went_on", task, attempt, message, at)
        }
        Event::RankLetGo { attempt, task, at } => {
            let message = "its gang does not wait for it: its worker's connection is closed";
            ("rank_let_go", task, attempt, message, at)
        }
        Event::RankCompleted {
            attempt, task, at, ..
        } => ("rank_completed", task, attempt, "", at),
        _ => return None,
    };
    Some(Told {
        kind,
        about: About::Attempt(*task, *attempt),
        worker: match event {
            Event::AttemptStarted { worker, .. } => Some(*worker),
            _ => None,
        },
        message: message.into(),
        at: *at,
    })
}

fn of_gang(event: &Event) -> Option<Told<'_>> {
    let (kind, task, message, at) = match event {
        Event::GangFormed {
            task,
            generation,
            ranks,
            at,
        } => {
            let message = format!("generation {generation} of {} ranks", ranks.len());
            ("gang_formed", task, message, at)
        }
        Event::GangReleased {
            task, generation, at, ..
        } => ("gang_released", task, format!("generation {generation}"), at),
        Event::GangLate {
            task, generation, at, ..
        } => {
            let message = format!("generation {generation} was not ready in time");
            ("gang_late", task, message, at)
        }
        Event::GangEnded {
            task, generation, at, ..
        } => ("gang_ended", task, format!("generation {generation}"), at),
        _ => return None,
    };
    Some(Told {
        kind,
        about: About::Task(*task),
        worker: None,
        message: message.into(),
        at: *at,
    })
}
