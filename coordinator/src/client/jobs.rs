//! Holding a job, letting it go on, and what happened to it.

use espalier_proto::v1;

use super::{Client, Messages, present};
use crate::Result;

impl Client {
    /// Starts nothing more of a job.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], or [`crate::Error::Conflict`] when it has ended.
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
    /// [`crate::Error::NotFound`], or [`crate::Error::Conflict`] when it has ended.
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
    /// [`crate::Error::NotFound`], or [`crate::Error::Conflict`] when it has not failed.
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
    /// [`crate::Error::NotFound`] when there is none.
    pub async fn events(&mut self, job_id: &str, follow: bool) -> Result<Messages<v1::JobEvent>> {
        let request = v1::EventsRequest {
            job_id: job_id.to_owned(),
            follow,
        };
        let mut jobs = self.inner.clone();
        self.opened("events", jobs.events(request)).await
    }
}
