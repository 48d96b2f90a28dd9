//! Whether the coordinator lives, and whether it is ready.
//!
//! The loop notes what it does in [`Vitals`], a few atomics; probes read them without asking the loop, so
//! that one that is stuck is seen.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Sources;

/// A loop that has not turned for so long is stuck. It turns ten times a second, but waits for the disk.
const STUCK: Duration = Duration::from_secs(20);

/// What the loop says of itself. Clones are the same.
#[derive(Debug, Clone)]
pub struct Vitals(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    started: Instant,
    /// Milliseconds after `started` of the last turn, plus one; 0 before the first.
    turned: AtomicU64,
    replayed: AtomicBool,
    authority: AtomicBool,
    disk_full: AtomicBool,
    waits_for_room: Mutex<Option<String>>,
}

impl Default for Vitals {
    /// Of a coordinator that has just started: not ready yet.
    fn default() -> Self {
        Self(Arc::new(Inner {
            started: Instant::now(),
            turned: AtomicU64::new(0),
            replayed: AtomicBool::new(false),
            authority: AtomicBool::new(true),
            disk_full: AtomicBool::new(false),
            waits_for_room: Mutex::new(None),
        }))
    }
}

impl Vitals {
    /// The journal has been replayed and the loop is about to turn.
    pub fn replayed(&self) {
        self.0.replayed.store(true, Ordering::Relaxed);
        self.turned();
    }

    /// Whether the journal has been replayed.
    pub fn is_replayed(&self) -> bool {
        self.0.replayed.load(Ordering::Relaxed)
    }

    /// The loop has turned.
    pub fn turned(&self) {
        let since = u64::try_from(self.0.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.turned.store(since.saturating_add(1), Ordering::Relaxed);
    }

    /// Whether the term holds its authority: without it nothing is promoted.
    pub fn set_authority(&self, held: bool) {
        self.0.authority.store(held, Ordering::Relaxed);
    }

    /// Whether the journal's disk is full: nothing new is taken.
    pub fn set_disk_full(&self, full: bool) {
        self.0.disk_full.store(full, Ordering::Relaxed);
    }

    /// Why the coordinator cannot begin before there is room; none once it can.
    pub fn waits_for_room(&self, reason: Option<String>) {
        *self.waiting() = reason;
    }

    /// See [`Vitals::waits_for_room`].
    pub fn lacks_room(&self) -> Option<String> {
        self.waiting().clone()
    }

    fn waiting(&self) -> MutexGuard<'_, Option<String>> {
        self.0
            .waits_for_room
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the journal's disk is full.
    pub fn is_disk_full(&self) -> bool {
        self.0.disk_full.load(Ordering::Relaxed)
    }

    /// Whether the loop turns, or has yet to begin; the reason when it is stuck.
    pub fn alive(&self) -> Result<(), String> {
        let Some(turned) = self.0.turned.load(Ordering::Relaxed).checked_sub(1) else {
            return Ok(());
        };
        let since = self
            .0
            .started
            .elapsed()
            .saturating_sub(Duration::from_millis(turned));
        if since < STUCK {
            return Ok(());
        }
        Err(format!("the loop has not turned for {} s", since.as_secs()))
    }

    /// Whether jobs and results are taken; the reason when they are not.
    pub fn ready(&self) -> Result<(), String> {
        self.alive()?;
        if let Some(reason) = self.lacks_room() {
            return Err(reason);
        }
        if !self.is_replayed() {
            return Err("the journal is being replayed".to_owned());
        }
        if !self.0.authority.load(Ordering::Relaxed) {
            return Err("the term's authority is not held: nothing is promoted".to_owned());
        }
        if self.is_disk_full() {
            return Err(
                "the coordinator's disk is full: nothing new is taken until there is room".to_owned(),
            );
        }
        Ok(())
    }
}

/// `/healthz`: restart the coordinator when this fails.
pub(super) async fn alive(State(sources): State<Sources>) -> Response {
    answer(sources.vitals.alive())
}

/// `/readyz`: send it no work while this fails.
pub(super) async fn ready(State(sources): State<Sources>) -> Response {
    answer(sources.vitals.ready())
}

fn answer(well: Result<(), String>) -> Response {
    match well {
        Ok(()) => Json(json!({ "status": "ok" })).into_response(),
        Err(reason) => {
            let body = json!({ "status": "failing", "reason": reason });
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn readiness_says_what_is_in_the_way() {
        let vitals = Vitals::default();
        assert!(vitals.alive().is_ok());
        assert!(vitals.ready().unwrap_err().contains("replayed"));
        vitals.replayed();
        assert!(vitals.ready().is_ok());
        vitals.set_disk_full(true);
        assert!(vitals.ready().unwrap_err().contains("disk is full"));
        assert!(vitals.alive().is_ok(), "a full disk is no reason to restart");
        vitals.set_disk_full(false);
        vitals.set_authority(false);
        assert!(vitals.ready().unwrap_err().contains("authority"));
    }
}
