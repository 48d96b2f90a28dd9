//! Elementwise operations: activations and their gradients, sums, casts. Formulas: `kernels/activation.cu`,
//! `kernels/elementwise.cu`.

use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use super::{blocks_of, vector_width};

/// One thread for each vector of each row.
fn grid(shape: &Matrix, vector: u32) -> Grid {
    Grid::line(blocks_of(shape.rows() * (shape.columns() / vector as usize)), 256)
}

impl CudaDevice {
    /// `output = silu(gate) · up`, all bf16 of one shape; gate and up share a leading dimension. output may lie
    /// over either.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn swiglu(&self, gate: &Matrix, up: &Matrix, output: &Matrix) -> Result<()> {
        const NAME: &str = "swiglu";
        self.expect_alike(NAME, &[("gate", gate), ("up", up), ("output", output)])?;
        self.expect_one_leading(NAME, ("gate", gate), ("up", up))?;
        let vector = vector_width(&[Some(gate), Some(up), Some(output)]);
        let arguments = Arguments::new()
            .start(gate)
            .matrix(up)
            .matrix(output)
            .int(gate.rows())
            .int(gate.columns());
        self.activation("swiglu_forward", vector, grid(gate, vector), arguments)
    }

    /// The gradients of [`CudaDevice::swiglu`], written to `grad_gate` and `grad_up`, which share a leading
    /// dimension and may lie over gate and up, or one of them over grad_output.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn swiglu_backward(
        &self,
        grad_output: &Matrix,
        gate: &Matrix,
        up: &Matrix,
        grad_gate: &Matrix,
        grad_up: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "swiglu_backward";
        let operands = [
            ("gate", gate),
            ("up", up),
            ("grad_output", grad_output),
            ("grad_gate", grad_gate),
            ("grad_up", grad_up),
        ];
        self.expect_alike(NAME, &operands)?;
        self.expect_one_leading(NAME, ("gate", gate), ("up", up))?;
        self.expect_one_leading(NAME, ("grad_gate", grad_gate), ("grad_up", grad_up))?;
        let vector = vector_width(&operands.map(|(_, operand)| Some(operand)));
        let arguments = Arguments::new()
            .matrix(grad_output)
            .start(gate)
            .matrix(up)
            .start(grad_gate)
            .matrix(grad_up)
            .int(gate.rows())
            .int(gate.columns());
        self.activation("swiglu_backward", vector, grid(gate, vector), arguments)
    }

    /// `output = max(x, 0)²`, bf16 of one shape; output may lie over x.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn relu_squared(&self, x: &Matrix, output: &Matrix) -> Result<()> {
        self.expect_alike("relu_squared", &[("x", x), ("output", output)])?;
        let vector = vector_width(&[Some(x), Some(output)]);
        let arguments = Arguments::new()
            .matrix(x)
            .matrix(output)
            .int(x.rows())
            .int(x.columns());
        self.activation("relu_squared_forward", vector, grid(x, vector), arguments)
    }

    /// `grad_x = grad_output · 2 max(x, 0)`, bf16 of one shape; grad_x may lie over either.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn relu_squared_backward(&self, grad_output: &Matrix, x: &Matrix, grad_x: &Matrix) -> Result<()> {
        let operands = [("x", x), ("grad_output", grad_output), ("grad_x", grad_x)];
        self.expect_alike("relu_squared_backward", &operands)?;
        let vector = vector_width(&operands.map(|(_, operand)| Some(operand)));
        let arguments = Arguments::new()
            .matrix(grad_output)
            .matrix(x)
            .matrix(grad_x)
            .int(x.rows())
            .int(x.columns());
        self.activation("relu_squared_backward", vector, grid(x, vector), arguments)
    }

    /// `target += source`, each bf16 or f32, of one shape; summed in f32 and rounded once.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn add_assign(&self, target: &Matrix, source: &Matrix) -> Result<()> {
        self.elementwise("accumulate", target, source)
    }

    /// `target = source`, each bf16 or f32, of one shape: a copy when they are alike.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn cast(&self, target: &Matrix, source: &Matrix) -> Result<()> {
        self.elementwise("cast", target, source)
    }

    fn elementwise(&self, name: &'static str, target: &Matrix, source: &Matrix) -> Result<()> {
        for (what, operand) in [("target", target), ("source", source)] {
            if !matches!(operand.element(), Element::Bf16 | Element::F32) {
                return Err(self.wrong(name, what, "bf16 or f32", operand));
            }
            let shape = (target.rows(), target.columns());
            self.expect(name, what, operand, operand.element(), shape)?;
        }
        let vector = vector_width(&[Some(target), Some(source)]);
        let macros = [
            ("TARGET", target.element().kernel_name().into()),
            ("SOURCE", source.element().kernel_name().into()),
            ("VECTOR", vector.into()),
        ];
        let arguments = Arguments::new()
            .matrix(target)
            .matrix(source)
            .int(target.rows())
            .int(target.columns());
        let module = self.kernels.get(Specialisation::new("elementwise.cu", macros))?;
        module.launch(name, grid(target, vector), self.compute(), arguments)
    }

    fn activation(&self, name: &'static str, vector: u32, grid: Grid, arguments: Arguments) -> Result<()> {
        let kernel = Specialisation::new("activation.cu", [("VECTOR", vector.into())]);
        self.kernels
            .get(kernel)?
            .launch(name, grid, self.compute(), arguments)
    }

    /// bf16, and shaped as the first.
    fn expect_alike(&self, operation: &'static str, operands: &[(&str, &Matrix)]) -> Result<()> {
        let Some((_, first)) = operands.first() else {
            return Ok(());
        };
        let shape = (first.rows(), first.columns());
        operands
            .iter()
            .try_for_each(|(what, operand)| self.expect(operation, what, operand, Element::Bf16, shape))
    }

    fn expect_one_leading(
        &self,
        operation: &'static str,
        (_, first): (&str, &Matrix),
        (what, second): (&str, &Matrix),
    ) -> Result<()> {
        if first.leading() == second.leading() || first.rows() <= 1 {
            return Ok(());
        }
        let expected = format!("{} from row to row, as its twin has", first.leading());
        Err(self.wrong(operation, what, &expected, second))
    }
}
