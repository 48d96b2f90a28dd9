//! Which devices this machine has, and which of them a worker takes.
//!
//! GPUs are asked for in a process that ends at once: asking what is free takes a context on each, which holds
//! hundreds of MiB until its process ends, and an agent must never have one. That process runs [`look`], whoever
//! wants to know calls [`find`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use espalier_model::ops::cuda;
use serde::{Deserialize, Serialize};

use crate::agent::memory::DeviceMemory;
use crate::agent::options::DeviceOptions;
use crate::{Error, Result};

/// How long looking may take: a driver that has to load itself first needs seconds.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(5);
/// How long what a process that has ended complained of may take to come.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Bytes of what it says that are heard.
const MOST_HEARD: u64 = 1 << 20;
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

/// Looks; makes a context on every GPU, so only for a process that ends right afterwards.
pub fn look() -> Machine {
    match cuda::discover() {
        Ok(survey) => Machine {
            cuda: Some(survey.driver.to_string()),
            driver: std::fs::read_to_string("/proc/driver/nvidia/version")
                .ok()
                .and_then(|text| module_version(&text)),
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

/// Has `program` (this very one by default) look. Waits for it: not for a thread that serves others.
///
/// # Errors
/// When it cannot be started, takes too long, or answers something else.
pub fn find(program: Option<&Path>) -> Result<Machine> {
    let failed = |reason: String| Error::Child {
        reason: format!("cannot look for GPUs: {reason}"),
    };
    let own = || std::env::current_exe().map_err(|error| failed(error.to_string()));
    let program = program.map_or_else(own, |program| Ok(program.to_owned()))?;
    let mut child = Command::new(&program)
        .arg(COMMAND)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("{}: {error}", program.display())))?;
    let (output, complaints) = (child.stdout.take(), child.stderr.take());
    let heard = hear(output).and_then(|output| Ok((output, hear(complaints)?)));
    let (text, complaints) = heard.map_err(|error| failed(error.to_string()))?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK),
            waited => {
                let _ = child.kill();
                let _ = child.wait();
                let how = waited.err().map(|error| error.to_string());
                let seconds = PATIENCE.as_secs();
                return Err(failed(how.unwrap_or_else(|| {
                    format!("the driver does not answer within {seconds} s; see nvidia-smi")
                })));
            }
        }
    };
    let text = text.recv_timeout(PATIENCE).unwrap_or_default();
    // A driver may print what it likes beside the answer.
    let answer = text
        .lines()
        .rev()
        .find_map(|line| serde_json::from_str::<Machine>(line).ok());
    answer.filter(|_| status.success()).ok_or_else(|| {
        let complaints = complaints.recv_timeout(LAST_WORDS).unwrap_or_default();
        let why = complaints.lines().rev().map(str::trim).find(|line| says_why(line));
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        failed(format!(
            "the process that asks the NVIDIA driver ended without an answer, of {status}{why}: the driver is damaged or \
             does not fit this machine; see nvidia-smi, or use the cpu device"
        ))
    })
}

/// Reads to the end beside whoever waits for the process.
fn hear(source: Option<impl Read + Send + 'static>) -> std::io::Result<Receiver<String>> {
    let (sender, heard) = sync_channel(1);
    std::thread::Builder::new()
        .name("device look".to_owned())
        .spawn(move || {
            let mut bytes = Vec::new();
            if let Some(source) = source {
                let _ = source.take(MOST_HEARD).read_to_end(&mut bytes);
            }
            let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
        })?;
    Ok(heard)
}

/// Not where it happened, nor how to see more of that.
fn says_why(line: &str) -> bool {
    !(line.is_empty() || line.starts_with("note:") || (line.starts_with("thread ") && line.ends_with(':')))
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
    /// Bytes of each GPU that tensors may take; none: what is free when a child opens it, less a reserve.
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
            ..whole.clone()
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
        let machine = find(self.program.as_deref())
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
    }

    #[test]
    fn the_drivers_version_is_found_in_what_its_module_says() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\nGCC";
        assert_eq!(module_version(text).as_deref(), Some("580.159.04"));
        assert_eq!(module_version("no version at all."), None);
    }

    #[test]
    fn a_process_that_looks_and_ends_badly_is_an_error() {
        let error = find(Some(Path::new("/bin/false"))).unwrap_err().to_string();
        assert!(error.contains("cannot look for GPUs"), "{error}");
        let error = find(Some(Path::new("/bin/true"))).unwrap_err().to_string();
        assert!(error.contains("cannot look for GPUs"), "{error}");
    }

    /// What is found by a process that does this.
    fn found_by(script: &str) -> Result<Machine> {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("looks");
        std::fs::write(directory.path().join("text"), format!("#!/bin/sh\n{script}\n")).unwrap();
        // Copied by another process: one that this one had open for writing another test's child might hold yet.
        let copied = Command::new("sh")
            .args(["-c", "cp text looks && chmod +x looks"])
            .current_dir(directory.path())
            .status();
        assert!(copied.unwrap().success());
        find(Some(&program))
    }

    #[test]
    fn what_a_driver_prints_beside_the_answer_does_not_spoil_it() {
        let answer = serde_json::to_string(&with(vec![gpu(0, None)])).unwrap();
        let machine = found_by(&format!("echo 'NVRM: hello'; echo '{answer}'; echo bye")).unwrap();
        assert_eq!(machine.gpus.len(), 1);
    }

    #[test]
    fn a_process_that_panics_while_it_looks_says_why_and_what_to_do() {
        let script = "echo \"thread 'main' panicked at lib.rs:1:2:\" >&2; echo 'no cuInit' >&2; \
                      echo 'note: run with' >&2; exit 101";
        let error = found_by(script).unwrap_err().to_string();
        assert!(
            error.contains("101 (no cuInit): the driver is damaged"),
            "{error}"
        );
    }
}
