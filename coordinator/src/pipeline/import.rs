//! An imported cost table: whether it holds what the search needs, and how it leaves a finished job.

use espalier_arch::Architecture;
use espalier_proto::task::Profiled;
use espalier_search::{CostModel, CostTable, Error, Point, Subject, Whole, points};

use super::PlanError;
use super::context::{Context, block_parameters};
use crate::spec::{COST_TABLE_SCHEMA, CostTableFile};

/// Refuses a table that was measured of another parent, or that lacks a shape or point the search needs.
pub(super) fn refuse_uncovered(
    context: &Context<'_>,
    parent: &Architecture,
    table: &CostTableFile,
) -> Result<(), PlanError> {
    let name = table.name();
    let refused = |reason: String| PlanError::Invalid(format!("target.cost_table: {name} {reason}"));
    let (found, wanted) = (table.block_parameters, block_parameters(parent));
    if found != wanted {
        return Err(refused(format!(
            "was measured of a parent with {found} parameters in its blocks, expected {wanted}; give the table \
             of this parent"
        )));
    }
    let rows = CostTable {
        key: table.profile.key.clone(),
        rows: table.profile.rows.clone(),
        memory: table.profile.memory,
    };
    let model = CostModel::new(
        &rows,
        &context.workload(),
        parent,
        context.memory(),
        table.profile.parent.measured().map(|measurement| Whole {
            measurement,
            workload: &table.workload,
        }),
    )
    .map_err(|error| refused(format!("cannot be used: {error}")))?;
    let lacks = |what: &Subject, error: Error| match missing(context, &error) {
        Some(point) => refused(format!(
            "has no row for {what} at {point}; profile that too, or narrow the search to what the table has"
        )),
        None => refused(format!("cannot be used: {error}")),
    };
    let base = Subject::Base {
        vocab_size: parent.vocab_size,
    };
    model.base_costs(parent).map_err(|error| lacks(&base, error))?;
    for shape in context.space().shapes(parent)? {
        model
            .block_costs(Some(&shape))
            .map_err(|error| lacks(&Subject::Block(shape.clone()), error))?;
    }
    Ok(())
}

/// The load that a lookup did not find.
fn missing(context: &Context<'_>, error: &Error) -> Option<Point> {
    match error {
        Error::MissingRow { point, .. } => Some(*point),
        Error::Extrapolation {
            axis: "contexts",
            asked,
            ..
        } => points(&context.workload())
            .ok()?
            .into_iter()
            .find(|point| matches!(point, Point::Decode { context, .. } if context == asked)),
        _ => None,
    }
}

/// The table that a job chose by, as another job can import it.
pub(super) fn exported(context: &Context<'_>, parent: &Architecture, profiled: &Profiled) -> CostTableFile {
    CostTableFile {
        schema: COST_TABLE_SCHEMA,
        file: String::new(),
        workload: context.workload(),
        block_parameters: block_parameters(parent),
        profile: profiled.clone(),
    }
}
