//! Claims of terms as they lie in the store: `terms/<term>`, each made by conditional create and never changed.

use std::time::Duration;

use espalier_artifact::{Created, ObjectArea};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use super::authority::Predecessor;
use crate::shipping;
use crate::{Error, Result};

/// Claims that are tried when others claim at the same time.
const TRIES: usize = 8;
/// Claims that are read at a time.
const READ_AT_ONCE: usize = 16;

/// One claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The term.
    pub term: u64,
    /// The machine that claimed it, for people.
    pub host: String,
    /// The first frame that is this term's: frames of lower terms from here on are void.
    pub from_sequence: u64,
    /// The data directory that claimed it: the same one may go on at once.
    pub claimant: String,
    /// This one start, so that a claim whose answer was lost is known for one's own.
    pub start: String,
    /// How long its coordinator may promote after a look at the terms: a successor waits that out, whatever its
    /// own lease is.
    #[serde(default)]
    pub lease_ms: u64,
}

/// Who wants to claim.
#[derive(Debug, Clone)]
pub struct Claimant {
    /// See [`Claim::host`].
    pub host: String,
    /// See [`Claim::claimant`].
    pub claimant: String,
    /// See [`Claim::start`].
    pub start: String,
    /// See [`Claim::lease_ms`].
    pub lease: Duration,
    /// The highest term as the journal was built from the store just now, so that following it is right; none
    /// when the journal is the disk's own.
    pub restored: Option<u64>,
}

/// What to do about a claim.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// Claim this term.
    Claim(u64, Predecessor),
    /// Another has taken over from this journal: serving it would undo what that one did.
    Refuse,
    /// Another has claimed since the journal was built from the store: it has to be built again.
    Again,
    /// The store knows frames that the disk has lost: a claim would make them void.
    Behind,
}

/// Decides on a claim. `own` is the journal's last term, `next` the sequence of its next frame, `reach` the last
/// frame that a start from the store would know.
pub fn plan(claimant: &Claimant, own: u64, next: u64, claims: &[Claim], reach: u64) -> Plan {
    let highest = claims.iter().max_by_key(|claim| claim.term);
    let term = highest
        .map_or(own, |highest| highest.term.max(own))
        .saturating_add(1);
    let is_own = |claim: &&Claim| claim.claimant == claimant.claimant;
    let others = claims.iter().filter(|claim| !is_own(claim));
    match (highest, claimant.restored) {
        (Some(highest), Some(known)) if highest.term != known && !is_own(&highest) => Plan::Again,
        (Some(highest), None) if !is_own(&highest) => Plan::Refuse,
        (_, None) if reach >= next => Plan::Behind,
        (Some(highest), _) if !is_own(&highest) => {
            // Not only the last one's: those before it may not have been waited out.
            let longest = others.map(|claim| Duration::from_millis(claim.lease_ms)).max();
            let lease = longest.unwrap_or_default();
            Plan::Claim(term, Predecessor::MayServe { lease })
        }
        (Some(_) | None, _) => Plan::Claim(term, Predecessor::Gone),
    }
}

/// The claims of one cluster.
#[derive(Debug, Clone)]
pub struct Claims {
    area: ObjectArea,
    cluster: String,
}

impl Claims {
    /// Those in the cluster's area of a store.
    pub fn new(area: ObjectArea, cluster: &str) -> Self {
        Self {
            area,
            cluster: cluster.to_owned(),
        }
    }

    /// The highest term that was claimed; none when there is none.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn highest_term(&self) -> Result<Option<u64>> {
        Ok(self.terms().await?.into_iter().max())
    }

    async fn terms(&self) -> Result<Vec<u64>> {
        let listed = self.area.list("terms").await.map_err(store_error)?;
        let term = |key: &str| key.strip_prefix("terms/")?.parse().ok();
        Ok(listed.iter().filter_map(|object| term(&object.key)).collect())
    }

    /// Every claim, by term.
    ///
    /// # Errors
    /// When the store cannot be read or a claim is damaged.
    pub async fn all(&self) -> Result<Vec<Claim>> {
        let mut terms = self.terms().await?;
        terms.sort_unstable();
        let reads = stream::iter(terms).map(|term| self.get(term));
        let claims: Vec<Option<Claim>> = reads.buffered(READ_AT_ONCE).try_collect().await?;
        Ok(claims.into_iter().flatten().collect())
    }

    async fn get(&self, term: u64) -> Result<Option<Claim>> {
        let key = format!("terms/{term}");
        let Some(bytes) = self.area.get(&key).await.map_err(store_error)? else {
            return Ok(None);
        };
        let claim = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Internal(format!("store: the claim {key} is not understood: {error}")))?;
        Ok(Some(claim))
    }

    /// Claims the next term. `own` is the journal's last term, `next` the sequence of its next frame.
    ///
    /// # Errors
    /// When the store cannot be used, another coordinator has taken over from this journal, or the store knows
    /// frames that it has lost.
    pub async fn claim(&self, claimant: &Claimant, own: u64, next: u64) -> Result<(Claim, Predecessor)> {
        for _ in 0..TRIES {
            let claims = self.all().await?;
            let reach = match claimant.restored {
                // As far as the store reached; one that still runs may have shipped more, which is void.
                Some(_) => 0,
                None => shipping::reach(&self.area, &claims).await?,
            };
            let (term, predecessor) = match plan(claimant, own, next, &claims, reach) {
                Plan::Claim(term, predecessor) => (term, predecessor),
                Plan::Refuse => return Err(self.refused(own, &claims)),
                Plan::Again => return Err(self.overtaken(&claims)),
                Plan::Behind => return Err(self.behind(next, reach)),
            };
            let claim = Claim {
                term,
                host: claimant.host.clone(),
                from_sequence: next,
                claimant: claimant.claimant.clone(),
                start: claimant.start.clone(),
                lease_ms: u64::try_from(claimant.lease.as_millis()).unwrap_or(u64::MAX),
            };
            let json = serde_json::to_vec(&claim).map_err(|error| Error::Internal(error.to_string()))?;
            let key = format!("terms/{term}");
            let made = self.area.put_if_absent(&key, &json).await.map_err(store_error)?;
            if made == Created::Made || self.get(term).await?.as_ref() == Some(&claim) {
                return Ok((claim, predecessor));
            }
        }
        Err(Error::Conflict(format!(
            "other coordinators of cluster {:?} claim terms at the same time: start one only",
            self.cluster
        )))
    }

    fn refused(&self, own: u64, claims: &[Claim]) -> Error {
        let holder = claims.iter().max_by_key(|claim| claim.term);
        let (host, term, from) = holder.map_or(("another", 0, 0), |holder| {
            (holder.host.as_str(), holder.term, holder.from_sequence)
        });
        Error::Conflict(format!(
            "cluster {:?} in store {} has gone on without this data directory: {host} holds term {term} from frame \
             {from}, and the last term here is {own}. Serving from here would undo that. Stop for good, or start \
             with an empty data directory to take over from the store; give another `cluster` for a cluster of \
             its own",
            self.cluster,
            self.area.location(),
        ))
    }

    fn overtaken(&self, claims: &[Claim]) -> Error {
        let host = claims.iter().max_by_key(|claim| claim.term);
        Error::Conflict(format!(
            "{} has taken over cluster {:?} in store {} while this coordinator built its journal from there: start \
             one only, or this one again to take over from that one",
            host.map_or("another", |claim| claim.host.as_str()),
            self.cluster,
            self.area.location(),
        ))
    }

    fn behind(&self, next: u64, reach: u64) -> Error {
        Error::Conflict(format!(
            "the store {} holds the journal of cluster {:?} up to frame {reach}, and this data directory only up to \
             frame {}: going on from here would lose what lies between. Move the data directory away and start \
             with an empty one, which is built from the store; give another `cluster` to go on from here all the \
             same, as a cluster of its own",
            self.area.location(),
            self.cluster,
            next.saturating_sub(1),
        ))
    }
}

pub(crate) fn store_error(error: espalier_artifact::Error) -> Error {
    let told = format!("store: {error}");
    if error.is_full() {
        Error::StoreFull(told)
    } else {
        Error::Invalid(told)
    }
}
