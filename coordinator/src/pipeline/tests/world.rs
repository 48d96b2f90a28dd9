//! The made-up worker.

use espalier_arch::{Activation, Architecture, Attention, Block, BlockShape, Family, Mlp, Variant};
use espalier_proto::task::{
    ArtifactId, Exported, Ingested, MeasuredPair, ParentRef, Profile, Profiled, Quality, Recovered, Shard,
    TaskOutput, TaskSpec,
};
use espalier_search::{
    CostKey, CostRow, EngineMemory, Measurement, Mode, Point, Score, Shortage, Subject, Summary, WholeParent,
    Workload,
};

use crate::pipeline::*;

use crate::spec::{JobSpec, Strategy};

pub(super) const WORKLOAD: Workload = Workload {
    prompt_tokens: 16,
    output_tokens: 9,
    concurrency: 1,
};

pub(super) fn parent() -> Architecture {
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

pub(super) fn spec(limits: &str, strategies: &str) -> JobSpec {
    serde_json::from_str(&format!(
        r#"{{"parent": "p", "data": {{"train": ["t.txt"]}}, "output": "out",
            "target": {{"workload": {{"prompt_tokens": 16, "output_tokens": 9}}, "limits": {limits}}},
            "search": {{"mlp_grid": 32, "strategies": {strategies}}}}}"#
    ))
    .unwrap()
}

/// A worker that measures what a true cost model says, times a pace, and answers everything else plausibly.
pub(super) struct World {
    /// How much slower candidates run than the table says, a check each; then, and once exported, by `bias`.
    pub(super) check_biases: Vec<f64>,
    /// How much slower candidates run than the table says.
    pub(super) bias: f64,
    /// How much slower exported models run than checked ones, a verification each; then as checked.
    pub(super) verify_biases: Vec<f64>,
    /// Drift of the parent in each measurement; the last one for all that follow.
    pub(super) drifts: Vec<f64>,
    /// By what share repeats of one model lie off their middle, each model's by itself; none where there is but one.
    pub(super) scatter: Option<f64>,
    /// Of the table's times, as a share.
    pub(super) spread: f64,
    /// What candidates take of the memory that is predicted of them.
    pub(super) memory_bias: f64,
    /// The share of times that others disturb.
    pub(super) disturbed: f64,
    /// Whether others hide what the device's context takes.
    pub(super) without_context: bool,
    /// How much slower the machine is now than when it profiled.
    pub(super) pace: f64,
    /// Why nobody can measure the parent.
    pub(super) shortage: Option<Shortage>,
    /// Why nobody can measure it beside a candidate.
    pub(super) beside: Option<Shortage>,
    pub(super) log: Vec<Stage>,
}

impl Default for World {
    fn default() -> Self {
        Self {
            check_biases: Vec::new(),
            bias: 1.0,
            verify_biases: Vec::new(),
            drifts: vec![0.0],
            scatter: None,
            spread: 0.0,
            memory_bias: 1.0,
            disturbed: 0.0,
            without_context: false,
            pace: 1.0,
            shortage: None,
            beside: None,
            log: Vec::new(),
        }
    }
}

pub(super) fn milliseconds(shape: &BlockShape) -> f64 {
    match shape {
        BlockShape::Attention(attention) => 1.0 + attention.kv_groups as f64,
        BlockShape::Mlp(mlp) => 0.5 + mlp.channels as f64 / 32.0,
        _ => 0.0,
    }
}

pub(super) fn rows(profile: &Profile) -> Vec<CostRow> {
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

pub(super) fn measurement(architecture: &Architecture, pace: f64) -> Measurement {
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
        memory_bytes: 1_000_000 + 4 * crate::pipeline::context::all_parameters(architecture),
    }
}

pub(super) fn key() -> CostKey {
    let text = |text: &str| text.to_owned();
    CostKey {
        device: text("d"),
        engine: text("builtin"),
        engine_version: text("1"),
        precision: text("f32"),
        hidden: 32,
        parallelism: 1,
        mode: Mode::Eager,
        environment: std::collections::BTreeMap::new(),
    }
}

fn scores(block: usize, variants: &[Variant]) -> Vec<Score> {
    let each = variants.iter().enumerate();
    each.map(|(index, variant)| Score {
        block,
        variant: variant.clone(),
        divergence: 0.01 * (index as f64 + 1.0) * (block as f64 + 1.0),
        standard_error: 0.001,
        tokens: 2048,
    })
    .collect()
}

pub(super) fn shard() -> Shard {
    Shard {
        artifact: ArtifactId("a".to_owned()),
        sequences: 4,
        sequence_tokens: 512,
    }
}

impl World {
    pub(super) fn pair(&mut self, candidate: &Architecture, slower: f64) -> TaskOutput {
        let drift = if self.drifts.len() > 1 {
            self.drifts.remove(0)
        } else {
            self.drifts[0]
        };
        let mut candidate = measurement(candidate, self.pace * self.bias * slower);
        candidate.memory_bytes = (candidate.memory_bytes as f64 * self.memory_bias) as u64;
        TaskOutput::Measured(Box::new(MeasuredPair {
            parent: match (self.beside, self.whole_parent(self.pace)) {
                (Some(shortage), _) => WholeParent::TooLarge(shortage),
                (None, WholeParent::Measured(whole)) => {
                    WholeParent::Measured(self.scattered(whole, [1.0, -1.0, 0.0, 0.0]))
                }
                (None, too_large) => too_large,
            },
            candidate: self.scattered(candidate, [1.0, 1.0, -1.0, -1.0]),
            drift,
            disturbed: self.disturbed,
            without_context: self.without_context,
            serving: None,
        }))
    }

    /// The same with repeats that lie off their middle by so many times the scatter.
    fn scattered(&self, mut measured: Measurement, off: [f64; 4]) -> Measurement {
        let Some(scatter) = self.scatter else {
            return measured;
        };
        for summary in [
            &mut measured.latency_ms,
            &mut measured.first_token_ms,
            &mut measured.per_token_ms,
            &mut measured.throughput_tokens_per_second,
        ] {
            let middle = summary.median;
            *summary = Summary::of(off.map(|off| middle * (1.0 + off * scatter)).to_vec());
        }
        measured
    }

    fn whole_parent(&self, pace: f64) -> WholeParent {
        match self.shortage {
            Some(shortage) => WholeParent::TooLarge(shortage),
            None => WholeParent::Measured(measurement(&parent(), pace)),
        }
    }

    pub(super) fn answer(&mut self, spec: &TaskSpec, exported: &mut Option<Architecture>) -> TaskOutput {
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
                rows: rows(profile)
                    .into_iter()
                    .map(|row| CostRow {
                        spread_ms: row.spread_ms.max(self.spread * row.median_ms),
                        ..row
                    })
                    .collect(),
                parent: self.whole_parent(1.0),
                memory: self.shortage.map(|_| EngineMemory {
                    overhead_bytes: 1_000_000,
                    block_tokens: 1,
                    spare_blocks: 0,
                    steps_under_way: 1,
                }),
                reused_rows: 0,
                disturbed: false,
            }),
            TaskSpec::Calibrate(_) => TaskOutput::Calibrate {
                importance: ArtifactId("i".to_owned()),
                streamed: self.shortage.is_some(),
            },
            TaskSpec::Sort(_) => TaskOutput::Sort {
                permutation: ArtifactId("s".to_owned()),
            },
            TaskSpec::Score(task) => TaskOutput::Score {
                scores: task
                    .blocks()
                    .into_iter()
                    .flat_map(|(block, variants)| scores(block, variants))
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
            TaskSpec::Check(check) => {
                let slower = if self.check_biases.is_empty() {
                    1.0
                } else {
                    self.check_biases.remove(0) / self.bias
                };
                self.pair(&check.architecture, slower)
            }
            TaskSpec::Recover(recover) => TaskOutput::Recover(Recovered {
                weights: ArtifactId("w".to_owned()),
                losses: vec![2.0, 1.0],
                steps_per_loss: 1,
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
                    attempt: 0,
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

    pub(super) fn run(&mut self, spec: &JobSpec) -> std::result::Result<Outcome, PlanError> {
        self.run_with(spec, Self::answer)
    }

    /// Plans and answers until the job ends, one stage at a time. Every result crosses JSON, as the journal would.
    pub(super) fn run_with(
        &mut self,
        spec: &JobSpec,
        mut answer: impl FnMut(&mut Self, &TaskSpec, &mut Option<Architecture>) -> TaskOutput,
    ) -> std::result::Result<Outcome, PlanError> {
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
                .map(|task| answer(self, &task.spec, &mut exported))
                .collect();
            results.stages.get_mut(&stage.stage).unwrap().finished = Some(Finished {
                outputs,
                seconds: 2.0,
                ended_seconds: None,
            });
            results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
        }
        panic!("no end after {:?}", self.log)
    }

    pub(super) fn rounds(&self, strategy: Strategy) -> usize {
        self.log
            .iter()
            .filter(|stage| matches!(stage, Stage::Check { strategy: of, .. } if *of == strategy))
            .count()
    }
}

pub(super) const BOTH: &str = r#"["heterogeneous", "uniform"]"#;
