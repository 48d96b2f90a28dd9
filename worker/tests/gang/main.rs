//! A recovery by several ranks: whatever their number and layout, the losses of one rank; and ranks that are asked for a
//! checkpoint go on from it as any other number. Ranks are threads of this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod troubled;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use espalier_arch::{BlockShape, Candidate, Variant};
use espalier_artifact::BlockingStore;
use espalier_model::Device;
use espalier_model::collective::{Gang, local};
use espalier_proto::task::{FailureKind, Ingest, Ingested, Recipe, Recover, Recovered, TaskOutput, TaskSpec};
use espalier_worker::executor::{Backend, Caches, Context, Stop, execute};
use espalier_worker::{Error, Result};

const STEPS: usize = 10;
const DEADLINE: Duration = Duration::from_secs(60);

fn example(path: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("../examples").join(path).to_str().unwrap().to_owned()
}

fn attempt(
    store: &Path,
    gang: Option<Arc<dyn Gang>>,
    number: u64,
    task: &TaskSpec,
    stop_after: usize,
) -> Result<TaskOutput> {
    attempt_within(None, store, gang, number, task, stop_after)
}

/// An attempt on a host where a parent's weights may take so many bytes.
fn attempt_within(
    limit: Option<u64>,
    store: &Path,
    gang: Option<Arc<dyn Gang>>,
    number: u64,
    task: &TaskSpec,
    stop_after: usize,
) -> Result<TaskOutput> {
    let store = BlockingStore::open(store.to_str().unwrap())?;
    let backend = Backend::open(Device::Cpu, limit)?;
    let steps = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&steps);
    let progress = Box::new(move |progress: espalier_proto::task::Progress| {
        if progress.unit == "tokens" {
            let step = progress.done * STEPS as u64 / progress.total.max(1);
            seen.store(usize::try_from(step).unwrap(), Ordering::SeqCst);
        }
    });
    let stop = Box::new(move || {
        let done = steps.load(Ordering::SeqCst);
        // Who is to be stopped takes his time: progress is told no more often than this, and steps are quicker.
        if stop_after < usize::MAX && done < stop_after {
            std::thread::sleep(Duration::from_millis(250));
        }
        (done >= stop_after).then_some(Stop::AfterCheckpoint)
    });
    let context = Context::new(&backend, &store, progress, stop)
        .with_attempt(number)
        .with_gang(gang);
    execute(&context, &mut Caches::default(), task)
}

fn recovered(output: Result<TaskOutput>) -> Recovered {
    match output.unwrap() {
        TaskOutput::Recover(recovered) => recovered,
        other => panic!("another output: {other:?}"),
    }
}

/// A gang's attempt; what its ranks give, in their order.
fn gang(
    store: &Path,
    size: usize,
    number: u64,
    task: &TaskSpec,
    stop_after: usize,
) -> Vec<Result<TaskOutput>> {
    let gangs = local::LocalGang::all(size, DEADLINE);
    std::thread::scope(|scope| {
        let ranks = gangs.into_iter().map(|gang| {
            // Only the last rank is asked to stop: the others hear of it.
            let stop_after = if gang.rank() + 1 == size {
                stop_after
            } else {
                usize::MAX
            };
            scope.spawn(move || attempt(store, Some(gang), number + 1, task, stop_after))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn ingest(store: &Path) -> Ingested {
    let spec = TaskSpec::Ingest(Ingest {
        parent: example("tiny"),
        train: vec![example("data/train.jsonl.xz")],
        validation: vec![example("data/validation.jsonl.xz")],
        sequence_tokens: 64,
        calibration_tokens: 1024,
        scoring_tokens: 512,
        recovery_tokens: 4096,
        validation_tokens: 1024,
        seed: 3,
    });
    match attempt(store, None, 1, &spec, usize::MAX).unwrap() {
        TaskOutput::Ingest(ingested) => *ingested,
        other => panic!("another output: {other:?}"),
    }
}

fn recover(ingested: &Ingested, pipeline_stages: u32, seed: u64) -> TaskSpec {
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
            // Five sequences: no number of ranks but one shares them out evenly.
            tokens: (STEPS * 5 * 64) as u64,
            batch_sequences: 5,
            learning_rate: 1e-3,
            warmup: 0.1,
            final_share: 0.1,
            clip: 1.0,
            betas: (0.9, 0.95),
            weight_decay: 0.0,
            checkpoint_steps: 4,
            seed,
            ranks: 4,
            pipeline_stages,
        },
        resume: None,
    })
}

/// Two ranks as two stages, where a parent's weights may take so many bytes.
fn two_stages(limit: u64, store: &Path, task: &TaskSpec) -> Vec<Result<TaskOutput>> {
    let gangs = local::LocalGang::all(2, DEADLINE);
    std::thread::scope(|scope| {
        let run = |gang| move || attempt_within(Some(limit), store, Some(gang), 2, task, usize::MAX);
        let ranks = gangs.into_iter().map(|gang| scope.spawn(run(gang)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The same recovery with something else about it.
fn changed(task: TaskSpec, change: impl FnOnce(&mut Recover)) -> TaskSpec {
    let TaskSpec::Recover(mut task) = task else {
        panic!("not a recovery: {task:?}")
    };
    change(&mut task);
    TaskSpec::Recover(task)
}

fn assert_equal(found: &Recovered, expected: &Recovered, which: &str) {
    assert_eq!(found.losses.len(), STEPS, "{which}");
    for (step, (found, expected)) in found.losses.iter().zip(&expected.losses).enumerate() {
        let apart = (found - expected).abs() / expected;
        assert!(apart < 1e-5, "{which}, step {step}: {found} and {expected}");
    }
    assert_eq!(found.kept_untrained, expected.kept_untrained, "{which}");
}

#[test]
fn ranks_in_any_layout_recover_as_one_does() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let alone = recovered(attempt(
        directory.path(),
        None,
        1,
        &recover(&ingested, 1, 5),
        usize::MAX,
    ));
    for (size, stages) in [(2, 1), (3, 1), (2, 2), (4, 2)] {
        let which = format!("{size} ranks, {stages} stages");
        // Each layout of its own question: none goes on from another's checkpoint.
        let store = tempfile::tempdir().unwrap();
        let ingested = ingest(store.path());
        let task = recover(&ingested, stages, 5);
        let ranks = gang(store.path(), size, 1, &task, usize::MAX);
        let ranks: Vec<Recovered> = ranks.into_iter().map(recovered).collect();
        for rank in &ranks {
            assert_equal(rank, &alone, &which);
            assert_eq!(rank.weights, ranks[0].weights, "{which}");
        }
        let store = BlockingStore::open(store.path().to_str().unwrap()).unwrap();
        assert!(store.get_file(&ranks[0].weights.0).is_ok(), "{which}");
    }
}

#[test]
fn ranks_leave_a_checkpoint_together_when_one_is_asked_and_fewer_go_on_from_it() {
    for stages in [1, 2] {
        let directory = tempfile::tempdir().unwrap();
        let ingested = ingest(directory.path());
        let undisturbed = tempfile::tempdir().unwrap();
        let task = recover(&ingest(undisturbed.path()), 1, 6);
        let alone = recovered(attempt(undisturbed.path(), None, 1, &task, usize::MAX));
        let task = recover(&ingested, stages, 6);
        for stopped in gang(directory.path(), 4, 1, &task, 3) {
            assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
        }
        for rank in gang(directory.path(), 2, 2, &task, usize::MAX) {
            assert_equal(&recovered(rank), &alone, &format!("{stages} stages"));
        }
    }
}

#[test]
fn stages_recover_from_a_parent_that_no_rank_has_room_for() {
    let [alone, stages] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let ingested = ingest(alone.path());
    assert_eq!(ingest(stages.path()), ingested);
    // Without its first two blocks the student's stages are not those of its parent.
    let skip = |task: &mut Recover| task.candidate.variants[..2].fill(Variant::Skip);
    let whole = changed(recover(&ingested, 1, 5), skip);
    let expected = recovered(attempt(alone.path(), None, 1, &whole, usize::MAX));
    assert!(!expected.kept_untrained);
    let bytes = 4 * ingested.architecture.parameters().total;
    let refused = attempt_within(Some(bytes - 1), alone.path(), None, 2, &whole, usize::MAX).unwrap_err();
    assert_eq!(refused.failure().kind, FailureKind::OutOfMemory);
    assert!(refused.to_string().starts_with("the parent needs "), "{refused}");
    let task = changed(recover(&ingested, 2, 5), skip);
    // Both ends hold the tied embedding; half of the blocks each.
    let ranks = two_stages(bytes * 7 / 10, stages.path(), &task);
    for rank in ranks.into_iter().map(recovered) {
        assert_equal(&rank, &expected, "two stages");
    }
    for refused in two_stages(
        bytes / 4,
        stages.path(),
        &changed(task, |task| task.recipe.seed = 6),
    ) {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.starts_with("the parent's stage needs "), "{refused}");
    }
}

#[test]
fn stages_that_training_harms_leave_the_untrained_student_that_one_rank_leaves() {
    let [alone, stages] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let ingested = ingest(alone.path());
    ingest(stages.path());
    let harmful = |task: &mut Recover| {
        task.recipe.learning_rate = 0.3;
        task.candidate.variants[1] = Variant::Skip;
    };
    let task = changed(recover(&ingested, 1, 5), harmful);
    let expected = recovered(attempt(alone.path(), None, 1, &task, usize::MAX));
    assert!(expected.kept_untrained);
    let bytes = 4 * ingested.architecture.parameters().total;
    let task = changed(recover(&ingested, 2, 5), harmful);
    for rank in two_stages(bytes * 7 / 10, stages.path(), &task) {
        let rank = recovered(rank);
        assert!(rank.kept_untrained);
        assert_eq!(rank.weights, expected.weights, "the same file");
    }
}

#[test]
fn a_gang_that_its_stages_do_not_divide_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    for refused in gang(directory.path(), 3, 1, &recover(&ingested, 2, 5), usize::MAX) {
        let refused = refused.unwrap_err();
        assert_eq!(refused.failure().kind, FailureKind::Invalid);
        assert!(
            refused.to_string().contains("recovery.pipeline_stages is 2"),
            "{refused}"
        );
    }
}

#[test]
fn a_rank_whose_gang_broke_says_so_and_is_not_to_blame() {
    let directory = tempfile::tempdir().unwrap();
    let ingested = ingest(directory.path());
    let gangs = local::LocalGang::all(2, DEADLINE);
    gangs[1].abort();
    let task = recover(&ingested, 1, 5);
    let told = attempt(directory.path(), Some(gangs[0].clone()), 1, &task, usize::MAX).unwrap_err();
    assert_eq!(told.failure().kind, FailureKind::RankLost, "{told}");
}
