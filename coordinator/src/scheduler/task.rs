//! Tasks, the gangs of those that need several devices, and the attempts at them.

use serde::{Deserialize, Serialize};

use super::{AttemptId, Failures, JobId, Lease, Name, Payload, TaskId, Token, WorkerId};

/// What a task needs to run on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Needs {
    /// The kind of device; none means the job's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_kind: Option<Name>,
    /// Memory a device has to have; 0 means any.
    pub memory_bytes: u64,
    /// Memory that is put to use where it is free, and that is waited for a while; 0 means no more than the above.
    #[serde(skip_serializing_if = "is_zero")]
    pub ample_bytes: u64,
    /// Devices that run it together, each its rank; at least 1. Fewer where the cluster has not so many.
    pub ranks: u32,
    /// The number of ranks is a multiple of this; at least 1.
    pub rank_multiple: u32,
    /// The engine it is measured in; none means one that every worker has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Name>,
}

impl Default for Needs {
    fn default() -> Self {
        Self {
            device_kind: None,
            memory_bytes: 0,
            ample_bytes: 0,
            ranks: 1,
            rank_multiple: 1,
            engine: None,
        }
    }
}

impl Needs {
    /// Memory that a new child waits for on a device of this size, while it may come back. What takes nearly all of it is
    /// not waited for: something else may have a little.
    pub fn awaited_bytes(&self, device_bytes: u64) -> u64 {
        let nearly_all = device_bytes - device_bytes / 8;
        match self.ample_bytes <= nearly_all {
            true => self.memory_bytes.max(self.ample_bytes),
            false => self.memory_bytes,
        }
    }

    /// Any one device of the job's kind.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The unit handed to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// Its job.
    pub job: JobId,
    /// Index into the job's stages.
    pub stage: usize,
    /// Names it within its stage.
    pub name: Box<str>,
    /// Its executor: its stage's.
    #[serde(skip)]
    pub kind: Name,
    /// JSON of its spec.
    pub payload: Payload,
    /// Whether nothing else may run on its host meanwhile.
    #[serde(default, skip_serializing_if = "is_false")]
    pub exclusive: bool,
    /// What it runs on.
    #[serde(default, skip_serializing_if = "Needs::is_default")]
    pub needs: Needs,
    /// Where it stands.
    pub phase: TaskPhase,
    /// How often its gang was formed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u64,
    /// Ranks of its gang as it was last formed; 0 for a task that never had one.
    #[serde(default, skip_serializing_if = "is_none")]
    pub formed_ranks: u32,
    /// What went wrong with it; none for most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<Box<Trouble>>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_none(ranks: &u32) -> bool {
    *ranks == 0
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// What went wrong with a task.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// Counts how often the counters began again: when its job was retried, and when it went on from further than
    /// ever.
    pub era: u32,
    /// How often it failed, in this era.
    pub failures: Failures,
    /// Why it last failed.
    pub last_failure: Option<String>,
    /// Where it last failed: elsewhere is tried first.
    pub failed_on: Option<WorkerId>,
    /// Failures of its own making, one a worker.
    pub evidence: Vec<Evidence>,
    /// The furthest that an attempt has begun at after a failure, in units of its progress.
    #[serde(skip_serializing_if = "is_zero")]
    pub went_on_from: u64,
}

impl Trouble {
    /// Whether anything counts against it that [`Trouble::begin_again`] would forget.
    pub(super) fn is_held_against_it(&self) -> bool {
        self.failures != Failures::default() || !self.evidence.is_empty()
    }

    /// A new era: counters begin again, and what was held against it is forgotten.
    pub(super) fn begin_again(&mut self) {
        self.era = self.era.saturating_add(1);
        self.failures = Failures::default();
        self.evidence.clear();
    }
}

/// A failure that speaks against a task or against a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Where it failed.
    pub worker: WorkerId,
    /// One line.
    pub message: String,
}

impl Task {
    /// How often it failed, in this era.
    pub fn failures(&self) -> Failures {
        self.trouble
            .as_ref()
            .map(|trouble| trouble.failures)
            .unwrap_or_default()
    }

    /// Counts how often its failures began again. (`era`, `failures`) never falls.
    pub fn era(&self) -> u32 {
        self.trouble.as_ref().map_or(0, |trouble| trouble.era)
    }

    /// Why it last failed.
    pub fn last_failure(&self) -> Option<&str> {
        self.trouble.as_ref()?.last_failure.as_deref()
    }

    /// Where it last failed.
    pub fn failed_on(&self) -> Option<WorkerId> {
        self.trouble.as_ref()?.failed_on
    }

    /// Its gang, while one is formed.
    pub fn gang(&self) -> Option<&Gang> {
        match &self.phase {
            TaskPhase::Gang(gang) => Some(gang),
            _ => None,
        }
    }

    /// Whether several devices run it together.
    pub fn is_gang(&self) -> bool {
        self.needs.ranks > 1
    }

    pub(super) fn trouble_mut(&mut self) -> &mut Trouble {
        self.trouble.get_or_insert_default()
    }
}

/// Where a task stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskPhase {
    /// For a device, for its job to go on, or for a pause after a failure.
    Waiting,
    /// On a device.
    Running {
        /// By this attempt.
        attempt: AttemptId,
    },
    /// On several devices.
    Gang(Box<Gang>),
    /// It ended well.
    Done {
        /// By this attempt; of a gang, rank 0's. The other ranks' follow it.
        attempt: AttemptId,
        /// JSON of its output.
        output: Payload,
    },
    /// It failed for good.
    Failed,
    /// Its job ended before it did.
    Abandoned,
}

/// The ranks of a task that run together: one generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gang {
    /// Counts the formations of the task's gang, from 1.
    pub generation: u64,
    /// In their order.
    pub ranks: Vec<Rank>,
    /// Whether every rank was told to begin.
    pub released: bool,
    /// What they were told then.
    #[serde(default, skip_serializing_if = "Token::is_empty")]
    pub token: Token,
    /// Whether a rank ended badly: the others are being stopped, then the task waits again.
    pub ending: bool,
    /// What rank 0 gave, once it has ended well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Payload>,
}

impl Gang {
    /// Addresses of all ranks in their order, once all are known.
    pub fn addresses(&self) -> Option<Vec<String>> {
        let address = |rank: &Rank| (!rank.address.is_empty()).then(|| rank.address.clone());
        self.ranks.iter().map(address).collect()
    }

    /// Ranks that hold their device.
    pub fn live(&self) -> impl Iterator<Item = AttemptId> {
        let live = |rank: &&Rank| matches!(rank.phase, RankPhase::Preparing | RankPhase::Prepared);
        self.ranks.iter().filter(live).map(|rank| rank.attempt)
    }

    pub(super) fn rank_mut(&mut self, attempt: AttemptId) -> Option<&mut Rank> {
        self.ranks.iter_mut().find(|rank| rank.attempt == attempt)
    }
}

/// One device's part in a gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    /// Its attempt.
    pub attempt: AttemptId,
    /// Where it stands.
    pub phase: RankPhase,
    /// Where the other ranks reach it; empty until it is prepared.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub address: String,
}

/// Where a rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankPhase {
    /// It was handed out.
    Preparing,
    /// It can be reached.
    Prepared,
    /// It ended well.
    Completed,
    /// It ended otherwise.
    Ended,
}

/// One try at a task, or at one rank of it, that holds a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The right to run it.
    pub lease: Lease,
    /// Its task.
    pub task: TaskId,
    /// The task's job.
    pub job: JobId,
    /// Where it runs.
    pub worker: WorkerId,
    /// On which of that worker's devices.
    pub device: Name,
    /// Whether nothing but its task may run on its host.
    pub exclusive: bool,
    /// Whether the worker was told to stop it: its job has ended, or its gang.
    pub cancelled: bool,
    /// Whether its gang has ended without it, as nobody can tell its worker to stop it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub let_go: bool,
    /// Its place in its gang; none for a task of one rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<GangPlace>,
    /// Milliseconds since 1970.
    pub started_at: i64,
}

/// A rank's place in its gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangPlace {
    /// Counts the formations of the task's gang, from 1.
    pub generation: u64,
    /// This rank, from 0.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
}
