//! Workers that come, come back, and say that they live.

use espalier_proto::v1::{self, coordinator_message::Message};
use espalier_proto::{KNOWN_EPOCH_METADATA, STALE_EPOCH_METADATA};
use tonic::Status;

use super::handle::wire;
use super::request::{Greeting, Reply, WorkerHandle};
use super::{Link, Owner, status};
use crate::scheduler::{Command, Epoch, Lease, Rejection, Standing, Term, WorkerId};
use crate::service::watch::Watchers;
use crate::term::Heard;

/// More terms than a journal may have lost: each was the start of a coordinator.
const TERMS_LOST: u64 = 1_000_000;

impl Owner {
    /// A restart is said on the worker's stream and nowhere kept: what cannot be said is refused, not forgotten.
    pub(super) fn can_be_told_to_restart(&self, worker: WorkerId) -> Result<(), Status> {
        let Some(known) = self
            .state
            .worker(worker)
            .filter(|known| known.standing == Standing::Present)
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

    pub(super) fn greet(&mut self, greeting: Greeting, reply: Reply<WorkerHandle>) {
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
            owner.bereft.connected(worker);
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

    pub(super) fn heartbeat(
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
}

fn milliseconds(duration: std::time::Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
