//! What ranks write is what any others go on from.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use espalier_model::Error;
use espalier_model::train::{Checkpoint, Parts, SavedFile};

use super::*;

const HALF: usize = STEPS / 2;

/// Trains the first half of the steps on `from` and writes a checkpoint; gives where its record lies.
fn save(case: Case, from: Layers, home: &Path) -> std::path::PathBuf {
    let files: Vec<SavedFile> = local::run(from.stages * from.replicas, DEADLINE, |gang| {
        let mut trainer = joined(&gang, case, from, 700)?;
        let replica = gang.rank() % from.replicas;
        train(&mut trainer, case, 0..HALF, (replica, from.replicas));
        let writing = trainer.save_beside(home.join(format!("rank-{}", gang.rank())))?;
        // What is written is what was there when it was asked for.
        train(&mut trainer, case, 0..1, (replica, from.replicas));
        SavedFile::of(&writing.finish()?)
    })
    .unwrap();
    let record = home.join("checkpoint.json");
    let steps = u32::try_from(HALF).unwrap();
    Checkpoint { steps, files }.write(&record).unwrap();
    record
}

/// Trains the second half on `to`.
fn resume(case: Case, record: &Path, to: Layers) -> Vec<Run> {
    local::run(to.stages * to.replicas, DEADLINE, |gang| {
        let parts = Checkpoint::open(record)?;
        let grid = Grid::form(gang.as_ref(), to)?.with_bucket_elements(900);
        let stage = grid.stage();
        let range = |model| split::cut(model, to.stages, 6).unwrap()[stage].clone();
        let blocks = range(parts.architecture());
        let grid = (to.stages * to.replicas > 1).then_some(grid);
        let trainer = Trainer::resume(operations(), &parts, blocks, grid, usize::MAX)?;
        assert_eq!(trainer.steps() as usize, HALF);
        let parent = parent(case);
        let parent = StageWeights::of(&parent, range(&parent.architecture))?;
        let mut trainer = trainer.with_parent(parent)?;
        let replica = gang.rank() % to.replicas;
        Ok(train(&mut trainer, case, HALF..STEPS, (replica, to.replicas)))
    })
    .unwrap()
}

#[test]
fn a_checkpoint_of_any_ranks_and_stages_is_resumed_by_any_others() {
    let tied = Case { tied: true, ..DISTIL };
    for (case, ways) in [
        (TEXT, vec![((1, 4), (1, 1)), ((2, 2), (1, 2)), ((1, 1), (1, 4))]),
        (tied, vec![((1, 4), (1, 3)), ((3, 1), (2, 2)), ((1, 2), (3, 1))]),
    ] {
        let mut expected = alone(case);
        expected.losses.drain(..HALF);
        expected.norms.drain(..HALF);
        for (from, to) in ways {
            let home = tempfile::tempdir().unwrap();
            let record = save(case, layers(from), home.path());
            let found = resume(case, &record, layers(to));
            assert_same(case, layers(to), &found, &expected);
        }
    }
}

#[test]
fn the_same_ranks_go_on_to_the_bit() {
    for (case, way) in [(TEXT, (1, 3)), (DISTIL, (2, 2)), (TEXT, (3, 1)), (DISTIL, (1, 1))] {
        let way = layers(way);
        let home = tempfile::tempdir().unwrap();
        let record = save(case, way, home.path());
        let found = resume(case, &record, way);
        for (found, mut expected) in found.into_iter().zip(together(case, way, 900)) {
            expected.losses.drain(..HALF);
            expected.norms.drain(..HALF);
            assert!(found == expected, "{case:?}, {way:?}");
        }
    }
}

#[test]
fn a_checkpoint_that_is_not_whole_is_one_clear_error() {
    let home = tempfile::tempdir().unwrap();
    let record = save(TEXT, layers((1, 2)), home.path());
    let [first, second] = ["rank-0", "rank-1"].map(|name| home.path().join(name));
    let error = || Checkpoint::open(&record).map(drop).unwrap_err().to_string();
    let whole = std::fs::read(&second).unwrap();

    std::fs::write(&second, &whole[..whole.len() - 4]).unwrap();
    let cut = error();
    assert!(cut.contains("rank-1") && cut.contains("bytes, expected"), "{cut}");

    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(&second, &damaged).unwrap();
    let damaged = error();
    assert!(
        damaged.contains("rank-1") && damaged.contains("hash"),
        "{damaged}"
    );

    std::fs::remove_file(&second).unwrap();
    let gone = error();
    assert!(gone.contains("rank-1"), "{gone}");
    std::fs::write(&second, &whole).unwrap();

    let blocks = 0..student(TEXT).blocks.len();
    let some = Parts::open(&[&first]).unwrap();
    let missing = Trainer::resume(operations(), &some, blocks, None, 0);
    let missing = missing.unwrap_err().to_string();
    assert!(
        missing.contains("in none of the checkpoint's 1 files"),
        "{missing}"
    );

    let later = Trainer::new(operations(), &student(TEXT), 0).unwrap();
    let other = home.path().join("other");
    later.save(&other).unwrap();
    let mixed = Parts::open(&[&first, &other]).map(drop).unwrap_err().to_string();
    assert!(mixed.contains("of step 0, others are of step 10"), "{mixed}");
    let another = Model::random(&architecture(TEXT, 2, 24), 1, operations().as_ref()).unwrap();
    Trainer::new(operations(), &another, 0)
        .unwrap()
        .save(&other)
        .unwrap();
    let start = home.path().join("start");
    Trainer::new(operations(), &student(TEXT), 0)
        .unwrap()
        .save(&start)
        .unwrap();
    let mixed = Parts::open(&[&start, &other]).map(drop).unwrap_err().to_string();
    assert!(mixed.contains("another architecture"), "{mixed}");
}

/// Files that take each other's place, as in a cache with room for one: the one before is gone when the next is there.
fn one_after_the_other<'a>(
    home: &'a Path,
    names: &'a [&str],
    fetched: &'a Cell<usize>,
) -> impl Iterator<Item = Result<PathBuf, Error>> + 'a {
    let place = home.join("cached");
    names.iter().map(move |name| {
        fetched.set(fetched.get() + 1);
        let _ = std::fs::remove_file(&place);
        std::fs::copy(home.join(name), &place).unwrap();
        Ok(place.clone())
    })
}

#[test]
fn files_need_not_be_there_at_once_and_those_of_other_stages_are_not_asked_for() {
    let tied = Case { tied: true, ..DISTIL };
    let home = tempfile::tempdir().unwrap();
    let record = save(tied, layers((2, 2)), home.path());
    let all = Checkpoint::open(&record).unwrap();
    let stages = split::cut(all.architecture(), 2, 6).unwrap();
    // The first stage is of ranks 0 and 1.
    let names = ["rank-2", "rank-3", "rank-0", "rank-1"];
    let (first, second) = (names[2..].iter().chain(&names[..2]), names.iter());
    for (range, order, needed) in [
        (stages[0].clone(), first.copied().collect::<Vec<_>>(), 2),
        (stages[1].clone(), second.copied().collect(), 2),
        (0..all.architecture().blocks.len(), names.to_vec(), 4),
    ] {
        let fetched = Cell::new(0);
        let files = one_after_the_other(home.path(), &order, &fetched);
        let parts = Parts::open_for::<Error>(&range, files).unwrap();
        assert_eq!(fetched.get(), needed, "{order:?}");
        let read = |parts: &Parts| {
            let trainer = Trainer::resume(operations(), parts, range.clone(), None, 0).unwrap();
            let copy = home.path().join("copy");
            trainer.save(&copy).unwrap();
            std::fs::read(copy).unwrap()
        };
        assert!(read(&parts) == read(&all), "{order:?}");
    }
    let fetched = Cell::new(0);
    let files = one_after_the_other(home.path(), &names[..3], &fetched);
    let missing = Parts::open_for::<Error>(&stages[0], files).unwrap_err();
    assert!(
        matches!(missing, Error::MissingState { files: 3, .. }),
        "{missing}"
    );
    let none = Parts::open_for::<Error>(&stages[0], []).unwrap_err().to_string();
    assert!(none.starts_with("files of a checkpoint is 0"), "{none}");
}
