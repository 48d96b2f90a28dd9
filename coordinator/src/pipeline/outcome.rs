//! What a finished job has to tell: everything that `report.json` and `report.html` show.

use espalier_arch::{Architecture, Candidate, Variant};
use espalier_proto::task::{ArtifactId, Exported, Quality, Serving, is_one_each, one_each};
use espalier_search::heterogeneous::FrontPoint;
use espalier_search::uniform::GridPoint;
use espalier_search::{Bound, Corrections, CostKey, Measurement, Metric, Prediction, Score, WholeParent};
use serde::{Deserialize, Serialize};

use super::{SolverProof, Stage};
use crate::spec::{CostTableFile, JobSpec, Strategy};

/// Version of [`Outcome`]'s form.
pub const OUTCOME_SCHEMA: u32 = 1;

/// What a finished job has to tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// [`OUTCOME_SCHEMA`].
    pub schema: u32,
    /// What was asked.
    pub spec: JobSpec,
    /// The model that was compressed.
    pub parent: ParentReport,
    /// What the times are true for.
    pub target: CostKey,
    /// What was chosen by, measured or imported: `cost-table.json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_table: Option<CostTableFile>,
    /// What checks of heterogeneous choices taught of that table: the last of them and `front` are predicted so.
    #[serde(default, skip_serializing_if = "Corrections::are_none")]
    pub corrections: Corrections,
    /// The exported model, against each limit.
    pub limits: Vec<LimitReport>,
    /// Whose model was exported.
    pub winner: Strategy,
    /// Each strategy that ran; the first is the winner's.
    pub strategies: Vec<StrategyReport>,
    /// Score of every variant that was scored.
    pub scores: Vec<Score>,
    /// Which metric the front runs over, and its points: the least score at each value, predicted.
    pub front_metric: Metric,
    /// See `front_metric`.
    pub front: Vec<FrontPoint>,
    /// The uniform grid as ranked.
    pub grid: Vec<RankedPoint>,
    /// The directory as written.
    pub export: Exported,
    /// How it was served while it was verified; none where no other program can serve it so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Serving>,
    /// `serving` as a line for a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serve_command: Option<String>,
    /// Tokens and seconds of every stage, in the order of the pipeline.
    pub stages: Vec<StageCost>,
    /// What the reader should know: repeated measurements, corrected predictions, weights kept untrained.
    pub notes: Vec<String>,
}

impl Outcome {
    /// Names the directory in which the export ends up, and so the line that serves it.
    pub fn settle(&mut self, directory: String) {
        self.export.directory = directory;
        self.serve_command = self
            .serving
            .as_ref()
            .map(|serving| serving.command(&self.export.directory));
    }

    /// The parent's own figure beside a limit, for people; of one that was not measured what is predicted, and that it is.
    pub fn parent_figure(&self, limit: &LimitReport) -> String {
        let metric = limit.metric;
        let predicted = self.parent.prediction.figures.get(metric);
        match (limit.parent_measured(), predicted) {
            (Some(measured), _) => metric.display(measured),
            (None, Some(predicted)) => format!("{} predicted", metric.display(predicted)),
            (None, None) => "not known".to_owned(),
        }
    }
}

/// What a job has to tell that was to measure its target and nothing else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileOutcome {
    /// What was measured: `cost-table.json`.
    pub cost_table: CostTableFile,
}

impl ProfileOutcome {
    /// Reads an outcome's JSON; none where it is of a job that did more.
    pub fn read(outcome_json: &str) -> Option<Self> {
        serde_json::from_str(outcome_json).ok()
    }
}

/// The parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentReport {
    /// Where it came from.
    pub source: String,
    /// BLAKE3 over its files, as ingested.
    pub fingerprint: String,
    /// Its shape.
    pub architecture: Architecture,
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters of its blocks.
    pub block_parameters: u64,
    /// Measured on the target when profiled, or why it was not.
    pub measurement: WholeParent,
    /// What the cost table predicts of it: a test of additivity, and all that is known of one that was not measured.
    pub prediction: Prediction,
    /// Its quality on the held-out data.
    pub quality: Quality,
}

/// One limit: asked, predicted, checked with dummy weights, verified on the exported model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitReport {
    /// What is limited.
    pub metric: Metric,
    /// As asked.
    pub asked: Bound,
    /// In the metric's unit, as the choice was fitted to it: on the machine as it was when profiled.
    pub limit: f64,
    /// The parent's own, as profiled; none where the device had no room for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<f64>,
    /// Predicted from the cost table, corrections included, on the machine as it was when profiled.
    pub predicted: f64,
    /// Standard error of `predicted`.
    pub predicted_error: f64,
    /// Before training.
    pub checked: Reading,
    /// The exported model; what counts.
    pub verified: Reading,
}

impl LimitReport {
    /// The parent's own, measured beside the exported model or else when profiled.
    pub fn parent_measured(&self) -> Option<f64> {
        self.verified.parent.or(self.parent)
    }

    /// Those of `limits` that the exported model was not measured inside of, in words; empty when there is none.
    pub fn missed(limits: &[Self]) -> String {
        let outside = limits.iter().filter(|limit| !limit.verified.inside).map(|limit| {
            let verified = &limit.verified;
            format!(
                "{} is {}, the limit is {}{}",
                limit.metric,
                limit.metric.display(verified.value),
                limit.metric.display(verified.limit),
                if verified.noisy {
                    ", on a machine too noisy to tell"
                } else {
                    ""
                }
            )
        });
        outside.collect::<Vec<_>>().join(", ")
    }
}

/// One metric measured, in alternation with the parent where that has room.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reading {
    /// The candidate's median.
    pub value: f64,
    /// Median absolute deviation of its repeats; 0 where nothing is timed.
    pub spread: f64,
    /// The parent's median in the same run; none where the candidate was measured alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<f64>,
    /// The limit as it stands in this run: a share is of the parent as measured here, or else as profiled.
    pub limit: f64,
    /// The prediction, scaled by how much faster or slower the parent ran here than when profiled, if it did.
    pub predicted: f64,
    /// `value / predicted − 1`.
    pub error: f64,
    /// Whether `value` is inside `limit`, and can be told.
    pub inside: bool,
    /// Whether it cannot be told: the machine was too noisy for what is timed, or others hid what the device's context takes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub noisy: bool,
}

impl Reading {
    /// The same, taken when the machine was too noisy to tell.
    pub(super) fn too_noisy(self) -> Self {
        Self {
            inside: false,
            noisy: true,
            ..self
        }
    }

    /// What it says of the limit, in a word or two.
    pub fn verdict(&self) -> &'static str {
        match (self.inside, self.noisy) {
            (true, _) => "met",
            (false, true) => "not shown",
            (false, false) => "missed",
        }
    }
}

/// One strategy's model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyReport {
    /// Whose.
    pub strategy: Strategy,
    /// One variant for each block of the parent.
    pub candidate: Candidate,
    /// What is left of each block, for the picture: one for each block of the parent.
    pub blocks: Vec<BlockReport>,
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters of its blocks.
    pub block_parameters: u64,
    /// Sequences that run together, where fewer than the workload's requests do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<usize>,
    /// What it will cost.
    pub prediction: Prediction,
    /// Measured with dummy weights, alternating with the parent where that has room.
    pub checked: Measurement,
    /// Rounds of choosing and checking.
    pub rounds: u32,
    /// Heterogeneous: the solver's proof.
    pub solved: Option<SolverProof>,
    /// Quality before recovery.
    pub before: Quality,
    /// Quality after recovery; none when nothing was trained.
    pub after: Option<Quality>,
    /// Mean loss of each [`StrategyReport::steps_per_loss`] steps of recovery.
    pub losses: Vec<f32>,
    /// Steps that each loss is the mean of; the last may be of fewer. 1 unless there were many.
    #[serde(default = "one_each", skip_serializing_if = "is_one_each")]
    pub steps_per_loss: u64,
    /// Tokens it was trained on.
    pub recovery_tokens: u64,
    /// Seconds that took, loading and evaluating aside.
    #[serde(default)]
    pub recovery_seconds: f64,
    /// Whether training made it worse, on what it was trained on or on held-out text, so that the untrained weights count.
    pub kept_untrained: bool,
    /// Recovered weights.
    pub weights: Option<ArtifactId>,
}

impl StrategyReport {
    /// Quality of the weights that count: those after recovery unless it made them worse.
    pub fn quality(&self) -> &Quality {
        let trained = self.after.as_ref().filter(|_| !self.kept_untrained);
        trained.unwrap_or(&self.before)
    }
}

/// What is left of one block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockReport {
    /// Index into the parent's list of blocks.
    pub block: usize,
    /// The layer number that tensor names carry.
    pub layer: usize,
    /// `attention`, `mlp`, `mamba2`, `moe`.
    pub kind: espalier_arch::BlockKind,
    /// What was chosen.
    pub variant: Variant,
    /// Key/value groups or channels kept; none where the block has no such axis.
    pub size: usize,
    /// Key/value groups or channels of the whole.
    pub whole: usize,
    /// Score of the chosen variant, nats a token; none where it was not scored.
    pub score: Option<f64>,
}

/// One ranked point of the uniform grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankedPoint {
    /// The point.
    pub point: GridPoint,
    /// KL to the parent without training, nats a token.
    pub divergence: f64,
}

/// What one stage cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageCost {
    /// Which.
    pub stage: Stage,
    /// Tasks it had.
    pub tasks: usize,
    /// Tokens that went through the model, those of a shard once for each task, or block that was scored; 0 where none did.
    pub tokens: u64,
    /// Seconds from its first task's start to its last one's end, those between a failure of the job and its retry aside.
    pub seconds: f64,
    /// Seconds from the start of the job's first task to its end; none in outcomes of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_seconds: Option<f64>,
}
