//! A few kills for every build; `make check-kill` does 300.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use espalier_chaos::kill::{Plan, run_blocking};

#[test]
fn no_acknowledged_result_is_lost_or_made_again_when_the_coordinator_is_killed() {
    let report = run_blocking(Plan { kills: 8, seed: 7 }, |_| {}).unwrap();
    assert!(report.holds(), "{report}");
}
