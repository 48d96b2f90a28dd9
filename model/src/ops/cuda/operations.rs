//! The operation set over a [`CudaDevice`]: makes the results, and lets the device's methods write them.
//!
//! Shapes, element types and leading dimensions are checked there. What takes more than a call is in the rooms
//! below: tensors and their copies, linear layers, attention, decoding, losses, the update.

mod attention;
mod decoding;
mod linear;
mod loss;
mod tensors;
mod update;

use std::collections::BTreeSet;
use std::sync::Arc;

use espalier_arch::{Architecture, Attention, BlockShape};

use decoding::CudaDecoding;

use super::device::{CudaDevice, Options};
use super::matrix::{Element, Matrix};
use super::rope::{RopeAngles, Rotation};
use super::{AttentionShape, KernelNeeds, Mark};
use crate::collective::Gang;
use crate::collective::MeshGang;
use crate::collective::mesh::Mesh;
use crate::ops::decoding::Decoding;
use crate::ops::{
    Accelerator, AdamWParameter, AdamWStep, Axis, Completion, CudaTokens, Head, HeadGradient, KvCache,
    Layout, Linear, LinearGradient, Losses, Operations, Pending, RopeTable, TokenBatch,
};
use crate::{Device, ElementType, Elements, Result, Tensor};

/// Operations on one GPU: bf16 activations, f32 sums. Clones share the device.
#[derive(Debug, Clone)]
pub struct CudaOperations {
    device: Arc<CudaDevice>,
}

impl CudaOperations {
    /// Opens the `index`th device.
    ///
    /// # Errors
    /// Those of [`CudaDevice::open`].
    pub fn open(index: u32, options: Options) -> Result<Self> {
        Ok(Self {
            device: Arc::new(CudaDevice::open(index, options)?),
        })
    }

    /// The device: its memory, its streams, what is known of it.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn tensor(&self, matrix: Matrix) -> Result<Tensor> {
        Tensor::on_cuda(matrix, self.device.info.index)
    }

    fn bf16(&self, rows: usize, columns: usize) -> Result<Matrix> {
        Ok(self.device.matrix(Element::Bf16, rows, columns)?)
    }

    fn f32(&self, rows: usize, columns: usize) -> Result<Matrix> {
        Ok(self.device.matrix(Element::F32, rows, columns)?)
    }

    /// A new bf16 matrix of `x`'s shape, and what `write` made of it.
    fn like(&self, x: &Matrix, write: impl FnOnce(&Matrix) -> super::Result<()>) -> Result<Tensor> {
        let output = self.bf16(x.rows(), x.columns())?;
        write(&output)?;
        self.tensor(output)
    }

    #[allow(clippy::too_many_arguments)] // two tensors, their table, and where they stand
    fn turn(
        &self,
        q: &Tensor,
        k: &Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
        first_position: usize,
        rotation: Rotation,
    ) -> Result<()> {
        let (cosine, sine) = (table.cosine.cuda()?, table.sine.cuda()?);
        let angles = RopeAngles {
            cosine: &cosine,
            sine: &sine,
        };
        let (q, k) = (q.cuda()?, k.cuda()?);
        let tokens = layout.tokens;
        Ok(self
            .device
            .rope(&q, Some(&k), angles, head_dim, tokens, first_position, rotation)?)
    }
}

/// What attention of this shape runs over.
fn attention_shape(shape: &Attention, layout: Layout) -> AttentionShape {
    AttentionShape {
        head_dim: shape.head_dim,
        sequences: layout.sequences,
        window: shape.sliding_window.unwrap_or(0),
    }
}

impl Completion for Mark {
    fn is_reached(&self) -> Result<bool> {
        Ok(Mark::is_reached(self)?)
    }
}

impl Operations for CudaOperations {
    fn activation_type(&self) -> ElementType {
        ElementType::Bf16
    }

    fn accelerator(&self) -> Option<Accelerator> {
        let info = self.device.info();
        Some(Accelerator {
            device: Device::Cuda(info.index),
            name: info.name.clone(),
            cache_bytes: info.cache,
            memory_limit: self.device.memory_limit(),
            memory_in_use: self.device.usage().in_use,
        })
    }

    fn wait(&self) -> Result<()> {
        Ok(self.device.wait()?)
    }

    fn mark(&self) -> Result<Option<Box<dyn Completion>>> {
        // What is recorded is not asked for yet, and no replay would pass a mark of this time.
        if self.device.recorder().is_recording() {
            return Ok(None);
        }
        Ok(Some(Box::new(self.device.compute().mark()?)))
    }

    fn prepare(&self, architecture: &Architecture) -> Result<()> {
        let mut needs = KernelNeeds::default();
        let mut norms = BTreeSet::from([architecture.hidden]);
        let mut heads = BTreeSet::new();
        for block in &architecture.blocks {
            if let BlockShape::Attention(shape) = &block.shape {
                heads.insert(shape.head_dim);
                norms.extend(shape.qk_norm.then_some(shape.head_dim));
            }
        }
        needs.norm_widths.extend(norms);
        needs.head_dims.extend(heads);
        Ok(self.device.prepare(&needs)?)
    }

    fn gang(&self, mesh: Arc<Mesh>) -> Result<Arc<dyn Gang>> {
        Ok(Arc::new(MeshGang::of_gpus(mesh, &self.device)?))
    }

    fn zeros(&self, rows: usize, columns: usize, element_type: ElementType) -> Result<Tensor> {
        self.tensor(self.device.zeros(element_type.into(), rows, columns)?)
    }

    fn upload(&self, data: &[f32], rows: usize, columns: usize) -> Result<Tensor> {
        self.tensor(self.device.upload_f32(data, rows, columns)?)
    }

    fn upload_elements(&self, elements: &Elements, rows: usize, columns: usize) -> Result<Tensor> {
        match elements {
            Elements::F32(values) => self.upload(values, rows, columns),
            Elements::Bf16(bits) => self.tensor(self.device.upload(Element::Bf16, bits, rows, columns)?),
        }
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        Ok(self.device.download(&tensor.cuda()?)?)
    }

    fn copy_as(&self, tensor: &Tensor, element_type: ElementType) -> Result<Tensor> {
        let source = tensor.cuda()?;
        let target = self
            .device
            .matrix(element_type.into(), source.rows(), source.columns())?;
        self.device.cast(&target, &source)?;
        self.tensor(target)
    }

    fn concatenate(&self, tensors: &[&Tensor]) -> Result<Tensor> {
        self.one_below_the_other(tensors.iter().copied())
    }

    fn stack(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.stacked(tensors)
    }

    fn flatten(
        &self,
        parts: &[(usize, &Tensor)],
        rows: usize,
        columns: usize,
        element_type: ElementType,
    ) -> Result<Tensor> {
        self.flattened(parts, rows, columns, element_type)
    }

    fn clear(&self, tensors: &mut [&mut Tensor]) -> Result<()> {
        for tensor in tensors {
            self.device.clear(&tensor.cuda()?)?;
        }
        Ok(())
    }

    fn gather(&self, tensor: &Tensor, indices: &[usize], axis: Axis) -> Result<Tensor> {
        self.gathered(tensor, indices, axis)
    }

    fn tokens(&self, ids: &[u32], targets: Option<&[Option<u32>]>) -> Result<TokenBatch> {
        let bound = ids.iter().max().map_or(0, |&largest| largest as usize + 1);
        // A target that no i32 holds is above every vocabulary: `expect_targets` refuses it by its own value.
        let number = |target: &Option<u32>| target.map_or(-1, |id| i32::try_from(id).unwrap_or(i32::MAX));
        let row: Vec<i32> = targets.unwrap_or_default().iter().map(number).collect();
        let (on_device, row) = self.device.tokens_with(ids, bound, &row)?;
        let tokens = CudaTokens {
            ids: on_device,
            targets: row,
        };
        Ok(TokenBatch::on_cuda(tokens, ids, targets))
    }

    fn embedding(&self, table: &Tensor, tokens: &TokenBatch) -> Result<Tensor> {
        tokens.expect_ids("embedding", table.rows())?;
        let output = self.bf16(tokens.rows(), table.columns())?;
        self.device
            .embedding(&table.cuda()?, &tokens.cuda()?.ids, &output)?;
        self.tensor(output)
    }

    fn embedding_backward(
        &self,
        grad_output: &Tensor,
        tokens: &TokenBatch,
        grad_table: &mut Tensor,
    ) -> Result<()> {
        tokens.expect_ids("embedding_backward", grad_table.rows())?;
        let (grad_output, table) = (grad_output.cuda()?, grad_table.cuda()?);
        let ids = &tokens.cuda()?.ids;
        Ok(self.device.embedding_backward(&grad_output, ids, &table)?)
    }

    fn linear(&self, x: &Tensor, layer: Linear<'_>) -> Result<Tensor> {
        self.forward(x, layer, None)
    }

    fn linear_many(&self, x: &Tensor, layers: &[Linear<'_>]) -> Result<Vec<Tensor>> {
        self.forward_many(x, layers)
    }

    fn linear_residual(&self, x: &Tensor, layer: Linear<'_>, residual: &Tensor) -> Result<Tensor> {
        self.forward(x, layer, Some(residual))
    }

    fn linear_backward_input(&self, layers: &[(&Tensor, &Tensor)]) -> Result<Tensor> {
        self.backward_input(layers)
    }

    fn linear_backward_weight(&self, x: &Tensor, layers: &mut [LinearGradient<'_>]) -> Result<()> {
        self.backward_weight(x, layers)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)> {
        let (x, weight) = (x.cuda()?, weight.cuda()?);
        // The device refuses groups that do not divide the row.
        let reciprocal = self.f32(x.rows(), x.columns() / weight.len().max(1))?;
        #[allow(clippy::cast_possible_truncation)] // the kernel's own precision
        let epsilon = epsilon as f32;
        let output = self.like(&x, |output| {
            self.device
                .rms_norm(&x, None, &weight, output, &reciprocal, epsilon)
        })?;
        Ok((output, self.tensor(reciprocal)?))
    }

    fn rms_norm_backward(
        &self,
        grad_output: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        reciprocal: &Tensor,
        residual: Option<Tensor>,
        grad_weight: &mut Tensor,
    ) -> Result<Tensor> {
        let add = residual.is_some();
        let grad_x = match residual {
            Some(residual) => residual,
            None => self.tensor(self.bf16(x.rows(), x.columns())?)?,
        };
        self.device.rms_norm_backward(
            &grad_output.cuda()?,
            &x.cuda()?,
            &weight.cuda()?,
            &reciprocal.cuda()?,
            &grad_x.cuda()?,
            add,
            Some(&grad_weight.cuda()?),
        )?;
        Ok(grad_x)
    }

    fn rope(
        &self,
        q: &mut Tensor,
        k: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
        first_position: usize,
    ) -> Result<()> {
        self.turn(q, k, head_dim, table, layout, first_position, Rotation::Forward)
    }

    fn rope_backward(
        &self,
        grad_q: &mut Tensor,
        grad_k: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
    ) -> Result<()> {
        self.turn(grad_q, grad_k, head_dim, table, layout, 0, Rotation::Backward)
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor)> {
        self.attend([q, k, v], shape, layout)
    }

    fn attention_backward(
        &self,
        grad_output: &Tensor,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        output: &Tensor,
        log_sums: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        self.attend_backward(grad_output, [q, k, v], (output, log_sums), shape, layout)
    }

    fn attention_cached(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cache: &mut KvCache,
        shape: &Attention,
        layout: Layout,
    ) -> Result<Tensor> {
        self.attend_cached([q, k, v], cache, shape, layout)
    }

    fn decoding(&self, sequences: usize, architecture: &Architecture) -> Result<Option<Box<dyn Decoding>>> {
        let served = |block: &BlockShape| match block {
            BlockShape::Attention(shape) => matches!(shape.head_dim, 16 | 32 | 64 | 128),
            _ => true,
        };
        if sequences == 0 || !architecture.blocks.iter().all(|block| served(&block.shape)) {
            return Ok(None);
        }
        let decoding = CudaDecoding::new(self, sequences, architecture.vocab_size)?;
        Ok(Some(Box::new(decoding)))
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let (gate, up) = (gate.cuda()?, up.cuda()?);
        self.like(&gate, |output| self.device.swiglu(&gate, &up, output))
    }

    fn swiglu_backward(&self, grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)> {
        let (grad_output, gate, up) = (grad_output.cuda()?, gate.cuda()?, up.cuda()?);
        // Side by side as `linear_many` takes the two, so that their products are one.
        let channels = up.columns();
        let both = self.bf16(up.rows(), 2 * channels)?;
        let (grad_up, grad_gate) = (
            both.narrow_columns(0, channels)?,
            both.narrow_columns(channels, channels)?,
        );
        self.device
            .swiglu_backward(&grad_output, &gate, &up, &grad_gate, &grad_up)?;
        Ok((self.tensor(grad_gate)?, self.tensor(grad_up)?))
    }

    fn relu_squared(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.cuda()?;
        self.like(&x, |output| self.device.relu_squared(&x, output))
    }

    fn relu_squared_backward(&self, grad_output: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (grad_output, x) = (grad_output.cuda()?, x.cuda()?);
        self.like(&x, |grad_x| {
            self.device.relu_squared_backward(&grad_output, &x, grad_x)
        })
    }

    fn logits(&self, head: Head<'_>) -> Result<Tensor> {
        let logits = self.f32(head.hidden.rows(), head.weight.rows())?;
        self.write_logits(&head.hidden.cuda()?, &head.weight.cuda()?, &logits)?;
        self.tensor(logits)
    }

    fn likeliest(&self, logits: &Tensor) -> Result<Vec<u32>> {
        let tokens = self.device.matrix(Element::I32, 1, logits.rows())?;
        self.device.argmax(&logits.cuda()?, &tokens, None)?;
        let tokens = self.device.download_i32(&tokens)?;
        Ok(tokens.into_iter().map(i32::unsigned_abs).collect())
    }

    fn cross_entropy(
        &self,
        head: Head<'_>,
        targets: &TokenBatch,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        targets.expect_targets("cross_entropy", head.hidden.rows(), head.weight.rows())?;
        self.cross_entropy_of(head, &targets.cuda()?.targets, gradient)
    }

    fn distillation(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        self.distillation_of(student, parent, gradient)
    }

    fn distillation_many(&self, students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Tensor>> {
        self.distillation_of_many(students, parent)
    }

    fn column_squares(&self, x: &Tensor) -> Result<Vec<f64>> {
        self.squares_of_columns(x)
    }

    fn tile_products(&self, a: &Tensor, b: &Tensor, tile: usize) -> Result<Vec<f64>> {
        self.products_of_tiles(a, b, tile)
    }

    fn measure(&self, gradients: &[&Tensor], losses: &[Tensor]) -> Result<Tensor> {
        let gradients = gradients.iter().map(|gradient| gradient.cuda());
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        let losses = losses.iter().map(Tensor::cuda).collect::<Result<Vec<_>>>()?;
        self.tensor(self.device.measure(&gradients, &losses)?)
    }

    fn update(
        &self,
        parameters: &mut [AdamWParameter<'_>],
        step: AdamWStep,
        measured: &Tensor,
    ) -> Result<Box<dyn Pending>> {
        self.updated(parameters, step, measured)
    }
}
