//! The network between processes: which direction of which link is cut or bad, and how long things take.
//!
//! A gRPC stream is two ordered [`Lane`]s over one connection: nothing overtakes, nothing comes twice, and
//! the connection can break at any moment, losing what is under way. What is sent into a cut stays under way
//! (TCP sends it again) until the cut is healed or an end gives the connection up. Unary calls go each by
//! itself: they are lost, late, twice, and overtake each other.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::clock::Time;
use crate::dice::Dice;

/// How long an end of a silent connection waits before it gives it up: HTTP/2 keepalive's interval and timeout.
pub const KEEPALIVE: Duration = Duration::from_secs(30);

/// Something that has an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// A machine that a coordinator runs on.
    Coordinator(usize),
    /// A worker's machine.
    Worker(usize),
    /// The artifact store.
    Store,
    /// Who submits jobs.
    User,
}

/// One direction of a link.
#[derive(Debug, Clone, Copy, Default)]
struct Direction {
    /// Partitions that cut it at the moment.
    cuts: u32,
    /// Spells of bad weather.
    bad: u32,
}

/// All links.
#[derive(Debug)]
pub struct Network {
    dice: Dice,
    directions: BTreeMap<(Place, Place), Direction>,
}

impl Network {
    /// Every link is good.
    pub fn new(dice: Dice) -> Self {
        Self {
            dice,
            directions: BTreeMap::new(),
        }
    }

    /// Cuts a direction, until it has been healed as often as it was cut.
    pub fn cut(&mut self, from: Place, to: Place) {
        self.directions.entry((from, to)).or_default().cuts += 1;
    }

    /// Takes one cut back.
    pub fn heal(&mut self, from: Place, to: Place) {
        let direction = self.directions.entry((from, to)).or_default();
        direction.cuts = direction.cuts.saturating_sub(1);
    }

    /// Makes both directions slow and lossy.
    pub fn worsen(&mut self, one: Place, other: Place) {
        for ends in [(one, other), (other, one)] {
            self.directions.entry(ends).or_default().bad += 1;
        }
    }

    /// Takes one worsening back.
    pub fn better(&mut self, one: Place, other: Place) {
        for ends in [(one, other), (other, one)] {
            let direction = self.directions.entry(ends).or_default();
            direction.bad = direction.bad.saturating_sub(1);
        }
    }

    /// Whether nothing passes.
    pub fn is_cut(&self, from: Place, to: Place) -> bool {
        self.directions
            .get(&(from, to))
            .is_some_and(|direction| direction.cuts > 0)
    }

    /// Whether both directions are neither cut nor bad.
    pub fn is_good(&self, one: Place, other: Place) -> bool {
        [(one, other), (other, one)].iter().all(|ends| {
            let direction = self.directions.get(ends).copied().unwrap_or_default();
            direction.cuts == 0 && direction.bad == 0
        })
    }

    /// How long one message takes.
    pub fn latency(&mut self, from: Place, to: Place) -> Duration {
        let bad = self
            .directions
            .get(&(from, to))
            .is_some_and(|direction| direction.bad > 0);
        let slowest = if bad {
            Duration::from_secs(8)
        } else {
            Duration::from_millis(4)
        };
        self.dice.scale(Duration::from_micros(150), slowest)
    }

    /// How long each arrival of one unary call takes: none when it is lost, two when it is sent again although
    /// the first one arrived.
    pub fn call(&mut self, from: Place, to: Place) -> Vec<Duration> {
        let direction = self.directions.get(&(from, to)).copied().unwrap_or_default();
        if direction.cuts > 0 {
            return Vec::new();
        }
        let arrivals = match (direction.bad > 0, self.dice.below(10)) {
            (false, _) => 1,
            (true, 0..4) => 0,
            (true, 4..8) => 1,
            (true, _) => 2,
        };
        (0..arrivals).map(|_| self.latency(from, to)).collect()
    }
}

/// One direction of a stream.
#[derive(Debug)]
pub struct Lane<M> {
    under_way: VecDeque<(Time, M)>,
    last: Time,
}

impl<M> Lane<M> {
    /// Sends a message that takes so long, unless one before it takes longer; says when it will arrive.
    pub fn send(&mut self, now: Time, latency: Duration, message: M) -> Time {
        let arrival = (now + latency).max(self.last);
        self.last = arrival;
        self.under_way.push_back((arrival, message));
        arrival
    }

    /// The next message that has arrived by now.
    pub fn receive(&mut self, now: Time) -> Option<M> {
        let (arrival, _) = self.under_way.front()?;
        if *arrival > now {
            return None;
        }
        self.under_way.pop_front().map(|(_, message)| message)
    }

    /// How many messages are under way.
    pub fn len(&self) -> usize {
        self.under_way.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Loses what is under way.
    pub fn clear(&mut self) {
        self.under_way.clear();
    }
}

impl<M> Default for Lane<M> {
    fn default() -> Self {
        Self {
            under_way: VecDeque::new(),
            last: Time::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overtakes_on_a_stream() {
        let mut lane = Lane::default();
        lane.send(Time(0), Duration::from_secs(5), "slow");
        let arrival = lane.send(Time(1), Duration::from_micros(1), "fast");
        assert_eq!(arrival, Time(5_000_000));
        assert_eq!(lane.receive(Time(4_000_000)), None);
        assert_eq!(
            [lane.receive(arrival), lane.receive(arrival)],
            [Some("slow"), Some("fast")]
        );
    }

    #[test]
    fn a_direction_that_was_cut_twice_is_open_after_two_heals() {
        let mut network = Network::new(Dice::new(1, "network"));
        let (here, there) = (Place::Worker(0), Place::Coordinator(0));
        network.cut(here, there);
        network.cut(here, there);
        network.heal(here, there);
        assert!(network.is_cut(here, there) && !network.is_cut(there, here));
        assert!(network.call(here, there).is_empty());
        network.heal(here, there);
        assert_eq!(network.call(here, there).len(), 1);
    }
}
