//! Random histories: every command at any time, late and repeated messages included.

use std::collections::BTreeMap;

use espalier_proto::task::{Failure, FailureKind};
use proptest::prelude::*;

use super::kit::{World, introduction, measurement, stage};
use crate::scheduler::{AttemptId, Command, Epoch, JobId, Lease, TaskId, TaskPhase, WorkerId};

#[derive(Debug, Clone)]
enum Step {
    Submit,
    Plan {
        job: usize,
        tasks: usize,
        measured: bool,
    },
    Cancel {
        job: usize,
    },
    Join {
        worker: usize,
        newer: bool,
    },
    Silence {
        worker: usize,
    },
    Leave {
        worker: usize,
    },
    Complete {
        lease: usize,
    },
    Fail {
        lease: usize,
        kind: FailureKind,
    },
    Stop {
        lease: usize,
    },
    Dispatch,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        Just(FailureKind::Error),
        Just(FailureKind::OutOfMemory),
        Just(FailureKind::Crashed),
        Just(FailureKind::Invalid),
    ];
    prop_oneof![
        1 => Just(Step::Submit),
        3 => (0..4usize, 1..4usize, any::<bool>())
            .prop_map(|(job, tasks, measured)| Step::Plan { job, tasks, measured }),
        1 => (0..4usize).prop_map(|job| Step::Cancel { job }),
        3 => (0..3usize, any::<bool>()).prop_map(|(worker, newer)| Step::Join { worker, newer }),
        1 => (0..3usize).prop_map(|worker| Step::Silence { worker }),
        1 => (0..3usize).prop_map(|worker| Step::Leave { worker }),
        6 => (0..64usize).prop_map(|lease| Step::Complete { lease }),
        2 => (0..64usize, kind).prop_map(|(lease, kind)| Step::Fail { lease, kind }),
        1 => (0..64usize).prop_map(|lease| Step::Stop { lease }),
        6 => Just(Step::Dispatch),
        1 => Just(Step::Restart),
    ]
}

#[derive(Default)]
struct History {
    jobs: Vec<JobId>,
    leases: Vec<(WorkerId, Lease)>,
    tasks: BTreeMap<AttemptId, TaskId>,
    accepted: BTreeMap<TaskId, Lease>,
    epochs: [u64; 3],
    plans: usize,
}

fn act(world: &mut World, history: &mut History, step: &Step) {
    match step {
        Step::Submit => {
            let output = format!("/out/{}", history.jobs.len());
            history.jobs.push(world.submit(&output));
        }
        Step::Plan { job, tasks, measured } => {
            let Some(job) = history.jobs.get(*job).copied() else {
                return;
            };
            history.plans += 1;
            let name = format!("stage-{}", history.plans);
            let planned = if *measured {
                measurement(&name)
            } else {
                stage(&name, *tasks)
            };
            world.plan(job, vec![planned]);
        }
        Step::Cancel { job } => {
            let Some(job) = history.jobs.get(*job).copied() else {
                return;
            };
            let _ = world.run(Command::Cancel {
                job,
                reason: String::new(),
            });
        }
        Step::Join { worker, newer } => {
            history.epochs[*worker] += u64::from(*newer || history.epochs[*worker] == 0);
            let name = format!("w{worker}");
            let host = format!("h{}", worker / 2);
            let introduction = introduction(&name, history.epochs[*worker], &host, 2);
            world.run(Command::Introduce(introduction)).unwrap();
        }
        Step::Silence { worker } | Step::Leave { worker } => {
            let Some(known) = world.state.worker_named(&format!("w{worker}")) else {
                return;
            };
            let (worker, epoch): (WorkerId, Epoch) = (known.id, known.epoch);
            let command = match step {
                Step::Leave { .. } => Command::Leave { worker, epoch },
                _ => Command::WorkerSilent { worker, epoch },
            };
            world.run(command).unwrap();
        }
        Step::Complete { lease } => {
            let Some(work) = history.leases.get(*lease).copied() else {
                return;
            };
            let task = history.tasks[&work.1.attempt];
            let acknowledged = world.complete(work).is_ok();
            let done = matches!(
                world.state.task(task).unwrap().phase,
                TaskPhase::Done { attempt, .. } if attempt == work.1.attempt
            );
            if acknowledged && done {
                let first = *history.accepted.entry(task).or_insert(work.1);
                assert_eq!(first, work.1, "two attempts of task {task} were promoted");
            }
        }
        Step::Fail { lease, kind } => {
            let Some((worker, lease)) = history.leases.get(*lease).copied() else {
                return;
            };
            let failure = Failure {
                kind: *kind,
                message: "bad luck".to_owned(),
            };
            let _ = world.run(Command::Fail {
                worker,
                lease,
                failure,
            });
        }
        Step::Stop { lease } => {
            let Some((worker, lease)) = history.leases.get(*lease).copied() else {
                return;
            };
            let _ = world.run(Command::Stopped { worker, lease });
        }
        Step::Dispatch => {
            for (worker, lease) in world.dispatch() {
                let task = world.state.task_of(lease.attempt).unwrap();
                history.tasks.insert(lease.attempt, task);
                history.leases.push((worker, lease));
            }
        }
        Step::Restart => {
            let replayed = world.replayed();
            assert_eq!(replayed, world.state, "replay gives another state");
            world.state = replayed;
            world.run(Command::BeginTerm).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn no_history_breaks_an_invariant_or_an_acknowledged_result(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        let mut world = World::new();
        let mut history = History::default();
        for step in &steps {
            act(&mut world, &mut history, step);
            for (task, lease) in &history.accepted {
                let kept = matches!(
                    world.state.task(*task).unwrap().phase,
                    TaskPhase::Done { attempt, .. } if attempt == lease.attempt
                );
                prop_assert!(kept, "task {task} lost its acknowledged result");
            }
        }
        prop_assert_eq!(world.replayed(), world.state);
    }
}
