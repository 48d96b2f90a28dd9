//! What users of other orchestrators suffer from, where it takes real processes to see that ours do not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;
use std::time::{Duration, Instant};

use espalier_chaos::ledger::What;
use espalier_chaos::process::{Process, program};
use espalier_chaos::rig::Rig;
use espalier_chaos::story::Story;
use espalier_proto::v1::JobState;
use espalier_worker::agent::memory::processes_of_group;

const END: Duration = Duration::from_secs(120);

fn story(millis: u64, busy: bool) -> Story {
    Story {
        stages: 1,
        errands: 1,
        millis,
        busy,
        brings_process: false,
        doomed: "-doomed".to_owned(),
    }
}

#[tokio::test]
async fn a_worker_busy_with_every_processor_is_not_given_up() {
    // Its only errand takes a seventh of this, and three times as long as a silent worker is waited for. That is sixteen
    // of its heartbeats, so that a machine that others use too holds none up for as long.
    let rig = Rig::start(story(168_000, true), 1, Duration::from_secs(8), false).unwrap();
    let id = rig.submit("job0").await.unwrap();
    let ended = rig.end_of(&id, END).await.unwrap();
    assert_eq!(ended.state(), JobState::Succeeded, "{}", ended.message);
    let ledger = rig.ledger().unwrap();
    let begun = ledger
        .iter()
        .filter(|entry| matches!(entry.what, What::Began { .. }));
    assert_eq!(begun.count(), 1, "the errand was handed on");
}

#[tokio::test]
async fn waiting_for_a_job_that_failed_does_not_exit_as_if_it_had_succeeded() {
    let rig = Rig::start(story(50, false), 1, Duration::from_secs(30), false).unwrap();
    let id = rig.submit("job0-doomed").await.unwrap();
    let waited = Command::new(program("espalier").unwrap())
        .args(["job", "wait", &id, "--coordinator", &rig.endpoint()])
        .output()
        .unwrap();
    assert_eq!(
        waited.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&waited.stderr)
    );
}

/// The group of the device's child, once what it started runs too.
fn at_work(worker: &Process) -> Option<i32> {
    let group = worker.children().unwrap().first().copied()?;
    (processes_of_group(group).len() == 2).then_some(group)
}

async fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < END, "{what}: not within {END:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn cancelling_a_job_leaves_no_process_on_its_device() {
    let story = Story {
        brings_process: true,
        ..story(7 * 3_600_000, false)
    };
    let mut rig = Rig::start(story, 1, Duration::from_secs(30), false).unwrap();
    let id = rig.submit("job0").await.unwrap();
    let group = wait_for("a child and its own process", || at_work(rig.worker(0)?)).await;
    rig.client().await.unwrap().cancel(&id, "enough").await.unwrap();
    let ended = rig.end_of(&id, END).await.unwrap();
    assert_eq!(ended.state(), JobState::Cancelled, "{}", ended.message);
    wait_for("the child's group is gone", || {
        processes_of_group(group).is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_worker_whose_name_another_process_takes_ends_with_all_it_runs() {
    let story = Story {
        brings_process: true,
        ..story(7 * 3_600_000, false)
    };
    let mut rig = Rig::start(story, 1, Duration::from_secs(30), false).unwrap();
    rig.submit("job0").await.unwrap();
    let group = wait_for("a child and its own process", || at_work(rig.worker(0)?)).await;
    let rival = rig.start_rival(0).unwrap();
    let ended = wait_for("the older one ends", || rig.worker(0)?.ended().unwrap()).await;
    assert!(!ended.success(), "it says that it was not asked to end");
    wait_for("what it ran is gone", || {
        processes_of_group(group).is_empty().then_some(())
    })
    .await;
    wait_for("its successor does the work", || at_work(&rival)).await;
}
