//! The stages of a job, and what is known of each.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use espalier_arch::Candidate;
use espalier_proto::task::{TaskOutput, TaskSpec};
use espalier_search::heterogeneous::FrontPoint;
use espalier_search::uniform::GridPoint;
use espalier_search::{AbsoluteLimit, Corrections, Prediction};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::spec::Strategy;

/// A step of a job's pipeline. Written as text: `ingest`, `check-uniform-2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Reads the parent and tokenises the data.
    Ingest,
    /// Times every block shape on the target, and the whole parent.
    Profile,
    /// Sums importance, one task a shard.
    Calibrate,
    /// Orders channels and groups.
    Sort,
    /// Scores every variant: one task a block, or one for several where the parent is read for each task.
    Score,
    /// Orders layers for removal.
    DepthOrder,
    /// KL of the uniform grid's candidates; again when corrected costs leave none of the first inside.
    Rank {
        /// Counts from 1.
        round: u32,
    },
    /// Measures a strategy's choice with dummy weights; again after a miss or a noisy measurement.
    Check {
        /// Whose choice.
        strategy: Strategy,
        /// Counts from 1.
        round: u32,
    },
    /// Distils each strategy's choice, one task a strategy.
    Recover,
    /// Quality of the parent and of each choice before and after recovery.
    Evaluate,
    /// Writes the winner.
    Export,
    /// Measures what was written; again after a noisy measurement.
    Verify {
        /// Counts from 1.
        round: u32,
    },
}

impl Stage {
    /// The executor of its tasks, as [`TaskSpec::kind`] names it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Profile => "profile",
            Self::Calibrate => "calibrate",
            Self::Sort => "sort",
            Self::Score => "score",
            Self::DepthOrder => "depth_order",
            Self::Rank { .. } => "rank",
            Self::Check { .. } => "check",
            Self::Recover => "recover",
            Self::Evaluate => "evaluate",
            Self::Export => "export",
            Self::Verify { .. } => "verify",
        }
    }

    /// Whether nothing else may run on the host meanwhile, because time is measured.
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::Profile | Self::Check { .. } | Self::Verify { .. })
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Check { strategy, round } => write!(formatter, "check-{strategy}-{round}"),
            Self::Rank { round } | Self::Verify { round } => write!(formatter, "{}-{round}", self.kind()),
            _ => formatter.write_str(self.kind()),
        }
    }
}

impl FromStr for Stage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("`{text}` is no stage, expected for example ingest or check-uniform-1");
        let plain = [
            Self::Ingest,
            Self::Profile,
            Self::Calibrate,
            Self::Sort,
            Self::Score,
            Self::DepthOrder,
            Self::Recover,
            Self::Evaluate,
            Self::Export,
        ];
        if let Some(stage) = plain.into_iter().find(|stage| stage.kind() == text) {
            return Ok(stage);
        }
        let (name, round) = text.rsplit_once('-').ok_or_else(unknown)?;
        let round = round.parse().map_err(|_| unknown())?;
        match name {
            "rank" => Ok(Self::Rank { round }),
            "verify" => Ok(Self::Verify { round }),
            "check-heterogeneous" => Ok(Self::Check {
                strategy: Strategy::Heterogeneous,
                round,
            }),
            "check-uniform" => Ok(Self::Check {
                strategy: Strategy::Uniform,
                round,
            }),
            _ => Err(unknown()),
        }
    }
}

impl Serialize for Stage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Stage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// What a job's stages have found out so far. Every stage that an earlier plan named is here, finished or not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Each stage that was planned.
    pub stages: BTreeMap<Stage, StageResult>,
}

/// One planned stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageResult {
    /// What was decided when it was planned ([`PlannedStage::decision`], given back as it was).
    pub decision: Option<Decision>,
    /// What its tasks found out; none while any of them is unfinished.
    pub finished: Option<Finished>,
}

/// A stage whose tasks have all ended well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finished {
    /// One for each task, in the order planned.
    pub outputs: Vec<TaskOutput>,
    /// Seconds from the first task's start to the last one's end, those between a failure of the job and its retry aside.
    pub seconds: f64,
    /// Seconds from the start of the job's first task to the stage's end; none where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_seconds: Option<f64>,
}

impl Results {
    /// Whether an earlier plan named the stage.
    pub fn planned(&self, stage: Stage) -> bool {
        self.stages.contains_key(&stage)
    }

    /// The outputs of a stage that has finished.
    pub fn outputs(&self, stage: Stage) -> Option<&[TaskOutput]> {
        self.stages
            .get(&stage)?
            .finished
            .as_ref()
            .map(|finished| finished.outputs.as_slice())
    }

    /// What was decided when the stage was planned.
    pub fn decision(&self, stage: Stage) -> Option<&Decision> {
        self.stages.get(&stage)?.decision.as_ref()
    }
}

/// A stage whose tasks may start now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedStage {
    /// Which.
    pub stage: Stage,
    /// Its tasks; at least one.
    pub tasks: Vec<PlannedTask>,
    /// What was decided to make it ready; to be kept, and given back in [`StageResult::decision`].
    pub decision: Option<Decision>,
    /// What made it necessary, where that is news: what the check before it found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// One task of a planned stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedTask {
    /// Names it within its stage: `block-007`, `blocks-008-015`, `uniform-after`.
    pub name: String,
    /// What it is asked.
    pub spec: TaskSpec,
}

/// What was decided between stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The uniform grid's points to be ranked.
    Grid(Vec<GridPoint>),
    /// A strategy's choice, to be checked.
    Chosen(Box<Chosen>),
    /// Which strategy's model is exported.
    Winner(Winner),
}

/// A strategy's choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    /// Whose.
    pub strategy: Strategy,
    /// One variant for each block.
    pub candidate: Candidate,
    /// What it will cost, on the machine as it was when profiled.
    pub prediction: Prediction,
    /// The limits it was fitted to, on the machine as it was when profiled.
    pub limits: Vec<AbsoluteLimit>,
    /// Share of each timed limit left to spare.
    pub margin: f64,
    /// Sequences that run together, where the engine batches continuously and fewer than the concurrency do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<usize>,
    /// What the reader should know of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What checks before it taught, whatever the machine's pace was, and which of them was the last.
    pub corrections: Corrections,
    /// Heterogeneous: the solver's objective and its proof.
    pub solved: Option<SolverProof>,
    /// Uniform: KL without training, by which it was chosen.
    pub divergence: Option<f64>,
    /// Heterogeneous: the least score at each value of the first limit.
    pub front: Vec<FrontPoint>,
}

/// How good the solver's choice is proven to be.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SolverProof {
    /// Sum of the chosen variants' scores, nats a token.
    pub score: f64,
    /// No candidate inside the limits has a lower sum.
    pub bound: f64,
    /// (score − bound) / score.
    pub gap: f64,
}

/// Which strategy's model is exported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Winner {
    /// Whose.
    pub strategy: Strategy,
    /// Whether the weights after recovery are exported; the sorted parent's slices otherwise.
    pub recovered: bool,
}
