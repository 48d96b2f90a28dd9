//! Tables kept, merged, found again, and files that are none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_arch::Architecture;
use espalier_search::{Measurement, Mode, Point, Shortage, Summary};

use super::*;

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
    }
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
    let (listed, wrong) = tables.list().unwrap();
    assert!(wrong.is_empty() && listed.len() == 1);
    let mut times: Vec<f64> = listed[0].rows.iter().map(|row| row.median_ms).collect();
    times.sort_by(f64::total_cmp);
    assert_eq!(times, [1.0, 5.0, 6.0]);
    assert_eq!(listed[0].parents.len(), 1);
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
    assert!(kept(&tables).parent(0, &workload(4)).is_none());

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
    fs::write(directory.path().join("torn.json"), "{\"schema\": 2, \"key\"").unwrap();
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
                    reason.contains(&format!("has schema {schema}, expected 1 to 2")),
                    "{reason}"
                );
            }
        }
    }
}
