//! What a gang is to do, and what its ranks say about it: one line of JSON each.

use std::path::PathBuf;

use espalier_arch::Architecture;
use espalier_model::ops::Layout;
use espalier_model::train::Layers;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Result;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Cpu,
    Cuda,
}

/// One training, the same for every rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) stages: usize,
    pub(crate) replicas: usize,
    /// The student, as a Hugging Face config.
    pub(crate) student: Value,
    /// Whom it learns from; none: from the text.
    pub(crate) parent: Option<Value>,
    pub(crate) steps: u32,
    pub(crate) learning_rate: f64,
    /// Of a step, all replicas together.
    pub(crate) micro_batches: usize,
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    /// Steps after which the text begins again.
    pub(crate) period: u32,
    /// A checkpoint every so many steps goes here.
    pub(crate) home: Option<(PathBuf, u32)>,
    /// The record of a checkpoint to go on from.
    pub(crate) resume: Option<PathBuf>,
    /// Which formation of the gang this is.
    pub(crate) generation: u64,
    /// How long a rank may be silent.
    pub(crate) silence_ms: u64,
    /// A rank that goes no further than this.
    pub(crate) fall: Option<Fall>,
}

/// The signal that a rank sends itself in the middle of a step: no other one can end it without that.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Fall {
    pub(crate) rank: usize,
    pub(crate) step: u32,
    /// As `kill` has it: KILL or STOP.
    pub(crate) signal: String,
}

/// What a rank says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Line {
    /// Where the others reach it.
    Listening(String),
    Step {
        step: u32,
        loss: f64,
        seconds: f64,
    },
    /// A checkpoint is there, whole.
    Saved(PathBuf),
    /// The last word of a rank that falls.
    Falls,
    Done {
        /// Bytes of tensors on its device at most, and taken from it.
        in_use: u64,
        held: u64,
    },
    Failed(String),
}

impl Plan {
    pub(crate) fn layers(&self) -> Layers {
        Layers {
            stages: self.stages,
            replicas: self.replicas,
        }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.stages * self.replicas
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout {
            sequences: self.sequences,
            tokens: self.tokens,
        }
    }

    pub(crate) fn architectures(&self) -> Result<(Architecture, Option<Architecture>)> {
        let parent = self.parent.as_ref().map(Architecture::from_config).transpose()?;
        Ok((Architecture::from_config(&self.student)?, parent))
    }

    /// Which micro-batches a replica has in a step: on a CPU unevenly many, and other ones each step.
    pub(crate) fn share(&self, step: u32, replica: usize) -> Vec<usize> {
        let all = 0..self.micro_batches;
        let uneven = self.kind == Kind::Cpu;
        let of = |index: usize| match uneven {
            true => (index * index + step as usize) % 7 % self.replicas,
            false => index % self.replicas,
        };
        all.filter(|&index| of(index) == replica).collect()
    }

    /// Text that can be learnt: every token follows from the one before but for one in eight.
    pub(crate) fn text(&self, step: u32, index: usize, vocabulary: usize) -> Vec<u32> {
        let number = u64::from(step % self.period) * 1009 + index as u64 + 1;
        let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut token = 0;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            token = match state >> 61 {
                0 => (state >> 8) % vocabulary as u64,
                _ => (token * 31 + 7) % vocabulary as u64,
            };
            u32::try_from(token).unwrap_or_default()
        };
        (0..self.layout().rows()).map(|_| next()).collect()
    }
}
