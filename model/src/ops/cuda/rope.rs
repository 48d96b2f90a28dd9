//! Rotary positions. Formulas: `kernels/rope.cu`.

use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use super::{blocks_of, vector_width};

/// Which way heads turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// By the position's angle.
    Forward,
    /// Back by it, which is also the gradient.
    Backward,
}

/// Cosines and sines, f32 `(positions, head_dim / 2)` each.
#[derive(Debug, Clone, Copy)]
pub struct RopeAngles<'a> {
    /// Of every position and frequency.
    pub cosine: &'a Matrix,
    /// Of every position and frequency.
    pub sine: &'a Matrix,
}

impl CudaDevice {
    /// Rotates every head of `q` and `k` in place, bf16 `(rows, heads · head_dim)`; row `s · tokens + t` stands at
    /// position `first_position + t`.
    ///
    /// # Errors
    /// When an operand does not fit, a position is beyond the tables, or the driver refuses.
    #[allow(clippy::too_many_arguments)] // two tensors, their tables, and where they stand
    pub fn rope(
        &self,
        q: &Matrix,
        k: Option<&Matrix>,
        angles: RopeAngles<'_>,
        head_dim: usize,
        tokens: usize,
        first_position: usize,
        rotation: Rotation,
    ) -> Result<()> {
        const NAME: &str = "rope";
        let half = head_dim / 2;
        if half == 0 || !head_dim.is_multiple_of(2) || tokens == 0 || !q.rows().is_multiple_of(tokens) {
            let expected = format!("whole sequences of {tokens} tokens, heads of an even {head_dim}");
            return Err(self.wrong(NAME, "q", &expected, q));
        }
        for (what, heads) in [("q", Some(q)), ("k", k)] {
            let Some(heads) = heads else { continue };
            self.expect(NAME, what, heads, Element::Bf16, (q.rows(), heads.columns()))?;
            if !heads.columns().is_multiple_of(head_dim) {
                return Err(self.wrong(NAME, what, &format!("heads of {head_dim}"), heads));
            }
        }
        for (what, table) in [("cosine", angles.cosine), ("sine", angles.sine)] {
            self.expect_row(NAME, what, table, Element::F32, table.rows() * half)?;
            if first_position + tokens > table.rows() {
                let expected = format!("{} positions", first_position + tokens);
                return Err(self.wrong(NAME, what, &expected, table));
            }
        }
        let vector = if half.is_multiple_of(8) {
            vector_width(&[Some(q), k])
        } else {
            1
        };
        let (q_heads, k_heads) = (q.columns() / head_dim, k.map_or(0, |k| k.columns() / head_dim));
        let threads = q.rows() * (q_heads + k_heads) * (half / vector as usize);
        let direction = match rotation {
            Rotation::Forward => 1.0,
            Rotation::Backward => -1.0,
        };
        let arguments = Arguments::new()
            .matrix(q)
            .int(q_heads)
            .any_matrix(k)
            .int(k_heads)
            .start(angles.cosine)
            .start(angles.sine)
            .int(head_dim)
            .int(q.rows())
            .int(tokens)
            .int(first_position)
            .float(direction);
        let kernel = Specialisation::new("rope.cu", [("VECTOR", vector.into())]);
        let module = self.kernels.get(kernel)?;
        module.launch(
            "rope",
            Grid::line(blocks_of(threads), 256),
            self.compute(),
            arguments,
        )
    }
}
