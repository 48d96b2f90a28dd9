//! Each bug that is planted is found within a hundred seeds.
#![allow(clippy::panic)]

use espalier_simulation::planted::{Planted, caught};

#[test]
fn every_planted_bug_is_caught_within_a_hundred_seeds() {
    for bug in Planted::ALL {
        assert!(caught(bug, 0..100).is_some(), "{bug:?} went unseen");
    }
}
