//! Losses against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::{Head, HeadGradient, TokenBatch};

/// Log-probabilities, row by row; inputs hidden and weight.
fn log_probabilities(hidden: &[f64], weight: &[f64], width: usize) -> Vec<Vec<f64>> {
    let row_of = |hidden: &[f64]| {
        let dots = weight
            .chunks(width)
            .map(|w| w.iter().zip(hidden).map(|(w, h)| w * h).sum::<f64>());
        let logits: Vec<f64> = dots.collect();
        let log = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        logits.iter().map(|logit| logit - log).collect()
    };
    hidden.chunks(width).map(row_of).collect()
}

fn cross_entropy_formula(inputs: &[Vec<f64>], targets: &[Option<u32>], width: usize) -> Vec<f64> {
    let rows = log_probabilities(&inputs[0], &inputs[1], width);
    let rows = rows.iter().zip(targets);
    rows.map(|(row, target)| target.map_or(0.0, |target| -row[target as usize]))
        .collect()
}

/// Inputs: the student's hidden states and weight, then the parent's.
fn divergence_formula(inputs: &[Vec<f64>], width: usize, parent_width: usize) -> Vec<f64> {
    let students = log_probabilities(&inputs[0], &inputs[1], width);
    let parents = log_probabilities(&inputs[2], &inputs[3], parent_width);
    let row = |(student, parent): (&Vec<f64>, &Vec<f64>)| {
        student
            .iter()
            .zip(parent)
            .map(|(student, parent)| parent.exp() * (parent - student))
            .sum()
    };
    students.iter().zip(&parents).map(row).collect()
}

/// A batch of which only the head is asked.
fn targets_only(targets: &[Option<u32>]) -> TokenBatch {
    OPS.tokens(&[], Some(targets)).unwrap()
}

#[test]
fn cross_entropy_and_its_gradients_match_float64() {
    let (hidden, weight) = (view(5, 7, 1), view(37, 7, 2));
    let targets = [Some(0), Some(36), None, Some(11), Some(11)];
    let head = Head {
        hidden: &hidden,
        weight: &weight,
    };
    let exact = [values(&hidden), values(&weight)];
    let formula = |inputs: &[Vec<f64>]| cross_entropy_formula(inputs, &targets, 7);
    let batch = targets_only(&targets);
    let losses = OPS.cross_entropy(head, &batch, None).unwrap();
    assert!(losses.hidden_gradient.is_none());
    assert_close("losses", &values(&losses.rows), &formula(&exact), 1e-6);
    let mut grad_weight = OPS.contiguous(&weight).unwrap();
    let gradient = HeadGradient {
        weight: &mut grad_weight,
        scale: 0.25,
    };
    let losses = OPS.cross_entropy(head, &batch, Some(gradient)).unwrap();
    assert_close("losses", &values(&losses.rows), &formula(&exact), 1e-6);
    assert_close(
        "grad_hidden",
        &values(&losses.hidden_gradient.unwrap()),
        &derivatives(formula, &exact, 0, &[0.25; 5]),
        1e-5,
    );
    let slopes = derivatives(formula, &exact, 1, &[0.25; 5]);
    let expected: Vec<f64> = slopes
        .iter()
        .zip(values(&weight))
        .map(|(slope, was)| slope + was)
        .collect();
    assert_close("grad_weight", &values(&grad_weight), &expected, 1e-6);
    let outside = targets_only(&[Some(37); 5]);
    assert!(OPS.cross_entropy(head, &outside, None).is_err());
}

#[test]
fn distillation_over_several_chunks_matches_float64() {
    let (rows, vocabulary) = (300, 41);
    let (hidden, weight) = (view(rows, 7, 1), view(vocabulary, 7, 2));
    let (parent_hidden, parent_weight) = (view(rows, 5, 3), view(vocabulary, 5, 4));
    let (student, parent) = (
        Head {
            hidden: &hidden,
            weight: &weight,
        },
        Head {
            hidden: &parent_hidden,
            weight: &parent_weight,
        },
    );
    let exact = [&hidden, &weight, &parent_hidden, &parent_weight].map(values);
    let formula = |inputs: &[Vec<f64>]| divergence_formula(inputs, 7, 5);
    let mut grad_weight = zeros(vocabulary, 7);
    let gradient = HeadGradient {
        weight: &mut grad_weight,
        scale: 0.5,
    };
    let losses = OPS.distillation(student, parent, Some(gradient)).unwrap();
    assert_close("losses", &values(&losses.rows), &formula(&exact), 2e-6);
    let weights = vec![0.5; rows];
    let grad_hidden = values(&losses.hidden_gradient.unwrap());
    assert_slope("grad_hidden", formula, &exact, 0, &weights, &grad_hidden);
    assert_slope("grad_weight", formula, &exact, 1, &weights, &values(&grad_weight));
    let few = derivatives(formula, &exact, 1, &weights);
    assert_close("grad_weight", &values(&grad_weight), &few, 1e-5);
}

#[test]
fn many_students_get_what_each_would_get_alone() {
    let parent = (tensor(131, 6, 1), tensor(23, 6, 2));
    let parent = Head {
        hidden: &parent.0,
        weight: &parent.1,
    };
    let students = [
        (tensor(131, 6, 3), tensor(23, 6, 4)),
        (tensor(131, 4, 5), tensor(23, 4, 6)),
    ];
    let heads = [0, 1].map(|index| Head {
        hidden: &students[index].0,
        weight: &students[index].1,
    });
    let together = OPS.distillation_many(&heads, parent).unwrap();
    for (head, losses) in heads.iter().zip(&together) {
        let alone = OPS.distillation(*head, parent, None).unwrap();
        assert_eq!(values(losses), values(&alone.rows));
    }
    let alike = OPS.distillation(parent, parent, None).unwrap();
    assert!(
        values(&alike.rows).iter().all(|loss| loss.abs() < 1e-7),
        "a parent diverges from itself"
    );
}

#[test]
fn the_logits_are_the_head_times_the_hidden_states() {
    let (hidden, weight) = (view(8, 7, 1), view(37, 7, 2));
    let logits = OPS
        .logits(Head {
            hidden: &hidden,
            weight: &weight,
        })
        .unwrap();
    let linear = OPS.linear(&hidden, plain(&weight)).unwrap();
    assert_eq!(values(&logits), values(&linear));
    assert_eq!((logits.rows(), logits.columns()), (8, 37));
}
