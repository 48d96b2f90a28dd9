//! Limits, cost tables, scores and the exact solver. Pure and synchronous: no tensor, no clock, no I/O.
//!
//! A cost table ([`CostTable`]) becomes a [`CostModel`], which prices any candidate; a [`Space`] names the
//! variants of every block; [`heterogeneous`] puts both and the scores into a [`solver::Problem`], whose
//! solution is a candidate; [`uniform`] is the grid that it is compared with.

mod cost;
mod error;
pub mod estimate;
mod figures;
#[cfg(test)]
mod fixtures;
pub mod heterogeneous;
mod kept;
mod limit;
mod measurement;
mod memory;
pub mod plan;
mod predict;
pub mod running;
mod score;
pub mod shapes;
pub mod solver;
mod space;
pub mod statistics;
pub mod uniform;
mod workload;

pub use cost::{CostKey, CostRow, CostTable, EngineMemory, Mode, Point, Subject};
pub use error::{Error, Result};
pub use figures::Figures;
pub use kept::{Kept, merged, telling};
pub use limit::{AbsoluteLimit, Bound, Limit, Limits, Metric};
pub use measurement::{Measurement, Shortage, Summary, Whole, WholeParent};
pub use memory::{MemoryModel, Windows, sequence_pages, step_tokens};
pub use predict::{Checked, Corrections, CostModel, Costs, Prediction, parameters, points, running_points};
pub use score::Score;
pub use space::Space;
pub use workload::Workload;
