//! What a model takes beside its weights, keys and values.
//!
//! Of a host: how far the process's memory rises while it serves.
//!
//! Of a GPU: the engine's memory is read before a model is opened, after, and after it has served. What opening kept of
//! the allocator's beside weights, keys and values are captured graphs and buffers; what serving added are activations.
//! What a process takes beside the allocator (the device's context, libraries, launched graphs) is measured once in it,
//! when its first model has served, and is part of every model: each would be served by a process of its own. The same
//! holds of what it takes once of the allocator's, with whichever model comes first (the pool of all graphs, rotary tables,
//! cuBLAS's workspace): each model counts with at least what any before it kept.

use super::protocol::{self, DeviceMemory, Memory};
use super::{Error, InVllm, Whole};
use crate::Result;

/// Runs by which it is known how far a host's memory rises: single ones were seen to differ by 5 MB of 20.
pub(super) const HOST_MEMORY_RUNS: usize = 3;

/// Readings around one model.
#[derive(Debug)]
pub(super) struct Readings {
    pub before: DeviceMemory,
    pub opened: DeviceMemory,
    pub served: DeviceMemory,
}

impl Readings {
    /// Bytes that opening kept beside the `counted` ones of weights, keys and values.
    pub fn kept(&self, counted: u64) -> u64 {
        let taken = self
            .opened
            .reserved_bytes
            .saturating_sub(self.before.reserved_bytes);
        taken.saturating_sub(counted)
    }

    /// Bytes that serving added.
    pub fn activations(&self) -> u64 {
        self.served
            .peak_reserved_bytes
            .saturating_sub(self.opened.reserved_bytes)
    }
}

impl InVllm<'_> {
    /// Bytes of a model that was just opened beside weights, keys and values, which are resident from the start: those
    /// that it takes while it serves, and, of a GPU, what else it keeps. `before` is what was held before it was opened.
    pub(super) fn other_bytes(
        &mut self,
        whole: &Whole,
        before: &Memory,
        opened: &protocol::Opened,
    ) -> Result<u64> {
        let after = self.helper.memory(self.surroundings)?;
        self.serve(whole, whole.workload.concurrency)?;
        let warm = self.helper.memory(self.surroundings)?;
        let (Some(before), Some(after)) = (&before.device, after.device) else {
            return self.host_rise(whole, warm);
        };
        self.serve(whole, whole.workload.concurrency)?;
        let Some(served) = self.helper.memory(self.surroundings)?.device else {
            return Err(Error::Engine {
                reason: "it told its device's memory before it served, and not after".to_owned(),
            }
            .into());
        };
        let counted = opened.weight_bytes.saturating_add(opened.kv_bytes);
        let known = self.helper.outside_bytes.or(served.outside_bytes);
        if known.is_none() {
            tracing::warn!("others have memory of the device: the context's own is not counted");
        }
        self.helper.outside_bytes = known;
        let readings = Readings {
            before: before.clone(),
            opened: after,
            served,
        };
        let kept = readings.kept(counted).max(self.helper.kept_bytes);
        self.helper.kept_bytes = kept;
        Ok(kept
            .saturating_add(readings.activations())
            .saturating_add(known.unwrap_or(0)))
    }

    /// The most that a host's memory rises by while the model serves, of several runs: how much of what one run frees the
    /// next finds again is chance. What the process makes once, for whichever model runs first, is no model's, so the
    /// run before these is not looked at; what earlier models left free would hide what this one takes, so none
    /// is opened in a process after others (`InVllm::open`).
    fn host_rise(&mut self, whole: &Whole, warm: Memory) -> Result<u64> {
        let mut most = 0;
        let mut before = warm;
        for _ in 0..HOST_MEMORY_RUNS {
            self.serve(whole, whole.workload.concurrency)?;
            let served = self.helper.memory(self.surroundings)?;
            most = most.max(served.peak_held_bytes.saturating_sub(before.held_bytes));
            before = served;
        }
        Ok(most)
    }
}
