//! An attempt's span: part of its job's trace, in the agent and in the child.

use std::collections::HashMap;

use opentelemetry::global::get_text_map_propagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// W3C's name of the header.
const TRACEPARENT: &str = "traceparent";

/// What names an attempt in logs and traces.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// Its job.
    pub job: &'a str,
    /// Its task.
    pub task: u64,
    /// Its number.
    pub attempt: u64,
    /// The executor.
    pub kind: &'a str,
}

/// The span of an attempt below `traceparent`; a span without a parent when that is empty.
pub fn attempt_span(names: Names<'_>, traceparent: &str) -> Span {
    let Names {
        job,
        task,
        attempt,
        kind,
    } = names;
    let span = tracing::info_span!("attempt", job, task, attempt, kind);
    if !traceparent.is_empty() {
        let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
        let parent = get_text_map_propagator(|propagator| propagator.extract(&carrier));
        // Refused only where no trace is exported: then there is nothing to be part of.
        let _ = span.set_parent(parent);
    }
    span
}

/// The `traceparent` of a span's children: the span itself where traces are exported, else `otherwise`.
pub fn traceparent_below(span: &Span, otherwise: &str) -> String {
    let mut carrier: HashMap<String, String> = HashMap::new();
    get_text_map_propagator(|propagator| propagator.inject_context(&span.context(), &mut carrier));
    carrier
        .remove(TRACEPARENT)
        .unwrap_or_else(|| otherwise.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_exporter_the_job_s_own_context_goes_on_to_the_child() {
        let names = Names {
            job: "job-1",
            task: 2,
            attempt: 3,
            kind: "score",
        };
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let span = attempt_span(names, given);
        assert_eq!(traceparent_below(&span, given), given);
    }
}
