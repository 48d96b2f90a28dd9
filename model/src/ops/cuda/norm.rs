//! RMS norm, forward and backward. Formulas: `kernels/rms_norm.cu`.

use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use super::vector_width;

/// Threads of a block, unless one group needs more.
const BLOCK: usize = 256;
/// Vectors that a thread should hold at most: more would leave registers to fewer warps.
const ITEMS: usize = 3;
/// Blocks for each multiprocessor, forward and backward; more work is met by striding.
const FORWARD_BLOCKS: usize = 8;
const BACKWARD_BLOCKS: usize = 3;

/// How a group of `width` entries is spread over threads.
#[derive(Debug, Clone, Copy)]
struct Spread {
    kernel: Specialisation,
    threads: usize,
}

impl Spread {
    fn new(width: usize, vector: u32) -> Self {
        let vectors = width.div_ceil(vector as usize);
        let mut threads = 32;
        while vectors.div_ceil(threads) > ITEMS && threads < 1024 {
            threads *= 2;
        }
        let items = vectors.div_ceil(threads);
        // Both are small: threads at most 1024, items at most a width's.
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let macros = [
            ("VECTOR", vector.into()),
            ("THREADS", number(threads).into()),
            ("ITEMS", number(items).into()),
        ];
        Self {
            kernel: Specialisation::new("rms_norm.cu", macros),
            threads,
        }
    }

    /// The grid for `groups` groups with at most `blocks` blocks.
    fn grid(&self, groups: usize, blocks: usize) -> Grid {
        let block = self.threads.max(BLOCK);
        let slots = block / self.threads;
        Grid::line(
            groups.div_ceil(slots).min(blocks),
            u32::try_from(block).unwrap_or(u32::MAX),
        )
    }
}

/// What is added to the input before the norm, and where the sum goes.
#[derive(Debug, Clone, Copy)]
pub struct NormResidual<'a> {
    /// bf16, shaped as the input.
    pub delta: &'a Matrix,
    /// Written: bf16, shaped as the input, which it may lie over.
    pub sum: &'a Matrix,
}

impl CudaDevice {
    /// `output = x · r · weight` with `r = 1 / sqrt(mean(x²) + epsilon)` over each group of `weight`'s length, x
    /// being `input`, or `input + delta` rounded to bf16.
    ///
    /// input and output bf16 `(rows, groups · width)`, weight f32 of `width`, reciprocal (written) f32 of
    /// `rows · groups`. output may lie over what is read.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn rms_norm(
        &self,
        input: &Matrix,
        residual: Option<NormResidual<'_>>,
        weight: &Matrix,
        output: &Matrix,
        reciprocal: &Matrix,
        epsilon: f32,
    ) -> Result<()> {
        const NAME: &str = "rms_norm";
        let shape = (input.rows(), input.columns());
        let (width, groups) = self.norm_groups(NAME, input, weight)?;
        self.expect(NAME, "input", input, Element::Bf16, shape)?;
        self.expect(NAME, "output", output, Element::Bf16, shape)?;
        self.expect_row(
            NAME,
            "reciprocal",
            reciprocal,
            Element::F32,
            input.rows() * groups,
        )?;
        let (delta, sum) = (residual.map(|r| r.delta), residual.map(|r| r.sum));
        for (what, operand) in [("delta", delta), ("sum", sum)] {
            if let Some(operand) = operand {
                self.expect(NAME, what, operand, Element::Bf16, shape)?;
            }
        }
        let vector = norm_vector(width, &[Some(input), Some(output), Some(weight), delta, sum]);
        let spread = Spread::new(width, vector);
        let blocks = self.info.multiprocessors as usize * FORWARD_BLOCKS;
        let arguments = Arguments::new()
            .matrix(input)
            .any_matrix(delta)
            .any_matrix(sum)
            .start(weight)
            .matrix(output)
            .start(reciprocal)
            .int(input.rows())
            .int(groups)
            .int(width)
            .float(epsilon);
        let grid = spread.grid(input.rows() * groups, blocks);
        let module = self.kernels.get(spread.kernel)?;
        module.launch("rms_norm_forward", grid, self.compute(), arguments)
    }

    /// The gradient of [`CudaDevice::rms_norm`]: to x it is written to `grad_x`, or added to what is there when
    /// `add`; to the weight it is added to `grad_weight`.
    ///
    /// grad_output, x and grad_x bf16 `(rows, groups · width)`, weight and grad_weight f32 of `width`, reciprocal
    /// as the forward wrote it. grad_x may lie over grad_output.
    ///
    /// # Errors
    /// When an operand does not fit, there is no memory for the weight's partial sums, or the driver refuses.
    #[allow(clippy::too_many_arguments)] // what the forward took and gave, and the gradients
    pub fn rms_norm_backward(
        &self,
        grad_output: &Matrix,
        x: &Matrix,
        weight: &Matrix,
        reciprocal: &Matrix,
        grad_x: &Matrix,
        add: bool,
        grad_weight: Option<&Matrix>,
    ) -> Result<()> {
        const NAME: &str = "rms_norm_backward";
        let shape = (x.rows(), x.columns());
        let (width, groups) = self.norm_groups(NAME, x, weight)?;
        for (what, operand) in [("grad_output", grad_output), ("x", x), ("grad_x", grad_x)] {
            self.expect(NAME, what, operand, Element::Bf16, shape)?;
        }
        self.expect_row(NAME, "reciprocal", reciprocal, Element::F32, x.rows() * groups)?;
        let vector = norm_vector(width, &[Some(grad_output), Some(x), Some(weight), Some(grad_x)]);
        let spread = Spread::new(width, vector);
        let blocks = self.info.multiprocessors as usize * BACKWARD_BLOCKS;
        let grid = spread.grid(x.rows() * groups, blocks);
        let partial = match grad_weight {
            Some(grad_weight) => {
                self.expect_row(NAME, "grad_weight", grad_weight, Element::F32, width)?;
                Some(self.matrix(Element::F32, grid.blocks[0], width)?)
            }
            None => None,
        };
        let arguments = Arguments::new()
            .matrix(grad_output)
            .matrix(x)
            .start(weight)
            .start(reciprocal)
            .matrix(grad_x)
            .start_of_any(partial.as_ref())
            .int(x.rows())
            .int(groups)
            .int(width)
            .int(usize::from(add));
        let module = self.kernels.get(spread.kernel)?;
        module.launch("rms_norm_backward", grid, self.compute(), arguments)?;
        let (Some(partial), Some(grad_weight)) = (partial, grad_weight) else {
            return Ok(());
        };
        let sums = Arguments::new()
            .start(&partial)
            .int(grid.blocks[0])
            .int(width)
            .start(grad_weight);
        let grid = Grid::line(width.div_ceil(32), 256);
        module.launch("rms_norm_weight_gradient", grid, self.compute(), sums)
    }

    /// (entries of a group, groups of a row).
    fn norm_groups(&self, operation: &'static str, x: &Matrix, weight: &Matrix) -> Result<(usize, usize)> {
        let width = weight.len();
        self.expect_row(operation, "weight", weight, Element::F32, width)?;
        if width == 0 || !x.columns().is_multiple_of(width) {
            return Err(self.wrong(operation, "x", &format!("rows of groups of {width}"), x));
        }
        Ok((width, x.columns() / width))
    }
}

/// What groups of `width` entries are normed with.
pub(super) fn norm_kernel(width: usize, vector: u32) -> Specialisation {
    Spread::new(width, if width.is_multiple_of(8) { vector } else { 1 }).kernel
}

/// Whether every group, not only every row, begins where vectors may.
fn norm_vector(width: usize, operands: &[Option<&Matrix>]) -> u32 {
    if width.is_multiple_of(8) {
        vector_width(operands)
    } else {
        1
    }
}
