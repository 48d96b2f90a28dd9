//! An NCCL communicator with its stream, and the thread that makes all calls on it.
//!
//! NCCL is told not to block: the thread makes a call, looks until it has gone through, and marks the stream. Between
//! calls it watches over those that the device still has before it: whether NCCL failed, whether one takes too long,
//! whether the mesh is broken. Then it aborts, after the mesh was told, so that whoever sees what an aborted call left
//! can know.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::collective::members::Members;
use crate::collective::mesh::{Mesh, Waiting};
use crate::collective::{Error, Flight, InFlight};
use crate::ops::cuda::{Beside, Id, Link, Mark, Matrix, Stream};
use crate::{Result, Tensor};

/// Between two looks at a call that goes through.
const QUICK: Duration = Duration::from_micros(20);
/// Between two looks at ranks that join.
const SLOW: Duration = Duration::from_millis(1);
/// Between two looks at what the device has before it, and at nothing.
const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(250);
/// How long the mesh may take to find whose fault an error of NCCL's was.
const GRACE: Duration = Duration::from_millis(1500);
/// Multiprocessors for messages, so that those of all directions and collective calls have room side by side.
const MESSAGE_BLOCKS: i32 = 8;

/// What a lane is for; ranks are the communicator's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// Collective calls.
    Together,
    /// Messages of one direction.
    Message { from: usize, to: usize },
}

impl Purpose {
    fn name(self) -> String {
        match self {
            Self::Together => "all on GPUs".to_owned(),
            Self::Message { from, to } => format!("from {from} to {to} on GPUs"),
        }
    }

    /// The communicator's ranks that take part, in the order that NCCL knows them by.
    fn ranks(self, members: &Members) -> Vec<usize> {
        match self {
            Self::Together => (0..members.size()).collect(),
            Self::Message { from, to } => vec![from, to],
        }
    }
}

/// What is called.
#[derive(Debug, Clone, Copy)]
pub(super) enum Call {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast { root: usize },
    Send,
    Receive,
}

impl Call {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

/// A call with its one or two operands, of which the last is written.
pub(super) struct Job {
    pub(super) call: Call,
    pub(super) operands: Vec<Matrix>,
    /// The compute stream is past this before the call begins.
    pub(super) before: Mark,
}

/// Buffers that a call uses. They go back to the pool, which is the compute stream's, once that stream waits for the
/// call or the call has ended.
type Held = Arc<Mutex<Vec<Matrix>>>;

enum Message {
    Call {
        job: Job,
        held: Held,
        queued: SyncSender<Result<Arc<Mark>>>,
    },
    Look,
    End,
}

/// Threads of lanes that have been let go of. Ranks let go of theirs in any order, and each lane ends when all have: who
/// holds the last share of this waits for them.
#[derive(Debug)]
pub(super) struct Parting {
    mesh: Arc<Mesh>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Parting {
    pub(super) fn new(mesh: Arc<Mesh>) -> Self {
        Self {
            mesh,
            threads: Mutex::default(),
        }
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // They end what is under way, unless another rank does not do its part.
        let deadline = Instant::now() + self.mesh.options().silence * 2;
        let is_over = || threads.iter().all(JoinHandle::is_finished);
        while !is_over() && Instant::now() < deadline {
            std::thread::sleep(SLOW);
        }
        if !is_over() {
            self.mesh.abort();
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of a communicator has panicked");
            }
        }
    }
}

/// The lane as its communicator holds it; it ends after this is dropped.
#[derive(Debug)]
pub(super) struct Lane {
    beside: Beside,
    messages: Sender<Message>,
    thread: Option<JoinHandle<()>>,
    parting: Arc<Parting>,
}

impl Lane {
    pub(super) fn start(
        members: &Arc<Members>,
        beside: &Beside,
        purpose: Purpose,
        parting: Arc<Parting>,
    ) -> Result<Self> {
        let (messages, queue) = channel();
        let waker = messages.clone();
        members.mesh.on_break(move |_| {
            // The lane may have ended before.
            let _ = waker.send(Message::Look);
        });
        let works = Works {
            members: members.clone(),
            beside: beside.clone(),
            purpose,
            under_way: VecDeque::new(),
            putting: None,
            is_let_go: false,
        };
        let spawned = std::thread::Builder::new()
            .name("nccl".to_owned())
            .spawn(move || works.run(&queue));
        let thread = spawned.map_err(|error| Error::System {
            what: "a thread of a communicator",
            reason: error.to_string(),
        })?;
        Ok(Self {
            beside: beside.clone(),
            messages,
            thread: Some(thread),
            parting,
        })
    }

    pub(super) fn queue(&self, job: Job, result: Tensor) -> Result<InFlight> {
        let held: Held = Arc::new(Mutex::new(job.operands.clone()));
        let (queued, mark) = sync_channel(1);
        let message = Message::Call {
            job,
            held: held.clone(),
            queued,
        };
        self.messages.send(message).map_err(|_| ended())?;
        Ok(InFlight(Box::new(Queued {
            mark,
            held,
            result,
            beside: self.beside.clone(),
        })))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let _ = self.messages.send(Message::End);
        let mut parting = self
            .parting
            .threads
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        parting.extend(self.thread.take());
    }
}

fn ended() -> Error {
    Error::System {
        what: "a call",
        reason: "its thread has ended".to_owned(),
    }
}

/// A call on its way to the stream, or there.
#[derive(Debug)]
struct Queued {
    mark: Receiver<Result<Arc<Mark>>>,
    held: Held,
    result: Tensor,
    beside: Beside,
}

impl Flight for Queued {
    fn wait(self: Box<Self>) -> Result<Tensor> {
        // Ends: what the thread does before has deadlines.
        let mark = self.mark.recv().unwrap_or_else(|_| Err(ended().into()))?;
        self.beside.compute().after(&mark)?;
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(self.result)
    }
}

/// A call that the device has before it.
struct UnderWay {
    name: &'static str,
    mark: Arc<Mark>,
    /// What the device has to get past before it begins.
    before: Mark,
    since: Instant,
    /// Once it has begun: only other ranks are in its way.
    waiting: Option<Waiting>,
    /// Kept until the mark is reached.
    _held: Held,
}

/// What the lane's thread has.
struct Works {
    members: Arc<Members>,
    beside: Beside,
    purpose: Purpose,
    under_way: VecDeque<UnderWay>,
    /// Of the call that is being put on the stream: when that fails it may be there or not.
    putting: Option<Held>,
    /// Whether the lane has been let go of: nothing more comes.
    is_let_go: bool,
}

impl Works {
    fn run(mut self, queue: &Receiver<Message>) {
        if let Err(error) = self.work(queue) {
            self.give_up(&error);
            if self.is_let_go {
                return;
            }
            // Every later call gets the reason, until the communicator is dropped.
            for message in queue {
                match message {
                    Message::Call { queued, .. } => {
                        let reason = self.members.mesh.check().err().unwrap_or_else(ended);
                        let _ = queued.send(Err(reason.into()));
                    }
                    Message::Look => {}
                    Message::End => return,
                }
            }
        }
    }

    /// Tells the mesh, unless it knows.
    fn give_up(&self, error: &crate::Error) {
        let own = match error {
            crate::Error::Gang(error) => error.clone(),
            error => {
                // A rank that is lost breaks NCCL as well; the mesh soon knows which it was.
                let deadline = Instant::now() + GRACE;
                while self.members.mesh.check().is_ok() && Instant::now() < deadline {
                    std::thread::sleep(SLOW);
                }
                Error::Device {
                    reason: error.to_string(),
                }
            }
        };
        self.members.mesh.give_up(own);
    }

    fn work(&mut self, queue: &Receiver<Message>) -> Result<()> {
        let stream = self.beside.urgent_stream()?;
        let link = self.join()?;
        let served = self.serve(queue, &link, &stream);
        match served.and_then(|()| self.leave(&link)) {
            Ok(have_parted) => {
                if have_parted {
                    link.destroy();
                }
                Ok(())
            }
            Err(error) => {
                // Before the abort: whoever reads what it leaves finds the mesh broken.
                self.give_up(&error);
                drop(link);
                self.let_go_of_aborted(&stream);
                Err(error)
            }
        }
    }

    /// Gives back the buffers of calls that were aborted, once none of their kernels can write them any more: the
    /// pool hands them out again at once. Where the device does not get there they are nobody's for good.
    fn let_go_of_aborted(&mut self, stream: &Stream) {
        let deadline = Instant::now() + self.members.mesh.options().silence;
        let has_ended = stream.mark().is_ok_and(|mark| {
            loop {
                match mark.is_reached() {
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(SLOW),
                    reached => return reached.unwrap_or(false),
                }
            }
        });
        let (under_way, putting) = (std::mem::take(&mut self.under_way), self.putting.take());
        if !has_ended {
            tracing::error!("calls that were aborted do not end: their memory is given up");
            std::mem::forget((under_way, putting));
        }
    }

    /// Joins this rank with the others of the lane: its first tells them NCCL's id.
    fn join(&self) -> Result<Link> {
        let (mesh, ranks) = (&self.members.mesh, self.purpose.ranks(&self.members));
        let lane = self.members.lane(&self.purpose.name());
        let begun = Instant::now();
        let deadline = begun + mesh.options().call;
        let first = ranks.first().copied().unwrap_or(0);
        let _waiting = mesh.waiting();
        let id = if first == self.members.rank {
            let id = Id::new()?;
            for &other in ranks.iter().filter(|&&other| other != first) {
                mesh.send(self.members.in_gang(other), lane, id.0.to_vec(), deadline)?;
            }
            id
        } else {
            let first = self.members.in_gang(first);
            let bytes = mesh.receive(first, lane, "joining GPUs", deadline)?;
            let id = bytes.try_into().map_err(|bytes: Vec<u8>| {
                mesh.nonsense(first, format!("an id of NCCL's of {} bytes", bytes.len()))
            });
            Id(id?)
        };
        let own = ranks
            .iter()
            .position(|&rank| rank == self.members.rank)
            .unwrap_or(0);
        let blocks = (self.purpose != Purpose::Together).then_some(MESSAGE_BLOCKS);
        let link = Link::begin(&self.beside, id, own, ranks.len(), blocks)?;
        self.until_ready(&link, "joining GPUs", SLOW)?;
        tracing::debug!(?self.purpose, ranks = ranks.len(), took = ?begun.elapsed(), "GPUs are joined");
        Ok(link)
    }

    /// Looks until what was asked of NCCL has gone through.
    fn until_ready(&self, link: &Link, operation: &'static str, pause: Duration) -> Result<()> {
        let begun = Instant::now();
        let _waiting = self.members.mesh.waiting();
        while !link.is_ready()? {
            self.members.mesh.check()?;
            self.in_time(operation, begun)?;
            std::thread::sleep(pause);
        }
        Ok(())
    }

    /// An error if what began then should have ended: at the deadline, or soon after a rank that it needs has left.
    fn in_time(&self, operation: &'static str, since: Instant) -> Result<()> {
        let (mesh, waited) = (&self.members.mesh, since.elapsed());
        if waited > mesh.options().call {
            return Err(Error::Deadline { operation, waited }.into());
        }
        if waited > mesh.options().silence {
            for rank in self.purpose.ranks(&self.members) {
                mesh.expect_present(self.members.in_gang(rank))?;
            }
        }
        Ok(())
    }

    fn serve(&mut self, queue: &Receiver<Message>, link: &Link, stream: &Stream) -> Result<()> {
        let mut looked = Instant::now();
        loop {
            let pause = if self.under_way.is_empty() { IDLE } else { BUSY };
            match queue.recv_timeout(pause) {
                Ok(Message::Call { job, held, queued }) => {
                    let put = self.put(link, stream, job, held);
                    let mark = put.inspect_err(|error| {
                        self.give_up(error);
                        let reason = self.members.mesh.check().err().unwrap_or_else(ended);
                        let _ = queued.send(Err(reason.into()));
                    })?;
                    // Nobody may wait for it any more.
                    let _ = queued.send(Ok(mark));
                    if looked.elapsed() < BUSY {
                        continue;
                    }
                }
                Ok(Message::Look) | Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => {
                    self.is_let_go = true;
                    return Ok(());
                }
            }
            self.look(link)?;
            looked = Instant::now();
        }
    }

    /// Puts a call on the stream.
    fn put(&mut self, link: &Link, stream: &Stream, job: Job, held: Held) -> Result<Arc<Mark>> {
        self.members.mesh.check()?;
        let Job {
            call,
            operands,
            before,
        } = job;
        self.putting = Some(held.clone());
        stream.after(&before)?;
        let (Some(from), Some(to)) = (operands.first(), operands.last()) else {
            return Err(ended().into());
        };
        match call {
            Call::AllReduce => link.all_reduce(from, to, stream)?,
            Call::ReduceScatter => link.reduce_scatter(from, to, stream)?,
            Call::AllGather => link.all_gather(from, to, stream)?,
            Call::Broadcast { root } => link.broadcast(to, root, stream)?,
            // A lane for messages knows its sender as 0 and its receiver as 1.
            Call::Send => link.send(from, 1, stream)?,
            Call::Receive => link.receive(to, 0, stream)?,
        }
        self.until_ready(link, call.name(), QUICK)?;
        let mark = Arc::new(stream.mark()?);
        self.under_way.push_back(UnderWay {
            name: call.name(),
            mark: mark.clone(),
            before,
            since: Instant::now(),
            waiting: None,
            _held: held,
        });
        self.putting = None;
        Ok(mark)
    }

    /// Whether all is well with what is under way.
    fn look(&mut self, link: &Link) -> Result<()> {
        self.members.mesh.check()?;
        link.is_ready()?;
        while let Some(first) = self.under_way.front_mut() {
            if first.mark.is_reached()? {
                self.under_way.pop_front();
                continue;
            }
            if first.waiting.is_none() && first.before.is_reached()? {
                first.waiting = Some(self.members.mesh.waiting());
            }
            let (name, since) = (first.name, first.since);
            return self.in_time(name, since);
        }
        Ok(())
    }

    /// Ends what is under way, and takes the ranks apart; whether they are, or another has not done its part.
    fn leave(&mut self, link: &Link) -> Result<bool> {
        let deadline = Instant::now() + self.members.mesh.options().silence;
        while !self.under_way.is_empty() && Instant::now() < deadline {
            self.look(link)?;
            std::thread::sleep(QUICK);
        }
        if !self.under_way.is_empty() {
            return Err(Error::Aborted.into());
        }
        link.finish()?;
        while Instant::now() < deadline && self.members.mesh.check().is_ok() {
            if link.is_ready()? {
                return Ok(true);
            }
            std::thread::sleep(SLOW);
        }
        Ok(false)
    }
}
