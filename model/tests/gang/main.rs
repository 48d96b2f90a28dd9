//! Several ranks that train one student: whatever the layout, the losses and the weights of one rank. Ranks are
//! threads of this process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs
)]

mod checkpoints;
mod errors;

use std::sync::Arc;
use std::time::Duration;

use espalier_arch::Architecture;
use espalier_model::collective::{Gang, local};
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Layout, Operations};
use espalier_model::train::{Grid, Hyperparameters, Layers, MicroBatch, Objective, Trainer, split};
use espalier_model::{Model, StageWeights};
use serde_json::json;

const VOCABULARY: usize = 61;
const STEPS: usize = 20;
const DEADLINE: Duration = Duration::from_secs(600);
/// Sequences of each micro-batch of a step; tokens of each sequence.
const BATCHES: [(usize, usize); 5] = [(2, 5), (1, 7), (3, 4), (1, 5), (2, 6)];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Lesson {
    Text,
    Distil,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    family: &'static str,
    tied: bool,
    lesson: Lesson,
}

fn operations() -> Arc<dyn Operations> {
    Arc::new(CpuOperations::new())
}

fn architecture(case: Case, layers: usize, hidden: usize) -> Architecture {
    let config = json!({
        "model_type": case.family, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 3 * hidden / 2,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": case.tied,
    });
    Architecture::from_config(&config).unwrap()
}

fn student(case: Case) -> Model {
    random(&architecture(case, 3, 24), 1)
}

/// Deeper and wider than the student, so that it is cut elsewhere.
fn parent(case: Case) -> Model {
    random(&architecture(case, 4, 32), 2)
}

/// Weights large enough that two models differ by more than rounding.
fn random(architecture: &Architecture, seed: u64) -> Model {
    let operations = operations();
    let random = Model::random(architecture, seed, operations.as_ref()).unwrap();
    let mut tensors = random.tensors().into_iter();
    Model::from_tensors(architecture, |spec| {
        let (_, tensor) = tensors.next().unwrap();
        let scale = if spec.shape.len() > 1 { 8.0 } else { 1.0 };
        let values = operations
            .download(tensor)?
            .into_iter()
            .map(|value| scale * value);
        operations.upload(&values.collect::<Vec<_>>(), tensor.rows(), tensor.columns())
    })
    .unwrap()
}

fn tokens(count: usize, seed: usize) -> Vec<u32> {
    let token =
        |index: usize| ((index * 7919 + seed * 104_729) * (index + seed + 3) % 65_537 % VOCABULARY) as u32;
    (0..count).map(token).collect()
}

/// The micro-batches of a step: every other step has the same.
fn texts(step: usize) -> Vec<(Vec<u32>, Layout)> {
    let batch = |(index, (sequences, tokens_each)): (usize, &(usize, usize))| {
        let layout = Layout {
            sequences: *sequences,
            tokens: *tokens_each,
        };
        (tokens(layout.rows(), step % 2 * BATCHES.len() + index), layout)
    };
    BATCHES.iter().enumerate().map(batch).collect()
}

fn batches(texts: &[(Vec<u32>, Layout)], lesson: Lesson) -> Vec<MicroBatch<'_>> {
    texts
        .iter()
        .map(|(tokens, layout)| MicroBatch {
            tokens,
            layout: *layout,
            objective: match lesson {
                Lesson::Text => Objective::NextToken,
                Lesson::Distil => Objective::FromParent,
            },
        })
        .collect()
}

fn hyperparameters() -> Hyperparameters {
    Hyperparameters {
        learning_rate: 2e-3,
        weight_decay: 0.1,
        ..Hyperparameters::default()
    }
}

/// Losses, norms and the weights after them.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(String, Vec<f32>)>,
}

fn weights(trainer: &Trainer) -> Vec<(String, Vec<f32>)> {
    let named = trainer.weights().named_tensors().into_iter();
    named
        .map(|(spec, tensor)| (spec.name, operations().download(tensor).unwrap()))
        .collect()
}

/// Which micro-batches a replica has: uneven, and sometimes none.
fn share(step: usize, replica: usize, replicas: usize) -> Vec<usize> {
    (0..BATCHES.len())
        .filter(|index| (index * index + step) % 7 % replicas == replica)
        .collect()
}

fn train(trainer: &mut Trainer, case: Case, steps: std::ops::Range<usize>, of: (usize, usize)) -> Run {
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in steps {
        let texts = texts(step);
        let all = batches(&texts, case.lesson);
        let predictions = all.iter().map(MicroBatch::predictions).sum();
        let own: Vec<MicroBatch<'_>> = share(step, of.0, of.1)
            .into_iter()
            .map(|index| all[index])
            .collect();
        trainer.accumulate_all(&own, predictions).unwrap();
        let report = trainer
            .update(&hyperparameters(), predictions)
            .unwrap()
            .read()
            .unwrap();
        losses.push(report.loss);
        norms.push(report.gradient_norm);
    }
    Run {
        losses,
        norms,
        weights: weights(trainer),
    }
}

fn alone(case: Case) -> Run {
    let mut trainer = Trainer::new(operations(), &student(case), usize::MAX)
        .unwrap()
        .with_parent(StageWeights::whole(&parent(case)).unwrap())
        .unwrap();
    train(&mut trainer, case, 0..STEPS, (0, 1))
}

/// Fails where another rank has given up meanwhile.
fn joined(
    gang: &local::LocalGang,
    case: Case,
    layers: Layers,
    bucket_elements: usize,
) -> espalier_model::Result<Trainer> {
    let grid = Grid::form(gang, layers)?.with_bucket_elements(bucket_elements);
    let stage = grid.stage();
    let part = |model: &Model| {
        let ranges = split::cut(&model.architecture, layers.stages, 6).unwrap();
        StageWeights::of(model, ranges[stage].clone()).unwrap()
    };
    let trainer = Trainer::join(operations(), &part(&student(case)), grid, 20_000)?;
    assert_eq!(gang.rank() / layers.replicas, stage);
    trainer.with_parent(part(&parent(case)))
}

/// The runs of every rank.
fn together(case: Case, layers: Layers, bucket_elements: usize) -> Vec<Run> {
    local::run(layers.stages * layers.replicas, DEADLINE, |gang| {
        let mut trainer = joined(&gang, case, layers, bucket_elements)?;
        let replica = gang.rank() % layers.replicas;
        Ok(train(&mut trainer, case, 0..STEPS, (replica, layers.replicas)))
    })
    .unwrap()
}

fn relative(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = found.iter().zip(expected);
    norm(&mut pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)))
        / norm(&mut expected.iter().map(|x| f64::from(*x))).max(1e-12)
}

/// Every rank's losses are those of one rank, and all ranks that hold a tensor hold the same.
fn assert_same(case: Case, layers: Layers, found: &[Run], expected: &Run) {
    let what = format!("{case:?}, {layers:?}");
    let (mut worst_loss, mut worst_weights) = (0.0_f64, 0.0_f64);
    for run in found {
        assert_eq!(run.losses, found[0].losses, "{what}: every rank reads one loss");
        for (found, expected) in run.losses.iter().zip(&expected.losses) {
            worst_loss = worst_loss.max((found / expected - 1.0).abs());
        }
        for (found, expected) in run.norms.iter().zip(&expected.norms) {
            assert!(
                (found / expected - 1.0).abs() < 1e-4,
                "{what}: norm {found}, {expected}"
            );
        }
    }
    for (name, expected) in &expected.weights {
        let held = found
            .iter()
            .flat_map(|run| &run.weights)
            .filter(|(other, _)| other == name);
        let held: Vec<_> = held.map(|(_, values)| values).collect();
        assert!(!held.is_empty(), "{what}: {name} is nowhere");
        for values in &held {
            assert_eq!(*values, held[0], "{what}: {name} differs between ranks");
            // A key's bias has no gradient but rounding, of which AdamW makes a step like any other.
            if !name.ends_with("k_proj.bias") {
                worst_weights = worst_weights.max(relative(values, expected));
            }
        }
    }
    println!("{what}: losses within {worst_loss:.1e}, weights within {worst_weights:.1e}");
    assert!(worst_loss < 1e-5, "{what}: {worst_loss}");
    assert!(worst_weights < 1e-5, "{what}: {worst_weights}");
    assert!(
        expected.losses[expected.losses.len() - 2] < expected.losses[0],
        "{what}: nothing was learnt"
    );
}

const TEXT: Case = Case {
    family: "llama",
    tied: true,
    lesson: Lesson::Text,
};
const DISTIL: Case = Case {
    family: "qwen3",
    tied: false,
    lesson: Lesson::Distil,
};

#[test]
fn ranks_that_share_out_an_optimiser_train_like_one() {
    for case in [TEXT, DISTIL] {
        let expected = alone(case);
        for (ranks, bucket_elements) in [(2, 500), (3, 1), (4, 3000), (2, 1 << 20)] {
            let layers = Layers {
                stages: 1,
                replicas: ranks,
            };
            assert_same(case, layers, &together(case, layers, bucket_elements), &expected);
        }
    }
}

#[test]
fn stages_in_a_row_train_like_one_rank() {
    let untied = Case { tied: false, ..TEXT };
    let tied = Case { tied: true, ..DISTIL };
    let biased = Case {
        family: "qwen2",
        ..DISTIL
    };
    for case in [TEXT, untied, DISTIL, tied, biased] {
        let expected = alone(case);
        for stages in [2, 3] {
            let layers = Layers { stages, replicas: 1 };
            assert_same(case, layers, &together(case, layers, 1), &expected);
        }
    }
}

#[test]
fn stages_with_replicas_train_like_one_rank() {
    let untied = Case { tied: false, ..TEXT };
    let tied = Case { tied: true, ..DISTIL };
    for case in [TEXT, untied, DISTIL, tied] {
        let expected = alone(case);
        for (stages, replicas) in [(2, 2), (3, 2)] {
            let layers = Layers { stages, replicas };
            assert_same(case, layers, &together(case, layers, 2000), &expected);
        }
    }
}

fn layers((stages, replicas): (usize, usize)) -> Layers {
    Layers { stages, replicas }
}
