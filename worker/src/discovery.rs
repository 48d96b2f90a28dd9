//! Which devices this machine has, and which of them a worker takes.
//!
//! GPUs are asked for in a process that ends at once: asking what is free takes a context on each, which holds
//! hundreds of MiB until its process ends, and an agent must never have one. That process runs [`look`], whoever
//! wants to know calls [`find`]; how the two speak is [`process`]'s affair.

mod process;

use std::path::PathBuf;
use std::str::FromStr;

use espalier_model::ops::cuda;
use serde::{Deserialize, Serialize};

use crate::agent::memory::DeviceMemory;
use crate::agent::options::DeviceOptions;
use crate::{Error, Result};
pub use process::find;

/// The command of this program that looks; hidden from its users.
pub const COMMAND: &str = "device-look";

/// What a machine has beside its processor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The CUDA version that the driver supports; none without a driver.
    pub cuda: Option<String>,
    /// The driver's own version, where its kernel module tells it.
    pub driver: Option<String>,
    /// Why there is no GPU that can be used, where that follows from the driver.
    pub refusal: Option<String>,
    /// Whether there is no driver at all, as on a machine that was never meant to have GPUs.
    pub no_driver: bool,
    /// Every GPU that the driver shows.
    pub gpus: Vec<Gpu>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Counted from 0, in the driver's order.
    pub index: u32,
    /// The driver's name for it.
    pub name: String,
    /// Its compute capability.
    pub capability: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes that nobody has taken.
    pub free_bytes: u64,
    /// Why it cannot be used now.
    pub unusable: Option<String>,
}

/// Looks at every GPU, or at `only` one; makes a context on each, so only for a process that ends right afterwards.
pub fn look(only: Option<u32>) -> Machine {
    match cuda::discover(only) {
        Ok(survey) => Machine {
            cuda: Some(survey.driver.to_string()),
            driver: driver_version(),
            gpus: survey.devices.into_iter().map(gpu).collect(),
            ..Machine::default()
        },
        Err(error) => Machine {
            no_driver: matches!(error, cuda::Error::NoDriver),
            refusal: Some(error.to_string()),
            ..Machine::default()
        },
    }
}

/// The version of NVIDIA's driver, where its kernel module tells it.
pub(crate) fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    module_version(&text)
}

/// The first word of dotted numbers: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  …`.
fn module_version(text: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.split_whitespace().find(is_version).map(str::to_owned)
}

fn gpu(surveyed: cuda::Surveyed) -> Gpu {
    let info = surveyed.info;
    Gpu {
        index: info.index,
        name: info.name,
        capability: info.capability.to_string(),
        memory_bytes: info.total,
        free_bytes: info.free,
        unusable: surveyed.unusable.map(|error| error.to_string()),
    }
}

/// What a user asks for: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Every GPU that can be used; the processor where there is none.
    Auto,
    /// The processor.
    Cpu,
    /// Every GPU that can be used, and at least one.
    EveryGpu,
    /// This one.
    Gpu(u32),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (text, number) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::EveryGpu),
            (_, Some(number)) => Ok(Self::Gpu(number)),
            _ => Err(format!(
                "`{text}` is no device; expected auto, cpu, cuda for every GPU, or cuda:0, cuda:1 and so on"
            )),
        }
    }
}

/// How the chosen devices are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shares {
    /// Threads of all of them together; 0 means one for each processor.
    pub threads: usize,
    /// As [`DeviceOptions::memory_limit`], of each.
    pub memory_limit: Option<u64>,
}

/// The devices that were asked for, each once. `find` is called where that may be a GPU.
///
/// # Errors
/// When a GPU is asked for that is not there or cannot be used, with why.
pub fn choose(
    wanted: &[Wanted],
    shares: Shares,
    find: impl FnOnce() -> Result<Machine>,
) -> Result<Vec<DeviceOptions>> {
    let names_gpus = |wanted: &Wanted| matches!(wanted, Wanted::EveryGpu | Wanted::Gpu(_));
    let machine = if wanted.iter().all(|wanted| *wanted == Wanted::Cpu) {
        Machine::default()
    } else {
        match find() {
            // Whoever asked for no GPU by name can do without.
            Err(error) if !wanted.iter().any(names_gpus) => Machine {
                refusal: Some(error.to_string()),
                ..Machine::default()
            },
            machine => machine?,
        }
    };
    let mut chosen: Vec<Option<&Gpu>> = Vec::new();
    for wanted in wanted {
        let found = match wanted {
            Wanted::Cpu => vec![None],
            Wanted::Gpu(index) => vec![Some(machine.usable(*index)?)],
            Wanted::EveryGpu => machine.every_usable()?.into_iter().map(Some).collect(),
            Wanted::Auto => match machine.every_usable() {
                Ok(gpus) => gpus.into_iter().map(Some).collect(),
                Err(reason) => {
                    if !machine.no_driver {
                        tracing::warn!(%reason, "no GPU can be used; taking the processor");
                    }
                    vec![None]
                }
            },
        };
        for device in found {
            if !chosen.contains(&device) {
                chosen.push(device);
            }
        }
    }
    let whole = DeviceOptions::cpu(shares.threads);
    let threads = (whole.threads / chosen.len().max(1)).max(1);
    let device = |gpu: &Option<&Gpu>| match gpu {
        Some(gpu) => DeviceOptions::gpu(gpu, threads, shares.memory_limit),
        None => DeviceOptions {
            threads,
            ..whole.clone().with_memory_limit(shares.memory_limit)
        },
    };
    Ok(chosen.iter().map(device).collect())
}

impl Machine {
    fn refused(&self) -> Error {
        let none = || cuda::Error::NoDevice.to_string();
        Error::Invalid {
            reason: self.refusal.clone().unwrap_or_else(none),
        }
    }

    fn usable(&self, index: u32) -> Result<&Gpu> {
        let Some(gpu) = self.gpus.iter().find(|gpu| gpu.index == index) else {
            let count = u32::try_from(self.gpus.len()).unwrap_or(u32::MAX);
            return Err(match count {
                0 => self.refused(),
                count => Error::Invalid {
                    reason: cuda::Error::DeviceNotThere { index, count }.to_string(),
                },
            });
        };
        match &gpu.unusable {
            None => Ok(gpu),
            Some(reason) => Err(Error::Invalid {
                reason: reason.clone(),
            }),
        }
    }

    /// At least one; those that cannot be used are logged.
    fn every_usable(&self) -> Result<Vec<&Gpu>> {
        let usable: Vec<&Gpu> = self.gpus.iter().filter(|gpu| gpu.unusable.is_none()).collect();
        let mut reasons = self.gpus.iter().filter_map(|gpu| gpu.unusable.as_ref());
        if usable.is_empty() {
            return Err(match reasons.next() {
                Some(reason) => Error::Invalid {
                    reason: reason.clone(),
                },
                None => self.refused(),
            });
        }
        for reason in reasons {
            tracing::warn!(reason, "a GPU is left out");
        }
        Ok(usable)
    }
}

/// The memory of one GPU, seen by a process that looks each time.
#[derive(Debug, Clone)]
pub struct GpuMemory {
    /// Who looks; this very program by default.
    pub program: Option<PathBuf>,
    /// Which GPU.
    pub index: u32,
}

impl DeviceMemory for GpuMemory {
    fn free_bytes(&self) -> Option<u64> {
        let machine = process::find_one(self.program.as_deref(), self.index)
            .inspect_err(|error| tracing::warn!(%error, "what is free on a GPU is not known"))
            .ok()?;
        let gpu = machine.gpus.iter().find(|gpu| gpu.index == self.index)?;
        Some(gpu.free_bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn gpu(index: u32, unusable: Option<&str>) -> Gpu {
        Gpu {
            index,
            name: "GPU".to_owned(),
            capability: "9.0".to_owned(),
            memory_bytes: 80 << 30,
            free_bytes: 79 << 30,
            unusable: unusable.map(str::to_owned),
        }
    }

    fn with(gpus: Vec<Gpu>) -> Machine {
        Machine {
            cuda: Some("13.0".to_owned()),
            gpus,
            ..Machine::default()
        }
    }

    fn ids(wanted: &[&str], machine: &Machine) -> std::result::Result<Vec<String>, String> {
        let wanted: Vec<Wanted> = wanted.iter().map(|text| text.parse().unwrap()).collect();
        let chosen = choose(&wanted, Shares::default(), || Ok(machine.clone()));
        let chosen = chosen.map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(|device| device.id).collect())
    }

    #[test]
    fn every_gpu_is_taken_by_default_and_the_processor_where_there_is_none() {
        let none = Machine {
            no_driver: true,
            refusal: Some("no driver".to_owned()),
            ..Machine::default()
        };
        assert_eq!(ids(&["auto"], &none).unwrap(), ["cpu"]);
        let two = with(vec![gpu(0, None), gpu(1, None)]);
        assert_eq!(ids(&["auto"], &two).unwrap(), ["cuda:0", "cuda:1"]);
        assert_eq!(
            ids(&["cuda:1", "cuda", "cpu"], &two).unwrap(),
            ["cuda:1", "cuda:0", "cpu"]
        );
        let one_full = with(vec![gpu(0, Some("it is full")), gpu(1, None)]);
        assert_eq!(ids(&["auto"], &one_full).unwrap(), ["cuda:1"]);
        let all_full = with(vec![gpu(0, Some("it is full"))]);
        assert_eq!(ids(&["auto"], &all_full).unwrap(), ["cpu"]);
    }

    #[test]
    fn a_gpu_that_is_asked_for_and_cannot_be_had_is_one_error() {
        let one = with(vec![gpu(0, None)]);
        assert_eq!(
            ids(&["cuda:3"], &one).unwrap_err(),
            "there is no GPU 3: this machine has 1, counted from 0"
        );
        let full = with(vec![gpu(0, Some("it is full"))]);
        assert_eq!(ids(&["cuda"], &full).unwrap_err(), "it is full");
        assert_eq!(ids(&["cuda:0"], &full).unwrap_err(), "it is full");
        let none = with(Vec::new());
        assert!(ids(&["cuda:0"], &none).unwrap_err().contains("sees no GPU"));
        assert!(
            "gpu"
                .parse::<Wanted>()
                .unwrap_err()
                .contains("expected auto, cpu, cuda")
        );
    }

    #[test]
    fn threads_are_shared_out_and_the_processor_alone_asks_nobody() {
        let two = with(vec![gpu(0, None), gpu(1, None)]);
        let shares = Shares {
            threads: 9,
            memory_limit: Some(4 << 30),
        };
        let chosen = choose(&[Wanted::Auto], shares, || Ok(two)).unwrap();
        assert_eq!(
            chosen.iter().map(|device| device.threads).collect::<Vec<_>>(),
            [4, 4]
        );
        assert_eq!(chosen[0].memory_bytes, 4 << 30);
        let unasked = || -> Result<Machine> { panic!("it is not asked for GPUs") };
        let chosen = choose(&[Wanted::Cpu], shares, unasked).unwrap();
        assert_eq!((chosen[0].kind.as_str(), chosen[0].threads), ("cpu", 9));
        assert_eq!(chosen[0].memory_limit, Some(4 << 30));
    }

    #[test]
    fn the_drivers_version_is_found_in_what_its_module_says() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\nGCC";
        assert_eq!(module_version(text).as_deref(), Some("580.159.04"));
        assert_eq!(module_version("no version at all."), None);
    }
}
