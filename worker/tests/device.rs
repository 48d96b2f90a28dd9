//! A device and its child, where the child is a script: what becomes of an attempt, and of the child.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use espalier_arch::Candidate;
use espalier_proto::task::{ArtifactId, Failure, FailureKind, ParentRef, Rank, Shard, TaskSpec};
use espalier_proto::v1::{Assign, Lease};
use espalier_worker::agent::core::{DeviceEvent, Ended, Run};
use espalier_worker::agent::device::{Command, Runner};
use espalier_worker::agent::leftover::Mark;
use espalier_worker::agent::options::{ChildOptions, DeviceOptions};
use tokio::sync::mpsc;

/// Longer than any of these may take, so that a wait for it shows as a failure.
const NEVER: Duration = Duration::from_secs(3600);

fn lease(attempt: u64) -> Lease {
    Lease {
        term: 1,
        epoch: 1,
        attempt,
    }
}

fn task() -> TaskSpec {
    TaskSpec::Rank(Rank {
        parent: ParentRef {
            source: "parent".to_owned(),
            fingerprint: "fingerprint".to_owned(),
            permutation: None,
        },
        candidates: vec![Candidate { variants: Vec::new() }],
        shard: Shard {
            artifact: ArtifactId("0".repeat(64)),
            sequences: 1,
            sequence_tokens: 2,
        },
    })
}

/// Runs attempts 1 and 2 after each other on a shell script that stands in for the child; how each failed.
async fn failures(script: &str) -> [Failure; 2] {
    let options = ChildOptions {
        program: Some(PathBuf::from("/bin/sh")),
        arguments: vec!["-c".to_owned(), script.to_owned()],
        hang_timeout: NEVER,
        stop_timeout: NEVER,
    };
    let (event_sender, mut events) = mpsc::channel(64);
    let (commands, received) = mpsc::channel(4);
    // Tests run side by side, and none may take another's child for its own.
    static DEVICES: AtomicUsize = AtomicUsize::new(0);
    let device = format!("device-{}", DEVICES.fetch_add(1, Ordering::SeqCst));
    let mark = Mark::new("http://127.0.0.1:1", "scripts", &device);
    let runner = Runner::new(
        DeviceOptions::cpu(1),
        options,
        "http://127.0.0.1:1",
        mark,
        event_sender,
    );
    let runner = tokio::spawn(runner.run(received));
    let mut ended = Vec::new();
    for attempt in [1, 2] {
        let run = Run {
            lease: lease(attempt),
            assign: Assign {
                spec_json: serde_json::to_vec(&task()).unwrap().into(),
                ..Assign::default()
            },
            artifact_store: "file:///nowhere".to_owned(),
            artifact_store_id: String::new(),
        };
        commands.send(Command::Run(Box::new(run))).await.unwrap();
        let failure = loop {
            if let DeviceEvent::Ended { lease: of, ended } = events.recv().await.unwrap() {
                assert_eq!(of, lease(attempt));
                let Ended::Failure(json) = ended else {
                    panic!("{ended:?}")
                };
                break serde_json::from_slice::<Failure>(&json).unwrap();
            }
        };
        ended.push(failure);
    }
    drop(commands);
    runner.await.unwrap();
    ended.try_into().unwrap()
}

/// A child that fails every attempt; the message is its own process id, so that two children can be told apart.
fn failing(kind: &str) -> String {
    format!(
        r#"while read line; do
            attempt=${{line#*\"attempt\":}}
            attempt=${{attempt%%[,\}}]*}}
            echo '{{"reply":"failure","attempt":'$attempt',"failure":{{"kind":"{kind}","message":"'$$'"}}}}'
        done"#
    )
}

#[tokio::test]
async fn a_reply_that_is_not_understood_fails_the_attempt_at_once() {
    let [first, second] = failures("read line; echo '{\"reply\":\"outptu\"'; exec sleep 3600").await;
    for failure in [first, second] {
        assert_eq!(failure.kind, FailureKind::Error, "{failure:?}");
        assert!(failure.message.contains("not understood"), "{failure:?}");
    }
}

#[tokio::test]
async fn a_refused_task_leaves_the_child_and_its_model_where_they_are() {
    let [first, second] = failures(&failing("invalid")).await;
    assert_eq!(first, second, "the same process answered both");
}

#[tokio::test]
async fn an_error_replaces_the_child() {
    let [first, second] = failures(&failing("error")).await;
    assert_ne!(first.message, second.message, "a new process answered the second");
}

#[tokio::test]
async fn a_child_that_dies_fails_its_attempt_with_its_last_words() {
    let [first, _] = failures("read line; echo 'no such device' >&2; exit 3").await;
    assert_eq!(first.kind, FailureKind::Crashed);
    assert!(
        first.message.contains("code 3") && first.message.contains("no such device"),
        "{first:?}"
    );
}
