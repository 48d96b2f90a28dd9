//! The backend of a child's device, opened once for all its attempts.

use std::sync::Arc;

use espalier_model::Device;
use espalier_model::ops::{self, Operations};

use super::pulse::{Beating, Pulse};
use crate::Result;
use crate::engine::vllm::VllmOptions;

/// An open device, and the pulse of what runs on it. Clones are the same.
#[derive(Debug, Clone)]
pub struct Backend {
    pub(super) operations: Arc<dyn Operations>,
    pub(super) pulse: Pulse,
    /// Bytes that a parent may take on the host.
    pub(super) host_limit: Option<u64>,
    pub(super) vllm: VllmOptions,
}

impl Backend {
    /// Opens `device`, of which tensors may take `memory_limit` bytes (see [`ops::open`]); on the host, the parent's
    /// weights alone.
    ///
    /// # Errors
    /// When the device is a GPU that is not there, too old or full, or a library that it needs is missing.
    pub fn open(device: Device, memory_limit: Option<u64>) -> Result<Self> {
        let pulse = Pulse::default();
        let operations = Beating::new(ops::open(device, memory_limit)?, pulse.clone());
        Ok(Self {
            operations: Arc::new(operations),
            pulse,
            host_limit: memory_limit.filter(|_| device == Device::Cpu),
            vllm: VllmOptions::default(),
        })
    }

    /// The same beside vLLM.
    #[must_use]
    pub fn with_vllm(self, vllm: VllmOptions) -> Self {
        Self { vllm, ..self }
    }

    /// The device's operations.
    pub fn operations(&self) -> &dyn Operations {
        &*self.operations
    }

    /// What beats as long as something is done.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }
}
