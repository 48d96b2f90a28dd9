//! AdamW over every parameter at once, clipped by the global gradient norm, without the host. Formulas:
//! `kernels/adamw.cu`.

use super::device::CudaDevice;
use super::error::{Error, Result};
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::source::Specialisation;
use crate::ops::{MEASURED, PARTS};

/// Elements of one block's work.
const CHUNK: usize = 8192;

/// One parameter: all of one length and without gaps.
#[derive(Debug, Clone)]
pub struct CudaParameter {
    /// f32, updated.
    pub value: Matrix,
    /// f32, read, then set to zero.
    pub gradient: Matrix,
    /// f32, updated.
    pub first_moment: Matrix,
    /// f32, updated.
    pub second_moment: Matrix,
    /// bf16, written: what products read.
    pub working: Option<Matrix>,
    /// Decoupled weight decay.
    pub decay: f32,
}

/// Hyperparameters of one step (1711.05101).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaStep {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Counts from 1.
    pub step: u32,
    /// Multiplies every gradient first.
    pub gradient_scale: f32,
    /// The largest gradient norm that is left alone; infinity clips nothing.
    pub clip: f32,
}

/// Parameters laid out for [`CudaDevice::update`].
#[derive(Debug)]
pub struct Optimiser {
    /// Kept: the table holds their addresses.
    parameters: Vec<CudaParameter>,
    table: Matrix,
    chunks: Matrix,
    count: usize,
    norm: Matrix,
    report: Matrix,
    step: Matrix,
}

impl Optimiser {
    /// The parameters, in the order they were given.
    pub fn parameters(&self) -> &[CudaParameter] {
        &self.parameters
    }

    /// f32 of 2, after an update: the gradient norm before clipping (not finite: nothing was updated), and what
    /// gradients were multiplied with.
    pub fn norm(&self) -> &Matrix {
        &self.norm
    }

    /// f64 of 2, after an update: the sum of the losses measured, and the gradient norm before clipping.
    pub(super) fn report(&self) -> &Matrix {
        &self.report
    }
}

impl CudaDevice {
    /// Lays `parameters` out for updates.
    ///
    /// # Errors
    /// When one does not fit, or there is no memory for the tables.
    pub fn optimiser(&self, parameters: Vec<CudaParameter>) -> Result<Optimiser> {
        const NAME: &str = "adamw";
        let mut table: Vec<i32> = Vec::new();
        let mut chunks: Vec<i32> = Vec::new();
        for (index, parameter) in (0_i32..).zip(&parameters) {
            let length = parameter.value.len();
            let wide = [
                ("value", &parameter.value),
                ("gradient", &parameter.gradient),
                ("first moment", &parameter.first_moment),
                ("second moment", &parameter.second_moment),
            ];
            for (what, matrix) in wide {
                self.expect_row(NAME, what, matrix, Element::F32, length)?;
                push_word(&mut table, matrix.address());
            }
            if let Some(working) = &parameter.working {
                self.expect_row(NAME, "working copy", working, Element::Bf16, length)?;
            }
            push_word(&mut table, parameter.working.as_ref().map_or(0, Matrix::address));
            push_word(&mut table, length as u64);
            push_word(&mut table, u64::from(parameter.decay.to_bits()));
            push_chunks(&mut chunks, index, length)?;
        }
        let count = chunks.len() / 2;
        Ok(Optimiser {
            parameters,
            table: self.upload_i32(&table)?,
            chunks: self.upload_i32(&chunks)?,
            count,
            norm: self.matrix(Element::F32, 1, 2)?,
            report: self.matrix(Element::F64, 1, 2)?,
            step: self.matrix(Element::F32, 1, 8)?,
        })
    }

    /// Sets the hyperparameters of the next updates, in the order of the compute stream.
    ///
    /// # Errors
    /// When the step is 0, whose moments no correction makes right, or the driver refuses.
    pub fn set_step(&self, optimiser: &Optimiser, step: CudaStep) -> Result<()> {
        if step.step == 0 {
            return Err(Error::Operand {
                operation: "adamw",
                expected: "a step of at least 1".to_owned(),
                found: step.step.to_string(),
            });
        }
        // In f64: 1 − β^t loses half its digits in f32 where β is near 1.
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(f64::from(step.step))) as f32;
        let words = [
            step.rate,
            step.beta1,
            step.beta2,
            step.epsilon,
            correction(step.beta1),
            correction(step.beta2),
            step.gradient_scale,
            step.clip,
        ];
        self.overwrite(&optimiser.step, &words)
    }

    /// The sums of `losses`, rows of f32, and of the squares of `gradients`, f32 without gaps: f32 of
    /// [`MEASURED`], each sum as [`PARTS`] entries that add up to it in f64.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn measure(&self, gradients: &[Matrix], losses: &[Matrix]) -> Result<Matrix> {
        const NAME: &str = "measure";
        let mut table: Vec<i32> = Vec::new();
        let mut chunks: Vec<i32> = Vec::new();
        for (index, gradient) in (0_i32..).zip(gradients) {
            self.expect_row(NAME, "the gradient", gradient, Element::F32, gradient.len())?;
            push_word(&mut table, gradient.address());
            push_word(&mut table, gradient.len() as u64);
            push_chunks(&mut chunks, index, gradient.len())?;
        }
        let count = chunks.len() / 2;
        let (table, chunks) = (self.upload_i32(&table)?, self.upload_i32(&chunks)?);
        let partial = self.matrix(Element::F64, 1, count)?;
        let loss = self.zeros(Element::F64, 1, 1)?;
        let module = self.kernels.get(adamw_kernel())?;
        for losses in losses {
            self.expect_row(NAME, "the losses", losses, Element::F32, losses.len())?;
            let arguments = Arguments::new().start(losses).int(losses.len()).start(&loss);
            module.launch("add_losses", Grid::line(1, 1024), self.compute(), arguments)?;
        }
        if count > 0 {
            let squares = Arguments::new().start(&table).start(&chunks).start(&partial);
            module.launch("squares", Grid::line(count, 256), self.compute(), squares)?;
        }
        let measured = self.matrix(Element::F32, 1, MEASURED)?;
        let sums = Arguments::new()
            .start(&partial)
            .int(count)
            .start(&loss)
            .start(&measured);
        module.launch("add_squares", Grid::line(1, 1024), self.compute(), sums)?;
        Ok(measured)
    }

    /// Updates every parameter by the step that was set, unless what was measured, a row of [`MEASURED`] for each
    /// rank, is not finite: then nothing else changes. Gradients are left at zero either way.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn update(&self, optimiser: &Optimiser, measured: &Matrix) -> Result<()> {
        const NAME: &str = "adamw";
        let ranks = measured.rows();
        self.expect(NAME, "measured", measured, Element::F32, (ranks, MEASURED))?;
        self.expect_row(NAME, "measured", measured, Element::F32, ranks * MEASURED)?;
        let module = self.kernels.get(adamw_kernel())?;
        let norm = Arguments::new()
            .start(measured)
            .int(ranks)
            .start(&optimiser.step)
            .start(&optimiser.norm)
            .start(&optimiser.report);
        module.launch("gradient_norm", Grid::line(1, 32), self.compute(), norm)?;
        if optimiser.count == 0 {
            return Ok(());
        }
        let update = Arguments::new()
            .start(&optimiser.table)
            .start(&optimiser.chunks)
            .start(&optimiser.step)
            .start(&optimiser.norm);
        module.launch("adamw", Grid::line(optimiser.count, 256), self.compute(), update)
    }
}

/// Which pieces of a parameter there are, for the blocks that take one each.
fn push_chunks(chunks: &mut Vec<i32>, parameter: i32, length: usize) -> Result<()> {
    let count = i32::try_from(length.div_ceil(CHUNK)).map_err(|_| too_large(length))?;
    chunks.extend((0..count).flat_map(|chunk| [parameter, chunk]));
    Ok(())
}

/// The update's kernels.
pub(super) fn adamw_kernel() -> Specialisation {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).into();
    Specialisation::new("adamw.cu", [("CHUNK", number(CHUNK)), ("PARTS", number(PARTS))])
}

/// 8 bytes as they lie in memory, the low half first.
fn push_word(table: &mut Vec<i32>, word: u64) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    table.extend([i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([e, f, g, h])]);
}

fn too_large(length: usize) -> Error {
    Error::Operand {
        operation: "adamw",
        expected: format!("parameters of fewer than 2^31 pieces of {CHUNK}"),
        found: format!("{length} elements"),
    }
}
