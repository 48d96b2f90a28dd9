//! The loop: the only one to touch the state and the journal.
//!
//! It takes what waits in its inbox, decides and applies it, commits the journal once for all of it, and
//! only then answers and acts. When the disk is full nothing of the batch has happened: the state is
//! replayed, those who asked are told, and workers keep their results and send them again.
//!
//! It runs without a clock, thread or runtime of its own: [`Surroundings`] gives it time and a place for
//! slow work, [`Owner::turn`] the requests. Replies are oneshots and outboxes bounded channels, neither of
//! which needs a runtime; so a simulation drives it as the service does.

mod act;
mod archive;
mod handle;
mod query;
mod request;
mod shelf;
mod sight;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use espalier_proto::task::Progress;
use espalier_proto::v1;
use tokio_util::sync::CancellationToken;
use tonic::Status;

pub use super::watch::Following;
pub use request::{
    Greeting, JobOrder, Listing, Outbox, Query, Reply, Report, Request, Submission, TaskListing,
    WorkerHandle, WorkerOrder,
};

use super::history::{self, History, Replayed};
use super::surroundings::Surroundings;
use super::watch::Watchers;
use super::{CoordinatorOptions, Planner, view};
use crate::journal::{self, Journal};
use crate::logs::Logs;
use crate::metrics::{Expiry, Metrics};
use crate::scheduler::{
    AttemptId, Command, Effect, Epoch, Event, Failures, JobId, Now, Rejection, State, Task, TaskId,
    TaskPhase, Term, WorkerId, apply, decide, effects, hand_back_pause, resume, retry_pause,
};
use crate::term::{Fence, OwnDirectory, Standing};
use crate::{Error, Result};

/// Requests taken in one turn at the most, and so committed together.
pub const BATCH: usize = 1024;
/// How often the loop is sent [`Request::Tick`], to look at silence and publish changes.
pub const TICK: Duration = Duration::from_millis(100);
/// How long after a full disk the loop tries again by itself.
const FULL_PAUSE: Duration = Duration::from_secs(2);
/// How long a gang may take until every rank is ready: each loads its model first.
const GANG_DEADLINE: Duration = Duration::from_secs(15 * 60);

/// How long a worker that is gone is remembered.
const GONE_FOR: Duration = Duration::from_secs(24 * 60 * 60);
/// Workers that are gone and remembered, at the most.
const GONE_KEPT: usize = 1024;

/// What is said once the turn is durable, or is not.
type Answer = Box<dyn FnOnce(&mut Owner, Result<(), Status>) + Send>;

struct Link {
    epoch: Epoch,
    build: String,
    version: u32,
    number: u64,
    outbox: Outbox,
    stop: CancellationToken,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// The loop's belongings.
pub struct Owner {
    options: CoordinatorOptions,
    planner: Arc<dyn Planner>,
    surroundings: Surroundings,
    fence: Arc<dyn Fence>,
    journal: Journal,
    state: State,
    effects: Vec<Effect>,
    answers: Vec<Answer>,
    /// Commands that followed from acting, for the next turn.
    afterwards: Vec<Command>,
    links: BTreeMap<WorkerId, Link>,
    next_link: u64,
    heard: BTreeMap<WorkerId, Duration>,
    /// Workers that said something in this turn that has to be kept.
    reporters: BTreeSet<WorkerId>,
    progress: BTreeMap<AttemptId, Progress>,
    /// Tasks that failed and are not done since.
    troubled: BTreeSet<(JobId, TaskId)>,
    /// Tasks that rest after a failure, and until when.
    resting: BTreeMap<TaskId, Duration>,
    /// Gangs that have not begun, and since when.
    forming: BTreeMap<(TaskId, u64), Duration>,
    history: History,
    /// Entries of the history that are not durable yet.
    noted: Vec<(JobId, u64, history::Entry)>,
    metrics: Metrics,
    logs: Logs,
    log_lines: sight::LogLines,
    watchers: Watchers,
    planning: BTreeSet<JobId>,
    writing: BTreeSet<JobId>,
    archiving: archive::Archiving,
    full_until: Option<Duration>,
    /// While the disk is full: the state before the turn, as most turns will have to be taken back.
    before: Option<Box<State>>,
    /// When silence was last looked for.
    listened: Duration,
    stopping: bool,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Owner")
            .field("term", &self.state.term())
            .finish_non_exhaustive()
    }
}

impl Owner {
    /// Replays the journal, begins a term, and starts what was left to do.
    ///
    /// # Errors
    /// When the journal cannot be used.
    pub fn open(
        options: CoordinatorOptions,
        planner: Arc<dyn Planner>,
        surroundings: Surroundings,
    ) -> Result<Self> {
        Self::open_fenced(options, planner, surroundings, Arc::new(OwnDirectory))
    }

    /// The same where another coordinator may serve from another disk.
    ///
    /// # Errors
    /// When the journal cannot be used or no term can be claimed.
    pub fn open_fenced(
        options: CoordinatorOptions,
        planner: Arc<dyn Planner>,
        surroundings: Surroundings,
        fence: Arc<dyn Fence>,
    ) -> Result<Self> {
        let mut state = State::default();
        let directory = options.data_dir.join("journal");
        let mut history = History::default();
        let disk = Arc::clone(&surroundings.disk);
        let mut replayed = Replayed {
            state: &mut state,
            history: &mut history,
        };
        let journal_options = journal::Options {
            segment_bytes: options.segment_bytes,
        };
        let journal = Journal::open(disk, &directory, journal_options, &mut replayed)?;
        // A claim is for good: a start that fails for want of room would leave one behind each time.
        journal.check_room()?;
        let term = fence.claim(state.term(), journal.last().saturating_add(1))?;
        let known = state.workers().map(|worker| worker.id).collect::<Vec<_>>();
        // A worker has the whole of its grace to come back to a coordinator that was away itself.
        let started = surroundings.clock.elapsed();
        let mut owner = Self {
            options,
            planner,
            surroundings,
            fence,
            journal,
            state,
            effects: Vec::new(),
            answers: Vec::new(),
            afterwards: Vec::new(),
            links: BTreeMap::new(),
            next_link: 0,
            heard: known.into_iter().map(|worker| (worker, started)).collect(),
            reporters: BTreeSet::new(),
            progress: BTreeMap::new(),
            troubled: BTreeSet::new(),
            resting: BTreeMap::new(),
            forming: BTreeMap::new(),
            history,
            noted: Vec::new(),
            metrics: Metrics::default(),
            logs: Logs::nowhere(),
            log_lines: sight::LogLines::default(),
            watchers: Watchers::new(Term::default()),
            planning: BTreeSet::new(),
            writing: BTreeSet::new(),
            archiving: archive::Archiving::default(),
            full_until: None,
            before: None,
            listened: started,
            stopping: false,
        };
        owner.find_trouble();
        owner
            .decide(Command::BeginTermAt { term })
            .map_err(|error| Error::Internal(error.to_string()))?;
        owner.journal.commit()?;
        owner.watchers = Watchers::new(owner.state.term());
        owner.effects = resume(&owner.state);
        if owner.holds() {
            owner.act();
        }
        Ok(owner)
    }

    /// The last frame of the journal that is durable, for those who read along.
    pub fn position(&self) -> Arc<AtomicU64> {
        self.journal.position()
    }

    /// What the loop knows.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether the journal's disk was full when it was last tried: nothing new is taken.
    pub fn is_full(&self) -> bool {
        self.full_until.is_some()
    }

    /// The last frame of the journal that is durable.
    pub fn durable(&self) -> u64 {
        self.journal.last()
    }

    /// Whether this coordinator may promote now: while not, [`Owner::turn`] leaves its requests waiting.
    pub fn holds(&self) -> bool {
        self.fence.standing(self.surroundings.clock.elapsed()) == Standing::Holds
    }

    /// Whether [`Request::Stop`] was taken: no turn may follow.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Takes these requests, makes what follows from them durable, and only then answers and acts.
    /// Leaves `batch` empty, unless the term's authority does not hold: then requests wait in it for a later turn.
    ///
    /// # Errors
    /// When the journal fails or another coordinator has taken over: nothing more may be promised, and no turn
    /// may follow.
    pub fn turn(&mut self, batch: &mut Vec<Request>) -> Result<()> {
        match self.fence.standing(self.surroundings.clock.elapsed()) {
            Standing::Holds => {}
            Standing::Waits => {
                self.wait(batch);
                return Ok(());
            }
            Standing::Superseded { by } => {
                let own = self.state.term().0;
                return Err(Error::Succeeded { own, term: by });
            }
        }
        let mut ticked = false;
        for command in std::mem::take(&mut self.afterwards) {
            self.note(command);
        }
        for request in batch.drain(..) {
            ticked |= matches!(request, Request::Tick);
            self.handle(request);
        }
        let rests = self.rests_while_full();
        if !rests {
            self.dispatch();
        }
        let (last, began) = (self.journal.last(), self.surroundings.clock.elapsed());
        match self.journal.commit() {
            Ok(()) => {
                self.before = None;
                self.reporters.clear();
                self.committed(last, began);
                self.snapshot();
                if !self.holds() {
                    // What was asked is durable, but may not be promised: a later turn does, or a successor
                    // decides without it.
                    return Ok(());
                }
                if !rests && self.full_until.take().is_some() {
                    self.effects.extend(resume(&self.state));
                }
                for (job, frame, entry) in std::mem::take(&mut self.noted) {
                    self.history.push(job, frame, entry);
                }
                for answer in std::mem::take(&mut self.answers) {
                    answer(self, Ok(()));
                }
                self.act();
            }
            Err(error @ journal::Error::Full { .. }) => self.step_back(&error)?,
            Err(error) => return Err(error.into()),
        }
        if ticked {
            self.publish();
            self.stand();
            self.archive();
        }
        Ok(())
    }

    /// Without authority nothing is promised, but what is durable can be looked at.
    fn wait(&mut self, batch: &mut Vec<Request>) {
        let requests = std::mem::take(batch);
        for request in requests {
            match request {
                Request::Tick => {}
                Request::Query(query) => {
                    if let Some(answer) = self.query(query) {
                        answer(self, Ok(()));
                    }
                }
                Request::Watch { job, reply } => {
                    let answer = Self::watch(job, reply);
                    answer(self, Ok(()));
                }
                request => {
                    self.stopping |= matches!(request, Request::Stop);
                    batch.push(request);
                }
            }
        }
    }

    /// Has the state written beside the loop, when that is worth it.
    fn snapshot(&mut self) {
        let Some(due) = self.journal.snapshot_due() else {
            return;
        };
        let state = self.state.bare();
        let work = Box::new(move || Request::SnapshotEnded(due.take(&state)));
        self.surroundings.beside.spawn(work);
    }

    /// Whether the disk was full and still is, as far as is known: it is tried now and then with bytes that nobody
    /// needs, as a turn that does not fit costs those whose reports it took.
    fn rests_while_full(&mut self) -> bool {
        let elapsed = self.surroundings.clock.elapsed();
        match self.full_until {
            None => false,
            Some(until) if elapsed < until => true,
            Some(_) if self.journal.check_room().is_ok() => false,
            Some(_) => {
                self.full_until = Some(elapsed.saturating_add(FULL_PAUSE));
                true
            }
        }
    }

    /// Nothing of the turn has happened: the state goes back to what the journal says.
    fn step_back(&mut self, error: &journal::Error) -> Result<()> {
        tracing::error!(%error, "nothing new is taken until there is room");
        self.state = match self.before.take() {
            Some(before) => *before,
            None => {
                let mut state = State::default();
                self.journal.replay(&mut state)?;
                state
            }
        };
        self.find_trouble();
        self.effects.clear();
        self.noted.clear();
        // Workers send what was not acknowledged again when they come back; the others need not.
        for reporter in std::mem::take(&mut self.reporters) {
            self.links.remove(&reporter);
        }
        self.full_until = Some(self.surroundings.clock.elapsed().saturating_add(FULL_PAUSE));
        let status = Status::resource_exhausted(error.to_string());
        for answer in std::mem::take(&mut self.answers) {
            answer(self, Err(status.clone()));
        }
        Ok(())
    }

    fn decide(&mut self, command: Command) -> Result<(), Rejection> {
        let events = decide(&self.state, command, self.now())?;
        if self.full_until.is_some() && self.before.is_none() && !events.is_empty() {
            self.before = Some(Box::new(self.state.clone()));
        }
        let frame = self.journal.next();
        self.journal
            .append(&events)
            .map_err(|error| Rejection::Invalid(error.to_string()))?;
        let (frame, expiry) = (self.journal.appended(), Expiry::of(&events));
        for event in &events {
            if let Event::JobArchived { job, .. } = event {
                self.publish_last(*job);
            }
            let entry = history::entry(&self.state, event);
            self.noted.extend(entry.map(|(job, entry)| (job, frame, entry)));
            self.observe(event, expiry);
            apply(&mut self.state, event);
            if let Some(witness) = &self.surroundings.witness {
                witness.applied(&self.state, event, frame);
            }
            self.note_trouble(event);
            self.effects.extend(effects(&self.state, event));
        }
        Ok(())
    }

    /// Keeps who is in trouble, and lets a task that failed rest.
    fn note_trouble(&mut self, event: &Event) {
        match event {
            Event::AttemptFailed { task, .. }
            | Event::AttemptLost { task, .. }
            | Event::GangLate { task, .. } => {
                let Some(known) = self.state.task(*task) else {
                    return;
                };
                self.troubled.insert((known.job, *task));
                let pause = retry_pause(&known.failures());
                if !matches!(event, Event::AttemptLost { .. }) && !pause.is_zero() {
                    let until = self.surroundings.clock.elapsed().saturating_add(pause);
                    self.resting.insert(*task, until);
                }
            }
            Event::AttemptHandedBack { task, .. } => {
                let failures = self.state.task(*task).map(Task::failures);
                let pause = failures.map_or(Duration::ZERO, |failures| hand_back_pause(&failures));
                if !pause.is_zero() {
                    let until = self.surroundings.clock.elapsed().saturating_add(pause);
                    self.resting.insert(*task, until);
                }
            }
            Event::AttemptCompleted { task, .. }
            | Event::GangEnded {
                task,
                completed: true,
                ..
            } => {
                if !self.troubled.is_empty()
                    && let Some(known) = self.state.task(*task)
                {
                    self.troubled.remove(&(known.job, *task));
                }
            }
            Event::JobRetried { .. } => self.find_trouble(),
            Event::JobArchived { job, .. } => {
                self.troubled.retain(|(of, _)| of != job);
                self.history.forget(*job);
            }
            _ => {}
        }
    }

    /// Looks for trouble in the whole state.
    fn find_trouble(&mut self) {
        let in_trouble = |task: &&Task| {
            let done = matches!(task.phase, TaskPhase::Done { .. });
            !done && task.failures() != Failures::default()
        };
        let tasks = self.state.tasks().filter(in_trouble);
        self.troubled = tasks.map(|task| (task.job, task.id)).collect();
        let state = &self.state;
        self.resting.retain(|task, _| state.task(*task).is_some());
    }

    fn absent(&self) -> BTreeSet<WorkerId> {
        let workers = self.state.workers().map(|worker| worker.id);
        workers
            .filter(|worker| !self.links.contains_key(worker))
            .collect()
    }

    fn resting(&self) -> BTreeSet<TaskId> {
        self.resting.keys().copied().collect()
    }

    fn dispatch(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        self.resting.retain(|_, until| *until > elapsed);
        let (absent, resting) = (self.absent(), self.resting());
        if let Err(error) = self.decide(Command::Dispatch { absent, resting }) {
            tracing::error!(%error, "no task can be handed out");
        }
    }

    fn silence(&mut self) {
        let lost = self.options.worker_lost;
        let elapsed = self.surroundings.clock.elapsed();
        // While the loop itself was away, as when its process was stopped, nobody could be heard: what workers
        // said meanwhile still waits to be taken.
        let away = elapsed.saturating_sub(std::mem::replace(&mut self.listened, elapsed));
        if away >= lost / 2 {
            for heard in self.heard.values_mut() {
                *heard = heard.saturating_add(away).min(elapsed);
            }
        }
        let is_lost = |worker: &&crate::scheduler::Worker| {
            !worker.standing.is_gone()
                && self
                    .heard
                    .get(&worker.id)
                    .is_none_or(|heard| elapsed.saturating_sub(*heard) >= lost)
        };
        let silent: Vec<(WorkerId, Epoch)> = self
            .state
            .workers()
            .filter(is_lost)
            .map(|worker| (worker.id, worker.epoch))
            .collect();
        for (worker, epoch) in silent {
            tracing::warn!(%worker, "nothing was heard from the worker: its tasks are handed on");
            if let Err(error) = self.decide(Command::WorkerSilent { worker, epoch }) {
                tracing::error!(%error, "the worker cannot be given up");
            }
        }
        self.forget_the_gone();
        let (state, progress) = (&self.state, &mut self.progress);
        progress.retain(|attempt, _| state.attempt(*attempt).is_some());
    }

    /// Forgets workers that have been gone for long, or are too many: names need not come back.
    fn forget_the_gone(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        let gone = self.state.workers().filter(|worker| worker.standing.is_gone());
        let silent = |worker: WorkerId| {
            let heard = self.heard.get(&worker).copied().unwrap_or_default();
            elapsed.saturating_sub(heard)
        };
        let mut gone: Vec<(Duration, WorkerId)> = gone.map(|worker| (silent(worker.id), worker.id)).collect();
        gone.sort_unstable();
        let recent = gone.iter().take(GONE_KEPT);
        let kept = recent.filter(|(silent, _)| *silent < GONE_FOR).count();
        let old: Vec<WorkerId> = gone.into_iter().skip(kept).map(|(_, worker)| worker).collect();
        for worker in old {
            self.note(Command::Forget { worker });
            if self.state.worker(worker).is_none() {
                self.heard.remove(&worker);
            }
        }
    }

    /// Ends gangs that have not become ready for too long.
    fn end_late_gangs(&mut self) {
        let elapsed = self.surroundings.clock.elapsed();
        let forming: BTreeSet<(TaskId, u64)> = self.state.forming().collect();
        self.forming.retain(|gang, _| forming.contains(gang));
        for gang in forming {
            self.forming.entry(gang).or_insert(elapsed);
        }
        let is_late = |since: &Duration| elapsed.saturating_sub(*since) >= GANG_DEADLINE;
        let late = self.forming.iter().filter(|(_, since)| is_late(since));
        let late: Vec<(TaskId, u64)> = late.map(|(gang, _)| *gang).collect();
        for (task, generation) in late {
            tracing::warn!(%task, generation, "a gang is not ready: it is ended and formed anew");
            self.note(Command::GangLate { task, generation });
        }
    }

    fn publish(&mut self) {
        let (absent, resting) = (self.absent(), self.resting());
        let mut watchers = std::mem::take(&mut self.watchers);
        let (state, beside) = (&self.state, self.beside_state(&absent, &resting));
        watchers.publish(|job, revision| Some(view::snapshot(state, state.job(job)?, revision, beside)));
        self.watchers = watchers;
    }

    /// The last snapshot of a job whose tasks are about to leave the state.
    fn publish_last(&mut self, job: JobId) {
        let (absent, resting) = (self.absent(), self.resting());
        let mut watchers = std::mem::take(&mut self.watchers);
        let (state, beside) = (&self.state, self.beside_state(&absent, &resting));
        watchers.publish_now(job, |job, revision| {
            Some(view::snapshot(state, state.job(job)?, revision, beside))
        });
        self.watchers = watchers;
    }

    fn beside_state<'a>(
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

    fn view(&self, job: JobId) -> Result<v1::Job, Status> {
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

    /// Wall clock, for display.
    fn now(&self) -> Now {
        Now {
            unix_ms: self.surroundings.clock.unix_ms(),
        }
    }
}

/// A rejection as a gRPC status.
fn status(rejection: &Rejection) -> Status {
    let text = rejection.to_string();
    match rejection {
        Rejection::NoSuchJob(_) | Rejection::NoSuchWorker(_) => Status::not_found(text),
        Rejection::RequestIdTaken { .. } | Rejection::SubmittedBefore(_) | Rejection::OutputTaken { .. } => {
            Status::already_exists(text)
        }
        Rejection::JobEnded { .. }
        | Rejection::NotFailed { .. }
        | Rejection::Archived { .. }
        | Rejection::WorkerGone { .. }
        | Rejection::StaleEpoch { .. }
        | Rejection::Stale(_) => Status::failed_precondition(text),
        Rejection::Invalid(_) => Status::invalid_argument(text),
    }
}
