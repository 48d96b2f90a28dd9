//! How the export is served as it was measured, and what another `vllm serve` does differently.

use std::fmt::Write as _;

use super::format::metric;
use crate::pipeline::Outcome;

/// What a figure of the report holds for.
const MEASURED: &str = "The figures are those of vLLM with exactly these settings, its steps driven in one process: a \
    server's HTTP and tokenizer are not in them. The space of keys and values is what the workload needs, and no \
    more; prompts are not cached, and all that run together are computed in one step. Without these arguments \
    vLLM takes as much memory as it finds and other numbers of tokens a step, and its times are others.";

/// Why a CPU's measurement is no compiled one.
const EAGER: &str = "It is run eagerly, as the whole job was (`mode: eager`): on a CPU vLLM compiles by default, which for \
    each of the models that a profile opens takes longer than timing it. Compiled, times are others; they were not \
    measured.";

/// What to know beside the line that serves the export.
pub(super) fn remarks(outcome: &Outcome) -> Vec<&'static str> {
    let eager = outcome
        .serving
        .iter()
        .flat_map(|serving| &serving.arguments)
        .any(|argument| argument == "--enforce-eager");
    [Some(MEASURED), eager.then_some(EAGER)]
        .into_iter()
        .flatten()
        .collect()
}

/// The page beside the exported weights; none where no other program serves them as they were measured.
pub(super) fn readme(outcome: &Outcome) -> Option<String> {
    let command = outcome.serve_command.as_ref()?;
    let workload = &outcome.spec.target.workload;
    let mut page = format!(
        "# A smaller {}\n\nFitted by Espalier to {} prompt and {} output tokens, {} requests at once, on {} with vLLM {} \
         ({}). Measured on this checkpoint:\n\n| | measured | limit |\n|---|---|---|\n",
        outcome.parent.source,
        workload.prompt_tokens,
        workload.output_tokens,
        workload.concurrency,
        outcome.target.device,
        outcome.target.engine_version,
        outcome.target.precision,
    );
    for limit in &outcome.limits {
        let _ = writeln!(
            page,
            "| {} | {} | {} |",
            metric(limit.metric),
            limit.metric.display(limit.verified.value),
            limit.metric.display(limit.verified.limit),
        );
    }
    page.push_str("\n## Serve it as it was measured\n\n");
    if outcome.export.needs_remote_code {
        page.push_str(
            "Its blocks have sizes of their own, so vLLM needs the plugin `espalier_vllm` beside it; no code of this \
             directory is trusted.\n\n",
        );
    }
    let _ = writeln!(page, "```sh\n{command}\n```");
    for remark in remarks(outcome) {
        let _ = writeln!(page, "\n{remark}");
    }
    Some(page)
}
