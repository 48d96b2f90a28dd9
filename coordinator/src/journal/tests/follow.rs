//! Stories of reading along.

use std::path::Path;
use std::sync::Arc;

use super::faulty::FaultyDisk;
use super::{Journal, Options, Told};
use crate::journal::{Step, Tailing};

const DIRECTORY: &str = "data/journal";

fn commit(journal: &mut Journal, numbers: std::ops::Range<usize>) {
    for number in numbers {
        journal.append(&[format!("event {number}")]).unwrap();
        journal.commit().unwrap();
    }
}

fn open(disk: &FaultyDisk) -> Journal {
    let options = Options { segment_bytes: 100 };
    Journal::open(
        Arc::new(disk.clone()),
        Path::new(DIRECTORY),
        options,
        &mut Told::default(),
    )
    .unwrap()
}

/// Reads up to a frame; gives the frames and the events in them.
fn read(tailing: &mut Tailing, up_to: u64) -> Vec<(u64, String)> {
    let mut read = Vec::new();
    while tailing.last() < up_to {
        let step = tailing.step(up_to, &mut |frame, payload| {
            let events: Vec<String> = serde_json::from_slice(payload).map_err(|error| error.to_string())?;
            read.extend(events.into_iter().map(|event| (frame, event)));
            Ok(())
        });
        assert_eq!(step.unwrap(), Step::Read);
    }
    read
}

#[test]
fn who_reads_along_sees_each_frame_once_over_segments() {
    let disk = FaultyDisk::default();
    let mut journal = open(&disk);
    let mut tailing = Tailing::after(Arc::new(disk), Path::new(DIRECTORY), 0);
    commit(&mut journal, 0..10);
    let mut all = read(&mut tailing, journal.last());
    commit(&mut journal, 10..30);
    all.extend(read(&mut tailing, 20));
    all.extend(read(&mut tailing, journal.last()));
    let truth: Vec<(u64, String)> = (1..=30)
        .map(|frame| (frame, format!("event {}", frame - 1)))
        .collect();
    assert_eq!(all, truth);
}

#[test]
fn who_comes_late_begins_in_the_middle_of_a_segment() {
    let disk = FaultyDisk::default();
    let mut journal = open(&disk);
    commit(&mut journal, 0..20);
    let mut tailing = Tailing::after(Arc::new(disk), Path::new(DIRECTORY), 7);
    let read = read(&mut tailing, journal.last());
    assert_eq!(read.first(), Some(&(8, "event 7".to_owned())));
    assert_eq!(read.len(), 13);
}

#[test]
fn who_comes_too_late_is_told_that_frames_are_gone() {
    let disk = FaultyDisk::default();
    let mut journal = open(&disk);
    let mut state = Vec::new();
    for number in 0..60 {
        commit(&mut journal, number..number + 1);
        state.push(number);
        if let Some(due) = journal.snapshot_due() {
            journal.snapshot_ended(due.take(&state));
        }
    }
    let mut tailing = Tailing::after(Arc::new(disk), Path::new(DIRECTORY), 0);
    let step = tailing.step(journal.last(), &mut |_, _| Ok(()));
    assert_eq!(step.unwrap(), Step::Gone);
}
