//! Effects: what is done in the world once a turn is durable.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use espalier_proto::v1::{self, coordinator_message::Message};

use super::handle::wire;
use super::{Owner, Request};
use crate::scheduler::{
    AttemptId, Command, Effect, JobId, JobPhase, Payload, Stage, Task, TaskPhase, WorkerId,
};
use crate::service::StageSnapshot;
use crate::trace;

impl Owner {
    pub(super) fn act(&mut self) {
        for effect in std::mem::take(&mut self.effects) {
            match effect {
                Effect::Assign { attempt } => self.assign(attempt),
                Effect::StopAttempt { attempt } => self.stop_attempt(attempt),
                Effect::Release { attempt } => self.release(attempt),
                Effect::Drain { worker, reason } => {
                    let term = self.state.term().0;
                    self.send(worker, Message::Drain(v1::Drain { reason, term }));
                }
                Effect::RestartWorker { worker, reason } => {
                    let term = self.state.term().0;
                    self.send(worker, Message::Restart(v1::Restart { reason, term }));
                }
                Effect::Plan { job } => self.plan(job),
                Effect::WriteOutcome { job } => self.write_outcome(job),
                Effect::RemovePartial { job } => self.remove_partial(job),
                Effect::Disconnect { worker } => {
                    // One that came back in the same turn has a new stream by now, and keeps it.
                    let known = self.state.worker(worker);
                    if known.is_none_or(|known| known.standing.is_gone()) {
                        self.links.remove(&worker);
                    }
                }
                Effect::Changed { job } => self.watchers.changed(job),
            }
        }
    }

    /// Sends to a worker; one that does not keep up loses its stream and is told all again when it comes back.
    pub(super) fn send(&mut self, worker: WorkerId, message: Message) {
        let Some(link) = self.links.get(&worker) else {
            return;
        };
        if link.version < 2 && matches!(message, Message::Release(_) | Message::Restart(_)) {
            tracing::warn!(%worker, "the worker's protocol version has no such message: it is not sent");
            return;
        }
        let message = v1::CoordinatorMessage {
            message: Some(message),
        };
        if link.outbox.try_send(Ok(message)).is_err() {
            tracing::warn!(%worker, "the worker does not take its messages: its stream is closed");
            self.links.remove(&worker);
        }
    }

    pub(super) fn assign(&mut self, attempt: AttemptId) {
        let Some(attempt) = self.state.attempt(attempt).filter(|attempt| !attempt.cancelled) else {
            return;
        };
        let Some(task) = self.state.task(attempt.task) else {
            return;
        };
        tracing::debug!(
            job = %task.job, task = %task.id, attempt = %attempt.lease.attempt, kind = %task.kind,
            worker = %attempt.worker, "a task was handed out"
        );
        let too_old = |link: &super::Link| link.version < 2;
        if attempt.place.is_some() && self.links.get(&attempt.worker).is_some_and(too_old) {
            let failure = espalier_proto::task::Failure {
                kind: espalier_proto::task::FailureKind::Error,
                message: "the worker's build runs no task of several ranks: replace it by a newer one"
                    .to_owned(),
            };
            self.afterwards.push(Command::Fail {
                worker: attempt.worker,
                lease: attempt.lease,
                failure,
            });
            return;
        }
        let worker = self.state.worker(attempt.worker);
        let device = worker.and_then(|worker| {
            let mut devices = worker.devices.iter();
            devices.find(|device| device.info.id == attempt.device)
        });
        let device_bytes = device.map_or(0, |device| device.info.memory_bytes);
        let job = self.state.job(task.job);
        let traceparent = job.map(|job| trace::traceparent(job, attempt.lease.attempt));
        let assign = v1::Assign {
            lease: Some(wire(attempt.lease)),
            task_id: task.id.0,
            job_id: task.job.to_string(),
            device_id: attempt.device.to_string(),
            spec_json: Bytes::copy_from_slice(task.payload.as_str().as_bytes()),
            traceparent: traceparent.unwrap_or_default(),
            memory_bytes: task.needs.memory_bytes,
            ample_bytes: task.needs.awaited_bytes(device_bytes),
            gang: attempt.place.map(|place| v1::Gang {
                generation: place.generation,
                rank: place.rank,
                ranks: place.ranks,
            }),
        };
        self.send(attempt.worker, Message::Assign(assign));
    }

    pub(super) fn stop_attempt(&mut self, attempt: AttemptId) {
        let Some(attempt) = self.state.attempt(attempt) else {
            return;
        };
        let reason = self.state.stop_reason(attempt);
        let cancel = v1::Cancel {
            lease: Some(wire(attempt.lease)),
            reason,
        };
        self.send(attempt.worker, Message::Cancel(cancel));
    }

    /// Tells a rank to begin, once its gang has been released.
    pub(super) fn release(&mut self, attempt: AttemptId) {
        let Some(release) = self.state.release_of(attempt) else {
            return;
        };
        let Some(attempt) = self.state.attempt(attempt) else {
            return;
        };
        let message = v1::Release {
            lease: Some(wire(attempt.lease)),
            communicator: release.communicator.reveal().to_owned(),
            addresses: release.addresses,
        };
        self.send(attempt.worker, Message::Release(message));
    }

    fn plan(&mut self, job: JobId) {
        let Some(known) = self.state.job(job).filter(|job| job.wants_plan()) else {
            return;
        };
        if self.planning.contains(&job) {
            // It is asked again when this answer has come, as what it saw is older.
            return;
        }
        let (spec, revision) = (known.spec.clone(), known.results);
        let stages = self.snapshots(job);
        let planner = Arc::clone(&self.planner);
        self.planning.insert(job);
        self.beside(move || {
            let planned = planner.plan(spec.as_str(), &stages);
            Request::Planned {
                job,
                revision,
                planned,
            }
        });
    }

    /// What the stages of a job have found out.
    pub(super) fn snapshots(&self, job: JobId) -> Vec<StageSnapshot> {
        let Some(job) = self.state.job(job) else {
            return Vec::new();
        };
        let snapshot = |stage: &Stage| {
            let ended = stage.finished_at.unwrap_or(0);
            StageSnapshot {
                name: stage.name.clone(),
                decision: stage.decision.clone(),
                outputs: self.outputs(stage),
                seconds: seconds(stage.elapsed_ms(ended)),
                ended_seconds: seconds(ended.saturating_sub(job.started_at.unwrap_or(ended))),
            }
        };
        job.stages.iter().map(snapshot).collect()
    }

    fn outputs(&self, stage: &Stage) -> Option<Vec<Payload>> {
        let output = |task: &Task| match &task.phase {
            TaskPhase::Done { output, .. } => Some(output.clone()),
            _ => None,
        };
        self.state.stage_tasks(stage).map(output).collect()
    }

    fn write_outcome(&mut self, job: JobId) {
        let Some(known) = self.state.job(job) else { return };
        let JobPhase::Finishing { outcome } = &known.phase else {
            return;
        };
        let (outcome, output) = (outcome.clone(), known.output.clone());
        if !self.writing.insert(job) {
            return;
        }
        let planner = Arc::clone(&self.planner);
        self.beside(move || {
            let written = planner.finish(outcome.as_str(), Path::new(&output));
            Request::Written { job, written }
        });
    }

    fn remove_partial(&mut self, job: JobId) {
        let Some(known) = self.state.job(job).filter(|job| job.wants_removal()) else {
            return;
        };
        let output = known.output.clone();
        if !self.writing.insert(job) {
            return;
        }
        let planner = Arc::clone(&self.planner);
        self.beside(move || {
            let removed = planner.remove_partial(Path::new(&output));
            Request::Removed { job, removed }
        });
    }

    /// Does something slow beside the loop; its answer comes through the inbox.
    fn beside(&self, work: impl FnOnce() -> Request + Send + 'static) {
        self.surroundings.beside.spawn(Box::new(work));
    }
}

#[allow(clippy::cast_precision_loss)] // far below 2^53
fn seconds(milliseconds: i64) -> f64 {
    milliseconds.max(0) as f64 / 1e3
}
