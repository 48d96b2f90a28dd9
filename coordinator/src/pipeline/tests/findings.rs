//! Other questions, answered from what a job found out.

use espalier_arch::{Candidate, Storage, WeightFormat};
use espalier_search::plan::{Answer, Target, answer};
use espalier_search::solver::Options;
use espalier_search::{Corrections, MemoryModel, Whole};

use super::world::*;
use crate::cost_tables::KeptTable;
use crate::pipeline::*;
use crate::spec::{JobSpec, Strategy};

/// What a plan answers to the job's own limits.
fn asked_again(findings: &Findings) -> Answer {
    let kept = KeptTable::from(findings.cost_table.clone().unwrap());
    let asked = &findings.spec.target;
    let parent = kept.parent(&findings.architecture, &asked.workload).unwrap();
    let target = Target {
        table: &kept.cost_table(),
        memory: MemoryModel::unpaged(Storage::all(WeightFormat::F32)),
        whole: parent.measurement.measured().map(|measurement| Whole {
            measurement,
            workload: &parent.workload,
        }),
        workload: asked.workload,
        limits: &asked.limits,
        extrapolate: false,
        corrections: findings.corrections.clone(),
        disturbed: kept.disturbed,
    };
    answer(&findings.known().unwrap(), &target, 4, &Options::default()).unwrap()
}

fn candidate(findings: &Findings) -> Candidate {
    asked_again(findings).chosen.unwrap().candidate
}

/// What is known once `last` has ended.
fn until(world: &mut World, spec: &JobSpec, last: Stage) -> Results {
    let (mut results, mut exported) = (Results::default(), None);
    while results.outputs(last).is_none() {
        for stage in plan(spec, &results).unwrap().stages {
            let each = stage.tasks.iter();
            let outputs = each.map(|task| world.answer(&task.spec, &mut exported)).collect();
            let result = StageResult {
                decision: stage.decision,
                finished: Some(Finished {
                    outputs,
                    seconds: 1.0,
                    ended_seconds: None,
                }),
            };
            results.stages.insert(stage.stage, result);
        }
    }
    results
}

fn biased() -> World {
    World {
        bias: 1.2,
        ..World::default()
    }
}

const CHECK: Stage = Stage::Check {
    strategy: Strategy::Heterogeneous,
    round: 1,
};

#[test]
fn a_plan_for_the_jobs_own_limits_is_the_choice_that_its_checks_accepted() {
    let mut world = biased();
    let outcome = world.run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert_eq!(world.rounds(Strategy::Heterogeneous), 2);
    let accepted = outcome.strategies.iter();
    let accepted = accepted
        .filter(|report| report.strategy == Strategy::Heterogeneous)
        .map(|report| report.candidate.clone());
    let findings = Findings::from(outcome.clone());
    assert_eq!(accepted.collect::<Vec<_>>(), [candidate(&findings)]);
    assert!((findings.corrections.decode - 1.2).abs() < 1e-9);
    let notes = asked_again(&findings).notes;
    assert!(
        notes[0].contains("time to the first token × 1.200, decode steps × 1.200, memory"),
        "{notes:?}"
    );
    // Of a job that has not ended: once the check has missed, and with its second choice.
    let spec = spec(r#"{"latency": "75%"}"#, BOTH);
    let results = until(&mut biased(), &spec, CHECK);
    assert_eq!(
        Findings::of_results(&spec, &results).unwrap().corrections,
        findings.corrections
    );
    let second = Stage::Check {
        strategy: Strategy::Heterogeneous,
        round: 2,
    };
    let results = until(&mut biased(), &spec, second);
    assert_eq!(
        candidate(&Findings::of_results(&spec, &results).unwrap()),
        candidate(&findings)
    );
    // As the table alone has it, the candidate is another one, which the check measured outside.
    let uncorrected = Findings {
        corrections: Corrections::default(),
        ..findings.clone()
    };
    assert_ne!(candidate(&uncorrected), candidate(&findings));
}

#[test]
fn results_of_a_version_that_was_content_with_the_first_choice_go_on_with_it() {
    let spec = spec(r#"{"latency": "75% at 90%"}"#, r#"["heterogeneous"]"#);
    let mut world = World {
        spread: 0.6,
        ..World::default()
    };
    let mut results = until(&mut world, &spec, Stage::Evaluate);
    let second = Stage::Check {
        strategy: Strategy::Heterogeneous,
        round: 2,
    };
    let Some(Decision::Chosen(first)) = results.decision(CHECK).cloned() else {
        panic!("the first check has a choice")
    };
    assert!(results.stages.remove(&second).is_some());
    let planned = plan(&spec, &results).unwrap();
    let stages: Vec<Stage> = planned.stages.iter().map(|stage| stage.stage).collect();
    assert_eq!(stages, [Stage::Export]);
    let findings = Findings::of_results(&spec, &results).unwrap();
    assert_eq!(findings.corrections, first.corrections);
}

#[test]
fn the_check_after_one_that_missed_says_what_that_one_found() {
    let spec = spec(r#"{"latency": "75%"}"#, r#"["heterogeneous"]"#);
    let results = until(&mut biased(), &spec, CHECK);
    let planned = plan(&spec, &results).unwrap();
    let reasons: Vec<String> = planned
        .stages
        .into_iter()
        .filter_map(|stage| stage.reason)
        .collect();
    let [reason] = &reasons[..] else {
        panic!("{reasons:?}")
    };
    let found = "the choice of check-heterogeneous-1 missed a limit (latency was ";
    assert!(reason.starts_with(found), "{reason}");
    assert!(
        reason.contains(", predicted ") && reason.contains(", the limit "),
        "{reason}"
    );
}

#[test]
fn findings_of_an_older_version_are_read_and_what_taught_nothing_is_not_written() {
    let outcome = biased().run(&spec(r#"{"latency": "75%"}"#, BOTH)).unwrap();
    assert!(!outcome.corrections.are_none());
    let mut older = serde_json::to_value(&outcome).unwrap();
    older.as_object_mut().unwrap().remove("corrections").unwrap();
    let read = Findings::of_outcome(&older.to_string()).unwrap();
    assert!(read.corrections.are_none());
    let mut written = serde_json::to_value(&read).unwrap();
    assert!(written.get("corrections").is_none());
    assert_eq!(serde_json::from_value::<Findings>(written.take()).unwrap(), read);
}

#[test]
fn a_plan_says_that_the_table_was_measured_while_others_used_the_machine() {
    let outcome = World::default()
        .run(&spec(r#"{"latency": "75%"}"#, BOTH))
        .unwrap();
    let mut findings = Findings::from(outcome);
    assert!(asked_again(&findings).notes.is_empty());
    findings.cost_table.as_mut().unwrap().profile.disturbed = true;
    let notes = asked_again(&findings).notes;
    assert!(notes[0].contains("predictions may be too high"), "{notes:?}");
}
