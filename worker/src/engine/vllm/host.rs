//! What the host needs for a step, from models timed by the clock and by the device.
//!
//! The host schedules a step, launches its blocks and takes its tokens while the device computes; what it cannot do
//! meanwhile, the device waits for. With n blocks a step takes
//!
//! > max(device + alone, floor + block · n)
//!
//! by the clock. Models that are bound by the host tell floor and block, the others alone, by least squares; which are
//! which is told by trying: in the order of the device's share of the clock's time, the split that leaves the least error.

use crate::engine::fit::{Cost, Equation, solve};

/// Of a time by the clock, beside its scatter, as a share: what differs between engines for no reason that is known.
const SYSTEMATIC: f64 = 0.02;

/// A model at one point, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    /// Blocks that it has.
    pub blocks: f64,
    pub device: f64,
    /// By the clock.
    pub wall: f64,
    /// Standard error of that.
    pub error: f64,
}

/// The host's time of any model's step at that point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Host {
    /// Of a step without blocks.
    pub floor: Cost,
    /// Of each block.
    pub block: Cost,
    /// What the device waits for.
    pub alone: Cost,
}

impl Host {
    /// The law under which the steps' times come out best; none for no steps.
    pub fn of(steps: &[Step]) -> Option<Self> {
        let mut steps = steps.to_vec();
        steps.sort_by(|one, other| (one.device / one.wall).total_cmp(&(other.device / other.wall)));
        let splits = (1..=steps.len()).rev().filter_map(|bound| {
            let (by_host, by_device) = steps.split_at_checked(bound)?;
            let host = Self::split(by_host, by_device)?;
            let squares = steps
                .iter()
                .map(|step| ((host.wall(step.blocks, step.device) - step.wall) / error(step)).powi(2));
            Some((squares.sum::<f64>(), host))
        });
        // Of equals the first, with the most models bound by the host.
        let best = splits.min_by(|(one, _), (other, _)| one.total_cmp(other));
        best.map(|(_, host)| host)
    }

    fn split(by_host: &[Step], by_device: &[Step]) -> Option<Self> {
        let none = Cost {
            value: 0.0,
            error: 0.0,
        };
        let waits = by_device.iter().map(|step| Equation {
            counts: vec![1.0],
            time: step.wall - step.device,
            error: error(step),
        });
        let alone = solve(&waits.collect::<Vec<_>>()).and_then(|costs| costs.first().copied());
        let with = |counts: fn(&Step) -> Vec<f64>| {
            let equations = by_host.iter().map(|step| Equation {
                counts: counts(step),
                time: step.wall,
                error: error(step),
            });
            solve(&equations.collect::<Vec<_>>())
        };
        let both = with(|step| vec![1.0, step.blocks]);
        let (floor, block) = match both.as_deref() {
            Some([floor, block]) if floor.value > 0.0 && block.value > 0.0 => (*floor, *block),
            // Each by itself where together one would be below nothing, or where the models are all of one depth.
            Some([floor, _]) if floor.value <= 0.0 => (none, *with(|step| vec![step.blocks])?.first()?),
            _ => (*with(|_| vec![1.0])?.first()?, none),
        };
        Some(Self {
            floor,
            block,
            alone: alone.unwrap_or(none),
        })
    }

    /// The time of a step by the clock.
    pub fn wall(&self, blocks: f64, device: f64) -> f64 {
        (device + self.alone.value).max(self.floor.value + self.block.value * blocks)
    }
}

fn error(step: &Step) -> f64 {
    step.error
        .hypot(SYSTEMATIC * step.wall)
        .max(f64::MIN_POSITIVE.sqrt())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde::Deserialize;

    use super::*;
    use espalier_search::statistics::median;

    fn planted(floor: f64, block: f64, alone: f64) -> Vec<Step> {
        let models = [
            (4.0, 0.4),
            (12.0, 1.1),
            (5.0, 2.5),
            (13.0, 7.4),
            (4.0, 0.2),
            (60.0, 9.0),
        ];
        let step = |(blocks, device): (f64, f64)| Step {
            blocks,
            device,
            wall: (device + alone).max(floor + block * blocks),
            error: 0.01,
        };
        models.map(step).to_vec()
    }

    #[test]
    fn a_planted_law_comes_out_whichever_of_both_binds() {
        for (floor, block, alone) in [
            (2.0, 0.1, 1.5),
            (0.5, 0.02, 0.4),
            (30.0, 0.5, 0.0),
            (3.0, 0.0, 3.0),
        ] {
            let steps = planted(floor, block, alone);
            let host = Host::of(&steps).unwrap();
            for step in &steps {
                let found = host.wall(step.blocks, step.device);
                assert!(
                    (found - step.wall).abs() < 1e-6,
                    "{host:?} gives {found} at {step:?}"
                );
            }
            let unseen = host.wall(30.0, 5.0);
            let expected = (5.0 + alone).max(floor + block * 30.0);
            assert!(
                (unseen - expected).abs() < 1e-6,
                "{host:?} gives {unseen} for {expected}"
            );
        }
    }

    #[test]
    fn a_host_that_needs_less_for_deeper_models_is_one_whose_blocks_cost_nothing() {
        let walls = [(4.0, 2.1), (8.0, 2.0), (12.0, 1.9)];
        let steps = walls.map(|(blocks, wall)| Step {
            blocks,
            device: 0.1,
            wall,
            error: 0.0,
        });
        let host = Host::of(&steps).unwrap();
        assert_eq!(host.block.value, 0.0);
        assert!((host.floor.value - 2.0).abs() < 0.01, "{host:?}");
        let [step, _, _] = steps;
        assert_eq!(Host::of(&[step]).unwrap().floor.value, 2.1);
        assert_eq!(Host::of(&[]), None);
    }

    #[derive(Deserialize)]
    struct Recorded {
        points: Vec<RecordedPoint>,
    }

    #[derive(Deserialize)]
    struct RecordedPoint {
        point: String,
        hidden: usize,
        stacks: Vec<RecordedStep>,
        unseen: Vec<RecordedStep>,
    }

    #[derive(Deserialize)]
    struct RecordedStep {
        blocks: f64,
        device_ms: f64,
        wall_ms: f64,
    }

    /// Steps of vLLM 0.26 on an H200 (the file says how they were taken). Its engine was synchronous, and engines of
    /// six processes differ by up to half at the same work, so that no law comes near: the old one, which took the
    /// shortest stack for the floor of all, is left behind all the same.
    #[test]
    fn recorded_steps_of_whole_models_are_nearer_than_by_the_shortest_stacks_floor() {
        let recorded: Recorded = serde_json::from_str(include_str!("recorded-h200.json")).unwrap();
        let (mut old, mut new) = (Vec::new(), Vec::new());
        for point in &recorded.points {
            let steps: Vec<Step> = point.stacks.iter().map(step).collect();
            let host = Host::of(&steps).unwrap();
            let shortest = steps.iter().map(|step| step.wall).fold(f64::INFINITY, f64::min);
            for unseen in point.unseen.iter().map(step) {
                let before = unseen.device.max(shortest) / unseen.wall - 1.0;
                let now = host.wall(unseen.blocks, unseen.device) / unseen.wall - 1.0;
                eprintln!(
                    "hidden {}, {}, {} blocks: {:+.0}%, before {:+.0}%",
                    point.hidden,
                    point.point,
                    unseen.blocks,
                    100.0 * now,
                    100.0 * before
                );
                old.push(before.abs());
                new.push(now.abs());
            }
        }
        assert_eq!(new.len(), 14);
        assert!(median(&new) < 0.2, "{new:?}");
        assert!(median(&new) < 0.5 * median(&old), "{new:?} instead of {old:?}");
        let nearer = new.iter().zip(&old).filter(|(new, old)| new < old).count();
        assert_eq!(nearer, 14);
    }

    fn step(recorded: &RecordedStep) -> Step {
        Step {
            blocks: recorded.blocks,
            device: recorded.device_ms,
            wall: recorded.wall_ms,
            error: 0.0,
        }
    }
}
