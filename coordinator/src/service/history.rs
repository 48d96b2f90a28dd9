//! What happened to jobs lately, in the journal's words: a bounded ring a job, for people who ask.
//!
//! Never the only copy: the journal is. What was dropped is said to have been.

use std::collections::{BTreeMap, VecDeque};

use espalier_proto::v1;

use crate::journal::Fold;
use crate::scheduler::{AttemptId, Event, JobId, State, TaskId, WorkerId};

/// Entries kept of one job.
const ENTRIES: usize = 1024;
/// Jobs of which entries are kept.
const JOBS: usize = 64;

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Counts the entries of its job, from 1.
    pub number: u64,
    /// Milliseconds since 1970; 0 where the journal does not say.
    pub at: i64,
    /// The journal's word for it.
    pub kind: &'static str,
    /// The task it was about.
    pub task: Option<TaskId>,
    /// The attempt.
    pub attempt: Option<AttemptId>,
    /// Where the attempt ran.
    pub worker: Option<WorkerId>,
    /// One line; empty when the kind says all.
    pub message: Box<str>,
}

#[derive(Debug, Default)]
struct Ring {
    entries: VecDeque<Entry>,
    next: u64,
}

/// The rings.
#[derive(Debug, Default)]
pub struct History {
    rings: BTreeMap<JobId, Ring>,
}

impl History {
    /// Keeps an entry: see [`entry`].
    pub fn push(&mut self, job: JobId, mut entry: Entry) {
        let ring = self.rings.entry(job).or_default();
        ring.next = ring.next.saturating_add(1);
        entry.number = ring.next;
        if ring.entries.len() == ENTRIES {
            ring.entries.pop_front();
        }
        ring.entries.push_back(entry);
        if self.rings.len() > JOBS {
            self.rings.pop_first();
        }
    }

    /// Entries of a job with numbers above `after`, and whether some between were dropped.
    pub fn since(&self, job: JobId, after: u64) -> (Vec<Entry>, bool) {
        let Some(ring) = self.rings.get(&job) else {
            return (Vec::new(), true);
        };
        let newer: Vec<Entry> = ring
            .entries
            .iter()
            .filter(|entry| entry.number > after)
            .cloned()
            .collect();
        let first = newer
            .first()
            .map_or_else(|| ring.next.saturating_add(1), |entry| entry.number);
        (newer, first > after.saturating_add(1))
    }

    /// Entries about a task of this job, the oldest first.
    pub fn of_task(&self, job: JobId, task: TaskId) -> impl Iterator<Item = &Entry> {
        let entries = self.rings.get(&job).map(|ring| ring.entries.iter());
        entries
            .into_iter()
            .flatten()
            .filter(move |entry| entry.task == Some(task))
    }

    /// Drops what is kept of a job.
    pub fn forget(&mut self, job: JobId) {
        self.rings.remove(&job);
    }
}

/// A state and what led to it, as a journal is read back.
#[derive(Debug)]
pub struct Replayed<'a> {
    /// The state.
    pub state: &'a mut State,
    /// What happened since the snapshot that was read.
    pub history: &'a mut History,
}

impl Fold for Replayed<'_> {
    type Event = Event;

    fn restore(&mut self, json: &[u8]) -> Result<(), String> {
        self.state.restore(json)
    }

    fn event(&mut self, sequence: u64, event: Event) {
        if let Some((job, entry)) = entry(self.state, &event) {
            self.history.push(job, entry);
        }
        self.state.event(sequence, event);
    }
}

/// An entry as clients see it.
pub fn shown(state: &State, entry: &Entry, lagged: bool) -> v1::JobEvent {
    let worker = entry.worker.and_then(|worker| state.worker(worker));
    v1::JobEvent {
        unix_ms: entry.at,
        kind: entry.kind.to_owned(),
        task: entry.task.unwrap_or_default().0,
        attempt: entry.attempt.unwrap_or_default().0,
        worker: worker.map(|worker| worker.name.clone()).unwrap_or_default(),
        message: entry.message.to_string(),
        lagged,
    }
}

fn of_job(job: JobId, kind: &'static str, at: i64, message: &str) -> (JobId, Entry) {
    let entry = Entry {
        number: 0,
        at,
        kind,
        task: None,
        attempt: None,
        worker: None,
        message: message.into(),
    };
    (job, entry)
}

fn of_task(
    state: &State,
    task: TaskId,
    attempt: Option<AttemptId>,
    kind: &'static str,
    at: i64,
    message: &str,
) -> Option<(JobId, Entry)> {
    let (job, entry) = of_job(state.task(task)?.job, kind, at, message);
    let worker = attempt.and_then(|attempt| state.attempt(attempt));
    let entry = Entry {
        task: Some(task),
        attempt,
        worker: worker.map(|attempt| attempt.worker),
        ..entry
    };
    Some((job, entry))
}

/// What to keep of an event that is about to be applied to `state`: who ran an attempt is known only until
/// it is.
pub fn entry(state: &State, event: &Event) -> Option<(JobId, Entry)> {
    match event {
        Event::JobSubmitted { job, at, .. } => Some(of_job(*job, "job_submitted", *at, "")),
        Event::JobPaused { job, reason, at } => Some(of_job(*job, "job_paused", *at, reason)),
        Event::JobResumed { job, at } => Some(of_job(*job, "job_resumed", *at, "")),
        Event::JobRetried { job, at, .. } => Some(of_job(*job, "job_retried", *at, "")),
        Event::StagesPlanned { job, stages, .. } if !stages.is_empty() => {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
            Some(of_job(*job, "stages_planned", 0, &names.join(", ")))
        }
        Event::OutcomeReached { job, .. } => Some(of_job(*job, "outcome_reached", 0, "")),
        Event::JobSucceeded { job, at } => Some(of_job(*job, "job_succeeded", *at, "")),
        Event::JobFailed { job, message, at } => Some(of_job(*job, "job_failed", *at, message)),
        Event::JobCancelled { job, reason, at } => Some(of_job(*job, "job_cancelled", *at, reason)),
        Event::JobArchived { job, at } => Some(of_job(*job, "job_archived", *at, "")),
        _ => attempt_entry(state, event),
    }
}

fn attempt_entry(state: &State, event: &Event) -> Option<(JobId, Entry)> {
    let about = |task: &TaskId, attempt: &AttemptId, kind, at: i64, message: &str| {
        of_task(state, *task, Some(*attempt), kind, at, message)
    };
    match event {
        Event::AttemptStarted {
            attempt,
            task,
            worker,
            at,
            ..
        } => {
            let (job, entry) = about(task, attempt, "attempt_started", *at, "")?;
            let worker = Some(*worker);
            Some((job, Entry { worker, ..entry }))
        }
        Event::AttemptCompleted {
            attempt, task, at, ..
        } => about(task, attempt, "attempt_completed", *at, ""),
        Event::AttemptFailed {
            attempt,
            task,
            failure,
            at,
            ..
        } => about(task, attempt, "attempt_failed", *at, &failure.message),
        Event::AttemptLost {
            attempt, task, at, ..
        } => about(task, attempt, "attempt_lost", *at, "the worker was lost"),
        Event::AttemptHandedBack { attempt, task, at } => {
            about(task, attempt, "attempt_handed_back", *at, "")
        }
        Event::AttemptStopped { attempt, task } => about(task, attempt, "attempt_stopped", 0, ""),
        Event::RankCompleted {
            attempt, task, at, ..
        } => about(task, attempt, "rank_completed", *at, ""),
        Event::GangFormed {
            task,
            generation,
            ranks,
            at,
        } => {
            let message = format!("generation {generation} of {} ranks", ranks.len());
            of_task(state, *task, None, "gang_formed", *at, &message)
        }
        Event::GangReleased { task, generation, .. } => {
            let message = format!("generation {generation}");
            of_task(state, *task, None, "gang_released", 0, &message)
        }
        Event::GangLate {
            task, generation, at, ..
        } => {
            let message = format!("generation {generation} was not ready in time");
            of_task(state, *task, None, "gang_late", *at, &message)
        }
        Event::GangEnded {
            task, generation, at, ..
        } => {
            let message = format!("generation {generation}");
            of_task(state, *task, None, "gang_ended", *at, &message)
        }
        _ => None,
    }
}
