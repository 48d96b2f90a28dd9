//! What a model takes of a GPU beside its weights, keys and values.
//!
//! The engine's memory is read before a model is opened, after, and after it has served. What opening kept of the
//! allocator's beside weights, keys and values are captured graphs and buffers; what serving added are activations. What a
//! process takes beside the allocator (the device's context, libraries, launched graphs) is measured once in it, when
//! its first model has served, and is part of every model: each would be served by a process of its own.

use super::protocol::DeviceMemory;

/// Readings around one model.
#[derive(Debug)]
pub(super) struct Readings {
    pub before: DeviceMemory,
    pub opened: DeviceMemory,
    pub served: DeviceMemory,
}

impl Readings {
    /// Bytes beside the `counted` ones of weights, keys and values; `outside` is what the process takes beside the
    /// allocator.
    pub fn beside(&self, counted: u64, outside: u64) -> u64 {
        let taken = self
            .opened
            .reserved_bytes
            .saturating_sub(self.before.reserved_bytes);
        let kept = taken.saturating_sub(counted);
        let activations = self
            .served
            .peak_reserved_bytes
            .saturating_sub(self.opened.reserved_bytes);
        kept.saturating_add(activations).saturating_add(outside)
    }
}
