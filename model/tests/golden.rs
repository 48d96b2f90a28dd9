//! Logits, gradients, decoding, sorting and resume of tiny models of every family, against transformers in
//! float64 (`tests/parity/golden.py` makes the files; `ESPALIER_GOLDEN` names another directory of them).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs
)]

use std::path::PathBuf;
use std::sync::Arc;

use espalier_arch::{Architecture, BlockShape, Candidate, Variant};
use espalier_model::decode::Session;
use espalier_model::importance::Importance;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::sort::Permutation;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Trainer};
use espalier_model::{Model, Tensor};
use safetensors::SafeTensors;

/// Sequences of every golden case.
const SEQUENCES: usize = 2;

struct Golden {
    name: String,
    operations: Arc<dyn Operations>,
    model: Arc<Model>,
    tokens: Vec<u32>,
    layout: Layout,
    logits: Vec<f32>,
    loss: f64,
    gradients: Vec<(String, Vec<f32>)>,
}

fn directory() -> PathBuf {
    std::env::var_os("ESPALIER_GOLDEN").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
        PathBuf::from,
    )
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file
        .tensor(name)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let (chunks, _) = tensor.data().as_chunks::<4>();
    chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn golden(name: &str) -> Golden {
    let config = std::fs::read(directory().join(format!("{name}.config.json"))).unwrap();
    let architecture = Architecture::from_config(&serde_json::from_slice(&config).unwrap()).unwrap();
    let bytes = std::fs::read(directory().join(format!("{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let operations: Arc<dyn Operations> = Arc::new(CpuOperations::new());
    let model = Model::from_tensors(&architecture, |spec| {
        let data = floats(&file, &format!("weight/{}", spec.name));
        let columns = *spec.shape.last().unwrap();
        operations.upload(&data, data.len() / columns, columns)
    })
    .unwrap();
    let tokens: Vec<u32> = floats(&file, "tokens")
        .iter()
        .map(|token| *token as u32)
        .collect();
    let names: Vec<String> = file
        .names()
        .iter()
        .filter_map(|name| name.strip_prefix("gradient/"))
        .map(str::to_owned)
        .collect();
    Golden {
        name: name.to_owned(),
        operations,
        model: Arc::new(model),
        layout: Layout {
            sequences: SEQUENCES,
            tokens: tokens.len() / SEQUENCES,
        },
        tokens,
        logits: floats(&file, "logits"),
        loss: f64::from(floats(&file, "loss")[0]),
        gradients: names
            .into_iter()
            .map(|name| {
                let values = floats(&file, &format!("gradient/{name}"));
                (name, values)
            })
            .collect(),
    }
}

fn cases() -> Vec<Golden> {
    let mut names: Vec<String> = std::fs::read_dir(directory())
        .unwrap()
        .filter_map(|entry| {
            entry
                .unwrap()
                .file_name()
                .to_str()?
                .strip_suffix(".safetensors")
                .map(str::to_owned)
        })
        .collect();
    names.sort();
    assert!(names.len() >= 9, "golden cases are missing: {names:?}");
    names.iter().map(|name| golden(name)).collect()
}

fn runner(golden: &Golden, model: &Arc<Model>) -> Runner {
    Runner::new(Arc::clone(&golden.operations), Arc::clone(model))
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

fn batch(golden: &Golden) -> MicroBatch<'_> {
    MicroBatch {
        tokens: &golden.tokens,
        layout: golden.layout,
        objective: Objective::NextToken,
    }
}

fn bits(operations: &dyn Operations, model: &Model) -> Vec<Vec<u32>> {
    let values = |tensor: &Tensor| operations.download(tensor).unwrap();
    model
        .tensors()
        .into_iter()
        .map(|(_, t)| values(t).into_iter().map(f32::to_bits).collect())
        .collect()
}

#[test]
fn logits_equal_those_of_transformers() {
    for golden in cases() {
        let logits = runner(&golden, &golden.model)
            .logits(&golden.tokens, golden.layout)
            .unwrap();
        let found = golden.operations.download(&logits).unwrap();
        let difference = largest_difference(&found, &golden.logits);
        println!("{} logits differ by at most {difference:.2e}", golden.name);
        assert!(difference < 1e-4, "{}: {difference}", golden.name);
    }
}

#[test]
fn every_gradient_equals_that_of_transformers() {
    for golden in cases() {
        let mut trainer = Trainer::new(Arc::clone(&golden.operations), &golden.model, usize::MAX).unwrap();
        let predictions = batch(&golden).predictions();
        trainer.accumulate(&batch(&golden), predictions).unwrap();
        let loss = trainer.summed_loss().unwrap() / predictions as f64;
        assert!(
            (loss - golden.loss).abs() < 1e-5,
            "{}: loss {loss}, expected {}",
            golden.name,
            golden.loss
        );
        let found = trainer.gradients().named_tensors();
        assert_eq!(found.len(), golden.gradients.len(), "{}: parameters", golden.name);
        let mut worst = 0.0_f64;
        for (spec, tensor) in found {
            let (_, expected) = golden
                .gradients
                .iter()
                .find(|(name, _)| *name == spec.name)
                .unwrap();
            let found = golden.operations.download(tensor).unwrap();
            let error = norm(found.iter().zip(expected).map(|(a, b)| a - b));
            let scale = norm(expected.iter().copied()).max(1e-12);
            worst = worst.max(error / scale);
            assert!(
                error / scale < 1e-4,
                "{} {}: relative error {}",
                golden.name,
                spec.name,
                error / scale
            );
        }
        println!(
            "{} gradients differ by at most {worst:.2e}, relative",
            golden.name
        );
    }
}

#[test]
fn rebuilding_blocks_gives_the_same_bits_as_keeping_their_activations() {
    for golden in cases() {
        let trained = |activation_bytes| {
            let operations = Arc::clone(&golden.operations);
            let mut trainer = Trainer::new(operations, &golden.model, activation_bytes).unwrap();
            trainer
                .step(&[batch(&golden)], &Hyperparameters::default())
                .unwrap();
            bits(golden.operations.as_ref(), &trainer.model().unwrap())
        };
        let kept = trained(usize::MAX);
        assert_eq!(kept, trained(0), "{}", golden.name);
        assert_eq!(kept, trained(20_000), "{}", golden.name);
    }
}

#[test]
fn a_resumed_trainer_ends_where_an_uninterrupted_one_does() {
    let golden = golden("qwen3");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.safetensors");
    let hyperparameters = Hyperparameters {
        weight_decay: 0.1,
        ..Hyperparameters::default()
    };
    let mut whole = Trainer::new(Arc::clone(&golden.operations), &golden.model, 0).unwrap();
    whole.step(&[batch(&golden)], &hyperparameters).unwrap();
    whole.save(&path).unwrap();
    let mut resumed = Trainer::load(Arc::clone(&golden.operations), &path, 0).unwrap();
    for _ in 0..2 {
        let expected = whole.step(&[batch(&golden)], &hyperparameters).unwrap();
        assert_eq!(
            resumed.step(&[batch(&golden)], &hyperparameters).unwrap(),
            expected
        );
    }
    assert_eq!(
        bits(golden.operations.as_ref(), &resumed.model().unwrap()),
        bits(golden.operations.as_ref(), &whole.model().unwrap())
    );
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = Trainer::load(Arc::clone(&golden.operations), &path, 0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("state.safetensors"), "{error}");
}

#[test]
fn distillation_brings_a_smaller_student_closer_to_its_parent() {
    let golden = golden("llama");
    let blocks = golden.model.architecture.blocks.iter();
    let variants = blocks
        .map(|block| match &block.shape {
            BlockShape::Attention(_) => Variant::Attention { kv_groups: 1 },
            _ => Variant::Mlp { channels: 12 },
        })
        .collect();
    let student = golden.model.slice(&Candidate { variants }).unwrap();
    let parent = runner(&golden, &golden.model);
    let hidden = parent.hidden_states(&golden.tokens, golden.layout).unwrap();
    let mut trainer = Trainer::new(Arc::clone(&golden.operations), &student, 0).unwrap();
    let objective = Objective::Distil {
        hidden: &hidden,
        head: golden.model.head(),
    };
    let batch = MicroBatch {
        tokens: &golden.tokens,
        layout: golden.layout,
        objective,
    };
    let hyperparameters = Hyperparameters {
        learning_rate: 1e-2,
        ..Hyperparameters::default()
    };
    let losses: Vec<f64> = (0..30)
        .map(|_| trainer.step(&[batch], &hyperparameters).unwrap().loss)
        .collect();
    assert!(losses[29] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn decoding_token_by_token_gives_the_logits_of_the_whole_sequence() {
    for golden in cases()
        .into_iter()
        .filter(|golden| golden.name != "llama_dynamic")
    {
        let Layout { sequences, tokens } = golden.layout;
        let operations = Arc::clone(&golden.operations);
        let mut session = Session::new(operations, Arc::clone(&golden.model), sequences, tokens).unwrap();
        let column = |start: usize, count: usize| -> Vec<u32> {
            golden
                .tokens
                .chunks(tokens)
                .flat_map(|sequence| sequence[start..start + count].to_vec())
                .collect()
        };
        let vocabulary = golden.model.architecture.vocab_size;
        let expected = |position: usize| -> Vec<f32> {
            let rows = golden.logits.chunks(vocabulary * tokens);
            rows.flat_map(|rows| rows[position * vocabulary..(position + 1) * vocabulary].to_vec())
                .collect()
        };
        let logits = session.prefill(&column(0, 5)).unwrap();
        let difference = largest_difference(&golden.operations.download(&logits).unwrap(), &expected(4));
        assert!(difference < 1e-4, "{} prefill: {difference}", golden.name);
        for position in 5..tokens {
            let logits = session.decode(&column(position, 1)).unwrap();
            let found = golden.operations.download(&logits).unwrap();
            let difference = largest_difference(&found, &expected(position));
            assert!(difference < 1e-4, "{} at {position}: {difference}", golden.name);
        }
        assert!(session.decode(&column(0, 1)).is_err(), "beyond the capacity");
    }
}

#[test]
fn a_sorted_parent_computes_the_same_function_and_its_prefixes_are_views() {
    for golden in cases() {
        let parent = runner(&golden, &golden.model);
        let importance = Importance::measure(&parent, &golden.tokens, golden.layout, 1).unwrap();
        let operations = golden.operations.as_ref();
        let permutation = Permutation::from_importance(&importance, &golden.model, operations).unwrap();
        let sorted = Arc::new(permutation.apply(&golden.model, operations).unwrap());
        let logits = runner(&golden, &sorted)
            .logits(&golden.tokens, golden.layout)
            .unwrap();
        let difference = largest_difference(&operations.download(&logits).unwrap(), &golden.logits);
        assert!(difference < 1e-4, "{}: {difference}", golden.name);

        let whole = sorted.slice(&sorted.architecture.whole()).unwrap();
        assert_eq!(whole.parameters(), sorted.parameters());
        let (slice, own) = (whole.tensors(), sorted.tensors());
        let mut pairs = slice.iter().zip(&own);
        assert!(
            pairs.all(|((_, slice), (_, own))| slice.shares_storage_with(own)),
            "a slice copies nothing"
        );
    }
}

#[test]
fn importance_of_shards_adds_up_and_survives_its_file_to_the_bit() {
    let golden = golden("llama");
    let parent = runner(&golden, &golden.model);
    let one = Layout {
        sequences: 1,
        ..golden.layout
    };
    let mut sum: Option<Importance> = None;
    for shard in golden.tokens.chunks(one.tokens) {
        let part = Importance::measure(&parent, shard, one, 1).unwrap();
        match &mut sum {
            Some(sum) => sum.add(&part).unwrap(),
            None => sum = Some(part),
        }
    }
    let whole = Importance::measure(&parent, &golden.tokens, golden.layout, 1).unwrap();
    assert_eq!(sum.unwrap(), whole);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("importance.json");
    whole.save(&path).unwrap();
    assert_eq!(Importance::load(&path).unwrap(), whole);
}
