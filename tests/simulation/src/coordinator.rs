//! Machines that coordinators run on, and how their processes start and end.
//!
//! A turn is one moment of virtual time for the loop and one fsync's worth for the world: what it answered
//! sets out when the disk has answered. A crash within a turn takes all answers with it, whether it came
//! before the write, between write and fsync, or after both.

mod answers;
mod turn;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use espalier_coordinator::CoordinatorOptions;
use espalier_coordinator::service::owner::{Owner, Request, WorkerHandle};
use espalier_coordinator::service::surroundings::{Beside, Clock, Secrets, Surroundings, Work};
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
use crate::wire::{Downward, StreamId};
use crate::world::{Event, World};

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

/// Secrets that are none: a seed is a run.
#[derive(Debug, Default)]
struct Numbered(AtomicU64);

impl Secrets for Numbered {
    fn draw(&self) -> u128 {
        self.0.fetch_add(1, Ordering::Relaxed).into()
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
            secrets: Arc::new(Numbered::default()),
            tables: Tables::default(),
            store: "mem://artifacts".to_owned(),
            store_id: String::new(),
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
        self.oracle.started(machine, owner.state())?;
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
        self.oracle.ended(machine)?;
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
        self.oracle.ended(machine)?;
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
