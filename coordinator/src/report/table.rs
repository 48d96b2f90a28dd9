//! The report's tables.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use espalier_proto::task::Quality;

use super::format::{bound, duration, escape, grouped, metric, short, signed_percent};
use crate::pipeline::outcome::{Outcome, StageCost};

/// Asked, predicted, checked and measured of every limit.
pub(super) fn limits(outcome: &Outcome) -> String {
    let mut rows = String::new();
    for limit in &outcome.limits {
        let show = |value: f64| escape(&limit.metric.display(value));
        let verified = &limit.verified;
        let class = if verified.inside { "good" } else { "bad" };
        let _ = write!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td><b>{}</b></td><td>{}</td>\
             <td class=\"{class}\">{}</td></tr>",
            metric(limit.metric),
            escape(&bound(limit.metric, limit.asked)),
            show(verified.limit),
            escape(&outcome.parent_figure(limit)),
            show(verified.predicted),
            show(limit.checked.value),
            show(verified.value),
            signed_percent(verified.error),
            verified.verdict(),
        );
    }
    table(
        &[
            "",
            "asked",
            "limit",
            "parent",
            "predicted",
            "checked",
            "measured",
            "off by",
            "",
        ],
        &rows,
    )
}

/// Parent, and each strategy before and after recovery.
pub(super) fn quality(outcome: &Outcome) -> String {
    let mut all = vec![(
        "parent".to_owned(),
        outcome.parent.parameters,
        &outcome.parent.quality,
        false,
    )];
    for report in &outcome.strategies {
        let chosen = report.strategy == outcome.winner;
        let untrained_chosen = chosen && (report.after.is_none() || report.kept_untrained);
        all.push((
            format!("{}, before recovery", report.strategy),
            report.parameters,
            &report.before,
            untrained_chosen,
        ));
        if let Some(after) = &report.after {
            all.push((
                format!("{}, after recovery", report.strategy),
                report.parameters,
                after,
                chosen && !untrained_chosen,
            ));
        }
    }
    let mut seen = BTreeSet::new();
    let benchmarks: Vec<&str> = all
        .iter()
        .flat_map(|(.., quality, _)| quality.benchmarks.iter().map(|benchmark| benchmark.name.as_str()))
        .filter(|name| seen.insert(*name))
        .collect();
    let mut rows = String::new();
    for (name, parameters, quality, chosen) in &all {
        let class = if *chosen { " class=\"chosen\"" } else { "" };
        let _ = write!(
            rows,
            "<tr{class}><td>{}</td><td>{}</td><td>{}</td><td>{:.2}</td>",
            escape(name),
            short(*parameters),
            divergence(quality),
            quality.perplexity
        );
        for benchmark in &benchmarks {
            let found = quality.benchmarks.iter().find(|result| result.name == *benchmark);
            let cell = found.map_or_else(
                || "–".to_owned(),
                |result| {
                    format!(
                        "{:.1} <span class=\"soft\">± {:.1}</span>",
                        result.accuracy * 100.0,
                        result.accuracy_error * 100.0
                    )
                },
            );
            let _ = write!(rows, "<td>{cell}</td>");
        }
        rows.push_str("</tr>");
    }
    let named: Vec<String> = benchmarks
        .iter()
        .map(|name| format!("{}, %", escape(name)))
        .collect();
    let mut heads = vec!["", "parameters", "KL to the parent, nats a token", "perplexity"];
    heads.extend(named.iter().map(String::as_str));
    table(&heads, &rows)
}

fn divergence(quality: &Quality) -> String {
    format!(
        "{:.4} <span class=\"soft\">± {:.4}</span>",
        quality.divergence, quality.divergence_error
    )
}

/// Tasks, tokens and time of every stage.
pub(super) fn costs(outcome: &Outcome) -> String {
    let mut rows = String::new();
    for stage in &outcome.stages {
        let tokens = if stage.tokens == 0 {
            "–".to_owned()
        } else {
            grouped(stage.tokens)
        };
        let _ = write!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{tokens}</td><td>{}</td></tr>",
            escape(&stage.stage.to_string()),
            stage.tasks,
            duration(stage.seconds)
        );
    }
    let tokens = outcome.stages.iter().map(|stage| stage.tokens).sum();
    let seconds = elapsed_seconds(&outcome.stages);
    let _ = write!(
        rows,
        "<tr><td><b>all stages</b></td><td></td><td><b>{}</b></td><td><b>{}</b></td></tr>",
        grouped(tokens),
        duration(seconds)
    );
    table(&["stage", "tasks", "tokens", "time"], &rows)
}

/// Seconds in which any stage ran: several may run at a time. Their sum where it is not known when they did.
pub(super) fn elapsed_seconds(stages: &[StageCost]) -> f64 {
    let spans = stages.iter().map(|stage| {
        let ended = stage.ended_seconds?;
        Some((ended - stage.seconds, ended))
    });
    let Some(mut spans) = spans.collect::<Option<Vec<(f64, f64)>>>() else {
        return stages.iter().map(|stage| stage.seconds).sum();
    };
    spans.sort_by(|first, second| first.0.total_cmp(&second.0));
    let (mut elapsed, mut until) = (0.0, f64::NEG_INFINITY);
    for (begun, ended) in spans {
        elapsed += (ended - begun.max(until)).max(0.0);
        until = until.max(ended);
    }
    elapsed
}

fn table(heads: &[&str], rows: &str) -> String {
    let heads: String = heads
        .iter()
        .map(|head| format!("<th scope=\"col\">{head}</th>"))
        .collect();
    format!("<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>")
}
