#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use espalier_proto::task::Serving;
use espalier_search::heterogeneous::Reachable;
use espalier_search::plan::Answer;
use espalier_search::{AbsoluteLimit, Figures, Metric, Shortage, WholeParent};

use super::{html, plans, sample, write};
use crate::pipeline::Outcome;

#[test]
fn the_page_says_asked_predicted_checked_and_measured_of_every_limit() {
    let page = html(&sample::outcome());
    for expected in [
        "75% of the parent",
        "110% of the parent",
        "768.0 ms",
        "781.5 ms",
        "41.0 tokens/s",
        "every limit met",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
}

#[test]
fn a_missed_limit_is_said_in_the_headline() {
    let mut outcome = sample::outcome();
    outcome.limits[1].verified.inside = false;
    let page = html(&outcome);
    assert!(page.contains("a limit was missed") && !page.contains("every limit met"));
    outcome.limits[1].verified.noisy = true;
    let page = html(&outcome);
    assert!(page.contains("✕ too noisy to show every limit met") && page.contains(">not shown<"));
    outcome.limits[0].verified.inside = false;
    assert!(html(&outcome).contains("a limit was missed"));
}

#[test]
fn the_page_loads_nothing_and_escapes_what_it_is_given() {
    let page = html(&sample::outcome());
    for forbidden in [
        "<script", "http://", "https://", "src=", "url(", "@import", "<link", "piqa <b>",
    ] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert!(page.contains("&lt;script&gt;") && page.contains("piqa &lt;b&gt;"));
    assert!(
        !page.contains("NaN") && !page.contains("inf\""),
        "no figure is undefined"
    );
}

#[test]
fn what_was_measured_in_vllm_can_be_served_by_a_line_in_the_report_the_page_and_beside_the_weights() {
    let mut outcome = sample::outcome();
    assert!(
        !html(&outcome).contains("vllm serve"),
        "another engine's job has none"
    );
    outcome.serving = Some(Serving {
        arguments: ["--max-num-seqs", "4", "--enforce-eager"]
            .map(str::to_owned)
            .to_vec(),
        environment: BTreeMap::from([("OMP_NUM_THREADS".to_owned(), "2".to_owned())]),
    });
    outcome.settle("/models/out/checkpoint".to_owned());
    let line = "env -u VLLM_CPU_KVCACHE_SPACE OMP_NUM_THREADS=2 vllm serve /models/out/checkpoint --max-num-seqs 4 \
                --enforce-eager";
    let directory = tempfile::tempdir().unwrap();
    let exported = directory.path().join("checkpoint");
    std::fs::create_dir(&exported).unwrap();
    write(&outcome, directory.path()).unwrap();
    for (place, name) in [
        (directory.path(), "report.json"),
        (directory.path(), "report.html"),
        (exported.as_path(), "README.md"),
    ] {
        let text = std::fs::read_to_string(place.join(name)).unwrap();
        assert!(text.contains(line), "{name}");
        assert!(name == "report.json" || text.contains("eager"), "{name} says why");
    }
    let readme = std::fs::read_to_string(exported.join("README.md")).unwrap();
    assert!(readme.contains("| Latency | 768.0 ms | 781.5 ms |"), "{readme}");
}

#[test]
fn every_block_is_drawn_and_skipped_ones_as_outlines() {
    let outcome = sample::outcome();
    let page = html(&outcome);
    assert_eq!(page.matches("<title>layer ").count(), 2 * 60);
    let skipped = outcome
        .strategies
        .iter()
        .flat_map(|it| &it.blocks)
        .filter(|block| block.size == 0)
        .count();
    assert!(skipped > 0);
    assert_eq!(page.matches(": skipped</title>").count(), skipped);
}

#[test]
fn the_sections_stand_in_their_order() {
    let page = html(&sample::outcome());
    let titles: Vec<&str> = page
        .split("<h2>")
        .skip(1)
        .filter_map(|rest| rest.split("</h2>").next())
        .collect();
    assert_eq!(
        titles,
        [
            "Limits",
            "What is left of each block",
            "Quality",
            "Search and recovery",
            "What it cost",
            "Notes",
            "Job spec"
        ]
    );
}

#[test]
fn both_files_are_written_and_the_json_is_the_outcome() {
    let outcome = sample::outcome();
    let directory = tempfile::tempdir().unwrap();
    write(&outcome, directory.path()).unwrap();
    let json = std::fs::read(directory.path().join("report.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Outcome>(&json).unwrap(), outcome);
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        2,
        "no partial file stays"
    );
    if let Some(keep) = std::env::var_os("ESPALIER_KEEP_SAMPLE") {
        write(&outcome, keep.as_ref()).unwrap();
    }
}

#[test]
fn an_outcome_without_recovery_or_front_still_makes_a_page() {
    let mut outcome = sample::outcome();
    outcome.front.clear();
    outcome.notes.clear();
    for report in &mut outcome.strategies {
        report.after = None;
        report.losses.clear();
    }
    let page = html(&outcome);
    assert!(page.contains("heterogeneous, before recovery") && !page.contains("after recovery"));
}

#[test]
fn losses_of_many_steps_each_are_drawn_over_all_steps_and_those_of_older_versions_are_one_a_step() {
    let mut outcome = sample::outcome();
    assert!(html(&outcome).contains(">120</text>"));
    let as_ever = serde_json::to_string(&outcome).unwrap();
    assert!(!as_ever.contains("steps_per_loss"));
    assert_eq!(serde_json::from_str::<Outcome>(&as_ever).unwrap(), outcome);
    for report in &mut outcome.strategies {
        report.steps_per_loss = 256;
    }
    assert!(html(&outcome).contains(">30720</text>"));
    let json = serde_json::to_string(&outcome).unwrap();
    assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap(), outcome);
}

#[test]
fn the_time_of_stages_that_run_at_once_is_counted_once() {
    let mut outcome = sample::outcome();
    let time = |outcome: &Outcome| {
        let page = html(outcome);
        let fact = page.split("<dt>Time</dt><dd>").nth(1).unwrap();
        let row = page.split("<b>all stages</b>").nth(1).unwrap();
        let shown = fact.split("<small>").next().unwrap().to_owned();
        assert!(row.contains(&format!("<b>{shown}</b>")), "{shown}");
        shown
    };
    // Of 723.6 s of all stages, 40.2 s of one ran within another, though it is listed after it.
    assert_eq!(time(&outcome), "11 min 23 s");
    // As an older version left it.
    for stage in &mut outcome.stages {
        stage.ended_seconds = None;
    }
    let json = serde_json::to_string(&outcome).unwrap();
    assert!(!json.contains("ended_seconds"));
    assert_eq!(time(&serde_json::from_str(&json).unwrap()), "12 min 04 s");
}

#[test]
fn a_parent_without_room_is_said_to_have_none_and_its_figures_to_be_predicted() {
    let mut outcome = sample::outcome();
    outcome.parent.measurement = WholeParent::TooLarge(Shortage {
        needed_bytes: 140 << 30,
        free_bytes: 79 << 30,
    });
    for limit in &mut outcome.limits {
        (limit.parent, limit.verified.parent, limit.checked.parent) = (None, None, None);
    }
    let page = html(&outcome);
    for expected in [
        "measured alone, because the parent does not fit this device (needs 140.0 GiB, has 79.0 GiB)",
        "1042.0 ms predicted",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
    assert!(!page.contains("in alternation") && !page.contains("class=\"parent-mark\""));
    assert!(!page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn a_model_that_had_no_room_beside_the_parent_is_said_to_be_measured_alone() {
    let mut outcome = sample::outcome();
    for limit in &mut outcome.limits {
        limit.verified.parent = None;
    }
    let page = html(&outcome);
    assert!(page.contains("measured alone, because the parent has no room beside it"));
    assert!(!page.contains("in alternation"));
}

#[test]
fn the_page_of_plans_says_what_can_be_reached_and_why_others_have_no_answer() {
    let reach = |metric, limit: f64, alone: f64, together: f64| Reachable {
        limit: AbsoluteLimit::new(metric, limit),
        alone,
        together,
    };
    let impossible = Answer {
        target: sample::outcome().target,
        workload: sample::outcome().spec.target.workload,
        limits: Vec::new(),
        parent: Figures::default(),
        parent_measured: false,
        chosen: None,
        reachable: vec![
            reach(Metric::Throughput, 1000.0, 1200.0, 900.0),
            reach(Metric::PerToken, 20.0, 15.0, 22.0),
        ],
        notes: Vec::new(),
        unpriced: 0,
    };
    let page = plans(
        "out",
        &[
            ("own".to_owned(), Ok(impossible)),
            ("h200".to_owned(), Err("no row for <base>".to_owned())),
        ],
    );
    for expected in [
        "No candidate is inside throughput at least 1000.0 tokens/s; the best that can be reached is 1200.0 tokens/s \
         (900.0 tokens/s with the other limits), and per_token at most 20.0 ms; the best that can be reached is 15.0 ms \
         (22.0 ms with the other limits).",
        "<h2>h200</h2><p>no row for &lt;base&gt;</p>",
    ] {
        assert!(page.contains(expected), "{page}");
    }
}
