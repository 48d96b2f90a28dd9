//! The truth as seen from outside, and what no run may show.
//!
//! It knows what each worker was told, what each user was told, and every event that a coordinator made
//! durable, in the order it did. A [`History`] is the life of one journal: the first begins with an empty
//! disk, and another where a coordinator starts on another disk, with the events that were shipped and no
//! others.

mod eye;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use espalier_coordinator::scheduler::{Event, JobId, State, check};
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::{CoordinatorMessage, Lease};

use eye::Seen;
pub use eye::{Attempt, Eye};
use history::{Fate, History};

/// A coordinator that runs.
#[derive(Debug)]
struct Running {
    term: u64,
    eye: Arc<Eye>,
    served: bool,
}

/// A completion of a device.
#[derive(Debug, Clone, Copy)]
struct Completion {
    is_rank: bool,
    acknowledged: bool,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Oracle {
    histories: Vec<History>,
    /// Which history is on which machine's disk.
    on_disk: BTreeMap<usize, usize>,
    /// How many of its events were in the store when a machine last shipped.
    shipped: BTreeMap<usize, usize>,
    running: BTreeMap<usize, Running>,
    /// Events of turns that were cut short, by machine: durable or not, as the next start will show.
    doubtful: BTreeMap<usize, Vec<Seen>>,
    highest_served: u64,
    /// Attempts whose devices ended well.
    completed: BTreeMap<Attempt, Completion>,
    /// What coordinators were right to acknowledge.
    vouched: BTreeSet<Attempt>,
    /// What users were told.
    accepted: BTreeMap<String, JobId>,
    /// Coordinators that started on another disk.
    losses: usize,
    /// Events that were made durable.
    pub events: u64,
    /// Those of them by which a task's budgets began anew, as it had gone further than ever.
    pub went_on: u64,
    /// And those by which a gang ended without a rank.
    pub let_go: u64,
    /// Completions that a lost disk took along.
    pub lost_with_disk: u64,
}

impl Oracle {
    /// What watches the coordinator that is about to start on a machine.
    pub fn open_eye(&mut self, machine: usize) -> Arc<Eye> {
        let eye = Arc::new(Eye::default());
        self.running.insert(
            machine,
            Running {
                term: 0,
                eye: Arc::clone(&eye),
                served: false,
            },
        );
        eye
    }

    /// What is durable on a machine is in the store too.
    pub fn shipped(&mut self, machine: usize) {
        let history = self.history_on(machine);
        self.shipped.insert(machine, history.map_or(0, History::events));
    }

    /// A coordinator will start on a machine from what was shipped of another's journal: that is there, and
    /// what was not is gone with the disk.
    ///
    /// # Errors
    /// Never, unless the oracle is wrong.
    pub fn takes_over(&mut self, from: usize, to: usize) -> Result<(), String> {
        let events = self.shipped.get(&from).copied().unwrap_or(0);
        let mut goes_on = History::default();
        if let Some(before) = self.history_on(from) {
            goes_on = before.first(events)?;
            let lost = before
                .promoted
                .keys()
                .filter(|task| !goes_on.promoted.contains_key(task));
            let forgotten = before
                .jobs
                .keys()
                .filter(|request| !goes_on.jobs.contains_key(*request));
            let (lost, forgotten) = (lost.count(), forgotten.cloned().collect::<Vec<_>>());
            self.lost_with_disk += lost as u64;
            for request_id in forgotten {
                self.accepted.remove(&request_id);
            }
        }
        self.losses += 1;
        self.shipped.insert(to, goes_on.events());
        self.histories.push(goes_on);
        self.on_disk.insert(to, self.histories.len() - 1);
        Ok(())
    }

    fn history_on(&self, machine: usize) -> Option<&History> {
        let index = self.on_disk.get(&machine)?;
        self.histories.get(*index)
    }

    /// A coordinator has replayed its journal: what was durable must be there.
    ///
    /// # Errors
    /// What was lost, or came back twice.
    pub fn started(&mut self, machine: usize, state: &State) -> Result<(), String> {
        let Some(running) = self.running.get_mut(&machine) else {
            return Ok(());
        };
        running.term = state.term().0;
        running.eye.knows(state);
        let begun = running.eye.take();
        check(state).map_err(|broken| format!("after a start: {broken}"))?;
        if !self.on_disk.contains_key(&machine) {
            self.histories.push(History::default());
            self.on_disk.insert(machine, self.histories.len() - 1);
        }
        self.resolve(machine, &begun)?;
        self.keep(machine, begun)?;
        self.history_on(machine)
            .map_or(Ok(()), |history| history.compare(state))
    }

    /// Of the turns that were cut short, what lies before the first frame of the next start is durable.
    fn resolve(&mut self, machine: usize, begun: &[Seen]) -> Result<(), String> {
        let Some(first) = begun.first().map(|seen| seen.frame) else {
            return Ok(());
        };
        let mut doubtful = self.doubtful.remove(&machine).unwrap_or_default();
        doubtful.retain(|seen| seen.frame < first);
        self.keep(machine, doubtful)?;
        match self.history_on(machine).map(History::last_frame) {
            Some(last) if last + 1 != first => Err(format!(
                "coordinator {machine} goes on with frame {first}, although frame {last} was durable"
            )),
            _ => Ok(()),
        }
    }

    /// A turn's events were applied, and may be durable or not.
    ///
    /// # Errors
    /// The first invariant that one of them broke.
    pub fn witnessed(&mut self, machine: usize) -> Result<(), String> {
        let running = self.running.get(&machine);
        let broken = running.and_then(|running| running.eye.take_broken());
        broken.map_or(Ok(()), Err)
    }

    /// A turn is durable.
    ///
    /// # Errors
    /// What must not have happened.
    pub fn committed(&mut self, machine: usize) -> Result<(), String> {
        let events = self.seen_by(machine);
        self.keep(machine, events)
    }

    /// A turn was undone: nothing of it has happened.
    pub fn undone(&mut self, machine: usize) {
        drop(self.seen_by(machine));
    }

    /// A coordinator has ended; what it had not said to be durable may be or not.
    ///
    /// # Errors
    /// What must not have happened.
    pub fn ended(&mut self, machine: usize) -> Result<(), String> {
        let events = self.seen_by(machine);
        let running = self.running.remove(&machine);
        // One that ended while it started has read the journal, too.
        if running.is_some_and(|running| running.term == 0) {
            self.resolve(machine, &events)?;
        }
        self.doubtful.entry(machine).or_default().extend(events);
        Ok(())
    }

    /// What a coordinator's eye has seen since it was last asked.
    fn seen_by(&self, machine: usize) -> Vec<Seen> {
        let running = self.running.get(&machine);
        running.map(|running| running.eye.take()).unwrap_or_default()
    }

    fn keep(&mut self, machine: usize, events: Vec<Seen>) -> Result<(), String> {
        let index = self.on_disk.get(&machine).copied();
        let Some(history) = index.and_then(|index| self.histories.get_mut(index)) else {
            return Ok(());
        };
        self.events += events.len() as u64;
        let went_on = |seen: &&Seen| matches!(seen.event, Event::TaskWentOn { .. });
        self.went_on += events.iter().filter(went_on).count() as u64;
        let let_go = |seen: &&Seen| matches!(seen.event, Event::RankLetGo { .. });
        self.let_go += events.iter().filter(let_go).count() as u64;
        events.into_iter().try_for_each(|seen| history.take(seen))
    }

    /// A coordinator sends to a worker.
    ///
    /// # Errors
    /// What it must not send.
    pub fn sent(&mut self, machine: usize, message: &CoordinatorMessage) -> Result<(), String> {
        let Some(running) = self.running.get_mut(&machine) else {
            return Ok(());
        };
        match &message.message {
            Some(FromCoordinator::Welcome(_)) if !running.served => {
                running.served = true;
                self.highest_served = self.highest_served.max(running.term);
                Ok(())
            }
            Some(FromCoordinator::Release(release)) if release.addresses.iter().any(String::is_empty) => Err(
                format!("a gang is released that is not whole: {:?}", release.addresses),
            ),
            Some(FromCoordinator::Acknowledged(acknowledged)) => {
                let term = running.term;
                let lease = acknowledged.lease.as_ref();
                lease.map_or(Ok(()), |lease| self.acknowledges(machine, term, lease))
            }
            _ => Ok(()),
        }
    }

    /// A coordinator says that an end is durable: its own journal has to have it.
    fn acknowledges(&mut self, machine: usize, term: u64, lease: &Lease) -> Result<(), String> {
        let attempt = (lease.term, lease.attempt);
        let Some(completion) = self.completed.get(&attempt) else {
            return Ok(());
        };
        if term < self.highest_served {
            return Err(format!(
                "term {term} promotes attempt {} of term {} although term {} serves",
                lease.attempt, lease.term, self.highest_served
            ));
        }
        let fate = self
            .history_on(machine)
            .and_then(|history| history.fates.get(&attempt).copied());
        let is_right = match fate {
            // Stopped: its job had ended, and nobody wants the result.
            Some(Fate::Promoted | Fate::RankDone | Fate::Stopped) => true,
            // After a disk was lost, the release of a gang is not known any more; and a worker that was told
            // before has forgotten the completion, so that what the journal still takes to run has stopped.
            Some(Fate::HandedBack) => self.losses > 0 && (completion.is_rank || completion.acknowledged),
            Some(Fate::Failed | Fate::Lost) | None => false,
        };
        if !is_right {
            return Err(format!(
                "coordinator {machine} says that the completion of {attempt:?} is durable, whose fate is {fate:?}"
            ));
        }
        self.vouched.insert(attempt);
        Ok(())
    }

    /// A device completed an attempt.
    pub fn completed(&mut self, lease: &Lease, is_rank: bool) {
        let completion = Completion {
            is_rank,
            acknowledged: false,
        };
        self.completed.insert((lease.term, lease.attempt), completion);
    }

    /// A worker was told that an end is durable, and forgets it.
    ///
    /// # Errors
    /// When no coordinator said so.
    pub fn acknowledged(&mut self, worker: usize, lease: &Lease) -> Result<(), String> {
        let attempt = (lease.term, lease.attempt);
        let Some(completion) = self.completed.get_mut(&attempt) else {
            return Ok(());
        };
        if !self.vouched.contains(&attempt) {
            return Err(format!(
                "worker {worker} was told that its completion of {attempt:?} is durable, which nobody had said"
            ));
        }
        completion.acknowledged = true;
        Ok(())
    }

    /// A user was told which job a submission made.
    ///
    /// # Errors
    /// When it was told otherwise before, or no journal has it.
    pub fn accepted(&mut self, request_id: &str, job: JobId) -> Result<(), String> {
        let known = self
            .histories
            .iter()
            .any(|history| history.jobs.get(request_id) == Some(&job));
        if !known {
            return Err(format!(
                "request {request_id} was said to have made {job}, which is not durable"
            ));
        }
        let before = self.accepted.insert(request_id.to_owned(), job);
        match before.filter(|before| *before != job) {
            Some(before) => Err(format!(
                "request {request_id} was said to have made {before}, and now {job}"
            )),
            None => Ok(()),
        }
    }

    /// A device begins an attempt.
    ///
    /// # Errors
    /// When its result is acknowledged already.
    pub fn begins(&mut self, worker: usize, lease: &Lease, task: u64) -> Result<(), String> {
        let attempt = (lease.term, lease.attempt);
        if self
            .completed
            .get(&attempt)
            .is_some_and(|known| known.acknowledged)
        {
            return Err(format!(
                "worker {worker} begins {attempt:?} of task {task} after its acknowledgement"
            ));
        }
        Ok(())
    }

    /// Looks at everything once more.
    ///
    /// # Errors
    /// What is broken.
    pub fn at_the_end(&self, machine: usize, state: &State) -> Result<(), String> {
        check(state).map_err(|broken| format!("at the end: {broken}"))?;
        let Some(history) = self.history_on(machine) else {
            return Ok(());
        };
        history.compare(state)?;
        for (request_id, job) in &self.accepted {
            if history.jobs.get(request_id).is_none_or(|made| made != job) {
                return Err(format!("{job} of request {request_id} is gone at the end"));
            }
        }
        Ok(())
    }

    /// How many completions workers were told are durable.
    pub fn acknowledged_count(&self) -> usize {
        let known = self.completed.values();
        known.filter(|completion| completion.acknowledged).count()
    }
}
