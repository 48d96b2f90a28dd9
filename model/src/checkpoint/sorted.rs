//! A parent on disk in the order that importance gave its axes: read whole, a stage at a time, or cut to a student's
//! shape as it is read, so that a device need not hold more of it than it uses. [`super::walk`] reads it block by block.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use espalier_arch::{Architecture, Candidate, Role, TensorSpec};

use super::{BlockFiles, Parent, place};
use crate::ops::Operations;
use crate::ops::cpu::CpuOperations;
use crate::sort::{Order, Permutation};
use crate::weights::file::save_model;
use crate::weights::{StageWeights, matrix_shape, read_as, stage_specs};
use crate::{ElementType, Elements, Error, Model, Result, Tensor};

/// A parent whose blocks are sorted when they are read, where there is an order.
#[derive(Debug)]
pub struct SortedParent {
    parent: Parent,
    permutation: Option<Permutation>,
    loaded: AtomicUsize,
}

/// A student as it lies in its parent's files, one tensor of it at a time in the host's memory and none on a device.
#[derive(Debug)]
pub struct StudentFiles<'a> {
    source: &'a SortedParent,
    cut: Cut,
    host: CpuOperations,
}

/// A student's tensors as parts of its parent's.
#[derive(Debug)]
struct Cut {
    /// The student's shape.
    student: Architecture,
    /// Of each of the student's blocks, which of the parent's it is a part of.
    blocks: Vec<usize>,
    /// The parent's tensors by block and role.
    whole: HashMap<(Option<usize>, Role), TensorSpec>,
}

impl SortedParent {
    /// `parent` in this order.
    ///
    /// # Errors
    /// When it is not a permutation of the parent's axes.
    pub fn new(parent: Parent, permutation: Option<Permutation>) -> Result<Self> {
        if let Some(permutation) = &permutation {
            permutation.check(&parent.architecture)?;
        }
        Ok(Self {
            parent,
            permutation,
            loaded: AtomicUsize::new(0),
        })
    }

    /// Config, tokenizer, side files.
    pub fn parent(&self) -> &Parent {
        &self.parent
    }

    /// The same, once its weights are read.
    pub fn into_parent(self) -> Parent {
        self.parent
    }

    /// Bytes of weights that were read for devices so far, as they take them.
    pub fn loaded_bytes(&self) -> usize {
        self.loaded.load(Ordering::Relaxed)
    }

    /// Bytes that the stage with blocks `range` takes on the backend's device.
    pub fn stage_bytes(&self, range: &Range<usize>, operations: &dyn Operations) -> usize {
        bytes_of(&stage_specs(&self.parent.architecture, range), operations)
    }

    /// All of it, sorted.
    ///
    /// # Errors
    /// As [`SortedParent::stage`].
    pub fn load(&self, operations: &dyn Operations) -> Result<Model> {
        self.stage(0..self.parent.architecture.blocks.len(), operations)?
            .into_model()
    }

    /// The stage with blocks `range`, sorted; nothing else is read.
    ///
    /// # Errors
    /// When there are no such blocks, a file cannot be read any more, or the backend runs out of memory.
    pub fn stage(&self, range: Range<usize>, operations: &dyn Operations) -> Result<StageWeights> {
        let architecture = &self.parent.architecture;
        StageWeights::build(architecture, range, |spec| self.tensor(spec, operations))?.stacked(operations)
    }

    /// Blocks `range` of the student that `candidate` makes, with what stands before and after them: parts of what is
    /// `held` of the parent, which nothing copies, and what of it lies in other stages read beside.
    ///
    /// # Errors
    /// When the candidate does not fit, and as [`SortedParent::stage`].
    pub fn student_stage(
        &self,
        candidate: &Candidate,
        range: Range<usize>,
        held: &StageWeights,
        operations: &dyn Operations,
    ) -> Result<StageWeights> {
        let cut = Cut::of(&self.parent.architecture, candidate)?;
        let held = held.named_tensors().into_iter();
        let held: HashMap<String, &Tensor> = held.map(|(spec, tensor)| (spec.name, tensor)).collect();
        StageWeights::build(&cut.student, range, |spec| {
            let whole = cut.whole(spec)?;
            match held.get(&whole.name) {
                Some(tensor) => part(tensor, spec),
                None => part(&self.tensor(whole, operations)?, spec),
            }
        })
    }

    /// The student that `candidate` makes, tensor by tensor.
    ///
    /// # Errors
    /// When the candidate does not fit.
    pub fn student(&self, candidate: &Candidate) -> Result<StudentFiles<'_>> {
        Ok(StudentFiles {
            source: self,
            cut: Cut::of(&self.parent.architecture, candidate)?,
            host: CpuOperations::new(),
        })
    }

    /// One of the parent's tensors on a device.
    fn tensor(&self, spec: &TensorSpec, operations: &dyn Operations) -> Result<Tensor> {
        let elements = self.read(spec, read_as(operations, spec.role))?;
        place(spec, &elements, operations)
    }

    /// One of the parent's tensors in this type, sorted.
    fn sorted(&self, spec: &TensorSpec, element_type: ElementType) -> Result<Elements> {
        let order = self.order_of(spec)?;
        self.parent.elements(spec, element_type, order.as_ref())
    }

    fn order_of(&self, spec: &TensorSpec) -> Result<Option<Order>> {
        let (Some(permutation), Some(block)) = (&self.permutation, spec.block) else {
            return Ok(None);
        };
        let shape = self.parent.architecture.blocks.get(block);
        let (Some(order), Some(block)) = (permutation.blocks.get(block), shape) else {
            return Err(Error::MissingTensor { role: spec.role });
        };
        order.order_of(&block.shape, spec.role)
    }
}

impl BlockFiles for SortedParent {
    fn architecture(&self) -> &Architecture {
        &self.parent.architecture
    }

    fn read(&self, spec: &TensorSpec, element_type: ElementType) -> Result<Elements> {
        let elements = self.sorted(spec, element_type)?;
        self.loaded.fetch_add(elements.bytes(), Ordering::Relaxed);
        Ok(elements)
    }
}

impl StudentFiles<'_> {
    /// The student's shape.
    pub fn architecture(&self) -> &Architecture {
        &self.cut.student
    }

    /// One of its tensors, in the host's memory.
    ///
    /// # Errors
    /// When it has no such tensor, or a file cannot be read any more.
    pub fn tensor(&self, spec: &TensorSpec) -> Result<Tensor> {
        let whole = self.cut.whole(spec)?;
        let elements = self.source.sorted(whole, ElementType::F32)?;
        part(&place(whole, &elements, &self.host)?, spec)
    }

    /// Writes what [`Model::save`] writes of it.
    ///
    /// # Errors
    /// As [`StudentFiles::tensor`], and when `path` cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        save_model(path, &self.cut.student, |spec| {
            self.host.download(&self.tensor(spec)?)
        })
    }
}

impl Cut {
    fn of(parent: &Architecture, candidate: &Candidate) -> Result<Self> {
        let student = parent.with_candidate(candidate)?;
        let mut blocks = Vec::with_capacity(student.blocks.len());
        for (index, (block, variant)) in parent.blocks.iter().zip(&candidate.variants).enumerate() {
            let left = block.shape.with_variant(variant);
            let left =
                left.map_err(|reason| espalier_arch::Error::VariantDoesNotFit { block: index, reason })?;
            blocks.extend(left.is_some().then_some(index));
        }
        let whole = parent.tensors().into_iter();
        Ok(Self {
            student,
            blocks,
            whole: whole.map(|spec| ((spec.block, spec.role), spec)).collect(),
        })
    }

    /// The parent's tensor that the student's is a part of.
    fn whole(&self, spec: &TensorSpec) -> Result<&TensorSpec> {
        let block = match spec.block {
            Some(block) => self.blocks.get(block).copied().map(Some),
            None => Some(None),
        };
        let whole = block.and_then(|block| self.whole.get(&(block, spec.role)));
        whole.ok_or(Error::MissingTensor { role: spec.role })
    }
}

/// Bytes that tensors take on the backend's device.
pub(super) fn bytes_of<'a>(
    specs: impl IntoIterator<Item = &'a TensorSpec>,
    operations: &dyn Operations,
) -> usize {
    let bytes = |spec: &TensorSpec| {
        let each = read_as(operations, spec.role).bytes();
        spec.shape.iter().product::<usize>().saturating_mul(each)
    };
    specs.into_iter().map(bytes).fold(0, usize::saturating_add)
}

/// The first rows and columns of a sorted tensor, as many as a student's has.
fn part(whole: &Tensor, spec: &TensorSpec) -> Result<Tensor> {
    let (rows, columns) = matrix_shape(&spec.shape);
    whole.first_rows(rows)?.first_columns(columns)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::path::PathBuf;

    use espalier_arch::{BlockShape, Variant};

    use super::*;
    use crate::checkpoint::Precision;
    use crate::export::{Tensors, export, export_tensors};
    use crate::sort::BlockPermutation;

    pub fn tiny() -> Parent {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        Parent::open(path.to_str().unwrap()).unwrap()
    }

    /// The last come first.
    pub fn backwards(architecture: &Architecture) -> Permutation {
        let order = |block: &espalier_arch::Block| match &block.shape {
            BlockShape::Attention(shape) => BlockPermutation::Attention {
                groups: (0..shape.kv_groups).rev().collect(),
            },
            BlockShape::Mlp(shape) => BlockPermutation::Mlp {
                channels: (0..shape.channels).rev().collect(),
            },
            other => panic!("{other:?}"),
        };
        Permutation {
            blocks: architecture.blocks.iter().map(order).collect(),
        }
    }

    pub fn sorted() -> SortedParent {
        let parent = tiny();
        let permutation = backwards(&parent.architecture);
        SortedParent::new(parent, Some(permutation)).unwrap()
    }

    /// The first block is skipped, so that the student's stages lie elsewhere than the parent's; MLPs are halved.
    fn candidate(architecture: &Architecture) -> Candidate {
        let variant = |(index, block): (usize, &espalier_arch::Block)| match &block.shape {
            _ if index == 0 => Variant::Skip,
            BlockShape::Mlp(shape) => Variant::Mlp {
                channels: shape.channels / 2,
            },
            _ => Variant::Whole,
        };
        let blocks = architecture.blocks.iter().enumerate();
        Candidate {
            variants: blocks.map(variant).collect(),
        }
    }

    fn assert_same(found: &StageWeights, expected: &StageWeights) {
        let host = CpuOperations::new();
        let (found, expected) = (found.named_tensors(), expected.named_tensors());
        assert_eq!(found.len(), expected.len());
        for ((spec, own), (expected_spec, expected)) in found.iter().zip(&expected) {
            assert_eq!(spec, expected_spec);
            let bits = |tensor: &Tensor| -> Vec<u32> {
                let values = host.download(tensor).unwrap().into_iter();
                values.map(f32::to_bits).collect()
            };
            assert_eq!(bits(own), bits(expected), "{}", spec.name);
        }
    }

    #[test]
    fn a_stage_is_that_of_the_sorted_model_and_nothing_else_is_read() {
        let host = CpuOperations::new();
        let parent = tiny();
        let model = parent.load(&host).unwrap();
        let model = backwards(&parent.architecture).apply(&model, &host).unwrap();
        let blocks = model.blocks.len();
        for range in [0..blocks, 0..blocks / 2, 1..2, blocks / 2..blocks] {
            let source = sorted();
            let stage = source.stage(range.clone(), &host).unwrap();
            assert_same(&stage, &StageWeights::of(&model, range.clone()).unwrap());
            assert_eq!(source.loaded_bytes(), stage.bytes(), "{range:?}");
            assert_eq!(source.stage_bytes(&range, &host), stage.bytes(), "{range:?}");
        }
        assert!(source_bytes(0..blocks / 2) < model.bytes() * 3 / 4);
        assert!(sorted().stage(0..blocks + 1, &host).is_err());
    }

    #[test]
    fn what_is_read_for_a_device_is_the_sorted_model_rounded_to_what_the_device_keeps() {
        let host = CpuOperations::new();
        let source = sorted();
        let model = tiny().load(&host).unwrap();
        let model = backwards(&model.architecture).apply(&model, &host).unwrap();
        for (spec, tensor) in model.named_tensors() {
            let exact = host.download(tensor).unwrap();
            for element_type in [ElementType::F32, ElementType::Bf16] {
                let found = source.read(&spec, element_type).unwrap();
                let expected = Elements::rounded(exact.clone(), element_type);
                assert_eq!(found.element_type(), element_type);
                assert!(found == expected, "{} in {element_type}", spec.name);
            }
        }
    }

    fn source_bytes(range: Range<usize>) -> usize {
        let source = sorted();
        source.stage(range, &CpuOperations::new()).unwrap();
        source.loaded_bytes()
    }

    #[test]
    fn a_students_stage_is_cut_out_of_what_is_held_and_only_the_rest_is_read() {
        let host = CpuOperations::new();
        let source = sorted();
        let model = source.load(&host).unwrap();
        let candidate = candidate(&model.architecture);
        let student = model.slice(&candidate).unwrap();
        let (blocks, kept) = (model.blocks.len(), student.blocks.len());
        // The student's first blocks are the parent's from the second on: one of them is in the other stage.
        for (own, of_parent, beside) in [(0..blocks / 2, 0..blocks / 2, 1), (kept / 2..kept, 0..blocks, 0)] {
            let source = sorted();
            let held = source.stage(of_parent, &host).unwrap();
            let before = source.loaded_bytes();
            let stage = source.student_stage(&candidate, own.clone(), &held, &host);
            let stage = stage.unwrap();
            assert_same(&stage, &StageWeights::of(&student, own.clone()).unwrap());
            let outside = model.blocks[blocks / 2].tensors().into_iter();
            let outside: usize = outside.map(|(_, tensor)| tensor.bytes()).sum();
            assert_eq!(source.loaded_bytes() - before, beside * outside);
            assert!(
                stage.blocks()[0].tensors()[0]
                    .1
                    .shares_storage_with(held.blocks()[own.start + 1].tensors()[0].1)
            );
        }
    }

    #[test]
    fn a_student_written_tensor_by_tensor_is_the_file_that_its_model_saves() {
        let host = CpuOperations::new();
        let directory = tempfile::tempdir().unwrap();
        let [streamed, saved] = ["streamed", "saved"].map(|name| directory.path().join(name));
        let source = sorted();
        let candidate = candidate(&source.parent().architecture);
        source.student(&candidate).unwrap().save(&streamed).unwrap();
        assert_eq!(source.loaded_bytes(), 0, "nothing goes to a device");
        let student = source.load(&host).unwrap().slice(&candidate).unwrap();
        student.save(&saved, &host).unwrap();
        assert_eq!(std::fs::read(&streamed).unwrap(), std::fs::read(&saved).unwrap());
        let exports = ["from files", "of the model"].map(|name| directory.path().join(name));
        let files = source.student(&candidate).unwrap();
        let tensors = Tensors {
            architecture: files.architecture(),
            tensor: &|spec| files.tensor(spec),
            operations: &host,
        };
        export_tensors(tensors, source.parent(), &exports[0], Precision::Bf16).unwrap();
        export(&student, source.parent(), &exports[1], Precision::Bf16, &host).unwrap();
        let [from_files, of_the_model] =
            exports.map(|export| std::fs::read(export.join("model.safetensors")).unwrap());
        assert_eq!(from_files, of_the_model);
        let unfit = Candidate { variants: Vec::new() };
        assert!(source.student(&unfit).is_err());
    }

    #[test]
    fn an_order_of_another_parent_is_refused() {
        let parent = tiny();
        let mut permutation = backwards(&parent.architecture);
        permutation.blocks.pop();
        let refused = SortedParent::new(parent, Some(permutation)).unwrap_err();
        assert!(refused.to_string().contains("permutation"), "{refused}");
    }
}
