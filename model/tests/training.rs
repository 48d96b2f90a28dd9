//! What the golden set leaves out: batches that accumulate, weights that are saved, greedy text, and the
//! perceptron without a gate, which no golden family has.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::sync::Arc;

use espalier_arch::{Activation, Architecture, BlockShape, Mlp};
use espalier_model::block::{self, Context};
use espalier_model::decode::Session;
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::ops::{Layout, Operations};
use espalier_model::runner::Runner;
use espalier_model::train::{Hyperparameters, MicroBatch, Objective, Trainer};
use espalier_model::{BlockWeights, ElementType, MlpWeights, Model, Tensor};
use serde_json::json;

const VOCABULARY: usize = 61;

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
    let scaled = numbers(count, seed)
        .into_iter()
        .map(|x| (x + 1.0) / 2.0 * VOCABULARY as f32);
    scaled.map(|x| (x as u32).min(VOCABULARY as u32 - 1)).collect()
}

fn operations() -> Arc<dyn Operations> {
    Arc::new(CpuOperations::new())
}

/// Random weights in the shape of a small Qwen3.
fn model(operations: &dyn Operations, seed: u64) -> Model {
    let config = json!({
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 36,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    let architecture = Architecture::from_config(&config).unwrap();
    let mut seed = seed;
    Model::from_tensors(&architecture, |spec| {
        seed += 1;
        let columns = *spec.shape.last().unwrap();
        let count = spec.shape.iter().product::<usize>();
        let around = if spec.shape.len() == 1 { 1.0 } else { 0.0 };
        let data: Vec<f32> = numbers(count, seed).iter().map(|x| around + 0.4 * x).collect();
        operations.upload(&data, count / columns, columns)
    })
    .unwrap()
}

fn elements(operations: &dyn Operations, model: &Model) -> Vec<f32> {
    let tensors = model.tensors().into_iter();
    tensors
        .flat_map(|(_, tensor)| operations.download(tensor).unwrap())
        .collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn batches_accumulated_one_by_one_give_the_loss_and_the_gradient_of_one_batch() {
    let operations = operations();
    let student = model(operations.as_ref(), 1);
    let parent = Runner::new(
        Arc::clone(&operations),
        Arc::new(model(operations.as_ref(), 1000)),
    );
    let text = tokens(5 * 9, 2);
    // Parts of different sizes, so that a mean of means would differ from the mean.
    for (distil, parts) in [
        (true, vec![5, 2, 2]),
        (true, vec![9]),
        (false, vec![4, 5]),
        (false, vec![9]),
    ] {
        let run = |sizes: &[usize]| {
            let mut trainer = Trainer::new(Arc::clone(&operations), &student, 0).unwrap();
            let mut rest = text.as_slice();
            let mut predictions = 0;
            for size in sizes {
                let (tokens, left) = rest.split_at(size * 5);
                rest = left;
                let layout = Layout {
                    sequences: *size,
                    tokens: 5,
                };
                let hidden = parent.hidden_states(tokens, layout).unwrap();
                let head = parent.model().head();
                let objective = if distil {
                    Objective::Distil {
                        hidden: &hidden,
                        head,
                    }
                } else {
                    Objective::NextToken
                };
                let batch = MicroBatch {
                    tokens,
                    layout,
                    objective,
                };
                predictions += batch.predictions();
                trainer.accumulate(&batch, if distil { 45 } else { 36 }).unwrap();
            }
            (
                trainer.summed_loss().unwrap(),
                predictions,
                elements(
                    operations.as_ref(),
                    &trainer.gradients().clone().into_model().unwrap(),
                ),
            )
        };
        let (sum, predictions, gradient) = run(&parts);
        let (expected_sum, expected_predictions, expected) = run(&[9]);
        assert_eq!(predictions, expected_predictions);
        assert!((sum / expected_sum - 1.0).abs() < 1e-6, "{sum} {expected_sum}");
        let difference = norm(gradient.iter().zip(&expected).map(|(a, b)| f64::from(a - b)));
        let scale = norm(expected.iter().copied().map(f64::from));
        assert!(
            scale > 0.1 && difference / scale < 1e-5,
            "{parts:?}: {difference} of {scale}"
        );
    }
}

#[test]
fn a_step_that_is_not_finite_leaves_the_student_as_it_was_and_can_be_followed_by_another() {
    let operations = operations();
    let student = model(operations.as_ref(), 1);
    let mut trainer = Trainer::new(Arc::clone(&operations), &student, 0).unwrap();
    let (text, layout) = (
        tokens(10, 2),
        Layout {
            sequences: 2,
            tokens: 5,
        },
    );
    let nan = operations.upload(&[f32::NAN; 240], 10, 24).unwrap();
    let broken = MicroBatch {
        tokens: &text,
        layout,
        objective: Objective::Distil {
            hidden: &nan,
            head: student.head(),
        },
    };
    let right = MicroBatch {
        objective: Objective::NextToken,
        ..broken
    };
    let step = |trainer: &mut Trainer, batch| trainer.step(&[batch], &Hyperparameters::default());
    let error = step(&mut trainer, broken).unwrap_err().to_string();
    assert!(error.starts_with("the loss is not finite"), "{error}");
    assert_eq!(trainer.steps(), 0);
    assert_eq!(
        elements(operations.as_ref(), &trainer.model().unwrap()),
        elements(operations.as_ref(), &student)
    );
    let mut undisturbed = Trainer::new(Arc::clone(&operations), &student, 0).unwrap();
    assert_eq!(
        step(&mut trainer, right).unwrap(),
        step(&mut undisturbed, right).unwrap()
    );
    assert_eq!(
        elements(operations.as_ref(), &trainer.model().unwrap()),
        elements(operations.as_ref(), &undisturbed.model().unwrap())
    );
}

#[test]
fn saved_weights_come_back_to_the_bit_and_a_cut_file_is_an_error() {
    let operations = operations();
    let model = model(operations.as_ref(), 3);
    let smaller = {
        let mut candidate = model.architecture.whole();
        candidate.variants[0] = espalier_arch::Variant::Attention { kv_groups: 1 };
        candidate.variants[1] = espalier_arch::Variant::Mlp { channels: 5 };
        candidate.variants[2] = espalier_arch::Variant::Skip;
        model.slice(&candidate).unwrap()
    };
    let home = tempfile::tempdir().unwrap();
    for (name, model) in [("whole", &model), ("views", &smaller)] {
        let path = home.path().join(name);
        model.save(&path, operations.as_ref()).unwrap();
        let again = Model::load(&path, operations.as_ref()).unwrap();
        assert_eq!(again.architecture, model.architecture);
        let bits = |model: &Model| -> Vec<u32> {
            elements(operations.as_ref(), model)
                .into_iter()
                .map(f32::to_bits)
                .collect()
        };
        assert_eq!(bits(&again), bits(model), "{name}");
        let bytes = std::fs::read(&path).unwrap();
        for length in [0, 7, 100, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..length]).unwrap();
            Model::load(&path, operations.as_ref()).unwrap_err();
        }
    }
    assert_eq!(
        std::fs::read_dir(home.path()).unwrap().count(),
        2,
        "nothing partial stays"
    );
}

/// The likeliest tokens after `prompt`, each from the whole sequence anew.
fn greedy_without_cache(runner: &Runner, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let layout = Layout {
            sequences: 1,
            tokens: tokens.len(),
        };
        let logits = runner.logits(&tokens, layout).unwrap();
        let values = runner.operations().download(&logits).unwrap();
        let last = &values[values.len() - VOCABULARY..];
        let best = (0..VOCABULARY)
            .max_by(|a, b| last[*a].total_cmp(&last[*b]))
            .unwrap();
        tokens.push(u32::try_from(best).unwrap());
    }
    tokens.split_off(prompt.len())
}

#[test]
fn greedy_text_of_a_batch_is_that_of_each_prompt_alone_and_ends_before_a_stop_token() {
    let operations = operations();
    let model = Arc::new(model(operations.as_ref(), 4));
    let runner = Runner::new(Arc::clone(&operations), Arc::clone(&model));
    let (first, second) = (tokens(6, 5), tokens(6, 6));
    let expected = [
        greedy_without_cache(&runner, &first, 12),
        greedy_without_cache(&runner, &second, 12),
    ];
    assert_ne!(expected[0], expected[1]);
    let prompt = [first, second].concat();
    let generate = |stop: &[u32]| {
        let operations = Arc::clone(&operations);
        let mut session = Session::new(operations, Arc::clone(&model), 2, 18).unwrap();
        session.generate_greedy(&prompt, 12, stop).unwrap()
    };
    assert_eq!(generate(&[]), expected);
    let stop = expected[0][3];
    let before =
        |text: &Vec<u32>| -> Vec<u32> { text.iter().copied().take_while(|token| *token != stop).collect() };
    let ended = generate(&[stop]);
    assert!(ended[0].len() < 12);
    assert_eq!(ended, expected.iter().map(before).collect::<Vec<_>>());
}

#[test]
fn greedy_steps_go_on_from_given_tokens_until_they_are_told_to_end() {
    let operations = operations();
    let model = Arc::new(model(operations.as_ref(), 4));
    let runner = Runner::new(Arc::clone(&operations), Arc::clone(&model));
    let prompt = tokens(6, 5);
    let expected = greedy_without_cache(&runner, &prompt, 5);
    let mut session = Session::new(operations, model, 1, 18).unwrap();
    session.prefill(&prompt).unwrap();
    session.settle().unwrap();
    assert_eq!(session.length(), 6);
    let mut shown = Vec::new();
    let end_after_four = |next: &[u32]| {
        shown.extend_from_slice(next);
        shown.len() == 4
    };
    session.go_on(&expected[..1], 9, end_after_four).unwrap();
    assert_eq!(shown, expected[1..]);
    let full = session.go_on(&[0], 99, |_| false).unwrap_err().to_string();
    assert!(full.contains("at most its capacity of 18"), "{full}");
}

/// `Σ w · (x + down(relu(up(norm(x)))²))` in f64; `parts` are x, norm, up, up bias, down and down bias.
fn relu_squared_block(parts: &[Vec<f64>; 6], weighting: &[f64], rows: usize, hidden: usize) -> f64 {
    let [x, norm_weight, up, up_bias, down, down_bias] = parts;
    let mut total = 0.0;
    for row in 0..rows {
        let x = &x[row * hidden..(row + 1) * hidden];
        let mean = x.iter().map(|value| value * value).sum::<f64>() / hidden as f64;
        let normed: Vec<f64> = x
            .iter()
            .zip(norm_weight)
            .map(|(value, weight)| value / (mean + 1e-5).sqrt() * weight)
            .collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let activated: Vec<f64> = up
            .chunks(hidden)
            .zip(up_bias)
            .map(|(row, bias)| (dot(row, &normed) + bias).max(0.0).powi(2))
            .collect();
        for column in 0..hidden {
            let channels = activated.len();
            let added = dot(&down[column * channels..(column + 1) * channels], &activated);
            total += weighting[row * hidden + column] * (x[column] + added + down_bias[column]);
        }
    }
    total
}

#[test]
fn every_gradient_of_a_relu_squared_block_equals_central_differences_in_f64() {
    let (rows, hidden, channels) = (5, 7, 11);
    let operations = operations();
    let sizes = [
        (rows, hidden),
        (1, hidden),
        (channels, hidden),
        (1, channels),
        (hidden, channels),
        (1, hidden),
    ];
    let singles: Vec<Vec<f32>> = sizes
        .iter()
        .zip(10..)
        .map(|((rows, columns), seed)| numbers(rows * columns, seed))
        .collect();
    let tensor = |index: usize| -> Tensor {
        let (rows, columns) = sizes[index];
        operations.upload(&singles[index], rows, columns).unwrap()
    };
    let weights = |tensor: &dyn Fn(usize) -> Tensor| {
        BlockWeights::Mlp(MlpWeights {
            norm: tensor(1),
            gate: None,
            up: tensor(2),
            up_bias: Some(tensor(3)),
            gate_bias: None,
            down: tensor(4),
            down_bias: Some(tensor(5)),
        })
    };
    let shape = BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::ReluSquared,
        bias: true,
    });
    let context = Context {
        operations: operations.as_ref(),
        layout: Layout {
            sequences: 1,
            tokens: rows,
        },
        epsilon: 1e-5,
        rope: None,
    };
    let (x, block) = (tensor(0), weights(&tensor));
    let weighting = numbers(rows * hidden, 99);
    let (output, saved) = block::forward_saving(context, &shape, &block, &x).unwrap();
    let zeros = |(rows, columns)| operations.zeros(rows, columns, ElementType::F32).unwrap();
    let mut gradients = weights(&|index| zeros(sizes[index]));
    let grad = operations.upload(&weighting, rows, hidden).unwrap();
    let grad_x = block::backward(context, &shape, &block, &x, saved, grad, &mut gradients).unwrap();

    let doubles = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<f64>>();
    let weighting = doubles(&weighting);
    let mut parts: [Vec<f64>; 6] = std::array::from_fn(|index| doubles(&singles[index]));
    let value = doubles(&operations.download(&output).unwrap());
    let value: f64 = value.iter().zip(&weighting).map(|(a, b)| a * b).sum();
    let expected = relu_squared_block(&parts, &weighting, rows, hidden);
    assert!(
        (value - expected).abs() < 1e-5 * expected.abs().max(1.0),
        "{value} {expected}"
    );

    let BlockWeights::Mlp(gradients) = gradients else {
        panic!("another kind")
    };
    let biases = (gradients.up_bias.unwrap(), gradients.down_bias.unwrap());
    let found = [
        &grad_x,
        &gradients.norm,
        &gradients.up,
        &biases.0,
        &gradients.down,
        &biases.1,
    ];
    for (index, found) in found.into_iter().enumerate() {
        let found = doubles(&operations.download(found).unwrap());
        let step = 1e-5;
        let mut differences = Vec::with_capacity(found.len());
        for element in 0..found.len() {
            let mut at = |offset: f64| {
                parts[index][element] += offset;
                let value = relu_squared_block(&parts, &weighting, rows, hidden);
                parts[index][element] -= offset;
                value
            };
            differences.push((at(step) - at(-step)) / (2.0 * step));
        }
        let error = norm(found.iter().zip(&differences).map(|(a, b)| a - b));
        let scale = norm(differences.iter().copied());
        assert!(
            scale > 0.1 && error / scale < 1e-5,
            "part {index}: {error} of {scale}"
        );
    }
}
