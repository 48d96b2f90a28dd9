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
fn a_choice_that_was_inside_stands_where_corrections_lead_to_nothing() {
    let job = spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#);
    let first = World::default().run(&job).unwrap().strategies[0]
        .candidate
        .clone();
    // The first is faster than predicted by more than is believed; then each is slower again, or so slow that nothing is
    // left, or nobody can tell.
    for (check_biases, drifts, rounds, reason) in [
        (vec![0.85, 1.1, 1.4, 1.8], vec![0.0], 4, "none of 4 checks"),
        (vec![0.85, 10.0], vec![0.0], 2, "no model of the search space"),
        (vec![0.85], vec![0.0, 0.2, 0.2, 0.2, 0.0], 4, "too noisy"),
    ] {
        let mut world = World {
            check_biases,
            drifts,
            bias: 0.85,
            ..World::default()
        };
        let outcome = world.run(&job).unwrap();
        let chosen = &outcome.strategies[0];
        assert_eq!((&chosen.candidate, chosen.rounds), (&first, rounds), "{reason}");
        assert_eq!(world.rounds(Strategy::Heterogeneous), rounds as usize);
        let latency = &outcome.limits[0];
        assert!(latency.checked.inside && latency.verified.inside, "{latency:?}");
        assert!((latency.checked.error + 0.15).abs() < 1e-9, "{latency:?}");
        let stands = |note: &&String| note.contains("the choice of check-heterogeneous-1 stands");
        let note = outcome.notes.iter().find(stands).unwrap();
        assert!(note.contains(reason), "{note}");
    }
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
}

#[test]
fn an_export_that_nobody_can_measure_is_kept_and_its_limits_on_time_are_not_shown_to_be_met() {
    let mut world = World {
        drifts: vec![0.0, 0.2],
        ..World::default()
    };
    let outcome = world
        .run(&spec(
            r#"{"latency": "75%", "memory": "99%"}"#,
            r#"["heterogeneous"]"#,
        ))
        .unwrap();
    let [latency, memory] = &outcome.limits[..] else {
        panic!("{:?}", outcome.limits)
    };
    let verified = &latency.verified;
    assert!(verified.noisy && !verified.inside && verified.value <= verified.limit);
    assert!(
        memory.verified.inside && !memory.verified.noisy,
        "bytes are counted"
    );
    let missed = outcome::LimitReport::missed(&outcome.limits);
    assert!(
        missed.starts_with("latency is") && missed.ends_with("too noisy to tell"),
        "{missed}"
    );
    let noted = |note: &String| note.starts_with("verify-3 was noisy, as all before it");
    assert!(outcome.notes.iter().any(noted), "{:?}", outcome.notes);
}

#[test]
fn a_reading_of_a_build_that_could_not_be_too_noisy_still_reads() {
    let outcome = World::default()
        .run(&spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#))
        .unwrap();
    let text = serde_json::to_string(&outcome).unwrap();
    assert!(!text.contains("noisy\":"), "a quiet one is written as it was");
    let again: Outcome = serde_json::from_str(&text).unwrap();
    assert_eq!(again, outcome);
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
    let whole = measurement(&parent(), 1.0);
    let latency = whole.latency_ms.median * 0.9;
    let throughput = whole.throughput_tokens_per_second.median / 0.9;
    for (limit, when_profiled) in [
        (format!(r#"{{"latency": "{latency}ms"}}"#), latency / 1.15),
        (format!(r#"{{"throughput": "{throughput}"}}"#), throughput * 1.15),
    ] {
        let mut world = World {
            pace: 1.15,
            ..World::default()
        };
        let outcome = world.run(&spec(&limit, BOTH)).unwrap();
        let rounds = world.rounds(Strategy::Heterogeneous);
        assert_eq!(rounds, 2, "{limit}: {:?}", outcome.notes);
        let [reported] = &outcome.limits[..] else {
            panic!("{:?}", outcome.limits)
        };
        assert!(reported.verified.inside);
        for reading in [&reported.checked, &reported.verified] {
            assert!(reading.error.abs() < 1e-9, "the pace counts once: {reading:?}");
        }
        assert!(
            (reported.limit / when_profiled - 1.0).abs() < 1e-9,
            "{reported:?}"
        );
    }
}

#[test]
fn a_share_is_kept_as_it_is_beside_an_absolute_limit_on_a_slower_machine() {
    let chosen = |limits: &str| {
        let mut world = World {
            bias: 1.12,
            pace: 1.15,
            ..World::default()
        };
        let outcome = world.run(&spec(limits, BOTH)).unwrap();
        assert_eq!(world.rounds(Strategy::Heterogeneous), 2, "{:?}", outcome.notes);
        let share = &outcome.limits.last().unwrap().checked;
        assert!(share.error.abs() < 1e-9, "{share:?}");
        let each = outcome.strategies.iter();
        each.map(|strategy| strategy.candidate.clone())
            .collect::<Vec<_>>()
    };
    let alone = chosen(r#"{"first_token": "75%"}"#);
    assert_eq!(chosen(r#"{"latency": "1min", "first_token": "75%"}"#), alone);
}

#[test]
fn what_can_be_reached_is_said_of_the_machine_as_it_is_now() {
    // The check shows everything twice as slow as the table says, and the machine at half its pace.
    let mut world = World {
        bias: 2.0,
        pace: 2.0,
        ..World::default()
    };
    let base = 9.0 * 4.0;
    let limit = base * 3.0;
    let error = world
        .run(&spec(
            &format!(r#"{{"latency": "{limit}ms"}}"#),
            r#"["heterogeneous"]"#,
        ))
        .unwrap_err()
        .to_string();
    let said = format!(
        "latency at most {limit:.1} ms; the best that can be reached is {:.1} ms",
        base * 4.0
    );
    assert!(error.contains(&said), "{error}");
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
fn what_is_clearly_inside_or_outside_a_limit_is_told_however_the_machine_drifts() {
    // A share knows no drift, only the scatter of the two against each other; a limit in milliseconds knows both.
    let latency = 0.75 * measurement(&parent(), 1.0).latency_ms.median;
    let absolute = format!(r#"{{"latency": "{latency}ms"}}"#);
    let generous = format!(r#"{{"latency": "{}ms"}}"#, 2.0 * latency);
    for (limit, scatter, told) in [
        (r#"{"latency": "75%"}"#, 0.001, true),
        (r#"{"latency": "75%"}"#, 0.3, false),
        (absolute.as_str(), 0.001, false),
        // Far inside, whatever was predicted.
        (generous.as_str(), 0.001, true),
    ] {
        let mut world = World {
            drifts: vec![0.2],
            scatter: Some(scatter),
            check_biases: vec![0.95],
            bias: 0.95,
            ..World::default()
        };
        let found = world.run(&spec(limit, r#"["heterogeneous"]"#));
        match found {
            Ok(outcome) => {
                assert!(told, "{limit} {scatter}");
                assert!(outcome.limits[0].verified.inside && !outcome.limits[0].verified.noisy);
            }
            Err(error) => {
                assert!(!told, "{limit} {scatter}: {error}");
                assert!(error.to_string().contains("too noisy"), "{error}");
            }
        }
    }
}

#[test]
fn what_is_given_away_for_doubts_is_had_back_once_a_check_has_told_them() {
    let chosen = |limit: &str, spread, rounds| {
        let mut world = World {
            spread,
            ..World::default()
        };
        let job = spec(&format!(r#"{{"latency": "{limit}"}}"#), r#"["heterogeneous"]"#);
        let outcome = world.run(&job).unwrap();
        assert_eq!(world.rounds(Strategy::Heterogeneous), rounds, "{limit} {spread}");
        assert!(outcome.limits[0].verified.inside);
        (outcome.strategies[0].block_parameters, outcome.notes)
    };
    let (sure, _) = chosen("75% at 90%", 0.01, 1);
    let (doubted, notes) = chosen("75% at 90%", 0.6, 2);
    // The first choice gave a seventh of the limit away.
    let spare = |note: &String| note.contains("with 15% to spare for doubts of its prediction");
    assert!(notes.iter().any(spare), "{notes:?}");
    assert!(10 * doubted > 9 * sure, "{doubted} {sure}");
    // Without a confidence there is but a margin, and that is small.
    chosen("75%", 0.6, 1);
}

#[test]
fn a_choice_that_doubts_did_not_make_worse_stands_without_a_second_check() {
    let mut world = World {
        spread: 0.6,
        ..World::default()
    };
    let limits = r#"{"latency": "100% at 90%", "block_parameters": "60%"}"#;
    let outcome = world.run(&spec(limits, r#"["heterogeneous"]"#)).unwrap();
    assert_eq!(world.rounds(Strategy::Heterogeneous), 1);
    let stands = |note: &String| {
        note.contains("check-heterogeneous-1 stands, which was inside the limits: no better one")
    };
    assert!(outcome.notes.iter().any(stands), "{:?}", outcome.notes);
}

#[test]
fn memory_that_was_predicted_wrongly_is_corrected_however_times_drift() {
    for drift in [0.0, 0.2] {
        let mut world = World {
            drifts: vec![drift],
            memory_bias: 0.8,
            ..World::default()
        };
        let outcome = world
            .run(&spec(r#"{"memory": "95%"}"#, r#"["heterogeneous"]"#))
            .unwrap();
        assert!(outcome.limits[0].verified.inside);
        assert_eq!(world.rounds(Strategy::Heterogeneous), 2, "drift {drift}");
    }
}

#[test]
fn a_limit_on_memory_is_not_met_by_what_leaves_the_context_out() {
    let mut world = World {
        without_context: true,
        ..World::default()
    };
    let limits = r#"{"latency": "75%", "memory": "99%"}"#;
    let error = world.run(&spec(limits, BOTH)).unwrap_err();
    assert!(
        error.to_string().contains("others held memory of the device"),
        "{error}"
    );
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert!(
        outcome.limits.iter().all(|limit| limit.verified.inside),
        "nobody asked for it"
    );
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
