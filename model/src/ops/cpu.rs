//! The CPU backend: f32, threads by rayon, vector units chosen at run time.
//!
//! Here lives the list of operations; each is written in the room that its body names. Nothing here
//! knows blocks, models or files. Same inputs give the same bits, whatever the number of threads.

mod adamw;
mod attention;
mod attention_backward;
mod cached;
mod elementwise;
mod flat;
mod linear;
mod loss;
mod matmul;
mod norm;
mod rope;
mod rows;
mod simd;
mod statistics;
#[cfg(test)]
mod tests;

use espalier_arch::Attention;

use super::{
    AdamWParameter, AdamWStep, Axis, Head, HeadGradient, HostTokens, KvCache, Layout, Linear, LinearGradient,
    Losses, Operations, Pending, RopeTable, TokenBatch,
};
use crate::{ElementType, Elements, Error, Result, Tensor};

/// Operations on the host's processor and memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuOperations;

impl CpuOperations {
    /// A backend on rayon's threads (`RAYON_NUM_THREADS`, else one a core).
    pub fn new() -> Self {
        Self
    }

    /// Refuses what this backend cannot hold.
    fn expect_f32(element_type: ElementType) -> Result<()> {
        match element_type {
            ElementType::F32 => Ok(()),
            ElementType::Bf16 => Err(Error::ElementType { element_type }),
        }
    }
}

impl Operations for CpuOperations {
    fn activation_type(&self) -> ElementType {
        ElementType::F32
    }

    fn zeros(&self, rows: usize, columns: usize, element_type: ElementType) -> Result<Tensor> {
        Self::expect_f32(element_type)?;
        Tensor::zeros(rows, columns)
    }

    fn upload(&self, data: &[f32], rows: usize, columns: usize) -> Result<Tensor> {
        elementwise::upload(data, rows, columns)
    }

    fn upload_elements(&self, elements: &Elements, rows: usize, columns: usize) -> Result<Tensor> {
        match elements {
            Elements::F32(values) => self.upload(values, rows, columns),
            Elements::Bf16(_) => Err(Error::ElementType {
                element_type: ElementType::Bf16,
            }),
        }
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let rows = rows::Rows::of(tensor)?;
        let mut data = Vec::with_capacity(tensor.len());
        for index in 0..tensor.rows() {
            data.extend_from_slice(rows.row(index));
        }
        Ok(data)
    }

    fn copy_as(&self, tensor: &Tensor, element_type: ElementType) -> Result<Tensor> {
        Self::expect_f32(element_type)?;
        elementwise::contiguous(tensor)
    }

    fn concatenate(&self, tensors: &[&Tensor]) -> Result<Tensor> {
        elementwise::concatenate(tensors)
    }

    fn flatten(
        &self,
        parts: &[(usize, &Tensor)],
        rows: usize,
        columns: usize,
        element_type: ElementType,
    ) -> Result<Tensor> {
        Self::expect_f32(element_type)?;
        flat::flatten(parts, rows, columns)
    }

    fn clear(&self, tensors: &mut [&mut Tensor]) -> Result<()> {
        flat::clear(tensors)
    }

    fn gather(&self, tensor: &Tensor, indices: &[usize], axis: Axis) -> Result<Tensor> {
        elementwise::gather(tensor, indices, axis)
    }

    fn tokens(&self, ids: &[u32], targets: Option<&[Option<u32>]>) -> Result<TokenBatch> {
        let tokens = HostTokens::new(ids, targets)?;
        Ok(TokenBatch::on_host(tokens, targets.is_some()))
    }

    fn embedding(&self, table: &Tensor, tokens: &TokenBatch) -> Result<Tensor> {
        elementwise::embedding(table, tokens)
    }

    fn embedding_backward(
        &self,
        grad_output: &Tensor,
        tokens: &TokenBatch,
        grad_table: &mut Tensor,
    ) -> Result<()> {
        elementwise::embedding_backward(grad_output, tokens, grad_table)
    }

    fn linear(&self, x: &Tensor, layer: Linear<'_>) -> Result<Tensor> {
        linear::forward(x, layer, None)
    }

    fn linear_residual(&self, x: &Tensor, layer: Linear<'_>, residual: &Tensor) -> Result<Tensor> {
        linear::forward(x, layer, Some(residual))
    }

    fn linear_backward_input(&self, layers: &[(&Tensor, &Tensor)]) -> Result<Tensor> {
        linear::backward_input(layers)
    }

    fn linear_backward_weight(&self, x: &Tensor, layers: &mut [LinearGradient<'_>]) -> Result<()> {
        layers
            .iter_mut()
            .try_for_each(|layer| linear::backward_weight(x, layer))
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)> {
        norm::forward(x, weight, epsilon)
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
        norm::backward(grad_output, x, weight, reciprocal, residual, grad_weight)
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
        let turn = rope::Turn::forward(head_dim, table, layout, first_position)?;
        turn.rotate(q)?;
        turn.rotate(k)
    }

    fn rope_backward(
        &self,
        grad_q: &mut Tensor,
        grad_k: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
    ) -> Result<()> {
        let turn = rope::Turn::backward(head_dim, table, layout)?;
        turn.rotate(grad_q)?;
        turn.rotate(grad_k)
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor)> {
        attention::forward(q, k, v, shape, layout)
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
        let saved = attention_backward::Saved {
            grad_output,
            q,
            k,
            v,
            output,
            log_sums,
        };
        attention_backward::backward(&saved, shape, layout)
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
        cached::attention(q, k, v, cache, shape, layout)
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        elementwise::swiglu(gate, up)
    }

    fn swiglu_backward(&self, grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)> {
        elementwise::swiglu_backward(grad_output, gate, up)
    }

    fn relu_squared(&self, x: &Tensor) -> Result<Tensor> {
        elementwise::relu_squared(x)
    }

    fn relu_squared_backward(&self, grad_output: &Tensor, x: &Tensor) -> Result<Tensor> {
        elementwise::relu_squared_backward(grad_output, x)
    }

    fn logits(&self, head: Head<'_>) -> Result<Tensor> {
        let layer = Linear {
            weight: head.weight,
            bias: None,
        };
        linear::forward(head.hidden, layer, None)
    }

    fn likeliest(&self, logits: &Tensor) -> Result<Vec<u32>> {
        statistics::likeliest(logits)
    }

    fn cross_entropy(
        &self,
        head: Head<'_>,
        targets: &TokenBatch,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        loss::cross_entropy(head, targets, gradient)
    }

    fn distillation(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses> {
        loss::distillation(student, parent, gradient)
    }

    fn distillation_many(&self, students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Tensor>> {
        loss::distillation_many(students, parent)
    }

    fn column_squares(&self, x: &Tensor) -> Result<Vec<f64>> {
        statistics::column_squares(x)
    }

    fn tile_products(&self, a: &Tensor, b: &Tensor, tile: usize) -> Result<Vec<f64>> {
        statistics::tile_products(a, b, tile)
    }

    fn measure(&self, gradients: &[&Tensor], losses: &[Tensor]) -> Result<Tensor> {
        adamw::measure(gradients, losses)
    }

    fn update(
        &self,
        parameters: &mut [AdamWParameter<'_>],
        step: AdamWStep,
        measured: &Tensor,
    ) -> Result<Box<dyn Pending>> {
        Ok(Box::new(adamw::update(parameters, step, measured)?))
    }
}
