//! What a task is asked and what it answers, one pair of types for each executor.

mod engine;
mod failure;
mod score;
mod serving;

use std::fmt;

use espalier_arch::{Architecture, BlockShape, Candidate};
use espalier_search::{
    CostKey, CostRow, EngineMemory, Kept, Measurement, Point, Score, WholeParent, Workload,
};
use serde::{Deserialize, Serialize};

pub use engine::{Engine, VLLM};
pub use failure::{Failure, FailureKind};
pub use score::{BlockVariants, ScoreBlocks};
pub use serving::Serving;

/// Names an artifact by its content: lower-case hexadecimal BLAKE3.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ArtifactId(pub String);

impl fmt::Display for ArtifactId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Packed sequences of tokens in the artifact store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// The tokens.
    pub artifact: ArtifactId,
    /// How many sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub sequence_tokens: usize,
}

/// A parent as executors load it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParentRef {
    /// A directory, a GGUF file, or `hf://org/name`.
    pub source: String,
    /// BLAKE3 over the names, sizes and first and last megabytes of its files, so that a parent that changes under a job is noticed.
    pub fingerprint: String,
    /// How its channels and groups are sorted; none before `sort`.
    pub permutation: Option<ArtifactId>,
}

/// A smaller model: the sorted parent's slices, or trained weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Student {
    /// Which variant each block has.
    pub candidate: Candidate,
    /// Weights after recovery; none means the sorted parent's prefixes.
    pub weights: Option<ArtifactId>,
}

/// What a task is asked to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum TaskSpec {
    /// Reads the parent's config and tensor index and tokenises the data.
    Ingest(Ingest),
    /// Times block shapes on the target, all of them interleaved.
    Profile(Profile),
    /// Sums importance over one shard.
    Calibrate(Calibrate),
    /// Merges importance and orders channels and groups by it.
    Sort(Sort),
    /// Measures what each variant of some blocks costs in quality.
    Score(ScoreBlocks),
    /// Greedy conditional order in which whole layers are best removed (uniform strategy).
    DepthOrder(DepthOrder),
    /// KL of whole candidates without training (uniform strategy's grid).
    Rank(Rank),
    /// Measures an architecture with dummy weights, alternating with the parent.
    Check(Check),
    /// Distils a student from the parent.
    Recover(Recover),
    /// Measures quality on held-out text and benchmarks.
    Evaluate(Evaluate),
    /// Writes a Hugging Face directory.
    Export(Export),
    /// Loads an exported directory and measures it, alternating with the parent.
    Verify(Verify),
}

impl TaskSpec {
    /// The executor's name, as in metrics and listings.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Ingest(_) => "ingest",
            Self::Profile(_) => "profile",
            Self::Calibrate(_) => "calibrate",
            Self::Sort(_) => "sort",
            Self::Score(_) => "score",
            Self::DepthOrder(_) => "depth_order",
            Self::Rank(_) => "rank",
            Self::Check(_) => "check",
            Self::Recover(_) => "recover",
            Self::Evaluate(_) => "evaluate",
            Self::Export(_) => "export",
            Self::Verify(_) => "verify",
        }
    }

    /// What runs the models it measures; our own where it measures none.
    pub fn engine(&self) -> Engine {
        match self {
            Self::Profile(task) => task.engine,
            Self::Check(task) => task.engine,
            Self::Verify(task) => task.engine,
            _ => Engine::Builtin,
        }
    }
}

/// What a task found out; the variant always matches the spec's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[allow(clippy::large_enum_variant)] // one a task, moved a few times in its life
pub enum TaskOutput {
    /// Of [`TaskSpec::Ingest`].
    Ingest(Box<Ingested>),
    /// Of [`TaskSpec::Profile`].
    Profile(Profiled),
    /// Of [`TaskSpec::Calibrate`].
    Calibrate {
        /// Importance sums in f64.
        importance: ArtifactId,
        /// Whether the device had no room for the parent, so that its blocks were read as they were run.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        streamed: bool,
    },
    /// Of [`TaskSpec::Sort`].
    Sort {
        /// The permutation of every prunable axis.
        permutation: ArtifactId,
    },
    /// Of [`TaskSpec::Score`].
    Score {
        /// One for each variant asked for, block by block, in that order.
        scores: Vec<Score>,
    },
    /// Of [`TaskSpec::DepthOrder`].
    DepthOrder {
        /// Layer numbers, the most dispensable first.
        layers: Vec<usize>,
        /// KL to the parent after each removal.
        divergences: Vec<f64>,
    },
    /// Of [`TaskSpec::Rank`].
    Rank {
        /// Mean KL to the parent of each candidate, in the order asked.
        divergences: Vec<f64>,
    },
    /// Of [`TaskSpec::Check`] and [`TaskSpec::Verify`].
    Measured(Box<MeasuredPair>),
    /// Of [`TaskSpec::Recover`].
    Recover(Recovered),
    /// Of [`TaskSpec::Evaluate`].
    Evaluate(Quality),
    /// Of [`TaskSpec::Export`].
    Export(Exported),
}

/// Asks to read the parent and tokenise the data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ingest {
    /// A directory, a GGUF file, or `hf://org/name`.
    pub parent: String,
    /// Files of training text: `.txt`, `.jsonl`, each also `.gz`, `.xz`, `.zst`.
    pub train: Vec<String>,
    /// Files of held-out text.
    pub validation: Vec<String>,
    /// Tokens of each packed sequence.
    pub sequence_tokens: usize,
    /// Tokens wanted for importance.
    pub calibration_tokens: u64,
    /// Tokens wanted for scoring; disjoint from validation.
    pub scoring_tokens: u64,
    /// Tokens wanted for recovery.
    pub recovery_tokens: u64,
    /// Tokens wanted for held-out quality.
    pub validation_tokens: u64,
    /// Seeds the order of documents.
    pub seed: u64,
}

/// The parent as read, and the data as tokenised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ingested {
    /// Its fingerprint is filled in, its permutation is not.
    pub parent: ParentRef,
    /// The parent's shape.
    pub architecture: Architecture,
    /// For importance.
    pub calibration: Vec<Shard>,
    /// For scores, ranks and depth order.
    pub scoring: Shard,
    /// For recovery, in order.
    pub recovery: Vec<Shard>,
    /// For held-out quality only.
    pub validation: Shard,
    /// Documents read, and how many were left out as empty.
    pub documents: u64,
    /// Documents left out as empty.
    pub empty_documents: u64,
}

/// Asks to time block shapes on the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The parent's shape: hidden width, vocabulary, rope.
    pub architecture: Architecture,
    /// The distinct shapes to time.
    pub shapes: Vec<BlockShape>,
    /// Loads to time them at.
    pub points: Vec<Point>,
    /// Rounds over all shapes, interleaved.
    pub rounds: usize,
    /// The workload under which the whole parent is measured too.
    pub workload: Workload,
    /// What runs them.
    #[serde(default, skip_serializing_if = "Engine::is_builtin")]
    pub engine: Engine,
    /// What earlier jobs measured on such targets; of the one it runs on, only what is missing is measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Kept>,
}

/// Rows for the cost table, and the parent measured whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profiled {
    /// What the rows are true for.
    pub key: CostKey,
    /// One a shape and point, and the base at each point.
    pub rows: Vec<CostRow>,
    /// The whole parent under the workload, or why it was not measured.
    pub parent: WholeParent,
    /// What the engine needs and rounds, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<EngineMemory>,
    /// How many of the rows, the first ones, earlier jobs had measured. Where all of them, as older workers had it,
    /// then the parent too.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reused_rows: usize,
    /// Whether others went on using the processors while something was timed, so that times may be too long. The job
    /// itself checks what it chooses by them; other jobs are not told.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disturbed: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde asks
fn is_none(count: &usize) -> bool {
    *count == 0
}

/// Asks for importance sums over one shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibrate {
    /// The parent.
    pub parent: ParentRef,
    /// The tokens.
    pub shard: Shard,
}

/// Asks to order every prunable axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sort {
    /// The parent.
    pub parent: ParentRef,
    /// Sums, merged in this order.
    pub importance: Vec<ArtifactId>,
}

/// Asks in which order whole layers are best removed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthOrder {
    /// The sorted parent.
    pub parent: ParentRef,
    /// How many layers to remove at the most.
    pub remove: usize,
    /// The tokens.
    pub shard: Shard,
    /// How many sequences of the shard to use.
    pub sequences: usize,
}

/// Asks for the KL of whole candidates without training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rank {
    /// The sorted parent.
    pub parent: ParentRef,
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// The tokens.
    pub shard: Shard,
}

/// Asks to measure an architecture with dummy weights, alternating with the parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// The parent's shape.
    pub parent: Architecture,
    /// The candidate's shape.
    pub architecture: Architecture,
    /// What to run.
    pub workload: Workload,
    /// Sequences of the candidate that run together, where fewer than the workload's requests do: the others wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<usize>,
    /// Alternations.
    pub repeats: usize,
    /// What runs both.
    #[serde(default, skip_serializing_if = "Engine::is_builtin")]
    pub engine: Engine,
}

/// Asks to measure an exported directory, alternating with the parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// The parent.
    pub parent: ParentRef,
    /// The exported directory.
    pub directory: String,
    /// What to run.
    pub workload: Workload,
    /// Sequences of the candidate that run together, where fewer than the workload's requests do: the others wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<usize>,
    /// Alternations.
    pub repeats: usize,
    /// What runs both.
    #[serde(default, skip_serializing_if = "Engine::is_builtin")]
    pub engine: Engine,
}

/// Two models measured in alternation; the candidate alone where the parent has no room on the device, or none beside
/// it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredPair {
    /// The parent, or why it was not measured.
    pub parent: WholeParent,
    /// The candidate.
    pub candidate: Measurement,
    /// Largest drift of the parent's latency within the run, as a share of its median; of the candidate's own where the
    /// parent was not measured.
    #[serde(rename = "parent_drift")]
    pub drift: f64,
    /// The share of the runs that were taken while others used the processors, of the model with more of them.
    #[serde(default)]
    pub disturbed: f64,
    /// Whether memory is told without what the device's context takes: others held memory of the device, and what is theirs
    /// could not be told from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_context: bool,
    /// How the candidate was served, where another program can serve it alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<Serving>,
}

/// Asks to distil a student from the parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recover {
    /// The sorted parent.
    pub parent: ParentRef,
    /// The student's variants.
    pub candidate: Candidate,
    /// Tokens to train on, in order.
    pub shards: Vec<Shard>,
    /// How it is trained.
    pub recipe: Recipe,
    /// A checkpoint of an earlier attempt to go on from.
    pub resume: Option<ArtifactId>,
}

/// How a student is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Tokens to train on; the schedule is laid over them.
    pub tokens: u64,
    /// Sequences in a step.
    pub batch_sequences: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Share of the steps in which it rises from zero.
    pub warmup: f64,
    /// Share of the peak at which the cosine ends.
    pub final_share: f64,
    /// Global gradient norm is clipped to this.
    pub clip: f64,
    /// AdamW's decay of moments.
    pub betas: (f64, f64),
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// A checkpoint is written every so many steps.
    pub checkpoint_steps: u64,
    /// Orders the sequences.
    pub seed: u64,
    /// Devices that train together, at the most; it changes the result no more than rounding does.
    // One is left out: a worker that knows no ranks takes it, and checkpoints are found by what a recipe is written as.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: u32,
    /// Parts into which the model is cut, each on a rank of its own.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline_stages: u32,
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

/// A trained student.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recovered {
    /// Its weights.
    pub weights: ArtifactId,
    /// Mean loss of each [`Recovered::steps_per_loss`] steps, nats a token.
    pub losses: Vec<f32>,
    /// Steps that each loss is the mean of; the last may be of fewer. 1 unless there were many.
    #[serde(default = "one_each", skip_serializing_if = "is_one_each")]
    pub steps_per_loss: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Whether training made the held-in loss worse, so that the untrained weights were kept.
    pub kept_untrained: bool,
    /// Seconds of training, over all attempts.
    pub seconds: f64,
}

/// As [`Recovered::steps_per_loss`] is where it is left out.
pub fn one_each() -> u64 {
    1
}

/// Whether [`Recovered::steps_per_loss`] is left out.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
pub fn is_one_each(steps: &u64) -> bool {
    *steps == 1
}

/// Asks for quality on held-out text and benchmarks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluate {
    /// The parent, sorted when a student is evaluated.
    pub parent: ParentRef,
    /// The model to evaluate; none is the parent itself.
    pub student: Option<Student>,
    /// Held-out sequences for KL and perplexity.
    pub validation: Shard,
    /// Benchmark files.
    pub benchmarks: Vec<String>,
    /// Examples of each benchmark at the most.
    pub benchmark_examples: usize,
}

/// Quality of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Mean KL to the parent, nats a token; 0 for the parent.
    pub divergence: f64,
    /// Its standard error over sequences.
    pub divergence_error: f64,
    /// Perplexity on the held-out sequences.
    pub perplexity: f64,
    /// Accuracy on each benchmark.
    pub benchmarks: Vec<Benchmark>,
}

/// Accuracy on one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Benchmark {
    /// The file's stem.
    pub name: String,
    /// Share right, 0 to 1.
    pub accuracy: f64,
    /// Its standard error.
    pub accuracy_error: f64,
    /// Examples it was measured on.
    pub examples: usize,
}

/// Asks to write a Hugging Face directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// The sorted parent.
    pub parent: ParentRef,
    /// What to export.
    pub student: Student,
    /// Directory to make; must not exist.
    pub directory: String,
}

/// A Hugging Face directory as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exported {
    /// The directory, as the task named it.
    pub directory: String,
    /// The attempt that wrote it: until the outcome is moved into place it lies at [`Exported::written_to`]. 0 when
    /// it lies where it belongs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempt: u64,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Parameters.
    pub parameters: u64,
    /// Whether transformers needs the modelling file that lies in it.
    pub needs_remote_code: bool,
}

impl Exported {
    /// Where the attempt wrote it: beside its place, so that two attempts never write to one directory.
    pub fn written_to(&self) -> String {
        if self.attempt == 0 {
            self.directory.clone()
        } else {
            format!("{}{ATTEMPT_SUFFIX}{}", self.directory, self.attempt)
        }
    }
}

/// Between the name of an exported directory and the number of the attempt that wrote it.
pub const ATTEMPT_SUFFIX: &str = ".attempt-";

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde wants it
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// How far an attempt has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Units done.
    pub done: u64,
    /// Units in all.
    pub total: u64,
    /// What a unit is: `tokens`, `variants`, `rounds`.
    pub unit: String,
    /// One line for people, for example the loss.
    pub note: String,
    /// Units of `done` that earlier attempts have left to this one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub went_on_from: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use espalier_search::{Measurement, Shortage, Summary, WholeParent};

    use super::{MeasuredPair, Recipe, Recovered, TaskOutput};

    #[test]
    fn a_pair_with_its_context_is_written_as_before_it_could_be_without() {
        let once = Summary {
            median: 1.0,
            spread: 0.0,
            samples: vec![1.0],
        };
        let shortage = Shortage {
            needed_bytes: 2,
            free_bytes: 1,
        };
        let mut pair = MeasuredPair {
            parent: WholeParent::TooLarge(shortage),
            candidate: Measurement {
                latency_ms: once.clone(),
                first_token_ms: once.clone(),
                per_token_ms: once.clone(),
                throughput_tokens_per_second: once,
                memory_bytes: 1,
            },
            drift: 0.0,
            disturbed: 0.0,
            without_context: false,
            serving: None,
        };
        let written = serde_json::to_string(&pair).unwrap();
        assert!(!written.contains("context"), "{written}");
        assert_eq!(serde_json::from_str::<MeasuredPair>(&written).unwrap(), pair);
        pair.without_context = true;
        let written = serde_json::to_string(&pair).unwrap();
        assert_eq!(serde_json::from_str::<MeasuredPair>(&written).unwrap(), pair);
    }

    #[test]
    fn a_recovery_with_a_loss_a_step_is_written_as_before_there_were_means() {
        let before = r#"{"weights":"w","losses":[0.5,0.25],"tokens":4,"kept_untrained":false,"seconds":1.0}"#;
        let each: Recovered = serde_json::from_str(before).unwrap();
        assert_eq!(each.steps_per_loss, 1);
        assert_eq!(serde_json::to_string(&each).unwrap(), before);
        let means = Recovered {
            steps_per_loss: 8,
            ..each
        };
        let written = serde_json::to_string(&means).unwrap();
        assert_eq!(serde_json::from_str::<Recovered>(&written).unwrap(), means);
    }

    #[test]
    fn sums_of_a_parent_that_was_held_are_told_as_before_one_could_be_streamed() {
        let before = r#"{"kind":"calibrate","importance":"i"}"#;
        let held: TaskOutput = serde_json::from_str(before).unwrap();
        assert_eq!(serde_json::to_string(&held).unwrap(), before);
        assert!(matches!(held, TaskOutput::Calibrate { streamed: false, .. }));
        let streamed = r#"{"kind":"calibrate","importance":"i","streamed":true}"#;
        let read: TaskOutput = serde_json::from_str(streamed).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), streamed);
    }

    #[test]
    fn a_recipe_for_one_rank_is_written_as_before_there_were_several() {
        let before = r#"{"tokens":1,"batch_sequences":2,"learning_rate":0.5,"warmup":0.5,"final_share":0.5,"clip":1.0,"betas":[0.5,0.5],"weight_decay":0.5,"checkpoint_steps":3,"seed":4}"#;
        let alone: Recipe = serde_json::from_str(before).unwrap();
        assert_eq!((alone.ranks, alone.pipeline_stages), (1, 1));
        assert_eq!(serde_json::to_string(&alone).unwrap(), before);
        let several = Recipe {
            ranks: 4,
            pipeline_stages: 2,
            ..alone
        };
        let written = serde_json::to_string(&several).unwrap();
        assert_eq!(serde_json::from_str::<Recipe>(&written).unwrap(), several);
    }
}
