//! Cross-entropy, distillation and the choice of a token, over chunks of logits. Formulas: `kernels/loss.cu`,
//! `kernels/argmax.cu`.

use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid, Start};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use super::vector_width;

const THREADS: u32 = 512;

/// Columns that one block of `argmax_parts` reads.
const ARGMAX_PART: usize = 4096;

/// Where the gradient to the logits goes.
#[derive(Debug, Clone, Copy)]
pub struct LogitGradient<'a> {
    /// Written: bf16, shaped as the logits, over which it may lie when they are bf16.
    pub target: &'a Matrix,
    /// Factor of the loss before differentiation.
    pub scale: f32,
}

impl CudaDevice {
    /// `loss[row] = ln Σ e^logits − logits[targets[row]]`, and its gradient. A target below 0 leaves its row out.
    ///
    /// logits bf16 or f32 `(rows, vocabulary)`, targets i32 and loss (written) f32, a row each. Targets at or
    /// above the vocabulary are the caller's to refuse: they come from the host.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn cross_entropy(
        &self,
        logits: &Matrix,
        targets: &Matrix,
        loss: &Matrix,
        gradient: Option<LogitGradient<'_>>,
    ) -> Result<()> {
        const NAME: &str = "cross_entropy";
        self.expect_logits(NAME, logits, loss, gradient)?;
        self.expect_row(NAME, "targets", targets, Element::I32, logits.rows())?;
        let target = gradient.map(|gradient| gradient.target);
        let arguments = Arguments::new()
            .matrix(logits)
            .start(targets)
            .start(loss)
            .any_matrix(target)
            .int(logits.columns())
            .float(gradient.map_or(0.0, |gradient| gradient.scale));
        let kernel = loss_kernel(logits, &[Some(logits), target]);
        let grid = Grid::line(logits.rows(), THREADS);
        self.kernels
            .get(kernel)?
            .launch(NAME, grid, self.compute(), arguments)
    }

    /// `loss[row] = Σ p (ln p − ln q)` with p and q the softmaxes of parent and student, and its gradient to the
    /// student's logits.
    ///
    /// student and parent bf16 or f32, alike, `(rows, vocabulary)`; loss (written) f32, a row each.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn distillation(
        &self,
        student: &Matrix,
        parent: &Matrix,
        loss: &Matrix,
        gradient: Option<LogitGradient<'_>>,
    ) -> Result<()> {
        const NAME: &str = "distillation";
        self.expect_logits(NAME, student, loss, gradient)?;
        let shape = (student.rows(), student.columns());
        self.expect(NAME, "parent", parent, student.element(), shape)?;
        let target = gradient.map(|gradient| gradient.target);
        let arguments = Arguments::new()
            .matrix(student)
            .matrix(parent)
            .start(loss)
            .any_matrix(target)
            .int(student.columns())
            .float(gradient.map_or(0.0, |gradient| gradient.scale));
        let kernel = loss_kernel(student, &[Some(student), Some(parent), target]);
        let grid = Grid::line(student.rows(), THREADS);
        self.kernels
            .get(kernel)?
            .launch(NAME, grid, self.compute(), arguments)
    }

    /// The column of each row's largest logit, the first of equal ones: logits bf16 or f32, result i32, a row
    /// each. With `lengths`, i32 a row each, those become one more.
    ///
    /// # Errors
    /// When an operand does not fit, there is no memory for the parts of rows, or the driver refuses.
    pub fn argmax(&self, logits: &Matrix, result: &Matrix, lengths: Option<&Matrix>) -> Result<()> {
        const NAME: &str = "argmax";
        self.expect_float(NAME, "logits", logits)?;
        for (what, row) in [("result", Some(result)), ("lengths", lengths)] {
            if let Some(row) = row {
                self.expect_row(NAME, what, row, Element::I32, logits.rows())?;
            }
        }
        let parts = logits.columns().div_ceil(ARGMAX_PART);
        let (values, columns) = (
            self.matrix(Element::F32, logits.rows(), parts)?,
            self.matrix(Element::I32, logits.rows(), parts)?,
        );
        let macros = [("LOGIT", logits.element().kernel_name().into())];
        let module = self.kernels.get(Specialisation::new("argmax.cu", macros))?;
        let grid = Grid {
            blocks: [parts, logits.rows(), 1],
            threads: 256,
            shared: 0,
        };
        let arguments = Arguments::new()
            .matrix(logits)
            .start(&values)
            .start(&columns)
            .int(logits.columns());
        module.launch_at(Start::Early, "argmax_parts", grid, self.compute(), arguments)?;
        let arguments = Arguments::new()
            .start(&values)
            .start(&columns)
            .int(parts)
            .start(result)
            .start_of_any(lengths);
        let grid = Grid::line(logits.rows(), 32);
        module.launch_at(Start::Early, NAME, grid, self.compute(), arguments)
    }

    fn expect_logits(
        &self,
        operation: &'static str,
        logits: &Matrix,
        loss: &Matrix,
        gradient: Option<LogitGradient<'_>>,
    ) -> Result<()> {
        self.expect_float(operation, "logits", logits)?;
        self.expect_row(operation, "loss", loss, Element::F32, logits.rows())?;
        let Some(LogitGradient { target, .. }) = gradient else {
            return Ok(());
        };
        if logits.element() == Element::F32 && target.shares_buffer(logits) {
            return Err(self.wrong(
                operation,
                "gradient",
                "a buffer that f32 logits do not lie in",
                target,
            ));
        }
        self.expect(
            operation,
            "gradient",
            target,
            Element::Bf16,
            (logits.rows(), logits.columns()),
        )
    }

    /// bf16 or f32, on this device.
    pub(super) fn expect_float(&self, operation: &'static str, what: &str, found: &Matrix) -> Result<()> {
        if !matches!(found.element(), Element::Bf16 | Element::F32) {
            return Err(self.wrong(operation, what, "bf16 or f32", found));
        }
        self.expect(
            operation,
            what,
            found,
            found.element(),
            (found.rows(), found.columns()),
        )
    }
}

fn loss_kernel(logits: &Matrix, operands: &[Option<&Matrix>]) -> Specialisation {
    let macros = [
        ("LOGIT", logits.element().kernel_name().into()),
        ("VECTOR", vector_width(operands).into()),
    ];
    Specialisation::new("loss.cu", macros)
}
