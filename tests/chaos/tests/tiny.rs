//! The tiny job under a few kills for every build; `make check-chaos` upsets it in every way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_chaos::upset::{Upset, run};

#[test]
fn the_checkpoint_is_the_same_to_the_bit_though_a_worker_is_killed_at_every_stage() {
    let specs = tempfile::tempdir().unwrap();
    let truth = run(Upset::Nothing, specs.path()).unwrap();
    let outcome = run(Upset::WorkerKilled, specs.path()).unwrap();
    assert!(outcome.faults >= 5, "{} faults", outcome.faults);
    assert_eq!(outcome.spared, [""; 0]);
    assert_eq!(outcome.checkpoint, truth.checkpoint);
}
