//! A worker on its way out: it has what runs checkpointed, hands everything back, and waits until nothing would be
//! lost with it, but not for ever.

use std::time::Duration;

use espalier_proto::v1::Leaving;
use espalier_proto::v1::worker_message::Message as FromWorker;

use super::{Core, Finish, Output};

impl Core {
    /// Begins to leave, once: asks for checkpoints of what runs, and takes nothing more.
    pub(super) fn drain(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        if self.drain_deadline.is_some() {
            return;
        }
        self.drain_deadline = Some(now.saturating_add(self.options.drain_timeout));
        self.say_leaving(outputs);
        for message in self.attempts.stop_all(true, outputs) {
            self.send(message, outputs);
        }
    }

    /// Tells the coordinator so, on each stream.
    pub(super) fn say_leaving(&self, outputs: &mut Vec<Output>) {
        let Some(terms) = self.link.terms() else { return };
        outputs.push(Output::Send(FromWorker::Leaving(Leaving {
            term: terms.term,
            epoch: self.options.epoch,
        })));
    }

    /// Whether a worker on its way out has nothing left that would be lost with it.
    pub(super) fn is_handed_back(&self) -> bool {
        let told = if self.is_connected() {
            self.attempts.is_acknowledged()
        } else {
            !self.attempts.holds_results()
        };
        self.attempts.is_idle() && told
    }

    /// The drain timeout has passed. What still runs is killed; results that the coordinator has not taken are
    /// worth waiting for, as long as it may want them.
    pub(super) fn end_of_drain(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        if !self.attempts.holds_results() {
            if !self.attempts.is_idle() {
                tracing::warn!("attempts still run at the end of the drain timeout and are killed");
            }
            return self.finish(Finish::Killed, outputs);
        }
        let given_up_at = self
            .drain_deadline
            .unwrap_or(now)
            .saturating_add(self.orphan_grace);
        if given_up_at <= now {
            tracing::warn!("the coordinator has not taken the last results: they are lost with this worker");
            return self.finish(Finish::Killed, outputs);
        }
        if self.attempts.may_stop() {
            tracing::warn!("attempts still run at the end of the drain timeout and are stopped");
        }
        for message in self.attempts.stop_all(false, outputs) {
            self.send(message, outputs);
        }
        if !self.waits_for_results {
            self.waits_for_results = true;
            tracing::warn!(
                "waiting for the coordinator to take the last results; a second signal gives them up"
            );
        }
    }

    /// When a worker on its way out is due: at the end of its drain timeout, and once more when nobody has taken
    /// its results for the orphan grace.
    pub(super) fn drained_at(&self) -> Option<Duration> {
        let grace = if self.waits_for_results {
            self.orphan_grace
        } else {
            Duration::ZERO
        };
        Some(self.drain_deadline?.saturating_add(grace))
    }
}
