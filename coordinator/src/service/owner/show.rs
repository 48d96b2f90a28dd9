//! Jobs as those see them who follow them or ask.

use std::collections::BTreeSet;

use espalier_proto::v1;
use tonic::Status;

use super::{Owner, status};
use crate::scheduler::{JobId, Rejection, TaskId, WorkerId};
use crate::service::view;

impl Owner {
    pub(super) fn publish(&mut self) {
        let (absent, resting) = (self.absent(), self.resting());
        let mut watchers = std::mem::take(&mut self.watchers);
        let (state, beside) = (&self.state, self.beside_state(&absent, &resting));
        watchers.publish(|job, revision| Some(view::snapshot(state, state.job(job)?, revision, beside)));
        self.watchers = watchers;
    }

    /// The last snapshot of a job whose tasks are about to leave the state.
    pub(super) fn publish_last(&mut self, job: JobId) {
        let (absent, resting) = (self.absent(), self.resting());
        let mut watchers = std::mem::take(&mut self.watchers);
        let (state, beside) = (&self.state, self.beside_state(&absent, &resting));
        watchers.publish_now(job, |job, revision| {
            Some(view::snapshot(state, state.job(job)?, revision, beside))
        });
        self.watchers = watchers;
    }

    pub(super) fn beside_state<'a>(
        &'a self,
        absent: &'a BTreeSet<WorkerId>,
        resting: &'a BTreeSet<TaskId>,
    ) -> view::Beside<'a> {
        view::Beside {
            progress: &self.progress,
            troubled: &self.troubled,
            absent,
            resting,
            now: self.now().unix_ms,
        }
    }

    pub(super) fn view(&self, job: JobId) -> Result<v1::Job, Status> {
        let revision = self.watchers.revision(job);
        let (absent, resting) = (self.absent(), self.resting());
        if let Some(known) = self.state.job(job) {
            let beside = self.beside_state(&absent, &resting);
            return Ok(view::job(&self.state, known, revision, beside));
        }
        match self.state.summary(job) {
            Some(summary) => Ok(view::archived(summary, revision)),
            None => Err(status(&Rejection::NoSuchJob(job))),
        }
    }
}
