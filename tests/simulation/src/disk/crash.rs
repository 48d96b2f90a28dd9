//! What a crash leaves of what was not synced.

use super::{Bytes, Figures};
use crate::dice::Dice;

/// What a disk keeps together, whatever a crash does to it: bytes of one sector.
const SECTOR: usize = 512;

/// What is left of an unsynced change after a crash.
enum Fate {
    Kept,
    Dropped,
    Torn,
}

/// Takes every unsynced change back and lets each survive or not; `tearing`, some survive in part.
pub(super) fn survive(file: &mut Bytes, dice: &mut Dice, figures: &mut Figures, tearing: bool) {
    let changes = std::mem::take(&mut file.unsynced);
    // What each change wrote, before anything is taken back.
    let mut after = Vec::with_capacity(changes.len());
    for change in changes.iter().rev() {
        let new = file.live.split_off(change.at.min(file.live.len()));
        file.live.extend_from_slice(&change.old);
        after.push(new);
    }
    // Mostly all of one kind, as when nothing had been written back or everything had.
    let mood = dice.below(4);
    for (change, new) in changes.iter().zip(after.into_iter().rev()) {
        let fate = match (mood, dice.below(3)) {
            (0, _) | (2 | 3, 0) => Fate::Kept,
            (1, _) | (2 | 3, 1) => Fate::Dropped,
            _ if tearing && change.old.is_empty() => Fate::Torn,
            _ => Fate::Dropped,
        };
        match fate {
            Fate::Kept => {
                file.live.resize(change.at, 0);
                file.live.extend_from_slice(&new);
            }
            Fate::Dropped => {
                figures.dropped += 1;
                // A later change cannot survive one that it was laid upon.
                break;
            }
            Fate::Torn => {
                figures.torn += 1;
                file.live.resize(change.at, 0);
                file.live.extend_from_slice(&tear(new, change.at, dice));
                break;
            }
        }
    }
}

/// A write at a place of a file of which a part arrived: its beginning, or some of the file's sectors with
/// nothing between them.
fn tear(mut new: Vec<u8>, at: usize, dice: &mut Dice) -> Vec<u8> {
    if dice.chance(0.5) {
        new.truncate(dice.below(new.len() + 1));
        return new;
    }
    let shared = (SECTOR - at % SECTOR).min(new.len());
    let (first, others) = new.split_at_mut(shared);
    for sector in std::iter::once(first).chain(others.chunks_mut(SECTOR)) {
        if dice.chance(0.5) {
            sector.fill(0);
        }
    }
    new
}
