//! Whether an attempt is alive, apart from how far it has come: a count that every operation of the backend
//! and every chance to stop raises. Who looks at it knows a long silence from a hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use espalier_arch::Attention;
use espalier_model::ops::{
    AdamWParameter, AdamWStep, Head, HeadGradient, KvCache, Layout, Operations, RopeTable,
};
use espalier_model::{Result, Tensor};

/// The count. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Pulse(Arc<AtomicU64>);

impl Pulse {
    /// Something was done.
    pub(super) fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How much was done so far.
    pub fn beats(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A backend whose every operation is a beat.
#[derive(Debug)]
pub(super) struct Beating {
    inner: Box<dyn Operations>,
    pulse: Pulse,
}

impl Beating {
    pub(super) fn new(inner: Box<dyn Operations>, pulse: Pulse) -> Self {
        Self { inner, pulse }
    }
}

/// Passes every operation on, and then counts it.
macro_rules! beating {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl Operations for Beating {
            $(
                #[allow(clippy::too_many_arguments)] // the operation's own
                fn $name(&self, $($argument: $type),*) -> Result<$answer> {
                    let answer = self.inner.$name($($argument),*);
                    self.pulse.beat();
                    answer
                }
            )*
        }
    };
}

beating! {
    zeros(rows: usize, columns: usize) -> Tensor;
    upload(data: &[f32], rows: usize, columns: usize) -> Tensor;
    download(tensor: &Tensor) -> Vec<f32>;
    contiguous(tensor: &Tensor) -> Tensor;
    add_assign(target: &mut Tensor, source: &Tensor) -> ();
    add(a: &Tensor, b: &Tensor) -> Tensor;
    sum_of_squares(tensor: &Tensor) -> f64;
    embedding(table: &Tensor, tokens: &[u32]) -> Tensor;
    embedding_backward(grad_output: &Tensor, tokens: &[u32], grad_table: &mut Tensor) -> ();
    linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor;
    linear_residual(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, residual: &Tensor) -> Tensor;
    linear_backward_input(grad_output: &Tensor, weight: &Tensor, grad_x: &mut Tensor, accumulate: bool) -> ();
    linear_backward_weight(
        grad_output: &Tensor, x: &Tensor, grad_weight: &mut Tensor, grad_bias: Option<&mut Tensor>
    ) -> ();
    rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> (Tensor, Tensor);
    rms_norm_backward(
        grad_output: &Tensor, x: &Tensor, weight: &Tensor, reciprocal: &Tensor, grad_x: &mut Tensor,
        grad_weight: Option<&mut Tensor>
    ) -> ();
    rope(x: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout, first_position: usize) -> ();
    rope_backward(grad: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout) -> ();
    attention(q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention, layout: Layout) -> (Tensor, Tensor);
    attention_backward(
        grad_output: &Tensor, q: &Tensor, k: &Tensor, v: &Tensor, output: &Tensor, log_sums: &Tensor,
        shape: &Attention, layout: Layout
    ) -> (Tensor, Tensor, Tensor);
    attention_cached(
        q: &Tensor, k: &Tensor, v: &Tensor, cache: &mut KvCache, shape: &Attention, layout: Layout
    ) -> Tensor;
    swiglu(gate: &Tensor, up: &Tensor) -> Tensor;
    swiglu_backward(grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> (Tensor, Tensor);
    relu_squared(x: &Tensor) -> Tensor;
    relu_squared_backward(grad_output: &Tensor, x: &Tensor) -> Tensor;
    logits(head: Head<'_>) -> Tensor;
    cross_entropy(
        head: Head<'_>, targets: &[Option<u32>], gradient: Option<HeadGradient<'_>>
    ) -> Vec<f32>;
    distillation(student: Head<'_>, parent: Head<'_>, gradient: Option<HeadGradient<'_>>) -> Vec<f32>;
    distillation_many(students: &[Head<'_>], parent: Head<'_>) -> Vec<Vec<f32>>;
    adamw(parameters: &mut [AdamWParameter<'_>], step: AdamWStep) -> ();
}
