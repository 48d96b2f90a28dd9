#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub(crate) mod faulty;
mod follow;
mod snapshots;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{Disk, SystemDisk};
use super::{Error, Fold, Journal, Options};
use faulty::FaultyDisk;

fn open(directory: &Path) -> Result<(Journal, Vec<String>), Error> {
    open_on(Arc::new(SystemDisk), directory)
}

fn open_on(disk: Arc<dyn Disk>, directory: &Path) -> Result<(Journal, Vec<String>), Error> {
    let mut told = Told::default();
    let journal = Journal::open(disk, directory, Options::default(), &mut told)?;
    Ok((journal, told.all()))
}

/// A state that is a list of the events it has seen.
#[derive(Debug, Default)]
struct Told {
    snapshot: Vec<String>,
    after: Vec<String>,
}

impl Told {
    fn all(self) -> Vec<String> {
        [self.snapshot, self.after].concat()
    }
}

impl Fold for Told {
    type Event = String;

    fn restore(&mut self, json: &[u8]) -> Result<(), String> {
        self.snapshot = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn event(&mut self, _sequence: u64, event: String) {
        self.after.push(event);
    }
}

fn written(directory: &Path, batches: &[&[&str]]) -> PathBuf {
    let (mut journal, _) = open(directory).unwrap();
    for batch in batches {
        journal.append(batch).unwrap();
        journal.commit().unwrap();
    }
    only_segment(directory)
}

fn only_segment(directory: &Path) -> PathBuf {
    let mut entries = fs::read_dir(directory).unwrap();
    let path = entries.next().unwrap().unwrap().path();
    assert!(entries.next().is_none());
    path
}

#[test]
fn what_was_committed_comes_back_in_order() {
    let directory = tempfile::tempdir().unwrap();
    written(directory.path(), &[&["a", "b"], &["c"]]);
    let (mut journal, events) = open(directory.path()).unwrap();
    assert_eq!(events, ["a", "b", "c"]);
    journal.append(&["d"]).unwrap();
    journal.append(&["e"]).unwrap();
    journal.commit().unwrap();
    drop(journal);
    assert_eq!(open(directory.path()).unwrap().1, ["a", "b", "c", "d", "e"]);
}

#[test]
fn what_was_only_appended_is_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(directory.path()).unwrap();
    journal.append(&["a"]).unwrap();
    drop(journal);
    assert!(open(directory.path()).unwrap().1.is_empty());
}

#[test]
fn a_tail_cut_at_any_byte_of_the_last_frame_is_dropped_and_the_journal_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path(), &[&["first"]]);
    let whole = fs::read(&path).unwrap().len();
    written(directory.path(), &[&["second"]]);
    let bytes = fs::read(&path).unwrap();
    for length in whole..bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        let (mut journal, events) = open(directory.path()).unwrap();
        assert_eq!(events, ["first"], "cut at {length}");
        journal.append(&["third"]).unwrap();
        journal.commit().unwrap();
        drop(journal);
        assert_eq!(
            open(directory.path()).unwrap().1,
            ["first", "third"],
            "cut at {length}"
        );
    }
}

#[test]
fn any_flipped_bit_is_refused_with_the_place_and_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path(), &[&["first"], &["second"]]);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            fs::write(&path, &flipped).unwrap();
            let error = open(directory.path()).expect_err("a flipped bit was read");
            assert!(matches!(error, Error::Damaged { .. }), "{at}: {error}");
            let remedy = "espalier doctor repair --data-dir ";
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }
}

#[test]
fn sixty_four_zeroed_bytes_anywhere_never_panic_nor_invent_events() {
    let directory = tempfile::tempdir().unwrap();
    let long = "x".repeat(150);
    let path = written(directory.path(), &[&["first"], &[&long], &["third"]]);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut zeroed = bytes.clone();
        zeroed.iter_mut().skip(at).take(64).for_each(|byte| *byte = 0);
        fs::write(&path, &zeroed).unwrap();
        if let Ok((_, events)) = open(directory.path()) {
            let all = ["first", &long, "third"];
            assert!(all.starts_with(&events.iter().map(String::as_str).collect::<Vec<_>>()));
        }
    }
}

#[test]
fn segments_follow_each_other_and_a_missing_one_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options { segment_bytes: 60 };
    let disk = Arc::new(SystemDisk);
    let mut journal = Journal::open(disk, directory.path(), options, &mut Told::default()).unwrap();
    let events: Vec<String> = (0..20).map(|number| format!("event {number}")).collect();
    for event in &events {
        journal.append(&[event]).unwrap();
        journal.commit().unwrap();
    }
    drop(journal);
    assert_eq!(open(directory.path()).unwrap().1, events);
    let mut segments: Vec<PathBuf> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    segments.sort();
    assert!(segments.len() > 5);
    fs::remove_file(&segments[2]).unwrap();
    assert!(matches!(open(directory.path()), Err(Error::Damaged { .. })));
}

#[test]
fn a_newer_schema_is_refused_by_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path(), &[&["first"]]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[4] = 9;
    let checksum = crc32c::crc32c(&bytes[..20]);
    bytes[20..24].copy_from_slice(&checksum.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        open(directory.path()),
        Err(Error::TooNew { found: 9, .. })
    ));
}

#[test]
fn want_of_room_is_seen_before_anything_is_promised_and_looking_leaves_nothing_behind() {
    let (disk, directory) = (FaultyDisk::default(), Path::new("journal"));
    let (journal, _) = open_on(Arc::new(disk.clone()), directory).unwrap();
    let before = disk.list(directory).unwrap();
    journal.check_room().unwrap();
    disk.set_room(Some(40));
    let error = journal.check_room().unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert_eq!(disk.list(directory).unwrap(), before);
    disk.set_room(None);
    journal.check_room().unwrap();
}

#[test]
fn a_full_disk_takes_back_the_whole_batch() {
    let (disk, directory) = (FaultyDisk::default(), Path::new("journal"));
    let (mut journal, _) = open_on(Arc::new(disk.clone()), directory).unwrap();
    journal.append(&["kept"]).unwrap();
    journal.commit().unwrap();
    disk.set_room(Some(40));
    journal.append(&["this one would fit"]).unwrap();
    journal.append(&["this one does not"]).unwrap();
    let error = journal.commit().unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    let mut read = Told::default();
    journal.replay(&mut read).unwrap();
    assert_eq!(read.all(), ["kept"]);
    disk.set_room(None);
    journal.append(&["after"]).unwrap();
    journal.commit().unwrap();
    drop(journal);
    let disk = disk.after_power_cut(0, false);
    assert_eq!(open_on(Arc::new(disk), directory).unwrap().1, ["kept", "after"]);
}

#[test]
fn a_failed_sync_is_never_tried_again() {
    let (disk, directory) = (FaultyDisk::default(), Path::new("journal"));
    let (mut journal, _) = open_on(Arc::new(disk.clone()), directory).unwrap();
    journal.append(&["first"]).unwrap();
    disk.fail_syncs();
    assert!(matches!(journal.commit(), Err(Error::Io { action: "sync", .. })));
    assert!(matches!(journal.commit(), Err(Error::Failed)));
}

/// Commits ten events in small segments; gives how many were acknowledged before the disk failed.
fn commit_ten(disk: &FaultyDisk, directory: &Path) -> usize {
    let options = Options { segment_bytes: 100 };
    let disk = Arc::new(disk.clone());
    let Ok(mut journal) = Journal::open(disk, directory, options, &mut Told::default()) else {
        return 0;
    };
    for number in 0..10 {
        journal.append(&[format!("event {number}")]).unwrap();
        journal.append(&[format!("and its echo {number}")]).unwrap();
        if journal.commit().is_err() {
            return number;
        }
    }
    10
}

#[test]
fn an_acknowledged_event_survives_a_crash_at_any_write() {
    let directory = Path::new("journal");
    let undisturbed = FaultyDisk::default();
    assert_eq!(commit_ten(&undisturbed, directory), 10);
    for crash in 1..=undisturbed.writes() {
        let disk = FaultyDisk::default();
        disk.crash_at(crash);
        let acknowledged = commit_ten(&disk, directory);
        for kept in [0, 1, 30, 60] {
            for zeros in [false, true] {
                let found = disk.after_power_cut(kept, zeros);
                let (_, events) = open_on(Arc::new(found), directory).unwrap();
                let at = format!("write {crash}, {kept} bytes kept, zeros {zeros}");
                assert!(events.len() >= 2 * acknowledged, "{at}: {events:?}");
                let truth =
                    (0..10).flat_map(|number| [format!("event {number}"), format!("and its echo {number}")]);
                assert!(truth.zip(&events).all(|(truth, event)| truth == *event), "{at}");
            }
        }
    }
}
