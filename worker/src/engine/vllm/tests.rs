//! vLLM's process as it should be and as it should not, by the fake beside the real one (`serving/tests`), which needs
//! only a Python.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use espalier_arch::{Activation, Architecture, Attention, Block, BlockShape, Family, Mlp, Precision};
use espalier_proto::task::{FailureKind, MeasuredPair, Profile, Profiled};
use espalier_search::{Point, Subject as RowSubject, Workload};
use tempfile::TempDir;

use super::*;
use crate::engine::pair::measure_pair;

const WORKLOAD: Workload = Workload {
    prompt_tokens: 64,
    output_tokens: 9,
    concurrency: 2,
};
const SHORT: Deadlines = Deadlines {
    hello: Duration::from_secs(20),
    open: Duration::from_secs(2),
    work: Duration::from_secs(2),
};

/// An environment whose Python is the fake.
struct World {
    directory: TempDir,
    options: VllmOptions,
    whoever: Whoever,
}

#[derive(Debug, Default)]
struct Whoever {
    /// After so many beats it should stop; 0 is never.
    stops_after: Cell<u32>,
    beats: Cell<u32>,
}

impl Surroundings for Whoever {
    fn check_stopped(&self) -> Result<()> {
        match self.stops_after.get() {
            beats if beats > 0 && self.beats.get() >= beats => Err(crate::Error::Cancelled),
            _ => Ok(()),
        }
    }

    fn beat(&self) {
        self.beats.set(self.beats.get() + 1);
    }

    fn progress(&self, _: usize, _: usize, _: &str, _: &dyn Fn() -> String) -> Result<()> {
        self.check_stopped()
    }
}

fn script(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A Python that has what `found` says, and whose helper is the fake.
fn python(directory: &Path, found: &str) -> PathBuf {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("../serving/tests/fake_helper.py");
    let fake = fake.canonicalize().unwrap();
    let text = format!(
        "case \"$1\" in -c) echo '{found}';; *) exec python3 '{}';; esac",
        fake.display()
    );
    script(directory, "python", &text)
}

const BOTH: &str = r#"{"vllm": "0.32.0", "plugin": "0.1.0"}"#;

impl World {
    fn new(variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let environment = Environment {
            python: python(directory.path(), BOTH),
            trusted: Vec::new(),
        };
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Self {
            options: VllmOptions {
                environment: Some(environment),
                deadlines: SHORT,
                variables: variables.collect(),
                platform: None,
            },
            directory,
            whoever: Whoever::default(),
        }
    }

    fn profile(&self) -> Result<Profiled> {
        self.profile_of(&task())
    }

    fn profile_of(&self, task: &Profile) -> Result<Profiled> {
        let mut vllm = Vllm::new(self.options.clone());
        let mut engine = vllm.engine(Precision::Bf16, &self.whoever)?;
        let profiled = engine.profile(task)?;
        engine.close()?;
        assert!(vllm.helper.is_some(), "it is kept for the next task");
        Ok(profiled)
    }

    fn pair(&self) -> Result<MeasuredPair> {
        let mut vllm = Vllm::new(self.options.clone());
        let mut engine = vllm.engine(Precision::Bf16, &self.whoever)?;
        let mut smaller = parent();
        smaller.blocks.truncate(3);
        let whole = parent();
        let both = [&whole, &smaller].map(Subject::Shape);
        measure_pair(&mut engine, both, &WORKLOAD, 4, &self.whoever)
    }

    /// What a profile fails with where this goes wrong.
    fn fails(wrong: &str) -> Error {
        match Self::new(&[("FAKE_VLLM", wrong)]).profile() {
            Err(crate::Error::Vllm(error)) => error,
            other => panic!("{wrong}: {other:?}"),
        }
    }
}

fn attention(kv_groups: usize) -> BlockShape {
    BlockShape::Attention(Attention {
        kv_groups,
        queries_per_group: 2,
        head_dim: 32,
        qkv_bias: false,
        output_bias: false,
        qk_norm: false,
        rope: None,
        sliding_window: None,
    })
}

fn mlp(channels: usize) -> BlockShape {
    BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::SwiGlu,
        bias: false,
    })
}

fn parent() -> Architecture {
    let blocks = (0..3).flat_map(|layer| [attention(2), mlp(512)].map(|shape| Block { layer, shape }));
    Architecture {
        family: Family::Llama,
        vocab_size: 4096,
        hidden: 128,
        layers: 3,
        blocks: blocks.collect(),
        tied_embedding: true,
        norm_epsilon: 1e-5,
        max_positions: 256,
    }
}

fn task() -> Profile {
    Profile {
        architecture: parent(),
        shapes: vec![attention(2), attention(1), mlp(512), mlp(256)],
        points: espalier_search::points(&WORKLOAD).unwrap(),
        rounds: 3,
        workload: WORKLOAD,
        engine: espalier_proto::task::Engine::Vllm {
            precision: Precision::Bf16,
        },
        kept: Vec::new(),
    }
}

/// The fake's formula, milliseconds.
fn true_cost(subject: &RowSubject, point: Point) -> f64 {
    let (tokens, keys) = match point {
        Point::Prefill { tokens, sequences } => (tokens * sequences, tokens * tokens * sequences),
        Point::Decode { context, sequences } => (sequences, context * sequences),
    };
    let (tokens, keys) = (tokens as f64, keys as f64);
    let linear = |weights: f64| 10.0 + weights / 500.0 + tokens * weights / 20_000.0;
    let microseconds = match subject {
        RowSubject::Base { .. } => 200.0 + tokens / 2.0,
        RowSubject::Block(BlockShape::Attention(attention)) => {
            let heads = attention.query_heads() + attention.kv_groups;
            let weights = 2.0 * 128.0 * (attention.head_dim * heads) as f64;
            linear(weights) + keys * 2.0 * (attention.kv_groups * attention.head_dim) as f64 / 400.0
        }
        RowSubject::Block(BlockShape::Mlp(mlp)) => linear(3.0 * 128.0 * mlp.channels as f64),
        other => panic!("{other:?}"),
    };
    microseconds / 1000.0
}

#[test]
fn a_profile_gives_what_each_block_and_the_base_cost_and_what_the_table_is_true_for() {
    let world = World::new(&[]);
    let profiled = world.profile().unwrap();
    assert_eq!(profiled.rows.len(), 5 * task().points.len());
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        let (found, close) = (row.median_ms, 0.02 * expected + 0.002);
        assert!(
            (found - expected).abs() < close,
            "{:?} at {}: {found} for {expected}",
            row.subject,
            row.point
        );
    }
    let key = &profiled.key;
    assert_eq!(
        (key.engine.as_str(), key.engine_version.as_str()),
        ("vllm", "0.32.0")
    );
    assert_eq!((key.precision.as_str(), key.hidden), ("bf16", 128));
    assert!(key.device.ends_with(" threads"), "{}", key.device);
    assert!(world.whoever.beats.get() > 0, "it was seen to be alive");
}

#[test]
fn a_busy_machine_is_timed_again_and_then_as_it_is() {
    let profiled = World::new(&[("FAKE_VLLM_NOISE", "1")]).profile().unwrap();
    let blocks = profiled
        .rows
        .iter()
        .filter(|row| matches!(row.subject, RowSubject::Block(_)));
    assert!(
        blocks.map(|row| row.spread_ms).sum::<f64>() > 0.0,
        "its scatter is told"
    );
    let rounds = profiled.parent.latency_ms.samples.len();
    assert!(
        rounds > task().rounds,
        "more rounds while times scatter: {rounds}"
    );
}

#[test]
fn fewer_engines_are_open_at_once_where_there_is_no_room_for_all() {
    let world = World::new(&[("FAKE_VLLM_ENGINES", "4")]);
    let profiled = world.profile().unwrap();
    for row in &profiled.rows {
        let expected = true_cost(&row.subject, row.point);
        assert!(
            (row.median_ms - expected).abs() < 0.02 * expected + 0.002,
            "{row:?}"
        );
    }
    let later = World::new(&[("FAKE_VLLM", "steps:9=out_of_memory")]);
    assert!(
        later.profile().is_ok(),
        "also where it shows while they are timed"
    );
    let crate::Error::Vllm(error) = World::new(&[("FAKE_VLLM_ENGINES", "1")]).profile().unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(error.failure_kind(), FailureKind::OutOfMemory, "{error}");
}

#[test]
fn parent_and_candidate_are_served_in_turns_and_their_memory_is_what_the_engine_holds() {
    let pair = World::new(&[]).pair().unwrap();
    assert_eq!(pair.parent.latency_ms.samples.len(), 4);
    let ratio = pair.candidate.latency_ms.median / pair.parent.latency_ms.median;
    assert!(ratio > 0.4 && ratio < 0.9, "{ratio}");
    // Blocks of 32 tokens: 3 for each of 2 sequences and the null block; 2 × 64 × 2 bytes a token and block.
    let state = |blocks: u64| 7 * 32 * 2 * 64 * 2 * blocks;
    let weights = |architecture: &Architecture| 2 * architecture.parameters().total;
    let mut smaller = parent();
    smaller.blocks.truncate(3);
    let expected = (weights(&parent()) - weights(&smaller)) + state(3) - state(2);
    let found = pair.parent.memory_bytes - pair.candidate.memory_bytes;
    let norms = 2 * 128 * 4;
    assert!(
        found.abs_diff(expected) <= norms + (1 << 20),
        "{found} for {expected}"
    );
    assert!(pair.parent.first_token_ms.median < pair.parent.latency_ms.median);
}

#[test]
fn whatever_goes_wrong_in_the_middle_of_a_profile_is_one_error_of_its_kind() {
    use FailureKind as Kind;
    for (wrong, kind, part) in [
        (
            "steps:5=die",
            Kind::Crashed,
            "of signal 9 while it was asked to time steps",
        ),
        (
            "steps:5=exit",
            Kind::Crashed,
            "with code 1 while it was asked to time steps; its last line: RuntimeError: fell over",
        ),
        ("open:2=half", Kind::Error, "came where an answer was expected"),
        (
            "steps:5=garbage",
            Kind::Error,
            "came where an answer was expected",
        ),
        (
            "steps:3=long_line",
            Kind::Error,
            "came where an answer was expected",
        ),
        ("steps:5=wrong_id", Kind::Error, "it answered request"),
        ("steps:5=twice", Kind::Error, "it answered request"),
        ("steps:5=nothing", Kind::Error, "is none"),
        ("steps:5=unsupported", Kind::Invalid, "vLLM cannot run this"),
        ("open=invalid", Kind::Invalid, "vLLM cannot run this"),
        ("steps:5=engine", Kind::Error, "vLLM failed"),
        ("steps:5=fatal", Kind::Error, "illegal memory access"),
        ("open=busy", Kind::OutOfMemory, "busy with other work"),
        ("hello=no_vllm", Kind::Error, "--vllm-python"),
        ("hello=version", Kind::Error, "--vllm-python"),
        ("hello=protocol", Kind::Error, "protocol"),
        ("start=exit", Kind::Crashed, "while it was asked to start"),
    ] {
        let error = World::fails(wrong);
        let said = error.to_string();
        assert_eq!(error.failure_kind(), kind, "{wrong}: {said}");
        assert!(said.contains(part), "{wrong}: {said}");
        assert!(!said.contains('\n'), "{wrong}: {said}");
    }
}

#[test]
fn a_process_that_hangs_or_only_says_that_it_lives_is_killed_at_its_deadline() {
    for wrong in ["steps:5=hang", "steps:5=stall", "open:2=hang"] {
        let began = Instant::now();
        let error = World::fails(wrong);
        assert_eq!(error.failure_kind(), FailureKind::Hung, "{wrong}: {error}");
        assert!(
            error.to_string().contains("came no further for"),
            "{wrong}: {error}"
        );
        assert!(began.elapsed() < Duration::from_secs(60), "{wrong}");
    }
    let slow = World::new(&[("FAKE_VLLM", "steps:5=slow")]);
    assert!(
        slow.profile().is_ok(),
        "one that takes longer but gets further is waited for"
    );
}

#[test]
fn output_of_any_amount_holds_nobody_up() {
    let world = World::new(&[("FAKE_VLLM", "steps:2=flood")]);
    assert!(world.profile().is_ok());
}

#[test]
fn a_first_step_has_as_long_as_an_engine_to_open_and_later_ones_follow_the_longest() {
    let patient = Deadlines::default();
    assert_eq!(patient.timing(None), Duration::from_secs(600));
    let longest = Some(Duration::from_secs(88));
    assert_eq!(patient.timing(longest), Duration::from_secs(60 + 50 * 88));
}

#[test]
fn a_vllm_made_for_another_kind_of_device_measures_nothing() {
    for (fake, wanted, says) in [
        ("0", "cuda", "runs on cpu and the task's device is cuda"),
        ("1", "cpu", "runs on cuda and the task's device is cpu"),
    ] {
        let mut world = World::new(&[("FAKE_VLLM_CUDA", fake)]);
        world.options.platform = Some(wanted);
        let refused = world.profile().unwrap_err();
        assert!(refused.to_string().contains(says), "{refused}");
        world.options.platform = Some(if wanted == "cpu" { "cuda" } else { "cpu" });
        world.profile().unwrap();
    }
}

#[test]
fn a_stop_is_heeded_while_the_process_hangs_and_leaves_none_behind() {
    let world = World::new(&[("FAKE_VLLM", "hello=hang")]);
    world.whoever.stops_after.set(1);
    let mut vllm = Vllm::new(VllmOptions {
        deadlines: Deadlines::default(),
        ..world.options.clone()
    });
    let began = Instant::now();
    assert!(matches!(
        vllm.engine(Precision::Bf16, &world.whoever).map(|_| ()),
        Err(crate::Error::Cancelled)
    ));
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(processes_of(world.directory.path()), 0);
}

#[test]
fn an_error_leaves_no_process_behind_not_even_a_child_of_its_own() {
    let mark = tempfile::tempdir().unwrap();
    let wrong = "steps:2=orphan,steps:4=garbage";
    let world = World::new(&[("FAKE_VLLM", wrong), ("FAKE_MARK", mark.path().to_str().unwrap())]);
    world.profile().unwrap_err();
    assert_eq!(processes_of(mark.path()), 0);
}

/// Processes that have the path in their environment or command line.
fn processes_of(path: &Path) -> usize {
    let path = path.to_str().unwrap().as_bytes().to_vec();
    let is_of = |process: &fs::DirEntry| {
        ["environ", "cmdline"].iter().any(|file| {
            let text = fs::read(process.path().join(file)).unwrap_or_default();
            text.windows(path.len()).any(|window| window == path)
        })
    };
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|process| process.file_name().to_str().is_some_and(|name| name != own))
        .filter(is_of)
        .count()
}

#[test]
fn an_environment_that_lacks_something_is_told_in_one_line_before_anything_is_started() {
    let directory = tempfile::tempdir().unwrap();
    let look = |python: PathBuf, trusted: &[&str]| {
        let trusted = trusted.iter().map(|version| (*version).to_owned()).collect();
        Environment { python, trusted }.look()
    };
    let found = |found: &str| python(directory.path(), found);
    let said = |looked: std::result::Result<String, Error>| looked.unwrap_err().to_string();
    assert_eq!(look(found(BOTH), &[]), Ok("0.32.0".to_owned()));
    let path = directory.path().join("nowhere/python");
    assert!(said(look(path, &[])).contains("cannot be used: No such file"));
    assert!(said(look(directory.path().to_owned(), &[])).contains("is a directory"));
    let plain = directory.path().join("plain");
    fs::write(&plain, "text").unwrap();
    assert!(said(look(plain, &[])).contains("cannot be started"));
    let other = script(directory.path(), "other", "echo hello");
    assert!(said(look(other, &[])).contains("answers \"hello\\n\", which no Python does"));
    let failing = script(directory.path(), "failing", "exit 3");
    assert!(said(look(failing, &[])).contains("ended with code 3"));
    assert!(said(look(found(r#"{"vllm": null, "plugin": null}"#), &[])).contains("there is no module vllm"));
    assert!(said(look(found(r#"{"vllm": "0.32.0", "plugin": null}"#), &[])).contains("plugin espalier_vllm"));
    let newer = r#"{"vllm": "0.40.1", "plugin": "0.1.0"}"#;
    let refused = said(look(found(newer), &["0.33"]));
    for part in ["0.40.1 was not tested", "0.26 and 0.32", "--vllm-trust 0.40"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(look(found(newer), &["0.40"]), Ok("0.40.1".to_owned()));
}

#[test]
fn the_python_that_this_machine_has_is_understood_by_what_it_prints() {
    let environment = Environment {
        python: PathBuf::from("python3"),
        trusted: Vec::new(),
    };
    match environment.look() {
        Ok(_) | Err(Error::NoVllm { .. } | Error::NoPlugin { .. } | Error::Untested { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn on_a_gpu_rows_are_its_own_time_and_the_hosts_floor_stands_beside_them() {
    let profiled = World::new(&[("FAKE_VLLM_CUDA", "1")]).profile().unwrap();
    assert_eq!(profiled.key.mode, Mode::Graphs);
    assert_eq!(profiled.key.device, "fake GPU");
    let decode = |row: &&espalier_search::CostRow| matches!(row.point, Point::Decode { .. });
    let floors = profiled
        .rows
        .iter()
        .filter(|row| row.subject == RowSubject::HostFloor);
    assert_eq!(floors.clone().count(), task().points.len());
    let base = |row: &&espalier_search::CostRow| matches!(row.subject, RowSubject::Base { .. });
    let floor = floors.clone().find(decode).unwrap().median_ms;
    let device = profiled.rows.iter().filter(decode).find(base).unwrap().median_ms;
    // The stand-in's device takes six tenths of the clock's time.
    let expected = 0.6 * true_cost(&RowSubject::Base { vocab_size: 0 }, task().points[1]);
    assert!(
        (device - expected).abs() < 0.02 * expected,
        "{device} for {expected}"
    );
    assert!(floor > device, "{floor}");
}

#[test]
fn on_a_gpu_rounds_end_with_its_own_times_however_the_clock_scatters() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let world = World::new(&[
        ("FAKE_VLLM_CUDA", "1"),
        ("FAKE_VLLM_NOISE", "1"),
        ("FAKE_VLLM_LOG", log.path().to_str().unwrap()),
    ]);
    let mut task = task();
    task.rounds = 7;
    let profiled = world.profile_of(&task).unwrap();
    assert_eq!(profiled.parent.latency_ms.samples.len(), 7);
    let asked = fs::read_to_string(log.path()).unwrap();
    let steps = asked.lines().filter(|line| line.contains("\"steps\"")).count();
    // A parent, a short model, and two stacks of each shape: their own times do not scatter and take three rounds.
    assert_eq!(steps, 3 * (2 + 2 * 4) * task.points.len());
}

#[test]
fn its_process_sees_the_gpu_of_its_child_alone() {
    assert_eq!(visible(1, ""), "1");
    assert_eq!(visible(1, "4, 6"), "6");
    assert_eq!(visible(0, "GPU-1f"), "GPU-1f");
}

#[test]
fn a_worker_without_vllm_says_how_to_start_one_with_it() {
    let whoever = Whoever::default();
    let error = Vllm::default()
        .engine(Precision::Bf16, &whoever)
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("--vllm-python"), "{error}");
}
