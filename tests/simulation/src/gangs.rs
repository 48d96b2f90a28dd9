//! Which ranks of which gangs are there, as their devices know it: a gang works when all of it was released.

use std::collections::BTreeMap;

/// One formation of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GangKey {
    /// The task.
    pub task: u64,
    /// Counts formations.
    pub generation: u64,
    /// The term that formed it: a coordinator that lost the end of its journal counts again.
    pub term: u64,
}

#[derive(Debug, Default)]
struct Formation {
    ranks: u32,
    released: BTreeMap<u32, (usize, usize)>,
    broken: bool,
}

/// All formations that any device has heard of.
#[derive(Debug, Default)]
pub struct Gangs {
    formations: BTreeMap<GangKey, Formation>,
    /// How often a rank told that another one is gone.
    pub losses_told: u64,
}

impl Gangs {
    /// A rank was told of its gang.
    pub fn form(&mut self, key: GangKey, ranks: u32) {
        self.formations.entry(key).or_default().ranks = ranks;
    }

    /// A rank on this worker's device was released; true when it was the last and none is gone.
    pub fn release(&mut self, key: GangKey, rank: u32, worker: usize, device: usize) -> bool {
        let Some(formation) = self.formations.get_mut(&key) else {
            return false;
        };
        formation.released.insert(rank, (worker, device));
        !formation.broken && formation.released.len() == formation.ranks as usize
    }

    /// Where released ranks are: worker and device.
    pub fn members(&self, key: GangKey) -> Vec<(usize, usize)> {
        let formation = self.formations.get(&key);
        formation
            .map(|formation| formation.released.values().copied().collect())
            .unwrap_or_default()
    }

    /// A rank is gone: the rest of its gang.
    pub fn break_up(&mut self, key: GangKey) -> Vec<(usize, usize)> {
        if let Some(formation) = self.formations.get_mut(&key) {
            formation.broken = true;
        }
        self.members(key)
    }
}
