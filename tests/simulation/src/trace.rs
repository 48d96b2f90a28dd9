//! What happened, folded into one number: two runs of a seed are the same when it is the same. Lines for
//! people are written only when they are asked for.

use crate::clock::Time;

/// The record of one run.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    steps: u64,
    lines: Option<fn(&str)>,
    from: u64,
}

impl Trace {
    /// A silent record, or one that gives every line after the first `from` steps to `lines`.
    pub fn new(lines: Option<fn(&str)>, from: u64) -> Self {
        Self {
            hash: 0xcbf2_9ce4_8422_2325,
            steps: 0,
            lines,
            from,
        }
    }

    /// Something happened: a kind of thing, and two numbers that tell it from others of its kind.
    pub fn step(
        &mut self,
        now: Time,
        kind: &'static str,
        one: u64,
        other: u64,
        line: impl FnOnce() -> String,
    ) {
        self.steps += 1;
        for word in [now.0, word(kind), one, other] {
            self.hash = (self.hash ^ word)
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(23);
        }
        if let Some(print) = self.lines
            && self.steps > self.from
        {
            print(&format!("{:>8} {now} {kind:<12} {}", self.steps, line()));
        }
    }

    /// How many things happened.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Stands for all of them.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

fn word(kind: &str) -> u64 {
    kind.bytes().fold(0, |word, byte| (word << 5) ^ u64::from(byte))
}
