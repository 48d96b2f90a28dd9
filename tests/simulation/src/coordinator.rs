//! Machines that coordinators run on: the loop's turns, what comes of them, and its ends.
//!
//! A turn is one moment of virtual time for the loop and one fsync's worth for the world: what it answered
//! sets out when the disk has answered. A crash within a turn takes all answers with it, whether it came
//! before the write, between write and fsync, or after both.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use espalier_coordinator::CoordinatorOptions;
use espalier_coordinator::service::owner::{BATCH, Owner, Request, WorkerHandle};
use espalier_coordinator::service::surroundings::{Beside, Clock, Surroundings, Work};
use espalier_coordinator::tables::Tables;
use espalier_coordinator::term::{Fence, OwnDirectory};
use espalier_proto::v1::{self, HeartbeatResponse};
use tokio::sync::oneshot;
use tonic::Status;

use crate::clock::{MachineClock, Time};
use crate::dice::Dice;
use crate::disk::VirtualDisk;
use crate::heartbeat::{CREDIT, HeartbeatCall};
use crate::network::Place;
use crate::planner::SimulatedPlanner;
use crate::store::{SHIPPING, VirtualFence};
use crate::user::Answer;
use crate::wire::{Downward, StreamId};
use crate::world::{Event, World};

/// A coordinator that has nothing to do is told the time this often; the service does so ten times a second.
const IDLE_TICK: Duration = Duration::from_secs(5);
/// After something happened it is told soon.
const BUSY_TICK: Duration = Duration::from_millis(500);
/// A supervisor waits so long before it starts a coordinator that stopped.
const RESTART: Duration = Duration::from_secs(2);

/// A machine for a coordinator.
#[derive(Debug)]
pub struct CoordinatorMachine {
    /// Its disk.
    pub disk: VirtualDisk,
    /// Its clocks.
    pub clock: Arc<MachineClock>,
    /// Starts so far.
    pub life: u64,
    /// What runs on it.
    pub process: Option<CoordinatorProcess>,
    /// Whether the process is stopped, as by SIGSTOP.
    pub paused: bool,
    /// Whether a supervisor starts it again.
    pub supervised: bool,
    /// What the next turn ends in.
    pub doom: Option<Doom>,
}

/// How a process that is to die does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doom {
    /// Killed once its turn is durable, before anybody is told.
    BeforeAnswers,
    /// Killed within its turn by the loss of power that its disk was ordered.
    WithinTurn,
}

/// A coordinator that runs.
#[derive(Debug)]
pub struct CoordinatorProcess {
    /// The loop.
    pub owner: Owner,
    /// What waits for it.
    pub inbox: VecDeque<Request>,
    /// Whether a turn is to come.
    pub turn_asked: bool,
    /// Until when the disk is at work.
    pub busy_until: Time,
    tick_at: Time,
    /// Its hold on its term.
    pub fence: Arc<VirtualFence>,
    beside: Arc<VirtualBeside>,
    work: BTreeMap<u64, SlowWork>,
    next_work: u64,
    waiting: Vec<Waiting>,
}

struct SlowWork(Work);

impl std::fmt::Debug for SlowWork {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("slow work")
    }
}

/// An answer that somebody waits for.
#[derive(Debug)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Waiting {
    /// A worker's hello.
    Greeting {
        stream: StreamId,
        answer: oneshot::Receiver<Result<WorkerHandle, Status>>,
    },
    /// A heartbeat.
    Heartbeat {
        call: Box<HeartbeatCall>,
        answer: oneshot::Receiver<Result<HeartbeatResponse, Status>>,
    },
    /// Heartbeats made good: of interest only if they say something.
    Credit {
        call: Box<HeartbeatCall>,
        answer: oneshot::Receiver<Result<HeartbeatResponse, Status>>,
    },
    /// A submission.
    Submission {
        errand: usize,
        answer: oneshot::Receiver<Result<(v1::Job, bool), Status>>,
    },
    /// What a keeper asked of a worker.
    Worker {
        errand: usize,
        answer: oneshot::Receiver<Result<v1::Worker, Status>>,
    },
    /// What a user asked of a job.
    Job {
        errand: usize,
        answer: oneshot::Receiver<Result<v1::Job, Status>>,
    },
}

/// Keeps slow work until the world takes it.
#[derive(Default)]
struct VirtualBeside(Mutex<Vec<Work>>);

impl std::fmt::Debug for VirtualBeside {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("slow work")
    }
}

impl VirtualBeside {
    fn take(&self) -> Vec<Work> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Beside for VirtualBeside {
    fn spawn(&self, work: Work) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(work);
    }
}

impl CoordinatorMachine {
    /// A machine with an empty disk.
    pub fn new(seed: u64, number: usize) -> Self {
        let clock = Arc::<MachineClock>::default();
        Self {
            disk: VirtualDisk::new(Dice::new(seed, &format!("disk {number}")), Arc::clone(&clock)),
            clock,
            life: 0,
            process: None,
            paused: false,
            supervised: true,
            doom: None,
        }
    }
}

impl World {
    /// A supervisor starts a coordinator, if none runs.
    ///
    /// # Errors
    /// What no run may show.
    pub fn start_coordinator(&mut self, machine: usize) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return Ok(());
        };
        if known.process.is_some() || !known.supervised {
            return Ok(());
        }
        known.life += 1;
        let life = known.life;
        known.clock.set(now);
        let beside = Arc::new(VirtualBeside::default());
        let surroundings = Surroundings {
            clock: Arc::clone(&known.clock) as Arc<dyn Clock>,
            beside: Arc::clone(&beside) as Arc<dyn Beside>,
            disk: Arc::new(known.disk.clone()),
            tables: Tables::default(),
            store: "mem://artifacts".to_owned(),
            witness: Some(self.oracle.open_eye(machine)),
        };
        let mut options = CoordinatorOptions::new("/data");
        options.segment_bytes = self.plan.segment_bytes;
        let fence = VirtualFence::new(self.store.clone(), machine, life, Arc::clone(&known.clock));
        let fence = Arc::new(fence);
        let opened = Owner::open_fenced(
            options,
            Arc::new(SimulatedPlanner),
            surroundings,
            if self.plan.fenced {
                Arc::clone(&fence) as Arc<dyn Fence>
            } else {
                Arc::new(OwnDirectory)
            },
        );
        let owner = match opened {
            Ok(owner) => owner,
            Err(error) => return self.would_not_start(machine, &error),
        };
        self.store.settled(machine);
        self.trace
            .step(now, "start", machine as u64, owner.state().term().0, || {
                format!("coordinator {machine} starts term {}", owner.state().term())
            });
        self.oracle.started(now, machine, owner.state())?;
        let process = CoordinatorProcess {
            owner,
            inbox: VecDeque::new(),
            turn_asked: false,
            busy_until: now,
            tick_at: now,
            fence,
            beside,
            work: BTreeMap::new(),
            next_work: 0,
            waiting: Vec::new(),
        };
        if let Some(known) = self.coordinators.get_mut(machine) {
            known.process = Some(process);
        }
        self.take_work(machine, Duration::ZERO);
        self.ask(machine, Request::Tick);
        self.queue.after(CREDIT, Event::Credit { machine, life });
        self.look_later(machine, life);
        self.queue.after(SHIPPING, Event::Ships { machine, life });
        Ok(())
    }

    /// A start failed: on a disk that fails, or away from the store, it may, and is tried again; where
    /// another has taken over it has to; else it never may.
    fn would_not_start(&mut self, machine: usize, error: &espalier_coordinator::Error) -> Result<(), String> {
        let now = self.now();
        self.trace.step(now, "no start", machine as u64, 0, || {
            format!("coordinator {machine} does not start: {error}")
        });
        self.oracle.ended(machine);
        let reaches = self.store.reaches(machine);
        let succeeded = self.address != machine;
        let Some(known) = self.coordinators.get_mut(machine) else {
            return Ok(());
        };
        if known.disk.is_off() {
            known.disk.crash();
        } else if matches!(
            error,
            espalier_coordinator::Error::Conflict(_) | espalier_coordinator::Error::Succeeded { .. }
        ) && succeeded
        {
            known.supervised = false;
            return Ok(());
        } else if reaches && !known.disk.take_failed() {
            return Err(format!(
                "coordinator {machine} does not start on a good disk: {error}"
            ));
        }
        self.queue.after(RESTART, Event::CoordinatorStarts { machine });
        Ok(())
    }

    /// Registers an answer that will come of the next turn.
    pub fn expect(&mut self, machine: usize, waiting: Waiting) {
        if let Some(process) = self
            .coordinators
            .get_mut(machine)
            .and_then(|known| known.process.as_mut())
        {
            process.waiting.push(waiting);
        }
    }

    /// The loop takes what waits for it.
    ///
    /// # Errors
    /// What no run may show.
    pub fn turn(&mut self, machine: usize, life: u64) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return Ok(());
        };
        if known.life != life || known.paused {
            return Ok(());
        }
        let doom = known.doom.take();
        let Some(process) = known.process.as_mut() else {
            return Ok(());
        };
        process.turn_asked = false;
        let count = process.inbox.len().min(BATCH);
        let mut batch: Vec<Request> = process.inbox.drain(..count).collect();
        known.clock.set(now);
        let durable = process.owner.durable();
        let turned = process.owner.turn(&mut batch);
        // A full disk undoes a turn.
        let undone = process.owner.durable() == durable;
        // What its disk took.
        let fsync = known.clock.now() - now;
        // Without authority requests stay where they are.
        for request in batch.into_iter().rev() {
            process.inbox.push_front(request);
        }
        self.trace.step(now, "turn", machine as u64, count as u64, || {
            format!("coordinator {machine} takes {count} requests")
        });
        self.oracle.witnessed(machine)?;
        if let Err(error) = turned {
            return self.turn_failed(machine, &error.to_string());
        }
        if doom == Some(Doom::BeforeAnswers) {
            return self.kill_coordinator(machine, "after its fsync, before its answers", false);
        }
        if undone {
            self.oracle.undone(machine);
        } else {
            self.oracle.committed(now, machine)?;
        }
        self.take_answers(machine, fsync)?;
        self.take_messages(machine, fsync)?;
        self.take_work(machine, fsync);
        self.ask_for_time(machine, fsync);
        Ok(())
    }

    /// The next turn comes when the disk is free, and the next tick soon.
    fn ask_for_time(&mut self, machine: usize, fsync: Duration) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        process.busy_until = now + fsync;
        // Without authority they wait until it has looked again.
        let may = process.owner.holds();
        if may && !process.inbox.is_empty() && !process.turn_asked {
            process.turn_asked = true;
            self.queue.at(process.busy_until, Event::Turn { machine, life });
        }
        if process.tick_at <= now {
            process.tick_at = now + BUSY_TICK;
            self.queue
                .at(process.tick_at, Event::CoordinatorTick { machine, life });
        }
    }

    /// The coordinator is told that time has passed.
    pub fn tick_coordinator(&mut self, machine: usize, life: u64) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        if known.life != life {
            return;
        }
        let Some(process) = known.process.as_mut() else {
            return;
        };
        if process.tick_at > now {
            return;
        }
        process.tick_at = now + IDLE_TICK;
        self.queue
            .at(process.tick_at, Event::CoordinatorTick { machine, life });
        self.ask(machine, Request::Tick);
    }

    /// A turn failed, so that nothing may be promised any more: the process ends.
    fn turn_failed(&mut self, machine: usize, error: &str) -> Result<(), String> {
        let power = self
            .coordinators
            .get(machine)
            .is_some_and(|known| known.disk.is_off());
        self.kill_coordinator(machine, error, power)
    }

    /// A coordinator's process ends at once, and with `power` its machine.
    ///
    /// # Errors
    /// What no run may show.
    pub fn kill_coordinator(&mut self, machine: usize, why: &str, power: bool) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return Ok(());
        };
        let Some(process) = known.process.take() else {
            return Ok(());
        };
        known.paused = false;
        known.doom = None;
        if power {
            known.disk.crash();
        } else {
            known.disk.let_go();
        }
        drop(process);
        self.trace
            .step(now, "ends", machine as u64, u64::from(power), || {
                format!("coordinator {machine} ends: {why}")
            });
        self.oracle.ended(machine);
        let held: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.machine == machine && stream.coordinator_end.is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in held {
            if power {
                self.vanish(id, false);
            } else {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.coordinator_end = None;
                }
                self.send_down(id, Duration::ZERO, Downward::End);
            }
        }
        self.queue.after(RESTART, Event::CoordinatorStarts { machine });
        Ok(())
    }

    /// Answers set out.
    fn take_answers(&mut self, machine: usize, fsync: Duration) -> Result<(), String> {
        let process = self
            .coordinators
            .get_mut(machine)
            .and_then(|known| known.process.as_mut());
        let Some(process) = process else { return Ok(()) };
        for waiting in std::mem::take(&mut process.waiting) {
            self.take_answer(machine, fsync, waiting)?;
        }
        Ok(())
    }

    fn take_answer(&mut self, machine: usize, fsync: Duration, waiting: Waiting) -> Result<(), String> {
        match waiting {
            Waiting::Greeting { stream, mut answer } => match answer.try_recv() {
                Ok(answer) => self.greeted(stream, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Greeting { stream, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {
                    self.greeted(stream, fsync, Err(Status::unavailable("the loop has no answer")));
                }
            },
            Waiting::Heartbeat { mut call, mut answer } => match answer.try_recv() {
                Ok(answer) => {
                    call.answer = Some(answer);
                    self.answer_heartbeat(*call, fsync);
                }
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Heartbeat { call, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Credit { mut call, mut answer } => match answer.try_recv() {
                Ok(Ok(said)) if said.superseded.is_empty() && said.term == call.request.term => {}
                Ok(answer) => {
                    call.answer = Some(answer);
                    self.answer_heartbeat(*call, fsync);
                }
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Credit { call, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Submission { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.submission_answered(machine, errand, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Submission { errand, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Worker { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.answer_user(machine, errand, fsync, answer.map(|_| Answer::Done)),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Worker { errand, answer });
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
            Waiting::Job { errand, mut answer } => match answer.try_recv() {
                Ok(answer) => self.job_answered(machine, errand, fsync, answer),
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.expect(machine, Waiting::Job { errand, answer })
                }
                Err(oneshot::error::TryRecvError::Closed) => {}
            },
        }
        Ok(())
    }

    /// Messages to workers set out; streams that the loop let go of end.
    fn take_messages(&mut self, machine: usize, fsync: Duration) -> Result<(), String> {
        let life = self.coordinators.get(machine).map(|known| known.life);
        let held: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| {
                stream.machine == machine
                    && Some(stream.coordinator_life) == life
                    && stream.coordinator_end.is_some()
            })
            .map(|(id, _)| *id)
            .collect();
        for id in held {
            loop {
                let end = self
                    .streams
                    .get_mut(&id)
                    .and_then(|stream| stream.coordinator_end.as_mut());
                let Some(end) = end else { break };
                match end.outbox.try_recv() {
                    Ok(Ok(message)) => {
                        self.oracle.sent(machine, &message)?;
                        self.send_down(id, fsync, Downward::Message(Box::new(message)));
                    }
                    Ok(Err(_)) => {}
                    Err(_) if end.stop.is_cancelled() => {
                        if let Some(stream) = self.streams.get_mut(&id) {
                            stream.coordinator_end = None;
                        }
                        self.send_down(id, fsync, Downward::End);
                        break;
                    }
                    Err(_) => break,
                }
            }
        }
        Ok(())
    }

    /// Slow work begins.
    fn take_work(&mut self, machine: usize, fsync: Duration) {
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        for work in process.beside.take() {
            process.next_work += 1;
            let id = process.next_work;
            process.work.insert(id, SlowWork(work));
            let takes = self.dice.scale(Duration::from_millis(5), Duration::from_secs(5));
            self.queue.after(
                fsync + takes,
                Event::BesideDone {
                    machine,
                    life,
                    work: id,
                },
            );
        }
    }

    /// Slow work is done: the loop gets its answer.
    pub fn beside_done(&mut self, machine: usize, life: u64, work: u64) {
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        if known.life != life {
            return;
        }
        let Some(done) = known
            .process
            .as_mut()
            .and_then(|process| process.work.remove(&work))
        else {
            return;
        };
        let answer = done.0();
        self.ask(machine, answer);
    }

    /// The process goes on after a pause.
    pub fn resume_coordinator(&mut self, machine: usize) {
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        if !std::mem::take(&mut known.paused) {
            return;
        }
        if let Some(process) = known.process.as_mut() {
            process.turn_asked = false;
        }
        self.ask(machine, Request::Tick);
        // What came in meanwhile may be read before the loop has its turn, and then after that tick.
        let held_up: Vec<StreamId> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.machine == machine)
            .map(|(id, _)| *id)
            .collect();
        for id in held_up {
            if self.dice.chance(0.5) {
                self.read_all_up(id);
            }
        }
        for worker in 0..self.workers.len() {
            self.go_on(worker, machine);
        }
    }

    /// Where the machine is.
    pub fn place_of(&self, machine: usize) -> Place {
        Place::Coordinator(machine)
    }
}
