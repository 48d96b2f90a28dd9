//! Why a job does not move, in words for its user.

use std::collections::BTreeSet;

use super::index::{Class, Turn};
use super::{Device, Job, JobId, JobPhase, Standing, State, TaskId, Worker, WorkerId};

impl State {
    /// Why nothing of the job runs; none when something does, or when it has ended.
    pub fn why_waiting(&self, job: JobId) -> Option<String> {
        self.why_waiting_beside(job, &BTreeSet::new(), &BTreeSet::new())
    }

    /// The same, where some workers cannot be told at the moment and some tasks rest after a failure.
    pub fn why_waiting_beside(
        &self,
        job: JobId,
        absent: &BTreeSet<WorkerId>,
        resting: &BTreeSet<TaskId>,
    ) -> Option<String> {
        let job = self.job(job)?;
        let runs = self.attempts_of(job.id).any(|attempt| !attempt.let_go);
        let is_held = self.attempts_of(job.id).next().is_some();
        match &job.phase {
            JobPhase::Succeeded { .. } => return None,
            JobPhase::Failed { .. } | JobPhase::Cancelled { .. } if !job.wants_removal() => return None,
            JobPhase::Failed { .. } | JobPhase::Cancelled { .. } if is_held => {
                return Some("waits for its attempts to stop".to_owned());
            }
            JobPhase::Failed { .. } | JobPhase::Cancelled { .. } => {
                return Some("removes what it had half-written".to_owned());
            }
            JobPhase::Finishing { .. } => return Some("writes its outcome".to_owned()),
            JobPhase::Active => {}
        }
        if runs {
            return None;
        }
        if let Some(pause) = &job.paused {
            return Some(match pause.reason.as_str() {
                "" => "is paused".to_owned(),
                reason => format!("is paused: {reason}"),
            });
        }
        if job.wants_plan() {
            return Some("decides what comes next".to_owned());
        }
        Some(self.why_no_device(job, absent, resting))
    }

    fn why_no_device(&self, job: &Job, absent: &BTreeSet<WorkerId>, resting: &BTreeSet<TaskId>) -> String {
        let places = Turn::range(job);
        let mut rests = false;
        for (class, queue) in &self.index.waiting {
            let mut turns = queue.range(places.clone()).peekable();
            if turns.peek().is_none() {
                continue;
            }
            if turns.all(|turn| resting.contains(&turn.task)) {
                rests = true;
                continue;
            }
            return self.why_class_waits(class, absent);
        }
        if rests {
            return "rests after a failure".to_owned();
        }
        "waits for what is planned next".to_owned()
    }

    fn why_class_waits(&self, class: &Class, absent: &BTreeSet<WorkerId>) -> String {
        let wanted = wanted(class);
        let known: Vec<&Worker> = self
            .workers()
            .filter(|worker| able(worker, class).next().is_some())
            .collect();
        if known.is_empty() {
            return format!("waits for a worker with {wanted}: there is none");
        }
        let usable = known
            .iter()
            .filter(|worker| worker.is_usable() && !absent.contains(&worker.id));
        let usable: Vec<&&Worker> = usable.collect();
        if usable.is_empty() {
            let gone = gone(&known, absent);
            return format!("waits for a worker with {wanted}: {gone}");
        }
        if class.is_gang() {
            let count = |workers: &mut dyn Iterator<Item = &Worker>| {
                let within_reach = workers.map(|worker| self.devices_within_reach(worker, class));
                u32::try_from(within_reach.sum::<usize>()).unwrap_or(u32::MAX)
            };
            let in_all = count(&mut usable.iter().map(|worker| **worker));
            // A gang waits for workers that are away for a moment rather than form without them.
            let with_absent = count(&mut known.iter().copied().filter(|worker| worker.is_usable()));
            return match class.ranks_of(with_absent) {
                None => {
                    let least = wanted_together(class, class.rank_multiple);
                    format!("waits for {least}: there are {with_absent}, and a worker with more has to join")
                }
                Some(ranks) if ranks > in_all => format!("waits for {wanted}: there are {in_all}"),
                Some(ranks) => {
                    let wanted = wanted_together(class, ranks);
                    format!("waits until {wanted} are free together")
                }
            };
        }
        if class.exclusive {
            return format!("waits for a host with {wanted} and nothing else running");
        }
        if self.is_kept_from(class, absent) {
            return format!(
                "waits for {wanted}: what is free is kept for a task that needs several together, or for one \
                 that measures time"
            );
        }
        format!("waits for {wanted} to be free")
    }

    fn devices_within_reach(&self, worker: &Worker, class: &Class) -> usize {
        able(worker, class)
            .filter(|device| !self.is_cut_off(device))
            .count()
    }

    /// Whether devices that would do are free, and something of their kind measures or waits to have several or a
    /// host for itself.
    fn is_kept_from(&self, class: &Class, absent: &BTreeSet<WorkerId>) -> bool {
        let keeps = |other: &Class| {
            other != class && other.device_kind == class.device_kind && (other.is_gang() || other.exclusive)
        };
        let is_kept =
            self.index.waiting.keys().any(keeps) || self.index.hosts.values().any(|used| used.exclusive > 0);
        let mut free = self.index.free.get(&class.device_kind).into_iter().flatten();
        is_kept
            && free.any(|(worker, place)| {
                let device = self.worker(*worker).and_then(|worker| worker.devices.get(*place));
                let fits = device.is_some_and(|device| device.info.can_run(class));
                fits && !absent.contains(worker)
            })
    }
}

/// What a task asks for: `2 cuda devices of 80.0 GiB`.
fn wanted(class: &Class) -> String {
    wanted_together(class, class.ranks)
}

fn wanted_together(class: &Class, ranks: u32) -> String {
    let devices = match ranks {
        0 | 1 => format!("a {} device", class.device_kind),
        ranks => format!("{ranks} {} devices", class.device_kind),
    };
    let devices = match class.memory_bytes {
        0 => devices,
        bytes => format!("{devices} of at least {}", memory(bytes)),
    };
    match &class.engine {
        None => devices,
        Some(engine) => format!("{devices} and {engine} to measure in"),
    }
}

fn memory(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    let mebibytes = bytes.div_ceil(MIB);
    match mebibytes {
        0..10_240 => format!("{mebibytes} MiB"),
        _ => format!("{} GiB", mebibytes.div_ceil(1024)),
    }
}

/// Devices of a worker that could run a task of this class, busy ones too.
fn able<'a>(worker: &'a Worker, class: &'a Class) -> impl Iterator<Item = &'a Device> {
    worker.devices.iter().filter(|device| device.info.is_of(class))
}

/// What became of workers of which none gets work: `1 is cordoned (the disk is full), 2 were lost`.
fn gone(workers: &[&Worker], absent: &BTreeSet<WorkerId>) -> String {
    let count = |is: &dyn Fn(&Worker) -> bool| workers.iter().filter(|worker| is(worker)).count();
    let lost = count(&|worker| worker.standing == Standing::Lost);
    let left = count(&|worker| worker.standing == Standing::Left);
    let leaving = count(&|worker| worker.standing == Standing::Leaving);
    let cordoned = |worker: &Worker| worker.standing == Standing::Present && worker.cordon.is_some();
    let away = count(&|worker| worker.is_usable() && absent.contains(&worker.id));
    let reason = workers.iter().find(|worker| cordoned(worker));
    let reason = reason.and_then(|worker| worker.cordon.as_ref());
    let reason = reason.map_or("", |cordon| cordon.reason.as_str());
    let parts = [
        (count(&cordoned), format!("cordoned ({reason})")),
        (leaving, "leaving".to_owned()),
        (away, "away".to_owned()),
        (lost, "lost".to_owned()),
        (left, "left".to_owned()),
    ];
    let parts = parts.into_iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
    parts.join(", ")
}
