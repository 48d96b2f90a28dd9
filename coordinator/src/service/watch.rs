//! Those who follow jobs. A slow client costs nothing: it gets the newest snapshot, and is told that some
//! were left out.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use espalier_proto::v1;
use tokio::sync::watch;

use crate::scheduler::{JobId, Term};

/// Clients that may follow jobs at a time.
pub const FOLLOWERS: usize = 256;
/// Clients that may follow one job at a time.
pub const FOLLOWERS_OF_ONE: usize = 64;

/// A client's end.
#[derive(Debug)]
pub struct Following {
    /// Snapshots without the spec: it never changes, and may be as large as all else of many snapshots.
    pub snapshots: watch::Receiver<Arc<v1::Job>>,
    /// The spec, for the first of them.
    pub spec_json: String,
}

/// Jobs that changed, their revisions, and who wants to know.
#[derive(Debug, Default)]
pub struct Watchers {
    first: u64,
    revisions: HashMap<JobId, u64>,
    changed: BTreeSet<JobId>,
    senders: HashMap<JobId, watch::Sender<Arc<v1::Job>>>,
}

impl Watchers {
    /// Revisions count from above those of every earlier term, so that a client that comes back after a
    /// restart is not kept waiting.
    pub fn new(term: Term) -> Self {
        let first = (term.0 << 32).saturating_add(1);
        let (revisions, changed, senders) = Default::default();
        Self {
            first,
            revisions,
            changed,
            senders,
        }
    }

    /// The job looks different now.
    pub fn changed(&mut self, job: JobId) {
        self.changed.insert(job);
    }

    /// How many follow.
    pub fn count(&self) -> usize {
        self.senders.values().map(watch::Sender::receiver_count).sum()
    }

    /// The job's revision as last published.
    pub fn revision(&self, job: JobId) -> u64 {
        self.revisions.get(&job).copied().unwrap_or(self.first)
    }

    /// Whether one more may follow this job; says why not.
    pub fn admits(&mut self, job: JobId) -> Result<(), String> {
        self.senders.retain(|_, sender| sender.receiver_count() > 0);
        let of_one = self.senders.get(&job).map_or(0, watch::Sender::receiver_count);
        let in_all = self.count();
        if of_one >= FOLLOWERS_OF_ONE {
            return Err(format!(
                "{job} is followed by {of_one} clients already: end some of them"
            ));
        }
        if in_all >= FOLLOWERS {
            return Err(format!("{in_all} clients follow jobs already: end some of them"));
        }
        Ok(())
    }

    /// Follows a job from this snapshot on.
    pub fn follow(&mut self, job: JobId, mut snapshot: v1::Job) -> Following {
        let spec_json = std::mem::take(&mut snapshot.spec_json);
        let sender = self
            .senders
            .entry(job)
            .or_insert_with(|| watch::Sender::new(Arc::default()));
        sender.send_replace(Arc::new(snapshot));
        Following {
            snapshots: sender.subscribe(),
            spec_json,
        }
    }

    /// Publishes what changed since the last time.
    pub fn publish(&mut self, mut view: impl FnMut(JobId, u64) -> Option<v1::Job>) {
        for job in std::mem::take(&mut self.changed) {
            self.publish_one(job, &mut view);
        }
    }

    /// Publishes one job now, if it changed.
    pub fn publish_now(&mut self, job: JobId, mut view: impl FnMut(JobId, u64) -> Option<v1::Job>) {
        if self.changed.remove(&job) {
            self.publish_one(job, &mut view);
        }
    }

    fn publish_one(&mut self, job: JobId, view: &mut dyn FnMut(JobId, u64) -> Option<v1::Job>) {
        let revision = self.revisions.entry(job).or_insert(self.first);
        *revision = revision.saturating_add(1);
        let followed = self
            .senders
            .get(&job)
            .filter(|sender| sender.receiver_count() > 0);
        let Some(sender) = followed else {
            self.senders.remove(&job);
            return;
        };
        if let Some(snapshot) = view(job, *revision) {
            sender.send_replace(Arc::new(snapshot));
        }
    }
}
