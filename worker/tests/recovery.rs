//! Recovery through device children that are stopped and killed in its middle: the weights are those of an
//! undisturbed run, to the bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::{Path, PathBuf};

use espalier_arch::{BlockShape, Candidate, Variant};
use espalier_artifact::BlockingStore;
use espalier_proto::task::{FailureKind, Ingest, Recipe, Recover, Recovered, TaskOutput, TaskSpec};
use espalier_worker::agent::core::Ended;
use espalier_worker::agent::device::Command;
use espalier_worker::executor::{Backend, Caches, Context, execute};

use support::{Device, children_of, lease, signal};

/// Tokens of a step.
const STEP: u64 = 2 * 64;

fn example(path: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("../examples").join(path).to_str().unwrap().to_owned()
}

/// Half of every MLP of the tiny parent, trained for 80 steps on what `store` then holds.
fn recovery(store: &Path) -> TaskSpec {
    let store = BlockingStore::open(store.to_str().unwrap()).unwrap();
    let backend = Backend::open(espalier_model::Device::Cpu, None).unwrap();
    let context = Context::new(&backend, &store, Box::new(|_| ()), Box::new(|| None));
    let ingest = Ingest {
        parent: example("tiny"),
        train: vec![example("data/train.jsonl.xz")],
        validation: vec![example("data/validation.jsonl.xz")],
        sequence_tokens: 64,
        calibration_tokens: 128,
        scoring_tokens: 128,
        recovery_tokens: 4096,
        validation_tokens: 128,
        seed: 3,
    };
    let output = execute(&context, &mut Caches::default(), &TaskSpec::Ingest(ingest)).unwrap();
    let TaskOutput::Ingest(ingested) = output else {
        panic!("another output")
    };
    let halved = |shape: &BlockShape| match shape {
        BlockShape::Mlp(mlp) => Variant::Mlp {
            channels: mlp.channels / 2,
        },
        _ => Variant::Whole,
    };
    let blocks = &ingested.architecture.blocks;
    TaskSpec::Recover(Recover {
        parent: ingested.parent.clone(),
        candidate: Candidate {
            variants: blocks.iter().map(|block| halved(&block.shape)).collect(),
        },
        shards: ingested.recovery.clone(),
        recipe: Recipe {
            // Seconds are left after those steps that it is stopped and killed at, however late that is seen.
            tokens: 80 * STEP,
            batch_sequences: 2,
            learning_rate: 1e-3,
            warmup: 0.1,
            final_share: 0.1,
            clip: 1.0,
            betas: (0.9, 0.95),
            weight_decay: 0.0,
            checkpoint_steps: 4,
            seed: 5,
            ranks: 1,
            pipeline_stages: 1,
        },
        resume: None,
    })
}

fn recovered(ended: Ended) -> Recovered {
    let Ended::Output(json) = ended else {
        panic!("{ended:?}")
    };
    match serde_json::from_slice(&json).unwrap() {
        TaskOutput::Recover(recovered) => recovered,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn recovery_that_is_drained_and_then_killed_ends_where_an_undisturbed_one_does() {
    let directory = tempfile::tempdir().unwrap();
    let (quiet, rough) = (directory.path().join("quiet"), directory.path().join("rough"));
    let (expected, task) = tokio::task::spawn_blocking({
        let (quiet, rough) = (quiet.clone(), rough.clone());
        move || (recovery(&quiet), recovery(&rough))
    })
    .await
    .unwrap();
    assert_eq!(expected, task, "both stores hold the same");

    let mut device = Device::start("child").on_store(quiet);
    device.run(1, &expected, None).await;
    let undisturbed = recovered(device.until_it_ends(1).await.0);
    device.stop().await;

    let mut drained = Device::start("child").on_store(rough.clone());
    drained.run(1, &task, None).await;
    let fresh = drained.wait_for_progress(2 * STEP).await;
    assert_eq!(fresh.went_on_from, 0);
    let stop = Command::Stop {
        lease: lease(1),
        checkpoint: true,
    };
    drained.commands.send(stop).await.unwrap();
    let (ended, log) = drained.until_it_ends(1).await;
    assert_eq!(ended, Ended::Stopped, "{log:?}");
    assert!(
        log.iter().any(|line| line.contains("a checkpoint was asked for")),
        "{log:?}"
    );
    drained.stop().await;

    let mut killed = Device::start("child").on_store(rough.clone());
    killed.run(2, &task, None).await;
    let gone_on = killed.wait_for_progress(2 * STEP).await.went_on_from;
    assert!(
        gone_on >= 2 * STEP && gone_on.is_multiple_of(STEP),
        "{gone_on}: where the drained one had left it"
    );
    // It has left checkpoints of its own by then.
    killed.wait_for_progress(gone_on + 12 * STEP).await;
    let children = children_of(std::process::id(), killed.marker());
    assert_eq!(children.len(), 1);
    signal(children[0], libc::SIGKILL);
    assert_eq!(killed.failure(2).await.kind, FailureKind::Crashed);
    killed.stop().await;

    let mut last = Device::start("child").on_store(rough);
    last.run(3, &task, None).await;
    let (ended, log) = last.until_it_ends(3).await;
    assert!(
        log.iter()
            .any(|line| line.contains("going on from a checkpoint") && line.contains("of attempt 2")),
        "the furthest checkpoint is taken: {log:?}"
    );
    let disturbed = recovered(ended);
    assert_eq!(disturbed.weights, undisturbed.weights, "to the bit");
    assert_eq!(disturbed.losses, undisturbed.losses);
    last.stop().await;
}
