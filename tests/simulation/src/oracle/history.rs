//! What one journal has made durable, event by event, and what that means: who did which task, how attempts
//! ended, what budgets were used up. No event of it may go back on an earlier one.

use std::collections::{BTreeMap, BTreeSet};

use espalier_coordinator::scheduler::{AttemptId, Event, JobId, Payload, State, TaskId};

use super::eye::{Attempt, Budget, Seen, budget, done_by};
use crate::planner;

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Its output is the task's.
    Promoted,
    /// A rank ended well; the task is done when all have.
    RankDone,
    /// It failed.
    Failed,
    /// Its worker was given up.
    Lost,
    /// Its worker gave it back.
    HandedBack,
    /// Nobody wanted it any more.
    Stopped,
}

/// What one journal has made durable.
#[derive(Debug, Default)]
pub struct History {
    /// From the first event of the first journal on.
    log: Vec<Seen>,
    /// Who did which task.
    pub promoted: BTreeMap<TaskId, Attempt>,
    /// How attempts ended.
    pub fates: BTreeMap<Attempt, Fate>,
    /// Which job a request made.
    pub jobs: BTreeMap<String, JobId>,
    budgets: BTreeMap<TaskId, Budget>,
    job_of: BTreeMap<TaskId, JobId>,
    /// Leases of ranks that ended well.
    ranks: BTreeMap<AttemptId, Attempt>,
}

impl History {
    /// How many events there are.
    pub fn events(&self) -> usize {
        self.log.len()
    }

    /// What was durable when there were so many events.
    ///
    /// # Errors
    /// Never: what was taken once is taken again.
    pub fn first(&self, events: usize) -> Result<Self, String> {
        let mut first = Self::default();
        for seen in self.log.iter().take(events) {
            first.take(seen.clone())?;
        }
        Ok(first)
    }

    /// The last frame that is durable.
    pub fn last_frame(&self) -> u64 {
        self.log.last().map_or(0, |seen| seen.frame)
    }

    /// An event has become durable.
    ///
    /// # Errors
    /// When it goes back on another, or frames between are missing.
    pub fn take(&mut self, seen: Seen) -> Result<(), String> {
        let last = self.last_frame();
        if seen.frame != last && seen.frame != last + 1 {
            return Err(format!("frame {} comes after frame {last}", seen.frame));
        }
        self.follow(&seen)?;
        self.log.push(seen);
        Ok(())
    }

    fn follow(&mut self, seen: &Seen) -> Result<(), String> {
        if let Event::JobSubmitted { job, request_id, .. } = &seen.event
            && let Some(request_id) = request_id
            && let Some(other) = self.jobs.insert(request_id.clone(), *job)
        {
            return Err(format!("request {request_id} made {other} and {job}"));
        }
        if let Event::StagesPlanned { job, stages, .. } = &seen.event {
            let tasks = stages.iter().flat_map(|stage| &stage.tasks);
            self.job_of.extend(tasks.map(|task| (task.id, *job)));
        }
        if let Some((job, left)) = &seen.left {
            self.forget(*job, left);
        }
        let Some(task) = seen.task else { return Ok(()) };
        self.spend(task, seen)?;
        match &seen.event {
            Event::AttemptStarted { .. } | Event::GangFormed { .. } => match self.promoted.get(&task) {
                Some(by) => Err(format!(
                    "task {task} is done by {by:?} and begins again: {:?}",
                    seen.event
                )),
                None => Ok(()),
            },
            Event::GangEnded { completed: true, .. } => self.gang_done(task, seen),
            Event::AttemptCompleted { output, .. } => {
                let attempt = self.end(seen, Fate::Promoted)?;
                is_of(output, attempt)?;
                self.promote(task, attempt)
            }
            Event::RankCompleted { attempt, output, .. } => {
                let lease = self.end(seen, Fate::RankDone)?;
                self.ranks.insert(*attempt, lease);
                if output.as_str().is_empty() {
                    Ok(())
                } else {
                    is_of(output, lease)
                }
            }
            Event::AttemptFailed { .. } => self.end(seen, Fate::Failed).map(drop),
            Event::AttemptLost { .. } => self.end(seen, Fate::Lost).map(drop),
            Event::AttemptHandedBack { .. } => self.end(seen, Fate::HandedBack).map(drop),
            Event::AttemptStopped { .. } => self.end(seen, Fate::Stopped).map(drop),
            _ => Ok(()),
        }
    }

    fn gang_done(&mut self, task: TaskId, seen: &Seen) -> Result<(), String> {
        let by = seen
            .done_by
            .ok_or_else(|| format!("task {task} is not done by its gang"))?;
        let attempt = self.ranks.get(&by).copied();
        let attempt = attempt.ok_or_else(|| format!("task {task} is done by {by}, no rank of its"))?;
        self.promote(task, attempt)
    }

    /// A job is tried again: tasks that it forgets may be done anew.
    fn forget(&mut self, job: JobId, left: &BTreeSet<TaskId>) {
        let job_of = &self.job_of;
        let stays = |task: &TaskId| job_of.get(task) != Some(&job) || left.contains(task);
        self.promoted.retain(|task, _| stays(task));
        self.budgets.retain(|task, _| stays(task));
    }

    fn spend(&mut self, task: TaskId, seen: &Seen) -> Result<(), String> {
        let Some(now) = seen.budget else { return Ok(()) };
        match self
            .budgets
            .insert(task, now)
            .filter(|before| is_below(&now, before))
        {
            Some(before) => Err(format!(
                "the budget of task {task} went back from {before:?} to {now:?}"
            )),
            None => Ok(()),
        }
    }

    fn promote(&mut self, task: TaskId, attempt: Attempt) -> Result<(), String> {
        match self.promoted.insert(task, attempt) {
            Some(before) => Err(format!(
                "task {task} was promoted twice: {before:?} and {attempt:?}"
            )),
            None => Ok(()),
        }
    }

    fn end(&mut self, seen: &Seen, fate: Fate) -> Result<Attempt, String> {
        let Some((_, attempt)) = seen.attempts.first().copied() else {
            return Err(format!(
                "{:?} is about an attempt that was never made",
                seen.event
            ));
        };
        match self.fates.insert(attempt, fate) {
            Some(before) => Err(format!(
                "attempt {attempt:?} ended twice: {before:?} and {fate:?}"
            )),
            None => Ok(attempt),
        }
    }

    /// Whether a state that was replayed says what its journal made durable: no more and no less.
    ///
    /// # Errors
    /// What was lost, went back, or came from nowhere.
    pub fn compare(&self, state: &State) -> Result<(), String> {
        for (task, attempt) in &self.promoted {
            // Of an archived job nothing is left but a summary.
            let Some(known) = state.task(*task) else {
                if self.is_archived(state, *task) {
                    continue;
                }
                return Err(format!("task {task} was lost, which {attempt:?} had done"));
            };
            let by = done_by(known).and_then(|by| Some((state.term_of(by)?.0, by.0)));
            if by != Some(*attempt) {
                return Err(format!(
                    "the completion of {attempt:?} was lost: task {task} is done by {by:?}"
                ));
            }
        }
        for task in state.tasks() {
            if let Some(by) = done_by(task).filter(|_| !self.promoted.contains_key(&task.id)) {
                return Err(format!("task {} is done by {by}, which nobody promoted", task.id));
            }
        }
        for (task, before) in &self.budgets {
            let Some(known) = state.task(*task) else { continue };
            let now = budget(known);
            if is_below(&now, before) {
                return Err(format!(
                    "the budget of task {task} was {before:?}, and after a start {now:?}"
                ));
            }
        }
        for (request_id, job) in &self.jobs {
            let active = state.job(*job).map(|known| known.request_id.as_ref());
            let archived = state.summary(*job).map(|known| known.request_id.as_ref());
            if active.or(archived) != Some(Some(request_id)) {
                return Err(format!("{job} of request {request_id} was lost"));
            }
        }
        Ok(())
    }

    fn is_archived(&self, state: &State, task: TaskId) -> bool {
        let job = self.job_of.get(&task);
        job.is_some_and(|job| state.summary(*job).is_some())
    }
}

fn is_below(now: &Budget, before: &Budget) -> bool {
    now.0 < before.0 || (now.0 == before.0 && !now.1.covers(&before.1))
}

/// Whether an output is this attempt's own.
fn is_of(output: &Payload, attempt: Attempt) -> Result<(), String> {
    match planner::made_by(output) {
        Some(made_by) if made_by == attempt => Ok(()),
        made_by => Err(format!(
            "attempt {attempt:?} was promoted with the result of {made_by:?}"
        )),
    }
}
