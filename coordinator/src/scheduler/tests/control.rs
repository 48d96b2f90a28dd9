use espalier_proto::task::FailureKind;

use super::kit::{World, check_of, introduction, stage, submission};
use crate::scheduler::{
    Command, Effect, Ended, Epoch, JobId, JobPhase, Rejection, Standing, TaskPhase, WorkerId,
};

fn reason() -> String {
    "maintenance".to_owned()
}

#[test]
fn a_paused_job_finishes_what_runs_and_starts_nothing_more() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 2)]);
    let work = world.dispatch()[0];
    world.pause(job);
    world.pause(job);
    assert_eq!(world.complete(work), Ok(1));
    assert!(world.dispatch().is_empty());
    assert_eq!(world.why(job), "is paused: lunch");
    assert_eq!(world.replayed(), world.state);
    world.run(Command::Resume { job }).unwrap();
    assert_eq!(world.dispatch().len(), 1);
    assert_eq!(world.run(Command::Resume { job }), Ok(Vec::new()));
}

#[test]
fn a_stage_planned_while_its_job_is_paused_waits_too() {
    let mut world = World::new();
    world.join("a", 1, 4);
    let job = world.submit("/out");
    world.pause(job);
    world.plan(job, vec![stage("score", 2)]);
    assert!(world.dispatch().is_empty());
    world.run(Command::Resume { job }).unwrap();
    assert_eq!(world.dispatch().len(), 2);
}

#[test]
fn a_paused_job_can_be_cancelled_and_an_ended_one_cannot_be_paused() {
    let mut world = World::new();
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 2)]);
    world.pause(job);
    world
        .run(Command::Cancel {
            job,
            reason: reason(),
        })
        .unwrap();
    let refused = world.run(Command::Pause {
        job,
        reason: reason(),
    });
    assert!(matches!(refused, Err(Rejection::JobEnded { .. })));
}

/// A job whose second task has failed for good and that has stopped.
fn failed_job(world: &mut World) -> JobId {
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let first = world.dispatch()[0];
    world.complete(first).unwrap();
    let mut export = stage("export", 1);
    export.in_output = true;
    world.plan(job, vec![export]);
    let second = world.dispatch()[0];
    world.complete(second).unwrap();
    world.plan(job, vec![stage("recover", 1)]);
    while let Some(work) = world.dispatch().first().copied() {
        world.fail(work, FailureKind::Crashed);
    }
    world.run(Command::PartialRemoved { job }).unwrap();
    job
}

#[test]
fn a_retried_job_keeps_what_is_done_and_plans_anew_what_lay_in_its_output() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = failed_job(&mut world);
    world.effects.clear();
    let retry = Command::Retry {
        job,
        request_id: Some("again".to_owned()),
    };
    world.run(retry.clone()).unwrap();
    assert!(world.effects.contains(&Effect::Plan { job }));
    assert_eq!(
        world.stages(job),
        ["score"],
        "the export and what came after are planned anew"
    );
    assert!(world.dispatch().is_empty(), "what is done does not run again");
    assert_eq!(world.run(retry), Ok(Vec::new()), "a retry sent twice is one");
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_job_given_up_for_what_its_checks_measured_checks_anew_when_retried() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    let retry = Command::Retry {
        job,
        request_id: None,
    };
    for round in 1..3 {
        for planned in [
            stage(&format!("score-{round}"), 1),
            check_of("check-uniform-1"),
            stage(&format!("rank-{round}"), 1),
            check_of("check-uniform-2"),
        ] {
            world.passes(job, planned);
        }
        // The other strategy's is under way.
        world.plan(job, vec![stage(&format!("order-{round}"), 1)]);
        world.give_up(job);
        world.run(retry.clone()).unwrap();
        let under_way = world.dispatch()[0];
        let task = world.task_of(under_way);
        assert_eq!(*task.kind, *format!("order-{round}"));
        let stages = &world.state.job(job).unwrap().stages;
        assert_eq!(stages[task.stage].tasks, [task.id], "it is known by its place");
        world.complete(under_way).unwrap();
        assert_eq!(world.replayed(), world.state);
    }
    let kept = ["score-1", "rank-1", "order-1", "score-2", "rank-2", "order-2"];
    assert_eq!(world.stages(job), kept, "what was done besides stays done");
}

#[test]
fn checks_that_a_job_went_on_by_or_in_which_a_task_failed_stay_when_it_is_retried() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    let retry = Command::Retry {
        job,
        request_id: None,
    };
    world.passes(job, check_of("check-uniform-1"));
    world.plan(job, vec![check_of("check-uniform-2")]);
    let mut failed = None;
    while let Some(work) = world.dispatch().first().copied() {
        failed = Some(world.task_of(work).id);
        world.fail(work, FailureKind::Crashed);
    }
    world.run(Command::PartialRemoved { job }).unwrap();
    world.run(retry.clone()).unwrap();
    assert_eq!(world.stages(job), ["check-uniform-1", "check-uniform-2"]);
    let work = world.dispatch()[0];
    assert_eq!(
        Some(world.task_of(work).id),
        failed,
        "it goes on from where it failed"
    );
    world.complete(work).unwrap();
    world.passes(job, stage("recover", 1));
    world.give_up(job);
    world.run(retry).unwrap();
    assert_eq!(
        world.stages(job),
        ["check-uniform-1", "check-uniform-2", "recover"]
    );
}

#[test]
fn a_retried_task_has_its_budget_again_and_the_retry_is_on_record() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    for round in 0..2 {
        let mut attempts = 0;
        while let Some(work) = world.dispatch().first().copied() {
            attempts += 1;
            world.fail(work, FailureKind::Crashed);
        }
        assert_eq!(attempts, 3, "round {round}");
        let refused = world.run(Command::Retry {
            job,
            request_id: None,
        });
        assert!(
            matches!(refused, Err(Rejection::NotFailed { .. })),
            "it is still being tidied"
        );
        world.run(Command::PartialRemoved { job }).unwrap();
        world
            .run(Command::Retry {
                job,
                request_id: None,
            })
            .unwrap();
        assert_eq!(world.only_task(job).era(), round + 1);
        assert_eq!(
            world.state.job(job).unwrap().retries.len(),
            usize::try_from(round).unwrap() + 1
        );
    }
}

#[test]
fn the_days_between_a_failure_and_its_retry_are_no_stages_time() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("recover", 1)]);
    let elapsed = |world: &World| {
        let stage = &world.state.job(job).unwrap().stages[0];
        let (start, end) = (stage.started_at.unwrap(), stage.finished_at);
        let now = end.unwrap_or(world.clock);
        (stage.elapsed_ms(now), now - start)
    };
    while let Some(work) = world.dispatch().first().copied() {
        world.fail(work, FailureKind::Crashed);
    }
    world.run(Command::PartialRemoved { job }).unwrap();
    let (before, _) = elapsed(&world);
    let days = 2 * 24 * 60 * 60 * 1000;
    world.clock += days;
    let retry = Command::Retry {
        job,
        request_id: None,
    };
    world.run(retry).unwrap();
    let work = world.dispatch()[0];
    world.complete(work).unwrap();
    let (took, passed) = elapsed(&world);
    assert!(
        passed - took >= days && took >= before && before > 0,
        "{took} of {passed}"
    );
    assert_eq!(world.replayed(), world.state);
}

#[test]
fn a_job_whose_output_another_has_taken_since_cannot_be_retried() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = failed_job(&mut world);
    world.submit("/out");
    let refused = world.run(Command::Retry {
        job,
        request_id: None,
    });
    assert!(matches!(refused, Err(Rejection::OutputTaken { .. })));
}

#[test]
fn only_a_failed_job_can_be_retried() {
    let mut world = World::new();
    let job = world.submit("/out");
    let running = world.run(Command::Retry {
        job,
        request_id: None,
    });
    assert!(matches!(running, Err(Rejection::NotFailed { .. })));
    let unknown = world.run(Command::Retry {
        job: JobId(9),
        request_id: None,
    });
    assert_eq!(unknown, Err(Rejection::NoSuchJob(JobId(9))));
}

#[test]
fn a_cordoned_worker_finishes_what_it_has_and_stays_cordoned_over_a_restart() {
    let mut world = World::new();
    let worker = world.join("a", 1, 2);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 4)]);
    let work = world.dispatch();
    world
        .run(Command::Cordon {
            worker,
            reason: reason(),
        })
        .unwrap();
    for rank in work {
        assert_eq!(world.complete(rank), Ok(1));
    }
    assert!(world.dispatch().is_empty());
    assert_eq!(
        world.why(job),
        "waits for a worker with a cpu device: 1 cordoned (maintenance)"
    );
    world.join("a", 2, 2);
    assert!(world.dispatch().is_empty());
    world.run(Command::Uncordon { worker }).unwrap();
    assert_eq!(world.dispatch().len(), 2);
    let unknown = world.run(Command::Uncordon { worker: WorkerId(7) });
    assert_eq!(unknown, Err(Rejection::NoSuchWorker(WorkerId(7))));
}

#[test]
fn a_drained_worker_leaves_even_if_its_stream_breaks_and_may_come_back_anew() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    world
        .run(Command::Drain {
            worker,
            reason: reason(),
        })
        .unwrap();
    assert!(world.effects.contains(&Effect::Drain {
        worker,
        reason: reason()
    }));
    world.join("a", 1, 1);
    let known = world.state.worker(worker).unwrap();
    assert_eq!(
        (known.standing, known.drain.clone()),
        (Standing::Leaving, Some(reason()))
    );
    world.lose(worker);
    world.join("a", 1, 1);
    assert_eq!(world.state.worker(worker).unwrap().standing, Standing::Leaving);
    world.join("a", 2, 1);
    assert_eq!(world.state.worker(worker).unwrap().standing, Standing::Present);
}

#[test]
fn a_lost_worker_cannot_be_drained_or_restarted() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    world
        .run(Command::RestartWorker {
            worker,
            reason: reason(),
        })
        .unwrap();
    assert!(world.effects.contains(&Effect::RestartWorker {
        worker,
        reason: reason()
    }));
    world.lose(worker);
    for command in [
        Command::Drain {
            worker,
            reason: reason(),
        },
        Command::RestartWorker {
            worker,
            reason: reason(),
        },
    ] {
        assert!(matches!(world.run(command), Err(Rejection::WorkerGone { .. })));
    }
}

#[test]
fn work_handed_back_by_a_draining_worker_is_free() {
    let mut world = World::new();
    let worker = world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    for _ in 0..20 {
        let work = world.dispatch()[0];
        world.stop(work);
    }
    let task = world.only_task(job);
    assert_eq!(task.failures().handed_back, 20);
    assert_eq!(task.failures().own() + task.failures().worker_lost, 0);
    let epoch = Epoch(1);
    world.run(Command::Leave { worker, epoch }).unwrap();
    assert_eq!(world.why(job), "waits for a worker with a cpu device: 1 leaving");
}

fn succeeded(world: &mut World, request_id: &str, output: &str) -> JobId {
    world.run(submission(Some(request_id), output)).unwrap();
    let job = world.state.last_job();
    world.plan(job, vec![stage("score", 3)]);
    for work in world.dispatch() {
        world.complete(work).unwrap();
    }
    let revision = world.state.job(job).unwrap().results;
    let outcome = "{}".into();
    world
        .run(Command::OutcomeReached {
            job,
            revision,
            outcome,
        })
        .unwrap();
    world.run(Command::OutcomeWritten { job }).unwrap();
    job
}

#[test]
fn an_archived_job_leaves_a_summary_and_nothing_else() {
    let mut world = World::new();
    world.join("a", 1, 3);
    let job = succeeded(&mut world, "r", "/out");
    let old = (
        WorkerId(1),
        world.state.tasks().next().map(|task| match task.phase {
            TaskPhase::Done { attempt, .. } => attempt,
            _ => panic!("not done"),
        }),
    );
    assert!(world.state.archivable().any(|ended| ended.id == job));
    world.run(Command::Archived { job }).unwrap();
    assert_eq!(world.state.tasks().count(), 0);
    assert!(world.state.job(job).is_none());
    let summary = world.state.summary(job).unwrap();
    assert_eq!(
        (summary.ended, summary.tasks, summary.tasks_done),
        (Ended::Succeeded, 3, 3)
    );
    let lease = crate::scheduler::Lease {
        term: world.state.term(),
        epoch: Epoch(1),
        attempt: old.1.unwrap(),
    };
    assert!(matches!(world.complete((old.0, lease)), Err(Rejection::Stale(_))));
    assert_eq!(world.replayed(), world.state);
    let next = world.submit("/next");
    assert_eq!(next, job.next(), "ids are not used again");
    world.plan(next, vec![stage("score", 1)]);
    assert_eq!(world.state.tasks().next().unwrap().id.0, 4);
}

#[test]
fn a_submission_sent_again_after_its_job_was_archived_still_runs_once() {
    let mut world = World::new();
    world.join("a", 1, 3);
    let job = succeeded(&mut world, "r", "/out");
    world.run(Command::Archived { job }).unwrap();
    let again = world.run(submission(Some("r"), "/out"));
    assert_eq!(again, Err(Rejection::SubmittedBefore(job)));
    let other = world.run(submission(Some("r"), "/elsewhere"));
    assert!(matches!(other, Err(Rejection::RequestIdTaken { .. })));
}

#[test]
fn a_job_is_archived_only_when_nothing_of_it_runs_or_lies_about() {
    let mut world = World::new();
    world.join("a", 1, 1);
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    assert_eq!(world.run(Command::Archived { job }), Ok(Vec::new()), "it runs");
    world
        .run(Command::Cancel {
            job,
            reason: reason(),
        })
        .unwrap();
    assert_eq!(
        world.run(Command::Archived { job }),
        Ok(Vec::new()),
        "its attempt has not stopped"
    );
    world.stop(work);
    assert_eq!(
        world.run(Command::Archived { job }),
        Ok(Vec::new()),
        "what it half-wrote lies about"
    );
    world.run(Command::PartialRemoved { job }).unwrap();
    assert!(world.state.archivable().any(|ended| ended.id == job));
    assert_eq!(world.run(Command::Archived { job }).unwrap().len(), 1);
    assert_eq!(
        world.run(Command::Archived { job }),
        Ok(Vec::new()),
        "archived twice is once"
    );
    assert!(matches!(
        world.run(Command::Cancel {
            job,
            reason: reason()
        }),
        Err(Rejection::JobEnded {
            phase: "been cancelled",
            ..
        })
    ));
}

#[test]
fn a_job_broken_while_its_outcome_is_written_can_be_retried() {
    let mut world = World::new();
    world
        .run(Command::Introduce(introduction("a", 1, "a", 1)))
        .unwrap();
    let job = world.submit("/out");
    world.plan(job, vec![stage("score", 1)]);
    let work = world.dispatch()[0];
    world.complete(work).unwrap();
    let revision = world.state.job(job).unwrap().results;
    let outcome = "{}".into();
    world
        .run(Command::OutcomeReached {
            job,
            revision,
            outcome,
        })
        .unwrap();
    let message = "no room".to_owned();
    world.run(Command::JobBroken { job, message }).unwrap();
    world.run(Command::PartialRemoved { job }).unwrap();
    world
        .run(Command::Retry {
            job,
            request_id: None,
        })
        .unwrap();
    let job = world.state.job(job).unwrap();
    assert!(matches!(job.phase, JobPhase::Active));
    assert!(job.wants_plan());
}
