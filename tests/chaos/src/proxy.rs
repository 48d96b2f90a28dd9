//! A wire that can be cut, both ways or one: a TCP proxy between workers and a coordinator.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{io, thread};

use anyhow::Result;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Wire {
    target: AtomicU16,
    /// What workers say is held back.
    cut_up: AtomicBool,
    /// What the coordinator says is held back.
    cut_down: AtomicBool,
    ended: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

/// A direction of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From a worker to the coordinator.
    Up,
    /// From the coordinator to a worker.
    Down,
}

impl Wire {
    fn is_cut(&self, way: Way) -> &AtomicBool {
        match way {
            Way::Up => &self.cut_up,
            Way::Down => &self.cut_down,
        }
    }

    /// Waits while a direction is cut.
    fn wait_until_mended(&self, way: Way) {
        while self.is_cut(way).load(Ordering::SeqCst) && !self.ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A proxy on a port of its own. Ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    wire: Arc<Wire>,
}

impl Proxy {
    /// A wire to a port of this machine.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(target: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let wire = Arc::new(Wire::default());
        wire.target.store(target, Ordering::SeqCst);
        let served = Arc::clone(&wire);
        thread::spawn(move || serve(&listener, &served));
        Ok(Self { address, wire })
    }

    /// The endpoint on this side of the wire.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Points the wire at another port.
    pub fn retarget(&self, target: u16) {
        self.wire.target.store(target, Ordering::SeqCst);
    }

    /// Cuts the wire without a word to either end: what was open goes silent, what is new is not answered.
    pub fn cut(&self) {
        self.cut_one_way(Way::Up);
        self.cut_one_way(Way::Down);
    }

    /// Cuts one direction: one end goes on hearing the other, which hears nothing.
    pub fn cut_one_way(&self, way: Way) {
        self.wire.is_cut(way).store(true, Ordering::SeqCst);
    }

    /// Mends the wire: what was open before is closed, as no peer could trust it.
    pub fn mend(&self) {
        self.close();
        for way in [Way::Up, Way::Down] {
            self.wire.is_cut(way).store(false, Ordering::SeqCst);
        }
    }

    fn close(&self) {
        let Ok(mut open) = self.wire.open.lock() else {
            return;
        };
        for stream in open.drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.wire.ended.store(true, Ordering::SeqCst);
        self.close();
        // Wakes the listener, so that its thread sees the end.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(listener: &TcpListener, wire: &Arc<Wire>) {
    for near in listener.incoming() {
        if wire.ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(near) = near else { continue };
        let wire = Arc::clone(wire);
        thread::spawn(move || join(near, &wire));
    }
}

fn join(near: TcpStream, wire: &Arc<Wire>) {
    for way in [Way::Up, Way::Down] {
        wire.wait_until_mended(way);
    }
    if wire.ended.load(Ordering::SeqCst) {
        return;
    }
    let target = SocketAddr::from(([127, 0, 0, 1], wire.target.load(Ordering::SeqCst)));
    let Ok(far) = TcpStream::connect_timeout(&target, CONNECT) else {
        return;
    };
    let (Ok(near_back), Ok(far_back)) = (near.try_clone(), far.try_clone()) else {
        return;
    };
    if let Ok(mut open) = wire.open.lock() {
        open.extend([near.try_clone(), far.try_clone()].into_iter().flatten());
    }
    let back = Arc::clone(wire);
    thread::spawn(move || pass(far_back, near_back, &back, Way::Down));
    pass(near, far, wire, Way::Up);
}

/// Passes bytes on until either end closes; while their direction is cut they are held back.
fn pass(mut from: TcpStream, mut to: TcpStream, wire: &Wire, way: Way) {
    let _ = from.set_nodelay(true);
    let mut bytes = [0; 16 << 10];
    while let Ok(length) = io::Read::read(&mut from, &mut bytes) {
        wire.wait_until_mended(way);
        let Some(passed) = bytes.get(..length).filter(|passed| !passed.is_empty()) else {
            break;
        };
        if io::Write::write_all(&mut to, passed).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_wire_cut_one_way_passes_what_goes_the_other_way() {
        for (way, passes) in [(Way::Up, [false, true]), (Way::Down, [true, false])] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let proxy = Proxy::start(listener.local_addr().unwrap().port()).unwrap();
            let mut worker = TcpStream::connect(proxy.address).unwrap();
            worker.write_all(b"hello").unwrap();
            let (mut coordinator, _) = listener.accept().unwrap();
            coordinator.read_exact(&mut [0; 5]).unwrap();
            proxy.cut_one_way(way);
            worker.write_all(b"x").unwrap();
            coordinator.write_all(b"x").unwrap();
            for (end, hears) in [&mut coordinator, &mut worker].into_iter().zip(passes) {
                // What comes may come late on a busy machine; what does not is not waited for as long.
                let patience = Duration::from_millis(if hears { 60_000 } else { 500 });
                end.set_read_timeout(Some(patience)).unwrap();
                assert_eq!(end.read_exact(&mut [0]).is_ok(), hears, "{way:?}");
            }
        }
    }
}
