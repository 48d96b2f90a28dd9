//! Workers and their devices.

use serde::{Deserialize, Serialize};

use super::index::Class;
use super::{AttemptId, Epoch, JobId, Name, TaskId, WorkerId};

/// A process that owns devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its name.
    pub name: String,
    /// Its incarnation.
    pub epoch: Epoch,
    /// Workers of one host share it.
    pub host: Name,
    /// What it can run on.
    pub devices: Vec<Device>,
    /// Whether it gets work.
    pub standing: Standing,
    /// Why it gets nothing more, until a user says otherwise. Outlives its incarnations.
    #[serde(default)]
    pub cordon: Option<Cordon>,
    /// Why a user asked it to leave; none when it was not, or has been started anew since.
    #[serde(default)]
    pub drain: Option<String>,
    /// Distinct tasks that failed on it since it last completed one, the newest last.
    #[serde(default)]
    pub failed_in_a_row: Vec<TaskId>,
}

impl Worker {
    /// Whether it gets work while it can be told.
    pub fn is_usable(&self) -> bool {
        self.standing == Standing::Present && self.cordon.is_none()
    }

    /// Whether one of its devices is of this kind.
    pub fn has_kind(&self, kind: &str) -> bool {
        self.devices.iter().any(|device| &device.info.kind == kind)
    }
}

/// Why a worker gets nothing more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    /// One line.
    pub reason: String,
    /// Whether the rules did it, because task after task failed on it.
    pub by_rule: bool,
}

/// Whether a worker gets work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It does, unless cordoned.
    Present,
    /// It keeps what it has and gets nothing more.
    Leaving,
    /// It was given up; its attempts were handed on.
    Lost,
    /// It left as it had said it would, with nothing to hand on.
    Left,
}

impl Standing {
    /// Whether it is no longer there.
    pub fn is_gone(self) -> bool {
        match self {
            Self::Present | Self::Leaving => false,
            Self::Lost | Self::Left => true,
        }
    }
}

/// A device as its worker describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Unique within the worker.
    pub id: Name,
    /// `cpu` or `cuda`.
    pub kind: Name,
    /// For display.
    pub name: Name,
    /// Its memory; 0 when its system does not tell.
    pub memory_bytes: u64,
    /// Threads an attempt may use.
    pub threads: u32,
    /// What measures on it beside the built-in engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineInfo>,
}

/// An engine as a worker announces it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// `vllm`.
    pub name: Name,
    /// For display.
    pub version: Name,
}

impl DeviceInfo {
    /// Whether it is what tasks of the class ask for.
    pub fn is_of(&self, class: &Class) -> bool {
        self.kind == class.device_kind && self.can_run(class)
    }

    /// Whether one of the class's kind has the memory and the engine that it asks for.
    pub fn can_run(&self, class: &Class) -> bool {
        let has_memory = self.memory_bytes == 0 || self.memory_bytes >= class.memory_bytes;
        let wanted = class.engine.as_ref();
        has_memory && wanted.is_none_or(|wanted| self.engines.iter().any(|engine| engine.name == *wanted))
    }
}

/// A device and what it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As its worker describes it.
    pub info: DeviceInfo,
    /// The attempt that holds it.
    pub attempt: Option<AttemptId>,
    /// What its child last ran: the job and the executor.
    pub last: Option<(JobId, Name)>,
}
