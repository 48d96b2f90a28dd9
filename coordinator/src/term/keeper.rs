//! Brings the rules of authority to a store and a clock: claims at the start, looks again while it runs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime;
use tokio_util::sync::CancellationToken;

use super::Fence;
use super::authority::{Authority, Standing};
use super::claims::{Claimant, Claims};
use crate::scheduler::Term;
use crate::service::surroundings::Clock;
use crate::{Error, Result};

/// A coordinator's hold on its term.
#[derive(Debug)]
pub struct Keeper {
    claims: Claims,
    claimant: Claimant,
    lease: Duration,
    clock: ClockOf,
    runtime: runtime::Handle,
    authority: Mutex<Option<Authority>>,
}

struct ClockOf(Arc<dyn Clock>);

impl std::fmt::Debug for ClockOf {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Clock")
    }
}

impl Keeper {
    /// A keeper that has no term yet. The clock is the loop's.
    pub fn new(
        claims: Claims,
        claimant: Claimant,
        lease: Duration,
        clock: Arc<dyn Clock>,
        runtime: runtime::Handle,
    ) -> Self {
        Self {
            claims,
            claimant,
            lease,
            clock: ClockOf(clock),
            runtime,
            authority: Mutex::new(None),
        }
    }

    /// Looks at the terms as often as it takes to keep the authority, until told to stop or superseded.
    pub async fn keep(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let pause = self
                .with(|authority| authority.look_again_at())
                .unwrap_or_default()
                .saturating_sub(self.clock.0.elapsed())
                // A store that does not answer is asked again soon, but not at once.
                .max(self.lease / 20);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if let Err(error) = self.look().await {
                tracing::warn!(%error, "the terms in the store cannot be read; authority ends when that lasts");
            }
            if let Some(Standing::Superseded { .. }) =
                self.with(|authority| authority.standing(Duration::ZERO))
            {
                return;
            }
        }
    }

    async fn look(&self) -> Result<()> {
        let begun_at = self.clock.0.elapsed();
        let highest = tokio::time::timeout(self.lease, self.claims.highest_term())
            .await
            .map_err(|_| Error::Exhausted("store: no answer within the term's lease".to_owned()))??;
        self.with(|authority| authority.looked(begun_at, highest));
        Ok(())
    }

    fn with<T>(&self, what: impl FnOnce(&mut Authority) -> T) -> Option<T> {
        let mut authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        authority.as_mut().map(what)
    }
}

impl Fence for Keeper {
    fn claim(&self, own: Term, next: u64) -> Result<Term> {
        self.runtime.block_on(async {
            let (claim, predecessor) = self.claims.claim(&self.claimant, own.0, next).await?;
            let claimed_at = self.clock.0.elapsed();
            tracing::info!(
                term = claim.term,
                from_sequence = next,
                ?predecessor,
                "a term was claimed"
            );
            let authority = Authority::new(claim.term, self.lease, claimed_at, predecessor);
            *self.authority.lock().unwrap_or_else(PoisonError::into_inner) = Some(authority);
            self.look().await?;
            Ok(Term(claim.term))
        })
    }

    fn standing(&self, now: Duration) -> Standing {
        self.with(|authority| authority.standing(now))
            .unwrap_or(Standing::Waits)
    }
}
