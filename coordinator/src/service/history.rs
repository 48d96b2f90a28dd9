//! What happened to jobs lately, in the journal's words: a bounded ring a job, for people who ask.
//!
//! Never the only copy: the journal is. What was dropped is said to have been, and snapshots say how far each job was
//! told, so that who has seen all of it is not told that something is missing.

use std::collections::{BTreeMap, VecDeque};

use espalier_proto::v1;
use serde::{Deserialize, Serialize};

use crate::journal::Fold;
use crate::scheduler::{AttemptId, Event, JobId, State, TaskId, WorkerId};
use crate::told::{About, told};

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
    /// The newest entry of jobs of which none is kept.
    told: BTreeMap<JobId, u64>,
}

impl History {
    /// Keeps an entry of this frame: see [`entry`].
    pub fn push(&mut self, job: JobId, frame: u64, mut entry: Entry) {
        if !self.rings.contains_key(&job) && self.rings.len() == JOBS {
            // The one where nothing has happened for the longest.
            let stillest = self.rings.iter().min_by_key(|(_, ring)| ring.last);
            if let Some((stillest, last)) = stillest.map(|(job, ring)| (*job, ring.last)) {
                self.rings.remove(&stillest);
                self.told.insert(stillest, last);
            }
        }
        let told = &mut self.told;
        let ring = self.rings.entry(job).or_insert_with(|| {
            let last = told.remove(&job).unwrap_or_default();
            Ring {
                last,
                dropped: last,
                ..Ring::default()
            }
        });
        entry.number = number(frame, ring.last);
        if ring.last == 0 && entry.kind != FIRST {
            // What came before lies in a snapshot of a build that did not note how far the job was told.
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
        self.told.remove(&job);
    }

    /// The newest entry of each job that `state` knows.
    fn told(&self, state: &State) -> BTreeMap<JobId, u64> {
        let kept = self.rings.iter().map(|(job, ring)| (*job, ring.last));
        let told = self.told.iter().map(|(job, last)| (*job, *last));
        let known = |(job, _): &(JobId, u64)| state.job(*job).is_some();
        kept.chain(told).filter(known).collect()
    }
}

/// What a snapshot holds: the state, and beside it how far its jobs were told. Whoever needs only the state reads it
/// as one.
#[derive(Debug, Serialize)]
pub struct Snapshot {
    #[serde(flatten)]
    state: State,
    told: BTreeMap<JobId, u64>,
}

impl Snapshot {
    /// Of this moment, to be written later.
    pub fn of(state: &State, history: &History) -> Self {
        Self {
            state: state.bare(),
            told: history.told(state),
        }
    }
}

/// The part of a [`Snapshot`] beside the state; snapshots of older builds have none.
#[derive(Deserialize)]
struct Beside {
    #[serde(default)]
    told: BTreeMap<JobId, u64>,
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
        self.state.restore(json)?;
        let beside: Beside = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        *self.history = History {
            told: beside.told,
            ..History::default()
        };
        Ok(())
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

/// What to keep of an event that is about to be applied to `state`: who ran an attempt is known only until
/// it is.
pub fn entry(state: &State, event: &Event) -> Option<(JobId, Entry)> {
    let told = told(event)?;
    let (task, attempt) = (told.about.task(), told.about.attempt());
    let job = match told.about {
        About::Job(job) => job,
        About::Task(task) | About::Attempt(task, _) => state.task(task)?.job,
    };
    let ran = attempt.and_then(|attempt| state.attempt(attempt));
    let entry = Entry {
        number: 0,
        at: told.at,
        kind: told.kind,
        task,
        attempt,
        worker: told.worker.or_else(|| ran.map(|attempt| attempt.worker)),
        message: told.message.into(),
    };
    Some((job, entry))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn told(history: &mut History, job: u64, frame: u64, kind: &'static str) {
        let entry = Entry {
            number: 0,
            at: 0,
            kind,
            task: None,
            attempt: None,
            worker: None,
            message: "".into(),
        };
        history.push(JobId(job), frame, entry);
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
        assert!(
            history.since(JobId(2), 0).1,
            "its beginning lies in an older build's snapshot"
        );
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

        told(&mut history, 2, jobs + 3, "attempt_started");
        assert!(history.since(JobId(2), 0).1, "its beginning was dropped");
        assert!(
            !history.since(JobId(2), 2 << 20).1,
            "who knows what was dropped misses nothing"
        );
    }
}
