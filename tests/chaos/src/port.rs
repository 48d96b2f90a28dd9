//! Ports for coordinators that are started again where they were.

use std::net::{SocketAddr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// Below the ports that systems hand out to whoever does not ask for a certain one, so that nobody gets it between two
/// starts.
const FIRST: u16 = 20_000;
const PORTS: u32 = 12_000;

/// A port that nobody listens on, and that this process gives once.
///
/// # Errors
/// When there is none.
pub fn reserve() -> Result<u16> {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Processes beside each other begin in different places.
    let own = process::id().wrapping_mul(61);
    let tries = (0..PORTS).filter_map(|_| {
        let place = own.wrapping_add(GIVEN.fetch_add(7, Ordering::Relaxed)) % PORTS;
        Some(FIRST + u16::try_from(place).ok()?)
    });
    let is_free = |port: &u16| TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], *port))).is_ok();
    let mut free = tries.filter(is_free);
    free.next()
        .with_context(|| format!("no port from {FIRST} on is free"))
}
