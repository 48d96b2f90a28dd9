//! What is said of a data directory, what mends it, and that a coordinator then starts on it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::{DEADLINE, Place, Story, client};
use espalier_coordinator::doctor::{self, Report};
use espalier_coordinator::{Coordinator, Error};

/// A place where a coordinator has taken a job, and its data directory.
async fn with_a_past() -> (Place, PathBuf) {
    let place = Place::new();
    let handle = place.coordinator().await;
    client(&handle).await.submit(place.spec(), "").await.unwrap();
    while handle.tables().reflects() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    handle.shutdown(DEADLINE).await.unwrap();
    let data_dir = place.options().data_dir;
    (place, data_dir)
}

async fn refused(place: &Place) -> Error {
    let started = Coordinator::start_with(place.options(), Arc::new(Story)).await;
    started.unwrap_err()
}

fn first_segment(data_dir: &Path) -> PathBuf {
    data_dir.join("journal/journal-00000000000000000001.log")
}

/// What keeps a coordinator from starting.
fn fatal(report: &Report) -> String {
    let fatal = report.findings.iter().filter(|finding| finding.fatal);
    fatal
        .map(|finding| format!("{}: {}\n", finding.path.display(), finding.problem))
        .collect()
}

async fn starts_after_repair(place: &Place, data_dir: &Path) -> Report {
    let report = doctor::repair(data_dir).unwrap();
    assert!(report.starts && fatal(&report).is_empty(), "{report:?}");
    let again = place.coordinator().await;
    again.shutdown(DEADLINE).await.unwrap();
    report
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_that_leaves_no_frame_sets_aside_what_tells_of_them_and_the_start_works() {
    let (place, data_dir) = with_a_past().await;
    fs::create_dir_all(data_dir.join("logs/job-1")).unwrap();
    fs::write(data_dir.join("logs/job-1/attempt-1.log"), "a line\n").unwrap();
    let segment = first_segment(&data_dir);
    let mut bytes = fs::read(&segment).unwrap();
    *bytes.first_mut().unwrap() ^= 1;
    fs::write(&segment, bytes).unwrap();

    let report = starts_after_repair(&place, &data_dir).await;
    let copies = report.copies.unwrap();
    let kept = fs::read_to_string(copies.join("logs/job-1/attempt-1.log")).unwrap();
    assert_eq!(kept, "a line\n", "what was set aside is not what was there");
    assert!(
        report.mended.iter().any(|mended| mended.contains("logs away")),
        "{:?}",
        report.mended
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_says_that_a_start_refuses_a_journal_that_was_emptied_and_a_repair_mends_it() {
    let (place, data_dir) = with_a_past().await;
    fs::write(first_segment(&data_dir), "").unwrap();
    let said = refused(&place).await.to_string();
    assert!(said.contains("espalier doctor repair"), "{said}");
    let report = doctor::check(&data_dir).unwrap();
    assert!(
        !report.starts && fatal(&report).contains("holds nothing, but"),
        "{report:?}"
    );
    starts_after_repair(&place, &data_dir).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_says_that_a_damaged_store_id_keeps_a_start_off_and_a_repair_mends_it() {
    let (place, data_dir) = with_a_past().await;
    for damaged in [b"\xff\xfe\x00 no text".as_slice(), b"not an id".as_slice()] {
        fs::write(data_dir.join("store-id"), damaged).unwrap();
        let error = refused(&place).await;
        assert!(matches!(error, Error::StoreId { .. }), "{error:?}");
        let said = error.to_string();
        for part in ["store-id", "espalier doctor repair --data-dir"] {
            assert!(said.contains(part), "{said}");
        }
        let report = doctor::check(&data_dir).unwrap();
        assert!(
            !report.starts && fatal(&report).contains("store-id"),
            "{report:?}"
        );
        let report = starts_after_repair(&place, &data_dir).await;
        let kept = fs::read(report.copies.unwrap().join("store-id")).unwrap();
        assert_eq!(kept, damaged);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_says_that_the_store_is_not_the_one_there_was_and_a_repair_leaves_that_to_people() {
    let (place, data_dir) = with_a_past().await;
    let other = "0123456789abcdef0123456789abcdef";
    fs::write(data_dir.join("store-id"), other).unwrap();
    assert!(matches!(refused(&place).await, Error::Invalid(_)));
    for report in [
        doctor::check(&data_dir).unwrap(),
        doctor::repair(&data_dir).unwrap(),
    ] {
        let said = fatal(&report);
        assert!(
            !report.starts && said.contains(other) && said.contains("remove this file"),
            "{said}"
        );
    }
    assert_eq!(fs::read_to_string(data_dir.join("store-id")).unwrap(), other);
    fs::remove_file(data_dir.join("store-id")).unwrap();
    assert!(doctor::check(&data_dir).unwrap().starts);
    place.coordinator().await.shutdown(DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_in_a_segments_place_is_found_and_moved_away() {
    let (place, data_dir) = with_a_past().await;
    let segment = first_segment(&data_dir);
    fs::remove_file(&segment).unwrap();
    fs::create_dir(&segment).unwrap();
    let report = doctor::check(&data_dir).unwrap();
    assert!(
        !report.starts && fatal(&report).contains("a directory lies"),
        "{report:?}"
    );
    starts_after_repair(&place, &data_dir).await;
}

#[test]
fn looking_at_a_directory_leaves_nothing_in_it_and_needs_no_leave_to_write() {
    let directory = tempfile::tempdir().unwrap();
    doctor::check(directory.path()).unwrap();
    fs::create_dir(directory.path().join("journal")).unwrap();
    doctor::export(directory.path(), &mut Vec::new()).unwrap();
    assert!(!directory.path().join("lock").exists(), "it was written to");
    // Nobody may write to a program that runs, whoever they are.
    let running = std::env::current_exe().unwrap();
    std::os::unix::fs::symlink(running, directory.path().join("lock")).unwrap();
    doctor::check(directory.path()).unwrap();
    doctor::export(directory.path(), &mut Vec::new()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_at_the_same_time_do_not_take_each_other_for_damage() {
    let (_place, data_dir) = with_a_past().await;
    let together = std::sync::Barrier::new(4);
    // Asserted when all have ended: one that panics would leave the others waiting.
    let look = || -> Vec<_> {
        let looks = (0..5).map(|_| {
            together.wait();
            doctor::check(&data_dir)
        });
        looks.collect()
    };
    let reports: Vec<_> = std::thread::scope(|scope| {
        let looking: Vec<_> = (0..4).map(|_| scope.spawn(look)).collect();
        let looks = looking.into_iter().map(|looks| looks.join().unwrap());
        looks.flatten().collect()
    });
    for report in reports {
        let report = report.unwrap();
        let wrong = |finding: &doctor::Finding| finding.problem.contains("built anew");
        assert!(!report.findings.iter().any(wrong), "{report:?}");
    }
}
