//! A gang that loses a rank with its agent: what is waited for, and what is not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use common::bench::{Bench, FromLoop, assigned, messages};
use espalier_coordinator::scheduler::{Lease, Needs, StagePlan, TaskPlan};
use espalier_coordinator::service::owner::{Report, Request, WorkerHandle};
use espalier_coordinator::service::{Planned, Planner, StageSnapshot};
use espalier_proto::task::FailureKind;
use espalier_proto::v1::coordinator_message::Message;

/// One task of two ranks, or of one where there are no more devices.
struct Pair;

impl Planner for Pair {
    fn plan(&self, _: &str, stages: &[StageSnapshot]) -> Result<Planned, String> {
        let task = TaskPlan {
            name: "pair".to_owned(),
            payload: "{}".into(),
            exclusive: false,
            needs: Needs {
                ranks: 2,
                ..Needs::default()
            },
        };
        let stage = StagePlan {
            name: "pair".to_owned(),
            kind: "recover".to_owned(),
            decision: None,
            note: String::new(),
            in_output: false,
            tasks: vec![task],
        };
        let is_planned = !stages.is_empty();
        Ok(Planned::Stages(if is_planned { Vec::new() } else { vec![stage] }))
    }

    fn write_report(&self, _: &str, _: &Path) -> Result<(), String> {
        Ok(())
    }
}

struct Rank {
    from: WorkerHandle,
    inbox: FromLoop,
    lease: Lease,
}

/// A gang at work on workers `a` and `b`.
fn gang(bench: &mut Bench) -> [Rank; 2] {
    let workers = ["a", "b"].map(|name| bench.greet_as(name, 1, Vec::new()));
    bench.submit("/out").unwrap();
    bench.turn(vec![Request::Tick]);
    let ranks = workers.map(|(from, mut inbox)| {
        let lease = assigned(&messages(&mut inbox)).expect("a rank was handed out");
        Rank { from, inbox, lease }
    });
    let prepared = |rank: &Rank| Request::Report {
        from: rank.from,
        lease: rank.lease,
        report: Report::Prepared("host:1".to_owned()),
    };
    bench.turn(ranks.iter().map(prepared).collect());
    ranks
}

fn tick(bench: &mut Bench, milliseconds: u64) {
    bench.wait(milliseconds);
    bench.turn(vec![Request::Tick]);
    bench.turn(vec![Request::Tick]);
}

/// The ranks of the gang that a worker was told to take part in.
fn formed(inbox: &mut FromLoop) -> Option<u32> {
    messages(inbox).into_iter().find_map(|message| match message {
        Message::Assign(assign) => assign.gang.map(|gang| gang.ranks),
        _ => None,
    })
}

#[test]
fn a_rank_that_is_gone_with_its_agent_is_not_waited_for_and_its_worker_may_come_back() {
    let mut bench = Bench::new(Pair);
    let [mut left, gone] = gang(&mut bench);
    let from = gone.from;
    bench.turn(vec![Request::Closed { from }]);
    bench.fail(left.from, left.lease, FailureKind::RankLost);
    tick(&mut bench, 1900);
    assert_eq!(formed(&mut left.inbox), None, "it may be on its way back");
    tick(&mut bench, 200);
    assert_eq!(
        formed(&mut left.inbox),
        Some(1),
        "the gang is formed of what is there"
    );
    // The agent was only cut off: it is welcome, and stops what it ran.
    let (from, mut inbox) = bench.greet_as("b", 1, vec![gone.lease]);
    let told = messages(&mut inbox);
    assert!(
        told.iter().any(|message| matches!(message, Message::Cancel(_))),
        "{told:?}"
    );
    let (lease, report) = (gone.lease, Report::Stopped);
    bench.turn(vec![Request::Report { from, lease, report }]);
    let told = messages(&mut inbox);
    assert!(matches!(told[..], [Message::Acknowledged(_)]), "{told:?}");
}

#[test]
fn a_rank_whose_worker_is_merely_silent_or_comes_back_soon_is_waited_for() {
    for is_silent in [true, false] {
        let mut bench = Bench::new(Pair);
        let [mut left, gone] = gang(&mut bench);
        bench.fail(left.from, left.lease, FailureKind::RankLost);
        if !is_silent {
            let from = gone.from;
            bench.turn(vec![Request::Closed { from }]);
            tick(&mut bench, 1000);
            bench.greet_as("b", 1, vec![gone.lease]);
        }
        tick(&mut bench, 10_000);
        assert_eq!(formed(&mut left.inbox), None);
    }
}
