//! Small models trained and run on a GPU beside the CPU backend, within what bf16 activations allow. Where there is
//! no GPU each test says so and ends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs
)]

use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::decode::Session;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::cuda::{CudaOperations, Error, Options};
use espalier_model::ops::{Axis, Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Trainer};
use espalier_model::{ElementType, Model};
use serde_json::{Value, json};

const VOCABULARY: usize = 101;
const LAYOUT: Layout = Layout {
    sequences: 3,
    tokens: 19,
};

/// The first GPU with fresh memory poisoned, so that nobody reads what nobody wrote; none where there is none.
fn gpu() -> Option<Arc<dyn Operations>> {
    let options = Options {
        memory_limit: Some(4 << 30),
        poison: true,
        ..Options::default()
    };
    match CudaOperations::open(0, options) {
        Ok(operations) => Some(Arc::new(operations)),
        Err(espalier_model::Error::Cuda(
            reason @ (Error::NoDriver
            | Error::NoDevice
            | Error::DriverTooOld { .. }
            | Error::LibraryMissing { .. }),
        )) => {
            println!("skipped, no GPU here: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn config(family: &str) -> Value {
    let mut config = json!({
        "model_type": family, "hidden_act": "silu", "hidden_size": 72, "intermediate_size": 77,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": family != "llama",
    });
    if family == "qwen2" {
        // Its head is hidden / heads wide; its projections have biases.
        config["hidden_size"] = json!(96);
    }
    config
}

/// Numbers in −1..1, the same for the same seed.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..16).for_each(|_| {
        next();
    });
    (0..count).map(|_| next()).collect()
}

fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let numbers = numbers(count, seed).into_iter();
    numbers
        .map(|x| ((x + 1.0) / 2.0 * VOCABULARY as f32) as u32)
        .map(|token| token.min(VOCABULARY as u32 - 1))
        .collect()
}

/// A model whose weights are the same bits on every backend: bf16 already.
fn model(operations: &dyn Operations, family: &str, seed: u64) -> Model {
    let architecture = Architecture::from_config(&config(family)).unwrap();
    let mut seed = seed;
    Model::from_tensors(&architecture, |spec| {
        seed += 1;
        let columns = *spec.shape.last().unwrap();
        let count = spec.shape.iter().product::<usize>();
        let (around, reach) = if spec.name.ends_with("norm.weight") {
            (1.0, 0.2)
        } else {
            (0.0, 0.2)
        };
        let data: Vec<f32> = numbers(count, seed)
            .iter()
            .map(|x| half::bf16::from_f32(around + reach * x).to_f32())
            .collect();
        let tensor = operations.upload(&data, count / columns, columns)?;
        if spec.shape.len() == 1 {
            return Ok(tensor);
        }
        operations.copy_as(&tensor, operations.activation_type())
    })
    .unwrap()
}

fn relative(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = found
        .iter()
        .zip(expected)
        .map(|(a, b)| f64::from(*a) - f64::from(*b));
    norm(&mut { difference }) / norm(&mut expected.iter().map(|x| f64::from(*x))).max(1e-12)
}

/// What is compared of one backend's run.
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Of the first step, by tensor.
    gradients: Vec<(String, Vec<f32>)>,
    weights: Vec<f32>,
}

fn elements(operations: &dyn Operations, model: &Model) -> Vec<(String, Vec<f32>)> {
    let tensors = model.named_tensors().into_iter();
    tensors
        .map(|(spec, tensor)| (spec.name, operations.download(tensor).unwrap()))
        .collect()
}

fn train(operations: &Arc<dyn Operations>, family: &str, distil: bool, activation_bytes: usize) -> Run {
    let student = model(operations.as_ref(), family, 1);
    let parent = Runner::new(
        Arc::clone(operations),
        Arc::new(model(operations.as_ref(), family, 500)),
    );
    let mut trainer = Trainer::new(Arc::clone(operations), &student, activation_bytes).unwrap();
    let hyperparameters = Hyperparameters {
        learning_rate: 2e-3,
        ..Hyperparameters::default()
    };
    let (mut losses, mut norms, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..6 {
        let halves = [tokens(LAYOUT.rows(), 2), tokens(LAYOUT.rows(), 3)];
        let hidden = halves
            .each_ref()
            .map(|half| parent.hidden_states(half, LAYOUT).unwrap());
        let batch = |index: usize| MicroBatch {
            tokens: &halves[index],
            layout: LAYOUT,
            objective: if distil {
                Objective::Distil {
                    hidden: &hidden[index],
                    head: parent.model().head(),
                }
            } else {
                Objective::NextToken
            },
        };
        let predictions = 2 * batch(0).predictions();
        for index in 0..2 {
            trainer.accumulate(&batch(index), predictions).unwrap();
        }
        if step == 0 {
            gradients = elements(
                operations.as_ref(),
                &trainer.gradients().clone().into_model().unwrap(),
            );
        }
        let report = trainer
            .update(&hyperparameters, predictions)
            .unwrap()
            .read()
            .unwrap();
        losses.push(report.loss);
        norms.push(report.gradient_norm);
    }
    let weights = elements(operations.as_ref(), &trainer.model().unwrap());
    Run {
        losses,
        norms,
        gradients,
        weights: weights.into_iter().flat_map(|(_, weights)| weights).collect(),
    }
}

#[test]
fn training_on_a_gpu_follows_training_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu: Arc<dyn Operations> = Arc::new(CpuOperations::new());
    for (family, distil) in [
        ("llama", false),
        ("llama", true),
        ("qwen3", false),
        ("qwen2", false),
        ("qwen2", true),
    ] {
        let expected = train(&cpu, family, distil, usize::MAX);
        let found = train(&gpu, family, distil, usize::MAX);
        println!(
            "{family}, distil {distil}: losses {:.4?} (CPU {:.4?}), norms {:.4?} (CPU {:.4?})",
            found.losses, expected.losses, found.norms, expected.norms
        );
        for (found, expected) in found.losses.iter().zip(&expected.losses) {
            assert!((found / expected - 1.0).abs() < 2e-2, "{found} {expected}");
        }
        let (mut all, mut all_expected) = (Vec::new(), Vec::new());
        for ((name, gradient), (_, expected)) in found.gradients.iter().zip(&expected.gradients) {
            let error = relative(gradient, expected);
            // A key's bias shifts every score of a query alike: its gradient is zero but for rounding.
            assert!(error < 6e-2 || name.ends_with("k_proj.bias"), "{name}: {error}");
            all.extend_from_slice(gradient);
            all_expected.extend_from_slice(expected);
        }
        let error = relative(&all, &all_expected);
        println!("{family}, distil {distil}: gradient {error:.1e} off");
        assert!(error < 3e-2, "{error}");
        assert!(found.losses.last() < found.losses.first(), "{:?}", found.losses);
    }
}

#[test]
fn a_step_on_a_gpu_gives_the_same_bits_twice_and_when_activations_are_computed_again() {
    let Some(gpu) = gpu() else { return };
    let first = train(&gpu, "llama", false, usize::MAX);
    for activation_bytes in [usize::MAX, 0] {
        let again = train(&gpu, "llama", false, activation_bytes);
        assert_eq!(first.losses, again.losses);
        assert!(first.weights == again.weights);
    }
}

/// Logits after a prompt, after six steps of a token a sequence, and after two tokens more and two steps: steps are run,
/// recorded, replayed, and replayed after what was no step.
fn decode(operations: &Arc<dyn Operations>, family: &str, sequences: usize) -> Vec<Vec<f32>> {
    let text = tokens(sequences * 15, 7);
    let part = |from: usize, to: usize| -> Vec<u32> {
        let of = |sequence: &[u32]| sequence[from..to].to_vec();
        text.chunks(15).flat_map(of).collect()
    };
    let model = Arc::new(model(operations.as_ref(), family, 1));
    let mut session = Session::new(Arc::clone(operations), model, sequences, 24).unwrap();
    let mut logits = vec![session.prefill(&part(0, 5)).unwrap()];
    for at in 5..11 {
        logits.push(session.decode(&part(at, at + 1)).unwrap());
    }
    logits.push(session.prefill(&part(11, 13)).unwrap());
    for at in 13..15 {
        logits.push(session.decode(&part(at, at + 1)).unwrap());
    }
    let download = |logits| operations.download(logits).unwrap();
    logits.iter().map(download).collect()
}

#[test]
fn decoding_on_a_gpu_gives_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu: Arc<dyn Operations> = Arc::new(CpuOperations::new());
    // Biases and norms of heads; few sequences, which take norms into their products, and more.
    for family in ["llama", "qwen2", "qwen3"] {
        for sequences in [1, 2, 6] {
            let (found, expected) = (decode(&gpu, family, sequences), decode(&cpu, family, sequences));
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = relative(found, expected);
                assert!(
                    error < 2e-2,
                    "{family}, {sequences} sequences, step {step}: {error}"
                );
            }
        }
    }
}

#[test]
fn greedy_steps_that_a_gpu_takes_by_itself_are_those_that_the_host_asks_for() {
    let Some(gpu) = gpu() else { return };
    for sequences in [1, 5] {
        let model = Arc::new(model(gpu.as_ref(), "llama", 1));
        let prompt = tokens(sequences * 4, 3);
        let new = || Session::new(Arc::clone(&gpu), Arc::clone(&model), sequences, 32).unwrap();
        let mut session = new();
        let mut asked = vec![Vec::new(); sequences];
        let mut logits = session.prefill(&prompt).unwrap();
        if sequences > 1 {
            // Steps that leave nothing behind.
            session.settle().unwrap();
            assert_eq!(session.length(), 4);
        }
        for _ in 0..20 {
            let next = session.likeliest(&logits).unwrap();
            for (sequence, token) in asked.iter_mut().zip(&next) {
                sequence.push(*token);
            }
            logits = session.decode(&next).unwrap();
        }
        let mut session = new();
        assert_eq!(session.generate_greedy(&prompt, 20, &[]).unwrap(), asked);
        // Once more in the same session, which was recorded; a token that ends a sequence is not part of it.
        session.clear();
        let stop = asked[0][9];
        let cut = |sequence: &Vec<u32>| {
            sequence
                .iter()
                .copied()
                .take_while(|token| *token != stop)
                .collect()
        };
        let expected: Vec<Vec<u32>> = asked.iter().map(cut).collect();
        assert_eq!(session.generate_greedy(&prompt, 20, &[stop]).unwrap(), expected);
    }
}

#[test]
fn what_is_asked_seldom_is_the_same_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let cpu: Arc<dyn Operations> = Arc::new(CpuOperations::new());
    let data: Vec<f32> = numbers(24 * 18, 5)
        .iter()
        .map(|x| half::bf16::from_f32(*x).to_f32())
        .collect();
    let run = |operations: &Arc<dyn Operations>, element_type: ElementType| {
        let plain = operations.upload(&data, 24, 18).unwrap();
        let tensor = operations.copy_as(&plain, element_type).unwrap();
        let view = tensor.columns_from(2, 12).unwrap();
        let download = |tensor| operations.download(&tensor).unwrap();
        let gathered = [
            download(operations.gather(&view, &[5, 0, 23, 5], Axis::Rows).unwrap()),
            download(operations.gather(&view, &[11, 3], Axis::Columns).unwrap()),
            download(
                operations
                    .concatenate(&[&view, &view.narrow_rows(3, 2).unwrap()])
                    .unwrap(),
            ),
            download(view.clone()),
            {
                let mut whole = operations.contiguous(&tensor).unwrap();
                let flat = operations.flatten(&[(3, &whole)], 5, 100, element_type).unwrap();
                operations.clear(&mut [&mut whole]).unwrap();
                let window = flat.window(3, 24, 18).unwrap();
                [download(flat), download(window), download(whole)].concat()
            },
        ];
        let likeliest = operations.likeliest(&view).unwrap();
        let squares = operations.column_squares(&view).unwrap();
        let products = operations.tile_products(&view, &view, 6).unwrap();
        (gathered, likeliest, [squares, products].concat())
    };
    for element_type in [ElementType::F32, ElementType::Bf16] {
        let (expected, found) = (run(&cpu, ElementType::F32), run(&gpu, element_type));
        assert_eq!(expected.0, found.0);
        assert_eq!(expected.1, found.1);
        for (expected, found) in expected.2.iter().zip(&found.2) {
            assert!((expected / found - 1.0).abs() < 1e-5, "{expected} {found}");
        }
    }
}
