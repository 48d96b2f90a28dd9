//! What the journal leads to: its snapshots are states, its events are the scheduler's.

use crate::journal::Fold;
use crate::scheduler::{Event, State, apply};

impl Fold for State {
    type Event = Event;

    fn restore(&mut self, json: &[u8]) -> Result<(), String> {
        *self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn event(&mut self, _sequence: u64, event: Event) {
        apply(self, &event);
    }
}
