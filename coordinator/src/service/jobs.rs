//! The `Jobs` service: checks what comes in, asks the loop, translates what goes out.

use std::collections::VecDeque;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use espalier_proto::v1::{self, jobs_server::Jobs};
use futures::Stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Request, Response, Status};

use super::inbox::Inbox;
use super::owner::{self, JobOrder, Listing, Query};
use super::{adapter, outcome, watch::Following};
use crate::pipeline::Findings;
use crate::scheduler::JobId;
use crate::spec::JobSpec;

const REQUEST_ID_CHARACTERS: usize = 128;
const LINE_CHARACTERS: usize = 500;
const HIGHEST_PRIORITY: i32 = 100;
/// How often a client that follows events is served.
const BETWEEN_PAGES: Duration = Duration::from_millis(250);
/// Clients that may follow events at a time.
pub(super) const EVENT_FOLLOWERS: usize = 256;
const PAGE: u32 = 50;
const LARGEST_PAGE: u32 = 500;

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) inbox: Inbox,
    /// One for each client that follows events.
    pub(super) seats: Arc<Semaphore>,
}

pub(super) fn parse_id(text: &str) -> Result<JobId, Status> {
    text.parse().map_err(Status::invalid_argument)
}

/// A user's words as one line of bounded length, or what stands for none.
pub(super) fn line(text: String, otherwise: &str) -> String {
    let one_line: String = text
        .chars()
        .map(|character| if character.is_control() { ' ' } else { character })
        .take(LINE_CHARACTERS)
        .collect();
    match one_line.trim() {
        "" => otherwise.to_owned(),
        line => line.to_owned(),
    }
}

/// Reads and checks a spec; needs the file system, so it runs on a blocking thread.
fn admit(spec: v1::submit_request::Spec, priority: i32) -> Result<owner::Submission, Status> {
    let base = std::env::current_dir().unwrap_or_else(|_| Path::new("/").to_owned());
    let parsed = match spec {
        v1::submit_request::Spec::Yaml(text) => JobSpec::from_yaml(&text, &base),
        v1::submit_request::Spec::Json(text) => JobSpec::from_json(&text),
    };
    let invalid = |error: crate::spec::SpecError| Status::invalid_argument(error.to_string());
    let mut spec = parsed.map_err(invalid)?;
    spec.check_files().map_err(invalid)?;
    spec.import_files().map_err(invalid)?;
    let output = spec.output.clone().ok_or_else(|| {
        Status::invalid_argument("output: missing: name the directory to write the outcome to")
    })?;
    let free = outcome::check_free(Path::new(&output));
    let device_kind = serde_json::to_value(spec.target.device)
        .ok()
        .and_then(|kind| kind.as_str().map(str::to_owned))
        .ok_or_else(|| Status::internal("the target's device has no name"))?;
    let text = serde_json::to_string(&spec).map_err(|error| Status::internal(error.to_string()))?;
    Ok(owner::Submission {
        spec: text.into(),
        parent: spec.parent,
        output,
        device_kind,
        priority,
        free,
    })
}

fn request_id_of(request_id: String) -> Result<Option<String>, Status> {
    if request_id.chars().count() > REQUEST_ID_CHARACTERS {
        return Err(Status::invalid_argument(format!(
            "request_id: has more than {REQUEST_ID_CHARACTERS} characters"
        )));
    }
    Ok(Some(request_id).filter(|id| !id.is_empty()))
}

impl Service {
    async fn keep(&self, job_id: &str, order: JobOrder) -> Result<Option<v1::Job>, Status> {
        let job = parse_id(job_id)?;
        let answer = self
            .inbox
            .ask(|reply| owner::Request::KeepJob { job, order, reply });
        answer.await.map(Some)
    }
}

#[tonic::async_trait]
impl Jobs for Service {
    async fn submit(
        &self,
        request: Request<v1::SubmitRequest>,
    ) -> Result<Response<v1::SubmitResponse>, Status> {
        let v1::SubmitRequest {
            request_id,
            spec,
            priority,
        } = request.into_inner();
        let request_id = request_id_of(request_id)?;
        if !(-HIGHEST_PRIORITY..=HIGHEST_PRIORITY).contains(&priority) {
            return Err(Status::invalid_argument(format!(
                "priority: {priority} is not between -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}"
            )));
        }
        let spec = spec.ok_or_else(|| Status::invalid_argument("spec: missing"))?;
        let submission = tokio::task::spawn_blocking(move || admit(spec, priority))
            .await
            .map_err(|error| Status::internal(error.to_string()))??;
        let (job, existed) = self
            .inbox
            .ask(|reply| owner::Request::Submit {
                request_id,
                submission: Box::new(submission),
                reply,
            })
            .await?;
        Ok(Response::new(v1::SubmitResponse {
            job: Some(job),
            existed,
        }))
    }

    async fn pause(&self, request: Request<v1::PauseRequest>) -> Result<Response<v1::PauseResponse>, Status> {
        let v1::PauseRequest { job_id, reason } = request.into_inner();
        let reason = line(reason, "");
        let job = self.keep(&job_id, JobOrder::Pause { reason }).await?;
        Ok(Response::new(v1::PauseResponse { job }))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        let job = self.keep(&request.get_ref().job_id, JobOrder::Resume).await?;
        Ok(Response::new(v1::ResumeResponse { job }))
    }

    async fn retry(&self, request: Request<v1::RetryRequest>) -> Result<Response<v1::RetryResponse>, Status> {
        let v1::RetryRequest { job_id, request_id } = request.into_inner();
        let request_id = request_id_of(request_id)?;
        let job = self.keep(&job_id, JobOrder::Retry { request_id }).await?;
        Ok(Response::new(v1::RetryResponse { job }))
    }

    type EventsStream = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let v1::EventsRequest {
            job_id,
            follow,
            after,
        } = request.into_inner();
        let job = parse_id(&job_id)?;
        let seat = Arc::clone(&self.seats)
            .try_acquire_owned()
            .map_err(|_| Status::resource_exhausted("too many clients follow events: end some of them"))?;
        let events = Events {
            inbox: self.inbox.clone(),
            job,
            follow,
            after,
            ready: VecDeque::new(),
            ended: false,
            _seat: seat,
        };
        // A job that does not exist is told before the stream begins.
        let stream = events.fetched().await?.stream();
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::GetResponse>, Status> {
        let job = parse_id(&request.get_ref().job_id)?;
        let job = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Job { job, reply }))
            .await?;
        Ok(Response::new(v1::GetResponse { job: Some(job) }))
    }

    async fn findings(
        &self,
        request: Request<v1::FindingsRequest>,
    ) -> Result<Response<v1::FindingsResponse>, Status> {
        let job = parse_id(&request.get_ref().job_id)?;
        let shown = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Job { job, reply }))
            .await?;
        let refused = |reason: String| Status::failed_precondition(format!("{job}: {reason}"));
        let found = if shown.outcome_json.is_empty() {
            let (spec, stages) = self
                .inbox
                .ask(|reply| owner::Request::Query(Query::Findings { job, reply }))
                .await?;
            let read = move || adapter::findings(spec.as_str(), &stages);
            tokio::task::spawn_blocking(read)
                .await
                .map_err(|error| Status::internal(error.to_string()))?
                .map_err(refused)?
        } else {
            Findings::of_outcome(&shown.outcome_json)
                .map_err(|reason| refused(format!("its outcome {reason}")))?
        };
        let findings_json =
            serde_json::to_string(&found).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::FindingsResponse { findings_json }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<v1::ListResponse>, Status> {
        let v1::ListRequest {
            page_size,
            page_token,
            states,
        } = request.into_inner();
        let before = match page_token.as_str() {
            "" => None,
            token => Some(
                parse_id(token)
                    .map_err(|_| Status::invalid_argument("page_token: is not one that List has given"))?,
            ),
        };
        let size = if page_size == 0 {
            PAGE
        } else {
            page_size.min(LARGEST_PAGE)
        };
        let size = usize::try_from(size).unwrap_or(1);
        let listing = Listing { before, size, states };
        let jobs = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Jobs { listing, reply }))
            .await?;
        let next_page_token = match jobs.last() {
            Some(last) if jobs.len() == size => last.id.clone(),
            _ => String::new(),
        };
        Ok(Response::new(v1::ListResponse {
            jobs,
            next_page_token,
        }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::WatchResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchRequest {
            job_id,
            after_revision,
        } = request.into_inner();
        let job = parse_id(&job_id)?;
        let following = self
            .inbox
            .ask(|reply| owner::Request::Watch { job, reply })
            .await?;
        Ok(Response::new(Box::pin(snapshots(following, after_revision))))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let v1::CancelRequest { job_id, reason } = request.into_inner();
        let reason = line(reason, "cancelled by a user");
        let job = self.keep(&job_id, JobOrder::Cancel { reason }).await?;
        Ok(Response::new(v1::CancelResponse { job }))
    }
}

/// Events of a job on their way to a client: asked for page by page, so that a slow client holds nothing.
struct Events {
    inbox: Inbox,
    job: JobId,
    follow: bool,
    after: u64,
    ready: VecDeque<v1::JobEvent>,
    ended: bool,
    _seat: OwnedSemaphorePermit,
}

impl Events {
    async fn fetched(mut self) -> Result<Self, Status> {
        let (job, after) = (self.job, self.after);
        let (page, ended) = self
            .inbox
            .ask(|reply| owner::Request::Query(Query::Events { job, after, reply }))
            .await?;
        self.after = page.last().map_or(self.after, |(number, _)| *number);
        let numbered = page
            .into_iter()
            .map(|(number, event)| v1::JobEvent { number, ..event });
        self.ready.extend(numbered);
        self.ended = ended || !self.follow;
        Ok(self)
    }

    fn stream(self) -> impl Stream<Item = Result<v1::JobEvent, Status>> + Send {
        futures::stream::unfold(Some(self), |events| async move {
            let mut events = events?;
            loop {
                if let Some(event) = events.ready.pop_front() {
                    return Some((Ok(event), Some(events)));
                }
                if events.ended {
                    return None;
                }
                tokio::time::sleep(BETWEEN_PAGES).await;
                events = match events.fetched().await {
                    Ok(events) => events,
                    Err(status) => return Some((Err(status), None)),
                };
            }
        })
    }
}

struct Follower {
    following: Following,
    seen: u64,
    first: bool,
    ended: bool,
}

fn snapshots(
    following: Following,
    after_revision: u64,
) -> impl Stream<Item = Result<v1::WatchResponse, Status>> + Send {
    let follower = Follower {
        following,
        seen: after_revision,
        first: true,
        ended: false,
    };
    futures::stream::unfold(follower, |mut follower| async move {
        if follower.ended {
            return None;
        }
        loop {
            if !follower.first && follower.following.snapshots.changed().await.is_err() {
                follower.ended = true;
                let stopping = Status::unavailable("the coordinator is stopping");
                return Some((Err(stopping), follower));
            }
            let job = follower.following.snapshots.borrow_and_update().clone();
            follower.ended = is_terminal(job.state());
            let first = std::mem::take(&mut follower.first);
            if first && job.revision <= follower.seen && !follower.ended {
                continue;
            }
            if !first && job.revision <= follower.seen {
                // Another client began to follow: the snapshot is one this client has.
                if follower.ended {
                    return None;
                }
                continue;
            }
            let lagged = !first && job.revision > follower.seen.saturating_add(1);
            follower.seen = job.revision;
            let mut job = job.as_ref().clone();
            job.spec_json = std::mem::take(&mut follower.following.spec_json);
            let job = Some(job);
            return Some((Ok(v1::WatchResponse { job, lagged }), follower));
        }
    })
}

fn is_terminal(state: v1::JobState) -> bool {
    match state {
        v1::JobState::Succeeded | v1::JobState::Failed | v1::JobState::Cancelled => true,
        v1::JobState::Unspecified | v1::JobState::Queued | v1::JobState::Running | v1::JobState::Paused => {
            false
        }
    }
}
