//! Terms: which coordinator may promote, when there may be two.
//!
//! A coordinator claims its term in the artifact store by conditional create before it serves, and holds its
//! authority by reading the list of terms again. Past a lease since the last good look nothing is promoted
//! until there is another; one that sees a higher term stops. A successor on another disk waits a lease out
//! after its claim, so that by then its predecessor has either seen it or lost its authority. The rules are
//! [`authority`], a function of times and lists; [`keeper`] brings them to a store and a clock. A coordinator
//! whose store lies inside its own data directory needs none of this: the directory's lock fences it.

pub mod authority;
pub mod claims;
pub mod keeper;
#[cfg(feature = "planted-bugs")]
pub mod planted;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use authority::{Authority, Standing};
pub use claims::{Claim, Claims};
pub use keeper::Keeper;

use crate::Result;
use crate::scheduler::Term;

/// A coordinator promotes nothing when it last saw itself to be the newest longer ago than this.
pub const TERM_LEASE: Duration = Duration::from_secs(10);

/// What keeps two coordinators from both promoting.
pub trait Fence: std::fmt::Debug + Send + Sync + 'static {
    /// Claims a term above every other; `own` is the last of the journal and `next` the sequence of its next
    /// frame. Blocks.
    ///
    /// # Errors
    /// When the store cannot be used, or another coordinator has taken over from this data directory.
    fn claim(&self, own: Term, next: u64) -> Result<Term>;

    /// Whether acknowledging and handing out is allowed at this time of the loop's clock.
    fn standing(&self, now: Duration) -> Standing;

    /// A worker says that it was welcomed by a coordinator of this term, which is higher than one's own. That is
    /// no proof: the worker may come from another cluster, or the journal may have lost its last terms.
    fn hears_of(&self, _term: Term) -> Heard {
        Heard::Looks
    }
}

/// What is done about a higher term that a worker speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// The terms are looked at again: [`Fence::standing`] will tell. The worker has to wait.
    Looks,
    /// Nobody else can have it: a term above it is begun.
    Rises,
}

/// The fence of a coordinator with a store of its own: whoever holds the directory's lock is the only one.
#[derive(Debug, Clone, Copy, Default)]
pub struct OwnDirectory;

impl Fence for OwnDirectory {
    fn claim(&self, own: Term, _next: u64) -> Result<Term> {
        Ok(own.next())
    }

    fn standing(&self, _now: Duration) -> Standing {
        Standing::Holds
    }

    fn hears_of(&self, _term: Term) -> Heard {
        Heard::Rises
    }
}
