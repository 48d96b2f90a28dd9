//! Elementwise operations against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::ops::cpu::simd::{exponential, exponentials};
use crate::ops::{Axis, Layout, RopeTable};

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
        let mut grad_weight = tensor(1, width, 4);
        let weight_before = values(&grad_weight);
        let slopes = derivatives(norm_formula, &inputs, 0, &values(&grad));
        let grad_x = OPS
            .rms_norm_backward(&grad, &x, &weight, &reciprocal, None, &mut grad_weight)
            .unwrap();
        assert_close("grad_x", &values(&grad_x), &slopes, 1e-5);
        let residual = tensor(rows, columns, 5);
        let expected: Vec<f64> = slopes
            .iter()
            .zip(values(&residual))
            .map(|(slope, was)| slope + was)
            .collect();
        let mut unused = zeros(1, width);
        let grad_x = OPS
            .rms_norm_backward(&grad, &x, &weight, &reciprocal, Some(residual), &mut unused)
            .unwrap();
        assert_close("grad_x and residual", &values(&grad_x), &expected, 1e-5);
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
    let mut narrow = OPS.contiguous(&x.first_columns(head_dim).unwrap()).unwrap();
    OPS.rope(&mut x, &mut narrow, head_dim, &table, layout, first)
        .unwrap();
    assert_close("rope", &values(&x), &expected, 1e-6);
    let first_heads = values(&x.first_columns(head_dim).unwrap());
    assert_eq!(values(&narrow), first_heads, "k turns as q does");
    assert!(
        OPS.rope(&mut x, &mut narrow, head_dim, &table, layout, 7)
            .is_err()
    );
    let mut there = Tensor::from_vec(before.iter().map(|x| *x as f32).collect(), 6, 12).unwrap();
    OPS.rope(&mut there, &mut narrow, head_dim, &table, layout, 0)
        .unwrap();
    OPS.rope_backward(&mut there, &mut narrow, head_dim, &table, layout)
        .unwrap();
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
fn copies_joins_and_choices_read_through_views() {
    let (a, b) = (view(200, 131, 1), view(3, 131, 2));
    assert_eq!(values(&OPS.contiguous(&a).unwrap()), values(&a));
    let joined = OPS.concatenate(&[&a, &b]).unwrap();
    assert_eq!(values(&joined), [values(&a), values(&b)].concat());
    assert!(OPS.concatenate(&[&a, &tensor(1, 130, 3)]).is_err());
    let rows = OPS.gather(&a, &[7, 0, 7], Axis::Rows).unwrap();
    let row = |index: usize| values(&a)[index * 131..(index + 1) * 131].to_vec();
    assert_eq!(values(&rows), [row(7), row(0), row(7)].concat());
    let columns = OPS.gather(&b, &[130, 2], Axis::Columns).unwrap();
    let expected: Vec<f64> = values(&b)
        .chunks(131)
        .flat_map(|row| [row[130], row[2]])
        .collect();
    assert_eq!(values(&columns), expected);
    assert!(OPS.gather(&b, &[131], Axis::Columns).is_err());
    assert!(OPS.gather(&b, &[3], Axis::Rows).is_err());
    assert!(OPS.zeros(1, 1, ElementType::Bf16).is_err());
    assert!(OPS.copy_as(&a, ElementType::Bf16).is_err());
}

#[test]
fn views_by_columns_and_by_every_other_row_share_the_storage() {
    let whole = tensor(7, 9, 1);
    let all = values(&whole);
    let part = whole.columns_from(4, 3).unwrap().strided_rows(1, 2).unwrap();
    let expected: Vec<f64> = [1, 3, 5]
        .iter()
        .flat_map(|row| all[row * 9 + 4..row * 9 + 7].to_vec())
        .collect();
    assert_eq!(values(&part), expected);
    assert!(part.shares_storage_with(&whole) && !part.is_contiguous());
    assert!(!OPS.contiguous(&part).unwrap().shares_storage_with(&whole));
    assert!(whole.columns_from(7, 3).is_err());
    assert!(whole.strided_rows(7, 1).is_err() && whole.strided_rows(0, 0).is_err());
    assert!(values(&part.narrow_rows(3, 0).unwrap()).is_empty());
}

#[test]
fn statistics_match_float64() {
    let (a, b) = (view(6, 9, 1), view(6, 9, 2));
    let (left, right) = (values(&a), values(&b));
    let squares = OPS.column_squares(&a).unwrap();
    for (column, square) in squares.iter().enumerate() {
        let expected: f64 = left.chunks(9).map(|row| row[column] * row[column]).sum();
        assert!((square - expected).abs() < 1e-12);
    }
    let tiles = OPS.tile_products(&a, &b, 3).unwrap();
    assert_eq!(tiles.len(), 6);
    for (place, found) in tiles.iter().enumerate() {
        let inside = |index: &usize| index / 9 / 3 == place / 3 && index % 9 / 3 == place % 3;
        let entries = (0..54).filter(inside);
        let expected: f64 = entries.map(|index| left[index] * right[index]).sum();
        assert!((found - expected).abs() < 1e-12, "tile {place}");
    }
    assert!(OPS.tile_products(&a, &b, 4).is_err());
}

#[test]
fn the_likeliest_token_is_the_first_of_equals() {
    let logits = Tensor::from_vec(vec![0.5, 2.0, 2.0, f32::NAN, -1.0, -2.0], 2, 3).unwrap();
    assert_eq!(OPS.likeliest(&logits).unwrap(), [1, 1]);
}

#[test]
fn embedding_rows_are_copied_and_repeated_tokens_add_up() {
    let table = view(11, 7, 1);
    let ids = [3, 0, 3, 10];
    let tokens = OPS.tokens(&ids, None).unwrap();
    let out = OPS.embedding(&table, &tokens).unwrap();
    let rows = values(&table);
    let expected: Vec<f64> = ids
        .iter()
        .flat_map(|t| rows[*t as usize * 7..][..7].to_vec())
        .collect();
    assert_close("embedding", &values(&out), &expected, 0.0);
    let grad = view(4, 7, 2);
    let mut grad_table = OPS.contiguous(&table).unwrap();
    OPS.embedding_backward(&grad, &tokens, &mut grad_table).unwrap();
    let mut expected = rows;
    for (grad, token) in values(&grad).chunks(7).zip(ids) {
        for (column, grad) in grad.iter().enumerate() {
            expected[token as usize * 7 + column] += grad;
        }
    }
    assert_close("embedding_backward", &values(&grad_table), &expected, 1e-7);
    let outside = OPS.tokens(&[11], None).unwrap();
    assert!(OPS.embedding(&table, &outside).is_err());
}
