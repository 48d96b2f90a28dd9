//! Random operands, poisoned outputs, comparisons.

use std::collections::BTreeMap;

use espalier_model::ops::cuda::{CudaDevice, Element, Matrix, Result};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A matrix on the device and its elements on the host, exactly.
pub(crate) struct Operand {
    pub(crate) device: Matrix,
    pub(crate) host: Vec<f64>,
}

/// An output with what lies around it.
pub(crate) struct Output {
    whole: Matrix,
    pub(crate) view: Matrix,
}

impl Output {
    /// What an operation left somewhere, with nothing around it.
    pub(crate) fn of(view: Matrix) -> Self {
        Self {
            whole: view.clone(),
            view,
        }
    }
}

/// What a pass found.
pub(crate) struct Findings {
    pub(crate) comparisons: usize,
    pub(crate) failed: usize,
    /// Of every output, in order.
    pub(crate) results: Vec<blake3::Hash>,
}

pub(crate) struct Harness {
    pub(crate) device: CudaDevice,
    pub(crate) prefix: &'static str,
    random: ChaCha8Rng,
    /// Of the first pass; the second compares with it, not with float64.
    before: Option<Vec<blake3::Hash>>,
    findings: Findings,
    worst: BTreeMap<String, f64>,
}

impl Harness {
    pub(crate) fn new(device: CudaDevice, seed: u64, before: Option<Vec<blake3::Hash>>) -> Self {
        Self {
            device,
            prefix: "",
            random: ChaCha8Rng::seed_from_u64(seed),
            before,
            findings: Findings {
                comparisons: 0,
                failed: 0,
                results: Vec::new(),
            },
            worst: BTreeMap::new(),
        }
    }

    pub(crate) fn finish(self) -> (CudaDevice, Findings) {
        for (kind, error) in &self.worst {
            println!("largest {}{kind:36} {error:.1e}", self.prefix);
        }
        (self.device, self.findings)
    }

    /// A normal deviate (Box and Muller 1958).
    fn normal(&mut self) -> f64 {
        let (u, v): (f64, f64) = (self.random.random(), self.random.random());
        (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    pub(crate) fn normals(&mut self, count: usize, scale: f64) -> Vec<f32> {
        (0..count).map(|_| (self.normal() * scale) as f32).collect()
    }

    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        self.random.random_range(0..limit)
    }

    /// Normal deviates, `leading` apart, around which lies what is not a number.
    pub(crate) fn operand(
        &mut self,
        element: Element,
        (rows, columns): (usize, usize),
        leading: usize,
        scale: f64,
    ) -> Result<Operand> {
        let mut data = vec![f32::NAN; rows * leading];
        let mut host = Vec::with_capacity(rows * columns);
        for row in data.chunks_mut(leading.max(1)) {
            for place in row.iter_mut().take(columns) {
                let value = (self.normal() * scale) as f32;
                *place = match element {
                    Element::Bf16 => half::bf16::from_f32(value).to_f32(),
                    _ => value,
                };
                host.push(f64::from(*place));
            }
        }
        let whole = match element {
            Element::Bf16 => self.device.upload_bf16(&data, rows, leading)?,
            _ => self.device.upload_f32(&data, rows, leading)?,
        };
        Ok(Operand {
            device: whole.narrow_columns(0, columns)?,
            host,
        })
    }

    pub(crate) fn bf16(
        &mut self,
        rows: usize,
        columns: usize,
        leading: usize,
        scale: f64,
    ) -> Result<Operand> {
        self.operand(Element::Bf16, (rows, columns), leading, scale)
    }

    /// A row of f32.
    pub(crate) fn row(&mut self, columns: usize, scale: f64) -> Result<Operand> {
        self.operand(Element::F32, (1, columns), columns, scale)
    }

    /// Nothing but what is not a number.
    pub(crate) fn poison(
        &self,
        element: Element,
        rows: usize,
        columns: usize,
        leading: usize,
    ) -> Result<Output> {
        let whole = self.device.matrix(element, rows, leading)?;
        Ok(Output {
            view: whole.narrow_columns(0, columns)?,
            whole,
        })
    }

    /// A copy to be written over.
    pub(crate) fn copy(&self, operand: &Operand) -> Result<Output> {
        let matrix = &operand.device;
        let output = self.poison(
            matrix.element(),
            matrix.rows(),
            matrix.columns(),
            matrix.leading(),
        )?;
        self.device.cast(&output.view, matrix)?;
        Ok(output)
    }

    /// Compares what was computed with what should have been, by ‖found − expected‖ / ‖expected‖, and what lies
    /// around it with what did before. In the second pass, with the bits of the first.
    pub(crate) fn compare(
        &mut self,
        kind: &str,
        shape: &str,
        output: &Output,
        bound: f64,
        expected: impl FnOnce() -> Vec<f64>,
    ) -> Result<()> {
        self.compare_above(kind, shape, output, bound, 1e-300, expected)
    }

    /// As [`Harness::compare`], the expected norm counting as at least `least`: where it may be 0.
    pub(crate) fn compare_above(
        &mut self,
        kind: &str,
        shape: &str,
        output: &Output,
        bound: f64,
        least: f64,
        expected: impl FnOnce() -> Vec<f64>,
    ) -> Result<()> {
        let found = self.device.download(&output.view)?;
        let whole = self.device.download(&output.whole)?;
        let columns = output.view.columns();
        let untouched = whole
            .chunks(output.whole.columns().max(1))
            .all(|row| row.iter().skip(columns).all(|x| x.is_nan()));
        let Some(error) = self.judge(&found, least, expected) else {
            self.record(kind, shape, untouched, "differs from the first pass");
            return Ok(());
        };
        let good = error <= bound && untouched;
        let worst = self.worst.entry(kind.to_owned()).or_insert(0.0);
        *worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
        let around = if untouched {
            ""
        } else {
            ", and what lies around it was written"
        };
        println!(
            "{} {}{kind} {shape}: {error:.2e}, bound {bound:.0e}{around}",
            if good { "ok  " } else { "FAIL" },
            self.prefix
        );
        self.findings.comparisons += 1;
        self.findings.failed += usize::from(!good);
        Ok(())
    }

    /// Notes something that is right or wrong.
    pub(crate) fn record(&mut self, kind: &str, shape: &str, good: bool, wrong: &str) {
        self.findings.comparisons += 1;
        if !good {
            self.findings.failed += 1;
            println!("FAIL {}{kind} {shape}: {wrong}", self.prefix);
        }
    }

    /// The error in the first pass; none in the second when the bits are the same, and what is not a number else.
    fn judge(&mut self, found: &[f32], least: f64, expected: impl FnOnce() -> Vec<f64>) -> Option<f64> {
        let mut hasher = blake3::Hasher::new();
        for value in found {
            hasher.update(&value.to_bits().to_le_bytes());
        }
        let hash = hasher.finalize();
        let index = self.findings.results.len();
        self.findings.results.push(hash);
        if let Some(before) = &self.before {
            return if before.get(index) == Some(&hash) {
                None
            } else {
                Some(f64::NAN)
            };
        }
        let expected = expected();
        if expected.len() != found.len() {
            return Some(f64::NAN);
        }
        let apart: f64 = found
            .iter()
            .zip(&expected)
            .map(|(&a, &b)| (f64::from(a) - b).powi(2))
            .sum();
        let whole: f64 = expected.iter().map(|b| b * b).sum();
        Some(apart.sqrt() / whole.sqrt().max(least))
    }
}
