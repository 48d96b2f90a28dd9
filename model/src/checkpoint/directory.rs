//! Hugging Face directories: config.json, safetensors in one file or in shards, and what lies beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use espalier_arch::Architecture;
use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use super::side_files::SideFiles;
use super::stored::{Encoding, Stored, TensorIndex, WeightFile};
use super::{Opened, read_json};
use crate::export::flat;
use crate::{Error, Result};

/// One file of weights.
pub const SINGLE: &str = "model.safetensors";
/// Which shard holds which tensor.
pub const INDEX: &str = "model.safetensors.index.json";
/// A header longer than this is damage, not a model (the format's own limit).
const MAXIMUM_HEADER: u64 = 100_000_000;

/// Opens a Hugging Face directory.
pub fn open(directory: &Path) -> Result<Opened> {
    let config_path = directory.join("config.json");
    let config = read_json(&config_path)?;
    let architecture = architecture(&config).map_err(|error| Error::Damaged {
        path: config_path,
        reason: error.to_string(),
    })?;
    let tensors = index(directory)?;
    let side_files = SideFiles::from_directory(directory)?;
    Ok(Opened {
        architecture,
        config,
        tensors,
        side_files,
    })
}

/// The shape that a config describes, one of our own flat exports included.
fn architecture(config: &Value) -> Result<Architecture> {
    if flat::is_flat(config) {
        flat::from_config(config)
    } else {
        Ok(Architecture::from_config(config)?)
    }
}

fn index(directory: &Path) -> Result<TensorIndex> {
    let index_path = directory.join(INDEX);
    if index_path.exists() {
        return sharded(directory, &index_path);
    }
    let single = directory.join(SINGLE);
    if !single.exists() {
        return Err(Error::Damaged {
            path: directory.to_owned(),
            reason: format!(
                "no weights, expected {SINGLE} or {INDEX}{}",
                other_weights(directory)
            ),
        });
    }
    let mut index = TensorIndex {
        listing: single.clone(),
        ..TensorIndex::default()
    };
    add_file(&mut index, &single)?;
    Ok(index)
}

/// A remedy when weights are there in a format that is not read.
fn other_weights(directory: &Path) -> &'static str {
    let pickled = directory.join("pytorch_model.bin").exists()
        || directory.join("pytorch_model.bin.index.json").exists();
    if pickled {
        " (pytorch_model.bin is not read: save the model with transformers' save_pretrained to get safetensors)"
    } else {
        ""
    }
}

fn sharded(directory: &Path, index_path: &Path) -> Result<TensorIndex> {
    let listing = read_json(index_path)?;
    let wrong = |reason: String| Error::Damaged {
        path: index_path.to_owned(),
        reason,
    };
    let map = listing
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| wrong("no weight_map, expected an object from tensor names to files".to_owned()))?;
    let mut shard_of: BTreeMap<&str, &str> = BTreeMap::new();
    for (tensor, shard) in map {
        let shard = shard
            .as_str()
            .filter(|shard| !shard.is_empty() && !shard.contains(['/', '\\']) && *shard != "..")
            .ok_or_else(|| wrong(format!("weight_map of {tensor} is {shard}, expected a file name")))?;
        shard_of.insert(tensor, shard);
    }
    let shards: BTreeSet<&str> = shard_of.values().copied().collect();
    let mut index = TensorIndex {
        listing: index_path.to_owned(),
        ..TensorIndex::default()
    };
    for shard in shards {
        add_file(&mut index, &directory.join(shard))?;
    }
    for (tensor, shard) in shard_of {
        let found = index
            .tensors
            .get(tensor)
            .and_then(|stored| index.files.get(stored.file));
        if found.is_none_or(|file| file.path.file_name() != Some(shard.as_ref())) {
            return Err(Error::CheckpointTensor {
                path: directory.join(shard),
                tensor: tensor.to_owned(),
                expected: format!("the tensor in this file, where {INDEX} puts it"),
                found: "none".to_owned(),
            });
        }
    }
    Ok(index)
}

/// Reads the header of one file of weights and adds its tensors.
fn add_file(index: &mut TensorIndex, path: &Path) -> Result<()> {
    let file = WeightFile::open(path)?;
    let (header_end, metadata) = header(&file)?;
    let number = index.files.len();
    let expected = header_end.saturating_add(metadata.data_len() as u64);
    if file.bytes != expected {
        return Err(length_mismatch(&file, &metadata, header_end, expected));
    }
    for (name, info) in metadata.tensors() {
        let Some(encoding) = encoding(info.dtype) else {
            if name.ends_with("inv_freq") || name.ends_with("masked_bias") {
                continue;
            }
            return Err(Error::CheckpointTensor {
                path: path.to_owned(),
                tensor: name,
                expected: "type F32, F16, BF16 or F64".to_owned(),
                found: format!("{:?}", info.dtype),
            });
        };
        let stored = Stored {
            file: number,
            offset: header_end + info.data_offsets.0 as u64,
            shape: info.shape.clone(),
            encoding,
            interleaved_heads: None,
        };
        if index.tensors.insert(name.clone(), stored).is_some() {
            return Err(Error::CheckpointTensor {
                path: path.to_owned(),
                tensor: name,
                expected: "each tensor in one file only".to_owned(),
                found: "it in an earlier file too".to_owned(),
            });
        }
    }
    index.files.push(file);
    Ok(())
}

/// The end of the header, and what it says.
fn header(file: &WeightFile) -> Result<(u64, Metadata)> {
    let wrong = |reason: String| Error::Damaged {
        path: file.path.clone(),
        reason,
    };
    let mut length = [0u8; 8];
    if file.bytes < 8 {
        return Err(wrong(format!(
            "the file is {} bytes long, expected a safetensors header",
            file.bytes
        )));
    }
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > MAXIMUM_HEADER || length > file.bytes - 8 {
        return Err(wrong(format!(
            "the safetensors header claims {length} bytes of a file of {}: damaged, cut short or another format",
            file.bytes
        )));
    }
    let mut header = vec![0u8; usize::try_from(length).unwrap_or_default()];
    file.read_exact_at(&mut header, 8)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| wrong(format!("the safetensors header cannot be read: {error}")))?;
    Ok((8 + length, metadata))
}

fn length_mismatch(file: &WeightFile, metadata: &Metadata, header_end: u64, expected: u64) -> Error {
    let cut = metadata
        .tensors()
        .into_iter()
        .filter(|(_, info)| header_end.saturating_add(info.data_offsets.1 as u64) > file.bytes)
        .min_by_key(|(_, info)| info.data_offsets.0);
    match cut {
        Some((tensor, _)) => Error::CheckpointTensor {
            path: file.path.clone(),
            tensor,
            expected: format!("it whole, in a file of {expected} bytes"),
            found: format!("the file cut short at {} bytes", file.bytes),
        },
        None => Error::Damaged {
            path: file.path.clone(),
            reason: format!(
                "the file is {} bytes long, expected {expected} as its header says",
                file.bytes
            ),
        },
    }
}

fn encoding(dtype: Dtype) -> Option<Encoding> {
    match dtype {
        Dtype::F64 => Some(Encoding::F64),
        Dtype::F32 => Some(Encoding::F32),
        Dtype::F16 => Some(Encoding::F16),
        Dtype::BF16 => Some(Encoding::Bf16),
        _ => None,
    }
}
