//! How ranks find each other: each connects to those before it and lets those after it come, in any order.
//!
//! Both sides of a connection say who they are and prove that they know the gang's token, without showing it: each
//! answers the other's nonce with a keyed hash over what both have said. Whoever cannot is turned away and costs
//! nothing but the connection; a rank that was turned away comes again until the deadline.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::collective::Error;

/// Begins every connection; the last digit is the protocol's version.
const MAGIC: [u8; 8] = *b"esp-mes1";
/// Bytes of what a side says of itself: magic, rank, ranks, generation, nonce.
const HELLO: usize = 8 + 4 + 4 + 8 + 32;
/// How long one reads before it looks whether all is over.
const LOOK: Duration = Duration::from_millis(20);
/// How long a stranger may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be asked at once.
const ASKED_AT_ONCE: usize = 64;
/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// One try to connect.
const TRY: Duration = Duration::from_secs(1);

/// Who a rank is.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) rank: usize,
    pub(super) addresses: Vec<String>,
    pub(super) generation: u64,
    /// Hash of the token.
    pub(super) key: [u8; 32],
}

impl Identity {
    fn hello(&self) -> [u8; HELLO] {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = Vec::with_capacity(HELLO);
        bytes.extend(MAGIC);
        bytes.extend(number(self.rank));
        bytes.extend(number(self.addresses.len()));
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(nonce());
        let mut hello = [0; HELLO];
        hello.copy_from_slice(&bytes);
        hello
    }

    /// The rank that said `hello`, if it belongs to this gang and generation.
    fn rank_of(&self, hello: &[u8; HELLO]) -> Result<usize, String> {
        let number = |at: usize| {
            let bytes = hello.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let generation = u64::from(number(16)) | u64::from(number(20)) << 32;
        let rank = usize::try_from(number(8)).unwrap_or(usize::MAX);
        let ranks = usize::try_from(number(12)).unwrap_or(usize::MAX);
        if !hello.starts_with(&MAGIC) {
            return Err("no rank of this version answers there".to_owned());
        }
        if generation != self.generation {
            return Err(format!(
                "it is of generation {generation}, this one of {}",
                self.generation
            ));
        }
        if ranks != self.addresses.len() || rank >= ranks || rank == self.rank {
            return Err(format!(
                "it says that it is rank {rank} of {ranks}, and this one is rank {} of {}",
                self.rank,
                self.addresses.len()
            ));
        }
        Ok(rank)
    }

    /// What the side that said `own` answers to the one that said `other`.
    fn proof(&self, own: &[u8; HELLO], other: &[u8; HELLO]) -> blake3::Hash {
        let said = [own.as_slice(), other.as_slice()].concat();
        blake3::keyed_hash(&self.key, &said)
    }
}

/// 32 bytes that were never said before.
fn nonce() -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for _ in 0..4 {
        hasher.update(&RandomState::new().build_hasher().finish().to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// What is known while ranks come together.
struct Forming<'a> {
    identity: &'a Identity,
    deadline: Instant,
    /// Of each rank: its connection, or why there is none yet.
    places: Mutex<Vec<Result<TcpStream, String>>>,
    is_over: AtomicBool,
    asked: AtomicUsize,
}

/// A connection to every other rank; none at this rank's own place.
///
/// # Errors
/// [`Error::NotFormed`] when one is missing at the deadline.
pub(super) fn form(
    identity: &Identity,
    listener: &TcpListener,
    patience: Duration,
) -> Result<Vec<Option<TcpStream>>, Error> {
    let begun = Instant::now();
    let size = identity.addresses.len();
    let forming = Forming {
        identity,
        deadline: begun + patience,
        // Of those before this one another reason is known after the first try.
        places: Mutex::new((0..size).map(|_| Err("it has not come".to_owned())).collect()),
        is_over: AtomicBool::new(false),
        asked: AtomicUsize::new(0),
    };
    std::thread::scope(|scope| {
        for rank in 0..identity.rank {
            let forming = &forming;
            let seeks = std::thread::Builder::new().name(format!("to rank {rank}"));
            if let Err(error) = seeks.spawn_scoped(scope, move || forming.go_to(rank)) {
                forming.put(rank, Err(format!("there is no thread to look for it: {error}")));
            }
        }
        forming.let_come(scope, listener);
    });
    let places = forming
        .places
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let missing: Vec<String> = places
        .iter()
        .enumerate()
        .filter(|&(rank, _)| rank != identity.rank)
        .filter_map(|(rank, place)| {
            let address = identity.addresses.get(rank).map_or("", String::as_str);
            let reason = place.as_ref().err()?;
            Some(format!("rank {rank} at {address} ({reason})"))
        })
        .collect();
    if missing.is_empty() {
        return Ok(places.into_iter().map(Result::ok).collect());
    }
    Err(Error::NotFormed {
        rank: identity.rank,
        waited: begun.elapsed(),
        missing: missing.join(", "),
    })
}

impl Forming<'_> {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire) || Instant::now() >= self.deadline
    }

    fn put(&self, rank: usize, place: Result<TcpStream, String>) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = places.get_mut(rank) {
            // A rank that comes again has given its earlier connection up.
            if place.is_ok() || old.is_err() {
                *old = place;
            }
        }
        let own = self.identity.rank;
        let all = places
            .iter()
            .enumerate()
            .all(|(rank, place)| rank == own || place.is_ok());
        if all {
            self.is_over.store(true, Ordering::Release);
        }
    }

    /// Connects to `rank` until it is there.
    fn go_to(&self, rank: usize) {
        let address = self.identity.addresses.get(rank).map_or("", String::as_str);
        let mut is_first = true;
        loop {
            let tried = connect(address, self.deadline).and_then(|mut stream| {
                self.greet(&mut stream, Some(rank), self.deadline)?;
                Ok(stream)
            });
            let (is_there, is_over) = (tried.is_ok(), self.is_over());
            // A try that the end cut short knows less than the one before it.
            if is_there || is_first || !is_over {
                self.put(rank, tried);
            }
            if is_there || is_over {
                return;
            }
            is_first = false;
            std::thread::sleep(PAUSE);
        }
    }

    /// Lets ranks come until all are there.
    fn let_come<'scope, 'env>(
        &'env self,
        scope: &'scope std::thread::Scope<'scope, 'env>,
        listener: &TcpListener,
    ) {
        if let Err(error) = listener.set_nonblocking(true) {
            tracing::warn!(%error, "a rank cannot listen without waiting");
            return;
        }
        // To a gang of one nobody comes.
        let size = self.identity.addresses.len();
        if size <= 1 {
            return;
        }
        while !self.is_over() {
            let Ok((stream, from)) = listener.accept() else {
                std::thread::sleep(LOOK / 4);
                continue;
            };
            if self.asked.fetch_add(1, Ordering::AcqRel) >= ASKED_AT_ONCE {
                self.asked.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let greets = std::thread::Builder::new().name("greets a rank".to_owned());
            let greeted = greets.spawn_scoped(scope, move || {
                let mut stream = stream;
                let deadline = self.deadline.min(Instant::now() + PATIENCE);
                match self.greet(&mut stream, None, deadline) {
                    Ok(rank) => self.put(rank, Ok(stream)),
                    Err(reason) => tracing::debug!(%from, reason, "a stranger was turned away"),
                }
                self.asked.fetch_sub(1, Ordering::AcqRel);
            });
            if let Err(error) = greeted {
                // It tries again.
                self.asked.fetch_sub(1, Ordering::AcqRel);
                tracing::debug!(%from, %error, "there is no thread to greet a rank");
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Says who this is, and gives who the other is: `expected`, if it was this rank that connected; else one that
    /// comes after it.
    fn greet(
        &self,
        stream: &mut TcpStream,
        expected: Option<usize>,
        deadline: Instant,
    ) -> Result<usize, String> {
        let ready = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_read_timeout(Some(LOOK)))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        ready.map_err(|error| error.to_string())?;
        let said = |error: std::io::Error| error.to_string();
        let own = self.identity.hello();
        stream.write_all(&own).map_err(said)?;
        let mut other = [0; HELLO];
        self.hear(stream, &mut other, deadline)?;
        let rank = self.identity.rank_of(&other)?;
        let may_be = expected.map_or(rank > self.identity.rank, |expected| rank == expected);
        if !may_be {
            return Err(format!("rank {rank} answers there"));
        }
        // The side that came proves itself first.
        let (mine, its) = (
            self.identity.proof(&own, &other),
            self.identity.proof(&other, &own),
        );
        let mut proof = [0; 32];
        if expected.is_some() {
            stream.write_all(mine.as_bytes()).map_err(said)?;
        }
        self.hear(stream, &mut proof, deadline)?;
        // Compared in constant time.
        if its != blake3::Hash::from_bytes(proof) {
            return Err("it does not know this gang's token".to_owned());
        }
        if expected.is_none() {
            stream.write_all(mine.as_bytes()).map_err(said)?;
        }
        Ok(rank)
    }

    /// Fills `bytes`, unless the deadline passes or all others are there.
    fn hear(&self, stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> Result<(), String> {
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            if self.is_over() || Instant::now() >= deadline {
                let _ = stream.shutdown(Shutdown::Both);
                return Err("it does not answer".to_owned());
            }
            match stream.read(rest) {
                Ok(0) => return Err("it turned this rank away".to_owned()),
                Ok(count) => filled += count,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}

/// A connection to whichever of the name's addresses answers first.
fn connect(address: &str, deadline: Instant) -> Result<TcpStream, String> {
    let resolved = address
        .to_socket_addrs()
        .map_err(|error| format!("no such address: {error}"))?;
    let mut reason = None;
    for socket in resolved {
        let left = deadline.saturating_duration_since(Instant::now()).min(TRY);
        if left.is_zero() {
            reason.get_or_insert_with(|| "the time was over before it was tried".to_owned());
            break;
        }
        match TcpStream::connect_timeout(&socket, left) {
            // A port that nobody listens on can connect to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                reason = Some("nobody listens there".to_owned());
            }
            Ok(stream) => return Ok(stream),
            Err(error) => reason = Some(error.to_string()),
        }
    }
    Err(reason.unwrap_or_else(|| "no such address".to_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    fn forming<'a>(identity: &'a Identity, deadline: Instant) -> Forming<'a> {
        Forming {
            identity,
            deadline,
            places: Mutex::new(vec![Err(String::new()), Err(String::new())]),
            is_over: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
        }
    }

    /// Rank 1 of a gang whose rank 0 is at `first`.
    fn second(first: &TcpListener) -> Identity {
        Identity {
            rank: 1,
            addresses: vec![first.local_addr().unwrap().to_string(), String::new()],
            generation: 4,
            key: [0; 32],
        }
    }

    #[test]
    fn a_try_that_the_end_cuts_short_does_not_hide_why_the_one_before_it_failed() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let identity = second(&first);
        let forming = forming(&identity, Instant::now() + Duration::from_secs(600));
        std::thread::scope(|scope| {
            let went = scope.spawn(|| forming.go_to(0));
            let (mut turned_away, _) = first.accept().unwrap();
            turned_away.read_exact(&mut [0; HELLO]).unwrap();
            drop(turned_away);
            let (_unanswered, _) = first.accept().unwrap();
            forming.is_over.store(true, Ordering::Release);
            went.join().unwrap();
        });
        let why = forming.places.lock().unwrap().remove(0).unwrap_err();
        assert_eq!(why, "it turned this rank away");
    }

    #[test]
    fn a_rank_for_which_no_time_is_left_is_not_called_one_without_an_address() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let identity = second(&first);
        let forming = forming(&identity, Instant::now());
        forming.go_to(0);
        let why = forming.places.lock().unwrap().remove(0).unwrap_err();
        assert_eq!(why, "the time was over before it was tried");
    }
}
