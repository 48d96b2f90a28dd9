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
    /// A config without a key that its family needs.
    #[error("config {key} is missing, expected {expected}")]
    MissingKey {
        /// The key, with the path to it.
        key: String,
        /// What would be right.
        expected: String,
    },
    /// A config key with a value that cannot be used.
    #[error("config {key} is {value}, expected {expected}")]
    BadValue {
        /// The key, with the path to it.
        key: String,
        /// The value found, as JSON, shortened.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A family that is not known here.
    #[error("config model_type is {found}, expected one of {known}")]
    UnknownModelType {
        /// The value found, as JSON, shortened.
        found: String,
        /// The families known.
        known: String,
    },
    /// A model that tensor-parallel ranks cannot share out evenly.
    #[error(
        "{place} has {size} {field}, which {ranks} ranks cannot share evenly; expected a number of ranks that divides it"
    )]
    Uneven {
        /// The block, or the whole model.
        place: String,
        /// What is to be divided.
        field: &'static str,
        /// How many there are.
        size: usize,
        /// Among how many.
        ranks: usize,
    },
    /// A shape that the family's own config cannot express.
    #[error(
        "the architecture is not uniform: {reason}; expected layers of one attention and one MLP block, all of equal sizes"
    )]
    NotUniform {
        /// What differs.
        reason: String,
    },
}

/// A result whose error is this crate's.
pub type Result<T> = std::result::Result<T, Error>;
