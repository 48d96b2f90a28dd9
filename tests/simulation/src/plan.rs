//! What a run is made of, all of it drawn from its seed before it begins: the cluster, the jobs, the faults.

use std::time::Duration;

use crate::clock::Time;
use crate::dice::Dice;
use crate::faults::{self, Fault};
use crate::planner::JobShape;

/// A run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Decides everything.
    pub seed: u64,
    /// Each worker's host and number of devices.
    pub workers: Vec<(String, usize)>,
    /// Machines that a coordinator may run on.
    pub machines: usize,
    /// Whether terms are claimed in the store; without, the lock of the data directory is the only fence.
    pub fenced: bool,
    /// Segments of the journal are closed at this size, small enough that a run sees snapshots.
    pub segment_bytes: u64,
    /// What users ask, and when.
    pub errands: Vec<Errand>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// From here on nothing goes wrong any more.
    pub calm_from: Time,
    /// By then everything must have ended.
    pub end: Time,
}

/// Something a user asks for.
#[derive(Debug, Clone)]
pub struct Errand {
    /// When it is first asked.
    pub at: Time,
    /// What.
    pub what: What,
}

/// What a user asks for.
#[derive(Debug, Clone)]
pub enum What {
    /// A new job.
    Submit {
        /// Its shape.
        shape: JobShape,
        /// Higher goes first.
        priority: i32,
    },
    /// The end of the job of this errand.
    Cancel(usize),
    /// To let nothing more of it start.
    Pause(usize),
    /// To let it go on.
    Resume(usize),
    /// To try it again where it failed.
    Retry(usize),
    /// To give a worker nothing more.
    Cordon(usize),
    /// To give it work again.
    Uncordon(usize),
    /// To let it leave; its supervisor starts it again.
    Drain(usize),
}

/// How large a run is.
#[derive(Debug, Clone, Copy)]
struct Size {
    hours: u64,
    jobs: usize,
    tasks: usize,
    seconds: u64,
    ranks: u32,
    faults: usize,
    /// The least that a segment of the journal is closed at.
    segment_bytes: u64,
}

impl Plan {
    /// A short run: 4 to 16 workers, 2 hours, hundreds of tasks.
    pub fn short(seed: u64) -> Self {
        let mut dice = Dice::new(seed, "plan");
        let workers = 4 + dice.below(13);
        let size = Size {
            hours: 2,
            jobs: 3 + dice.below(6),
            tasks: 120 + dice.below(280),
            seconds: 30 + dice.between(0, 60 * workers as u64 / 4),
            ranks: 4,
            faults: 4 + dice.below(24),
            segment_bytes: 8 << 10,
        };
        Self::draw(seed, &mut dice, workers, size)
    }

    /// A full run: 128 workers, 64 hours, 20,000 tasks.
    pub fn full(seed: u64) -> Self {
        let mut dice = Dice::new(seed, "plan");
        let size = Size {
            hours: 64,
            jobs: 48,
            tasks: 20_000,
            seconds: 1200,
            ranks: 16,
            faults: 600,
            segment_bytes: 128 << 10,
        };
        Self::draw(seed, &mut dice, 128, size)
    }

    fn draw(seed: u64, dice: &mut Dice, count: usize, size: Size) -> Self {
        let hours = |hours: f64| Time::default() + Duration::from_secs_f64(3600.0 * hours);
        let whole = size.hours as f64;
        // Some hosts have two workers, so that a task which wants its host for itself has to wait.
        let host = |index: usize| format!("host-{}", if index % 4 == 1 { index - 1 } else { index });
        let devices = if count > 16 { 1 } else { 2 };
        let workers: Vec<_> = (0..count)
            .map(|index| (host(index), 1 + dice.below(devices)))
            .collect();
        let slots: usize = workers.iter().map(|(_, devices)| devices).sum();
        let ranks = size.ranks.min(u32::try_from(slots / 2).unwrap_or(1));
        let mut left = size.tasks;
        let mut errands = Vec::new();
        for index in 0..size.jobs {
            let share = left / (size.jobs - index);
            let shape = JobShape::draw(dice, share, size.seconds, ranks);
            left = left.saturating_sub(shape.tasks());
            let at = if index == 0 {
                hours(0.01)
            } else {
                hours(dice.share() * whole * 0.6)
            };
            let priority = if dice.chance(0.3) {
                1 + dice.below(5) as i32
            } else {
                0
            };
            errands.push(Errand {
                at,
                what: What::Submit { shape, priority },
            });
        }
        errands.extend(whims(dice, &errands, count, size.hours));
        let calm_from = hours(whole * 0.8);
        let mut dice = Dice::new(seed, "journal");
        let segment_bytes = size.segment_bytes << dice.below(4);
        let (faults, machines) = faults::draw(seed, count, size.faults, calm_from);
        Self {
            seed,
            workers,
            machines,
            fenced: machines > 1 || seed.is_multiple_of(2),
            segment_bytes,
            errands,
            faults,
            calm_from,
            end: hours(whole + 72.0),
        }
    }
}

/// What users and keepers ask for between submissions.
fn whims(dice: &mut Dice, submitted: &[Errand], workers: usize, hours: u64) -> Vec<Errand> {
    let mut whims = Vec::new();
    for (index, job) in submitted.iter().enumerate() {
        let later =
            |dice: &mut Dice| job.at + dice.scale(Duration::from_secs(20), Duration::from_secs(900 * hours));
        match dice.below(8) {
            0 => whims.push((later(dice), What::Cancel(index))),
            1 => {
                let at = later(dice);
                whims.push((at, What::Pause(index)));
                let on = at + dice.scale(Duration::from_secs(5), Duration::from_secs(1800));
                whims.push((on, What::Resume(index)));
            }
            _ => {}
        }
        // Harmless unless it has failed by then.
        whims.push((later(dice), What::Retry(index)));
    }
    let end = Duration::from_secs(2400 * hours);
    for _ in 0..workers / 8 {
        let worker = dice.below(workers);
        let at = Time::default() + dice.duration(Duration::ZERO, end);
        if dice.chance(0.5) {
            whims.push((at, What::Drain(worker)));
        } else {
            whims.push((at, What::Cordon(worker)));
            let on = at + dice.scale(Duration::from_secs(60), Duration::from_secs(3600));
            whims.push((on, What::Uncordon(worker)));
        }
    }
    whims.into_iter().map(|(at, what)| Errand { at, what }).collect()
}
