//! What follows from time passing: workers that are silent, tasks that rest, gangs that are late.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Owner;
use crate::scheduler::{
    Command, Epoch, Event, Failures, Standing, Task, TaskId, TaskPhase, Worker, WorkerId, hand_back_pause,
    retry_pause,
};

/// How long a gang may take until every rank is ready: devices come free and children start. Models are loaded later.
const GANG_DEADLINE: Duration = Duration::from_secs(15 * 60);
/// How long a worker that is gone is remembered.
const GONE_FOR: Duration = Duration::from_secs(24 * 60 * 60);
/// Workers that are gone and remembered, at the most.
const GONE_KEPT: usize = 1024;

impl Owner {
    /// Keeps who is in trouble, and lets a task that failed rest.
    pub(super) fn note_trouble(&mut self, event: &Event) {
        match event {
            Event::AttemptFailed { task, .. }
            | Event::AttemptLost { task, .. }
            | Event::GangLate { task, .. } => {
                let Some(known) = self.state.task(*task) else {
                    return;
                };
                self.troubled.insert((known.job, *task));
                let pause = retry_pause(&known.failures());
                if !matches!(event, Event::AttemptLost { .. }) && !pause.is_zero() {
                    let until = self.surroundings.clock.elapsed().saturating_add(pause);
                    self.resting.insert(*task, until);
                }
            }
            Event::AttemptHandedBack { task, .. } => {
                let failures = self.state.task(*task).map(Task::failures);
                let pause = failures.map_or(Duration::ZERO, |failures| hand_back_pause(&failures));
                if !pause.is_zero() {
                    let until = self.surroundings.clock.elapsed().saturating_add(pause);
                    self.resting.insert(*task, until);
                }
            }
            Event::AttemptCompleted { task, .. }
            | Event::GangEnded {
                task,
                completed: true,
                ..
            } => {
                if !self.troubled.is_empty()
                    && let Some(known) = self.state.task(*task)
                {
                    self.troubled.remove(&(known.job, *task));
                }
            }
            Event::JobRetried { .. } => self.find_trouble(),
            Event::JobArchived { job, .. } => {
                self.troubled.retain(|(of, _)| of != job);
                self.history.forget(*job);
            }
            _ => {}
        }
    }

    /// Looks for trouble in the whole state.
    pub(super) fn find_trouble(&mut self) {
        let in_trouble = |task: &&Task| {
            let done = matches!(task.phase, TaskPhase::Done { .. });
            !done && task.failures() != Failures::default()
        };
        let tasks = self.state.tasks().filter(in_trouble);
        self.troubled = tasks.map(|task| (task.job, task.id)).collect();
        let state = &self.state;
        self.resting.retain(|task, _| state.task(*task).is_some());
    }

    pub(super) fn absent(&self) -> BTreeSet<WorkerId> {
        let workers = self.state.workers().map(|worker| worker.id);
        workers
            .filter(|worker| !self.links.contains_key(worker))
            .collect()
    }

    pub(super) fn resting(&self) -> BTreeSet<TaskId> {
        self.resting.keys().copied().collect()
    }

    pub(super) fn dispatch(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        self.resting.retain(|_, until| *until > elapsed);
        let (absent, resting) = (self.absent(), self.resting());
        if let Err(error) = self.decide(Command::Dispatch { absent, resting }) {
            tracing::error!(%error, "no task can be handed out");
        }
    }

    pub(super) fn silence(&mut self) {
        let lost = self.options.worker_lost;
        let elapsed = self.surroundings.clock.elapsed();
        // While the loop itself was away, as when its process was stopped, nobody could be heard: what workers
        // said meanwhile still waits to be taken.
        let away = elapsed.saturating_sub(std::mem::replace(&mut self.listened, elapsed));
        if away >= lost / 2 {
            for heard in self.heard.values_mut() {
                *heard = heard.saturating_add(away).min(elapsed);
            }
        }
        let is_lost = |worker: &&Worker| {
            !worker.standing.is_gone()
                && self
                    .heard
                    .get(&worker.id)
                    .is_none_or(|heard| elapsed.saturating_sub(*heard) >= lost)
        };
        let silent: Vec<(WorkerId, Epoch)> = self
            .state
            .workers()
            .filter(is_lost)
            .map(|worker| (worker.id, worker.epoch))
            .collect();
        for (worker, epoch) in silent {
            if let Err(error) = self.decide(Command::WorkerSilent { worker, epoch }) {
                tracing::error!(%error, %worker, "the worker cannot be given up");
                continue;
            }
            if self.state.worker(worker).map(|known| known.standing) == Some(Standing::Lost) {
                tracing::warn!(%worker, "nothing was heard from the worker: its tasks are handed on");
            } else {
                tracing::info!(%worker, "the worker has left");
            }
        }
        self.forget_the_gone();
        let (state, progress) = (&self.state, &mut self.progress);
        progress.retain(|attempt, _| state.attempt(*attempt).is_some());
    }

    /// Forgets workers that have been gone for long, or are too many: names need not come back.
    fn forget_the_gone(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        let gone = self.state.workers().filter(|worker| worker.standing.is_gone());
        let silent = |worker: WorkerId| {
            let heard = self.heard.get(&worker).copied().unwrap_or_default();
            elapsed.saturating_sub(heard)
        };
        let mut gone: Vec<(Duration, WorkerId)> = gone.map(|worker| (silent(worker.id), worker.id)).collect();
        gone.sort_unstable();
        let recent = gone.iter().take(GONE_KEPT);
        let kept = recent.filter(|(silent, _)| *silent < GONE_FOR).count();
        let old: Vec<WorkerId> = gone.into_iter().skip(kept).map(|(_, worker)| worker).collect();
        for worker in old {
            self.note(Command::Forget { worker });
            if self.state.worker(worker).is_none() {
                self.heard.remove(&worker);
            }
        }
    }

    /// Ends gangs that have not become ready for too long.
    pub(super) fn end_late_gangs(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        let forming: BTreeSet<(TaskId, u64)> = self.state.forming().collect();
        self.forming.retain(|gang, _| forming.contains(gang));
        for gang in forming {
            self.forming.entry(gang).or_insert(elapsed);
        }
        let is_late = |since: &Duration| elapsed.saturating_sub(*since) >= GANG_DEADLINE;
        let late = self.forming.iter().filter(|(_, since)| is_late(since));
        let late: Vec<(TaskId, u64)> = late.map(|(gang, _)| *gang).collect();
        for (task, generation) in late {
            tracing::warn!(%task, generation, "a gang is not ready: it is ended and formed anew");
            self.note(Command::GangLate { task, generation });
        }
    }
}
