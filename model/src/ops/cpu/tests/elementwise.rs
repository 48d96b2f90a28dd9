//! Elementwise operations against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::cpu::simd::{exponential, exponentials};
use crate::ops::{Layout, RopeTable};

#[test]
fn the_exponential_is_within_three_tenths_of_a_millionth() {
    for step in 0..200_000 {
        let x = -87.0 + step as f32 * (175.0 / 200_000.0);
        let exact = f64::from(x).exp();
        for value in [exponential::<true>(x), exponential::<false>(x)] {
            let error = (f64::from(value) / exact - 1.0).abs();
            assert!(error < 3e-7, "e^{x}: {value} instead of {exact}");
        }
    }
    let mut row = numbers(1003, 5);
    let expected: Vec<f64> = row.iter().map(|x| (f64::from(*x) - 0.5).exp()).collect();
    let sum = exponentials(&mut row, 0.5);
    assert!((sum / expected.iter().sum::<f64>() - 1.0).abs() < 1e-6);
    assert_close(
        "row",
        &row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
        &expected,
        3e-7,
    );
    assert!(exponential::<true>(f32::NAN).is_nan());
}

fn norm_formula(inputs: &[Vec<f64>]) -> Vec<f64> {
    let (x, weight) = (&inputs[0], &inputs[1]);
    let normed = |x: &[f64]| -> Vec<f64> {
        let mean: f64 = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter()
            .zip(weight)
            .map(|(x, weight)| x * weight / (mean + 1e-5).sqrt())
            .collect()
    };
    x.chunks(weight.len()).flat_map(normed).collect()
}

#[test]
fn rms_norm_of_rows_and_of_heads_matches_float64_forward_and_backward() {
    for (rows, columns, width) in [(5, 37, 37), (70, 24, 8)] {
        let (x, weight, grad) = (
            view(rows, columns, 1),
            tensor(1, width, 2),
            view(rows, columns, 3),
        );
        let inputs = [values(&x), values(&weight)];
        let (out, reciprocal) = OPS.rms_norm(&x, &weight, 1e-5).unwrap();
        assert_close("rms_norm", &values(&out), &norm_formula(&inputs), 1e-6);
        let mut grad_x = OPS.contiguous(&x).unwrap();
        let mut grad_weight = tensor(1, width, 4);
        let weight_before = values(&grad_weight);
        OPS.rms_norm_backward(
            &grad,
            &x,
            &weight,
            &reciprocal,
            &mut grad_x,
            Some(&mut grad_weight),
        )
        .unwrap();
        let slopes = derivatives(norm_formula, &inputs, 0, &values(&grad));
        let expected: Vec<f64> = slopes
            .iter()
            .zip(values(&x))
            .map(|(slope, was)| slope + was)
            .collect();
        assert_close("grad_x", &values(&grad_x), &expected, 1e-5);
        let slopes = derivatives(norm_formula, &inputs, 1, &values(&grad));
        let expected: Vec<f64> = slopes
            .iter()
            .zip(weight_before)
            .map(|(slope, was)| slope + was)
            .collect();
        assert_close("grad_weight", &values(&grad_weight), &expected, 1e-5);
    }
}

#[test]
fn rope_turns_pairs_by_their_angle_and_back() {
    let layout = Layout {
        sequences: 2,
        tokens: 3,
    };
    let (head_dim, first) = (6, 4);
    let angle = |position: usize, pair: usize| (position as f64 + 1.0) * 0.3 / (pair as f64 + 1.0);
    let table_of = |function: fn(f64) -> f64| {
        let entries = (0..9).flat_map(|p| (0..3).map(move |pair| (p, pair)));
        let data = entries
            .map(|(position, pair)| function(angle(position, pair)) as f32)
            .collect();
        Tensor::from_vec(data, 9, 3).unwrap()
    };
    let table = RopeTable {
        cosine: table_of(f64::cos),
        sine: table_of(f64::sin),
    };
    let mut x = tensor(6, 12, 1);
    let before = values(&x);
    let mut expected = before.clone();
    for (row, x) in expected.chunks_mut(12).enumerate() {
        for head in x.chunks_mut(head_dim) {
            for pair in 0..3 {
                let (sine, cosine) = angle(first + row % 3, pair).sin_cos();
                let (low, high) = (head[pair], head[pair + 3]);
                head[pair] = low * cosine - high * sine;
                head[pair + 3] = high * cosine + low * sine;
            }
        }
    }
    OPS.rope(&mut x, head_dim, &table, layout, first).unwrap();
    assert_close("rope", &values(&x), &expected, 1e-6);
    assert!(OPS.rope(&mut x, head_dim, &table, layout, 7).is_err());
    let mut there = Tensor::from_vec(before.iter().map(|x| *x as f32).collect(), 6, 12).unwrap();
    OPS.rope(&mut there, head_dim, &table, layout, 0).unwrap();
    OPS.rope_backward(&mut there, head_dim, &table, layout).unwrap();
    assert_close("there and back", &values(&there), &before, 1e-6);
}

fn swiglu_formula(inputs: &[Vec<f64>]) -> Vec<f64> {
    inputs[0]
        .iter()
        .zip(&inputs[1])
        .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
        .collect()
}

fn relu_squared_formula(inputs: &[Vec<f64>]) -> Vec<f64> {
    inputs[0].iter().map(|x| x.max(0.0).powi(2)).collect()
}

#[test]
fn activations_match_float64_forward_and_backward() {
    let (gate, up, grad) = (view(5, 37, 1), view(5, 37, 2), view(5, 37, 3));
    let inputs = [values(&gate), values(&up)];
    assert_close(
        "swiglu",
        &values(&OPS.swiglu(&gate, &up).unwrap()),
        &swiglu_formula(&inputs),
        1e-6,
    );
    let (grad_gate, grad_up) = OPS.swiglu_backward(&grad, &gate, &up).unwrap();
    for (which, actual) in [grad_gate, grad_up].iter().enumerate() {
        let expected = derivatives(swiglu_formula, &inputs, which, &values(&grad));
        assert_close("swiglu_backward", &values(actual), &expected, 1e-6);
    }
    let squared = OPS.relu_squared(&gate).unwrap();
    assert_close(
        "relu_squared",
        &values(&squared),
        &relu_squared_formula(&inputs),
        1e-6,
    );
    let slopes = OPS.relu_squared_backward(&grad, &gate).unwrap();
    let expected = derivatives(relu_squared_formula, &inputs, 0, &values(&grad));
    assert_close("relu_squared_backward", &values(&slopes), &expected, 1e-5);
}

#[test]
fn sums_and_copies_leave_gaps_alone() {
    let (a, b) = (view(200, 131, 1), view(200, 131, 2));
    let expected: Vec<f64> = values(&a).iter().zip(values(&b)).map(|(a, b)| a + b).collect();
    assert_close("add", &values(&OPS.add(&a, &b).unwrap()), &expected, 1e-7);
    let mut target = OPS.contiguous(&a).unwrap();
    assert_close("contiguous", &values(&target), &values(&a), 0.0);
    OPS.add_assign(&mut target, &b).unwrap();
    assert_close("add_assign", &values(&target), &expected, 1e-7);
    let squares: f64 = values(&a).iter().map(|x| x * x).sum();
    assert!((OPS.sum_of_squares(&a).unwrap() / squares - 1.0).abs() < 1e-7);
    // The only handle to a narrower view may be written: what lies between its rows stays.
    let mut narrow = tensor(3, 5, 3).first_columns(2).unwrap();
    let host = narrow.host().to_vec();
    OPS.add_assign(&mut narrow, &tensor(3, 2, 4)).unwrap();
    assert_eq!(narrow.host()[2..5], host[2..5]);
}

#[test]
fn embedding_rows_are_copied_and_repeated_tokens_add_up() {
    let table = view(11, 7, 1);
    let tokens = [3, 0, 3, 10];
    let out = OPS.embedding(&table, &tokens).unwrap();
    let rows = values(&table);
    let expected: Vec<f64> = tokens
        .iter()
        .flat_map(|t| rows[*t as usize * 7..][..7].to_vec())
        .collect();
    assert_close("embedding", &values(&out), &expected, 0.0);
    let grad = view(4, 7, 2);
    let mut grad_table = OPS.contiguous(&table).unwrap();
    OPS.embedding_backward(&grad, &tokens, &mut grad_table).unwrap();
    let mut expected = rows;
    for (grad, token) in values(&grad).chunks(7).zip(tokens) {
        for (column, grad) in grad.iter().enumerate() {
            expected[token as usize * 7 + column] += grad;
        }
    }
    assert_close("embedding_backward", &values(&grad_table), &expected, 1e-7);
    assert!(OPS.embedding(&table, &[11]).is_err());
}
