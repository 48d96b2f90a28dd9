//! `/`: the cluster at a glance. One page that loads nothing from elsewhere and refreshes itself.
//!
//! What it shows is bounded: the newest jobs, the stages of those that work, a few of their tasks.

use std::fmt::Write as _;

use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::response::{Html, IntoResponse, Response};
use espalier_proto::json;
use espalier_proto::v1::{
    GetRequest, Job, JobState, ListRequest, Stage, StageState, Task, Worker, WorkerState,
};

use super::Sources;
use crate::report::format::{duration, escape};

const STYLE: &str = include_str!("status.css");
const SCRIPT: &str = include_str!("status.js");
/// Jobs that are listed.
const JOBS: u32 = 30;
/// Jobs whose stages are shown.
const OPEN: usize = 8;
/// Tasks that are shown of a job.
const TASKS: usize = 6;
/// Workers that are shown; the others are counted.
const WORKERS: usize = 200;
/// Devices that are shown of a worker.
const DEVICES: usize = 16;
/// The page may run its own script and style, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What the page shows.
#[derive(Debug, Default)]
pub struct Shown {
    /// Why the coordinator is not ready; none when it is.
    pub trouble: Option<String>,
    /// The newest jobs, those that work with their stages.
    pub jobs: Vec<Job>,
    /// The workers.
    pub workers: Vec<Worker>,
}

/// `/status.js`.
pub async fn script() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/javascript; charset=utf-8"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, SCRIPT).into_response()
}

/// `/`. What cannot be had is left out and said: a page that shows the trouble is worth more than none.
pub async fn status(State(sources): State<Sources>) -> Response {
    let mut shown = Shown {
        trouble: sources.vitals.ready().err(),
        ..Shown::default()
    };
    // Before the journal is replayed there is nothing to be had.
    if sources.vitals.is_replayed()
        && let Err(status) = gather(&sources, &mut shown).await
    {
        shown.trouble.get_or_insert_with(|| status.message().to_owned());
    }
    let headers = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, Html(page(&shown))).into_response()
}

async fn gather(sources: &Sources, shown: &mut Shown) -> Result<(), tonic::Status> {
    let request = ListRequest {
        page_size: JOBS,
        ..ListRequest::default()
    };
    shown.jobs = sources.reads.jobs(request).await?.jobs;
    let works = |job: &&mut Job| !has_ended(job.state());
    for job in shown.jobs.iter_mut().filter(works).take(OPEN) {
        let request = GetRequest {
            job_id: job.id.clone(),
        };
        if let Some(whole) = sources.reads.job(request).await?.job {
            *job = whole;
        }
    }
    shown.workers = sources.reads.workers().await?.workers;
    Ok(())
}

/// The whole page.
pub fn page(shown: &Shown) -> String {
    let mut body = String::new();
    headline(&mut body, shown);
    jobs(&mut body, &shown.jobs);
    workers(&mut body, &shown.workers);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\
         <title>Espalier</title><style>{STYLE}</style><script src=\"/status.js\" defer></script></head>\n\
         <body><main>\n{body}<footer>Espalier {} · <a href=\"/api/v1/jobs\">jobs</a>, \
         <a href=\"/api/v1/workers\">workers</a> and <a href=\"/api/v1/health\">health</a> as JSON · \
         <a href=\"/metrics\">metrics</a></footer>\n</main></body></html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn headline(body: &mut String, shown: &Shown) {
    let (class, health) = match &shown.trouble {
        None => ("good", "ready"),
        Some(reason) => ("bad", reason.as_str()),
    };
    let _ = writeln!(
        body,
        "<header><h1>Espalier</h1><span class=\"pill {class}\">{}</span>\
         <span class=\"pill bad\" id=\"gone\" hidden>the coordinator does not answer</span></header>",
        escape(health)
    );
    let devices = || {
        shown
            .workers
            .iter()
            .filter(|worker| is_here(worker))
            .flat_map(|worker| &worker.devices)
    };
    let busy = devices().filter(|device| device.attempt != 0).count();
    let here = shown.workers.iter().filter(|worker| is_here(worker)).count();
    let working = shown.jobs.iter().filter(|job| !has_ended(job.state())).count();
    let failures = shown
        .jobs
        .iter()
        .filter(|job| job.state() == JobState::Failed)
        .count();
    let facts = [
        ("Jobs at work", working.to_string()),
        ("Failed lately", failures.to_string()),
        ("Workers here", format!("{here} of {}", shown.workers.len())),
        ("Devices busy", format!("{busy} of {}", devices().count())),
    ];
    body.push_str("<dl class=\"facts\">");
    for (name, value) in facts {
        let _ = write!(body, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    }
    body.push_str("</dl>\n");
}

fn jobs(body: &mut String, jobs: &[Job]) {
    body.push_str("<h2>Jobs</h2>\n");
    if jobs.is_empty() {
        body.push_str("<p class=\"soft\">None yet. <code>espalier job submit SPEC</code> makes one.</p>\n");
        return;
    }
    for job in jobs.iter().filter(|job| !has_ended(job.state())) {
        open_job(body, job);
    }
    let ended: Vec<&Job> = jobs.iter().filter(|job| has_ended(job.state())).collect();
    if ended.is_empty() {
        return;
    }
    body.push_str("<div class=\"card\"><table>");
    for job in ended {
        let took = job.finished_unix_ms.saturating_sub(job.submitted_unix_ms);
        let _ = write!(
            body,
            "<tr><td>{}</td><td>{}</td><td class=\"clip soft\">{}</td><td class=\"clip soft\">{}</td>\
             <td class=\"soft\">{}</td></tr>",
            link(&job.id),
            badge(job.state()),
            escape(&job.parent),
            escape(&job.message),
            time(u64::try_from(took).unwrap_or(0)),
        );
    }
    body.push_str("</table></div>\n");
}

fn open_job(body: &mut String, job: &Job) {
    let _ = write!(
        body,
        "<div class=\"card\"><div class=\"head\"><b>{}</b>{}<span class=\"clip soft\">{}</span>\
         <span class=\"push small soft\">{}</span></div>",
        link(&job.id),
        badge(job.state()),
        escape(&job.parent),
        escape(&job.message),
    );
    if !job.stages.is_empty() {
        body.push_str("<div class=\"stages\">");
        job.stages.iter().for_each(|shown| stage(body, shown));
        body.push_str("</div>");
    }
    let all: Vec<&Task> = job.stages.iter().flat_map(|stage| &stage.active).collect();
    if !all.is_empty() {
        body.push_str("<div class=\"tasks\">");
        all.iter().take(TASKS).for_each(|shown| task(body, shown));
        if let Some(more) = all.len().checked_sub(TASKS).filter(|more| *more > 0) {
            let _ = write!(body, "<div class=\"small soft\">and {more} more</div>");
        }
        body.push_str("</div>");
    }
    body.push_str("</div>\n");
}

fn stage(body: &mut String, stage: &Stage) {
    let class = json::stage_state(stage.state());
    let width = percent(stage.tasks_done.into(), stage.tasks.into());
    let time = match stage.state() {
        StageState::Waiting | StageState::Unspecified => String::new(),
        _ => format!(" · {}", time(stage.elapsed_ms)),
    };
    let _ = write!(
        body,
        "<div class=\"stage {class}\" title=\"{}\"><b>{}</b><span>{}/{}{time}</span>\
         <i style=\"width:{width}%\"></i></div>",
        escape(&stage.decision),
        escape(&stage.name),
        stage.tasks_done,
        stage.tasks,
    );
}

fn task(body: &mut String, task: &Task) {
    let (unknown, width) = match task.total {
        0 => (" unknown", 0),
        total => ("", percent(task.done, total)),
    };
    let at = match task.total {
        0 => String::new(),
        total => format!("{} of {total} {} ", task.done, escape(&task.unit)),
    };
    let note = match (task.worker.is_empty(), task.note.is_empty()) {
        (true, _) => format!("waits to be tried again: {}", escape(&task.last_failure)),
        (false, true) => format!("{at}on {} {}", escape(&task.worker), escape(&task.device)),
        (false, false) => format!("{at}· {}", escape(&task.note)),
    };
    let style = if width > 0 {
        format!(" style=\"width:{width}%\"")
    } else {
        String::new()
    };
    let _ = write!(
        body,
        "<div class=\"task\"><span class=\"clip\">{}</span><div class=\"bar{unknown}\"><i{style}></i></div>\
         <span class=\"clip soft\">{note}</span></div>",
        escape(&task.name),
    );
}

fn workers(body: &mut String, workers: &[Worker]) {
    body.push_str("<h2>Workers</h2>\n");
    if workers.is_empty() {
        body.push_str("<p class=\"soft\">None yet. <code>espalier worker run</code> starts one.</p>\n");
        return;
    }
    body.push_str("<div class=\"workers\">");
    workers.iter().take(WORKERS).for_each(|shown| worker(body, shown));
    body.push_str("</div>\n");
    if let Some(more) = workers.len().checked_sub(WORKERS).filter(|more| *more > 0) {
        let _ = writeln!(body, "<p class=\"soft\">and {more} more</p>");
    }
}

fn worker(body: &mut String, worker: &Worker) {
    let state = worker.state();
    let class = match state {
        WorkerState::Ready => "good",
        WorkerState::Lost => "bad",
        WorkerState::Away | WorkerState::Cordoned | WorkerState::Leaving => "warm",
        WorkerState::Left | WorkerState::Unspecified => "",
    };
    let _ = write!(
        body,
        "<div class=\"card worker\" title=\"{}\"><div class=\"head\"><b class=\"clip\">{}</b>\
         <span class=\"pill {class} push\">{}</span></div>",
        escape(&worker.message),
        escape(&worker.name),
        json::worker_state(state),
    );
    if !worker.message.is_empty() {
        let _ = write!(
            body,
            "<div class=\"small soft clip\">{}</div>",
            escape(&worker.message)
        );
    }
    if is_here(worker) {
        body.push_str("<div class=\"devices\">");
        for device in worker.devices.iter().take(DEVICES) {
            let (class, work) = match device.attempt {
                0 => ("", "free".to_owned()),
                _ => (
                    " busy",
                    format!("{} {}", escape(&device.job_id), escape(&device.stage)),
                ),
            };
            let id = device
                .device
                .as_ref()
                .map(|device| escape(&device.id))
                .unwrap_or_default();
            let _ = write!(
                body,
                "<div class=\"device{class}\"><span>{id}</span><span class=\"clip\">{work}</span></div>"
            );
        }
        body.push_str("</div>");
    }
    body.push_str("</div>");
}

fn is_here(worker: &Worker) -> bool {
    match worker.state() {
        WorkerState::Ready | WorkerState::Cordoned | WorkerState::Leaving => true,
        WorkerState::Away | WorkerState::Lost | WorkerState::Left | WorkerState::Unspecified => false,
    }
}

fn has_ended(state: JobState) -> bool {
    match state {
        JobState::Succeeded | JobState::Failed | JobState::Cancelled => true,
        JobState::Queued | JobState::Running | JobState::Paused | JobState::Unspecified => false,
    }
}

fn badge(state: JobState) -> String {
    let class = match state {
        JobState::Running | JobState::Succeeded => "good",
        JobState::Failed => "bad",
        JobState::Paused | JobState::Cancelled => "warm",
        JobState::Queued | JobState::Unspecified => "",
    };
    format!("<span class=\"pill {class}\">{}</span>", json::job_state(state))
}

fn link(job: &str) -> String {
    let job = escape(job);
    format!("<a href=\"/api/v1/jobs/{job}\">{job}</a>")
}

fn time(milliseconds: u64) -> String {
    duration(std::time::Duration::from_millis(milliseconds).as_secs_f64())
}

fn percent(part: u64, whole: u64) -> u64 {
    part.min(whole)
        .saturating_mul(100)
        .checked_div(whole)
        .unwrap_or(0)
}
