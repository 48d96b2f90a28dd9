//! Choices against sums worked out by hand.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_precision_loss)]
mod batches;
mod confidence;

use super::*;
use crate::fixtures::{f32, prompts, small};
use crate::{Figures, Metric, Space};

fn latency(value: f64) -> AbsoluteLimit {
    AbsoluteLimit::new(Metric::Latency, value)
}

fn figures(latency_ms: f64, first_token_ms: f64) -> Figures {
    Figures {
        latency_ms: Some(latency_ms),
        first_token_ms: Some(first_token_ms),
        memory_bytes: Some(1.0),
        ..Figures::default()
    }
}

#[test]
fn the_margin_is_two_standard_errors_of_the_worst_timed_limit_within_bounds() {
    let memory = AbsoluteLimit::new(Metric::Memory, 1.0);
    let first = AbsoluteLimit::new(Metric::FirstToken, 10.0);
    let of = |latency_error, first_error, limits: &[AbsoluteLimit]| {
        let prediction = Prediction {
            figures: figures(100.0, 10.0),
            errors: figures(latency_error, first_error),
            device: None,
        };
        margin(&prediction, limits)
    };
    assert_eq!(of(1.0, 0.2, &[latency(90.0)]), 0.02);
    assert_eq!(of(1.0, 0.2, &[latency(90.0), first, memory]), 0.04);
    assert_eq!(of(0.1, 0.2, &[latency(90.0)]), LEAST_MARGIN);
    assert_eq!(of(9.0, 0.2, &[latency(90.0)]), MOST_MARGIN);
    assert_eq!(of(9.0, 9.0, &[memory]), 0.0);
}

/// Fits [`small`], whose block `b` loses `b + 1` for each size it goes down.
fn fit(limit: f64, count: usize) -> Fitted {
    let (workload, table) = prompts();
    let parent = small();
    let model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
    let space = Space {
        mlp_grid: Some(32),
        ..Space::default()
    };
    let variants = space.all_variants(&parent).unwrap();
    let mut scores = Vec::new();
    for (block, variants) in variants.iter().enumerate() {
        for (step, variant) in variants.iter().enumerate() {
            scores.push(Score {
                block,
                variant: variant.clone(),
                divergence: (block as f64 + 1.0) * step as f64,
                standard_error: 0.0,
                tokens: 1,
            });
        }
    }
    let library = Library::new(&parent, &variants, &scores, &model).unwrap();
    library
        .fit(&[latency(limit)], count, 2, &Options::default())
        .unwrap()
}

#[test]
fn the_least_score_inside_the_limit_and_its_margin_is_found() {
    // 8 ms and the margin have to go from 31: skipping the first MLP and halving the first attention lose
    // 2 · 2 + 1 for 8 ms, which the margin makes too little; skipping both loses 2 · 2 + 2 · 1 for 10.
    let Fitted::Found(choices) = fit(23.0, 2) else {
        panic!("31 ms can be made 23")
    };
    let best = &choices[0];
    assert_eq!(best.margin, LEAST_MARGIN);
    assert_eq!(best.score, 6.0);
    assert!(best.prediction.figures.latency_ms.unwrap() <= 23.0 * 0.99);
    let (first, second) = (&best.candidate.variants, &choices[1].candidate.variants);
    assert!(first.iter().zip(second).filter(|(a, b)| a != b).count() >= 2);
    assert!(choices[1].score >= best.score);
}

#[test]
fn a_limit_that_only_the_bare_value_admits_is_aimed_at_without_margin() {
    // Everything skipped leaves the base of 1 ms.
    let Fitted::Found(choices) = fit(1.0, 1) else {
        panic!("1 ms is the base's")
    };
    assert_eq!(choices[0].margin, 0.0);
    assert_eq!(choices[0].candidate.variants, vec![Variant::Skip; 6]);
}

#[test]
fn an_impossible_limit_is_answered_with_the_best_that_can_be_reached() {
    let Fitted::Impossible(impossible) = fit(0.5, 1) else {
        panic!("the base alone takes 1 ms")
    };
    assert!(impossible.proven && impossible.notes().is_empty());
    assert_eq!(impossible.limits[0].alone, 1.0);
    assert_eq!(impossible.limits[0].together, 1.0);
}

/// [`prompts`] with a spread for every row.
fn scattered(spread: f64) -> (crate::Workload, crate::CostTable) {
    let (workload, mut table) = prompts();
    for row in &mut table.rows {
        row.spread_ms = spread;
    }
    (workload, table)
}

#[test]
fn a_limit_that_asks_for_a_confidence_is_kept_with_that_many_standard_errors() {
    let (workload, table) = scattered(0.4);
    let parent = small();
    let model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
    let variants = Space {
        mlp_grid: Some(32),
        ..Space::default()
    }
    .all_variants(&parent)
    .unwrap();
    let library = Library::unscored(&parent, &variants, &model).unwrap();
    let fitted = |limit: &str| {
        let limit = crate::Limit::parse(Metric::Latency, limit).unwrap();
        let limit = limit.resolve(&Figures::default()).unwrap();
        (limit, library.fit(&[limit], 1, 1, &Options::default()).unwrap())
    };
    let (limit, found) = fitted("20ms at 95%");
    let Fitted::Found(choices) = found else {
        panic!("everything but the base may go")
    };
    let prediction = choices[0].prediction;
    let (value, error) = (
        prediction.figures.latency_ms.unwrap(),
        prediction.errors.latency_ms.unwrap(),
    );
    assert!(error > 0.0 && value + 1.64 * error <= 20.0, "{value} ± {error}");
    assert!(limit.admits_prediction(&prediction));
    // The base of 1 ms has an error of its own, which only the bare limit forgives.
    assert!(matches!(fitted("1ms").1, Fitted::Found(_)));
    assert!(matches!(fitted("1ms at 95%").1, Fitted::Impossible(_)));
}
