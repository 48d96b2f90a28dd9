//! The ranks of a communicator over a mesh, and the names of what goes between them.

use std::sync::Arc;

use super::mesh::Mesh;

/// The ranks of a communicator, and this one's place among them.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) mesh: Arc<Mesh>,
    pub(super) rank: usize,
    /// Their numbers in the gang.
    pub(super) ranks: Vec<usize>,
    /// Which of those that these ranks have formed.
    pub(super) number: u64,
}

impl Members {
    /// How many there are.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// All but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&other| other != self.rank)
    }

    /// A lane of the mesh that these ranks use for this and nothing else.
    pub(super) fn lane(&self, purpose: &str) -> u64 {
        let name = format!("{:?} {} {purpose}", self.ranks, self.number);
        let hash = blake3::hash(name.as_bytes());
        let start = hash.as_bytes().first_chunk::<8>().copied();
        u64::from_le_bytes(start.unwrap_or_default())
    }

    /// A rank's number in the gang.
    pub(super) fn in_gang(&self, rank: usize) -> usize {
        self.ranks.get(rank).copied().unwrap_or(usize::MAX)
    }
}
