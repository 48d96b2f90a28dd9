//! What the loop tells those who watch it: counts, spans, logs of attempts. None of it is waited for.

use std::collections::BTreeMap;

use super::Owner;
use crate::logs::Logs;
use crate::metrics::{Expiry, Metrics, Standings};
use crate::scheduler::{AttemptId, Event, Lease, Standing, WorkerId};
use crate::trace;

/// Attempts whose lines are counted, at the most: as many as could run, as those that have ended are forgotten.
const COUNTED_LOGS: usize = 4096;

/// How many lines of each attempt's log have come: a worker sends again what a broken stream may have lost.
#[derive(Debug, Default)]
pub(super) struct LogLines(BTreeMap<AttemptId, u64>);

impl LogLines {
    /// The attempt has ended: nothing more of it is taken.
    fn forget(&mut self, attempt: AttemptId) {
        self.0.remove(&attempt);
    }

    /// How many lines before these are missing, and the lines that have not come before; `first_line` counts from
    /// 1, and 0 when it is not known.
    fn new_ones(&mut self, attempt: AttemptId, first_line: u64, lines: Vec<String>) -> (u64, Vec<String>) {
        if first_line == 0 {
            return (0, lines);
        }
        let next = self.0.entry(attempt).or_insert(first_line);
        let known = usize::try_from(next.saturating_sub(first_line)).unwrap_or(usize::MAX);
        let missing = first_line.saturating_sub(*next);
        *next = (*next).max(first_line.saturating_add(lines.len() as u64));
        if self.0.len() > COUNTED_LOGS {
            self.0.pop_first();
        }
        (missing, lines.into_iter().skip(known).collect())
    }
}

impl Owner {
    /// Counts here, and keeps logs of attempts there. Without this nobody sees either.
    #[must_use]
    pub fn seen_by(mut self, metrics: Metrics, logs: Logs) -> Self {
        self.metrics = metrics;
        self.logs = logs;
        self
    }

    /// An event was decided and is about to be applied.
    pub(super) fn observe(&mut self, event: &Event, expiry: Expiry) {
        self.metrics.observe(&self.state, event, expiry);
        trace::observe(&self.state, event);
        if let Some(attempt) = ended(event) {
            self.logs.ended(attempt);
            self.log_lines.forget(attempt);
        }
    }

    /// Lines of an attempt's log, from the worker that holds it.
    pub(super) fn keep_log(&mut self, worker: WorkerId, lease: Lease, first_line: u64, lines: Vec<String>) {
        let held = self.state.attempt(lease.attempt);
        let Some(held) = held.filter(|held| held.lease == lease && held.worker == worker) else {
            return;
        };
        let job = held.job;
        let (missing, lines) = self.log_lines.new_ones(lease.attempt, first_line, lines);
        if missing > 0 || !lines.is_empty() {
            let now = self.now().unix_ms;
            self.logs.append_after(missing, job, lease.attempt, now, lines);
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
                Standing::Left => &mut standings.workers_left,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_sent_again_are_kept_once_and_uncounted_ones_always() {
        let line = |number: u64| number.to_string();
        let mut known = LogLines::default();
        let mut take =
            |first: u64, last: u64| known.new_ones(AttemptId(1), first, (first..=last).map(line).collect());
        let lines = |texts: &[&str]| -> Vec<String> { texts.iter().map(|text| (*text).to_owned()).collect() };
        assert_eq!(take(1, 2), (0, lines(&["1", "2"])));
        assert_eq!(take(1, 4), (0, lines(&["3", "4"])));
        assert_eq!(take(2, 3), (0, Vec::new()));
        assert_eq!(
            take(7, 7),
            (2, lines(&["7"])),
            "5 and 6 are missing, which the log says"
        );
        assert_eq!(
            take(10, 9),
            (2, Vec::new()),
            "8 and 9 were written and have not come"
        );
        let uncounted = |known: &mut LogLines| known.new_ones(AttemptId(1), 0, vec![line(0)]);
        assert_eq!(uncounted(&mut known), (0, lines(&["0"])));
    }

    #[test]
    fn lines_of_an_attempt_that_runs_for_long_are_counted_while_thousands_come_and_go() {
        let mut known = LogLines::default();
        let line = || vec!["a line".to_owned()];
        known.new_ones(AttemptId(1), 1, line());
        for short in 2..10_000 {
            known.new_ones(AttemptId(short), 1, line());
            known.forget(AttemptId(short));
        }
        let again = known.new_ones(AttemptId(1), 1, line());
        assert_eq!(again, (0, Vec::new()), "it is kept twice");
    }
}
