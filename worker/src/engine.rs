//! Engines: what runs a model under a workload and says how long it took and how much memory it needs.
//!
//! [`Engine`] is what stages that measure ask of one. [`builtin`] is our own, and [`stacks`] prices single block shapes
//! on it; [`vllm`] is vLLM in a process of the user's own Python. [`pair`] measures two models in alternation on any of
//! them. [`quiet`] throws away what was timed while the process did not run as it should.

pub mod builtin;
mod fit;
pub mod pair;
pub mod quiet;
pub mod stacks;
pub mod vllm;

use std::fmt::{self, Debug};
use std::ops::Range;
use std::path::Path;

use espalier_arch::Architecture;
use espalier_proto::task::{ParentRef, Profile, Profiled, Serving};
use espalier_search::statistics::{drift, ratios, relative_error};
use espalier_search::{CostKey, Measurement, Shortage, Summary, Workload};

use crate::Result;

/// Measures models.
pub trait Engine {
    /// What its cost rows are true for, at this width of the residual stream.
    fn key(&self, hidden: usize) -> CostKey;

    /// Times every shape of the task and the base at every point, and the whole parent under the workload.
    ///
    /// # Errors
    /// When a model cannot be run, the machine is too noisy, or the attempt should stop.
    fn profile(&mut self, task: &Profile) -> Result<Profiled>;

    /// Makes a model ready to run a workload, and runs it once, untimed. `running` of its requests run together at the
    /// most, and the others wait.
    ///
    /// # Errors
    /// When the model cannot be run under that workload or with so many running, or there is no room for it.
    fn open(&mut self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Opened>;

    /// The same, where a device without room for it is an answer and no error: parents may be larger than any device.
    ///
    /// # Errors
    /// When the model cannot be run for another reason.
    fn open_where_it_fits(
        &mut self,
        model: &Subject<'_>,
        workload: &Workload,
        running: usize,
    ) -> Result<std::result::Result<Opened, Shortage>> {
        match self.open(model, workload, running) {
            Err(error) if error.is_want_of_room() => {
                let shortage = self.shortage(model, workload, running)?;
                tracing::info!(%error, "{model} {shortage}: it is not measured");
                Ok(Err(shortage))
            }
            opened => opened.map(Ok),
        }
    }

    /// What a model that has no room needs under a workload with so many running, and what it could have taken.
    ///
    /// # Errors
    /// When its shape cannot be read.
    fn shortage(&self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Shortage>;

    /// Closes a model, so that others have its room.
    ///
    /// # Errors
    /// When the engine is of no more use.
    fn release(&mut self, model: Opened) -> Result<()>;

    /// Runs the workload once, undisturbed.
    ///
    /// # Errors
    /// As [`Engine::profile`].
    fn run(&mut self, model: Opened) -> Result<Sample>;

    /// Bytes that the model takes under its workload: weights, state and activations.
    fn memory_bytes(&self, model: Opened) -> u64;

    /// Whether those are without what the device's context takes, since others held memory of the device.
    fn without_context(&self, _: Opened) -> bool {
        false
    }

    /// How another program serves the model just so; none where only this engine can.
    fn serving(&self, model: Opened) -> Option<Serving>;
}

/// A model to measure.
#[derive(Debug, Clone, Copy)]
pub enum Subject<'a> {
    /// Of this shape, with random weights.
    Shape(&'a Architecture),
    /// The parent of a job.
    Parent(&'a ParentRef),
    /// As it was exported.
    Directory(&'a Path),
}

impl fmt::Display for Subject<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape(architecture) => {
                write!(formatter, "a model of {} blocks", architecture.blocks.len())
            }
            Self::Parent(reference) => write!(formatter, "the parent {}", reference.source),
            Self::Directory(directory) => write!(formatter, "{}", directory.display()),
        }
    }
}

/// A model that an engine has opened: its place among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened(usize);

impl Opened {
    /// The model in this place.
    pub(crate) fn place(index: usize) -> Self {
        Self(index)
    }

    /// Its place.
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// The times of one run of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Milliseconds to the first token.
    pub first_token: f64,
    /// Milliseconds to the last token.
    pub latency: f64,
    /// Output tokens a second over all requests.
    pub throughput: f64,
    /// Whether others used the processors meanwhile, though they were waited for.
    pub disturbed: bool,
}

/// Runs of one model, in the order taken.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    workload: Workload,
    samples: Vec<Sample>,
}

impl Series {
    /// None yet.
    pub fn new(workload: &Workload) -> Self {
        Self {
            workload: *workload,
            samples: Vec::new(),
        }
    }

    /// Adds a run.
    pub fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// How many runs there are.
    pub fn runs(&self) -> usize {
        self.samples.len()
    }

    /// Some of the runs, by their numbers from 0; those that there are.
    pub fn part(&self, runs: Range<usize>) -> Self {
        Self {
            workload: self.workload,
            samples: self.samples.get(runs).unwrap_or_default().to_vec(),
        }
    }

    /// The share of the runs that others disturbed.
    pub fn disturbed(&self) -> f64 {
        let disturbed = self.samples.iter().filter(|sample| sample.disturbed);
        lossless(disturbed.count()) / lossless(self.samples.len().max(1))
    }

    /// How far the latency drifted over the runs.
    pub fn drift(&self) -> f64 {
        drift(&self.each(|sample| sample.latency))
    }

    /// Standard error of the latency's or the throughput's median, whichever is larger, as a share of it.
    pub fn error(&self) -> f64 {
        let error = |figure| relative_error(&self.each(figure));
        error(|sample| sample.latency).max(error(|sample| sample.throughput))
    }

    /// The same of what they are of those of `other`, whose runs were had in turns with these.
    pub fn error_against(&self, other: &Self) -> f64 {
        let error = |figure| relative_error(&ratios(&self.each(figure), &other.each(figure)));
        error(|sample| sample.latency).max(error(|sample| sample.throughput))
    }

    fn each(&self, figure: fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.iter().map(figure).collect()
    }

    /// What the runs say, of a model that takes so many bytes.
    pub fn measurement(&self, memory_bytes: u64) -> Measurement {
        let each = |figure: &dyn Fn(&Sample) -> f64| Summary::of(self.samples.iter().map(figure).collect());
        let steps = lossless(self.workload.output_tokens.saturating_sub(1).max(1));
        Measurement {
            latency_ms: each(&|sample| sample.latency),
            first_token_ms: each(&|sample| sample.first_token),
            per_token_ms: each(&|sample| (sample.latency - sample.first_token) / steps),
            throughput_tokens_per_second: each(&|sample| sample.throughput),
            memory_bytes,
        }
    }
}

/// Whoever runs an engine, as the engine sees them.
pub trait Surroundings: Debug {
    /// Whether it should stop.
    ///
    /// # Errors
    /// [`crate::Error::Cancelled`] when it should.
    fn check_stopped(&self) -> Result<()>;

    /// Something was done.
    fn beat(&self);

    /// How far it has come, of how many units.
    ///
    /// # Errors
    /// As [`Surroundings::check_stopped`].
    fn progress(&self, done: usize, total: usize, unit: &str, note: &dyn Fn() -> String) -> Result<()>;

    /// Why it waits, having come as far as it last said.
    ///
    /// # Errors
    /// As [`Surroundings::check_stopped`].
    fn waits(&self, why: &dyn Fn() -> String) -> Result<()>;
}

#[allow(clippy::cast_precision_loss)] // tokens and copies, far below 2^53
fn lossless(value: usize) -> f64 {
    value as f64
}
