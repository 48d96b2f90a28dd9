//! Which parts of the device memory taken so far are whose: addresses and sizes only, no device.
//!
//! Memory is taken in slabs and handed out in blocks: the smallest free one that fits, cut to size; freed
//! neighbours of one slab join again. Small blocks have slabs of their own, so that they do not break up the
//! large ones.

use std::collections::{BTreeMap, BTreeSet};

/// Every block begins and ends at a multiple of this: more than any kernel or matrix product asks for.
pub(super) const ALIGNMENT: u64 = 512;
/// Blocks below this size lie in slabs of small ones.
const SMALL: u64 = 1 << 20;
const SMALL_SLAB: u64 = 2 << 20;
/// Blocks below this size share a slab; larger ones get one of their own.
const SHARED: u64 = 32 << 20;
const SHARED_SLAB: u64 = 128 << 20;
/// Slabs of one block are a multiple of this.
const SLAB_STEP: u64 = 2 << 20;

/// Bytes by what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Of live buffers.
    pub in_use: u64,
    /// The most that [`Usage::in_use`] has been.
    pub in_use_peak: u64,
    /// Taken from the device, in use or not.
    pub held: u64,
    /// The most that [`Usage::held`] has been.
    pub held_peak: u64,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    size: u64,
    slab: u64,
    small: bool,
    free: bool,
}

/// The slabs and their blocks.
#[derive(Debug, Default)]
pub(super) struct Arena {
    /// By address.
    blocks: BTreeMap<u64, Block>,
    /// (small, size, address) of the free ones.
    free: BTreeSet<(bool, u64, u64)>,
    /// Size by address.
    slabs: BTreeMap<u64, u64>,
    usage: Usage,
}

/// The size of the block that `bytes` get; none when no address space holds it.
pub(super) fn rounded(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT)
}

/// The size of the slab to take when no block fits `size`, a rounded one; and the least that would do.
pub(super) fn slab_size(size: u64) -> (u64, u64) {
    if size < SMALL {
        (SMALL_SLAB, SMALL_SLAB)
    } else if size < SHARED {
        (SHARED_SLAB, size.next_multiple_of(SLAB_STEP))
    } else {
        let exact = size.checked_next_multiple_of(SLAB_STEP).unwrap_or(size);
        (exact, exact)
    }
}

impl Arena {
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Forgets the peaks.
    pub(super) fn reset_peaks(&mut self) {
        self.usage.in_use_peak = self.usage.in_use;
        self.usage.held_peak = self.usage.held;
    }

    /// A block of `size` bytes, a rounded size, if one is free.
    pub(super) fn take(&mut self, size: u64) -> Option<u64> {
        self.take_of(size, size < SMALL)
    }

    /// As [`Arena::take`], out of the slabs that are for blocks of the other kind: better than none.
    pub(super) fn take_elsewhere(&mut self, size: u64) -> Option<u64> {
        self.take_of(size, size >= SMALL)
    }

    fn take_of(&mut self, size: u64, small: bool) -> Option<u64> {
        let &(_, found, address) = self
            .free
            .range((small, size, 0)..)
            .next()
            .filter(|entry| entry.0 == small)?;
        self.free.remove(&(small, found, address));
        let block = self.blocks.get_mut(&address)?;
        block.free = false;
        block.size = size;
        let slab = block.slab;
        if found > size {
            self.put_free(address + size, found - size, slab, small);
        }
        self.usage.in_use += size;
        self.usage.in_use_peak = self.usage.in_use_peak.max(self.usage.in_use);
        Some(address)
    }

    /// Takes back what [`Arena::take`] gave.
    pub(super) fn give(&mut self, address: u64) {
        let Some(block) = self.blocks.remove(&address).filter(|block| !block.free) else {
            return;
        };
        self.usage.in_use -= block.size;
        let (mut start, mut size) = (address, block.size);
        if let Some(next) = self.free_at(start + size, block.slab) {
            self.remove_free(start + size, next);
            size += next.size;
        }
        let before = self
            .blocks
            .range(..start)
            .next_back()
            .map(|(&at, &before)| (at, before));
        if let Some((at, before)) = before
            && before.free
            && before.slab == block.slab
            && at + before.size == start
        {
            self.remove_free(at, before);
            start = at;
            size += before.size;
        }
        self.put_free(start, size, block.slab, block.small);
    }

    /// A slab that was taken from the device; `size` is one of [`slab_size`]'s for what is to be handed out.
    pub(super) fn add_slab(&mut self, address: u64, size: u64, wanted: u64) {
        self.slabs.insert(address, size);
        self.put_free(address, size, address, wanted < SMALL);
        self.usage.held += size;
        self.usage.held_peak = self.usage.held_peak.max(self.usage.held);
    }

    /// Removes the slabs of which nothing is in use, and gives their addresses.
    pub(super) fn remove_idle_slabs(&mut self) -> Vec<u64> {
        let whole = |&(&address, &size): &(&u64, &u64)| {
            self.blocks
                .get(&address)
                .is_some_and(|block| block.free && block.size == size)
        };
        let idle: Vec<(u64, u64)> = self.slabs.iter().filter(whole).map(|(&a, &s)| (a, s)).collect();
        for &(address, size) in &idle {
            if let Some(&block) = self.blocks.get(&address) {
                self.remove_free(address, block);
            }
            self.slabs.remove(&address);
            self.usage.held -= size;
        }
        idle.into_iter().map(|(address, _)| address).collect()
    }

    fn free_at(&self, address: u64, slab: u64) -> Option<Block> {
        let block = self.blocks.get(&address)?;
        (block.free && block.slab == slab).then_some(*block)
    }

    fn remove_free(&mut self, address: u64, block: Block) {
        self.blocks.remove(&address);
        self.free.remove(&(block.small, block.size, address));
    }

    fn put_free(&mut self, address: u64, size: u64, slab: u64, small: bool) {
        let block = Block {
            size,
            slab,
            small,
            free: true,
        };
        self.blocks.insert(address, block);
        self.free.insert((small, size, address));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    /// Takes a block, with a slab from a device whose addresses only grow.
    fn take(arena: &mut Arena, next: &mut u64, bytes: u64) -> (u64, u64) {
        let size = rounded(bytes).unwrap();
        let address = arena.take(size).unwrap_or_else(|| {
            let (slab, _) = slab_size(size);
            arena.add_slab(*next, slab, size);
            *next += slab;
            arena.take(size).unwrap()
        });
        (address, size)
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_every_byte_comes_back(
            steps in prop::collection::vec((any::<bool>(), 1_u64..80 << 20, any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut arena, mut next) = (Arena::default(), 1 << 30);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (give, bytes, which) in steps {
                // Sizes of every kind, most of them small.
                let bytes = bytes >> (bytes % 18);
                if give && !live.is_empty() {
                    let (address, _) = live.swap_remove(which.index(live.len()));
                    arena.give(address);
                } else {
                    let (address, size) = take(&mut arena, &mut next, bytes.max(1));
                    prop_assert_eq!(address % ALIGNMENT, 0);
                    prop_assert!(size >= bytes);
                    for &(other, other_size) in &live {
                        prop_assert!(address + size <= other || other + other_size <= address);
                    }
                    live.push((address, size));
                }
                prop_assert_eq!(arena.usage().in_use, live.iter().map(|block| block.1).sum::<u64>());
                prop_assert!(arena.usage().in_use_peak >= arena.usage().in_use);
                prop_assert!(arena.usage().held >= arena.usage().in_use);
            }
            let slabs = arena.slabs.len();
            for (address, _) in live {
                arena.give(address);
            }
            prop_assert_eq!(arena.remove_idle_slabs().len(), slabs);
            prop_assert_eq!(arena.usage().held, 0);
            prop_assert!(arena.blocks.is_empty() && arena.free.is_empty());
        }
    }

    #[test]
    fn a_freed_block_is_the_next_one_handed_out() {
        let (mut arena, mut next) = (Arena::default(), 0);
        let (first, _) = take(&mut arena, &mut next, 5 << 20);
        arena.give(first);
        assert_eq!(take(&mut arena, &mut next, 5 << 20).0, first);
    }

    #[test]
    fn a_slab_with_a_live_block_is_kept() {
        let (mut arena, mut next) = (Arena::default(), 0);
        let (kept, _) = take(&mut arena, &mut next, 40 << 20);
        let (freed, _) = take(&mut arena, &mut next, 50 << 20);
        arena.give(freed);
        assert_eq!(arena.remove_idle_slabs(), [freed]);
        assert_eq!(arena.usage().held, 40 << 20);
        arena.give(kept);
        assert_eq!(arena.remove_idle_slabs(), [kept]);
    }

    #[test]
    fn a_small_block_out_of_a_large_slab_joins_its_neighbours_again() {
        let (mut arena, mut next) = (Arena::default(), 0);
        let (kept, _) = take(&mut arena, &mut next, 40 << 20);
        arena.give(kept);
        assert_eq!(arena.take(ALIGNMENT), None);
        let small = [(); 3].map(|()| arena.take_elsewhere(ALIGNMENT).unwrap());
        assert_eq!(small, [kept, kept + ALIGNMENT, kept + 2 * ALIGNMENT]);
        assert_eq!(arena.take(40 << 20), None);
        for block in [small[1], small[2], small[0]] {
            arena.give(block);
        }
        assert_eq!(arena.take(40 << 20), Some(kept));
    }

    #[test]
    fn giving_back_twice_changes_nothing() {
        let (mut arena, mut next) = (Arena::default(), 0);
        let (block, _) = take(&mut arena, &mut next, 600);
        arena.give(block);
        arena.give(block);
        assert_eq!(arena.usage().in_use, 0);
        assert_eq!(arena.free.len(), 1);
    }
}
