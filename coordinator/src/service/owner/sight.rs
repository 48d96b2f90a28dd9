//! What the loop tells those who watch it: counts, spans, logs of attempts. None of it is waited for.

use std::time::Duration;

use super::Owner;
use crate::logs::Logs;
use crate::metrics::{Metrics, Standings};
use crate::scheduler::{AttemptId, Event, Lease, Standing, WorkerId};
use crate::trace;

impl Owner {
    /// Counts here, and keeps logs of attempts there. Without this nobody sees either.
    #[must_use]
    pub fn seen_by(mut self, metrics: Metrics, logs: Logs) -> Self {
        self.metrics = metrics;
        self.logs = logs;
        self
    }

    /// An event was decided and is about to be applied.
    pub(super) fn observe(&self, event: &Event) {
        self.metrics.observe(&self.state, event);
        trace::observe(&self.state, event, self.now().unix_ms);
        if let Some(attempt) = ended(event) {
            self.logs.ended(attempt);
        }
    }

    /// Lines of an attempt's log, from the worker that holds it.
    pub(super) fn keep_log(&self, worker: WorkerId, lease: Lease, lines: Vec<String>) {
        let held = self.state.attempt(lease.attempt);
        if let Some(held) = held.filter(|held| held.lease == lease && held.worker == worker) {
            self.logs
                .append(held.job, lease.attempt, self.now().unix_ms, lines);
        }
    }

    /// The journal was committed; `last` was its last frame when that began.
    pub(super) fn committed(&self, last: u64, began: Duration) {
        if self.journal.last() != last {
            let ended = self.surroundings.clock.elapsed();
            self.metrics.journal_synced(ended.saturating_sub(began));
        }
    }

    /// Tells how things stand.
    pub(super) fn stand(&self) {
        let mut standings = Standings {
            queue_depth: self.state.waiting(),
            running: self.state.attempts().count(),
            watchers: self.watchers.count(),
            ..Standings::default()
        };
        for worker in self.state.workers() {
            let counter = match worker.standing {
                Standing::Lost => &mut standings.workers_lost,
                Standing::Leaving => &mut standings.workers_leaving,
                Standing::Present if !self.links.contains_key(&worker.id) => &mut standings.workers_away,
                Standing::Present if worker.cordon.is_some() => &mut standings.workers_cordoned,
                Standing::Present => &mut standings.workers_ready,
            };
            *counter += 1;
        }
        self.metrics.stand(&standings);
    }
}

/// The attempt that ends with this event.
fn ended(event: &Event) -> Option<AttemptId> {
    match event {
        Event::AttemptCompleted { attempt, .. }
        | Event::RankCompleted { attempt, .. }
        | Event::AttemptFailed { attempt, .. }
        | Event::AttemptLost { attempt, .. }
        | Event::AttemptHandedBack { attempt, .. }
        | Event::AttemptStopped { attempt, .. } => Some(*attempt),
        _ => None,
    }
}
