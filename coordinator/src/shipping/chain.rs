//! Which shipped frames count: pure functions of the claims and of what is listed.

use crate::term::Claim;

/// Frames that were shipped together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where they lie.
    pub key: String,
    /// The term that shipped them.
    pub term: u64,
    /// The first frame.
    pub first: u64,
    /// The last frame.
    pub last: u64,
}

/// A snapshot that was shipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Where it lies.
    pub key: String,
    /// The term that shipped it.
    pub term: u64,
    /// The last frame that it reflects.
    pub sequence: u64,
}

/// Frames to take from a piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where they lie.
    pub key: String,
    /// The first frame to take.
    pub first: u64,
    /// The last frame to take.
    pub last: u64,
}

impl Piece {
    /// The key of frames.
    pub fn key(term: u64, first: u64, last: u64) -> String {
        format!("journal/{term}/{first:020}-{last:020}")
    }

    /// Reads a key as [`Piece::key`] makes it.
    pub fn parse(key: &str) -> Option<Self> {
        let (term, frames) = key.strip_prefix("journal/")?.split_once('/')?;
        let (first, last) = frames.split_once('-')?;
        Some(Self {
            key: key.to_owned(),
            term: term.parse().ok()?,
            first: first.parse().ok()?,
            last: last.parse().ok()?,
        })
    }
}

impl Snapshot {
    /// The key of a snapshot.
    pub fn key(term: u64, sequence: u64) -> String {
        format!("snapshots/{term}/{sequence:020}")
    }

    /// Reads a key as [`Snapshot::key`] makes it.
    pub fn parse(key: &str) -> Option<Self> {
        let (term, sequence) = key.strip_prefix("snapshots/")?.split_once('/')?;
        Some(Self {
            key: key.to_owned(),
            term: term.parse().ok()?,
            sequence: sequence.parse().ok()?,
        })
    }
}

/// The first frame of a term that is void, as a later term has begun with it.
fn void_from(claims: &[Claim], term: u64) -> u64 {
    let later = claims.iter().filter(|claim| claim.term > term);
    later.map(|claim| claim.from_sequence).min().unwrap_or(u64::MAX)
}

/// Snapshots of no void frame, the newest first.
pub fn sound<'a>(claims: &[Claim], snapshots: &'a [Snapshot]) -> Vec<&'a Snapshot> {
    let mut sound: Vec<_> = snapshots
        .iter()
        .filter(|snapshot| snapshot.sequence < void_from(claims, snapshot.term))
        .collect();
    sound.sort_by_key(|snapshot| std::cmp::Reverse((snapshot.sequence, snapshot.term)));
    sound
}

/// The frames after this one, without a gap, as far as they were shipped and are not void.
pub fn after(claims: &[Claim], pieces: &[Piece], frame: u64) -> Vec<Step> {
    let mut sound: Vec<(u64, u64, &Piece)> = pieces
        .iter()
        .map(|piece| {
            let last = piece.last.min(void_from(claims, piece.term).saturating_sub(1));
            (piece.first, last, piece)
        })
        .filter(|(first, last, _)| first <= last)
        .collect();
    sound.sort_by_key(|(first, last, piece)| (*first, *last, piece.term));
    let mut steps = Vec::new();
    let mut next = frame.saturating_add(1);
    let mut best: Option<(u64, &Piece)> = None;
    for (first, last, piece) in sound {
        if first > next {
            let Some((reached, chosen)) = best.take() else {
                break;
            };
            push(&mut steps, &mut next, reached, chosen);
            if first > next {
                break;
            }
        }
        if last >= next && best.is_none_or(|(reached, _)| last > reached) {
            best = Some((last, piece));
        }
    }
    if let Some((reached, chosen)) = best {
        push(&mut steps, &mut next, reached, chosen);
    }
    steps
}

fn push(steps: &mut Vec<Step>, next: &mut u64, last: u64, piece: &Piece) {
    steps.push(Step {
        key: piece.key.clone(),
        first: *next,
        last,
    });
    *next = last.saturating_add(1);
}

/// The last frame that a start from the store would reach: with the newest snapshot, or from the first frame.
pub fn reach(claims: &[Claim], pieces: &[Piece], snapshots: &[Snapshot]) -> u64 {
    let base = sound(claims, snapshots)
        .first()
        .map_or(0, |snapshot| snapshot.sequence);
    after(claims, pieces, base).last().map_or(base, |step| step.last)
}
