//! The CPU backend: f32, threads by rayon, vector units chosen at run time.
//!
//! Here lives the list of operations; each is written in the room that its body names. Nothing here
//! knows blocks, models or files. Same inputs give the same bits, whatever the number of threads.

mod adamw;
mod attention;
mod attention_backward;
mod cached;
mod elementwise;
mod linear;
mod loss;
mod matmul;
mod norm;
mod rope;
mod rows;
mod simd;
#[cfg(test)]
mod tests;

use espalier_arch::Attention;

use super::{AdamWParameter, AdamWStep, Head, HeadGradient, KvCache, Layout, Operations, RopeTable};
use crate::{Result, Tensor};

/// Operations on the host's processor and memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuOperations;

impl CpuOperations {
    /// A backend on rayon's threads (`RAYON_NUM_THREADS`, else one a core).
    pub fn new() -> Self {
        Self
    }
}

impl Operations for CpuOperations {
    fn zeros(&self, rows: usize, columns: usize) -> Result<Tensor> {
        Tensor::zeros(rows, columns)
    }

    fn upload(&self, data: &[f32], rows: usize, columns: usize) -> Result<Tensor> {
        rows::expect(
            "upload",
            rows.checked_mul(columns) == Some(data.len()),
            || format!("{rows} x {columns} elements"),
            || format!("{} elements", data.len()),
        )?;
        let mut tensor = Tensor::unspecified(rows, columns)?;
        rows::for_each_row(&mut tensor, |index, out| {
            out.copy_from_slice(&data[index * columns..(index + 1) * columns]);
        })?;
        Ok(tensor)
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let mut data = Vec::with_capacity(tensor.len());
        for index in 0..tensor.rows() {
            data.extend_from_slice(rows::row(tensor, index));
        }
        Ok(data)
    }

    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor> {
        elementwise::contiguous(tensor)
    }

    fn add_assign(&self, target: &mut Tensor, source: &Tensor) -> Result<()> {
        elementwise::add_assign(target, source)
    }

    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        elementwise::add(a, b)
    }

    fn sum_of_squares(&self, tensor: &Tensor) -> Result<f64> {
        Ok(elementwise::sum_of_squares(tensor))
    }

    fn embedding(&self, table: &Tensor, tokens: &[u32]) -> Result<Tensor> {
        elementwise::embedding(table, tokens)
    }

    fn embedding_backward(
        &self,
        grad_output: &Tensor,
        tokens: &[u32],
        grad_table: &mut Tensor,
    ) -> Result<()> {
        elementwise::embedding_backward(grad_output, tokens, grad_table)
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        linear::forward(x, weight, bias, None)
    }

    fn linear_residual(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        residual: &Tensor,
    ) -> Result<Tensor> {
        linear::forward(x, weight, bias, Some(residual))
    }

    fn linear_backward_input(
        &self,
        grad_output: &Tensor,
        weight: &Tensor,
        grad_x: &mut Tensor,
        accumulate: bool,
    ) -> Result<()> {
        linear::backward_input(grad_output, weight, grad_x, accumulate)
    }

    fn linear_backward_weight(
        &self,
        grad_output: &Tensor,
        x: &Tensor,
        grad_weight: &mut Tensor,
        grad_bias: Option<&mut Tensor>,
    ) -> Result<()> {
        linear::backward_weight(grad_output, x, grad_weight, grad_bias)
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
        grad_x: &mut Tensor,
        grad_weight: Option<&mut Tensor>,
    ) -> Result<()> {
        norm::backward(grad_output, x, weight, reciprocal, grad_x, grad_weight)
    }

    fn rope(
        &self,
        x: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
        first_position: usize,
    ) -> Result<()> {
        rope::rotate(
            x,
            head_dim,
            table,
            layout,
            first_position,
            rope::Direction::Forward,
        )
    }

    fn rope_backward(
        &self,
        grad: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
    ) -> Result<()> {
        rope::rotate(grad, head_dim, table, layout, 0, rope::Direction::Backward)
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
        linear::forward(head.hidden, head.weight, None, None)
    }

    fn cross_entropy(
        &self,
        head: Head<'_>,
        targets: &[Option<u32>],
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Vec<f32>> {
        loss::cross_entropy(head, targets, gradient)
    }

    fn distillation(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Vec<f32>> {
        loss::distillation(student, parent, gradient)
    }

    fn distillation_many(&self, students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Vec<f32>>> {
        loss::distillation_many(students, parent)
    }

    fn adamw(&self, parameters: &mut [AdamWParameter<'_>], step: AdamWStep) -> Result<()> {
        adamw::step(parameters, step)
    }
}
