//! What a worker is told at start, and its defaults.

use std::path::PathBuf;
use std::time::Duration;

use espalier_model::Device;
use espalier_proto::task::VLLM;
use espalier_proto::v1;

use super::memory::meminfo_bytes;
use crate::discovery::Gpu;
use crate::{Error, Result};

/// The variable that tells a worker, and it its children, after how long without a sign of life an attempt is killed.
pub const HANG_TIMEOUT: &str = "ESPALIER_HANG_TIMEOUT";

/// An attempt says once a second that it is alive; a shorter limit would kill one on a busy machine.
const SHORTEST_HANG_TIMEOUT: Duration = Duration::from_secs(10);

/// What a worker is told at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerOptions {
    /// The coordinator's URL, for example `http://127.0.0.1:7474`.
    pub coordinator: String,
    /// Names the worker: at most 64 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Names the host, for workers that share one; empty means the worker's own name.
    pub host: String,
    /// What it runs attempts on.
    pub devices: Vec<DeviceOptions>,
    /// How children are started and watched.
    pub child: ChildOptions,
    /// On shutdown, how long running attempts may take to end before they are killed.
    pub drain_timeout: Duration,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Unique within the worker.
    pub id: String,
    /// `cpu` or `cuda`.
    pub kind: String,
    /// The model, as the system calls it.
    pub name: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Threads an attempt uses.
    pub threads: usize,
    /// Bytes of a GPU that tensors may take; none: what is free when a child opens it, less a reserve. Of the processor's
    /// memory, bytes that a parent's weights may take; none: all.
    pub memory_limit: Option<u64>,
    /// The version of vLLM that it can be measured in; none without.
    pub vllm: Option<String>,
}

/// How children are started and watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildOptions {
    /// The program; this very program by default.
    pub program: Option<PathBuf>,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// An attempt that computes nothing, moves no bytes and tells no progress for this long is killed as hung.
    pub hang_timeout: Duration,
    /// A cancelled attempt that has not stopped after this long is killed.
    pub stop_timeout: Duration,
}

impl Default for ChildOptions {
    fn default() -> Self {
        Self {
            program: None,
            arguments: vec!["device-child".to_owned()],
            hang_timeout: Duration::from_secs(600),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

impl WorkerOptions {
    /// A worker with this machine's processor as its one device, on `threads` threads (0: all there are).
    pub fn cpu(coordinator: &str, name: &str, threads: usize) -> Self {
        Self::new(coordinator, name, vec![DeviceOptions::cpu(threads)])
    }

    /// A worker with these devices.
    pub fn new(coordinator: &str, name: &str, devices: Vec<DeviceOptions>) -> Self {
        Self {
            coordinator: coordinator.to_owned(),
            name: name.to_owned(),
            host: String::new(),
            devices,
            child: ChildOptions::default(),
            drain_timeout: Duration::from_secs(60),
        }
    }

    /// Checks what can be checked before a connection.
    ///
    /// # Errors
    /// The field, its value and what would be right.
    pub fn validate(&self) -> Result<()> {
        let invalid = |reason: String| Err(Error::Invalid { reason });
        let plain =
            |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.');
        let is_place = matches!(self.name.as_str(), "." | "..");
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(plain) || is_place {
            return invalid(format!(
                "worker name is {:?}, expected 1 to 64 letters, digits, '-', '_' or '.', and not '.' or '..'",
                self.name
            ));
        }
        if self.child.hang_timeout < SHORTEST_HANG_TIMEOUT {
            return invalid(format!(
                "the hang timeout is {} ms, expected at least {} s",
                self.child.hang_timeout.as_millis(),
                SHORTEST_HANG_TIMEOUT.as_secs()
            ));
        }
        if self.devices.is_empty() {
            return invalid("the worker has no device, expected at least one".to_owned());
        }
        for (index, device) in self.devices.iter().enumerate() {
            if self
                .devices
                .iter()
                .skip(index + 1)
                .any(|other| other.id == device.id)
            {
                return invalid(format!(
                    "device id {:?} is there twice, expected unique ids",
                    device.id
                ));
            }
        }
        Ok(())
    }
}

impl DeviceOptions {
    /// This machine's processor.
    pub fn cpu(threads: usize) -> Self {
        let available = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if threads == 0 { available } else { threads };
        Self {
            id: "cpu".to_owned(),
            kind: "cpu".to_owned(),
            name: processor_name(),
            memory_bytes: memory_bytes(),
            threads,
            memory_limit: None,
            vllm: None,
        }
    }

    /// The same, where weights may take at most so many bytes of its memory.
    #[must_use]
    pub fn with_memory_limit(self, limit: Option<u64>) -> Self {
        Self {
            memory_bytes: limit.map_or(self.memory_bytes, |limit| limit.min(self.memory_bytes)),
            memory_limit: limit,
            ..self
        }
    }

    /// A GPU.
    pub fn gpu(gpu: &Gpu, threads: usize, memory_limit: Option<u64>) -> Self {
        Self {
            id: Device::Cuda(gpu.index).to_string(),
            kind: "cuda".to_owned(),
            name: gpu.name.clone(),
            memory_bytes: memory_limit.map_or(gpu.memory_bytes, |limit| limit.min(gpu.memory_bytes)),
            threads,
            memory_limit,
            vllm: None,
        }
    }

    /// Which device its child opens: the one whose name is the id, else the processor.
    pub(super) fn device(&self) -> Device {
        self.id.parse().unwrap_or(Device::Cpu)
    }

    /// Tells a child which GPU is its, and how much it may take; one of the processor needs no telling which.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments = match self.device() {
            Device::Cpu => Vec::new(),
            gpu => vec!["--device".to_owned(), gpu.to_string()],
        };
        if let Some(limit) = self.memory_limit {
            arguments.extend(["--memory-limit".to_owned(), limit.to_string()]);
        }
        arguments
    }

    /// What its child finds in its environment. Replicas and stages of a gang have many streams, which with fewer
    /// connections hold each other up. Whoever has set their number keeps it.
    pub(super) fn variables(&self) -> Option<(&'static str, &'static str)> {
        const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
        let is_open = self.device() != Device::Cpu && std::env::var_os(CONNECTIONS).is_none();
        is_open.then_some((CONNECTIONS, "32"))
    }

    pub(super) fn announce(&self) -> v1::Device {
        v1::Device {
            id: self.id.clone(),
            kind: self.kind.clone(),
            name: self.name.clone(),
            memory_bytes: self.memory_bytes,
            threads: u32::try_from(self.threads).unwrap_or(u32::MAX),
            engines: self.vllm.iter().map(|version| vllm(version)).collect(),
        }
    }
}

fn vllm(version: &str) -> v1::Engine {
    v1::Engine {
        name: VLLM.to_owned(),
        version: version.to_owned(),
    }
}

/// The processor's model, as the system tells it.
pub fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}

/// Memory in all; 0 where the system does not tell.
fn memory_bytes() -> u64 {
    meminfo_bytes("MemTotal:").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_name_that_would_be_a_place_in_a_path_is_refused() {
        for (name, sound) in [
            ("a", true),
            ("a.b", true),
            ("...", true),
            (".", false),
            ("..", false),
            ("a/b", false),
        ] {
            let options = WorkerOptions::cpu("http://127.0.0.1:7474", name, 1);
            assert_eq!(options.validate().is_ok(), sound, "{name}");
        }
    }
}
