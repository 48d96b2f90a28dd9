//! Following logs until what writes them has ended.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use espalier_coordinator::Error;
use espalier_coordinator::client::{Client, Messages, RECONNECTING};
use espalier_proto::v1::{TaskDetail, TaskLogsResponse, TaskState};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Named, print};
use crate::args::{JobLogs, TaskLogs};
use crate::commands::connect;
use crate::output;

/// Between looks at a task that rests between attempts, and between tries to reach a coordinator.
const PAUSE: Duration = Duration::from_millis(500);
/// Attempts that are followed at a time.
const FOLLOWED: usize = 256;
/// Lines of all of them that wait to be printed.
const LINES: usize = 1024;

/// Asks until there is an answer, while nobody is there to give one.
async fn patiently<T>(mut ask: impl AsyncFnMut() -> Result<T, Error>) -> Result<T, Error> {
    let start = Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_away() && start.elapsed() < RECONNECTING => {
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// One attempt's log, line by line.
struct Lines {
    client: Client,
    task: u64,
    attempt: u64,
    tail: u32,
    /// What comes next; none before the first line and while the coordinator is away.
    parts: Option<Messages<TaskLogsResponse>>,
    waiting: VecDeque<String>,
    /// Lines given.
    given: u64,
    /// Lines that come again, after the coordinator was away.
    known: u64,
    /// Every line of the log was given: their number says where to go on.
    whole: bool,
}

impl Lines {
    fn new(client: &Client, task: u64, attempt: u64, tail: u32) -> Self {
        Self {
            client: client.clone(),
            task,
            attempt,
            tail,
            parts: None,
            waiting: VecDeque::new(),
            given: 0,
            known: 0,
            whole: tail == 0,
        }
    }

    /// The next line; none when the attempt has ended.
    async fn next(&mut self) -> Result<Option<String>, Error> {
        loop {
            while let Some(line) = self.waiting.pop_front() {
                if let Some(known) = self.known.checked_sub(1) {
                    self.known = known;
                    continue;
                }
                self.given = self.given.saturating_add(1);
                return Ok(Some(line));
            }
            let mut parts = match self.parts.take() {
                Some(parts) => parts,
                None => self.open().await?,
            };
            let part = parts.next().await;
            self.parts = Some(parts);
            match part {
                Ok(Some(part)) => self.take(part),
                Ok(None) if self.has_ended().await? => return Ok(None),
                // A coordinator that stops ends what it sends in good order.
                Ok(None) => self.lost(),
                Err(Error::Unreachable { .. }) => self.lost(),
                Err(error) => return Err(error),
            }
        }
    }

    /// Opens the log, and waits for a coordinator that is away.
    async fn open(&mut self) -> Result<Messages<TaskLogsResponse>, Error> {
        let start = Instant::now();
        loop {
            match self.client.logs(self.task, self.attempt, self.tail, true).await {
                Err(error) if error.is_away() && start.elapsed() < RECONNECTING => {
                    tokio::time::sleep(PAUSE).await;
                }
                opened => return opened,
            }
        }
    }

    /// Whether the attempt has.
    async fn has_ended(&mut self) -> Result<bool, Error> {
        let detail = match self.client.task(self.task).await {
            Err(error) if error.is_away() => return Ok(false),
            detail => detail?,
        };
        let mut attempts = detail.attempts.iter();
        Ok(!attempts.any(|attempt| attempt.id == self.attempt && attempt.ended_unix_ms == 0))
    }

    fn take(&mut self, part: TaskLogsResponse) {
        if part.lagged {
            output::say("lines before these were left out");
            self.whole = false;
            self.known = 0;
        }
        self.waiting.extend(part.lines);
    }

    fn lost(&mut self) {
        self.parts = None;
        if self.whole {
            self.known = self.given;
        } else {
            output::say("the coordinator was away: lines may be missing here");
            self.tail = 1;
        }
    }
}

fn has_ended(task: &TaskDetail) -> bool {
    matches!(
        task.state(),
        TaskState::Done | TaskState::Failed | TaskState::Abandoned
    )
}

/// A task, from its newest attempt (or the one that is named) to its end.
pub(super) async fn task(arguments: &TaskLogs) -> anyhow::Result<()> {
    let mut client = connect(&arguments.remote).await?;
    let format = arguments.remote.how.format;
    let follow = async |client: &Client, attempt: u64, tail: u32| {
        let mut lines = Lines::new(client, arguments.task, attempt, tail);
        while let Some(line) = lines.next().await? {
            print(attempt, &line, format)?;
        }
        anyhow::Ok(())
    };
    if arguments.attempt != 0 {
        return follow(&client, arguments.attempt, arguments.tail).await;
    }
    let mut last = None;
    loop {
        let detail = patiently(async || client.task(arguments.task).await).await?;
        let newer: Vec<u64> = match last {
            None => detail
                .attempts
                .last()
                .map(|attempt| attempt.id)
                .into_iter()
                .collect(),
            Some(last) => {
                let ids = detail.attempts.iter().map(|attempt| attempt.id);
                ids.filter(|id| *id > last).collect()
            }
        };
        if newer.is_empty() && has_ended(&detail) {
            return Ok(());
        }
        for attempt in newer {
            if last.is_some() {
                output::say(&format!("attempt {attempt}"));
            }
            let tail = if last.is_none() { arguments.tail } else { 0 };
            follow(&client, attempt, tail).await?;
            last = Some(attempt);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// A line of one of many attempts.
struct Line {
    of: Named,
    attempt: u64,
    text: String,
}

/// Follows attempts of a job, each once.
struct Followers {
    client: Client,
    tail: u32,
    seen: HashSet<u64>,
    running: JoinSet<anyhow::Result<()>>,
    lines: mpsc::Sender<Line>,
}

impl Followers {
    fn begin(&mut self, of: Named, attempt: u64) {
        if !self.seen.insert(attempt) {
            return;
        }
        let mut log = Lines::new(&self.client, of.task, attempt, self.tail);
        let lines = self.lines.clone();
        self.running.spawn(async move {
            loop {
                let text = match log.next().await {
                    Ok(Some(text)) => text,
                    // It has ended, or is no longer kept.
                    Ok(None) | Err(Error::NotFound(_)) => return Ok(()),
                    Err(error) => return Err(error.into()),
                };
                let of = of.clone();
                lines.send(Line { of, attempt, text }).await?;
            }
        });
    }

    /// Begins with the newest attempt of each task that has begun.
    async fn begin_with_newest(
        &mut self,
        job: &str,
        stage: &str,
        states: &[TaskState],
    ) -> anyhow::Result<()> {
        let listed = patiently(async || self.client.tasks(job, states, stage).await).await?;
        for task in listed {
            self.begin_task(task.id, stage, 0).await?;
        }
        Ok(())
    }

    /// Begins with this attempt of a task, or with its newest, where the task is of the stage.
    async fn begin_task(&mut self, task: u64, stage: &str, attempt: u64) -> anyhow::Result<()> {
        if self.seen.contains(&attempt) {
            return Ok(());
        }
        while self.running.len() >= FOLLOWED {
            self.join().await?;
        }
        let detail = match patiently(async || self.client.task(task).await).await {
            Err(Error::NotFound(_)) => return Ok(()),
            detail => detail?,
        };
        let newest = detail.attempts.last().map(|attempt| attempt.id);
        let attempt = if attempt == 0 { newest } else { Some(attempt) };
        if let Some(attempt) = attempt
            && (stage.is_empty() || detail.stage == stage)
        {
            self.begin(Named::of(&detail), attempt);
        }
        Ok(())
    }

    async fn join(&mut self) -> anyhow::Result<()> {
        match self.running.join_next().await {
            None => Ok(()),
            Some(ended) => ended?,
        }
    }
}

/// Every attempt of a job that has begun or begins, until the job has ended.
pub(super) async fn job(arguments: &JobLogs) -> anyhow::Result<()> {
    let client = connect(&arguments.remote).await?;
    let (lines, mut printed) = mpsc::channel(LINES);
    let followers = Followers {
        client,
        tail: arguments.tail,
        seen: HashSet::new(),
        running: JoinSet::new(),
        lines,
    };
    let format = arguments.remote.how.format;
    let print = async {
        while let Some(Line { of, attempt, text }) = printed.recv().await {
            of.print(attempt, &text, format)?;
        }
        Ok(())
    };
    tokio::try_join!(see(followers, arguments), print).map(drop)
}

/// Follows what the job's events tell of. Ends, and lets go of the printer, when the job and every log has ended.
async fn see(mut followers: Followers, arguments: &JobLogs) -> anyhow::Result<()> {
    let (job, stage) = (&arguments.job, &arguments.stage);
    let mut client = followers.client.clone();
    // First, so that nothing begins unseen between the listing and the events.
    let mut events = patiently(async || client.events(job, true).await).await?;
    let begun = [
        TaskState::Running,
        TaskState::Done,
        TaskState::Failed,
        TaskState::Abandoned,
    ];
    followers.begin_with_newest(job, stage, &begun).await?;
    loop {
        let event = match events.next().await {
            Ok(Some(event)) => event,
            Ok(None) if output::has_ended(&patiently(async || client.get(job).await).await?) => break,
            Ok(None) | Err(Error::Unreachable { .. }) => {
                // They come again from the first that is kept; what is followed already is known.
                events = patiently(async || client.events(job, true).await).await?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if event.lagged {
            followers
                .begin_with_newest(job, stage, &[TaskState::Running])
                .await?;
        }
        if event.kind == "attempt_started" {
            followers.begin_task(event.task, stage, event.attempt).await?;
        }
    }
    while !followers.running.is_empty() {
        followers.join().await?;
    }
    Ok(())
}
