//! Tables kept, merged, found again, and files that are none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::{self, File};
use std::thread;
use std::time::{Duration, SystemTime};

use espalier_arch::{Activation, Architecture, BlockShape, Mlp};
use espalier_search::{Measurement, Mode, Point, Shortage, Summary};

use super::*;
use crate::Error;
use crate::spec::OLDEST_SCHEMA;

fn table(device: &str, rows: &[(usize, f64)]) -> KeptTable {
    let summary = Summary {
        median: 1.0,
        spread: 0.0,
        samples: vec![1.0],
    };
    KeptTable {
        schema: COST_TABLE_SCHEMA,
        key: CostKey {
            device: device.to_owned(),
            engine: "builtin".to_owned(),
            engine_version: "1".to_owned(),
            precision: "f32".to_owned(),
            hidden: 8,
            parallelism: 1,
            mode: Mode::Eager,
            environment: std::collections::BTreeMap::new(),
        },
        rows: rows
            .iter()
            .map(|(tokens, median_ms)| CostRow {
                subject: Subject::Base { vocab_size: 16 },
                point: Point::Prefill {
                    tokens: *tokens,
                    sequences: 1,
                },
                median_ms: *median_ms,
                spread_ms: 0.0,
                repeats: 3,
            })
            .collect(),
        memory: None,
        parents: vec![KeptParent {
            architecture: Some(digest(&profile().architecture)),
            block_parameters: 0,
            workload: workload(4),
            measurement: WholeParent::Measured(Measurement {
                latency_ms: summary.clone(),
                first_token_ms: summary.clone(),
                per_token_ms: summary.clone(),
                throughput_tokens_per_second: summary,
                memory_bytes: 7,
            }),
        }],
        disturbed: false,
    }
}

const TORN: &str = "{\"schema\": 2, \"key\"";

fn times(tables: &CostTables) -> Vec<f64> {
    let (listed, wrong) = tables.list().unwrap();
    assert!(wrong.is_empty() && listed.len() <= 1, "{listed:?} {wrong:?}");
    let rows = listed.iter().flat_map(|table| &table.rows);
    let mut times: Vec<f64> = rows.map(|row| row.median_ms).collect();
    times.sort_by(f64::total_cmp);
    times
}

fn workload(prompt_tokens: usize) -> Workload {
    Workload {
        prompt_tokens,
        output_tokens: 1,
        concurrency: 1,
    }
}

fn profile() -> Profile {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8,
        "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let mut architecture = Architecture::from_config(&config).unwrap();
    architecture.blocks.clear();
    Profile {
        architecture,
        shapes: Vec::new(),
        points: espalier_search::points(&workload(4)).unwrap(),
        rounds: 3,
        workload: workload(4),
        engine: espalier_proto::task::Engine::default(),
        kept: Vec::new(),
    }
}

#[test]
fn what_is_kept_is_found_by_what_a_profile_asks_for_and_kept_again_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path().join("deep/cost-tables"));
    assert!(tables.known(&profile(), "f32", "builtin").is_empty());
    assert!(tables.keep(&table("a", &[(4, 1.0), (8, 2.0)])).unwrap());
    assert!(!tables.keep(&table("a", &[(8, 2.0)])).unwrap());
    assert!(tables.keep(&table("b", &[(4, 3.0)])).unwrap());
    let known = tables.known(&profile(), "f32", "builtin");
    let devices: Vec<&str> = known.iter().map(|kept| kept.key.device.as_str()).collect();
    assert_eq!(devices, ["a", "b"]);
    assert_eq!(known[0].rows.len(), 1, "the other point is not asked for");
    assert!(known[0].parent.is_some());
    assert!(tables.known(&profile(), "bf16", "builtin").is_empty());
    assert!(tables.known(&profile(), "f32", "vllm").is_empty());
    let mut in_vllm = table("a", &[(4, 1.0)]);
    in_vllm.key.engine = "vllm".to_owned();
    tables.keep(&in_vllm).unwrap();
    assert!(
        tables.known(&profile(), "f32", "vllm").is_empty(),
        "who knows in which environment it was measured"
    );
    in_vllm
        .key
        .environment
        .insert("torch".to_owned(), "2.13.0".to_owned());
    tables.keep(&in_vllm).unwrap();
    assert_eq!(tables.known(&profile(), "f32", "vllm").len(), 1);
    let other = Profile {
        workload: workload(5),
        ..profile()
    };
    assert!(tables.known(&other, "f32", "builtin")[0].parent.is_none());
}

#[test]
fn rows_measured_again_replace_the_old_and_the_others_stay() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    tables.keep(&table("a", &[(4, 1.0), (8, 2.0)])).unwrap();
    assert!(tables.keep(&table("a", &[(8, 5.0), (16, 6.0)])).unwrap());
    assert_eq!(times(&tables), [1.0, 5.0, 6.0]);
    assert_eq!(tables.list().unwrap().0[0].parents.len(), 1);
}

fn mlp(channels: usize) -> BlockShape {
    BlockShape::Mlp(Mlp {
        channels,
        activation: Activation::SwiGlu,
        bias: false,
    })
}

#[test]
fn rows_of_other_points_are_put_beside_those_of_before_once_something_tells_that_they_are_of_one_pace() {
    let at = |tokens: usize, median_ms: f64| CostRow {
        subject: Subject::Block(mlp(64)),
        ..table("a", &[(tokens, median_ms)]).rows.remove(0)
    };
    for (now, merges) in [(1.2, false), (1.0, true)] {
        let directory = tempfile::tempdir().unwrap();
        let tables = CostTables::at(directory.path());
        let mut before = table("a", &[]);
        before.rows = vec![at(4, 1.0)];
        tables.keep(&before).unwrap();
        let longer = Profile {
            shapes: vec![mlp(64)],
            points: espalier_search::points(&workload(8)).unwrap(),
            ..profile()
        };
        let known = tables.known(&longer, "f32", "builtin").remove(0);
        assert_eq!(known.rows, before.rows);
        // As a worker times them.
        let (_, points) = known.compared(&longer.shapes, &longer.points);
        assert_eq!(points.len(), longer.points.len() + 1);
        let mut newer = table("a", &[]);
        newer.rows = vec![at(8, 2.0 * now), at(4, now)];
        tables.keep(&newer).unwrap();
        let expected = if merges { vec![1.0, 2.0] } else { vec![1.2, 2.4] };
        assert_eq!(times(&tables), expected);
    }
}

#[test]
fn rows_of_one_pace_are_not_put_beside_those_of_another() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let of_blocks = |rows: &[(usize, f64)]| {
        let mut of_blocks = table("a", &[]);
        of_blocks.rows = rows
            .iter()
            .map(|(channels, median_ms)| CostRow {
                subject: Subject::Block(mlp(*channels)),
                ..table("a", &[(4, *median_ms)]).rows.remove(0)
            })
            .collect();
        of_blocks
    };
    tables.keep(&of_blocks(&[(64, 1.0), (32, 0.5)])).unwrap();
    let mut slower = of_blocks(&[(64, 1.2)]);
    slower.parents[0].workload = workload(5);
    assert!(tables.keep(&slower).unwrap());
    assert_eq!(
        tables.list().unwrap().0,
        [slower],
        "neither the row nor the parent of before"
    );
    tables.keep(&of_blocks(&[(64, 1.21), (32, 0.6)])).unwrap();
    tables.keep(&of_blocks(&[(16, 0.3)])).unwrap();
    assert_eq!(times(&tables), [0.3, 0.6, 1.21]);
    assert_eq!(tables.list().unwrap().0[0].parents.len(), 2);
}

#[test]
fn several_files_of_one_target_are_one_table_and_are_removed_together() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    tables.keep(&table("a", &[(4, 1.0), (8, 2.0)])).unwrap();
    let own = directory.path().join(format!("{}.json", table("a", &[]).id()));
    let copied = directory.path().join("a.json");
    fs::write(
        &copied,
        serde_json::to_string(&table("a", &[(8, 5.0), (16, 6.0)])).unwrap(),
    )
    .unwrap();
    let written = |path: &std::path::Path, seconds: u64| {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
            .unwrap();
    };
    written(&own, 100);
    written(&copied, 200);
    assert_eq!(times(&tables), [1.0, 5.0, 6.0]);
    written(&own, 300);
    assert_eq!(times(&tables), [1.0, 2.0, 6.0]);
    assert_eq!(tables.known(&profile(), "f32", "builtin").len(), 1);
    tables.remove(&table("a", &[]).id()).unwrap();
    assert!(times(&tables).is_empty());
}

#[test]
fn what_was_measured_beside_others_work_is_neither_kept_nor_told() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let mut disturbed = table("a", &[(4, 1.0)]);
    disturbed.disturbed = true;
    let reason = tables.keep(&disturbed).unwrap_err().to_string();
    assert!(reason.contains("while others used the machine"), "{reason}");
    // Copied there by hand.
    fs::write(
        directory.path().join("a.json"),
        serde_json::to_string(&disturbed).unwrap(),
    )
    .unwrap();
    assert!(tables.known(&profile(), "f32", "builtin").is_empty());
}

#[test]
fn a_profile_is_taken_once_whatever_was_measured_or_removed_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let old = table("a", &[(4, 1.0), (8, 1.0)]);
    assert!(tables.take(&old).unwrap());
    assert!(tables.take(&table("a", &[(4, 2.0)])).unwrap());
    assert!(!tables.take(&old).unwrap(), "its job is planned on");
    assert_eq!(times(&tables), [1.0, 2.0]);
    tables.remove(&old.id()[..5]).unwrap();
    let after_a_restart = CostTables::at(directory.path());
    assert!(!after_a_restart.take(&old).unwrap());
    assert!(times(&tables).is_empty());
    assert!(tables.keep(&old).unwrap(), "who imports it says so himself");
    assert_eq!(times(&tables), [1.0, 1.0]);
}

#[test]
fn only_what_a_profile_measured_itself_and_undisturbed_is_for_others() {
    let told = table("a", &[(4, 1.0), (8, 2.0), (16, 3.0)]);
    let mut profiled = Profiled {
        key: told.key.clone(),
        rows: told.rows.clone(),
        parent: told.parents[0].measurement.clone(),
        memory: None,
        reused_rows: 2,
        disturbed: false,
    };
    let of = |profiled: &Profiled| KeptTable::of(profiled, workload(4), &profile().architecture);
    assert_eq!(of(&profiled).unwrap().rows, told.rows[2..]);
    profiled.disturbed = true;
    assert_eq!(of(&profiled), None);
    profiled.disturbed = false;
    profiled.reused_rows = 3;
    assert_eq!(of(&profiled), None, "its parent was known too");
}

#[test]
fn several_that_add_at_once_lose_nothing_of_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let adding: Vec<_> = (0..8_usize)
        .map(|one| {
            // Each as a process of its own has it.
            let tables = CostTables::at(directory.path());
            thread::spawn(move || {
                for row in 0..5 {
                    tables.keep(&table("a", &[(1 + one * 5 + row, 1.0)])).unwrap();
                    tables.list().unwrap();
                }
            })
        })
        .collect();
    for thread in adding {
        thread.join().unwrap();
    }
    assert_eq!(times(&CostTables::at(directory.path())).len(), 40);
    let names = fs::read_dir(directory.path()).unwrap();
    let names: Vec<_> = names.map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "the table and the lock: {names:?}");
}

#[test]
fn what_cannot_be_read_is_moved_aside_and_what_a_newer_version_wrote_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let kept = table("a", &[(4, 1.0)]);
    let path = directory.path().join(format!("{}.json", kept.id()));
    fs::write(&path, TORN).unwrap();
    assert!(tables.keep(&kept).unwrap());
    fs::write(&path, "\u{0}").unwrap();
    assert!(tables.keep(&kept).unwrap());
    let aside = |count: usize| fs::read_to_string(format!("{}.unreadable-{count}", path.display())).unwrap();
    assert_eq!((aside(1), aside(2)), (TORN.to_owned(), "\u{0}".to_owned()));
    assert_eq!(times(&tables), [1.0]);
    let mut newer = serde_json::to_value(&kept).unwrap();
    newer["schema"] = serde_json::json!(COST_TABLE_SCHEMA + 1);
    fs::write(&path, newer.to_string()).unwrap();
    let refused = tables.keep(&kept).unwrap_err();
    assert!(matches!(refused, Error::Conflict(_)), "{refused}");
    assert_eq!(fs::read_to_string(&path).unwrap(), newer.to_string());
}

#[test]
fn a_parent_is_known_by_its_whole_shape_and_one_that_is_not_told_is_measured_again() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let mut kept = table("a", &[(4, 1.0)]);
    tables.keep(&kept).unwrap();
    let parent = |profile: &Profile| tables.known(profile, "f32", "builtin")[0].parent.clone();
    assert!(parent(&profile()).is_some());
    // The same blocks, the same vocabulary, 16 × 8 weights more.
    let mut untied = profile();
    untied.architecture.tied_embedding = false;
    assert_eq!(parent(&untied), None);
    let (one, other) = (workload(4), workload(5));
    assert!(kept.parent(&untied.architecture, &one).is_none());
    assert!(kept.parent(&profile().architecture, &other).is_some());
    // As an older version kept it.
    kept.parents[0].architecture = None;
    fs::remove_dir_all(directory.path()).unwrap();
    tables.keep(&kept).unwrap();
    assert_eq!(parent(&profile()), None);
    assert!(
        kept.parent(&untied.architecture, &one).is_some(),
        "for who names the table"
    );
    // Both models stay.
    tables.keep(&table("a", &[])).unwrap();
    assert_eq!(tables.list().unwrap().0[0].parents.len(), 2);
}

#[test]
fn of_more_than_a_task_can_be_told_it_is_told_what_was_written_last() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let mut asked = profile();
    let rows: Vec<(usize, f64)> = (1..6000).map(|tokens| (tokens, 1.0)).collect();
    asked.points = table("a", &rows).rows.iter().map(|row| row.point).collect();
    for (seconds, device) in [(100, "a"), (300, "b"), (200, "c")] {
        let mut kept = table(device, &rows);
        // Enough that two of them are told and the third is not.
        for row in &mut kept.rows {
            row.median_ms = 1.0 / 3.0;
        }
        tables.keep(&kept).unwrap();
        let file = fs::File::open(directory.path().join(format!("{}.json", kept.id()))).unwrap();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        file.set_modified(at).unwrap();
    }
    let told = tables.known(&asked, "f32", "builtin");
    let devices: Vec<&str> = told.iter().map(|kept| kept.key.device.as_str()).collect();
    assert_eq!(devices, ["b", "c"]);
    assert!(serde_json::to_vec(&told).unwrap().len() < espalier_proto::PAYLOAD_LIMIT_BYTES / 2);
}

#[test]
fn a_file_is_blamed_for_what_is_wrong_with_the_form_that_it_has() {
    let kept = serde_json::to_value(table("a", &[(4, 1.0)])).unwrap();
    let parent = &kept["parents"][0];
    let mut of_a_job = serde_json::json!({
        "schema": COST_TABLE_SCHEMA,
        "workload": parent["workload"],
        "block_parameters": 0,
        "profile": {"key": kept["key"], "rows": kept["rows"], "parent": parent["measurement"]},
    });
    assert_eq!(KeptTable::parse(&of_a_job.to_string()).unwrap().rows.len(), 1);
    of_a_job["profile"]["rows"][0]["repeats"] = serde_json::json!("three");
    let reason = KeptTable::parse(&of_a_job.to_string()).unwrap_err();
    assert!(
        reason.contains("three") && !reason.contains("profile`"),
        "{reason}"
    );
    for (field, wrong) in [("median_ms", "-1.5"), ("spread_ms", "1e999")] {
        let mut kept = kept.clone();
        kept["rows"][0][field] = serde_json::json!(0.25);
        let text = kept.to_string().replace("0.25", wrong);
        assert!(KeptTable::parse(&text).is_err(), "{text}");
    }
    let negative = kept
        .to_string()
        .replace("\"median_ms\":1.0", "\"median_ms\":-1.5");
    let reason = KeptTable::parse(&negative).unwrap_err();
    assert!(
        reason.contains("has -1.5 ± 0 ms for the base with 16 vocabulary entries at prefill of 1 × 4 tokens"),
        "{reason}"
    );
}

#[test]
fn a_table_of_a_parent_without_room_is_kept_and_puts_nothing_in_the_place_of_what_was_measured() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    let measured = table("a", &[(4, 1.0)]);
    let mut without = table("a", &[(4, 1.0)]);
    without.parents[0].measurement = WholeParent::TooLarge(Shortage {
        needed_bytes: 9,
        free_bytes: 7,
    });
    assert!(tables.keep(&without).unwrap());
    let known = tables.known(&profile(), "f32", "builtin");
    assert!(known[0].rows.len() == 1 && known[0].parent.is_none());
    let kept = |tables: &CostTables| tables.list().unwrap().0.remove(0);
    assert_eq!(kept(&tables), without);
    assert!(
        kept(&tables)
            .parent(&profile().architecture, &workload(4))
            .is_none()
    );

    assert!(tables.keep(&measured).unwrap());
    assert_eq!(kept(&tables), measured, "there was room this time");
    assert!(!tables.keep(&without).unwrap());
    assert_eq!(kept(&tables), measured);
}

#[test]
fn a_file_that_is_no_table_is_named_and_hides_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let tables = CostTables::at(directory.path());
    tables.keep(&table("a", &[(4, 1.0)])).unwrap();
    fs::write(directory.path().join("torn.json"), TORN).unwrap();
    fs::write(directory.path().join("notes.txt"), "mine").unwrap();
    let (listed, wrong) = tables.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert!(
        wrong.len() == 1 && wrong[0].contains("torn.json is no cost table"),
        "{wrong:?}"
    );
}

#[test]
fn a_file_of_another_schema_is_refused_whichever_form_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let kept = serde_json::to_value(table("a", &[])).unwrap();
    let parent = &kept["parents"][0];
    let of_a_job = serde_json::json!({
        "schema": COST_TABLE_SCHEMA,
        "workload": parent["workload"],
        "block_parameters": parent["block_parameters"],
        "profile": {"key": kept["key"], "rows": [], "parent": parent["measurement"]},
    });
    let path = directory.path().join("table.json");
    for form in [kept, of_a_job] {
        for (schema, is_read) in [
            (OLDEST_SCHEMA - 1, false),
            (OLDEST_SCHEMA, true),
            (COST_TABLE_SCHEMA, true),
            (COST_TABLE_SCHEMA + 1, false),
        ] {
            let mut file = form.clone();
            file["schema"] = serde_json::json!(schema);
            fs::write(&path, file.to_string()).unwrap();
            let read = KeptTable::read(&path);
            assert_eq!(read.is_ok(), is_read, "{read:?}");
            if let Err(reason) = read {
                assert!(
                    reason.contains(&format!("has schema {schema}, expected 1 to 3")),
                    "{reason}"
                );
            }
        }
    }
}
