//! Attention against float64.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use espalier_arch::Attention;

use super::*;
use crate::ops::{KvCache, Layout};

fn shape(kv_groups: usize, queries_per_group: usize, head_dim: usize, window: Option<usize>) -> Attention {
    Attention {
        kv_groups,
        queries_per_group,
        head_dim,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: window,
    }
}

/// Attention row by row in f64; inputs q, k, v.
fn formula(inputs: &[Vec<f64>], shape: &Attention, layout: Layout) -> Vec<f64> {
    let (dim, width, kv_width) = (shape.head_dim, shape.query_width(), shape.kv_width());
    let mut out = vec![0.0; layout.rows() * width];
    for row in 0..layout.rows() {
        let (sequence, position) = (row / layout.tokens, row % layout.tokens);
        let first = (position + 1).saturating_sub(shape.sliding_window.unwrap_or(usize::MAX));
        for head in 0..shape.query_heads() {
            let query = &inputs[0][row * width + head * dim..][..dim];
            let at = |key: usize| {
                (sequence * layout.tokens + key) * kv_width + head / shape.queries_per_group * dim
            };
            let score = |key: usize| {
                let dots = query.iter().zip(&inputs[1][at(key)..]).map(|(q, k)| q * k);
                (dots.sum::<f64>() / (dim as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (first..=position).map(score).collect();
            let sum: f64 = weights.iter().sum();
            for (key, weight) in (first..=position).zip(&weights) {
                for entry in 0..dim {
                    out[row * width + head * dim + entry] += weight / sum * inputs[2][at(key) + entry];
                }
            }
        }
    }
    out
}

fn inputs(shape: &Attention, layout: Layout) -> [Tensor; 3] {
    let rows = layout.rows();
    [
        view(rows, shape.query_width(), 1),
        view(rows, shape.kv_width(), 2),
        view(rows, shape.kv_width(), 3),
    ]
}

#[test]
fn small_attention_and_every_gradient_match_float64() {
    for (window, tokens) in [(None, 7), (Some(3), 7), (Some(1), 2)] {
        let (shape, layout) = (shape(2, 3, 5, window), Layout { sequences: 2, tokens });
        let [q, k, v] = inputs(&shape, layout);
        let exact = [values(&q), values(&k), values(&v)];
        let (out, log_sums) = OPS.attention(&q, &k, &v, &shape, layout).unwrap();
        assert_close("attention", &values(&out), &formula(&exact, &shape, layout), 1e-6);
        let grad = view(layout.rows(), shape.query_width(), 4);
        let (grad_q, grad_k, grad_v) = OPS
            .attention_backward(&grad, &q, &k, &v, &out, &log_sums, &shape, layout)
            .unwrap();
        for (which, actual) in [grad_q, grad_k, grad_v].iter().enumerate() {
            let formula = |inputs: &[Vec<f64>]| formula(inputs, &shape, layout);
            let expected = derivatives(formula, &exact, which, &values(&grad));
            assert_close(
                ["grad_q", "grad_k", "grad_v"][which],
                &values(actual),
                &expected,
                1e-5,
            );
        }
    }
}

#[test]
fn attention_longer_than_its_tiles_matches_float64() {
    for window in [None, Some(70)] {
        let (shape, layout) = (
            shape(1, 2, 8, window),
            Layout {
                sequences: 1,
                tokens: 301,
            },
        );
        let [q, k, v] = inputs(&shape, layout);
        let exact = [values(&q), values(&k), values(&v)];
        let (out, log_sums) = OPS.attention(&q, &k, &v, &shape, layout).unwrap();
        assert_close("attention", &values(&out), &formula(&exact, &shape, layout), 1e-6);
        let grad = view(layout.rows(), shape.query_width(), 4);
        let (grad_q, grad_k, grad_v) = OPS
            .attention_backward(&grad, &q, &k, &v, &out, &log_sums, &shape, layout)
            .unwrap();
        for (which, actual) in [grad_q, grad_k, grad_v].iter().enumerate() {
            let formula = |inputs: &[Vec<f64>]| formula(inputs, &shape, layout);
            assert_slope(
                "gradient",
                formula,
                &exact,
                which,
                &values(&grad),
                &values(actual),
            );
        }
    }
}

#[test]
fn attention_does_not_depend_on_the_number_of_threads() {
    let (shape, layout) = (
        shape(3, 2, 8, None),
        Layout {
            sequences: 2,
            tokens: 130,
        },
    );
    let [q, k, v] = inputs(&shape, layout);
    assert_same_on_any_threads(|| {
        let (out, log_sums) = OPS.attention(&q, &k, &v, &shape, layout).unwrap();
        let (grad_q, grad_k, grad_v) = OPS
            .attention_backward(&out, &q, &k, &v, &out, &log_sums, &shape, layout)
            .unwrap();
        [out, grad_q, grad_k, grad_v]
            .iter()
            .flat_map(|tensor| OPS.download(tensor).unwrap())
            .collect()
    });
}

#[test]
fn a_cache_filled_in_chunks_and_token_by_token_gives_what_the_whole_sequence_gives() {
    for window in [None, Some(4)] {
        let (shape, layout) = (
            shape(2, 3, 8, window),
            Layout {
                sequences: 2,
                tokens: 9,
            },
        );
        let [q, k, v] = inputs(&shape, layout);
        let (whole, _) = OPS.attention(&q, &k, &v, &shape, layout).unwrap();
        let mut cache = KvCache {
            keys: zeros(2 * 12, shape.kv_width()),
            values: zeros(2 * 12, shape.kv_width()),
            capacity: 12,
            length: 0,
        };
        for (first, tokens) in [(0, 4), (4, 3), (7, 1), (8, 1)] {
            let part_of = |tensor: &Tensor| {
                let rows = (0..2).flat_map(|sequence| {
                    let rows = tensor.narrow_rows(sequence * 9 + first, tokens).unwrap();
                    OPS.download(&rows).unwrap()
                });
                Tensor::from_vec(rows.collect(), 2 * tokens, tensor.columns()).unwrap()
            };
            let part = Layout { sequences: 2, tokens };
            let out = OPS
                .attention_cached(&part_of(&q), &part_of(&k), &part_of(&v), &mut cache, &shape, part)
                .unwrap();
            assert_close("attention_cached", &values(&out), &values(&part_of(&whole)), 1e-6);
        }
        assert_eq!(cache.length, 9);
        let full = Layout {
            sequences: 2,
            tokens: 4,
        };
        let [q, k, v] = inputs(&shape, full);
        assert!(
            OPS.attention_cached(&q, &k, &v, &mut cache, &shape, full)
                .is_err()
        );
    }
}
