//! How a small object guards itself: a first line with the BLAKE3 of what follows.
//!
//! Artifacts need none: their name is their hash.

use bytes::Bytes;

const PREFIX: &[u8] = b"blake3 ";
/// The prefix, 64 digits and a line feed.
const LINE_BYTES: usize = PREFIX.len() + 65;

/// The content with its line before it.
pub fn seal(content: &[u8]) -> Bytes {
    let mut sealed = Vec::with_capacity(LINE_BYTES.saturating_add(content.len()));
    sealed.extend_from_slice(&line(content));
    sealed.extend_from_slice(content);
    sealed.into()
}

/// The content, where it matches its line.
pub fn unseal(sealed: &Bytes) -> Option<Bytes> {
    let (found, content) = sealed.split_at_checked(LINE_BYTES)?;
    (found == line(content)).then(|| sealed.slice(LINE_BYTES..))
}

fn line(content: &[u8]) -> Vec<u8> {
    let mut line = Vec::with_capacity(LINE_BYTES);
    line.extend_from_slice(PREFIX);
    line.extend_from_slice(blake3::hash(content).to_hex().as_bytes());
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn what_was_sealed_comes_back_and_a_flipped_bit_or_a_cut_is_seen_anywhere() {
        let sealed = seal(b"a quince");
        assert_eq!(unseal(&sealed).unwrap().as_ref(), b"a quince");
        assert_eq!(unseal(&seal(b"")).unwrap().as_ref(), b"");
        for place in 0..sealed.len() {
            let mut bent = sealed.to_vec();
            bent[place] ^= 4;
            assert!(unseal(&bent.into()).is_none(), "bit flipped in byte {place}");
            assert!(unseal(&sealed.slice(..place)).is_none(), "cut to {place} bytes");
        }
    }
}
