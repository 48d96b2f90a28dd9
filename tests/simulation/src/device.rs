//! Devices that only pretend to work.
//!
//! An attempt takes a virtual time and ends as chance will have it. Ranks of a gang stand ready, wait for
//! their release, and end together: one that is gone leaves the others hanging or crashing, as a collective
//! does, or has them tell that it is gone.

use std::time::Duration;

use espalier_proto::task::{Failure, FailureKind, Progress, TaskSpec};
use espalier_proto::v1::Lease;
use espalier_worker::agent::core::{DeviceEvent, Ended, Input, Run};

use crate::gangs::GangKey;
use crate::planner;
use crate::world::{Event, World};

/// A child that tells nothing for so long is killed.
const HANG: Duration = Duration::from_secs(600);

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
    RankLost,
    Stopped,
    Hung,
    Nothing,
}

impl World {
    fn device(&mut self, worker: usize, device: &str) -> Option<(usize, &mut FakeDevice)> {
        let index: usize = device.strip_prefix("gpu-")?.parse().ok()?;
        let process = self.workers.get_mut(worker)?.process.as_mut()?;
        process.devices.get_mut(index).map(|device| (index, device))
    }

    /// A device begins an attempt.
    pub(crate) fn run_attempt(&mut self, worker: usize, run: &Run) -> Result<(), String> {
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
        let gang = run.assign.gang.map(|gang| {
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

    pub(crate) fn stop_attempt(&mut self, worker: usize, device: &str, lease: &Lease, checkpoint: bool) {
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
    pub(crate) fn release(&mut self, worker: usize, device: &str, lease: &Lease) {
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

    /// A rank is gone before its gang has ended: the others notice, crash, or hang in a collective.
    pub(crate) fn leaves_gang(&mut self, gone: &Running) {
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
            let soon = self.dice.duration(Duration::ZERO, Duration::from_secs(30));
            match self.dice.below(6) {
                0..3 => self.will_say(worker, index, soon, News::RankLost),
                3 => self.will_say(worker, index, soon, News::Failure),
                _ => self.will_say(worker, index, HANG, News::Hung),
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
        if let Some((key, _)) = gone.gang {
            self.tells_where_it_began(worker, life, lease, key)?;
        }
        self.trace.step(now, "ended", task, lease.attempt, || {
            format!(
                "worker {worker} ends attempt {} of task {task}: {news:?}",
                lease.attempt
            )
        });
        if news == News::Output {
            self.oracle.completed(&lease, gone.gang.is_some());
        } else {
            self.leaves_gang(&gone);
        }
        let ended = self.end_of(news, &lease);
        self.feed(worker, life, Input::Device(DeviceEvent::Ended { lease, ended }))
    }

    /// Before its end a rank tells where its gang had begun: every other formation further than any before.
    fn tells_where_it_began(
        &mut self,
        worker: usize,
        life: u64,
        lease: Lease,
        key: GangKey,
    ) -> Result<(), String> {
        let went_on_from = key.generation - key.generation % 2;
        let progress_json = json(&Progress {
            done: went_on_from + 1,
            total: u64::MAX,
            unit: "steps".to_owned(),
            note: String::new(),
            went_on_from,
        });
        let progress = DeviceEvent::Progress { lease, progress_json };
        self.feed(worker, life, Input::Device(progress))
    }

    fn end_of(&mut self, news: News, lease: &Lease) -> Ended {
        let failure = |kind| {
            let message = "it pretends to have failed".to_owned();
            Ended::Failure(json(&Failure { kind, message }))
        };
        match news {
            News::Output => Ended::Output(json(&planner::output(lease))),
            News::Failure => failure(planner::failure(&mut self.dice)),
            News::Hung => failure(FailureKind::Hung),
            News::RankLost => {
                self.gangs.losses_told += 1;
                failure(FailureKind::RankLost)
            }
            News::Stopped | News::Prepared | News::Nothing => Ended::Stopped,
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}
