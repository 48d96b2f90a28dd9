//! Jobs measured in vLLM, by the stand-in of its process (`serving/tests/fake_helper.py`): from the submission to the
//! report, and what its users are told where it is not there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const BUDGETS: &str = "
search: {mlp_grid: 128, strategies: [heterogeneous]}
budget: {sequence_tokens: 64, calibration_tokens: 1024, scoring_tokens: 512, recovery_tokens: 0, validation_tokens: 1024}
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .unwrap()
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

/// A directory with a parent, a spec and a Python whose vLLM is the stand-in.
struct World {
    directory: TempDir,
    python: PathBuf,
}

impl World {
    fn new(head: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let made = Command::new("python3")
            .arg(root().join("tests/checks/random-parent.py"))
            .arg(directory.path().join("parent"))
            .args(["--hidden", "64", "--layers", "3", "--channels", "256"])
            .args(["--heads", "4", "--kv-heads", "2", "--head", &head.to_string()])
            .status();
        assert!(made.unwrap().success());
        let text = format!(
            "#!/bin/sh
case \"$1\" in
-c) echo '{{\"vllm\": \"0.32.0\", \"plugin\": \"0.1.0\"}}';;
*) exec python3 '{}';;
esac
",
            root().join("serving/tests/fake_helper.py").display()
        );
        fs::write(directory.path().join("text"), text).unwrap();
        // Copied by another process: one that this one had open for writing another test's child might hold yet, and
        // then it cannot be started.
        let copied = Command::new("sh")
            .args(["-c", "cp text python && chmod +x python"])
            .current_dir(directory.path())
            .status();
        assert!(copied.unwrap().success());
        Self {
            python: directory.path().join("python"),
            directory,
        }
    }

    fn spec(&self, limits: &str) -> PathBuf {
        let spec = self.directory.path().join("job.yaml");
        let data = root().join("examples/data");
        let text = format!(
            "parent: parent
data: {{train: [{data}/train.jsonl.xz], validation: [{data}/validation.jsonl.xz]}}
target:
  engine: vllm
  workload: {{prompt_tokens: 48, output_tokens: 8, concurrency: 2}}
  limits: {limits}
{BUDGETS}",
            data = data.display()
        );
        fs::write(&spec, text).unwrap();
        spec
    }

    /// `espalier run` of the spec, with the Python where it is named and what goes wrong in its vLLM.
    fn run(&self, python: Option<&Path>, limits: &str, variables: &[(&str, &str)]) -> Output {
        let mut command = self.command(limits);
        if let Some(python) = python {
            command.arg("--vllm-python").arg(python);
        }
        command.envs(variables.iter().copied()).output().unwrap()
    }

    fn command(&self, limits: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
        command.arg("run").arg(self.spec(limits));
        command.arg("--output-dir").arg(self.output());
        command.env("ESPALIER_CACHE_DIR", self.directory.path().join("cache"));
        command
    }

    fn output(&self) -> PathBuf {
        self.directory.path().join("out")
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_job_is_profiled_checked_and_verified_in_vllm_from_its_submission_to_its_report() {
    if !has_python() {
        return;
    }
    let world = World::new(32);
    let ended = world.run(Some(&world.python), "{latency: 75%}", &[]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let report = fs::read_to_string(world.output().join("report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    let verified = &report["limits"][0]["verified"];
    assert_eq!(verified["inside"], true, "{report}");
    // The stand-in's costs add up exactly, and so does the prediction.
    let error = verified["error"].as_f64().unwrap();
    assert!(error.abs() < 0.02, "{error}");
    let table = fs::read_to_string(world.output().join("cost-table.json")).unwrap();
    let table: Value = serde_json::from_str(&table).unwrap();
    let key = &table["profile"]["key"];
    assert_eq!(
        (&key["engine"], &key["engine_version"]),
        (&"vllm".into(), &"0.32.0".into())
    );
    assert!(world.output().join("checkpoint/config.json").is_file());
}

#[test]
fn a_job_goes_on_after_its_vllm_died_in_the_middle_of_a_profile() {
    if !has_python() {
        return;
    }
    let world = World::new(32);
    let once = world.directory.path().join("once");
    let variables = [
        ("FAKE_VLLM", "steps:7=die"),
        ("FAKE_VLLM_ONCE", once.to_str().unwrap()),
    ];
    let ended = world.run(Some(&world.python), "{latency: 75%}", &variables);
    assert!(once.exists(), "it did die");
    assert!(ended.status.success(), "{}", stderr(&ended));
}

/// Processes whose command line has the word and whose environment names the world's directory.
fn processes_of(world: &World, word: &str) -> Vec<libc::pid_t> {
    let has = |process: &fs::DirEntry, file: &str, wanted: &str| {
        let text = fs::read(process.path().join(file)).unwrap_or_default();
        text.windows(wanted.len())
            .any(|window| window == wanted.as_bytes())
    };
    let directory = world.directory.path().to_str().unwrap();
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|process| has(process, "cmdline", word) && has(process, "environ", directory))
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect()
}

/// A run that is ended with the test, however that ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let Ok(None) = self.0.try_wait() else { return };
        if let Ok(run) = libc::pid_t::try_from(self.0.id()) {
            // SAFETY: kill touches no memory; the run was started here and is not reaped. It ends what it started.
            unsafe { libc::kill(run, libc::SIGTERM) };
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.0.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something is so, for as long as a machine that others use too may take.
fn expect_soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_child_that_is_killed_takes_its_hung_vllm_with_it_and_the_job_goes_on() {
    if !has_python() {
        return;
    }
    let world = World::new(32);
    let once = world.directory.path().join("once");
    let mut command = world.command("{latency: 75%}");
    command
        .arg("--vllm-python")
        .arg(&world.python)
        .env("FAKE_VLLM", "steps:7=hang")
        .env("FAKE_VLLM_ONCE", &once)
        .stdout(Stdio::null());
    let mut running = Running(command.spawn().unwrap());
    expect_soon("its vLLM hangs", || {
        let ended = running.0.try_wait().unwrap();
        assert!(ended.is_none(), "it ended before its vLLM hung");
        once.exists()
    });
    let hung = processes_of(&world, "fake_helper");
    assert_eq!(hung.len(), 1);
    for child in processes_of(&world, "device-child") {
        // SAFETY: kill touches no memory; the child is that of a run of this test's own.
        unsafe { libc::kill(child, libc::SIGKILL) };
    }
    expect_soon("it goes with its child", || {
        !processes_of(&world, "fake_helper").contains(&hung[0])
    });
    assert!(running.0.wait().unwrap().success());
}

#[test]
fn what_no_vllm_can_be_measured_in_is_refused_in_one_line_before_a_worker_starts() {
    if !has_python() {
        return;
    }
    let world = World::new(32);
    let nowhere = world.directory.path().join("nowhere/python");
    for (python, part) in [
        (None, "give --vllm-python"),
        (Some(nowhere.as_path()), "No such file"),
        (Some(Path::new("/bin/true")), "which no Python does"),
    ] {
        let ended = world.run(python, "{latency: 75%}", &[]);
        let said = stderr(&ended);
        assert_eq!(ended.status.code(), Some(2), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains(part), "{said}");
        assert!(!world.output().exists());
    }
}

#[test]
fn heads_that_vllm_cannot_take_are_refused_once_the_parent_is_known() {
    if !has_python() {
        return;
    }
    let world = World::new(16);
    let ended = world.run(Some(&world.python), "{latency: 75%}", &[]);
    assert_eq!(ended.status.code(), Some(1));
    let said = stderr(&ended);
    assert!(
        said.contains("block 0: its head size is 16, expected one of 32, 64"),
        "{said}"
    );
    assert!(!said.contains("profile"), "nothing was measured: {said}");
}

#[test]
fn an_error_that_stays_ends_the_job_with_what_vllm_said_and_the_worker_lives() {
    if !has_python() {
        return;
    }
    let world = World::new(32);
    let ended = world.run(
        Some(&world.python),
        "{latency: 75%}",
        &[("FAKE_VLLM", "open=unsupported")],
    );
    let said = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("vLLM cannot run this: a fake failure of kind unsupported"),
        "{said}"
    );
    assert!(!said.contains("ended unexpectedly"), "{said}");
}
