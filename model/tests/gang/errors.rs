//! What a rank that cannot go on costs the others, and what is refused.

use std::time::Instant;

use espalier_model::train::Parts;

use super::*;

#[test]
fn a_stage_in_the_wrong_place_is_refused_before_anything_is_exchanged() {
    let error = local::run(2, DEADLINE, |gang| {
        let grid = Grid::form(gang.as_ref(), layers((2, 1)))?;
        let stage = StageWeights::of(&student(TEXT), 0..3)?;
        Trainer::join(operations(), &stage, grid, 0).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("stage 2 of 2"), "{error}");
    let empty = StageWeights::of(&student(TEXT), 2..2).unwrap_err().to_string();
    assert!(empty.contains("the end of a stage is 2"), "{empty}");
    let error = local::run(3, DEADLINE, |gang| {
        Grid::form(gang.as_ref(), layers((2, 2))).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("ranks of a gang is 3, expected 2 stages x 2 replicas"),
        "{error}"
    );
}

#[test]
fn a_loss_that_is_not_finite_on_one_rank_leaves_every_rank_as_it_was() {
    let untied = Case { tied: false, ..TEXT };
    for (case, way) in [(TEXT, (1, 3)), (untied, (2, 2))] {
        let way = layers(way);
        let runs = local::run(way.stages * way.replicas, DEADLINE, |gang| {
            let mut trainer = joined(&gang, case, way, 700)?;
            let replica = gang.rank() % way.replicas;
            let before = weights(&trainer);
            let texts = texts(0);
            let predictions = 4 * batches(&texts, Lesson::Text)[0].predictions();
            let operations = operations();
            let values = if replica == 1 { [f32::NAN; 240] } else { [0.5; 240] };
            let (hidden, head) = (operations.upload(&values, 10, 24)?, student(case).head().clone());
            let broken = MicroBatch {
                objective: Objective::Distil {
                    hidden: &hidden,
                    head: &head,
                },
                ..batches(&texts, Lesson::Text)[0]
            };
            trainer.accumulate_all(&[broken], predictions)?;
            let error = trainer
                .update(&hyperparameters(), predictions)?
                .read()
                .unwrap_err();
            assert!(error.to_string().contains("the loss is not finite"), "{error}");
            assert!(weights(&trainer) == before);
            assert!(trainer.gradients().tensors().iter().all(|(_, gradient)| {
                let values = operations.download(gradient).unwrap();
                values.iter().all(|value| *value == 0.0)
            }));
            // AdamW counts the step that was not made.
            Ok(train(&mut trainer, case, 1..3, (replica, way.replicas)).losses)
        });
        let runs = runs.unwrap();
        assert!(runs[0].iter().all(|loss| loss.is_finite()));
        assert!(runs.iter().all(|losses| *losses == runs[0]));
    }
}

#[test]
fn a_rank_that_cannot_go_on_ends_the_others_and_is_the_one_that_is_blamed() {
    for way in [(1, 2), (2, 1)] {
        let way = layers(way);
        let error = local::run(2, DEADLINE, |gang| {
            let mut trainer = joined(&gang, TEXT, way, 700)?;
            let mut texts = texts(0);
            if gang.rank() == 1 {
                // Not even a layout: it notices before it exchanges anything.
                texts[0].0.pop();
            }
            let all = batches(&texts, Lesson::Text);
            trainer.accumulate_all(&all[..2], 100)?;
            trainer.update(&hyperparameters(), 100)?.read().map(drop)
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("expected 2 sequences of 5 tokens"),
            "{way:?}: {error}"
        );
    }
}

#[test]
fn what_would_be_wrong_without_a_word_is_refused() {
    let error = local::run(2, DEADLINE, |gang| {
        let mut trainer = joined(&gang, TEXT, layers((1, 2)), 700)?;
        let texts = texts(0);
        let all = batches(&texts, Lesson::Text);
        let alone = trainer.step(&all, &hyperparameters()).unwrap_err().to_string();
        assert!(alone.contains("Trainer::accumulate_all"), "{alone}");
        trainer.accumulate_all(&all[..1], 100)?;
        trainer.accumulate(&all[1], 100)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("an update first"), "{error}");
    let mut lonely = Trainer::new(operations(), &student(TEXT), 0).unwrap();
    let texts = texts(0);
    let error = lonely
        .accumulate(&batches(&texts, Lesson::Distil)[0], 100)
        .unwrap_err()
        .to_string();
    assert!(error.contains("Trainer::with_parent"), "{error}");
}

/// What each of two ranks says, where nobody but the library tells one of the other's end, and how long that took.
fn both(work: impl Fn(Arc<local::LocalGang>) -> Result<(), String> + Sync) -> Vec<String> {
    let (begun, work) = (Instant::now(), &work);
    let said = std::thread::scope(|scope| {
        let ranks = local::LocalGang::all(2, DEADLINE).into_iter();
        let threads: Vec<_> = ranks.map(|gang| scope.spawn(move || work(gang))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().unwrap();
        threads.into_iter().map(join).map(Result::unwrap_err).collect()
    });
    assert!(begun.elapsed() < DEADLINE / 2);
    said
}

#[test]
fn a_rank_that_cannot_even_begin_ends_the_others_by_itself() {
    let words = |error: espalier_model::Error| error.to_string();
    let home = tempfile::tempdir().unwrap();
    let whole = home.path().join("whole");
    Trainer::new(operations(), &student(TEXT), 0)
        .unwrap()
        .save(&whole)
        .unwrap();
    let parts = Parts::open(&[&whole]).unwrap();
    let shape = &student(TEXT).architecture;
    // Of another stage, and of another parent's vocabulary.
    let said = both(|gang| {
        let grid = Grid::form(gang.as_ref(), layers((1, 2))).map_err(words)?;
        let range = if gang.rank() == 1 {
            0..3
        } else {
            0..shape.blocks.len()
        };
        let stage = StageWeights::of(&student(TEXT), range).unwrap();
        Trainer::join(operations(), &stage, grid, 0)
            .map(drop)
            .map_err(words)
    });
    assert!(
        said[0].contains("aborted the gang") && said[1].contains("stage 1 of 1"),
        "{said:?}"
    );
    let said = both(|gang| {
        let grid = Grid::form(gang.as_ref(), layers((1, 2))).map_err(words)?;
        let range = if gang.rank() == 1 {
            0..3
        } else {
            0..shape.blocks.len()
        };
        Trainer::resume(operations(), &parts, range, Some(grid), 0)
            .map(drop)
            .map_err(words)
    });
    assert!(
        said[0].contains("aborted the gang") && said[1].contains("stage 1 of 1"),
        "{said:?}"
    );
    let said = both(|gang| {
        let mut trainer = joined(&gang, TEXT, layers((1, 2)), 700).map_err(words)?;
        if gang.rank() == 1 {
            // Nothing is predicted by anybody: every rank would divide by it.
            return trainer.update(&hyperparameters(), 0).map(drop).map_err(words);
        }
        trainer.update(&hyperparameters(), 100).map(drop).map_err(words)
    });
    assert!(
        said[0].contains("aborted the gang") && said[1].contains("tokens to predict"),
        "{said:?}"
    );
}

#[test]
fn a_step_that_fails_leaves_nothing_to_the_next() {
    let texts = texts(0);
    let all = batches(&texts, Lesson::Text);
    let fresh = || Trainer::new(operations(), &student(TEXT), usize::MAX).unwrap();
    let expected = fresh().step(&all, &hyperparameters()).unwrap();

    let mut trainer = fresh();
    let held = trainer.model().unwrap();
    let error = trainer.step(&all, &hyperparameters()).unwrap_err();
    assert!(matches!(error, espalier_model::Error::SharedTensor), "{error}");
    drop(held);
    assert_eq!(trainer.step(&all, &hyperparameters()).unwrap(), expected);

    let before = weights(&trainer);
    let error = trainer.step(&[], &hyperparameters()).unwrap_err().to_string();
    assert!(error.contains("tokens to predict is 0"), "{error}");
    assert!(weights(&trainer) == before);
    assert_eq!(trainer.steps(), 1);
}
