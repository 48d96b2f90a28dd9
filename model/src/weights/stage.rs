//! A slice of a model's block list with what stands before and after it: what one rank of a pipeline holds, and
//! the whole model where there is one stage.
//!
//! Tensors come in the order of [`Architecture::tensors`], those that are elsewhere left out. A tied embedding is
//! held by the first stage, which looks tokens up in it, and by the last, whose head it is.

use std::ops::Range;

use espalier_arch::{Architecture, BlockShape, Role, TensorSpec};

use super::tensors::checked;
use super::{BlockWeights, Model, for_blocks};
use crate::ops::Operations;
use crate::{ElementType, Error, Result, Tensor};

/// The weights of one stage.
#[derive(Debug, Clone)]
pub struct StageWeights {
    /// The shape of the whole model.
    architecture: Architecture,
    /// Which of its blocks are here.
    range: Range<usize>,
    embedding: Option<Tensor>,
    blocks: Vec<BlockWeights>,
    final_norm: Option<Tensor>,
    head: Option<Tensor>,
}

impl StageWeights {
    /// The stage whose tensors are what `tensor` gives for each of its own, in order. A matrix is `(out, in)`, a
    /// vector `(1, n)`.
    ///
    /// # Errors
    /// When the range is empty or not within the architecture's blocks, one of them is of a kind that cannot be
    /// run yet, a tensor has another shape than its specification, and those of `tensor`.
    pub fn build(
        architecture: &Architecture,
        range: Range<usize>,
        mut tensor: impl FnMut(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Self> {
        // A model may have no block at all, a stage of one that has some may not.
        let shapes = architecture.blocks.get(range.clone());
        let shapes = shapes.filter(|shapes| !shapes.is_empty() || architecture.blocks.is_empty());
        let shapes = shapes.ok_or_else(|| Error::OutOfRange {
            what: "the end of a stage",
            value: range.end,
            expected: format!(
                "at most {}, after its start {}",
                architecture.blocks.len(),
                range.start
            ),
        })?;
        for block in shapes {
            if !matches!(block.shape, BlockShape::Attention(_) | BlockShape::Mlp(_)) {
                return Err(Error::UnsupportedBlock {
                    kind: block.shape.kind(),
                });
            }
        }
        let [mut embedding, mut final_norm, mut head] = [None, None, None];
        let mut inside: Vec<Vec<(Role, Tensor)>> = vec![Vec::new(); shapes.len()];
        for spec in specs(architecture, &range) {
            let made = checked(&spec, tensor(&spec)?)?;
            match (spec.block, spec.role) {
                (_, Role::Embedding) => embedding = Some(made),
                (_, Role::FinalNorm) => final_norm = Some(made),
                (_, Role::Head) => head = Some(made),
                (Some(block), role) => {
                    if let Some(parts) = block.checked_sub(range.start).and_then(|at| inside.get_mut(at)) {
                        parts.push((role, made));
                    }
                }
                (None, _) => {}
            }
        }
        let mut blocks = Vec::with_capacity(inside.len());
        for (block, parts) in shapes.iter().zip(inside) {
            blocks.push(BlockWeights::of_parts(&block.shape, architecture.hidden, &parts)?);
        }
        Ok(Self {
            architecture: architecture.clone(),
            range,
            embedding,
            blocks,
            final_norm,
            head,
        })
    }

    /// A stage of `model` with blocks `range`: the same tensors, nothing is copied.
    ///
    /// # Errors
    /// When the model has no such blocks.
    pub fn of(model: &Model, range: Range<usize>) -> Result<Self> {
        let mut held = model.named_tensors().into_iter();
        Self::build(&model.architecture, range, |wanted| {
            let found = held.find(|(spec, _)| spec.name == wanted.name);
            found
                .map(|(_, tensor)| tensor.clone())
                .ok_or(Error::MissingTensor { role: wanted.role })
        })
    }

    /// All of `model` as one stage.
    ///
    /// # Errors
    /// When a block is of a kind that cannot be run yet.
    pub fn whole(model: &Model) -> Result<Self> {
        Self::of(model, 0..model.blocks.len())
    }

    /// The model whose only stage this is.
    ///
    /// # Errors
    /// When it is not the only one.
    pub fn into_model(self) -> Result<Model> {
        let missing = |role| Error::MissingTensor { role };
        if self.range != (0..self.architecture.blocks.len()) {
            return Err(Error::OutOfRange {
                what: "blocks of a whole model",
                value: self.blocks.len(),
                expected: self.architecture.blocks.len().to_string(),
            });
        }
        Ok(Model {
            architecture: self.architecture,
            embedding: self.embedding.ok_or_else(|| missing(Role::Embedding))?,
            blocks: self.blocks,
            final_norm: self.final_norm.ok_or_else(|| missing(Role::FinalNorm))?,
            head: self.head,
        })
    }

    /// The shape of the whole model.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Which of the model's blocks are here.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether tokens come in here.
    pub fn is_first(&self) -> bool {
        self.range.start == 0
    }

    /// Whether the head is here.
    pub fn is_last(&self) -> bool {
        self.range.end == self.architecture.blocks.len()
    }

    /// `(vocabulary, hidden)`.
    ///
    /// # Errors
    /// When it is on another stage.
    pub fn embedding(&self) -> Result<&Tensor> {
        let missing = Error::MissingTensor {
            role: Role::Embedding,
        };
        self.embedding.as_ref().ok_or(missing)
    }

    /// `(1, hidden)`.
    ///
    /// # Errors
    /// When it is on another stage.
    pub fn final_norm(&self) -> Result<&Tensor> {
        let missing = Error::MissingTensor {
            role: Role::FinalNorm,
        };
        self.final_norm.as_ref().ok_or(missing)
    }

    /// The matrix that turns normed hidden states into logits, `(vocabulary, hidden)`.
    ///
    /// # Errors
    /// When it is on another stage.
    pub fn head(&self) -> Result<&Tensor> {
        let head = self.head.as_ref().or(self.embedding.as_ref());
        head.filter(|_| self.is_last())
            .ok_or(Error::MissingTensor { role: Role::Head })
    }

    /// Final norm and head to write.
    ///
    /// # Errors
    /// When they are on another stage.
    pub(crate) fn head_mut(&mut self) -> Result<(&mut Tensor, &mut Tensor)> {
        let head = self.head.as_mut().or(self.embedding.as_mut());
        match (self.final_norm.as_mut(), head) {
            (Some(norm), Some(head)) => Ok((norm, head)),
            _ => Err(Error::MissingTensor { role: Role::Head }),
        }
    }

    /// The embedding to write, or to take away and put back.
    pub(crate) fn embedding_mut(&mut self) -> &mut Option<Tensor> {
        &mut self.embedding
    }

    /// Shape and weights of the stage's `index`th block.
    ///
    /// # Errors
    /// When there are fewer.
    pub(crate) fn block(&self, index: usize) -> Result<(&BlockShape, &BlockWeights)> {
        let shape = self
            .architecture
            .blocks
            .get(self.range.start.saturating_add(index));
        match (shape, self.blocks.get(index)) {
            (Some(block), Some(weights)) => Ok((&block.shape, weights)),
            _ => Err(self.no_block(index)),
        }
    }

    /// Weights of the stage's `index`th block, to write.
    ///
    /// # Errors
    /// When there are fewer.
    pub(crate) fn block_mut(&mut self, index: usize) -> Result<&mut BlockWeights> {
        let missing = self.no_block(index);
        self.blocks.get_mut(index).ok_or(missing)
    }

    fn no_block(&self, index: usize) -> Error {
        Error::OutOfRange {
            what: "block of a stage",
            value: index,
            expected: format!("below {}", self.blocks.len()),
        }
    }

    /// The stage's blocks.
    pub fn blocks(&self) -> &[BlockWeights] {
        &self.blocks
    }

    /// Every tensor with what it is for, in order.
    pub fn tensors(&self) -> Vec<(Role, &Tensor)> {
        let mut tensors: Vec<(Role, &Tensor)> = Vec::new();
        tensors.extend(self.embedding.as_ref().map(|tensor| (Role::Embedding, tensor)));
        tensors.extend(self.blocks.iter().flat_map(BlockWeights::tensors));
        tensors.extend(self.final_norm.as_ref().map(|tensor| (Role::FinalNorm, tensor)));
        tensors.extend(self.head.as_ref().map(|tensor| (Role::Head, tensor)));
        tensors
    }

    /// Every tensor to write, in order.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut tensors: Vec<&mut Tensor> = Vec::new();
        tensors.extend(self.embedding.as_mut());
        tensors.extend(self.blocks.iter_mut().flat_map(BlockWeights::tensors_mut));
        tensors.extend(self.final_norm.as_mut());
        tensors.extend(self.head.as_mut());
        tensors
    }

    /// Every tensor beside its checkpoint name and shape, in order.
    pub fn named_tensors(&self) -> Vec<(TensorSpec, &Tensor)> {
        let tensors = self.tensors().into_iter().map(|(_, tensor)| tensor);
        self.specs().into_iter().zip(tensors).collect()
    }

    /// Name and shape of every tensor, in order.
    pub fn specs(&self) -> Vec<TensorSpec> {
        specs(&self.architecture, &self.range)
    }

    /// The same shape with every tensor replaced by what `change` makes of it, stacked where the backend gains.
    fn map(
        &self,
        operations: &dyn Operations,
        change: &mut dyn FnMut(Role, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut copy = self.clone();
        for (tensor, (role, own)) in copy.tensors_mut().into_iter().zip(self.tensors()) {
            *tensor = change(role, own)?;
        }
        copy.stacked(operations)
    }

    /// The same tensors, those that a block reads together stacked where the backend gains by it.
    pub(crate) fn stacked(mut self, operations: &dyn Operations) -> Result<Self> {
        for block in &mut self.blocks {
            block.stack(operations)?;
        }
        Ok(self)
    }

    /// Contiguous f32 copies of every tensor that share nothing with these, fit to be trained.
    ///
    /// # Errors
    /// When the backend runs out of memory.
    pub(crate) fn to_owned_weights(&self, operations: &dyn Operations) -> Result<Self> {
        self.map(operations, &mut |_, tensor| {
            operations.copy_as(tensor, ElementType::F32)
        })
    }

    /// f32 zeros of the same shape, for gradients and moments.
    ///
    /// # Errors
    /// When the backend runs out of memory.
    pub(crate) fn zeros_like(&self, operations: &dyn Operations) -> Result<Self> {
        self.map(operations, &mut |_, tensor| {
            operations.zeros(tensor.rows(), tensor.columns(), ElementType::F32)
        })
    }

    /// What blocks read of f32 weights: the same where the backend computes in f32, else copies of the matrices in
    /// the backend's own type beside the vectors themselves.
    ///
    /// # Errors
    /// When the backend runs out of memory.
    pub(crate) fn working_copy(&self, operations: &dyn Operations) -> Result<Option<Self>> {
        if operations.activation_type() == ElementType::F32 {
            return Ok(None);
        }
        self.map(operations, &mut |role, tensor| {
            for_blocks(operations, role, tensor.clone())
        })
        .map(Some)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors().iter().map(|(_, tensor)| tensor.bytes()).sum()
    }
}

/// Name and shape of every tensor of the stage with blocks `range`.
pub(crate) fn specs(architecture: &Architecture, range: &Range<usize>) -> Vec<TensorSpec> {
    let (first, last) = (range.start == 0, range.end == architecture.blocks.len());
    let mut specs = architecture.tensors();
    specs.retain(|spec| match (spec.block, spec.role) {
        (Some(block), _) => range.contains(&block),
        (None, Role::Embedding) => first || (last && architecture.tied_embedding),
        (None, _) => last,
    });
    specs
}
