//! One frame: encoding, and telling what is wrong with bytes that are not one.

/// The newest schema this build writes and reads.
pub const SCHEMA_VERSION: u32 = 1;

/// Bytes before the payload.
pub const HEADER_BYTES: usize = 24;

/// Largest payload.
pub const PAYLOAD_LIMIT_BYTES: usize = 64 << 20;

/// A whole frame.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its number, counted from 1 over all segments.
    pub sequence: u64,
    /// How the payload is to be read.
    pub version: u32,
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
    /// An append that did not finish: too short for its header or for the length a sound header gives, or
    /// blocks of zeros that the file system gave the file before the data. Never acknowledged; may be cut.
    Torn,
    /// Anything else. It may have been acknowledged; must not be cut without asking.
    Damaged(String),
}

/// Appends a frame to a buffer; the payload must be within the limit.
pub fn encode(buffer: &mut Vec<u8>, sequence: u64, payload: &[u8]) -> Option<()> {
    let length = u32::try_from(payload.len()).ok()?;
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(&length.to_le_bytes());
    header.extend_from_slice(&SCHEMA_VERSION.to_le_bytes());
    header.extend_from_slice(&sequence.to_le_bytes());
    header.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    let checksum = crc32c::crc32c(&header);
    header.extend_from_slice(&checksum.to_le_bytes());
    buffer.extend_from_slice(&header);
    buffer.extend_from_slice(payload);
    Some(())
}

/// Reads the frame at the start of `bytes`, or says how they end.
pub fn decode(bytes: &[u8]) -> Result<Frame<'_>, Tail> {
    if bytes.is_empty() {
        return Err(Tail::Clean);
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(Tail::Torn);
    }
    let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) else {
        return Err(Tail::Torn);
    };
    let (Some(length), Some(version), Some(sequence), Some(checksum), Some(header_checksum)) = (
        read_u32(header, 0),
        read_u32(header, 4),
        read_u64(header, 8),
        read_u32(header, 16),
        read_u32(header, 20),
    ) else {
        return Err(Tail::Torn);
    };
    let sound = header
        .get(..20)
        .is_some_and(|fields| crc32c::crc32c(fields) == header_checksum);
    if !sound {
        return Err(Tail::Damaged("the header's checksum is wrong".to_owned()));
    }
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let Some(payload) = rest.get(..length) else {
        return Err(Tail::Torn);
    };
    if crc32c::crc32c(payload) != checksum {
        let is_last = rest.len() == length;
        let blank_end = payload.last() == Some(&0);
        return Err(if is_last && blank_end {
            Tail::Torn
        } else {
            Tail::Damaged("the payload's checksum is wrong".to_owned())
        });
    }
    Ok(Frame {
        sequence,
        version,
        payload,
        bytes: HEADER_BYTES.saturating_add(length),
    })
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}
