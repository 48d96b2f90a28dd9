//! Removing from the store what no start needs any more, beside shipping: it may be thousands of objects.

use std::sync::Arc;

use espalier_artifact::ObjectArea;
use futures::{StreamExt, stream};
use tokio::sync::Notify;

use super::chain;
use super::listing::list;
use crate::term::Claims;
use crate::term::claims::store_error;
use crate::{Error, Result};

/// Snapshots that stay in the store.
const KEPT: usize = 2;
/// Objects that are removed at a time.
const REMOVED_AT_ONCE: usize = 8;

/// Prunes for one term. Clones wake the same one.
#[derive(Debug, Clone)]
pub struct Pruner {
    area: ObjectArea,
    claims: Claims,
    term: u64,
    due: Arc<Notify>,
}

impl Pruner {
    pub fn new(area: ObjectArea, claims: Claims, term: u64) -> Self {
        Self {
            area,
            claims,
            term,
            due: Arc::new(Notify::new()),
        }
    }

    /// There is a new snapshot in the store.
    pub fn is_due(&self) {
        self.due.notify_one();
    }

    /// Prunes whenever it is due, until dropped: what is not removed then is with the next snapshot.
    pub async fn run(&self) {
        loop {
            self.due.notified().await;
            if let Err(error) = self.prune().await {
                tracing::warn!(%error, "old frames stay in the store until the next snapshot");
            }
        }
    }

    /// Removes all but two snapshots, and frames before the older of them.
    ///
    /// # Errors
    /// When the store cannot be used, or another coordinator has taken over.
    pub async fn prune(&self) -> Result<()> {
        let claims = self.claims.all().await?;
        if claims.iter().any(|claim| claim.term > self.term) {
            return Err(Error::Conflict(
                "another coordinator has taken over: nothing is removed".to_owned(),
            ));
        }
        let listed = list(&self.area).await?;
        let sound = chain::sound(&claims, &listed.snapshots);
        let mut kept: Vec<u64> = sound.iter().map(|snapshot| snapshot.sequence).collect();
        kept.dedup();
        kept.truncate(KEPT);
        let (Some(older), true) = (kept.last().copied(), kept.len() == KEPT) else {
            return Ok(());
        };
        let snapshots = listed
            .snapshots
            .into_iter()
            .filter(|snapshot| snapshot.sequence < older)
            .map(|snapshot| snapshot.key);
        let pieces = listed
            .pieces
            .into_iter()
            .filter(|piece| piece.last <= older)
            .map(|piece| piece.key);
        let keys: Vec<String> = snapshots.chain(pieces).collect();
        let removals = stream::iter(keys).map(|key| async move { self.area.delete(&key).await });
        let mut removals = std::pin::pin!(removals.buffer_unordered(REMOVED_AT_ONCE));
        while let Some(removed) = removals.next().await {
            removed.map_err(store_error)?;
        }
        Ok(())
    }
}
