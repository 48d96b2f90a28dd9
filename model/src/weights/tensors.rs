//! Walking over a model's tensors, and building a model tensor by tensor, always in the order of
//! [`Architecture::tensors`], so that gradients, moments, files and counting agree without names.

use espalier_arch::{Architecture, BlockKind, BlockShape, Role, TensorSpec};

use super::{AttentionWeights, BlockWeights, MlpWeights, Model, StageWeights};
use crate::ops::Operations;
use crate::{ElementType, Elements, Error, Result, Tensor};

/// Standard deviation of random matrices, that of most families' initialisers.
const RANDOM_DEVIATION: f32 = 0.02;

impl AttentionWeights {
    fn parts(&self) -> Vec<(Role, Option<&Tensor>)> {
        vec![
            (Role::Norm, Some(&self.norm)),
            (Role::Query, Some(&self.query)),
            (Role::Key, Some(&self.key)),
            (Role::Value, Some(&self.value)),
            (Role::Output, Some(&self.output)),
            (Role::QueryBias, self.query_bias.as_ref()),
            (Role::KeyBias, self.key_bias.as_ref()),
            (Role::ValueBias, self.value_bias.as_ref()),
            (Role::OutputBias, self.output_bias.as_ref()),
            (Role::QueryNorm, self.query_norm.as_ref()),
            (Role::KeyNorm, self.key_norm.as_ref()),
        ]
    }

    fn parts_mut(&mut self) -> Vec<Option<&mut Tensor>> {
        vec![
            Some(&mut self.norm),
            Some(&mut self.query),
            Some(&mut self.key),
            Some(&mut self.value),
            Some(&mut self.output),
            self.query_bias.as_mut(),
            self.key_bias.as_mut(),
            self.value_bias.as_mut(),
            self.output_bias.as_mut(),
            self.query_norm.as_mut(),
            self.key_norm.as_mut(),
        ]
    }
}

impl MlpWeights {
    fn parts(&self) -> Vec<(Role, Option<&Tensor>)> {
        vec![
            (Role::Norm, Some(&self.norm)),
            (Role::Gate, self.gate.as_ref()),
            (Role::Up, Some(&self.up)),
            (Role::Down, Some(&self.down)),
            (Role::GateBias, self.gate_bias.as_ref()),
            (Role::UpBias, self.up_bias.as_ref()),
            (Role::DownBias, self.down_bias.as_ref()),
        ]
    }

    fn parts_mut(&mut self) -> Vec<Option<&mut Tensor>> {
        vec![
            Some(&mut self.norm),
            self.gate.as_mut(),
            Some(&mut self.up),
            Some(&mut self.down),
            self.gate_bias.as_mut(),
            self.up_bias.as_mut(),
            self.down_bias.as_mut(),
        ]
    }
}

impl BlockWeights {
    /// What the block computes.
    pub fn kind(&self) -> BlockKind {
        match self {
            Self::Attention(_) => BlockKind::Attention,
            Self::Mlp(_) => BlockKind::Mlp,
        }
    }

    /// The block's tensors with what they are for, in checkpoint order.
    pub fn tensors(&self) -> Vec<(Role, &Tensor)> {
        let parts = match self {
            Self::Attention(weights) => weights.parts(),
            Self::Mlp(weights) => weights.parts(),
        };
        parts
            .into_iter()
            .filter_map(|(role, tensor)| tensor.map(|tensor| (role, tensor)))
            .collect()
    }

    /// As [`BlockWeights::tensors`], to write.
    pub fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let parts = match self {
            Self::Attention(weights) => weights.parts_mut(),
            Self::Mlp(weights) => weights.parts_mut(),
        };
        parts.into_iter().flatten().collect()
    }

    /// What the block's tensors are for, those together that it reads together, in the order in which
    /// [`Operations::stack`] lays them.
    pub(crate) fn groups(&self) -> &'static [&'static [Role]] {
        match self {
            Self::Attention(_) => &[
                &[Role::Query, Role::Key, Role::Value],
                &[Role::Output],
                &[Role::Norm],
                &[Role::QueryBias, Role::KeyBias, Role::ValueBias],
                &[Role::OutputBias],
                &[Role::QueryNorm],
                &[Role::KeyNorm],
            ],
            Self::Mlp(_) => &[
                &[Role::Up, Role::Gate],
                &[Role::Down],
                &[Role::Norm],
                &[Role::UpBias, Role::GateBias],
                &[Role::DownBias],
            ],
        }
    }

    /// Lays tensors that the block reads together one after the other where the backend gains by it.
    pub(crate) fn stack(&mut self, operations: &dyn Operations) -> Result<()> {
        for group in self.read_together() {
            let tensors = group.iter().map(|tensor| (**tensor).clone()).collect();
            for (tensor, stacked) in group.into_iter().zip(operations.stack(tensors)?) {
                *tensor = stacked;
            }
        }
        Ok(())
    }

    /// Tensors of layers that read the same input, in the order in which the block hands them to
    /// [`Operations::linear_many`].
    fn read_together(&mut self) -> Vec<Vec<&mut Tensor>> {
        match self {
            Self::Attention(weights) => {
                let biases = [
                    &mut weights.query_bias,
                    &mut weights.key_bias,
                    &mut weights.value_bias,
                ];
                vec![
                    vec![&mut weights.query, &mut weights.key, &mut weights.value],
                    biases.into_iter().flatten().collect(),
                ]
            }
            Self::Mlp(weights) => {
                let matrices = std::iter::once(&mut weights.up).chain(&mut weights.gate);
                let biases = [&mut weights.up_bias, &mut weights.gate_bias];
                vec![matrices.collect(), biases.into_iter().flatten().collect()]
            }
        }
    }

    /// The same block with every tensor replaced by what `change` makes of it.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn map(&self, change: &mut dyn FnMut(Role, &Tensor) -> Result<Tensor>) -> Result<Self> {
        let mut copy = self.clone();
        let roles: Vec<Role> = self.tensors().into_iter().map(|(role, _)| role).collect();
        for (tensor, role) in copy.tensors_mut().into_iter().zip(roles) {
            *tensor = change(role, tensor)?;
        }
        Ok(copy)
    }

    /// Weights of `shape`, of these tensors.
    ///
    /// # Errors
    /// When one is missing, or the kind of block cannot be run yet.
    pub(crate) fn of_parts(shape: &BlockShape, hidden: usize, parts: &[(Role, Tensor)]) -> Result<Self> {
        Self::build(shape, hidden, |role| {
            let part = parts.iter().find(|(held, _)| *held == role);
            part.map(|(_, tensor)| tensor.clone())
                .ok_or(Error::MissingTensor { role })
        })
    }

    /// Weights of `shape`, each tensor as `make` gives it.
    ///
    /// # Errors
    /// When the kind of block cannot be run yet, and those of `make`.
    fn build(
        shape: &BlockShape,
        hidden: usize,
        mut make: impl FnMut(Role) -> Result<Tensor>,
    ) -> Result<Self> {
        let roles: Vec<Role> = shape.parts(hidden).into_iter().map(|part| part.role).collect();
        let mut optional = |role: Role| roles.contains(&role).then(|| make(role)).transpose();
        let missing = |role: Role| Error::MissingTensor { role };
        match shape {
            BlockShape::Attention(_) => Ok(Self::Attention(AttentionWeights {
                norm: optional(Role::Norm)?.ok_or_else(|| missing(Role::Norm))?,
                query: optional(Role::Query)?.ok_or_else(|| missing(Role::Query))?,
                key: optional(Role::Key)?.ok_or_else(|| missing(Role::Key))?,
                value: optional(Role::Value)?.ok_or_else(|| missing(Role::Value))?,
                output: optional(Role::Output)?.ok_or_else(|| missing(Role::Output))?,
                query_bias: optional(Role::QueryBias)?,
                key_bias: optional(Role::KeyBias)?,
                value_bias: optional(Role::ValueBias)?,
                output_bias: optional(Role::OutputBias)?,
                query_norm: optional(Role::QueryNorm)?,
                key_norm: optional(Role::KeyNorm)?,
            })),
            BlockShape::Mlp(_) => Ok(Self::Mlp(MlpWeights {
                norm: optional(Role::Norm)?.ok_or_else(|| missing(Role::Norm))?,
                gate: optional(Role::Gate)?,
                up: optional(Role::Up)?.ok_or_else(|| missing(Role::Up))?,
                down: optional(Role::Down)?.ok_or_else(|| missing(Role::Down))?,
                gate_bias: optional(Role::GateBias)?,
                up_bias: optional(Role::UpBias)?,
                down_bias: optional(Role::DownBias)?,
            })),
            BlockShape::Mamba2(_) | BlockShape::Moe(_) => Err(Error::UnsupportedBlock { kind: shape.kind() }),
        }
    }
}

impl Model {
    /// The model whose tensors are what `tensor` gives for each of [`Architecture::tensors`], in that order.
    /// A matrix is `(out, in)`, a vector `(1, n)`.
    ///
    /// # Errors
    /// When a block is of a kind that cannot be run yet, a tensor has another shape than its
    /// specification, and those of `tensor`.
    pub fn from_tensors(
        architecture: &Architecture,
        mut tensor: impl FnMut(&TensorSpec) -> Result<Tensor>,
    ) -> Result<Self> {
        StageWeights::build(architecture, 0..architecture.blocks.len(), |spec| tensor(spec))?.into_model()
    }

    /// A model of this shape with small random matrices (uniform, standard deviation 0.02), ones for norms
    /// and zeros for biases: for measuring speed and for tests. The same seed gives the same weights.
    ///
    /// # Errors
    /// When a block is of a kind that cannot be run yet.
    pub fn random(architecture: &Architecture, seed: u64, operations: &dyn Operations) -> Result<Self> {
        let mut generator = SplitMix64(seed);
        Self::from_tensors(architecture, |spec| {
            let (rows, columns) = matrix_shape(&spec.shape);
            let mut data = vec![if is_norm(spec.role) { 1.0 } else { 0.0 }; rows * columns];
            if spec.shape.len() > 1 {
                let reach = RANDOM_DEVIATION * 3.0_f32.sqrt();
                data.iter_mut()
                    .for_each(|value| *value = reach * generator.symmetric());
            }
            let elements = Elements::rounded(data, read_as(operations, spec.role));
            operations.upload_elements(&elements, rows, columns)
        })?
        .stacked(operations)
    }

    /// Every tensor with what it is for, in the order of [`Architecture::tensors`].
    pub fn tensors(&self) -> Vec<(Role, &Tensor)> {
        let mut tensors = vec![(Role::Embedding, &self.embedding)];
        tensors.extend(self.blocks.iter().flat_map(BlockWeights::tensors));
        tensors.push((Role::FinalNorm, &self.final_norm));
        tensors.extend(self.head.as_ref().map(|head| (Role::Head, head)));
        tensors
    }

    /// Every tensor beside its checkpoint name and shape.
    pub fn named_tensors(&self) -> Vec<(TensorSpec, &Tensor)> {
        let tensors = self.tensors().into_iter().map(|(_, tensor)| tensor);
        self.architecture.tensors().into_iter().zip(tensors).collect()
    }

    /// Every tensor to write, in the order of [`Architecture::tensors`].
    pub fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut tensors = vec![&mut self.embedding];
        tensors.extend(self.blocks.iter_mut().flat_map(BlockWeights::tensors_mut));
        tensors.push(&mut self.final_norm);
        tensors.extend(self.head.as_mut());
        tensors
    }

    /// The same tensors, those that a block reads together stacked where the backend gains by it.
    pub(crate) fn stacked(mut self, operations: &dyn Operations) -> Result<Self> {
        for block in &mut self.blocks {
            block.stack(operations)?;
        }
        Ok(self)
    }
}

/// A weight as blocks read it: a matrix in the backend's activation type, a vector as it is.
pub(crate) fn for_blocks(operations: &dyn Operations, role: Role, tensor: Tensor) -> Result<Tensor> {
    let element_type = read_as(operations, role);
    if tensor.element_type() == element_type {
        return Ok(tensor);
    }
    operations.copy_as(&tensor, element_type)
}

/// What a weight is made of where blocks read it.
pub(crate) fn read_as(operations: &dyn Operations, role: Role) -> ElementType {
    if is_vector(role) {
        ElementType::F32
    } else {
        operations.activation_type()
    }
}

pub(crate) fn is_vector(role: Role) -> bool {
    let bias = matches!(
        role,
        Role::QueryBias
            | Role::KeyBias
            | Role::ValueBias
            | Role::OutputBias
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias
    );
    bias || is_norm(role)
}

fn is_norm(role: Role) -> bool {
    matches!(
        role,
        Role::Norm | Role::FinalNorm | Role::QueryNorm | Role::KeyNorm
    )
}

/// Rows and columns of a handle for a tensor of this shape: a vector is one row.
pub(crate) fn matrix_shape(shape: &[usize]) -> (usize, usize) {
    match shape {
        [] => (1, 1),
        [columns] => (1, *columns),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
    }
}

pub(crate) fn checked(spec: &TensorSpec, tensor: Tensor) -> Result<Tensor> {
    let (rows, columns) = matrix_shape(&spec.shape);
    if (tensor.rows(), tensor.columns()) == (rows, columns) {
        return Ok(tensor);
    }
    Err(Error::TensorShape {
        name: spec.name.clone(),
        expected: spec.shape.clone(),
        found: vec![tensor.rows(), tensor.columns()],
    })
}

/// Steele, Lea and Flood's SplitMix64: small, fast and the same everywhere.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in [-1, 1), from the upper 24 bits, which an f32 holds exactly.
    fn symmetric(&mut self) -> f32 {
        #[allow(clippy::cast_precision_loss)] // 24 bits fit
        let unit = (self.next() >> 40) as f32;
        unit.mul_add(2.0 / 16_777_216.0, -1.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use serde_json::json;

    use super::*;
    use crate::ops::Linear;
    use crate::ops::cpu::CpuOperations;

    #[test]
    fn what_a_block_reads_together_is_stacked_in_the_order_in_which_it_reads_it() {
        let config = json!({
            "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 8, "intermediate_size": 12,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9,
            "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        });
        let architecture = Architecture::from_config(&config).unwrap();
        let mut model = Model::random(&architecture, 1, &CpuOperations::new()).unwrap();
        for block in &mut model.blocks {
            let copy = block.clone();
            let layers: Vec<Linear<'_>> = match &copy {
                BlockWeights::Attention(weights) => weights.projections().into(),
                BlockWeights::Mlp(weights) => weights.input_layers(),
            };
            let biases = layers.iter().filter_map(|layer| layer.bias).collect();
            let read: [Vec<&Tensor>; 2] = [layers.iter().map(|layer| layer.weight).collect(), biases];
            let held = copy.tensors();
            let of_role = |role: &Role| held.iter().find(|(held, _)| held == role);
            let grouped: Vec<Vec<&Tensor>> = block
                .groups()
                .iter()
                .map(|roles| {
                    roles
                        .iter()
                        .filter_map(of_role)
                        .map(|(_, tensor)| *tensor)
                        .collect()
                })
                .collect();
            assert_eq!(grouped.concat().len(), held.len(), "every tensor is in one group");
            let stacked = block.read_together();
            assert_eq!(stacked.len(), 2);
            for stacked in stacked.iter().filter(|stacked| !stacked.is_empty()) {
                let group = grouped.iter().filter(|group| !group.is_empty());
                let group = group
                    .clone()
                    .find(|group| group[0].shares_storage_with(stacked[0]))
                    .unwrap();
                assert_eq!(group.len(), stacked.len());
                assert!(
                    group
                        .iter()
                        .zip(stacked)
                        .all(|(one, other)| one.shares_storage_with(other))
                );
            }
            for (stacked, read) in stacked.into_iter().zip(read) {
                assert_eq!(stacked.len(), read.len());
                for (stacked, read) in stacked.into_iter().zip(read) {
                    assert!(stacked.shares_storage_with(read));
                }
            }
        }
    }
}
