//! Drives [`plan`] through whole jobs with a made-up worker.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_arch::{Activation, Architecture, Attention, Block, BlockShape, Family, Mlp, Variant};
use espalier_proto::task::{
    ArtifactId, Exported, Ingested, MeasuredPair, ParentRef, Profile, Profiled, Quality, Recovered,
    ScoreBlock, Shard, TaskOutput, TaskSpec,
};
use espalier_search::{
    Corrections, CostKey, CostModel, CostRow, CostTable, Measurement, Point, Score, Subject, Summary,
    Workload,
};

use super::*;
use crate::spec::Strategy;

const WORKLOAD: Workload = Workload {
    prompt_tokens: 16,
    output_tokens: 9,
    concurrency: 1,
};

fn parent() -> Architecture {
    let attention = BlockShape::Attention(Attention {
        kv_groups: 2,
        queries_per_group: 2,
        head_dim: 8,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    });
    let mlp = BlockShape::Mlp(Mlp {
        channels: 128,
        activation: Activation::SwiGlu,
        bias: false,
    });
    let blocks =
        (0..4).flat_map(|layer| [attention.clone(), mlp.clone()].map(|shape| Block { layer, shape }));
    Architecture {
        family: Family::Llama,
        vocab_size: 100,
        hidden: 32,
        layers: 4,
        blocks: blocks.collect(),
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 256,
    }
}

fn spec(limits: &str, strategies: &str) -> JobSpec {
    serde_json::from_str(&format!(
        r#"{{"parent": "p", "data": {{"train": ["t.txt"]}}, "output": "out",
            "target": {{"workload": {{"prompt_tokens": 16, "output_tokens": 9}}, "limits": {limits}}},
            "search": {{"mlp_grid": 32, "strategies": {strategies}}}}}"#
    ))
    .unwrap()
}

/// A worker that measures what a true cost model says, times a pace, and answers everything else plausibly.
struct World {
    /// How much slower candidates run than the table says.
    bias: f64,
    /// How much slower exported models run than checked ones, a verification each; then as checked.
    verify_biases: Vec<f64>,
    /// Drift of the parent in each measurement; the last one for all that follow.
    drifts: Vec<f64>,
    /// How much slower the machine is now than when it profiled.
    pace: f64,
    log: Vec<Stage>,
}

impl Default for World {
    fn default() -> Self {
        Self {
            bias: 1.0,
            verify_biases: Vec::new(),
            drifts: vec![0.0],
            pace: 1.0,
            log: Vec::new(),
        }
    }
}

fn milliseconds(shape: &BlockShape) -> f64 {
    match shape {
        BlockShape::Attention(attention) => 1.0 + attention.kv_groups as f64,
        BlockShape::Mlp(mlp) => 0.5 + mlp.channels as f64 / 32.0,
        _ => 0.0,
    }
}

fn rows(profile: &Profile) -> Vec<CostRow> {
    let subjects = profile
        .shapes
        .iter()
        .map(|shape| (Subject::Block(shape.clone()), milliseconds(shape)));
    let base = (Subject::Base { vocab_size: 100 }, 4.0);
    let row = |subject: &Subject, point: &Point, median_ms| CostRow {
        subject: subject.clone(),
        point: *point,
        median_ms,
        spread_ms: 0.001,
        repeats: 7,
    };
    subjects
        .chain([base])
        .flat_map(|(subject, ms)| {
            profile
                .points
                .iter()
                .map(move |point| row(&subject, point, ms))
                .collect::<Vec<_>>()
        })
        .collect()
}

fn measurement(architecture: &Architecture, pace: f64) -> Measurement {
    let step: f64 = 4.0
        + architecture
            .blocks
            .iter()
            .map(|block| milliseconds(&block.shape))
            .sum::<f64>();
    let summary = |median: f64| Summary {
        median,
        spread: 0.01 * median,
        samples: vec![median],
    };
    let latency = 9.0 * step * pace;
    Measurement {
        latency_ms: summary(latency),
        first_token_ms: summary(step * pace),
        per_token_ms: summary(step * pace),
        throughput_tokens_per_second: summary(9000.0 / latency),
        memory_bytes: 1_000_000 + 4 * super::context::all_parameters(architecture),
    }
}

fn key() -> CostKey {
    let text = |text: &str| text.to_owned();
    CostKey {
        device: text("d"),
        engine: text("builtin"),
        engine_version: text("1"),
        precision: text("f32"),
        hidden: 32,
    }
}

fn shard() -> Shard {
    Shard {
        artifact: ArtifactId("a".to_owned()),
        sequences: 4,
        sequence_tokens: 512,
    }
}

impl World {
    fn pair(&mut self, candidate: &Architecture, slower: f64) -> TaskOutput {
        let parent_drift = if self.drifts.len() > 1 {
            self.drifts.remove(0)
        } else {
            self.drifts[0]
        };
        TaskOutput::Measured(Box::new(MeasuredPair {
            parent: measurement(&parent(), self.pace),
            candidate: measurement(candidate, self.pace * self.bias * slower),
            parent_drift,
        }))
    }

    fn answer(&mut self, spec: &TaskSpec, exported: &mut Option<Architecture>) -> TaskOutput {
        match spec {
            TaskSpec::Ingest(_) => TaskOutput::Ingest(Box::new(Ingested {
                parent: ParentRef {
                    source: "p".to_owned(),
                    fingerprint: "f".to_owned(),
                    permutation: None,
                },
                architecture: parent(),
                calibration: vec![shard(), shard()],
                scoring: shard(),
                recovery: vec![shard()],
                validation: shard(),
                documents: 9,
                empty_documents: 0,
            })),
            TaskSpec::Profile(profile) => TaskOutput::Profile(Profiled {
                key: key(),
                rows: rows(profile),
                parent: measurement(&parent(), 1.0),
            }),
            TaskSpec::Calibrate(_) => TaskOutput::Calibrate {
                importance: ArtifactId("i".to_owned()),
            },
            TaskSpec::Sort(_) => TaskOutput::Sort {
                permutation: ArtifactId("s".to_owned()),
            },
            TaskSpec::Score(ScoreBlock { block, variants, .. }) => TaskOutput::Score {
                scores: variants
                    .iter()
                    .enumerate()
                    .map(|(index, variant)| Score {
                        block: *block,
                        variant: variant.clone(),
                        divergence: 0.01 * (index as f64 + 1.0) * (*block as f64 + 1.0),
                        standard_error: 0.001,
                        tokens: 2048,
                    })
                    .collect(),
            },
            TaskSpec::DepthOrder(order) => TaskOutput::DepthOrder {
                layers: (0..4).rev().take(order.remove).collect(),
                divergences: vec![0.1; order.remove],
            },
            TaskSpec::Rank(rank) => TaskOutput::Rank {
                divergences: (0..rank.candidates.len())
                    .map(|index| 1.0 + index as f64)
                    .collect(),
            },
            TaskSpec::Check(check) => self.pair(&check.architecture, 1.0),
            TaskSpec::Recover(recover) => TaskOutput::Recover(Recovered {
                weights: ArtifactId("w".to_owned()),
                losses: vec![2.0, 1.0],
                tokens: recover.recipe.tokens,
                kept_untrained: false,
                seconds: 1.0,
            }),
            TaskSpec::Evaluate(evaluate) => {
                let divergence = match &evaluate.student {
                    None => 0.0,
                    Some(student) => {
                        if student.weights.is_some() {
                            0.2
                        } else {
                            0.6
                        }
                    }
                };
                TaskOutput::Evaluate(Quality {
                    divergence,
                    divergence_error: 0.01,
                    perplexity: 20.0 + divergence,
                    benchmarks: vec![],
                })
            }
            TaskSpec::Export(export) => {
                *exported = Some(parent().with_candidate(&export.student.candidate).unwrap());
                TaskOutput::Export(Exported {
                    directory: export.directory.clone(),
                    weight_bytes: 1,
                    parameters: 1,
                    needs_remote_code: true,
                })
            }
            TaskSpec::Verify(_) => {
                let slower = if self.verify_biases.is_empty() {
                    1.0
                } else {
                    self.verify_biases.remove(0)
                };
                self.pair(exported.as_ref().unwrap(), slower)
            }
        }
    }

    /// Plans and answers until the job ends, one stage at a time. Every result crosses JSON, as the journal would.
    fn run(&mut self, spec: &JobSpec) -> std::result::Result<Outcome, PlanError> {
        let mut results = Results::default();
        let mut exported = None;
        let mut running: Vec<PlannedStage> = Vec::new();
        for _ in 0..100 {
            let plan = plan(spec, &results)?;
            if let Some(outcome) = plan.finished {
                return Ok(*outcome);
            }
            for stage in plan.stages {
                assert!(!stage.tasks.is_empty(), "{} has no tasks", stage.stage);
                assert!(
                    stage
                        .tasks
                        .iter()
                        .all(|task| task.spec.kind() == stage.stage.kind())
                );
                let result = StageResult {
                    decision: stage.decision.clone(),
                    finished: None,
                };
                assert!(
                    results.stages.insert(stage.stage, result).is_none(),
                    "{} planned twice",
                    stage.stage
                );
                self.log.push(stage.stage);
                running.push(stage);
            }
            assert!(
                !running.is_empty(),
                "neither a stage nor an outcome after {:?}",
                self.log
            );
            let stage = running.remove(0);
            let outputs = stage
                .tasks
                .iter()
                .map(|task| self.answer(&task.spec, &mut exported))
                .collect();
            results.stages.get_mut(&stage.stage).unwrap().finished = Some(Finished {
                outputs,
                seconds: 2.0,
            });
            results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
        }
        panic!("no end after {:?}", self.log)
    }

    fn rounds(&self, strategy: Strategy) -> usize {
        self.log
            .iter()
            .filter(|stage| matches!(stage, Stage::Check { strategy: of, .. } if *of == strategy))
            .count()
    }
}

const BOTH: &str = r#"["heterogeneous", "uniform"]"#;

#[test]
fn a_job_with_both_strategies_goes_through_every_stage_to_an_outcome_inside_the_limit() {
    let mut world = World::default();
    let outcome = world
        .run(&spec(r#"{"latency": "75%", "memory": "99%"}"#, BOTH))
        .unwrap();
    assert_eq!(outcome.strategies.len(), 2);
    assert_eq!(outcome.strategies[0].strategy, outcome.winner);
    assert_eq!(
        outcome.strategies[0].recovery_tokens,
        outcome.strategies[1].recovery_tokens
    );
    let latency = &outcome.limits[0];
    assert!(latency.verified.inside && latency.verified.value < 0.75 * latency.parent);
    assert!(
        latency.verified.error.abs() < 1e-9,
        "the world is additive: {}",
        latency.verified.error
    );
    assert!(
        latency.predicted <= latency.limit * 0.99 + 1e-9,
        "a margin of at least 1% is kept"
    );
    assert!(!outcome.front.is_empty() && !outcome.grid.is_empty());
    assert!(
        outcome
            .front
            .windows(2)
            .all(|pair| pair[0].value < pair[1].value && pair[0].score > pair[1].score)
    );
    assert_eq!(outcome.stages.len(), world.log.len());
    assert_eq!(outcome.strategies[0].blocks.len(), 8);
    let again: Outcome = serde_json::from_str(&serde_json::to_string(&outcome).unwrap()).unwrap();
    assert_eq!(again, outcome);
}

#[test]
fn a_single_strategy_runs_only_its_own_stages() {
    let mut world = World::default();
    world
        .run(&spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#))
        .unwrap();
    assert!(!world.log.contains(&Stage::DepthOrder) && !world.log.contains(&Stage::Rank { round: 1 }));
    let mut world = World::default();
    world
        .run(&spec(r#"{"latency": "75%"}"#, r#"["uniform"]"#))
        .unwrap();
    assert!(!world.log.contains(&Stage::Score) && world.rounds(Strategy::Uniform) == 1);
}

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

#[test]
fn a_limit_on_time_that_nothing_meets_is_refused_after_the_profile_with_the_best_that_can_be_reached() {
    let mut world = World::default();
    let error = world
        .run(&spec(r#"{"latency": "1ms"}"#, BOTH))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the best that can be reached is 36.0 ms"),
        "{error}"
    );
    assert!(!world.log.contains(&Stage::Score));
}

#[test]
fn a_limit_on_memory_that_nothing_meets_is_refused_before_anything_is_measured() {
    let mut world = World::default();
    let error = world
        .run(&spec(r#"{"memory": "1KiB"}"#, BOTH))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("memory at most") && error.contains("the best that can be reached"),
        "{error}"
    );
    assert_eq!(world.log, [Stage::Ingest]);
}

#[test]
fn without_recovery_tokens_the_untrained_choice_is_exported() {
    let mut job = spec(r#"{"latency": "75%"}"#, BOTH);
    job.budget.recovery_tokens = 0;
    let mut world = World::default();
    let outcome = world.run(&job).unwrap();
    assert!(!world.log.contains(&Stage::Recover));
    assert!(
        outcome
            .strategies
            .iter()
            .all(|strategy| strategy.after.is_none() && strategy.weights.is_none())
    );
}

#[test]
fn every_stage_reads_back_from_its_name() {
    let mut stages = vec![
        Stage::Ingest,
        Stage::DepthOrder,
        Stage::Rank { round: 2 },
        Stage::Verify { round: 3 },
    ];
    stages.extend(
        [Strategy::Heterogeneous, Strategy::Uniform].map(|strategy| Stage::Check { strategy, round: 12 }),
    );
    for stage in stages {
        assert_eq!(stage.to_string().parse(), Ok(stage));
    }
    assert!("check-diagonal-1".parse::<Stage>().is_err());
}

#[test]
fn the_parents_own_prediction_is_the_sum_of_its_blocks() {
    let profile = Profile {
        architecture: parent(),
        shapes: espalier_search::Space::default().shapes(&parent()).unwrap(),
        points: espalier_search::points(&WORKLOAD).unwrap(),
        rounds: 7,
        workload: WORKLOAD,
    };
    let table = CostTable {
        key: key(),
        rows: rows(&profile),
    };
    let model = CostModel::new(&table, &WORKLOAD, &parent(), 4.0, None)
        .unwrap()
        .corrected(Corrections::default());
    let skipped = espalier_arch::Candidate {
        variants: [vec![Variant::Skip], vec![Variant::Whole; 7]].concat(),
    };
    let whole = model.predict(&parent()).unwrap().figures.latency_ms.unwrap();
    let less = model
        .predict(&parent().with_candidate(&skipped).unwrap())
        .unwrap()
        .figures
        .latency_ms
        .unwrap();
    assert!((whole - measurement(&parent(), 1.0).latency_ms.median).abs() < 1e-9);
    assert!((whole - less - 9.0 * 3.0).abs() < 1e-9);
}
