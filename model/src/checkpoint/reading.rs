//! Reading one tensor, by many threads: from the encoding of its file to the type in which it is wanted, and in the order
//! in which it is wanted.
//!
//! What is stored as it is wanted is copied and never decoded. A file is read from front to back, whatever the order of the
//! result. Memory beyond that is two pieces a thread.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use rayon::prelude::*;

use super::stored::{Encoding, Stored, WeightFile};
use crate::ops::Axis;
use crate::sort::Order;
use crate::tensor::{bf16_bits, fresh};
use crate::{ElementType, Elements, Error, Result};

/// Elements that a thread reads at a time, about: so few that they stay in its cache.
const PIECE: usize = 1 << 17;

/// What a tensor is read as.
pub trait Element: Copy + Default + Send + Sync {
    /// Rounded from f32, ties to even.
    fn of(value: f32) -> Self;
    /// From bf16, as a file has it.
    fn of_bf16(bytes: [u8; 2]) -> Self;
}

impl Element for f32 {
    fn of(value: f32) -> Self {
        value
    }

    fn of_bf16(bytes: [u8; 2]) -> Self {
        half::bf16::from_le_bytes(bytes).to_f32()
    }
}

/// The bits of bf16.
impl Element for u16 {
    fn of(value: f32) -> Self {
        bf16_bits(value)
    }

    fn of_bf16(bytes: [u8; 2]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

/// One tensor of a file, row by row, in this type, and in this order where there is one.
///
/// # Errors
/// When the file cannot be read any more, or the order is not one of the tensor's.
pub fn read(
    file: &WeightFile,
    name: &str,
    stored: &Stored,
    element_type: ElementType,
    order: Option<&Order>,
) -> Result<Elements> {
    Ok(match element_type {
        ElementType::F32 => Elements::F32(read_vec(file, name, stored, order)?),
        ElementType::Bf16 => Elements::Bf16(read_vec(file, name, stored, order)?),
    })
}

/// The same, in a type that the caller knows.
///
/// # Errors
/// As [`read`].
pub fn read_vec<T: Element>(
    file: &WeightFile,
    name: &str,
    stored: &Stored,
    order: Option<&Order>,
) -> Result<Vec<T>> {
    // A vector is read as a column, so that whatever permutes it permutes rows.
    let (rows, columns): (usize, usize) = match stored.shape.as_slice() {
        [] => (1, 1),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
    };
    let by_rows = |order: &&Order| order.axis == Axis::Rows || stored.shape.len() < 2;
    let row_order = order.filter(by_rows).map(|order| order.indices.as_slice());
    let column_order = order.filter(|order| !by_rows(order));
    let column_order = column_order.map(|order| order.indices.as_slice());
    let mut named = column_order.into_iter().flatten();
    if let Some(column) = named.find(|column| **column >= columns) {
        return Err(outside(format!("columns of {name} below {columns}"), *column));
    }
    let width = column_order.map_or(columns, <[usize]>::len);
    let mut data = fresh::<T>(row_order.map_or(rows, <[usize]>::len) * width);
    if data.is_empty() {
        return Ok(data);
    }
    // Where each of the file's rows goes.
    let mut places: Vec<Option<&mut [T]>> = Vec::new();
    places.resize_with(rows, || None);
    for (index, out) in data.chunks_exact_mut(width).enumerate() {
        let row = row_order.and_then(|order| order.get(index)).unwrap_or(&index);
        let row = match stored.interleaved_heads {
            Some(heads) => interleaved(*row, rows / heads.max(1)),
            None => *row,
        };
        match places.get_mut(row) {
            Some(place) if place.is_none() => *place = Some(out),
            _ => return Err(outside(format!("each row of {name} below {rows} once"), row)),
        }
    }
    fill(file, name, stored, columns, column_order, &mut places)?;
    Ok(data)
}

fn outside(expected: String, found: usize) -> Error {
    Error::Shape {
        operation: "read in an order",
        expected,
        found: found.to_string(),
    }
}

/// Reads a file's rows of `columns` elements, or those of them that `column_order` names, each to its place.
fn fill<T: Element>(
    file: &WeightFile,
    name: &str,
    stored: &Stored,
    columns: usize,
    column_order: Option<&[usize]>,
    places: &mut [Option<&mut [T]>],
) -> Result<()> {
    let (unit_elements, unit_bytes) = stored.encoding.unit();
    // A piece is made of whole units, even where a row is not.
    let least = if columns.is_multiple_of(unit_elements) {
        1
    } else {
        unit_elements
    };
    let together = (PIECE / columns.max(1)).max(1).next_multiple_of(least);
    let bytes_of = |rows: usize| rows * columns / unit_elements * unit_bytes;
    places.par_chunks_mut(together).enumerate().try_for_each_init(
        || (Vec::<u8>::new(), Vec::<T>::new()),
        |(raw, decoded), (index, places)| -> Result<()> {
            raw.resize(bytes_of(places.len()), 0);
            decoded.resize(places.len() * columns, T::default());
            file.read_exact_at(raw, stored.offset + bytes_of(index * together) as u64)?;
            decode(stored.encoding, raw, decoded).map_err(|found| Error::CheckpointTensor {
                path: file.path.clone(),
                tensor: name.to_owned(),
                expected: "elements that can be decoded".to_owned(),
                found,
            })?;
            for (place, row) in places.iter_mut().zip(decoded.chunks_exact(columns)) {
                match (place, column_order) {
                    (None, _) => {}
                    (Some(place), None) => place.copy_from_slice(row),
                    (Some(place), Some(order)) => {
                        for (out, column) in place.iter_mut().zip(order) {
                            *out = row[*column];
                        }
                    }
                }
            }
            Ok(())
        },
    )
}

/// Where the file of a converted Llama has a row of query or key, whose heads have so many rows: it stores rotated pairs
/// side by side, where Hugging Face stores the first halves of all pairs of a head, then the second.
fn interleaved(row: usize, head_rows: usize) -> usize {
    let (head_rows, half) = (head_rows.max(1), (head_rows / 2).max(1));
    let (head, within) = (row / head_rows, row % head_rows);
    head * head_rows + 2 * (within % half) + within / half
}

fn decode<T: Element>(encoding: Encoding, raw: &[u8], out: &mut [T]) -> std::result::Result<(), String> {
    match encoding {
        Encoding::F64 => each(raw, out, |bytes: [u8; 8]| {
            #[allow(clippy::cast_possible_truncation)] // rounding to f32 is what is asked for
            let value = f64::from_le_bytes(bytes) as f32;
            T::of(value)
        }),
        Encoding::F32 => each(raw, out, |bytes: [u8; 4]| T::of(f32::from_le_bytes(bytes))),
        Encoding::F16 => each(raw, out, |bytes: [u8; 2]| {
            T::of(half::f16::from_le_bytes(bytes).to_f32())
        }),
        Encoding::Bf16 => each(raw, out, T::of_bf16),
        Encoding::Quantised(kind) => {
            let values = dequantise(kind, raw, out.len()).map_err(|error| error.to_string())?;
            if values.len() != out.len() {
                return Err(format!("{} elements in place of {}", values.len(), out.len()));
            }
            for (out, value) in out.iter_mut().zip(values) {
                *out = T::of(value);
            }
        }
    }
    Ok(())
}

fn each<const BYTES: usize, T>(raw: &[u8], out: &mut [T], convert: impl Fn([u8; BYTES]) -> T) {
    for (out, bytes) in out.iter_mut().zip(raw.as_chunks::<BYTES>().0) {
        *out = convert(*bytes);
    }
}

fn dequantise(kind: GgmlDType, raw: &[u8], elements: usize) -> candle_core::Result<Vec<f32>> {
    let cpu = candle_core::Device::Cpu;
    let storage = QStorage::from_data(std::borrow::Cow::Borrowed(raw), &cpu, kind)?;
    QTensor::new(storage, elements)?
        .dequantize(&cpu)?
        .to_vec1::<f32>()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use candle_core::{Device, Tensor};

    use super::*;

    const ROWS: usize = 24;
    /// Two units of Q8_0; a row ends in the middle of a unit of Q4K.
    const COLUMNS: usize = 64;

    fn values() -> Vec<f32> {
        // Not a few of them lie halfway between two of bf16.
        let value = |index: usize| (index as f32 - 700.0) * (1.0 + 1.0 / 256.0) / 64.0;
        (0..ROWS * COLUMNS).map(value).collect()
    }

    /// What a file holds of the values, and what these bytes say in f32.
    fn encoded(encoding: Encoding) -> (Vec<u8>, Vec<f32>) {
        let values = values();
        let each = values.iter();
        let bytes: Vec<u8> = match encoding {
            Encoding::F64 => each.flat_map(|value| f64::from(*value).to_le_bytes()).collect(),
            Encoding::F32 => each.flat_map(|value| value.to_le_bytes()).collect(),
            Encoding::F16 => each
                .flat_map(|value| half::f16::from_f32(*value).to_le_bytes())
                .collect(),
            Encoding::Bf16 => each
                .flat_map(|value| half::bf16::from_f32(*value).to_le_bytes())
                .collect(),
            Encoding::Quantised(kind) => {
                let plain = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap();
                let quantised = QTensor::quantize(&plain, kind).unwrap();
                quantised.data().unwrap().into_owned()
            }
        };
        let exact = match encoding {
            Encoding::F64 | Encoding::F32 => values,
            Encoding::F16 => values
                .iter()
                .map(|value| half::f16::from_f32(*value).to_f32())
                .collect(),
            Encoding::Bf16 => values
                .iter()
                .map(|value| half::bf16::from_f32(*value).to_f32())
                .collect(),
            Encoding::Quantised(kind) => dequantise(kind, &bytes, values.len()).unwrap(),
        };
        (bytes, exact)
    }

    struct Written {
        directory: tempfile::TempDir,
        stored: Stored,
    }

    /// A file with something before and behind the tensor.
    fn written(encoding: Encoding, shape: &[usize], bytes: &[u8]) -> Written {
        let directory = tempfile::tempdir().unwrap();
        let whole = [&[7; 11][..], bytes, &[9; 300]].concat();
        std::fs::write(directory.path().join("weights"), whole).unwrap();
        let stored = Stored {
            file: 0,
            offset: 11,
            shape: shape.to_vec(),
            encoding,
            interleaved_heads: None,
        };
        Written { directory, stored }
    }

    impl Written {
        fn read(&self, element_type: ElementType, order: Option<&Order>) -> Result<Elements> {
            let file = WeightFile::open(&self.directory.path().join("weights")).unwrap();
            read(&file, "a", &self.stored, element_type, order)
        }

        fn assert_reads(&self, order: Option<&Order>, expected: Vec<f32>) {
            for element_type in [ElementType::F32, ElementType::Bf16] {
                let found = self.read(element_type, order).unwrap();
                let expected = Elements::rounded(expected.clone(), element_type);
                assert_eq!(found, expected, "{:?} {order:?}", self.stored);
            }
        }
    }

    /// Every third, then every third from the second on, then the rest.
    fn thirds(length: usize) -> Vec<usize> {
        (0..3).flat_map(|first| (first..length).step_by(3)).collect()
    }

    fn gathered(values: &[f32], columns: usize, order: &Order) -> Vec<f32> {
        let rows: Vec<&[f32]> = values.chunks(columns).collect();
        match order.axis {
            Axis::Rows => order.indices.iter().flat_map(|row| rows[*row].to_vec()).collect(),
            Axis::Columns => rows
                .iter()
                .flat_map(|row| order.indices.iter().map(move |column| row[*column]))
                .collect(),
        }
    }

    #[test]
    fn every_encoding_is_read_in_every_order_and_type_as_if_it_were_decoded_whole_then_sorted_then_rounded() {
        for encoding in [
            Encoding::F64,
            Encoding::F32,
            Encoding::F16,
            Encoding::Bf16,
            Encoding::Quantised(GgmlDType::Q8_0),
            Encoding::Quantised(GgmlDType::Q4K),
        ] {
            let (bytes, exact) = encoded(encoding);
            let written = written(encoding, &[ROWS, COLUMNS], &bytes);
            written.assert_reads(None, exact.clone());
            for (axis, length) in [(Axis::Rows, ROWS), (Axis::Columns, COLUMNS)] {
                let order = Order::new(axis, thirds(length));
                written.assert_reads(Some(&order), gathered(&exact, COLUMNS, &order));
            }
        }
    }

    #[test]
    fn a_tensor_of_many_pieces_is_read_as_one_of_one() {
        let (rows, columns) = (40, PIECE / 8);
        let value = |index: usize| (index % 8191) as f32 - 4000.0;
        let exact: Vec<f32> = (0..rows * columns).map(value).collect();
        let bytes: Vec<u8> = exact.iter().flat_map(|value| value.to_le_bytes()).collect();
        let written = written(Encoding::F32, &[rows, columns], &bytes);
        for (axis, length) in [(Axis::Rows, rows), (Axis::Columns, columns)] {
            let order = Order::new(axis, thirds(length));
            let found = written.read(ElementType::F32, Some(&order)).unwrap();
            assert!(
                found == Elements::F32(gathered(&exact, columns, &order)),
                "{axis:?}"
            );
        }
    }

    #[test]
    fn a_vector_is_sorted_as_the_row_that_it_is_elsewhere() {
        let (bytes, exact) = encoded(Encoding::F32);
        let written = written(Encoding::F32, &[ROWS * COLUMNS], &bytes);
        written.assert_reads(None, exact.clone());
        let order = Order::new(Axis::Columns, thirds(exact.len()));
        written.assert_reads(Some(&order), gathered(&exact, exact.len(), &order));
    }

    #[test]
    fn interleaved_heads_are_put_back_before_they_are_sorted() {
        let (bytes, exact) = encoded(Encoding::F32);
        let mut written = written(Encoding::F32, &[ROWS, COLUMNS], &bytes);
        // Three heads of eight rows.
        written.stored.interleaved_heads = Some(3);
        let halves = |head: usize| [0, 2, 4, 6, 1, 3, 5, 7].map(|row| 8 * head + row);
        let put_back = Order::new(Axis::Rows, (0..3).flat_map(halves).collect());
        let exact = gathered(&exact, COLUMNS, &put_back);
        written.assert_reads(None, exact.clone());
        let heads = Order::new(
            Axis::Rows,
            (0..3).rev().flat_map(|head| 8 * head..8 * head + 8).collect(),
        );
        written.assert_reads(Some(&heads), gathered(&exact, COLUMNS, &heads));
    }

    #[test]
    fn an_order_of_another_tensor_is_one_error_that_names_the_tensor() {
        let (bytes, _) = encoded(Encoding::Bf16);
        let written = written(Encoding::Bf16, &[ROWS, COLUMNS], &bytes);
        for (axis, indices, told) in [
            (Axis::Rows, vec![0, ROWS], "each row of a below 24 once"),
            (Axis::Rows, vec![1, 1], "each row of a below 24 once"),
            (Axis::Columns, vec![COLUMNS], "columns of a below 64"),
        ] {
            let order = Order::new(axis, indices);
            let refused = written.read(ElementType::Bf16, Some(&order)).unwrap_err();
            assert!(refused.to_string().contains(told), "{refused}");
        }
    }

    #[test]
    fn an_empty_tensor_is_read_as_nothing() {
        let written = written(Encoding::F32, &[0, COLUMNS], &[]);
        written.assert_reads(None, Vec::new());
    }
}
