//! Stories of snapshots.

use std::path::Path;
use std::sync::Arc;

use super::faulty::FaultyDisk;
use super::{Error, Journal, Options, Told};
use crate::journal::disk::Disk;

const DIRECTORY: &str = "data/journal";
const SMALL: Options = Options { segment_bytes: 60 };

/// A journal and the state that it leads to.
struct Story {
    journal: Journal,
    state: Vec<String>,
    /// How many events were read after the snapshot.
    replayed: usize,
}

impl Story {
    fn open(disk: &FaultyDisk) -> Result<Self, Error> {
        let mut told = Told::default();
        let disk = Arc::new(disk.clone());
        let journal = Journal::open(disk, Path::new(DIRECTORY), SMALL, &mut told)?;
        Ok(Self {
            journal,
            replayed: told.after.len(),
            state: told.all(),
        })
    }

    /// Commits one event, and takes a snapshot when one is due.
    fn tell(&mut self, event: String) {
        self.journal.append(std::slice::from_ref(&event)).unwrap();
        self.journal.commit().unwrap();
        self.state.push(event);
        if let Some(due) = self.journal.snapshot_due() {
            self.journal.snapshot_ended(due.take(&self.state));
        }
    }
}

fn told(disk: &FaultyDisk, events: usize) -> Vec<String> {
    let mut story = Story::open(disk).unwrap();
    for number in 0..events {
        story.tell(format!("event {number}"));
    }
    story.state
}

fn named(disk: &FaultyDisk, part: &str) -> Vec<std::path::PathBuf> {
    let mut paths = disk.paths();
    paths.retain(|path| path.to_string_lossy().contains(part));
    paths
}

#[test]
fn a_start_reads_the_newest_snapshot_and_what_came_after() {
    let disk = FaultyDisk::default();
    let truth = told(&disk, 100);
    let story = Story::open(&disk).unwrap();
    assert_eq!(story.state, truth);
    assert!(story.replayed < 50, "{}", story.replayed);
}

#[test]
fn two_snapshots_are_kept_and_the_segments_back_to_the_older() {
    let disk = FaultyDisk::default();
    told(&disk, 400);
    let snapshots = named(&disk, "snapshot-");
    assert_eq!(snapshots.len(), 2, "{snapshots:?}");
    let segments = named(&disk, "journal-");
    let older = snapshots[0].to_string_lossy().replace("snapshot-", "");
    let first = segments[0].to_string_lossy().replace("journal-", "");
    assert!(first > older, "{first} is needed by no snapshot");
    assert!(segments.len() > 1);
}

#[test]
fn a_damaged_snapshot_gives_way_to_the_one_before_wherever_it_is_damaged() {
    let disk = FaultyDisk::default();
    let truth = told(&disk, 200);
    let newest = named(&disk, "snapshot-").pop().unwrap();
    let bytes = disk.read(&newest).unwrap();
    for at in 0..bytes.len() {
        let damaged = disk.after_power_cut(0, false);
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        damaged.overwrite(&newest, &flipped);
        let story = Story::open(&damaged).unwrap();
        assert_eq!(story.state, truth, "flipped at {at}");
        assert_eq!(named(&damaged, "damaged-").len(), 1);
        damaged.overwrite(&named(&damaged, "damaged-")[0], &bytes[..at]);
        assert_eq!(Story::open(&damaged).unwrap().state, truth);
    }
}

#[test]
fn without_any_snapshot_and_the_first_segments_a_start_is_refused_with_the_remedy() {
    let disk = FaultyDisk::default();
    told(&disk, 400);
    for path in named(&disk, "snapshot-") {
        disk.overwrite(&path, b"nothing of use");
    }
    let Err(error) = Story::open(&disk) else {
        panic!("the journal was opened")
    };
    assert!(matches!(error, Error::NoBase { .. }), "{error}");
    assert!(
        error
            .to_string()
            .contains("espalier doctor repair --data-dir data"),
        "{error}"
    );
}

#[test]
fn a_snapshot_of_a_newer_build_is_refused_by_its_number() {
    let disk = FaultyDisk::default();
    told(&disk, 100);
    let newest = named(&disk, "snapshot-").pop().unwrap();
    let mut bytes = disk.read(&newest).unwrap();
    bytes[8] = 7;
    let checksum = crc32c::crc32c(&bytes[..32]);
    bytes[32..36].copy_from_slice(&checksum.to_le_bytes());
    disk.overwrite(&newest, &bytes);
    assert!(matches!(Story::open(&disk), Err(Error::TooNew { found: 7, .. })));
}

#[test]
fn a_journal_that_ends_before_its_snapshot_goes_on_after_it() {
    let disk = FaultyDisk::default();
    let truth = told(&disk, 200);
    let newest = named(&disk, "snapshot-").pop().unwrap();
    let state: Vec<String> = {
        let story = Story::open(&disk).unwrap();
        story.state[..story.state.len() - story.replayed].to_vec()
    };
    for path in named(&disk, "journal-") {
        disk.remove(&path).unwrap();
    }
    let mut story = Story::open(&disk).unwrap();
    assert_eq!(story.state, state, "{}", newest.display());
    story.tell("and on".to_owned());
    let mut expected = state;
    expected.push("and on".to_owned());
    assert_eq!(Story::open(&disk).unwrap().state, expected);
    assert!(truth.len() >= expected.len() - 1);
}

#[test]
fn a_crash_at_any_write_of_a_snapshot_loses_nothing() {
    let undisturbed = FaultyDisk::default();
    told(&undisturbed, 60);
    let opened = undisturbed.writes();
    for crash in 1..=opened {
        let disk = FaultyDisk::default();
        disk.crash_at(crash);
        let mut acknowledged = 0;
        if let Ok(mut story) = Story::open(&disk) {
            for number in 0..60 {
                let event = format!("event {number}");
                story.journal.append(std::slice::from_ref(&event)).unwrap();
                if story.journal.commit().is_err() {
                    break;
                }
                acknowledged += 1;
                story.state.push(event);
                if let Some(due) = story.journal.snapshot_due() {
                    story.journal.snapshot_ended(due.take(&story.state));
                }
            }
        }
        for kept in [0, 25] {
            let found = disk.after_power_cut(kept, kept > 0);
            let story = Story::open(&found).unwrap();
            assert!(
                story.state.len() >= acknowledged,
                "write {crash}: {:?}",
                story.state
            );
            let truth = (0..60).map(|number| format!("event {number}"));
            assert!(
                truth.zip(&story.state).all(|(truth, event)| truth == *event),
                "write {crash}"
            );
            assert!(named(&found, ".partial").is_empty());
        }
    }
}
