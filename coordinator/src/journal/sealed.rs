//! Files that are written whole: a header, then a compressed payload, each with a checksum.
//!
//! ```text
//! header = magic 8 bytes | schema version u32 | number u64 | payload length u64 | payload CRC32C u32
//!          | header CRC32C u32
//! ```
//!
//! All integers are little-endian; the payload is zstd. The number ties a file to its name, so that one
//! that was copied over another is noticed.

use std::io::{self, Read, Write};

use serde::Serialize;

const HEADER_BYTES: usize = 36;
const CHECKED_BYTES: usize = 32;

/// The fastest level that is worth the name: snapshots are taken while work goes on.
const COMPRESSION_LEVEL: i32 = 1;

/// Largest payload after decompression.
const LIMIT_BYTES: u64 = 16 << 30;

/// What a sealed file is.
#[derive(Debug, Clone, Copy)]
pub struct Seal {
    /// Its first bytes.
    pub magic: [u8; 8],
    /// The newest schema this build writes and reads.
    pub version: u32,
}

/// Why the bytes of a file cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// They are not what was written.
    Damaged(&'static str),
    /// Written by a newer build, in this schema.
    TooNew(u32),
}

impl Seal {
    /// The bytes of a file that holds the JSON of `content`, and how many that JSON takes.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn close(self, number: u64, content: &impl Serialize) -> io::Result<(Vec<u8>, u64)> {
        let mut encoder = zstd::Encoder::new(vec![0; HEADER_BYTES], COMPRESSION_LEVEL)?;
        let mut json_bytes = 0;
        {
            let counted = Counted {
                inner: &mut encoder,
                bytes: &mut json_bytes,
            };
            // serde_json writes a few bytes at a time.
            let mut writer = io::BufWriter::with_capacity(128 << 10, counted);
            serde_json::to_writer(&mut writer, content)?;
            writer.flush()?;
        }
        let mut bytes = encoder.finish()?;
        let (header, payload) = bytes.split_at_mut(HEADER_BYTES);
        let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
        let mut fields = Vec::with_capacity(HEADER_BYTES);
        fields.extend_from_slice(&self.magic);
        fields.extend_from_slice(&self.version.to_le_bytes());
        fields.extend_from_slice(&number.to_le_bytes());
        fields.extend_from_slice(&length.to_le_bytes());
        fields.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
        fields.extend_from_slice(&crc32c::crc32c(&fields).to_le_bytes());
        header.copy_from_slice(&fields);
        Ok((bytes, json_bytes))
    }

    /// The JSON in the bytes of a file.
    ///
    /// # Errors
    /// When they are damaged, or newer than this build.
    pub fn open(self, number: u64, bytes: &[u8]) -> Result<Vec<u8>, Fault> {
        let payload = self.check(number, bytes)?;
        decompress(payload).map_err(|_| Fault::Damaged("the payload does not decompress"))
    }

    /// The payload in the bytes of a file, still compressed.
    ///
    /// # Errors
    /// As [`Seal::open`].
    pub fn check(self, number: u64, bytes: &[u8]) -> Result<&[u8], Fault> {
        let (header, payload) = bytes
            .split_at_checked(HEADER_BYTES)
            .ok_or(Fault::Damaged("it is shorter than its header"))?;
        let (checked, checksum) = header
            .split_at_checked(CHECKED_BYTES)
            .ok_or(Fault::Damaged("it is shorter than its header"))?;
        if checksum != crc32c::crc32c(checked).to_le_bytes() {
            return Err(Fault::Damaged("the header's checksum is wrong"));
        }
        if !checked.starts_with(&self.magic) {
            return Err(Fault::Damaged("it is a file of another kind"));
        }
        let version = field(checked, 8).map_or(0, u32::from_le_bytes);
        if version > self.version {
            return Err(Fault::TooNew(version));
        }
        if field(checked, 12).map(u64::from_le_bytes) != Some(number) {
            return Err(Fault::Damaged("its number is not the one in its name"));
        }
        if field(checked, 20).map(u64::from_le_bytes) != u64::try_from(payload.len()).ok() {
            return Err(Fault::Damaged("its length is wrong"));
        }
        if field(checked, 28).map(u32::from_le_bytes) != Some(crc32c::crc32c(payload)) {
            return Err(Fault::Damaged("the payload's checksum is wrong"));
        }
        Ok(payload)
    }
}

/// Counts what goes through it.
struct Counted<'a, W> {
    inner: W,
    bytes: &'a mut u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        *self.bytes = self
            .bytes
            .saturating_add(u64::try_from(written).unwrap_or(u64::MAX));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn decompress(payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    let decoder = zstd::Decoder::new(payload)?;
    decoder.take(LIMIT_BYTES).read_to_end(&mut json)?;
    Ok(json)
}

fn field<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..at.checked_add(BYTES)?)?.try_into().ok()
}
