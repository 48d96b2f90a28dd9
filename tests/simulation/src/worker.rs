//! Machines that workers run on, with the real core of the agent.
//!
//! A paused worker is one whose agent is stopped while its children go on.

use std::collections::VecDeque;
use std::time::Duration;

use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{self, WorkerMessage};
use espalier_worker::agent::core::{Core, CoreOptions, Finish, Input, Output};

use crate::clock::Time;
use crate::device::FakeDevice;
use crate::wire::{StreamId, Upward};
use crate::world::{Event, World};

/// Ends that may be said once more.
const SAID: usize = 6;
/// A supervisor waits so long before it starts a worker that ended.
const RESTART: Duration = Duration::from_secs(5);

/// A worker's machine.
#[derive(Debug)]
pub struct WorkerMachine {
    /// The worker's name.
    pub name: String,
    /// Its host: some workers share one.
    pub host: String,
    /// How many devices it has.
    pub devices: usize,
    /// Starts so far.
    pub life: u64,
    /// What runs on it.
    pub process: Option<WorkerProcess>,
    /// The newest stream.
    pub stream: Option<StreamId>,
    /// Whether the agent is stopped, as by SIGSTOP.
    pub paused: bool,
    /// What came in while it was.
    pub held_back: Vec<Input>,
    /// Whether a heartbeat was sent and not answered.
    pub unanswered: bool,
    /// Whether a supervisor starts it again.
    pub supervised: bool,
    /// Ends that it told last, in this life or before: the network may bring them once more.
    said: VecDeque<FromWorker>,
}

/// A worker that runs.
#[derive(Debug)]
pub struct WorkerProcess {
    /// The agent's protocol.
    pub core: Core,
    /// Its devices.
    pub devices: Vec<FakeDevice>,
    wake: u64,
    wake_at: Option<Time>,
}

impl WorkerMachine {
    /// A machine on which nothing runs.
    pub fn new(name: String, host: String, devices: usize) -> Self {
        Self {
            name,
            host,
            devices,
            life: 0,
            process: None,
            stream: None,
            paused: false,
            held_back: Vec::new(),
            unanswered: false,
            supervised: true,
            said: VecDeque::new(),
        }
    }
}

impl World {
    /// A supervisor starts a worker, if none runs.
    ///
    /// # Errors
    /// What no run may show.
    pub fn start_worker(&mut self, worker: usize) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.workers.get_mut(worker) else {
            return Ok(());
        };
        if known.process.is_some() || !known.supervised {
            return Ok(());
        }
        known.life += 1;
        let device = |index: usize| v1::Device {
            id: format!("gpu-{index}"),
            kind: "cuda".to_owned(),
            name: "pretended".to_owned(),
            memory_bytes: 80 << 30,
            threads: 0,
            engines: Vec::new(),
        };
        let options = CoreOptions {
            name: known.name.clone(),
            host: known.host.clone(),
            epoch: now.0.max(1),
            devices: (0..known.devices).map(device).collect(),
            drain_timeout: Duration::from_secs(120),
            seed: self.plan.seed ^ (worker as u64) << 32 ^ known.life,
        };
        known.process = Some(WorkerProcess {
            core: Core::new(options),
            devices: (0..known.devices).map(|_| FakeDevice::default()).collect(),
            wake: 0,
            wake_at: None,
        });
        known.stream = None;
        known.unanswered = false;
        let life = known.life;
        self.trace.step(now, "worker", worker as u64, life, || {
            format!("worker {worker} starts")
        });
        self.feed(worker, life, Input::Tick)
    }

    /// A worker's process ends at once and its children with it; with `power` its machine too.
    ///
    /// # Errors
    /// What no run may show.
    pub fn kill_worker(&mut self, worker: usize, power: bool) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.workers.get_mut(worker) else {
            return Ok(());
        };
        let Some(process) = known.process.take() else {
            return Ok(());
        };
        known.paused = false;
        known.held_back.clear();
        let stream = known.stream.take();
        self.trace
            .step(now, "killed", worker as u64, u64::from(power), || {
                format!("worker {worker} is killed")
            });
        for running in process.devices.into_iter().filter_map(|device| device.running) {
            self.leaves_gang(&running);
        }
        if let Some(id) = stream {
            if power {
                self.vanish(id, true);
            } else {
                self.let_go_up(id);
            }
        }
        Ok(())
    }

    /// Something happens to a worker's core.
    ///
    /// # Errors
    /// What no run may show.
    pub fn feed(&mut self, worker: usize, life: u64, input: Input) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.workers.get_mut(worker) else {
            return Ok(());
        };
        if known.life != life {
            return Ok(());
        }
        let Some(process) = known.process.as_mut() else {
            return Ok(());
        };
        if known.paused {
            known.held_back.push(input);
            return Ok(());
        }
        if let Input::Message {
            message: FromCoordinator::Acknowledged(acknowledged),
            ..
        } = &input
            && let Some(lease) = &acknowledged.lease
        {
            self.oracle.acknowledged(worker, lease)?;
        }
        let mut outputs = Vec::new();
        process.core.handle(input, now.elapsed(), &mut outputs);
        for output in outputs {
            self.carry_out(worker, output)?;
        }
        self.ask_for_wake(worker);
        Ok(())
    }

    /// Wakes a worker when its core wants it; heartbeats on a good link need no waking.
    pub fn ask_for_wake(&mut self, worker: usize) {
        let Some(known) = self.workers.get(worker) else {
            return;
        };
        let Some(process) = known.process.as_ref() else {
            return;
        };
        let machine = known
            .stream
            .and_then(|id| self.streams.get(&id))
            .map(|stream| stream.machine);
        let calm = !known.unanswered && machine.is_some_and(|machine| self.hear_each_other(worker, machine));
        let due = if calm {
            process.core.wake_at_but_heartbeats()
        } else {
            process.core.wake_at()
        };
        // Never before it is due, or it would be asked for again and again.
        let due = due.map(|due| Time::default() + due + Duration::from_micros(1));
        let Some(known) = self.workers.get_mut(worker) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        if due == process.wake_at {
            return;
        }
        process.wake_at = due;
        process.wake += 1;
        let wake = process.wake;
        if let Some(due) = due {
            self.queue.at(due, Event::WorkerWakes { worker, life, wake });
        }
    }

    /// The moment has come that a core asked for.
    ///
    /// # Errors
    /// What no run may show.
    pub fn wake_worker(&mut self, worker: usize, life: u64, wake: u64) -> Result<(), String> {
        let Some(known) = self.workers.get_mut(worker) else {
            return Ok(());
        };
        let Some(process) = known.process.as_mut() else {
            return Ok(());
        };
        if known.life != life || process.wake != wake || known.paused {
            return Ok(());
        }
        process.wake_at = None;
        self.feed(worker, life, Input::Tick)
    }

    fn carry_out(&mut self, worker: usize, output: Output) -> Result<(), String> {
        match output {
            Output::Connect { connection, hello } => self.connect(worker, connection, *hello),
            Output::Disconnect { .. } => {
                let stream = self.workers.get_mut(worker).and_then(|known| known.stream.take());
                if let Some(id) = stream {
                    self.let_go_up(id);
                }
            }
            Output::Send(message) => self.say(worker, message),
            Output::Heartbeat { connection, request } => {
                if let Some(known) = self.workers.get_mut(worker) {
                    known.unanswered = true;
                }
                self.heartbeat(worker, connection, request);
            }
            Output::Run(run) => self.run_attempt(worker, &run)?,
            Output::Stop {
                device,
                lease,
                checkpoint,
            } => self.stop_attempt(worker, &device, &lease, checkpoint),
            Output::Release { device, lease, .. } => self.release(worker, &device, &lease),
            Output::ReplaceChild { .. } => {}
            Output::Finish(how) => self.finish_worker(worker, &how)?,
        }
        Ok(())
    }

    fn say(&mut self, worker: usize, message: FromWorker) {
        let Some(known) = self.workers.get_mut(worker) else {
            return;
        };
        let ends = matches!(
            message,
            FromWorker::Completed(_) | FromWorker::Failed(_) | FromWorker::Stopped(_)
        );
        if ends {
            known.said.push_back(message.clone());
            if known.said.len() > SAID {
                known.said.pop_front();
            }
        }
        let Some(id) = known.stream else { return };
        let message = WorkerMessage {
            message: Some(message),
        };
        self.send_up(id, Upward::Message(Box::new(message)));
    }

    /// What a worker had said before arrives once more, out of order, on its newest stream.
    pub fn echo(&mut self, worker: usize) {
        let Some(known) = self.workers.get(worker) else {
            return;
        };
        let (Some(id), said) = (known.stream, known.said.clone()) else {
            return;
        };
        for message in said.into_iter().rev() {
            if self.dice.chance(0.5) {
                let message = WorkerMessage {
                    message: Some(message),
                };
                self.send_up(id, Upward::Message(Box::new(message)));
            }
        }
    }

    fn finish_worker(&mut self, worker: usize, how: &Finish) -> Result<(), String> {
        if let Finish::Refused(reason) = how {
            let now = self.now();
            self.trace.step(now, "refused", worker as u64, 0, || {
                format!("worker {worker}: {reason}")
            });
        }
        self.kill_worker(worker, false)?;
        self.queue.after(RESTART, Event::WorkerStarts { worker });
        Ok(())
    }

    /// The agent goes on after a pause: everything that came in meanwhile is there at once.
    ///
    /// # Errors
    /// What no run may show.
    pub fn resume_worker(&mut self, worker: usize) -> Result<(), String> {
        let Some(known) = self.workers.get_mut(worker) else {
            return Ok(());
        };
        if !std::mem::take(&mut known.paused) {
            return Ok(());
        }
        let life = known.life;
        let inputs = std::mem::take(&mut known.held_back);
        if let Some(process) = known.process.as_mut() {
            process.wake_at = None;
        }
        for input in inputs {
            self.feed(worker, life, input)?;
        }
        self.feed(worker, life, Input::Tick)?;
        for machine in 0..self.coordinators.len() {
            self.go_on(worker, machine);
        }
        Ok(())
    }
}
