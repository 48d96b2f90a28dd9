//! Brings the rules of authority to a store and a clock: claims at the start, looks again while it runs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::authority::{Authority, Standing};
use super::claims::{Claimant, Claims};
use super::{Fence, Heard};
use crate::scheduler::Term;
use crate::service::surroundings::Clock;
use crate::{Error, Result};

/// How long a claim may take, with everything that is read before it.
const CLAIM_DEADLINE: Duration = Duration::from_secs(180);

/// A coordinator's hold on its term.
#[derive(Debug)]
pub struct Keeper {
    claims: Claims,
    claimant: Claimant,
    lease: Duration,
    clock: ClockOf,
    runtime: runtime::Handle,
    authority: Mutex<Option<Authority>>,
    /// There may be a higher term: it is looked at once.
    hint: Notify,
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
            hint: Notify::new(),
        }
    }

    /// Looks at the terms as often as it takes to keep the authority, until told to stop or superseded.
    pub async fn keep(self: Arc<Self>, stop: CancellationToken) {
        // A store that does not answer is asked again soon, but not at once; nor whenever a worker says so.
        let least = self.lease / 20;
        let mut complained = false;
        loop {
            let due = self
                .with(|authority| authority.look_again_at())
                .unwrap_or_default();
            let rest = due.saturating_sub(self.clock.0.elapsed()).saturating_sub(least);
            let pause = async {
                sleep(least).await;
                tokio::select! {
                    () = sleep(rest) => {}
                    () = self.hint.notified() => {}
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = pause => {}
            }
            match self.look().await {
                Err(error) if !complained => {
                    tracing::warn!(%error, "the terms in the store cannot be read; authority ends when that lasts");
                    complained = true;
                }
                Err(_) => {}
                Ok(()) => {
                    if std::mem::take(&mut complained) {
                        tracing::info!("the terms in the store can be read again");
                    }
                }
            }
            if self.is_superseded() {
                return;
            }
        }
    }

    /// Whether another coordinator has taken over, as far as was seen.
    pub fn is_superseded(&self) -> bool {
        let standing = self.with(|authority| authority.standing(Duration::ZERO));
        matches!(standing, Some(Standing::Superseded { .. }))
    }

    async fn look(&self) -> Result<()> {
        let begun_at = self.clock.0.elapsed();
        // One request that gets stuck must leave time for others before the lease is over.
        let highest = timeout(self.lease / 4, self.claims.highest_term())
            .await
            .map_err(|_| {
                Error::Exhausted("store: no answer within a quarter of the term's lease".to_owned())
            })??;
        let own = self.with(|authority| {
            authority.looked(begun_at, highest);
            authority.term()
        });
        if own > highest {
            let term = own.unwrap_or_default();
            return Err(Error::NotFound(format!(
                "store: the claim of term {term} is not there: is the store still where it was?"
            )));
        }
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
            let claim = self.claims.claim(&self.claimant, own.0, next);
            let (claim, predecessor) = timeout(CLAIM_DEADLINE, claim).await.map_err(|_| {
                let waited = CLAIM_DEADLINE.as_secs();
                Error::Exhausted(format!("store: no term could be claimed within {waited} s"))
            })??;
            let claimed_at = self.clock.0.elapsed();
            tracing::info!(
                term = claim.term,
                from_sequence = next,
                ?predecessor,
                "a term was claimed"
            );
            let authority = Authority::new(claim.term, self.lease, claimed_at, predecessor);
            *self.authority.lock().unwrap_or_else(PoisonError::into_inner) = Some(authority);
            if let Err(error) = self.look().await {
                tracing::warn!(%error, "the terms in the store cannot be read; nothing is promoted until they can");
            }
            Ok(Term(claim.term))
        })
    }

    fn standing(&self, now: Duration) -> Standing {
        self.with(|authority| authority.standing(now))
            .unwrap_or(Standing::Waits)
    }

    fn hears_of(&self, term: Term) -> Heard {
        tracing::warn!(%term, "a worker was welcomed by a coordinator of a higher term: the store is asked");
        self.hint.notify_one();
        Heard::Looks
    }
}
