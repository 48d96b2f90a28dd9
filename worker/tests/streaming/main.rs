//! A parent that the device does not hold: every stage that streams it gives, to the bit, what a device gives that holds
//! it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod measured;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use espalier_arch::{BlockShape, Candidate, Variant};
use espalier_artifact::BlockingStore;
use espalier_model::Device;
use espalier_model::checkpoint::{Parent, Precision};
use espalier_model::collective::local;
use espalier_model::export::export;
use espalier_model::ops::cpu::CpuOperations;
use espalier_proto::task::{
    ArtifactId, BlockVariants, Calibrate, DepthOrder, Evaluate, Export, FailureKind, Ingest, Ingested,
    ParentRef, Rank, Recipe, Recover, ScoreBlocks, Sort, Student, TaskOutput, TaskSpec,
};
use espalier_worker::executor::{Backend, Caches, Context, Stop, execute};
use espalier_worker::{Error, Result};

struct Bench {
    directory: tempfile::TempDir,
    store: BlockingStore,
    limit: Option<u64>,
    caches: Caches,
}

fn example(path: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.join("../examples").join(path).to_str().unwrap().to_owned()
}

impl Bench {
    fn new(limit: Option<u64>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = BlockingStore::open(directory.path().join("store").to_str().unwrap()).unwrap();
        Self {
            directory,
            store,
            limit,
            caches: Caches::default(),
        }
    }

    fn run(&mut self, spec: &TaskSpec) -> Result<TaskOutput> {
        self.run_until(spec, || None)
    }

    fn run_until(
        &mut self,
        spec: &TaskSpec,
        stop: impl Fn() -> Option<Stop> + 'static,
    ) -> Result<TaskOutput> {
        let backend = Backend::open(Device::Cpu, self.limit)?;
        let context = Context::new(&backend, &self.store, Box::new(|_| ()), Box::new(stop));
        execute(&context, &mut self.caches, spec)
    }

    fn ingest(&mut self, parent: &str) -> Ingested {
        let spec = TaskSpec::Ingest(Ingest {
            parent: parent.to_owned(),
            train: vec![example("data/train.jsonl.xz")],
            validation: vec![example("data/validation.jsonl.xz")],
            sequence_tokens: 64,
            // Three batches and two: where states may take as much as half of the tiny parent, two go together, and no more
            // than one in several forms; inputs of all blocks do not fit.
            calibration_tokens: 5000,
            scoring_tokens: 2500,
            recovery_tokens: 4096,
            validation_tokens: 2500,
            seed: 3,
        });
        match self.run(&spec).unwrap() {
            TaskOutput::Ingest(ingested) => *ingested,
            other => panic!("{other:?}"),
        }
    }

    fn sorted(&mut self, ingested: &Ingested) -> ParentRef {
        let calibrate = |shard| {
            let parent = ingested.parent.clone();
            match self
                .run(&TaskSpec::Calibrate(Calibrate { parent, shard }))
                .unwrap()
            {
                TaskOutput::Calibrate { importance, streamed } => {
                    assert_eq!(
                        streamed,
                        self.limit.is_some(),
                        "limits here are less than the parent"
                    );
                    importance
                }
                other => panic!("{other:?}"),
            }
        };
        let importance: Vec<ArtifactId> = ingested.calibration.iter().cloned().map(calibrate).collect();
        let parent = ingested.parent.clone();
        match self.run(&TaskSpec::Sort(Sort { parent, importance })).unwrap() {
            TaskOutput::Sort { permutation } => ParentRef {
                permutation: Some(permutation),
                ..ingested.parent.clone()
            },
            other => panic!("{other:?}"),
        }
    }
}

/// Of each block, what a search would try.
fn variants(shape: &BlockShape) -> Vec<Variant> {
    let smaller = match shape {
        BlockShape::Mlp(mlp) => vec![
            Variant::Mlp {
                channels: mlp.channels * 3 / 4,
            },
            Variant::Mlp {
                channels: mlp.channels / 4,
            },
        ],
        _ => vec![Variant::Attention { kv_groups: 1 }],
    };
    [vec![Variant::Whole], smaller, vec![Variant::Skip]].concat()
}

/// As many candidates as two passes over the vocabulary take.
fn candidates(ingested: &Ingested) -> Vec<Candidate> {
    let blocks = &ingested.architecture.blocks;
    (0..10)
        .map(|number| {
            let variant = |(index, block): (usize, &espalier_arch::Block)| {
                let variants = variants(&block.shape);
                variants[(index + number) % variants.len()].clone()
            };
            Candidate {
                variants: blocks.iter().enumerate().map(variant).collect(),
            }
        })
        .collect()
}

fn benchmark(directory: &Path) -> String {
    let path = directory.join("guesses.jsonl");
    let lines: Vec<String> = (0..12)
        .map(|number| {
            let long = "the sea is deep and the boat is small ".repeat(1 + number % 7);
            match number % 2 {
                0 => format!(r#"{{"query": "{long}", "choices": ["a", "small boat", "sea"], "gold": 1}}"#),
                _ => format!(r#"{{"context": "{long} the", "continuation": "sea"}}"#),
            }
        })
        .collect();
    std::fs::write(&path, lines.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Every task that the search and the end of a job ask of a parent, and what each gives.
fn everything(bench: &mut Bench, ingested: &Ingested, weights: Option<&ArtifactId>) -> Vec<TaskOutput> {
    let parent = bench.sorted(ingested);
    let shard = ingested.scoring.clone();
    let candidates = candidates(ingested);
    let mut tasks = Vec::new();
    let blocks = &ingested.architecture.blocks;
    let last = blocks.len() - 1;
    // The third goes on from what the second left, the fourth cannot; the fifth and the last are of several blocks, of which
    // not two have room together.
    for together in [&[0][..], &[3], &[6], &[5], &[6, 7, 9], &[last], &[1, 2]] {
        let further = together[1..].iter().map(|block| BlockVariants {
            block: *block,
            variants: variants(&blocks[*block].shape),
        });
        tasks.push(TaskSpec::Score(ScoreBlocks {
            parent: parent.clone(),
            block: together[0],
            variants: variants(&blocks[together[0]].shape),
            further: further.collect(),
            shard: shard.clone(),
        }));
    }
    tasks.push(TaskSpec::DepthOrder(DepthOrder {
        parent: parent.clone(),
        remove: 2,
        shard: shard.clone(),
        sequences: 12,
    }));
    tasks.push(TaskSpec::Rank(Rank {
        parent: parent.clone(),
        candidates: candidates.clone(),
        shard,
    }));
    let untrained = Student {
        candidate: candidates[0].clone(),
        weights: None,
    };
    let trained = weights.map(|weights| Student {
        candidate: candidates[0].clone(),
        weights: Some(weights.clone()),
    });
    let file = benchmark(bench.directory.path());
    for student in [None, Some(untrained), trained] {
        tasks.push(TaskSpec::Evaluate(Evaluate {
            parent: parent.clone(),
            student,
            validation: ingested.validation.clone(),
            benchmarks: vec![file.clone()],
            benchmark_examples: 100,
        }));
    }
    let mut outputs: Vec<TaskOutput> = tasks.iter().map(|task| bench.run(task).unwrap()).collect();
    outputs.push(TaskOutput::Sort {
        permutation: parent.permutation.unwrap(),
    });
    outputs
}

fn recovery(parent: &ParentRef, ingested: &Ingested, pipeline_stages: u32) -> TaskSpec {
    TaskSpec::Recover(Recover {
        parent: parent.clone(),
        candidate: candidates(ingested)[0].clone(),
        shards: ingested.recovery.clone(),
        recipe: Recipe {
            tokens: 2048,
            batch_sequences: 8,
            learning_rate: 1e-3,
            warmup: 0.1,
            final_share: 0.1,
            clip: 1.0,
            betas: (0.9, 0.95),
            weight_decay: 0.0,
            checkpoint_steps: 100,
            seed: 5,
            ranks: pipeline_stages,
            pipeline_stages,
        },
        resume: None,
    })
}

fn recover(bench: &mut Bench, parent: &ParentRef, ingested: &Ingested) -> ArtifactId {
    recovered(bench.run(&recovery(parent, ingested, 1)))
}

fn recovered(output: Result<TaskOutput>) -> ArtifactId {
    match output.unwrap() {
        TaskOutput::Recover(recovered) => recovered.weights,
        other => panic!("{other:?}"),
    }
}

/// The same by two ranks, each of a stage.
fn recover_by_two(bench: &Bench, parent: &ParentRef, ingested: &Ingested) -> ArtifactId {
    let task = recovery(parent, ingested, 2);
    let (store, limit) = (bench.directory.path().join("store"), bench.limit);
    let rank = |gang: Arc<local::LocalGang>| {
        let store = BlockingStore::open(store.to_str().unwrap()).unwrap();
        let backend = Backend::open(Device::Cpu, limit)?;
        let context =
            Context::new(&backend, &store, Box::new(|_| ()), Box::new(|| None)).with_gang(Some(gang));
        execute(&context, &mut Caches::default(), &task)
    };
    let weights: Vec<ArtifactId> = std::thread::scope(|scope| {
        let gangs = local::LocalGang::all(2, Duration::from_secs(60));
        let ranks: Vec<_> = gangs.into_iter().map(|gang| scope.spawn(|| rank(gang))).collect();
        ranks
            .into_iter()
            .map(|rank| recovered(rank.join().unwrap()))
            .collect()
    });
    assert_eq!(weights[0], weights[1]);
    weights[0].clone()
}

#[test]
fn a_job_ends_as_elsewhere_where_the_host_may_hold_seven_tenths_of_the_parent() {
    let mut whole = Bench::new(None);
    let ingested = whole.ingest(&example("tiny"));
    // Less would do but for the first of the two stages, which has more blocks than the one with the head.
    let mut streamed = Bench::new(Some(bytes_of(&ingested) * 7 / 10));
    assert_eq!(streamed.ingest(&example("tiny")), ingested);
    let mut sides = Vec::new();
    for bench in [&mut whole, &mut streamed] {
        let parent = bench.sorted(&ingested);
        let weights = match bench.limit {
            None => recover(bench, &parent, &ingested),
            Some(_) => recover_by_two(bench, &parent, &ingested),
        };
        let student = Student {
            candidate: candidates(&ingested)[0].clone(),
            weights: Some(weights),
        };
        let evaluate = TaskSpec::Evaluate(Evaluate {
            parent: parent.clone(),
            student: Some(student.clone()),
            validation: ingested.validation.clone(),
            benchmarks: Vec::new(),
            benchmark_examples: 0,
        });
        let directory = bench.directory.path().join("export").to_str().unwrap().to_owned();
        let export = TaskSpec::Export(Export {
            parent,
            student,
            directory: directory.clone(),
        });
        let outputs = [evaluate, export].map(|task| bench.run(&task).unwrap());
        let [TaskOutput::Evaluate(quality), TaskOutput::Export(exported)] = outputs else {
            panic!("{outputs:?}")
        };
        let written = Parent::open(&directory).unwrap();
        assert_eq!(written.architecture.parameters().total, exported.parameters);
        sides.push((quality, exported.weight_bytes));
    }
    let [(held, bytes), (streamed, streamed_bytes)] = &sides[..] else {
        panic!("two sides")
    };
    assert_eq!(bytes, streamed_bytes);
    let apart = (held.divergence - streamed.divergence).abs() / held.divergence;
    assert!(apart < 1e-4, "{held:?} {streamed:?}");
}

/// A parent with a block missing and a head of its own, made of the tiny one.
fn odd(directory: &Path) -> String {
    let host = CpuOperations::new();
    let parent = Parent::open(&example("tiny")).unwrap();
    let mut candidate = parent.architecture.whole();
    candidate.variants[3] = Variant::Skip;
    candidate.variants[4] = Variant::Attention { kv_groups: 2 };
    let mut model = parent.load(&host).unwrap().slice(&candidate).unwrap();
    let reversed: Vec<usize> = (0..model.embedding.rows()).rev().collect();
    let head = espalier_model::ops::Operations::gather(
        &host,
        &model.embedding,
        &reversed,
        espalier_model::ops::Axis::Rows,
    );
    model.head = Some(head.unwrap());
    model.architecture.tied_embedding = false;
    let path = directory.join("odd");
    export(&model, &parent, &path, Precision::F32, &host).unwrap();
    path.to_str().unwrap().to_owned()
}

fn bytes_of(ingested: &Ingested) -> u64 {
    4 * ingested.architecture.parameters().total
}

#[test]
fn a_streamed_parent_gives_the_bits_of_one_that_is_held() {
    let made = tempfile::tempdir().unwrap();
    for parent in [example("tiny"), odd(made.path())] {
        let mut whole = Bench::new(None);
        let ingested = whole.ingest(&parent);
        let sorted = whole.sorted(&ingested);
        let weights = recover(&mut whole, &sorted, &ingested);
        let expected = everything(&mut whole, &ingested, Some(&weights));

        // The odd parent's trained student is larger than that.
        let mut streamed = Bench::new(Some(bytes_of(&ingested) / 2));
        assert_eq!(streamed.ingest(&parent), ingested);
        let file = whole.store.get_file(&weights.0).unwrap();
        assert_eq!(streamed.store.put_file(&file).unwrap().to_string(), weights.0);
        let found = everything(&mut streamed, &ingested, Some(&weights));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            // As they are written down, so that every bit counts.
            let written = |output| serde_json::to_string(output).unwrap();
            assert_eq!(written(found), written(expected));
        }
    }
}

#[test]
fn an_export_needs_no_room_on_the_device() {
    let mut whole = Bench::new(None);
    let ingested = whole.ingest(&example("tiny"));
    let parent = whole.sorted(&ingested);
    let weights = recover(&mut whole, &parent, &ingested);
    // Less than any of the parent's matrices.
    whole.limit = Some(1000);
    whole.caches = Caches::default();
    let candidate = candidates(&ingested).remove(0);
    for (name, weights) in [("untrained", None), ("trained", Some(weights))] {
        let directory = whole.directory.path().join(name).to_str().unwrap().to_owned();
        let student = Student {
            candidate: candidate.clone(),
            weights,
        };
        let task = TaskSpec::Export(Export {
            parent: parent.clone(),
            student,
            directory: directory.clone(),
        });
        let TaskOutput::Export(exported) = whole.run(&task).unwrap() else {
            panic!("another output")
        };
        let written = Parent::open(&directory).unwrap();
        let expected = ingested.architecture.with_candidate(&candidate).unwrap();
        assert_eq!(written.architecture.parameters().total, exported.parameters);
        assert_eq!(expected.parameters().total, exported.parameters);
        assert_eq!(written.stored_precision(), Precision::Bf16, "as the parent is");
    }
}

#[test]
fn a_device_without_room_for_two_blocks_is_one_error_that_says_what_is_needed() {
    let mut bench = Bench::new(None);
    let ingested = bench.ingest(&example("tiny"));
    bench.limit = Some(bytes_of(&ingested) / 5);
    let task = TaskSpec::Calibrate(Calibrate {
        parent: ingested.parent.clone(),
        shard: ingested.calibration[0].clone(),
    });
    let refused = bench.run(&task).unwrap_err();
    assert_eq!(refused.failure().kind, FailureKind::OutOfMemory);
    let said = refused.to_string();
    let what = "the parent's embedding, its head and two of its blocks needs 1 MiB";
    assert!(said.starts_with(what), "{said}");
}

fn copied(directory: &Path) -> PathBuf {
    for entry in std::fs::read_dir(example("tiny")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, directory.join(path.file_name().unwrap())).unwrap();
    }
    directory.join("model.safetensors")
}

#[test]
fn a_file_that_is_cut_while_it_is_streamed_ends_the_attempt_by_one_error_that_another_may_not_meet() {
    let directory = tempfile::tempdir().unwrap();
    let weights = copied(directory.path());
    let mut bench = Bench::new(None);
    let ingested = bench.ingest(directory.path().to_str().unwrap());
    bench.limit = Some(bytes_of(&ingested) * 6 / 10);
    let task = TaskSpec::Calibrate(Calibrate {
        parent: ingested.parent.clone(),
        shard: ingested.calibration[0].clone(),
    });
    let whole = std::fs::read(&weights).unwrap();
    // The attempt is asked whether it should stop between blocks: then the file is cut, in the middle of the walk.
    let asked = Rc::new(Cell::new(0));
    let (seen, file) = (Rc::clone(&asked), weights.clone());
    let cutting = move || {
        seen.set(seen.get() + 1);
        if seen.get() == 6 {
            std::fs::OpenOptions::new()
                .write(true)
                .open(&file)
                .unwrap()
                .set_len(9000)
                .unwrap();
        }
        None
    };
    let cut = bench.run_until(&task, cutting).unwrap_err();
    assert!(asked.get() >= 6);
    assert!(matches!(cut, Error::Model(_)), "{cut:?}");
    assert_eq!(cut.failure().kind, FailureKind::Error, "{cut}");
    let said = cut.to_string();
    assert!(
        said.contains("model.safetensors") && said.contains("cut short"),
        "{said}"
    );

    // Still cut: no attempt can mend that. Mended: the next one does.
    let changed = bench.run(&task).unwrap_err();
    assert_eq!(changed.failure().kind, FailureKind::Error, "{changed}");
    std::fs::write(&weights, whole).unwrap();
    bench.run(&task).unwrap();

    // Other bytes of the same length are no longer this parent.
    let mut other = std::fs::read(&weights).unwrap();
    *other.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, other).unwrap();
    let changed = bench.run(&task).unwrap_err();
    assert_eq!(changed.failure().kind, FailureKind::Invalid);
    assert!(
        changed.to_string().contains("has changed since the job began"),
        "{changed}"
    );
}

#[test]
fn an_attempt_that_streams_stops_when_it_is_asked() {
    let mut bench = Bench::new(None);
    let ingested = bench.ingest(&example("tiny"));
    bench.limit = Some(bytes_of(&ingested) * 6 / 10);
    let task = TaskSpec::Calibrate(Calibrate {
        parent: ingested.parent.clone(),
        shard: ingested.calibration[0].clone(),
    });
    let asked = Cell::new(0);
    let stop = move || {
        asked.set(asked.get() + 1);
        (asked.get() > 8).then_some(Stop::Now)
    };
    assert!(matches!(bench.run_until(&task, stop), Err(Error::Cancelled)));
    bench.run(&task).unwrap();
}
