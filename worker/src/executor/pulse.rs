//! Whether an attempt is alive, apart from how far it has come: a count that every operation of the backend
//! and every chance to stop raises. Who looks at it knows a long silence from a hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use espalier_arch::{Architecture, Attention};
use espalier_model::collective::Gang;
use espalier_model::collective::mesh::Mesh;
use espalier_model::ops::{
    AdamWParameter, AdamWStep, Axis, Head, HeadGradient, KvCache, Layout, Linear, LinearGradient, Losses,
    Operations, Pending, RopeTable, TokenBatch,
};
use espalier_model::{ElementType, Result, Tensor};

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
            fn activation_type(&self) -> ElementType {
                self.inner.activation_type()
            }

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
    prepare(architecture: &Architecture) -> ();
    gang(mesh: Arc<Mesh>) -> Arc<dyn Gang>;
    zeros(rows: usize, columns: usize, element_type: ElementType) -> Tensor;
    upload(data: &[f32], rows: usize, columns: usize) -> Tensor;
    download(tensor: &Tensor) -> Vec<f32>;
    copy_as(tensor: &Tensor, element_type: ElementType) -> Tensor;
    concatenate(tensors: &[&Tensor]) -> Tensor;
    stack(tensors: Vec<Tensor>) -> Vec<Tensor>;
    flatten(
        parts: &[(usize, &Tensor)], rows: usize, columns: usize, element_type: ElementType
    ) -> Tensor;
    clear(tensors: &mut [&mut Tensor]) -> ();
    gather(tensor: &Tensor, indices: &[usize], axis: Axis) -> Tensor;
    tokens(ids: &[u32], targets: Option<&[Option<u32>]>) -> TokenBatch;
    embedding(table: &Tensor, tokens: &TokenBatch) -> Tensor;
    embedding_backward(grad_output: &Tensor, tokens: &TokenBatch, grad_table: &mut Tensor) -> ();
    linear(x: &Tensor, layer: Linear<'_>) -> Tensor;
    linear_many(x: &Tensor, layers: &[Linear<'_>]) -> Vec<Tensor>;
    linear_residual(x: &Tensor, layer: Linear<'_>, residual: &Tensor) -> Tensor;
    linear_backward_input(layers: &[(&Tensor, &Tensor)]) -> Tensor;
    linear_backward_weight(x: &Tensor, layers: &mut [LinearGradient<'_>]) -> ();
    rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> (Tensor, Tensor);
    rms_norm_backward(
        grad_output: &Tensor, x: &Tensor, weight: &Tensor, reciprocal: &Tensor, residual: Option<Tensor>,
        grad_weight: &mut Tensor
    ) -> Tensor;
    rope(
        q: &mut Tensor, k: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout,
        first_position: usize
    ) -> ();
    rope_backward(
        grad_q: &mut Tensor, grad_k: &mut Tensor, head_dim: usize, table: &RopeTable, layout: Layout
    ) -> ();
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
    likeliest(logits: &Tensor) -> Vec<u32>;
    cross_entropy(head: Head<'_>, targets: &TokenBatch, gradient: Option<HeadGradient<'_>>) -> Losses;
    distillation(student: Head<'_>, parent: Head<'_>, gradient: Option<HeadGradient<'_>>) -> Losses;
    distillation_many(students: &[Head<'_>], parent: Head<'_>) -> Vec<Tensor>;
    column_squares(x: &Tensor) -> Vec<f64>;
    tile_products(a: &Tensor, b: &Tensor, tile: usize) -> Vec<f64>;
    measure(gradients: &[&Tensor], losses: &[Tensor]) -> Tensor;
    update(parameters: &mut [AdamWParameter<'_>], step: AdamWStep, measured: &Tensor) -> Box<dyn Pending>;
}
