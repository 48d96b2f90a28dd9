//! Where the connection stands, its heartbeats, and the pauses between connections.

use std::time::Duration;

use espalier_proto::v1::Welcome;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// A heartbeat not answered within the interval, or this when that is longer, is taken for lost.
const HEARTBEAT_DEADLINE: Duration = Duration::from_secs(1);

/// What a welcome says, as far as it is needed while the connection stands.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub(super) term: u64,
    pub(super) worker_id: u64,
    pub(super) artifact_store: std::sync::Arc<str>,
    pub(super) artifact_store_id: std::sync::Arc<str>,
    heartbeat_interval: Duration,
    worker_lost: Duration,
}

impl Terms {
    pub(super) fn of(welcome: &Welcome) -> Self {
        let heartbeat_interval = Duration::from_millis(u64::from(welcome.heartbeat_interval_ms.max(10)));
        let worker_lost = Duration::from_millis(u64::from(welcome.worker_lost_ms));
        Self {
            term: welcome.term,
            worker_id: welcome.worker_id,
            artifact_store: welcome.artifact_store.as_str().into(),
            artifact_store_id: welcome.artifact_store_id.as_str().into(),
            heartbeat_interval,
            worker_lost: worker_lost.max(2 * heartbeat_interval),
        }
    }
}

/// Where the connection stands.
#[derive(Debug)]
pub(super) enum Link {
    /// There is none until then.
    Down { retry_at: Duration },
    /// Hello is on its way.
    Connecting { connection: u64, deadline: Duration },
    /// Welcomed.
    Up(Up),
}

/// A connection that was welcomed.
#[derive(Debug)]
pub(super) struct Up {
    connection: u64,
    terms: Terms,
    since: Duration,
    next_heartbeat: Duration,
    in_flight_since: Option<Duration>,
    unanswered_since: Option<Duration>,
}

impl Link {
    pub(super) fn up(connection: u64, terms: Terms, now: Duration) -> Self {
        Self::Up(Up {
            connection,
            terms,
            since: now,
            next_heartbeat: now,
            in_flight_since: None,
            unanswered_since: None,
        })
    }

    /// The connection that stands or is being made.
    pub(super) fn connection(&self) -> Option<u64> {
        match self {
            Self::Down { .. } => None,
            Self::Connecting { connection, .. } => Some(*connection),
            Self::Up(up) => Some(up.connection),
        }
    }

    pub(super) fn is_connecting(&self, asked: u64) -> bool {
        matches!(self, Self::Connecting { connection, .. } if *connection == asked)
    }

    pub(super) fn is_up(&self, asked: u64) -> bool {
        matches!(self, Self::Up(up) if up.connection == asked)
    }

    pub(super) fn up_since(&self) -> Option<Duration> {
        match self {
            Self::Up(up) => Some(up.since),
            Self::Down { .. } | Self::Connecting { .. } => None,
        }
    }

    pub(super) fn terms(&self) -> Option<Terms> {
        match self {
            Self::Up(up) => Some(up.terms.clone()),
            Self::Down { .. } | Self::Connecting { .. } => None,
        }
    }

    pub(super) fn may_connect(&self, now: Duration) -> bool {
        matches!(self, Self::Down { retry_at } if *retry_at <= now)
    }

    /// When the link wants a tick, heartbeats left aside.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        match self {
            Self::Down { retry_at } => Some(*retry_at),
            Self::Connecting { deadline, .. } => Some(*deadline),
            Self::Up(up) => up.given_up_at(),
        }
    }

    /// When the next heartbeat is due, or one in flight is taken for lost.
    pub(super) fn heartbeat_at(&self) -> Option<Duration> {
        let Self::Up(up) = self else { return None };
        Some(match up.in_flight_since {
            Some(since) => since.saturating_add(up.heartbeat_deadline()),
            None => up.next_heartbeat,
        })
    }

    /// Why a connection is of no more use, when it is not.
    pub(super) fn overdue(&self, now: Duration) -> Option<&'static str> {
        match self {
            Self::Down { .. } => None,
            Self::Connecting { deadline, .. } => {
                (*deadline <= now).then_some("the coordinator does not answer")
            }
            Self::Up(up) => up
                .given_up_at()
                .is_some_and(|at| at <= now)
                .then_some("heartbeats are not answered"),
        }
    }

    /// Begins a heartbeat when one is due.
    pub(super) fn beat(&mut self, now: Duration) -> Option<(u64, Terms)> {
        let Self::Up(up) = self else { return None };
        if up
            .in_flight_since
            .is_some_and(|since| since.saturating_add(up.heartbeat_deadline()) <= now)
        {
            up.in_flight_since = None;
        }
        if up.in_flight_since.is_some() || now < up.next_heartbeat {
            return None;
        }
        up.next_heartbeat = now.saturating_add(up.terms.heartbeat_interval);
        up.in_flight_since = Some(now);
        up.unanswered_since.get_or_insert(now);
        Some((up.connection, up.terms.clone()))
    }

    /// A heartbeat was answered, or will not be.
    pub(super) fn heartbeat_over(&mut self, answered: bool) {
        let Self::Up(up) = self else { return };
        up.in_flight_since = None;
        if answered {
            up.unanswered_since = None;
        }
    }
}

impl Up {
    fn heartbeat_deadline(&self) -> Duration {
        self.terms.heartbeat_interval.max(HEARTBEAT_DEADLINE)
    }

    fn given_up_at(&self) -> Option<Duration> {
        Some(self.unanswered_since?.saturating_add(self.terms.worker_lost))
    }
}

/// Pauses between connections: each about twice the one before, with jitter, so that workers who lost the
/// same coordinator do not come back in one moment.
#[derive(Debug)]
pub(super) struct Pauses {
    random: ChaCha8Rng,
    upper: Duration,
}

impl Pauses {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
            upper: FIRST_PAUSE,
        }
    }

    pub(super) fn is_first(&self) -> bool {
        self.upper == FIRST_PAUSE
    }

    pub(super) fn begin_again(&mut self) {
        self.upper = FIRST_PAUSE;
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.upper.mul_f64(self.random.random_range(0.5..=1.0));
        self.upper = (2 * self.upper).min(LAST_PAUSE);
        pause
    }
}
