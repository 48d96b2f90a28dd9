//! Where each tensor lies and how it is encoded.
//!
//! Files are read by position, not mapped: a file that is cut while a job runs gives an error, where a
//! mapping would kill the process. How bytes become elements is [`super::reading`]'s affair.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use espalier_arch::Architecture;

use super::reading;
use crate::sort::Order;
use crate::{ElementType, Elements, Error, Result};

/// Bytes hashed at each end of a file.
const FINGERPRINT_BYTES: u64 = 1 << 20;

/// The type that weights are written in: those of [`espalier_arch::Precision`] that exports have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// IEEE single precision.
    F32,
    /// The upper half of single precision.
    Bf16,
    /// IEEE half precision: more digits than bf16, and no number beyond 65504.
    F16,
}

impl From<Precision> for espalier_arch::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
            Precision::F16 => Self::F16,
        }
    }
}

/// How a tensor's elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
    /// Blocks of a GGML quantisation.
    Quantised(GgmlDType),
}

impl Encoding {
    /// Elements of the smallest unit, and its bytes.
    pub fn unit(self) -> (usize, usize) {
        match self {
            Self::F64 => (1, 8),
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Quantised(kind) => (kind.block_size(), kind.type_size()),
        }
    }

    /// Bytes of `elements` elements; none when they do not fill whole units or the size overflows.
    pub fn bytes(self, elements: usize) -> Option<u64> {
        let (unit_elements, unit_bytes) = self.unit();
        if !elements.is_multiple_of(unit_elements) {
            return None;
        }
        (elements / unit_elements)
            .checked_mul(unit_bytes)
            .map(|bytes| bytes as u64)
    }
}

/// A file of weights, open for reading.
#[derive(Debug)]
pub struct WeightFile {
    pub path: PathBuf,
    pub bytes: u64,
    pub handle: File,
}

impl WeightFile {
    /// Opens a file of weights.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let handle = File::open(path).map_err(io)?;
        let bytes = handle.metadata().map_err(io)?.len();
        Ok(Self {
            path: path.to_owned(),
            bytes,
            handle,
        })
    }

    /// Reads bytes at a position.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.handle.read_exact_at(buffer, offset).map_err(|source| {
            // The length was checked when the file was opened.
            let source = match source.kind() {
                ErrorKind::UnexpectedEof => {
                    let end = offset.saturating_add(buffer.len() as u64);
                    let reason = format!("cut short since it was opened: bytes {offset} to {end} are gone");
                    std::io::Error::new(ErrorKind::UnexpectedEof, reason)
                }
                _ => source,
            };
            Error::Io {
                path: self.path.clone(),
                source,
            }
        })
    }
}

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Index into the files.
    pub file: usize,
    /// Position of its first byte in the file.
    pub offset: u64,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// How its elements are stored.
    pub encoding: Encoding,
    /// Heads whose rows are interleaved (GGUF's Llama), to be put back into halves on reading.
    pub interleaved_heads: Option<usize>,
}

/// Every tensor of a checkpoint, by its Hugging Face name.
#[derive(Debug, Default)]
pub struct TensorIndex {
    pub files: Vec<WeightFile>,
    pub tensors: BTreeMap<String, Stored>,
    /// Where a missing tensor should have been: the index file, or the only file of weights.
    pub listing: PathBuf,
}

impl TensorIndex {
    /// Checks names, shapes and bounds against the architecture.
    pub fn check(&self, architecture: &Architecture) -> Result<()> {
        let specs = architecture.tensors();
        for spec in &specs {
            let Some(stored) = self.tensors.get(&spec.name) else {
                return Err(Error::CheckpointTensor {
                    path: self.listing.clone(),
                    tensor: spec.name.clone(),
                    expected: format!("a tensor of shape {:?}", spec.shape),
                    found: "none".to_owned(),
                });
            };
            if stored.shape != spec.shape {
                return Err(self.wrong(
                    &spec.name,
                    stored,
                    format!("shape {:?}", spec.shape),
                    format!("{:?}", stored.shape),
                ));
            }
        }
        let known: std::collections::BTreeSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let surplus: Vec<&String> = self
            .tensors
            .keys()
            .filter(|name| !known.contains(name.as_str()) && !is_harmless(name, architecture))
            .collect();
        let Some(first) = surplus.first() else {
            return Ok(());
        };
        Err(Error::CheckpointTensor {
            path: self.listing.clone(),
            tensor: (*first).clone(),
            expected: "only tensors of the config's architecture".to_owned(),
            found: match surplus.len() {
                1 => "this one besides".to_owned(),
                count => format!("this and {} more besides", count - 1),
            },
        })
    }

    /// One tensor, row by row, in this type, and in this order where there is one.
    pub fn read(&self, name: &str, element_type: ElementType, order: Option<&Order>) -> Result<Elements> {
        let stored = self.tensors.get(name).ok_or_else(|| Error::CheckpointTensor {
            path: self.listing.clone(),
            tensor: name.to_owned(),
            expected: "a tensor".to_owned(),
            found: "none".to_owned(),
        })?;
        let file = self.files.get(stored.file).ok_or_else(|| Error::Damaged {
            path: self.listing.clone(),
            reason: format!(
                "tensor {name} lies in file number {}, which was not opened",
                stored.file
            ),
        })?;
        reading::read(file, name, stored, element_type, order)
    }

    /// 16-bit when no matrix is wider; f16 when all of them are that.
    pub fn precision(&self) -> Precision {
        let matrices = self.tensors.values().filter(|stored| stored.shape.len() > 1);
        let mut encodings = matrices.map(|stored| stored.encoding);
        let is_wide = |encoding| matches!(encoding, Encoding::F32 | Encoding::F64);
        if encodings.clone().any(is_wide) {
            Precision::F32
        } else if encodings.all(|encoding| encoding == Encoding::F16) {
            Precision::F16
        } else {
            Precision::Bf16
        }
    }

    /// Feeds names, sizes and both ends of every file to the hash.
    pub fn fingerprint(&self, hasher: &mut blake3::Hasher) -> Result<()> {
        for file in &self.files {
            let name = file.path.file_name().unwrap_or_default();
            hasher.update(name.as_encoded_bytes());
            hasher.update(&file.bytes.to_le_bytes());
            let length = file.bytes.min(FINGERPRINT_BYTES);
            let mut buffer = vec![0u8; usize::try_from(length).unwrap_or_default()];
            file.read_exact_at(&mut buffer, 0)?;
            hasher.update(&buffer);
            file.read_exact_at(&mut buffer, file.bytes - length)?;
            hasher.update(&buffer);
        }
        Ok(())
    }

    fn wrong(&self, name: &str, stored: &Stored, expected: String, found: String) -> Error {
        let path = self
            .files
            .get(stored.file)
            .map_or_else(|| self.listing.clone(), |file| file.path.clone());
        Error::CheckpointTensor {
            path,
            tensor: name.to_owned(),
            expected,
            found,
        }
    }
}

/// Tensors that checkpoints carry though nothing is lost without them.
fn is_harmless(name: &str, architecture: &Architecture) -> bool {
    name.ends_with("rotary_emb.inv_freq")
        || name.ends_with("attn.masked_bias")
        || (architecture.tied_embedding && name == "lm_head.weight")
}
