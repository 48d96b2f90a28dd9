//! What is asked of a device, and what is kept of a profile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use espalier_arch::{Activation, Attention, Block, BlockShape, Family, Mlp};
use espalier_proto::task::{
    ArtifactId, Calibrate, Check, Engine, Ingested, ParentRef, Profile, Profiled, Shard, Sort, Verify,
};
use espalier_search::{CostKey, CostRow, Measurement, Mode, Subject, Summary, WholeParent, Workload};

use super::*;

/// One layer of 18,656 parameters, counted by hand: an embedding of 100 × 32, projections of 32 × 32 and 16 × 32
/// twice each, three of 128 × 32, and three norms of 32.
fn parent() -> Architecture {
    let attention = BlockShape::Attention(Attention {
        kv_groups: 2,
        queries_per_group: 2,
        head_dim: 8,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    });
    let mlp = BlockShape::Mlp(Mlp {
        channels: 128,
        activation: Activation::SwiGlu,
        bias: false,
    });
    Architecture {
        family: Family::Llama,
        vocab_size: 100,
        hidden: 32,
        layers: 1,
        blocks: [attention, mlp].map(|shape| Block { layer: 0, shape }).to_vec(),
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 256,
    }
}

#[test]
fn a_task_needs_a_device_for_what_its_child_holds_of_the_parent() {
    let bytes = weight_bytes(&parent(), 2);
    assert_eq!(bytes, 18_656 * 2);
    // The MLP is the largest block: with its norm 3 * 128 * 32 + 32.
    let streamed = streamed_bytes(&parent(), 2);
    assert_eq!(streamed, bytes, "two of them are more than the whole");
    let mut deep = parent();
    deep.blocks.extend(parent().blocks);
    assert_eq!(streamed_bytes(&deep, 2), 2 * (3200 + 32 + 2 * 12_320));
    assert!(streamed_bytes(&deep, 2) < weight_bytes(&deep, 2));
    let weights = |parent| Weights {
        each: 2,
        timed: parent,
        exported: parent / 4,
        parent,
        streamed: parent / 2,
    };
    let calibrate = TaskSpec::Calibrate(Calibrate {
        parent: parent_ref(),
        shard: Shard {
            artifact: ArtifactId("0".repeat(64)),
            sequences: 1,
            sequence_tokens: 1,
        },
    });
    let wanted = needs(&calibrate, weights(bytes));
    assert_eq!((wanted.memory_bytes, wanted.ample_bytes), (bytes / 2, bytes));
    assert_eq!(
        wanted.awaited_bytes(2 * bytes),
        bytes,
        "it is waited for where it fits"
    );
    assert_eq!(
        wanted.awaited_bytes(bytes),
        bytes / 2,
        "and not where it would fill the device"
    );
    let sort = TaskSpec::Sort(Sort {
        parent: parent_ref(),
        importance: Vec::new(),
    });
    let wanted = needs(&sort, weights(bytes));
    assert_eq!((wanted.memory_bytes, wanted.ample_bytes), (0, bytes));
    let mut smaller = parent();
    smaller.blocks.pop();
    let check = TaskSpec::Check(Check {
        parent: parent(),
        architecture: smaller.clone(),
        workload: WORKLOAD,
        running: None,
        repeats: 1,
        engine: Engine::Builtin,
    });
    let wanted = needs(&check, weights(0));
    assert_eq!(
        (wanted.memory_bytes, wanted.ample_bytes),
        (weight_bytes(&smaller, 2), bytes),
        "of shapes it is told itself: the parent where there is room, the candidate where there is not"
    );
    let verify = TaskSpec::Verify(Verify {
        parent: parent_ref(),
        directory: "d".to_owned(),
        workload: WORKLOAD,
        running: None,
        repeats: 1,
        engine: Engine::Builtin,
    });
    let wanted = needs(&verify, weights(bytes));
    assert_eq!((wanted.memory_bytes, wanted.ample_bytes), (bytes / 4, bytes));
}

#[test]
fn only_tasks_that_time_models_hold_them_in_the_targets_precision() {
    let weights = |device: &str, precision: &str| {
        let text = format!(
            "{{parent: p, data: {{train: [t.txt]}}, target: {{device: {device}, engine: vllm, precision: {precision}, \
             workload: {{prompt_tokens: 4, output_tokens: 3}}, limits: {{latency: 75%}}}}, output: out}}"
        );
        let spec = JobSpec::from_yaml(&text, Path::new("/")).unwrap();
        let results = results(&[snapshot("ingest", &ingested())]).unwrap();
        Weights::of(&spec, &results)
    };
    let on_cpu = weights("cpu", "bf16");
    assert_eq!((on_cpu.timed, on_cpu.parent), (2 * 18_656, 4 * 18_656));
    assert_eq!(on_cpu.streamed, 4 * 18_656);
    let on_gpu = weights("cuda", "f32");
    assert_eq!((on_gpu.timed, on_gpu.parent), (4 * 18_656, 2 * 18_656));
    assert_eq!((on_cpu.each, on_gpu.each), (2, 4));
}

const WORKLOAD: Workload = Workload {
    prompt_tokens: 1,
    output_tokens: 1,
    concurrency: 1,
};

fn parent_ref() -> ParentRef {
    ParentRef {
        source: "p".to_owned(),
        fingerprint: "f".to_owned(),
        permutation: None,
    }
}

fn ingested() -> TaskOutput {
    let shard = Shard {
        artifact: ArtifactId("0".repeat(64)),
        sequences: 1,
        sequence_tokens: 4,
    };
    TaskOutput::Ingest(Box::new(Ingested {
        parent: ParentRef {
            source: "p".to_owned(),
            fingerprint: "f".to_owned(),
            permutation: None,
        },
        architecture: parent(),
        calibration: vec![shard.clone()],
        scoring: shard.clone(),
        recovery: Vec::new(),
        validation: shard,
        documents: 1,
        empty_documents: 0,
    }))
}

fn snapshot(name: &str, output: &TaskOutput) -> StageSnapshot {
    StageSnapshot {
        name: name.to_owned(),
        decision: None,
        outputs: Some(vec![write(output).unwrap()]),
        seconds: 1.0,
        ended_seconds: 1.0,
    }
}

/// The profile that a new job of this planner is asked for.
fn asked(planner: &PipelinePlanner, spec: &str) -> Profile {
    let Planned::Stages(stages) = planner.plan(spec, &[snapshot("ingest", &ingested())]).unwrap() else {
        panic!("it has only begun")
    };
    let stage = stages.iter().find(|stage| stage.name == "profile").unwrap();
    match read("a task", stage.tasks[0].payload.as_str()).unwrap() {
        TaskSpec::Profile(profile) => profile,
        other => panic!("{other:?}"),
    }
}

fn measured(profile: &Profile) -> TaskOutput {
    let base = Subject::Base {
        vocab_size: profile.architecture.vocab_size,
    };
    let subjects = profile.shapes.iter().cloned().map(Subject::Block).chain([base]);
    let rows = subjects.flat_map(|subject| {
        profile.points.iter().map(move |point| CostRow {
            subject: subject.clone(),
            point: *point,
            median_ms: 1.0,
            spread_ms: 0.0,
            repeats: 7,
        })
    });
    let once = Summary {
        median: 9.0,
        spread: 0.0,
        samples: vec![9.0],
    };
    TaskOutput::Profile(Profiled {
        key: CostKey {
            device: "d".to_owned(),
            engine: "builtin".to_owned(),
            engine_version: "1".to_owned(),
            precision: "f32".to_owned(),
            hidden: 32,
            parallelism: 1,
            mode: Mode::Eager,
            environment: std::collections::BTreeMap::new(),
        },
        rows: rows.collect(),
        parent: WholeParent::Measured(Measurement {
            latency_ms: once.clone(),
            first_token_ms: once.clone(),
            per_token_ms: once.clone(),
            throughput_tokens_per_second: once,
            memory_bytes: 1 << 20,
        }),
        memory: None,
        reused_rows: 0,
        disturbed: false,
    })
}

#[test]
fn a_second_job_on_the_same_target_is_told_all_that_the_first_measured() {
    let directory = tempfile::tempdir().unwrap();
    let planner = || PipelinePlanner {
        cost_tables: Some(CostTables::at(directory.path())),
    };
    let text = "{parent: p, data: {train: [t.txt]}, target: {workload: {prompt_tokens: 4, output_tokens: 3}, \
                limits: {latency: 75%}}, output: out}";
    let spec = JobSpec::from_yaml(text, Path::new("/")).unwrap();
    let spec = serde_json::to_string(&spec).unwrap();
    let first = asked(&planner(), &spec);
    assert!(first.kept.is_empty());
    let stages = [
        snapshot("ingest", &ingested()),
        snapshot("profile", &measured(&first)),
    ];
    planner().plan(&spec, &stages).unwrap();
    let second = asked(&planner(), &spec);
    let [kept] = &second.kept[..] else {
        panic!("{:?}", second.kept)
    };
    let vocabulary = second.architecture.vocab_size;
    assert!(kept.parent.is_some());
    assert!(
        kept.missing(&second.shapes, vocabulary, &second.points)
            .is_empty()
    );
    assert!(asked(&PipelinePlanner::default(), &spec).kept.is_empty());
    let anew = spec.replace("\"limits\":", "\"measure_anew\":true,\"limits\":");
    assert!(asked(&planner(), &anew).kept.is_empty());
}

#[test]
fn a_job_that_goes_on_does_not_put_its_measurements_back_over_newer_ones() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let planner = PipelinePlanner {
        cost_tables: Some(tables.clone()),
    };
    let text = "{parent: p, data: {train: [t.txt]}, target: {workload: {prompt_tokens: 4, output_tokens: 3}, \
                limits: {latency: 75%}}, output: out}";
    let spec = JobSpec::from_yaml(text, Path::new("/")).unwrap();
    let spec = serde_json::to_string(&spec).unwrap();
    let found = measured(&asked(&planner, &spec));
    let planned = || {
        let stages = [snapshot("ingest", &ingested()), snapshot("profile", &found)];
        planner.plan(&spec, &stages).unwrap();
    };
    planned();
    let first = tables.list().unwrap().0.remove(0);
    let mut newer = first.clone();
    for row in &mut newer.rows {
        row.median_ms = 2.0;
    }
    tables.keep(&newer).unwrap();
    planned();
    assert_eq!(tables.list().unwrap().0, [newer]);
    tables.remove(&first.id()).unwrap();
    planned();
    assert!(tables.list().unwrap().0.is_empty());
}

#[test]
fn a_checkpoint_grows_beside_its_place_and_is_reported_in_it() {
    let (output, partial) = (Path::new("/a/out"), Path::new("/a/out.partial"));
    let growing = moved("/a/out/checkpoint", output, partial);
    assert_eq!(growing, "/a/out.partial/checkpoint");
    assert_eq!(
        moved(&growing, output, partial),
        growing,
        "a second move changes nothing"
    );
    assert_eq!(moved(&growing, partial, output), "/a/out/checkpoint");
}
