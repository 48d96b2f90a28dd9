//! Looking into a job: its tasks, their attempts and logs.

use espalier_proto::v1;

use super::{Client, Messages};
use crate::{Error, Result};

impl Client {
    /// Every task of a job that is in one of `states` (none: all) and of `stage` (empty: all).
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such job.
    pub async fn tasks(
        &mut self,
        job_id: &str,
        states: &[v1::TaskState],
        stage: &str,
    ) -> Result<Vec<v1::TaskDetail>> {
        let mut tasks = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = self.timed(v1::ListTasksRequest {
                job_id: job_id.to_owned(),
                states: states.iter().map(|state| i32::from(*state)).collect(),
                stage: stage.to_owned(),
                page_size: 0,
                page_token: std::mem::take(&mut page_token),
            });
            let response = self.tasks.list(request).await;
            let page = response
                .map_err(|status| self.error("list tasks", &status))?
                .into_inner();
            let empty = page.tasks.is_empty();
            tasks.extend(page.tasks);
            if empty || page.next_page_token.is_empty() {
                return Ok(tasks);
            }
            page_token = page.next_page_token;
        }
    }

    /// One task with its attempts.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none.
    pub async fn task(&mut self, task_id: u64) -> Result<v1::TaskDetail> {
        let request = self.timed(v1::GetTaskRequest { task_id });
        let response = self.tasks.get(request).await;
        let response = response.map_err(|status| self.error("get task", &status))?;
        let task = response.into_inner().task;
        task.ok_or_else(|| Error::Internal("the coordinator's answer has no task".to_owned()))
    }

    /// The log of an attempt of a task; attempt 0 is the newest, `tail` 0 all lines that are kept.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such task or attempt.
    pub async fn logs(
        &mut self,
        task_id: u64,
        attempt: u64,
        tail: u32,
        follow: bool,
    ) -> Result<Messages<v1::TaskLogsResponse>> {
        let request = v1::TaskLogsRequest {
            task_id,
            attempt,
            tail,
            follow,
        };
        let mut tasks = self.tasks.clone();
        self.opened("logs", tasks.logs(request)).await
    }
}
