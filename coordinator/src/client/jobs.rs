//! Holding a job, letting it go on, and what happened to it.

use std::time::Instant;

use espalier_proto::v1;

use super::{Away, BETWEEN_ATTEMPTS, Client, Messages, present};
use crate::{Error, Result};

impl Client {
    /// Starts nothing more of a job.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Conflict`] when it has ended.
    pub async fn pause(&mut self, job_id: &str, reason: &str) -> Result<v1::Job> {
        let request = self.timed(v1::PauseRequest {
            job_id: job_id.to_owned(),
            reason: reason.to_owned(),
        });
        let response = self.inner.pause(request).await;
        let response = response.map_err(|status| self.error("pause", &status))?;
        present(response.into_inner().job)
    }

    /// Lets a paused job go on.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Conflict`] when it has ended.
    pub async fn resume(&mut self, job_id: &str) -> Result<v1::Job> {
        let request = self.timed(v1::ResumeRequest {
            job_id: job_id.to_owned(),
        });
        let response = self.inner.resume(request).await;
        let response = response.map_err(|status| self.error("resume", &status))?;
        present(response.into_inner().job)
    }

    /// Lets a failed job go on from where it failed. The same request id twice is one retry.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Conflict`] when it has not failed.
    pub async fn retry(&mut self, job_id: &str, request_id: &str) -> Result<v1::Job> {
        let request = self.timed(v1::RetryRequest {
            job_id: job_id.to_owned(),
            request_id: request_id.to_owned(),
        });
        let response = self.inner.retry(request).await;
        let response = response.map_err(|status| self.error("retry", &status))?;
        present(response.into_inner().job)
    }

    /// What happened to a job, in order; with `follow` until it has ended.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    pub async fn events(&mut self, job_id: &str, follow: bool) -> Result<Events> {
        let messages = self.events_after(job_id, follow, 0).await?;
        Ok(Events {
            messages,
            client: self.clone(),
            job_id: job_id.to_owned(),
            follow,
            last: None,
        })
    }

    async fn events_after(
        &mut self,
        job_id: &str,
        follow: bool,
        after: u64,
    ) -> Result<Messages<v1::JobEvent>> {
        let request = v1::EventsRequest {
            job_id: job_id.to_owned(),
            follow,
            after,
        };
        let mut jobs = self.inner.clone();
        self.opened("events", jobs.events(request)).await
    }
}

/// Events of a job.
#[derive(Debug)]
pub struct Events {
    messages: Messages<v1::JobEvent>,
    client: Client,
    job_id: String,
    follow: bool,
    /// The number of the last event that was given.
    last: Option<u64>,
}

impl Events {
    /// The next; none after the last. Where they are followed and the connection breaks, for example because the
    /// coordinator is restarted, it is made again for [`super::RECONNECTING`], and what comes next comes once.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when the coordinator stays away.
    pub async fn next(&mut self) -> Result<Option<v1::JobEvent>> {
        let mut away = Away::default();
        loop {
            match self.messages.next().await {
                Ok(Some(event)) => {
                    self.last = Some(event.number);
                    return Ok(Some(event));
                }
                Err(error) if self.goes_on_after(&error) => self.reconnect(error, &mut away).await?,
                ended => return ended,
            }
        }
    }

    /// An older coordinator gives no numbers, and cannot be asked to go on from one.
    fn goes_on_after(&self, error: &Error) -> bool {
        self.follow && error.is_away() && self.last != Some(0)
    }

    async fn reconnect(&mut self, mut error: Error, away: &mut Away) -> Result<()> {
        let after = self.last.unwrap_or_default();
        while error.is_away() && away.is_borne(Instant::now()) {
            tokio::time::sleep(BETWEEN_ATTEMPTS).await;
            match self.client.events_after(&self.job_id, true, after).await {
                Ok(messages) => {
                    self.messages = messages;
                    return Ok(());
                }
                Err(again) => error = again,
            }
        }
        Err(error)
    }
}
