//! Predictions of planted truths, and choices against brute force over whole candidates.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::cast_precision_loss)]

use espalier_arch::{
    Activation, Architecture, Attention, Block, BlockShape, Candidate, Family, Mlp, Storage, Variant,
    WeightFormat,
};
use espalier_search::heterogeneous::{Fitted, Question, choose};
use espalier_search::solver::Options;
use espalier_search::{
    AbsoluteLimit, CostKey, CostModel, CostRow, CostTable, MemoryModel, Metric, Mode, Point, Score, Space,
    Subject, Workload,
};
use proptest::prelude::*;

const WORKLOAD: Workload = Workload {
    prompt_tokens: 8,
    output_tokens: 3,
    concurrency: 4,
};

fn attention(kv_groups: usize) -> BlockShape {
    BlockShape::Attention(Attention {
        kv_groups,
        queries_per_group: 2,
        head_dim: 8,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    })
}

fn mlp(channels: usize) -> BlockShape {
    BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::SwiGlu,
        bias: false,
    })
}

fn parent(layers: usize) -> Architecture {
    let layer = |layer| [attention(2), mlp(64)].map(|shape| Block { layer, shape });
    Architecture {
        family: Family::Llama,
        vocab_size: 64,
        hidden: 16,
        layers,
        blocks: (0..layers).flat_map(layer).collect(),
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 64,
    }
}

fn table(engine: &str, rows: Vec<(Subject, Point, f64, f64)>) -> CostTable {
    let row = |(subject, point, median_ms, spread_ms)| CostRow {
        subject,
        point,
        median_ms,
        spread_ms,
        repeats: 9,
    };
    CostTable {
        key: CostKey {
            device: "planted".to_owned(),
            engine: engine.to_owned(),
            engine_version: "0".to_owned(),
            precision: "f32".to_owned(),
            hidden: 16,
            parallelism: 1,
            mode: Mode::Graphs,
            environment: std::collections::BTreeMap::new(),
        },
        rows: rows.into_iter().map(row).collect(),
        memory: None,
    }
}

fn f32() -> MemoryModel {
    MemoryModel::unpaged(Storage::all(WeightFormat::F32))
}

const PROMPT: Point = Point::Prefill {
    tokens: 8,
    sequences: 4,
};

/// First token of one MLP, with its error.
fn first_token(table: &CostTable, channels: usize) -> (f64, f64) {
    let workload = Workload {
        output_tokens: 1,
        ..WORKLOAD
    };
    let mut model = parent(1);
    model.blocks = vec![Block {
        layer: 0,
        shape: mlp(channels),
    }];
    let costs = CostModel::new(table, &workload, &model, f32(), None).unwrap();
    let prediction = costs.predict(&model).unwrap();
    (
        prediction.figures.first_token_ms.unwrap(),
        prediction.errors.first_token_ms.unwrap(),
    )
}

fn widths(times: impl Iterator<Item = (usize, f64)>, spread: f64) -> CostTable {
    let base = (Subject::Base { vocab_size: 64 }, PROMPT, 0.0, 0.0);
    let rows = times.map(|(channels, time)| (Subject::Block(mlp(channels)), PROMPT, time, spread));
    table("builtin", rows.chain([base]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_wider_block_never_costs_less_where_no_measured_one_does(
        steps in prop::collection::vec(0.0_f64..3.0, 3..7),
        one in 64_usize..192,
        other in 64_usize..192,
    ) {
        let mut time = 0.5;
        let times: Vec<(usize, f64)> = steps.iter().enumerate().map(|(index, step)| {
            time += step;
            (64 * (index + 1), time)
        }).collect();
        let table = widths(times.into_iter(), 0.0);
        let (narrow, wide) = (one.min(other), one.max(other));
        prop_assert!(first_token(&table, narrow).0 <= first_token(&table, wide).0 + 1e-12);
    }

    /// A kernel's time bends with its width, and steps where a tile begins; measured every 128 channels, exactly, so that
    /// nothing but the error of the line can hold the truth.
    #[test]
    fn two_standard_errors_of_the_line_hold_the_truth_between_measured_widths(
        bend in -3.0_f64..3.0,
        tile in 0.0_f64..0.2,
        channels in 130_usize..1020,
    ) {
        let truth = |channels: usize| {
            let share = channels as f64 / 1024.0;
            4.0 + 4.0 * share + bend * share * share + tile * channels.div_ceil(64) as f64 / 16.0
        };
        let measured = (1..=8).map(|step| (step * 128, truth(step * 128)));
        let (predicted, error) = first_token(&widths(measured, 0.0), channels);
        // A step of one tile is not seen by points that are whole tiles apart: it is allowed for by itself.
        let unseen = tile / 16.0;
        prop_assert!(
            (predicted - truth(channels)).abs() <= 2.0 * error + unseen + 1e-12,
            "{predicted} ± {error}, but {}", truth(channels)
        );
    }

    /// The same of what is measured with noise: twice the error holds it where the line is straight.
    #[test]
    fn two_standard_errors_hold_the_noise_of_measured_widths(
        noise in prop::collection::vec(-1.0_f64..1.0, 8),
        channels in 130_usize..1020,
    ) {
        let truth = |channels: usize| 1.0 + channels as f64 / 512.0;
        let spread = 0.01;
        let measured = (1..=8).zip(&noise).map(|(step, noise)| (step * 128, truth(step * 128) + spread * noise));
        let (predicted, error) = first_token(&widths(measured, spread), channels);
        // Nine repeats lie within the spread of their median; the median's own error is a third of that and more.
        prop_assert!((predicted - truth(channels)).abs() <= 2.0 * error + spread, "{predicted} ± {error}");
    }
}

/// Every candidate of a space.
fn candidates(variants: &[Vec<Variant>]) -> Vec<Candidate> {
    let mut all: Vec<Vec<Variant>> = vec![vec![]];
    for block in variants {
        let longer = all.iter().flat_map(|begun| {
            block
                .iter()
                .map(move |variant| [begun.clone(), vec![variant.clone()]].concat())
        });
        all = longer.collect();
    }
    all.into_iter().map(|variants| Candidate { variants }).collect()
}

/// Times at one prompt alone, four together, and decoding at 1, 2 and 4; the host's floor, its time for each block, and
/// what the device waits for, each for prompts and for decoding.
fn continuous(times: &[f64], host: Option<Vec<(f64, f64)>>) -> CostTable {
    let subjects = [
        Subject::Base { vocab_size: 64 },
        Subject::Block(attention(2)),
        Subject::Block(attention(1)),
        Subject::Block(mlp(64)),
        Subject::Block(mlp(32)),
    ];
    let mut rows = Vec::new();
    for (subject, time) in subjects.into_iter().zip(times) {
        for (sequences, factor) in [(1, 3.0), (4, 9.0)] {
            let point = Point::Prefill { tokens: 8, sequences };
            rows.push((subject.clone(), point, time * factor, 0.0));
        }
        for (sequences, factor) in [(1, 1.0), (2, 1.25), (4, 1.75)] {
            for context in [8, 9] {
                rows.push((
                    subject.clone(),
                    Point::Decode { context, sequences },
                    time * factor,
                    0.0,
                ));
            }
        }
    }
    let parts = [Subject::HostFloor, Subject::HostBlock, Subject::HostAlone];
    for (subject, (prefill, decode)) in parts.into_iter().zip(host.into_iter().flatten()) {
        for sequences in [1, 4] {
            let point = Point::Prefill { tokens: 8, sequences };
            rows.push((subject.clone(), point, prefill, 0.0));
        }
        for sequences in [1, 2, 4] {
            for context in [8, 9] {
                rows.push((subject.clone(), Point::Decode { context, sequences }, decode, 0.0));
            }
        }
    }
    table("vllm", rows)
}

fn scores(variants: &[Vec<Variant>], losses: &[f64]) -> Vec<Score> {
    let each = variants.iter().enumerate().flat_map(|(block, variants)| {
        variants
            .iter()
            .enumerate()
            .map(move |(step, variant)| (block, step, variant.clone()))
    });
    each.map(|(block, step, variant)| Score {
        block,
        variant,
        divergence: losses[(block * 3 + step) % losses.len()] * step as f64,
        standard_error: 0.0,
        tokens: 1,
    })
    .collect()
}

const EXACT: Options = Options {
    relative_gap: 0.0,
    work: 50_000_000,
};

fn least_score(
    parent: &Architecture,
    variants: &[Vec<Variant>],
    scores: &[Score],
    model: &mut CostModel,
    limits: &[AbsoluteLimit],
    batches: std::ops::RangeInclusive<usize>,
) -> Option<f64> {
    let score_of = |candidate: &Candidate| -> f64 {
        let each = candidate.variants.iter().enumerate().map(|(block, variant)| {
            let known = scores
                .iter()
                .find(|score| score.block == block && score.variant == *variant);
            known.unwrap().divergence
        });
        each.sum()
    };
    let mut least: Option<f64> = None;
    for running in batches {
        model.run_together(running).unwrap();
        for candidate in candidates(variants) {
            let architecture = parent.with_candidate(&candidate).unwrap();
            let mut blocks = architecture.blocks.iter();
            if model.needs_attention() && !blocks.any(|block| matches!(block.shape, BlockShape::Attention(_)))
            {
                continue;
            }
            let prediction = model.predict(&architecture).unwrap();
            let kept = |limit: &AbsoluteLimit| limit.admits(prediction.figures.get(limit.metric).unwrap());
            if limits.iter().all(kept) {
                let score = score_of(&candidate);
                least = Some(least.map_or(score, |least| least.min(score)));
            }
        }
    }
    least
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn throughput_and_latency_are_kept_at_the_least_score_of_all_candidates_and_batches(
        times in prop::collection::vec(0.2_f64..2.0, 5),
        losses in prop::collection::vec(0.1_f64..3.0, 12),
        floor in (0.5_f64..15.0, 0.5_f64..2.0),
        block in (0.0_f64..6.0, 0.0_f64..1.0),
        alone in (0.0_f64..4.0, 0.0_f64..0.5),
        is_hosted in prop::bool::ANY,
        is_latency in prop::bool::ANY,
        throughput in 0.6_f64..2.5,
        latency in 0.3_f64..1.1,
        memory in 0.3_f64..1.1,
    ) {
        let parent = parent(2);
        let variants = Space { mlp_grid: Some(32), ..Space::default() }.all_variants(&parent).unwrap();
        let scores = scores(&variants, &losses);
        let host = is_hosted.then(|| vec![floor, block, alone]);
        let table = continuous(&times, host);
        let mut model = CostModel::new(&table, &WORKLOAD, &parent, f32(), None).unwrap();
        let whole = model.predict(&parent).unwrap().figures;
        // Where a latency is limited all run together; the time of a token is that of any number.
        let (timed, batches) = if is_latency { (Metric::Latency, 4..=4) } else { (Metric::PerToken, 1..=4) };
        // A hair looser than round, so that no sum lies exactly at a limit.
        let limits = [
            (timed, latency * 1.000_001),
            (Metric::Throughput, throughput * 0.999_999),
            (Metric::Memory, memory * 1.000_001),
        ].map(|(metric, share)| AbsoluteLimit::new(metric, whole.get(metric).unwrap() * share));
        let best = least_score(&parent, &variants, &scores, &mut model, &limits, batches);
        // A margin is no part of what is asked here: a confidence of one half asks for none.
        let limits = limits.map(|limit| AbsoluteLimit {
            confidence: limit.metric.is_timed().then_some(0.5),
            ..limit
        });
        let question = Question {
            parent: &parent,
            variants: &variants,
            scores: Some(&scores),
            limits: &limits,
            count: 1,
            distance: 1,
        };
        let fitted = choose(&question, &mut model, &EXACT).unwrap();
        match (fitted, best) {
            (Fitted::Found(choices), Some(best)) => {
                prop_assert!((choices[0].score - best).abs() < 1e-9, "{} instead of {best}", choices[0].score);
                prop_assert_eq!(choices[0].running, model.running());
            }
            (Fitted::Impossible(_), None) => {}
            (fitted, best) => prop_assert!(false, "{fitted:?}, brute force {best:?}"),
        }
    }
}
