//! Real device children as processes: killed, stopped, orphaned, asked for checkpoints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Command as Program, Stdio};
use std::time::{Duration, Instant};

use espalier_artifact::ArtifactStore;
use espalier_proto::task::{FailureKind, TaskOutput, TaskSpec};
use espalier_proto::v1::Gang;
use espalier_worker::agent::core::{DeviceEvent, Ended};
use espalier_worker::agent::device::Command;
use espalier_worker::agent::memory::processes_of_group;

use support::{Device, children_of, lease, long_profile, shared_recovery, signal, stand_in};

/// Longer than any of these may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A child that does nothing and reads nothing. The shell stays: another program in its place would not have the marker
/// that it is found by.
const SLEEPS: &str = "sleep 3600; true";

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_agent_killed_at_once_leaves_no_process_of_its_device_however_busy() {
    let directory = tempfile::tempdir().unwrap();
    let TaskSpec::Profile(mut endless) = long_profile() else {
        panic!("another task")
    };
    endless.rounds = 1_000_000;
    let spec = serde_json::to_string(&TaskSpec::Profile(endless)).unwrap();
    let mut agent = Program::new(stand_in())
        .args(["holder", "parent-of-one", &spec])
        .arg(directory.path())
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(agent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let group: i32 = line.trim().parse().unwrap();
    assert_eq!(
        processes_of_group(group).len(),
        2,
        "the child and what it started are at work"
    );
    agent.kill().unwrap();
    agent.wait().unwrap();
    wait_until("the group is gone", || processes_of_group(group).is_empty());
}

#[tokio::test]
async fn a_profile_that_overlapped_a_stop_is_measured_again() {
    let mut device = Device::start("child");
    device.run(1, &long_profile(), None).await;
    device.wait_for_progress(0).await;
    let child = children_of(std::process::id(), device.marker());
    let [child] = child[..] else { panic!("{child:?}") };
    device.wait_for_progress(2).await;
    // On a busy machine one may fall between two samples, while the profile waits for quiet.
    for _ in 0..3 {
        signal(child, libc::SIGSTOP);
        tokio::time::sleep(Duration::from_millis(900)).await;
        signal(child, libc::SIGCONT);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (ended, log) = device.until_it_ends(1).await;
    let Ended::Output(json) = ended else {
        panic!("{ended:?}")
    };
    let TaskOutput::Profile(profiled) = serde_json::from_slice(&json).unwrap() else {
        panic!("another output")
    };
    assert!(
        log.iter().any(|line| line.contains("overlapped a stop")),
        "{log:?}"
    );
    for sample in &profiled.parent.measured().unwrap().latency_ms.samples {
        assert!(
            *sample < 900.0,
            "a sample that overlapped the stop was kept: {sample} ms"
        );
    }
    device.stop().await;
}

#[tokio::test]
async fn a_store_that_is_not_mounted_is_refused_and_what_was_put_beside_it_is_not_done() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mount");
    let mut device = Device::start("child").on_store(path.clone());
    device.store_id = "0123".to_owned();
    device.run(1, &long_profile(), None).await;
    let absent = device.failure(1).await;
    assert_eq!(absent.kind, FailureKind::Storage, "it may be mounted again");
    assert!(
        absent.message.contains("there is no such directory"),
        "{absent:?}"
    );
    assert!(absent.message.contains(&path.display().to_string()), "{absent:?}");
    assert!(!path.exists(), "it was made");

    std::fs::create_dir(&path).unwrap();
    device.run(2, &long_profile(), None).await;
    let empty = device.failure(2).await;
    assert!(empty.message.contains("it has no STORE-ID"), "{empty:?}");
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);

    let store = ArtifactStore::open(path.to_str().unwrap()).unwrap();
    device.store_id = store.id_or_new().await.unwrap();
    device.run(3, &long_profile(), None).await;
    device.wait_for_progress(2).await;
    std::fs::rename(path.join("STORE-ID"), directory.path().join("elsewhere")).unwrap();
    let unmounted = device.failure(3).await;
    assert!(unmounted.message.contains("it has no STORE-ID"), "{unmounted:?}");
    assert_eq!(unmounted.kind, FailureKind::Storage);
    std::fs::rename(directory.path().join("elsewhere"), path.join("STORE-ID")).unwrap();
    device.run(4, &long_profile(), None).await;
    let (ended, log) = device.until_it_ends(4).await;
    assert!(matches!(ended, Ended::Output(_)), "{ended:?} {log:?}");
    device.stop().await;
}

#[tokio::test]
async fn a_rank_refuses_what_it_cannot_do_and_stands_ready_until_its_generation_ends() {
    let mut device = Device::start("child");
    let gang = Gang {
        generation: 1,
        rank: 1,
        ranks: 2,
    };
    device.run(1, &long_profile(), Some(gang)).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Invalid);
    assert!(failure.message.contains("2 ranks"), "{failure:?}");

    device.run(2, &shared_recovery(), Some(gang)).await;
    let address = device.wait_for_address().await;
    std::net::TcpStream::connect(&address).expect("the rank listens where it says");
    let stop = Command::Stop {
        lease: lease(2),
        checkpoint: false,
    };
    device.commands.send(stop).await.unwrap();
    let (ended, _) = device.until_it_ends(2).await;
    assert_eq!(
        ended,
        Ended::Stopped,
        "a generation that ends is a stop like any other"
    );

    // Nobody releases it: it fails before it would wait for that.
    device.store_id = "0123".to_owned();
    device.run(3, &shared_recovery(), Some(gang)).await;
    let failure = device.failure(3).await;
    assert_eq!(failure.kind, FailureKind::Storage, "{failure:?}");
    device.stop().await;
}

#[tokio::test]
async fn a_child_that_is_replaced_is_gone_before_the_next_one_starts() {
    let mut device = Device::start("parent-of-one");
    let gang = Gang {
        generation: 1,
        rank: 0,
        ranks: 1,
    };
    let mut groups = Vec::new();
    for attempt in [1, 2] {
        device.run(attempt, &long_profile(), Some(gang)).await;
        device.wait_for_address().await;
        let children = children_of(std::process::id(), device.marker());
        let [child] = children[..] else {
            panic!("{children:?}: the child before is still there")
        };
        groups.push(child);
        let stop = Command::Stop {
            lease: lease(attempt),
            checkpoint: false,
        };
        device.commands.send(stop).await.unwrap();
        device.until_it_ends(attempt).await;
        device.commands.send(Command::Replace).await.unwrap();
    }
    assert_ne!(groups[0], groups[1]);
    assert!(
        processes_of_group(groups[0]).is_empty(),
        "nor anything it started"
    );
    device.stop().await;
    wait_until("the last one goes too", || {
        processes_of_group(groups[1]).is_empty()
    });
}

#[tokio::test]
async fn a_cancelled_attempt_leaves_no_process_on_its_device() {
    let mut device = Device::start("parent-of-one");
    device.run(1, &long_profile(), None).await;
    device.wait_for_progress(1).await;
    let children = children_of(std::process::id(), device.marker());
    let [child] = children[..] else {
        panic!("{children:?}")
    };
    assert_eq!(
        processes_of_group(child).len(),
        2,
        "the child and what it started are at work"
    );
    let stop = Command::Stop {
        lease: lease(1),
        checkpoint: false,
    };
    device.commands.send(stop).await.unwrap();
    let (ended, _) = device.until_it_ends(1).await;
    assert_eq!(ended, Ended::Stopped);
    wait_until("the group is gone", || processes_of_group(child).is_empty());
    device.stop().await;
}

#[tokio::test]
async fn a_device_that_does_not_come_free_is_told_and_not_used() {
    let mut device = Device::without_memory("child", Duration::from_millis(50));
    device.run(1, &long_profile(), None).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::OutOfMemory);
    assert!(failure.message.contains("not free"), "{failure:?}");
    assert!(children_of(std::process::id(), device.marker()).is_empty());
    device.stop().await;
}

#[tokio::test]
async fn a_line_written_before_the_end_arrives_before_the_end() {
    let script = r#"read line; echo 'last words' >&2
        echo '{"reply":"failure","attempt":1,"failure":{"kind":"invalid","message":"no"}}'; read line"#;
    let mut device = Device::script(script);
    device.run(1, &long_profile(), None).await;
    let (_, log) = device.until_it_ends(1).await;
    assert_eq!(log, ["last words"]);
    device.stop().await;
}

#[tokio::test]
async fn a_child_that_ignores_a_checkpoint_is_killed_by_the_stop_that_follows() {
    let mut device = Device::script(
        r#"read line
        echo '{"reply":"progress","attempt":1,"progress":{"done":1,"total":2,"unit":"rounds","note":""}}'
        while true; do read line; done"#,
    );
    device.run(1, &long_profile(), None).await;
    device.wait_for_progress(1).await;
    for checkpoint in [true, false] {
        let stop = Command::Stop {
            lease: lease(1),
            checkpoint,
        };
        device.commands.send(stop).await.unwrap();
        if checkpoint {
            let early = tokio::time::timeout(Duration::from_millis(300), device.events.recv()).await;
            assert!(early.is_err(), "{early:?}: it may take its time for a checkpoint");
        }
    }
    let (ended, _) = device.until_it_ends(1).await;
    assert_eq!(ended, Ended::Stopped);
    device.stop().await;
}

#[tokio::test]
async fn an_attempt_that_says_it_is_alive_is_not_hung_and_one_that_says_nothing_is() {
    let script = r#"read line
        for second in 1 2 3 4 5 6; do echo '{"reply":"alive","attempt":1}'; sleep 1; done
        exec sleep 3600"#;
    let mut device = Device::script_hung_after(script, Duration::from_secs(3));
    let start = Instant::now();
    device.run(1, &long_profile(), None).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Hung, "{failure:?}");
    let lived = start.elapsed();
    assert!(
        lived > Duration::from_secs(6),
        "killed while it said that it lived: {lived:?}"
    );
    device.stop().await;
}

#[tokio::test]
async fn a_task_that_cannot_be_decoded_is_told_to_be_invalid_and_the_device_goes_on() {
    let mut device = Device::start("child");
    device
        .run_json(1, br#"{"kind":"of a later build"}"#.to_vec())
        .await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Invalid);
    assert!(failure.message.contains("cannot be decoded"), "{failure:?}");
    device.run(2, &long_profile(), None).await;
    device.wait_for_progress(1).await;
    device.stop().await;
}

/// An order of more than a pipe holds.
fn large_order() -> TaskSpec {
    let TaskSpec::Profile(mut profile) = long_profile() else {
        panic!("another task")
    };
    profile.points = vec![profile.points[0]; 20_000];
    TaskSpec::Profile(profile)
}

#[tokio::test]
async fn a_child_that_never_reads_its_order_can_be_stopped() {
    let mut device = Device::script("exec sleep 3600");
    device.run(1, &large_order(), None).await;
    let early = tokio::time::timeout(Duration::from_millis(300), device.events.recv()).await;
    assert!(early.is_err(), "{early:?}");
    let stop = Command::Stop {
        lease: lease(1),
        checkpoint: false,
    };
    device.commands.send(stop).await.unwrap();
    let (ended, _) = device.until_it_ends(1).await;
    assert_eq!(ended, Ended::Stopped);
    device.stop().await;
}

#[tokio::test]
async fn a_child_that_never_reads_its_order_is_hung() {
    let mut device = Device::script_hung_after("exec sleep 3600", Duration::from_secs(1));
    device.run(1, &large_order(), None).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Hung, "{failure:?}");
    device.stop().await;
}

#[tokio::test]
async fn an_agent_that_ends_does_not_wait_for_a_child_that_never_reads() {
    let device = Device::script(SLEEPS);
    device.run(1, &large_order(), None).await;
    let child = device.child().await;
    tokio::time::timeout(PATIENCE, device.stop())
        .await
        .expect("the device ends");
    wait_until("its child is gone", || processes_of_group(child).is_empty());
}

#[tokio::test]
async fn an_end_that_is_too_large_to_be_told_fails_its_task_for_good() {
    // As many bytes of output as the coordinator takes, and a few more.
    let script = r#"read line
        printf '{"reply":"output","attempt":1,"output":{"kind":"calibrate","importance":"'
        head -c 6291456 /dev/zero | tr '\0' a
        echo '"}}'; read line"#;
    let mut device = Device::script(script);
    device.run(1, &long_profile(), None).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Invalid, "{}", failure.message);
    assert!(
        failure.message.contains("expected at most"),
        "{}",
        failure.message
    );
    device.stop().await;

    let script = r#"read line
        printf '{"reply":"failure","attempt":1,"failure":{"kind":"error","message":"'
        head -c 6291456 /dev/zero | tr '\0' a
        echo '"}}'; read line"#;
    let mut device = Device::script(script);
    device.run(1, &long_profile(), None).await;
    let failure = device.failure(1).await;
    assert_eq!(failure.kind, FailureKind::Error);
    assert!(failure.message.len() < 10_000, "{} bytes", failure.message.len());
    device.stop().await;
}

#[tokio::test]
async fn lines_of_a_log_are_numbered_within_their_attempt() {
    let script = r#"while read line; do
            attempt=${line#*\"attempt\":}
            attempt=${attempt%%[,\}]*}
            echo "a word of $attempt" >&2; echo "and another" >&2
            echo '{"reply":"failure","attempt":'$attempt',"failure":{"kind":"invalid","message":"no"}}'
        done"#;
    let mut device = Device::script(script);
    for attempt in [1, 2] {
        device.run(attempt, &long_profile(), None).await;
        let mut lines = Vec::new();
        loop {
            match device.events.recv().await.unwrap() {
                DeviceEvent::Log {
                    first_line,
                    lines: some,
                    ..
                } => lines.extend((first_line..).zip(some)),
                DeviceEvent::Ended { .. } => break,
                _ => {}
            }
        }
        assert_eq!(
            lines,
            [(1, format!("a word of {attempt}")), (2, "and another".to_owned())]
        );
    }
    device.stop().await;
}

#[tokio::test]
async fn what_a_killed_child_was_writing_goes_with_it() {
    let mut device = Device::script(SLEEPS);
    device.run(1, &long_profile(), None).await;
    let child = device.child().await;
    // A name as the child would choose one, beside one of this process.
    let own = espalier_artifact::ArtifactStore::open(device.store.to_str().unwrap())
        .unwrap()
        .scratch_path()
        .unwrap();
    let machine = own
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .split('-')
        .next()
        .unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
    let started = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .nth(19)
        .unwrap();
    let half = own.with_file_name(format!("{machine}-{child}-{started}-0"));
    for path in [&own, &half] {
        std::fs::write(path, "half a checkpoint").unwrap();
    }
    let stop = Command::Stop {
        lease: lease(1),
        checkpoint: false,
    };
    device.commands.send(stop).await.unwrap();
    device.until_it_ends(1).await;
    assert!(!half.exists() && own.exists());
    device.stop().await;
}
