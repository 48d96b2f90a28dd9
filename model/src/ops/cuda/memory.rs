//! Device memory: a pool with a limit, and the buffers that it hands out.
//!
//! The pool is ordered by the compute stream: a buffer that is dropped is free for whatever is queued next,
//! although work queued before still uses it, because that work comes first. Work of another stream that reads
//! or writes a buffer therefore keeps a handle until the compute stream waits for it.
//!
//! A recording (`graph.rs`) has a reserve instead: an arena of its own, over buffers of the pool.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::arena::{Arena, Usage, rounded, slab_size};
use super::driver::{Address, Context};
use super::error::{Error, Result};
use super::graph::Recorder;

/// Bytes of a reserve's slabs at least: a step of decoding needs many small blocks.
const SMALLEST_SLAB: u64 = 1 << 20;

/// Bytes, shown as mebibytes.
pub(super) struct Mebibytes(pub(super) u64);

impl std::fmt::Display for Mebibytes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.0.div_ceil(1 << 20))
    }
}

/// The memory of one device as far as this process has it.
#[derive(Debug)]
pub(super) struct Pool {
    context: Arc<Context>,
    recorder: Arc<Recorder>,
    arena: Mutex<Arena>,
    limit: u64,
    deadline: Duration,
    /// Whether fresh buffers are filled with NaN.
    poison: bool,
}

impl Pool {
    pub(super) fn new(
        context: &Arc<Context>,
        recorder: &Arc<Recorder>,
        limit: u64,
        deadline: Duration,
        poison: bool,
    ) -> Self {
        Self {
            context: context.clone(),
            recorder: recorder.clone(),
            arena: Mutex::default(),
            limit,
            deadline,
            poison,
        }
    }

    fn arena(&self) -> MutexGuard<'_, Arena> {
        // Its methods leave it whole wherever they could panic.
        self.arena.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn usage(&self) -> Usage {
        self.arena().usage()
    }

    pub(super) fn reset_peaks(&self) {
        self.arena().reset_peaks();
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// A buffer of at least `bytes` bytes; what it holds is unspecified.
    ///
    /// # Errors
    /// When the limit or the device leaves no room, also after what is idle was given back.
    pub(super) fn allocate(self: &Arc<Self>, bytes: u64) -> Result<Buffer> {
        let size = rounded(bytes).ok_or_else(|| self.out_of_memory(bytes))?;
        let buffer = match self.recorder.reserve() {
            Some(reserve) => reserve.take(size)?,
            None => self.take(size)?,
        };
        if self.poison {
            // 0xff.. is a NaN as f32 and as bf16.
            buffer.fill(0xff)?;
        }
        Ok(buffer)
    }

    /// A buffer of the pool's own, of a rounded size.
    fn take(self: &Arc<Self>, size: u64) -> Result<Buffer> {
        let mut arena = self.arena();
        let address = match arena.take(size) {
            Some(address) => address,
            None => self.grow(&mut arena, size)?,
        };
        drop(arena);
        Ok(Buffer {
            pool: self.clone(),
            reserve: None,
            address,
            bytes: size,
        })
    }

    fn grow(&self, arena: &mut Arena, size: u64) -> Result<Address> {
        let (wanted, least) = slab_size(size);
        if self.add_slab(arena, wanted, size)? || (least < wanted && self.add_slab(arena, least, size)?) {
            return self.taken(arena, size);
        }
        self.release_idle(arena)?;
        for slab in [wanted, least] {
            if self.add_slab(arena, slab, size)? {
                return self.taken(arena, size);
            }
        }
        let elsewhere = arena.take_elsewhere(size);
        elsewhere.ok_or_else(|| self.out_of_memory_at(size, arena.usage()))
    }

    /// A block out of a slab that was added for it.
    fn taken(&self, arena: &mut Arena, size: u64) -> Result<Address> {
        let address = arena.take(size);
        address.ok_or_else(|| self.out_of_memory_at(size, arena.usage()))
    }

    /// Whether a slab of `slab` bytes could be had within the limit.
    fn add_slab(&self, arena: &mut Arena, slab: u64, wanted: u64) -> Result<bool> {
        if arena
            .usage()
            .held
            .checked_add(slab)
            .is_none_or(|held| held > self.limit)
        {
            return Ok(false);
        }
        let Ok(bytes) = usize::try_from(slab) else {
            return Ok(false);
        };
        let Some(address) = self.context.allocate(bytes)? else {
            return Ok(false);
        };
        arena.add_slab(address, slab, wanted);
        Ok(true)
    }

    /// Gives slabs of which nothing is in use back to the device, once no queued work can touch them.
    fn release_idle(&self, arena: &mut Arena) -> Result<()> {
        let idle = arena.remove_idle_slabs();
        if idle.is_empty() {
            return Ok(());
        }
        // Given up on an error: then the slabs are left to the work that may still use them.
        self.recorder
            .compute()
            .wait(self.deadline, "the work before giving memory back")?;
        for address in idle {
            self.context.free(address);
        }
        Ok(())
    }

    /// Gives everything that is idle back to the device.
    ///
    /// # Errors
    /// When the work queued before does not end.
    pub(super) fn trim(&self) -> Result<()> {
        let mut arena = self.arena();
        self.release_idle(&mut arena)
    }

    fn out_of_memory(&self, asked: u64) -> Error {
        let usage = self.usage();
        self.out_of_memory_at(asked, usage)
    }

    fn out_of_memory_at(&self, asked: u64, usage: Usage) -> Error {
        Error::OutOfMemory {
            asked,
            in_use: usage.in_use,
            held: usage.held,
            limit: self.limit,
            free: self.context.memory().map_or(0, |(free, _)| free),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let idle = self.arena().remove_idle_slabs();
        if self
            .recorder
            .compute()
            .wait(self.deadline, "the work before the device is closed")
            .is_ok()
        {
            for address in idle {
                self.context.free(address);
            }
        }
    }
}

/// The memory of one recording: blocks of its own over slabs that are buffers of the pool, so that what its work
/// frees its later work takes again, and nobody else.
#[derive(Debug)]
pub(super) struct Reserve {
    pool: Arc<Pool>,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    arena: Arena,
    slabs: Vec<Buffer>,
}

impl Reserve {
    pub(super) fn new(pool: &Arc<Pool>) -> Self {
        Self {
            pool: pool.clone(),
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>, size: u64) -> Result<Buffer> {
        let mut held = self.held();
        let address = match held.arena.take(size) {
            Some(address) => address,
            None => {
                let slab = self.pool.take(size.max(SMALLEST_SLAB))?;
                held.arena.add_slab(slab.address, slab.bytes, size);
                held.slabs.push(slab);
                let found = held.arena.take(size);
                found.ok_or_else(|| self.pool.out_of_memory(size))?
            }
        };
        drop(held);
        Ok(Buffer {
            pool: self.pool.clone(),
            reserve: Some(self.clone()),
            address,
            bytes: size,
        })
    }
}

/// A piece of device memory, free again for later work of the compute stream when it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    pool: Arc<Pool>,
    /// Whose it is, where not the pool's.
    reserve: Option<Arc<Reserve>>,
    address: Address,
    bytes: u64,
}

impl Buffer {
    pub(super) fn address(&self) -> Address {
        self.address
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Sets every byte, in the order of this thread's work.
    pub(super) fn fill(&self, value: u8) -> Result<()> {
        let bytes = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        self.pool
            .context
            .fill(self.address, value, bytes, self.pool.recorder.stream().raw())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &self.reserve {
            Some(reserve) => reserve.held().arena.give(self.address),
            None => self.pool.arena().give(self.address),
        }
    }
}
