//! Limits, cost tables, scores and the exact solver. Pure and synchronous: no tensor, no clock, no I/O.

mod cost;
mod limit;
mod measurement;
mod score;
mod workload;

pub use cost::{CostKey, CostRow, CostTable, Point, Subject};
pub use limit::{Bound, Limit, Metric};
pub use measurement::{Measurement, Summary};
pub use score::Score;
pub use workload::Workload;
