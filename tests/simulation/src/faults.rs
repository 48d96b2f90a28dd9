//! What goes wrong: each fault's story, from how it begins to how it ends, in one place.

use std::time::Duration;

use crate::clock::Time;
use crate::coordinator::Doom;
use crate::dice::Dice;
use crate::network::Place;
use crate::world::{Event, World};

/// Something that goes wrong for a while.
#[derive(Debug, Clone)]
pub struct Fault {
    /// When.
    pub at: Time,
    /// How long.
    pub lasts: Duration,
    /// What.
    pub kind: Kind,
}

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are what the variants' docs say
pub enum Kind {
    /// A worker's process is killed, or its machine loses power; it is started again at the end.
    WorkerDies { worker: usize, power: bool },
    /// A worker's agent is stopped, and goes on at the end.
    WorkerPauses { worker: usize },
    /// Nothing passes between these workers and any coordinator, in one direction or both.
    Partition {
        workers: Vec<usize>,
        up: bool,
        down: bool,
    },
    /// Calls between a worker and the coordinator are lost, late, doubled and out of order.
    BadWeather { worker: usize },
    /// A worker's stream breaks.
    StreamBreaks { worker: usize },
    /// The coordinator's process is killed between turns, or its machine loses power.
    CoordinatorDies { power: bool },
    /// It loses power within a turn, before its disk has taken so many more changes.
    PowerGoes { changes: u32 },
    /// It is killed when its turn is durable and nobody has been told.
    DiesBeforeAnswers,
    /// The coordinator is stopped, and goes on at the end.
    CoordinatorPauses,
    /// Its next write fails.
    WriteFails,
    /// Its next fsync fails.
    SyncFails,
    /// Its disk is full until the end.
    DiskFull,
    /// Its wall clock jumps.
    ClockJumps { by_ms: i64 },
    /// Nobody can reach the artifact store until the end.
    StoreOut,
    /// Its machine and disk are gone; at the end another takes over on this machine, from what was shipped.
    Moves { to: usize },
    /// It is cut off from the store, from users and from these workers; half-way another takes over on this
    /// machine, from what was shipped; at the end the old one is back among the others.
    Succession { to: usize, workers: Vec<usize> },
}

impl Kind {
    /// For the figures.
    pub fn name(&self) -> &'static str {
        match self {
            Self::WorkerDies { power: false, .. } => "worker killed",
            Self::WorkerDies { power: true, .. } => "worker's machine lost",
            Self::WorkerPauses { .. } => "worker paused",
            Self::Partition {
                up: true, down: true, ..
            } => "partition",
            Self::Partition { .. } => "one-way partition",
            Self::BadWeather { .. } => "lossy link",
            Self::StreamBreaks { .. } => "stream broken",
            Self::CoordinatorDies { power: false } => "coordinator killed",
            Self::CoordinatorDies { power: true } => "coordinator lost power",
            Self::PowerGoes { .. } => "power lost in a turn",
            Self::DiesBeforeAnswers => "killed before answers",
            Self::CoordinatorPauses => "coordinator paused",
            Self::WriteFails => "write failed",
            Self::SyncFails => "fsync failed",
            Self::DiskFull => "disk full",
            Self::ClockJumps { .. } => "clock jump",
            Self::StoreOut => "store unreachable",
            Self::Moves { .. } => "coordinator's disk lost",
            Self::Succession { .. } => "two coordinators",
        }
    }
}

/// Draws so many faults before a moment, and says how many machines for coordinators they need.
pub fn draw(seed: u64, workers: usize, count: usize, before: Time) -> (Vec<Fault>, usize) {
    let mut dice = Dice::new(seed, "faults");
    let faults = (0..count).map(|_| {
        let at = Time(dice.between(1, before.0.max(2)));
        let kind = draw_kind(&mut dice, workers);
        let lasts = dice.scale(Duration::from_millis(200), Duration::from_secs(900));
        // All is over when calm begins.
        let lasts = lasts.min(before - at);
        Fault { at, lasts, kind }
    });
    let mut faults: Vec<Fault> = faults.collect();
    // Rarer, and longer: somebody has to decide on it.
    let most = 1 + workers / 64;
    let moves = (0..most).filter(|_| dice.chance(0.3)).count();
    let share = before.0 / (moves as u64 + 1);
    for to in 1..=moves {
        let at = Time(share * to as u64 - dice.between(1, share / 2));
        let lasts = dice.duration(Duration::from_secs(30), Duration::from_secs(600));
        let cut = (0..workers).filter(|_| dice.chance(0.5)).collect();
        let kind = if dice.chance(0.4) {
            Kind::Moves { to }
        } else {
            Kind::Succession { to, workers: cut }
        };
        faults.push(Fault { at, lasts, kind });
    }
    (faults, 1 + moves)
}

fn draw_kind(dice: &mut Dice, workers: usize) -> Kind {
    let worker = dice.below(workers);
    match dice.below(33) {
        0..3 => Kind::WorkerDies { worker, power: false },
        3..6 => Kind::WorkerDies { worker, power: true },
        6..9 => Kind::WorkerPauses { worker },
        9..13 => {
            let (up, down) = match dice.below(4) {
                0 => (true, false),
                1 => (false, true),
                _ => (true, true),
            };
            let share = if dice.chance(0.2) { 1.0 } else { dice.share() };
            let cut = (0..workers).filter(|_| dice.chance(share)).collect();
            Kind::Partition {
                workers: cut,
                up,
                down,
            }
        }
        13..16 => Kind::BadWeather { worker },
        16..19 => Kind::StreamBreaks { worker },
        19 => Kind::CoordinatorDies { power: false },
        20 => Kind::CoordinatorDies { power: true },
        21..24 => Kind::PowerGoes {
            changes: u32::try_from(dice.below(12)).unwrap_or(0),
        },
        24..26 => Kind::DiesBeforeAnswers,
        26..28 => Kind::CoordinatorPauses,
        28 => Kind::WriteFails,
        29 => Kind::SyncFails,
        30 => Kind::DiskFull,
        31 => Kind::StoreOut,
        _ => Kind::ClockJumps {
            by_ms: i64::try_from(dice.between(0, 7_200_000)).unwrap_or(0) - 3_600_000,
        },
    }
}

impl World {
    /// A fault begins.
    ///
    /// # Errors
    /// What no run may show.
    pub fn begin_fault(&mut self, fault: usize) -> Result<(), String> {
        let Some(Fault { lasts, kind, .. }) = self.faults.get(fault).cloned() else {
            return Ok(());
        };
        let now = self.now();
        *self.injected.entry(kind.name()).or_default() += 1;
        self.trace.step(now, "fault", fault as u64, 0, || {
            format!("{kind:?} for {lasts:?}")
        });
        self.queue.after(lasts, Event::FaultEnds { fault });
        // Up to now everybody was heard.
        self.credit_all();
        let machine = self.address;
        match kind {
            Kind::WorkerDies { worker, power } => self.kill_worker(worker, power)?,
            Kind::WorkerPauses { worker } => {
                if let Some(known) = self
                    .workers
                    .get_mut(worker)
                    .filter(|known| known.process.is_some())
                {
                    known.paused = true;
                }
            }
            Kind::Partition { workers, up, down } => self.partition(&workers, up, down),
            Kind::BadWeather { worker } => {
                for machine in 0..self.coordinators.len() {
                    self.network
                        .worsen(Place::Worker(worker), Place::Coordinator(machine));
                }
                self.ask_for_wake(worker);
            }
            Kind::StreamBreaks { worker } => self.break_stream(worker)?,
            Kind::CoordinatorDies { power } => self.kill_coordinator(machine, "it is killed", power)?,
            Kind::PowerGoes { changes } => {
                self.doom(machine, Doom::WithinTurn);
                self.order(machine, |orders| orders.power_off_after = Some(changes));
            }
            Kind::DiesBeforeAnswers => self.doom(machine, Doom::BeforeAnswers),
            Kind::CoordinatorPauses => {
                let known = self.coordinators.get_mut(machine);
                if let Some(known) = known.filter(|known| known.process.is_some()) {
                    known.paused = true;
                }
                self.wake_all();
            }
            Kind::WriteFails => self.order(machine, |orders| orders.fail_write = true),
            Kind::SyncFails => self.order(machine, |orders| orders.fail_sync = true),
            Kind::DiskFull => self.order(machine, |orders| orders.full = true),
            Kind::StoreOut => (0..self.coordinators.len()).for_each(|machine| self.store.cut_off(machine)),
            Kind::Moves { .. } => self.lose_machine(machine)?,
            Kind::Succession { workers, .. } => {
                self.isolate(machine, &workers);
                self.queue.after(lasts / 2, Event::TakesOver { fault });
            }
            Kind::ClockJumps { by_ms } => {
                if let Some(known) = self.coordinators.get(machine) {
                    known.clock.jump(by_ms);
                }
            }
        }
        Ok(())
    }

    /// A fault ends.
    ///
    /// # Errors
    /// What no run may show.
    pub fn end_fault(&mut self, fault: usize) -> Result<(), String> {
        let Some(Fault { kind, .. }) = self.faults.get(fault).cloned() else {
            return Ok(());
        };
        let now = self.now();
        self.trace
            .step(now, "fault over", fault as u64, 0, || format!("{kind:?}"));
        match kind {
            Kind::WorkerDies { worker, .. } => self.start_worker(worker)?,
            Kind::WorkerPauses { worker } => self.resume_worker(worker)?,
            Kind::Partition { workers, up, down } => self.reunite(&workers, up, down),
            Kind::BadWeather { worker } => {
                for machine in 0..self.coordinators.len() {
                    self.network
                        .better(Place::Worker(worker), Place::Coordinator(machine));
                }
                self.ask_for_wake(worker);
            }
            Kind::CoordinatorPauses => {
                for machine in 0..self.coordinators.len() {
                    self.resume_coordinator(machine);
                }
                self.wake_all();
            }
            Kind::DiskFull => {
                for machine in 0..self.coordinators.len() {
                    self.order(machine, |orders| orders.full = false);
                }
            }
            Kind::WriteFails | Kind::SyncFails => {
                for machine in 0..self.coordinators.len() {
                    self.order(machine, |orders| {
                        orders.fail_write = false;
                        orders.fail_sync = false;
                    });
                }
            }
            Kind::PowerGoes { .. } | Kind::DiesBeforeAnswers => self.meet_doom()?,
            Kind::StoreOut => (0..self.coordinators.len()).for_each(|machine| self.store.let_in(machine)),
            Kind::Moves { to } => self.take_over(to)?,
            Kind::Succession { to, workers } => self.rejoin(to, &workers),
            Kind::StreamBreaks { .. } | Kind::CoordinatorDies { .. } | Kind::ClockJumps { .. } => {}
        }
        Ok(())
    }

    /// Makes all heartbeats good up to now: what comes next may be silence.
    fn credit_all(&mut self) {
        for machine in 0..self.coordinators.len() {
            for worker in 0..self.workers.len() {
                self.credit_one(worker, machine);
            }
        }
    }

    /// Every core is asked anew when it wants to be woken, as heartbeats count or no longer do.
    fn wake_all(&mut self) {
        for worker in 0..self.workers.len() {
            self.ask_for_wake(worker);
        }
    }

    fn partition(&mut self, workers: &[usize], up: bool, down: bool) {
        for worker in workers {
            for machine in 0..self.coordinators.len() {
                let (there, here) = (Place::Coordinator(machine), Place::Worker(*worker));
                if up {
                    self.network.cut(here, there);
                }
                if down {
                    self.network.cut(there, here);
                }
                self.was_cut(*worker, machine);
            }
            self.ask_for_wake(*worker);
        }
    }

    fn reunite(&mut self, workers: &[usize], up: bool, down: bool) {
        for worker in workers {
            for machine in 0..self.coordinators.len() {
                let (there, here) = (Place::Coordinator(machine), Place::Worker(*worker));
                if up {
                    self.network.heal(here, there);
                }
                if down {
                    self.network.heal(there, here);
                }
                self.go_on(*worker, machine);
            }
            self.ask_for_wake(*worker);
        }
    }

    fn doom(&mut self, machine: usize, doom: Doom) {
        if let Some(known) = self.coordinators.get_mut(machine) {
            known.doom = Some(doom);
        }
    }

    /// A process that was to die within a turn had none worth the name: it dies now.
    fn meet_doom(&mut self) -> Result<(), String> {
        for machine in 0..self.coordinators.len() {
            let doomed = self
                .coordinators
                .get(machine)
                .is_some_and(|known| known.doom.is_some());
            let ordered = self
                .coordinators
                .get(machine)
                .is_some_and(|known| known.disk.is_ordered_off());
            if doomed || ordered {
                self.kill_coordinator(machine, "its time has come", ordered)?;
            }
        }
        Ok(())
    }

    fn order(&mut self, machine: usize, change: impl FnOnce(&mut crate::disk::Orders)) {
        if let Some(known) = self.coordinators.get(machine) {
            known.disk.order(change);
        }
    }
}
