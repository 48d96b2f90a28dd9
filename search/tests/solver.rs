//! The solver against brute force, and what it says where nothing fits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use espalier_search::solver::{Item, Options, Problem, Solved, solve, top};
use proptest::prelude::*;

const EXACT: Options = Options {
    relative_gap: 0.0,
    work: 50_000_000,
};

/// Few distinct values, so that ties and limits met exactly are common.
fn problems() -> impl Strategy<Value = Problem> {
    (1_usize..4).prop_flat_map(|limits| {
        let item = (0_i32..12, prop::collection::vec(0_i32..9, limits)).prop_map(|(cost, uses)| Item {
            cost: f64::from(cost),
            uses: uses.into_iter().map(f64::from).collect(),
        });
        let groups = prop::collection::vec(prop::collection::vec(item, 1..6), 1..6);
        (groups, prop::collection::vec(0_i32..30, limits)).prop_map(|(groups, limits)| Problem {
            groups,
            limits: limits.into_iter().map(f64::from).collect(),
        })
    })
}

/// Every choice inside the limits with its cost.
fn brute_force(problem: &Problem) -> Vec<(f64, Vec<usize>)> {
    let mut choices: Vec<Vec<usize>> = vec![vec![]];
    for group in &problem.groups {
        choices = choices
            .into_iter()
            .flat_map(|choice| (0..group.len()).map(move |item| [choice.clone(), vec![item]].concat()))
            .collect();
    }
    choices
        .into_iter()
        .filter_map(|choice| {
            let (cost, uses) = problem.totals(&choice);
            uses.iter()
                .zip(&problem.limits)
                .all(|(amount, limit)| amount <= limit)
                .then_some((cost, choice))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_solver_equals_brute_force(problem in problems()) {
        let best = brute_force(&problem).into_iter().map(|(cost, _)| cost).min_by(f64::total_cmp);
        match (solve(&problem, &EXACT).unwrap(), best) {
            (Solved::Found(solution), Some(best)) => {
                prop_assert!((solution.cost - best).abs() < 1e-9, "{} instead of {best}", solution.cost);
                prop_assert!(solution.gap < 1e-9, "gap {}", solution.gap);
                let (cost, uses) = problem.totals(&solution.chosen);
                prop_assert_eq!(cost, solution.cost);
                prop_assert!(uses.iter().zip(&problem.limits).all(|(amount, limit)| amount <= limit));
            }
            (Solved::Infeasible(reach), None) => {
                prop_assert!(reach.proven);
                let (_, uses) = problem.totals(&reach.closest);
                prop_assert_eq!(uses, reach.closest_uses);
            }
            (found, best) => prop_assert!(false, "{found:?} where brute force says {best:?}"),
        }
    }

    #[test]
    fn a_search_cut_short_never_claims_more_than_is_so(problem in problems(), work in 0_u64..400) {
        let best = brute_force(&problem).into_iter().map(|(cost, _)| cost).min_by(f64::total_cmp);
        match (solve(&problem, &Options { work, ..EXACT }).unwrap(), best) {
            (Solved::Found(solution), Some(best)) => {
                prop_assert!(solution.cost >= best - 1e-9, "{} below {best}", solution.cost);
                prop_assert!(solution.lower_bound <= best + 1e-9, "bound {} above {best}", solution.lower_bound);
            }
            (Solved::Infeasible(reach), best) => prop_assert!(best.is_none() || !reach.proven),
            (Solved::Found(solution), None) => prop_assert!(false, "{solution:?} where nothing fits"),
        }
    }

    #[test]
    fn each_of_the_best_few_is_the_best_that_differs_from_those_before(problem in problems()) {
        let all = brute_force(&problem);
        let found = top(&problem, 3, 2, &EXACT).unwrap();
        let mut earlier: Vec<Vec<usize>> = Vec::new();
        for solution in &found {
            let differs = |choice: &[usize]| earlier.iter().all(|other| {
                choice.iter().zip(other).filter(|(a, b)| a != b).count() >= 2
            });
            let best = all.iter().filter(|(_, choice)| differs(choice)).map(|(cost, _)| *cost).min_by(f64::total_cmp);
            prop_assert!(differs(&solution.chosen));
            prop_assert!((solution.cost - best.unwrap()).abs() < 1e-9);
            earlier.push(solution.chosen.clone());
        }
    }
}

#[test]
fn an_impossible_limit_is_answered_with_the_least_that_can_be_used() {
    let item = |cost, a, b| Item {
        cost,
        uses: vec![a, b],
    };
    let group = vec![item(0.0, 5.0, 1.0), item(1.0, 2.0, 4.0)];
    let problem = Problem {
        groups: vec![group.clone(), group],
        limits: vec![5.0, 3.0],
    };
    let Solved::Infeasible(reach) = solve(&problem, &EXACT).unwrap() else {
        panic!("nothing fits both")
    };
    assert_eq!(reach.least, [4.0, 2.0]);
    assert!(reach.proven);
}

#[test]
fn the_same_problem_gives_the_same_answer() {
    let mut state = 7_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        f64::from(u32::try_from(state >> 40).unwrap())
    };
    let groups = (0..20)
        .map(|_| {
            (0..8)
                .map(|_| Item {
                    cost: next(),
                    uses: vec![next(), next()],
                })
                .collect::<Vec<_>>()
        })
        .collect();
    let problem = Problem {
        groups,
        limits: vec![100e6, 110e6],
    };
    let options = Options::default();
    assert_eq!(
        solve(&problem, &options).unwrap(),
        solve(&problem, &options).unwrap()
    );
}

#[test]
fn a_malformed_problem_is_refused_by_name() {
    let problem = Problem {
        groups: vec![vec![Item {
            cost: f64::NAN,
            uses: vec![1.0],
        }]],
        limits: vec![1.0],
    };
    assert!(
        solve(&problem, &EXACT)
            .unwrap_err()
            .to_string()
            .contains("item 0 of group 0")
    );
    let problem = Problem {
        groups: vec![vec![]],
        limits: vec![],
    };
    assert!(
        solve(&problem, &EXACT)
            .unwrap_err()
            .to_string()
            .contains("group 0 is empty")
    );
}
