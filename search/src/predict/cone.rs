//! Limits as sums over blocks and base, with the reach of their errors.
//!
//! A time that a limit is over is a sum of parts: the first token, the later ones, the turnover. Each is the device's or
//! the host's, whichever takes longer, so a limit holds where it holds for every combination of the two. One combination
//! is a [`Cone`]:
//!
//! > Σ values + z · ‖Σ errors‖ ≤ bound,
//!
//! where the errors of a block are a vector with one coordinate for each source and part: errors of one source add,
//! different ones add in quadrature, as in [`CostModel::predict`]. In the choice of blocks that is a second-order
//! cone. With the unit vector u along the errors of any choice, Σ (values + z · u·errors) ≤ bound holds wherever the cone
//! does (u·a ≤ ‖a‖), and fails at that choice if the cone fails there.

use espalier_arch::{Architecture, BlockShape};

use super::model::{CostModel, Costs, parameters};
use super::sampled::{Sampled, Source};
use super::timed::Timed;
use crate::{AbsoluteLimit, Metric, Result};

/// What one block or the base adds to every sum.
#[derive(Debug, Clone, Default)]
pub(crate) struct Priced {
    pub(crate) costs: Costs,
    device: Timed,
    host: Timed,
}

/// Whose time a part is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Side {
    Device,
    Host,
}

/// One part of a sum.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    First(Side),
    Decode(Side),
    Steady(Side),
    Joined(Side),
    /// What has no error.
    Counted(Metric),
}

impl Part {
    fn of(self, priced: &Priced) -> Option<&Sampled> {
        let of = |side| match side {
            Side::Device => &priced.device,
            Side::Host => &priced.host,
        };
        match self {
            Self::First(side) => Some(&of(side).first),
            Self::Decode(side) => Some(&of(side).decode),
            Self::Steady(side) => Some(&of(side).steady),
            Self::Joined(side) => Some(&of(side).joined),
            Self::Counted(_) => None,
        }
    }

    /// Parts that share errors of one source, as in [`CostModel::predict`], have the same place.
    fn place(self) -> usize {
        match self {
            Self::First(_) => 0,
            Self::Decode(_) => 1,
            Self::Steady(_) | Self::Joined(_) => 2,
            Self::Counted(_) => 3,
        }
    }
}

/// A part, once it is known whose time it is.
type OfSide = fn(Side) -> Part;

/// Where an error stands in the vector: in which of the cone's parts, and where it comes from.
pub(crate) type Coordinate = (usize, Source);

/// What one block or the base adds to a cone.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Share {
    pub(crate) value: f64,
    /// Each coordinate at most once.
    pub(crate) errors: Vec<(Coordinate, f64)>,
}

impl Share {
    fn add_error(&mut self, coordinate: Coordinate, error: f64) {
        match self.errors.iter_mut().find(|(known, _)| *known == coordinate) {
            Some((_, sum)) => *sum += error,
            None => self.errors.push((coordinate, error)),
        }
    }
}

/// One combination of parts that a limit has to hold for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cone {
    /// Each with its factor.
    parts: Vec<(Part, f64)>,
    /// Standard errors to stay clear of the bound, z.
    pub(crate) deviations: f64,
    /// In the unit of the sum: milliseconds, bytes, parameters.
    pub(crate) bound: f64,
}

impl Cone {
    /// What `priced` adds. Errors are left out where the cone does not ask for them.
    pub(crate) fn share(&self, priced: &Priced) -> Share {
        let mut share = Share::default();
        for (part, factor) in &self.parts {
            match part {
                Part::Counted(metric) => share.value += priced.costs.get(*metric) * factor,
                part => {
                    let Some(time) = part.of(priced) else { continue };
                    share.value += time.value * factor;
                    if self.deviations > 0.0 {
                        for (source, error) in time.errors.iter().filter(|(_, error)| *error != 0.0) {
                            share.add_error((part.place(), *source), error * factor);
                        }
                    }
                }
            }
        }
        share
    }
}

impl CostModel {
    /// What `shape` adds to every sum; none is a skipped block and adds nothing.
    ///
    /// # Errors
    /// As [`CostModel::block_costs`].
    pub(crate) fn price(&self, shape: Option<&BlockShape>) -> Result<Priced> {
        let Some(shape) = shape else {
            return Ok(Priced::default());
        };
        let device = self.block_times(shape)?;
        let costs = Costs {
            memory_bytes: self.block_bytes(shape)?,
            block_parameters: parameters(shape, self.hidden),
            ..self.costs(&device)
        };
        Ok(Priced {
            costs,
            device,
            host: self.host().map_or_else(Timed::default, |host| host.block.clone()),
        })
    }

    /// What everything that is no block adds: of the host its floor, and of the device what it waits for.
    ///
    /// # Errors
    /// As [`CostModel::base_costs`].
    pub(crate) fn base_price(&self, architecture: &Architecture) -> Result<Priced> {
        let mut device = self.base_times(architecture)?;
        let costs = Costs {
            memory_bytes: self.base_bytes(architecture)?,
            ..self.costs(&device)
        };
        let mut floor = Timed::default();
        if let Some(host) = self.host() {
            device.add(&host.alone, 1.0);
            floor.clone_from(&host.floor);
        }
        Ok(Priced {
            costs,
            device,
            host: floor,
        })
    }

    /// Every combination that has to hold for the limit to.
    pub(crate) fn cones(&self, limit: &AbsoluteLimit) -> Vec<Cone> {
        let deviations = limit.deviations();
        let bound = self.sum_limit(limit);
        let with = |parts| Cone {
            parts,
            deviations,
            bound,
        };
        let sides = if self.host().is_some() {
            &[Side::Device, Side::Host][..]
        } else {
            &[Side::Device]
        };
        let timed: Vec<(OfSide, f64)> = match limit.metric {
            Metric::Memory | Metric::BlockParameters => {
                return vec![with(vec![(Part::Counted(limit.metric), 1.0)])];
            }
            Metric::FirstToken => vec![(Part::First, 1.0)],
            Metric::PerToken => vec![(Part::Decode, 1.0 / self.steps())],
            Metric::Throughput if self.batches_continuously() => {
                vec![(Part::Steady, 1.0), (Part::Joined, 1.0)]
            }
            Metric::Latency | Metric::Throughput => vec![(Part::First, 1.0), (Part::Decode, 1.0)],
        };
        let mut combinations = vec![Vec::new()];
        for (part, factor) in timed {
            let longer = combinations.iter().flat_map(|begun: &Vec<(Part, f64)>| {
                sides
                    .iter()
                    .map(move |side| [&begun[..], &[(part(*side), factor)]].concat())
            });
            combinations = longer.collect();
        }
        combinations.into_iter().map(with).collect()
    }
}
