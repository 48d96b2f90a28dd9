//! Composes the page; what it shows comes from [`super::chart`] and [`super::table`].

use std::fmt::Write as _;

use super::format::{bound, duration, escape, metric, short, signed_percent};
use super::{chart, serving, table};
use crate::pipeline::outcome::{Outcome, StrategyReport};

const STYLE: &str = include_str!("style.css");

/// The whole page.
pub(super) fn page(outcome: &Outcome) -> String {
    let mut body = String::new();
    headline(&mut body, outcome);
    limits(&mut body, outcome);
    blocks(&mut body, outcome);
    quality(&mut body, outcome);
    search(&mut body, outcome);
    serve(&mut body, outcome);
    section(&mut body, "What it cost", "", &table::costs(outcome));
    notes(&mut body, outcome);
    spec(&mut body, outcome);
    document(&outcome.parent.source, &body)
}

/// A page that loads nothing.
pub(super) fn document(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Espalier: {}</title><style>{STYLE}</style></head>\n<body><main>\n{body}</main></body></html>\n",
        escape(title)
    )
}

fn section(body: &mut String, title: &str, lead: &str, content: &str) {
    let lead = if lead.is_empty() {
        String::new()
    } else {
        format!("<p class=\"soft\">{lead}</p>")
    };
    let _ = writeln!(body, "<section><h2>{title}</h2>{lead}{content}</section>");
}

fn winner(outcome: &Outcome) -> Option<&StrategyReport> {
    outcome
        .strategies
        .iter()
        .find(|report| report.strategy == outcome.winner)
}

fn headline(body: &mut String, outcome: &Outcome) {
    let mut outside = outcome.limits.iter().filter(|limit| !limit.verified.inside);
    let (class, verdict) = match outside.next() {
        None => ("good", "✓ every limit met"),
        Some(first) if first.verified.noisy && outside.all(|limit| limit.verified.noisy) => {
            ("bad", "✕ too noisy to show every limit met")
        }
        Some(_) => ("bad", "✕ a limit was missed"),
    };
    let title = match outcome.limits.first() {
        Some(limit) => format!(
            "{} of {}: {} measured, {} allowed",
            metric(limit.metric),
            bound(limit.metric, limit.asked),
            limit.metric.display(limit.verified.value),
            limit.metric.display(limit.verified.limit)
        ),
        None => "No limit".to_owned(),
    };
    let _ = writeln!(
        body,
        "<header><p class=\"eyebrow\">Espalier report</p><h1>{}</h1>\
         <p class=\"soft\">{}</p><p><span class=\"verdict {class}\">{verdict}</span></p>",
        escape(&title),
        escape(&outcome.parent.source)
    );
    facts(body, outcome);
    body.push_str("</header>\n");
}

fn facts(body: &mut String, outcome: &Outcome) {
    let mut shown = Vec::new();
    if let Some(limit) = outcome.limits.first() {
        let verified = &limit.verified;
        shown.push(match limit.parent_measured() {
            Some(parent) => (
                metric(limit.metric),
                signed_percent(verified.value / parent - 1.0),
                format!("against the parent, {}", limit.metric.display(parent)),
            ),
            None => (
                metric(limit.metric),
                limit.metric.display(verified.value),
                format!("parent: {}", outcome.parent_figure(limit)),
            ),
        });
        shown.push((
            "Prediction missed by",
            signed_percent(verified.error),
            format!("predicted {}", limit.metric.display(verified.predicted)),
        ));
    }
    if let Some(report) = winner(outcome) {
        let quality = report.quality();
        shown.push((
            "KL to the parent",
            format!("{:.3}", quality.divergence),
            format!("{:.3} before recovery", report.before.divergence),
        ));
        let of = format!("of {}", short(outcome.parent.parameters));
        shown.push(("Parameters", short(report.parameters), of));
    }
    let seconds = table::elapsed_seconds(&outcome.stages);
    shown.push(("Time", duration(seconds), "all stages".to_owned()));
    body.push_str("<dl class=\"facts\">");
    for (name, value, note) in &shown {
        let (value, note) = (escape(value), escape(note));
        let _ = write!(
            body,
            "<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>"
        );
    }
    body.push_str("</dl>");
}

fn limits(body: &mut String, outcome: &Outcome) {
    let workload = &outcome.spec.target.workload;
    let alone = outcome
        .limits
        .iter()
        .any(|limit| limit.metric.is_timed() && limit.verified.parent.is_none());
    let how = match outcome.parent.measurement.shortage() {
        None if alone => "measured alone, because the parent has no room beside it: shares are of the parent as profiled"
            .to_owned(),
        None => "measured in alternation with the parent, the limit and the prediction following the parent's own time in \
                 that run"
            .to_owned(),
        Some(shortage) => format!(
            "measured alone, because the parent does not fit this device ({shortage}): what is said of it is predicted"
        ),
    };
    let lead = format!(
        "{} prompt and {} output tokens, {} at once{}, on {} ({} {}, {}). Every figure as a share of its limit; {how}.",
        workload.prompt_tokens,
        workload.output_tokens,
        workload.concurrency,
        waiting(outcome),
        escape(&outcome.target.device),
        escape(&outcome.target.engine),
        escape(&outcome.target.engine_version),
        escape(&outcome.target.precision),
    );
    let legend = "<div class=\"legend\">\
        <span><svg viewBox=\"0 0 14 12\"><circle class=\"hollow\" cx=\"7\" cy=\"6\" r=\"5\"/></svg>predicted from the cost table</span>\
        <span><svg viewBox=\"0 0 14 12\"><path class=\"dot\" opacity=\".45\" d=\"M7 0l6 6l-6 6l-6 -6z\"/></svg>checked before training</span>\
        <span><svg viewBox=\"0 0 14 12\"><circle class=\"dot\" cx=\"7\" cy=\"6\" r=\"4.5\"/></svg>measured on the exported model</span></div>";
    let content = format!(
        "{}{legend}{}",
        chart::limits(&outcome.limits),
        table::limits(outcome)
    );
    section(body, "Limits", &lead, &content);
}

/// What to say of requests that wait.
fn waiting(outcome: &Outcome) -> String {
    let running = winner(outcome).and_then(|report| report.running);
    running.map_or_else(String::new, |running| {
        format!(" ({running} of which run together and the others wait)")
    })
}

fn blocks(body: &mut String, outcome: &Outcome) {
    let mut content = String::from("<div class=\"pictures\">");
    for report in &outcome.strategies {
        let _ = write!(
            content,
            "<figure><figcaption><b>{}</b>: {} parameters in blocks, {:.0}% of the parent's</figcaption>{}</figure>",
            report.strategy,
            short(report.block_parameters),
            percent(report.block_parameters, outcome.parent.block_parameters),
            chart::blocks(report)
        );
    }
    content.push_str("</div>");
    let lead = "Each tier is a layer, the first at the bottom. Solid is kept, pale was cut, dashed was removed whole.";
    section(body, "What is left of each block", lead, &content);
}

fn quality(body: &mut String, outcome: &Outcome) {
    let lead = "On held-out text that nothing was trained or scored on. Benchmarks are accuracy; ± is one standard error.";
    section(body, "Quality", lead, &table::quality(outcome));
}

fn search(body: &mut String, outcome: &Outcome) {
    let mut content = String::from("<div class=\"pictures\">");
    if let Some(front) = chart::front(outcome) {
        let _ = write!(
            content,
            "<figure><figcaption>The Pareto front: the least quality lost at each {}</figcaption>{front}</figure>",
            metric(outcome.front_metric).to_lowercase()
        );
    }
    if let Some(losses) = chart::losses(&outcome.strategies) {
        let legend: String = outcome
            .strategies
            .iter()
            .map(|report| {
                format!(
                    "<span><svg viewBox=\"0 0 14 12\"><circle class=\"dot{}\" cx=\"7\" cy=\"6\" r=\"4.5\"/></svg>{}</span>",
                    chart::class(report.strategy),
                    report.strategy
                )
            })
            .collect();
        let _ = write!(
            content,
            "<figure><figcaption>Recovery: loss by step</figcaption>{losses}<div class=\"legend\">{legend}</div></figure>"
        );
    }
    content.push_str("</div>");
    let proof = winner(outcome).and_then(|report| report.solved);
    let lead = proof.map_or_else(String::new, |proof| {
        format!(
            "The solver's choice has a sum of scores of {:.4}; none inside the limits is below {:.4} (proven gap {:.1e}).",
            proof.score, proof.bound, proof.gap
        )
    });
    section(body, "Search and recovery", &lead, &content);
}

fn serve(body: &mut String, outcome: &Outcome) {
    let Some(command) = &outcome.serve_command else {
        return;
    };
    let remarks = serving::remarks(outcome).into_iter();
    let remarks: String = remarks
        .map(|remark| format!("<p>{}</p>", escape(remark)))
        .collect();
    let content = format!("<pre>{}</pre>{remarks}", escape(command));
    section(body, "Serve it as it was measured", "", &content);
}

fn notes(body: &mut String, outcome: &Outcome) {
    if outcome.notes.is_empty() {
        return;
    }
    let items: String = outcome
        .notes
        .iter()
        .map(|note| format!("<li>{}</li>", escape(note)))
        .collect();
    section(body, "Notes", "", &format!("<ul class=\"notes\">{items}</ul>"));
}

fn spec(body: &mut String, outcome: &Outcome) {
    let text = serde_saphyr::to_string(&outcome.spec)
        .or_else(|_| serde_json::to_string_pretty(&outcome.spec))
        .unwrap_or_default();
    let lead = "Exactly what ran, defaults filled in.";
    section(
        body,
        "Job spec",
        lead,
        &format!("<pre>{}</pre>", escape(text.trim_end())),
    );
    let _ = writeln!(
        body,
        "<footer>Parent {} · exported to {} · {}</footer>",
        escape(&outcome.parent.fingerprint),
        escape(&outcome.export.directory),
        if outcome.export.needs_remote_code {
            "transformers needs trust_remote_code and the modelling file beside the weights"
        } else {
            "loads in transformers as the plain family"
        }
    );
}

#[allow(clippy::cast_precision_loss, reason = "shown to two digits")]
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 * 100.0 / whole as f64
    }
}
