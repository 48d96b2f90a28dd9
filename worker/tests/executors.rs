//! Every executor in turn on the tiny parent, without a coordinator.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use espalier_arch::{BlockShape, Candidate, Variant};
use espalier_artifact::BlockingStore;
use espalier_model::Device;
use espalier_proto::task::{
    Calibrate, Check, DepthOrder, Engine, Evaluate, Export, FailureKind, Ingest, Ingested, ParentRef,
    Profile, Rank, Recipe, Recover, ScoreBlocks, Sort, Student, TaskOutput, TaskSpec, Verify,
};
use espalier_search::{Point, Workload};
use espalier_worker::Result;
use espalier_worker::executor::{Backend, Caches, Context, execute};

struct Bench {
    directory: tempfile::TempDir,
    store: BlockingStore,
    backend: Backend,
    caches: Caches,
}

fn example(path: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("../examples").join(path).to_str().unwrap().to_owned()
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = BlockingStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        Self {
            directory,
            store,
            backend: Backend::open(Device::Cpu, None).unwrap(),
            caches: Caches::default(),
        }
    }

    fn run(&mut self, spec: TaskSpec) -> Result<TaskOutput> {
        let context = Context::new(&self.backend, &self.store, Box::new(|_| ()), Box::new(|| None));
        execute(&context, &mut self.caches, &spec)
    }

    fn ingest(&mut self) -> Ingested {
        let spec = TaskSpec::Ingest(ingest(&example("data/train.jsonl.xz")));
        let TaskOutput::Ingest(ingested) = self.run(spec).unwrap() else {
            panic!("another output")
        };
        *ingested
    }

    fn sorted(&mut self, ingested: &Ingested) -> ParentRef {
        let mut importance = Vec::new();
        for shard in &ingested.calibration {
            let spec = TaskSpec::Calibrate(Calibrate {
                parent: ingested.parent.clone(),
                shard: shard.clone(),
            });
            let TaskOutput::Calibrate { importance: sums, .. } = self.run(spec).unwrap() else {
                panic!("another output")
            };
            importance.push(sums);
        }
        let spec = TaskSpec::Sort(Sort {
            parent: ingested.parent.clone(),
            importance,
        });
        let TaskOutput::Sort { permutation } = self.run(spec).unwrap() else {
            panic!("another output")
        };
        ParentRef {
            permutation: Some(permutation),
            ..ingested.parent.clone()
        }
    }
}

fn ingest(train: &str) -> Ingest {
    Ingest {
        parent: example("tiny"),
        train: vec![train.to_owned()],
        validation: vec![example("data/validation.jsonl.xz")],
        sequence_tokens: 64,
        calibration_tokens: 1024,
        scoring_tokens: 512,
        recovery_tokens: 4096,
        validation_tokens: 1024,
        seed: 3,
    }
}

/// Half of every MLP; attention whole.
fn narrow(ingested: &Ingested) -> Candidate {
    let halved = |shape: &BlockShape| match shape {
        BlockShape::Mlp(mlp) => Variant::Mlp {
            channels: mlp.channels / 2,
        },
        _ => Variant::Whole,
    };
    Candidate {
        variants: ingested
            .architecture
            .blocks
            .iter()
            .map(|block| halved(&block.shape))
            .collect(),
    }
}

fn recover(parent: &ParentRef, ingested: &Ingested) -> Recover {
    Recover {
        parent: parent.clone(),
        candidate: narrow(ingested),
        shards: ingested.recovery.clone(),
        recipe: Recipe {
            tokens: 8192,
            batch_sequences: 8,
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
    }
}

#[test]
fn ingest_is_the_same_twice_and_keeps_roles_apart() {
    let mut bench = Bench::new();
    let first = bench.ingest();
    assert_eq!(first, bench.ingest());
    let mut names: Vec<_> = first
        .calibration
        .iter()
        .chain(&first.recovery)
        .map(|shard| &shard.artifact)
        .collect();
    names.extend([&first.scoring.artifact, &first.validation.artifact]);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), first.calibration.len() + first.recovery.len() + 2);
}

#[test]
fn scores_grow_as_variants_shrink_and_a_whole_block_costs_nothing() {
    let mut bench = Bench::new();
    let ingested = bench.ingest();
    let parent = bench.sorted(&ingested);
    let block = ingested
        .architecture
        .blocks
        .iter()
        .position(|block| matches!(block.shape, BlockShape::Mlp(_)))
        .unwrap();
    let BlockShape::Mlp(mlp) = &ingested.architecture.blocks[block].shape else {
        panic!("not an mlp")
    };
    let variants = vec![
        Variant::Whole,
        Variant::Mlp {
            channels: mlp.channels * 3 / 4,
        },
        Variant::Mlp {
            channels: mlp.channels / 4,
        },
    ];
    let spec = ScoreBlocks {
        parent,
        block,
        variants,
        further: Vec::new(),
        shard: ingested.scoring.clone(),
    };
    let TaskOutput::Score { scores } = bench.run(TaskSpec::Score(spec)).unwrap() else {
        panic!("another output")
    };
    assert!(scores[0].divergence.abs() < 1e-5, "{scores:?}");
    assert!(
        scores[0].divergence < scores[1].divergence && scores[1].divergence < scores[2].divergence,
        "{scores:?}"
    );
}

#[test]
fn ranking_whole_candidates_agrees_with_the_depth_order() {
    let mut bench = Bench::new();
    let ingested = bench.ingest();
    let parent = bench.sorted(&ingested);
    let shard = ingested.scoring.clone();
    let spec = DepthOrder {
        parent: parent.clone(),
        remove: 1,
        shard: shard.clone(),
        sequences: shard.sequences,
    };
    let TaskOutput::DepthOrder { layers, divergences } = bench.run(TaskSpec::DepthOrder(spec)).unwrap()
    else {
        panic!("another output")
    };
    let blocks = &ingested.architecture.blocks;
    let variant = |layer: usize| {
        if layer == layers[0] {
            Variant::Skip
        } else {
            Variant::Whole
        }
    };
    let without = Candidate {
        variants: blocks.iter().map(|block| variant(block.layer)).collect(),
    };
    let candidates = vec![ingested.architecture.whole(), without];
    let TaskOutput::Rank { divergences: ranked } = bench
        .run(TaskSpec::Rank(Rank {
            parent,
            candidates,
            shard,
        }))
        .unwrap()
    else {
        panic!("another output")
    };
    assert!(ranked[0].abs() < 1e-5);
    assert!(
        (ranked[1] - divergences[0]).abs() < 1e-4 * divergences[0],
        "{ranked:?} {divergences:?}"
    );
}

#[test]
fn an_attempt_beats_with_every_operation_even_where_it_tells_nothing() {
    let mut bench = Bench::new();
    let ingested = bench.ingest();
    let context = Context::new(&bench.backend, &bench.store, Box::new(|_| ()), Box::new(|| None));
    let pulse = bench.backend.pulse();
    let spec = TaskSpec::Evaluate(Evaluate {
        parent: ingested.parent.clone(),
        student: None,
        validation: ingested.validation.clone(),
        benchmarks: Vec::new(),
        benchmark_examples: 0,
    });
    let [first, second] = [(); 2].map(|()| {
        let before = pulse.beats();
        execute(&context, &mut bench.caches, &spec).unwrap();
        pulse.beats() - before
    });
    let blocks = ingested.architecture.blocks.len() as u64;
    // The second finds the parent and its activations in memory: to load and to compute them tells no progress.
    assert!(
        first > second + 4 * blocks,
        "{first} beats, {second} of them after loading, {blocks} blocks"
    );
}

#[test]
fn a_profile_has_a_row_for_every_shape_and_the_base_at_every_point() {
    let mut bench = Bench::new();
    let ingested = bench.ingest();
    let workload = Workload {
        prompt_tokens: 16,
        output_tokens: 4,
        concurrency: 1,
    };
    let shapes = vec![
        ingested.architecture.blocks[0].shape.clone(),
        ingested.architecture.blocks[1].shape.clone(),
    ];
    let points = vec![
        Point::Prefill {
            tokens: 16,
            sequences: 1,
        },
        Point::Decode {
            context: 16,
            sequences: 1,
        },
    ];
    let architecture = ingested.architecture;
    let spec = Profile {
        architecture: architecture.clone(),
        shapes,
        points,
        rounds: 3,
        workload,
        engine: Engine::Builtin,
        kept: Vec::new(),
    };
    let TaskOutput::Profile(profiled) = bench.run(TaskSpec::Profile(spec)).unwrap() else {
        panic!("another output")
    };
    assert_eq!(profiled.rows.len(), 6);
    assert!(profiled.rows.iter().any(|row| row.median_ms > 0.0));
    assert_eq!(profiled.parent.measured().unwrap().latency_ms.samples.len(), 3);
    let check = Check {
        parent: architecture.clone(),
        architecture,
        workload,
        running: None,
        repeats: 4,
        engine: Engine::Builtin,
    };
    let TaskOutput::Measured(pair) = bench.run(TaskSpec::Check(check)).unwrap() else {
        panic!("another output")
    };
    assert_eq!(
        pair.parent.measured().unwrap().memory_bytes,
        pair.candidate.memory_bytes
    );
}

#[test]
fn recovery_lowers_the_held_out_divergence_and_resumes_to_the_bit() {
    let mut bench = Bench::new();
    let ingested = bench.ingest();
    let parent = bench.sorted(&ingested);
    let task = recover(&parent, &ingested);
    let TaskOutput::Recover(whole) = bench.run(TaskSpec::Recover(task.clone())).unwrap() else {
        panic!("another output")
    };
    // The record of the last checkpoint is still there: a second attempt trains only the steps after it.
    let TaskOutput::Recover(resumed) = bench.run(TaskSpec::Recover(task)).unwrap() else {
        panic!("another output")
    };
    assert_eq!(
        (&whole.weights, &whole.losses),
        (&resumed.weights, &resumed.losses)
    );
    assert!(!whole.kept_untrained);

    let evaluate = |weights| Evaluate {
        parent: parent.clone(),
        student: Some(Student {
            candidate: narrow(&ingested),
            weights,
        }),
        validation: ingested.validation.clone(),
        benchmarks: Vec::new(),
        benchmark_examples: 0,
    };
    let mut quality = |weights| match bench.run(TaskSpec::Evaluate(evaluate(weights))).unwrap() {
        TaskOutput::Evaluate(quality) => quality,
        other => panic!("{other:?}"),
    };
    let (before, after) = (quality(None), quality(Some(whole.weights.clone())));
    assert!(after.divergence < 0.9 * before.divergence, "{before:?} {after:?}");

    let directory = bench.directory.path().join("export").to_str().unwrap().to_owned();
    let student = Student {
        candidate: narrow(&ingested),
        weights: Some(whole.weights),
    };
    let export = Export {
        parent: parent.clone(),
        student,
        directory: directory.clone(),
    };
    let TaskOutput::Export(exported) = bench.run(TaskSpec::Export(export)).unwrap() else {
        panic!("another output")
    };
    assert!(Path::new(&exported.directory).join("config.json").is_file());
    let workload = Workload {
        prompt_tokens: 16,
        output_tokens: 4,
        concurrency: 1,
    };
    match bench.run(TaskSpec::Verify(Verify {
        parent,
        directory,
        workload,
        running: None,
        repeats: 4,
        engine: Engine::Builtin,
    })) {
        Ok(TaskOutput::Measured(pair)) => {
            let parent = pair.parent.measured().unwrap();
            assert!(pair.candidate.memory_bytes < parent.memory_bytes);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn bad_data_is_one_clear_error_that_names_file_and_line() {
    let mut bench = Bench::new();
    let cases: [(&str, &[u8], &str); 4] = [
        ("empty.jsonl", b"", "empty"),
        ("binary.txt", b"ab\x00cd", "binary"),
        ("broken.jsonl", b"{\"text\": \"a\"}\n{\"text\": ", "line 2"),
        (
            "keys.jsonl",
            b"{\"content\": \"a\"}\n",
            "neither text nor messages",
        ),
    ];
    for (name, bytes, expected) in cases {
        let path = bench.directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = bench
            .run(TaskSpec::Ingest(ingest(path.to_str().unwrap())))
            .unwrap_err();
        let failure = error.failure();
        assert_eq!(failure.kind, FailureKind::Invalid, "{failure:?}");
        assert!(
            failure.message.contains(name) && failure.message.contains(expected),
            "{failure:?}"
        );
    }
}
