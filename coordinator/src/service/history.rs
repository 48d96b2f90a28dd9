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
/// What a job's story begins with.
const FIRST: &str = "job_submitted";

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its place among the entries of its job: see [`number`].
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

/// The number of an entry of this frame of the journal, after one of the number `last`. An archive gives its rows the
/// same numbers, so that who asks on finds where it was, whether the job is archived by then or not.
pub fn number(frame: u64, last: u64) -> u64 {
    /// Entries that a frame has room for.
    const OF_A_FRAME: u32 = 20;
    frame
        .checked_shl(OF_A_FRAME)
        .unwrap_or(u64::MAX)
        .max(last.saturating_add(1))
}

#[derive(Debug, Default)]
struct Ring {
    entries: VecDeque<Entry>,
    /// The newest entry.
    last: u64,
    /// The newest entry that is no longer kept; 0 while all are.
    dropped: u64,
}

/// The rings.
#[derive(Debug, Default)]
pub struct History {
    rings: BTreeMap<JobId, Ring>,
}

impl History {
    /// Keeps an entry of this frame: see [`entry`].
    pub fn push(&mut self, job: JobId, frame: u64, mut entry: Entry) {
        if !self.rings.contains_key(&job) && self.rings.len() == JOBS {
            // The one where nothing has happened for the longest.
            let stillest = self.rings.iter().min_by_key(|(_, ring)| ring.last);
            if let Some(stillest) = stillest.map(|(job, _)| *job) {
                self.rings.remove(&stillest);
            }
        }
        let ring = self.rings.entry(job).or_default();
        entry.number = number(frame, ring.last);
        if ring.last == 0 && entry.kind != FIRST {
            // What came before lies in a snapshot, or in a ring that was dropped.
            ring.dropped = entry.number.saturating_sub(1);
        }
        ring.last = entry.number;
        if ring.entries.len() == ENTRIES {
            ring.dropped = ring.entries.pop_front().map_or(0, |oldest| oldest.number);
        }
        ring.entries.push_back(entry);
    }

    /// Entries of a job with numbers above `after`, and whether some between were dropped.
    pub fn since(&self, job: JobId, after: u64) -> (Vec<Entry>, bool) {
        let Some(ring) = self.rings.get(&job) else {
            return (Vec::new(), true);
        };
        let newer = ring.entries.iter().filter(|entry| entry.number > after);
        (newer.cloned().collect(), ring.dropped > after)
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
            self.history.push(job, sequence, entry);
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
        ..v1::JobEvent::default()
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
        Event::JobSubmitted { job, at, .. } => Some(of_job(*job, FIRST, *at, "")),
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
        _ => gang_entry(state, event),
    }
}

fn gang_entry(state: &State, event: &Event) -> Option<(JobId, Entry)> {
    match event {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn told(history: &mut History, job: u64, frame: u64, kind: &'static str) {
        let (job, entry) = of_job(JobId(job), kind, 0, "");
        history.push(job, frame, entry);
    }

    #[test]
    fn entries_are_numbered_by_their_frames_and_what_came_before_a_snapshot_is_said_to_be_missing() {
        let mut history = History::default();
        told(&mut history, 1, 7, "job_submitted");
        told(&mut history, 1, 9, "stages_planned");
        told(&mut history, 1, 9, "attempt_started");
        let (entries, lagged) = history.since(JobId(1), 0);
        let numbers: Vec<u64> = entries.iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, [7 << 20, 9 << 20, (9 << 20) + 1]);
        assert!(!lagged);
        assert_eq!(history.since(JobId(1), 9 << 20).0.len(), 1);

        told(&mut history, 2, 11, "attempt_started");
        assert!(history.since(JobId(2), 0).1, "its beginning lies in a snapshot");
        assert!(!history.since(JobId(2), 11 << 20).1);
    }

    #[test]
    fn the_job_where_nothing_happens_is_forgotten_first_and_not_the_oldest() {
        let mut history = History::default();
        let jobs = u64::try_from(JOBS).unwrap();
        for job in 1..=jobs {
            told(&mut history, job, job, "job_submitted");
        }
        told(&mut history, 1, jobs + 1, "attempt_started");
        told(&mut history, jobs + 1, jobs + 2, "job_submitted");
        assert_eq!(history.since(JobId(1), 0).0.len(), 2);
        assert!(history.since(JobId(2), 0).0.is_empty());
    }
}
