//! What follows from a shape by counting: parameters, bytes of weights and state, FLOPs. Shapes only: what an
//! engine adds (page rounding, activations, graphs) is the cost table's to measure.

mod flops;
mod memory;
mod storage;

use crate::{Architecture, BlockShape, Role};

pub use memory::Precision;
pub use storage::{Component, ComponentWeights, Storage, WeightFormat};

/// How many parameters a model has, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    /// The token embedding.
    pub embedding: u64,
    /// The head; 0 when it is the embedding.
    pub head: u64,
    /// Each block, its norm included, in the order of [`Architecture::blocks`].
    pub blocks: Vec<u64>,
    /// The norm before the head.
    pub final_norm: u64,
    /// All of them.
    pub total: u64,
    /// Those that one token uses: experts that its router does not choose are left out, both embedding tables
    /// are not.
    pub active: u64,
}

impl Parameters {
    /// All blocks together: what a parameter share is a share of.
    pub fn in_blocks(&self) -> u64 {
        sum(self.blocks.iter().copied())
    }
}

impl Architecture {
    /// Parameters, summed over [`Architecture::tensors`].
    pub fn parameters(&self) -> Parameters {
        let mut counted = Parameters {
            embedding: 0,
            head: 0,
            blocks: vec![0; self.blocks.len()],
            final_norm: 0,
            total: 0,
            active: 0,
        };
        for tensor in self.tensors() {
            let elements = tensor.elements();
            let place = match (tensor.block, tensor.role) {
                (Some(block), _) => counted.blocks.get_mut(block),
                (None, Role::Head) => Some(&mut counted.head),
                (None, Role::FinalNorm) => Some(&mut counted.final_norm),
                (None, _) => Some(&mut counted.embedding),
            };
            if let Some(place) = place {
                *place = place.saturating_add(elements);
            }
            counted.total = counted.total.saturating_add(elements);
        }
        let idle = sum(self.blocks.iter().map(|block| {
            block
                .shape
                .parameters(self.hidden)
                .saturating_sub(block.shape.active_parameters(self.hidden))
        }));
        counted.active = counted.total.saturating_sub(idle);
        counted
    }
}

impl BlockShape {
    /// Parameters of the block, its norm included, for a residual stream of width `hidden`.
    pub fn parameters(&self, hidden: usize) -> u64 {
        sum(self.parts(hidden).iter().map(crate::Part::elements))
    }

    /// Parameters that one token uses: as [`BlockShape::parameters`], but of a mixture's routed experts only
    /// as many as each token is sent to.
    pub fn active_parameters(&self, hidden: usize) -> u64 {
        sum(self
            .parts(hidden)
            .iter()
            .filter(|part| self.is_active(part.role))
            .map(crate::Part::elements))
    }

    /// Whether one token uses the tensor. Routed experts count by their number: which ones are chosen does not
    /// matter to a sum.
    fn is_active(&self, role: Role) -> bool {
        let Self::Moe(moe) = self else { return true };
        match role {
            Role::ExpertGate(expert) | Role::ExpertUp(expert) | Role::ExpertDown(expert) => {
                expert < moe.experts_per_token
            }
            _ => true,
        }
    }
}

/// Sums that stop at the largest number rather than wrap; sizes within a config's bounds come nowhere near it.
fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
