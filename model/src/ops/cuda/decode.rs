//! Decoding one token a sequence: products with few rows, with what comes before and after them, and attention over a
//! cache. Formulas: `kernels/matvec.cu`, `kernels/decode.cu`.

use super::attention::window_over;
use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid, Start};
use super::matrix::{Element, Matrix};
use super::rope::RopeAngles;
use super::source::Specialisation;
use super::vector_width;

/// Keys of one block's work are a multiple of this.
const SPLIT_STEP: usize = 64;
/// Blocks for each multiprocessor that keys are split for: so many that one sequence fills the device, and so few
/// that many sequences do not pay for adding up.
const BLOCKS: usize = 8;
/// Rows up to which [`CudaDevice::few_rows`] serves.
pub(super) const FEW_ROWS: usize = 8;
/// Threads of a warp that may share a key, in elements of a head, for all query heads of a block.
const HEAD_ELEMENTS: usize = 512;

/// Keys and values of the tokens so far: bf16 `(sequences · capacity, kv_heads · head_dim)` each, one leading
/// dimension.
#[derive(Debug, Clone, Copy)]
pub struct DecodeCache<'a> {
    /// Keys.
    pub keys: &'a Matrix,
    /// Values.
    pub values: &'a Matrix,
    /// Tokens of each sequence for which there is room.
    pub capacity: usize,
    /// i32, tokens of each sequence, the new one counted; at most the capacity, which is the caller's to see to.
    pub lengths: &'a Matrix,
}

/// What a product of few rows does to its operands besides.
#[derive(Debug, Clone, Copy, Default)]
pub struct FewRows<'a> {
    /// f32 `(1, in)` and an epsilon: x is normed first, by `rms_norm.cu`'s formula.
    pub norm: Option<(&'a Matrix, f32)>,
    /// bf16 `(out, in)`, with the weight's leading dimension: its product, by silu, multiplies the weight's. Only
    /// after a norm.
    pub gate: Option<&'a Matrix>,
    /// bf16 `(rows, out)`, added to the product.
    pub residual: Option<&'a Matrix>,
    /// Whether the weights may be read before what is queued earlier has ended: they, and the gate, must not have been
    /// written by the last kernel.
    pub early: bool,
}

impl FewRows<'_> {
    fn start(&self) -> Start {
        if self.early { Start::Early } else { Start::InOrder }
    }
}

/// Query heads that a block reads each key for: a divisor of the group.
fn heads_together(head_dim: usize, group: usize) -> usize {
    (1..=8)
        .rev()
        .find(|&count| group.is_multiple_of(count) && count * head_dim <= HEAD_ELEMENTS)
        .unwrap_or(1)
}

/// Attention's two kernels of decoding, for heads of `head_dim`, `group` query heads to a KV head.
pub(super) fn decode_kernel(head_dim: usize, group: usize) -> Specialisation {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let macros = [
        ("HEAD_DIM", number(head_dim).into()),
        ("HEADS", number(heads_together(head_dim, group)).into()),
    ];
    Specialisation::new("decode.cu", macros)
}

/// The product of `rows` rows, of this kind and with an output of this type.
pub(super) fn few_rows_kernel(rows: usize, vector: u32, kind: u32, output: Element) -> Specialisation {
    let macros = [
        ("ROWS", u32::try_from(rows).unwrap_or(u32::MAX).into()),
        ("VECTOR", vector.into()),
        ("KIND", kind.into()),
        ("OUTPUT", output.kernel_name().into()),
    ];
    Specialisation::new("matvec.cu", macros)
}

impl CudaDevice {
    /// `output = x · weightᵀ`, with `what` besides, for at most 8 rows, bound by reading the weight: x bf16 `(rows, in)`,
    /// weight bf16 `(out, in)`, output bf16 or f32 `(rows, out)`. A residual may be the output.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn few_rows(&self, x: &Matrix, weight: &Matrix, what: FewRows<'_>, output: &Matrix) -> Result<()> {
        const NAME: &str = "matvec";
        let shape = (x.rows(), weight.rows());
        if x.rows() == 0 || x.rows() > FEW_ROWS {
            return Err(self.wrong(NAME, "x", &format!("1 to {FEW_ROWS} rows"), x));
        }
        self.expect(NAME, "x", x, Element::Bf16, (x.rows(), weight.columns()))?;
        let layer = (weight.rows(), x.columns());
        self.expect(NAME, "weight", weight, Element::Bf16, layer)?;
        self.expect_float(NAME, "output", output)?;
        self.expect(NAME, "output", output, output.element(), shape)?;
        if let Some(residual) = what.residual {
            self.expect(NAME, "residual", residual, Element::Bf16, shape)?;
        }
        if let Some((norm, _)) = what.norm {
            self.expect_row(NAME, "norm", norm, Element::F32, x.columns())?;
        }
        if let Some(gate) = what.gate {
            self.expect(NAME, "gate", gate, Element::Bf16, layer)?;
            if gate.leading() != weight.leading() || what.norm.is_none() {
                let expected = "a norm, and the weight's leading dimension";
                return Err(self.wrong(NAME, "gate", expected, gate));
            }
        }
        let (norm, epsilon) = what.norm.unzip();
        let kind = u32::from(norm.is_some()) + u32::from(what.gate.is_some());
        let vector = vector_width(&[Some(x), Some(weight), norm, what.gate]);
        let arguments = Arguments::new()
            .matrix(x)
            .start_of_any(norm)
            .float(epsilon.unwrap_or_default())
            .start(weight)
            .start_of_any(what.gate)
            .long(weight.leading())
            .any_matrix(what.residual)
            .matrix(output)
            .int(weight.columns())
            .int(weight.rows());
        let grid = Grid::line(weight.rows().div_ceil(8), 256);
        let kernel = few_rows_kernel(x.rows(), vector, kind, output.element());
        let module = self.kernels.get(kernel)?;
        module.launch_at(what.start(), NAME, grid, self.compute(), arguments)
    }

    /// Appends one token's k and v a sequence to the cache, k rotated by `angles`, and attends q, rotated likewise, to
    /// what is there, at most `window` tokens of it (0: all).
    ///
    /// q and output bf16 `(sequences, query_heads · head_dim)`, k and v `(sequences, kv_heads · head_dim)`;
    /// head_dim 16, 32, 64 or 128; leading dimensions and addresses must allow accesses of 16 bytes. With `early` the
    /// cache and the lengths may be read before what is queued earlier has ended: the last kernel must not have written
    /// them.
    ///
    /// # Errors
    /// When an operand does not fit, there is no memory for partial sums, or the driver refuses.
    #[allow(clippy::too_many_arguments)] // what attention takes, and where it stands
    pub fn decode_attention(
        &self,
        q: &Matrix,
        k: &Matrix,
        v: &Matrix,
        cache: DecodeCache<'_>,
        angles: Option<RopeAngles<'_>>,
        output: &Matrix,
        head_dim: usize,
        window: usize,
        early: bool,
    ) -> Result<()> {
        const NAME: &str = "decode_attention";
        let heads = self.expect_decode(NAME, q, k, v, cache, angles, output, head_dim)?;
        let (query_heads, kv_heads) = heads;
        let (sequences, group) = (q.rows(), query_heads / kv_heads);
        let together = heads_together(head_dim, group);
        let (split, splits) = self.split(cache.capacity, sequences * query_heads / together);
        let partial = self.matrix(Element::F32, sequences * query_heads * splits, head_dim + 2)?;
        let module = self.kernels.get(decode_kernel(head_dim, group))?;
        let attend = Arguments::new()
            .matrix(q)
            .matrix(k)
            .matrix(v)
            .start(cache.keys)
            .matrix(cache.values)
            .int(cache.capacity)
            .start(cache.lengths)
            .start_of_any(angles.map(|angles| angles.cosine))
            .start_of_any(angles.map(|angles| angles.sine))
            .start(&partial)
            .int(query_heads)
            .int(group)
            .int(window_over(cache.capacity, window))
            .int(split)
            .float((head_dim as f32).sqrt().recip());
        let grid = Grid {
            blocks: [query_heads / together, sequences, splits],
            threads: 128,
            shared: 0,
        };
        let start = if early { Start::Early } else { Start::InOrder };
        module.launch_at(start, "decode_attend", grid, self.compute(), attend)?;
        let combine = Arguments::new().start(&partial).matrix(output).int(splits);
        let grid = Grid {
            blocks: [query_heads, sequences, 1],
            threads: u32::try_from(head_dim).unwrap_or(u32::MAX),
            shared: 0,
        };
        module.launch_at(Start::Early, "decode_combine", grid, self.compute(), combine)
    }

    /// Keys of one block's work, and parts, when each part of the keys is `blocks` blocks.
    fn split(&self, capacity: usize, blocks: usize) -> (usize, usize) {
        let wanted = (self.info.multiprocessors as usize * BLOCKS).div_ceil(blocks.max(1));
        let split = capacity.div_ceil(wanted.max(1)).next_multiple_of(SPLIT_STEP);
        (split, capacity.div_ceil(split))
    }

    /// (query heads, KV heads) when everything fits.
    #[allow(clippy::too_many_arguments)] // as its caller
    fn expect_decode(
        &self,
        name: &'static str,
        q: &Matrix,
        k: &Matrix,
        v: &Matrix,
        cache: DecodeCache<'_>,
        angles: Option<RopeAngles<'_>>,
        output: &Matrix,
        head_dim: usize,
    ) -> Result<(usize, usize)> {
        if !matches!(head_dim, 16 | 32 | 64 | 128) {
            return Err(self.wrong(
                name,
                "q",
                &format!("heads of 16, 32, 64 or 128, not {head_dim}"),
                q,
            ));
        }
        let heads = self.expect_heads(name, q, k, head_dim)?;
        let sequences = q.rows();
        self.expect(name, "q", q, Element::Bf16, (sequences, q.columns()))?;
        self.expect(name, "output", output, Element::Bf16, (sequences, q.columns()))?;
        for (what, operand) in [("k", k), ("v", v)] {
            self.expect(name, what, operand, Element::Bf16, (sequences, k.columns()))?;
        }
        for (what, operand) in [("keys", cache.keys), ("values", cache.values)] {
            let shape = (sequences * cache.capacity, k.columns());
            self.expect(name, what, operand, Element::Bf16, shape)?;
        }
        if cache.keys.leading() != cache.values.leading() {
            return Err(self.wrong(name, "values", "the keys' leading dimension", cache.values));
        }
        self.expect_row(name, "lengths", cache.lengths, Element::I32, sequences)?;
        for table in angles.iter().flat_map(|angles| [angles.cosine, angles.sine]) {
            self.expect_row(name, "angles", table, Element::F32, table.rows() * (head_dim / 2))?;
            if table.rows() < cache.capacity {
                return Err(self.wrong(name, "angles", &format!("{} positions", cache.capacity), table));
            }
        }
        let read = [
            ("q", q),
            ("k", k),
            ("v", v),
            ("keys", cache.keys),
            ("values", cache.values),
        ];
        for (what, operand) in read {
            if !operand.allows_vectors() {
                return Err(self.wrong(name, what, "rows that begin at multiples of 16 bytes", operand));
            }
        }
        Ok(heads)
    }
}
