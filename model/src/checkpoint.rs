//! Parents on disk: Hugging Face directories, GGUF files, repositories of a hub, and our own exports.
//!
//! [`Parent::open`] reads headers, config and tokenizer, never weights, and checks everything that can be
//! checked without them: each tensor of the architecture is there, with its shape, in a type that can be
//! read, inside a file that is long enough. [`Parent::load`] reads the weights as a backend keeps them, [`SortedParent`]
//! only a stage of them, or one block after the other. Here live formats and their quirks; nothing here computes with a model or
//! writes a checkpoint (see [`crate::export`]).

mod directory;
mod gguf;
mod hub;
mod reading;
mod side_files;
mod sorted;
mod stored;
mod walk;

use std::path::{Path, PathBuf};

use espalier_arch::{Architecture, Role, TensorSpec};
use serde_json::Value;

use crate::importance::Importance;
use crate::ops::Operations;
use crate::sort::{Order, Permutation};
use crate::tokenizer::{Tokenizer, check_vocabulary};
use crate::weights::{matrix_shape, read_as};
use crate::{ElementType, Elements, Error, Model, Result, Tensor};

pub use side_files::{SideFiles, SpecialTokens};
pub use sorted::{SortedParent, StudentFiles};
pub use stored::Precision;
pub use walk::BlockFiles;

/// The prefix of a source that names a repository of a hub.
pub const HUB_PREFIX: &str = "hf://";

/// A checkpoint that has been opened and checked, its weights not yet read.
#[derive(Debug)]
pub struct Parent {
    /// The model's shape.
    pub architecture: Architecture,
    /// `config.json`, or what it would be (rebuilt from GGUF metadata).
    pub config: Value,
    /// What [`Parent::open`] was given.
    pub source: String,
    /// The directory or file that was read: for a hub's repository, where its copy lies.
    pub path: PathBuf,
    tensors: stored::TensorIndex,
    side_files: SideFiles,
    tokenizer: Option<Tokenizer>,
}

impl Parent {
    /// Opens a Hugging Face directory, a GGUF file, or `hf://org/name[@revision]`.
    ///
    /// A hub is read through `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME`, as Hugging Face's own tools do.
    ///
    /// # Errors
    /// When the source cannot be read, its family is unknown, a tensor is missing, superfluous or of another
    /// shape, a file is cut short, or the tokenizer does not fit the vocabulary. The error names the file,
    /// the tensor and what was expected.
    pub fn open(source: &str) -> Result<Self> {
        let path = match source.strip_prefix(HUB_PREFIX) {
            Some(repository) => hub::fetch(repository)?,
            None => PathBuf::from(source),
        };
        let metadata = std::fs::metadata(&path).map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        let opened = if metadata.is_dir() {
            directory::open(&path)?
        } else {
            gguf::open(&path)?
        };
        opened.tensors.check(&opened.architecture)?;
        let tokenizer = opened
            .side_files
            .file(side_files::TOKENIZER)
            .map(|bytes| tokenizer_from_bytes(&path, bytes, &opened.architecture))
            .transpose()?;
        Ok(Self {
            architecture: opened.architecture,
            config: opened.config,
            source: source.to_owned(),
            path,
            tensors: opened.tensors,
            side_files: opened.side_files,
            tokenizer,
        })
    }

    /// BLAKE3, in hexadecimal, of the names, sizes, first and last MiB of every weight file, of the config
    /// and of the tokenizer: two parents with one fingerprint are one parent for every practical purpose.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.config.to_string().as_bytes());
        for (name, bytes) in self.side_files.iter() {
            hasher.update(name.as_bytes());
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        }
        self.tensors.fingerprint(&mut hasher)?;
        Ok(hasher.finalize().to_hex().to_string())
    }

    /// Reads every weight onto the backend's device, in the backend's own type.
    ///
    /// # Errors
    /// When a file cannot be read any more.
    pub fn load(&self, ops: &dyn Operations) -> Result<Model> {
        Model::from_tensors(&self.architecture, |spec| self.tensor(spec, ops))?.stacked(ops)
    }

    /// Reads one of the architecture's tensors, as blocks read it.
    fn tensor(&self, spec: &TensorSpec, ops: &dyn Operations) -> Result<Tensor> {
        let elements = self.elements(spec, read_as(ops, spec.role), None)?;
        place(spec, &elements, ops)
    }

    /// Reads one of the architecture's tensors, row by row, in this type, and in this order where there is one.
    fn elements(
        &self,
        spec: &TensorSpec,
        element_type: ElementType,
        order: Option<&Order>,
    ) -> Result<Elements> {
        self.tensors.read(&spec.name, element_type, order)
    }

    /// Orders every axis by importance, the most important first, with one tensor at a time on the device.
    ///
    /// # Errors
    /// When the importance was measured on a model of another shape, or a file cannot be read any more.
    pub fn permutation(&self, importance: &Importance, ops: &dyn Operations) -> Result<Permutation> {
        let specs = self.architecture.tensors();
        let down = |block: usize| {
            let is_its = |spec: &&TensorSpec| spec.block == Some(block) && spec.role == Role::Down;
            let missing = Error::MissingTensor { role: Role::Down };
            self.tensor(specs.iter().find(is_its).ok_or(missing)?, ops)
        };
        let blocks = importance.order(&self.architecture, ops, down)?;
        Ok(Permutation { blocks })
    }

    /// The tokenizer, already checked against the vocabulary.
    ///
    /// # Errors
    /// When the checkpoint has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| Error::Damaged {
            path: self.path.clone(),
            reason:
                "no tokenizer.json, expected one beside the weights (save the tokenizer with transformers' \
                     save_pretrained to make it)"
                    .to_owned(),
        })
    }

    /// Tokenizer, chat template, generation config and special tokens, as files to be copied and as values.
    pub fn side_files(&self) -> &SideFiles {
        &self.side_files
    }

    /// Ids of the tokens that begin and end a text or fill it up.
    pub fn special_tokens(&self) -> SpecialTokens {
        let id_of = |text: &str| {
            self.tokenizer
                .as_ref()
                .and_then(|tokenizer| tokenizer.token_to_id(text))
        };
        self.side_files.special_tokens(&self.config, &id_of)
    }

    /// What exports of it are written in: f16 when all weights are, bf16 when all of them are 16-bit or quantised, else f32.
    pub fn stored_precision(&self) -> Precision {
        self.tensors.precision()
    }
}

/// What a format's reader found, before the checks that all formats share.
struct Opened {
    architecture: Architecture,
    config: Value,
    tensors: stored::TensorIndex,
    side_files: SideFiles,
}

fn tokenizer_from_bytes(path: &Path, bytes: &[u8], architecture: &Architecture) -> Result<Tokenizer> {
    let file = if path.is_dir() {
        path.join(side_files::TOKENIZER)
    } else {
        path.to_owned()
    };
    let tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| Error::Damaged {
        path: file.clone(),
        reason: format!("not a tokenizer that can be read: {error}"),
    })?;
    check_vocabulary(&tokenizer, architecture).map_err(|reason| Error::Damaged { path: file, reason })?;
    Ok(tokenizer)
}

/// A tensor with these elements on a device.
fn place(spec: &TensorSpec, elements: &Elements, ops: &dyn Operations) -> Result<Tensor> {
    let (rows, columns) = matrix_shape(&spec.shape);
    ops.upload_elements(elements, rows, columns)
}

/// Reads a whole small file.
fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Io {
        path: path.to_owned(),
        source,
    })
}

/// Reads a whole small JSON file.
fn read_json(path: &Path) -> Result<Value> {
    let bytes = read_file(path)?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Damaged {
        path: path.to_owned(),
        reason: format!("not valid JSON: {error}"),
    })
}
