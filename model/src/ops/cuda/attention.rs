//! Causal attention, forward and backward, and the choice among its variants. Formulas:
//! `kernels/attention_forward.cu`, `kernels/attention_backward.cuh`.
//!
//! Hopper's warpgroup products have variants of their own for heads of 64 and 128. One of them that was compiled
//! just now is first run against the plain variant (`self_check.rs`): a compiler that gets such a kernel wrong
//! (ptxas 13.0 overwrote registers that a product still read) says nothing of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::CudaDevice;
use super::error::{Error, Result, Version};
use super::launch::{Arguments, Grid, Module};
use super::matrix::{Element, Matrix};
use super::self_check;
use super::source::Specialisation;

/// What attention runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Entries of a head: a multiple of 16, at most 128.
    pub head_dim: usize,
    /// Sequences, which do not see each other.
    pub sequences: usize,
    /// How many of the last keys a query sees, itself counted; 0: all.
    pub window: usize,
}

/// Where keys and values lie when they are more than the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedKeys {
    /// Keys of each sequence, those of the queries counted.
    pub keys: usize,
    /// Rows from one sequence's keys to the next one's.
    pub capacity: usize,
}

/// How one kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    /// Whether it uses Hopper's warpgroup products.
    pub(super) sm90: bool,
    /// 16 rows each.
    pub(super) warps: u32,
    /// Keys, or queries, at a time.
    pub(super) step: u32,
    /// Whether fragments stay in registers (backward only).
    pub(super) keep: bool,
}

/// The three kernels of one head dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Choice {
    pub(super) forward: Variant,
    pub(super) query: Variant,
    pub(super) key: Variant,
}

const fn variant(sm90: bool, warps: u32, step: u32, keep: bool) -> Variant {
    Variant {
        sm90,
        warps,
        step,
        keep,
    }
}

/// What runs on every device from Ampere on. The query half's larger step takes 104 KiB of shared memory at heads
/// of 128, which 8.6, 8.9 and 12.x do not have.
pub(super) fn plain_choice(capability: Version) -> Choice {
    let roomy = matches!((capability.major, capability.minor), (8, 0 | 7) | (9 | 10, _));
    Choice {
        forward: variant(false, 4, 64, false),
        query: variant(false, 4, if roomy { 64 } else { 32 }, false),
        key: variant(false, 4, 32, false),
    }
}

/// The fastest of those measured on an H200.
pub(super) fn hopper_choice(head_dim: usize) -> Option<Choice> {
    match head_dim {
        64 => Some(Choice {
            forward: variant(true, 4, 128, false),
            query: variant(true, 4, 64, false),
            key: variant(true, 4, 64, true),
        }),
        128 => Some(Choice {
            forward: variant(true, 12, 64, false),
            query: variant(true, 4, 64, false),
            key: variant(true, 4, 64, false),
        }),
        _ => None,
    }
}

/// The variants that this device runs, by head dimension.
#[derive(Debug, Default)]
pub(super) struct Variants {
    chosen: Mutex<HashMap<usize, Choice>>,
}

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

impl Variant {
    /// Rows of one block.
    fn rows(self) -> usize {
        16 * self.warps as usize
    }

    /// Bytes of tiles of `rows` rows; the warpgroup's begin at multiples of 1024.
    fn tile_bytes(self, rows: usize, head_dim: usize) -> u32 {
        number(if self.sm90 {
            rows * head_dim * 2 + 1024
        } else {
            rows * (head_dim + 8) * 2
        })
    }

    pub(super) fn forward_kernel(self, head_dim: usize) -> Specialisation {
        let (head_dim, warps, keys) = (number(head_dim).into(), self.warps.into(), self.step.into());
        if self.sm90 {
            let macros = [("HEAD_DIM", head_dim), ("WARPS", warps), ("KEYS", keys)];
            return Specialisation::new("attention_forward_sm90.cu", macros);
        }
        let macros = [
            ("HEAD_DIM", head_dim),
            ("WARPS", warps),
            ("ROW_TILES", 1.into()),
            ("KEYS", keys),
        ];
        Specialisation::new("attention_forward.cu", macros)
    }

    fn backward_kernel(self, head_dim: usize, plain: &'static str, sm90: &'static str) -> Specialisation {
        let macros = [
            ("HEAD_DIM", number(head_dim).into()),
            ("WARPS", self.warps.into()),
            ("STEP", self.step.into()),
            ("KEEP", u32::from(self.keep).into()),
        ];
        Specialisation::new(if self.sm90 { sm90 } else { plain }, macros)
    }

    pub(super) fn query_kernel(self, head_dim: usize) -> Specialisation {
        let (plain, sm90) = ("attention_backward_query.cu", "attention_backward_query_sm90.cu");
        self.backward_kernel(head_dim, plain, sm90)
    }

    pub(super) fn key_kernel(self, head_dim: usize) -> Specialisation {
        let (plain, sm90) = ("attention_backward_key.cu", "attention_backward_key_sm90.cu");
        self.backward_kernel(head_dim, plain, sm90)
    }
}

/// Operands of the forward; what is written comes last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forward<'a> {
    pub(super) q: &'a Matrix,
    pub(super) k: &'a Matrix,
    pub(super) v: &'a Matrix,
    pub(super) output: &'a Matrix,
    pub(super) log_sums: &'a Matrix,
}

/// What the forward read and wrote, and the gradient to its output.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// bf16 `(tokens, query_heads · head_dim)`.
    pub q: &'a Matrix,
    /// bf16 `(tokens, kv_heads · head_dim)`.
    pub k: &'a Matrix,
    /// As k.
    pub v: &'a Matrix,
    /// As q.
    pub output: &'a Matrix,
    /// f32 of `query_heads · tokens`.
    pub log_sums: &'a Matrix,
    /// As q.
    pub grad_output: &'a Matrix,
}

/// Where the backward writes: bf16, shaped as q, k and v.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradients<'a> {
    /// To q; may lie over output, not over q or grad_output, which are read again when it is written.
    pub q: &'a Matrix,
    /// To k.
    pub k: &'a Matrix,
    /// To v.
    pub v: &'a Matrix,
}

impl CudaDevice {
    /// `output = softmax(q kᵀ / √head_dim) v` within each sequence and each head, a query head reading the KV head
    /// of its group, every query seeing the keys up to its own position; and the log of each softmax's denominator.
    ///
    /// q and output (written) bf16 `(sequences · tokens, query_heads · head_dim)`; k and v bf16 `(sequences ·
    /// capacity, kv_heads · head_dim)`, `capacity` being `tokens` without `cached`; log_sums (written) f32 of
    /// `query_heads · sequences · tokens`, head by head. Leading dimensions and addresses must allow accesses of 16
    /// bytes. output may lie over q.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    #[allow(clippy::too_many_arguments)] // three operands, two results, two shapes
    pub fn attention(
        &self,
        q: &Matrix,
        k: &Matrix,
        v: &Matrix,
        output: &Matrix,
        log_sums: &Matrix,
        shape: AttentionShape,
        cached: Option<CachedKeys>,
    ) -> Result<()> {
        let chosen = self.attention_choice(shape.head_dim)?.forward;
        let operands = Forward {
            q,
            k,
            v,
            output,
            log_sums,
        };
        let module = self.kernels.get(chosen.forward_kernel(shape.head_dim))?;
        self.run_attention(operands, shape, cached, chosen, &module)
    }

    /// The gradients of [`CudaDevice::attention`] without a cache.
    ///
    /// # Errors
    /// When an operand does not fit, there is no memory for δ (f32 a query and head), or the driver refuses.
    pub fn attention_backward(
        &self,
        inputs: AttentionInputs<'_>,
        gradients: AttentionGradients<'_>,
        shape: AttentionShape,
    ) -> Result<()> {
        let choice = self.attention_choice(shape.head_dim)?;
        let modules = [
            self.kernels.get(choice.query.query_kernel(shape.head_dim))?,
            self.kernels.get(choice.key.key_kernel(shape.head_dim))?,
        ];
        self.run_attention_backward(inputs, gradients, shape, choice, &modules)
    }

    /// Has the variants for heads of `head_dim` compiled and checked. Waits for the device when one is new: so
    /// not while work is being captured.
    ///
    /// # Errors
    /// When the head dimension is not supported or a kernel does not compile.
    pub fn prepare_attention(&self, head_dim: usize) -> Result<()> {
        self.attention_choice(head_dim).map(|_| ())
    }

    /// The variants to use for heads of `head_dim`, checked.
    pub(super) fn attention_choice(&self, head_dim: usize) -> Result<Choice> {
        if !head_dim.is_multiple_of(16) || !(16..=128).contains(&head_dim) {
            return Err(Error::Operand {
                operation: "attention",
                expected: "a head dimension that is a multiple of 16, at most 128".to_owned(),
                found: head_dim.to_string(),
            });
        }
        let mut chosen = self
            .variants
            .chosen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(&choice) = chosen.get(&head_dim) {
            return Ok(choice);
        }
        let plain = plain_choice(self.info.capability);
        let is_hopper = self.info.capability == Version { major: 9, minor: 0 };
        let hopper = hopper_choice(head_dim).filter(|_| is_hopper && !self.options.plain_attention);
        let choice = match hopper {
            Some(hopper) => self_check::sound_of(self, head_dim, hopper, plain)?,
            None => plain,
        };
        chosen.insert(head_dim, choice);
        Ok(choice)
    }

    /// The forward with one variant.
    pub(super) fn run_attention(
        &self,
        operands: Forward<'_>,
        shape: AttentionShape,
        cached: Option<CachedKeys>,
        variant: Variant,
        module: &Arc<Module>,
    ) -> Result<()> {
        const NAME: &str = "attention_forward";
        let Forward {
            q,
            k,
            v,
            output,
            log_sums,
        } = operands;
        let (query_heads, kv_heads) = self.expect_heads(NAME, q, k, shape.head_dim)?;
        let tokens = self.tokens_of(NAME, q, shape)?;
        let CachedKeys { keys, capacity } = cached.unwrap_or(CachedKeys {
            keys: tokens,
            capacity: tokens,
        });
        if keys < tokens || capacity < keys {
            let expected = format!("{tokens} to {capacity} keys, not {keys}");
            return Err(self.wrong(NAME, "keys", &expected, k));
        }
        for (what, operand) in [("q", q), ("output", output)] {
            self.expect_rows(NAME, what, operand, (q.rows(), q.columns()))?;
        }
        for (what, operand) in [("k", k), ("v", v)] {
            self.expect_rows(NAME, what, operand, (shape.sequences * capacity, k.columns()))?;
        }
        self.expect_row(NAME, "log_sums", log_sums, Element::F32, query_heads * q.rows())?;
        let arguments = Arguments::new()
            .matrix(q)
            .matrix(k)
            .matrix(v)
            .matrix(output)
            .start(log_sums)
            .int(shape.sequences)
            .int(tokens)
            .int(keys)
            .int(capacity)
            .int(query_heads / kv_heads)
            .int(window_over(keys, shape.window))
            .float(scale(shape));
        let grid = Grid {
            blocks: [query_heads, shape.sequences, tokens.div_ceil(variant.rows())],
            threads: 32 * variant.warps,
            shared: variant.tile_bytes(variant.rows() + 4 * variant.step as usize, shape.head_dim),
        };
        module.launch(NAME, grid, self.compute(), arguments)
    }

    /// The backward with one choice of variants; `modules` are those of its query and key halves.
    pub(super) fn run_attention_backward(
        &self,
        inputs: AttentionInputs<'_>,
        gradients: AttentionGradients<'_>,
        shape: AttentionShape,
        choice: Choice,
        modules: &[Arc<Module>; 2],
    ) -> Result<()> {
        const NAME: &str = "attention_backward";
        let AttentionInputs {
            q,
            k,
            v,
            output,
            log_sums,
            grad_output,
        } = inputs;
        let (query_heads, kv_heads) = self.expect_heads(NAME, q, k, shape.head_dim)?;
        let tokens = self.tokens_of(NAME, q, shape)?;
        let like_q = [
            ("q", q),
            ("output", output),
            ("grad_output", grad_output),
            ("grad_q", gradients.q),
        ];
        for (what, operand) in like_q {
            self.expect_rows(NAME, what, operand, (q.rows(), q.columns()))?;
        }
        for (what, operand) in [
            ("k", k),
            ("v", v),
            ("grad_k", gradients.k),
            ("grad_v", gradients.v),
        ] {
            self.expect_rows(NAME, what, operand, (q.rows(), k.columns()))?;
        }
        self.expect_row(NAME, "log_sums", log_sums, Element::F32, query_heads * q.rows())?;
        // The half that gives grad_k and grad_v runs after the one that writes grad_q.
        for read_later in [q, grad_output] {
            if gradients.q.shares_buffer(read_later) {
                let expected = "another buffer than that of q and of grad_output";
                return Err(self.wrong(NAME, "grad_q", expected, gradients.q));
            }
        }
        let delta = self.matrix(Element::F32, query_heads, q.rows())?;
        let common = |arguments: Arguments| {
            arguments
                .int(shape.sequences)
                .int(tokens)
                .int(query_heads / kv_heads)
                .int(window_over(tokens, shape.window))
                .float(scale(shape))
        };
        let [query_module, key_module] = modules;
        let grid = |heads: usize, variant: Variant, extra: u32| {
            let rows = variant.rows();
            Grid {
                blocks: [heads, shape.sequences, tokens.div_ceil(rows)],
                threads: 32 * variant.warps,
                shared: variant.tile_bytes(2 * rows + 4 * variant.step as usize, shape.head_dim) + extra,
            }
        };
        let query = Arguments::new()
            .matrix(q)
            .matrix(k)
            .matrix(v)
            .matrix(output)
            .matrix(grad_output)
            .start(log_sums)
            .start(&delta)
            .matrix(gradients.q);
        let query_grid = grid(query_heads, choice.query, 0);
        query_module.launch(
            "attention_backward_query",
            query_grid,
            self.compute(),
            common(query),
        )?;
        let key = Arguments::new()
            .matrix(q)
            .matrix(k)
            .matrix(v)
            .matrix(grad_output)
            .start(log_sums)
            .start(&delta)
            .matrix(gradients.k)
            .matrix(gradients.v);
        let key_grid = grid(kv_heads, choice.key, 16 * choice.key.step);
        key_module.launch("attention_backward_key", key_grid, self.compute(), common(key))
    }

    /// (query heads, KV heads), the one a multiple of the other.
    pub(super) fn expect_heads(
        &self,
        operation: &'static str,
        q: &Matrix,
        k: &Matrix,
        head_dim: usize,
    ) -> Result<(usize, usize)> {
        let (query_heads, kv_heads) = (q.columns() / head_dim, k.columns() / head_dim);
        let whole = q.columns().is_multiple_of(head_dim) && k.columns().is_multiple_of(head_dim);
        if !whole || kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            let expected = format!("whole groups of {kv_heads} KV heads of {head_dim}");
            return Err(self.wrong(operation, "q", &expected, q));
        }
        Ok((query_heads, kv_heads))
    }

    fn tokens_of(&self, operation: &'static str, q: &Matrix, shape: AttentionShape) -> Result<usize> {
        if shape.sequences == 0 || !q.rows().is_multiple_of(shape.sequences) {
            let expected = format!("rows of {} equal sequences", shape.sequences);
            return Err(self.wrong(operation, "q", &expected, q));
        }
        Ok(q.rows() / shape.sequences)
    }

    /// bf16 of that shape, each row beginning at a multiple of 16 bytes.
    fn expect_rows(
        &self,
        operation: &'static str,
        what: &str,
        found: &Matrix,
        shape: (usize, usize),
    ) -> Result<()> {
        self.expect(operation, what, found, Element::Bf16, shape)?;
        if found.allows_vectors() {
            return Ok(());
        }
        Err(self.wrong(operation, what, "rows that begin at multiples of 16 bytes", found))
    }
}

/// What the kernels take for the window over `keys` keys, 0 for all of them: one as wide as there are keys hides none,
/// and one near 2³¹ would pass an int where it is added to a position.
pub(super) fn window_over(keys: usize, window: usize) -> usize {
    if window < keys { window } else { 0 }
}

fn scale(shape: AttentionShape) -> f32 {
    (shape.head_dim as f32).sqrt().recip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_hides_no_key_is_none() {
        assert_eq!(window_over(64, 63), 63);
        for window in [0, 64, 65, i32::MAX as usize, usize::MAX] {
            assert_eq!(window_over(64, window), 0, "{window}");
        }
    }
}
