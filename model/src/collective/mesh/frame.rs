//! What goes over a connection between two ranks: frames, and how they are read back. No sockets here.
//!
//! A frame is a header of 40 bytes (kind, length, lane, sequence, generation, the payload's CRC32C, the header's)
//! and a payload of at most [`LARGEST`] bytes; numbers are little-endian. Each direction counts its frames from 0:
//! one that is missing, repeated, damaged or of another generation is noticed, and the connection given up.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use crate::collective::Loss;

/// The longest payload.
pub(super) const LARGEST: usize = 256 << 10;
/// Bytes of a header.
pub(super) const HEADER: usize = 40;
/// The longest reason that is passed on.
const LONGEST_REASON: usize = 1024;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// That the sender lives.
    Beat,
    /// Bytes for a lane.
    Data,
    /// So many more frames of data may be sent on a lane.
    Credit,
    /// The sender has done all its work and leaves.
    Close,
    /// The gang is broken, and by whom.
    Broken,
}

impl Kind {
    const ALL: [(Self, u8); 5] = [
        (Self::Beat, 1),
        (Self::Data, 2),
        (Self::Credit, 3),
        (Self::Close, 4),
        (Self::Broken, 5),
    ];

    fn code(self) -> u8 {
        Self::ALL
            .iter()
            .find_map(|&(kind, code)| (kind == self).then_some(code))
            .unwrap_or(0)
    }

    fn of(code: u8) -> Option<Self> {
        Self::ALL
            .iter()
            .find_map(|&(kind, its)| (its == code).then_some(kind))
    }
}

/// A frame as it is queued and as it comes in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) lane: u64,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    /// One without a payload.
    pub(super) fn bare(kind: Kind) -> Self {
        Self {
            kind,
            lane: 0,
            payload: Vec::new(),
        }
    }

    /// So many more frames on `lane`.
    pub(super) fn credit(lane: u64, frames: u32) -> Self {
        Self {
            kind: Kind::Credit,
            lane,
            payload: frames.to_le_bytes().to_vec(),
        }
    }

    /// What [`Frame::credit`] was made of.
    pub(super) fn credited(&self) -> Option<u32> {
        self.payload.as_slice().try_into().ok().map(u32::from_le_bytes)
    }

    /// That `rank` was lost, and how.
    pub(super) fn broken(rank: usize, how: &Loss) -> Self {
        let (code, text) = match how {
            Loss::Disconnected { reason } => (0_u8, reason.clone()),
            Loss::Silent { silence } => (1, silence.as_millis().to_string()),
            Loss::Aborted { reason } => (2, reason.clone()),
            Loss::Damaged { reason } => (3, reason.clone()),
            Loss::Left => (4, String::new()),
        };
        let mut payload = u32::try_from(rank).unwrap_or(u32::MAX).to_le_bytes().to_vec();
        payload.push(code);
        payload.extend(text.chars().take(LONGEST_REASON / 4).collect::<String>().bytes());
        Self {
            kind: Kind::Broken,
            lane: 0,
            payload,
        }
    }

    /// What [`Frame::broken`] was made of.
    pub(super) fn loss(&self) -> Option<(usize, Loss)> {
        let (rank, rest) = self.payload.split_first_chunk::<4>()?;
        let (code, text) = rest.split_first()?;
        let text = String::from_utf8_lossy(text.get(..LONGEST_REASON).unwrap_or(text));
        let reason = text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let how = match code {
            0 => Loss::Disconnected { reason },
            1 => Loss::Silent {
                silence: Duration::from_millis(reason.parse().ok()?),
            },
            2 => Loss::Aborted { reason },
            3 => Loss::Damaged { reason },
            4 => Loss::Left,
            _ => return None,
        };
        Some((usize::try_from(u32::from_le_bytes(*rank)).ok()?, how))
    }

    /// The header that goes before the payload as the `sequence`th frame.
    pub(super) fn header(&self, sequence: u64, generation: u64) -> [u8; HEADER] {
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend([self.kind.code(), 0, 0, 0]);
        bytes.extend(length.to_le_bytes());
        bytes.extend(self.lane.to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        bytes.extend(generation.to_le_bytes());
        bytes.extend(crc32c::crc32c(&self.payload).to_le_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        let mut header = [0; HEADER];
        header.copy_from_slice(&bytes);
        header
    }
}

/// Why no frame could be read.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// The connection ended or broke.
    Broken(String),
    /// The bytes are no frame, or not the one that was due.
    Damaged(String),
}

fn damaged<T>(reason: impl Into<String>) -> Result<T, Unreadable> {
    Err(Unreadable::Damaged(reason.into()))
}

/// Reads the `sequence`th frame of `generation`. None when the connection ended before it began.
pub(super) fn read(
    source: &mut impl Read,
    sequence: u64,
    generation: u64,
) -> Result<Option<Frame>, Unreadable> {
    let mut header = [0; HEADER];
    if !fill(source, &mut header)? {
        return Ok(None);
    }
    let word = |at: usize| {
        let bytes = header.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let [low, high] = [word(0), word(32)];
    let (length, payload_crc, header_crc) = (low >> 32, high & 0xffff_ffff, high >> 32);
    let (protected, _) = header.split_at(HEADER - 4);
    if u64::from(crc32c::crc32c(protected)) != header_crc {
        return damaged("the header's checksum is wrong");
    }
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let kind = Kind::of(u8::try_from(low & 0xff).unwrap_or(0));
    let Some(kind) = kind.filter(|_| low >> 8 & 0xff_ffff == 0 && length <= LARGEST) else {
        return damaged(format!("a frame of kind {} and {length} bytes", low & 0xff));
    };
    if word(24) != generation {
        return damaged(format!(
            "a frame of generation {} in generation {generation}",
            word(24)
        ));
    }
    if word(16) != sequence {
        return damaged(format!("frame {} where {sequence} was due", word(16)));
    }
    let mut payload = vec![0; length];
    if length > 0 && !fill(source, &mut payload)? {
        return Err(Unreadable::Broken("it ended within a frame".to_owned()));
    }
    if u64::from(crc32c::crc32c(&payload)) != payload_crc {
        return damaged("a payload's checksum is wrong");
    }
    Ok(Some(Frame {
        kind,
        lane: word(8),
        payload,
    }))
}

/// Whether all of `bytes` came; not when the source ended before the first.
fn fill(source: &mut impl Read, bytes: &mut [u8]) -> Result<bool, Unreadable> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match source.read(rest) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(Unreadable::Broken("it ended within a frame".to_owned())),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Unreadable::Broken(error.to_string())),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    fn bytes_of(frame: &Frame, sequence: u64, generation: u64) -> Vec<u8> {
        let mut bytes = frame.header(sequence, generation).to_vec();
        bytes.extend(&frame.payload);
        bytes
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let kind = prop::sample::select(Kind::ALL.map(|(kind, _)| kind).to_vec());
        (kind, any::<u64>(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(kind, lane, payload)| Frame { kind, lane, payload })
    }

    proptest! {
        #[test]
        fn frames_come_back_as_they_were_sent(
            frames in prop::collection::vec(any_frame(), 0..5), generation in any::<u64>(),
        ) {
            let bytes: Vec<u8> = frames
                .iter()
                .enumerate()
                .flat_map(|(index, frame)| bytes_of(frame, index as u64, generation))
                .collect();
            let mut source = bytes.as_slice();
            for (index, frame) in frames.iter().enumerate() {
                let back = read(&mut source, index as u64, generation).unwrap();
                prop_assert_eq!(back.as_ref(), Some(frame));
            }
            prop_assert_eq!(read(&mut source, frames.len() as u64, generation).unwrap(), None);
        }

        #[test]
        fn a_frame_that_is_cut_or_has_a_flipped_bit_is_refused(
            frame in any_frame(), at in any::<prop::sample::Index>(), bit in 0..8_u32,
        ) {
            let whole = bytes_of(&frame, 3, 7);
            let at = at.index(whole.len());
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            let read_flipped = read(&mut flipped.as_slice(), 3, 7);
            prop_assert!(matches!(read_flipped, Err(Unreadable::Damaged(_))));
            let cut = read(&mut &whole[..at], 3, 7);
            prop_assert!(matches!((at, cut), (0, Ok(None)) | (_, Err(Unreadable::Broken(_)))));
        }

        #[test]
        fn nothing_that_a_peer_sends_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(!matches!(read(&mut bytes.as_slice(), 0, 0), Ok(Some(_))));
            let frame = Frame { kind: Kind::Broken, lane: 0, payload: bytes };
            prop_assert!(frame.loss().is_none_or(|(rank, _)| u32::try_from(rank).is_ok()));
        }
    }

    #[test]
    fn a_frame_of_another_generation_or_out_of_turn_says_so() {
        let bytes = bytes_of(&Frame::bare(Kind::Beat), 3, 7);
        for (sequence, generation, word) in [(3, 8, "generation 7"), (4, 7, "frame 3")] {
            let Err(Unreadable::Damaged(reason)) = read(&mut bytes.as_slice(), sequence, generation) else {
                panic!("accepted");
            };
            assert!(reason.contains(word), "{reason}");
        }
    }

    #[test]
    fn losses_are_passed_on_as_they_were() {
        let losses = [
            Loss::Disconnected {
                reason: "reset".to_owned(),
            },
            Loss::Silent {
                silence: Duration::from_millis(5040),
            },
            Loss::Aborted {
                reason: "out of memory".to_owned(),
            },
            Loss::Damaged {
                reason: "é".to_owned(),
            },
            Loss::Left,
        ];
        for how in losses {
            assert_eq!(Frame::broken(5, &how).loss(), Some((5, how)));
        }
        let long = Loss::Aborted {
            reason: "x".repeat(1 << 20),
        };
        assert!(Frame::broken(5, &long).payload.len() < LARGEST);
    }
}
