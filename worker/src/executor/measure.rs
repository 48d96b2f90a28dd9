//! The engines that stages which measure run on: which one a task asks for, and the built-in one over what this child
//! keeps.

use std::path::Path;
use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::Model;
use espalier_model::checkpoint::Parent;
use espalier_proto::task::{Engine as Wanted, Profile, Profiled, Serving};
use espalier_search::{CostKey, Shortage, WholeParent, Workload};

use super::{Caches, Context};
use crate::engine::builtin::{Bench, check_workload, cost_key, counted_bytes, dummy, overhead};
use crate::engine::quiet::Quiet;
use crate::engine::stacks::Stacks;
use crate::engine::{Engine, Opened, Sample, Series, Subject, Surroundings};
use crate::{Error, Result};

/// Rounds of a profile at the least: fewer give no spread worth the name.
const LEAST_ROUNDS: usize = 3;

/// Lets `work` measure on the engine that a task asks for.
pub(super) fn on<T>(
    wanted: Wanted,
    context: &Context<'_>,
    caches: &mut Caches,
    work: impl FnOnce(&mut dyn Engine) -> Result<T>,
) -> Result<T> {
    match wanted {
        Wanted::Builtin => work(&mut Builtin::new(context, caches)?),
        Wanted::Vllm { precision } => {
            let mut vllm = caches.take_vllm(context);
            let mut engine = vllm.engine(precision, context)?;
            let found = work(&mut engine);
            // A machine that is too noisy is no fault of vLLM's process, which the next try finds as it is.
            if matches!(found, Ok(_) | Err(Error::TooNoisy { .. })) {
                engine.close();
                caches.keep_vllm(vllm);
            }
            found
        }
    }
}

/// Our own engine.
struct Builtin<'a, 'store> {
    context: &'a Context<'store>,
    caches: &'a mut Caches,
    quiet: Quiet,
    /// None in place of those that were released.
    benches: Vec<Option<Bench>>,
}

impl<'a, 'store> Builtin<'a, 'store> {
    fn new(context: &'a Context<'store>, caches: &'a mut Caches) -> Result<Self> {
        Ok(Self {
            context,
            caches,
            quiet: Quiet::watch()?,
            benches: Vec::new(),
        })
    }

    fn load(&mut self, subject: &Subject<'_>) -> Result<Arc<Model>> {
        let operations = &self.context.operations;
        match subject {
            Subject::Shape(architecture) => {
                let parameters = usize::try_from(architecture.parameters().total).unwrap_or(usize::MAX);
                let bytes = parameters.saturating_mul(operations.activation_bytes());
                // Blocks of one that does not fit can be streamed, but not timed.
                let plan = self.context.plan();
                plan.expect_room("a model that is timed whole", bytes)?;
                dummy(operations, architecture, self.benches.len() as u64 + 1)
            }
            Subject::Parent(reference) => {
                let resident = self.caches.parent(self.context, reference)?;
                self.caches.clear_batches();
                Ok(Arc::clone(&resident.model))
            }
            Subject::Directory(directory) => Ok(Arc::new(exported(directory)?.load(&**operations)?)),
        }
    }
}

/// The shape of a model that is not open.
fn shape_of(model: &Subject<'_>) -> Result<Architecture> {
    Ok(match model {
        Subject::Shape(architecture) => (*architecture).clone(),
        Subject::Parent(reference) => Parent::open(&reference.source)?.architecture,
        Subject::Directory(directory) => exported(directory)?.architecture,
    })
}

fn exported(directory: &Path) -> Result<Parent> {
    Ok(Parent::open(&directory.to_string_lossy())?)
}

impl Engine for Builtin<'_, '_> {
    fn key(&self, hidden: usize) -> CostKey {
        cost_key(&*self.context.operations, hidden)
    }

    fn profile(&mut self, task: &Profile) -> Result<Profiled> {
        let (context, operations) = (self.context, &self.context.operations);
        let rounds = task.rounds.max(LEAST_ROUNDS);
        context.progress(0, rounds + 1, "rounds", || {
            "building stacks of every block shape".to_owned()
        })?;
        let mut stacks = Stacks::new(operations, &task.architecture, &task.shapes, &task.points)?;
        let (whole, workload) = (&task.architecture, &task.workload);
        let parent = self.open_where_it_fits(&Subject::Shape(whole), workload, workload.concurrency)?;
        let mut series = Series::new(&task.workload);
        // The first round warms pools and tables up and is thrown away.
        stacks.round(&self.quiet)?;
        stacks.forget();
        for round in 0..rounds {
            context.progress(round + 1, rounds + 1, "rounds", || {
                format!("{} shapes at {} points", task.shapes.len(), task.points.len())
            })?;
            if let Ok(parent) = parent {
                series.push(self.run(parent)?);
            }
            stacks.round(&self.quiet)?;
        }
        context.progress(rounds + 1, rounds + 1, "rounds", String::new)?;
        Ok(Profiled {
            key: self.key(task.architecture.hidden),
            rows: stacks.rows(),
            // Of one that was measured it is known what it needs beside.
            memory: parent.is_err().then(|| overhead(&**operations, whole, workload)),
            parent: match parent {
                Ok(parent) => WholeParent::Measured(series.measurement(self.memory_bytes(parent))),
                Err(shortage) => WholeParent::TooLarge(shortage),
            },
            reused_rows: 0,
            disturbed: self.quiet.gave_up(),
        })
    }

    fn open(&mut self, model: &Subject<'_>, workload: &Workload, running: usize) -> Result<Opened> {
        if running != workload.concurrency {
            return Err(Error::Invalid {
                reason: format!(
                    "running is {running}, expected the workload's concurrency, {}: the built-in engine runs all \
                     requests together",
                    workload.concurrency
                ),
            });
        }
        check_workload(workload)?;
        let model = self.load(model)?;
        let bench = Bench::new(&self.context.operations, &model, workload);
        let warm = bench.and_then(|mut bench| bench.warm_up().map(|()| bench));
        if let Err(error) = &warm
            && error.is_want_of_room()
        {
            // Weights that had room are not kept in the way of others.
            self.caches.clear();
        }
        self.benches.push(Some(warm?));
        Ok(Opened::place(self.benches.len() - 1))
    }

    fn shortage(&self, model: &Subject<'_>, workload: &Workload, _: usize) -> Result<Shortage> {
        let architecture = shape_of(model)?;
        Ok(Shortage {
            needed_bytes: counted_bytes(&*self.context.operations, &architecture, workload),
            free_bytes: self.context.plan().free_bytes(),
        })
    }

    fn release(&mut self, model: Opened) -> Result<()> {
        if let Some(bench) = self.benches.get_mut(model.index()) {
            *bench = None;
        }
        // It may have been the parent, which would be kept for the next task.
        self.caches.clear();
        Ok(())
    }

    fn run(&mut self, model: Opened) -> Result<Sample> {
        match self.benches.get_mut(model.index()) {
            Some(Some(bench)) => bench.run(&self.quiet),
            _ => Err(Error::Invalid {
                reason: format!("model {} is not open", model.index()),
            }),
        }
    }

    fn memory_bytes(&self, model: Opened) -> u64 {
        let bench = self.benches.get(model.index());
        bench.and_then(Option::as_ref).map_or(0, Bench::memory_bytes)
    }

    fn serving(&self, _: Opened) -> Option<Serving> {
        None
    }
}

impl Surroundings for Context<'_> {
    fn check_stopped(&self) -> Result<()> {
        self.look_for_stop()
    }

    fn beat(&self) {
        Context::beat(self);
    }

    fn progress(&self, done: usize, total: usize, unit: &str, note: &dyn Fn() -> String) -> Result<()> {
        Context::progress(self, done, total, unit, note)
    }

    fn waits(&self, why: &dyn Fn() -> String) -> Result<()> {
        Context::waits(self, why)
    }
}
