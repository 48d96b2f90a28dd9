//! How a backend decodes a token of each of some sequences again and again without the host in between.

use std::fmt::Debug;

use espalier_arch::Attention;

use super::{KvCache, Linear, RopeTable};
use crate::{Result, Tensor};

/// Tokens on their way to the host.
pub trait Arriving: Send + Debug {
    /// Waits for them: one a sequence.
    ///
    /// # Errors
    /// When the device failed meanwhile.
    fn read(self: Box<Self>) -> Result<Vec<u32>>;
}

/// A session's steps of one token a sequence, where the backend keeps what a step queues and queues it again: the
/// tokens, and how many each sequence holds, lie on the device. [`super::Operations::decoding`] makes it.
pub trait Decoding: Send + Debug {
    /// Rows of `table` at the step's tokens: `(sequences, hidden)`.
    ///
    /// # Errors
    /// When the table has no row for some token.
    fn embedding(&self, table: &Tensor) -> Result<Tensor>;

    /// The RMS norm of x by `norm`, and of that the layers' outputs, as [`super::Operations::linear_many`].
    ///
    /// # Errors
    /// When an operand does not fit.
    fn project(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: &[Linear<'_>]) -> Result<Vec<Tensor>>;

    /// `silu(gate(n)) · up(n)` of the RMS norm n of x; `layers` are up and gate.
    ///
    /// # Errors
    /// When an operand does not fit.
    fn gated(&self, x: &Tensor, norm: &Tensor, epsilon: f64, layers: [Linear<'_>; 2]) -> Result<Tensor>;

    /// Appends k and v of the step's tokens to the cache, k rotated by `rope`, and attends q, rotated likewise, to what
    /// is there. The cache's own length is not looked at.
    ///
    /// # Errors
    /// When an operand does not fit.
    fn attention(
        &self,
        qkv: [&Tensor; 3],
        cache: &KvCache,
        shape: &Attention,
        rope: Option<&RopeTable>,
    ) -> Result<Tensor>;

    /// Logits of the RMS norm of x, `(sequences, vocabulary)`.
    ///
    /// # Errors
    /// When an operand does not fit.
    fn logits(&self, x: &Tensor, norm: &Tensor, epsilon: f64, head: &Tensor) -> Result<Tensor>;

    /// Takes `tokens`, or the likeliest ones after the step before, where each sequence holds `held` tokens. `step`
    /// queues the work from [`Decoding::embedding`] to [`Decoding::logits`]. It is called for some of the first steps
    /// and must queue the same each time; afterwards that is queued again without it, so what it read and wrote must
    /// be there as long as this is.
    ///
    /// # Errors
    /// When a token is not below the vocabulary, there are more or fewer than sequences, or `step` fails.
    fn run(
        &mut self,
        tokens: Option<&[u32]>,
        held: usize,
        step: &dyn Fn(&dyn Decoding) -> Result<Tensor>,
    ) -> Result<()>;

    /// A copy of the last step's logits.
    ///
    /// # Errors
    /// When there was no step, or no memory.
    fn last_logits(&self) -> Result<Tensor>;

    /// Begins to bring the likeliest tokens after the last step to the host; does not wait.
    ///
    /// # Errors
    /// When the backend refuses.
    fn likeliest(&self) -> Result<Box<dyn Arriving>>;
}
