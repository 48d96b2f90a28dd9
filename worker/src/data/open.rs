//! A file's bytes, decompressed by what they begin with; names are not trusted.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::{Error, Result};

const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const BUFFER_BYTES: usize = 1 << 16;

/// Opens a plain, gzip, xz or zstd file; several compressed streams in a row are read as one.
///
/// # Errors
/// When the file cannot be opened or is empty.
pub fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    let failed = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, File::open(path).map_err(failed)?);
    let start = reader.fill_buf().map_err(failed)?;
    if start.is_empty() {
        return Err(Error::Data {
            path: path.to_owned(),
            line: None,
            reason: "the file is empty, expected text or JSONL".to_owned(),
        });
    }
    if start.starts_with(GZIP) {
        return Ok(buffered(flate2::bufread::MultiGzDecoder::new(reader)));
    }
    if start.starts_with(XZ) {
        return Ok(buffered(liblzma::bufread::XzDecoder::new_multi_decoder(reader)));
    }
    if start.starts_with(ZSTD) {
        return Ok(buffered(
            zstd::stream::read::Decoder::with_buffer(reader).map_err(failed)?,
        ));
    }
    Ok(Box::new(reader))
}

fn buffered(reader: impl std::io::Read + Send + 'static) -> Box<dyn BufRead + Send> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, reader))
}
