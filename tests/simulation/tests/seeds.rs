//! A few seeds of the simulation, and that a seed is a run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_simulation::plan::Plan;
use espalier_simulation::run::run;
use espalier_simulation::trace::Trace;

#[test]
fn short_seeds_hold_every_invariant_and_see_snapshots_and_gangs_that_lose_ranks() {
    let (mut snapshots, mut losses_told, mut went_on, mut let_go) = (0, 0, 0, 0);
    for seed in 0..6 {
        match run(Plan::short(seed), Trace::new(None, 0)) {
            Ok(report) => {
                snapshots += report.disks.snapshots;
                losses_told += report.losses_told;
                went_on += report.went_on;
                let_go += report.let_go;
            }
            Err(violation) => panic!("seed {seed}: {violation:?}"),
        }
    }
    assert!(snapshots > 0, "no segment was closed with a snapshot");
    assert!(losses_told > 0, "no rank told that another one is gone");
    assert!(went_on > 0, "no gang went on from further than ever");
    assert!(
        let_go > 0,
        "no gang ended without a rank whose worker was cut off"
    );
}

#[test]
fn the_same_seed_is_the_same_run() {
    let hash = |seed| run(Plan::short(seed), Trace::new(None, 0)).map(|report| (report.hash, report.steps));
    let first = hash(3).expect("the run holds");
    assert_eq!(first, hash(3).expect("the run holds"));
    assert_ne!(first, hash(4).expect("the run holds"));
}
