//! What can go wrong on a GPU, and what to do about it.

use std::time::Duration;

use super::memory::Mebibytes;

/// A result of the CUDA backend.
pub type Result<T> = std::result::Result<T, Error>;

/// A version as NVIDIA writes it: major and minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// What can go wrong on a GPU.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine has no NVIDIA driver.
    #[error(
        "no NVIDIA driver was found (libcuda.so.1): install one for CUDA 13 or later, or use the cpu device"
    )]
    NoDriver,
    /// A driver that cannot be loaded, or lacks what it should have.
    #[error("the NVIDIA driver cannot be used: {reason}: install it again, or use the cpu device")]
    DriverDamaged {
        /// The file, and what is wrong with it.
        reason: String,
    },
    /// A driver for an earlier CUDA.
    #[error("the NVIDIA driver supports CUDA {found}, and {required} is needed: update the driver")]
    DriverTooOld {
        /// What it supports.
        found: Version,
        /// What is needed.
        required: Version,
    },
    /// A driver without a device.
    #[error("the NVIDIA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// A device beyond the last.
    #[error("there is no GPU {index}: this machine has {count}, counted from 0")]
    DeviceNotThere {
        /// Asked for.
        index: u32,
        /// There.
        count: u32,
    },
    /// A device whose instructions are too few.
    #[error(
        "GPU {index} ({name}) has compute capability {capability}, and 8.0 (Ampere) is the least that is supported: \
         choose another, or use the cpu device"
    )]
    DeviceTooOld {
        /// Which.
        index: u32,
        /// Its name.
        name: String,
        /// What it has.
        capability: Version,
    },
    /// A device on which there is no room even to begin.
    #[error(
        "GPU {index} ({name}) is full: {} of {} MiB are free, and at least {} are needed; end what else runs \
         on it, or choose another",
        Mebibytes(*free), Mebibytes(*total), Mebibytes(*needed)
    )]
    DeviceFull {
        /// Which.
        index: u32,
        /// Its name.
        name: String,
        /// Bytes that are free.
        free: u64,
        /// Bytes that it has.
        total: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// A library of the CUDA toolkit that is not there.
    #[error(
        "{library} was not found; it {purpose} (searched: {searched}). Install it (the Python wheels nvidia-cuda-nvrtc, \
         nvidia-cublas and nvidia-nccl-cu13 hold what is needed) and name its directory in LD_LIBRARY_PATH or ESPALIER_CUDA_LIBRARIES"
    )]
    LibraryMissing {
        /// Its file.
        library: &'static str,
        /// What it is for.
        purpose: &'static str,
        /// Where it was looked for.
        searched: String,
    },
    /// A library of the toolkit that cannot be loaded.
    #[error(
        "{reason}; it {purpose}: install it again, or name another's directory in ESPALIER_CUDA_LIBRARIES"
    )]
    LibraryDamaged {
        /// The file, and what is wrong with it.
        reason: String,
        /// What it is for.
        purpose: &'static str,
    },
    /// A library of another toolkit.
    #[error(
        "{library} is of version {found}, and {required} or later is needed: install one (the Python wheels \
         nvidia-cuda-nvrtc and nvidia-cublas hold it) and name its directory in ESPALIER_CUDA_LIBRARIES"
    )]
    LibraryTooOld {
        /// Its file.
        library: &'static str,
        /// What was found.
        found: Version,
        /// What is needed.
        required: Version,
    },
    /// No memory for a tensor.
    #[error(
        "out of GPU memory: {} MiB asked for, {} in use, {} held, limit {}, {} free on the device; take fewer or \
         shorter sequences at a time, or end what else runs on the GPU",
        Mebibytes(*asked), Mebibytes(*in_use), Mebibytes(*held), Mebibytes(*limit), Mebibytes(*free)
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes of tensors.
        in_use: u64,
        /// Bytes taken from the device, in use or not.
        held: u64,
        /// Bytes that may be taken.
        limit: u64,
        /// Bytes that the device still has.
        free: u64,
    },
    /// Something that a replay could not do again.
    #[error("{operation} was asked for while work was being recorded: do it before or after")]
    Recording {
        /// What was asked for.
        operation: &'static str,
    },
    /// Operands that do not fit an operation.
    #[error("{operation}: expected {expected}, found {found}")]
    Operand {
        /// What was asked for.
        operation: &'static str,
        /// What would be right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A kernel that the compiler refuses.
    #[error("the kernel {kernel} does not compile: {log}")]
    Compile {
        /// Source file and macros.
        kernel: String,
        /// What the compiler says.
        log: String,
    },
    /// A call of the driver that failed.
    #[error("{call} failed: {code}")]
    Driver {
        /// The function.
        call: &'static str,
        /// What it answered.
        code: String,
    },
    /// A call of NCCL that failed.
    #[error("{call} failed: {reason}; NCCL_DEBUG=INFO in the environment lets NCCL tell more")]
    Nccl {
        /// The function.
        call: &'static str,
        /// What it answered.
        reason: String,
    },
    /// A matrix product that cuBLASLt refuses.
    #[error("{call} failed for {product}: {code}")]
    Matmul {
        /// The function.
        call: &'static str,
        /// Form, shapes, leading dimensions and types.
        product: String,
        /// What it answered.
        code: String,
    },
    /// Work that did not end in time. The device counts as lost from then on.
    #[error("{operation} did not end within {waited:?}: the GPU hangs, or is far slower than it should be")]
    Deadline {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        waited: Duration,
    },
    /// A device that failed before.
    #[error("the GPU was given up after an earlier failure; this process cannot use it again: start another")]
    Lost,
}
