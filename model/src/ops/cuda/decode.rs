//! Decoding one token a sequence: products with few rows, and attention over a cache. Formulas:
//! `kernels/matvec.cu`, `kernels/decode.cu`.

use super::attention::window_over;
use super::device::CudaDevice;
use super::error::Result;
use super::launch::{Arguments, Grid};
use super::matrix::{Element, Matrix};
use super::rope::RopeAngles;
use super::source::Specialisation;
use super::vector_width;

/// Keys of one block's work: few, so that one sequence fills the device.
const SPLIT: usize = 64;
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

/// Query heads that a block reads each key for: a divisor of the group.
fn heads_together(head_dim: usize, group: usize) -> usize {
    (1..=8)
        .rev()
        .find(|&count| group.is_multiple_of(count) && count * head_dim <= HEAD_ELEMENTS)
        .unwrap_or(1)
}

/// Decoding's three kernels for heads of `head_dim`, `group` query heads to a KV head.
pub(super) fn decode_kernel(head_dim: usize, group: usize) -> Specialisation {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let macros = [
        ("HEAD_DIM", number(head_dim).into()),
        ("HEADS", number(heads_together(head_dim, group)).into()),
        ("SPLIT", number(SPLIT).into()),
    ];
    Specialisation::new("decode.cu", macros)
}

impl CudaDevice {
    /// `output = x · weightᵀ + residual` for at most 8 rows, bound by reading the weight: all bf16, x `(rows, in)`,
    /// weight `(out, in)`, residual and output `(rows, out)`, which may be one.
    ///
    /// # Errors
    /// When an operand does not fit, or the driver refuses.
    pub fn few_rows(
        &self,
        x: &Matrix,
        weight: &Matrix,
        residual: Option<&Matrix>,
        output: &Matrix,
    ) -> Result<()> {
        const NAME: &str = "matvec";
        let shape = (x.rows(), weight.rows());
        if x.rows() == 0 || x.rows() > FEW_ROWS {
            return Err(self.wrong(NAME, "x", &format!("1 to {FEW_ROWS} rows"), x));
        }
        self.expect(NAME, "x", x, Element::Bf16, (x.rows(), weight.columns()))?;
        self.expect(
            NAME,
            "weight",
            weight,
            Element::Bf16,
            (weight.rows(), x.columns()),
        )?;
        self.expect(NAME, "output", output, Element::Bf16, shape)?;
        if let Some(residual) = residual {
            self.expect(NAME, "residual", residual, Element::Bf16, shape)?;
        }
        let rows = u32::try_from(x.rows()).unwrap_or(u32::MAX);
        let macros = [
            ("ROWS", rows.into()),
            ("VECTOR", vector_width(&[Some(x), Some(weight)]).into()),
        ];
        let arguments = Arguments::new()
            .matrix(x)
            .matrix(weight)
            .any_matrix(residual)
            .matrix(output)
            .int(weight.columns())
            .int(weight.rows());
        let grid = Grid::line(weight.rows().div_ceil(8), 256);
        let module = self.kernels.get(Specialisation::new("matvec.cu", macros))?;
        module.launch(NAME, grid, self.compute(), arguments)
    }

    /// Appends one token's k and v a sequence to the cache, rotates q (in place) and k by `angles`, and attends q
    /// to what is there, at most `window` tokens of it (0: all).
    ///
    /// q and output bf16 `(sequences, query_heads · head_dim)`, k and v `(sequences, kv_heads · head_dim)`;
    /// head_dim 16, 32, 64 or 128; leading dimensions and addresses must allow accesses of 16 bytes.
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
    ) -> Result<()> {
        const NAME: &str = "decode_attention";
        let heads = self.expect_decode(NAME, q, k, v, cache, angles, output, head_dim)?;
        let (query_heads, kv_heads) = heads;
        let (sequences, group) = (q.rows(), query_heads / kv_heads);
        let together = heads_together(head_dim, group);
        let splits = cache.capacity.div_ceil(SPLIT);
        let partial = self.matrix(Element::F32, sequences * query_heads * splits, head_dim + 2)?;
        let module = self.kernels.get(decode_kernel(head_dim, group))?;
        let append = Arguments::new()
            .matrix(q)
            .int(query_heads)
            .matrix(k)
            .matrix(v)
            .int(kv_heads)
            .start(cache.keys)
            .matrix(cache.values)
            .int(cache.capacity)
            .start(cache.lengths)
            .start_of_any(angles.map(|angles| angles.cosine))
            .start_of_any(angles.map(|angles| angles.sine));
        module.launch(
            "decode_append",
            Grid::line(sequences, 128),
            self.compute(),
            append,
        )?;
        let attend = Arguments::new()
            .matrix(q)
            .start(cache.keys)
            .matrix(cache.values)
            .int(cache.capacity)
            .start(cache.lengths)
            .start(&partial)
            .int(query_heads)
            .int(group)
            .int(window_over(cache.capacity, window))
            .float((head_dim as f32).sqrt().recip());
        let grid = Grid {
            blocks: [query_heads / together, sequences, splits],
            threads: 128,
            shared: 0,
        };
        module.launch("decode_attend", grid, self.compute(), attend)?;
        let combine = Arguments::new().start(&partial).matrix(output).int(splits);
        let grid = Grid {
            blocks: [query_heads, sequences, 1],
            threads: u32::try_from(head_dim).unwrap_or(u32::MAX),
            shared: 0,
        };
        module.launch("decode_combine", grid, self.compute(), combine)
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
        for (what, operand) in [("q", q), ("keys", cache.keys), ("values", cache.values)] {
            if !operand.allows_vectors() {
                return Err(self.wrong(name, what, "rows that begin at multiples of 16 bytes", operand));
            }
        }
        Ok(heads)
    }
}
