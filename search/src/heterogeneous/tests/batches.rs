//! Choices among several numbers of sequences that run together.

use super::*;
use crate::fixtures::{attention, mlp, table};
use crate::{Corrections, CostTable, Limit, Limits, Point, Subject, Workload, plan};

fn workload(concurrency: usize) -> Workload {
    Workload {
        prompt_tokens: 4,
        output_tokens: 2,
        concurrency,
    }
}

fn row(subject: Subject, sequences: usize, milliseconds: f64) -> (Subject, Point, f64, f64) {
    let context = 4;
    (subject, Point::Decode { context, sequences }, milliseconds, 0.0)
}

/// Times of [`small`] in vLLM: each part takes 1 ms for prompts, and so many for a step of one sequence and of two.
fn timed(parts: &[(Subject, Option<f64>, Option<f64>)]) -> CostTable {
    let mut rows = Vec::new();
    for (subject, alone, together) in parts {
        for (sequences, step) in [(1, alone), (2, together)] {
            if let Some(step) = step {
                let point = Point::Prefill { tokens: 4, sequences };
                rows.push((subject.clone(), point, 1.0, 0.0));
                rows.push(row(subject.clone(), sequences, *step));
            }
        }
    }
    let mut table = table(&rows);
    table.key.engine = "vllm".to_owned();
    table
}

/// Two together take 3 ms for each part whatever its size; one alone is faster, but for the whole MLP.
fn narrow_alone() -> Vec<(Subject, Option<f64>, Option<f64>)> {
    vec![
        (Subject::Base { vocab_size: 100 }, Some(0.1), Some(3.0)),
        (Subject::Block(attention(2)), Some(0.1), Some(3.0)),
        (Subject::Block(mlp(64)), Some(20.0), Some(3.0)),
        (Subject::Block(mlp(32)), Some(0.1), Some(3.0)),
    ]
}

/// Every MLP of [`small`] may be halved, at a loss of 1, and its first block be `other`, at a loss of 5.
fn scores(other: Option<&Variant>) -> Vec<Score> {
    let score = |block, variant: &Variant, divergence| Score {
        block,
        variant: variant.clone(),
        divergence,
        standard_error: 0.0,
        tokens: 1,
    };
    let halved = Variant::Mlp { channels: 32 };
    let mut scores: Vec<Score> = [1, 3, 5].map(|block| score(block, &halved, 1.0)).into();
    scores.extend(other.map(|variant| score(0, variant, 5.0)));
    scores
}

/// What is chosen where the throughput of the whole, two together, is just kept.
fn chosen(parts: &[(Subject, Option<f64>, Option<f64>)], scores: Vec<Score>, share: f64) -> Fitted {
    let table = timed(parts);
    let known = plan::Known::new(small(), scores);
    let mut model = CostModel::new(&table, &workload(2), &small(), f32(), None).unwrap();
    let whole = model.predict(&small()).unwrap().figures;
    let whole = whole.throughput_tokens_per_second.unwrap();
    let question = Question {
        parent: &known.parent,
        variants: &known.variants,
        scores: Some(&known.scores),
        limits: &[AbsoluteLimit::new(Metric::Throughput, whole * share)],
        count: 1,
        distance: 1,
    };
    choose(&question, &mut model, &Options::default()).unwrap()
}

fn found(fitted: Fitted) -> Choice {
    let Fitted::Found(choices) = fitted else {
        panic!("nothing found: {fitted:?}")
    };
    choices.into_iter().next().unwrap()
}

#[test]
fn a_choice_that_keeps_the_margin_goes_before_one_of_less_loss_that_lies_at_the_limit() {
    let choice = found(chosen(&narrow_alone(), scores(None), 0.999_999));
    assert_eq!((choice.running, choice.score), (1, 3.0));
    assert!(choice.margin >= LEAST_MARGIN);
    assert_eq!(choice.score_bound, 0.0, "two together are inside without loss");
    assert_eq!(choice.gap, 1.0);
    // With room for the margin it is the loss that counts.
    let choice = found(chosen(&narrow_alone(), scores(None), 0.9));
    assert_eq!((choice.running, choice.score), (2, 0.0));
}

#[test]
fn a_size_without_a_time_at_one_number_is_left_out_there_alone_and_it_is_said() {
    let mut parts = narrow_alone();
    parts.push((Subject::Block(attention(1)), None, Some(3.0)));
    let halved = Variant::Attention { kv_groups: 1 };
    let choice = found(chosen(&parts, scores(Some(&halved)), 0.999_999));
    assert_eq!((choice.running, choice.score), (1, 3.0));
    let notes = choice.notes();
    assert!(
        notes[0].contains("1 variants have no time at 1 sequences together"),
        "{notes:?}"
    );
}

#[test]
fn nothing_is_proven_of_numbers_that_were_not_measured_and_each_is_named() {
    let alone_unknown: Vec<_> = narrow_alone()
        .into_iter()
        .map(|(subject, _, together)| (subject, None, together))
        .collect();
    let table = timed(&alone_unknown);
    let known = plan::Known::new(small(), scores(None));
    let ask = |concurrency: usize, throughput: f64| {
        let mut table = table.clone();
        for row in &mut table.rows {
            row.point = match row.point {
                Point::Prefill { tokens, .. } => Point::Prefill {
                    tokens,
                    sequences: concurrency,
                },
                Point::Decode { context, .. } => Point::Decode {
                    context,
                    sequences: concurrency,
                },
            };
        }
        let workload = workload(concurrency);
        let mut model = CostModel::new(&table, &workload, &small(), f32(), None).unwrap();
        let question = Question {
            parent: &known.parent,
            variants: &known.variants,
            scores: Some(&known.scores),
            limits: &[AbsoluteLimit::new(Metric::Throughput, throughput)],
            count: 1,
            distance: 1,
        };
        choose(&question, &mut model, &Options::default()).unwrap()
    };
    let unseen = "2, 1 sequences together were not considered";
    let choice = found(ask(3, 1.0));
    assert_eq!((choice.running, choice.score), (3, 0.0));
    assert!(choice.notes()[0].contains(unseen), "{:?}", choice.notes());
    let Fitted::Impossible(impossible) = ask(3, 1e9) else {
        panic!("6 tokens take more than a microsecond")
    };
    assert!(!impossible.proven);
    assert!(impossible.unmeasured.as_ref().unwrap().contains(unseen));
    let Fitted::Impossible(impossible) = ask(1, 1e9) else {
        panic!("2 tokens take more than a microsecond")
    };
    assert!(impossible.proven, "one is all there is");
}

#[test]
fn a_plan_answers_at_the_numbers_that_were_measured_where_its_limits_are_absolute() {
    let alone_known: Vec<_> = narrow_alone()
        .into_iter()
        .map(|(subject, alone, _)| (subject, alone, None))
        .collect();
    let table = timed(&alone_known);
    let known = plan::Known::new(small(), scores(None));
    let ask = |limit: &str| {
        let limit = Limit::parse(Metric::Throughput, limit).unwrap();
        let target = plan::Target {
            table: &table,
            memory: f32(),
            whole: None,
            workload: workload(2),
            limits: &Limits::new([limit]).unwrap(),
            extrapolate: false,
            corrections: Corrections::default(),
            disturbed: false,
        };
        plan::answer(&known, &target, 4, &Options::default())
    };
    let answer = ask("1").unwrap();
    assert_eq!(answer.chosen.unwrap().running, 1);
    assert!(
        answer.notes[0].contains("2 sequences together were not considered"),
        "{:?}",
        answer.notes
    );
    assert_eq!(
        answer.notes[1],
        "1 of 2 sequences run together and the others wait: --max-num-seqs 1"
    );
    // A share of what is not known says nothing.
    let message = ask("50%").unwrap_err().to_string();
    assert!(message.contains("but 2 is asked for"), "{message}");
}
