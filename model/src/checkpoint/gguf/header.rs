//! The header of a GGUF file (version 1 to 3, little-endian): metadata and where each tensor lies.
//!
//! candle's reader is not used for this part: it divides by an alignment that the file states and multiplies
//! dimensions unchecked. Here every count and length is held against the bytes that are left, so a damaged
//! file costs an error, never a panic or a large allocation.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use candle_core::quantized::GgmlDType;

use crate::checkpoint::stored::Encoding;
use crate::{Error, Result};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAXIMUM_DIMENSIONS: u32 = 4;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Metadata {
    /// Any integer; none in use goes beyond 63 bits.
    Integer(i64),
    /// A float; one of single precision is the shortest decimal that means it.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// An array of texts.
    Texts(Vec<String>),
    /// An array of numbers or truth values.
    Numbers(Vec<f64>),
}

/// Where a tensor lies, by its GGUF name.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// How its elements are stored.
    pub encoding: Encoding,
    /// Position of its first byte in the file.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// What a GGUF file's header says.
#[derive(Debug)]
pub struct Header {
    /// By key.
    pub metadata: BTreeMap<String, Metadata>,
    /// By GGUF name.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// Reads the header of a file of `bytes` bytes.
pub fn read(path: &Path, file: &File, bytes: u64) -> Result<Header> {
    let handle = file.try_clone().map_err(|source| Error::Io {
        path: path.to_owned(),
        source,
    })?;
    let mut reader = Reader {
        inner: BufReader::with_capacity(1 << 20, handle),
        left: bytes,
        wide: true,
    };
    reader.header(bytes).map_err(|reason| Error::Damaged {
        path: path.to_owned(),
        reason,
    })
}

type Parsed<T> = std::result::Result<T, String>;

struct Reader {
    inner: BufReader<File>,
    left: u64,
    /// Lengths are 64-bit, as in every version but the first.
    wide: bool,
}

impl Reader {
    fn header(&mut self, bytes: u64) -> Parsed<Header> {
        let magic: [u8; 4] = self.array().map_err(|_| not_gguf())?;
        if &magic != MAGIC {
            return Err(not_gguf());
        }
        let version = self.u32()?;
        if !(1..=3).contains(&version) {
            return Err(format!(
                "GGUF version {version}, expected 1 to 3 in little-endian order"
            ));
        }
        self.wide = version > 1;
        let tensors = self.count("tensors", 24)?;
        let entries = self.count("metadata entries", 13)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = self.text()?;
            let kind = self.u32()?;
            let value = self
                .value(kind)
                .map_err(|reason| format!("metadata {key}: {reason}"))?;
            metadata.insert(key, value);
        }
        let mut infos = Vec::new();
        for _ in 0..tensors {
            infos.push(self.tensor()?);
        }
        let alignment = alignment(&metadata)?;
        let data = (bytes - self.left).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, mut info) in infos {
            info.offset = data
                .checked_add(info.offset)
                .filter(|offset| offset.checked_add(info.bytes).is_some_and(|end| end <= bytes))
                .ok_or_else(|| {
                    format!(
                        "tensor {name}: expected {} bytes from byte {} of the data, found the file cut short at {bytes} \
                         bytes",
                        info.bytes, info.offset
                    )
                })?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(format!("tensor {name} is listed twice"));
            }
        }
        Ok(Header { metadata, tensors })
    }

    fn tensor(&mut self) -> Parsed<(String, TensorInfo)> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions == 0 || dimensions > MAXIMUM_DIMENSIONS {
            return Err(format!(
                "tensor {name} has {dimensions} dimensions, expected 1 to {MAXIMUM_DIMENSIONS}"
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let size = usize::try_from(self.length()?).ok().filter(|size| *size > 0);
            shape.push(size.ok_or_else(|| format!("tensor {name} has an empty or absurd dimension"))?);
        }
        shape.reverse();
        let kind = self.u32()?;
        let encoding = encoding(kind)
            .ok_or_else(|| format!("tensor {name} is of GGML type {kind}, expected one of {READABLE}"))?;
        let bytes = shape
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(*size))
            .and_then(|elements| encoding.bytes(elements))
            .ok_or_else(|| {
                format!("tensor {name} has shape {shape:?}, which does not fill whole {encoding:?} units")
            })?;
        let offset = self.u64()?;
        Ok((
            name,
            TensorInfo {
                shape,
                encoding,
                offset,
                bytes,
            },
        ))
    }

    fn value(&mut self, kind: u32) -> Parsed<Metadata> {
        match kind {
            8 => Ok(Metadata::Text(self.text()?)),
            9 => self.values(),
            _ => self.number(kind),
        }
    }

    fn values(&mut self) -> Parsed<Metadata> {
        let kind = self.u32()?;
        if kind == 8 {
            let count = self.count("texts of an array", 4)?;
            let mut texts = Vec::new();
            for _ in 0..count {
                texts.push(self.text()?);
            }
            return Ok(Metadata::Texts(texts));
        }
        let size = number_bytes(kind)
            .ok_or_else(|| format!("an array of type {kind}, expected numbers or texts"))?;
        let count = self.count("numbers of an array", size)?;
        let mut numbers = Vec::new();
        for _ in 0..count {
            numbers.push(match self.number(kind)? {
                #[allow(clippy::cast_precision_loss)] // token types, sizes and scores are small
                Metadata::Integer(value) => value as f64,
                Metadata::Float(value) => value,
                Metadata::Bool(value) => f64::from(u8::from(value)),
                _ => return Err("a text among numbers".to_owned()),
            });
        }
        Ok(Metadata::Numbers(numbers))
    }

    fn number(&mut self, kind: u32) -> Parsed<Metadata> {
        Ok(match kind {
            0 => Metadata::Integer(i64::from(u8::from_le_bytes(self.array()?))),
            1 => Metadata::Integer(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Metadata::Integer(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Metadata::Integer(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Metadata::Integer(i64::from(self.u32()?)),
            5 => Metadata::Integer(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Metadata::Float(shortest(f32::from_le_bytes(self.array()?))),
            7 => match u8::from_le_bytes(self.array()?) {
                0 => Metadata::Bool(false),
                1 => Metadata::Bool(true),
                other => return Err(format!("truth value {other}, expected 0 or 1")),
            },
            10 => {
                let value = self.u64()?;
                Metadata::Integer(i64::try_from(value).map_err(|_| format!("{value} is absurdly large"))?)
            }
            11 => Metadata::Integer(i64::from_le_bytes(self.array()?)),
            12 => Metadata::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("type {other} is unknown")),
        })
    }

    /// A count of things of at least `least` bytes each, held against what is left of the file.
    fn count(&mut self, what: &str, least: u64) -> Parsed<u64> {
        let count = self.length()?;
        if count.checked_mul(least).is_none_or(|bytes| bytes > self.left) {
            return Err(format!(
                "the header claims {count} {what}, but only {} bytes follow: damaged or cut short",
                self.left
            ));
        }
        Ok(count)
    }

    fn text(&mut self) -> Parsed<String> {
        let length = self.count("bytes of a text", 1)?;
        let mut bytes = vec![0u8; usize::try_from(length).map_err(|error| error.to_string())?];
        self.fill(&mut bytes)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }

    fn length(&mut self) -> Parsed<u64> {
        if self.wide {
            self.u64()
        } else {
            Ok(u64::from(self.u32()?))
        }
    }

    fn u32(&mut self) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const BYTES: usize>(&mut self) -> Parsed<[u8; BYTES]> {
        let mut bytes = [0u8; BYTES];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Parsed<()> {
        let length = bytes.len() as u64;
        self.left = self
            .left
            .checked_sub(length)
            .ok_or("the file ends inside its header: it is cut short")?;
        self.inner
            .read_exact(bytes)
            .map_err(|error| format!("the header cannot be read: {error}"))
    }
}

fn not_gguf() -> String {
    "neither a directory nor a GGUF file, expected a Hugging Face directory, a .gguf file or hf://org/name"
        .to_owned()
}

fn alignment(metadata: &BTreeMap<String, Metadata>) -> Parsed<u64> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Metadata::Integer(value)) if *value > 0 && *value <= 1 << 20 => Ok(value.unsigned_abs()),
        Some(other) => Err(format!(
            "general.alignment is {other:?}, expected a small positive integer"
        )),
    }
}

/// The shortest decimal that is this single-precision number: 1e-5 and not 9.99999974737875e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

fn number_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

const READABLE: &str =
    "F32, F16, BF16, F64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K";

fn encoding(kind: u32) -> Option<Encoding> {
    let quantised = match kind {
        0 => return Some(Encoding::F32),
        1 => return Some(Encoding::F16),
        28 => return Some(Encoding::F64),
        30 => return Some(Encoding::Bf16),
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        15 => GgmlDType::Q8K,
        _ => return None,
    };
    Some(Encoding::Quantised(quantised))
}
