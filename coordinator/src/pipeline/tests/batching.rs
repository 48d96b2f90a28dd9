//! An engine that batches continuously: fewer sequences may run together than requests come, and its throughput is measured
//! by itself.

use espalier_arch::{Architecture, Storage, WeightFormat};
use espalier_proto::task::{MeasuredPair, Profile, Profiled, TaskOutput, TaskSpec};
use espalier_search::running::waits;
use espalier_search::{
    CostRow, EngineMemory, Measurement, MemoryModel, Point, Summary, WholeParent, Workload,
};

use super::world::*;
use crate::pipeline::*;
use crate::spec::{Device, Engine, JobSpec, Strategy};

const WORKLOAD: Workload = Workload {
    prompt_tokens: 16,
    output_tokens: 9,
    concurrency: 8,
};
const PAGES: EngineMemory = EngineMemory {
    overhead_bytes: 0,
    block_tokens: 16,
    spare_blocks: 1,
    steps_under_way: 1,
};
/// What the engine needs beside weights, keys and values.
const OTHER_BYTES: u64 = 100_000;

fn asked(limits: &str, strategies: &str) -> JobSpec {
    let mut spec = spec(limits, strategies);
    spec.target.engine = Engine::Vllm;
    spec.target.device = Device::Cuda;
    spec.target.workload = WORKLOAD;
    spec
}

/// Milliseconds of a step whose costs with one sequence are `alone`.
fn step(alone: f64, point: Point) -> f64 {
    match point {
        Point::Prefill { sequences, .. } => alone * sequences as f64,
        Point::Decode { sequences, .. } => alone * (1.0 + 0.1 * sequences as f64),
    }
}

fn rows_of(profile: &Profile) -> Vec<CostRow> {
    let mut rows = rows(profile);
    for row in &mut rows {
        row.median_ms = step(row.median_ms, row.point);
    }
    rows
}

/// A model served with so many running together: its throughput `slower` than its steps say.
fn served(architecture: &Architecture, running: usize, slower: f64) -> Measurement {
    let alone = 4.0
        + architecture
            .blocks
            .iter()
            .map(|block| milliseconds(&block.shape))
            .sum::<f64>();
    let prefill = |sequences| {
        step(
            alone,
            Point::Prefill {
                tokens: 16,
                sequences,
            },
        )
    };
    let sequences = running;
    let decode = 8.0
        * step(
            alone,
            Point::Decode {
                context: 16,
                sequences,
            },
        );
    let (first, waits) = (prefill(running), waits(WORKLOAD.concurrency, running));
    let waited = waits * (first + decode);
    let turnover = (decode / running as f64 + prefill(1)) * slower;
    let summary = |median: f64| Summary {
        median,
        spread: 0.0,
        samples: vec![median],
    };
    let workload = Workload {
        concurrency: running,
        ..WORKLOAD
    };
    let memory = MemoryModel::unpaged(Storage::all(WeightFormat::Bf16)).paged(Some(&PAGES));
    Measurement {
        latency_ms: summary(waited + first + decode),
        first_token_ms: summary(waited + first),
        per_token_ms: summary(decode / 8.0),
        throughput_tokens_per_second: summary(9000.0 / turnover),
        memory_bytes: OTHER_BYTES + memory.counted_bytes(architecture, &workload),
    }
}

/// The choices checked, and how many of each were to run together.
#[derive(Default)]
struct Seen {
    checked: Vec<(Architecture, Option<usize>)>,
    verified: Vec<Option<usize>>,
}

/// Runs a job in an engine whose throughput of candidates is so much slower than its steps say, a measurement each; the last
/// one for all that follow.
fn run(spec: &JobSpec, slower: &[f64]) -> (Result<Outcome, PlanError>, World, Seen) {
    let mut world = World::default();
    let mut seen = Seen::default();
    let mut each = slower.iter().copied();
    let mut slower = 1.0;
    let mut pair = |candidate: &Architecture, running: Option<usize>| {
        slower = each.next().unwrap_or(slower);
        let all = WORKLOAD.concurrency;
        TaskOutput::Measured(Box::new(MeasuredPair {
            parent: WholeParent::Measured(served(&parent(), all, 1.0)),
            candidate: served(candidate, running.unwrap_or(all), slower),
            drift: 0.0,
            disturbed: 0.0,
            without_context: false,
            serving: None,
        }))
    };
    let outcome = world.run_with(spec, |world, task, exported| match task {
        TaskSpec::Profile(profile) => {
            let mut key = key();
            key.engine = "vllm".to_owned();
            TaskOutput::Profile(Profiled {
                key,
                rows: rows_of(profile),
                parent: WholeParent::Measured(served(&parent(), WORKLOAD.concurrency, 1.0)),
                memory: Some(PAGES),
                reused_rows: 0,
                disturbed: false,
            })
        }
        TaskSpec::Check(check) => {
            seen.checked.push((check.architecture.clone(), check.running));
            pair(&check.architecture, check.running)
        }
        TaskSpec::Verify(verify) => {
            seen.verified.push(verify.running);
            pair(exported.as_ref().unwrap(), verify.running)
        }
        other => world.answer(other, exported),
    });
    (outcome, world, seen)
}

fn bytes(architecture: &Architecture, running: usize) -> u64 {
    served(architecture, running, 1.0).memory_bytes
}

fn throughput(architecture: &Architecture, running: usize) -> f64 {
    served(architecture, running, 1.0)
        .throughput_tokens_per_second
        .median
}

#[test]
fn fewer_running_together_than_requests_come_are_checked_verified_and_reported_as_so_many() {
    // The whole parent has room for four sequences, and with four the throughput asked for.
    let limits = format!(
        r#"{{"memory": "{:.3}KiB", "throughput": "{}"}}"#,
        (bytes(&parent(), 4) + 1000) as f64 / 1024.0,
        throughput(&parent(), 4) * 0.98
    );
    let (outcome, world, seen) = run(&asked(&limits, BOTH), &[1.0]);
    let outcome = outcome.unwrap();
    assert!(
        outcome.limits.iter().all(|limit| limit.verified.inside),
        "{:?}",
        outcome.limits
    );
    for limit in &outcome.limits {
        assert!(limit.verified.error.abs() < 1e-9, "{limit:?}");
    }
    for strategy in [Strategy::Heterogeneous, Strategy::Uniform] {
        assert_eq!(world.rounds(strategy), 1, "{strategy}");
    }
    let running: Vec<Option<usize>> = seen.checked.iter().map(|(_, running)| *running).collect();
    assert_eq!(running, [Some(4), Some(4)]);
    assert_eq!(seen.verified, [Some(4)]);
    let reported: Vec<Option<usize>> = outcome.strategies.iter().map(|report| report.running).collect();
    assert_eq!(reported, [Some(4), Some(4)]);
    let kept: Vec<u64> = outcome
        .strategies
        .iter()
        .map(|report| report.parameters)
        .collect();
    assert_eq!(kept, [outcome.parent.parameters; 2], "nothing had to be cut");
}

#[test]
fn all_run_together_where_a_latency_is_limited_too() {
    let limits = format!(
        r#"{{"memory": "{:.3}KiB", "throughput": "{}", "latency": "100%"}}"#,
        (bytes(&parent(), 4) + 1000) as f64 / 1024.0,
        throughput(&parent(), 4) * 0.5
    );
    let (outcome, _, seen) = run(&asked(&limits, r#"["heterogeneous"]"#), &[1.0]);
    let outcome = outcome.unwrap();
    assert_eq!(seen.checked[0].1, None);
    assert!(outcome.strategies[0].parameters < outcome.parent.parameters);
}

#[test]
fn a_throughput_missed_with_exact_latencies_makes_the_next_choice_smaller() {
    let (outcome, world, seen) = run(
        &asked(r#"{"throughput": "150%"}"#, r#"["heterogeneous"]"#),
        &[1.1],
    );
    let outcome = outcome.unwrap();
    assert!(outcome.limits[0].verified.inside);
    assert_eq!(world.rounds(Strategy::Heterogeneous), 2);
    let [(first, _), (second, _)] = &seen.checked[..] else {
        panic!("two choices")
    };
    assert!(
        throughput(second, 8) > 1.05 * throughput(first, 8),
        "it has to be faster by what was missed"
    );
    assert!(outcome.limits[0].verified.error.abs() < 1e-9);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("missed a limit") && note.contains("a new choice made")),
        "{:?}",
        outcome.notes
    );
}

#[test]
fn what_is_chosen_again_is_not_called_a_new_choice() {
    // The whole parent, whose throughput is 20% better than its steps say, and stays.
    let (outcome, _, seen) = run(
        &asked(r#"{"throughput": "50%"}"#, r#"["heterogeneous"]"#),
        &[1.0 / 1.2],
    );
    let outcome = outcome.unwrap();
    assert_eq!(seen.checked.len(), 2);
    assert_eq!(seen.checked[0], seen.checked[1]);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("predicted wrongly") && note.contains("the same choice again")),
        "{:?}",
        outcome.notes
    );
}

#[test]
fn a_limit_missed_to_the_end_is_told_with_what_each_check_measured() {
    // Whatever was learnt, the next is worse again.
    let spec = asked(r#"{"throughput": "150%"}"#, r#"["heterogeneous"]"#);
    let (outcome, ..) = run(&spec, &[1.15, 1.35, 1.6, 1.9]);
    let Err(error) = outcome else { panic!("it was met") };
    let error = error.to_string();
    assert!(error.starts_with("none of 4 checks"), "{error}");
    for round in 1..=4 {
        let part = format!("check-heterogeneous-{round}: throughput was ");
        assert!(error.contains(&part), "{error}");
    }
    let limit = 1.5 * throughput(&parent(), 8);
    assert_eq!(
        error.matches(&format!("the limit {limit:.1} tokens/s")).count(),
        4,
        "{error}"
    );
}
