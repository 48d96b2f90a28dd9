//! Requests in, commands to the state machine; answers wait until the turn is durable.

use espalier_proto::task::{Failure, FailureKind};
use espalier_proto::v1::{self, coordinator_message::Message};
use tonic::Status;

use super::request::{JobOrder, Reply, Report, Request, Submission, WorkerHandle, WorkerOrder};
use super::{Answer, Following, Owner, status};
use crate::journal;
use crate::scheduler::{Command, Effect, JobId, Lease, Rejection, WorkerId};
use crate::service::Planned;
impl Owner {
    pub(super) fn handle(&mut self, request: Request) {
        match request {
            Request::Submit {
                request_id,
                submission,
                reply,
            } => self.submit(request_id, *submission, reply),
            Request::Query(query) => {
                let answer = self.query(query);
                self.answers.extend(answer);
            }
            Request::Watch { job, reply } => self.answers.push(Self::watch(job, reply)),
            Request::KeepJob { job, order, reply } => self.keep_job(job, order, reply),
            Request::KeepWorker { name, order, reply } => self.keep_worker(name, order, reply),
            Request::Greet { greeting, reply } => self.greet(*greeting, reply),
            Request::Report { from, lease, report } => self.report(from, lease, report),
            Request::Leave { from } => self.leave(from),
            Request::Closed { from } => self.closed(from),
            // Waits for the disk too: what is not durable must not be called over.
            Request::Heartbeat {
                term,
                worker,
                epoch,
                attempts,
                reply,
            } => self.later(reply, move |owner| {
                owner.heartbeat(term, worker, epoch, &attempts)
            }),
            Request::Planned {
                job,
                revision,
                planned,
            } => self.planned(job, revision, planned),
            Request::Written { job, written } => self.written(job, written),
            Request::Removed { job, removed } => self.removed(job, removed),
            Request::SnapshotEnded(taken) => self.snapshot_ended(taken),
            Request::Archived { job, written } => self.archived(job, written),
            Request::Answered => {}
            Request::Tick => {
                self.silence();
                self.end_late_gangs();
                self.let_go();
            }
            Request::Stop => {
                self.stopping = true;
                self.links.clear();
            }
        }
    }

    fn keep_job(&mut self, job: JobId, order: JobOrder, reply: Reply<v1::Job>) {
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

    fn leave(&mut self, from: WorkerHandle) {
        let WorkerHandle { worker, epoch, .. } = from;
        self.reporters.insert(worker);
        self.note(Command::Leave { worker, epoch });
    }

    fn written(&mut self, job: JobId, written: Result<(), String>) {
        self.writing.remove(&job);
        self.note(match written {
            Ok(()) => Command::OutcomeWritten { job },
            Err(message) => Command::JobBroken { job, message },
        });
    }

    fn removed(&mut self, job: JobId, removed: Result<(), String>) {
        self.writing.remove(&job);
        if let Err(error) = removed {
            // The job has ended all the same; its next submission will be told what is in the way.
            tracing::error!(%job, %error, "the half-written output stays");
        }
        self.note(Command::PartialRemoved { job });
    }

    fn snapshot_ended(&mut self, taken: Result<u64, journal::Error>) {
        if taken.is_ok() {
            self.metrics.snapshot_written(self.now().unix_ms);
        }
        self.journal.snapshot_ended(taken);
    }

    /// Answers once the turn is durable.
    pub(super) fn later<T: Send + 'static>(
        &mut self,
        reply: Reply<T>,
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

    fn submit(&mut self, request_id: Option<String>, submission: Submission, reply: Reply<(v1::Job, bool)>) {
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

    fn keep_worker(&mut self, name: String, order: WorkerOrder, reply: Reply<v1::Worker>) {
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

    fn report(&mut self, from: WorkerHandle, lease: Lease, report: Report) {
        let worker = from.worker;
        self.heard.insert(worker, self.surroundings.clock.elapsed());
        match report {
            Report::Progress(progress) => self.progressed(worker, lease, progress),
            Report::Log { first_line, lines } => self.keep_log(worker, lease, first_line, lines),
            Report::Completed(output) => {
                let complete = Command::Complete {
                    worker,
                    lease,
                    output,
                };
                self.ended(worker, lease, complete);
            }
            Report::Failed(failure) => {
                tracing::warn!(attempt = %lease.attempt, reason = failure.message, "an attempt failed");
                if failure.kind == FailureKind::RankLost {
                    self.is_bereft(lease);
                }
                let fail = Command::Fail {
                    worker,
                    lease,
                    failure,
                };
                self.ended(worker, lease, fail);
            }
            Report::Stopped => self.ended(worker, lease, Command::Stopped { worker, lease }),
            Report::Prepared(address) => {
                // Not acknowledged: it is said again on each new stream until the gang is released.
                self.reporters.insert(worker);
                let token = self.surroundings.secrets.draw().into();
                self.note(Command::Prepared {
                    worker,
                    lease,
                    address,
                    token,
                });
            }
        }
    }

    /// Takes what a worker says of an attempt's end; it is told once that is durable, or is not to be.
    fn ended(&mut self, worker: WorkerId, lease: Lease, command: Command) {
        self.reporters.insert(worker);
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
        let done = progress.went_on_from;
        self.progress.insert(lease.attempt, progress);
        if done > 0 {
            self.note(Command::WentOn { worker, lease, done });
        }
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
