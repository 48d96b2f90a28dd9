//! Heartbeats: each a call of its own, lost, late or doubled on a bad link. On a good link they cost no event:
//! [`World::credit`] makes all of them good at once, before silence could be judged.

use std::time::Duration;

use espalier_coordinator::scheduler::{AttemptId, Epoch, Lease, Term, WorkerId};
use espalier_coordinator::service::owner::Request;
use espalier_proto::v1::{self, HeartbeatRequest, HeartbeatResponse};
use espalier_worker::agent::core::Input;
use tokio::sync::oneshot;
use tonic::{Code, Status};

use crate::coordinator::Waiting;
use crate::network::Place;
use crate::world::{Event, World};

/// How often good links are credited with their heartbeats: before a silence of 30 s could be judged.
pub const CREDIT: Duration = Duration::from_secs(20);

/// A heartbeat under way.
#[derive(Debug)]
pub struct HeartbeatCall {
    /// Which worker's.
    pub worker: usize,
    /// Its life.
    pub life: u64,
    /// The connection it belongs to.
    pub connection: u64,
    /// The coordinator's machine.
    pub machine: usize,
    /// What it says.
    pub request: HeartbeatRequest,
    /// What was answered.
    pub answer: Option<Result<HeartbeatResponse, Status>>,
}

impl World {
    /// A worker sends a heartbeat.
    pub fn heartbeat(&mut self, worker: usize, connection: u64, request: HeartbeatRequest) {
        let Some(known) = self.workers.get(worker) else {
            return;
        };
        let life = known.life;
        let Some(stream) = known.stream.and_then(|id| self.streams.get(&id)) else {
            return;
        };
        let machine = stream.machine;
        for latency in self.call(Place::Worker(worker), Place::Coordinator(machine)) {
            let call = HeartbeatCall {
                worker,
                life,
                connection,
                machine,
                request: request.clone(),
                answer: None,
            };
            self.queue.after(latency, Event::HeartbeatArrives(Box::new(call)));
        }
    }

    /// A heartbeat arrives at a coordinator.
    pub fn heartbeat_arrives(&mut self, mut call: HeartbeatCall) {
        let machine = call.machine;
        let runs = self
            .coordinators
            .get(machine)
            .is_some_and(|known| known.process.is_some());
        if !runs {
            call.answer = Some(Err(Status::unavailable("nobody listens")));
            return self.answer_heartbeat(call, Duration::ZERO);
        }
        let (reply, answer) = oneshot::channel();
        let request = heartbeat_request(&call.request, reply);
        self.expect(
            machine,
            Waiting::Heartbeat {
                call: Box::new(call),
                answer,
            },
        );
        self.ask(machine, request);
    }

    /// A coordinator's answer to a heartbeat sets out.
    pub fn answer_heartbeat(&mut self, call: HeartbeatCall, delay: Duration) {
        let back = self.call(Place::Coordinator(call.machine), Place::Worker(call.worker));
        if let Some(latency) = back.first() {
            self.queue
                .after(delay + *latency, Event::HeartbeatAnswered(Box::new(call)));
        }
    }

    /// The answer to a heartbeat arrives.
    ///
    /// # Errors
    /// What no run may show.
    pub fn heartbeat_answered(&mut self, call: HeartbeatCall) -> Result<(), String> {
        let connection = call.connection;
        let input = match call.answer {
            Some(Ok(answer)) => {
                if let Some(known) = self.workers.get_mut(call.worker) {
                    known.unanswered = false;
                }
                Input::HeartbeatAnswer { connection, answer }
            }
            Some(Err(status)) => Input::HeartbeatFailed {
                connection,
                unknown: matches!(status.code(), Code::FailedPrecondition | Code::NotFound),
                reason: status.message().to_owned(),
            },
            None => return Ok(()),
        };
        self.feed(call.worker, call.life, input)
    }

    /// Whether a worker and a coordinator hear each other without fail.
    pub fn hear_each_other(&self, worker: usize, machine: usize) -> bool {
        let awake = self.workers.get(worker).is_some_and(|known| !known.paused)
            && self.coordinators.get(machine).is_some_and(|known| !known.paused);
        awake
            && self
                .network
                .is_good(Place::Worker(worker), Place::Coordinator(machine))
    }

    /// Makes good the heartbeats of every worker whose link to this coordinator is good.
    pub fn credit(&mut self, machine: usize, life: u64) {
        let Some(known) = self.coordinators.get(machine) else {
            return;
        };
        if known.life != life || known.process.is_none() {
            return;
        }
        for worker in 0..self.workers.len() {
            self.credit_one(worker, machine);
        }
        self.queue.after(CREDIT, Event::Credit { machine, life });
    }

    /// Makes one worker's heartbeats good, up to now.
    pub fn credit_one(&mut self, worker: usize, machine: usize) {
        if !self.hear_each_other(worker, machine) {
            return;
        }
        let Some(known) = self.workers.get(worker) else {
            return;
        };
        let Some(process) = known.process.as_ref() else {
            return;
        };
        let Some(stream) = known.stream.and_then(|id| self.streams.get(&id)) else {
            return;
        };
        let Some(end) = stream
            .coordinator_end
            .as_ref()
            .filter(|_| stream.machine == machine)
        else {
            return;
        };
        let Some(handle) = end.handle.filter(|_| process.core.is_connected()) else {
            return;
        };
        let request = HeartbeatRequest {
            term: process.core.highest_term(),
            worker_id: handle.worker.0,
            epoch: handle.epoch.0,
            attempts: process.core.leases(),
        };
        let call = Box::new(HeartbeatCall {
            worker,
            life: known.life,
            connection: stream.connection,
            machine,
            request: request.clone(),
            answer: None,
        });
        let (reply, answer) = oneshot::channel();
        self.expect(machine, Waiting::Credit { call, answer });
        self.ask(machine, heartbeat_request(&request, reply));
    }
}

fn heartbeat_request(
    request: &HeartbeatRequest,
    reply: oneshot::Sender<Result<HeartbeatResponse, Status>>,
) -> Request {
    let lease = |lease: &v1::Lease| Lease {
        term: Term(lease.term),
        epoch: Epoch(lease.epoch),
        attempt: AttemptId(lease.attempt),
    };
    Request::Heartbeat {
        term: Term(request.term),
        worker: WorkerId(request.worker_id),
        epoch: Epoch(request.epoch),
        attempts: request.attempts.iter().map(lease).collect(),
        reply,
    }
}
