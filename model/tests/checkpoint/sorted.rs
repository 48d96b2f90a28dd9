//! Parents that are sorted as they are read, whatever their format.

use std::fs;
use std::path::Path;

use espalier_arch::{Architecture, Block, BlockShape};
use espalier_model::checkpoint::{BlockFiles, SortedParent};
use espalier_model::ops::cpu::CpuOperations;
use espalier_model::sort::{BlockPermutation, Permutation};
use espalier_model::{ElementType, Elements};

use crate::fixture::{Fixture, write_gguf};
use crate::{elements, open};

/// The last groups and channels come first.
fn backwards(architecture: &Architecture) -> Permutation {
    let order = |block: &Block| match &block.shape {
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

#[test]
fn a_parent_of_any_format_is_sorted_as_it_is_read_to_what_sorting_its_model_gives() {
    let host = CpuOperations::new();
    let assert_sorted = |path: &Path, what: &str| {
        let permutation = backwards(&open(path).unwrap().architecture);
        let model = open(path).unwrap().load(&host).unwrap();
        let model = permutation.apply(&model, &host).unwrap();
        let source = SortedParent::new(open(path).unwrap(), Some(permutation)).unwrap();
        for (spec, tensor) in model.named_tensors() {
            let exact = elements(tensor);
            for element_type in [ElementType::F32, ElementType::Bf16] {
                let found = source.read(&spec, element_type).unwrap();
                let expected = Elements::rounded(exact.clone(), element_type);
                assert!(found == expected, "{what}: {} in {element_type}", spec.name);
            }
        }
    };
    for family in ["llama", "qwen2", "qwen3"] {
        let fixture = Fixture::new(family);
        for dtype in ["F32", "BF16", "F16", "F64"] {
            fixture.write_weights(dtype, |_| true);
            assert_sorted(fixture.path(), &format!("{family} {dtype}"));
        }
        let file = fixture.path().join("model.gguf");
        fs::write(&file, write_gguf(&fixture, &[])).unwrap();
        assert_sorted(&file, &format!("{family} GGUF"));
    }
}
