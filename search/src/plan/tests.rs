//! Plans against sums worked out by hand.
#![allow(clippy::unwrap_used, clippy::panic, clippy::cast_precision_loss)]
use super::*;
use crate::fixtures::{f32, prompts, small};

/// [`small`], whose block `b` loses `b + 1` for each size it goes down.
fn known() -> Known {
    let space = crate::Space {
        mlp_grid: Some(32),
        ..crate::Space::default()
    };
    let variants = space.all_variants(&small()).unwrap();
    let mut scores = Vec::new();
    for (block, variants) in variants.iter().enumerate() {
        for (step, variant) in variants.iter().enumerate().skip(1) {
            scores.push(Score {
                block,
                variant: variant.clone(),
                divergence: (block as f64 + 1.0) * step as f64,
                standard_error: 0.1,
                tokens: 1,
            });
        }
    }
    Known::new(small(), scores)
}

fn target<'a>(table: &'a CostTable, limits: &'a Limits, workload: Workload) -> Target<'a> {
    Target {
        table,
        memory: f32(),
        whole: None,
        workload,
        limits,
        extrapolate: false,
        corrections: Corrections::default(),
        disturbed: false,
    }
}

fn ask(limits: &str, change: impl Fn(&mut Target<'_>)) -> Result<Answer> {
    let (workload, table) = prompts();
    let limits: Limits = serde_json::from_str(limits).unwrap();
    let mut target = target(&table, &limits, workload);
    change(&mut target);
    answer(&known(), &target, 8, &Options::default())
}

#[test]
fn the_limit_whose_relaxing_buys_quality_binds_and_has_a_price() {
    // 31 ms whole; memory is far away. 23 ms needs a loss of 6 (see `heterogeneous`), 24.15 one of 4.
    let answer = ask(r#"{"latency": "23ms", "memory": "3GiB"}"#, |_| {}).unwrap();
    let chosen = answer.chosen.unwrap();
    assert_eq!(chosen.score, 6.0);
    let [latency, memory] = chosen.limits[..] else {
        panic!("two limits")
    };
    assert!(latency.binding && !memory.binding);
    let price = latency.price.unwrap();
    assert!(price.score < 6.0 && price.per_unit > 0.0, "{price:?}");
    assert!(
        (price.per_unit - (6.0 - price.score) / 1.15).abs() < 1e-9,
        "{price:?}"
    );
    assert_eq!(memory.price.unwrap().per_unit, 0.0);
    assert!(!answer.parent_measured);
    assert_eq!(answer.parent.latency_ms, Some(31.0));
}

#[test]
fn the_front_falls_from_what_can_be_reached_to_the_parent_and_keeps_the_other_limits() {
    let free = ask(r#"{"latency": "90%"}"#, |_| {}).unwrap().chosen.unwrap();
    assert_eq!(free.front_metric, Metric::Latency);
    for pair in free.front.windows(2) {
        assert!(pair[0].score > pair[1].score && pair[0].value < pair[1].value);
    }
    // Everything skipped leaves the base, at twice the sum of what one size less loses; the parent loses nothing.
    let ends =
        [free.front.first(), free.front.last()].map(|point| point.map(|point| (point.value, point.score)));
    assert_eq!(ends, [Some((1.0, 42.0)), Some((31.0, 0.0))]);
    let tight = ask(r#"{"latency": "60%", "block_parameters": "80%"}"#, |_| {}).unwrap();
    let tight = tight.chosen.unwrap();
    assert!(
        tight.front.last().unwrap().score > 0.0,
        "fewer parameters cost quality too"
    );
}

#[test]
fn what_cannot_be_reached_is_answered_with_what_can() {
    let answer = ask(r#"{"latency": "0.5ms"}"#, |_| {}).unwrap();
    assert!(answer.chosen.is_none());
    assert_eq!(answer.reachable[0].alone, 1.0);
}

#[test]
fn variants_without_a_time_are_left_out_and_counted() {
    let (workload, mut table) = prompts();
    table
        .rows
        .retain(|row| row.subject != crate::Subject::Block(crate::fixtures::attention(1)));
    let limits: Limits = serde_json::from_str(r#"{"latency": "23ms"}"#).unwrap();
    let target = target(&table, &limits, workload);
    let answer = answer(&known(), &target, 0, &Options::default()).unwrap();
    assert_eq!(answer.unpriced, 3);
    assert!(
        answer.notes[0].starts_with("3 variants have no time"),
        "{:?}",
        answer.notes
    );
    let chosen = answer.chosen.unwrap();
    let halved = Variant::Attention { kv_groups: 1 };
    assert!(!chosen.candidate.variants.contains(&halved));
    assert!(chosen.front.is_empty());
}

#[test]
fn a_workload_that_was_not_measured_is_refused_by_what_is_missing() {
    let longer = |target: &mut Target<'_>| target.workload.prompt_tokens = 8;
    let message = ask(r#"{"latency": "90%"}"#, longer).unwrap_err().to_string();
    assert!(message.contains("prompts of tokens 4 to 4, but 8"), "{message}");
}

#[test]
fn corrections_are_of_what_is_chosen_and_leave_the_parent_as_the_table_has_it() {
    let slower = |target: &mut Target<'_>| target.corrections.first_token = 2.0;
    let answer = ask(r#"{"latency": "60%"}"#, slower).unwrap();
    assert_eq!(answer.parent.latency_ms, Some(31.0));
    let chosen = answer.chosen.unwrap();
    let uncorrected = small().with_candidate(&chosen.candidate).unwrap();
    let (workload, table) = prompts();
    let model = CostModel::new(&table, &workload, &small(), f32(), None).unwrap();
    let alone = model.predict(&uncorrected).unwrap().figures.latency_ms.unwrap();
    assert!(alone <= 0.3 * 31.0, "{alone}");
    assert_eq!(chosen.prediction.figures.latency_ms, Some(2.0 * alone));
    assert!(
        answer.notes[0].contains("time to the first token × 2.000"),
        "{:?}",
        answer.notes
    );
    let free = ask(r#"{"latency": "60%"}"#, |_| {}).unwrap();
    assert!(free.notes.is_empty() && free.chosen.unwrap().score < chosen.score);
}

#[test]
fn a_workload_beyond_the_parents_positions_is_refused_however_it_is_asked_for() {
    let message = ask(r#"{"latency": "90%"}"#, |target| {
        target.workload.prompt_tokens = 256;
        target.extrapolate = true;
    });
    assert_eq!(
        message.unwrap_err().to_string(),
        "workload: prompt_tokens + output_tokens is 257, expected at most 256, the positions the parent was made for"
    );
    let longest = |target: &mut Target<'_>| target.workload.prompt_tokens = 255;
    let unmeasured = ask(r#"{"latency": "90%"}"#, longest).unwrap_err();
    assert!(matches!(unmeasured, Error::Extrapolation { .. }), "{unmeasured}");
}
