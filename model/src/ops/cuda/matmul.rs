//! Matrix products in the three forms that a linear layer needs, with explicit leading dimensions.
//!
//! A plan is kept for each form, shape, leading dimensions, types and alignment. Its algorithm is cuBLASLt's first
//! proposal, or the best of several by the clock when tuning is on; the same plan gives the same bits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::cublas::{Addresses, Choice, Handle, Layout, Plan, Product};
use super::decode::{FEW_ROWS, FewRows};
use super::device::CudaDevice;
use super::driver::Context;
use super::error::{Error, Result};
use super::matrix::{Element, Matrix};

/// Bytes that algorithms may use: enough for every split of the inner dimension that pays.
const WORKSPACE: usize = 64 << 20;
/// Plans kept: a search over prefix slices meets thousands of shapes, each a few times.
const PLANS: usize = 4096;
/// Algorithms timed when tuning is on, and how often each runs.
const CANDIDATES: usize = 8;
const WARM_UP: usize = 2;
const TIMED: usize = 5;
/// Rows up to which reading the weight, not arithmetic, sets the time.
pub(super) const MATVEC_ROWS: usize = 4;
const _: () = assert!(MATVEC_ROWS <= FEW_ROWS);

/// What else goes into the result of a product.
#[derive(Debug, Clone, Copy, Default)]
pub enum Onto<'a> {
    /// Nothing: the output is written.
    #[default]
    Nothing,
    /// What the output already holds.
    Output,
    /// A matrix of the output's shape and type.
    Residual(&'a Matrix),
}

/// The plans of one device.
#[derive(Debug)]
pub(super) struct Matmuls {
    handle: Handle,
    tune: bool,
    plans: Mutex<Plans>,
    workspace: OnceLock<Matrix>,
}

#[derive(Debug, Default)]
struct Plans {
    by_product: HashMap<Product, Kept>,
    /// Products so far.
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    plan: Plan,
    choice: Choice,
    used: u64,
}

impl Matmuls {
    pub(super) fn new(context: &Arc<Context>, tune: bool) -> Result<Self> {
        Ok(Self {
            handle: Handle::new(context)?,
            tune,
            plans: Mutex::default(),
            workspace: OnceLock::new(),
        })
    }
}

impl Plans {
    /// Makes room by dropping the half that was used longest ago.
    fn make_room(&mut self) {
        if self.by_product.len() < PLANS {
            return;
        }
        let mut used: Vec<u64> = self.by_product.values().map(|kept| kept.used).collect();
        used.sort_unstable();
        let median = used.get(used.len() / 2).copied().unwrap_or(0);
        self.by_product.retain(|_, kept| kept.used > median);
    }
}

impl CudaDevice {
    /// `output = x · weightᵀ + bias`, onto nothing or onto something: x `(rows, in)` and weight `(out, in)` both
    /// bf16 or both f32, output bf16 or f32 `(rows, out)`, bias of `out` entries of the output's type. Sums are f32.
    ///
    /// # Errors
    /// When an operand does not fit, or cuBLASLt refuses.
    pub fn linear(
        &self,
        x: &Matrix,
        weight: &Matrix,
        bias: Option<&Matrix>,
        onto: Onto<'_>,
        output: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "linear";
        self.expect(NAME, "weight", weight, x.element(), (weight.rows(), x.columns()))?;
        self.expect(
            NAME,
            "output",
            output,
            output.element(),
            (x.rows(), weight.rows()),
        )?;
        let residual = match onto {
            Onto::Nothing => None,
            Onto::Output => Some(output),
            Onto::Residual(residual) => Some(residual),
        };
        let onto_bf16 = residual.is_none() || output.element() == Element::Bf16;
        let few = x.element() == Element::Bf16 && (1..=MATVEC_ROWS).contains(&x.rows());
        if few && onto_bf16 && bias.is_none() {
            let what = FewRows {
                residual,
                ..FewRows::default()
            };
            return self.few_rows(x, weight, what, output);
        }
        self.product(NAME, (x, false), (weight, true), bias, onto, output)
    }

    /// `grad_x = grad_output · weight`, onto nothing or onto something: grad_output `(rows, out)`, weight `(out,
    /// in)`, grad_x `(rows, in)`; types as in [`CudaDevice::linear`].
    ///
    /// # Errors
    /// When an operand does not fit, or cuBLASLt refuses.
    pub fn linear_backward_input(
        &self,
        grad_output: &Matrix,
        weight: &Matrix,
        onto: Onto<'_>,
        grad_x: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "linear_backward_input";
        let shape = (grad_output.columns(), weight.columns());
        self.expect(NAME, "weight", weight, grad_output.element(), shape)?;
        self.expect(
            NAME,
            "grad_x",
            grad_x,
            grad_x.element(),
            (grad_output.rows(), weight.columns()),
        )?;
        self.product(NAME, (grad_output, false), (weight, false), None, onto, grad_x)
    }

    /// `grad_weight += grad_outputᵀ · x`: grad_output `(rows, out)`, x `(rows, in)`, grad_weight bf16 or f32 `(out,
    /// in)`; types as in [`CudaDevice::linear`].
    ///
    /// # Errors
    /// When an operand does not fit, or cuBLASLt refuses.
    pub fn linear_backward_weight(
        &self,
        grad_output: &Matrix,
        x: &Matrix,
        grad_weight: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "linear_backward_weight";
        self.expect(
            NAME,
            "x",
            x,
            grad_output.element(),
            (grad_output.rows(), x.columns()),
        )?;
        let shape = (grad_output.columns(), x.columns());
        self.expect(NAME, "grad_weight", grad_weight, grad_weight.element(), shape)?;
        self.product(
            NAME,
            (grad_output, true),
            (x, false),
            None,
            Onto::Output,
            grad_weight,
        )
    }

    /// Checks what the three forms have in common, and runs the product. Inner dimensions agree already.
    fn product(
        &self,
        name: &'static str,
        (left, left_transposed): (&Matrix, bool),
        (right, right_transposed): (&Matrix, bool),
        bias: Option<&Matrix>,
        onto: Onto<'_>,
        output: &Matrix,
    ) -> Result<()> {
        self.expect_float(name, "the first operand", left)?;
        self.expect_float(name, "the output", output)?;
        let shape = (output.rows(), output.columns());
        if left.element() == Element::F32 && output.element() != Element::F32 {
            return Err(self.wrong(name, "the output", "f32, as the operands are", output));
        }
        if let Some(bias) = bias {
            self.expect_row(name, "bias", bias, output.element(), output.columns())?;
        }
        let source = match onto {
            Onto::Nothing => None,
            Onto::Output => Some(output),
            Onto::Residual(residual) => {
                self.expect(name, "residual", residual, output.element(), shape)?;
                Some(residual)
            }
        };
        if output.is_empty() {
            return Ok(());
        }
        if left.is_empty() || right.is_empty() {
            return Err(self.wrong(name, "the first operand", "an inner dimension above 0", left));
        }
        let product = Product {
            left: layout(left),
            right: layout(right),
            left_transposed,
            right_transposed,
            source: source.map(layout),
            target: layout(output),
            bias: bias.is_some(),
        };
        let addresses = Addresses {
            left: left.address(),
            right: right.address(),
            source: source.map(Matrix::address),
            target: output.address(),
            bias: bias.map(Matrix::address),
            workspace: self.workspace()?.address(),
        };
        self.planned(product, addresses, output)
    }

    fn workspace(&self) -> Result<&Matrix> {
        if let Some(workspace) = self.matmuls.workspace.get() {
            return Ok(workspace);
        }
        let fresh = self.matrix(Element::F32, 1, WORKSPACE / 4)?;
        Ok(self.matmuls.workspace.get_or_init(|| fresh))
    }

    fn planned(&self, product: Product, addresses: Addresses, output: &Matrix) -> Result<()> {
        let mut plans = self.matmuls.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.clock += 1;
        let used = plans.clock;
        plans.make_room();
        let kept = match plans.by_product.entry(product) {
            Entry::Occupied(kept) => kept.into_mut(),
            Entry::Vacant(place) => {
                // Timing waits, and a recording cannot.
                let tune = self.matmuls.tune && !self.recorder().is_recording();
                let wanted = if tune { CANDIDATES } else { 1 };
                let (plan, choices) = self.matmuls.handle.plans(&product, WORKSPACE, wanted)?;
                let choice = self.best_of(&plan, &choices, addresses, output)?;
                place.insert(Kept { plan, choice, used })
            }
        };
        kept.used = used;
        self.matmuls
            .handle
            .run(&kept.plan, &kept.choice, addresses, WORKSPACE, self.compute())
    }

    /// The quickest of `choices` on the operands themselves, with the output somewhere else.
    fn best_of(
        &self,
        plan: &Plan,
        choices: &[Choice],
        addresses: Addresses,
        output: &Matrix,
    ) -> Result<Choice> {
        let first = choices.first().copied().ok_or_else(|| Error::Operand {
            operation: "matmul",
            expected: "an algorithm".to_owned(),
            found: "none".to_owned(),
        })?;
        if choices.len() == 1 {
            return Ok(first);
        }
        let (rows, columns) = (output.rows(), output.columns());
        let scratch = match self.padded_matrix(output.element(), rows, columns, output.leading()) {
            // The product itself needs no more memory.
            Err(Error::OutOfMemory { .. }) => return Ok(first),
            scratch => scratch?,
        };
        let elsewhere = Addresses {
            target: scratch.address(),
            source: addresses.source.map(|source| {
                if source == addresses.target {
                    scratch.address()
                } else {
                    source
                }
            }),
            ..addresses
        };
        let run = |choice| {
            self.matmuls
                .handle
                .run(plan, choice, elsewhere, WORKSPACE, self.compute())
        };
        let mut best = (f32::INFINITY, first);
        for choice in choices {
            // One that does not run after all is passed over.
            if (0..WARM_UP).any(|_| run(choice).is_err()) {
                continue;
            }
            let begin = self.compute().timed_mark()?;
            for _ in 0..TIMED {
                run(choice)?;
            }
            let end = self.compute().timed_mark()?;
            self.wait()?;
            let time = begin.milliseconds_until(&end)?;
            if time < best.0 {
                best = (time, *choice);
            }
        }
        Ok(best.1)
    }
}

fn layout(matrix: &Matrix) -> Layout {
    Layout {
        element: matrix.element(),
        rows: matrix.rows(),
        columns: matrix.columns(),
        // Of a single row any leading dimension will do, and the library refuses one below the columns.
        leading: matrix.leading().max(matrix.columns()),
        alignment: 1 << matrix.address().trailing_zeros().min(4),
    }
}
