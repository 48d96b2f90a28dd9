//! One frame: encoding, and telling what is wrong with bytes that are not one.

/// The newest schema this build writes and reads.
pub const SCHEMA_VERSION: u16 = 2;

/// Bytes before the payload.
pub const HEADER_BYTES: usize = 24;

/// Largest payload.
pub const PAYLOAD_LIMIT_BYTES: usize = 64 << 20;

/// Set on the first frame of a commit: what lies before it was durable when it was written.
const BEGINS_COMMIT: u16 = 1;

/// Disks write this much or nothing.
const SECTOR_BYTES: usize = 512;

/// A whole frame.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its number, counted from 1 over all segments.
    pub sequence: u64,
    /// How the payload is to be read.
    pub version: u16,
    /// Whether what lies before it was durable when it was written.
    pub begins_commit: bool,
    /// What it carries.
    pub payload: &'a [u8],
    /// Bytes it takes, header included.
    pub bytes: usize,
}

/// How the bytes of a segment end, or what is wrong at a place.
#[derive(Debug, PartialEq, Eq)]
pub enum Tail {
    /// At a frame's end.
    Clean,
    /// A commit that did not finish: too short for its header or for the length a sound header gives, or with
    /// sectors that were never written, and no later commit after it. Never acknowledged; may be cut.
    Torn,
    /// Anything else. It may have been acknowledged; must not be cut without asking.
    Damaged(&'static str),
}

enum Fault {
    End,
    Short,
    Wrong(&'static str),
}

/// Leaves room for a frame's header at the end of a buffer; the payload is appended after it. Gives the place.
pub fn begin(buffer: &mut Vec<u8>) -> usize {
    let at = buffer.len();
    buffer.resize(at.saturating_add(HEADER_BYTES), 0);
    at
}

/// Fills in the header of the frame that began at `at` and ends with the buffer.
///
/// # Errors
/// The payload's bytes, when they are more than a frame may have.
pub fn finish(buffer: &mut [u8], at: usize, sequence: u64, begins_commit: bool) -> Result<(), usize> {
    let Some((header, payload)) = buffer
        .get_mut(at..)
        .and_then(|frame| frame.split_at_mut_checked(HEADER_BYTES))
    else {
        return Err(0);
    };
    let length = u32::try_from(payload.len()).map_err(|_| payload.len())?;
    if payload.len() > PAYLOAD_LIMIT_BYTES {
        return Err(payload.len());
    }
    let flags = if begins_commit { BEGINS_COMMIT } else { 0 };
    let mut fields = [0; HEADER_BYTES];
    write(&mut fields, 0, &length.to_le_bytes());
    write(&mut fields, 4, &SCHEMA_VERSION.to_le_bytes());
    write(&mut fields, 6, &flags.to_le_bytes());
    write(&mut fields, 8, &sequence.to_le_bytes());
    write(&mut fields, 16, &crc32c::crc32c(payload).to_le_bytes());
    let checksum = crc32c::crc32c(fields.get(..20).unwrap_or_default());
    write(&mut fields, 20, &checksum.to_le_bytes());
    header.copy_from_slice(&fields);
    Ok(())
}

/// Reads the frame at this place of a segment, or says how the segment ends.
pub fn decode(segment: &[u8], at: usize) -> Result<Frame<'_>, Tail> {
    let bytes = segment.get(at..).unwrap_or_default();
    parse(bytes).map_err(|fault| match fault {
        Fault::End => Tail::Clean,
        Fault::Short => Tail::Torn,
        Fault::Wrong(_) if has_unwritten_sector(segment, at) && !has_later_commit(bytes) => Tail::Torn,
        Fault::Wrong(what) => Tail::Damaged(what),
    })
}

fn parse(bytes: &[u8]) -> Result<Frame<'_>, Fault> {
    if bytes.is_empty() {
        return Err(Fault::End);
    }
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(Fault::Short)?;
    let fields = header.get(..20).ok_or(Fault::Short)?;
    let length = read_u32(header, 0).ok_or(Fault::Short)?;
    let version = read_u16(header, 4).ok_or(Fault::Short)?;
    let flags = read_u16(header, 6).ok_or(Fault::Short)?;
    let sequence = read_u64(header, 8).ok_or(Fault::Short)?;
    let checksum = read_u32(header, 16).ok_or(Fault::Short)?;
    if read_u32(header, 20) != Some(crc32c::crc32c(fields)) {
        return Err(Fault::Wrong("the header's checksum is wrong"));
    }
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let payload = rest.get(..length).ok_or(Fault::Short)?;
    if crc32c::crc32c(payload) != checksum {
        return Err(Fault::Wrong("the payload's checksum is wrong"));
    }
    Ok(Frame {
        sequence,
        version,
        // The first schema did not say: each of its frames may have been acknowledged alone.
        begins_commit: version == 1 || flags & BEGINS_COMMIT != 0,
        payload,
        bytes: HEADER_BYTES.saturating_add(length),
    })
}

/// Whether the file system gave the file room that the data never reached: a sector of zeros, or zeros at its
/// end. No frame holds either, as payloads are JSON.
fn has_unwritten_sector(segment: &[u8], at: usize) -> bool {
    let is_blank = |sector: &[u8]| sector.iter().all(|byte| *byte == 0);
    let first = SECTOR_BYTES.saturating_sub(at % SECTOR_BYTES);
    let bytes = segment.get(at..).unwrap_or_default();
    let (shared, own) = bytes.split_at_checked(first).unwrap_or((bytes, &[]));
    bytes.last() == Some(&0)
        || (shared.len() >= 4 && is_blank(shared))
        || own.chunks_exact(SECTOR_BYTES).any(is_blank)
}

/// Whether a sound frame of a later commit follows the one that is not sound.
fn has_later_commit(bytes: &[u8]) -> bool {
    (1..bytes.len())
        .any(|at| parse(bytes.get(at..).unwrap_or_default()).is_ok_and(|frame| frame.begins_commit))
}

fn write(fields: &mut [u8; HEADER_BYTES], at: usize, value: &[u8]) {
    for (field, byte) in fields.iter_mut().skip(at).zip(value) {
        *field = *byte;
    }
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}
