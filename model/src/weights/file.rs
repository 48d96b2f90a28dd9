//! Exact f32 weights in a safetensors file of our own: what training saves and goes on from.
//!
//! Parents in any encoding are `checkpoint`'s affair; directories for others to load are `export`'s.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use espalier_arch::{Architecture, TensorSpec};
use safetensors::{Dtype, View};
use serde_json::Value;

use super::{Model, read_as};
use crate::files;
use crate::ops::Operations;
use crate::{ElementType, Elements, Error, Result, Tensor};

/// Longest header that is believed.
const MAX_HEADER_BYTES: u64 = 100 << 20;
/// Elements read at a time.
const PIECE: usize = 1 << 20;
/// The one key of our metadata (a map with several would be written in no fixed order).
const METADATA_KEY: &str = "espalier";

/// One tensor on its way to a file.
pub(crate) struct Outgoing<'a> {
    data: Data<'a>,
    shape: Vec<usize>,
}

enum Data<'a> {
    /// Brought to the host only when its turn comes.
    Tensor(&'a Tensor, &'a dyn Operations),
    Copied(Vec<f32>),
    /// Made only when its turn comes. What cannot be made gives too few values, and whoever makes it says why.
    Made(&'a dyn Fn(&TensorSpec) -> Vec<f32>, TensorSpec),
}

impl<'a> Outgoing<'a> {
    pub(crate) fn of(tensor: &'a Tensor, operations: &'a dyn Operations) -> Self {
        Self {
            shape: vec![tensor.rows(), tensor.columns()],
            data: Data::Tensor(tensor, operations),
        }
    }

    /// Values that are on the host already, row by row.
    pub(crate) fn copied(values: Vec<f32>, shape: [usize; 2]) -> Self {
        Self {
            shape: shape.to_vec(),
            data: Data::Copied(values),
        }
    }
}

fn little_endian(values: &[f32]) -> Cow<'static, [u8]> {
    Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// A tensor while it is written, and what went wrong with the first that could not be brought to the host.
struct Going<'a, 'b> {
    tensor: Outgoing<'a>,
    failure: &'b RefCell<Option<Error>>,
}

impl View for Going<'_, '_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut failure = self.failure.borrow_mut();
        match &self.tensor.data {
            // Whoever asked for the file is told of it before anybody looks at what was written.
            _ if failure.is_some() => Cow::Borrowed(&[]),
            Data::Tensor(tensor, operations) => match operations.download(tensor) {
                Ok(values) => little_endian(&values),
                Err(error) => {
                    *failure = Some(error);
                    Cow::Borrowed(&[])
                }
            },
            Data::Copied(values) => little_endian(values),
            Data::Made(make, spec) => little_endian(&make(spec)),
        }
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

/// Writes tensors under their names with one text of metadata, whole or not at all.
pub(crate) fn save_tensors(
    path: &Path,
    tensors: Vec<(String, Outgoing<'_>)>,
    metadata: &Value,
) -> Result<()> {
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), metadata.to_string())]);
    let failure = RefCell::new(None);
    let going = tensors.into_iter().map(|(name, tensor)| {
        let failure = &failure;
        (name, Going { tensor, failure })
    });
    files::write_atomically(path, |partial| {
        let written = safetensors::serialize_to_file(going, Some(metadata), partial);
        if let Some(error) = failure.take() {
            return Err(error);
        }
        written.map_err(|error| unwritten(path, error))?;
        // Opening checks that every byte the header promises is there.
        TensorFile::open(partial).map(drop)
    })
}

fn unwritten(path: &Path, error: safetensors::SafeTensorError) -> Error {
    match error {
        safetensors::SafeTensorError::IoError(source) => Error::Io {
            path: path.to_path_buf(),
            source,
        },
        error => damaged(path, error),
    }
}

fn damaged(path: &Path, reason: impl ToString) -> Error {
    Error::Damaged {
        path: path.to_path_buf(),
        reason: reason.to_string(),
    }
}

/// A file that [`save_tensors`] wrote, read by position so that a cut file is an error and not a fault.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, (u64, Vec<usize>)>,
    pub(crate) metadata: Value,
}

impl TensorFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes + 8 > bytes {
            return Err(damaged(
                path,
                format!("a header of {header_bytes} bytes, expected a safetensors file"),
            ));
        }
        let mut header = vec![0; usize::try_from(header_bytes).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let header: BTreeMap<String, Value> =
            serde_json::from_slice(&header).map_err(|error| damaged(path, error))?;
        let mut entries = BTreeMap::new();
        let mut metadata = Value::Null;
        for (name, entry) in header {
            if name == "__metadata__" {
                let text = entry.get(METADATA_KEY).and_then(Value::as_str).unwrap_or("null");
                metadata = serde_json::from_str(text).map_err(|error| damaged(path, error))?;
                continue;
            }
            let parsed = parse_entry(&entry, header_bytes + 8)
                .filter(|(offset, shape)| end_of(*offset, shape).is_some_and(|end| end <= bytes));
            let parsed = parsed.ok_or_else(|| {
                damaged(
                    path,
                    format!("tensor {name}: expected f32 within the file's {bytes} bytes"),
                )
            })?;
            entries.insert(name, parsed);
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            entries,
            metadata,
        })
    }

    /// The elements of tensor `name`, which must have this shape, row by row.
    fn values(&self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>> {
        let missing = || damaged(&self.path, format!("tensor {name} is missing"));
        let (offset, shape) = self.entries.get(name).ok_or_else(missing)?;
        if *shape != [rows, columns] {
            return Err(Error::TensorShape {
                name: name.to_owned(),
                expected: vec![rows, columns],
                found: shape.clone(),
            });
        }
        let mut values = vec![0.0; rows * columns];
        self.fill(*offset, &mut values)?;
        Ok(values)
    }

    /// Every entry's name and how many elements it has.
    pub(crate) fn names(&self) -> impl Iterator<Item = (&str, usize)> {
        let entries = self.entries.iter();
        entries.map(|(name, (_, shape))| (name.as_str(), shape.iter().product()))
    }

    /// Elements of entry `name` from its `first`th on.
    pub(crate) fn read_elements(&self, name: &str, first: usize, values: &mut [f32]) -> Result<()> {
        let missing = || damaged(&self.path, format!("tensor {name} is missing"));
        let (offset, shape) = self.entries.get(name).ok_or_else(missing)?;
        if first + values.len() > shape.iter().product() {
            return Err(damaged(
                &self.path,
                format!("tensor {name} has {shape:?} elements, expected more than {first}"),
            ));
        }
        self.fill(offset + (first * size_of::<f32>()) as u64, values)
    }

    /// As many elements as there is room for, from byte `offset` on.
    fn fill(&self, offset: u64, values: &mut [f32]) -> Result<()> {
        let mut offset = offset;
        let mut bytes = vec![0; size_of::<f32>() * values.len().min(PIECE)];
        for piece in values.chunks_mut(PIECE) {
            let bytes = bytes.get_mut(..size_of_val(piece)).unwrap_or_default();
            self.file
                .read_exact_at(bytes, offset)
                .map_err(|source| Error::Io {
                    path: self.path.clone(),
                    source,
                })?;
            offset += bytes.len() as u64;
            for (value, chunk) in piece.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*chunk);
            }
        }
        Ok(())
    }

    /// What of the metadata lies under `key`.
    pub(crate) fn field<T: serde::de::DeserializeOwned>(&self, key: &str) -> Result<T> {
        let value = self.metadata.get(key).cloned().unwrap_or(Value::Null);
        serde_json::from_value(value).map_err(|error| damaged(&self.path, format!("metadata {key}: {error}")))
    }
}

fn parse_entry(entry: &Value, data_start: u64) -> Option<(u64, Vec<usize>)> {
    if entry.get("dtype")?.as_str()? != "F32" {
        return None;
    }
    let axes = entry.get("shape")?.as_array()?.iter();
    let shape: Option<Vec<usize>> = axes
        .map(|axis| axis.as_u64().and_then(|axis| axis.try_into().ok()))
        .collect();
    let offset = entry.get("data_offsets")?.get(0)?.as_u64()?;
    Some((data_start.checked_add(offset)?, shape?))
}

fn end_of(offset: u64, shape: &[usize]) -> Option<u64> {
    let elements = shape
        .iter()
        .try_fold(1_u64, |product, axis| product.checked_mul(*axis as u64))?;
    offset.checked_add(elements.checked_mul(size_of::<f32>() as u64)?)
}

/// Writes what [`Model::save`] would write of a model of this shape, of which one tensor after the other is made, in
/// no particular order, and none kept.
///
/// # Errors
/// Those of `make`, and when the file cannot be written.
pub(crate) fn save_model(
    path: &Path,
    architecture: &Architecture,
    make: impl Fn(&TensorSpec) -> Result<Vec<f32>>,
) -> Result<()> {
    let failed = RefCell::new(None);
    let make = |spec: &TensorSpec| match make(spec) {
        Ok(values) => values,
        Err(error) => {
            failed.borrow_mut().get_or_insert(error);
            Vec::new()
        }
    };
    let tensors = architecture.tensors().into_iter().map(|spec| {
        let (rows, columns) = super::matrix_shape(&spec.shape);
        let outgoing = Outgoing {
            shape: vec![rows, columns],
            data: Data::Made(&make, spec.clone()),
        };
        (spec.name, outgoing)
    });
    let saved = save_tensors(path, tensors.collect(), &about(architecture));
    failed.into_inner().map_or(saved, Err)
}

fn about(architecture: &Architecture) -> Value {
    serde_json::json!({ "architecture": architecture })
}

impl Model {
    /// Writes the weights, exact to the bit, with the architecture beside them; whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path, operations: &dyn Operations) -> Result<()> {
        let named = self.named_tensors();
        let tensors = named
            .into_iter()
            .map(|(spec, tensor)| (spec.name, Outgoing::of(tensor, operations)));
        save_tensors(path, tensors.collect(), &about(&self.architecture))
    }

    /// Reads what [`Model::save`] wrote.
    ///
    /// # Errors
    /// As [`SavedModel::open`] and [`SavedModel::tensor`].
    pub fn load(path: &Path, operations: &dyn Operations) -> Result<Self> {
        SavedModel::open(path)?.load(operations)
    }
}

/// A file that [`Model::save`] wrote, opened, its weights not yet read.
#[derive(Debug)]
pub struct SavedModel {
    file: TensorFile,
    architecture: Architecture,
}

impl SavedModel {
    /// Reads its header.
    ///
    /// # Errors
    /// When the file cannot be read, is cut, or is another.
    pub fn open(path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let architecture = file.field("architecture")?;
        Ok(Self { file, architecture })
    }

    /// The model's shape.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// One of the architecture's tensors, row by row, rounded to this type.
    ///
    /// # Errors
    /// When the file cannot be read any more, or holds it in another shape.
    pub fn elements(&self, spec: &TensorSpec, element_type: ElementType) -> Result<Elements> {
        let (rows, columns) = super::matrix_shape(&spec.shape);
        let values = self.file.values(&spec.name, rows, columns)?;
        Ok(Elements::rounded(values, element_type))
    }

    /// The same, as blocks read it.
    ///
    /// # Errors
    /// As [`SavedModel::elements`], and when the backend runs out of memory.
    pub fn tensor(&self, spec: &TensorSpec, operations: &dyn Operations) -> Result<Tensor> {
        let (rows, columns) = super::matrix_shape(&spec.shape);
        let elements = self.elements(spec, read_as(operations, spec.role))?;
        operations.upload_elements(&elements, rows, columns)
    }

    /// All of it on the backend's device.
    ///
    /// # Errors
    /// As [`SavedModel::tensor`].
    pub fn load(&self, operations: &dyn Operations) -> Result<Model> {
        Model::from_tensors(&self.architecture, |spec| self.tensor(spec, operations))?.stacked(operations)
    }
}
