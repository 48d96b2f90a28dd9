//! Parents that the target's engine cannot serve.

use espalier_arch::{Activation, Architecture, BlockShape};
use espalier_proto::task::TaskOutput;

use super::world::*;
use crate::pipeline::context::Context;
use crate::pipeline::servable::refuse_unservable;
use crate::pipeline::*;
use crate::spec::{Device, Engine, JobSpec};

fn for_vllm() -> JobSpec {
    let mut spec = spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#);
    spec.target.engine = Engine::Vllm;
    spec
}

fn with_heads(size: usize) -> Architecture {
    let mut parent = parent();
    for block in &mut parent.blocks {
        if let BlockShape::Attention(attention) = &mut block.shape {
            attention.head_dim = size;
        }
    }
    parent
}

fn refused(spec: &JobSpec, parent: &Architecture) -> String {
    let results = Results::default();
    let context = Context {
        spec,
        results: &results,
    };
    match refuse_unservable(&context, parent) {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_head_size_that_vllm_cannot_take_is_named_with_its_block_before_anything_is_measured() {
    let spec = for_vllm();
    let said = refused(&spec, &with_heads(16));
    for part in ["target.engine", "block 0", "head size is 16", "32, 64, 80"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(refused(&spec, &with_heads(64)), "");
    let mut on_a_gpu = for_vllm();
    on_a_gpu.target.device = Device::Cuda;
    assert_eq!(refused(&on_a_gpu, &with_heads(16)), "");
    assert!(refused(&on_a_gpu, &with_heads(264)).contains("up to 256"));
    let mut world = World::default();
    let said = world.run(&spec).unwrap_err().to_string();
    assert!(said.contains("head size is 8"), "{said}");
    assert_eq!(world.log, [Stage::Ingest], "nothing was measured");
}

#[test]
fn windows_and_heads_of_several_sizes_and_blocks_that_the_plugin_has_not_are_refused_by_their_place() {
    let spec = for_vllm();
    let mut parent = with_heads(64);
    if let BlockShape::Attention(attention) = &mut parent.blocks[2].shape {
        attention.sliding_window = Some(128);
    }
    let said = refused(&spec, &parent);
    for part in ["block 2", "128 tokens", "block 0's is unlimited"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let mut parent = with_heads(64);
    if let BlockShape::Attention(attention) = &mut parent.blocks[2].shape {
        attention.head_dim = 128;
    }
    let said = refused(&spec, &parent);
    assert!(said.contains("head size is 128 and block 0's is 64"), "{said}");
    let mut parent = with_heads(64);
    let is_mlp = |shape: &BlockShape| matches!(shape, BlockShape::Mlp(_));
    parent.blocks.retain(|block| is_mlp(&block.shape));
    assert!(refused(&spec, &parent).contains("without attention"));
    let mut parent = with_heads(64);
    if let BlockShape::Mlp(mlp) = &mut parent.blocks[1].shape {
        mlp.activation = Activation::ReluSquared;
    }
    assert!(refused(&spec, &parent).contains("block 1"));
    let mut parent = with_heads(64);
    parent.max_positions = 24;
    assert!(refused(&spec, &parent).contains("is 25, expected at most 24"));
    let mut crowded = for_vllm();
    crowded.target.workload.concurrency = 4096;
    assert!(refused(&crowded, &with_heads(64)).contains("is 65536, expected at most 32768"));
}

/// Whether a job with this parent is refused once the parent is known.
fn is_refused(spec: &JobSpec, parent: &Architecture) -> bool {
    let first = plan(spec, &Results::default()).unwrap().stages.remove(0);
    let mut output = World::default().answer(&first.tasks[0].spec, &mut None);
    let TaskOutput::Ingest(ingested) = &mut output else {
        panic!("{output:?}")
    };
    ingested.architecture = parent.clone();
    let mut results = Results::default();
    let finished = Finished {
        outputs: vec![output],
        seconds: 1.0,
        ended_seconds: None,
    };
    let result = StageResult {
        decision: None,
        finished: Some(finished),
    };
    results.stages.insert(first.stage, result);
    plan(spec, &results).is_err()
}

#[test]
fn what_vllm_gives_up_behind_a_window_is_not_held_against_a_limit_on_memory() {
    let mut parent = with_heads(64);
    parent.max_positions = 4096;
    for block in &mut parent.blocks {
        if let BlockShape::Attention(attention) = &mut block.shape {
            attention.sliding_window = Some(64);
        }
    }
    // At the least 512 bytes a token in each of four blocks: 4 MB of all 2016 tokens, 0.7 MB of the 63 behind which a
    // step of 256 comes.
    let asked = |engine: Engine, memory: &str| {
        let mut spec = spec(&format!(r#"{{"memory": "{memory}"}}"#), r#"["heterogeneous"]"#);
        spec.search.skip = false;
        spec.target.engine = engine;
        spec.target.workload.output_tokens = 2000;
        spec
    };
    assert!(!is_refused(&asked(Engine::Vllm, "2MB"), &parent));
    assert!(is_refused(&asked(Engine::Vllm, "0.6MB"), &parent));
    assert!(is_refused(&asked(Engine::Builtin, "2MB"), &parent));
}
