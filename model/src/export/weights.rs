//! Weights as safetensors: one file, or shards of at most 5 GB with an index.
//!
//! Tensors are asked for one at a time and written a few rows at a time through a small buffer, so an export needs no
//! second copy of the model.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use espalier_arch::{Architecture, TensorSpec};
use serde_json::{Map, Value, json};

use super::Tensors;
use crate::checkpoint::Precision;
use crate::weights::checked;
use crate::{Error, Result};

/// Bytes of one shard, as transformers shards.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Elements that are brought to the host together.
const DOWNLOADED_ELEMENTS: usize = 1 << 20;
/// Headers are padded so that data begins at a multiple of this.
const ALIGNMENT: usize = 8;

struct Entry {
    /// The model's own.
    own: TensorSpec,
    /// As it is written.
    name: String,
    bytes: u64,
}

/// How weights become bytes.
struct Writing<'a> {
    tensors: Tensors<'a>,
    precision: Precision,
}

/// Writes the weights under the names of `written`; the bytes written.
pub fn write(
    tensors: Tensors<'_>,
    written: &Architecture,
    precision: Precision,
    directory: &Path,
) -> Result<u64> {
    Writing { tensors, precision }.shards(written, directory, SHARD_BYTES)
}

fn plan(entries: Vec<Entry>, shard_bytes: u64) -> Vec<Vec<Entry>> {
    let mut shards: Vec<Vec<Entry>> = vec![Vec::new()];
    let mut filled = 0u64;
    for entry in entries {
        if filled > 0 && filled + entry.bytes > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += entry.bytes;
        if let Some(last) = shards.last_mut() {
            last.push(entry);
        }
    }
    shards
}

impl Writing<'_> {
    fn shards(&self, written: &Architecture, directory: &Path, shard_bytes: u64) -> Result<u64> {
        let shards = plan(self.entries(written)?, shard_bytes);
        let total: u64 = shards.iter().flatten().map(|entry| entry.bytes).sum();
        if let [only] = shards.as_slice() {
            self.shard(&directory.join("model.safetensors"), only)?;
            return Ok(total);
        }
        let mut map = Map::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
            self.shard(&directory.join(&name), shard)?;
            map.extend(shard.iter().map(|entry| (entry.name.clone(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        let bytes = serde_json::to_vec_pretty(&index).map_err(|error| Error::NotExportable {
            reason: error.to_string(),
        })?;
        super::write_file(&directory.join("model.safetensors.index.json"), &bytes)?;
        Ok(total)
    }

    fn entries(&self, written: &Architecture) -> Result<Vec<Entry>> {
        let (specs, own) = (written.tensors(), self.tensors.architecture.tensors());
        if specs.len() != own.len() {
            return Err(Error::NotExportable {
                reason: format!("it has {} tensors, expected {}", own.len(), specs.len()),
            });
        }
        let width = espalier_arch::Precision::from(self.precision).bytes();
        let mut entries = Vec::with_capacity(specs.len());
        for (spec, own) in specs.into_iter().zip(own) {
            if (spec.role, &spec.shape) != (own.role, &own.shape) {
                return Err(Error::TensorShape {
                    name: spec.name,
                    expected: spec.shape,
                    found: own.shape,
                });
            }
            let bytes = spec.elements() * width;
            let name = spec.name;
            entries.push(Entry { own, name, bytes });
        }
        Ok(entries)
    }

    fn shard(&self, path: &Path, entries: &[Entry]) -> Result<()> {
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let mut writer = BufWriter::with_capacity(1 << 20, File::create_new(path).map_err(io)?);
        let header = header(entries, self.precision)?;
        writer
            .write_all(&(header.len() as u64).to_le_bytes())
            .map_err(io)?;
        writer.write_all(&header).map_err(io)?;
        for entry in entries {
            let tensor = checked(&entry.own, (self.tensors.tensor)(&entry.own)?)?;
            let together = (DOWNLOADED_ELEMENTS / tensor.columns().max(1)).max(1);
            for first in (0..tensor.rows()).step_by(together) {
                let part = tensor.narrow_rows(first, together.min(tensor.rows() - first))?;
                let values = self.tensors.operations.download(&part)?;
                writer.write_all(&self.bytes(entry, &values)?).map_err(io)?;
            }
        }
        let file = writer.into_inner().map_err(|error| io(error.into_error()))?;
        file.sync_all().map_err(io)
    }

    fn bytes(&self, entry: &Entry, values: &[f32]) -> Result<Vec<u8>> {
        let each = values.iter();
        Ok(match self.precision {
            Precision::F32 => each.flat_map(|value| value.to_le_bytes()).collect(),
            Precision::Bf16 => each
                .flat_map(|value| half::bf16::from_f32(*value).to_le_bytes())
                .collect(),
            Precision::F16 => {
                let is_beyond =
                    |value: &&f32| value.is_finite() && half::f16::from_f32(**value).is_infinite();
                if let Some(value) = values.iter().find(is_beyond) {
                    return Err(Error::BeyondF16 {
                        tensor: entry.name.clone(),
                        value: *value,
                    });
                }
                each.flat_map(|value| half::f16::from_f32(*value).to_le_bytes())
                    .collect()
            }
        })
    }
}

fn header(entries: &[Entry], precision: Precision) -> Result<Vec<u8>> {
    let mut fields = Map::new();
    fields.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut begin = 0u64;
    for entry in entries {
        let end = begin + entry.bytes;
        let dtype = match precision {
            Precision::F32 => "F32",
            Precision::Bf16 => "BF16",
            Precision::F16 => "F16",
        };
        let info = json!({"dtype": dtype, "shape": entry.own.shape, "data_offsets": [begin, end]});
        fields.insert(entry.name.clone(), info);
        begin = end;
    }
    let mut header = serde_json::to_vec(&Value::Object(fields)).map_err(|error| Error::NotExportable {
        reason: error.to_string(),
    })?;
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    Ok(header)
}
