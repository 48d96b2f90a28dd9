//! What ranks have written at one step, as any others read it: whichever stretches of tensors lie in whichever files.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use espalier_arch::{Architecture, TensorSpec};

use super::saved::{STATES, damaged};
use super::shards::Bucket;
use crate::ops::Operations;
use crate::weights::file::{TensorFile, save_model};
use crate::weights::{StageWeights, matrix_shape, stage_specs};
use crate::{Error, Result, Tensor};

/// Files that ranks have written at one step, open to be read.
#[derive(Debug)]
pub struct Parts {
    files: Vec<TensorFile>,
    architecture: Architecture,
    steps: u32,
    /// By what a file calls state and tensor: which elements, in which file, under which name.
    stretches: HashMap<String, Vec<(Range<usize>, usize, String)>>,
}

impl Parts {
    /// Opens `paths`, which need not be all that were written: what is missing is noticed when it is needed.
    ///
    /// # Errors
    /// When there is none, one cannot be read or is cut, or they are of different steps or architectures.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let (first, rest) = paths.split_first().ok_or_else(no_files)?;
        let mut parts = Self::of(first.as_ref())?;
        for path in rest {
            parts.add(path.as_ref())?;
        }
        Ok(parts)
    }

    /// Opens one file after the other until they hold all of the stage with blocks `range`; the rest is not asked for.
    /// A file that is open stays readable, so `files` may fetch each into the place of the one before.
    ///
    /// # Errors
    /// Those of `files`; as [`Parts::open`]; [`Error::MissingState`] when there is none left and something is missing.
    pub fn open_for<E: From<Error>>(
        range: &Range<usize>,
        files: impl IntoIterator<Item = std::result::Result<PathBuf, E>>,
    ) -> std::result::Result<Self, E> {
        let mut files = files.into_iter();
        let mut parts = Self::of(&files.next().ok_or_else(no_files)??)?;
        while let Err(missing) = parts.expect_all_of(range) {
            parts.add(&files.next().ok_or(missing)??)?;
        }
        Ok(parts)
    }

    fn of(path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let mut parts = Self {
            architecture: file.field("architecture")?,
            steps: file.field("steps")?,
            files: Vec::new(),
            stretches: HashMap::new(),
        };
        parts.take_in(path, file)?;
        Ok(parts)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = TensorFile::open(path)?;
        let (architecture, steps): (Architecture, u32) = (file.field("architecture")?, file.field("steps")?);
        if steps != self.steps {
            let reason = format!("of step {steps}, others are of step {}", self.steps);
            return Err(damaged(path, reason));
        }
        if architecture != self.architecture {
            let reason = "of another architecture than the others".to_owned();
            return Err(damaged(path, reason));
        }
        self.take_in(path, file)
    }

    fn take_in(&mut self, path: &Path, file: TensorFile) -> Result<()> {
        for (name, elements) in file.names() {
            let (whole, start) = place(name);
            let end = start.checked_add(elements);
            let end = end.ok_or_else(|| damaged(path, format!("tensor {name} has no end")))?;
            let stretches = self.stretches.entry(whole.to_owned()).or_default();
            let at = stretches.partition_point(|(range, ..)| range.start <= start);
            stretches.insert(at, (start..end, self.files.len(), name.to_owned()));
        }
        self.files.push(file);
        Ok(())
    }

    /// An error unless the files hold everything of the stage with blocks `range`.
    fn expect_all_of(&self, range: &Range<usize>) -> Result<()> {
        for spec in stage_specs(&self.architecture, range) {
            for state in STATES {
                self.expect_whole(state, &spec)?;
            }
        }
        Ok(())
    }

    /// How many elements a tensor has, all of which the files hold in this state: no more than there are in them, whatever
    /// the architecture says.
    fn expect_whole(&self, state: &str, spec: &TensorSpec) -> Result<usize> {
        let name = format!("{state}/{}", spec.name);
        let (mut next, end) = (0, usize::try_from(spec.elements()).unwrap_or(usize::MAX));
        for (held, ..) in self.stretches.get(&name).into_iter().flatten() {
            if held.start <= next {
                next = next.max(held.end);
            }
        }
        match next < end {
            true => Err(self.missing(name, next..end)),
            false => Ok(end),
        }
    }

    fn missing(&self, tensor: String, elements: Range<usize>) -> Error {
        Error::MissingState {
            tensor,
            from: elements.start,
            to: elements.end,
            files: self.files.len(),
        }
    }

    /// The shape of the student.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Updates that the files are the state after.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Writes what [`Model::save`](crate::Model::save) writes of the student's f32 weights, one tensor at a time in the
    /// host's memory.
    ///
    /// # Errors
    /// When the files do not hold all of them, or `path` cannot be written.
    pub fn save_model(&self, path: &Path) -> Result<()> {
        let [weights, ..] = STATES;
        // Before anything is made as large as the architecture says.
        for spec in self.architecture.tensors() {
            self.expect_whole(weights, &spec)?;
        }
        save_model(path, &self.architecture, |spec| self.whole(weights, spec))
    }

    /// One state of a whole tensor.
    fn whole(&self, state: &str, spec: &TensorSpec) -> Result<Vec<f32>> {
        let elements = self.expect_whole(state, spec)?;
        let mut values = vec![0.0; elements];
        self.read(state, spec, 0..elements, &mut values)?;
        Ok(values)
    }

    /// Elements `range` of one state of a tensor into `values`, from whichever files have them.
    fn read(&self, state: &str, spec: &TensorSpec, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let name = format!("{state}/{}", spec.name);
        let mut next = range.start;
        for (held, file, entry) in self.stretches.get(&name).into_iter().flatten() {
            if held.end as u64 > spec.elements() {
                return Err(Error::TensorShape {
                    name: entry.clone(),
                    expected: spec.shape.clone(),
                    found: vec![held.end],
                });
            }
            let end = held.end.min(range.end);
            if held.start > next || end <= next {
                continue;
            }
            let place = values.get_mut(next - range.start..end - range.start);
            if let (Some(place), Some(file)) = (place, self.files.get(*file)) {
                file.read_elements(entry, next - held.start, place)?;
            }
            next = end;
        }
        if next == range.end {
            return Ok(());
        }
        Err(self.missing(name, next..range.end))
    }

    /// A stage in f32 of one state, every tensor whole.
    pub(super) fn stage(
        &self,
        state: &str,
        range: Range<usize>,
        operations: &dyn Operations,
    ) -> Result<StageWeights> {
        StageWeights::build(&self.architecture, range, |spec| {
            let values = self.whole(state, spec)?;
            let (rows, columns) = matrix_shape(&spec.shape);
            operations.upload(&values, rows, columns)
        })?
        .stacked(operations)
    }

    /// One state of `rank`'s part of a bucket.
    pub(super) fn part(
        &self,
        state: &str,
        specs: &[TensorSpec],
        bucket: &Bucket,
        rank: usize,
        operations: &dyn Operations,
    ) -> Result<Tensor> {
        let mut values = vec![0.0; bucket.part];
        for owned in bucket.owned(rank) {
            let place = values.get_mut(owned.at..owned.at + owned.range.len());
            if let (Some(spec), Some(place)) = (specs.get(owned.tensor), place) {
                self.read(state, spec, owned.range, place)?;
            }
        }
        operations.upload(&values, 1, bucket.part)
    }
}

/// The tensor of an entry, and the element that it begins at.
fn place(name: &str) -> (&str, usize) {
    let stretch = name
        .rsplit_once('@')
        .and_then(|(name, start)| Some((name, start.parse().ok()?)));
    stretch.unwrap_or((name, 0))
}

fn no_files() -> Error {
    Error::OutOfRange {
        what: "files of a checkpoint",
        value: 0,
        expected: "at least 1".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use espalier_arch::Family;
    use serde_json::json;

    use super::*;
    use crate::ops::cpu::CpuOperations;
    use crate::weights::file::{Outgoing, save_tensors};

    /// A model of an embedding and a final norm.
    fn ends(hidden: usize) -> Architecture {
        Architecture {
            family: Family::Llama,
            vocab_size: 4,
            hidden,
            layers: 0,
            blocks: Vec::new(),
            tied_embedding: true,
            norm_epsilon: 1e-5,
            max_positions: 16,
        }
    }

    /// All states of that of two channels, in a file that says it is of `architecture`.
    fn saved(path: &Path, architecture: &Architecture) {
        let specs = ends(2).tensors();
        let states = STATES.iter().flat_map(|state| {
            specs.iter().map(move |spec| {
                let (rows, columns) = matrix_shape(&spec.shape);
                let values = vec![1.5; rows * columns];
                (
                    format!("{state}/{}", spec.name),
                    Outgoing::copied(values, [rows, columns]),
                )
            })
        });
        let metadata = json!({ "architecture": architecture, "steps": 3 });
        save_tensors(path, states.collect(), &metadata).unwrap();
    }

    #[test]
    fn an_architecture_larger_than_the_files_is_missing_state_before_anything_as_large_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let (path, written) = (directory.path().join("a"), directory.path().join("b"));
        saved(&path, &ends(2));
        let parts = Parts::open(&[&path]).unwrap();
        parts.save_model(&written).unwrap();
        std::fs::remove_file(&written).unwrap();

        // Neither rows times columns nor their bytes can be counted.
        for hidden in [3, 1 << 40, 1 << 62] {
            saved(&path, &ends(hidden));
            let parts = Parts::open(&[&path]).unwrap();
            let refused = parts.save_model(&written).unwrap_err();
            assert!(matches!(refused, Error::MissingState { .. }), "{refused}");
            assert!(!written.exists());
            let [weights, ..] = STATES;
            let refused = parts.stage(weights, 0..0, &CpuOperations::new()).unwrap_err();
            assert!(matches!(refused, Error::MissingState { .. }), "{refused}");
        }
    }
}
