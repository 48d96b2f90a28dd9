//! Hidden states on their way through a model's blocks. All that go together pass a block while it is there, so that a
//! walk over blocks that are read costs the reading once, whatever the number of batches and variants.
//!
//! A form that is the model itself up to some block branches off the model's own states before that block.
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
pub(super) struct Form {
    /// Up to this block it is the model itself.
    from: usize,
    shapes: Vec<Option<BlockShape>>,
}

/// What is wanted together: one batch through several forms.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    /// The forms, in the order in which they branch off; not before the start.
    pub forms: &'a [Form],
    /// How the batch divides into sequences.
    pub layout: Layout,
    /// Where it begins.
    pub start: Start<'a>,
    /// Before which block the model's own states are wanted, where they are; not before the last form has branched off.
    pub own: Option<usize>,
}

/// Where a batch begins.
#[derive(Debug)]
pub(super) enum Start<'a> {
    /// With its tokens.
    Tokens(&'a [u32]),
    /// Before this block, with the model's own states.
    Before(usize, Tensor),
}

/// What has come of a unit: hidden states before the final norm, `(rows, hidden)`.
#[derive(Debug)]
pub(super) struct Arrived {
    /// The model's own before the block that was asked for.
    pub own: Option<Tensor>,
    /// Those of its forms, in their order.
    pub forms: Vec<Tensor>,
}

/// States that go one way.
#[derive(Debug)]
struct Stream<'a> {
    /// What they go through.
    form: &'a Form,
    /// Which blocks of it.
    blocks: Range<usize>,
    /// How the rows divide into sequences.
    layout: Layout,
    /// `(rows, hidden)`.
    hidden: Tensor,
}

/// A unit on its way.
#[derive(Debug)]
struct Travelling<'a> {
    /// The model's own states, until nobody needs them any more.
    own: Option<Stream<'a>>,
    /// Whether they are wanted in the end.
    is_own_wanted: bool,
    /// Forms that have not branched off yet.
    ahead: &'a [Form],
    /// Those that have.
    branched: Vec<Stream<'a>>,
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

    /// One before all others, of which nobody knows how much of the attempt it is.
    pub fn before_others(note: &'a str) -> Self {
        Self {
            index: 0,
            of: 0,
            note,
        }
    }

    /// Says that one of the part's `walks` is before a block of so many, and gives the attempt the chance to stop.
    fn tell(
        self,
        context: &Context<'_>,
        (walk, walks): (usize, usize),
        (block, depth): (usize, usize),
    ) -> Result<()> {
        if self.of == 0 {
            let note = || format!("{}: block {block}, group {walk} of {walks}", self.note);
            return context.progress(0, 1, "blocks", note);
        }
        let done = (self.index * walks + walk) * depth + block;
        context.progress(done, self.of * walks * depth, "blocks", || self.note.to_owned())
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
        Self {
            from: 0,
            shapes: shapes.map(|block| Some(block.shape.clone())).collect(),
        }
    }

    /// The model itself but for a variant of one block.
    ///
    /// # Errors
    /// When it is none.
    pub fn but_for(architecture: &Architecture, block: usize, variant: &Variant) -> Result<Self> {
        let form = Self::whole(architecture).with(block, variant)?;
        Ok(Self { from: block, ..form })
    }

    /// The same with a variant of what is run of one block.
    ///
    /// # Errors
    /// When it is none.
    fn with(mut self, block: usize, variant: &Variant) -> Result<Self> {
        if let Some(Some(shape)) = self.shapes.get(block) {
            let smaller = shape.with_variant(variant);
            let smaller =
                smaller.map_err(|reason| espalier_arch::Error::VariantDoesNotFit { block, reason })?;
            self.shapes.splice(block..=block, [smaller]);
        }
        Ok(self)
    }

    /// Before which block it branches off the model itself.
    pub fn branches_before(&self) -> usize {
        self.from
    }

    fn shape(&self, block: usize) -> Option<&BlockShape> {
        self.shapes.get(block)?.as_ref()
    }
}

impl Stream<'_> {
    fn shape(&self, block: usize) -> Option<&BlockShape> {
        self.form.shape(block).filter(|_| self.blocks.contains(&block))
    }
}

impl Unit<'_> {
    /// How many states of the batch there are at once, at the most.
    fn streams(&self) -> usize {
        // The last form to branch off takes the model's own where nobody else wants them.
        self.forms.len() + usize::from(self.own.is_some())
    }
}

impl<'a> Travelling<'a> {
    /// A unit before its first block; `whole` is the model's own form.
    fn enter(unit: Unit<'a>, whole: &'a Form, blocks: Blocks<'_>) -> Result<Self> {
        let (from, hidden) = match unit.start {
            Start::Tokens(tokens) => (0, blocks.runner().embed(tokens)?),
            Start::Before(block, hidden) => (block, hidden),
        };
        let branching = unit.forms.last().map_or(from, Form::branches_before);
        let own = Stream {
            form: whole,
            blocks: from..unit.own.unwrap_or(branching),
            layout: unit.layout,
            hidden,
        };
        Ok(Self {
            own: Some(own),
            is_own_wanted: unit.own.is_some(),
            ahead: unit.forms,
            branched: Vec::with_capacity(unit.forms.len()),
        })
    }

    /// Lets the forms branch off that do so before this block, or did before one that nobody went through.
    fn branch_off(&mut self, block: usize) {
        let Some(own) = &self.own else {
            return;
        };
        while let Some((form, ahead)) = self.ahead.split_first()
            && form.from <= block
        {
            self.branched.push(Stream {
                form,
                blocks: form.from..form.shapes.len(),
                layout: own.layout,
                hidden: own.hidden.clone(),
            });
            self.ahead = ahead;
        }
        if self.ahead.is_empty() && !self.is_own_wanted {
            self.own = None;
        }
    }

    /// Whether any of its states will go through the block.
    fn concerns(&self, block: usize) -> bool {
        let mut streams = self.own.iter().chain(&self.branched);
        let mut ahead = self.ahead.iter();
        streams.any(|stream| stream.shape(block).is_some())
            || ahead.any(|form| form.from <= block && form.shape(block).is_some())
    }

    fn arrived(self) -> Arrived {
        Arrived {
            own: self.own.map(|own| own.hidden),
            forms: self.branched.into_iter().map(|stream| stream.hidden).collect(),
        }
    }
}

/// Takes the units through the model, as many together as have room beside `kept` bytes that will be held besides, and
/// gives `take` what has come of each, in their order. `before` is called before each block with the model's own states of
/// the units that are there, where those are wanted.
///
/// # Errors
/// When a file cannot be read any more, the attempt should stop or the device fails, and those of `before` and `take`.
pub(super) fn through(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    units: Vec<Unit<'_>>,
    kept: usize,
    part: Part<'_>,
    mut before: impl FnMut(usize, &[&Tensor]) -> Result<()>,
    mut take: impl FnMut(usize, Arrived) -> Result<()>,
) -> Result<()> {
    let whole = Form::whole(blocks.architecture());
    let depth = whole.shapes.len();
    let row = blocks.architecture().hidden * context.operations.activation_bytes();
    let bytes = |unit: &Unit<'_>| unit.streams() * unit.layout.rows() * row;
    let groups = groups(&units, bytes, blocks.room(context, kept));
    let mut units = units.into_iter();
    for (number, group) in groups.iter().enumerate() {
        let entered = units.by_ref().take(group.len());
        let mut group_units = entered
            .map(|unit| Travelling::enter(unit, &whole, blocks))
            .collect::<Result<Vec<_>>>()?;
        advance(context, blocks, &mut group_units, |block, own| {
            part.tell(context, (number, groups.len()), (block, depth))?;
            before(block, own)
        })?;
        for (index, unit) in group.clone().zip(group_units) {
            take(index, unit.arrived())?;
        }
    }
    Ok(())
}

/// Takes units through every block that concerns any of them.
fn advance(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    units: &mut [Travelling<'_>],
    mut before: impl FnMut(usize, &[&Tensor]) -> Result<()>,
) -> Result<()> {
    let depth = blocks.architecture().blocks.len();
    let concerns = |block: &usize| units.iter().any(|unit| unit.concerns(*block));
    let wanted: Vec<usize> = (0..depth).filter(concerns).collect();
    blocks.walk(context, &wanted, |block, weights| {
        for unit in units.iter_mut() {
            unit.branch_off(block);
        }
        let own: Vec<&Tensor> = units
            .iter()
            .filter_map(|unit| unit.own.as_ref())
            .map(|own| &own.hidden)
            .collect();
        before(block, &own)?;
        let streams = units
            .iter_mut()
            .flat_map(|unit| unit.own.iter_mut().chain(&mut unit.branched));
        for stream in streams {
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
    })?;
    for unit in units {
        unit.branch_off(depth);
    }
    Ok(())
}

/// Gives `take` the hidden states of each unit's forms after the final norm, in the order of the units.
///
/// # Errors
/// As [`through`], and those of `take`.
pub(super) fn finals(
    context: &Context<'_>,
    blocks: Blocks<'_>,
    units: Vec<Unit<'_>>,
    part: Part<'_>,
    mut take: impl FnMut(usize, Vec<Tensor>) -> Result<()>,
) -> Result<()> {
    let normed = |index, arrived: Arrived| {
        let forms = arrived.forms.into_iter();
        let normed = forms.map(|hidden| blocks.runner().final_norm(&hidden));
        take(index, normed.collect::<espalier_model::Result<_>>()?)
    };
    through(context, blocks, units, 0, part, |_, _| Ok(()), normed)
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
