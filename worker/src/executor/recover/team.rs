//! The ranks that recover one student together: how they are laid out, and what they tell each other beside
//! tensors. One rank alone asks nobody.

use std::sync::Arc;

use espalier_model::collective::Gang;
use espalier_model::train::{Grid, Layers};
use espalier_proto::task::Recipe;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::executor::Context;
use crate::{Error, Result};

/// The ranks of a recovery, as one of them sees them.
#[derive(Debug)]
pub(super) struct Team {
    /// None for one that works alone.
    gang: Option<Arc<dyn Gang>>,
    layers: Layers,
}

impl Team {
    /// The attempt's gang, cut into the recipe's stages.
    ///
    /// # Errors
    /// When its ranks are no multiple of the stages.
    pub fn of(context: &Context<'_>, recipe: &Recipe) -> Result<Self> {
        let gang = context.gang.clone().filter(|gang| gang.size() > 1);
        let ranks = gang.as_ref().map_or(1, |gang| gang.size());
        let stages = usize::try_from(recipe.pipeline_stages).unwrap_or(usize::MAX);
        if stages == 0 || !ranks.is_multiple_of(stages) {
            return Err(Error::Invalid {
                reason: format!(
                    "recovery.pipeline_stages is {stages}, and the gang has {ranks} ranks, expected a multiple of it"
                ),
            });
        }
        let replicas = ranks / stages;
        Ok(Self {
            gang,
            layers: Layers { stages, replicas },
        })
    }

    /// Whether this rank decides and writes what there is once.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    fn rank(&self) -> usize {
        self.gang.as_ref().map_or(0, |gang| gang.rank())
    }

    /// How the ranks are laid out.
    pub fn layers(&self) -> Layers {
        self.layers
    }

    /// The stage that this rank holds.
    pub fn stage(&self) -> usize {
        self.rank() / self.layers.replicas
    }

    /// What a trainer needs of the others; none for one that works alone.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn grid(&self) -> Result<Option<Grid>> {
        let grid = self
            .gang
            .as_ref()
            .map(|gang| Grid::form(gang.as_ref(), self.layers));
        Ok(grid.transpose()?)
    }

    /// This rank's share of a step's sequences: its replica's, in their order.
    pub fn share<'a>(&self, sequences: &'a [usize]) -> &'a [usize] {
        let (replicas, replica) = (self.layers.replicas, self.rank() % self.layers.replicas);
        let bound = |replica: usize| sequences.len() * replica / replicas;
        sequences
            .get(bound(replica)..bound(replica + 1))
            .unwrap_or_default()
    }

    /// What every rank gives, in the order of the ranks. Every rank must call it.
    ///
    /// # Errors
    /// When a rank was lost, or is of another build.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        let Some(gang) = &self.gang else {
            return Ok(vec![own]);
        };
        let told = serde_json::to_vec(&own).map_err(|error| not_understood(&error))?;
        let all = gang.exchange(&told)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).map_err(|error| not_understood(&error));
        all.iter().map(read).collect()
    }

    /// What the first rank gives.
    ///
    /// # Errors
    /// As [`Team::gather`].
    pub fn first<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<T> {
        let mut all = self.gather(own)?.into_iter();
        all.next().ok_or_else(|| Error::Invalid {
            reason: "the gang has no first rank".to_owned(),
        })
    }

    /// Whether it is so on any rank.
    ///
    /// # Errors
    /// As [`Team::gather`].
    pub fn any(&self, own: bool) -> Result<bool> {
        Ok(self.gather(own)?.contains(&true))
    }

    /// Returns once every rank has come here.
    ///
    /// # Errors
    /// As [`Team::gather`].
    pub fn meet(&self) -> Result<()> {
        self.gather(()).map(drop)
    }
}

fn not_understood(error: &serde_json::Error) -> Error {
    Error::Invalid {
        reason: format!(
            "the ranks of the gang do not understand each other, expected the same build: {error}"
        ),
    }
}
