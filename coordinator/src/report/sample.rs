//! A made-up outcome for the report's tests: every figure is invented.
#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation
)]

use std::path::Path;

use espalier_arch::{
    Activation, Architecture, Attention, Block, BlockKind, BlockShape, Candidate, Family, Mlp, Variant,
};
use espalier_proto::task::{Benchmark, Exported, Quality};
use espalier_search::heterogeneous::FrontPoint;
use espalier_search::{Bound, CostKey, Figures, Measurement, Metric, Mode, Prediction, Summary, WholeParent};

use crate::pipeline::outcome::{
    BlockReport, LimitReport, OUTCOME_SCHEMA, Outcome, ParentReport, Reading, StageCost, StrategyReport,
};
use crate::pipeline::{SolverProof, Stage};
use crate::spec::{JobSpec, Strategy};

const LAYERS: usize = 30;
const SPEC: &str = "
parent: models/<script>alert(1)</script>.gguf
data: {train: [train.jsonl.xz]}
target:
  workload: {prompt_tokens: 128, output_tokens: 32}
  limits: {latency: 75%, throughput: 110%}
";

pub(super) fn outcome() -> Outcome {
    let spec = JobSpec::from_yaml(SPEC, Path::new("/specs")).unwrap();
    Outcome {
        schema: OUTCOME_SCHEMA,
        parent: ParentReport {
            source: spec.parent.clone(),
            fingerprint: "5f3a".repeat(16),
            architecture: architecture(),
            parameters: 134_515_008,
            block_parameters: 106_202_880,
            measurement: WholeParent::Measured(measurement(1042.0)),
            prediction: prediction(1042.0),
            quality: quality(0.0, 22.84, 0.479),
        },
        spec,
        cost_table: None,
        corrections: espalier_search::Corrections::default(),
        target: CostKey {
            device: "a made-up processor, 2 threads".into(),
            engine: "builtin".into(),
            engine_version: "0.1.0".into(),
            precision: "f32".into(),
            hidden: 576,
            parallelism: 1,
            mode: Mode::Eager,
            environment: std::collections::BTreeMap::new(),
        },
        limits: vec![
            limit(Metric::Latency, 0.75, 781.5, 1042.0, 768.0),
            limit(Metric::Throughput, 1.1, 33.8, 30.7, 41.0),
        ],
        winner: Strategy::Heterogeneous,
        strategies: vec![
            strategy(
                Strategy::Heterogeneous,
                quality(0.515, 49.0, 0.39),
                quality(0.281, 33.1, 0.41),
            ),
            strategy(
                Strategy::Uniform,
                quality(0.676, 54.6, 0.37),
                quality(0.352, 36.4, 0.40),
            ),
        ],
        scores: Vec::new(),
        front_metric: Metric::Latency,
        front: (0..=20)
            .map(|step| f64::from(step) / 20.0)
            .map(front_point)
            .collect(),
        grid: Vec::new(),
        export: Exported {
            directory: "out/checkpoint".into(),
            attempt: 0,
            weight_bytes: 398_000_000,
            parameters: 99_000_000,
            needs_remote_code: true,
        },
        serving: None,
        serve_command: None,
        stages: stages(),
        notes: vec!["the first check missed by 3.1%; the table was corrected and solved again".into()],
    }
}

fn front_point(share: f64) -> FrontPoint {
    FrontPoint {
        value: 420.0 + 620.0 * share,
        error: 0.0,
        score: 2.4 * (1.0 - share).powi(3),
    }
}

fn stages() -> Vec<StageCost> {
    let stage = |stage, tasks, tokens, seconds, ended| StageCost {
        stage,
        tasks,
        tokens,
        seconds,
        ended_seconds: Some(ended),
    };
    // The parent is calibrated while it is profiled.
    vec![
        stage(Stage::Ingest, 1, 0, 2.4, 2.4),
        stage(Stage::Profile, 1, 0, 61.0, 63.4),
        stage(Stage::Calibrate, 2, 32_768, 40.2, 42.6),
        stage(Stage::Score, 60, 245_760, 184.0, 247.4),
        stage(
            Stage::Check {
                strategy: Strategy::Heterogeneous,
                round: 1,
            },
            1,
            0,
            21.0,
            268.4,
        ),
        stage(Stage::Recover, 2, 65_536, 351.0, 619.4),
        stage(Stage::Evaluate, 5, 81_920, 64.0, 683.4),
    ]
}

fn architecture() -> Architecture {
    let attention = Attention {
        kv_groups: 3,
        queries_per_group: 3,
        head_dim: 64,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    };
    let mlp = Mlp {
        channels: 1536,
        activation: Activation::SwiGlu,
        bias: false,
    };
    let blocks = (0..LAYERS).flat_map(|layer| {
        [
            Block {
                layer,
                shape: BlockShape::Attention(attention.clone()),
            },
            Block {
                layer,
                shape: BlockShape::Mlp(mlp.clone()),
            },
        ]
    });
    Architecture {
        family: Family::Llama,
        vocab_size: 49_152,
        hidden: 576,
        layers: LAYERS,
        blocks: blocks.collect(),
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 2048,
    }
}

fn strategy(strategy: Strategy, before: Quality, after: Quality) -> StrategyReport {
    let uniform = strategy == Strategy::Uniform;
    let blocks: Vec<BlockReport> = (0..2 * LAYERS)
        .map(|block| block_report(block, uniform))
        .collect();
    let end = if uniform { 0.36 } else { 0.28 };
    let losses = (0..120).map(|step| {
        let wave = ((step * 7 % 11) as f32 - 5.0) / 300.0;
        end + 0.4 * (-(step as f32) / 30.0).exp() + wave
    });
    StrategyReport {
        strategy,
        candidate: Candidate {
            variants: blocks.iter().map(|block| block.variant.clone()).collect(),
        },
        blocks,
        parameters: 99_000_000,
        block_parameters: 71_000_000,
        running: None,
        prediction: prediction(775.0),
        checked: measurement(770.0),
        rounds: 1,
        solved: (!uniform).then_some(SolverProof {
            score: 0.4449,
            bound: 0.4449,
            gap: 0.0,
        }),
        before,
        after: Some(after),
        losses: losses.collect(),
        steps_per_loss: 1,
        recovery_tokens: 32_768,
        recovery_seconds: 12.5,
        kept_untrained: false,
        weights: None,
    }
}

fn block_report(block: usize, uniform: bool) -> BlockReport {
    let (layer, attention) = (block / 2, block.is_multiple_of(2));
    let whole = if attention { 3 } else { 1536 };
    let size = match (attention, uniform) {
        (true, true) => 3,
        (false, true) => 1280,
        (true, false) => [3, 3, 2, 1, 3, 0][layer % 6],
        (false, false) => [1536, 1280, 1024, 768, 1536, 256, 0][layer * 3 % 7],
    };
    let size = if uniform && matches!(layer, 21..=24) {
        0
    } else {
        size
    };
    let variant = match (size, attention) {
        (0, _) => Variant::Skip,
        (_, true) if size == whole => Variant::Whole,
        (_, true) => Variant::Attention { kv_groups: size },
        (_, false) => Variant::Mlp { channels: size },
    };
    let kind = if attention {
        BlockKind::Attention
    } else {
        BlockKind::Mlp
    };
    BlockReport {
        block,
        layer,
        kind,
        variant,
        size,
        whole,
        score: Some(0.01),
    }
}

fn limit(metric: Metric, share: f64, limit: f64, parent: f64, value: f64) -> LimitReport {
    let reading = |value: f64| Reading {
        value,
        spread: value * 0.01,
        parent: Some(parent),
        limit,
        predicted: value * 0.985,
        error: 1.0 / 0.985 - 1.0,
        inside: true,
        noisy: false,
    };
    LimitReport {
        metric,
        asked: Bound::ShareOfParent(share),
        limit,
        parent: Some(parent),
        predicted: value * 0.985,
        predicted_error: value * 0.01,
        checked: reading(value * 1.01),
        verified: reading(value),
    }
}

fn prediction(latency: f64) -> Prediction {
    let figures = Figures {
        latency_ms: Some(latency),
        ..Figures::default()
    };
    Prediction {
        figures,
        errors: Figures {
            latency_ms: Some(latency * 0.01),
            ..Figures::default()
        },
        device: None,
    }
}

fn measurement(latency: f64) -> Measurement {
    let summary = |median: f64| Summary {
        median,
        spread: median * 0.01,
        samples: vec![median; 3],
    };
    Measurement {
        latency_ms: summary(latency),
        first_token_ms: summary(latency / 4.0),
        per_token_ms: summary(latency / 43.0),
        throughput_tokens_per_second: summary(32_000.0 / latency),
        memory_bytes: 700 << 20,
    }
}

fn quality(divergence: f64, perplexity: f64, accuracy: f64) -> Quality {
    let benchmark = |name: &str, shift: f64| Benchmark {
        name: name.to_owned(),
        accuracy: accuracy + shift,
        accuracy_error: 0.033,
        examples: 200,
    };
    Quality {
        divergence,
        divergence_error: divergence * 0.02,
        perplexity,
        benchmarks: vec![benchmark("arc_easy", 0.01), benchmark("piqa <b>", 0.17)],
    }
}
