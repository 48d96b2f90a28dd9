//! What listings look like, whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_proto::v1::{
    AttemptDetail, Device, Job, JobState, Stage, StageState, TaskDetail, TaskState, Worker, WorkerDevice,
    WorkerState,
};

use super::*;

fn how(format: Format) -> How {
    How { format, quiet: false }
}

fn a_job() -> Job {
    Job {
        id: "job-12".to_owned(),
        state: JobState::Running.into(),
        parent: "hf://org/name".to_owned(),
        output: "/out".to_owned(),
        priority: 5,
        stages: vec![Stage {
            name: "ingest".to_owned(),
            kind: "ingest".to_owned(),
            state: StageState::Done.into(),
            tasks: 1,
            tasks_done: 1,
            elapsed_ms: 1_250,
            ..Stage::default()
        }],
        ..Job::default()
    }
}

fn a_worker() -> Worker {
    Worker {
        name: "node-7".to_owned(),
        state: WorkerState::Cordoned.into(),
        message: "3 tasks failed in a row".to_owned(),
        host: "rack-2".to_owned(),
        version: "0.1.0".to_owned(),
        epoch: 4,
        silent_ms: 900,
        failures_in_a_row: 3,
        devices: vec![WorkerDevice {
            device: Some(Device {
                id: "cpu".to_owned(),
                kind: "cpu".to_owned(),
                name: "AMD EPYC".to_owned(),
                ..Device::default()
            }),
            attempt: 31,
            task: 9,
            job_id: "job-12".to_owned(),
            stage: "recover".to_owned(),
        }],
    }
}

#[test]
fn a_job_is_a_row_with_its_stages_below() {
    assert_eq!(
        job(&a_job()).text(how(Format::Table), true).unwrap(),
        "JOB     STATE    PARENT         MESSAGE\n\
         job-12  running  hf://org/name\n\
         \n\
         STAGE   STATE  TASKS  TIME   DECISION\n\
         ingest  done   1/1    1.2 s\n"
    );
}

#[test]
fn wide_shows_every_column() {
    assert_eq!(
        jobs(&[a_job()]).text(how(Format::Wide), false).unwrap(),
        "JOB     STATE    PARENT         MESSAGE  OUTPUT  PRIORITY  REQUEST\n\
         job-12  running  hf://org/name           /out    5\n"
    );
}

#[test]
fn quiet_prints_ids_and_nothing_else() {
    let quiet = How {
        format: Format::Json,
        quiet: true,
    };
    assert_eq!(
        jobs(&[a_job(), a_job()]).text(quiet, false).unwrap(),
        "job-12\njob-12\n"
    );
    assert_eq!(jobs(&[]).text(quiet, false).unwrap(), "");
}

#[test]
fn a_worker_shows_why_it_is_cordoned_and_what_its_devices_run() {
    assert_eq!(
        worker(&a_worker()).text(how(Format::Table), true).unwrap(),
        "WORKER  STATE     BUSY  SILENT  MESSAGE\n\
         node-7  cordoned  1/1   0.9 s   3 tasks failed in a row\n\
         \n\
         DEVICE  KIND  NAME      JOB     STAGE    TASK  ATTEMPT\n\
         cpu     cpu   AMD EPYC  job-12  recover  9     31\n"
    );
}

#[test]
fn a_task_shows_its_attempts() {
    let detail = TaskDetail {
        id: 9,
        job_id: "job-12".to_owned(),
        stage: "recover".to_owned(),
        kind: "recover".to_owned(),
        name: "heterogeneous".to_owned(),
        state: TaskState::Running.into(),
        ranks: 1,
        attempts: vec![
            AttemptDetail {
                id: 30,
                worker: "node-6".to_owned(),
                device: "cpu".to_owned(),
                started_unix_ms: 1_000,
                ended_unix_ms: 3_500,
                outcome: "lost".to_owned(),
                message: "silent for 30 s".to_owned(),
                ..AttemptDetail::default()
            },
            AttemptDetail {
                id: 31,
                worker: "node-7".to_owned(),
                device: "cpu".to_owned(),
                started_unix_ms: 4_000,
                outcome: "running".to_owned(),
                progress: "12 of 64 steps".to_owned(),
                ..AttemptDetail::default()
            },
        ],
        ..TaskDetail::default()
    };
    assert_eq!(
        task(&detail).text(how(Format::Table), true).unwrap(),
        "TASK  STAGE    NAME           STATE    MESSAGE\n\
         9     recover  heterogeneous  running\n\
         \n\
         ATTEMPT  OUTCOME  WORKER  DEVICE  TIME   MESSAGE\n\
         30       lost     node-6  cpu     2.5 s  silent for 30 s\n\
         31       running  node-7  cpu            12 of 64 steps\n"
    );
}

#[test]
fn one_thing_is_an_object_and_a_list_an_array() {
    let one: Value =
        serde_json::from_str(&worker(&a_worker()).text(how(Format::Json), true).unwrap()).unwrap();
    assert_eq!(one["devices"][0]["task"], 9);
    let all: Value =
        serde_json::from_str(&workers(&[a_worker()]).text(how(Format::Json), false).unwrap()).unwrap();
    assert_eq!(all[0]["state"], "cordoned");
    let text = workers(&[a_worker()]).text(how(Format::Yaml), false).unwrap();
    let read: Value = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(read, all);
}

#[test]
fn times_are_told_as_people_read_them_and_one_that_nobody_noted_is_left_empty() {
    assert_eq!(super::at(1_796_041_902_399), "2026-11-30T12:31:42.399Z");
    assert_eq!(super::at(0), "");
    assert_eq!(super::at(-5), "");
    assert_eq!(super::at(i64::MAX), i64::MAX.to_string());
}

#[test]
fn an_estimate_ends_with_its_total_and_says_what_was_not_counted() {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let architecture = espalier_arch::Architecture::from_config(&config).unwrap();
    let assumptions = espalier_search::estimate::Assumptions {
        storage: "bf16".parse().unwrap(),
        workload: espalier_search::Workload {
            prompt_tokens: 100,
            output_tokens: 28,
            concurrency: 2,
        },
        block_tokens: 16,
        spare_blocks: 1,
        ranks: 2,
        step_tokens: 2048,
        overhead_bytes: 0,
    };
    let found = espalier_search::estimate::estimate(&architecture, &assumptions).unwrap();
    let text = estimate(&found).text(how(Format::Table), true).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines
            .iter()
            .any(|line| line.contains("not counted: give --overhead")),
        "{text}"
    );
    assert!(
        lines
            .iter()
            .any(|line| line.contains("2 sequences of 128 tokens, 128 bytes a token, 17 pages of 16 tokens")),
        "{text}"
    );
    assert!(lines.last().unwrap().starts_with("all ranks"), "{text}");
}

#[test]
fn a_plan_that_cannot_be_answered_says_why_in_its_row_and_in_its_json() {
    let answers = vec![(
        "own, 1 × 4 + 1 tokens, latency 60%".to_owned(),
        Err("no row".to_owned()),
    )];
    let listing = plans(&answers);
    let text = listing.text(how(Format::Table), false).unwrap();
    assert!(text.contains("latency 60%  no row"), "{text}");
    let json = listing.text(how(Format::Json), false).unwrap();
    assert!(json.contains("\"error\": \"no row\""), "{json}");
}

fn a_key() -> espalier_search::CostKey {
    espalier_search::CostKey {
        device: "a processor".to_owned(),
        engine: "vllm".to_owned(),
        engine_version: "0".to_owned(),
        precision: "f32".to_owned(),
        hidden: 64,
        parallelism: 1,
        mode: espalier_search::Mode::Eager,
        environment: std::collections::BTreeMap::new(),
    }
}

const WORKLOAD: espalier_search::Workload = espalier_search::Workload {
    prompt_tokens: 4,
    output_tokens: 2,
    concurrency: 2,
};

#[test]
fn a_pair_of_equal_latency_shows_what_both_are_predicted_to_take() {
    use espalier_search::shapes::{Pair, Shape, Shapes};
    let shape = |parameters: u64, latency_ms: f64| Shape {
        candidate: espalier_arch::Candidate { variants: Vec::new() },
        blocks: Vec::new(),
        parameters,
        prediction: espalier_search::Prediction {
            figures: espalier_search::Figures {
                latency_ms: Some(latency_ms),
                ..espalier_search::Figures::default()
            },
            errors: espalier_search::Figures::default(),
            device: None,
        },
    };
    let found = Shapes {
        target: a_key(),
        workload: WORKLOAD,
        equal_parameters: Vec::new(),
        equal_latency: vec![Pair {
            less: shape(100, 6.2),
            more: shape(250, 6.3),
            ratio: 2.5,
        }],
    };
    assert_eq!(
        shapes(&[found]).text(how(Format::Table), false).unwrap(),
        "EQUAL               LESS            MORE            RATIO  BLOCKS OF LESS      BLOCKS OF MORE\n\
         6.200 ms, 6.300 ms  100 parameters  250 parameters  2.50   0 attention, 0 mlp  0 attention, 0 mlp\n"
    );
}

#[test]
fn limits_that_exclude_each_other_show_the_best_of_each_alone_and_beside_the_others() {
    use espalier_search::heterogeneous::Reachable;
    use espalier_search::{AbsoluteLimit, Figures, Metric};
    let mib = 1024.0 * 1024.0;
    let reach = |metric, limit: f64, alone: f64, together: f64| Reachable {
        limit: AbsoluteLimit::new(metric, limit),
        alone,
        together,
    };
    let answer = espalier_search::plan::Answer {
        target: a_key(),
        workload: WORKLOAD,
        limits: Vec::new(),
        parent: Figures::default(),
        parent_measured: false,
        chosen: None,
        reachable: vec![
            reach(Metric::Throughput, 1000.0, 1200.0, 900.0),
            reach(Metric::Memory, 3072.0 * mib, 2500.0 * mib, 3200.0 * mib),
        ],
        notes: Vec::new(),
        unpriced: 0,
    };
    let text = plans(&[("own".to_owned(), Ok(answer))])
        .text(how(Format::Table), false)
        .unwrap();
    for expected in [
        "no candidate; the best that can be reached is 1200.0 tokens/s (900.0 tokens/s with the other limits)",
        "no candidate; the best that can be reached is 2500.0 MiB (3200.0 MiB with the other limits)",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}
