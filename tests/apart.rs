//! Coordinator, worker and client as separate processes, on the tiny parent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kit;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kit::{Process, endpoint_of, espalier, wait_for};
use serde_json::Value;

fn write_spec(directory: &Path) -> PathBuf {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let examples = examples.canonicalize().unwrap().display().to_string();
    let spec = directory.join("job.yaml");
    let text = format!(
        "parent: {examples}/tiny
data: {{train: [{examples}/data/train.jsonl.xz], validation: [{examples}/data/validation.jsonl.xz]}}
target:
  workload: {{prompt_tokens: 16, output_tokens: 4}}
  limits: {{block_parameters: 60%}}
search: {{mlp_grid: 64, strategies: [heterogeneous]}}
budget: {{sequence_tokens: 64, calibration_tokens: 1024, scoring_tokens: 512, recovery_tokens: 131072,
  validation_tokens: 1024}}
"
    );
    fs::write(&spec, text).unwrap();
    spec
}

fn job(endpoint: &str) -> Value {
    let arguments = ["job", "get", "job-1", "-o", "json", "--coordinator", endpoint];
    let got = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args(arguments)
        .output()
        .unwrap();
    serde_json::from_slice(&got.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&got.stderr)))
}

fn stage<'a>(job: &'a Value, name: &str) -> Option<&'a Value> {
    job["stages"]
        .as_array()
        .unwrap()
        .iter()
        .find(|stage| stage["name"] == name)
}

#[test]
fn a_worker_told_to_end_hands_its_work_back_and_another_takes_the_job_on() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let text = |name: &str| path(name).to_str().unwrap().to_owned();
    let coordinator = [
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        &text("state"),
    ];
    let mut coordinator = Process::start(&coordinator, path("coordinator.log"));
    let endpoint = endpoint_of(&coordinator);
    let start_worker = |name: &str| {
        let arguments = [
            "worker",
            "run",
            "--name",
            name,
            "--coordinator",
            &endpoint,
            "--drain-timeout",
            "300s",
        ];
        Process::start(&arguments, path(name))
    };
    let mut first = start_worker("first");
    let spec = write_spec(place.path());
    let submitted = Command::new(env!("CARGO_BIN_EXE_espalier"))
        .args([
            "job",
            "submit",
            spec.to_str().unwrap(),
            "--coordinator",
            &endpoint,
        ])
        .args(["--output-dir", &text("out")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&submitted.stdout), "job-1\n");

    let follow = |what: &[&str], printed: &str| {
        let arguments = [what, &["--follow", "--coordinator", &endpoint]].concat();
        let output = File::create(path(printed)).unwrap();
        Process::printing(&arguments, output, path(&format!("{printed}.log")))
    };
    let mut following_job = follow(&["job", "logs", "job-1"], "job-lines");

    wait_for("recovery to take its first step", || {
        let job = job(&endpoint);
        let recover = stage(&job, "recover")?;
        let begun = recover["active"]
            .as_array()?
            .iter()
            .any(|task| task["done"].as_u64() > Some(0));
        (begun || recover["state"] == "done").then_some(())
    });
    let said = |arguments: &[&str]| {
        let ended = Command::new(env!("CARGO_BIN_EXE_espalier"))
            .args(arguments)
            .args(["--coordinator", &endpoint])
            .output()
            .unwrap();
        let text = String::from_utf8(ended.stdout).unwrap();
        (ended.status.code(), text)
    };
    // However long these take, they are asked while it goes on, or it is over.
    let is_over = || stage(&job(&endpoint), "recover").unwrap()["state"] == "done";
    assert_eq!(said(&["worker", "list", "-q"]), (Some(0), "first\n".to_owned()));
    let (code, table) = said(&["worker", "get", "first"]);
    assert!(code == Some(0) && table.contains("DEVICE"), "{table}");
    assert!(table.contains("job-1") || is_over(), "{table}");
    assert_eq!(said(&["worker", "get", "nobody"]).0, Some(3));
    let (code, tasks) = said(&["task", "list", "job-1", "--stage", "recover", "-o", "json"]);
    assert_eq!(code, Some(0));
    let tasks: Value = serde_json::from_str(&tasks).unwrap();
    let task = tasks[0]["id"].as_u64().unwrap().to_string();
    let (code, table) = said(&["task", "get", &task]);
    assert!(code == Some(0) && table.contains("ATTEMPT"), "{table}");
    let (code, events) = said(&["job", "events", "job-1"]);
    assert!(code == Some(0) && events.contains("ingest"), "{events}");
    let paused = said(&["job", "pause", "job-1", "-q"]);
    let resumed = said(&["job", "resume", "job-1", "-q"]).0;
    let is_kept = (paused.0, paused.1.as_str(), resumed) == (Some(0), "job-1\n", Some(0));
    let has_ended = || job(&endpoint)["finished_unix_ms"].as_u64() > Some(0);
    assert!(is_kept || has_ended(), "{paused:?}, then {resumed:?}");

    let mut following_task = follow(&["task", "logs", &task], "task-lines");
    let ended = first.terminate();
    assert!(ended.success(), "{ended}: {}", first.log());
    let between = job(&endpoint);
    // Done in time, or handed back with a checkpoint: nobody works on it, and nothing has failed.
    let recover = stage(&between, "recover").unwrap();
    assert_eq!(recover["active"].as_array().unwrap().len(), 0, "{between}");
    let (_, shown) = said(&["task", "get", &task, "-o", "json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let outcome = shown["attempts"][0]["outcome"].as_str().unwrap();
    assert!(matches!(outcome, "completed" | "handed_back"), "{shown}");
    let goes_on = outcome == "handed_back";

    let _second = start_worker("second");
    let ended = wait_for("the job's end", || {
        let job = job(&endpoint);
        (job["finished_unix_ms"].as_u64() > Some(0)).then_some(job)
    });
    assert_eq!(ended["state"], "succeeded", "{}", ended["message"]);
    assert!(path("out").join("report.json").is_file());
    for following in [&mut following_job, &mut following_task] {
        let ended = wait_for("the end of what was followed", || {
            following.child.try_wait().unwrap()
        });
        assert!(ended.success(), "{ended}: {}", following.log());
    }
    // What the attempt says that is handed back, and then the one that goes on from there.
    for (printed, before) in [("job-lines", "recover/"), ("task-lines", "")] {
        let printed = fs::read_to_string(path(printed)).unwrap();
        let of_task: Vec<&str> = printed.lines().filter(|line| line.starts_with(before)).collect();
        for said in [
            "a checkpoint was asked for and is written",
            "going on from a checkpoint",
        ] {
            let lines = of_task.iter().filter(|line| line.contains(said)).count();
            assert_eq!(lines, usize::from(goes_on), "{said}: {printed}");
        }
    }
    let said = following_task.log();
    assert_eq!(said.contains("attempt "), goes_on, "{said}");
    assert!(coordinator.terminate().success());
}

#[test]
fn a_run_whose_job_fails_at_its_very_end_is_gone_on_with_by_the_commands_that_it_says() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let (spec, out) = (write_spec(place.path()), path("out"));
    let arguments = [
        "run",
        spec.to_str().unwrap(),
        "--output-dir",
        out.to_str().unwrap(),
    ];
    let mut run = Process::start(&arguments, path("run.log"));
    wait_for("the recovery to run", || {
        let has_ended = run.child.try_wait().unwrap().is_some();
        assert!(!has_ended, "{}", run.log());
        run.log().contains("recover running").then_some(())
    });
    // Somebody takes the outcome's place.
    fs::create_dir(&out).unwrap();
    let ended = run.child.wait().unwrap();
    let said = run.log();
    assert_eq!(ended.code(), Some(1), "{said}");
    fs::remove_dir(&out).unwrap();

    let commands = said.lines().filter_map(|line| line.strip_prefix("  espalier "));
    let commands: Vec<Vec<&str>> = commands.map(|line| line.split(' ').collect()).collect();
    let [coordinator, worker, retry] = commands.as_slice() else {
        panic!("{said}")
    };
    let mut coordinator = Process::spawn(
        espalier(coordinator).env("ESPALIER_LISTEN", "127.0.0.1:0"),
        path("coordinator.log"),
    );
    let endpoint = endpoint_of(&coordinator);
    let asking = |arguments: &[&str]| {
        let mut command = espalier(arguments);
        command
            .env("ESPALIER_COORDINATOR", &endpoint)
            .stdout(Stdio::null());
        command
    };
    // Not while the job is still being tidied up.
    wait_for("the retry to be taken", || {
        asking(retry).status().unwrap().success().then_some(())
    });
    // What was trained is there.
    assert_eq!(stage(&job(&endpoint), "recover").unwrap()["state"], "done");
    let _worker = Process::spawn(&mut asking(worker), path("worker.log"));
    let ended = wait_for("the job's end", || {
        let job = job(&endpoint);
        (job["finished_unix_ms"].as_u64() > Some(0)).then_some(job)
    });
    assert_eq!(ended["state"], "succeeded", "{}", ended["message"]);
    assert!(out.join("report.json").is_file());
    assert!(coordinator.terminate().success());
}

#[test]
fn a_coordinator_told_to_end_while_it_waits_for_room_ends_in_good_order() {
    let place = tempfile::tempdir().unwrap();
    let log = place.path().join("coordinator.log");
    // No file may grow to what a term needs, as on a full disk.
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\""])
        .args([env!("CARGO_BIN_EXE_espalier"), "coordinator"])
        .args(["--listen", "127.0.0.1:0", "--data-dir"])
        .arg(place.path().join("state"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut coordinator = Process { child, log };
    wait_for("the coordinator to say what it waits for", || {
        let said = coordinator.log().contains("begins when there is room");
        assert!(
            coordinator.child.try_wait().unwrap().is_none(),
            "{}",
            coordinator.log()
        );
        said.then_some(())
    });
    let ended = coordinator.terminate();
    assert!(ended.success(), "{ended}: {}", coordinator.log());
}
