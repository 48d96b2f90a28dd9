//! The narrow set of operations that every block, loss and optimiser is written over.
//!
//! Each has a forward and an explicit backward. Gradients of activations come as new tensors; gradients of
//! weights are *added* to those given, so that accumulation needs no second buffer. Activations are
//! `(tokens, features)` with row `sequence * tokens_per_sequence + position`; weights are `(out, in)` as
//! checkpoints store them. The CPU backend is in [`cpu`], that of NVIDIA GPUs in [`cuda`]; [`open`] chooses.
//!
//! Nothing in a training step asks for an answer on the host but [`Pending::read`]: tokens are brought once a
//! batch, losses stay where they are made, and the update decides by itself about clipping. What does wait
//! for the device says so.

pub(crate) mod check;
pub mod cpu;
pub mod cuda;
pub mod decoding;
mod tokens;

use std::fmt::Debug;
use std::sync::Arc;

use espalier_arch::{Architecture, Attention};

use decoding::Decoding;
pub use tokens::TokenBatch;
pub(crate) use tokens::{CudaTokens, HostTokens};

use crate::collective::mesh::Mesh;
use crate::collective::{Gang, MeshGang};
use crate::{Device, ElementType, Elements, Result, Tensor};

/// The backend of `device`. Its tensors take at most `memory_limit` bytes of a GPU; without one, what is free there
/// when it is opened, less a reserve.
///
/// # Errors
/// When the device is a GPU that is not there, too old or full, or a library that it needs is missing.
pub fn open(device: Device, memory_limit: Option<u64>) -> Result<Box<dyn Operations>> {
    Ok(match device {
        Device::Cpu => Box::new(cpu::CpuOperations::new()),
        Device::Cuda(index) => {
            let options = cuda::Options {
                memory_limit,
                ..cuda::Options::default()
            };
            Box::new(cuda::CudaOperations::open(index, options)?)
        }
    })
}

/// A device beside the host, as plans of how much is done at a time need to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accelerator {
    /// Which.
    pub device: Device,
    /// What its driver calls it.
    pub name: String,
    /// Bytes of its last-level cache.
    pub cache_bytes: u64,
    /// Bytes that tensors may take.
    pub memory_limit: u64,
    /// Bytes that they take now.
    pub memory_in_use: u64,
}

impl Accelerator {
    /// Bytes that further tensors may take.
    pub fn memory_free(&self) -> u64 {
        self.memory_limit.saturating_sub(self.memory_in_use)
    }
}

/// A point in a device's work.
pub trait Completion: Send + Debug {
    /// Whether everything that was asked before it is done. Does not wait.
    ///
    /// # Errors
    /// When that work failed.
    fn is_reached(&self) -> Result<bool>;
}

/// How the rows of an activation are divided into sequences of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
}

impl Layout {
    /// Rows of an activation with this layout.
    pub fn rows(self) -> usize {
        self.sequences * self.tokens
    }
}

/// Cosines and sines of every position and frequency, `(positions, head_dim / 2)` each.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Cosines, already multiplied by the attention factor.
    pub cosine: Tensor,
    /// Sines, already multiplied by the attention factor.
    pub sine: Tensor,
}

/// The head's input: hidden states after the final norm, and the matrix that turns them into logits.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `(tokens, hidden)`.
    pub hidden: &'a Tensor,
    /// `(vocabulary, hidden)`.
    pub weight: &'a Tensor,
}

/// That the gradient of a loss is wanted, and where the head's goes. `scale` multiplies the loss before
/// differentiation (1 / tokens of the whole step gives the gradient of the mean).
#[derive(Debug)]
pub struct HeadGradient<'a> {
    /// `(vocabulary, hidden)`, added to.
    pub weight: &'a mut Tensor,
    /// Factor of the loss.
    pub scale: f32,
}

/// What a loss gives.
#[derive(Debug)]
pub struct Losses {
    /// `(tokens, 1)` in f32, nats, not scaled.
    pub rows: Tensor,
    /// `(tokens, hidden)`: the scaled loss's gradient to the hidden states, when it was wanted.
    pub hidden_gradient: Option<Tensor>,
}

/// A linear layer's weight `(out, in)` and its bias `(1, out)`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `(out, in)`.
    pub weight: &'a Tensor,
    /// `(1, out)`.
    pub bias: Option<&'a Tensor>,
}

/// The gradient of a linear layer's output, and where those of its weight and bias are added.
#[derive(Debug)]
pub struct LinearGradient<'a> {
    /// `(tokens, out)`.
    pub output: &'a Tensor,
    /// `(out, in)`, added to.
    pub weight: &'a mut Tensor,
    /// `(1, out)`, added to.
    pub bias: Option<&'a mut Tensor>,
}

/// Which way a matrix is taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Row by row.
    Rows,
    /// Column by column.
    Columns,
}

/// Keys and values of the tokens seen so far, for one attention block.
#[derive(Debug)]
pub struct KvCache {
    /// `(sequences * capacity, kv_groups * head_dim)`.
    pub keys: Tensor,
    /// `(sequences * capacity, kv_groups * head_dim)`.
    pub values: Tensor,
    /// Tokens of each sequence for which there is room.
    pub capacity: usize,
    /// Tokens of each sequence already there.
    pub length: usize,
}

/// Hyperparameters of AdamW (1711.05101) for one step, and how its gradient is clipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Counts from 1; corrects the moments' bias.
    pub step: u32,
    /// Gradients whose norm over all parameters is larger are shrunk to this norm.
    pub clip: f64,
}

/// One parameter with its gradient and moments, all of one shape, contiguous and f32.
#[derive(Debug)]
pub struct AdamWParameter<'a> {
    /// Updated in place.
    pub value: &'a mut Tensor,
    /// Read, then set to zero.
    pub gradient: &'a mut Tensor,
    /// Updated in place.
    pub first_moment: &'a mut Tensor,
    /// Updated in place.
    pub second_moment: &'a mut Tensor,
    /// Becomes the value, rounded to its own element type, where the blocks read a copy of lesser precision.
    pub working: Option<&'a mut Tensor>,
}

/// Entries of one of the sums that [`Operations::measure`] gives: three f32 hold what an f64 does.
pub const PARTS: usize = 3;
/// Entries that [`Operations::measure`] gives: those of the losses, then those of the gradient's squares.
pub const MEASURED: usize = 2 * PARTS;

/// What an update found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Updated {
    /// Sum of every loss measured.
    pub loss: f64,
    /// Norm of the gradient over all parameters, before clipping.
    pub gradient_norm: f64,
}

impl Updated {
    /// Whether the parameters were updated; else they and their moments are as they were.
    pub fn is_applied(&self) -> bool {
        self.loss.is_finite() && self.gradient_norm.is_finite()
    }
}

/// An update on its way.
pub trait Pending: Send + Debug {
    /// Whether [`Pending::read`] would not wait.
    fn is_ready(&self) -> bool;
    /// Waits for the device.
    ///
    /// # Errors
    /// When the device failed meanwhile.
    fn read(self: Box<Self>) -> Result<Updated>;
}

impl Pending for Updated {
    fn is_ready(&self) -> bool {
        true
    }

    fn read(self: Box<Self>) -> Result<Updated> {
        Ok(*self)
    }
}

/// A backend. Every method checks shapes and returns an error that names them when they disagree.
///
/// Whoever lets a tensor be written sees to it that nobody else reads those elements meanwhile. Columns of one
/// buffer that the backend itself handed out may be written each for itself; otherwise a backend may refuse a
/// tensor whose storage another handle shares, as the CPU's does.
pub trait Operations: Send + Sync + Debug {
    /// What activations, and the matrices that they meet, are made of. Norms, biases, gradients of weights,
    /// moments, statistics and losses are f32 everywhere.
    fn activation_type(&self) -> ElementType;
    /// Bytes of one entry of an activation.
    fn activation_bytes(&self) -> usize {
        self.activation_type().bytes()
    }
    /// What it runs on, as it is now; none on the host.
    fn accelerator(&self) -> Option<Accelerator> {
        None
    }
    /// Waits until everything asked so far is done: a clock that is read afterwards has seen all of it.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    /// A point after everything asked so far, where a device runs behind its host; none where whatever was asked
    /// is done when the call returns. Does not wait.
    fn mark(&self) -> Result<Option<Box<dyn Completion>>> {
        Ok(None)
    }
    /// Makes ready what models of this shape need and takes a while, so that the first step is like the others.
    fn prepare(&self, _architecture: &Architecture) -> Result<()> {
        Ok(())
    }

    /// The ranks of `mesh` as a gang whose tensors are this backend's.
    ///
    /// # Errors
    /// When what moves them is not there.
    fn gang(&self, mesh: Arc<Mesh>) -> Result<Arc<dyn Gang>> {
        Ok(Arc::new(MeshGang::of_cpus(mesh)))
    }

    /// A tensor of zeros.
    fn zeros(&self, rows: usize, columns: usize, element_type: ElementType) -> Result<Tensor>;
    /// A tensor with `data`, row by row, in f32.
    fn upload(&self, data: &[f32], rows: usize, columns: usize) -> Result<Tensor>;
    /// A tensor with `elements`, row by row, in their own type. No more of the device is needed for it than it takes in the
    /// end: the largest tensor in f32 beside itself may be what a model that fits has no room for.
    fn upload_elements(&self, elements: &Elements, rows: usize, columns: usize) -> Result<Tensor>;
    /// The elements, row by row. Waits for the device.
    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>>;
    /// A contiguous copy of its own, rounded to `element_type`.
    fn copy_as(&self, tensor: &Tensor, element_type: ElementType) -> Result<Tensor>;
    /// A contiguous copy of its own.
    fn contiguous(&self, tensor: &Tensor) -> Result<Tensor> {
        self.copy_as(tensor, tensor.element_type())
    }
    /// Rows of the first tensor, then those of the second and so on, in a tensor of its own.
    fn concatenate(&self, tensors: &[&Tensor]) -> Result<Tensor>;
    /// The same tensors, one right after the other in one buffer where the backend gains by it: a linear
    /// layer's relatives that [`Operations::linear_many`] takes together, in the order in which it does.
    fn stack(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(tensors)
    }
    /// A new `(rows, columns)` tensor of `element_type` in which the elements of each tensor, which has no gaps,
    /// lie one after the other from its place on; places rise, and what no tensor fills is 0.
    fn flatten(
        &self,
        parts: &[(usize, &Tensor)],
        rows: usize,
        columns: usize,
        element_type: ElementType,
    ) -> Result<Tensor>;
    /// Sets every element of tensors without gaps to 0.
    fn clear(&self, tensors: &mut [&mut Tensor]) -> Result<()>;
    /// Rows or columns of `tensor` at `indices`, in that order, new.
    fn gather(&self, tensor: &Tensor, indices: &[usize], axis: Axis) -> Result<Tensor>;

    /// The tokens of a batch, and what each row of the head's input should predict (none leaves the row out:
    /// loss 0, no gradient).
    fn tokens(&self, ids: &[u32], targets: Option<&[Option<u32>]>) -> Result<TokenBatch>;
    /// Rows of `table` at the batch's tokens: `(tokens, hidden)`.
    fn embedding(&self, table: &Tensor, tokens: &TokenBatch) -> Result<Tensor>;
    /// Adds each row of `grad_output` to the row of `grad_table` that its token names.
    fn embedding_backward(
        &self,
        grad_output: &Tensor,
        tokens: &TokenBatch,
        grad_table: &mut Tensor,
    ) -> Result<()>;

    /// `x · weightᵀ + bias`: x `(tokens, in)`.
    fn linear(&self, x: &Tensor, layer: Linear<'_>) -> Result<Tensor>;
    /// [`Operations::linear`] of several layers that read the same x; in one product where their weights lie
    /// as [`Operations::stack`] lays them, and then the outputs may be columns of one buffer.
    fn linear_many(&self, x: &Tensor, layers: &[Linear<'_>]) -> Result<Vec<Tensor>> {
        layers.iter().map(|layer| self.linear(x, *layer)).collect()
    }
    /// `x · weightᵀ + bias + residual`, the residual step's last operation in one pass.
    fn linear_residual(&self, x: &Tensor, layer: Linear<'_>, residual: &Tensor) -> Result<Tensor>;
    /// `Σ grad_output · weight` over pairs of a gradient and the weight of its layer, all of which read the
    /// same x: that x's gradient, new.
    fn linear_backward_input(&self, layers: &[(&Tensor, &Tensor)]) -> Result<Tensor>;
    /// `grad_weight += grad_outputᵀ · x` and `grad_bias += Σ rows of grad_output`, for each layer that reads x.
    fn linear_backward_weight(&self, x: &Tensor, layers: &mut [LinearGradient<'_>]) -> Result<()>;

    /// RMS norm over groups of `weight.columns()` entries of each row (a whole row, or each head of it).
    /// Gives the output and the reciprocal root mean square of each group, `(rows, groups)`.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<(Tensor, Tensor)>;
    /// Gradient of [`Operations::rms_norm`] to x, to which that of the residual stream around it is added if
    /// there is one (in its own storage); the weight's is added to `grad_weight`.
    fn rms_norm_backward(
        &self,
        grad_output: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        reciprocal: &Tensor,
        residual: Option<Tensor>,
        grad_weight: &mut Tensor,
    ) -> Result<Tensor>;

    /// Rotates every head of `q` and `k` in place (half-split pairs, as Hugging Face checkpoints expect); row
    /// `s * tokens + t` stands at position `first_position + t`.
    fn rope(
        &self,
        q: &mut Tensor,
        k: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
        first_position: usize,
    ) -> Result<()>;
    /// The inverse rotation of both gradients, in place, from position 0.
    fn rope_backward(
        &self,
        grad_q: &mut Tensor,
        grad_k: &mut Tensor,
        head_dim: usize,
        table: &RopeTable,
        layout: Layout,
    ) -> Result<()>;

    /// Causal attention within each sequence: q `(tokens, query_width)`, k and v `(tokens, kv_width)`;
    /// scores are scaled by `1/sqrt(head_dim)`. Gives the output `(tokens, query_width)` and the log of
    /// each softmax's denominator, laid out as the backend's backward likes it. No score matrix outlives its
    /// tile.
    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        shape: &Attention,
        layout: Layout,
    ) -> Result<(Tensor, Tensor)>;
    /// Gradients of [`Operations::attention`] to q, k and v, new (and perhaps columns of one buffer).
    #[allow(clippy::too_many_arguments)] // what the forward took and gave, and nothing else
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
    ) -> Result<(Tensor, Tensor, Tensor)>;
    /// Appends k and v of `layout.tokens` new tokens a sequence to the cache, then attends q to all that is
    /// there, causally among the new ones. Serves prefill in chunks and decoding alike.
    fn attention_cached(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cache: &mut KvCache,
        shape: &Attention,
        layout: Layout,
    ) -> Result<Tensor>;

    /// Steps of one token of each of `sequences` sequences through a model of this shape, where the backend gains by
    /// keeping what they queue; none where it does not, and then each runs as a prompt does.
    fn decoding(&self, _sequences: usize, _architecture: &Architecture) -> Result<Option<Box<dyn Decoding>>> {
        Ok(None)
    }

    /// `silu(gate) · up`, elementwise.
    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor>;
    /// Gradients of [`Operations::swiglu`] to gate and up, each new.
    fn swiglu_backward(&self, grad_output: &Tensor, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor)>;
    /// `relu(x)²`, elementwise.
    fn relu_squared(&self, x: &Tensor) -> Result<Tensor>;
    /// Gradient of [`Operations::relu_squared`], new.
    fn relu_squared_backward(&self, grad_output: &Tensor, x: &Tensor) -> Result<Tensor>;

    /// Logits of every row, `(tokens, vocabulary)`: for decoding and small checks only, since it holds
    /// vocabulary × tokens.
    fn logits(&self, head: Head<'_>) -> Result<Tensor>;
    /// The likeliest token of each row of `logits`, the first of equals. Waits for the device.
    fn likeliest(&self, logits: &Tensor) -> Result<Vec<u32>>;
    /// Negative log-likelihood of the batch's targets, a row each, computed in chunks of rows with the gradient
    /// in the same pass.
    fn cross_entropy(
        &self,
        head: Head<'_>,
        targets: &TokenBatch,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses>;
    /// Forward KL at temperature 1, `Σ p_parent (log p_parent − log p_student)`, a row each, computed in
    /// chunks of rows with the gradient in the same pass.
    fn distillation(
        &self,
        student: Head<'_>,
        parent: Head<'_>,
        gradient: Option<HeadGradient<'_>>,
    ) -> Result<Losses>;
    /// [`Operations::distillation`] of several students against one parent, whose logits are computed once
    /// a chunk: the losses of each, `(tokens, 1)` in f32.
    fn distillation_many(&self, students: &[Head<'_>], parent: Head<'_>) -> Result<Vec<Tensor>>;

    /// Sum of squares of each column, in f64. Waits for the device.
    fn column_squares(&self, x: &Tensor) -> Result<Vec<f64>>;
    /// `Σ a ∘ b` over each square tile of `tile` rows and columns, in f64: one entry a tile, row by row. Waits
    /// for the device.
    fn tile_products(&self, a: &Tensor, b: &Tensor, tile: usize) -> Result<Vec<f64>>;

    /// What a step is judged by: the sum of `losses` and that of the squares of `gradients`, which are f32
    /// without gaps. `(1, MEASURED)` in f32, so that ranks can gather each other's: both sums, [`PARTS`] entries
    /// each, which added up in f64 give it to the last bit. Does not wait for the device.
    fn measure(&self, gradients: &[&Tensor], losses: &[Tensor]) -> Result<Tensor>;
    /// Adds up the rows of `measured`, one for each rank's share of a step by [`Operations::measure`], for the
    /// step's loss and the gradient's norm, and makes one fused, clipped AdamW step of every parameter; none
    /// where loss or norm are not finite. Gradients are left at zero either way. Does not wait for the device.
    fn update(
        &self,
        parameters: &mut [AdamWParameter<'_>],
        step: AdamWStep,
        measured: &Tensor,
    ) -> Result<Box<dyn Pending>>;
}
