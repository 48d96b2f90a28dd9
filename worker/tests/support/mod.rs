//! A device with a child, and what tests ask of both.
#![allow(dead_code)] // each test file uses its share

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use espalier_arch::{Architecture, BlockShape, Candidate};
use espalier_proto::task::{Engine, Failure, ParentRef, Profile, Progress, Recipe, Recover, TaskSpec};
use espalier_proto::v1::{Assign, Gang, Lease};
use espalier_search::{Point, Workload};
use espalier_worker::agent::core::{DeviceEvent, Ended, Run};
use espalier_worker::agent::device::{Command, Runner};
use espalier_worker::agent::leftover::Mark;
use espalier_worker::agent::memory::DeviceMemory;
use espalier_worker::agent::options::{ChildOptions, DeviceOptions};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

pub fn lease(attempt: u64) -> Lease {
    Lease {
        term: 1,
        epoch: 1,
        attempt,
    }
}

/// The program that stands in for `espalier`, which cargo builds beside the tests.
pub fn stand_in() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let path = path.join("examples/stand_in");
    assert!(
        path.is_file(),
        "{} is missing: cargo build -p espalier-worker --example stand_in",
        path.display()
    );
    path
}

/// The tiny parent's config.
pub fn architecture() -> Architecture {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
    espalier_model::checkpoint::Parent::open(path.to_str().unwrap())
        .unwrap()
        .architecture
}

/// A profile of one shape with many rounds.
pub fn long_profile() -> TaskSpec {
    let architecture = architecture();
    let shape: BlockShape = architecture.blocks[0].shape.clone();
    TaskSpec::Profile(Profile {
        architecture,
        shapes: vec![shape],
        points: vec![Point::Prefill {
            tokens: 16,
            sequences: 1,
        }],
        workload: Workload {
            prompt_tokens: 32,
            output_tokens: 8,
            concurrency: 1,
        },
        rounds: 64,
        engine: Engine::Builtin,
        kept: Vec::new(),
    })
}

/// A recovery by two ranks, of a parent that is not there: it is looked for once both are released.
pub fn shared_recovery() -> TaskSpec {
    TaskSpec::Recover(Recover {
        parent: ParentRef {
            source: "nowhere".to_owned(),
            fingerprint: "none".to_owned(),
            permutation: None,
        },
        candidate: Candidate { variants: Vec::new() },
        shards: Vec::new(),
        recipe: Recipe {
            tokens: 1,
            batch_sequences: 1,
            learning_rate: 1e-3,
            warmup: 0.1,
            final_share: 0.1,
            clip: 1.0,
            betas: (0.9, 0.95),
            weight_decay: 0.0,
            checkpoint_steps: 1,
            seed: 1,
            ranks: 2,
            pipeline_stages: 1,
        },
        resume: None,
    })
}

pub fn signal(process: i32, signal: i32) {
    // SAFETY: a plain system call on a process that this test started.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

/// Children of a process whose environment holds `marker`.
pub fn children_of(parent: u32, marker: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |process: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let mut fields = stat
            .rsplit_once(')')
            .map_or("", |(_, rest)| rest)
            .split_whitespace();
        let alive = fields.next().is_some_and(|state| state != "Z" && state != "X");
        let of = fields.next().and_then(|parent| parent.parse::<u32>().ok());
        let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        alive && of == Some(parent) && String::from_utf8_lossy(&words).contains(marker)
    };
    processes.filter(is_ours).collect()
}

/// No memory is ever free.
#[derive(Debug)]
struct Full;

impl DeviceMemory for Full {
    fn free_bytes(&self) -> Option<u64> {
        Some(0)
    }
}

/// One device and the task that owns its child.
pub struct Device {
    pub commands: mpsc::Sender<Command>,
    pub events: mpsc::Receiver<DeviceEvent>,
    pub store: PathBuf,
    /// What the coordinator says its store's id is.
    pub store_id: String,
    marker: String,
    runner: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Device {
    /// A device whose child is [`stand_in`] in one of its modes.
    pub fn start(mode: &str) -> Self {
        Self::with(stand_in(), vec![mode.to_owned()], PATIENCE, |runner| runner)
    }

    /// A device on which no memory is free.
    pub fn without_memory(mode: &str, patience: Duration) -> Self {
        Self::with(stand_in(), vec![mode.to_owned()], PATIENCE, |runner| {
            runner.with_memory(Arc::new(Full), patience)
        })
    }

    /// A device whose child is a shell script.
    pub fn script(script: &str) -> Self {
        Self::script_hung_after(script, PATIENCE)
    }

    /// The same, taken for hung after this long.
    pub fn script_hung_after(script: &str, hang_timeout: Duration) -> Self {
        let arguments = vec!["-c".to_owned(), script.to_owned()];
        Self::with(PathBuf::from("/bin/sh"), arguments, hang_timeout, |runner| runner)
    }

    fn with(
        program: PathBuf,
        mut arguments: Vec<String>,
        hang_timeout: Duration,
        change: impl FnOnce(Runner) -> Runner,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // The last argument means nothing to the child: it tells this device's child from those of other tests.
        let marker = directory.path().display().to_string();
        arguments.push(marker.clone());
        let options = ChildOptions {
            program: Some(program),
            arguments,
            hang_timeout,
            stop_timeout: Duration::from_millis(500),
        };
        let (to_events, events) = mpsc::channel(1024);
        let (commands, received) = mpsc::channel(16);
        let mark = Mark::new("http://127.0.0.1:1", &marker, "cpu");
        let runner = Runner::new(
            DeviceOptions::cpu(1),
            options,
            "http://127.0.0.1:1",
            mark,
            to_events,
        );
        let store = directory.path().join("store");
        std::fs::create_dir(&store).unwrap();
        Self {
            commands,
            events,
            store,
            store_id: String::new(),
            marker,
            runner: tokio::spawn(change(runner).run(received)),
            _directory: directory,
        }
    }

    /// The same, with artifacts that somebody else has put down.
    #[must_use]
    pub fn on_store(self, store: PathBuf) -> Self {
        Self { store, ..self }
    }

    /// What the command line of the device's child holds.
    pub fn marker(&self) -> &str {
        &self.marker
    }

    /// The device's child, once it is there.
    pub async fn child(&self) -> i32 {
        let child = async {
            loop {
                if let [child] = children_of(std::process::id(), &self.marker)[..] {
                    return child;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, child).await.expect("it starts in time")
    }

    /// Gives the device an attempt.
    pub async fn run(&self, attempt: u64, spec: &TaskSpec, gang: Option<Gang>) {
        self.give(attempt, serde_json::to_vec(spec).unwrap(), gang).await;
    }

    /// Gives the device an attempt at whatever this is.
    pub async fn run_json(&self, attempt: u64, spec: Vec<u8>) {
        self.give(attempt, spec, None).await;
    }

    async fn give(&self, attempt: u64, spec: Vec<u8>, gang: Option<Gang>) {
        let run = Run {
            lease: lease(attempt),
            assign: Assign {
                lease: Some(lease(attempt)),
                spec_json: spec.into(),
                gang,
                memory_bytes: 1,
                ..Assign::default()
            },
            artifact_store: self.store.display().to_string(),
            artifact_store_id: self.store_id.clone(),
        };
        self.commands.send(Command::Run(Box::new(run))).await.unwrap();
    }

    async fn next(&mut self) -> DeviceEvent {
        let event = timeout(PATIENCE, self.events.recv()).await;
        event.expect("news in time").expect("the device lives")
    }

    /// Waits until so many units are done; what the attempt told then.
    pub async fn wait_for_progress(&mut self, done: u64) -> Progress {
        loop {
            match self.next().await {
                DeviceEvent::Progress { progress_json, .. } => {
                    let progress: Progress = serde_json::from_slice(&progress_json).unwrap();
                    if progress.done >= done {
                        return progress;
                    }
                }
                DeviceEvent::Ended { ended, .. } => panic!("it has ended: {ended:?}"),
                DeviceEvent::Log { .. } | DeviceEvent::Prepared { .. } | DeviceEvent::Gone { .. } => {}
            }
        }
    }

    /// Waits until a rank stands ready; where it is reached.
    pub async fn wait_for_address(&mut self) -> String {
        loop {
            match self.next().await {
                DeviceEvent::Prepared { address, .. } => return address,
                DeviceEvent::Ended { ended, .. } => panic!("it has ended: {ended:?}"),
                DeviceEvent::Log { .. } | DeviceEvent::Progress { .. } | DeviceEvent::Gone { .. } => {}
            }
        }
    }

    /// How an attempt ended, and what its child wrote meanwhile.
    pub async fn until_it_ends(&mut self, attempt: u64) -> (Ended, Vec<String>) {
        let mut log = Vec::new();
        loop {
            match self.next().await {
                DeviceEvent::Ended { lease: of, ended } => {
                    assert_eq!(of, lease(attempt));
                    return (ended, log);
                }
                DeviceEvent::Log { lines, .. } => log.extend(lines),
                DeviceEvent::Progress { .. } | DeviceEvent::Prepared { .. } | DeviceEvent::Gone { .. } => {}
            }
        }
    }

    /// How an attempt failed.
    pub async fn failure(&mut self, attempt: u64) -> Failure {
        match self.until_it_ends(attempt).await {
            (Ended::Failure(json), _) => serde_json::from_slice(&json).unwrap(),
            (other, log) => panic!("it did not fail: {other:?}, {log:?}"),
        }
    }

    /// Ends the device and its child.
    pub async fn stop(self) {
        drop(self.commands);
        self.runner.await.unwrap();
    }
}
