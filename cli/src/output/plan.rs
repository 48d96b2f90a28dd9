//! Answers: a row for each limit of each plan; of a single plan its front below.

use espalier_search::Metric;
use espalier_search::heterogeneous::FrontPoint;
use espalier_search::plan::{Answer, Chosen, Standing};
use serde_json::json;

use super::Listing;
use crate::commands::plan::Named;

/// Plans, each with its name.
pub(crate) fn plans(answers: &[Named]) -> Listing {
    let rows = answers.iter().flat_map(|(name, answer)| match answer {
        Ok(answer) => answered(name, answer),
        Err(reason) => vec![row(
            name,
            [
                reason.clone(),
                String::new(),
                String::new(),
                String::new(),
                String::new(),
            ],
        )],
    });
    let values = answers.iter().map(|(name, answer)| match answer {
        Ok(answer) => json!({"name": name, "answer": answer}),
        Err(reason) => json!({"name": name, "error": reason}),
    });
    let below = match answers {
        [(_, Ok(answer))] => answer.chosen.as_ref().map(|chosen| Box::new(front(chosen))),
        _ => None,
    };
    Listing {
        heads: vec!["PLAN", "LIMIT", "PREDICTED", "SCORE", "BINDS", "RELAXING IT BUYS"],
        narrow: 6,
        rows: rows.collect(),
        values: values.collect(),
        below,
    }
}

fn row(name: &str, cells: [String; 5]) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(cells).collect()
}

fn answered(name: &str, answer: &Answer) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = match &answer.chosen {
        Some(chosen) => {
            let standings = chosen.limits.iter();
            standings
                .map(|standing| row(name, stands(chosen, standing)))
                .collect()
        }
        None => {
            let has_others = answer.reachable.len() > 1;
            let reachable = answer.reachable.iter().map(|reach| {
                let metric = reach.limit.metric;
                let what = [
                    format!("{metric} {}", metric.display(reach.limit.value)),
                    format!("no candidate; {}", reach.best(has_others)),
                    String::new(),
                    String::new(),
                    String::new(),
                ];
                row(name, what)
            });
            reachable.collect()
        }
    };
    let notes = answer.notes.iter();
    rows.extend(notes.map(|note| {
        let mut cells = [const { String::new() }; 5];
        cells[1].clone_from(note);
        row(name, cells)
    }));
    rows
}

fn stands(chosen: &Chosen, standing: &Standing) -> [String; 5] {
    let metric = standing.limit.metric;
    let price = standing.price.filter(|price| price.per_unit > 0.0);
    [
        format!("{metric} {}", metric.display(standing.limit.value)),
        with_error(metric, standing.value, standing.error),
        format!("{:.4} ± {:.4}", chosen.score, chosen.score_error),
        if standing.binding { "yes" } else { "" }.to_owned(),
        price.map_or_else(
            || "nothing".to_owned(),
            |price| format!("{:.4} nats a {}", price.per_unit, unit(metric)),
        ),
    ]
}

fn unit(metric: Metric) -> &'static str {
    match metric {
        Metric::Latency | Metric::FirstToken | Metric::PerToken => "ms",
        Metric::Throughput => "token/s",
        Metric::Memory => "GiB",
        Metric::BlockParameters => "million parameters",
    }
}

pub(super) fn with_error(metric: Metric, value: f64, error: f64) -> String {
    if error > 0.0 && value > 0.0 {
        format!("{} ± {:.1}%", metric.display(value), 100.0 * error / value)
    } else {
        metric.display(value)
    }
}

fn front(chosen: &Chosen) -> Listing {
    let metric = chosen.front_metric;
    let row = |point: &FrontPoint| {
        vec![
            with_error(metric, point.value, point.error),
            format!("{:.4}", point.score),
        ]
    };
    Listing {
        heads: vec!["FRONT", "SCORE"],
        narrow: 2,
        rows: chosen.front.iter().map(row).collect(),
        values: Vec::new(),
        below: None,
    }
}
