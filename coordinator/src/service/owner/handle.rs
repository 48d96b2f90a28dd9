//! Requests in, commands to the state machine; answers wait until the turn is durable.

use espalier_proto::task::{Failure, FailureKind};
use espalier_proto::v1::{self, coordinator_message::Message};
use espalier_proto::{KNOWN_EPOCH_METADATA, STALE_EPOCH_METADATA};
use tokio::sync::oneshot;
use tonic::Status;

use super::request::{Greeting, JobOrder, Reply, Report, Request, Submission, WorkerHandle, WorkerOrder};
use super::{Answer, Following, Link, Owner, status};
use crate::scheduler::{Command, Effect, Epoch, JobId, Lease, Rejection, Term, WorkerId};
use crate::service::Planned;
use crate::service::watch::Watchers;
use crate::term::Heard;

/// More terms than a journal may have lost: each was the start of a coordinator.
const TERMS_LOST: u64 = 1_000_000;

impl Owner {
    pub(super) fn handle(&mut self, request: Request) {
        match request {
            Request::Submit {
                request_id,
                submission,
                reply,
            } => {
                self.submit(request_id, *submission, reply);
            }
            Request::Query(query) => {
                let answer = self.query(query);
                self.answers.extend(answer);
            }
            Request::Watch { job, reply } => self.answers.push(Self::watch(job, reply)),
            Request::KeepJob { job, order, reply } => {
                let decided = self.decide(match order {
                    JobOrder::Cancel { reason } => Command::Cancel { job, reason },
                    JobOrder::Pause { reason } => Command::Pause { job, reason },
                    JobOrder::Resume => Command::Resume { job },
                    JobOrder::Retry { request_id } => Command::Retry { job, request_id },
                });
                self.later(reply, move |owner| {
                    decided.map_err(|rejection| status(&rejection))?;
                    owner.view(job)
                });
            }
            Request::KeepWorker { name, order, reply } => self.keep_worker(name, order, reply),
            Request::Greet { greeting, reply } => self.greet(*greeting, reply),
            Request::Report { from, lease, report } => self.report(from, lease, report),
            Request::Leave { from } => {
                let WorkerHandle { worker, epoch, .. } = from;
                self.reporters.insert(worker);
                self.note(Command::Leave { worker, epoch });
            }
            Request::Closed { from } => {
                let is_current = self
                    .links
                    .get(&from.worker)
                    .is_some_and(|link| link.number == from.link);
                if is_current {
                    self.links.remove(&from.worker);
                }
            }
            // Waits for the disk too: what is not durable must not be called over.
            Request::Heartbeat {
                term,
                worker,
                epoch,
                attempts,
                reply,
            } => {
                self.later(reply, move |owner| {
                    owner.heartbeat(term, worker, epoch, &attempts)
                });
            }
            Request::Planned {
                job,
                revision,
                planned,
            } => self.planned(job, revision, planned),
            Request::Written { job, written } => {
                self.writing.remove(&job);
                self.note(match written {
                    Ok(()) => Command::OutcomeWritten { job },
                    Err(message) => Command::JobBroken { job, message },
                });
            }
            Request::Removed { job, removed } => {
                self.writing.remove(&job);
                if let Err(error) = removed {
                    // The job has ended all the same; its next submission will be told what is in the way.
                    tracing::error!(%job, %error, "the half-written output stays");
                }
                self.note(Command::PartialRemoved { job });
            }
            Request::SnapshotEnded(taken) => {
                if taken.is_ok() {
                    self.metrics.snapshot_written(self.now().unix_ms);
                }
                self.journal.snapshot_ended(taken);
            }
            Request::Archived { job, written } => self.archived(job, written),
            Request::Answered => {}
            Request::Tick => {
                self.silence();
                self.end_late_gangs();
            }
            Request::Stop => {
                self.stopping = true;
                self.links.clear();
            }
        }
    }

    /// Answers once the turn is durable.
    pub(super) fn later<T: Send + 'static>(
        &mut self,
        reply: oneshot::Sender<Result<T, Status>>,
        answer: impl FnOnce(&mut Self) -> Result<T, Status> + Send + 'static,
    ) {
        self.answers.push(when_durable(reply, answer));
    }

    pub(super) fn watch(job: JobId, reply: Reply<Following>) -> Answer {
        when_durable(reply, move |owner| {
            let snapshot = owner.view(job)?;
            owner.watchers.admits(job).map_err(Status::resource_exhausted)?;
            Ok(owner.watchers.follow(job, snapshot))
        })
    }

    /// Runs a command that nobody waits for.
    pub(super) fn note(&mut self, command: Command) {
        if let Err(rejection) = self.decide(command) {
            tracing::debug!(%rejection, "a command was refused");
        }
    }

    fn submit(
        &mut self,
        request_id: Option<String>,
        submission: Submission,
        reply: oneshot::Sender<Result<(v1::Job, bool), Status>>,
    ) {
        let Submission {
            spec,
            parent,
            output,
            device_kind,
            priority,
            free,
        } = submission;
        let known = request_id
            .as_deref()
            .is_some_and(|id| self.state.knows_request(id));
        if !known && let Err(taken) = free {
            let taken = Status::failed_precondition(taken);
            return self.later(reply, |_| Err(taken));
        }
        if self.full_until.is_some() {
            let full = Status::resource_exhausted("the coordinator's disk is full: free some space");
            return self.later(reply, |_| Err(full));
        }
        let command = Command::Submit {
            request_id,
            spec,
            parent,
            output,
            device_kind,
            priority,
        };
        match self.decide(command) {
            Ok(()) => {
                let job = self.state.last_job();
                tracing::info!(%job, "a job was submitted");
                self.later(reply, move |owner| Ok((owner.view(job)?, false)));
            }
            Err(Rejection::SubmittedBefore(job)) => {
                self.later(reply, move |owner| Ok((owner.view(job)?, true)));
            }
            Err(rejection) => self.later(reply, move |_| Err(status(&rejection))),
        }
    }

    fn keep_worker(
        &mut self,
        name: String,
        order: WorkerOrder,
        reply: oneshot::Sender<Result<v1::Worker, Status>>,
    ) {
        let Some(worker) = self.state.worker_named(&name).map(|worker| worker.id) else {
            return self.later(reply, move |owner| owner.worker(&name));
        };
        if matches!(order, WorkerOrder::Restart { .. })
            && let Err(refused) = self.can_be_told_to_restart(worker)
        {
            return self.later(reply, |_| Err(refused));
        }
        let decided = self.decide(match order {
            WorkerOrder::Cordon { reason } => Command::Cordon { worker, reason },
            WorkerOrder::Uncordon => Command::Uncordon { worker },
            WorkerOrder::Drain { reason } => Command::Drain { worker, reason },
            WorkerOrder::Restart { reason } => Command::RestartWorker { worker, reason },
        });
        self.later(reply, move |owner| {
            decided.map_err(|rejection| status(&rejection))?;
            owner.worker(&name)
        });
    }

    /// A restart is said on the worker's stream and nowhere kept: what cannot be said is refused, not forgotten.
    fn can_be_told_to_restart(&self, worker: WorkerId) -> Result<(), Status> {
        let Some(known) = self
            .state
            .worker(worker)
            .filter(|known| !known.standing.is_gone())
        else {
            // Refused in words of its own.
            return Ok(());
        };
        let name = &known.name;
        match self.links.get(&worker) {
            Some(link) if link.version >= 2 => Ok(()),
            Some(link) => Err(Status::failed_precondition(format!(
                "worker `{name}` speaks protocol version {}, which has no restart: replace it by a newer build",
                link.version
            ))),
            None => Err(Status::failed_precondition(format!(
                "worker `{name}` is not connected: ask again when it is"
            ))),
        }
    }

    fn greet(&mut self, greeting: Greeting, reply: oneshot::Sender<Result<WorkerHandle, Status>>) {
        let Greeting {
            introduction,
            build,
            version,
            highest_term,
            attempts,
            outbox,
            stop,
        } = greeting;
        if let Err(refused) = self.hears_of(highest_term) {
            return self.later(reply, move |_| Err(refused));
        }
        let (name, epoch) = (introduction.name.clone(), introduction.epoch);
        if let Err(rejection) = self.decide(Command::Introduce(introduction)) {
            return self.later(reply, move |owner| Err(owner.refusal(&rejection)));
        }
        let Some(worker) = self.state.worker_named(&name).map(|worker| worker.id) else {
            return self.later(reply, |_| Err(Status::internal("the worker has no id")));
        };
        self.heard.insert(worker, self.surroundings.clock.elapsed());
        self.next_link = self.next_link.saturating_add(1);
        let handle = WorkerHandle {
            worker,
            epoch,
            link: self.next_link,
        };
        self.links.remove(&worker);
        self.later(reply, move |owner| {
            let link = Link {
                epoch,
                build,
                version,
                number: handle.link,
                outbox,
                stop,
            };
            owner.links.insert(worker, link);
            owner.send(
                worker,
                Message::Welcome(owner.welcome(worker, version, &attempts)),
            );
            owner.send_again(worker, &attempts);
            tracing::info!(worker = name, %epoch, "a worker connected");
            Ok(handle)
        });
    }

    /// A worker is told the epoch it is known by unless a process of that epoch is connected: a clock that ran
    /// ahead once must not lock the name out, and two processes must not take it from each other in turns.
    fn refusal(&self, rejection: &Rejection) -> Status {
        let mut refusal = status(rejection);
        let Rejection::StaleEpoch { name, known, said } = rejection else {
            return refusal;
        };
        if let Ok(epoch) = said.0.to_string().parse() {
            refusal.metadata_mut().insert(STALE_EPOCH_METADATA, epoch);
        }
        let worker = self.state.worker_named(name).map(|worker| worker.id);
        let is_connected = worker.is_some_and(|worker| self.links.contains_key(&worker));
        if !is_connected && let Ok(epoch) = known.0.to_string().parse() {
            refusal.metadata_mut().insert(KNOWN_EPOCH_METADATA, epoch);
        }
        refusal
    }

    fn welcome(&self, worker: WorkerId, version: u32, attempts: &[Lease]) -> v1::Welcome {
        v1::Welcome {
            protocol_version: version,
            term: self.state.term().0,
            worker_id: worker.0,
            heartbeat_interval_ms: milliseconds(self.options.heartbeat_interval),
            worker_lost_ms: milliseconds(self.options.worker_lost),
            orphan_grace_ms: milliseconds(self.options.orphan_grace),
            artifact_store: self.surroundings.store.clone(),
            artifact_store_id: self.surroundings.store_id.clone(),
            superseded: self.superseded(worker, attempts),
        }
    }

    /// A worker was last welcomed by a coordinator of this term. Where it is a higher one the worker takes none
    /// of this coordinator's, so that either somebody has taken over, or a higher term has to begin.
    fn hears_of(&mut self, term: Term) -> Result<(), Status> {
        let own = self.state.term();
        if term <= own {
            return Ok(());
        }
        if term.0.saturating_sub(own.0) > TERMS_LOST {
            return Err(Status::invalid_argument(format!(
                "the worker speaks of term {term} and this coordinator has term {own}: the worker is of another \
                 cluster, start it anew"
            )));
        }
        match self.fence.hears_of(term) {
            Heard::Looks => Err(Status::failed_precondition(format!(
                "the worker was welcomed by a coordinator of term {term} and this one has term {own}: it looks \
                 whether that one has taken over. When this is said for long, the worker is of another cluster: \
                 start it anew"
            ))),
            Heard::Rises => {
                tracing::warn!(%term, %own, "the journal has lost its last terms: one above them is begun");
                let above = Command::BeginTermAt { term: term.next() };
                self.decide(above).map_err(|rejection| status(&rejection))?;
                // Everybody else has to be told of it, and those who follow jobs to count anew.
                self.links.clear();
                self.watchers = Watchers::new(self.state.term());
                Ok(())
            }
        }
    }

    /// What the worker should run, begin or stop but did not say it knows of.
    fn send_again(&mut self, worker: WorkerId, known: &[Lease]) {
        let held: Vec<_> = self.state.attempts_on(worker).cloned().collect();
        for attempt in held {
            let id = attempt.lease.attempt;
            if attempt.cancelled {
                self.stop_attempt(id);
                continue;
            }
            if !known.contains(&attempt.lease) {
                self.assign(id);
            }
            self.release(id);
        }
        let drain = self.state.worker(worker).and_then(|known| known.drain.clone());
        if let Some(reason) = drain {
            let term = self.state.term().0;
            self.send(worker, Message::Drain(v1::Drain { reason, term }));
        }
    }

    /// Which of these the worker must stop: those it no longer holds and whose end was not taken. One whose
    /// end was taken will be said again, and acknowledged again.
    fn superseded(&self, worker: WorkerId, leases: &[Lease]) -> Vec<v1::Superseded> {
        let stale = leases.iter().filter(|lease| {
            let held = self.state.attempt(lease.attempt);
            let is_held = held.is_some_and(|held| held.lease == **lease && held.worker == worker);
            !is_held && !self.state.completed_before(**lease)
        });
        stale
            .map(|lease| v1::Superseded {
                lease: Some(wire(*lease)),
                reason: "the attempt has ended or was handed on".to_owned(),
            })
            .collect()
    }

    fn heartbeat(
        &mut self,
        term: Term,
        worker: WorkerId,
        epoch: Epoch,
        attempts: &[Lease],
    ) -> Result<v1::HeartbeatResponse, Status> {
        let again = |what: &str| Status::failed_precondition(format!("{what}: connect again"));
        if term < self.state.term() {
            return Err(again("the coordinator has been started anew"));
        }
        let known = self
            .state
            .worker(worker)
            .ok_or_else(|| again("the worker is unknown"))?;
        if known.epoch != epoch {
            return Err(again("the worker has been started anew"));
        }
        if term > self.state.term() {
            // It has left for another that may have taken over. A look does no harm.
            let _ = self.fence.hears_of(term);
            return Err(again("a coordinator of a higher term has welcomed the worker"));
        }
        if known.standing.is_gone() {
            return Err(again("the worker was given up"));
        }
        if self.links.get(&worker).is_none_or(|link| link.epoch != epoch) {
            return Err(again("the worker has no stream"));
        }
        self.heard.insert(worker, self.surroundings.clock.elapsed());
        let superseded = self.superseded(worker, attempts);
        Ok(v1::HeartbeatResponse {
            term: self.state.term().0,
            superseded,
        })
    }

    fn report(&mut self, from: WorkerHandle, lease: Lease, report: Report) {
        let worker = from.worker;
        self.heard.insert(worker, self.surroundings.clock.elapsed());
        match report {
            Report::Progress(progress) => return self.progressed(worker, lease, progress),
            Report::Log { first_line, lines } => return self.keep_log(worker, lease, first_line, lines),
            _ => self.reporters.insert(worker),
        };
        let command = match report {
            Report::Progress(_) | Report::Log { .. } => return,
            Report::Completed(output) => Command::Complete {
                worker,
                lease,
                output,
            },
            Report::Failed(failure) => {
                tracing::warn!(attempt = %lease.attempt, reason = failure.message, "an attempt failed");
                Command::Fail {
                    worker,
                    lease,
                    failure,
                }
            }
            Report::Stopped => Command::Stopped { worker, lease },
            Report::Prepared(address) => {
                // Not acknowledged: it is said again on each new stream until the gang is released.
                return self.note(Command::Prepared {
                    worker,
                    lease,
                    address,
                });
            }
        };
        let mut decided = self.decide(command);
        if let Err(Rejection::Invalid(reason)) = &decided {
            // A result that cannot be kept is a failure: left alone, its task would hang.
            let failure = Failure {
                kind: FailureKind::Invalid,
                message: reason.clone(),
            };
            decided = self.decide(Command::Fail {
                worker,
                lease,
                failure,
            });
        }
        let answer = match decided {
            Ok(()) => Message::Acknowledged(v1::Acknowledged {
                lease: Some(wire(lease)),
            }),
            Err(rejection) => {
                self.metrics.stale_message();
                tracing::info!(attempt = %lease.attempt, %rejection, "a report was refused");
                let reason = rejection.to_string();
                Message::Superseded(v1::Superseded {
                    lease: Some(wire(lease)),
                    reason,
                })
            }
        };
        self.answers.push(Box::new(move |owner, durable| {
            if durable.is_ok() {
                owner.send(worker, answer);
            }
        }));
    }

    fn progressed(&mut self, worker: WorkerId, lease: Lease, progress: espalier_proto::task::Progress) {
        let held = self.state.attempt(lease.attempt);
        let Some(held) = held.filter(|held| held.lease == lease && held.worker == worker) else {
            return;
        };
        self.watchers.changed(held.job);
        self.progress.insert(lease.attempt, progress);
    }

    fn planned(&mut self, job: JobId, revision: u64, planned: Result<Planned, String>) {
        self.planning.remove(&job);
        let known = self.state.job(job);
        if known.is_some_and(|known| revision <= known.planned) {
            // The job was retried since: the planner is asked what it wants now.
            self.effects.push(Effect::Plan { job });
            return;
        }
        let command = match planned {
            Ok(Planned::Stages(stages)) => Command::StagesPlanned {
                job,
                revision,
                stages,
            },
            Ok(Planned::Outcome(outcome)) => Command::OutcomeReached {
                job,
                revision,
                outcome,
            },
            Err(message) => Command::JobBroken { job, message },
        };
        if let Err(rejection) = self.decide(command) {
            // A plan that cannot be kept would be asked for for ever.
            self.note(Command::JobBroken {
                job,
                message: format!("the plan was refused: {rejection}"),
            });
        }
    }
}

/// What is said to who asked once the turn is durable.
pub(super) fn when_durable<T: Send + 'static>(
    reply: Reply<T>,
    answer: impl FnOnce(&mut Owner) -> Result<T, Status> + Send + 'static,
) -> Answer {
    Box::new(move |owner, durable| {
        let answer = durable.and_then(|()| answer(owner));
        // Who asked may have gone.
        let _ = reply.send(answer);
    })
}

/// A lease as messages carry it.
pub(super) fn wire(lease: Lease) -> v1::Lease {
    v1::Lease {
        term: lease.term.0,
        epoch: lease.epoch.0,
        attempt: lease.attempt.0,
    }
}

fn milliseconds(duration: std::time::Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
