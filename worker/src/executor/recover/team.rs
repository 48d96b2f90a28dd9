//! The ranks that recover one student together: how they are laid out, and what they tell each other beside
//! tensors. One rank alone asks nobody.

use std::ops::Range;
use std::sync::Arc;

use espalier_arch::Architecture;
use espalier_model::collective::Gang;
use espalier_model::collective::mesh::EXCHANGED;
use espalier_model::train::{Grid, Layers, split};
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
    fn stage(&self) -> usize {
        self.rank() / self.layers.replicas
    }

    /// The ranks of another gang, or of this one, those first that held what this one holds if they had as many stages.
    pub fn nearest_first(&self, ranks: usize) -> Vec<usize> {
        let size = self.layers.stages * self.layers.replicas;
        // Twice the distance between the middles of what of the whole each is.
        let distance = |other: &usize| ((2 * other + 1) * size).abs_diff((2 * self.rank() + 1) * ranks);
        let mut nearest: Vec<usize> = (0..ranks).collect();
        nearest.sort_by_key(distance);
        nearest
    }

    /// The blocks of a model that are this rank's, when it runs over sequences of `tokens` tokens.
    ///
    /// # Errors
    /// When it has fewer blocks than there are stages.
    pub fn blocks(&self, architecture: &Architecture, tokens: usize) -> Result<Range<usize>> {
        let cut = split::cut(architecture, self.layers.stages, tokens)?;
        Ok(cut.get(self.stage()).cloned().unwrap_or_default())
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

    /// What the first rank gives, however long it is; of the others nothing is asked. Every rank must call it.
    ///
    /// # Errors
    /// As [`Team::gather`].
    pub fn first<T: Serialize + DeserializeOwned>(&self, own: Option<T>) -> Result<T> {
        let no_first = || Error::Invalid {
            reason: "the gang has no first rank, expected one that tells the others".to_owned(),
        };
        let Some(gang) = &self.gang else {
            return own.ok_or_else(no_first);
        };
        let told = own.as_ref().map(serde_json::to_vec).transpose();
        let told = told.map_err(|error| not_understood(&error))?.unwrap_or_default();
        let length = self.gather(told.len())?.first().copied().unwrap_or(0);
        let mut all = Vec::with_capacity(length.min(EXCHANGED));
        while all.len() < length {
            let rest = told.get(all.len()..).unwrap_or_default();
            let piece = rest.get(..EXCHANGED).unwrap_or(rest);
            let piece = gang.exchange(piece)?.into_iter().next();
            all.extend(piece.filter(|piece| !piece.is_empty()).ok_or_else(no_first)?);
        }
        serde_json::from_slice(&all).map_err(|error| not_understood(&error))
    }

    /// The least that a rank gives.
    ///
    /// # Errors
    /// As [`Team::gather`].
    pub fn least(&self, own: usize) -> Result<usize> {
        Ok(self.gather(own)?.into_iter().fold(own, usize::min))
    }

    /// Breaks the gang: the others need not wait for what this rank will not do.
    pub fn give_up(&self) {
        if let Some(gang) = &self.gang {
            gang.abort();
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::time::Duration;

    use espalier_model::collective::{Communicator, local};

    use super::*;

    /// A gang that takes no more at a time than one over sockets.
    #[derive(Debug)]
    struct Narrow(Arc<dyn Gang>);

    impl Gang for Narrow {
        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn size(&self) -> usize {
            self.0.size()
        }

        fn communicator(&self, ranks: &[usize]) -> espalier_model::Result<Arc<dyn Communicator>> {
            self.0.communicator(ranks)
        }

        fn exchange(&self, bytes: &[u8]) -> espalier_model::Result<Vec<Vec<u8>>> {
            assert!(bytes.len() <= EXCHANGED, "{} bytes at once", bytes.len());
            self.0.exchange(bytes)
        }

        fn check(&self) -> espalier_model::Result<()> {
            self.0.check()
        }

        fn abort(&self) {
            self.0.abort();
        }
    }

    /// What each of three ranks gets.
    fn on_each<T: Send>(ask: impl Fn(&Team) -> T + Sync) -> Vec<T> {
        let gangs = local::LocalGang::all(3, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let ranks = gangs.into_iter().map(|gang| {
                scope.spawn(|| {
                    let layers = Layers {
                        stages: 3,
                        replicas: 1,
                    };
                    ask(&Team {
                        gang: Some(Arc::new(Narrow(gang))),
                        layers,
                    })
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_first_rank_tells_the_others_however_much_it_is() {
        let long: Vec<f32> = (0..400_000_u32).map(|step| step as f32 / 7.0).collect();
        let told = on_each(|team| team.first(team.is_first().then(|| long.clone())).unwrap());
        assert!(told.iter().all(|told| *told == long));
        let told = on_each(|team| team.first(team.is_first().then(String::new)).unwrap());
        assert_eq!(told, ["", "", ""]);
    }

    #[test]
    fn ranks_agree_on_the_least_of_what_each_has_room_for() {
        assert_eq!(
            on_each(|team| team.least(4096 >> team.rank()).unwrap()),
            [1024; 3]
        );
    }

    #[test]
    fn shares_of_the_same_stage_come_before_those_of_others() {
        let orders = on_each(|team| [3, 2, 6].map(|ranks| team.nearest_first(ranks)));
        assert_eq!(orders[0], [vec![0, 1, 2], vec![0, 1], vec![0, 1, 2, 3, 4, 5]]);
        assert_eq!(orders[1], [vec![1, 0, 2], vec![0, 1], vec![2, 3, 1, 4, 0, 5]]);
        assert_eq!(orders[2], [vec![2, 1, 0], vec![1, 0], vec![4, 5, 3, 2, 1, 0]]);
    }

    #[test]
    fn a_rank_that_gives_up_leaves_no_other_waiting() {
        let told = on_each(|team| match team.is_first() {
            true => {
                team.give_up();
                true
            }
            false => team.meet().is_err_and(|error| error.is_of_another_rank()),
        });
        assert_eq!(told, [true; 3]);
    }
}
