//! How a stage's parameters are shared out between the ranks that hold the same stage: arithmetic alone.
//!
//! Tensors stand in one flat order, cut into buckets between tensors, and each bucket is cut evenly into as many
//! parts as there are ranks. A part may begin and end anywhere within a tensor. Who moves the elements is
//! `optimiser`.

use std::ops::Range;

/// Elements of which every group's start is a multiple, so that kernels may read several at a time.
pub(super) const ALIGNMENT: usize = 64;
/// Elements of which every part is a multiple.
const PART: usize = 256;

/// Tensors that lie one right after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// The index of each tensor, and how many elements it has.
    pub(super) tensors: Vec<(usize, usize)>,
    /// When its gradients are written for the last time in a backward; rises from group to group.
    pub(super) written: usize,
}

/// Where a tensor lies in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) tensor: usize,
    /// Elements of the bucket before it.
    pub(super) start: usize,
    pub(super) elements: usize,
}

/// Tensors whose gradients are exchanged together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bucket {
    pub(super) pieces: Vec<Piece>,
    /// Elements of each rank's part.
    pub(super) part: usize,
    /// When the last of its gradients is written.
    pub(super) written: usize,
}

/// What of a tensor lies in one rank's part of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owned {
    pub(super) tensor: usize,
    /// Elements of the tensor.
    pub(super) range: Range<usize>,
    /// Where the first of them lies in the part.
    pub(super) at: usize,
}

/// Buckets of about `elements` elements; a larger group has one of its own.
pub(super) fn buckets(groups: &[Group], elements: usize, ranks: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let (mut pieces, mut end, mut written) = (Vec::new(), 0_usize, 0);
    for group in groups {
        let size: usize = group.tensors.iter().map(|(_, elements)| elements).sum();
        let start = end.next_multiple_of(ALIGNMENT);
        if !pieces.is_empty() && start + size > elements {
            buckets.push(Bucket::new(std::mem::take(&mut pieces), end, written, ranks));
            end = 0;
        }
        end = end.next_multiple_of(ALIGNMENT);
        for &(tensor, elements) in &group.tensors {
            pieces.push(Piece {
                tensor,
                start: end,
                elements,
            });
            end += elements;
        }
        written = group.written;
    }
    if !pieces.is_empty() {
        buckets.push(Bucket::new(pieces, end, written, ranks));
    }
    buckets
}

impl Bucket {
    fn new(pieces: Vec<Piece>, end: usize, written: usize, ranks: usize) -> Self {
        Self {
            pieces,
            part: end.div_ceil(ranks.max(1)).next_multiple_of(PART),
            written,
        }
    }

    /// What of which tensor lies in `rank`'s part; the rest of the part is padding.
    pub(super) fn owned(&self, rank: usize) -> Vec<Owned> {
        let (first, end) = (rank * self.part, (rank + 1) * self.part);
        let mut owned = Vec::new();
        for piece in &self.pieces {
            let (from, to) = (piece.start.max(first), (piece.start + piece.elements).min(end));
            if from < to {
                owned.push(Owned {
                    tensor: piece.tensor,
                    range: from - piece.start..to - piece.start,
                    at: from - first,
                });
            }
        }
        owned
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    fn groups(sizes: &[Vec<usize>]) -> Vec<Group> {
        let mut next = 0;
        let group = |(written, sizes): (usize, &Vec<usize>)| {
            let tensors = sizes.iter().map(|&elements| {
                next += 1;
                (next - 1, elements)
            });
            Group {
                tensors: tensors.collect(),
                written,
            }
        };
        sizes.iter().enumerate().map(group).collect()
    }

    proptest! {
        #[test]
        fn every_element_has_one_place_and_one_rank(
            sizes in prop::collection::vec(prop::collection::vec(1_usize..3000, 1..4), 0..20),
            elements in 1_usize..8000,
            ranks in 1_usize..8,
        ) {
            let groups = groups(&sizes);
            let buckets = buckets(&groups, elements, ranks);
            let flat: Vec<usize> = sizes.iter().flatten().copied().collect();
            let mut seen: Vec<Vec<u8>> = flat.iter().map(|&elements| vec![0; elements]).collect();
            for bucket in &buckets {
                prop_assert_eq!(bucket.part % PART, 0);
                let mut places = vec![0_u8; bucket.part * ranks];
                for piece in &bucket.pieces {
                    prop_assert_eq!(piece.elements, flat[piece.tensor]);
                    places[piece.start..piece.start + piece.elements].iter_mut().for_each(|place| *place += 1);
                }
                prop_assert!(places.iter().all(|&place| place <= 1));
                for rank in 0..ranks {
                    for owned in bucket.owned(rank) {
                        let piece = bucket.pieces.iter().find(|piece| piece.tensor == owned.tensor).unwrap();
                        prop_assert_eq!(rank * bucket.part + owned.at, piece.start + owned.range.start);
                        prop_assert!(owned.at + owned.range.len() <= bucket.part);
                        seen[owned.tensor][owned.range].iter_mut().for_each(|times| *times += 1);
                    }
                }
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
        }

        #[test]
        fn groups_lie_together_in_their_order_and_buckets_are_cut_between_them(
            sizes in prop::collection::vec(prop::collection::vec(1_usize..3000, 1..4), 1..20),
            elements in 1_usize..8000,
            ranks in 1_usize..8,
        ) {
            let groups = groups(&sizes);
            let buckets = buckets(&groups, elements, ranks);
            let order: Vec<usize> = buckets.iter().flat_map(|bucket| &bucket.pieces).map(|piece| piece.tensor).collect();
            prop_assert_eq!(order, (0..sizes.iter().map(Vec::len).sum()).collect::<Vec<_>>());
            for group in &groups {
                let first = group.tensors[0].0;
                let bucket = buckets.iter().find(|bucket| bucket.pieces.iter().any(|piece| piece.tensor == first));
                let bucket = bucket.unwrap();
                prop_assert!(bucket.written >= group.written);
                let at = bucket.pieces.iter().position(|piece| piece.tensor == first).unwrap();
                let mut next = bucket.pieces[at].start;
                prop_assert_eq!(next % ALIGNMENT, 0);
                for (piece, (tensor, elements)) in bucket.pieces[at..].iter().zip(&group.tensors) {
                    prop_assert_eq!((piece.tensor, piece.start), (*tensor, next));
                    next += elements;
                }
            }
            for bucket in &buckets {
                let last = bucket.pieces.last().unwrap();
                let own = groups.iter().filter(|group| bucket.pieces.iter().any(|piece| piece.tensor == group.tensors[0].0));
                prop_assert!(last.start + last.elements <= elements || own.count() == 1);
            }
        }
    }
}
