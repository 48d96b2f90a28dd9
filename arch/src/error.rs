//! What can be wrong with a model's shape.

/// What can be wrong with a model's shape.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A candidate for another number of blocks.
    #[error("the candidate has {found} variants, expected {expected}: one for each block of the parent")]
    CandidateLength {
        /// Blocks of the parent.
        expected: usize,
        /// Variants of the candidate.
        found: usize,
    },
    /// A variant of the wrong kind or size.
    #[error("variant of block {block}: {reason}")]
    VariantDoesNotFit {
        /// Index into the parent's list of blocks.
        block: usize,
        /// What was expected.
        reason: String,
    },
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;
