//! Jobs on a coordinator.

use anyhow::Context;
use espalier_coordinator::client::Client;
use espalier_proto::v1::submit_request::Spec;
use espalier_proto::v1::{Job, JobState};

use super::{confirm, connect, logs, read_spec, show, verdict};
use crate::args::{
    EndJob, Events, Format, HoldJob, JobCommand, JobStateName, ListJobs, OneJob, Remote, RetryJob, Submit,
};
use crate::{failure, output, progress};

const LARGEST_PAGE: u32 = 500;

pub(crate) async fn run(command: JobCommand) -> anyhow::Result<()> {
    match command {
        JobCommand::Submit(arguments) => submit(arguments).await,
        JobCommand::List(arguments) => list(arguments).await,
        JobCommand::Get(arguments) => get(arguments).await,
        JobCommand::Logs(arguments) => logs::of_job(arguments).await,
        JobCommand::Events(arguments) => events(arguments).await,
        JobCommand::Watch(arguments) => watch(arguments).await,
        JobCommand::Wait(arguments) => wait(arguments).await,
        JobCommand::Cancel(arguments) => cancel(arguments).await,
        JobCommand::Pause(arguments) => pause(arguments).await,
        JobCommand::Resume(arguments) => resume(arguments).await,
        JobCommand::Retry(arguments) => retry(arguments).await,
    }
}

async fn submit(arguments: Submit) -> anyhow::Result<()> {
    let spec = read_spec(&arguments.spec, arguments.output_dir)?;
    let json = serde_json::to_string(&spec).context("the spec cannot be written as JSON")?;
    let mut client = connect(&arguments.remote).await?;
    let (job, existed) = client
        .submit_first(Spec::Json(json), &arguments.request_id, arguments.priority)
        .await?;
    if existed {
        output::say("an earlier submission with this request id had made the job");
    }
    match arguments.remote.how.format {
        Format::Table | Format::Wide => output::print(&format!("{}\n", job.id)),
        Format::Json | Format::Yaml => output::job(&job).print_one(arguments.remote.how),
    }
}

async fn list(arguments: ListJobs) -> anyhow::Result<()> {
    let states: Vec<JobState> = arguments.state.iter().map(|name| state(*name)).collect();
    let limit = arguments.limit;
    let mut said = false;
    show(&arguments.listed, async |client: &mut Client| {
        let (jobs, more) = newest(client, limit, &states).await?;
        if more && !said {
            output::say(&format!("only the newest {limit} are shown: --limit shows more"));
            said = true;
        }
        Ok(output::jobs(&jobs))
    })
    .await
}

/// The newest jobs, and whether there are more.
async fn newest(client: &mut Client, limit: u32, states: &[JobState]) -> anyhow::Result<(Vec<Job>, bool)> {
    let mut jobs: Vec<Job> = Vec::new();
    let mut token = Some(String::new());
    let most = usize::try_from(limit).unwrap_or(usize::MAX);
    while jobs.len() < most
        && let Some(after) = token
    {
        let (page, next) = client.list(limit.min(LARGEST_PAGE), &after, states).await?;
        jobs.extend(page);
        token = next;
    }
    let more = jobs.len() > most || token.is_some_and(|next| !next.is_empty());
    jobs.truncate(most);
    Ok((jobs, more))
}

fn state(name: JobStateName) -> JobState {
    match name {
        JobStateName::Queued => JobState::Queued,
        JobStateName::Running => JobState::Running,
        JobStateName::Paused => JobState::Paused,
        JobStateName::Succeeded => JobState::Succeeded,
        JobStateName::Failed => JobState::Failed,
        JobStateName::Cancelled => JobState::Cancelled,
    }
}

async fn get(arguments: OneJob) -> anyhow::Result<()> {
    let job = connect(&arguments.remote).await?.get(&arguments.job).await?;
    output::job(&job).print_one(arguments.remote.how)
}

async fn events(arguments: Events) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let how = arguments.remote.how;
    let mut following = client.events(&arguments.job, arguments.follow).await?;
    let mut all = Vec::new();
    while let Some(event) = following.next().await? {
        if event.lagged {
            output::say("events before this one were left out");
        }
        if !arguments.follow {
            all.push(event);
            continue;
        }
        match how.format {
            Format::Json | Format::Yaml => {
                for value in output::events(std::slice::from_ref(&event)).values {
                    output::print_value(&value, how.format)?;
                }
            }
            Format::Table | Format::Wide => {
                let at = output::at(event.unix_ms);
                let line = format!("{at} {} {} {}", event.kind, event.worker, event.message);
                output::print(&format!("{}\n", output::plain(&line)))?;
            }
        }
    }
    if arguments.follow {
        return Ok(());
    }
    output::events(&all).print(how)
}

async fn watch(arguments: OneJob) -> anyhow::Result<()> {
    let how = arguments.remote.how;
    let mut changes = progress::Changes::default();
    let job = follow(&arguments.remote, &arguments.job, |job| {
        match how.format {
            Format::Json | Format::Yaml => {
                for value in output::job(job).values {
                    output::print_value(&value, how.format)?;
                }
            }
            Format::Table | Format::Wide => {
                for line in changes.lines(job) {
                    output::print(&format!("{}\n", output::plain(&line)))?;
                }
            }
        }
        Ok(())
    })
    .await?;
    verdict(&job)
}

async fn wait(arguments: OneJob) -> anyhow::Result<()> {
    let job = follow(&arguments.remote, &arguments.job, |_| Ok(())).await?;
    let how = arguments.remote.how;
    if how.quiet || matches!(how.format, Format::Json | Format::Yaml) {
        output::job(&job).print_one(how)?;
    }
    verdict(&job)
}

/// Follows a job until it has ended or time is up; gives it as it was last seen.
async fn follow(
    remote: &Remote,
    job_id: &str,
    mut seen: impl FnMut(&Job) -> anyhow::Result<()>,
) -> anyhow::Result<Job> {
    let mut client = connect(remote).await?;
    let ended = async {
        let mut following = client.watch(job_id, 0).await?;
        let mut last = None;
        while let Some(job) = following.next().await? {
            seen(&job)?;
            last = Some(job);
        }
        last.context("the coordinator ended the watch without a word")
    };
    match remote.timeout {
        None => ended.await,
        Some(timeout) => tokio::time::timeout(timeout, ended)
            .await
            .map_err(|_| failure::timed_out(format!("{job_id} has not ended in time")))?,
    }
}

async fn cancel(arguments: EndJob) -> anyhow::Result<()> {
    let EndJob { hold, yes } = arguments;
    confirm(&format!("this ends {} for good", hold.job), yes)?;
    let mut client = connect(&hold.remote).await?;
    let job = client.cancel(&hold.job, &hold.reason).await?;
    output::job(&job).print_one(hold.remote.how)
}

async fn pause(arguments: HoldJob) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let job = client.pause(&arguments.job, &arguments.reason).await?;
    output::job(&job).print_one(arguments.remote.how)
}

async fn resume(arguments: OneJob) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let job = client.resume(&arguments.job).await?;
    output::job(&job).print_one(arguments.remote.how)
}

async fn retry(arguments: RetryJob) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let job = client.retry(&arguments.job, &arguments.request_id).await?;
    output::job(&job).print_one(arguments.remote.how)
}
