//! What is counted: plain atomics that the loop adds to, written as OpenMetrics when somebody asks.
//!
//! Nothing here locks or allocates on the way of a task. Labels are the bounded words of [`labels`]; no job,
//! task, attempt or worker is ever one.

mod durations;
mod encode;
mod labels;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::registry::Registry;

use crate::scheduler::{Attempt, AttemptId, Event, State, TaskId};
use crate::shipping::Progress;
use durations::Durations;
pub use labels::Expiry;
use labels::{End, FAILURES, KINDS, STATES, failure_index, kind_index};

/// The counters. Clones are the same.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Counters>);

/// How things stand, as the loop sees them now and then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standings {
    /// Tasks that wait for a device.
    pub queue_depth: usize,
    /// Attempts that hold a device.
    pub running: usize,
    /// Workers that are connected and given work.
    pub workers_ready: usize,
    /// Workers that are not connected and not given up.
    pub workers_away: usize,
    /// Workers that are given nothing more.
    pub workers_cordoned: usize,
    /// Workers on their way out.
    pub workers_leaving: usize,
    /// Workers that were given up.
    pub workers_lost: usize,
    /// Workers that left.
    pub workers_left: usize,
    /// Clients that follow a job.
    pub watchers: usize,
}

#[derive(Debug)]
struct Counters {
    tasks: [[AtomicU64; STATES]; KINDS],
    failed: [[AtomicU64; FAILURES]; KINDS],
    durations: [Durations; KINDS],
    fsync: Durations,
    expirations: [AtomicU64; Expiry::ALL.len()],
    stale: AtomicU64,
    queue_depth: AtomicU64,
    running: AtomicU64,
    workers: [AtomicU64; labels::WORKER_STATES.len()],
    watchers: AtomicU64,
    journal: OnceLock<PathBuf>,
    /// Milliseconds since 1970; 0 for none.
    snapshot_at: AtomicU64,
    /// How far shipping has come; none when nothing is shipped.
    shipping: OnceLock<Progress>,
    disk_full: AtomicU64,
    collected_artifacts: AtomicU64,
    collected_bytes: AtomicU64,
    collections_failed: AtomicU64,
    archives_unreadable: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self(Arc::new(Counters {
            tasks: std::array::from_fn(|_| std::array::from_fn(|_| zero())),
            failed: std::array::from_fn(|_| std::array::from_fn(|_| zero())),
            durations: std::array::from_fn(|_| Durations::of_tasks()),
            fsync: Durations::of_disks(),
            expirations: std::array::from_fn(|_| zero()),
            stale: zero(),
            queue_depth: zero(),
            running: zero(),
            workers: std::array::from_fn(|_| zero()),
            watchers: zero(),
            journal: OnceLock::new(),
            snapshot_at: zero(),
            shipping: OnceLock::new(),
            disk_full: zero(),
            collected_artifacts: zero(),
            collected_bytes: zero(),
            collections_failed: zero(),
            archives_unreadable: zero(),
        }))
    }
}

impl Metrics {
    /// Counts an event that was decided, before it is applied to this state. Events replayed from the journal
    /// are not counted; those of a turn that a full disk takes back are, and again when they come again.
    /// `expiry` is why a lease ends, should one.
    pub fn observe(&self, state: &State, event: &Event, expiry: Expiry) {
        match event {
            Event::AttemptStarted { task, .. } => self.started(state, *task, 1),
            Event::GangFormed { task, ranks, .. } => self.started(state, *task, ranks.len()),
            Event::AttemptCompleted { attempt, at, .. } | Event::RankCompleted { attempt, at, .. } => {
                let Some((attempt, kind)) = ended(state, *attempt) else {
                    return;
                };
                self.count(kind, End::Completed);
                let took = u64::try_from(at.saturating_sub(attempt.started_at)).unwrap_or(0);
                if let Some(durations) = self.0.durations.get(kind_index(kind)) {
                    durations.observe(Duration::from_millis(took));
                }
            }
            Event::AttemptFailed { attempt, failure, .. } => {
                let Some((_, kind)) = ended(state, *attempt) else {
                    return;
                };
                self.count(kind, End::Failed);
                let counter = self.0.failed.get(kind_index(kind));
                add(counter.and_then(|counters| counters.get(failure_index(failure.kind))));
            }
            Event::AttemptLost { attempt, .. } => {
                let Some((_, kind)) = ended(state, *attempt) else {
                    return;
                };
                self.count(kind, End::Lost);
                self.lease_expired(expiry);
            }
            Event::AttemptStopped { attempt, .. } | Event::AttemptHandedBack { attempt, .. } => {
                if let Some((_, kind)) = ended(state, *attempt) {
                    self.count(kind, End::Stopped);
                }
            }
            _ => {}
        }
    }

    fn started(&self, state: &State, task: TaskId, ranks: usize) {
        let kind = state.task(task).map_or("", |task| task.kind.as_str());
        for _ in 0..ranks {
            self.count(kind, End::Started);
        }
    }

    fn count(&self, kind: &str, end: End) {
        let counters = self.0.tasks.get(kind_index(kind));
        add(counters.and_then(|counters| counters.get(end.index())));
    }

    /// A lease ended without its worker's word.
    pub fn lease_expired(&self, reason: Expiry) {
        add(self.0.expirations.get(reason.index()));
    }

    /// Something that was said of a lease no longer held.
    pub fn stale_message(&self) {
        add(Some(&self.0.stale));
    }

    /// The journal has made a batch durable.
    pub fn journal_synced(&self, took: Duration) {
        self.0.fsync.observe(took);
    }

    /// How things stand.
    pub fn stand(&self, standings: &Standings) {
        let set = |gauge: Option<&AtomicU64>, value: usize| {
            if let Some(gauge) = gauge {
                gauge.store(u64::try_from(value).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        };
        set(Some(&self.0.queue_depth), standings.queue_depth);
        set(Some(&self.0.running), standings.running);
        set(Some(&self.0.watchers), standings.watchers);
        let workers = [
            standings.workers_ready,
            standings.workers_away,
            standings.workers_cordoned,
            standings.workers_leaving,
            standings.workers_lost,
            standings.workers_left,
        ];
        for (index, value) in workers.into_iter().enumerate() {
            set(self.0.workers.get(index), value);
        }
    }

    /// The journal lies in this directory: how much that takes is looked up whenever somebody asks.
    pub fn journal_lies_in(&self, directory: PathBuf) {
        // Said once, at the start.
        let _ = self.0.journal.set(directory);
    }

    /// A snapshot was written at this moment, milliseconds since 1970.
    pub fn snapshot_written(&self, unix_ms: i64) {
        let at = u64::try_from(unix_ms).unwrap_or(0);
        self.0.snapshot_at.store(at, Ordering::Relaxed);
    }

    /// The journal is shipped, and this says how far.
    pub fn ships(&self, progress: Progress) {
        // Said once, at the start.
        let _ = self.0.shipping.set(progress);
    }

    /// Whether the journal's disk is full.
    pub fn set_disk_full(&self, full: bool) {
        self.0.disk_full.store(u64::from(full), Ordering::Relaxed);
    }

    /// An artifact of this size that nobody needed was removed.
    pub fn artifact_collected(&self, bytes: u64) {
        add(Some(&self.0.collected_artifacts));
        self.0.collected_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Garbage could not be collected, or not to the end.
    pub fn collection_failed(&self) {
        add(Some(&self.0.collections_failed));
    }

    /// So many archives of ended jobs are damaged or missing, as seen when garbage was last collected.
    pub fn archives_unreadable(&self, archives: usize) {
        let archives = u64::try_from(archives).unwrap_or(u64::MAX);
        self.0.archives_unreadable.store(archives, Ordering::Relaxed);
    }

    /// See [`Metrics::archives_unreadable`].
    pub fn unreadable_archives(&self) -> u64 {
        self.0.archives_unreadable.load(Ordering::Relaxed)
    }

    /// How far the artifact store is behind the journal; none when nothing is shipped.
    pub fn ship_lag(&self) -> Option<Duration> {
        self.0.shipping.get().map(Progress::lag)
    }

    /// All of it as OpenMetrics text.
    pub fn text(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(encode::Report(Arc::clone(&self.0))));
        let mut text = String::new();
        // Writing to a string cannot fail, and half a page is better than none.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }
}

/// An attempt that is about to end, and the kind of its task.
fn ended(state: &State, attempt: AttemptId) -> Option<(&Attempt, &str)> {
    let attempt = state.attempt(attempt)?;
    let kind = state.task(attempt.task).map_or("", |task| task.kind.as_str());
    Some((attempt, kind))
}

fn add(counter: Option<&AtomicU64>) {
    if let Some(counter) = counter {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
