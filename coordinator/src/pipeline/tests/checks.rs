//! Measurements that miss, scatter, or show a prediction wrong.

use super::world::*;
use crate::pipeline::*;
use crate::spec::Strategy;

#[test]
fn a_missed_limit_corrects_the_costs_and_chooses_anew() {
    let mut world = World {
        bias: 1.09,
        ..World::default()
    };
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert!(world.rounds(Strategy::Heterogeneous) > 1, "{:?}", world.log);
    assert!(outcome.limits[0].verified.inside);
    assert!(
        outcome.limits[0].verified.error.abs() < 1e-6,
        "the correction explains the bias"
    );
    let whole = 1.09 * measurement(&parent(), 1.0).latency_ms.median;
    let last = outcome.front.last().unwrap().value;
    assert!(
        (last / whole - 1.0).abs() < 1e-3,
        "the front is of the costs that were chosen by: {last}, {whole}"
    );
    assert!(
        outcome.notes.iter().any(|note| note.contains("missed a limit")),
        "{:?}",
        outcome.notes
    );
}

#[test]
fn an_export_outside_a_limit_is_measured_again() {
    let mut world = World {
        verify_biases: vec![1.1],
        ..World::default()
    };
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert!(world.log.contains(&Stage::Verify { round: 2 }));
    assert!(outcome.limits[0].verified.inside);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("verify-1 was outside the limits")),
        "{:?}",
        outcome.notes
    );
}

#[test]
fn an_export_that_stays_outside_a_limit_is_kept_and_reported_as_missing_it() {
    let mut world = World {
        verify_biases: vec![1.1; 3],
        ..World::default()
    };
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert!(!outcome.limits[0].verified.inside);
    let misses = outcome
        .notes
        .iter()
        .filter(|note| note.contains("outside the limits"));
    assert_eq!(misses.count(), 3, "{:?}", outcome.notes);
}

#[test]
fn a_noisy_last_measurement_of_an_export_leaves_the_quiet_one_before_it_standing() {
    let mut world = World {
        verify_biases: vec![1.1, 1.2, 1.3],
        // Of the check, then of each verification.
        drifts: vec![0.0, 0.0, 0.0, 0.2],
        ..World::default()
    };
    let heterogeneous = r#"["heterogeneous"]"#;
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, heterogeneous)).unwrap();
    let verified = &outcome.limits[0].verified;
    assert!(
        !verified.inside && (verified.error - 0.2).abs() < 1e-9,
        "{verified:?}"
    );
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("verify-3 was noisy")),
        "{:?}",
        outcome.notes
    );
    let mut world = World {
        drifts: vec![0.0, 0.2],
        ..World::default()
    };
    let error = world
        .run(&spec(r#"{"latency": "75%"}"#, heterogeneous))
        .unwrap_err();
    assert!(
        error.to_string().contains("verify-3: too noisy, 3 times"),
        "{error}"
    );
}

#[test]
fn a_slower_machine_moves_a_share_with_the_parent_but_not_an_absolute_limit() {
    let mut world = World {
        pace: 1.3,
        ..World::default()
    };
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert_eq!(world.rounds(Strategy::Heterogeneous), 1);
    assert!(outcome.limits[0].verified.error.abs() < 1e-9);
    let whole = measurement(&parent(), 1.0).latency_ms.median;
    let limit = format!(r#"{{"latency": "{}ms"}}"#, whole * 0.9);
    let mut world = World {
        pace: 1.15,
        ..World::default()
    };
    let outcome = world.run(&spec(&limit, BOTH)).unwrap();
    assert!(world.rounds(Strategy::Heterogeneous) > 1);
    assert!(outcome.limits[0].verified.value <= whole * 0.9);
}

#[test]
fn a_noisy_measurement_is_repeated_and_then_called_too_noisy() {
    let mut world = World {
        drifts: vec![0.2, 0.0],
        ..World::default()
    };
    let outcome = world
        .run(&spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#))
        .unwrap();
    assert_eq!(world.rounds(Strategy::Heterogeneous), 2);
    assert!(outcome.notes.iter().any(|note| note.contains("noisy")));
    let mut world = World {
        drifts: vec![0.2],
        ..World::default()
    };
    let error = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap_err();
    assert!(error.to_string().contains("too noisy"), "{error}");
    let mut world = World {
        disturbed: 0.75,
        ..World::default()
    };
    let error = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap_err();
    assert!(error.to_string().contains("75% of the times"), "{error}");
}

#[test]
fn a_limit_that_is_counted_is_met_on_a_noisy_machine() {
    let mut world = World {
        drifts: vec![0.2],
        ..World::default()
    };
    let outcome = world.run(&spec(r#"{"block_parameters": "75%"}"#, BOTH)).unwrap();
    assert_eq!(world.rounds(Strategy::Heterogeneous), 1);
    assert!(outcome.limits.iter().all(|limit| limit.verified.inside));
}
