//! Talking to a coordinator: a thin client with deadlines, whose errors say what to do.
//!
//! Jobs are here and in [`jobs`], tasks and workers in [`tasks`] and [`workers`], cost tables in [`kept`].

mod jobs;
mod kept;
mod tasks;
mod workers;

pub use jobs::Events;

use std::time::{Duration, Instant};

use espalier_proto::MESSAGE_LIMIT_BYTES;
use espalier_proto::v1::cluster_client::ClusterClient;
use espalier_proto::v1::cost_tables_client::CostTablesClient;
use espalier_proto::v1::tasks_client::TasksClient;
use espalier_proto::v1::{self, jobs_client::JobsClient, submit_request::Spec};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::{Error, Result};

const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// A connection to a coordinator. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    inner: JobsClient<Channel>,
    tasks: TasksClient<Channel>,
    cluster: ClusterClient<Channel>,
    kept: CostTablesClient<Channel>,
    endpoint: String,
    deadline: Duration,
}

impl Client {
    /// Connects; every later call has this deadline, save the whole of a watch.
    ///
    /// # Errors
    /// [`Error::Endpoint`] or [`Error::Unreachable`].
    pub async fn connect(endpoint: &str, deadline: Duration) -> Result<Self> {
        let with_scheme = espalier_proto::coordinator_url(endpoint);
        let wrong = |_| Error::Endpoint {
            endpoint: endpoint.to_owned(),
        };
        let address = Endpoint::from_shared(with_scheme.clone()).map_err(wrong)?;
        // Others would be spoken to in plain text all the same, and a path would be left out.
        if address.uri().scheme_str() != Some("http") || !matches!(address.uri().path(), "" | "/") {
            return Err(Error::Endpoint {
                endpoint: endpoint.to_owned(),
            });
        }
        let channel = address
            .connect_timeout(CONNECT_DEADLINE.min(deadline))
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(true)
            .tcp_nodelay(true)
            .connect()
            .await
            .map_err(|error| Error::Unreachable {
                endpoint: with_scheme.clone(),
                message: innermost(&error),
            })?;
        let tasks = TasksClient::new(channel.clone())
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        let cluster = ClusterClient::new(channel.clone())
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        let kept = CostTablesClient::new(channel.clone())
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        let inner = JobsClient::new(channel)
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
            .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
        Ok(Self {
            inner,
            tasks,
            cluster,
            kept,
            endpoint: with_scheme,
            deadline,
        })
    }

    /// Submits a spec; gives the job, and whether an earlier submission with this request id had made it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a wrong spec, [`Error::Conflict`] for a taken output or request id.
    pub async fn submit(&mut self, spec: Spec, request_id: &str) -> Result<(v1::Job, bool)> {
        self.submit_first(spec, request_id, 0).await
    }

    /// The same, with a priority: higher goes first, −100 to 100.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub async fn submit_first(
        &mut self,
        spec: Spec,
        request_id: &str,
        priority: i32,
    ) -> Result<(v1::Job, bool)> {
        let request = v1::SubmitRequest {
            request_id: request_id.to_owned(),
            spec: Some(spec),
            priority,
        };
        let request = self.timed(request);
        let response = self
            .inner
            .submit(request)
            .await
            .map_err(|status| self.error("submit", &status))?;
        let v1::SubmitResponse { job, existed } = response.into_inner();
        Ok((present(job)?, existed))
    }

    /// One job.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    pub async fn get(&mut self, job_id: &str) -> Result<v1::Job> {
        let request = self.timed(v1::GetRequest {
            job_id: job_id.to_owned(),
        });
        let response = self
            .inner
            .get(request)
            .await
            .map_err(|status| self.error("get", &status))?;
        present(response.into_inner().job)
    }

    /// What a job has found out so far, as JSON of [`crate::pipeline::Findings`].
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such job; another when it has no scores yet.
    pub async fn findings(&mut self, job_id: &str) -> Result<String> {
        let request = self.timed(v1::FindingsRequest {
            job_id: job_id.to_owned(),
        });
        let response = self.inner.findings(request).await;
        let response = response.map_err(|status| self.error("findings", &status))?;
        Ok(response.into_inner().findings_json)
    }

    /// A page of jobs, the newest first, and the token of the next one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a wrong token.
    pub async fn list(
        &mut self,
        page_size: u32,
        page_token: &str,
        states: &[v1::JobState],
    ) -> Result<(Vec<v1::Job>, Option<String>)> {
        let request = self.timed(v1::ListRequest {
            page_size,
            page_token: page_token.to_owned(),
            states: states.iter().map(|state| i32::from(*state)).collect(),
        });
        let response = self
            .inner
            .list(request)
            .await
            .map_err(|status| self.error("list", &status))?;
        let v1::ListResponse {
            jobs,
            next_page_token,
        } = response.into_inner();
        Ok((jobs, Some(next_page_token).filter(|token| !token.is_empty())))
    }

    /// Follows a job from its first snapshot above `after_revision`.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    pub async fn watch(&mut self, job_id: &str, after_revision: u64) -> Result<Following> {
        let request = v1::WatchRequest {
            job_id: job_id.to_owned(),
            after_revision,
        };
        let opened = tokio::time::timeout(self.deadline, self.inner.watch(request)).await;
        let response = opened
            .map_err(|_| Error::Timeout { call: "watch" })?
            .map_err(|status| self.error("watch", &status))?;
        Ok(Following {
            inner: response.into_inner(),
            client: self.clone(),
            job_id: job_id.to_owned(),
        })
    }

    /// Ends a job.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Conflict`] when it has ended otherwise.
    pub async fn cancel(&mut self, job_id: &str, reason: &str) -> Result<v1::Job> {
        let request = self.timed(v1::CancelRequest {
            job_id: job_id.to_owned(),
            reason: reason.to_owned(),
        });
        let response = self
            .inner
            .cancel(request)
            .await
            .map_err(|status| self.error("cancel", &status))?;
        present(response.into_inner().job)
    }

    /// Opens a stream; the deadline is for its opening.
    async fn opened<T>(
        &self,
        call: &'static str,
        opening: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    ) -> Result<Messages<T>> {
        let opened = tokio::time::timeout(self.deadline, opening).await;
        let response = opened
            .map_err(|_| Error::Timeout { call })?
            .map_err(|status| self.error(call, &status))?;
        Ok(Messages {
            inner: response.into_inner(),
            client: self.clone(),
            call,
        })
    }

    fn timed<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.deadline);
        request
    }

    fn error(&self, call: &'static str, status: &Status) -> Error {
        let message = status.message().to_owned();
        match status.code() {
            Code::NotFound => Error::NotFound(message),
            Code::InvalidArgument => Error::Invalid(message),
            Code::FailedPrecondition | Code::AlreadyExists => Error::Conflict(message),
            Code::PermissionDenied | Code::Unauthenticated => Error::Denied(message),
            Code::Unimplemented => Error::Internal(format!(
                "this coordinator does not offer {call}: {message}; use the version of the coordinator"
            )),
            Code::ResourceExhausted => Error::Exhausted(message),
            Code::DeadlineExceeded => Error::Timeout { call },
            // tonic tells a deadline of its own by cancelling.
            Code::Cancelled if message.contains("imeout") => Error::Timeout { call },
            // A connection that breaks in the middle of a stream comes as unknown, one to what speaks something else
            // as cancelled.
            Code::Unavailable | Code::Unknown | Code::Cancelled => Error::Unreachable {
                endpoint: self.endpoint.clone(),
                message,
            },
            // What a coordinator answers has no cause on this side: a connection that speaks something else has.
            Code::Internal if std::error::Error::source(status).is_some() => Error::Unreachable {
                endpoint: self.endpoint.clone(),
                message,
            },
            code => Error::Internal(format!("{call}: {message} ({code:?})")),
        }
    }
}

/// What a coordinator sends one after another: events, lines of a log.
#[derive(Debug)]
pub struct Messages<T> {
    inner: Streaming<T>,
    client: Client,
    call: &'static str,
}

impl<T> Messages<T> {
    /// The next; none after the last.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when the coordinator goes away.
    pub async fn next(&mut self) -> Result<Option<T>> {
        let message = self.inner.message().await;
        message.map_err(|status| self.client.error(self.call, &status))
    }
}

/// How long a broken watch is made again.
pub const RECONNECTING: Duration = Duration::from_secs(60);
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(500);

/// How long a coordinator has been away: from the first broken call on, whatever was waited for before.
#[derive(Debug, Default)]
struct Away {
    since: Option<Instant>,
}

impl Away {
    /// Whether it is tried again.
    fn is_borne(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        now.saturating_duration_since(since) < RECONNECTING
    }
}

/// Snapshots of a job.
#[derive(Debug)]
pub struct Following {
    inner: Streaming<v1::WatchResponse>,
    client: Client,
    job_id: String,
}

impl Following {
    /// The next snapshot; none after the last, which is terminal. When the connection breaks, for example
    /// because the coordinator is restarted, it is made again for [`RECONNECTING`], and the job as it stands
    /// then comes next.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when the coordinator stays away.
    pub async fn next(&mut self) -> Result<Option<v1::Job>> {
        let mut away = Away::default();
        loop {
            let response = self.inner.message().await;
            let error = match response.map_err(|status| self.client.error("watch", &status)) {
                Ok(Some(response)) => return present(response.job).map(Some),
                Ok(None) => return Ok(None),
                Err(error) => error,
            };
            self.reconnect(error, &mut away).await?;
        }
    }

    /// Opens the stream again; gives `error` back when it is no lost connection or time is up.
    async fn reconnect(&mut self, mut error: Error, away: &mut Away) -> Result<()> {
        while error.is_away() && away.is_borne(Instant::now()) {
            tokio::time::sleep(BETWEEN_ATTEMPTS).await;
            let job_id = self.job_id.clone();
            match self.client.watch(&job_id, 0).await {
                Ok(following) => {
                    self.inner = following.inner;
                    return Ok(());
                }
                Err(again) => error = again,
            }
        }
        Err(error)
    }
}

fn present(job: Option<v1::Job>) -> Result<v1::Job> {
    job.ok_or_else(|| Error::Internal("the coordinator's answer has no job".to_owned()))
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_coordinator_is_away_from_the_first_broken_call_on_and_not_from_when_it_was_last_heard() {
        let mut away = Away::default();
        let asked = Instant::now();
        let broke = asked + 10 * RECONNECTING;
        assert!(
            away.is_borne(broke),
            "a long wait for a message is not its absence"
        );
        assert!(away.is_borne(broke + RECONNECTING / 2));
        assert!(!away.is_borne(broke + RECONNECTING));
    }
}
