//! Streams between workers and coordinators.
//!
//! Either end of a stream may let go of it, and the other finds out: by what the machine says in its
//! process's stead, or, when that cannot be heard, by keepalive.

use std::time::Duration;

use espalier_coordinator::service::owner::{Greeting, Request, WorkerHandle};
use espalier_coordinator::service::workers;
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{CoordinatorMessage, Hello, WorkerMessage};
use espalier_worker::agent::core::{Input, Refusal};
use espalier_worker::agent::link::refusal;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::coordinator::Waiting;
use crate::network::{KEEPALIVE, Lane, Place};
use crate::world::{Event, World};

/// Messages that may wait for a worker; as the service has it.
const OUTBOX: usize = 256;
/// How often a new stream brings what was said on those before once more.
const ECHO: f64 = 0.3;

/// Names a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// What goes up a stream.
#[derive(Debug)]
pub enum Upward {
    /// A message.
    Message(Box<WorkerMessage>),
    /// The worker's end is gone.
    End,
}

/// What comes down a stream.
#[derive(Debug)]
pub enum Downward {
    /// A message.
    Message(Box<CoordinatorMessage>),
    /// The coordinator refuses the hello.
    Refused(Refusal, String),
    /// The coordinator's end is gone.
    End,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    /// Which worker's.
    pub worker: usize,
    /// Its life.
    pub life: u64,
    /// How the worker counts it.
    pub connection: u64,
    /// The coordinator's machine.
    pub machine: usize,
    /// The coordinator's life; 0 before the hello has arrived.
    pub coordinator_life: u64,
    /// Whether the worker holds its end.
    pub worker_end: bool,
    /// What the coordinator holds.
    pub coordinator_end: Option<CoordinatorEnd>,
    welcomed: bool,
    up: Lane<Upward>,
    down: Lane<Downward>,
}

/// The coordinator's end of a stream.
#[derive(Debug)]
pub struct CoordinatorEnd {
    /// How the loop names it, once it was greeted.
    pub handle: Option<WorkerHandle>,
    /// What the loop sends.
    pub outbox: mpsc::Receiver<Result<CoordinatorMessage, Status>>,
    /// Cancelled when the loop lets go.
    pub stop: CancellationToken,
}

impl World {
    /// A worker connects and says hello.
    pub fn connect(&mut self, worker: usize, connection: u64, hello: Hello) {
        let machine = self.address;
        let Some(life) = self.workers.get(worker).map(|known| known.life) else {
            return;
        };
        self.next_stream += 1;
        let id = StreamId(self.next_stream);
        let stream = Stream {
            worker,
            life,
            connection,
            machine,
            coordinator_life: 0,
            worker_end: true,
            coordinator_end: None,
            welcomed: false,
            up: Lane::default(),
            down: Lane::default(),
        };
        self.streams.insert(id, stream);
        if let Some(known) = self.workers.get_mut(worker) {
            known.stream = Some(id);
        }
        let first = WorkerMessage {
            message: Some(FromWorker::Hello(hello)),
        };
        self.send_up(id, Upward::Message(Box::new(first)));
    }

    /// Puts something on the way to the coordinator.
    pub fn send_up(&mut self, id: StreamId, message: Upward) {
        let now = self.now();
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let latency = self
            .network
            .latency(Place::Worker(stream.worker), Place::Coordinator(stream.machine));
        let at = stream.up.send(now, latency, message);
        self.queue.at(at, Event::Up { stream: id });
    }

    /// Puts something on the way to the worker, from a moment on.
    pub fn send_down(&mut self, id: StreamId, delay: Duration, message: Downward) {
        let now = self.now();
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let latency = self
            .network
            .latency(Place::Coordinator(stream.machine), Place::Worker(stream.worker));
        let at = stream.down.send(now, delay + latency, message);
        self.queue.at(at, Event::Down { stream: id });
    }

    /// The worker lets go of its end; what it sent may or may not be on the wire yet.
    pub fn let_go_up(&mut self, id: StreamId) {
        let lost = self.dice.chance(0.5);
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.worker_end = false;
        if lost {
            stream.up.clear();
        }
        self.send_up(id, Upward::End);
        self.sweep(id);
    }

    /// The machine of an end is gone without a word: the other end finds out by keepalive.
    pub fn vanish(&mut self, id: StreamId, worker_end: bool) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.up.clear();
        stream.down.clear();
        if worker_end {
            stream.worker_end = false;
        } else {
            stream.coordinator_end = None;
        }
        self.queue.after(KEEPALIVE, Event::Keepalive { stream: id });
        self.sweep(id);
    }

    /// Forgets a stream that neither end holds.
    fn sweep(&mut self, id: StreamId) {
        let is_gone = self.streams.get(&id).is_some_and(|stream| {
            !stream.worker_end && stream.coordinator_end.is_none() && stream.up.is_empty()
        });
        if is_gone {
            self.streams.remove(&id);
        }
    }

    /// Whether something can arrive where this stream leads up to.
    fn reaches_up(&self, stream: &Stream) -> bool {
        let (worker, machine) = (Place::Worker(stream.worker), Place::Coordinator(stream.machine));
        !self.network.is_cut(worker, machine)
            && self
                .coordinators
                .get(stream.machine)
                .is_some_and(|known| !known.paused)
    }

    /// The next message up the stream has arrived, if nothing is in its way.
    pub fn arrive_up(&mut self, id: StreamId) {
        let now = self.now();
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        if !self.reaches_up(stream) {
            return;
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let Some(message) = stream.up.receive(now) else {
            return;
        };
        match message {
            Upward::Message(message) => self.deliver_up(id, *message),
            Upward::End => {
                self.close_coordinator_end(id);
                self.sweep(id);
            }
        }
    }

    /// Everything that has arrived is read at once.
    pub fn read_all_up(&mut self, id: StreamId) {
        let waiting = self.streams.get(&id).map_or(0, |stream| stream.up.len());
        for _ in 0..waiting {
            self.arrive_up(id);
        }
    }

    /// The loop is told that a stream has ended.
    fn close_coordinator_end(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let machine = stream.machine;
        let ended = stream.coordinator_end.take();
        if let Some(from) = ended.and_then(|end| end.handle) {
            self.ask(machine, Request::Closed { from });
        }
    }

    fn deliver_up(&mut self, id: StreamId, message: WorkerMessage) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        let machine = stream.machine;
        let running = self
            .coordinators
            .get(machine)
            .filter(|known| known.process.is_some())
            .map(|known| known.life);
        let Some(life) = running else {
            // Nobody listens: the machine says so.
            return self.send_down(id, Duration::ZERO, Downward::End);
        };
        if let Some(FromWorker::Hello(hello)) = message.message {
            return self.deliver_hello(id, life, hello);
        }
        if stream.coordinator_life != life {
            return self.send_down(id, Duration::ZERO, Downward::End);
        }
        let handle = stream.coordinator_end.as_ref().and_then(|end| end.handle);
        if let (Some(from), Some(message)) = (handle, message.message)
            && let Some(request) = workers::translate(from, message)
        {
            self.ask(machine, request);
        }
    }

    fn deliver_hello(&mut self, id: StreamId, life: u64, hello: Hello) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let machine = stream.machine;
        stream.coordinator_life = life;
        let (outbox, receiver) = mpsc::channel(OUTBOX);
        let stop = CancellationToken::new();
        let greeting = match workers::greeting(hello, outbox, stop.clone()) {
            Ok(greeting) => greeting,
            Err(status) => return self.refuse(id, &status),
        };
        stream.coordinator_end = Some(CoordinatorEnd {
            handle: None,
            outbox: receiver,
            stop,
        });
        let (reply, answer) = oneshot::channel();
        self.expect(machine, Waiting::Greeting { stream: id, answer });
        self.greet(machine, greeting, reply);
    }

    fn greet(
        &mut self,
        machine: usize,
        greeting: Greeting,
        reply: oneshot::Sender<Result<WorkerHandle, Status>>,
    ) {
        let greeting = Box::new(greeting);
        self.ask(machine, Request::Greet { greeting, reply });
    }

    /// The loop has answered a hello.
    pub fn greeted(&mut self, id: StreamId, delay: Duration, answer: Result<WorkerHandle, Status>) {
        match answer {
            Ok(handle) => {
                let gone = {
                    let Some(stream) = self.streams.get_mut(&id) else {
                        return;
                    };
                    if let Some(end) = stream.coordinator_end.as_mut() {
                        end.handle = Some(handle);
                    }
                    stream.coordinator_end.is_none().then_some(stream.machine)
                };
                // It broke before the loop had answered: as with the service, the loop hears of it after.
                if let Some(machine) = gone {
                    self.ask(machine, Request::Closed { from: handle });
                }
            }
            Err(status) => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.coordinator_end = None;
                }
                self.queue_refusal(id, delay, &status);
            }
        }
    }

    fn refuse(&mut self, id: StreamId, status: &Status) {
        self.queue_refusal(id, Duration::ZERO, status);
    }

    fn queue_refusal(&mut self, id: StreamId, delay: Duration, status: &Status) {
        let is_final = matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition);
        let said = if is_final {
            Downward::Refused(refusal(status), status.message().to_owned())
        } else {
            Downward::End
        };
        self.send_down(id, delay, said);
    }

    /// The next message down the stream has arrived, if nothing is in its way.
    ///
    /// # Errors
    /// What no run may show.
    pub fn arrive_down(&mut self, id: StreamId) -> Result<(), String> {
        let now = self.now();
        let Some(stream) = self.streams.get(&id) else {
            return Ok(());
        };
        let (worker, machine) = (stream.worker, stream.machine);
        let cut = self
            .network
            .is_cut(Place::Coordinator(machine), Place::Worker(worker));
        let paused = self.workers.get(worker).is_some_and(|known| known.paused);
        if cut || paused {
            return Ok(());
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        let Some(message) = stream.down.receive(now) else {
            return Ok(());
        };
        if !stream.worker_end {
            return Ok(());
        }
        let (connection, life) = (stream.connection, stream.life);
        let reason = "the stream has ended".to_owned();
        let input = match message {
            Downward::Message(message) => match message.message {
                Some(FromCoordinator::Welcome(welcome)) if !stream.welcomed => {
                    stream.welcomed = true;
                    let welcome = Box::new(welcome);
                    Input::Connected { connection, welcome }
                }
                Some(message) => Input::Message { connection, message },
                None => Input::ConnectionLost { connection, reason },
            },
            Downward::Refused(refusal, reason) => {
                stream.worker_end = false;
                Input::Refused {
                    connection,
                    refusal,
                    reason,
                }
            }
            Downward::End => {
                stream.worker_end = false;
                Input::ConnectionLost { connection, reason }
            }
        };
        self.sweep(id);
        let welcomed = matches!(input, Input::Connected { .. });
        self.feed(worker, life, input)?;
        if welcomed && self.dice.chance(ECHO) {
            self.echo(worker);
        }
        Ok(())
    }

    /// Both ends of a stream look whether the other answers.
    ///
    /// # Errors
    /// What no run may show.
    pub fn keepalive(&mut self, id: StreamId) -> Result<(), String> {
        let Some(stream) = self.streams.get(&id) else {
            return Ok(());
        };
        let (worker, machine) = (Place::Worker(stream.worker), Place::Coordinator(stream.machine));
        let cut = self.network.is_cut(worker, machine) || self.network.is_cut(machine, worker);
        let alive = stream.worker_end && stream.coordinator_end.is_some();
        if alive && !cut {
            return Ok(());
        }
        let (index, life, connection) = (stream.worker, stream.life, stream.connection);
        let tell_worker = stream.worker_end;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.worker_end = false;
            stream.up.clear();
            stream.down.clear();
        }
        self.close_coordinator_end(id);
        self.sweep(id);
        if !tell_worker {
            return Ok(());
        }
        let reason = "the other end does not answer".to_owned();
        self.feed(index, life, Input::ConnectionLost { connection, reason })
    }

    /// A stream breaks, losing what is under way; each end finds out by itself.
    ///
    /// # Errors
    /// What no run may show.
    pub fn break_stream(&mut self, worker: usize) -> Result<(), String> {
        let Some(id) = self.workers.get_mut(worker).and_then(|known| known.stream.take()) else {
            return Ok(());
        };
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        stream.up.clear();
        stream.down.clear();
        let (life, connection) = (stream.life, stream.connection);
        let told = std::mem::take(&mut stream.worker_end);
        self.send_up(id, Upward::End);
        if !told {
            return Ok(());
        }
        let reason = "the connection was reset".to_owned();
        self.feed(worker, life, Input::ConnectionLost { connection, reason })
    }

    /// What was held up on a link goes on.
    pub fn go_on(&mut self, worker: usize, machine: usize) {
        let ids: Vec<(StreamId, usize, usize)> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.worker == worker && stream.machine == machine)
            .map(|(id, stream)| (*id, stream.up.len(), stream.down.len()))
            .collect();
        for (stream, up, down) in ids {
            // One event for each message held up: in order on one stream, and not across streams.
            let delay = self.dice.scale(Duration::from_millis(1), Duration::from_secs(3));
            for _ in 0..up {
                self.queue.after(delay, Event::Up { stream });
            }
            for _ in 0..down {
                self.queue.after(delay, Event::Down { stream });
            }
        }
    }

    /// A link was cut: its streams will be given up if it stays so.
    pub fn was_cut(&mut self, worker: usize, machine: usize) {
        let ids: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.worker == worker && stream.machine == machine)
            .map(|(id, _)| *id)
            .collect();
        for stream in ids {
            let jitter = self.dice.duration(Duration::ZERO, Duration::from_secs(10));
            self.queue.after(KEEPALIVE - jitter, Event::Keepalive { stream });
        }
    }
}
