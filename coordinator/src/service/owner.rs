//! The loop: the only one to touch the state and the journal.
//!
//! It takes what waits in its inbox, decides and applies it, commits the journal once for all of it, and
//! only then answers and acts. When the disk is full nothing of the batch has happened: the state goes back to
//! what the journal says, those who asked are told, and workers keep their results and send them again.
//!
//! It runs without a clock, thread or runtime of its own: [`Surroundings`] gives it time and a place for
//! slow work, [`Owner::turn`] the requests. Replies are oneshots and outboxes bounded channels, neither of
//! which needs a runtime; so a simulation drives it as the service does.

mod act;
mod archive;
mod bereft;
mod greet;
mod handle;
mod patience;
mod query;
mod request;
mod shelf;
mod show;
mod sight;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use espalier_proto::task::Progress;
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
use super::{CoordinatorOptions, Planner};
use crate::journal::{self, Journal};
use crate::logs::Logs;
use crate::metrics::{Expiry, Metrics};
use crate::scheduler::{
    AttemptId, Command, Effect, Epoch, Event, JobId, Now, Rejection, State, TaskId, Term, WorkerId, apply,
    decide, effects, resume,
};
use crate::term::{Fence, OwnDirectory, Standing};
use crate::{Error, Result};

/// Requests taken in one turn at the most, and so committed together.
pub const BATCH: usize = 1024;
/// How often the loop is sent [`Request::Tick`], to look at silence and publish changes.
pub const TICK: Duration = Duration::from_millis(100);

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
    /// Gangs of which a rank told that another is gone, and workers whose connections are closed.
    bereft: bereft::Bereft,
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
    /// When the disk is next asked for its room.
    looks_at: Duration,
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
        let mut owner = Self::of(options, planner, surroundings, fence, journal, state, history);
        owner.keep_unknown_archives()?;
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

    /// A loop on this state that has done nothing yet.
    fn of(
        options: CoordinatorOptions,
        planner: Arc<dyn Planner>,
        surroundings: Surroundings,
        fence: Arc<dyn Fence>,
        journal: Journal,
        state: State,
        history: History,
    ) -> Self {
        // A worker has the whole of its grace to come back to a coordinator that was away itself.
        let started = surroundings.clock.elapsed();
        let heard = state.workers().map(|worker| (worker.id, started)).collect();
        Self {
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
            heard,
            reporters: BTreeSet::new(),
            progress: BTreeMap::new(),
            troubled: BTreeSet::new(),
            resting: BTreeMap::new(),
            bereft: bereft::Bereft::default(),
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
            looks_at: started,
            before: None,
            listened: started,
            stopping: false,
        }
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

    fn decide(&mut self, command: Command) -> Result<(), Rejection> {
        let events = decide(&self.state, command, self.now())?;
        if self.full_until.is_some() && self.before.is_none() && !events.is_empty() {
            self.before = Some(Box::new(self.state.clone()));
        }
        let frame = self.journal.next();
        self.journal
            .append(&events)
            .map_err(|error| Rejection::Invalid(error.to_string()))?;
        let expiry = Expiry::of(&events);
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
