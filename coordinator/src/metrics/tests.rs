#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

/// The value of the one line that begins so.
fn value(text: &str, line: &str) -> f64 {
    let mut found = text.lines().filter_map(|shown| shown.strip_prefix(line));
    let value = found.next().unwrap_or_else(|| panic!("no `{line}` in\n{text}"));
    assert_eq!(found.next(), None, "`{line}` is there twice");
    value.trim().parse().unwrap()
}

#[test]
fn what_is_counted_is_written_under_its_conventional_name() {
    let metrics = Metrics::default();
    metrics.count("score", End::Completed);
    metrics.count("a kind that this build does not know", End::Completed);
    metrics.journal_synced(Duration::from_millis(3));
    metrics.journal_synced(Duration::from_secs(60));
    metrics.lease_expired(Expiry::WorkerLost);
    metrics.stale_message();
    metrics.stand(&Standings {
        queue_depth: 7,
        workers_away: 2,
        ..Standings::default()
    });
    let journal = tempfile::tempdir().unwrap();
    std::fs::write(journal.path().join("journal-1.log"), [0; 4096]).unwrap();
    metrics.journal_lies_in(journal.path().to_owned());
    let text = metrics.text();
    assert_eq!(
        value(&text, r#"espalier_tasks_total{state="completed",kind="score"}"#),
        1.0
    );
    assert_eq!(
        value(&text, r#"espalier_tasks_total{state="completed",kind="other"}"#),
        1.0
    );
    assert_eq!(
        value(&text, r#"espalier_journal_fsync_seconds_bucket{le="0.005"}"#),
        1.0
    );
    assert_eq!(
        value(&text, r#"espalier_journal_fsync_seconds_bucket{le="+Inf"}"#),
        2.0
    );
    assert!((value(&text, "espalier_journal_fsync_seconds_sum") - 60.003).abs() < 1e-9);
    assert_eq!(
        value(&text, r#"espalier_lease_expirations_total{reason="worker_lost"}"#),
        1.0
    );
    assert_eq!(value(&text, "espalier_stale_messages_total"), 1.0);
    assert_eq!(value(&text, "espalier_queue_depth"), 7.0);
    assert_eq!(value(&text, r#"espalier_workers{state="away"}"#), 2.0);
    assert_eq!(value(&text, "espalier_journal_bytes"), 4096.0);
    assert!(value(&text, "process_resident_memory_bytes") > 1e5);
    assert!(text.contains("espalier_build_info{version="));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn nothing_is_said_of_shipping_where_nothing_is_shipped() {
    let metrics = Metrics::default();
    assert!(!metrics.text().contains("espalier_ship_lag_seconds "));
    assert_eq!(metrics.ship_lag(), None);
}

#[test]
fn the_lag_of_shipping_grows_while_the_store_does_not_answer() {
    let metrics = Metrics::default();
    metrics.ships(Progress::default());
    let lag = || value(&metrics.text(), "espalier_ship_lag_seconds");
    let before = lag();
    std::thread::sleep(Duration::from_millis(20));
    assert!(lag() >= before + 0.02, "nobody has said anything meanwhile");
}

#[test]
fn a_page_of_metrics_stays_small_whatever_is_counted() {
    let metrics = Metrics::default();
    for kind in 0..1000 {
        metrics.count(&format!("kind-{kind}"), End::Failed);
    }
    assert!(metrics.text().lines().count() < 400);
}
