//! What the tables hold and answer, and when they are built anew. How they take damage is in `damage.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/past.rs"]
mod past;
#[path = "common/truth.rs"]
mod truth;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use espalier_coordinator::journal;
use espalier_coordinator::scheduler::TaskId;
use espalier_coordinator::tables::{DIRECTORY, Tables};
use past::copy;
use truth::{DEADLINE, Truth, broken, disk, scratch, tables_of};

#[test]
fn tables_ahead_of_the_journal_are_built_anew() {
    let truth = Truth::build(1 << 20, |past| {
        past.job(20, 20);
    });
    tables_of(truth.path(), truth.last);
    let earlier = truth.last / 2;
    let rebuilt = tables_of(truth.path(), earlier);
    assert_eq!(broken(truth.path()), 1);
    let fresh = scratch();
    copy(&truth.path().join("journal"), &fresh.path().join("journal"));
    assert_eq!(rebuilt, tables_of(fresh.path(), earlier));
}

#[test]
fn tables_behind_a_gap_in_the_journal_keep_nothing_of_jobs_archived_in_it() {
    // Small segments, so that the journal forgets its beginning; more tasks than tables write at once.
    let truth = Truth::build(4 << 10, |past| {
        let job = past.job(700, 700);
        past.end(job);
        past.archive(job);
        for _ in 0..40 {
            let job = past.job(20, 20);
            past.end(job);
            past.archive(job);
        }
    });
    let before = Truth::build(1 << 20, |past| {
        past.job(700, 700);
    });
    let of_live = tables_of(before.path(), before.last);
    assert!(of_live.len() > 1000, "{} rows", of_live.len());
    let fresh = scratch();
    copy(truth.path(), fresh.path());
    let expected = tables_of(fresh.path(), truth.last);
    copy(&before.path().join(DIRECTORY), &truth.path().join(DIRECTORY));
    assert!(journal::segments(disk().as_ref(), &truth.path().join("journal")).unwrap()[0].0 > before.last);
    assert!(tables_of(truth.path(), truth.last) == expected);
    assert_eq!(broken(truth.path()), 0);
}

#[test]
fn tables_built_from_an_archive_keep_nothing_of_attempts_that_the_journal_still_tells_of() {
    // The journal forgets that the first job was planned, and not how it ran.
    let truth = Truth::build(4 << 10, |past| {
        let early = past.job(20, 0);
        past.pause(early);
        for _ in 0..40 {
            let job = past.job(20, 20);
            past.end(job);
            past.archive(job);
        }
        past.resume(early);
        past.run(20);
        past.end(early);
        past.archive(early);
    });
    let rows = tables_of(truth.path(), truth.last);
    let of_attempts = rows.iter().filter(|(key, _)| key.first() == Some(&b'a'));
    assert_eq!(of_attempts.count(), 0, "every job is archived");
    assert!(rows.iter().any(|(key, _)| key.first() == Some(&b'r')));
}

#[test]
fn tables_that_wait_for_a_rush_to_end_stop_when_they_are_told_to() {
    // Small segments, so that the journal forgets its beginning.
    let truth = Truth::build(4 << 10, |past| {
        for _ in 0..40 {
            let job = past.job(20, 20);
            past.end(job);
            past.archive(job);
        }
    });
    let (tables, position) = (Tables::default(), Arc::new(AtomicU64::new(0)));
    let writer = tables.start(disk(), truth.path(), Arc::clone(&position)).unwrap();
    let began = Instant::now();
    while tables.dump().is_err() {
        assert!(began.elapsed() < DEADLINE, "the tables do not open");
        std::thread::sleep(Duration::from_millis(5));
    }
    // More since the start than tables keep up with, and its beginning is gone.
    position.store(truth.last + 10_000, Ordering::Release);
    // They look ten times a second.
    std::thread::sleep(Duration::from_secs(1));
    let told = Instant::now();
    writer.stop();
    // A rush is waited for half a minute.
    assert!(
        told.elapsed() < Duration::from_secs(20),
        "it took {:?}",
        told.elapsed()
    );
}

#[test]
fn tables_answer_for_tasks_attempts_events_and_scores() {
    let truth = Truth::build(1 << 20, |past| {
        let job = past.job(10, 10);
        past.end(job);
        past.archive(job);
        past.job(10, 4);
    });
    let (tables, position) = (Tables::default(), Arc::new(AtomicU64::new(truth.last)));
    let writer = tables.start(disk(), truth.path(), position).unwrap();
    let began = Instant::now();
    while tables.reflects() < truth.last {
        assert!(began.elapsed() < DEADLINE);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (past, live) = ("job-1".parse().unwrap(), "job-2".parse().unwrap());
    let archived = TaskId(3);
    assert_eq!(tables.archived_job_of(archived).unwrap(), Some(past));
    assert_eq!(tables.scores(past).unwrap().len(), 10);
    let done = TaskId(11);
    assert_eq!(tables.archived_job_of(done).unwrap(), None, "its job is live");
    assert_eq!(tables.archived_job_of(TaskId(21)).unwrap(), None, "there is none");
    let attempts = tables.attempts(done).unwrap();
    assert_eq!(attempts.len(), 1);
    assert_eq!(
        (attempts[0].worker.as_str(), attempts[0].outcome.name()),
        ("worker-a", "completed")
    );
    assert_eq!(tables.attempts_of_job(live).unwrap().len(), 10);
    assert_eq!(
        tables.attempts_of_job(past).unwrap(),
        [],
        "they are in its archive"
    );
    let events = tables.events(live, 100).unwrap();
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(
        kinds,
        ["job_submitted", "stages_planned"],
        "attempts' rows say the rest"
    );
    assert_eq!(tables.decisions(live).unwrap().len(), 1);
    writer.stop();
}
