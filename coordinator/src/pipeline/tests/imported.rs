//! Imported cost tables, and baselines that cannot meet the limits.

use espalier_search::{Metric, WholeParent};

use super::world::*;
use crate::cost_tables::KeptTable;
use crate::pipeline::*;
use crate::spec::{CostTableFile, CostTableSource, JobSpec, Strategy};

/// The table that a measured job leaves.
fn table() -> CostTableFile {
    let mut world = World::default();
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    outcome.cost_table.unwrap()
}

fn importing(limits: &str, table: CostTableFile) -> JobSpec {
    let mut job = spec(limits, BOTH);
    job.target.cost_table = Some(CostTableSource::Table(Box::new(table)));
    job
}

#[test]
fn with_an_imported_table_nothing_that_is_timed_changes_what_is_chosen() {
    let job = importing(r#"{"latency": "75%", "memory": "99%"}"#, table());
    let quiet = World::default().run(&job).unwrap();
    let mut busy = World {
        bias: 1.4,
        pace: 3.0,
        drifts: vec![0.9],
        verify_biases: vec![2.0],
        ..World::default()
    };
    let outcome = busy.run(&job).unwrap();
    assert!(!busy.log.contains(&Stage::Profile));
    assert_eq!(busy.rounds(Strategy::Heterogeneous), 1);
    assert!(!busy.log.contains(&Stage::Verify { round: 2 }));
    let choices = |outcome: &Outcome| -> Vec<_> {
        outcome
            .strategies
            .iter()
            .map(|strategy| strategy.candidate.clone())
            .collect()
    };
    assert_eq!(choices(&outcome), choices(&quiet));
    assert!(!outcome.limits[0].verified.inside, "the miss is reported");
    for expected in [
        "an imported table is not corrected",
        "verify-1 was outside the limits",
        "noisy and says little",
    ] {
        assert!(
            outcome.notes.iter().any(|note| note.contains(expected)),
            "{expected}: {:?}",
            outcome.notes
        );
    }
}

#[test]
fn a_job_leaves_the_table_that_it_chose_by_and_its_spec_names_the_file() {
    let mut imported = table();
    imported.file = "tables/a.json".to_owned();
    let outcome = World::default()
        .run(&importing(r#"{"latency": "75%"}"#, imported.clone()))
        .unwrap();
    imported.file = String::new();
    assert_eq!(outcome.cost_table, Some(imported));
    assert_eq!(
        outcome.spec.target.cost_table,
        Some(CostTableSource::File("tables/a.json".to_owned()))
    );
}

#[test]
fn the_first_row_that_is_missing_is_named() {
    let mut without = table();
    let missing = without.profile.rows.remove(3);
    let mut world = World::default();
    let error = world
        .run(&importing(r#"{"latency": "75%"}"#, without))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("target.cost_table: the table has no row for"),
        "{error}"
    );
    assert!(error.contains(&missing.point.to_string()), "{error}");
    assert_eq!(world.log, [Stage::Ingest], "nothing else was begun");
}

#[test]
fn a_table_of_another_parent_is_refused() {
    // As an older version left it.
    let mut other = table();
    other.architecture = None;
    other.block_parameters += 1;
    let error = World::default()
        .run(&importing(r#"{"latency": "75%"}"#, other))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("was measured of a parent with") && error.contains("give the table of this parent"),
        "{error}"
    );
}

#[test]
fn of_a_table_with_several_models_the_jobs_own_parent_is_taken_wherever_it_stands() {
    let own = table();
    let mut other = own.clone();
    other.architecture = Some("0".repeat(64));
    let WholeParent::Measured(measurement) = &mut other.profile.parent else {
        panic!("it was measured");
    };
    measurement.latency_ms.median *= 7.0;
    other.parents = vec![own.parent()];
    let outcome = World::default()
        .run(&importing(r#"{"latency": "75%"}"#, other.clone()))
        .unwrap();
    assert_eq!(outcome.cost_table, Some(own.clone()));
    assert_eq!(outcome.parent.measurement, own.profile.parent);
    other.parents.clear();
    let error = World::default()
        .run(&importing(r#"{"latency": "75%"}"#, other))
        .unwrap_err()
        .to_string();
    assert!(error.contains("was measured of another parent with"), "{error}");
}

#[test]
fn with_an_imported_table_memory_that_leaves_the_context_out_is_reported_and_not_called_met() {
    let job = importing(r#"{"latency": "75%", "memory": "99%"}"#, table());
    let mut world = World {
        without_context: true,
        ..World::default()
    };
    let outcome = world.run(&job).unwrap();
    let inside = |metric: Metric| {
        let mut limits = outcome.limits.iter();
        limits.any(|limit| limit.metric == metric && limit.verified.inside)
    };
    assert!(inside(Metric::Latency) && !inside(Metric::Memory));
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("noisy and says little"))
    );
}

#[test]
fn a_job_says_that_it_chose_by_times_that_were_taken_beside_others_work() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("cost-table.json");
    let said = |disturbed: bool| {
        let mut table = table();
        table.profile.disturbed = disturbed;
        std::fs::write(&file, serde_json::to_string(&table).unwrap()).unwrap();
        let mut job = spec(r#"{"latency": "75%"}"#, BOTH);
        job.target.cost_table = Some(CostTableSource::File(file.display().to_string()));
        job.import_files().unwrap();
        let outcome = World::default().run(&job).unwrap();
        assert_eq!(outcome.cost_table.unwrap().profile.disturbed, disturbed);
        let mut notes = outcome.notes.iter();
        notes.any(|note| note.contains("others kept using the machine"))
    };
    assert!(said(true) && !said(false));
}

#[test]
fn a_kept_table_is_imported_with_every_model_that_was_measured_under_the_workload() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kept.json");
    let own = table();
    let mut kept = KeptTable::from(own.clone());
    let mut first = own.parent();
    first.architecture = Some("0".repeat(64));
    kept.parents.insert(0, first.clone());
    first.workload.prompt_tokens += 1;
    kept.parents.insert(0, first);
    let mut job = spec(r#"{"latency": "75%"}"#, BOTH);
    let mut import = |kept: &KeptTable| {
        std::fs::write(&file, serde_json::to_string(kept).unwrap()).unwrap();
        job.target.cost_table = Some(CostTableSource::File(file.display().to_string()));
        job.import_files().map(|()| job.clone())
    };
    let job = import(&kept).unwrap();
    let outcome = World::default().run(&job).unwrap();
    assert_eq!(outcome.parent.measurement, own.profile.parent);
    kept.parents.truncate(1);
    let error = import(&kept).unwrap_err().to_string();
    assert!(
        error.contains("has models measured whole only under the workload of 1 × "),
        "{error}"
    );
}

#[test]
fn a_job_goes_on_without_a_baseline_where_only_the_baseline_cannot_meet_the_limits() {
    // 4 layers: leaving out all but one still costs a whole layer, which heterogeneous blocks need not.
    let mut world = World::default();
    let outcome = world.run(&spec(r#"{"latency": "19%"}"#, BOTH)).unwrap();
    assert_eq!(outcome.strategies.len(), 1);
    assert_eq!(outcome.winner, Strategy::Heterogeneous);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.starts_with("there is no uniform baseline: ")),
        "{:?}",
        outcome.notes
    );
    let error = World::default()
        .run(&spec(r#"{"latency": "19%"}"#, r#"["uniform"]"#))
        .unwrap_err()
        .to_string();
    assert!(error.contains("no uniform model of the grid"), "{error}");
    // What can be changed in a spec, and nothing else.
    for remedy in ["search.mlp_grid", "search.kv_groups", "search.strategies"] {
        assert!(error.contains(remedy), "{error}");
    }
    assert!(!error.contains("depth"), "{error}");
}

#[test]
fn budgets_that_the_data_cannot_fill_are_said() {
    let outcome = World::default()
        .run(&spec(r#"{"latency": "75%"}"#, BOTH))
        .unwrap();
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.contains("recovery had 2048 of the 1000000 tokens asked for")),
        "{:?}",
        outcome.notes
    );
}
