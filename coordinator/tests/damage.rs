//! Damage to everything a data directory holds, wherever it strikes: the coordinator starts, or refuses with a
//! command that mends it; never a panic, never an event that did not happen. `make check-damage` runs the
//! whole of it, `make test` a part.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "common/past.rs"]
mod past;
#[path = "common/truth.rs"]
mod truth;

use std::fs;
use std::path::{Path, PathBuf};

use espalier_coordinator::archive::{self, Archives};
use espalier_coordinator::doctor;
use espalier_coordinator::journal::{self, Journal, Options};
use espalier_coordinator::scheduler::{Event, State};
use espalier_coordinator::tables::DIRECTORY;
use past::copy;
use truth::{Truth, broken, disk, scratch, tables_of};

/// Cases of each kind at random places.
fn random_cases() -> u64 {
    if is_whole() { 400 } else { 20 }
}

/// Whether this is the check, not the tests of every day.
fn is_whole() -> bool {
    std::env::var_os("ESPALIER_CHECK_DAMAGE").is_some()
}

#[derive(Debug, Clone, Copy)]
enum Damage {
    Truncated,
    Zeroed,
    Flipped,
}

const DAMAGES: [Damage; 3] = [Damage::Truncated, Damage::Zeroed, Damage::Flipped];

impl Damage {
    fn done_to(self, bytes: &[u8], at: usize) -> Vec<u8> {
        let mut damaged = bytes.to_vec();
        match self {
            Self::Truncated => damaged.truncate(at),
            Self::Zeroed => damaged.iter_mut().skip(at).take(64).for_each(|byte| *byte = 0),
            Self::Flipped => {
                if let Some(byte) = damaged.get_mut(at) {
                    *byte ^= 1 << (at % 8);
                }
            }
        }
        damaged
    }
}

/// xorshift (Marsaglia 2003): the same places every time.
struct Places(u64);

impl Places {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(below.max(1)).unwrap()).unwrap()
    }
}

impl Truth {
    /// Starts on a copy with this damage, mending it when the start says how. Gives the last frame that
    /// survived, and whether it had to be mended.
    fn survives(&self, file: &Path, bytes: &[u8], case: &str) -> (u64, bool) {
        let copied = scratch();
        copy(self.path(), copied.path());
        let file = copied.path().join(file.strip_prefix(self.path()).unwrap());
        fs::write(&file, bytes).unwrap();
        let mut is_mended = false;
        let mut state = State::default();
        let journal = start(copied.path(), &mut state).unwrap_or_else(|error| {
            let remedy = format!("espalier doctor repair --data-dir {}", copied.path().display());
            assert!(error.to_string().contains(&remedy), "{case}: {error}");
            let report = doctor::repair(copied.path()).unwrap();
            assert!(report.starts, "{case}: {report:?}");
            assert!(report.copies.is_some_and(|copies| copies.is_dir()), "{case}");
            is_mended = true;
            state = State::default();
            start(copied.path(), &mut state).unwrap_or_else(|error| panic!("{case}: mended, but {error}"))
        });
        assert_eq!(
            state,
            self.state_after(journal.last()),
            "{case}: not what happened"
        );
        goes_on(journal, copied.path(), &state, case);
        (journal_last(copied.path()), is_mended)
    }
}

fn start(data_dir: &Path, state: &mut State) -> Result<Journal, journal::Error> {
    Journal::open(disk(), &data_dir.join("journal"), Options::default(), state)
}

/// Something can be appended after whatever happened, and is there after the next start.
fn goes_on(mut journal: Journal, data_dir: &Path, state: &State, case: &str) {
    let term = state.term().next();
    journal.append(&[Event::TermBegan { term }]).unwrap();
    journal.commit().unwrap();
    drop(journal);
    let mut again = State::default();
    start(data_dir, &mut again).unwrap_or_else(|error| panic!("{case}: it does not go on: {error}"));
    assert_eq!(again.term(), term, "{case}");
}

/// The last frame before the one that [`goes_on`] wrote.
fn journal_last(data_dir: &Path) -> u64 {
    start(data_dir, &mut State::default()).unwrap().last() - 1
}

/// Where each frame of a segment begins, and where the last ends.
fn frame_places(segment: &[u8]) -> Vec<usize> {
    let mut places = vec![0];
    let mut at = 0;
    while let Some(length) = segment.get(at..at + 4) {
        at += 24 + usize::try_from(u32::from_le_bytes(length.try_into().unwrap())).unwrap();
        places.push(at);
    }
    places
}

fn report(what: &str, cases: usize, mended: usize) {
    println!("damage: {what}: {cases} cases, {mended} refused and mended");
}

#[test]
fn one_zeroed_block_never_stops_a_start_without_a_remedy() {
    let truth = Truth::build(1 << 20, |past| {
        past.job(40, 30);
    });
    let segment = truth.files("journal-").pop().unwrap();
    let bytes = fs::read(&segment).unwrap();
    let frames = frame_places(&bytes);
    assert_eq!(frames.len() - 1, usize::try_from(truth.last).unwrap());
    let begin = frames[frames.len() - 3];
    let step = if is_whole() { 1 } else { 17 };
    let (mut cases, mut mended) = (0, 0);
    for at in (begin..bytes.len()).step_by(step) {
        for damage in DAMAGES {
            let case = format!("{damage:?} at {at} of {}", bytes.len());
            let (survived, was_mended) = truth.survives(&segment, &damage.done_to(&bytes, at), &case);
            let whole = frames.iter().skip(1).filter(|end| **end <= at).count();
            assert!(
                survived >= u64::try_from(whole).unwrap(),
                "{case}: too much was cut"
            );
            cases += 1;
            mended += usize::from(was_mended);
        }
    }
    report("every offset of the last two frames", cases, mended);
    let small = Truth::build(2 << 10, |past| {
        past.job(40, 30);
    });
    let (mut cases, mut mended, mut places) = (0, 0, Places(0x2545_f491_4f6c_dd1d));
    for _ in 0..random_cases() {
        for truth in [&truth, &small] {
            let files = truth.files("journal-");
            let file = &files[places.next(files.len())];
            let bytes = fs::read(file).unwrap();
            for damage in DAMAGES {
                let at = places.next(bytes.len());
                let case = format!("{damage:?} at {at} of {}", file.display());
                mended += usize::from(truth.survives(file, &damage.done_to(&bytes, at), &case).1);
                cases += 1;
            }
        }
    }
    assert!(mended > 0);
    report("random places of the journal", cases, mended);
}

#[test]
fn a_damaged_snapshot_costs_nothing_while_another_is_sound() {
    let truth = Truth::build(2 << 10, |past| {
        past.job(60, 50);
    });
    let snapshots = truth.files("snapshot-");
    assert_eq!(snapshots.len(), 2);
    let (mut cases, mut places) = (0, Places(0x9e37_79b9_7f4a_7c15));
    for snapshot in &snapshots {
        let bytes = fs::read(snapshot).unwrap();
        for _ in 0..random_cases() {
            for damage in DAMAGES {
                let at = places.next(bytes.len());
                let case = format!("{damage:?} at {at} of {}", snapshot.display());
                let (survived, _) = truth.survives(snapshot, &damage.done_to(&bytes, at), &case);
                assert_eq!(survived, truth.last, "{case}");
                cases += 1;
            }
        }
    }
    report("one snapshot", cases, 0);
}

#[test]
fn when_no_snapshot_is_sound_the_remedy_still_leads_to_a_start() {
    let truth = Truth::build(2 << 10, |past| {
        past.job(60, 50);
    });
    let snapshots = truth.files("snapshot-");
    for snapshot in &snapshots {
        fs::write(snapshot, b"nothing of use").unwrap();
    }
    let error = start(truth.path(), &mut State::default()).unwrap_err();
    assert!(error.to_string().contains("espalier doctor repair"), "{error}");
    let report = doctor::repair(truth.path()).unwrap();
    assert!(report.starts, "{report:?}");
    let kept = fs::read_dir(report.copies.unwrap()).unwrap().count();
    assert!(kept > snapshots.len(), "{kept} files were kept");
    start(truth.path(), &mut State::default()).unwrap();
}

#[test]
fn events_come_out_of_a_damaged_journal_up_to_the_damage() {
    let truth = Truth::build(1 << 20, |past| {
        past.job(5, 5);
    });
    let segment = truth.files("journal-").pop().unwrap();
    let mut bytes = fs::read(&segment).unwrap();
    let frames = frame_places(&bytes);
    let middle = frames.len() / 2;
    bytes[frames[middle] + 30] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let mut out = Vec::new();
    let exported = doctor::export(truth.path(), &mut out).unwrap();
    let lines = String::from_utf8(out).unwrap();
    let survived = u64::try_from(middle).unwrap();
    let expected = truth.told.iter().filter(|(frame, _)| *frame <= survived).count();
    assert_eq!(lines.lines().count(), expected);
    assert_eq!(exported.last_frame, survived);
    assert!(exported.damage.is_some());
    assert!(
        lines.starts_with("{\"frame\":1,\"event\":{\"event\":\"term_began\""),
        "{lines}"
    );
}

#[test]
fn a_directory_in_use_is_left_alone() {
    let truth = Truth::build(1 << 20, |_| {});
    let lock = fs::File::create(truth.path().join("lock")).unwrap();
    lock.lock().unwrap();
    for looked_at in [doctor::check(truth.path()), doctor::repair(truth.path())] {
        let error = looked_at.unwrap_err().to_string();
        assert!(error.contains("in use by another coordinator"), "{error}");
    }
}

#[test]
fn a_damaged_archive_is_reported_wherever_it_is_damaged() {
    let truth = Truth::build(1 << 20, |past| {
        let job = past.job(20, 20);
        past.end(job);
        past.archive(job);
    });
    let archives = Archives::new(disk(), truth.path());
    let job = archives.jobs().unwrap().pop().unwrap();
    let sound = archives.read(job).unwrap();
    assert_eq!(sound.state.tasks().count(), 20);
    assert_eq!(sound.state.job(job).unwrap().stages.len(), 1);
    let path = archives.path(job);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        for damage in DAMAGES {
            let damaged = damage.done_to(&bytes, at);
            if damaged == bytes {
                continue;
            }
            fs::write(&path, damaged).unwrap();
            let error = archives.read(job).unwrap_err();
            assert!(
                matches!(error, archive::Error::Damaged { .. }),
                "{damage:?} at {at}: {error}"
            );
        }
    }
    assert!(doctor::check(truth.path()).unwrap().starts);
}

#[test]
fn archives_that_are_missing_or_that_the_journal_does_not_know_are_found() {
    let truth = Truth::build(1 << 20, |past| {
        for _ in 0..3 {
            let job = past.job(2, 2);
            past.end(job);
            past.archive(job);
        }
    });
    let archive = |job: u64| truth.path().join(format!("archive/job-{job}.archive"));
    let found = |path: &Path| {
        let report = doctor::check(truth.path()).unwrap();
        assert!(report.starts, "{report:?}");
        let mut findings = report.findings.into_iter();
        findings
            .find(|finding| finding.path == path)
            .map(|finding| finding.problem)
    };
    assert_eq!(found(&archive(2)), None);
    fs::rename(archive(2), archive(9)).unwrap();
    assert!(found(&archive(2)).unwrap().starts_with("is missing: restore it"));
    assert!(found(&archive(9)).unwrap().contains("after job-3"));
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

#[test]
fn a_broken_table_store_is_set_aside_and_rebuilt() {
    let truth = Truth::build(1 << 20, |past| {
        let job = past.job(20, 20);
        past.end(job);
        past.archive(job);
        past.job(200, 150);
    });
    let expected = tables_of(truth.path(), truth.last);
    assert!(expected.len() > 300, "{} rows", expected.len());
    let tables = truth.path().join(DIRECTORY);
    let (mut cases, mut set_aside, mut places) = (0, 0, Places(0xd1b5_4a32_d192_ed03));
    for file in files_below(&tables) {
        let bytes = fs::read(&file).unwrap();
        for _ in 0..random_cases().div_ceil(10) {
            for damage in DAMAGES {
                let at = places.next(bytes.len());
                let copied = scratch();
                copy(truth.path(), copied.path());
                let damaged = copied.path().join(file.strip_prefix(truth.path()).unwrap());
                fs::write(&damaged, damage.done_to(&bytes, at)).unwrap();
                let rebuilt = tables_of(copied.path(), truth.last);
                assert!(rebuilt == expected, "{damage:?} at {at} of {}", file.display());
                cases += 1;
                set_aside += usize::from(broken(copied.path()) > 0);
            }
        }
    }
    assert!(set_aside > 0);
    println!("damage: tables: {cases} cases, {set_aside} set aside, every one whole again");
}
