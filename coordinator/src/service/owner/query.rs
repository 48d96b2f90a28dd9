//! Questions that change nothing, answered from the state as it is durable.

use espalier_proto::v1;
use tonic::Status;

use super::handle::when_durable;
use super::request::{Listing, Query, Reply, Request, TaskListing};
use super::{Answer, Owner};
use crate::scheduler::{JobId, Payload, Stage, State, Task, TaskId};
use crate::service::{StageSnapshot, history, view};

impl Owner {
    /// The answer to a question, to be given once the state it is from is durable; none when it is found beside
    /// the loop.
    pub(super) fn query(&mut self, query: Query) -> Option<Answer> {
        Some(match query {
            Query::Job { job, reply } if self.is_archived(job) => {
                let revision = self.watchers.revision(job);
                self.ask_archive(job, reply, move |archive| {
                    super::archive::job(archive, job, revision)
                });
                return None;
            }
            Query::Events { job, after, reply } if self.is_archived(job) => {
                self.ask_archive(job, reply, move |archive| {
                    Ok((super::archive::events(archive, after), true))
                });
                return None;
            }
            Query::Tasks { listing, reply } if self.is_archived(listing.job) => {
                self.ask_archive(listing.job, reply, move |archive| {
                    super::archive::tasks(archive, &listing)
                });
                return None;
            }
            Query::Task { task, reply } if self.state.task(task).is_none() => {
                self.ask_archived_task(task, reply);
                return None;
            }
            Query::Job { job, reply } => when_durable(reply, move |owner| owner.view(job)),
            Query::Findings { job, reply } => when_durable(reply, move |owner| owner.findings(job)),
            Query::Jobs { listing, reply } => when_durable(reply, move |owner| Ok(owner.list(&listing))),
            Query::Events { job, after, reply } => when_durable(reply, move |owner| owner.events(job, after)),
            Query::Tasks { listing, reply } => when_durable(reply, move |owner| owner.tasks(&listing)),
            Query::Task { task, reply } => Self::task(task, reply),
            Query::Workers { reply } => when_durable(reply, |owner| Ok(owner.workers())),
            Query::Worker { name, reply } => when_durable(reply, move |owner| owner.worker(&name)),
        })
    }

    /// A live task: what the loop remembers of its attempts, and, looked up beside it, what the tables know.
    fn task(task: TaskId, reply: Reply<v1::TaskDetail>) -> Answer {
        Box::new(move |owner, durable| {
            let mut detail = match durable.and_then(|()| owner.known_task(task)) {
                Ok(detail) => detail,
                Err(status) => {
                    // Who asked may have gone.
                    let _ = reply.send(Err(status));
                    return;
                }
            };
            let tables = owner.surroundings.tables.clone();
            owner.surroundings.beside.spawn(Box::new(move || {
                // Tables that cannot be asked know nothing.
                let rows = tables.attempts(task).unwrap_or_default();
                let remembered = std::mem::take(&mut detail.attempts);
                detail.attempts = view::merged(remembered, &rows.iter().collect::<Vec<_>>());
                let _ = reply.send(Ok(detail));
                Request::Answered
            }));
        })
    }

    fn findings(&self, job: JobId) -> Result<(Payload, Vec<StageSnapshot>), Status> {
        let known = self.state.job(job);
        let known = known.ok_or_else(|| {
            Status::failed_precondition(format!(
                "{job} ended without an outcome: there is nothing to answer from"
            ))
        })?;
        Ok((known.spec.clone(), self.snapshots(job)))
    }

    fn list(&self, listing: &Listing) -> Vec<v1::Job> {
        let before = listing.before.unwrap_or(JobId(u64::MAX));
        let (absent, resting) = (self.absent(), self.resting());
        let beside = self.beside_state(&absent, &resting);
        let wanted =
            |shown: v1::JobState| listing.states.is_empty() || listing.states.contains(&i32::from(shown));
        let revision = |job| self.watchers.revision(job);
        let live = self.state.jobs().rev().filter(|job| job.id < before);
        let mut live = live
            .filter(|job| wanted(view::job_state(job)))
            .map(|job| (job.id, view::summary(&self.state, job, revision(job.id), beside)))
            .peekable();
        let archived = self.state.archived().rev().filter(|job| job.id < before);
        let mut archived = archived
            .filter(|job| wanted(view::archived_state(job)))
            .map(|job| (job.id, view::archived(job, revision(job.id))))
            .peekable();
        let mut page = Vec::new();
        while page.len() < listing.size {
            let from_live = match (live.peek(), archived.peek()) {
                (Some((job, _)), Some((other, _))) => job > other,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => break,
            };
            let next = if from_live { live.next() } else { archived.next() };
            page.extend(next.map(|(_, job)| job));
        }
        page
    }

    fn events(&self, job: JobId, after: u64) -> Result<(Vec<(u64, v1::JobEvent)>, bool), Status> {
        let ended = match self.state.job(job) {
            Some(known) => known.phase.is_terminal() && !known.wants_removal(),
            None if self.state.summary(job).is_some() => true,
            None => return Err(Status::not_found(format!("there is no {job}"))),
        };
        let (entries, mut lagged) = self.history.since(job, after);
        let shown = |entry: &history::Entry| {
            let lagged = std::mem::take(&mut lagged);
            (entry.number, history::shown(&self.state, entry, lagged))
        };
        Ok((entries.iter().map(shown).collect(), ended))
    }

    fn tasks(&self, listing: &TaskListing) -> Result<(Vec<v1::TaskDetail>, Option<TaskId>), Status> {
        page(&self.state, &|task| self.resting.contains_key(&task), listing)
    }

    fn known_task(&self, task: TaskId) -> Result<v1::TaskDetail, Status> {
        let known = self.state.task(task);
        let known = known.ok_or_else(|| Status::not_found(format!("there is no task {task}")))?;
        let mut detail = self.detail(known);
        known.payload.as_str().clone_into(&mut detail.spec_json);
        view::output(known)
            .unwrap_or_default()
            .clone_into(&mut detail.output_json);
        detail.attempts = view::attempts(&self.state, known, &self.history, &self.progress);
        Ok(detail)
    }

    fn detail(&self, task: &Task) -> v1::TaskDetail {
        view::detail(&self.state, task, self.resting.contains_key(&task.id))
    }

    fn workers(&self) -> Vec<v1::Worker> {
        let mut workers: Vec<v1::Worker> = self
            .state
            .workers()
            .map(|worker| self.shown_worker(worker))
            .collect();
        workers.sort_by(|one, other| one.name.cmp(&other.name));
        workers
    }

    pub(super) fn worker(&self, name: &str) -> Result<v1::Worker, Status> {
        let known = self.state.worker_named(name);
        known
            .map(|worker| self.shown_worker(worker))
            .ok_or_else(|| Status::not_found(format!("there is no worker `{}`", name.escape_debug())))
    }

    fn shown_worker(&self, worker: &crate::scheduler::Worker) -> v1::Worker {
        let elapsed = self.surroundings.clock.elapsed();
        let silent = self
            .heard
            .get(&worker.id)
            .map(|heard| elapsed.saturating_sub(*heard));
        let link = self.links.get(&worker.id);
        let version = link.map(|link| link.build.clone()).unwrap_or_default();
        view::worker(&self.state, worker, link.is_some(), silent, version)
    }
}

/// A page of a job's tasks, and after which one the next begins.
pub(super) fn page(
    state: &State,
    rests: &dyn Fn(TaskId) -> bool,
    listing: &TaskListing,
) -> Result<(Vec<v1::TaskDetail>, Option<TaskId>), Status> {
    let Some(job) = state.job(listing.job) else {
        return Err(Status::not_found(format!("there is no {}", listing.job)));
    };
    let wanted = |stage: &&Stage| listing.stage.is_empty() || stage.name == listing.stage;
    let stages = job.stages.iter().filter(wanted);
    let after = listing.after;
    // Ids of a stage's tasks grow, and those of a later stage are larger.
    let ids = stages.flat_map(move |stage| {
        let seen = stage.tasks.partition_point(|task| *task <= after);
        stage.tasks.get(seen..).unwrap_or_default()
    });
    let mut page = Vec::new();
    for task in ids.filter_map(|task| state.task(*task)) {
        let standing = view::task_state(task);
        if !listing.states.is_empty() && !listing.states.contains(&standing.into()) {
            continue;
        }
        page.push(view::detail(state, task, rests(task.id)));
        if page.len() == listing.size {
            return Ok((page, Some(task.id)));
        }
    }
    Ok((page, None))
}
