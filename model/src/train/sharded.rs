//! The optimiser shared out between the ranks that hold the same stage (ZeRO-1, 1910.02054): each keeps masters
//! and moments of its own parts of the buckets, and updates those alone.
//!
//! Gradients of a bucket are laid flat and reduce-scattered as soon as the last of them is written, while the
//! backward goes on. After the update every bucket's new values are gathered, in the type that blocks read, and
//! the stage's weights become views of what arrived.

use std::collections::VecDeque;
use std::sync::Arc;

use espalier_arch::Role;

use super::grid::Grid;
use super::optimiser::{Kept, gathered, is_counted_elsewhere, no_tensor};
use super::shards::{Bucket, Group, buckets};
use super::stage::{Stage, Written};
use crate::collective::{Communicator, InFlight};
use crate::ops::{AdamWParameter, AdamWStep, Operations, Pending};
use crate::weights::{StageWeights, is_vector};
use crate::{ElementType, Result, Tensor};

/// One bucket, and this rank's part of it.
#[derive(Debug)]
struct Shard {
    bucket: Bucket,
    /// What blocks read its tensors as.
    element_type: ElementType,
    /// Whether the first stage holds the same bucket, and counts it.
    counted_elsewhere: bool,
    /// Whether another stage holds the same bucket, so that gradients are added up.
    tied: bool,
    /// `(1, part)` each, f32.
    value: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    /// The sum of all ranks' gradients of this part, once the bucket's last one is written.
    gradient: Option<Gradient>,
}

#[derive(Debug)]
enum Gradient {
    UnderWay(InFlight),
    Arrived(Tensor),
}

impl Gradient {
    fn wait(self) -> Result<Tensor> {
        match self {
            Self::UnderWay(gradient) => gradient.wait(),
            Self::Arrived(gradient) => Ok(gradient),
        }
    }
}

/// Buckets under way at a time: each holds its flat gradients, or its new values beside the old, until it is waited
/// for.
const UNDER_WAY: usize = 4;

/// This rank's share of a stage's optimiser.
#[derive(Debug)]
pub(super) struct Sharded {
    replicas: Arc<dyn Communicator>,
    shards: Vec<Shard>,
    /// When the stage's blocks are written, the last of them first.
    blocks: usize,
}

/// A bucket with what all its tensors have in common.
struct Planned {
    bucket: Bucket,
    element_type: ElementType,
    embedding: bool,
}

impl Sharded {
    /// The share of rank `replicas.rank()`. `state` gives value, first and second moment of a bucket's part.
    pub(super) fn new(
        operations: &dyn Operations,
        weights: &StageWeights,
        grid: &Grid,
        replicas: Arc<dyn Communicator>,
        state: &mut dyn FnMut(&Bucket) -> Result<[Tensor; 3]>,
    ) -> Result<Self> {
        let tied = grid.ends.is_some() && weights.architecture().tied_embedding;
        let mut shards = Vec::new();
        for planned in plan(operations, weights, grid.bucket_elements, replicas.size()) {
            let [value, first_moment, second_moment] = state(&planned.bucket)?;
            shards.push(Shard {
                bucket: planned.bucket,
                element_type: planned.element_type,
                counted_elsewhere: planned.embedding && is_counted_elsewhere(weights, Role::Embedding),
                tied: planned.embedding && tied,
                value,
                first_moment,
                second_moment,
                gradient: None,
            });
        }
        Ok(Self {
            replicas,
            shards,
            blocks: weights.blocks().len(),
        })
    }

    pub(super) fn written(
        &mut self,
        operations: &dyn Operations,
        what: Written,
        gradients: &mut StageWeights,
    ) -> Result<()> {
        let now = when(what, self.blocks);
        for index in 0..self.shards.len() {
            let Some(shard) = self.shards.get_mut(index) else {
                break;
            };
            if shard.gradient.is_none() && shard.bucket.written <= now {
                let flat = shard.take_gradients(operations, gradients, self.replicas.size())?;
                let gradient = self.replicas.reduce_scatter(flat)?;
                shard.gradient = Some(Gradient::UnderWay(gradient));
                self.wait_for_all_but(UNDER_WAY)?;
            }
        }
        Ok(())
    }

    /// Waits for the oldest buckets under way until no more than `most` are.
    fn wait_for_all_but(&mut self, most: usize) -> Result<()> {
        let is_under_way = |shard: &&mut Shard| matches!(shard.gradient, Some(Gradient::UnderWay(_)));
        let mut under_way: Vec<&mut Shard> = self.shards.iter_mut().filter(is_under_way).collect();
        let excess = under_way.len().saturating_sub(most);
        for shard in under_way.iter_mut().take(excess) {
            if let Some(gradient) = shard.gradient.take() {
                shard.gradient = Some(Gradient::Arrived(gradient.wait()?));
            }
        }
        Ok(())
    }

    pub(super) fn update(
        &mut self,
        stage: &mut Stage,
        grid: Option<&Grid>,
        step: AdamWStep,
        losses: &[Tensor],
    ) -> Result<Box<dyn Pending>> {
        let operations = Arc::clone(&stage.operations);
        // Of a rank that had nothing to go back through, too.
        self.written(operations.as_ref(), Written::Embedding, &mut stage.gradients)?;
        let mut gradients = Vec::with_capacity(self.shards.len());
        for shard in &mut self.shards {
            let Some(gradient) = shard.gradient.take() else {
                continue;
            };
            let gradient = gradient.wait()?;
            let ends = grid.and_then(|grid| grid.ends.as_ref()).filter(|_| shard.tied);
            gradients.push(match ends {
                Some(ends) => ends.all_reduce(gradient)?.wait()?,
                None => gradient,
            });
        }
        let counted = gradients.iter().zip(&self.shards);
        let counted: Vec<&Tensor> = counted
            .filter(|(_, shard)| !shard.counted_elsewhere)
            .map(|(gradient, _)| gradient)
            .collect();
        let measured = gathered(operations.measure(&counted, losses)?, grid)?;
        let mut parameters = Vec::with_capacity(self.shards.len());
        for (shard, gradient) in self.shards.iter_mut().zip(&mut gradients) {
            parameters.push(AdamWParameter {
                value: &mut shard.value,
                gradient,
                first_moment: &mut shard.first_moment,
                second_moment: &mut shard.second_moment,
                working: None,
            });
        }
        let pending = operations.update(&mut parameters, step, &measured)?;
        drop(parameters);
        self.spread(stage)?;
        Ok(pending)
    }

    /// Drops the gradients of a step.
    pub(super) fn forget(&mut self) {
        for shard in &mut self.shards {
            shard.gradient = None;
        }
    }

    /// Brings every rank's values to all of them, as the stage's weights.
    pub(super) fn spread(&self, stage: &mut Stage) -> Result<()> {
        let mut under_way = VecDeque::with_capacity(UNDER_WAY + 1);
        for shard in &self.shards {
            let part = stage.operations.copy_as(&shard.value, shard.element_type)?;
            under_way.push_back((&shard.bucket, self.replicas.all_gather(part)?));
            if under_way.len() > UNDER_WAY
                && let Some((bucket, gathered)) = under_way.pop_front()
            {
                put_in_place(bucket, &gathered.wait()?, &mut stage.weights)?;
            }
        }
        for (bucket, gathered) in under_way {
            put_in_place(bucket, &gathered.wait()?, &mut stage.weights)?;
        }
        Ok(())
    }

    pub(super) fn kept(&self) -> Result<Vec<Kept>> {
        let mut kept = Vec::new();
        for shard in &self.shards {
            for owned in shard.bucket.owned(self.replicas.rank()) {
                let part = |tensor: &Tensor| tensor.window(owned.at, 1, owned.range.len());
                kept.push(Kept {
                    tensor: owned.tensor,
                    state: [
                        part(&shard.value)?,
                        part(&shard.first_moment)?,
                        part(&shard.second_moment)?,
                    ],
                    range: owned.range,
                });
            }
        }
        Ok(kept)
    }
}

impl Shard {
    /// The bucket's gradients, `(ranks, part)`; the stage's own are left at zero.
    fn take_gradients(
        &self,
        operations: &dyn Operations,
        gradients: &mut StageWeights,
        ranks: usize,
    ) -> Result<Tensor> {
        let flat = lay_flat(operations, &self.bucket, gradients, ranks)?;
        let mut tensors: Vec<Option<&mut Tensor>> = gradients.tensors_mut().into_iter().map(Some).collect();
        let pieces = self.bucket.pieces.iter();
        let mut taken: Vec<&mut Tensor> = pieces
            .filter_map(|piece| tensors.get_mut(piece.tensor).and_then(Option::take))
            .collect();
        operations.clear(&mut taken)?;
        Ok(flat)
    }
}

/// The tensors of a bucket become views of its values.
fn put_in_place(bucket: &Bucket, flat: &Tensor, weights: &mut StageWeights) -> Result<()> {
    let mut weights = weights.tensors_mut();
    let count = weights.len();
    for piece in &bucket.pieces {
        let weight = weights.get_mut(piece.tensor);
        let weight = weight.ok_or_else(|| no_tensor(piece.tensor, count))?;
        **weight = flat.window(piece.start, weight.rows(), weight.columns())?;
    }
    Ok(())
}

/// All of a bucket in f32, `(ranks, part)`.
fn lay_flat(
    operations: &dyn Operations,
    bucket: &Bucket,
    from: &StageWeights,
    ranks: usize,
) -> Result<Tensor> {
    let tensors = from.tensors();
    let mut parts = Vec::with_capacity(bucket.pieces.len());
    for piece in &bucket.pieces {
        let tensor = tensors.get(piece.tensor);
        let (_, tensor) = tensor.ok_or_else(|| no_tensor(piece.tensor, tensors.len()))?;
        // A student is fresh views of its parent, with gaps.
        let whole = match tensor.is_contiguous() {
            true => (*tensor).clone(),
            false => operations.contiguous(tensor)?,
        };
        parts.push((piece.start, whole));
    }
    let parts: Vec<(usize, &Tensor)> = parts.iter().map(|(start, tensor)| (*start, tensor)).collect();
    operations.flatten(&parts, ranks, bucket.part, ElementType::F32)
}

/// Value and zero moments of `replicas.rank()`'s part of a bucket, from the whole weights.
pub(super) fn fresh_state(
    operations: &dyn Operations,
    bucket: &Bucket,
    weights: &StageWeights,
    replicas: &dyn Communicator,
) -> Result<[Tensor; 3]> {
    let flat = lay_flat(operations, bucket, weights, replicas.size())?;
    let value = operations.contiguous(&flat.narrow_rows(replicas.rank(), 1)?)?;
    let zeros = || operations.zeros(1, bucket.part, ElementType::F32);
    Ok([value, zeros()?, zeros()?])
}

/// Counts what of a backward is written: the head first, then the blocks from the last, then the embedding.
fn when(what: Written, blocks: usize) -> usize {
    match what {
        Written::Head => 0,
        Written::Block(index) => blocks.saturating_sub(index),
        Written::Embedding => blocks + 1,
    }
}

/// Matrices, the embedding and vectors each in buckets of their own: blocks read them in different types, and the
/// embedding is what two stages may have in common. In the order in which a backward completes them, which is that
/// in which every rank exchanges them.
fn plan(
    operations: &dyn Operations,
    weights: &StageWeights,
    bucket_elements: usize,
    ranks: usize,
) -> Vec<Planned> {
    let (mut matrices, mut vectors, mut embedding) = (Vec::new(), Vec::new(), Vec::new());
    for group in groups(weights) {
        let role = group.1;
        let list = match role {
            Role::Embedding => &mut embedding,
            role if is_vector(role) => &mut vectors,
            _ => &mut matrices,
        };
        list.push(group.0);
    }
    let of = |groups: &[Group], element_type, embedding| {
        let buckets = buckets(groups, bucket_elements, ranks).into_iter();
        buckets.map(move |bucket| Planned {
            bucket,
            element_type,
            embedding,
        })
    };
    let activations = operations.activation_type();
    let mut planned: Vec<Planned> = of(&matrices, activations, false)
        .chain(of(&embedding, activations, true))
        .chain(of(&vectors, ElementType::F32, false))
        .collect();
    planned.sort_by_key(|planned| planned.bucket.written);
    planned
}

/// Every tensor of a stage in groups of those that a block reads together, in the order in which a backward
/// writes their gradients; each group with the role of its first.
fn groups(weights: &StageWeights) -> Vec<(Group, Role)> {
    let blocks = weights.blocks().len();
    let specs = weights.specs();
    let first_block = weights.range().start;
    let elements: Vec<usize> = weights.tensors().iter().map(|(_, tensor)| tensor.len()).collect();
    let mut groups = Vec::new();
    let find = |block: Option<usize>, role: Role| {
        let index = specs
            .iter()
            .position(|spec| spec.block == block.map(|block| block + first_block) && spec.role == role)?;
        elements.get(index).map(|elements| (index, *elements))
    };
    let mut push = |block: Option<usize>, roles: &[Role], written: usize| {
        let tensors: Vec<(usize, usize)> = roles.iter().filter_map(|role| find(block, *role)).collect();
        if let (false, Some(role)) = (tensors.is_empty(), roles.first()) {
            groups.push((Group { tensors, written }, *role));
        }
    };
    for role in [Role::FinalNorm, Role::Head] {
        push(None, &[role], when(Written::Head, blocks));
    }
    for (index, block) in weights.blocks().iter().enumerate().rev() {
        for roles in block.groups() {
            push(Some(index), roles, when(Written::Block(index), blocks));
        }
    }
    push(None, &[Role::Embedding], when(Written::Embedding, blocks));
    groups
}
