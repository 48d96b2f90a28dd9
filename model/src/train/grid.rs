//! The ranks of a gang laid out as stages and replicas: which communicators one of them has.
//!
//! Rank `stage * replicas + replica` holds stage `stage` of replica `replica`. Ranks of one stage share out its
//! optimiser; those of one replica hand activations on. Any of the two may be one.

use std::ops::Range;
use std::sync::Arc;

use espalier_arch::Architecture;

use crate::collective::{Communicator, Gang};
use crate::{Error, Result};

/// How many stages and replicas there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// Slices of the block list.
    pub stages: usize,
    /// Ranks that hold each slice and see other data.
    pub replicas: usize,
}

/// The ranks that train one student, as one of them sees them.
#[derive(Debug)]
pub struct Grid {
    layers: Layers,
    stage: usize,
    /// Every rank.
    pub(super) all: Arc<dyn Communicator>,
    /// Those with the same stage.
    pub(super) replicas: Option<Arc<dyn Communicator>>,
    /// Those of the same replica, in the order of the stages.
    pub(super) stages: Option<Arc<dyn Communicator>>,
    /// The first and the last stage of the same replica, for what both hold.
    pub(super) ends: Option<Arc<dyn Communicator>>,
    pub(super) bucket_elements: usize,
}

/// Elements of a bucket: large enough for full bandwidth, small enough that most of them are exchanged while the
/// backward goes on.
const BUCKET_ELEMENTS: usize = 8 << 20;

/// What `work` makes of the grid. An error ends every rank: they would wait for this one.
pub(super) fn or_end_all<T>(grid: Option<Grid>, work: impl FnOnce(Option<Grid>) -> Result<T>) -> Result<T> {
    let all = grid.as_ref().map(|grid| Arc::clone(&grid.all));
    work(grid).inspect_err(|_| {
        if let Some(all) = all {
            all.abort();
        }
    })
}

impl Grid {
    /// Lays out `gang`. Every rank must do so.
    ///
    /// # Errors
    /// When `layers` do not make up the gang, or it is broken.
    pub fn form(gang: &dyn Gang, layers: Layers) -> Result<Self> {
        let Layers { stages, replicas } = layers;
        if stages == 0 || replicas == 0 || stages.checked_mul(replicas) != Some(gang.size()) {
            return Err(Error::OutOfRange {
                what: "ranks of a gang",
                value: gang.size(),
                expected: format!("{stages} stages x {replicas} replicas, each at least 1"),
            });
        }
        let (stage, replica) = (gang.rank() / replicas, gang.rank() % replicas);
        let all: Vec<usize> = (0..gang.size()).collect();
        let same_stage: Vec<usize> = (0..replicas).map(|replica| stage * replicas + replica).collect();
        let same_replica: Vec<usize> = (0..stages).map(|stage| stage * replicas + replica).collect();
        let ends = [replica, (stages - 1) * replicas + replica];
        let several = |ranks: &[usize]| (ranks.len() > 1).then(|| gang.communicator(ranks)).transpose();
        // Every rank asks in this order, so that nobody waits for one that waits for it.
        Ok(Self {
            layers,
            stage,
            all: gang.communicator(&all)?,
            replicas: several(&same_stage)?,
            stages: several(&same_replica)?,
            ends: match stages > 1 && (stage == 0 || stage + 1 == stages) {
                true => several(&ends)?,
                false => None,
            },
            bucket_elements: BUCKET_ELEMENTS,
        })
    }

    /// The same with gradients exchanged in buckets of about so many elements.
    #[must_use]
    pub fn with_bucket_elements(self, bucket_elements: usize) -> Self {
        Self {
            bucket_elements: bucket_elements.max(1),
            ..self
        }
    }

    /// How the gang is laid out.
    pub fn layers(&self) -> Layers {
        self.layers
    }

    /// Which stage this rank holds, from 0.
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// The communicator of those with the same stage, where there are several.
    pub(super) fn shared(&self) -> Option<(&Self, Arc<dyn Communicator>)> {
        self.replicas
            .as_ref()
            .map(|replicas| (self, Arc::clone(replicas)))
    }

    /// An error unless blocks `range` are a stage that may stand here.
    pub(super) fn expect_stage(&self, range: &Range<usize>, architecture: &Architecture) -> Result<()> {
        let (first, last) = (self.stage == 0, self.stage + 1 == self.layers.stages);
        let blocks = architecture.blocks.len();
        if (range.start == 0, range.end == blocks) == (first, last) {
            return Ok(());
        }
        Err(Error::OutOfRange {
            what: "the first block of a stage",
            value: range.start,
            expected: format!(
                "blocks of stage {} of {}, not blocks {} to {} of {blocks}",
                self.stage + 1,
                self.layers.stages,
                range.start,
                range.end,
            ),
        })
    }
}
