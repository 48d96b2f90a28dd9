//! In which order a stage of a pipeline works through the micro-batches of a step: one forward, one backward
//! (2006.09503, PipeDream-Flush). Arithmetic alone; what an action does is `pipeline`'s affair.
//!
//! A stage begins with as many forwards as there are stages after it, then takes turns, so that it never holds
//! the activations of more micro-batches than there are stages from it to the last.

/// What a stage does next, and with which micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Takes activations from the stage before, gives its own to the next.
    Forward(usize),
    /// Takes the gradient of its own activations from the next stage, gives that of what it was given.
    Backward(usize),
}

/// Micro-batches whose activations a stage holds at a time, at most.
pub(super) fn most_alive(stages: usize, stage: usize) -> usize {
    stages.saturating_sub(stage).max(1)
}

/// The actions of `stage`, counted from 0, over a step of `micro_batches`.
pub(super) fn actions(stages: usize, stage: usize, micro_batches: usize) -> Vec<Action> {
    let ahead = (most_alive(stages, stage) - 1).min(micro_batches);
    let mut actions: Vec<Action> = (0..ahead).map(Action::Forward).collect();
    for next in 0..micro_batches {
        if ahead + next < micro_batches {
            actions.push(Action::Forward(ahead + next));
        }
        actions.push(Action::Backward(next));
    }
    actions
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Runs all stages over channels, one a direction between neighbours, that hold `room` messages each: how
    /// many actions were left when nobody could go on.
    fn left_over(stages: usize, micro_batches: usize, room: usize) -> usize {
        let mut rest: Vec<VecDeque<Action>> = (0..stages)
            .map(|stage| actions(stages, stage, micro_batches).into())
            .collect();
        let mut down = vec![VecDeque::new(); stages];
        let mut up = vec![VecDeque::new(); stages];
        // What was computed and does not yet lie in its channel: a stage's sends keep their order, and its next
        // action goes on beside them.
        let mut unsent: Vec<[VecDeque<usize>; 2]> = vec![Default::default(); stages];
        loop {
            let mut moved = false;
            for stage in 0..stages {
                if let Some(&index) = unsent[stage][0].front()
                    && down[stage + 1].len() < room
                {
                    down[stage + 1].push_back(index);
                    unsent[stage][0].pop_front();
                    moved = true;
                }
                if let Some(&index) = unsent[stage][1].front()
                    && up[stage - 1].len() < room
                {
                    up[stage - 1].push_back(index);
                    unsent[stage][1].pop_front();
                    moved = true;
                }
                let Some(&action) = rest[stage].front() else {
                    continue;
                };
                match action {
                    Action::Forward(index) => {
                        if stage > 0 {
                            let Some(arrived) = down[stage].pop_front() else {
                                continue;
                            };
                            assert_eq!(arrived, index);
                        }
                        if stage + 1 < stages {
                            unsent[stage][0].push_back(index);
                        }
                    }
                    Action::Backward(index) => {
                        if stage + 1 < stages {
                            let Some(arrived) = up[stage].pop_front() else {
                                continue;
                            };
                            assert_eq!(arrived, index);
                        }
                        if stage > 0 {
                            unsent[stage][1].push_back(index);
                        }
                    }
                }
                rest[stage].pop_front();
                moved = true;
            }
            if !moved {
                return rest.iter().map(VecDeque::len).sum();
            }
        }
    }

    proptest! {
        #[test]
        fn each_micro_batch_goes_forward_once_and_then_back_once(
            stages in 1_usize..9, stage in 0_usize..9, micro_batches in 0_usize..40,
        ) {
            let stage = stage % stages;
            let actions = actions(stages, stage, micro_batches);
            let forward: Vec<usize> = actions.iter().filter_map(|action| match action {
                Action::Forward(index) => Some(*index),
                Action::Backward(_) => None,
            }).collect();
            prop_assert_eq!(&forward, &(0..micro_batches).collect::<Vec<_>>());
            let mut alive = 0_usize;
            let mut back = 0;
            for action in actions {
                match action {
                    Action::Forward(_) => alive += 1,
                    Action::Backward(index) => {
                        prop_assert_eq!(index, back);
                        back += 1;
                        alive = alive.checked_sub(1).expect("a backward before its forward");
                    }
                }
                prop_assert!(alive <= most_alive(stages, stage));
            }
            prop_assert_eq!((alive, back), (0, micro_batches));
        }

        #[test]
        fn no_stage_waits_for_ever_however_little_a_channel_holds(
            stages in 1_usize..9, micro_batches in 0_usize..40, room in 1_usize..4,
        ) {
            prop_assert_eq!(left_over(stages, micro_batches, room), 0);
        }
    }

    #[test]
    fn two_stages_take_turns_after_one_forward_ahead() {
        use Action::{Backward, Forward};
        assert_eq!(
            actions(2, 0, 3),
            [
                Forward(0),
                Forward(1),
                Backward(0),
                Forward(2),
                Backward(1),
                Backward(2)
            ]
        );
        assert_eq!(
            actions(2, 1, 2),
            [Forward(0), Backward(0), Forward(1), Backward(1)]
        );
    }
}
