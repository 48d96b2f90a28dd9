//! The agent's protocol, and nothing else: no I/O, no clock, no tasks, no randomness but a seeded jitter.
//!
//! [`Core::handle`] takes what happened and the time, and gives what to do. The agent is a rim around it,
//! and so is the simulation. Time only ever grows and is compared, never read: whoever drives the core sends
//! a [`Input::Tick`] when [`Core::wake_at`] has come.
//!
//! What holds, whatever comes in:
//! - an end is kept and said on every stream until it is acknowledged or superseded;
//! - the same lease twice is one attempt;
//! - a superseded attempt is stopped and nothing more is said of it;
//! - a coordinator with a lower term than one met before is not served;
//! - out of touch for longer than the orphan grace, everything is stopped and what has ended is kept;
//! - a worker whose name another process has taken since stops at once.

mod attempts;
mod interface;
mod leaving;
mod link;
mod log;

use std::time::Duration;

use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{
    Assign, HeartbeatRequest, HeartbeatResponse, Hello, Lease, Progress, Superseded, Welcome,
};

use attempts::Attempts;
pub use interface::{CoreOptions, DeviceEvent, Ended, Finish, Input, Output, Refusal, Run};
use link::{Link, Pauses, Terms};

/// How long a connection may take until its welcome.
const CONNECT_DEADLINE: Duration = Duration::from_secs(20);
/// A connection that lived this long was a good one: the next is tried without a long pause.
const GOOD_CONNECTION: Duration = Duration::from_secs(10);

/// How long a new process waits for another of its name and a higher epoch to go: longer than a coordinator takes to
/// notice that a connection is dead.
const RIVAL_PATIENCE: Duration = Duration::from_secs(60);

/// One worker's side of the protocol.
#[derive(Debug)]
pub struct Core {
    options: CoreOptions,
    attempts: Attempts,
    link: Link,
    connections: u64,
    pauses: Pauses,
    highest_term: u64,
    orphan_grace: Duration,
    /// When the last good connection was lost.
    alone_since: Duration,
    refused: Option<String>,
    /// Since when another process of a higher epoch is connected under this worker's name.
    rival_since: Option<Duration>,
    /// The stream has no room for logs: they are said when the next heartbeat is answered.
    logs_wait: bool,
    /// When what still runs is killed; set when the worker is on its way out.
    drain_deadline: Option<Duration>,
    /// Past the drain deadline with results that the coordinator has not taken.
    waits_for_results: bool,
    finished: bool,
}

impl Core {
    /// A worker that has done nothing yet; its first tick asks for a connection.
    pub fn new(options: CoreOptions) -> Self {
        Self {
            attempts: Attempts::new(options.devices.iter().map(|device| device.id.clone())),
            link: Link::Down {
                retry_at: Duration::ZERO,
            },
            connections: 0,
            pauses: Pauses::new(options.seed),
            highest_term: 0,
            orphan_grace: Duration::ZERO,
            alone_since: Duration::ZERO,
            refused: None,
            rival_since: None,
            logs_wait: false,
            drain_deadline: None,
            waits_for_results: false,
            finished: false,
            options,
        }
    }

    /// Takes what happened at `now`, which never falls, and appends what to do.
    pub fn handle(&mut self, input: Input, now: Duration, outputs: &mut Vec<Output>) {
        if self.finished {
            return;
        }
        match input {
            Input::Tick => {}
            Input::Connected { connection, welcome } if self.link.is_connecting(connection) => {
                self.welcomed(connection, &welcome, now, outputs);
            }
            Input::Refused {
                connection,
                refusal,
                reason,
            } if self.link.is_connecting(connection) => {
                self.refuse(refusal, reason, now, outputs);
            }
            Input::Message { connection, message } if self.link.is_up(connection) => {
                self.take_message(message, now, outputs);
            }
            Input::ConnectionLost { connection, reason } if self.link.connection() == Some(connection) => {
                self.lose(&reason, now, outputs);
            }
            Input::HeartbeatAnswer { connection, answer } if self.link.is_up(connection) => {
                self.take_heartbeat(answer, now, outputs);
            }
            Input::HeartbeatFailed {
                connection,
                unknown,
                reason,
            } if self.link.is_up(connection) => {
                self.link.heartbeat_over(false);
                if unknown {
                    self.lose(&reason, now, outputs);
                }
            }
            Input::Connected { .. }
            | Input::Refused { .. }
            | Input::Message { .. }
            | Input::ConnectionLost { .. }
            | Input::HeartbeatAnswer { .. }
            | Input::HeartbeatFailed { .. } => {}
            Input::LogHeldBack { lease, first_line } => {
                self.attempts.log_held_back(&lease, first_line);
                self.logs_wait = true;
            }
            Input::Device(event) => self.take_event(event, outputs),
            Input::ShutdownAsked if self.drain_deadline.is_some() => {
                return self.finish(Finish::Killed, outputs);
            }
            Input::ShutdownAsked => self.drain(now, outputs),
        }
        self.advance(now, outputs);
    }

    /// When the next tick is due, if nothing happens before.
    pub fn wake_at(&self) -> Option<Duration> {
        [self.wake_at_but_heartbeats(), self.link.heartbeat_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The same without heartbeats, for a simulation that lets those pass that neither fail nor tell news:
    /// a heartbeat that was never sent is not missed.
    pub fn wake_at_but_heartbeats(&self) -> Option<Duration> {
        if self.finished {
            return None;
        }
        let orphaned = self.orphaned_at();
        [self.link.wake_at(), orphaned, self.drained_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Leases of everything that waits, runs, or is not acknowledged.
    pub fn leases(&self) -> Vec<Lease> {
        self.attempts.leases()
    }

    /// The highest term that ever welcomed this worker; 0 before the first.
    pub fn highest_term(&self) -> u64 {
        self.highest_term
    }

    /// Whether a coordinator has welcomed the newest connection and it stands.
    pub fn is_connected(&self) -> bool {
        self.link.terms().is_some()
    }

    /// Does what time alone brings.
    fn advance(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        if self.finished {
            return;
        }
        if let Some(reason) = self.link.overdue(now) {
            self.lose(reason, now, outputs);
        }
        if self.finished {
            return;
        }
        if self.orphaned_at().is_some_and(|at| at <= now) {
            tracing::warn!("out of touch for longer than the orphan grace: attempts are stopped");
            self.attempts.stop_all(false, outputs);
            if let Some(reason) = self.refused.take() {
                return self.finish(Finish::Refused(reason), outputs);
            }
        }
        if self.drain_deadline.is_some() && self.is_handed_back() {
            return self.finish(Finish::Left, outputs);
        }
        if self.drain_deadline.is_some_and(|deadline| deadline <= now) {
            self.end_of_drain(now, outputs);
            if self.finished {
                return;
            }
        }
        if self.link.may_connect(now) {
            self.connect(now, outputs);
        }
        if let Some((connection, terms)) = self.link.beat(now) {
            let request = HeartbeatRequest {
                term: terms.term,
                worker_id: terms.worker_id,
                epoch: self.options.epoch,
                attempts: self.attempts.leases(),
            };
            outputs.push(Output::Heartbeat { connection, request });
        }
    }

    /// When attempts have been out of touch for too long; none while in touch or when there is nothing to stop.
    fn orphaned_at(&self) -> Option<Duration> {
        let stoppable = self.attempts.may_stop() || self.refused.is_some();
        (stoppable && !self.is_connected()).then(|| self.alone_since.saturating_add(self.orphan_grace))
    }

    fn finish(&mut self, how: Finish, outputs: &mut Vec<Output>) {
        self.finished = true;
        outputs.push(Output::Finish(how));
    }

    fn connect(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        self.connections += 1;
        self.link = Link::Connecting {
            connection: self.connections,
            deadline: now.saturating_add(CONNECT_DEADLINE),
        };
        let hello = Hello {
            protocol_version: espalier_proto::PROTOCOL_VERSION,
            worker: self.options.name.clone(),
            epoch: self.options.epoch,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: self.options.host.clone(),
            devices: self.options.devices.clone(),
            attempts: self.attempts.leases(),
            oldest_protocol_version: espalier_proto::OLDEST_PROTOCOL_VERSION,
            highest_term: self.highest_term,
        };
        outputs.push(Output::Connect {
            connection: self.connections,
            hello: Box::new(hello),
        });
    }

    fn welcomed(&mut self, connection: u64, welcome: &Welcome, now: Duration, outputs: &mut Vec<Output>) {
        if welcome.term < self.highest_term {
            let reason = format!(
                "an old coordinator of term {} answered, and term {} has been met",
                welcome.term, self.highest_term
            );
            return self.lose(&reason, now, outputs);
        }
        let spoken = espalier_proto::OLDEST_PROTOCOL_VERSION..=espalier_proto::PROTOCOL_VERSION;
        if !spoken.contains(&welcome.protocol_version) {
            let reason = format!(
                "the coordinator chose protocol version {}, and this worker speaks {} to {}: use builds at most \
                 one version apart",
                welcome.protocol_version,
                spoken.start(),
                spoken.end()
            );
            return self.finish(Finish::Refused(reason), outputs);
        }
        tracing::info!(
            term = welcome.term,
            worker = self.options.name,
            "connected to the coordinator"
        );
        self.highest_term = welcome.term;
        self.orphan_grace = Duration::from_millis(u64::from(welcome.orphan_grace_ms));
        self.refused = None;
        self.logs_wait = false;
        self.link = Link::up(connection, Terms::of(welcome), now);
        for superseded in &welcome.superseded {
            self.supersede(superseded, outputs);
        }
        if self.drain_deadline.is_some() {
            self.say_leaving(outputs);
        }
        outputs.extend(self.attempts.say_again().into_iter().map(Output::Send));
    }

    /// The coordinator wants none of this worker. One that has served it before may change its mind (or be
    /// replaced) within the orphan grace, unless another process has taken the worker's name.
    fn refuse(&mut self, refusal: Refusal, reason: String, now: Duration, outputs: &mut Vec<Output>) {
        match refusal {
            Refusal::Epoch { known: Some(known) } if self.highest_term == 0 => {
                // No lease was given to this process, so it is free to call itself newer.
                self.options.epoch = self.options.epoch.max(known.saturating_add(1));
                tracing::warn!(
                    epoch = self.options.epoch,
                    "this machine's clock was set back: the worker begins above the epoch it is known by"
                );
                return self.lose(&reason, now, outputs);
            }
            Refusal::Epoch { known: None }
                if self.highest_term == 0
                    && now.saturating_sub(*self.rival_since.get_or_insert(now)) < RIVAL_PATIENCE =>
            {
                return self.lose(&reason, now, outputs);
            }
            Refusal::Epoch { .. } => {
                tracing::error!(%reason, "another process has taken this worker's name: attempts are stopped");
                return self.finish(Finish::Refused(reason), outputs);
            }
            Refusal::Other if self.highest_term == 0 => {
                return self.finish(Finish::Refused(reason), outputs);
            }
            Refusal::Other => {}
        }
        self.lose(&reason, now, outputs);
        self.refused = Some(reason);
    }

    fn lose(&mut self, reason: &str, now: Duration, outputs: &mut Vec<Output>) {
        let Some(connection) = self.link.connection() else {
            return;
        };
        outputs.push(Output::Disconnect { connection });
        match self.link.up_since() {
            Some(since) => {
                tracing::warn!(
                    reason,
                    "the connection to the coordinator is lost; connecting again"
                );
                self.alone_since = now;
                if now.saturating_sub(since) >= GOOD_CONNECTION {
                    self.pauses.begin_again();
                }
            }
            None if self.pauses.is_first() => {
                tracing::warn!(reason, "cannot reach the coordinator; trying again");
            }
            None => tracing::debug!(reason, "cannot reach the coordinator"),
        }
        self.link = Link::Down {
            retry_at: now.saturating_add(self.pauses.next()),
        };
    }

    /// Says something that need not arrive now: on the next stream it is said again.
    fn send(&self, message: FromWorker, outputs: &mut Vec<Output>) {
        if self.is_connected() {
            outputs.push(Output::Send(message));
        }
    }

    fn take_event(&mut self, event: DeviceEvent, outputs: &mut Vec<Output>) {
        let messages = match event {
            DeviceEvent::Progress { lease, progress_json } => {
                let progress = self.attempts.holds(&lease).then(|| {
                    FromWorker::Progress(Progress {
                        lease: Some(lease),
                        progress_json: progress_json.into(),
                    })
                });
                progress.into_iter().collect()
            }
            DeviceEvent::Log {
                lease,
                first_line,
                lines,
            } => {
                self.attempts.log(&lease, first_line, lines);
                return self.say_logs(outputs);
            }
            DeviceEvent::Prepared { lease, address } => {
                self.attempts.prepared(&lease, address).into_iter().collect()
            }
            DeviceEvent::Ended { lease, ended } => self.attempts.ended(lease, ended, outputs),
            DeviceEvent::Gone { device } => self.attempts.device_gone(&device, outputs),
        };
        for message in messages {
            self.send(message, outputs);
        }
    }

    /// Says what no stream has taken yet of the logs; without a stream, later.
    fn say_logs(&mut self, outputs: &mut Vec<Output>) {
        if self.is_connected() && !self.logs_wait {
            outputs.extend(self.attempts.say_logs().into_iter().map(Output::Send));
        }
    }

    fn take_heartbeat(&mut self, answer: HeartbeatResponse, now: Duration, outputs: &mut Vec<Output>) {
        self.link.heartbeat_over(true);
        self.logs_wait = false;
        self.say_logs(outputs);
        for superseded in &answer.superseded {
            self.supersede(superseded, outputs);
        }
        if self.link.terms().is_some_and(|terms| terms.term != answer.term) {
            self.lose("the coordinator has started anew", now, outputs);
        }
    }

    fn take_message(&mut self, message: FromCoordinator, now: Duration, outputs: &mut Vec<Output>) {
        match message {
            FromCoordinator::Assign(assign) => self.assign(assign, outputs),
            FromCoordinator::Acknowledged(acknowledged) => {
                if let Some(lease) = acknowledged.lease {
                    tracing::debug!(attempt = lease.attempt, "acknowledged");
                    self.attempts.acknowledge(&lease);
                }
            }
            FromCoordinator::Cancel(cancel) => {
                let Some(lease) = cancel.lease.filter(|lease| self.is_ours(lease)) else {
                    return;
                };
                if let Some(message) = self.attempts.cancel(lease, outputs) {
                    self.send(message, outputs);
                }
            }
            FromCoordinator::Superseded(superseded) => self.supersede(&superseded, outputs),
            FromCoordinator::Release(release) => self.attempts.release(release, outputs),
            FromCoordinator::Drain(drain) if self.is_current(drain.term) => self.drain(now, outputs),
            FromCoordinator::Restart(restart) if self.is_current(restart.term) => {
                tracing::info!(reason = restart.reason, "device children are replaced");
                self.attempts.replace_children(outputs);
            }
            FromCoordinator::Drain(_) | FromCoordinator::Restart(_) | FromCoordinator::Welcome(_) => {}
        }
    }

    /// A lease given to an earlier incarnation of this worker means nothing to it.
    fn is_ours(&self, lease: &Lease) -> bool {
        lease.epoch == self.options.epoch
    }

    /// Whether a message is of the term that welcomed this stream; the version before names none.
    fn is_current(&self, term: u64) -> bool {
        term == 0 || self.link.terms().is_some_and(|terms| terms.term == term)
    }

    fn assign(&mut self, assign: Assign, outputs: &mut Vec<Output>) {
        let Some(lease) = assign.lease else { return };
        let Some(terms) = self.link.terms() else { return };
        if !self.is_ours(&lease) || lease.term > terms.term {
            tracing::warn!(
                ?lease,
                "an assignment with a lease that is not this worker's is left out"
            );
            return;
        }
        let message = if self.drain_deadline.is_some() && !self.attempts.knows(&lease) {
            Some(self.attempts.hand_back(lease))
        } else {
            self.attempts.assign(lease, assign, &terms, outputs)
        };
        if let Some(message) = message {
            self.send(message, outputs);
        }
    }

    fn supersede(&mut self, superseded: &Superseded, outputs: &mut Vec<Output>) {
        if let Some(lease) = superseded.lease.filter(|lease| self.is_ours(lease)) {
            self.attempts.supersede(&lease, outputs);
        }
    }
}

#[cfg(test)]
mod tests;
