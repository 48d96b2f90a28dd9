use espalier_proto::task::FailureKind;

use super::kit::{World, introduction, measurement, stage, submission};
use crate::scheduler::{Command, Effect, Epoch, JobPhase, Rejection, Standing, TaskPhase, Term, WorkerId};

#[test]
fn a_job_runs_stage_by_stage_to_its_outcome() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    assert!(world.effects.contains(&Effect::Plan { job }));
    world.plan(job, vec![stage("ingest", 1)]);
    let work = world.dispatch();
    world.effects.clear();
    world.complete(work[0]).unwrap();
    assert!(
        world.effects.contains(&Effect::Plan { job }),
        "the stage's end asks for a plan"
    );
    let revision = world.state.job(job).unwrap().results;
    world
        .run(Command::OutcomeReached {
            job,
            revision,
            outcome: "{}".into(),
        })
        .unwrap();
    assert!(world.effects.contains(&Effect::WriteOutcome { job }));
    world.run(Command::OutcomeWritten { job }).unwrap();
    assert!(matches!(
        world.state.job(job).unwrap().phase,
        JobPhase::Succeeded { .. }
    ));
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_plan_is_asked_for_again_when_a_stage_ended_while_the_planner_thought() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![stage("profile", 1), stage("calibrate", 1)]);
    let work = world.dispatch();
    world.complete(work[0]).unwrap();
    let seen = world.state.job(job).unwrap().results;
    world.complete(work[1]).unwrap();
    world.effects.clear();
    world
        .run(Command::StagesPlanned {
            job,
            revision: seen,
            stages: Vec::new(),
        })
        .unwrap();
    assert!(world.effects.contains(&Effect::Plan { job }));
}

#[test]
fn a_plan_made_before_a_failure_is_no_plan_for_the_retried_job() {
    let mut world = World::new();
    world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![stage("profile", 1), stage("score", 1)]);
    let work = world.dispatch();
    world.complete(work[0]).unwrap();
    let seen = world.state.job(job).unwrap().results;
    assert!(world.state.job(job).unwrap().wants_plan(), "the planner thinks");
    world.fail(work[1], FailureKind::Invalid);
    world.run(Command::PartialRemoved { job }).unwrap();
    let retry = Command::Retry {
        job,
        request_id: None,
    };
    world.run(retry).unwrap();
    let late = Command::StagesPlanned {
        job,
        revision: seen,
        stages: vec![stage("export", 1)],
    };
    assert_eq!(world.run(late), Ok(Vec::new()));
    assert!(world.state.job(job).unwrap().wants_plan());
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_task_too_large_to_be_sent_ends_its_job_and_says_so() {
    let mut world = World::new();
    let job = world.submit("/out");
    let mut large = stage("score", 2);
    large.tasks[1].payload = " ".repeat(espalier_proto::PAYLOAD_LIMIT_BYTES + 1).into();
    world.plan(job, vec![large]);
    let why = world.message(job);
    assert!(
        why.contains("score, task 1: its spec takes 6291457 bytes"),
        "{why}"
    );
}

#[test]
fn what_would_have_no_effect_is_refused_and_what_is_so_already_is_not() {
    let mut world = World::new();
    let job = world.submit("/out");
    let resume = |world: &mut World| world.run(Command::Resume { job });
    assert_eq!(resume(&mut world), Ok(Vec::new()), "it is not paused");
    let cancel = |world: &mut World| {
        let reason = "enough".to_owned();
        world.run(Command::Cancel { job, reason })
    };
    cancel(&mut world).unwrap();
    assert_eq!(cancel(&mut world), Ok(Vec::new()), "it is cancelled");
    assert!(matches!(resume(&mut world), Err(Rejection::JobEnded { .. })));

    let worker = world.join("a", 1, 1);
    let restart = |world: &mut World| {
        let reason = String::new();
        world.run(Command::RestartWorker { worker, reason })
    };
    assert_eq!(
        world.run(Command::Uncordon { worker }),
        Ok(Vec::new()),
        "it has no cordon"
    );
    restart(&mut world).unwrap();
    let reason = "mending it".to_owned();
    world
        .run(Command::Cordon {
            worker,
            reason: reason.clone(),
        })
        .unwrap();
    world.run(Command::Drain { worker, reason }).unwrap();
    let taken_off = world.run(Command::Uncordon { worker }).unwrap();
    assert_eq!(taken_off.len(), 1, "the cordon would be there when it comes back");
    for left in [false, true] {
        for refused in [world.run(Command::Uncordon { worker }), restart(&mut world)] {
            assert!(
                matches!(refused, Err(Rejection::WorkerGone { .. })),
                "{refused:?}"
            );
        }
        if !left {
            world.lose(worker);
            assert_eq!(world.state.worker(worker).unwrap().standing, Standing::Left);
        }
    }
}

#[test]
fn a_request_id_with_another_priority_is_another_submission() {
    let mut world = World::new();
    let with = |urgency| match submission(Some("a"), "/out") {
        Command::Submit {
            request_id,
            spec,
            parent,
            output,
            device_kind,
            ..
        } => Command::Submit {
            request_id,
            spec,
            parent,
            output,
            device_kind,
            priority: urgency,
        },
        other => other,
    };
    world.run(with(0)).unwrap();
    assert!(matches!(world.run(with(0)), Err(Rejection::SubmittedBefore(_))));
    let other = world.run(with(5)).unwrap_err();
    assert!(matches!(other, Rejection::RequestIdTaken { .. }), "{other}");
    assert!(other.to_string().contains("priority"), "{other}");
}

#[test]
fn a_worker_that_left_reads_as_left_and_its_number_is_not_given_again_once_it_is_forgotten() {
    let mut world = World::new();
    let (first, second) = (world.join("a", 1, 1), world.join("b", 1, 1));
    let epoch = Epoch(1);
    world.run(Command::Leave { worker: first, epoch }).unwrap();
    world.run(Command::WorkerSilent { worker: first, epoch }).unwrap();
    assert_eq!(world.state.worker(first).unwrap().standing, Standing::Left);
    world.lose(second);
    for worker in [first, second] {
        world.run(Command::Forget { worker }).unwrap();
    }
    assert!(world.state.worker(first).is_none() && world.state.worker_named("a").is_none());
    assert!(
        world.state.worker(second).is_some(),
        "the newest is kept for its number"
    );
    let again = world.join("a", 1, 1);
    assert_eq!(again, WorkerId(3));
    assert_eq!(
        world.run(Command::Forget { worker: again }),
        Ok(Vec::new()),
        "it is there"
    );
    let reason = "broken".to_owned();
    world
        .run(Command::Cordon {
            worker: second,
            reason,
        })
        .unwrap();
    world.run(Command::Forget { worker: second }).unwrap();
    assert!(
        world.state.worker(second).is_some(),
        "what a user said of it would be lost"
    );
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_planner_that_names_nothing_fails_the_job_rather_than_hang_it() {
    let mut world = World::new();
    let job = world.submit("/out");
    world.plan(job, Vec::new());
    assert!(matches!(
        world.state.job(job).unwrap().phase,
        JobPhase::Failed { .. }
    ));
}

#[test]
fn invalid_input_ends_the_job_at_once_with_its_message() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("ingest", 1)]);
    let work = world.dispatch();
    world.fail(work[0], FailureKind::Invalid);
    let JobPhase::Failed { message, .. } = &world.state.job(job).unwrap().phase else {
        panic!("the job goes on");
    };
    assert_eq!(message, "ingest, task 0: the disk caught fire");
    assert!(world.effects.contains(&Effect::RemovePartial { job }));
}

#[test]
fn each_kind_of_failure_has_its_own_budget() {
    let budgets = [
        (FailureKind::Error, 2),
        (FailureKind::OutOfMemory, 1),
        (FailureKind::Crashed, 2),
        (FailureKind::Hung, 2),
        (FailureKind::TooNoisy, 2),
    ];
    for (kind, retries) in budgets {
        let mut world = World::new();
        world.join("a", 1, 1);
        let job = world.submit("/out");
        world.plan(job, vec![stage("score", 1)]);
        let mut attempts = 0;
        while let Some(work) = world.dispatch().first().copied() {
            attempts += 1;
            world.fail(work, kind);
            world.state = world.replayed();
        }
        assert_eq!(attempts, retries + 1, "{kind:?}");
        assert!(world.state.job(job).unwrap().phase.is_terminal());
    }
}

#[test]
fn a_retry_prefers_another_worker() {
    let mut world = World::new();
    let first = world.join("a", 1, 1);
    let second = world.join("b", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch();
    assert_eq!(work[0].0, first);
    world.fail(work[0], FailureKind::Crashed);
    assert_eq!(world.dispatch()[0].0, second);
}

#[test]
fn a_lost_worker_costs_its_task_a_try_and_its_late_completion_is_refused() {
    let mut world = World::new();
    let lost = world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let old = world.dispatch()[0];
    world.lose(lost);
    world.join("b", 1, 1);
    let new = world.dispatch()[0];
    assert!(matches!(world.complete(old), Err(Rejection::Stale(_))));
    assert_eq!(world.complete(new), Ok(1));
    assert!(matches!(world.complete(old), Err(Rejection::Stale(_))));
}

#[test]
fn a_completion_sent_twice_is_acknowledged_twice_and_taken_once() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    assert_eq!(world.complete(work), Ok(1));
    assert_eq!(world.complete(work), Ok(0));
    assert!(world.dispatch().is_empty(), "nothing is left to run");
}

#[test]
fn a_lease_with_any_part_changed_is_stale() {
    let mut world = World::new();
    let other = world.join("b", 9, 1);
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let (worker, lease) = world.dispatch()[0];
    let mut wrong = vec![(other.max(worker), lease), (other.min(worker), lease)];
    wrong.retain(|(named, _)| *named != worker);
    let mut changed = lease;
    changed.term = Term(7);
    wrong.push((worker, changed));
    changed = lease;
    changed.epoch = Epoch(7);
    wrong.push((worker, changed));
    changed = lease;
    changed.attempt.0 += 1;
    wrong.push((worker, changed));
    for stale in wrong {
        assert!(
            matches!(world.complete(stale), Err(Rejection::Stale(_))),
            "{stale:?}"
        );
    }
}

#[test]
fn a_worker_carries_on_over_a_coordinators_restart() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.state = world.replayed();
    world.run(Command::BeginTerm).unwrap();
    assert_eq!(world.state.term(), Term(2));
    world.join("a", 1, 1);
    assert!(world.dispatch().is_empty(), "its attempt still holds the device");
    assert_eq!(world.complete(work), Ok(1));
}

#[test]
fn an_older_incarnation_of_a_worker_is_refused_and_a_newer_replaces_it() {
    let mut world = World::new();
    world.join("a", 5, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let old = world.dispatch()[0];
    let earlier = Command::Introduce(introduction("a", 4, "a", 1));
    assert!(matches!(world.run(earlier), Err(Rejection::StaleEpoch { .. })));
    world.join("a", 6, 1);
    let new = world.dispatch()[0];
    assert!(matches!(world.complete(old), Err(Rejection::Stale(_))));
    assert_eq!(world.complete(new), Ok(1));
}

#[test]
fn a_lost_worker_that_comes_back_gets_work_again() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    world.lose(worker);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    assert!(world.dispatch().is_empty());
    world.join("a", 1, 1);
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn a_worker_that_leaves_gets_nothing_more_and_finishes_what_it_has() {
    let mut world = World::new();
    let worker = world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 3)]);
    let work = world.dispatch();
    world
        .run(Command::Leave {
            worker,
            epoch: Epoch(1),
        })
        .unwrap();
    assert_eq!(world.complete(work[0]), Ok(1));
    assert!(world.dispatch().is_empty());
    assert_eq!(world.state.worker(worker).unwrap().standing, Standing::Leaving);
}

#[test]
fn losing_workers_for_ever_ends_the_job() {
    let mut world = World::new();
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let mut losses = 0;
    loop {
        let worker = world.join("a", 1 + losses, 1);
        if world.dispatch().is_empty() {
            break;
        }
        losses += 1;
        world.lose(worker);
    }
    assert_eq!(losses, 9);
    assert!(world.state.job(job).unwrap().phase.is_terminal());
}

#[test]
fn a_measurement_has_its_host_for_itself() {
    let mut world = World::new();
    for name in ["a", "b"] {
        let introduction = introduction(name, 1, "one-host", 1);
        world.run(Command::Introduce(introduction)).unwrap();
    }
    let job = world.submit("/out");
    world.plan(
        job,
        vec![stage("calibrate", 1), measurement("profile"), stage("score", 2)],
    );
    let first = world.dispatch();
    assert_eq!(
        first.len(),
        1,
        "the free device is kept quiet for the measurement"
    );
    world.complete(first[0]).unwrap();
    let second = world.dispatch();
    assert_eq!(second.len(), 1, "nothing runs beside the measurement");
    assert!(world.state.attempt(second[0].1.attempt).unwrap().exclusive);
    world.complete(second[0]).unwrap();
    assert_eq!(world.dispatch().len(), 2);
}

#[test]
fn a_child_that_holds_the_job_and_executor_is_preferred() {
    let mut world = World::new();
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    world.join("a", 1, 1);
    let first = world.dispatch()[0];
    world.complete(first).unwrap();
    let fresh = world.join("0-earlier-name", 1, 1);
    world.plan(job, vec![stage("recover", 1)]);
    let second = world.dispatch()[0];
    assert_ne!(second.0, fresh);
    assert_eq!(second.0, first.0);
}

#[test]
fn a_task_waits_for_a_device_of_its_kind() {
    let mut world = World::new();
    let mut gpu = introduction("a", 1, "a", 1);
    gpu.devices[0].kind = "cuda".into();
    world.run(Command::Introduce(gpu)).unwrap();
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    assert!(world.dispatch().is_empty());
    world.join("b", 1, 1);
    assert_eq!(world.dispatch().len(), 1);
}

#[test]
fn cancelling_stops_attempts_and_removes_only_when_they_have_stopped() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("export", 2)]);
    let (worker, lease) = world.dispatch()[0];
    let task = world.state.task_of(lease.attempt).unwrap();
    world
        .run(Command::Cancel {
            job,
            reason: "changed my mind".to_owned(),
        })
        .unwrap();
    assert!(world.effects.contains(&Effect::StopAttempt {
        attempt: lease.attempt
    }));
    assert!(!world.effects.contains(&Effect::RemovePartial { job }));
    assert!(world.dispatch().is_empty());
    world.run(Command::Stopped { worker, lease }).unwrap();
    assert!(world.effects.contains(&Effect::RemovePartial { job }));
    world
        .run(Command::Cancel {
            job,
            reason: String::new(),
        })
        .unwrap();
    let task = world.state.task(task).unwrap();
    assert_eq!(task.phase, TaskPhase::Abandoned);
}

#[test]
fn a_submission_sent_twice_runs_once() {
    let mut world = World::new();
    world.run(submission(Some("r"), "/out")).unwrap();
    let again = world.run(submission(Some("r"), "/out"));
    assert!(matches!(again, Err(Rejection::SubmittedBefore(_))));
    let other = world.run(submission(Some("r"), "/elsewhere"));
    assert!(matches!(other, Err(Rejection::RequestIdTaken { .. })));
    assert_eq!(world.state.jobs().count(), 1);
}

#[test]
fn two_jobs_never_write_to_one_directory() {
    let mut world = World::new();
    let job = world.submit("/out");
    let rival = world.run(submission(None, "/out"));
    assert!(matches!(rival, Err(Rejection::OutputTaken { .. })));
    world
        .run(Command::Cancel {
            job,
            reason: String::new(),
        })
        .unwrap();
    world.run(Command::PartialRemoved { job }).unwrap();
    world.run(submission(None, "/out")).unwrap();
}
