//! The devices of a machine as users see them, on a driver that the tests build with the machine's C compiler: what is
//! listed, what is refused and with which exit code, and what a child says whose GPU has filled up meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const DRIVER: &str = include_str!("../model/tests/false_driver/cuda.c");
/// One that takes everything and computes nothing.
const DEVICE: &str = include_str!("../model/tests/false_device/cuda.c");
const COMPILER: &str = include_str!("../model/tests/false_device/nvrtc.c");
const PRODUCTS: &str = include_str!("../model/tests/false_device/cublaslt.c");

fn compile(directory: &Path, library: &str, source: &str, macros: &[&str]) -> bool {
    let file = directory.join(format!("{library}.c"));
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(directory.join(library))
        .args(macros)
        .arg(&file)
        .status();
    match built {
        Ok(status) => {
            assert!(status.success(), "{compiler} refuses {library}");
            true
        }
        Err(error) => {
            eprintln!("skipped: no C compiler ({compiler}: {error}) to build a false driver with");
            false
        }
    }
}

/// A directory with a false driver and toolkit; none where there is no C compiler.
fn toolkit() -> Option<tempfile::TempDir> {
    toolkit_with(DRIVER)
}

fn toolkit_with(driver: &str) -> Option<tempfile::TempDir> {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    // The driver by the name that is tried first as well, so that a real one is not.
    let built = compile(place, "libcuda.so", driver, &["-DDOWNLOADS_ARE_ZEROS"])
        && compile(place, "libcuda.so.1", driver, &["-DDOWNLOADS_ARE_ZEROS"])
        && compile(
            place,
            "libnvrtc.so.13",
            COMPILER,
            &["-DVERSION=13000", "-DRESULT=0"],
        )
        && compile(place, "libnvrtc-builtins.so.13.0", "", &[])
        && compile(place, "libcublasLt.so.13", PRODUCTS, &["-DVERSION=130000"]);
    built.then_some(directory)
}

/// The program on the false driver with these settings.
fn espalier(toolkit: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", toolkit)
        .env("ESPALIER_CUDA_LIBRARIES", toolkit)
        .env_remove("ESPALIER_DEVICES")
        .envs(settings.iter().copied());
    command
}

fn run(toolkit: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    espalier(toolkit, arguments, settings).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const TWO_GPUS: [(&str, &str); 4] = [
    ("FALSE_VERSION", "13000"),
    ("FALSE_DEVICES", "2"),
    ("FALSE_MAJOR", "9"),
    ("FALSE_FREE_MIB", "70000"),
];

#[test]
fn devices_are_listed_with_their_memory_and_those_that_cannot_be_used_with_why() {
    let Some(toolkit) = toolkit() else { return };
    let list = |settings: &[(&str, &str)]| {
        let listed = run(toolkit.path(), &["device", "list", "-o", "json"], settings);
        assert!(listed.status.success(), "{}", said(&listed));
        serde_json::from_slice::<Value>(&listed.stdout).unwrap()
    };
    let two = list(&TWO_GPUS);
    assert_eq!(two.as_array().unwrap().len(), 3);
    assert_eq!(two[0]["id"], "cpu");
    let gpu = &two[2];
    assert_eq!(
        (&gpu["id"], &gpu["name"], &gpu["usable"]),
        (&json!("cuda:1"), &json!("False GPU"), &json!(true)),
        "{gpu}"
    );
    assert_eq!(gpu["memory_bytes"], 80_u64 << 30);
    assert_eq!(gpu["in_use_bytes"], (80_u64 << 30) - (70_000 << 20));
    assert_eq!(
        (&gpu["compute_capability"], &gpu["cuda_version"]),
        (&json!("9.0"), &json!("13.0"))
    );
    let mut old = TWO_GPUS;
    old[2].1 = "7";
    let reason = list(&old)[1]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("compute capability 7.0"), "{reason}");
    let none = run(
        toolkit.path(),
        &["device", "list", "-q"],
        &[("FALSE_VERSION", "12040")],
    );
    assert_eq!(String::from_utf8_lossy(&none.stdout), "cpu\n");
    assert!(
        said(&none).contains("supports CUDA 12.4, and 13.0 is needed"),
        "{}",
        said(&none)
    );
}

#[test]
fn the_processor_is_listed_beside_a_driver_that_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let listed = |wrong: &str| {
        let listed = run(place, &["device", "list", "-q"], &[]);
        let said = said(&listed);
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "cpu\n", "{said}");
        let library = place.join("libcuda.so").display().to_string();
        assert!(said.contains(&format!("{library}{wrong}")), "{said}");
    };
    for library in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(place.join(library), "no library").unwrap();
    }
    listed(": ");
    for library in ["libcuda.so", "libcuda.so.1"] {
        if !compile(place, library, "int nothing;", &[]) {
            return;
        }
    }
    listed(" has no function cuDriverGetVersion");
}

#[test]
fn a_worker_that_cannot_have_the_gpus_it_is_told_to_take_says_so_once_and_ends() {
    let Some(toolkit) = toolkit() else { return };
    let refused = |device: &str, settings: &[(&str, &str)]| {
        let ended = run(toolkit.path(), &["worker", "run", "--device", device], settings);
        assert_eq!(ended.status.code(), Some(2), "{}", said(&ended));
        said(&ended)
    };
    let beyond = refused("cuda:3", &TWO_GPUS);
    assert!(
        beyond.contains("error: there is no GPU 3: this machine has 2, counted from 0\n"),
        "{beyond}"
    );
    let mut full = TWO_GPUS;
    full[3].1 = "100";
    assert!(refused("cuda", &full).contains("GPU 0 (False GPU) is full: 100 of 81920 MiB are free"));
    assert!(refused("cuda", &[("FALSE_VERSION", "12040")]).contains("update the driver"));
    assert!(refused("cuda:0", &[("FALSE_VERSION", "13000")]).contains("sees no GPU"));
    assert!(refused("gpu", &TWO_GPUS).contains("expected auto, cpu, cuda"));
}

#[test]
fn a_job_for_more_than_there_is_is_refused_before_anything_is_started() {
    let Some(toolkit) = toolkit() else { return };
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let examples = examples.canonicalize().unwrap().display().to_string();
    let directory = tempfile::tempdir().unwrap();
    let spec = directory.path().join("job.yaml");
    let with = |target: &str| {
        let text = format!(
            "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 16, output_tokens: 2}}
  limits: {{block_parameters: 75%}}
{target}"
        );
        std::fs::write(&spec, text).unwrap();
    };
    let output = directory.path().join("out");
    let ends = |more: &[&str]| {
        let mut arguments = vec![
            "run",
            spec.to_str().unwrap(),
            "--output-dir",
            output.to_str().unwrap(),
        ];
        arguments.extend(more);
        let ended = run(toolkit.path(), &arguments, &[("FALSE_VERSION", "13000")]);
        assert_eq!(ended.status.code(), Some(2), "{}", said(&ended));
        said(&ended)
    };
    with("");
    assert!(ends(&["--device", "cuda"]).contains("sees no GPU"));
    assert!(ends(&["--device", "cuda:0,cpu"]).contains("expected one kind"));
    with("  device: cuda");
    assert!(ends(&[]).contains("sees no GPU"));
    with("  device: cuda\n  precision: f32");
    let wrong = ends(&[]);
    assert!(
        wrong.contains("target.precision: found f32, expected bf16"),
        "{wrong}"
    );
    with("recovery: {ranks: 2, pipeline_stages: 2}");
    let alone = ends(&[]);
    assert!(
        alone.contains("recovery.pipeline_stages: found 2, expected at most 1"),
        "{alone}"
    );
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "nothing was made: {left:?}");
}

/// What a child for the first GPU answers to its first attempt.
fn first_answer(toolkit: &Path, settings: &[(&str, &str)]) -> Value {
    let mut child = espalier(toolkit, &["device-child", "--device", "cuda:0"], settings)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let order = json!({
        "request": "run",
        "attempt": 7,
        "artifact_store": toolkit.display().to_string(),
        "spec": {"kind": "sort", "parent": {"source": "p", "fingerprint": "f"}, "importance": []},
    });
    let mut requests = child.stdin.take().unwrap();
    writeln!(requests, "{order}").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    drop(requests);
    child.wait().unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn an_attempt_on_a_gpu_that_has_filled_up_ran_out_of_memory_and_one_on_none_is_not_tried_again() {
    let Some(toolkit) = toolkit() else { return };
    let mut full = TWO_GPUS;
    full[3].1 = "100";
    let answer = first_answer(toolkit.path(), &full);
    assert_eq!(answer["attempt"], 7, "{answer}");
    assert_eq!(answer["failure"]["kind"], "out_of_memory", "{answer}");
    let message = answer["failure"]["message"].as_str().unwrap();
    assert!(
        message.contains("is full: 100 of 81920 MiB are free"),
        "{message}"
    );
    let gone = first_answer(toolkit.path(), &[("FALSE_VERSION", "13000")]);
    assert_eq!(gone["failure"]["kind"], "invalid", "{gone}");
}

/// Nothing is computed, so quality says nothing; that every stage runs on the GPU, in its precision, does.
#[test]
fn a_job_for_a_gpu_runs_on_it_from_its_first_task_to_its_last() {
    let Some(toolkit) = toolkit_with(DEVICE) else {
        return;
    };
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let examples = examples.canonicalize().unwrap().display().to_string();
    let directory = tempfile::tempdir().unwrap();
    let (spec, output) = (directory.path().join("job.yaml"), directory.path().join("out"));
    let text = format!(
        "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz], validation: [{examples}/data/validation.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 16, output_tokens: 2}}
  limits: {{block_parameters: 75%}}
search: {{mlp_grid: 64}}
budget: {{sequence_tokens: 128, calibration_tokens: 1024, scoring_tokens: 512, depth_tokens: 256, recovery_tokens: 4096, validation_tokens: 1024}}
"
    );
    std::fs::write(&spec, text).unwrap();
    let arguments = [
        "run",
        spec.to_str().unwrap(),
        "--output-dir",
        output.to_str().unwrap(),
        "--device",
        "cuda",
        "--device-memory",
        "2GiB",
    ];
    let cache = directory.path().join("cache").display().to_string();
    let ended = run(toolkit.path(), &arguments, &[("XDG_CACHE_HOME", &cache)]);
    assert!(ended.status.success(), "{}", said(&ended));
    let report: Value = serde_json::from_slice(&std::fs::read(output.join("report.json")).unwrap()).unwrap();
    let target = &report["target"];
    assert_eq!(
        (&target["device"], &target["precision"]),
        (&json!("False GPU"), &json!("bf16"))
    );
    assert_eq!(report["strategies"][0]["recovery_tokens"], 4096);
    assert_eq!(report["spec"]["target"]["device"], "cuda");
}
