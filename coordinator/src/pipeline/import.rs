//! An imported cost table: whether it holds what the search needs, and how it leaves a finished job.

use std::borrow::Cow;

use espalier_arch::Architecture;
use espalier_proto::task::Profiled;
use espalier_search::{CostModel, CostTable, Error, Point, Subject, Whole, points};

use super::PlanError;
use super::context::{Context, block_parameters};
use crate::cost_tables::digest;
use crate::spec::{COST_TABLE_SCHEMA, CostTableFile, CostTableSource, JobSpec};

/// Refuses a table that was measured of another parent, or that lacks a shape or point the search needs.
pub(super) fn refuse_uncovered(
    context: &Context<'_>,
    parent: &Architecture,
    table: &CostTableFile,
) -> Result<(), PlanError> {
    let name = table.name();
    let refused = |reason: String| PlanError::Invalid(format!("target.cost_table: {name} {reason}"));
    if !table.parent().is(parent) {
        let (found, wanted) = (table.block_parameters, block_parameters(parent));
        let of = if found == wanted {
            format!("another parent with {found} parameters in its blocks")
        } else {
            format!("a parent with {found} parameters in its blocks, expected {wanted}")
        };
        return Err(refused(format!(
            "was measured of {of}; give the table of this parent"
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

/// The spec with that of the imported table's models which is the job's parent. Where none is, the first is left, to be
/// refused by.
pub(super) fn settled<'a>(spec: &'a JobSpec, parent: &Architecture) -> Cow<'a, JobSpec> {
    let of_parent = match &spec.target.cost_table {
        Some(CostTableSource::Table(table)) if !table.parents.is_empty() => table.of(parent),
        _ => None,
    };
    let Some(table) = of_parent else {
        return Cow::Borrowed(spec);
    };
    let mut spec = spec.clone();
    spec.target.cost_table = Some(CostTableSource::Table(Box::new(table)));
    Cow::Owned(spec)
}

/// The table that a job chose by, as another job can import it.
pub(super) fn exported(context: &Context<'_>, parent: &Architecture, profiled: &Profiled) -> CostTableFile {
    // Of an imported one no more is known than it says.
    let architecture = match context.imported() {
        Ok(Some(table)) => table.architecture.clone(),
        _ => Some(digest(parent)),
    };
    CostTableFile {
        schema: COST_TABLE_SCHEMA,
        file: String::new(),
        workload: context.workload(),
        block_parameters: block_parameters(parent),
        architecture,
        profile: profiled.clone(),
        parents: Vec::new(),
    }
}
