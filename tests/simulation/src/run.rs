//! One run from its seed to its end, and what came of it.

use std::collections::BTreeMap;

use espalier_coordinator::scheduler::{Job, JobPhase, State, TaskPhase};

use crate::clock::{Queue, Time};
use crate::coordinator::CoordinatorMachine;
use crate::dice::Dice;
use crate::disk::Figures;
use crate::gangs::Gangs;
use crate::network::Network;
use crate::oracle::Oracle;
use crate::plan::Plan;
use crate::store::VirtualStore;
use crate::trace::Trace;
use crate::user::User;
use crate::worker::WorkerMachine;
use crate::world::{Event, World};

/// Between looks at whether everything has ended, once it is calm.
const LOOK_EVERY: u64 = 512;

/// More events at one moment than could be right.
const STANDSTILL: u64 = 200_000;

/// A run that held every invariant.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Stands for everything that happened.
    pub hash: u64,
    /// Things that happened.
    pub steps: u64,
    /// Events that coordinators made durable.
    pub events: u64,
    /// Completions that workers were told are durable.
    pub acknowledged: u64,
    /// Jobs by how they ended.
    pub jobs: BTreeMap<&'static str, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// How often a rank told that another one is gone.
    pub losses_told: u64,
    /// Tasks, not yet archived, whose last gang had fewer ranks than they ask for.
    pub smaller_gangs: u64,
    /// How often a task's budgets began anew, as it had gone further than ever.
    pub went_on: u64,
    /// How often a gang ended without waiting for a rank.
    pub let_go: u64,
    /// What coordinators' disks did, and did badly.
    pub disks: Figures,
    /// When everything had ended.
    pub ended_at: Time,
}

/// A run that did not.
#[derive(Debug, Clone)]
pub struct Violation {
    /// What was broken.
    pub broken: String,
    /// When.
    pub at: Time,
    /// Things that had happened by then.
    pub steps: u64,
}

/// Whether a job has ended, or waits for a user.
fn is_settled(state: &State, job: &Job) -> bool {
    let ended = job.phase.is_terminal() && !job.wants_removal();
    ended || (job.paused.is_some() && state.attempts_of(job.id).next().is_none())
}

/// Runs a plan to its end.
///
/// # Errors
/// The first invariant that was broken.
pub fn run(plan: Plan, trace: Trace) -> Result<Report, Violation> {
    let mut world = World::new(plan, trace);
    match world.live() {
        Ok(()) => Ok(world.report()),
        Err(broken) => Err(Violation {
            broken,
            at: world.now(),
            steps: world.trace.steps(),
        }),
    }
}

impl World {
    fn new(plan: Plan, trace: Trace) -> Self {
        let seed = plan.seed;
        let workers = plan.workers.iter().enumerate();
        let mut world = Self {
            queue: Queue::new(),
            network: Network::new(Dice::new(seed, "network")),
            coordinators: (0..plan.machines)
                .map(|number| CoordinatorMachine::new(seed, number))
                .collect(),
            store: VirtualStore::default(),
            address: 0,
            workers: workers
                .map(|(index, (host, devices))| {
                    WorkerMachine::new(format!("worker-{index}"), host.clone(), *devices)
                })
                .collect(),
            streams: BTreeMap::new(),
            next_stream: 0,
            user: User::new(plan.errands.clone()),
            faults: plan.faults.clone(),
            injected: BTreeMap::new(),
            gangs: Gangs::default(),
            oracle: Oracle::default(),
            trace,
            dice: Dice::new(seed, "processes"),
            plan,
        };
        world.schedule();
        world
    }

    fn schedule(&mut self) {
        self.queue.at(Time(1), Event::CoordinatorStarts { machine: 0 });
        for worker in 0..self.workers.len() {
            let at = Time(self.dice.between(1, 30_000_000));
            self.queue.at(at, Event::WorkerStarts { worker });
        }
        let errands: Vec<Time> = self.user.times().collect();
        for (errand, at) in errands.into_iter().enumerate() {
            self.queue.at(at, Event::UserActs { errand });
        }
        let faults: Vec<Time> = self.faults.iter().map(|fault| fault.at).collect();
        for (fault, at) in faults.into_iter().enumerate() {
            self.queue.at(at, Event::FaultBegins { fault });
        }
    }

    fn live(&mut self) -> Result<(), String> {
        let mut count = 0_u64;
        let (mut moment, mut began) = (self.now(), 0);
        while self.step()? {
            count += 1;
            if self.now() != moment {
                (moment, began) = (self.now(), count);
            } else if count - began > STANDSTILL {
                return Err("time stands still".to_owned());
            }
            if count.is_multiple_of(LOOK_EVERY) && self.is_over() {
                return self.look_back();
            }
            if self.now() > self.plan.end {
                return self.say_what_waits();
            }
        }
        Err("nothing is left to happen, although coordinators tick for ever".to_owned())
    }

    /// Whether it is calm and everything that was asked for has ended.
    fn is_over(&self) -> bool {
        if self.now() < self.plan.calm_from || !self.user.unanswered().is_empty() {
            return false;
        }
        let idle = |worker: &WorkerMachine| {
            worker.process.as_ref().is_some_and(|process| {
                process.core.leases().is_empty()
                    && process.devices.iter().all(|device| device.running.is_none())
            })
        };
        self.state()
            .is_some_and(|state| state.jobs().all(|job| is_settled(state, job)))
            && self.workers.iter().all(idle)
    }

    fn state(&self) -> Option<&State> {
        let known = self.coordinators.get(self.address)?;
        known.process.as_ref().map(|process| process.owner.state())
    }

    /// The full checks at the end.
    fn look_back(&mut self) -> Result<(), String> {
        let machine = self.address;
        let Some(known) = self.coordinators.get(machine) else {
            return Ok(());
        };
        let Some(process) = known.process.as_ref() else {
            return Ok(());
        };
        self.oracle.at_the_end(machine, process.owner.state())
    }

    /// Time is up, and something has not ended.
    fn say_what_waits(&self) -> Result<(), String> {
        let Some(state) = self.state() else {
            return Err("no coordinator runs at the end".to_owned());
        };
        let unexplained = state.jobs().filter(|job| {
            let open = !job.phase.is_terminal() || job.wants_removal();
            open && state.why_waiting(job.id).is_none()
        });
        let jobs: Vec<String> = unexplained
            .map(|job| {
                let open = state.tasks().filter(|task| task.job == job.id);
                let open = open.filter(|task| !matches!(task.phase, TaskPhase::Done { .. }));
                let open: Vec<_> = open.take(3).map(|task| (task.id, &task.phase)).collect();
                let attempts: Vec<_> = state.attempts_of(job.id).take(3).collect();
                format!(
                    "{} is {:?}; open are {open:?}; attempts {attempts:?}",
                    job.id, job.phase
                )
            })
            .collect();
        let workers = self.workers.iter().filter_map(|worker| {
            let leases = worker.process.as_ref()?.core.leases();
            (!leases.is_empty()).then(|| format!("{} holds {leases:?}", worker.name))
        });
        let workers: Vec<String> = workers.collect();
        if jobs.is_empty() && workers.is_empty() && self.user.unanswered().is_empty() {
            return Ok(());
        }
        Err(format!(
            "not everything has ended: jobs {jobs:?}; workers {workers:?}; submissions {:?}",
            self.user.unanswered()
        ))
    }

    fn report(&self) -> Report {
        let mut jobs = BTreeMap::new();
        for job in self.state().into_iter().flat_map(State::jobs) {
            let ended = match job.phase {
                JobPhase::Succeeded { .. } => "succeeded",
                JobPhase::Failed { .. } => "failed",
                JobPhase::Cancelled { .. } => "cancelled",
                _ => "open",
            };
            *jobs.entry(ended).or_default() += 1;
        }
        let archived = self.state().into_iter().flat_map(State::archived);
        for summary in archived {
            *jobs.entry(summary.ended.name()).or_default() += 1;
        }
        let tasks = self.state().into_iter().flat_map(State::tasks);
        let smaller = tasks.filter(|task| (1..task.needs.ranks).contains(&task.formed_ranks));
        let mut disks = Figures::default();
        for machine in &self.coordinators {
            disks += machine.disk.figures();
        }
        Report {
            hash: self.trace.hash(),
            steps: self.trace.steps(),
            events: self.oracle.events,
            acknowledged: self.oracle.acknowledged_count() as u64,
            jobs,
            faults: self.injected.clone(),
            losses_told: self.gangs.losses_told,
            smaller_gangs: smaller.count() as u64,
            went_on: self.oracle.went_on,
            let_go: self.oracle.let_go,
            disks,
            ended_at: self.now(),
        }
    }
}
