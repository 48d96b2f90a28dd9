//! Random histories: every command at any time, late and repeated messages included.

use std::collections::BTreeMap;

use espalier_proto::task::{Failure, FailureKind};
use proptest::prelude::*;

use super::kit::{Work, World, check_of, introduction, pliable_gang, stage};
use crate::scheduler::{
    AttemptId, Command, Epoch, JobId, Lease, StagePlan, State, TaskId, TaskPhase, WorkerId,
};

#[derive(Debug, Clone)]
enum Step {
    Submit { priority: i32 },
    Plan { job: usize, kind: Kind, tasks: usize },
    Control { job: usize, how: Control },
    Keep { worker: usize, how: Keeping },
    Join { worker: usize, newer: bool },
    Prepare { lease: usize },
    GoOn { lease: usize, done: u64 },
    LetGo { lease: usize },
    Late,
    Complete { lease: usize },
    Fail { lease: usize, kind: FailureKind },
    Stop { lease: usize },
    Dispatch { rests: bool, away: Option<usize> },
    Restart { from_snapshot: bool },
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Plain,
    Measured,
    Gang,
    InOutput,
}

#[derive(Debug, Clone, Copy)]
enum Control {
    Cancel,
    Pause,
    Resume,
    Break,
    Retry,
    Tidy,
    Archive,
    Finish,
}

#[derive(Debug, Clone, Copy)]
enum Keeping {
    Silence,
    Leave,
    Cordon,
    Uncordon,
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    let failure = prop_oneof![
        4 => Just(FailureKind::Error),
        2 => Just(FailureKind::OutOfMemory),
        4 => Just(FailureKind::Crashed),
        4 => Just(FailureKind::TooNoisy),
        2 => Just(FailureKind::Storage),
        2 => Just(FailureKind::RankLost),
        1 => Just(FailureKind::Invalid),
    ];
    let kind = prop_oneof![
        3 => Just(Kind::Plain),
        1 => Just(Kind::Measured),
        3 => Just(Kind::Gang),
        1 => Just(Kind::InOutput),
    ];
    let control = prop_oneof![
        1 => Just(Control::Cancel),
        2 => Just(Control::Pause),
        4 => Just(Control::Resume),
        1 => Just(Control::Break),
        4 => Just(Control::Retry),
        5 => Just(Control::Tidy),
        1 => Just(Control::Archive),
        1 => Just(Control::Finish),
    ];
    let keeping = prop_oneof![
        3 => Just(Keeping::Silence),
        1 => Just(Keeping::Leave),
        1 => Just(Keeping::Cordon),
        3 => Just(Keeping::Uncordon),
        1 => Just(Keeping::Drain),
    ];
    prop_oneof![
        1 => (-2..3i32).prop_map(|priority| Step::Submit { priority }),
        3 => (0..4usize, kind, 1..4usize).prop_map(|(job, kind, tasks)| Step::Plan { job, kind, tasks }),
        3 => (0..4usize, control).prop_map(|(job, how)| Step::Control { job, how }),
        1 => (0..3usize, keeping).prop_map(|(worker, how)| Step::Keep { worker, how }),
        2 => (0..3usize, prop::bool::weighted(0.2)).prop_map(|(worker, newer)| Step::Join { worker, newer }),
        10 => (0..64usize).prop_map(|lease| Step::Prepare { lease }),
        2 => (0..64usize, 0..8u64).prop_map(|(lease, done)| Step::GoOn { lease, done }),
        4 => (0..64usize).prop_map(|lease| Step::LetGo { lease }),
        1 => Just(Step::Late),
        9 => (0..64usize).prop_map(|lease| Step::Complete { lease }),
        2 => (0..64usize, failure).prop_map(|(lease, kind)| Step::Fail { lease, kind }),
        3 => (0..64usize).prop_map(|lease| Step::Stop { lease }),
        6 => (any::<bool>(), prop::option::weighted(0.2, 0..3usize))
            .prop_map(|(rests, away)| Step::Dispatch { rests, away }),
        1 => any::<bool>().prop_map(|from_snapshot| Step::Restart { from_snapshot }),
    ]
}

#[derive(Default)]
struct History {
    jobs: Vec<JobId>,
    leases: Vec<Work>,
    tasks: BTreeMap<AttemptId, TaskId>,
    accepted: BTreeMap<TaskId, Lease>,
    epochs: [u64; 3],
    plans: usize,
}

impl History {
    /// Mostly one that still holds a device, now and then any that was ever given.
    fn lease(&self, world: &World, choice: usize) -> Option<Work> {
        let live = world.state.attempts().count();
        if !choice.is_multiple_of(4) && live > 0 {
            let held = world.state.attempts().nth(choice % live)?;
            return Some((held.worker, held.lease));
        }
        self.leases.get(choice % self.leases.len().max(1)).copied()
    }

    fn job(&self, choice: usize) -> Option<JobId> {
        self.jobs.get(choice % self.jobs.len().max(1)).copied()
    }
}

fn act(world: &mut World, history: &mut History, step: &Step) {
    match step {
        Step::Submit { priority } => {
            let output = format!("/out/{}", history.jobs.len());
            history.jobs.push(world.submit_at(&output, *priority));
        }
        Step::Plan { job, kind, tasks } => plan(world, history, *job, *kind, *tasks),
        Step::Control { job, how } => {
            if let Some(job) = history.job(*job) {
                control(world, job, *how);
            }
        }
        Step::Keep { worker, how } => keep(world, *worker, *how),
        Step::Join { worker, newer } => {
            history.epochs[*worker] += u64::from(*newer || history.epochs[*worker] == 0);
            let name = format!("w{worker}");
            let host = format!("h{}", worker / 2);
            let introduction = introduction(&name, history.epochs[*worker], &host, 2);
            world.run(Command::Introduce(introduction)).unwrap();
        }
        Step::Prepare { lease } => {
            if let Some((worker, lease)) = history.lease(world, *lease) {
                let address = format!("h{worker}:{}", lease.attempt);
                let _ = world.run(Command::Prepared {
                    worker,
                    lease,
                    address,
                    token: 7.into(),
                });
            }
        }
        Step::GoOn { lease, done } => {
            if let Some((worker, lease)) = history.lease(world, *lease) {
                let done = *done;
                let _ = world.run(Command::WentOn { worker, lease, done });
            }
        }
        Step::LetGo { lease } => {
            if let Some((_, lease)) = history.lease(world, *lease) {
                let attempt = lease.attempt;
                world.run(Command::LetGo { attempt }).unwrap();
            }
        }
        Step::Late => {
            let first = world.state.forming().next();
            if let Some((task, generation)) = first {
                world.run(Command::GangLate { task, generation }).unwrap();
            }
        }
        Step::Complete { lease } => complete(world, history, *lease),
        Step::Fail { lease, kind } => {
            if let Some((worker, lease)) = history.lease(world, *lease) {
                let message = "bad luck".to_owned();
                let failure = Failure { kind: *kind, message };
                let _ = world.run(Command::Fail {
                    worker,
                    lease,
                    failure,
                });
            }
        }
        Step::Stop { lease } => {
            if let Some((worker, lease)) = history.lease(world, *lease) {
                let _ = world.run(Command::Stopped { worker, lease });
            }
        }
        Step::Dispatch { rests, away } => dispatch(world, history, *rests, *away),
        Step::Restart { from_snapshot } => {
            let replayed = world.replayed();
            assert_eq!(replayed, world.state, "replay gives another state");
            world.state = replayed;
            if *from_snapshot {
                let snapshot = serde_json::to_string(&world.state).unwrap();
                let read: State = serde_json::from_str(&snapshot).unwrap();
                assert_eq!(read, world.state, "a snapshot reads as another state");
                world.state = read;
            }
            world.run(Command::BeginTerm).unwrap();
        }
    }
}

fn plan(world: &mut World, history: &mut History, job: usize, kind: Kind, tasks: usize) {
    let Some(job) = history.job(job).and_then(|job| world.state.job(job)) else {
        return;
    };
    history.plans += 1;
    let name = format!("stage-{}", history.plans);
    let planned: StagePlan = match kind {
        Kind::Plain => stage(&name, tasks),
        Kind::Measured => check_of(&name),
        Kind::Gang => {
            let ranks = u32::try_from(tasks).unwrap() + 1;
            // Some form with fewer, some in pairs, some only whole.
            pliable_gang(&name, ranks, [1, 2, ranks][tasks % 3].min(ranks))
        }
        Kind::InOutput => StagePlan {
            in_output: true,
            ..stage(&name, tasks)
        },
    };
    let (job, revision) = (job.id, job.results);
    let stages = vec![planned];
    let _ = world.run(Command::StagesPlanned {
        job,
        revision,
        stages,
    });
}

fn control(world: &mut World, job: JobId, how: Control) {
    let reason = String::new();
    let request_id = None;
    let _ = match how {
        Control::Cancel => world.run(Command::Cancel { job, reason }),
        Control::Pause => world.run(Command::Pause { job, reason }),
        Control::Resume => world.run(Command::Resume { job }),
        Control::Break => world.run(Command::JobBroken { job, message: reason }),
        Control::Retry => world.run(Command::Retry { job, request_id }),
        Control::Tidy if world.state.attempts_of(job).next().is_none() => {
            world.run(Command::PartialRemoved { job })
        }
        Control::Tidy => return,
        Control::Archive => world.run(Command::Archived { job }),
        Control::Finish => {
            let revision = world.state.job(job).map_or(0, |job| job.results);
            let outcome = "{}".into();
            let all_done = |state: &State| {
                let mut tasks = state.tasks().filter(|task| task.job == job);
                tasks.all(|task| matches!(task.phase, TaskPhase::Done { .. }))
            };
            if !all_done(&world.state) {
                return;
            }
            let _ = world.run(Command::OutcomeReached {
                job,
                revision,
                outcome,
            });
            world.run(Command::OutcomeWritten { job })
        }
    };
}

fn keep(world: &mut World, worker: usize, how: Keeping) {
    let Some(known) = world.state.worker_named(&format!("w{worker}")) else {
        return;
    };
    let (worker, epoch): (WorkerId, Epoch) = (known.id, known.epoch);
    let reason = "a reason".to_owned();
    let _ = match how {
        Keeping::Silence => world.run(Command::WorkerSilent { worker, epoch }),
        Keeping::Leave => world.run(Command::Leave { worker, epoch }),
        Keeping::Cordon => world.run(Command::Cordon { worker, reason }),
        Keeping::Uncordon => world.run(Command::Uncordon { worker }),
        Keeping::Drain => world.run(Command::Drain { worker, reason }),
    };
}

fn complete(world: &mut World, history: &mut History, lease: usize) {
    let Some(work) = history.lease(world, lease) else {
        return;
    };
    let task = history.tasks[&work.1.attempt];
    if world.complete(work).is_err() {
        return;
    }
    let Some(task) = world.state.task(task) else {
        return;
    };
    if let TaskPhase::Done { attempt, .. } = task.phase
        && attempt == work.1.attempt
    {
        let first = *history.accepted.entry(task.id).or_insert(work.1);
        assert_eq!(first, work.1, "two attempts of task {} were promoted", task.id);
    }
}

fn dispatch(world: &mut World, history: &mut History, rests: bool, away: Option<usize>) {
    let absent = away.and_then(|worker| world.state.worker_named(&format!("w{worker}")));
    world.absent = absent.map(|worker| worker.id).into_iter().collect();
    let failed = world
        .state
        .tasks()
        .filter(|task| rests && task.failures().own() > 0);
    world.resting = failed.map(|task| task.id).collect();
    for (worker, lease) in world.dispatch() {
        let task = world.state.task_of(lease.attempt).unwrap();
        assert!(!world.resting.contains(&task), "task {task} was to rest");
        assert!(!world.absent.contains(&worker), "worker {worker} is away");
        history.tasks.insert(lease.attempt, task);
        history.leases.push((worker, lease));
    }
}

/// Results that were acknowledged are there until their job is archived, or forgets its output.
fn nothing_was_lost(world: &World, history: &History) {
    for (task, lease) in &history.accepted {
        let Some(task) = world.state.task(*task) else {
            continue;
        };
        let kept = matches!(task.phase, TaskPhase::Done { attempt, .. } if attempt == lease.attempt);
        assert!(kept, "task {} lost its acknowledged result", task.id);
    }
}

/// A job that does not move says why.
fn nobody_waits_without_a_word(world: &World) {
    for job in world.state.jobs() {
        let runs = world.state.attempts_of(job.id).any(|attempt| !attempt.let_go);
        let over = job.phase.is_terminal() && !job.wants_removal();
        let says = !world.why(job.id).is_empty();
        assert_eq!(says, !over && (!runs || job.phase.is_terminal()), "{}", job.id);
    }
}

/// Once every worker is well and every job goes on, all that waits is served: nothing is stuck for ever.
fn everything_is_served_in_the_end(world: &mut World, history: &mut History) {
    for worker in 0..3 {
        act(world, history, &Step::Join { worker, newer: true });
        keep(world, worker, Keeping::Uncordon);
    }
    for job in history.jobs.clone() {
        control(world, job, Control::Resume);
    }
    loop {
        dispatch(world, history, false, None);
        let held: Vec<Work> = world
            .state
            .attempts()
            .map(|held| (held.worker, held.lease))
            .collect();
        if held.is_empty() {
            break;
        }
        for (worker, lease) in held.iter().copied() {
            let address = format!("h{worker}:{}", lease.attempt);
            let _ = world.run(Command::Prepared {
                worker,
                lease,
                address,
                token: 7.into(),
            });
        }
        for work in held {
            if world.complete(work).is_err() {
                world.stop(work);
            }
        }
    }
    let stuck = world
        .state
        .tasks()
        .find(|task| matches!(task.phase, TaskPhase::Waiting));
    assert_eq!(stuck, None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn no_history_breaks_an_invariant_or_an_acknowledged_result(
        steps in prop::collection::vec(step(), 1..240)
    ) {
        let mut world = World::new();
        let mut history = History::default();
        for worker in 0..3 {
            act(&mut world, &mut history, &Step::Join { worker, newer: true });
        }
        act(&mut world, &mut history, &Step::Submit { priority: 0 });
        for step in &steps {
            act(&mut world, &mut history, step);
            nothing_was_lost(&world, &history);
            nobody_waits_without_a_word(&world);
        }
        everything_is_served_in_the_end(&mut world, &mut history);
        prop_assert_eq!(world.replayed(), world.state);
    }
}
