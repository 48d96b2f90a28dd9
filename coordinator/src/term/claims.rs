//! Claims of terms as they lie in the store: `terms/<term>`, each made by conditional create and never changed.

use espalier_artifact::{Created, ObjectArea};
use serde::{Deserialize, Serialize};

use super::authority::Predecessor;
use crate::{Error, Result};

/// Claims that are tried when others claim at the same time.
const TRIES: usize = 8;

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
    /// Whether the journal was built from the store just now, so that following another's term is right.
    pub restored: bool,
}

/// What to do when the highest claim is this.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// Claim this term.
    Claim(u64, Predecessor),
    /// Another has taken over from this journal: serving it would undo what that one did.
    Refuse,
}

/// Decides on a claim. `own` is the journal's last term, `next` the sequence of its next frame.
pub fn plan(claimant: &Claimant, own: u64, next: u64, highest: Option<&Claim>) -> Plan {
    let Some(highest) = highest else {
        return Plan::Claim(own.saturating_add(1), Predecessor::Gone);
    };
    let term = highest.term.max(own).saturating_add(1);
    if highest.claimant == claimant.claimant {
        return Plan::Claim(term, Predecessor::Gone);
    }
    let has_own_past = next > 1 && !claimant.restored;
    if has_own_past {
        Plan::Refuse
    } else {
        Plan::Claim(term, Predecessor::MayServe)
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
        let mut claims = Vec::with_capacity(terms.len());
        for term in terms {
            claims.extend(self.get(term).await?);
        }
        Ok(claims)
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

    async fn highest(&self) -> Result<Option<Claim>> {
        match self.highest_term().await? {
            Some(term) => self.get(term).await,
            None => Ok(None),
        }
    }

    /// Claims the next term. `own` is the journal's last term, `next` the sequence of its next frame.
    ///
    /// # Errors
    /// When the store cannot be used, or another coordinator has taken over from this journal.
    pub async fn claim(&self, claimant: &Claimant, own: u64, next: u64) -> Result<(Claim, Predecessor)> {
        for _ in 0..TRIES {
            let highest = self.highest().await?;
            let (term, predecessor) = match (plan(claimant, own, next, highest.as_ref()), highest) {
                (Plan::Claim(term, predecessor), _) => (term, predecessor),
                (Plan::Refuse, Some(holder)) => return Err(self.refused(own, &holder)),
                (Plan::Refuse, None) => continue,
            };
            let claim = Claim {
                term,
                host: claimant.host.clone(),
                from_sequence: next,
                claimant: claimant.claimant.clone(),
                start: claimant.start.clone(),
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

    fn refused(&self, own: u64, holder: &Claim) -> Error {
        Error::Conflict(format!(
            "cluster {:?} has gone on without this data directory: {} holds term {} from frame {}, and the last \
             term here is {own}. Serving from here would undo that. Stop for good, or start with an empty data \
             directory to take over from the store; give another `cluster` for a cluster of its own",
            self.cluster, holder.host, holder.term, holder.from_sequence
        ))
    }
}

pub(crate) fn store_error(error: espalier_artifact::Error) -> Error {
    Error::Invalid(format!("store: {error}"))
}
