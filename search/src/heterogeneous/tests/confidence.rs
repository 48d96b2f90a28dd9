//! Limits with a confidence, and attention that an engine needs, against every candidate there is.

use proptest::prelude::*;

use super::*;
use crate::fixtures::{attention, mlp, table};
use crate::{Checked, Corrections, CostTable, Point, Subject, Workload};

const WORKLOAD: Workload = Workload {
    prompt_tokens: 8,
    output_tokens: 4,
    concurrency: 2,
};
const LOADS: [Point; 3] = [
    Point::Prefill {
        tokens: 8,
        sequences: 2,
    },
    Point::Decode {
        context: 8,
        sequences: 2,
    },
    Point::Decode {
        context: 10,
        sequences: 2,
    },
];

/// Every size of [`small`] timed; of MLPs 32 channels only where `measured`, else on the line between 16 and 64.
fn timed(engine: &str, times: &[(f64, f64)], measured: bool) -> CostTable {
    let narrow = if measured { mlp(32) } else { mlp(16) };
    let subjects = [
        Subject::Base { vocab_size: 100 },
        Subject::Block(attention(2)),
        Subject::Block(attention(1)),
        Subject::Block(mlp(64)),
        Subject::Block(narrow),
    ];
    let mut rows = Vec::new();
    for (place, subject) in subjects.iter().enumerate() {
        for (load, point) in LOADS.iter().enumerate() {
            let (time, share) = times[(place * LOADS.len() + load) % times.len()];
            // Seldom is a smaller block slower, and then by what it scatters.
            let size = [0.3, 1.0, 0.6, 1.2, 0.7][place];
            let time = size * (1.0 + 0.3 * time);
            rows.push((subject.clone(), *point, time, time * share));
        }
    }
    let mut table = table(&rows);
    table.key.engine = engine.to_owned();
    table
}

/// The first two layers of [`small`].
fn parent() -> Architecture {
    let mut parent = small();
    parent.blocks.truncate(4);
    parent.layers = 2;
    parent
}

fn space(skip: bool) -> Vec<Vec<Variant>> {
    let space = Space {
        mlp_grid: Some(32),
        skip,
        ..Space::default()
    };
    space.all_variants(&parent()).unwrap()
}

fn scored(variants: &[Vec<Variant>], losses: &[f64]) -> Vec<Score> {
    let mut scores = Vec::new();
    for (block, variants) in variants.iter().enumerate() {
        for (step, variant) in variants.iter().cloned().enumerate() {
            scores.push(Score {
                block,
                variant,
                divergence: losses[(block * 3 + step) % losses.len()] * step as f64,
                standard_error: 0.0,
                tokens: 1,
            });
        }
    }
    scores
}

/// What a check of one candidate taught.
fn taught(variants: &[Vec<Variant>], sizes: &[usize], error: f64) -> Corrections {
    let each = variants.iter().zip(sizes);
    let candidate = Candidate {
        variants: each
            .map(|(variants, size)| variants[size % variants.len()].clone())
            .collect(),
    };
    Corrections {
        first_token: 1.1,
        decode: 0.8,
        turnover: 1.2,
        memory_bytes: 0.0,
        checked: Some(Checked {
            candidate,
            workload: WORKLOAD,
            running: 2,
            first_token_error: error,
            decode_error: 2.0 * error,
            turnover_error: error,
        }),
    }
}

/// Every candidate that the engine serves, with its score and its prediction.
fn every(model: &CostModel, variants: &[Vec<Variant>], scores: &[Score]) -> Vec<(f64, Prediction)> {
    let mut all: Vec<(f64, Vec<Variant>)> = vec![(0.0, Vec::new())];
    for (block, variants) in variants.iter().enumerate() {
        let longer = all.iter().flat_map(|(score, begun)| {
            variants.iter().map(move |variant| {
                let mut own = scores.iter();
                let own = own
                    .find(|score| score.block == block && score.variant == *variant)
                    .unwrap();
                (
                    score + own.divergence,
                    [&begun[..], std::slice::from_ref(variant)].concat(),
                )
            })
        });
        all = longer.collect();
    }
    let served = |variants: &[Variant]| {
        let attention = [0, 2].into_iter().any(|block| variants[block] != Variant::Skip);
        attention || !model.needs_attention()
    };
    let served = all.into_iter().filter(|(_, variants)| served(variants));
    served
        .map(|(score, variants)| {
            let architecture = parent().with_candidate(&Candidate { variants }).unwrap();
            (score, model.predict(&architecture).unwrap())
        })
        .collect()
}

/// A limit between the least and the largest of a metric at a confidence; exactly one candidate's own where `exact`.
fn limit(
    all: &[(f64, Prediction)],
    metric: Metric,
    share: f64,
    confidence: Option<f64>,
    exact: bool,
) -> AbsoluteLimit {
    let limit = AbsoluteLimit {
        confidence,
        ..AbsoluteLimit::new(metric, 1.0)
    };
    let mut values: Vec<f64> = all
        .iter()
        .map(|(_, prediction)| limit.value_at_confidence(prediction).unwrap())
        .collect();
    values.sort_by(f64::total_cmp);
    let (first, last) = (values[0], values[values.len() - 1]);
    let between = first * 0.97 + share * share * (last - first * 0.97);
    let nearest = values
        .iter()
        .copied()
        .min_by(|one, other| (one - between).abs().total_cmp(&(other - between).abs()));
    AbsoluteLimit {
        value: if exact { nearest.unwrap() } else { between },
        ..limit
    }
}

const EXACT: Options = Options {
    relative_gap: 0.0,
    work: 50_000_000,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// However differently variants scatter: never impossible where a candidate is inside, never another than the best, and
    /// the gate before scoring lets pass exactly what has an answer.
    #[test]
    fn the_best_of_all_candidates_is_found_at_any_confidence(
        times in prop::collection::vec((0.0_f64..1.0, 0.0_f64..0.5), 15),
        losses in prop::collection::vec(0.1_f64..3.0, 12),
        shares in prop::collection::vec(0.0_f64..1.0, 3),
        confidences in prop::collection::vec(0.5_f64..0.999, 3),
        engine in prop::sample::select(vec!["builtin", "vllm"]),
        checked in prop::option::of((prop::collection::vec(0_usize..3, 4), 0.0_f64..0.1)),
        measured: bool,
        exact: bool,
        skip: bool,
    ) {
        let parent = parent();
        let table = timed(engine, &times, measured);
        let mut model = CostModel::new(&table, &WORKLOAD, &parent, f32(), None).unwrap();
        let variants = space(skip);
        if let Some((sizes, error)) = checked {
            model = model.corrected(&taught(&variants, &sizes, error), &parent).unwrap();
        }
        let scores = scored(&variants, &losses);
        let all = every(&model, &variants, &scores);
        let metrics = [Metric::Latency, Metric::FirstToken, Metric::Throughput, Metric::Memory];
        let limits: Vec<AbsoluteLimit> = metrics
            .into_iter()
            .zip(&shares)
            .zip(&confidences)
            // Two of the timed ones at a time, so that most have an answer.
            .filter(|((metric, _), _)| *metric != if measured { Metric::FirstToken } else { Metric::Throughput })
            .map(|((metric, share), confidence)| limit(&all, metric, *share, Some(*confidence), exact))
            .collect();
        let inside = all.iter().filter(|(_, prediction)| {
            limits.iter().all(|limit| limit.admits_prediction(prediction))
        });
        let best = inside.map(|(score, _)| *score).min_by(f64::total_cmp);
        let mut question = Question {
            parent: &parent,
            variants: &variants,
            scores: Some(&scores),
            limits: &limits,
            count: 1,
            distance: 1,
        };
        match (choose(&question, &mut model, &EXACT).unwrap(), best) {
            (Fitted::Found(choices), Some(best)) => {
                let choice = &choices[0];
                prop_assert!((choice.score - best).abs() < 1e-9, "{} instead of {best}", choice.score);
                prop_assert!(choice.score_bound <= best + 1e-9);
                prop_assert!(limits.iter().all(|limit| limit.admits_prediction(&choice.prediction)));
            }
            (Fitted::Impossible(impossible), None) => {
                prop_assert!(impossible.proven);
                for reach in &impossible.limits {
                    let values = all.iter().map(|(_, prediction)| reach.limit.value_at_confidence(prediction).unwrap());
                    let uses: Vec<f64> = values.map(|value| reach.limit.use_of(value)).collect();
                    let least = uses.iter().copied().fold(f64::INFINITY, f64::min);
                    let alone = reach.limit.use_of(reach.alone);
                    // Some candidate has it, and none is better by more than exchanges of single variants see.
                    prop_assert!(uses.iter().any(|used| (used - alone).abs() < 1e-9), "{reach:?}");
                    prop_assert!(alone <= least * 1.02, "{reach:?}, but {least} of it is reached");
                    let together = reach.limit.use_of(reach.together);
                    prop_assert!(uses.iter().any(|used| (used - together).abs() < 1e-9), "{reach:?}");
                }
            }
            (fitted, best) => prop_assert!(false, "{fitted:?}, of all candidates {best:?}"),
        }
        question.scores = None;
        let passes = matches!(choose(&question, &mut model, &Options::default()).unwrap(), Fitted::Found(_));
        prop_assert_eq!(passes, best.is_some());
    }
}

#[test]
fn a_surer_variant_is_taken_where_the_better_one_scatters_across_the_limit() {
    // The whole takes 100 ms, one size of it 90 ± 10 and another 85 ± 0.1.
    let point = Point::Prefill {
        tokens: 4,
        sequences: 1,
    };
    let (workload, _) = prompts();
    let table = table(&[
        (Subject::Base { vocab_size: 100 }, point, 0.0, 0.0),
        (Subject::Block(mlp(64)), point, 100.0, 0.0),
        (Subject::Block(mlp(48)), point, 90.0, 10.0),
        (Subject::Block(mlp(32)), point, 85.0, 0.1),
    ]);
    let mut parent = small();
    parent.blocks = vec![parent.blocks[1].clone()];
    let mut model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
    let size = |channels| Variant::Mlp { channels };
    let variants = [vec![Variant::Whole, size(48), size(32)]];
    let scores: Vec<Score> = [(48, 1.0), (32, 2.0)]
        .into_iter()
        .map(|(channels, divergence)| Score {
            block: 0,
            variant: size(channels),
            divergence,
            standard_error: 0.0,
            tokens: 1,
        })
        .collect();
    let limit = crate::Limit::parse(Metric::Latency, "92ms at 95%").unwrap();
    let limits = [limit.resolve(&Figures::default()).unwrap()];
    let mut question = Question {
        parent: &parent,
        variants: &variants,
        scores: Some(&scores),
        limits: &limits,
        count: 1,
        distance: 1,
    };
    let Fitted::Found(choices) = choose(&question, &mut model, &Options::default()).unwrap() else {
        panic!("85 ms is inside of 92 with certainty")
    };
    assert_eq!(choices[0].candidate.variants, [size(32)]);
    question.scores = None;
    assert!(matches!(
        choose(&question, &mut model, &Options::default()).unwrap(),
        Fitted::Found(_)
    ));
}

#[test]
fn a_block_of_attention_stays_where_the_engine_needs_one_and_that_is_said() {
    let (workload, mut table) = prompts();
    table.key.engine = "vllm".to_owned();
    let fitted = |limit: f64| {
        let parent = small();
        let model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
        let space = Space {
            mlp_grid: Some(32),
            ..Space::default()
        };
        let variants = space.all_variants(&parent).unwrap();
        let each = variants.iter().enumerate().flat_map(|(block, variants)| {
            let steps = variants.iter().enumerate();
            steps.map(move |(step, variant)| Score {
                block,
                variant: variant.clone(),
                divergence: step as f64,
                standard_error: 0.0,
                tokens: 1,
            })
        });
        let scores: Vec<Score> = each.collect();
        Library::new(&parent, &variants, &scores, &model)
            .unwrap()
            .fit(&[latency(limit)], 1, 1, &Options::default())
            .unwrap()
    };
    // The base takes 1 ms and the smaller attention 2.
    let Fitted::Found(choices) = fitted(3.0) else {
        panic!("one block of attention takes 3 ms")
    };
    let kept = Variant::Attention { kv_groups: 1 };
    let mut variants = choices[0].candidate.variants.iter();
    assert_eq!(variants.clone().filter(|variant| **variant == kept).count(), 1);
    assert!(variants.all(|variant| *variant == kept || *variant == Variant::Skip));
    assert!(choices[0].notes()[0].contains("vllm"), "{:?}", choices[0].notes());
    let Fitted::Impossible(impossible) = fitted(2.9) else {
        panic!("without attention it would be 1 ms, with it 3")
    };
    assert_eq!(impossible.limits[0].alone, 3.0);
    assert!(impossible.attention && impossible.proven);
    let Fitted::Found(choices) = fitted(25.0) else {
        panic!("31 ms can be made 25")
    };
    assert!(choices[0].notes().is_empty());
}

#[test]
fn what_can_be_reached_is_the_best_of_all_batches() {
    let (mut workload, _) = prompts();
    (workload.output_tokens, workload.concurrency) = (2, 2);
    let subjects = [
        Subject::Base { vocab_size: 100 },
        Subject::Block(attention(2)),
        Subject::Block(mlp(64)),
    ];
    let mut rows = Vec::new();
    for subject in subjects {
        for sequences in [1, 2] {
            let point = Point::Prefill { tokens: 4, sequences };
            rows.push((subject.clone(), point, 1.0, 0.0));
            let point = Point::Decode {
                context: 4,
                sequences,
            };
            rows.push((subject.clone(), point, 1.0, 0.0));
        }
    }
    let mut table = table(&rows);
    table.key.engine = "vllm".to_owned();
    let parent = small();
    let variants = vec![vec![Variant::Whole]; parent.blocks.len()];
    let mut model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
    let memory = |running: usize| -> f64 {
        let mut model = CostModel::new(&table, &workload, &parent, f32(), None).unwrap();
        model.run_together(running).unwrap();
        model.predict(&parent).unwrap().figures.memory_bytes.unwrap()
    };
    let limits = [
        AbsoluteLimit::new(Metric::Throughput, 1e6),
        AbsoluteLimit::new(Metric::Memory, 1.0),
    ];
    let question = Question {
        parent: &parent,
        variants: &variants,
        scores: None,
        limits: &limits,
        count: 1,
        distance: 1,
    };
    let Fitted::Impossible(impossible) = choose(&question, &mut model, &Options::default()).unwrap() else {
        panic!("nothing fits a byte")
    };
    assert!(memory(1) < memory(2));
    assert_eq!(
        impossible.limits[1].alone,
        memory(1),
        "one sequence needs the least"
    );
    // Two share a step: 4 tokens in 7 ms of steps and twice 7 of prompts.
    assert!(
        (impossible.limits[0].alone - 4000.0 / 21.0).abs() < 1e-9,
        "{impossible:?}"
    );
}
