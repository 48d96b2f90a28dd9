//! vLLM as an engine: models are opened and timed by a helper, a process of the user's own Python with vLLM and the
//! plugin, which serves exactly the class that exports are served with.
//!
//! The helper knows no policy: which models are open, in which order they are timed, when a machine is too busy and
//! when a spread is known is decided here. It may hang, die, flood its output or say what is no answer: each is an
//! [`Error`] within a deadline, and leaves no process behind.

mod environment;
mod error;
mod helper;
mod host;
mod memory;
mod models;
mod process;
mod profile;
mod protocol;
mod stacks;
#[cfg(test)]
mod tests;

use std::time::Duration;

use espalier_arch::{Architecture, Precision};
use espalier_model::Device;
use espalier_model::checkpoint::Parent;
use espalier_proto::task::{ParentRef, Profile, Profiled};
use espalier_search::{CostKey, EngineMemory, Mode, Workload};

pub use environment::Environment;
pub use error::Error;

use super::statistics::median;
use super::{Engine, Opened, Sample, Subject, Surroundings};
use crate::Result;
use crate::agent::options::processor_name;
use helper::Helper;
use memory::Readings;
use models::Load;
use protocol::{Memory, Model, Open, Served};

/// The share of the processors that others may use while something is timed.
const MOST_BUSY: f64 = 0.2;
/// Requests for a throughput, in concurrencies: the first and the last ones run with fewer beside them.
const ROUNDS_OF_REQUESTS: usize = 4;
/// How often what was timed on a busy machine is timed again, in all.
const MOST_RETAKES: usize = 12;

/// How long the helper may come no further before it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// While it imports vLLM.
    pub hello: Duration,
    /// While it opens an engine.
    pub open: Duration,
    /// While it times, at the least.
    pub work: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(300),
            open: Duration::from_secs(600),
            work: Duration::from_secs(60),
        }
    }
}

impl Deadlines {
    /// While it times, where the longest such request so far took this. One step may compute every prompt of a
    /// workload, and nothing is heard of it meanwhile: before the first has ended nobody knows how long that takes.
    fn timing(self, longest: Option<Duration>) -> Duration {
        /// Times that a request may take longer than any before.
        const LONGER: u32 = 50;
        match longest {
            None => self.open.max(self.work),
            Some(longest) => self.work.saturating_add(longest.saturating_mul(LONGER)),
        }
    }
}

/// vLLM as a device child is told of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VllmOptions {
    /// Where it is; none on a worker that measures in no vLLM.
    pub environment: Option<Environment>,
    /// How long its process may come no further.
    pub deadlines: Deadlines,
    /// For the environment of its process.
    pub variables: Vec<(String, String)>,
    /// What it has to run on, `cpu` or `cuda`; none where no device is known yet.
    pub platform: Option<&'static str>,
}

impl VllmOptions {
    /// The same on a device, with the threads that this process has.
    #[must_use]
    pub fn on(mut self, device: Device) -> Self {
        let mut set = |name: &str, value: String| self.variables.push((name.to_owned(), value));
        set("OMP_NUM_THREADS", rayon::current_num_threads().to_string());
        self.platform = match device {
            Device::Cpu => {
                // An ordinary vLLM would take a GPU that it sees.
                set(VISIBLE, String::new());
                Some("cpu")
            }
            Device::Cuda(index) => {
                let seen = std::env::var(VISIBLE).unwrap_or_default();
                set(VISIBLE, visible(index, &seen));
                Some("cuda")
            }
        };
        self
    }
}

/// Which GPUs a process may see, and in which order it numbers them.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The GPU that this process numbers so, as another has to be told.
fn visible(index: u32, seen: &str) -> String {
    let place = usize::try_from(index).unwrap_or(usize::MAX);
    let named = seen
        .split(',')
        .map(str::trim)
        .filter(|name| !name.is_empty())
        .nth(place);
    named.map_or_else(|| index.to_string(), str::to_owned)
}

/// vLLM, and its helper once it runs.
#[derive(Debug, Default)]
pub struct Vllm {
    options: VllmOptions,
    helper: Option<Helper>,
}

impl Vllm {
    /// Not started yet.
    pub fn new(options: VllmOptions) -> Self {
        Self {
            options,
            helper: None,
        }
    }

    /// As an engine in this precision. Whatever was open before is closed.
    ///
    /// # Errors
    /// When there is no vLLM, or it cannot be started.
    pub fn engine<'a>(
        &'a mut self,
        precision: Precision,
        surroundings: &'a dyn Surroundings,
    ) -> Result<InVllm<'a>> {
        let VllmOptions {
            environment: Some(environment),
            deadlines,
            variables,
            platform,
        } = &self.options
        else {
            return Err(Error::NotConfigured.into());
        };
        let helper = match self.helper.take() {
            Some(helper) => helper,
            None => {
                surroundings.progress(0, 0, "", &|| "starting vLLM".to_owned())?;
                // What is missing is told in a moment, and in fewer words than an import's.
                environment.look()?;
                Helper::start(environment, *deadlines, variables, surroundings)?
            }
        };
        let found = &helper.hello.platform;
        if let Some(wanted) = platform.filter(|wanted| wanted != found) {
            return Err(Error::NoVllm {
                python: environment.python.clone(),
                reason: format!(
                    "its vLLM runs on {found} and the task's device is {wanted}; give the python of an environment \
                     whose vLLM is made for that"
                ),
            }
            .into());
        }
        Ok(InVllm {
            precision_name: models::precision_name(precision)?,
            precision,
            home: &mut self.helper,
            helper,
            surroundings,
            open: Vec::new(),
            retakes: 0,
        })
    }
}

/// vLLM in one precision, for one task.
#[derive(Debug)]
pub struct InVllm<'a> {
    precision: Precision,
    precision_name: String,
    /// Where the helper goes when all has ended well.
    home: &'a mut Option<Helper>,
    helper: Helper,
    surroundings: &'a dyn Surroundings,
    open: Vec<Whole>,
    retakes: usize,
}

/// A model under a workload.
#[derive(Debug, Clone)]
struct Whole {
    engine: String,
    workload: Workload,
    memory_bytes: u64,
    /// Beside weights, keys and values.
    other_bytes: u64,
}

impl InVllm<'_> {
    /// What cost rows are true for, at this width of the residual stream.
    fn cost_key(&self, hidden: usize) -> CostKey {
        let hello = &self.helper.hello;
        let device = match hello.platform.as_str() {
            "cpu" => format!("{}, {} threads", processor_name(), rayon::current_num_threads()),
            _ => hello.device.clone(),
        };
        CostKey {
            device,
            engine: "vllm".to_owned(),
            engine_version: hello.vllm.clone(),
            precision: self.precision_name.clone(),
            hidden,
            parallelism: 1,
            mode: if hello.graphs { Mode::Graphs } else { Mode::Eager },
        }
    }

    /// What the engine needs and rounds, as a model that is open showed.
    fn memory_of(&self, model: Opened) -> Option<EngineMemory> {
        let whole = self.open.get(model.index())?;
        Some(EngineMemory {
            overhead_bytes: whole.other_bytes,
            block_tokens: self.helper.hello.block_tokens.multiple,
            spare_blocks: models::SPARE_BLOCKS,
        })
    }

    /// Closes what was opened and keeps the helper for the next task. Where an error comes first it is dropped, and so
    /// ended, instead.
    ///
    /// # Errors
    /// When an engine cannot be closed.
    pub fn close(mut self) -> Result<()> {
        for whole in std::mem::take(&mut self.open) {
            self.helper.close(&whole.engine, self.surroundings)?;
        }
        *self.home = Some(self.helper);
        Ok(())
    }

    /// Opens a model under a load.
    fn open_model(
        &mut self,
        engine: &str,
        model: Model,
        architecture: &Architecture,
        load: Load,
    ) -> Result<protocol::Opened> {
        let block_tokens = self.helper.hello.block_tokens.multiple;
        let open = Open {
            engine: engine.to_owned(),
            model,
            precision: self.precision_name.clone(),
            max_tokens: load.max_tokens()?,
            max_sequences: load.sequences,
            max_context: load.context,
            kv_bytes: load.kv_bytes(architecture, self.precision, block_tokens),
            block_tokens,
            compiled: self.helper.hello.graphs,
        };
        let opened = self.helper.open(open, self.surroundings)?;
        tracing::debug!(
            engine,
            seconds = opened.seconds,
            weight_bytes = opened.weight_bytes,
            "vLLM has opened a model"
        );
        if opened.kv_blocks < load.blocks(block_tokens) {
            return Err(Error::Engine {
                reason: format!(
                    "it made {} blocks of keys and values of the space for {}",
                    opened.kv_blocks,
                    load.blocks(block_tokens)
                ),
            }
            .into());
        }
        Ok(opened)
    }

    /// Serves so many requests of the workload, on a machine that is not busy.
    fn serve_undisturbed(&mut self, whole: &Whole, requests: usize) -> Result<Served> {
        loop {
            let served = self.serve(whole, requests)?;
            if !self.retakes(served.busy) {
                return Ok(served);
            }
        }
    }

    /// Serves so many requests of the workload.
    fn serve(&mut self, whole: &Whole, requests: usize) -> Result<Served> {
        let Whole { engine, workload, .. } = whole;
        let served = self.helper.serve(engine, workload, requests, self.surroundings)?;
        if served.preemptions > 0 {
            return Err(Error::Engine {
                reason: format!(
                    "{} requests were put back for want of keys and values, which were counted to suffice",
                    served.preemptions
                ),
            }
            .into());
        }
        Ok(served)
    }

    /// Whether what was timed while others used so much of the processors is timed again.
    fn retakes(&mut self, busy: Option<f64>) -> bool {
        let Some(busy) = busy.filter(|busy| *busy > MOST_BUSY) else {
            return false;
        };
        self.retakes += 1;
        if self.retakes == MOST_RETAKES + 1 {
            tracing::warn!(
                busy,
                retakes = MOST_RETAKES,
                "others keep taking the processor: times are kept from here on"
            );
        }
        self.retakes <= MOST_RETAKES
    }

    /// Bytes of a model that was just opened beside weights, keys and values, which are resident from the start: those
    /// that it takes while it serves, and, of a GPU, what else it keeps. `before` is what was held before it was opened.
    fn other_bytes(&mut self, whole: &Whole, before: &Memory, opened: &protocol::Opened) -> Result<u64> {
        let after = self.helper.memory(self.surroundings)?;
        self.serve(whole, whole.workload.concurrency)?;
        let served = self.helper.memory(self.surroundings)?;
        let (Some(before), Some(after), Some(served)) = (&before.device, after.device, &served.device) else {
            return Ok(served.peak_pss_bytes.saturating_sub(after.pss_bytes));
        };
        let counted = opened.weight_bytes.saturating_add(opened.kv_bytes);
        let outside = *self.helper.outside_bytes.get_or_insert_with(|| {
            if served.outside_bytes.is_none() {
                tracing::warn!("others have memory of the device: the context's own is not counted");
            }
            served.outside_bytes.unwrap_or(0)
        });
        let readings = Readings {
            before: before.clone(),
            opened: after,
            served: served.clone(),
        };
        Ok(readings.beside(counted, outside))
    }
}

impl Engine for InVllm<'_> {
    fn key(&self, hidden: usize) -> CostKey {
        self.cost_key(hidden)
    }

    fn profile(&mut self, task: &Profile) -> Result<Profiled> {
        profile::run(self, task)
    }

    fn open(&mut self, model: &Subject<'_>, workload: &Workload) -> Result<Opened> {
        super::builtin::check_workload(workload)?;
        let load = Load {
            context: workload.prompt_tokens.saturating_add(workload.output_tokens),
            sequences: workload.concurrency,
            prompt: workload.prompt_tokens,
        };
        let (architecture, model) = resolved(model, self.precision, load.context)?;
        let engine = format!("model-{}", self.open.len());
        let before = self.helper.memory(self.surroundings)?;
        let opened = self.open_model(&engine, model, &architecture, load)?;
        let mut whole = Whole {
            engine,
            workload: *workload,
            memory_bytes: 0,
            other_bytes: 0,
        };
        whole.other_bytes = self.other_bytes(&whole, &before, &opened)?;
        whole.memory_bytes = opened
            .weight_bytes
            .saturating_add(opened.kv_bytes)
            .saturating_add(whole.other_bytes);
        self.open.push(whole);
        Ok(Opened::place(self.open.len() - 1))
    }

    fn run(&mut self, model: Opened) -> Result<Sample> {
        let Some(whole) = self.open.get(model.index()).cloned() else {
            return Err(crate::Error::Invalid {
                reason: format!("model {} is not open", model.index()),
            });
        };
        let concurrency = whole.workload.concurrency;
        let together = self.serve_undisturbed(&whole, concurrency)?;
        let throughput = if concurrency > 1 {
            // As an engine runs that takes a new request in as soon as one has ended.
            let requests = concurrency.saturating_mul(ROUNDS_OF_REQUESTS);
            self.serve_undisturbed(&whole, requests)?.output_tokens_per_second
        } else {
            together.output_tokens_per_second
        };
        Ok(Sample {
            first_token: median(&together.first_token_ms),
            latency: median(&together.end_to_end_ms),
            throughput,
        })
    }

    fn memory_bytes(&self, model: Opened) -> u64 {
        self.open.get(model.index()).map_or(0, |whole| whole.memory_bytes)
    }
}

/// A model as vLLM opens it: a directory with its own weights, anything else by its shape with random ones. A parent
/// that is no Hugging Face directory is measured by its shape too.
fn resolved(
    subject: &Subject<'_>,
    precision: Precision,
    max_context: usize,
) -> Result<(Architecture, Model)> {
    let opened = match subject {
        Subject::Shape(architecture) => {
            let config = models::config(architecture, precision, max_context)?;
            return Ok(((*architecture).clone(), Model::Config(config)));
        }
        Subject::Parent(reference) => unchanged(reference)?,
        Subject::Directory(directory) => Parent::open(&directory.to_string_lossy())?,
    };
    let model = if opened.path.is_dir() {
        let path = std::fs::canonicalize(&opened.path).map_err(|source| crate::Error::Io {
            path: opened.path.clone(),
            source,
        })?;
        Model::Directory(path.display().to_string())
    } else {
        Model::Config(models::config(&opened.architecture, precision, max_context)?)
    };
    Ok((opened.architecture, model))
}

/// The parent, if it is still the one that the job began with.
fn unchanged(reference: &ParentRef) -> Result<Parent> {
    let parent = Parent::open(&reference.source)?;
    if parent.fingerprint()? == reference.fingerprint {
        return Ok(parent);
    }
    Err(crate::Error::Invalid {
        reason: format!(
            "the parent {} has changed since the job began; submit the job again",
            reference.source
        ),
    })
}
