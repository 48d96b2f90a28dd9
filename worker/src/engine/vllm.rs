//! vLLM as an engine: models are opened and timed by a helper, a process of the user's own Python with vLLM and the
//! plugin, which serves exactly the class that exports are served with.
//!
//! The helper knows no policy: which models are open, in which order they are timed, when a machine is too busy and
//! when a spread is known is decided here. It may hang, die, flood its output or say what is no answer: each is an
//! [`Error`] within a deadline, and leaves no process behind.

mod beside;
mod contention;
mod environment;
mod error;
mod fits;
mod group;
mod helper;
mod host;
mod memory;
mod models;
mod options;
mod process;
mod profile;
mod protocol;
mod room;
mod stacks;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use espalier_arch::{Architecture, Precision};
use espalier_model::checkpoint::Parent;
use espalier_proto::task::{ParentRef, Profile, Profiled, Serving};
use espalier_search::statistics::median;
use espalier_search::{CostKey, EngineMemory, Mode, Shortage, Workload};

pub use environment::Environment;
pub use error::Error;
pub use options::{Deadlines, Pause, VllmOptions};

use super::{Engine, Opened, Sample, Subject, Surroundings};
use crate::Result;
use crate::agent::options::processor_name;
use contention::{Contention, Judged, What};
use helper::Helper;
use models::Load;
use protocol::{Model, Open, Served};

/// Requests for a throughput, in concurrencies: the first and the last ones run with fewer beside them.
const ROUNDS_OF_REQUESTS: usize = 4;
/// How often it is looked whether the attempt should stop while others are waited for.
const LOOK: Duration = Duration::from_millis(50);

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
        let mut kept = self.helper.take();
        let helper = match kept.take_if(|helper| helper.is_idle()) {
            Some(helper) => helper,
            // What is left of one that has ended meanwhile goes first.
            None => {
                drop(kept);
                start(&self.options, surroundings)?
            }
        };
        Ok(InVllm {
            precision_name: models::precision_name(precision)?,
            precision,
            contention: Contention::new(self.options.pause, &helper.hello.platform),
            home: self,
            helper,
            surroundings,
            open: Vec::new(),
        })
    }
}

/// Starts a helper for the device.
fn start(options: &VllmOptions, surroundings: &dyn Surroundings) -> Result<Helper> {
    let Some(environment) = &options.environment else {
        return Err(Error::NotConfigured.into());
    };
    surroundings.waits(&|| "starting vLLM".to_owned())?;
    // What is missing is told in a moment, and in fewer words than an import's.
    environment.look_while(|| {
        surroundings.beat();
        surroundings.check_stopped()
    })?;
    let helper = Helper::start(environment, options, surroundings)?;
    let found = &helper.hello.platform;
    match options.platform.filter(|wanted| wanted != found) {
        None => Ok(helper),
        Some(wanted) => Err(Error::NoVllm {
            python: environment.python.clone(),
            reason: format!(
                "its vLLM runs on {found} and the task's device is {wanted}; give the python of an environment whose \
                 vLLM is made for that"
            ),
        }
        .into()),
    }
}

/// vLLM in one precision, for one task.
#[derive(Debug)]
pub struct InVllm<'a> {
    precision: Precision,
    precision_name: String,
    /// Where the helper goes when all has ended well.
    home: &'a mut Vllm,
    helper: Helper,
    surroundings: &'a dyn Surroundings,
    /// None in place of those that were released.
    open: Vec<Option<Whole>>,
    contention: Contention,
}

/// A model under a workload.
#[derive(Debug, Clone)]
struct Whole {
    engine: String,
    architecture: Architecture,
    model: Model,
    load: Load,
    workload: Workload,
    memory_bytes: u64,
    /// Beside weights, keys and values.
    other_bytes: u64,
    /// Whether a GPU's context is not among them.
    without_context: bool,
    serving: Serving,
}

impl InVllm<'_> {
    /// What cost rows are true for, at this width of the residual stream.
    fn cost_key(&self, hidden: usize) -> CostKey {
        let hello = &self.helper.hello;
        let device = match hello.platform.as_str() {
            "cpu" => format!("{}, {} threads", processor_name(), hello.threads),
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
            environment: hello.environment(),
        }
    }

    /// What the engine needs and rounds, as a model that is open showed.
    fn memory_of(&self, model: Opened) -> Option<EngineMemory> {
        let whole = self.open.get(model.index())?.as_ref()?;
        Some(EngineMemory {
            overhead_bytes: whole.other_bytes,
            block_tokens: self.helper.hello.block_tokens.multiple,
            spare_blocks: models::SPARE_BLOCKS,
            steps_under_way: self.helper.hello.steps_under_way(),
        })
    }

    /// Closes what was opened and keeps the helper for the next task. One that cannot close it is ended: what was measured
    /// is no less true for it. Where an error comes first the helper is dropped, and so ended, instead.
    pub fn close(mut self) {
        match self.helper.close_all(self.surroundings) {
            Ok(()) => self.home.helper = Some(self.helper),
            Err(error) => {
                tracing::warn!(%error, "vLLM's process is ended, for its engines could not be closed")
            }
        }
    }

    /// Begins anew with the models that are open and no others: in the same process, or in another where that has
    /// ended or cannot close them.
    ///
    /// # Errors
    /// When there is no room even for those, or vLLM cannot be started again.
    fn begin_anew(&mut self) -> Result<()> {
        match self.helper.close_all(self.surroundings) {
            Ok(()) => self.open_again(),
            Err(crate::Error::Cancelled) => Err(crate::Error::Cancelled),
            Err(error) => {
                tracing::warn!(%error, "vLLM is started again");
                self.begin_in_another()
            }
        }
    }

    /// The same in another process.
    fn begin_in_another(&mut self) -> Result<()> {
        self.helper.end();
        self.helper = start(&self.home.options, self.surroundings)?;
        self.open_again()
    }

    /// Opens, in a process without engines, those models that are to be open.
    fn open_again(&mut self) -> Result<()> {
        for place in 0..self.open.len() {
            let Some(whole) = self.open.get(place).cloned().flatten() else {
                continue;
            };
            let anew = self.open_whole(whole)?;
            self.open.splice(place..=place, [Some(anew)]);
        }
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
        let opened = self.helper.open(open, architecture, self.surroundings)?;
        tracing::debug!(
            engine,
            seconds = opened.seconds,
            weight_bytes = opened.weight_bytes,
            "vLLM has opened a model"
        );
        let threads = self.helper.hello.threads;
        if self.helper.hello.platform == "cpu" && opened.threads != threads {
            let reason = format!(
                "its vLLM computes with {} threads, expected {threads}, by which its times are kept; unset \
                 VLLM_CPU_OMP_THREADS_BIND, or start the worker with --threads {}",
                opened.threads, opened.threads
            );
            return Err(self.helper.unfit(reason).into());
        }
        let blocks = load.blocks(architecture, block_tokens);
        if opened.kv_blocks < blocks {
            return Err(Error::Engine {
                reason: format!(
                    "it made {} blocks of keys and values of the space for {blocks}",
                    opened.kv_blocks
                ),
            }
            .into());
        }
        Ok(opened)
    }

    /// Opens a model that is to be served, serves it once and tells its memory.
    fn open_whole(&mut self, mut whole: Whole) -> Result<Whole> {
        let before = self.helper.memory(self.surroundings)?;
        let opened = self.open_model(
            &whole.engine,
            whole.model.clone(),
            &whole.architecture,
            whole.load,
        )?;
        // One that is opened once more may find free what models before it have left.
        whole.other_bytes = self.other_bytes(&whole, &before, &opened)?.max(whole.other_bytes);
        whole.without_context = before.device.is_some() && self.helper.outside_bytes.is_none();
        whole.memory_bytes = opened
            .weight_bytes
            .saturating_add(opened.kv_bytes)
            .saturating_add(whole.other_bytes);
        whole.serving = Serving {
            arguments: opened.serve_arguments,
            environment: opened.serve_environment,
        };
        Ok(whole)
    }

    /// Closes one engine, which may not be open.
    fn close_engine(&mut self, engine: &str) -> Result<()> {
        match self.helper.close(engine, self.surroundings) {
            Ok(()) | Err(crate::Error::Vllm(Error::NotOpen { .. })) => Ok(()),
            Err(crate::Error::Cancelled) => Err(crate::Error::Cancelled),
            Err(error) => {
                tracing::warn!(%error, engine, "it cannot be closed");
                self.begin_anew()
            }
        }
    }

    /// Serves so many requests of the workload, when others let it; and whether they did.
    fn serve_undisturbed(&mut self, whole: &Whole, requests: usize) -> Result<(Served, bool)> {
        loop {
            let served = self.serve(whole, requests)?;
            if let Some(undisturbed) = self.judge(What::Workload, served.busy)? {
                return Ok((served, undisturbed));
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

    /// Whether what was timed while others used so much of the processors was undisturbed; none where it is to be
    /// timed again, after a pause that is over by then.
    fn judge(&mut self, what: What, busy: Option<f64>) -> Result<Option<bool>> {
        let pause = match self.contention.judge(what, busy) {
            Judged::Undisturbed => return Ok(Some(true)),
            Judged::Disturbed => return Ok(Some(false)),
            Judged::Again(pause) => pause,
        };
        let share = 100.0 * busy.unwrap_or_default();
        self.surroundings.waits(&|| {
            format!(
                "others use {share:.0}% of the processors: {:.0} s until it is timed again",
                pause.as_secs_f64()
            )
        })?;
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            self.surroundings.check_stopped()?;
            self.surroundings.beat();
            std::thread::sleep(left.min(LOOK));
        }
        Ok(None)
    }
}

impl Engine for InVllm<'_> {
    fn key(&self, hidden: usize) -> CostKey {
        self.cost_key(hidden)
    }

    fn profile(&mut self, task: &Profile) -> Result<Profiled> {
        profile::run(self, task)
    }

    fn open(&mut self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Opened> {
        super::builtin::check_workload(workload)?;
        // What closed models leave free in a processor's process, about 10 MB after one of 135M parameters, the next one
        // takes without a rise of the process's memory, and would seem to need that much less.
        let hides_memory = self.helper.hello.platform == "cpu" && self.helper.had_others();
        // A model that had no room may have taken its process with it.
        if hides_memory || !self.helper.is_idle() {
            self.begin_in_another()?;
        }
        let load = Load::of(workload, running, self.helper.hello.steps_under_way());
        let (architecture, model) = resolved(model, self.precision, load.context)?;
        let shortage = self.shortage_of(&architecture, load);
        if shortage.needed_bytes > shortage.free_bytes {
            // What cannot fit is not tried: on a processor the system would end whatever it likes.
            let reason = format!("a model of {} blocks {shortage}", architecture.blocks.len());
            return Err(Error::OutOfMemory { reason }.into());
        }
        let engine = format!("model-{}", self.open.len());
        let whole = self.open_whole(Whole {
            engine: engine.clone(),
            architecture,
            model,
            load,
            workload: *workload,
            memory_bytes: 0,
            other_bytes: 0,
            without_context: false,
            serving: Serving::default(),
        });
        if let Err(error) = &whole
            && error.is_want_of_room()
        {
            // Others may be opened in its place.
            self.close_engine(&engine)?;
        }
        self.open.push(Some(whole?));
        Ok(Opened::place(self.open.len() - 1))
    }

    fn shortage(&self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Shortage> {
        let load = Load::of(workload, running, self.helper.hello.steps_under_way());
        let (architecture, _) = resolved(model, self.precision, load.context)?;
        Ok(self.shortage_of(&architecture, load))
    }

    fn release(&mut self, model: Opened) -> Result<()> {
        match self.open.get_mut(model.index()).and_then(Option::take) {
            Some(whole) => self.close_engine(&whole.engine),
            None => Ok(()),
        }
    }

    fn run(&mut self, model: Opened) -> Result<Sample> {
        let Some(whole) = self.open.get(model.index()).cloned().flatten() else {
            return Err(crate::Error::Invalid {
                reason: format!("model {} is not open", model.index()),
            });
        };
        let concurrency = whole.workload.concurrency;
        let (together, mut undisturbed) = self.serve_undisturbed(&whole, concurrency)?;
        let mut throughput = together.output_tokens_per_second;
        if concurrency > 1 {
            // As an engine runs that takes a new request in as soon as one has ended.
            let requests = concurrency.saturating_mul(ROUNDS_OF_REQUESTS);
            let (served, also) = self.serve_undisturbed(&whole, requests)?;
            throughput = served.output_tokens_per_second;
            undisturbed &= also;
        }
        Ok(Sample {
            first_token: median(&together.first_token_ms),
            latency: median(&together.end_to_end_ms),
            throughput,
            disturbed: !undisturbed,
        })
    }

    fn memory_bytes(&self, model: Opened) -> u64 {
        let whole = self.open.get(model.index());
        whole
            .and_then(Option::as_ref)
            .map_or(0, |whole| whole.memory_bytes)
    }

    fn without_context(&self, model: Opened) -> bool {
        let whole = self.open.get(model.index()).and_then(Option::as_ref);
        whole.is_some_and(|whole| whole.without_context)
    }

    fn serving(&self, model: Opened) -> Option<Serving> {
        let whole = self.open.get(model.index()).and_then(Option::as_ref);
        whole.map(|whole| whole.serving.clone())
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
