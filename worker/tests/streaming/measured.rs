//! What times a parent goes without one that has no room.

use espalier_arch::{Storage, WeightFormat};
use espalier_proto::task::{Check, Engine, MeasuredPair, Profile, Profiled, Verify};
use espalier_search::{CostModel, CostTable, MemoryModel, Whole, Workload};

use super::*;

const WORKLOAD: Workload = Workload {
    prompt_tokens: 16,
    output_tokens: 4,
    concurrency: 1,
};

fn measured(output: Result<TaskOutput>) -> MeasuredPair {
    match output.unwrap() {
        TaskOutput::Measured(pair) => *pair,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_timed_is_timed_without_a_parent_that_has_no_room_and_its_sum_is_that_of_its_rows() {
    let mut bench = Bench::new(None);
    let ingested = bench.ingest(&example("tiny"));
    let architecture = ingested.architecture.clone();
    let profile = Profile {
        architecture: architecture.clone(),
        shapes: espalier_search::Space::default().shapes(&architecture).unwrap(),
        points: espalier_search::points(&WORKLOAD).unwrap(),
        rounds: 3,
        workload: WORKLOAD,
        engine: Engine::Builtin,
        kept: Vec::new(),
    };
    let mut profiled = |limit| {
        bench.limit = limit;
        match bench.run(&TaskSpec::Profile(profile.clone())).unwrap() {
            TaskOutput::Profile(profiled) => profiled,
            other => panic!("{other:?}"),
        }
    };
    let held = profiled(None);
    let limit = bytes_of(&ingested) * 6 / 10;
    let without = profiled(Some(limit));
    let shortage = without.parent.shortage().unwrap();
    let whole = held.parent.measured().unwrap().memory_bytes;
    assert_eq!((shortage.needed_bytes, shortage.free_bytes), (whole, limit));
    assert_eq!(without.rows.len(), held.rows.len());
    // What a parent needs beside weights and state is told by itself, so that candidates are predicted as exactly.
    let predicted = |profiled: &Profiled| {
        let table = CostTable {
            key: profiled.key.clone(),
            rows: profiled.rows.clone(),
            memory: profiled.memory,
        };
        let parent = profiled.parent.measured().map(|measurement| Whole {
            measurement,
            workload: &WORKLOAD,
        });
        let memory = MemoryModel::unpaged(Storage::all(WeightFormat::F32));
        let model = CostModel::new(&table, &WORKLOAD, &architecture, memory, parent).unwrap();
        model.predict(&architecture).unwrap().figures
    };
    assert_eq!(predicted(&without).memory_bytes, predicted(&held).memory_bytes);
    assert!(predicted(&without).latency_ms.unwrap() > 0.0);

    bench.limit = Some(limit);
    let candidate = candidates(&ingested).remove(0);
    let check = TaskSpec::Check(Check {
        parent: architecture.clone(),
        architecture: architecture.with_candidate(&candidate).unwrap(),
        workload: WORKLOAD,
        running: None,
        repeats: 4,
        engine: Engine::Builtin,
    });
    let checked = measured(bench.run(&check));
    assert_eq!(checked.parent.shortage(), Some(shortage));
    // Times of so small a model scatter.
    assert!((4..=12).contains(&checked.candidate.latency_ms.samples.len()));

    let parent = bench.sorted(&ingested);
    let directory = bench.directory.path().join("export").to_str().unwrap().to_owned();
    let export = TaskSpec::Export(Export {
        parent: parent.clone(),
        student: Student {
            candidate,
            weights: None,
        },
        directory: directory.clone(),
    });
    bench.run(&export).unwrap();
    let verify = TaskSpec::Verify(Verify {
        parent,
        directory,
        workload: WORKLOAD,
        running: None,
        repeats: 4,
        engine: Engine::Builtin,
    });
    let verified = measured(bench.run(&verify));
    assert_eq!(verified.parent.shortage(), Some(shortage));
    assert_eq!(verified.candidate.memory_bytes, checked.candidate.memory_bytes);

    // Not even the candidate: that is an error.
    bench.limit = Some(1000);
    let refused = bench.run(&check).unwrap_err();
    assert_eq!(refused.failure().kind, FailureKind::OutOfMemory, "{refused}");
}
