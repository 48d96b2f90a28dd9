//! An estimate: a row a component, the total last.

use espalier_search::Metric;
use espalier_search::estimate::Estimate;

use super::Listing;

/// What serving a model will need.
pub(crate) fn estimate(found: &Estimate) -> Listing {
    let assumed = &found.assumptions;
    let workload = &assumed.workload;
    let context = workload.prompt_tokens.saturating_add(workload.output_tokens);
    let mut rows = Vec::new();
    let mut row = |what: &str, size: String, of: String| rows.push(vec![what.to_owned(), size, of]);
    row(
        "parameters",
        found.parameters.to_string(),
        format!("{} of them active for a token", found.active_parameters),
    );
    for component in &found.weights {
        row(
            &format!("weights: {}", component.component.name()),
            size(component.bytes),
            format!("{} parameters", component.parameters),
        );
    }
    row(
        "keys and values",
        size(found.kv_bytes),
        format!(
            "{} sequences of {context} tokens, {} bytes a token, {} pages of {} tokens",
            workload.concurrency, found.kv_bytes_per_token, found.kv_blocks, assumed.block_tokens
        ),
    );
    row(
        "recurrent state",
        size(found.state_bytes),
        format!("{} bytes a sequence", found.state_bytes_per_sequence),
    );
    row(
        "activations",
        size(found.activation_bytes),
        format!("at most {} tokens a step", assumed.step_tokens),
    );
    let overhead = if found.overhead_bytes == 0 {
        "not counted: give --overhead"
    } else {
        "as given"
    };
    row("engine", size(found.overhead_bytes), overhead.to_owned());
    let ranks = assumed.ranks;
    row("total", size(found.total_bytes), assumed.storage.to_string());
    if ranks > 1 {
        row(
            "all ranks",
            size(found.all_ranks_bytes),
            format!("{ranks} ranks, the rows above are of one"),
        );
    }
    Listing {
        heads: vec!["WHAT", "SIZE", "OF WHAT"],
        narrow: 3,
        rows,
        values: vec![serde_json::to_value(found).unwrap_or_default()],
        below: None,
    }
}

#[allow(clippy::cast_precision_loss)] // far below 2^53
fn size(bytes: u64) -> String {
    Metric::Memory.display(bytes as f64)
}
