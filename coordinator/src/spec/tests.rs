#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use espalier_search::{Bound, Metric};

use super::{CostTableSource, JobSpec, KvGroups, Strategy, json_schema};

const SHORTEST: &str = "
parent: models/parent
data: {train: [text.txt]}
target:
  workload: {prompt_tokens: 128, output_tokens: 32}
  limits: {latency: 75%}
";

fn read(text: &str) -> Result<JobSpec, String> {
    JobSpec::from_yaml(text, Path::new("/specs")).map_err(|error| error.to_string())
}

fn refusal(text: &str) -> String {
    let message = read(text).expect_err("the spec is refused");
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

fn with(line: &str) -> String {
    format!("{SHORTEST}{line}\n")
}

#[test]
fn parent_data_workload_and_one_limit_are_enough() {
    let spec = read(SHORTEST).unwrap();
    assert_eq!(spec.target.workload.concurrency, 1);
    assert_eq!(
        spec.target.limits.get(Metric::Latency),
        Some(Bound::ShareOfParent(0.75))
    );
    assert_eq!(
        spec.search.strategies,
        [Strategy::Heterogeneous, Strategy::Uniform]
    );
    assert_eq!(spec.search.kv_groups, KvGroups::Auto);
    assert_eq!(spec.budget.scoring_tokens, 4096);
}

#[test]
fn relative_paths_are_taken_from_the_directory_of_the_spec() {
    let spec = read(&with("output: ./out")).unwrap();
    assert_eq!(spec.parent, "/specs/models/parent");
    assert_eq!(spec.data.train, ["/specs/text.txt"]);
    assert_eq!(spec.output.as_deref(), Some("/specs/out"));
    let hub = read(&SHORTEST.replace("models/parent", "hf://org/name")).unwrap();
    assert_eq!(hub.parent, "hf://org/name");
}

#[test]
fn a_spec_survives_the_way_to_the_coordinator_and_back() {
    let spec = read(&with("search: {kv_groups: [3, 1], mlp_grid: 128}")).unwrap();
    assert_eq!(spec.search.kv_groups, KvGroups::Counts(vec![3, 1]));
    let json = serde_json::to_string(&spec).unwrap();
    assert_eq!(JobSpec::from_json(&json).unwrap(), spec);
}

#[test]
fn an_unknown_field_is_refused_with_the_nearest_known_one() {
    let message = refusal(&SHORTEST.replace("latency", "latancy"));
    assert_eq!(
        message,
        "unknown field \"latancy\" in target.limits; did you mean \"latency\"?"
    );
    let message = refusal(&with("bugdet: {}"));
    assert_eq!(message, "unknown field \"bugdet\"; did you mean \"budget\"?");
    let message = refusal(&with("recovery: {qqq: 1}"));
    assert!(
        message.starts_with("unknown field \"qqq\" in recovery; known are "),
        "{message}"
    );
}

#[test]
fn a_wrong_type_is_refused_with_its_path_the_value_and_what_would_be_right() {
    let message = refusal(&SHORTEST.replace("128", "many"));
    assert!(
        message.starts_with("target.workload.prompt_tokens: found \"many\", expected a whole number"),
        "{message}"
    );
    let message = refusal(&SHORTEST.replace("[text.txt]", "text.txt"));
    assert!(
        message.starts_with("data.train: found \"text.txt\", expected a list"),
        "{message}"
    );
    let message = refusal(&with("search: {kv_groups: some}"));
    assert!(
        message.starts_with("search.kv_groups: found \"some\", expected `auto` or a list"),
        "{message}"
    );
    let message = refusal(&with("search: {strategies: [heterogenous]}"));
    assert!(
        message.starts_with("search.strategies[0]: found \"heterogenous\", expected `heterogeneous`"),
        "{message}"
    );
    let message = refusal(&with("seed: -1"));
    assert!(
        message.starts_with("seed: found -1, expected at least 0"),
        "{message}"
    );
}

#[test]
fn a_limit_that_cannot_be_read_says_how_limits_are_written() {
    let message = refusal(&SHORTEST.replace("75%", "fast"));
    assert!(
        message.contains("latency") && message.contains("fast") && message.contains("900ms"),
        "{message}"
    );
    let message = refusal(&SHORTEST.replace("{latency: 75%}", "{}"));
    assert!(
        message.starts_with("target.limits: empty; give at least one of"),
        "{message}"
    );
}

#[test]
fn a_missing_field_is_named_with_its_purpose() {
    let message = refusal("data: {train: [a]}");
    assert!(message.contains(": missing; add it ("), "{message}");
    let message = refusal(&SHORTEST.replace("parent: models/parent", ""));
    assert!(
        message.starts_with("parent: missing; add it (The model to compress"),
        "{message}"
    );
}

#[test]
fn impossible_values_are_refused_with_what_would_be_right() {
    let cases = [
        (
            "budget: {sequence_tokens: 512, scoring_tokens: 100}",
            "budget.scoring_tokens: found 100",
        ),
        (
            "budget: {recovery_tokens: 100}",
            "budget.recovery_tokens: found 100",
        ),
        (
            "recovery: {learning_rate: 7}",
            "recovery.learning_rate: found 7, expected 0 to 1",
        ),
        (
            "recovery: {betas: [0.9]}",
            "recovery.betas: found 1 values, expected 2",
        ),
        (
            "recovery: {ranks: 0}",
            "recovery.ranks: found 0, expected at least 1",
        ),
        (
            "recovery: {ranks: 99999999999}",
            "recovery.ranks: found 99999999999, expected at most 4294967295",
        ),
        (
            "recovery: {ranks: 3, pipeline_stages: 2}",
            "recovery.ranks: found 3, expected a multiple of recovery.pipeline_stages (2)",
        ),
        (
            "recovery: {ranks: 8, pipeline_stages: 2, batch_sequences: 3}",
            "recovery.batch_sequences: found 3, expected at least one sequence for each of 4 replicas",
        ),
        (
            "recovery: {clip: 0}",
            "recovery.clip: found 0, expected more than 0",
        ),
        ("search: {strategies: []}", "search.strategies: no strategy"),
        ("search: {kv_groups: [0]}", "search.kv_groups: found [0]"),
        (
            "search: {mlp_grid: 0}",
            "search.mlp_grid: found 0, expected at least 1",
        ),
        ("evaluate: {examples: 0}", "evaluate.examples: found 0"),
    ];
    for (line, expected) in cases {
        let message = refusal(&with(line));
        assert!(message.starts_with(expected), "{line}: {message}");
    }
    let twice = refusal(&SHORTEST.replace("[text.txt]", "[text.txt], validation: [text.txt]"));
    assert!(
        twice.starts_with("data.validation[0]: /specs/text.txt is listed twice"),
        "{twice}"
    );
    let hub = refusal(&SHORTEST.replace("models/parent", "hf://name"));
    assert!(
        hub.starts_with("parent: found `hf://name`, expected hf://org/name"),
        "{hub}"
    );
}

#[test]
fn a_limit_on_the_time_between_tokens_needs_two_of_them() {
    let one = SHORTEST.replace("output_tokens: 32", "output_tokens: 1");
    for bound in ["20ms", "75%"] {
        let message = refusal(&one.replace("latency: 75%", &format!("per_token: {bound}")));
        assert!(
            message.starts_with("target.workload.output_tokens: found 1, expected at least 2"),
            "{message}"
        );
    }
    read(&one).unwrap();
    read(&SHORTEST.replace("latency", "per_token").replace("32", "2")).unwrap();
}

#[test]
fn a_file_that_is_missing_empty_or_a_directory_is_refused_at_submission() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("models/parent")).unwrap();
    let text = directory.path().join("text.txt");
    let spec = JobSpec::from_yaml(SHORTEST, directory.path()).unwrap();
    let missing = spec.check_files().unwrap_err();
    assert_eq!(missing.path, "data.train[0]");
    assert!(
        missing.message.ends_with("does not exist; give a file that does"),
        "{missing}"
    );
    std::fs::write(&text, "").unwrap();
    assert!(spec.check_files().unwrap_err().message.contains("is empty"));
    std::fs::write(&text, "words").unwrap();
    spec.check_files().unwrap();
}

#[test]
fn text_that_is_not_yaml_is_refused_with_the_place() {
    let message = refusal("parent: [");
    assert!(
        message.starts_with("not valid YAML: ") && message.contains("line"),
        "{message}"
    );
    let message = refusal("just words");
    assert!(message.contains("expected a mapping"), "{message}");
}

#[test]
fn the_schema_documents_every_field_of_the_spec() {
    fn undocumented(
        root: &serde_json::Value,
        schema: &serde_json::Value,
        path: &str,
        found: &mut Vec<String>,
    ) {
        let fields = schema
            .get("properties")
            .and_then(|fields| fields.as_object())
            .into_iter()
            .flatten();
        for (name, field) in fields {
            let target = field
                .get("$ref")
                .and_then(|name| name.as_str())
                .and_then(|name| root.pointer(&name[1..]));
            let documented = field
                .get("description")
                .or_else(|| target.and_then(|it| it.get("description")));
            if documented.is_none() {
                found.push(format!("{path}.{name}"));
            }
            undocumented(root, target.unwrap_or(field), &format!("{path}.{name}"), found);
        }
    }
    let schema = json_schema();
    let mut found = Vec::new();
    undocumented(&schema, &schema, "", &mut found);
    assert!(found.is_empty(), "{found:?}");
    assert_eq!(
        schema.pointer("/$defs/Limits/additionalProperties"),
        Some(&serde_json::Value::Bool(false))
    );
}

#[test]
fn yaml_that_cannot_be_read_is_refused_without_the_readers_own_words() {
    for (text, expected) in [
        ("parent: a\nparent: b\n", "a key stands twice in one mapping"),
        ("parent: a\n---\nparent: b\n", "a second document begins"),
        ("parent: &a [*a]\n", "an alias refers to what it stands in"),
    ] {
        let message = refusal(text);
        assert!(message.contains(expected), "{message}");
        assert!(message.contains("at line"), "{message}");
        for word in ["Options", "from_str", "u64", "Policy"] {
            assert!(!message.contains(word), "{message}");
        }
    }
}

/// A spec beside a cost table that holds `text`, as read; the directory must outlive its reading.
fn importing(text: &str) -> (tempfile::TempDir, JobSpec) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("table.json"), text).unwrap();
    let spec = SHORTEST.replace("limits:", "cost_table: table.json\n  limits:");
    let spec = JobSpec::from_yaml(&spec, directory.path()).unwrap();
    (directory, spec)
}

const TABLE: &str = include_str!("../../../examples/tiny/cost-table.json");

#[test]
fn an_imported_cost_table_stands_in_the_spec_whole_and_survives_the_way_to_the_coordinator() {
    let (_directory, mut spec) = importing(TABLE);
    spec.import_files().unwrap();
    let Some(CostTableSource::Table(table)) = &spec.target.cost_table else {
        panic!("not imported: {:?}", spec.target.cost_table);
    };
    assert!(table.name().ends_with("table.json"));
    assert_eq!(table.profile.rows.len(), 24);
    let json = serde_json::to_string(&spec).unwrap();
    assert_eq!(JobSpec::from_json(&json).unwrap(), spec);
}

#[test]
fn a_cost_table_that_is_none_or_is_another_targets_is_refused() {
    let (_directory, mut spec) = importing("{}");
    let message = spec.import_files().unwrap_err().to_string();
    assert!(
        message.contains("target.cost_table") && message.contains("is no cost table"),
        "{message}"
    );
    let (_directory, mut spec) = importing(TABLE);
    spec.target.workload.output_tokens = 64;
    let message = spec.import_files().unwrap_err().to_string();
    assert!(
        message.contains("1 × 128 prompt and 32 output tokens, expected the parent under the workload of 1 × 128 prompt and 64"),
        "{message}"
    );
}

#[test]
fn a_job_that_only_measures_its_target_takes_no_table_in_place_of_that() {
    let (_directory, mut spec) = importing(TABLE);
    spec.check().unwrap();
    spec.profile_only = true;
    let message = spec.check().unwrap_err().to_string();
    assert!(
        message.starts_with("target.cost_table: found one, expected none"),
        "{message}"
    );
}
