//! A rank of a gang before its work: it makes itself reachable, says so, and waits until all stand ready.
//! What ranks then say to each other belongs to the executor.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use espalier_model::collective::Gang;
use espalier_model::collective::mesh::{self, Mesh};
use espalier_model::ops::Operations;
use espalier_proto::task::TaskSpec;

use super::protocol::{Place, Request};
use super::stop::Stops;
use crate::{Error, Result};

/// How often a rank that waits looks whether it should stop.
const LOOK: Duration = Duration::from_millis(20);
/// How long the cause of a lost rank may take to come round by way of the coordinator.
const CAUSE_PATIENCE: Duration = Duration::from_millis(500);

/// A gang that stands ready.
#[derive(Debug)]
pub(super) struct Released {
    communicator: String,
    addresses: Vec<String>,
    /// Where the other ranks reach this one.
    listener: TcpListener,
}

/// Listens for the other ranks, says where through `say`, and waits for the release.
///
/// # Errors
/// [`Error::Cancelled`] when the generation ends first; when no port can be had.
pub(super) fn stand_ready(
    place: &Place,
    attempt: u64,
    requests: &Receiver<Request>,
    stops: &Stops,
    say: impl FnOnce(String),
) -> Result<Released> {
    let listened = TcpListener::bind((place.host.as_str(), 0)).and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    let (listener, address) = listened.map_err(|error| Error::Child {
        reason: format!("rank {} cannot listen on {}: {error}", place.rank, place.host),
    })?;
    tracing::info!(rank = place.rank, ranks = place.ranks, generation = place.generation, %address, "a rank stands ready");
    say(address.to_string());
    loop {
        if stops.asked(attempt).is_some() {
            return Err(Error::Cancelled);
        }
        match requests.recv_timeout(LOOK) {
            Ok(Request::Release {
                attempt: of,
                communicator,
                addresses,
            }) if of == attempt => {
                return Ok(Released {
                    communicator,
                    addresses,
                    listener,
                });
            }
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Cancelled),
        }
    }
}

/// The gang that a release has made, as one of its ranks.
#[derive(Debug)]
pub(super) struct Member {
    mesh: Arc<Mesh>,
    /// What executors see of it.
    pub gang: Arc<dyn Gang>,
}

impl Member {
    /// Finds the other ranks.
    ///
    /// # Errors
    /// When the release is not for this gang, or ranks do not come together.
    pub fn join(place: &Place, released: Released, operations: &dyn Operations) -> Result<Self> {
        if u32::try_from(released.addresses.len()) != Ok(place.ranks) {
            return Err(Error::Invalid {
                reason: format!(
                    "the release names {} addresses, expected one for each of {} ranks",
                    released.addresses.len(),
                    place.ranks
                ),
            });
        }
        let place = mesh::Place {
            rank: usize::try_from(place.rank).unwrap_or(usize::MAX),
            listener: released.listener,
            addresses: released.addresses,
            token: released.communicator,
            generation: place.generation,
        };
        let formed = Mesh::form(place, mesh::Options::default()).map_err(espalier_model::Error::from)?;
        let mesh = Arc::new(formed);
        let gang = operations.gang(Arc::clone(&mesh))?;
        Ok(Self { mesh, gang })
    }

    /// Says whether this rank waits for others, which all live.
    pub fn waits(&self) -> impl Fn() -> bool + Send + use<> {
        let mesh = Arc::downgrade(&self.mesh);
        move || mesh.upgrade().is_some_and(|mesh| mesh.is_waiting())
    }

    /// Leaves the others, all work done. They may have been lost since; what this rank has is whole all the same.
    pub fn leave(self) {
        if let Err(error) = self.mesh.close() {
            tracing::warn!(%error, "the gang broke when its work was done");
        }
    }
}

/// Only recovery works on several ranks.
///
/// # Errors
/// [`Error::Invalid`] when another task's gang has more than one.
pub(super) fn require_alone(place: &Place, spec: &TaskSpec) -> Result<()> {
    if place.ranks <= 1 || matches!(spec, TaskSpec::Recover(_)) {
        return Ok(());
    }
    Err(Error::Invalid {
        reason: format!(
            "the task asks for {} ranks, and a task of kind {} runs on one: ask for 1 rank",
            place.ranks,
            spec.kind()
        ),
    })
}

/// A rank that tells of another's loss gives that one's own attempt the time to tell why, and its generation to end:
/// then it has merely stopped.
pub(super) fn await_the_cause(attempt: u64, stops: &Stops) -> bool {
    let deadline = Instant::now() + CAUSE_PATIENCE;
    while Instant::now() < deadline {
        if stops.asked(attempt).is_some() {
            return true;
        }
        std::thread::sleep(LOOK);
    }
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn place(ranks: u32) -> Place {
        Place {
            generation: 1,
            rank: 0,
            ranks,
            host: "127.0.0.1".to_owned(),
        }
    }

    #[test]
    fn a_rank_can_be_reached_before_it_says_so_and_is_released_once_all_are() {
        let (sender, requests) = sync_channel(4);
        let mut said = String::new();
        let release = |attempt| Request::Release {
            attempt,
            communicator: "c".to_owned(),
            addresses: vec!["a:1".to_owned(), "b:2".to_owned()],
        };
        sender.send(release(8)).unwrap();
        sender.send(release(7)).unwrap();
        let released = stand_ready(&place(2), 7, &requests, &Stops::default(), |address| {
            std::net::TcpStream::connect(&address).unwrap();
            said = address;
        })
        .unwrap();
        assert!(said.starts_with("127.0.0.1:"), "{said}");
        assert_eq!(released.addresses.len(), 2);
    }

    #[test]
    fn a_generation_that_ends_before_its_release_stops_the_rank() {
        let (_sender, requests) = sync_channel(4);
        let stops = Stops::default();
        let ended = stand_ready(&place(2), 7, &requests, &stops, |_| stops.ask(7, false));
        assert!(matches!(ended, Err(Error::Cancelled)));
    }
}
