//! A bug on purpose, for the simulation to find: behind a switch of its thread, and never built into a release.

use std::cell::Cell;

thread_local! {
    static SERVE_OLD_TERMS: Cell<bool> = const { Cell::new(false) };
}

/// Lets authorities of this thread hold whatever they see, or not.
pub fn serve_old_terms(on: bool) {
    SERVE_OLD_TERMS.set(on);
}

pub(super) fn serves_old_terms() -> bool {
    SERVE_OLD_TERMS.get()
}
