//! One turn of the loop: requests in, one commit, and only then answers and effects.

use std::time::Duration;

use tonic::Status;

use super::{Owner, Request};
use crate::journal;
use crate::scheduler::{State, resume};
use crate::service::history::Snapshot;
use crate::term::Standing;
use crate::{Error, Result};

/// How long after a full disk the loop tries again by itself.
const FULL_PAUSE: Duration = Duration::from_secs(2);

impl Owner {
    /// Takes these requests, makes what follows from them durable, and only then answers and acts.
    /// Leaves `batch` empty, unless the term's authority does not hold: then requests wait in it for a later turn.
    ///
    /// # Errors
    /// When the journal fails or another coordinator has taken over: nothing more may be promised, and no turn
    /// may follow.
    pub fn turn(&mut self, batch: &mut Vec<Request>) -> Result<()> {
        match self.fence.standing(self.surroundings.clock.elapsed()) {
            Standing::Holds => {}
            Standing::Waits => {
                self.wait(batch);
                return Ok(());
            }
            Standing::Superseded { by } => {
                let own = self.state.term().0;
                return Err(Error::Succeeded { own, term: by });
            }
        }
        let ticked = batch.iter().any(|request| matches!(request, Request::Tick));
        for command in std::mem::take(&mut self.afterwards) {
            self.note(command);
        }
        for request in batch.drain(..) {
            self.handle(request);
        }
        let rests = self.rests_while_full();
        if !rests {
            self.dispatch();
        }
        let (last, began) = (self.journal.last(), self.surroundings.clock.elapsed());
        match self.journal.commit() {
            Ok(()) => {
                self.committed(last, began);
                if !self.holds() {
                    // What was asked is durable, but may not be promised: a later turn does, or a successor
                    // decides without it.
                    return Ok(());
                }
                self.keep_promises(rests);
            }
            Err(error @ journal::Error::Full { .. }) => self.step_back(&error)?,
            Err(error) => return Err(error.into()),
        }
        if ticked {
            self.look_for_room();
            self.publish();
            self.stand();
            self.archive();
        }
        Ok(())
    }

    /// The turn is durable; `last` was the journal's last frame before, and `began` when it was written.
    fn committed(&mut self, last: u64, began: Duration) {
        self.before = None;
        self.reporters.clear();
        if self.journal.last() != last {
            let ended = self.surroundings.clock.elapsed();
            self.metrics.journal_synced(ended.saturating_sub(began));
        }
        for (job, frame, entry) in std::mem::take(&mut self.noted) {
            self.history.push(job, frame, entry);
        }
        self.snapshot();
    }

    /// Says and does what was waiting for the turn to be durable.
    fn keep_promises(&mut self, rests: bool) {
        if !rests && self.full_until.take().is_some() {
            self.effects.extend(resume(&self.state));
        }
        for answer in std::mem::take(&mut self.answers) {
            answer(self, Ok(()));
        }
        self.act();
    }

    /// Without authority nothing is promised, but what is durable can be looked at.
    fn wait(&mut self, batch: &mut Vec<Request>) {
        let requests = std::mem::take(batch);
        for request in requests {
            match request {
                Request::Tick => {}
                Request::Query(query) => {
                    if let Some(answer) = self.query(query) {
                        answer(self, Ok(()));
                    }
                }
                Request::Watch { job, reply } => {
                    let answer = Self::watch(job, reply);
                    answer(self, Ok(()));
                }
                request => {
                    self.stopping |= matches!(request, Request::Stop);
                    batch.push(request);
                }
            }
        }
    }

    /// Whether the disk was full and still is, as far as is known: it is tried now and then with bytes that nobody
    /// needs, as a turn that does not fit costs those whose reports it took.
    fn rests_while_full(&mut self) -> bool {
        let elapsed = self.surroundings.clock.elapsed();
        match self.full_until {
            None => false,
            Some(until) if elapsed < until => true,
            Some(_) if self.journal.check_room().is_ok() => false,
            Some(_) => {
                self.full_until = Some(elapsed.saturating_add(FULL_PAUSE));
                true
            }
        }
    }

    /// A disk that others filled up is noticed before somebody's turn does not fit.
    fn look_for_room(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        if self.full_until.is_some() || elapsed < self.looks_at {
            return;
        }
        self.looks_at = elapsed.saturating_add(FULL_PAUSE);
        if !self.journal.seems_full() {
            return;
        }
        if let Err(error @ journal::Error::Full { .. }) = self.journal.check_room() {
            tracing::error!(%error, "nothing new is taken until there is room");
            self.full_until = Some(self.looks_at);
        }
    }

    /// Has the state written beside the loop, when that is worth it.
    fn snapshot(&mut self) {
        let Some(due) = self.journal.snapshot_due() else {
            return;
        };
        let snapshot = Snapshot::of(&self.state, &self.history);
        let work = Box::new(move || Request::SnapshotEnded(due.take(&snapshot)));
        self.surroundings.beside.spawn(work);
    }

    /// Nothing of the turn has happened: the state goes back to what the journal says.
    fn step_back(&mut self, error: &journal::Error) -> Result<()> {
        tracing::error!(%error, "nothing new is taken until there is room");
        self.state = match self.before.take() {
            Some(before) => *before,
            None => {
                let mut state = State::default();
                self.journal.replay(&mut state)?;
                state
            }
        };
        self.find_trouble();
        self.effects.clear();
        self.noted.clear();
        // Workers send what was not acknowledged again when they come back; the others need not.
        for reporter in std::mem::take(&mut self.reporters) {
            self.links.remove(&reporter);
        }
        self.full_until = Some(self.surroundings.clock.elapsed().saturating_add(FULL_PAUSE));
        let status = Status::resource_exhausted(error.to_string());
        for answer in std::mem::take(&mut self.answers) {
            answer(self, Err(status.clone()));
        }
        Ok(())
    }
}
