//! Predictions against figures worked out by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::fixtures::{attention, f32, mlp, small, table};
use crate::{CostTable, Measurement, Metric, Subject, Summary};
use espalier_arch::{Candidate, Variant};

const WORKLOAD: Workload = Workload {
    prompt_tokens: 10,
    output_tokens: 5,
    concurrency: 2,
};

/// Attention's decoding grows by 0.1 ms a token of context; only prefill has spread.
fn times() -> CostTable {
    let prefill = Point::Prefill {
        tokens: 10,
        sequences: 2,
    };
    let decode = |context| Point::Decode {
        context,
        sequences: 2,
    };
    let base = || Subject::Base { vocab_size: 100 };
    let (heads, channels) = (|| Subject::Block(attention(2)), || Subject::Block(mlp(64)));
    table(&[
        (base(), prefill, 1.0, 0.0),
        (base(), decode(10), 0.2, 0.0),
        (base(), decode(13), 0.2, 0.0),
        (heads(), prefill, 4.0, 0.1),
        (heads(), decode(10), 1.0, 0.0),
        (heads(), decode(13), 1.3, 0.0),
        (channels(), prefill, 2.0, 0.2),
        (channels(), decode(10), 0.5, 0.0),
        (channels(), decode(13), 0.5, 0.0),
    ])
}

fn model(measured: Option<&Measurement>) -> CostModel {
    CostModel::new(&times(), &WORKLOAD, &small(), f32(), measured).unwrap()
}

fn close(value: Option<f64>, expected: f64) {
    let value = value.unwrap();
    assert!(
        (value - expected).abs() <= 1e-9 * expected.abs(),
        "{value} instead of {expected}"
    );
}

#[test]
fn a_workload_is_timed_at_its_first_and_last_context_and_between_where_they_are_far_apart() {
    let contexts = |output_tokens| -> Vec<usize> {
        let workload = Workload {
            output_tokens,
            ..WORKLOAD
        };
        let decode = points(&workload)
            .unwrap()
            .into_iter()
            .filter_map(|point| match point {
                Point::Decode { context, .. } => Some(context),
                Point::Prefill { .. } => None,
            });
        decode.collect()
    };
    assert!(contexts(1).is_empty());
    assert_eq!(contexts(2), [10]);
    assert_eq!(contexts(5), [10, 13]);
    assert_eq!(contexts(2050), [10, 1034, 2058]);
}

#[test]
fn every_figure_is_the_sum_over_blocks_and_base() {
    let figures = model(None).predict(&small()).unwrap().figures;
    // Prefill: 3 · 4 + 3 · 2 + 1.
    close(figures.first_token_ms, 19.0);
    // Four steps at contexts 10 to 13: 3 · (1.0 + 1.1 + 1.2 + 1.3) + 3 · 4 · 0.5 + 4 · 0.2.
    close(figures.per_token_ms, 20.6 / 4.0);
    close(figures.latency_ms, 39.6);
    close(figures.throughput_tokens_per_second, 2.0 * 5.0 / 0.0396);
    // Norm, query and output of 32 × 32, key and value of 16 × 32; norm and three matrices of 64 × 32.
    let parameters = 3.0 * (32.0 + 2.0 * 1024.0 + 2.0 * 512.0) + 3.0 * (32.0 + 3.0 * 2048.0);
    close(figures.block_parameters, parameters);
    // Keys and values of 16 at context 15 for two requests in three layers; 100 tied embeddings and a norm.
    let state = 3.0 * 2.0 * 2.0 * 16.0 * 15.0;
    close(figures.memory_bytes, 4.0 * (parameters + state + 101.0 * 32.0));
}

#[test]
fn errors_of_one_shape_add_and_those_of_different_shapes_add_in_quadrature() {
    let errors = model(None).predict(&small()).unwrap().errors;
    // The median of four repeats: 1.4826 · √(π/2) · 0.1 / √4.
    let one = 1.4826 * (std::f64::consts::PI / 2.0).sqrt() * 0.05;
    let expected = (3.0 * one).hypot(3.0 * 2.0 * one);
    close(errors.first_token_ms, expected);
    close(errors.latency_ms, expected);
    assert_eq!(errors.per_token_ms, Some(0.0));
    close(
        errors.throughput_tokens_per_second,
        10_000.0 / 39.6 * expected / 39.6,
    );
}

#[test]
fn a_skipped_block_costs_nothing_and_its_state_goes() {
    let model = model(None);
    let mut variants = vec![Variant::Whole; 6];
    variants[2] = Variant::Skip;
    let smaller = small().with_candidate(&Candidate { variants }).unwrap();
    let figures = model.predict(&smaller).unwrap().figures;
    close(figures.latency_ms, 39.6 - 4.0 - 4.6);
    let whole = model.predict(&small()).unwrap().figures.memory_bytes.unwrap();
    close(
        figures.memory_bytes,
        whole - 4.0 * (3104.0 + 2.0 * 2.0 * 16.0 * 15.0),
    );
}

#[test]
fn corrections_scale_times_and_the_parents_other_memory_stays() {
    let summary = Summary {
        median: 1.0,
        spread: 0.0,
        samples: vec![],
    };
    let counted = f32().counted_bytes(&small(), &WORKLOAD);
    let measurement = Measurement {
        latency_ms: summary.clone(),
        first_token_ms: summary.clone(),
        per_token_ms: summary.clone(),
        throughput_tokens_per_second: summary,
        memory_bytes: 200_000,
    };
    assert!(counted < 200_000);
    let corrected = model(Some(&measurement)).corrected(Corrections {
        first_token: 2.0,
        decode: 0.5,
        memory_bytes: 7.0,
    });
    let figures = corrected.predict(&small()).unwrap().figures;
    close(figures.first_token_ms, 38.0);
    close(figures.latency_ms, 38.0 + 10.3);
    close(figures.memory_bytes, 200_007.0);
}

#[test]
fn a_floor_on_throughput_is_a_ceiling_on_the_sum_of_latencies() {
    let limit = crate::AbsoluteLimit {
        metric: Metric::Throughput,
        value: 250.0,
    };
    assert_eq!(model(None).sum_limit(&limit), 40.0);
}

#[test]
fn times_are_never_extrapolated_nor_guessed() {
    let longer = Workload {
        output_tokens: 6,
        ..WORKLOAD
    };
    let model_of_longer = CostModel::new(&times(), &longer, &small(), f32(), None).unwrap();
    let message = model_of_longer.predict(&small()).unwrap_err().to_string();
    assert!(message.contains("contexts 10 to 13, but 14"), "{message}");
    let message = model(None).block_costs(Some(&mlp(32))).unwrap_err().to_string();
    assert!(message.contains("profile it first"), "{message}");
}
