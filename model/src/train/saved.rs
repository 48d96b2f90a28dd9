//! Checkpoints: each rank writes what it keeps, masters and moments of its stretches of tensors, as one file; any
//! set of files that covers what a rank needs resumes it, whatever the number of ranks and stages that wrote them.
//!
//! A file is safetensors in f32. A whole tensor is `weight/NAME`, `first_moment/NAME` or `second_moment/NAME`; a
//! stretch of one has the element it begins at behind an `@`. Where files are kept, and the record that names all
//! of a step, are the caller's affair; [`Checkpoint`] is such a record for a directory.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use espalier_arch::{Architecture, TensorSpec};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::grid::{self, Grid};
use super::parts::Parts;
use super::shards::Bucket;
use super::{Trainer, shared, whole};
use crate::files;
use crate::ops::Operations;
use crate::weights::file::{Outgoing, save_tensors};
use crate::weights::{StageWeights, matrix_shape};
use crate::{ElementType, Error, Result, Tensor};

/// What a rank keeps of a parameter, as files name it.
pub(super) const STATES: [&str; 3] = ["weight", "first_moment", "second_moment"];
/// Bytes hashed at a time.
const PIECE: usize = 1 << 20;

/// A file that a rank has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Its name within the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Of its content, in hexadecimal digits.
    pub blake3: String,
}

/// The record of a checkpoint: every rank's file, in the order of the ranks. Whoever writes it does so last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Updates that it is the state after.
    pub steps: u32,
    /// All files.
    pub files: Vec<SavedFile>,
}

impl Checkpoint {
    /// Writes the record, whole or not at all. Every file that it names must be there for good.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        files::write_json(path, self)
    }

    /// Reads a record and opens the files beside it, each compared with its hash.
    ///
    /// # Errors
    /// When the record or a file is missing, cut or damaged, or of another step or architecture.
    pub fn open(path: &Path) -> Result<Parts> {
        let record: Self = files::read_json(path)?;
        let directory = path.parent().unwrap_or_else(|| Path::new("."));
        let mut paths = Vec::with_capacity(record.files.len());
        for file in &record.files {
            let path = directory.join(&file.name);
            file.verify(&path)?;
            paths.push(path);
        }
        let parts = Parts::open(&paths)?;
        if parts.steps() == record.steps {
            return Ok(parts);
        }
        Err(damaged(
            path,
            format!(
                "its files are of step {}, expected {}",
                parts.steps(),
                record.steps
            ),
        ))
    }
}

impl SavedFile {
    /// The file at `path`, read once to be hashed.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let (bytes, blake3) = digest(path)?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(Self { name, bytes, blake3 })
    }

    fn verify(&self, path: &Path) -> Result<()> {
        let (bytes, blake3) = digest(path)?;
        if bytes != self.bytes {
            return Err(damaged(path, format!("{bytes} bytes, expected {}", self.bytes)));
        }
        if blake3 != self.blake3 {
            return Err(damaged(
                path,
                format!("its hash is {blake3}, expected {}", self.blake3),
            ));
        }
        Ok(())
    }
}

fn digest(path: &Path) -> Result<(u64, String)> {
    let io = |source| Error::Io {
        path: path.to_path_buf(),
        source,
    };
    let mut file = File::open(path).map_err(io)?;
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
    let mut piece = vec![0; PIECE];
    loop {
        let read = file.read(&mut piece).map_err(io)?;
        let Some(read_bytes) = piece.get(..read).filter(|piece| !piece.is_empty()) else {
            return Ok((bytes, hasher.finalize().to_hex().to_string()));
        };
        hasher.update(read_bytes);
        bytes += read as u64;
    }
}

pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged {
        path: path.to_path_buf(),
        reason,
    }
}

/// A file on its way, written by a thread beside the training.
#[derive(Debug)]
pub struct Writing {
    path: PathBuf,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Writing {
    /// Whether [`Writing::finish`] would not wait.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the file is there for good, and gives its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self) -> Result<PathBuf> {
        let path = self.path.clone();
        let joined = self.thread.take().map(JoinHandle::join);
        let died = || Error::Io {
            path: path.clone(),
            source: std::io::Error::other("the thread that writes it died"),
        };
        joined.and_then(std::result::Result::ok).ok_or_else(died)??;
        Ok(path)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Nobody asks what came of it.
            let _ = thread.join();
        }
    }
}

impl Trainer {
    /// Writes what this rank keeps, whole tensors or stretches of them, and the count of steps, exact to the bit,
    /// whole or not at all.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let named = self.named_state()?;
        let operations = self.stage.operations.as_ref();
        let outgoing = named
            .iter()
            .map(|(name, tensor)| (name.clone(), Outgoing::of(tensor, operations)));
        save_tensors(path, outgoing.collect(), &self.about())
    }

    /// As [`Trainer::save`], by a thread of its own while training goes on. Waits for the device and copies 12
    /// bytes for each parameter that this rank keeps to the host's memory; writing is beside.
    ///
    /// # Errors
    /// When the device fails, or no thread can be had.
    pub fn save_beside(&self, path: PathBuf) -> Result<Writing> {
        let mut copies = Vec::new();
        for (name, tensor) in self.named_state()? {
            let shape = [tensor.rows(), tensor.columns()];
            copies.push((name, shape, self.stage.operations.download(&tensor)?));
        }
        let about = self.about();
        let io = |source| Error::Io {
            path: path.clone(),
            source,
        };
        let target = path.clone();
        let write = move || {
            let outgoing = copies.into_iter();
            let outgoing = outgoing.map(|(name, shape, values)| (name, Outgoing::copied(values, shape)));
            save_tensors(&target, outgoing.collect(), &about)
        };
        let thread = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(write)
            .map_err(io)?;
        Ok(Writing {
            path,
            thread: Some(thread),
        })
    }

    fn about(&self) -> serde_json::Value {
        json!({ "architecture": self.stage.weights.architecture(), "steps": self.steps })
    }

    fn named_state(&self) -> Result<Vec<(String, Tensor)>> {
        let specs = self.stage.weights.specs();
        let mut named = Vec::new();
        for kept in self.optimiser.kept(&self.stage)? {
            let Some(spec) = specs.get(kept.tensor) else {
                continue;
            };
            let place = match kept.range.len() as u64 == spec.elements() {
                true => String::new(),
                false => format!("@{}", kept.range.start),
            };
            for (state, tensor) in STATES.into_iter().zip(kept.state) {
                named.push((format!("{state}/{}{place}", spec.name), tensor));
            }
        }
        Ok(named)
    }

    /// Goes on from what [`Trainer::save`] wrote on one rank: the next step is what it would have been.
    ///
    /// # Errors
    /// When the file cannot be read, is cut or does not hold everything.
    pub fn load(operations: Arc<dyn Operations>, path: &Path, activation_bytes: usize) -> Result<Self> {
        let parts = Parts::open(&[path])?;
        let blocks = 0..parts.architecture().blocks.len();
        Self::resume(operations, &parts, blocks, None, activation_bytes)
    }

    /// Goes on from what any number of ranks wrote, with blocks `range` here: the next step is what it would have
    /// been, to the bit where there are as many ranks in the same places, else up to the order of sums.
    ///
    /// # Errors
    /// As [`Trainer::join`]; also when the files do not hold everything that this rank keeps.
    pub fn resume(
        operations: Arc<dyn Operations>,
        parts: &Parts,
        range: Range<usize>,
        grid: Option<Grid>,
        activation_bytes: usize,
    ) -> Result<Self> {
        grid::or_end_all(grid, |grid| {
            Self::resumed(operations, parts, range, grid, activation_bytes)
        })
    }

    fn resumed(
        operations: Arc<dyn Operations>,
        parts: &Parts,
        range: Range<usize>,
        grid: Option<Grid>,
        activation_bytes: usize,
    ) -> Result<Self> {
        if let Some(grid) = &grid {
            grid.expect_stage(&range, parts.architecture())?;
        }
        let (optimiser, stage) = match grid.as_ref().and_then(Grid::shared) {
            None => {
                let [masters, first, second] =
                    STATES.map(|state| parts.stage(state, range.clone(), operations.as_ref()));
                whole(operations, masters?, [first?, second?])?
            }
            Some((grid, replicas)) => {
                let shape = blank(operations.as_ref(), parts.architecture(), range)?;
                let (specs, rank) = (shape.specs(), replicas.rank());
                let mut read = |bucket: &Bucket| {
                    let part = |state| parts.part(state, &specs, bucket, rank, operations.as_ref());
                    let [value, first, second] = STATES.map(part);
                    Ok([value?, first?, second?])
                };
                shared(&operations, &shape, grid, Arc::clone(&replicas), &mut read)?
            }
        };
        Self::from_parts(stage, optimiser, grid, parts.steps(), activation_bytes)
    }
}

/// A stage that only says what shape its tensors have: all are views of one that is as large as the largest. Values
/// arrive from the ranks that read them.
fn blank(
    operations: &dyn Operations,
    architecture: &Architecture,
    range: Range<usize>,
) -> Result<StageWeights> {
    let largest = architecture.tensors().iter().map(TensorSpec::elements).max();
    let largest = usize::try_from(largest.unwrap_or(0)).unwrap_or(usize::MAX);
    let all = operations.zeros(1, largest, ElementType::F32)?;
    StageWeights::build(architecture, range, |spec| {
        let (rows, columns) = matrix_shape(&spec.shape);
        all.window(0, rows, columns)
    })
}
