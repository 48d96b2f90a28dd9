//! The page of answers to other questions: for each target its front, its choice and what relaxing each limit buys.

use std::fmt::Write as _;

use espalier_search::heterogeneous::Reachable;
use espalier_search::plan::{Answer, Chosen};

use super::chart;
use super::format::{escape, metric};

/// A section for each answer, or the reason why there is none, under its name.
pub(super) fn sections(answers: &[(String, Result<Answer, String>)]) -> String {
    let mut body = String::from(
        "<header><p class=\"eyebrow\">Espalier plan</p><h1>What was measured once, asked again</h1></header>\n",
    );
    for (name, answer) in answers {
        let content = match answer {
            Ok(answer) => answered(answer),
            Err(reason) => format!("<p>{}</p>", escape(reason)),
        };
        let _ = writeln!(body, "<section><h2>{}</h2>{content}</section>", escape(name));
    }
    body
}

fn answered(answer: &Answer) -> String {
    let content = match &answer.chosen {
        Some(chosen) => choice(chosen),
        None => format!(
            "<p>No candidate is inside {}.</p>",
            escape(&Reachable::describe(&answer.reachable))
        ),
    };
    let notes = answer.notes.iter().map(|note| format!("<p>{}</p>", escape(note)));
    format!(
        "<p class=\"soft\">{}, {} {}, {}</p>{content}{}",
        escape(&answer.target.device),
        escape(&answer.target.engine),
        escape(&answer.target.engine_version),
        escape(&answer.target.precision),
        notes.collect::<String>()
    )
}

fn choice(chosen: &Chosen) -> String {
    let limit = chosen.limits.iter().find(|standing| standing.binding);
    let at = limit.map(|standing| (standing.value, chosen.score));
    let bound = limit.map(|standing| standing.limit.value);
    let mut content = chart::plot_front(chosen.front_metric, &chosen.front, bound, at).unwrap_or_default();
    content.push_str(
        "<table><tr><th>limit</th><th>allowed</th><th>predicted</th><th>relaxing it buys</th></tr>",
    );
    for standing in &chosen.limits {
        let over = standing.limit.metric;
        let price = standing.price.map_or_else(
            || "–".to_owned(),
            |price| {
                format!(
                    "{:.4} nats at {}",
                    chosen.score - price.score,
                    over.display(price.relaxed)
                )
            },
        );
        let _ = write!(
            content,
            "<tr><td>{}{}</td><td>{}</td><td>{} ± {}</td><td>{}</td></tr>",
            metric(over),
            if standing.binding { ", binding" } else { "" },
            escape(&over.display(standing.limit.value)),
            escape(&over.display(standing.value)),
            escape(&over.display(standing.error)),
            escape(&price),
        );
    }
    content.push_str("</table>");
    content
}
