//! All that is: machines, processes, streams and what is to happen. Each room beside this one is a part of
//! the same world and moves it; here the parts are kept and events find their way.

use std::collections::BTreeMap;
use std::time::Duration;

use espalier_coordinator::service::owner::Request;

use crate::clock::{Queue, Time};
use crate::coordinator::CoordinatorMachine;
use crate::dice::Dice;
use crate::faults::Fault;
use crate::gangs::Gangs;
use crate::heartbeat::HeartbeatCall;
use crate::network::{Network, Place};
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::store::VirtualStore;
use crate::trace::Trace;
use crate::user::User;
use crate::wire::{Stream, StreamId};
use crate::worker::WorkerMachine;

/// What happens at a moment. A life is one start of a process: what was meant for an earlier one is void.
#[derive(Debug)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Event {
    /// A supervisor starts a coordinator.
    CoordinatorStarts { machine: usize },
    /// A coordinator's loop takes what waits for it.
    Turn { machine: usize, life: u64 },
    /// A coordinator is told that time has passed.
    CoordinatorTick { machine: usize, life: u64 },
    /// Slow work beside a coordinator's loop is done.
    BesideDone { machine: usize, life: u64, work: u64 },
    /// A coordinator looks whether its term is still the highest.
    Looks { machine: usize, life: u64 },
    /// What it saw has come.
    Looked {
        machine: usize,
        life: u64,
        begun_at: Time,
        highest: Option<u64>,
    },
    /// A coordinator's journal is shipped.
    Ships { machine: usize, life: u64 },
    /// Heartbeats of workers whose links are good are made good.
    Credit { machine: usize, life: u64 },
    /// A supervisor starts a worker.
    WorkerStarts { worker: usize },
    /// A worker's core asked to be woken.
    WorkerWakes { worker: usize, life: u64, wake: u64 },
    /// Something happens on a worker's device.
    DeviceNews {
        worker: usize,
        life: u64,
        device: usize,
        run: u64,
    },
    /// The next message to the coordinator may have arrived.
    Up { stream: StreamId },
    /// The next message to the worker may have arrived.
    Down { stream: StreamId },
    /// The ends of a stream look whether the other one still answers.
    Keepalive { stream: StreamId },
    /// A heartbeat arrives.
    HeartbeatArrives(Box<HeartbeatCall>),
    /// The answer to a heartbeat arrives.
    HeartbeatAnswered(Box<HeartbeatCall>),
    /// A request of the user arrives at a coordinator.
    UserAsks { machine: usize, errand: usize },
    /// An answer to the user arrives.
    UserHears { errand: usize, answer: u64 },
    /// The user does what is due.
    UserActs { errand: usize },
    /// A fault begins.
    FaultBegins { fault: usize },
    /// Half-way through a fault, another coordinator takes over.
    TakesOver { fault: usize },
    /// A fault ends.
    FaultEnds { fault: usize },
}

/// Everything.
pub struct World {
    /// What it is made of.
    pub plan: Plan,
    /// What is to happen.
    pub queue: Queue<Event>,
    /// Links.
    pub network: Network,
    /// Machines for coordinators, in the order they were set up.
    pub coordinators: Vec<CoordinatorMachine>,
    /// Where they claim their terms and ship their journals.
    pub store: VirtualStore,
    /// Which of them the service's name leads to.
    pub address: usize,
    /// Machines of workers.
    pub workers: Vec<WorkerMachine>,
    /// Streams that an end still holds.
    pub streams: BTreeMap<StreamId, Stream>,
    /// Names the next stream.
    pub next_stream: u64,
    /// Who submits jobs.
    pub user: User,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// How often each kind did.
    pub injected: BTreeMap<&'static str, u64>,
    /// Formations of gangs, as devices know them.
    pub gangs: Gangs,
    /// What is true, as seen from outside.
    pub oracle: Oracle,
    /// What happened.
    pub trace: Trace,
    /// Chance in processes.
    pub dice: Dice,
}

impl World {
    /// Lets the next thing happen. False when nothing is left.
    ///
    /// # Errors
    /// What no run may show.
    pub fn step(&mut self) -> Result<bool, String> {
        let Some(event) = self.queue.advance() else {
            return Ok(false);
        };
        self.happen(event)?;
        Ok(true)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::CoordinatorStarts { machine } => self.start_coordinator(machine),
            Event::Turn { machine, life } => self.turn(machine, life),
            Event::CoordinatorTick { machine, life } => {
                self.tick_coordinator(machine, life);
                Ok(())
            }
            Event::BesideDone { machine, life, work } => {
                self.beside_done(machine, life, work);
                Ok(())
            }
            Event::Looks { machine, life } => {
                self.look(machine, life);
                Ok(())
            }
            Event::Looked {
                machine,
                life,
                begun_at,
                highest,
            } => {
                self.looked(machine, life, begun_at, highest);
                Ok(())
            }
            Event::Ships { machine, life } => {
                self.ship(machine, life);
                Ok(())
            }
            Event::Credit { machine, life } => {
                self.credit(machine, life);
                Ok(())
            }
            Event::WorkerStarts { worker } => self.start_worker(worker),
            Event::WorkerWakes { worker, life, wake } => self.wake_worker(worker, life, wake),
            Event::DeviceNews {
                worker,
                life,
                device,
                run,
            } => self.device_news(worker, life, device, run),
            Event::Up { stream } => {
                self.arrive_up(stream);
                Ok(())
            }
            Event::Down { stream } => self.arrive_down(stream),
            Event::Keepalive { stream } => self.keepalive(stream),
            Event::HeartbeatArrives(call) => {
                self.heartbeat_arrives(*call);
                Ok(())
            }
            Event::HeartbeatAnswered(call) => self.heartbeat_answered(*call),
            Event::UserAsks { machine, errand } => {
                self.user_asks(machine, errand);
                Ok(())
            }
            Event::UserHears { errand, answer } => self.user_hears(errand, answer),
            Event::UserActs { errand } => {
                self.user_acts(errand);
                Ok(())
            }
            Event::FaultBegins { fault } => self.begin_fault(fault),
            Event::TakesOver { fault } => self.take_over_in(fault),
            Event::FaultEnds { fault } => self.end_fault(fault),
        }
    }

    /// Now.
    pub fn now(&self) -> Time {
        self.queue.now()
    }

    /// Gives a request to a coordinator's loop, if it runs.
    pub fn ask(&mut self, machine: usize, request: Request) {
        let now = self.now();
        let Some(known) = self.coordinators.get_mut(machine) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        process.inbox.push_back(request);
        if known.paused || process.turn_asked {
            return;
        }
        process.turn_asked = true;
        let at = process.busy_until.max(now);
        self.queue.at(at, Event::Turn { machine, life });
    }

    /// How long a unary call takes on its way, each time it arrives.
    pub fn call(&mut self, from: Place, to: Place) -> Vec<Duration> {
        self.network.call(from, to)
    }
}
