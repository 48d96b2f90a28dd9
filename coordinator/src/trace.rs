//! One trace a job: its ids, and the spans that the coordinator adds to it.
//!
//! The ids are derived from what the journal says of the job, so a coordinator that restarts, or one that
//! takes over, goes on with the same trace. A span is made when what it tells of has ended: its start is then
//! in the state, and nothing has to be remembered over a restart. Workers and children hang their own spans
//! below the attempt's, whose id they are told before it exists.
//!
//! An exporter that takes its ids from [`claimed_span_id`] and [`claimed_trace_id`] says so with
//! [`exporter_is_in_place`]; before that nothing is made.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{
    Span, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
    TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue, global};

use crate::scheduler::{Attempt, AttemptId, Event, Job, JobId, Stage, State, Task, TaskId};

static EXPORTS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The ids that the span being made on this thread must have.
    static CLAIMED: Cell<Option<(TraceId, SpanId)>> = const { Cell::new(None) };
}

/// An exporter is in place whose ids come from [`claimed_span_id`] and [`claimed_trace_id`].
pub fn exporter_is_in_place() {
    EXPORTS.store(true, Ordering::Relaxed);
}

/// The id that the span being made on this thread must have; none for any other.
pub fn claimed_span_id() -> Option<SpanId> {
    CLAIMED.get().map(|(_, span)| span)
}

/// The id of the trace that the span being made on this thread begins; none for any other.
pub fn claimed_trace_id() -> Option<TraceId> {
    CLAIMED.get().map(|(trace, _)| trace)
}

/// W3C `traceparent` for what runs below this attempt.
pub fn traceparent(job: &Job, attempt: AttemptId) -> String {
    let trace = Trace::of(job);
    format!("00-{}-{}-01", trace.id, trace.span("attempt", attempt.0))
}

/// Adds what ends with this event to its job's trace, before the event is applied to the state.
pub fn observe(state: &State, event: &Event) {
    if EXPORTS.load(Ordering::Relaxed) {
        spans(state, event);
    }
}

fn spans(state: &State, event: &Event) {
    match event {
        Event::AttemptCompleted { attempt, at, .. } => {
            if let Some(ended) = Ended::of(state, *attempt) {
                ended.tell("completed", Status::Ok, *at);
                task_done(state, ended.attempt.task, *at);
            }
        }
        Event::RankCompleted { attempt, at, .. } => {
            tell(state, *attempt, "completed", Status::Ok, *at);
        }
        Event::GangEnded {
            task,
            completed: true,
            at,
            ..
        } => task_done(state, *task, *at),
        Event::AttemptFailed {
            attempt, failure, at, ..
        } => {
            tell(
                state,
                *attempt,
                "failed",
                Status::error(failure.message.clone()),
                *at,
            );
        }
        Event::AttemptLost { attempt, at, .. } => {
            tell(state, *attempt, "lost", Status::error("the worker is gone"), *at);
        }
        Event::AttemptHandedBack { attempt, at, .. } => {
            tell(state, *attempt, "handed back", Status::Unset, *at);
        }
        Event::AttemptStopped { attempt, at, .. } => tell(state, *attempt, "stopped", Status::Unset, *at),
        Event::StagesPlanned { job, at, .. } | Event::OutcomeReached { job, at, .. } => {
            if let Some(job) = state.job(*job) {
                below_job(job, "plan", job.results, last_result(job), *at, Status::Ok);
            }
        }
        Event::JobSucceeded { job, at } => {
            if let Some(job) = state.job(*job) {
                below_job(job, "outcome", 0, last_result(job), *at, Status::Ok);
                job_ended(job, *at, Status::Ok);
            }
        }
        Event::JobFailed { job, message, at } => failed(state, *job, message, *at),
        Event::JobCancelled { job, reason, at } => failed(state, *job, reason, *at),
        _ => {}
    }
}

fn tell(state: &State, attempt: AttemptId, outcome: &'static str, status: Status, at: i64) {
    if let Some(ended) = Ended::of(state, attempt) {
        ended.tell(outcome, status, at);
    }
}

fn failed(state: &State, job: JobId, reason: &str, at: i64) {
    if let Some(job) = state.job(job) {
        job_ended(job, at, Status::error(reason.to_owned()));
    }
}

/// When the planner could begin with what it now has answered.
fn last_result(job: &Job) -> i64 {
    let stages = job.stages.iter().filter_map(|stage| stage.finished_at);
    stages.max().unwrap_or(job.submitted_at)
}

/// The ids of a job's trace.
#[derive(Debug, Clone, Copy)]
struct Trace {
    id: TraceId,
}

impl Trace {
    fn of(job: &Job) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"espalier trace 1");
        hasher.update(&job.id.0.to_be_bytes());
        hasher.update(&job.submitted_at.to_be_bytes());
        hasher.update(job.output.as_bytes());
        let id = u128::from_be_bytes(first(&hasher));
        Self {
            id: TraceId::from(id.max(1)),
        }
    }

    /// The id of a span, by what it tells of.
    fn span(self, what: &str, number: u64) -> SpanId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.id.to_bytes());
        hasher.update(what.as_bytes());
        hasher.update(&number.to_be_bytes());
        SpanId::from(u64::from_be_bytes(first(&hasher)).max(1))
    }

    fn root(self) -> SpanId {
        self.span("job", 0)
    }

    /// What hangs below this span.
    fn below(self, span: SpanId) -> Context {
        let context = SpanContext::new(self.id, span, TraceFlags::SAMPLED, true, TraceState::default());
        Context::new().with_remote_span_context(context)
    }

    fn record(self, span: SpanId, parent: &Context, made: Made) {
        CLAIMED.set(Some((self.id, span)));
        let builder = SpanBuilder::from_name(made.name)
            .with_kind(SpanKind::Internal)
            .with_start_time(moment(made.start))
            .with_attributes(made.attributes);
        let mut span = global::tracer("espalier-coordinator").build_with_context(builder, parent);
        CLAIMED.set(None);
        span.set_status(made.status);
        span.end_with_timestamp(moment(made.end.max(made.start)));
    }
}

/// A span as it is made; times in milliseconds since 1970.
struct Made {
    name: String,
    start: i64,
    end: i64,
    attributes: Vec<KeyValue>,
    status: Status,
}

/// An attempt that is about to end.
struct Ended<'a> {
    attempt: &'a Attempt,
    task: &'a Task,
    job: &'a Job,
    stage: &'a Stage,
    worker: &'a str,
}

impl<'a> Ended<'a> {
    fn of(state: &'a State, attempt: AttemptId) -> Option<Self> {
        let attempt = state.attempt(attempt)?;
        let task = state.task(attempt.task)?;
        let job = state.job(task.job)?;
        Some(Self {
            attempt,
            task,
            job,
            stage: job.stages.get(task.stage)?,
            worker: state.worker(attempt.worker).map_or("", |worker| &worker.name),
        })
    }

    fn tell(&self, outcome: &'static str, status: Status, at: i64) {
        let trace = Trace::of(self.job);
        let number = self.attempt.lease.attempt;
        let attributes = vec![
            KeyValue::new("espalier.job", self.job.id.to_string()),
            KeyValue::new("espalier.stage", self.stage.name.to_string()),
            KeyValue::new("espalier.task", self.task.id.to_string()),
            KeyValue::new("espalier.attempt", number.to_string()),
            KeyValue::new("espalier.worker", self.worker.to_owned()),
            KeyValue::new("espalier.device", self.attempt.device.to_string()),
            KeyValue::new("espalier.outcome", outcome),
        ];
        let made = Made {
            name: format!("attempt {}", self.task.name),
            start: self.attempt.started_at,
            end: at,
            attributes,
            status,
        };
        let parent = trace.below(stage_span(trace, self.task.stage));
        trace.record(trace.span("attempt", number.0), &parent, made);
    }
}

fn stage_span(trace: Trace, stage: usize) -> SpanId {
    trace.span("stage", u64::try_from(stage).unwrap_or(u64::MAX))
}

/// A task is about to be done; it may be the last of its stage.
fn task_done(state: &State, task: TaskId, at: i64) {
    let Some(task) = state.task(task) else { return };
    let Some(job) = state.job(task.job) else { return };
    let Some(stage) = job.stages.get(task.stage) else {
        return;
    };
    if stage.done.saturating_add(1) < stage.tasks.len() {
        return;
    }
    let trace = Trace::of(job);
    let made = Made {
        name: format!("stage {}", stage.name),
        start: stage.started_at.unwrap_or(at),
        end: at,
        attributes: vec![
            KeyValue::new("espalier.job", job.id.to_string()),
            KeyValue::new("espalier.stage", stage.name.to_string()),
            KeyValue::new("espalier.decision", stage.note.clone()),
        ],
        status: Status::Ok,
    };
    trace.record(stage_span(trace, task.stage), &trace.below(trace.root()), made);
}

fn below_job(job: &Job, name: &'static str, number: u64, start: i64, end: i64, status: Status) {
    let trace = Trace::of(job);
    let made = Made {
        name: name.to_owned(),
        start,
        end,
        attributes: vec![KeyValue::new("espalier.job", job.id.to_string())],
        status,
    };
    trace.record(trace.span(name, number), &trace.below(trace.root()), made);
}

fn job_ended(job: &Job, at: i64, status: Status) {
    let trace = Trace::of(job);
    let made = Made {
        name: format!("job {}", job.id),
        start: job.submitted_at,
        end: at,
        attributes: vec![
            KeyValue::new("espalier.job", job.id.to_string()),
            KeyValue::new("espalier.parent", job.parent.clone()),
        ],
        status,
    };
    trace.record(trace.root(), &Context::new(), made);
}

fn moment(unix_ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(unix_ms).unwrap_or(0))
}

fn first<const N: usize>(hasher: &blake3::Hasher) -> [u8; N] {
    let mut bytes = [0; N];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}
