//! The kernels of one device: compiled or read from the cache when they are first asked for, then kept.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::cache::Cache;
use super::driver::Context;
use super::error::{Error, Result, Version};
use super::launch::Module;
use super::source::{Specialisation, signatures};
use super::{library, nvrtc};

/// A module that nobody may use yet.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) module: Arc<Module>,
    key: blake3::Hash,
    /// When it was compiled just now, not read from the cache.
    fresh: Option<Vec<u8>>,
}

impl Candidate {
    /// Whether it was compiled just now: the cache holds only what was accepted before.
    pub(super) fn is_fresh(&self) -> bool {
        self.fresh.is_some()
    }
}

/// Where kernels come from.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    capability: Version,
    compiler: OnceLock<Version>,
    cache: Cache,
    modules: RwLock<HashMap<Specialisation, Arc<Module>>>,
}

impl Kernels {
    pub(super) fn new(context: &Arc<Context>, capability: Version, cache: Option<PathBuf>) -> Self {
        Self {
            context: context.clone(),
            capability,
            compiler: OnceLock::new(),
            cache: Cache::new(cache),
            modules: RwLock::default(),
        }
    }

    /// The module of `kernel`.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be compiled.
    pub(super) fn get(&self, kernel: Specialisation) -> Result<Arc<Module>> {
        if let Some(module) = self.known(&kernel) {
            return Ok(module);
        }
        let candidate = self.candidate(kernel)?;
        Ok(self.accept(kernel, candidate))
    }

    /// The module of `kernel` if it was accepted before.
    pub(super) fn known(&self, kernel: &Specialisation) -> Option<Arc<Module>> {
        let modules = self.modules.read().unwrap_or_else(PoisonError::into_inner);
        modules.get(kernel).cloned()
    }

    /// Loads or compiles `kernel` without keeping it.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be compiled.
    pub(super) fn candidate(&self, kernel: Specialisation) -> Result<Candidate> {
        let compiler = self.compiler()?;
        let key = kernel.key(self.capability, compiler);
        let names = || kernel.text().map(signatures).unwrap_or_default();
        if let Some(cubin) = self.cache.load(&key) {
            // The driver may refuse what an earlier one took: then it is compiled again.
            match Module::load(&self.context, &cubin, names()) {
                Ok(module) => {
                    return Ok(Candidate {
                        module: Arc::new(module),
                        key,
                        fresh: None,
                    });
                }
                Err(Error::Lost) => return Err(Error::Lost),
                Err(error) => tracing::warn!(%kernel, %error, "a cached kernel is compiled again"),
            }
        }
        let compiled = nvrtc::compile(&kernel, self.capability, false)?;
        if !compiled.log.is_empty() {
            tracing::debug!(%kernel, log = compiled.log, "compiled");
        }
        let module = Module::load(&self.context, &compiled.cubin, names())?;
        Ok(Candidate {
            module: Arc::new(module),
            key,
            fresh: Some(compiled.cubin),
        })
    }

    /// Keeps `candidate`, here and in the cache. When another thread was first, that one's is kept.
    pub(super) fn accept(&self, kernel: Specialisation, candidate: Candidate) -> Arc<Module> {
        if let Some(cubin) = &candidate.fresh {
            self.cache.store(&candidate.key, cubin);
        }
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        modules.entry(kernel).or_insert(candidate.module).clone()
    }

    /// Has every one of `kernels` ready, compiling on all processors.
    ///
    /// # Errors
    /// The first that failed.
    pub(super) fn prepare(&self, kernels: &[Specialisation]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(kernels.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(&kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(error) = self.get(kernel) {
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            failed.get_or_insert(error);
                            return;
                        }
                    }
                });
            }
        });
        failed
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .map_or(Ok(()), Err)
    }

    fn compiler(&self) -> Result<Version> {
        if let Some(&version) = self.compiler.get() {
            return Ok(version);
        }
        let version = library::compiler()?;
        Ok(*self.compiler.get_or_init(|| version))
    }
}
