#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use super::{Error, Journal, Options};

fn open(directory: &Path) -> Result<(Journal, Vec<String>), Error> {
    let mut events = Vec::new();
    let journal = Journal::open(directory, Options::default(), &mut |event| events.push(event))?;
    Ok((journal, events))
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
            let Error::Damaged { offset, .. } = &error else {
                panic!("{at}: {error}")
            };
            let remedy = format!("truncate -s {offset} ");
            assert!(error.to_string().contains(&remedy), "{error}");
        }
    }
}

#[test]
fn the_remedy_of_a_damaged_journal_works() {
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path(), &[&["first"], &["second"], &["third"]]);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let Err(Error::Damaged { offset, .. }) = open(directory.path()) else {
        panic!("was read")
    };
    bytes.truncate(usize::try_from(offset).unwrap());
    fs::write(&path, &bytes).unwrap();
    assert_eq!(open(directory.path()).unwrap().1, ["first"]);
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
    let mut journal = Journal::open(directory.path(), options, &mut |_: String| panic!("empty")).unwrap();
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
fn a_full_disk_keeps_nothing_of_the_batch_and_the_journal_goes_on() {
    let Ok(mut full) = fs::OpenOptions::new().write(true).open("/dev/full") else {
        return;
    };
    let refused = std::io::Write::write_all(&mut full, b"x").and_then(|()| full.sync_data());
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(directory.path()).unwrap();
    journal.append(&["kept"]).unwrap();
    journal.commit().unwrap();
    journal.append(&["dropped"]).unwrap();
    let error = journal.undo(refused.unwrap_err());
    assert!(matches!(error, Error::Full { .. }), "{error}");
    journal.append(&["after"]).unwrap();
    journal.commit().unwrap();
    drop(journal);
    assert_eq!(open(directory.path()).unwrap().1, ["kept", "after"]);
}
