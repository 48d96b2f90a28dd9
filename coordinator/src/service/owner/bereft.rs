//! Gangs that have lost a rank with its agent: they need not wait until its worker is given up.
//!
//! A killed agent's connection closes at once, and its child ends with it; the other ranks notice and tell. Where both are
//! so, the gang ends without that rank and forms again from what is there. The worker is not given up for it: it has all of
//! its patience to come back, and is told then to stop what it may still run. Known to this loop alone: after a start
//! nobody is connected, and everybody's patience begins anew.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Owner, WorkerHandle};
use crate::scheduler::{AttemptId, Command, Gang, Lease, Task, TaskId, WorkerId};

/// How long a worker may be without a connection until that counts: one whose connection broke for another reason is back
/// by then.
const COMING_BACK: Duration = Duration::from_secs(2);

/// Which gangs, and which workers.
#[derive(Debug, Default)]
pub(super) struct Bereft {
    /// The task and the generation.
    gangs: BTreeSet<(TaskId, u64)>,
    /// Since when.
    closed: BTreeMap<WorkerId, Duration>,
}

impl Bereft {
    pub(super) fn connected(&mut self, worker: WorkerId) {
        self.closed.remove(&worker);
    }
}

impl Owner {
    /// A worker's stream has ended.
    pub(super) fn closed(&mut self, from: WorkerHandle) {
        let link = self.links.get(&from.worker);
        if link.is_some_and(|link| link.number == from.link) {
            self.links.remove(&from.worker);
            let elapsed = self.surroundings.clock.elapsed();
            self.bereft.closed.insert(from.worker, elapsed);
        }
    }

    /// A rank tells that another one of its gang is gone.
    pub(super) fn is_bereft(&mut self, lease: Lease) {
        let held = self
            .state
            .attempt(lease.attempt)
            .filter(|held| held.lease == lease);
        if let Some((task, place)) = held.and_then(|held| Some((held.task, held.place?))) {
            self.bereft.gangs.insert((task, place.generation));
        }
    }

    /// Lets go of ranks that such gangs wait for, of workers whose connections have closed.
    pub(super) fn let_go(&mut self) {
        let state = &self.state;
        let ending = |task: TaskId, generation: u64| {
            let gang = state.task(task).and_then(Task::gang);
            gang.filter(|gang| gang.generation == generation && gang.ending)
        };
        let Bereft { gangs, closed } = &mut self.bereft;
        gangs.retain(|(task, generation)| ending(*task, *generation).is_some());
        closed.retain(|worker, _| {
            state
                .worker(*worker)
                .is_some_and(|known| !known.standing.is_gone())
        });
        let elapsed = self.surroundings.clock.elapsed();
        let is_away = |attempt: &AttemptId| {
            let worker = state.attempt(*attempt).map(|held| held.worker);
            let since = worker.and_then(|worker| closed.get(&worker));
            since.is_some_and(|since| elapsed.saturating_sub(*since) >= COMING_BACK)
        };
        let ranks = gangs
            .iter()
            .filter_map(|(task, generation)| ending(*task, *generation))
            .flat_map(Gang::live);
        let lost: Vec<AttemptId> = ranks.filter(is_away).collect();
        for attempt in lost {
            tracing::warn!(%attempt, "a rank is gone with its worker's connection: its gang does not wait for it");
            self.note(Command::LetGo { attempt });
        }
    }
}
