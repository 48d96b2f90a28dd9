//! What each call sends, to whom, and what it makes of what comes.
//!
//! Every call begins with what is called, by which ranks see that they do the same. Pieces go out a few ahead of those
//! that come in, never so many that a lane fills up: no rank waits for room while another waits for it.

use std::ops::Range;
use std::time::Instant;

use crate::collective::members::Members;
use crate::collective::mesh::PIECE;
use crate::collective::{Error, host};
use crate::{Result, Tensor};

/// Elements of a piece.
const ELEMENTS: usize = if cfg!(test) { 50 } else { PIECE / 4 };
/// Pieces that go out to each rank before one must have come from each.
const AHEAD: usize = 4;

/// What is called.
#[derive(Debug)]
pub(super) enum Call {
    AllReduce(Tensor),
    ReduceScatter(Tensor),
    AllGather(Tensor),
    Broadcast {
        tensor: Tensor,
        root: usize,
    },
    Send {
        tensor: Tensor,
        to: usize,
    },
    Receive {
        rows: usize,
        columns: usize,
        from: usize,
    },
}

/// What every rank must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    code: u64,
    rows: u64,
    columns: u64,
    root: u64,
}

const NAMES: [&str; 5] = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"];

impl Head {
    fn bytes(self) -> Vec<u8> {
        [self.code, self.rows, self.columns, self.root]
            .map(u64::to_le_bytes)
            .concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| word.try_into().map(u64::from_le_bytes).unwrap_or_default());
        let (code, rows, columns, root) = (words.next()?, words.next()?, words.next()?, words.next()?);
        (bytes.len() == 32).then_some(Self {
            code,
            rows,
            columns,
            root,
        })
    }

    fn name(self) -> &'static str {
        let index = usize::try_from(self.code).unwrap_or(usize::MAX);
        NAMES.get(index).copied().unwrap_or("something else")
    }

    fn describe(self) -> String {
        let Self {
            rows, columns, root, ..
        } = self;
        match self.name() {
            "broadcast" => format!("broadcast of {rows} x {columns} from {root}"),
            name => format!("{name} of {rows} x {columns}"),
        }
    }
}

impl Call {
    fn head(&self) -> Head {
        let (code, rows, columns, root) = match self {
            Self::AllReduce(tensor) => (0, tensor.rows(), tensor.columns(), 0),
            Self::ReduceScatter(tensor) => (1, tensor.rows(), tensor.columns(), 0),
            Self::AllGather(tensor) => (2, tensor.rows(), tensor.columns(), 0),
            Self::Broadcast { tensor, root } => (3, tensor.rows(), tensor.columns(), *root),
            Self::Send { tensor, .. } => (4, tensor.rows(), tensor.columns(), 0),
            Self::Receive { rows, columns, .. } => (4, *rows, *columns, 0),
        };
        let [rows, columns, root] = [rows, columns, root].map(|number| number as u64);
        Head {
            code,
            rows,
            columns,
            root,
        }
    }

    /// Makes the call. Ends at the mesh's deadline for calls at the latest.
    pub(super) fn run(self, members: &Members) -> Result<Tensor> {
        let head = self.head();
        let deadline = Instant::now() + members.mesh.options().call;
        let line = |purpose: &str| Line {
            members,
            lane: members.lane(purpose),
            name: head.name(),
            deadline,
        };
        match self {
            Self::Send { tensor, to } => {
                let line = line(&format!("from {} to {to}", members.rank));
                line.send(to, head.bytes())?;
                for piece in host::elements(head.name(), &tensor)?.chunks(ELEMENTS) {
                    line.send(to, bytes_of(piece))?;
                }
                Ok(tensor)
            }
            Self::Receive { rows, columns, from } => {
                let line = line(&format!("from {from} to {}", members.rank));
                line.expect(from, head)?;
                let mut tensor = Tensor::unspecified(rows, columns)?;
                for piece in tensor.host_mut()?.chunks_mut(ELEMENTS) {
                    line.receive(from, piece)?;
                }
                Ok(tensor)
            }
            collective => {
                let line = line("all");
                for other in members.others() {
                    line.send(other, head.bytes())?;
                }
                for other in members.others() {
                    line.expect(other, head)?;
                }
                collective.together(&line)
            }
        }
    }

    /// What is left of a call once all ranks have agreed on it.
    fn together(self, line: &Line<'_>) -> Result<Tensor> {
        let size = line.members.size();
        match self {
            Self::AllReduce(mut tensor) => {
                let shares = shares(tensor.len(), size);
                let sum = line.reduce(host::elements(line.name, &tensor)?, &shares)?;
                if tensor.host_mut().is_err() {
                    tensor = Tensor::unspecified(tensor.rows(), tensor.columns())?;
                }
                line.gather(&sum, tensor.host_mut()?, &shares)?;
                Ok(tensor)
            }
            Self::ReduceScatter(whole) => {
                let shares = shares(whole.len(), size);
                let sum = line.reduce(host::elements(line.name, &whole)?, &shares)?;
                Tensor::from_vec(sum, whole.rows() / size, whole.columns())
            }
            Self::AllGather(part) => {
                let mut whole = Tensor::unspecified(part.rows() * size, part.columns())?;
                let shares = shares(part.len() * size, size);
                let own = host::elements(line.name, &part)?;
                line.gather(own, whole.host_mut()?, &shares)?;
                Ok(whole)
            }
            Self::Broadcast { tensor, root } if root == line.members.rank => {
                for piece in host::elements(line.name, &tensor)?.chunks(ELEMENTS) {
                    let bytes = bytes_of(piece);
                    for other in line.members.others() {
                        line.send(other, bytes.clone())?;
                    }
                }
                Ok(tensor)
            }
            Self::Broadcast { mut tensor, root } => {
                if tensor.host_mut().is_err() {
                    tensor = Tensor::unspecified(tensor.rows(), tensor.columns())?;
                }
                for piece in tensor.host_mut()?.chunks_mut(ELEMENTS) {
                    line.receive(root, piece)?;
                }
                Ok(tensor)
            }
            Self::Send { tensor, .. } => Ok(tensor),
            Self::Receive { rows, columns, .. } => Tensor::unspecified(rows, columns),
        }
    }
}

/// The elements of which each rank makes the sum: as many, or one more among the first.
fn shares(elements: usize, size: usize) -> Vec<Range<usize>> {
    let start = |rank: usize| elements / size * rank + rank.min(elements % size);
    (0..size).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// The elements of a share that are its `index`th piece; perhaps none.
fn piece_of(share: &Range<usize>, index: usize) -> Range<usize> {
    let at = |index: usize| {
        share
            .start
            .saturating_add(index.saturating_mul(ELEMENTS))
            .min(share.end)
    };
    at(index)..at(index + 1)
}

fn bytes_of(elements: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(elements)];
    for (four, element) in bytes.chunks_exact_mut(4).zip(elements) {
        four.copy_from_slice(&element.to_le_bytes());
    }
    bytes
}

/// A lane during one call.
struct Line<'a> {
    members: &'a Members,
    lane: u64,
    name: &'static str,
    deadline: Instant,
}

impl Line<'_> {
    fn send(&self, to: usize, bytes: Vec<u8>) -> Result<()> {
        let mesh = &self.members.mesh;
        Ok(mesh.send(self.members.in_gang(to), self.lane, bytes, self.deadline)?)
    }

    fn next(&self, from: usize) -> Result<Vec<u8>> {
        let mesh = &self.members.mesh;
        Ok(mesh.receive(self.members.in_gang(from), self.lane, self.name, self.deadline)?)
    }

    /// Waits until rank `from` calls, and sees that it calls the same.
    fn expect(&self, from: usize, own: Head) -> Result<()> {
        let bytes = self.next(from)?;
        let Some(other) = Head::read(&bytes) else {
            return Err(self.out_of_step(from, "a piece of another call".to_owned()));
        };
        if other == own {
            return Ok(());
        }
        Err(Error::Mismatch {
            rank: self.members.in_gang(self.members.rank),
            expected: other.describe(),
            found: own.describe(),
        }
        .into())
    }

    fn out_of_step(&self, from: usize, reason: String) -> crate::Error {
        let reason = format!("{reason} came where {} goes on", self.name);
        self.members
            .mesh
            .nonsense(self.members.in_gang(from), reason)
            .into()
    }

    fn receive(&self, from: usize, piece: &mut [f32]) -> Result<()> {
        let bytes = self.next(from)?;
        if bytes.len() != size_of_val(piece) {
            return Err(self.out_of_step(from, format!("{} bytes", bytes.len())));
        }
        for (element, four) in piece.iter_mut().zip(bytes.chunks_exact(4)) {
            *element = four.try_into().map(f32::from_le_bytes).unwrap_or_default();
        }
        Ok(())
    }

    /// This rank's share of the sum of every rank's `whole`, in the order of the ranks.
    fn reduce(&self, whole: &[f32], shares: &[Range<usize>]) -> Result<Vec<f32>> {
        let own = shares.get(self.members.rank).cloned().unwrap_or_default();
        let mut sum = Vec::with_capacity(own.len());
        let mut part = vec![0.0; ELEMENTS.min(own.len())];
        self.in_rounds(
            shares,
            |other, piece| self.send(other, bytes_of(whole.get(piece).unwrap_or_default())),
            |index| {
                let piece = piece_of(&own, index);
                let (begin, mine) = (sum.len(), whole.get(piece).unwrap_or_default());
                let part = part.get_mut(..mine.len()).unwrap_or_default();
                for rank in 0..self.members.size() {
                    let next: &[f32] = if rank == self.members.rank || mine.is_empty() {
                        mine
                    } else {
                        self.receive(rank, part)?;
                        part
                    };
                    match rank {
                        0 => sum.extend_from_slice(next),
                        _ => host::add(sum.get_mut(begin..).unwrap_or_default(), next),
                    }
                }
                Ok(())
            },
        )?;
        Ok(sum)
    }

    /// Fills `whole` with every rank's share; `own` is this one's.
    fn gather(&self, own: &[f32], whole: &mut [f32], shares: &[Range<usize>]) -> Result<()> {
        let place = shares.get(self.members.rank).cloned().unwrap_or_default();
        let start = place.start;
        if let Some(target) = whole.get_mut(place.clone()) {
            target.copy_from_slice(own);
        }
        // Each other rank gets this one's share, whatever its own.
        let same = vec![place; shares.len()];
        let most = shares.iter().map(Range::len).max().unwrap_or(0);
        self.in_rounds_of(
            most.div_ceil(ELEMENTS),
            &same,
            |other, piece| {
                let piece = piece.start - start..piece.end - start;
                self.send(other, bytes_of(own.get(piece).unwrap_or_default()))
            },
            |index| {
                for other in self.members.others() {
                    let share = shares.get(other).cloned().unwrap_or_default();
                    let piece = whole.get_mut(piece_of(&share, index)).unwrap_or_default();
                    if !piece.is_empty() {
                        self.receive(other, piece)?;
                    }
                }
                Ok(())
            },
        )
    }

    fn in_rounds(
        &self,
        shares: &[Range<usize>],
        send: impl FnMut(usize, Range<usize>) -> Result<()>,
        take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let most = shares.iter().map(Range::len).max().unwrap_or(0);
        self.in_rounds_of(most.div_ceil(ELEMENTS), shares, send, take)
    }

    /// Sends each other rank a piece of what is in its place of `shares`, and takes in one of each, `rounds` times.
    fn in_rounds_of(
        &self,
        rounds: usize,
        shares: &[Range<usize>],
        mut send: impl FnMut(usize, Range<usize>) -> Result<()>,
        mut take: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        for round in 0..rounds + AHEAD {
            for other in self.members.others().filter(|_| round < rounds) {
                let share = shares.get(other).cloned().unwrap_or_default();
                let piece = piece_of(&share, round);
                if !piece.is_empty() {
                    send(other, piece)?;
                }
            }
            if let Some(index) = round.checked_sub(AHEAD) {
                take(index)?;
            }
        }
        Ok(())
    }
}
