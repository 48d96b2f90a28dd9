//! The program as its users run it: every stage of a job on `examples/tiny`, and how bad specs are refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Small enough for CI, large enough that recovery is seen to win back quality.
const BUDGETS: &str = "
search: {mlp_grid: 64}
budget:
  sequence_tokens: 128
  calibration_tokens: 4096
  scoring_tokens: 1024
  depth_tokens: 512
  recovery_tokens: 65536
  validation_tokens: 4096
recovery: {learning_rate: 0.001, batch_sequences: 16}
";

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../examples")
        .canonicalize()
        .unwrap()
}

fn write_spec(directory: &Path, limits: &str) -> PathBuf {
    let examples = examples().display().to_string();
    let spec = directory.join("job.yaml");
    let text = format!(
        "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz], validation: [{examples}/data/validation.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 64, output_tokens: 8}}
  limits: {limits}
{BUDGETS}"
    );
    fs::write(&spec, text).unwrap();
    spec
}

fn espalier(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(arguments)
        .output()
        .unwrap()
}

fn run(spec: &Path, output: &Path) -> Output {
    run_with(spec, output, &[])
}

fn run_with(spec: &Path, output: &Path, more: &[&str]) -> Output {
    let (spec, output) = (spec.to_str().unwrap(), output.to_str().unwrap());
    espalier(&[&["run", spec, "--output-dir", output], more].concat())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn divergence(strategy: &Value, when: &str) -> f64 {
    strategy[when]["divergence"].as_f64().unwrap()
}

// Memory and a parameter share are exact, so that a busy machine cannot make this test fail; timed limits are
// what `make demo` asserts.
#[test]
fn a_job_on_the_tiny_parent_meets_its_limits_and_wins_quality_back() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path(), "{block_parameters: 60%, memory: 95%}");
    let outcome = directory.path().join("out");
    let ended = run(&spec, &outcome);
    assert!(ended.status.success(), "{}", stderr(&ended));

    assert_eq!(names(directory.path()), ["job.yaml", "out"], "no state stays");
    assert_eq!(
        names(&outcome),
        ["checkpoint", "cost-table.json", "report.html", "report.json"]
    );
    let report: Value = serde_json::from_slice(&fs::read(outcome.join("report.json")).unwrap()).unwrap();
    for limit in report["limits"].as_array().unwrap() {
        let verified = &limit["verified"];
        assert_eq!(verified["inside"], true, "{limit}");
        assert!(
            verified["value"].as_f64() <= verified["limit"].as_f64(),
            "{limit}"
        );
    }
    // Measured: 0.163 to 0.070 against 0.324 to 0.169 for the uniform baseline.
    let strategies = report["strategies"].as_array().unwrap();
    for strategy in strategies {
        let (before, after) = (divergence(strategy, "before"), divergence(strategy, "after"));
        assert!(before > 0.1, "quality falls: {before}");
        assert!(after < 0.65 * before, "quality comes back: {before} to {after}");
    }
    assert_eq!(strategies.len(), 2);
    assert!(divergence(&strategies[0], "after") < 0.8 * divergence(&strategies[1], "after"));
    let table = String::from_utf8(ended.stdout).unwrap();
    assert!(
        table.starts_with("LIMIT") && table.contains("block_parameters"),
        "{table}"
    );

    the_checkpoint_is_whole(&outcome.join("checkpoint"), &report);
}

/// Bytes of six tenths of the tiny parent's parameters in f32.
const SIX_TENTHS: &str = "1698740B";

#[test]
fn a_job_whose_device_has_room_for_six_tenths_of_the_parent_ends_with_a_verified_report() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(
        directory.path(),
        "{latency: 60s, memory: 3MiB, block_parameters: 45%}",
    );
    // A recovery needs a device for each stage of the parent.
    let text = fs::read_to_string(&spec).unwrap();
    fs::write(
        &spec,
        text.replace("recovery_tokens: 65536", "recovery_tokens: 0"),
    )
    .unwrap();
    let outcome = directory.path().join("out");
    let ended = run_with(&spec, &outcome, &["--device-memory", SIX_TENTHS]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let report: Value = serde_json::from_slice(&fs::read(outcome.join("report.json")).unwrap()).unwrap();
    let shortage = &report["parent"]["measurement"];
    assert_eq!(shortage["free_bytes"], 1_698_740);
    assert!(
        shortage["needed_bytes"].as_u64().unwrap() > 4 * 707_808,
        "{shortage}"
    );
    assert!(
        report["parent"]["prediction"]["figures"]["latency_ms"]
            .as_f64()
            .unwrap()
            > 0.0
    );
    for limit in report["limits"].as_array().unwrap() {
        assert_eq!(limit["verified"]["inside"], true, "{limit}");
        let is_counted = limit["metric"] == "block_parameters";
        assert_eq!(limit["verified"].get("parent").is_some(), is_counted, "{limit}");
    }
    let why = "the parent does not fit this device (needs ";
    let page = fs::read_to_string(outcome.join("report.html")).unwrap();
    let table = String::from_utf8(ended.stdout).unwrap();
    assert!(page.contains(why) && table.contains(why), "{table}");
    assert!(
        page.contains("ms predicted") && table.contains("ms predicted"),
        "{table}"
    );
    the_checkpoint_is_whole(&outcome.join("checkpoint"), &report);
}

#[test]
fn a_share_of_a_parent_that_has_no_room_is_refused_and_an_absolute_limit_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path(), "{latency: 75%}");
    let outcome = directory.path().join("out");
    let ended = run_with(&spec, &outcome, &["--device-memory", SIX_TENTHS]);
    assert!(!ended.status.success());
    let said = stderr(&ended);
    for part in [
        "target.limits.latency: 75% is a share of what the parent measures",
        "the parent does not fit this device (needs ",
        "give an absolute limit (",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert!(!outcome.exists());
}

/// The verify stage has loaded and measured it; this holds what was written against what the report says.
fn the_checkpoint_is_whole(checkpoint: &Path, report: &Value) {
    assert_eq!(
        Path::new(report["export"]["directory"].as_str().unwrap()),
        checkpoint
    );
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(checkpoint.join(file).is_file(), "{file}");
    }
    let weights = fs::read(checkpoint.join("model.safetensors")).unwrap();
    let (length, rest) = weights.split_first_chunk::<8>().unwrap();
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap();
    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    let tensors = header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__");
    let parameters = tensors.map(|(_, tensor)| {
        tensor["shape"]
            .as_array()
            .unwrap()
            .iter()
            .map(|side| side.as_u64().unwrap())
            .product::<u64>()
    });
    assert_eq!(
        parameters.sum::<u64>(),
        report["export"]["parameters"].as_u64().unwrap()
    );
}

/// The imported table of `examples/tiny`, with budgets of moments.
fn write_imported_spec(directory: &Path) -> PathBuf {
    let examples = examples().display().to_string();
    let spec = directory.join("imported.yaml");
    let text = format!(
        "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz], validation: [{examples}/data/validation.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 128, output_tokens: 32}}
  limits: {{latency: 75%}}
  cost_table: {examples}/tiny/cost-table.json
search: {{mlp_grid: 64, strategies: [heterogeneous]}}
budget: {{sequence_tokens: 64, calibration_tokens: 1024, scoring_tokens: 512, recovery_tokens: 32768,
  validation_tokens: 1024}}
recovery: {{checkpoint_steps: 4}}
"
    );
    fs::write(&spec, text).unwrap();
    spec
}

/// The worker that a running `espalier run` has started.
fn worker_of(run: u32) -> Option<libc::pid_t> {
    let processes = fs::read_dir("/proc").unwrap();
    processes.flatten().find_map(|process| {
        let status = fs::read_to_string(process.path().join("status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        let command = fs::read_to_string(process.path().join("cmdline")).ok()?;
        if parent.trim() != run.to_string() || !command.contains("--with-parent") {
            return None;
        }
        process.file_name().to_str()?.parse().ok()
    })
}

fn weights(outcome: &Path) -> Vec<u8> {
    fs::read(outcome.join("checkpoint/model.safetensors")).unwrap()
}

#[test]
fn by_an_imported_table_the_checkpoint_is_the_same_to_the_bit_though_the_worker_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_imported_spec(directory.path());
    let (undisturbed, disturbed) = (directory.path().join("a"), directory.path().join("b"));
    // Exit code 1: this machine measures the result outside the limit, which changes nothing of it.
    let ended = run(&spec, &undisturbed);
    assert!(matches!(ended.status.code(), Some(0 | 1)), "{}", stderr(&ended));

    let log = directory.path().join("log");
    let mut running = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(["run", spec.to_str().unwrap(), "--output-dir"])
        .arg(&disturbed)
        .stderr(fs::File::create(&log).unwrap())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    while !said().contains("recover running") {
        assert!(running.try_wait().unwrap().is_none(), "{}", said());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let worker = worker_of(running.id()).unwrap();
    // SAFETY: kill touches no memory; the run, which lives, has not waited for its worker.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0);
    let ended = running.wait().unwrap();
    assert!(matches!(ended.code(), Some(0 | 1)), "{}", said());
    assert!(said().contains("worker-1 ended unexpectedly"), "{}", said());
    assert!(
        weights(&undisturbed) == weights(&disturbed),
        "the checkpoints differ"
    );
    assert!(names(&disturbed).contains(&"cost-table.json".to_owned()));
}

#[test]
fn an_output_that_exists_is_refused_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path(), "{latency: 75%}");
    let ended = run(&spec, directory.path());
    assert_eq!(ended.status.code(), Some(6));
    assert_eq!(stderr(&ended).lines().count(), 1, "{}", stderr(&ended));
    assert!(
        stderr(&ended).contains("exists; name a directory that does not"),
        "{}",
        stderr(&ended)
    );
    assert_eq!(names(directory.path()), ["job.yaml"]);
}

#[test]
fn more_threads_than_processors_are_a_usage_error() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path(), "{latency: 75%}");
    let ended = espalier(&["run", spec.to_str().unwrap(), "--threads", "100000"]);
    assert_eq!(ended.status.code(), Some(2));
    assert!(
        stderr(&ended).contains("processors of this machine"),
        "{}",
        stderr(&ended)
    );
    assert_eq!(names(directory.path()), ["job.yaml"]);
}

#[test]
fn a_misspelt_field_is_a_usage_error_with_the_nearest_known_one() {
    let directory = tempfile::tempdir().unwrap();
    let spec = write_spec(directory.path(), "{latancy: 75%}");
    let ended = run(&spec, &directory.path().join("out"));
    assert_eq!(ended.status.code(), Some(2));
    assert!(
        stderr(&ended).contains("did you mean \"latency\"?"),
        "{}",
        stderr(&ended)
    );
    assert_eq!(names(directory.path()), ["job.yaml"]);
}

#[test]
fn a_job_command_without_a_coordinator_says_so_and_exits_4() {
    let ended = espalier(&["job", "list", "--coordinator", "http://127.0.0.1:9"]);
    assert_eq!(ended.status.code(), Some(4));
    assert!(
        stderr(&ended).starts_with("error: no coordinator answers"),
        "{}",
        stderr(&ended)
    );
    assert!(ended.stdout.is_empty());
}

#[test]
fn a_doctor_called_to_a_directory_that_is_missing_exits_3_and_makes_none() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    for what in ["check", "repair", "export"] {
        let ended = espalier(&["doctor", what, "--data-dir", missing.to_str().unwrap()]);
        assert_eq!(ended.status.code(), Some(3), "{what}: {}", stderr(&ended));
        assert!(stderr(&ended).contains("there is no data directory"), "{what}");
        assert!(ended.stdout.is_empty() && !missing.exists(), "{what}");
    }
}

#[test]
fn completion_is_printed_for_a_shell_and_refused_for_what_is_none() {
    let ended = espalier(&["completion", "bash"]);
    assert!(ended.status.success());
    assert!(String::from_utf8_lossy(&ended.stdout).contains("_espalier"));
    assert_eq!(espalier(&["completion", "abacus"]).status.code(), Some(2));
}

#[test]
fn the_schema_on_standard_output_is_json() {
    let ended = espalier(&["schema"]);
    assert!(ended.status.success());
    let schema: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert!(schema["properties"]["target"].is_object());
}
