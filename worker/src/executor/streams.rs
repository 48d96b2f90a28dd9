//! Hidden states on their way through a model's blocks. All that go together pass a block while it is there, so that a
//! walk over blocks that are read costs the reading once, whatever the number of batches and variants.
//!
//! States stay on the device: to move them to the host and back for each block takes longer than to read the weights again
//! for another group.

use std::ops::Range;

use espalier_arch::{Architecture, BlockShape, Candidate, Variant};
use espalier_model::Tensor;
use espalier_model::ops::Layout;

use super::Context;
use super::parent::Blocks;
use crate::Result;

/// What of each block of a model is run: the block or a smaller one, or nothing.
#[derive(Debug, Clone)]
pub(super) struct Form(Vec<Option<BlockShape>>);

/// States that go one way.
#[derive(Debug)]
pub(super) struct Stream<'a> {
    /// What they go through.
    pub form: &'a Form,
    /// Before which block they are; earlier ones do not concern them.
    pub from: usize,
    /// How the rows divide into sequences.
    pub layout: Layout,
    /// `(rows, hidden)`.
    pub hidden: Tensor,
}

/// What is wanted together: one batch through several forms.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    /// The forms.
    pub forms: &'a [Form],
    /// How the batch divides into sequences.
    pub layout: Layout,
    /// Where it begins.
    pub start: Start<'a>,
}

/// Where a batch begins.
#[derive(Debug)]
pub(super) enum Start<'a> {
    /// With its tokens.
    Tokens(&'a [u32]),
    /// Before this block, with these states.
    Before(usize, &'a Tensor),
}

/// Which part of an attempt's progress a walk is, and what is said of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    /// Which, from 0.
    pub index: usize,
    /// Of how many.
    pub of: usize,
    /// One line for people.
    pub note: &'a str,
}

impl<'a> Part<'a> {
    /// The only one.
    pub fn only(note: &'a str) -> Self {
        Self {
            index: 0,
            of: 1,
            note,
        }
    }
}

impl Form {
    /// That of a candidate.
    ///
    /// # Errors
    /// When it does not fit the architecture.
    pub fn of(architecture: &Architecture, candidate: &Candidate) -> Result<Self> {
        // It is refused here as anywhere.
        architecture.with_candidate(candidate)?;
        let mut form = Self::whole(architecture);
        for (block, variant) in candidate.variants.iter().enumerate() {
            form = form.with(block, variant)?;
        }
        Ok(form)
    }

    /// Every block whole.
    pub fn whole(architecture: &Architecture) -> Self {
        let shapes = architecture.blocks.iter();
        Self(shapes.map(|block| Some(block.shape.clone())).collect())
    }

    /// The same with a variant of what is run of one block.
    ///
    /// # Errors
    /// When it is none.
    pub fn with(mut self, block: usize, variant: &Variant) -> Result<Self> {
        if let Some(Some(shape)) = self.0.get(block) {
            let smaller = shape.with_variant(variant);
            let smaller =
                smaller.map_err(|reason| espalier_arch::Error::VariantDoesNotFit { block, reason })?;
            self.0.splice(block..=block, [smaller]);
        }
        Ok(self)
    }

    fn shape(&self, block: usize) -> Option<&BlockShape> {
        self.0.get(block)?.as_ref()
    }
}

impl Stream<'_> {
    fn shape(&self, block: usize) -> Option<&BlockShape> {
        self.form.shape(block).filter(|_| block >= self.from)
    }
}

/// Takes the streams through blocks `range`; those that none goes through are left out. `before` is called before each of
/// the others with the streams as they are.
///
/// # Errors
/// When a file cannot be read any more, the attempt should stop or the device fails, and those of `before`.
pub(super) fn advance<'a>(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    range: Range<usize>,
    streams: &mut [Stream<'a>],
    mut before: impl FnMut(usize, &[Stream<'a>]) -> Result<()>,
) -> Result<()> {
    let concerns = |block: &usize| streams.iter().any(|stream| stream.shape(*block).is_some());
    let wanted: Vec<usize> = range.filter(concerns).collect();
    blocks.walk(context, &wanted, |block, weights| {
        before(block, streams)?;
        for stream in streams.iter_mut() {
            context.check_cancelled()?;
            let Some(shape) = stream.shape(block) else {
                continue;
            };
            let weights = weights.prefix(shape)?;
            stream.hidden = blocks
                .runner()
                .block_with(shape, &weights, &stream.hidden, stream.layout)?;
        }
        Ok(())
    })
}

/// Gives `take` the hidden states of each unit after the final norm, a form each, in the order of the units.
///
/// # Errors
/// As [`advance`], and those of `take`.
pub(super) fn finals(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    units: &[Unit<'_>],
    part: Part<'_>,
    mut take: impl FnMut(usize, Vec<Tensor>) -> Result<()>,
) -> Result<()> {
    let end = blocks.architecture().blocks.len();
    let row = blocks.architecture().hidden * context.operations.activation_bytes();
    let bytes = |unit: &Unit<'_>| unit.forms.len() * unit.layout.rows() * row;
    let groups = groups(units, bytes, blocks.room(context, 0));
    let total = groups.len() * end * part.of;
    for (number, group) in groups.iter().enumerate() {
        let entered = units.get(group.clone()).unwrap_or_default();
        let mut streams = Vec::new();
        for unit in entered {
            streams.extend(unit.streams(blocks)?);
        }
        let first = streams.iter().map(|stream| stream.from).min().unwrap_or(end);
        advance(context, blocks, first..end, &mut streams, |block, _| {
            let done = part.index * groups.len() * end + number * end + block;
            context.progress(done, total, "blocks", || part.note.to_owned())
        })?;
        let mut streams = streams.into_iter();
        for (index, unit) in group.clone().zip(entered) {
            let own = streams.by_ref().take(unit.forms.len());
            let normed = own.map(|stream| blocks.runner().final_norm(&stream.hidden));
            take(index, normed.collect::<espalier_model::Result<_>>()?)?;
        }
    }
    Ok(())
}

impl<'a> Unit<'a> {
    fn streams(&self, blocks: Blocks<'_>) -> Result<Vec<Stream<'a>>> {
        let (from, hidden) = match self.start {
            Start::Tokens(tokens) => (0, blocks.runner().embed(tokens)?),
            Start::Before(block, hidden) => (block, hidden.clone()),
        };
        let stream = |form| Stream {
            form,
            from,
            layout: self.layout,
            hidden: hidden.clone(),
        };
        Ok(self.forms.iter().map(stream).collect())
    }
}

/// Cuts a list into stretches of at most `room` bytes, of one entry where that alone is more.
pub(super) fn groups<T>(list: &[T], bytes: impl Fn(&T) -> usize, room: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut left = 0;
    for (index, entry) in list.iter().enumerate() {
        let needed = bytes(entry);
        match groups.last_mut() {
            Some(group) if needed <= left => group.end = index + 1,
            _ => {
                groups.push(index..index + 1);
                left = room;
            }
        }
        left = left.saturating_sub(needed);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn groups_are_as_large_as_their_room_and_never_empty() {
        let cut = |room| groups(&[3, 3, 9, 1, 2, 3], |bytes| *bytes, room);
        assert_eq!(cut(6), [0..2, 2..3, 3..6]);
        assert_eq!(cut(0), [0..1, 1..2, 2..3, 3..4, 4..5, 5..6]);
        assert_eq!(cut(21), cut(usize::MAX));
        assert_eq!(cut(21).len(), 1);
        assert!(groups(&[0_usize; 0], |bytes| *bytes, 6).is_empty());
    }
}
