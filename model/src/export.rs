//! Writing a model as a Hugging Face directory: weights, config, tokenizer and what else its parent carried.
//!
//! A model whose layers are all alike is written as its plain family. Any other is written in a flat form of
//! our own ([`flat`]), with the modelling file that loads it. The directory appears whole or not at all.

pub mod flat;
mod weights;

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use espalier_arch::{Architecture, Block, BlockShape, Family, TensorSpec};
use serde_json::Value;

use crate::checkpoint::{Parent, Precision};
use crate::ops::Operations;
use crate::{Error, Model, Result, Tensor};

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The directory.
    pub directory: PathBuf,
    /// Whether it is a plain checkpoint of its family, which loads without our modelling file.
    pub uniform: bool,
    /// Numbers in all tensors; a tied embedding counts once.
    pub parameters: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
}

/// The config that a model of this shape, made from `parent`, is exported with, and the shape under the
/// layer numbers that its tensors are written with.
///
/// # Errors
/// When no config expresses the shape.
pub fn config(
    architecture: &Architecture,
    parent: &Parent,
    precision: Precision,
) -> Result<(Value, Architecture)> {
    if loads_as_plain_family(architecture) {
        let renumbered = architecture.renumbered();
        // A parent in the flat form may lack a key that its family wants: then the flat form stays.
        if let Ok(config) = uniform_config(&renumbered, &parent.config, precision) {
            return Ok((config, renumbered));
        }
    }
    let flattened = flat::renumbered(architecture);
    let config = flat::to_config(&flattened, &parent.config, precision)?;
    Ok((config, flattened))
}

/// A model that is written one tensor after the other.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    /// Its shape.
    pub architecture: &'a Architecture,
    /// Gives each of its tensors when its turn comes: a matrix is `(out, in)`, a vector `(1, n)`.
    pub tensor: &'a dyn Fn(&TensorSpec) -> Result<Tensor>,
    /// The backend whose tensors they are.
    pub operations: &'a dyn Operations,
}

/// Writes `model` as [`export_tensors`] does.
///
/// # Errors
/// As [`export_tensors`].
pub fn export(
    model: &Model,
    parent: &Parent,
    directory: &Path,
    precision: Precision,
    operations: &dyn Operations,
) -> Result<Exported> {
    let held: HashMap<String, &Tensor> = model
        .named_tensors()
        .into_iter()
        .map(|(spec, tensor)| (spec.name, tensor))
        .collect();
    let tensors = Tensors {
        architecture: &model.architecture,
        tensor: &|spec| {
            let tensor = held.get(&spec.name).map(|tensor| (*tensor).clone());
            tensor.ok_or(Error::MissingTensor { role: spec.role })
        },
        operations,
    };
    export_tensors(tensors, parent, directory, precision)
}

/// Writes a model to `directory`, which must not exist, with the tokenizer and the other files of `parent`. One tensor is
/// asked for at a time.
///
/// Everything is written to a directory beside it and synchronised, then renamed: after an error, a full disk
/// or a crash there is no `directory`.
///
/// # Errors
/// When the directory exists, a file cannot be written, or the shape cannot be expressed, and those of the tensors.
pub fn export_tensors(
    tensors: Tensors<'_>,
    parent: &Parent,
    directory: &Path,
    precision: Precision,
) -> Result<Exported> {
    if fs::symlink_metadata(directory).is_ok() {
        return Err(Error::OutputExists {
            path: directory.to_owned(),
        });
    }
    let (config, written) = config(tensors.architecture, parent, precision)?;
    let staging = Staging::beside(directory)?;
    let weight_bytes = weights::write(tensors, &written, precision, &staging.path)?;
    let mut json = serde_json::to_vec_pretty(&config).map_err(|error| Error::NotExportable {
        reason: error.to_string(),
    })?;
    json.push(b'\n');
    write_file(&staging.path.join("config.json"), &json)?;
    for (name, bytes) in parent.side_files().iter() {
        write_file(&staging.path.join(name), bytes)?;
    }
    let uniform = !flat::is_flat(&config);
    if !uniform {
        for (name, text) in flat::MODELLING_FILES {
            write_file(&staging.path.join(name), text.as_bytes())?;
        }
    }
    staging.publish(directory)?;
    Ok(Exported {
        directory: directory.to_owned(),
        uniform,
        parameters: written.tensors().iter().map(TensorSpec::elements).sum(),
        weight_bytes,
    })
}

/// Whether it loads as its plain family wherever that is served: all layers alike, with query heads that the family's
/// classes can do with. Llama's config class in transformers insists that they divide the width; Qwen2's model class in vLLM
/// reads no head size, and takes the width over their number for it.
fn loads_as_plain_family(architecture: &Architecture) -> bool {
    let hidden = architecture.hidden;
    let is_plain = |block: &Block| match (&block.shape, architecture.family) {
        (BlockShape::Attention(attention), Family::Llama) => hidden.is_multiple_of(attention.query_heads()),
        (BlockShape::Attention(attention), Family::Qwen2) => hidden == attention.query_width(),
        _ => true,
    };
    architecture.is_uniform() && architecture.blocks.iter().all(is_plain)
}

/// The parent's config with the new sizes; keys that we do not know are kept.
fn uniform_config(architecture: &Architecture, parent: &Value, precision: Precision) -> Result<Value> {
    let mut config = architecture.to_config(parent)?;
    if let Some(fields) = config.as_object_mut() {
        for stale in flat::OWN_KEYS.iter().chain(&["torch_dtype"]) {
            fields.remove(*stale);
        }
        fields.insert("dtype".to_owned(), dtype(precision).into());
    }
    expect_same(architecture, &Architecture::from_config(&config)?)?;
    Ok(config)
}

/// What transformers calls the type.
fn dtype(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
        Precision::F16 => "float16",
    }
}

/// A config that would be read back as another shape must not be written.
fn expect_same(written: &Architecture, read: &Architecture) -> Result<()> {
    if written == read {
        return Ok(());
    }
    Err(Error::NotExportable {
        reason: format!("its config would be read back as another shape: wrote {written:?}, read {read:?}"),
    })
}

/// Writes and synchronises one file.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut file = File::create_new(path).map_err(io)?;
    std::io::Write::write_all(&mut file, bytes).map_err(io)?;
    file.sync_all().map_err(io)
}

/// A directory that vanishes unless it is published.
struct Staging {
    path: PathBuf,
    published: bool,
}

impl Staging {
    /// A fresh directory beside `target`, on the same file system.
    fn beside(target: &Path) -> Result<Self> {
        let name = target.file_name().ok_or_else(|| Error::Damaged {
            path: target.to_owned(),
            reason: "not a name for a directory, expected a path that ends in one".to_owned(),
        })?;
        let parent = target
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or_else(|| Path::new("."));
        fs::create_dir_all(parent).map_err(|source| Error::Io {
            path: parent.to_owned(),
            source,
        })?;
        let path = parent.join(format!(
            ".{}.{}.partial",
            name.to_string_lossy(),
            std::process::id()
        ));
        // Left by a process of the same number that was killed; nobody else uses this name.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(|source| Error::Io {
                path: path.clone(),
                source,
            })?;
        }
        fs::create_dir(&path).map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            path,
            published: false,
        })
    }

    fn publish(mut self, target: &Path) -> Result<()> {
        let sync = |path: &Path| {
            File::open(path)
                .and_then(|directory| directory.sync_all())
                .map_err(|source| Error::Io {
                    path: path.to_owned(),
                    source,
                })
        };
        sync(&self.path)?;
        // rename() replaces an empty directory silently: one made meanwhile is somebody's.
        if fs::symlink_metadata(target).is_ok() {
            return Err(Error::OutputExists {
                path: target.to_owned(),
            });
        }
        fs::rename(&self.path, target).map_err(|source| Error::Io {
            path: target.to_owned(),
            source,
        })?;
        self.published = true;
        match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => sync(parent),
            _ => Ok(()),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a half-written export");
        }
    }
}
