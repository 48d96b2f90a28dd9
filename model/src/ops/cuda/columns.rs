//! Sums over rows. Formulas: `kernels/columns.cu`.

use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;

/// Rows of one partial sum.
const CHUNK: usize = 256;

fn kernel(x: &Matrix) -> Specialisation {
    Specialisation::new("columns.cu", [("ELEMENT", x.element().kernel_name().into())])
}

impl CudaDevice {
    /// `target += Σ rows of x`, a bias's gradient: x bf16 or f32 `(rows, columns)`, target f32 of `columns`.
    ///
    /// # Errors
    /// When an operand does not fit, there is no memory for partial sums, or the driver refuses.
    pub fn add_column_sums(&self, x: &Matrix, target: &Matrix) -> Result<()> {
        const NAME: &str = "column_sums";
        self.expect_float(NAME, "x", x)?;
        self.expect_row(NAME, "target", target, Element::F32, x.columns())?;
        let chunks = x.rows().div_ceil(CHUNK);
        let partial = self.matrix(Element::F32, chunks, x.columns())?;
        let tiles = x.columns().div_ceil(32);
        let module = self.kernels.get(kernel(x))?;
        let grid = Grid {
            blocks: [tiles, chunks, 1],
            threads: 256,
            shared: 0,
        };
        let arguments = Arguments::new()
            .matrix(x)
            .start(&partial)
            .int(x.rows())
            .int(x.columns())
            .int(CHUNK);
        module.launch(NAME, grid, self.compute(), arguments)?;
        let arguments = Arguments::new()
            .start(&partial)
            .start(target)
            .int(chunks)
            .int(x.columns());
        module.launch("add_partials", Grid::line(tiles, 256), self.compute(), arguments)
    }

    /// Σ |x| and Σ x² of each column over each sequence's tokens, written: x bf16 or f32 `(sequences · tokens,
    /// columns)`, magnitudes and squares f32 `(sequences, columns)`.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn column_magnitudes(
        &self,
        x: &Matrix,
        sequences: usize,
        magnitudes: &Matrix,
        squares: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "column_magnitudes";
        self.expect_float(NAME, "x", x)?;
        if sequences == 0 || !x.rows().is_multiple_of(sequences) {
            return Err(self.wrong(NAME, "x", &format!("rows of {sequences} equal sequences"), x));
        }
        for (what, sums) in [("magnitudes", magnitudes), ("squares", squares)] {
            self.expect_row(NAME, what, sums, Element::F32, sequences * x.columns())?;
        }
        let grid = Grid {
            blocks: [x.columns().div_ceil(32), sequences, 1],
            threads: 256,
            shared: 0,
        };
        let arguments = Arguments::new()
            .matrix(x)
            .start(magnitudes)
            .start(squares)
            .int(x.rows() / sequences)
            .int(x.columns());
        self.kernels
            .get(kernel(x))?
            .launch(NAME, grid, self.compute(), arguments)
    }
}
