//! What can go wrong with vLLM and the process it runs in.

use std::path::PathBuf;
use std::time::Duration;

use espalier_proto::task::FailureKind;

/// The versions of vLLM that were tested, by major and minor number.
pub const TESTED: [&str; 2] = ["0.26", "0.32"];

/// What can go wrong with vLLM and the process it runs in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The worker was not told of a Python.
    #[error(
        "this worker measures in no vLLM: start it with --vllm-python PYTHON, of an environment that has it"
    )]
    NotConfigured,
    /// The Python that the worker was told of cannot be started, or is none.
    #[error("--vllm-python {}: {reason}; give the python of an environment with vLLM", python.display())]
    NoPython {
        /// What it was told.
        python: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// vLLM is not there, or not as it has to be.
    #[error("--vllm-python {}: {reason}", python.display())]
    NoVllm {
        /// Which Python.
        python: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Our plugin is not there.
    #[error(
        "--vllm-python {}: the plugin espalier_vllm is not there: install it with that Python's pip from serving/",
        python.display()
    )]
    NoPlugin {
        /// Which Python.
        python: PathBuf,
    },
    /// A version of vLLM that was not tested.
    #[error(
        "vLLM {version} was not tested, only {}: install one of these, or trust it with --vllm-trust {}",
        TESTED.join(" and "), minor(version)
    )]
    Untested {
        /// Which.
        version: String,
    },
    /// What vLLM cannot run on this device, or as it was opened: no other try changes that.
    #[error("vLLM cannot run this: {reason}")]
    Refused {
        /// What it said.
        reason: String,
    },
    /// The device has no room, however few engines are open.
    #[error("vLLM ran out of memory: {reason}")]
    OutOfMemory {
        /// What it said.
        reason: String,
    },
    /// Another process holds the device's memory.
    #[error("the device is busy with other work: {reason}")]
    Busy {
        /// What vLLM said.
        reason: String,
    },
    /// Anything else that vLLM raised.
    #[error("vLLM failed: {reason}")]
    Engine {
        /// What it said.
        reason: String,
    },
    /// An engine that was never opened, or that vLLM gave up after an error.
    #[error("vLLM has no such engine open: {reason}")]
    NotOpen {
        /// What it said.
        reason: String,
    },
    /// The helper does not keep to the protocol.
    #[error("vLLM's process does not keep to the protocol: {reason}")]
    Protocol {
        /// What came, and what was expected.
        reason: String,
    },
    /// The helper ended though nobody told it to.
    #[error("vLLM's process ended {how} while it was asked to {verb}{}", last_line(last))]
    Ended {
        /// With which code or of which signal.
        how: String,
        /// What it was asked.
        verb: &'static str,
        /// The last line it wrote.
        last: String,
    },
    /// The helper came no further for too long, and was killed.
    #[error(
        "vLLM's process came no further for {} s while it was asked to {verb}, and was killed{}",
        waited.as_secs(), last_line(last)
    )]
    Silent {
        /// What it was asked.
        verb: &'static str,
        /// How long it was waited for.
        waited: Duration,
        /// The last line it wrote.
        last: String,
    },
}

impl Error {
    /// What it means for trying again. What is wrong with the worker's own environment is tried elsewhere.
    pub fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Refused { .. } => FailureKind::Invalid,
            Self::OutOfMemory { .. } | Self::Busy { .. } => FailureKind::OutOfMemory,
            Self::Ended { .. } => FailureKind::Crashed,
            Self::Silent { .. } => FailureKind::Hung,
            Self::NotConfigured
            | Self::NoPython { .. }
            | Self::NoVllm { .. }
            | Self::NoPlugin { .. }
            | Self::Untested { .. }
            | Self::Engine { .. }
            | Self::NotOpen { .. }
            | Self::Protocol { .. } => FailureKind::Error,
        }
    }
}

/// `0.33.1` as `0.33`.
pub(super) fn minor(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

fn last_line(last: &str) -> String {
    if last.is_empty() {
        String::new()
    } else {
        format!("; its last line: {last}")
    }
}
