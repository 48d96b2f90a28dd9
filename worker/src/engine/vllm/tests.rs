//! vLLM's process as it should be and as it should not, by the fake beside the real one (`serving/tests`), which needs
//! only a Python.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod environment;
mod failures;
mod pair;
mod profile;
mod too_large;

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
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
/// For all that is to go well, on a machine that others use too.
const PATIENT: Deadlines = Deadlines {
    hello: Duration::from_secs(120),
    open: Duration::from_secs(120),
    work: Duration::from_secs(120),
    idle: Duration::from_secs(120),
};

/// An environment whose Python is the fake.
struct World {
    directory: TempDir,
    options: VllmOptions,
    whoever: Whoever,
}

#[derive(Debug, Default)]
pub(super) struct Whoever {
    /// After so many beats it should stop; 0 is never.
    stops_after: Cell<u32>,
    beats: Cell<u32>,
    /// What was told: how far it had come, of how many, and why or what.
    told: RefCell<Vec<(usize, usize, String)>>,
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

    fn progress(&self, done: usize, total: usize, _: &str, note: &dyn Fn() -> String) -> Result<()> {
        self.told.borrow_mut().push((done, total, note()));
        self.check_stopped()
    }

    fn waits(&self, why: &dyn Fn() -> String) -> Result<()> {
        let (done, total) = self
            .told
            .borrow()
            .last()
            .map_or((0, 0), |(done, total, _)| (*done, *total));
        self.progress(done, total, "", why)
    }
}

/// Whether there is the Python that the stand-in of vLLM's process needs; says so where there is none.
fn has_python() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| {
        let asked = "import sys; sys.exit(sys.version_info < (3, 10))";
        let ran = Command::new("python3").args(["-c", asked]).status();
        let is_there = ran.is_ok_and(|status| status.success());
        if !is_there {
            // Not by a macro: what those print is shown of failing tests only.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: tests with a stand-in of vLLM, which needs python3 of version 3.10 or later"
            );
        }
        is_there
    })
}

fn script(directory: &Path, name: &str, text: &str) -> PathBuf {
    fs::write(directory.join("text"), format!("#!/bin/sh\n{text}\n")).unwrap();
    // Copied by another process: one that this one had open for writing another test's child might hold yet, and then it
    // cannot be started.
    let copied = Command::new("sh")
        .args(["-c", "cp text \"$0\" && chmod +x \"$0\"", name])
        .current_dir(directory)
        .status();
    assert!(copied.unwrap().success());
    directory.join(name)
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
                deadlines: PATIENT,
                variables: variables.collect(),
                platform: None,
                rooms: Some(directory.path().join("rooms")),
                pause: Pause(Duration::from_millis(1)),
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
        engine.close();
        assert!(vllm.helper.is_some(), "it is kept for the next task");
        Ok(profiled)
    }

    fn pair(&self, running: Option<usize>) -> Result<MeasuredPair> {
        self.pair_of(&parent(), running)
    }

    /// The model and a smaller one in turns.
    fn pair_of(&self, whole: &Architecture, running: Option<usize>) -> Result<MeasuredPair> {
        let mut vllm = Vllm::new(self.options.clone());
        let mut engine = vllm.engine(Precision::Bf16, &self.whoever)?;
        let smaller = smaller_than(whole);
        let both = [whole, &smaller].map(Subject::Shape);
        measure_pair(&mut engine, both, &WORKLOAD, running, 4, &self.whoever)
    }

    /// The same, but what the process does not get on with is given up after this long.
    fn patient_for(mut self, patience: Duration) -> Self {
        let deadlines = &mut self.options.deadlines;
        (deadlines.open, deadlines.work) = (patience, patience);
        self
    }

    /// What a profile fails with.
    fn fails(&self) -> Error {
        match self.profile() {
            Err(crate::Error::Vllm(error)) => error,
            other => panic!("{:?}: {other:?}", self.options.variables),
        }
    }
}

pub(super) fn attention(kv_groups: usize) -> BlockShape {
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

pub(super) fn mlp(channels: usize) -> BlockShape {
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

/// Half of its blocks.
fn smaller_than(architecture: &Architecture) -> Architecture {
    let mut smaller = architecture.clone();
    smaller.blocks.truncate(architecture.blocks.len() / 2);
    smaller
}

pub(super) fn task() -> Profile {
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
