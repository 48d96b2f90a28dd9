//! Machines that workers run on: the real core of the agent, and devices that only pretend to work.
//!
//! An attempt takes a virtual time and ends as chance will have it. Ranks of a gang stand ready, wait for
//! their release, and end together: one that is gone leaves the others hanging or crashing, as a collective
//! does. A paused worker is one whose agent is stopped while its children go on.

use std::collections::VecDeque;
use std::time::Duration;

use espalier_proto::task::{Failure, TaskSpec};
use espalier_proto::v1::coordinator_message::Message as FromCoordinator;
use espalier_proto::v1::worker_message::Message as FromWorker;
use espalier_proto::v1::{self, Lease, WorkerMessage};
use espalier_worker::agent::core::{Core, CoreOptions, DeviceEvent, Ended, Finish, Input, Output, Run};

use crate::clock::Time;
use crate::gangs::GangKey;
use crate::planner;
use crate::wire::{StreamId, Upward};
use crate::world::{Event, World};

/// A child that tells nothing for so long is killed.
const HANG: Duration = Duration::from_secs(600);
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

/// A device that pretends.
#[derive(Debug, Default)]
pub struct FakeDevice {
    /// Counts what it ran.
    runs: u64,
    /// What it runs.
    pub running: Option<Running>,
}

/// An attempt that a device pretends to run.
#[derive(Debug)]
pub struct Running {
    /// Its lease.
    pub lease: Lease,
    /// Its task.
    pub task: u64,
    /// Its place in a gang.
    pub gang: Option<(GangKey, u32)>,
    usual: Duration,
    failing: u64,
    next: News,
}

/// What the device says next of what it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum News {
    Prepared,
    Output,
    Failure,
    Stopped,
    Hung,
    Nothing,
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

    fn device(&mut self, worker: usize, device: &str) -> Option<(usize, &mut FakeDevice)> {
        let index: usize = device.strip_prefix("gpu-")?.parse().ok()?;
        let process = self.workers.get_mut(worker)?.process.as_mut()?;
        process.devices.get_mut(index).map(|device| (index, device))
    }

    /// A device begins an attempt.
    fn run_attempt(&mut self, worker: usize, run: &Run) -> Result<(), String> {
        let now = self.now();
        let (lease, task) = (run.lease, run.assign.task_id);
        self.trace.step(now, "runs", task, lease.attempt, || {
            format!("worker {worker} begins attempt {} of task {task}", lease.attempt)
        });
        self.oracle.begins(worker, &lease, task)?;
        let spec: Result<TaskSpec, _> = serde_json::from_slice(&run.assign.spec_json);
        let nature = spec.ok().as_ref().and_then(planner::nature);
        let Some(nature) = nature else {
            return Err(format!("attempt {} was assigned without a task", lease.attempt));
        };
        let gang = run.assign.gang.filter(|gang| gang.ranks > 1);
        let gang = gang.map(|gang| {
            let key = GangKey {
                task,
                generation: gang.generation,
                term: lease.term,
            };
            self.gangs.form(key, gang.ranks);
            (key, gang.rank)
        });
        let running = Running {
            lease,
            task,
            gang,
            usual: nature.usual,
            failing: nature.failing,
            next: News::Nothing,
        };
        let Some((index, device)) = self.device(worker, &run.assign.device_id) else {
            return Err(format!("attempt {} runs on no device", lease.attempt));
        };
        if let Some(other) = &device.running {
            return Err(format!(
                "attempts {} and {} run on one device of worker {worker}",
                other.lease.attempt, lease.attempt
            ));
        }
        device.runs += 1;
        device.running = Some(running);
        if gang.is_some() {
            let takes = self
                .dice
                .scale(Duration::from_millis(100), Duration::from_secs(20));
            self.will_say(worker, index, takes, News::Prepared);
        } else {
            self.work(worker, index);
        }
        Ok(())
    }

    /// Decides how an attempt ends, and when.
    fn work(&mut self, worker: usize, index: usize) {
        let process = self.workers.get(worker).and_then(|known| known.process.as_ref());
        let running = process
            .and_then(|process| process.devices.get(index))
            .and_then(|device| device.running.as_ref());
        let Some((usual, failing)) = running.map(|running| (running.usual, running.failing)) else {
            return;
        };
        let takes = self.dice.duration(usual / 2, usual + usual / 2);
        if self.dice.between(1, 1000) > failing {
            return self.will_say(worker, index, takes, News::Output);
        }
        // Some hang, and are killed for it.
        if self.dice.chance(0.1) {
            return self.will_say(worker, index, takes + HANG, News::Hung);
        }
        let share = self.dice.duration(Duration::ZERO, takes);
        self.will_say(worker, index, share, News::Failure);
    }

    fn will_say(&mut self, worker: usize, index: usize, delay: Duration, next: News) {
        let Some(known) = self.workers.get_mut(worker) else {
            return;
        };
        let life = known.life;
        let Some(process) = known.process.as_mut() else {
            return;
        };
        let Some(device) = process.devices.get_mut(index) else {
            return;
        };
        let Some(running) = device.running.as_mut() else {
            return;
        };
        running.next = next;
        // Whatever it would have said is void.
        device.runs += 1;
        let run = device.runs;
        self.queue.after(
            delay,
            Event::DeviceNews {
                worker,
                life,
                device: index,
                run,
            },
        );
    }

    fn stop_attempt(&mut self, worker: usize, device: &str, lease: &Lease, checkpoint: bool) {
        let slowest = if checkpoint { 60 } else { 6 };
        let takes = self
            .dice
            .scale(Duration::from_millis(50), Duration::from_secs(slowest));
        let Some((index, device)) = self.device(worker, device) else {
            return;
        };
        let is_it = device
            .running
            .as_ref()
            .is_some_and(|running| running.lease == *lease);
        if is_it {
            self.will_say(worker, index, takes, News::Stopped);
        }
    }

    /// A rank is released: the gang ends together, when its last rank was.
    fn release(&mut self, worker: usize, device: &str, lease: &Lease) {
        let Some((index, device)) = self.device(worker, device) else {
            return;
        };
        let running = device.running.as_ref().filter(|running| running.lease == *lease);
        let Some((key, rank)) = running.and_then(|running| running.gang) else {
            return;
        };
        if self.gangs.release(key, rank, worker, index) {
            self.gang_works(key);
        } else {
            // Until the others are there, it waits in its first collective.
            self.will_say(worker, index, HANG, News::Hung);
        }
    }

    /// All ranks work together; each ends as all do, a little apart.
    fn gang_works(&mut self, key: GangKey) {
        let members = self.gangs.members(key);
        let unlucky = self.dice.below(members.len());
        for (place, (worker, index)) in members.into_iter().enumerate() {
            let process = self.workers.get(worker).and_then(|known| known.process.as_ref());
            let usual = process
                .and_then(|process| process.devices.get(index))
                .and_then(|device| device.running.as_ref())
                .filter(|running| running.gang.is_some_and(|(gang, _)| gang == key))
                .map(|running| (running.usual, running.failing));
            let Some((usual, failing)) = usual else { continue };
            let apart = self.dice.duration(Duration::ZERO, Duration::from_secs(2));
            if place == unlucky && self.dice.between(1, 1000) <= failing {
                self.will_say(worker, index, usual / 2 + apart, News::Failure);
            } else {
                self.will_say(worker, index, usual + apart, News::Output);
            }
        }
    }

    /// A rank is gone before its gang has ended: the others hang in a collective, or crash.
    fn leaves_gang(&mut self, gone: &Running) {
        let Some((key, _)) = gone.gang else { return };
        for (worker, index) in self.gangs.break_up(key) {
            let process = self.workers.get(worker).and_then(|known| known.process.as_ref());
            let still = process
                .and_then(|process| process.devices.get(index))
                .and_then(|device| device.running.as_ref())
                .is_some_and(|running| {
                    running.lease != gone.lease
                        && running.next != News::Stopped
                        && running.gang.is_some_and(|(gang, _)| gang == key)
                });
            if !still {
                continue;
            }
            if self.dice.chance(0.5) {
                let soon = self.dice.duration(Duration::ZERO, Duration::from_secs(30));
                self.will_say(worker, index, soon, News::Failure);
            } else {
                self.will_say(worker, index, HANG, News::Hung);
            }
        }
    }

    /// What a device had to say is due.
    ///
    /// # Errors
    /// What no run may show.
    pub fn device_news(&mut self, worker: usize, life: u64, index: usize, run: u64) -> Result<(), String> {
        let now = self.now();
        let Some(known) = self.workers.get_mut(worker).filter(|known| known.life == life) else {
            return Ok(());
        };
        let Some(process) = known.process.as_mut() else {
            return Ok(());
        };
        let Some(device) = process.devices.get_mut(index).filter(|device| device.runs == run) else {
            return Ok(());
        };
        let Some(running) = device.running.as_mut() else {
            return Ok(());
        };
        let (lease, task, news) = (running.lease, running.task, running.next);
        if news == News::Prepared {
            running.next = News::Nothing;
            let address = format!("worker-{worker}:{}", 20_000 + index);
            return self.feed(
                worker,
                life,
                Input::Device(DeviceEvent::Prepared { lease, address }),
            );
        }
        let Some(gone) = device.running.take() else {
            return Ok(());
        };
        self.trace.step(now, "ended", task, lease.attempt, || {
            format!(
                "worker {worker} ends attempt {} of task {task}: {news:?}",
                lease.attempt
            )
        });
        if news == News::Output {
            self.oracle.completed(&lease, task);
        } else {
            self.leaves_gang(&gone);
        }
        let ended = self.end_of(news, &lease);
        self.feed(worker, life, Input::Device(DeviceEvent::Ended { lease, ended }))
    }

    fn end_of(&mut self, news: News, lease: &Lease) -> Ended {
        let failure = |kind| Failure {
            kind,
            message: "it pretends to have failed".to_owned(),
        };
        match news {
            News::Output => Ended::Output(json(&planner::output(lease))),
            News::Failure => Ended::Failure(json(&failure(planner::failure(&mut self.dice)))),
            News::Hung => Ended::Failure(json(&failure(espalier_proto::task::FailureKind::Hung))),
            News::Stopped | News::Prepared | News::Nothing => Ended::Stopped,
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}
