//! Limits of rates: token buckets, and what a port may flood or carry.
//!
//! # Storm control
//! A frame to a group or to an unknown address is copied to every other port, so its cost grows
//! with the network. Three things bound that cost. All of them are O(1) per frame.
//!
//! | bound | unit | of | reason |
//! | --- | --- | --- | --- |
//! | [`Storm::broadcast`], `multicast`, `unknown` | frames/s | each port | `broadcast_storm`, `multicast_storm`, `unknown_storm` |
//! | the port's share of [`FLOOD_COPIES`] | copies/s | each port | none: beyond it, the pool decides |
//! | the pool, once more [`FLOOD_COPIES`] | copies/s | the network | `flood_budget` |
//!
//! A port that stays within its share is never refused, whatever load the others cause: a storm
//! cannot take away a neighbour's ARP requests. A port beyond its share takes from the pool, so
//! that a single sender in a quiet network gets more.
//!
//! # Rates
//! [`Rates::send`] slows a port down. The worker takes no more frames from it until its bucket
//! allows more. So the peer's own queue fills and nothing is lost in the switch. [`Rates::receive`]
//! drops frames beyond the rate, as `rate_limit`. So do the limits of classes, in both directions:
//! the frames of one class may not hold up those behind them in the peer's queue.

use crate::Nanos;
use crate::class::{CLASSES, Class};
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Frame, Mac};
use crate::mac::PortNumber;
use crate::wait::Token;

/// Copies of flooded frames that the ports of one network share per second, and once more as a
/// common pool. A copy into a tap is a system call of 1 to 2 µs, so all of it together is less than
/// half a core, and much less for shared memory.
pub const FLOOD_COPIES: u64 = 100_000;
/// Copies that the pool holds at most: about 10 ms of work.
const POOL_BURST: u64 = 5_000;
/// Copies that a port may spend at once from its own share, if that is more than
/// [`SHARE_BURST_FRAMES`] frames.
const SHARE_BURST: u64 = 4_096;
/// Flooded frames that every port may send at once, however many ports there are.
const SHARE_BURST_FRAMES: u64 = 16;
/// Flooded frames per second that every port may send, however many ports there are.
const SHARE_FRAMES: u64 = 2;
/// Frames per second of each class of flooded frames, where the file says nothing.
const STORM_FRAMES: u64 = 1_000;
/// A rate limit lets this span's worth pass at once.
const RATE_BURST: Nanos = Nanos(20_000_000);
/// But at least so many bits: one frame of the longest kind.
const RATE_BURST_BITS: u64 = 65_536 * 8;
/// And at least so many frames.
const RATE_BURST_FRAMES: u64 = 64;

/// What the limits of gateways and translations are kept per: a port of the switch, or a MAC
/// address where the port is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ChargedTo {
    Port(Token),
    Mac(Mac),
}

/// A rate and how much may pass at once after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Tokens per second; at least 1.
    pub per_second: u64,
    /// Tokens that a full bucket holds; at least 1.
    pub burst: u64,
}

impl Limit {
    /// A limit whose bucket holds what one second brings.
    pub const fn frames(per_second: u64) -> Limit {
        Limit { per_second, burst: per_second }
    }

    const fn span(self, tokens: u64) -> Nanos {
        let per_second = if self.per_second == 0 { 1 } else { self.per_second } as u128;
        let ns = tokens as u128 * Nanos::SECOND.0 as u128 / per_second;
        Nanos(if ns > u64::MAX as u128 { u64::MAX } else { ns as u64 })
    }
}

/// A token bucket in the form of one instant, the one at which it is full again (GCRA, ITU-T I.371
/// annex A).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    full_at: Nanos,
}

impl Bucket {
    /// Takes `tokens`, or nothing and returns `false` if there are fewer.
    #[inline]
    pub fn take(&mut self, now: Nanos, tokens: u64, limit: Limit) -> bool {
        let full_at = self.full_at.max(now).after(limit.span(tokens));
        let there = full_at.since(now) <= limit.span(limit.burst);
        if there {
            self.full_at = full_at;
        }
        there
    }

    /// Takes `tokens` that were spent already: the bucket may owe some afterwards.
    #[inline]
    pub fn charge(&mut self, now: Nanos, tokens: u64, limit: Limit) {
        self.full_at = self.full_at.max(now).after(limit.span(tokens));
    }

    /// How long until the bucket owes nothing; zero where it holds something.
    #[inline]
    pub fn owes(&self, now: Nanos, limit: Limit) -> Nanos {
        self.full_at.since(now).since(limit.span(limit.burst))
    }
}

/// What a port may flood, in frames per second; `None` for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storm {
    /// Frames to the broadcast address.
    pub broadcast: Option<Limit>,
    /// Frames to other group addresses.
    pub multicast: Option<Limit>,
    /// Frames to addresses behind no known port.
    pub unknown: Option<Limit>,
    /// Whether the network's budget of copies applies to the port.
    pub shared: bool,
}

impl Storm {
    /// No storm control.
    pub const OFF: Storm = Storm { broadcast: None, multicast: None, unknown: None, shared: false };
}

impl Default for Storm {
    fn default() -> Self {
        let each = Some(Limit::frames(STORM_FRAMES));
        Storm { broadcast: each, multicast: each, unknown: each, shared: true }
    }
}

/// Why a frame is copied to every port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flooded {
    Broadcast,
    Multicast,
    Unknown,
}

/// What storm control keeps of one port.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    storm: Storm,
    /// Of broadcast, multicast, unknown.
    frames: [Bucket; 3],
    share: Bucket,
}

/// The storm control of one network.
#[derive(Debug, Default)]
pub(crate) struct Floods {
    ports: Vec<Spent>,
    pool: Bucket,
}

impl Floods {
    /// Sets what `port` may flood; its buckets are full.
    pub(crate) fn set(&mut self, port: PortNumber, storm: Storm) {
        let at = usize::from(port);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, Spent::default);
        }
        self.ports[at] = Spent { storm, ..Spent::default() };
    }

    /// Whether a frame of `port` may be copied to `copies` ports of the `up` that are up. The error
    /// is why it may not.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        now: Nanos,
        port: PortNumber,
        why: Flooded,
        (copies, up): (u64, u64),
    ) -> Result<(), Reason> {
        let Some(spent) = self.ports.get_mut(usize::from(port)) else { return Ok(()) };
        let (limit, reason) = match why {
            Flooded::Broadcast => (spent.storm.broadcast, Reason::BroadcastStorm),
            Flooded::Multicast => (spent.storm.multicast, Reason::MulticastStorm),
            Flooded::Unknown => (spent.storm.unknown, Reason::UnknownStorm),
        };
        if let Some(limit) = limit
            && !spent.frames[why as usize].take(now, 1, limit)
        {
            return Err(reason);
        }
        let share = Limit {
            per_second: (FLOOD_COPIES / up.max(1)).max(SHARE_FRAMES * copies).max(1),
            burst: SHARE_BURST.max(SHARE_BURST_FRAMES * copies),
        };
        let pool = Limit { per_second: FLOOD_COPIES, burst: POOL_BURST };
        if !spent.storm.shared || spent.share.take(now, copies, share) || self.pool.take(now, copies, pool) {
            Ok(())
        } else {
            Err(Reason::FloodBudget)
        }
    }
}

/// A limit of what a port carries in one direction; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Bits of frames per second, Ethernet header included.
    pub bits: Option<u64>,
    /// Frames per second. A frame that represents several segments counts as one.
    pub frames: Option<u64>,
    /// Bits that may pass at once after a pause; `None` for 20 ms' worth, or one of the longest
    /// frames if that is more. Without `bits` it means nothing.
    pub burst: Option<u64>,
}

/// What a port may carry, from the view of the member behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// What the member sends.
    pub send: Rate,
    /// What the member receives.
    pub receive: Rate,
    /// What it sends of each class, by [`Class`].
    pub send_class: [Rate; CLASSES],
    /// What it receives of each class, by [`Class`].
    pub receive_class: [Rate; CLASSES],
}

impl Rates {
    /// The limits of both directions and of their classes, by name: `send`, `send_background` to
    /// `receive_urgent`.
    pub fn named(&self) -> impl Iterator<Item = (String, Rate)> {
        let ways = [("send", self.send, self.send_class), ("receive", self.receive, self.receive_class)];
        ways.into_iter().flat_map(|(way, whole, classes)| {
            let of_class = move |class: Class| (format!("{way}_{}", class.word()), classes[class as usize]);
            std::iter::once((way.to_string(), whole)).chain(Class::ALL.into_iter().map(of_class))
        })
    }

    /// The limit of that name, as [`Rates::named`] has it; `None` for another name.
    pub fn named_mut(&mut self, name: &str) -> Option<&mut Rate> {
        let (way, class) = name.split_once('_').map_or((name, None), |(way, class)| (way, Some(class)));
        let (whole, classes) = match way {
            "send" => (&mut self.send, &mut self.send_class),
            "receive" => (&mut self.receive, &mut self.receive_class),
            _ => return None,
        };
        match class {
            None => Some(whole),
            Some(word) => Some(&mut classes[Class::ALL.into_iter().find(|class| class.word() == word)? as usize]),
        }
    }
}

/// A [`Rate`] at work.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    bits: Option<(Limit, Bucket)>,
    frames: Option<(Limit, Bucket)>,
}

impl Meter {
    pub(crate) fn new(rate: Rate) -> Meter {
        let limit = |per_second: Option<u64>, burst: Option<u64>, least: u64| {
            let per_second = per_second?.max(1);
            let burst = burst.unwrap_or_else(|| least.max(per_second / (Nanos::SECOND.0 / RATE_BURST.0)));
            Some((Limit { per_second, burst }, Bucket::default()))
        };
        Meter {
            bits: limit(rate.bits, rate.burst, RATE_BURST_BITS),
            frames: limit(rate.frames, None, RATE_BURST_FRAMES),
        }
    }

    /// Whether there is any limit.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.bits.is_some() || self.frames.is_some()
    }

    /// How long until more may be carried; zero for at once.
    pub(crate) fn wait(&self, now: Nanos) -> Nanos {
        let each = [self.bits, self.frames].into_iter().flatten();
        each.map(|(limit, bucket)| bucket.owes(now, limit)).max().unwrap_or_default()
    }

    /// Charges what was carried.
    pub(crate) fn charge(&mut self, now: Nanos, frames: u64, bytes: u64) {
        for (meter, tokens) in [(&mut self.bits, bytes * 8), (&mut self.frames, frames)] {
            if let Some((limit, bucket)) = meter {
                bucket.charge(now, tokens, *limit);
            }
        }
    }

    fn is_free(&self, now: Nanos) -> bool {
        self.wait(now) == Nanos(0)
    }

    /// How many of the frames with these lengths in bytes, one after the other, may be carried now.
    pub(crate) fn fit(&self, now: Nanos, lens: impl Iterator<Item = usize>) -> usize {
        let mut trial = *self;
        lens.take_while(|len| {
            let is_free = trial.is_free(now);
            trial.charge(now, 1, *len as u64);
            is_free
        })
        .count()
    }

    /// How long the next frame may have to wait where nothing else holds it up: after one of the
    /// longest kind.
    pub(crate) fn longest_wait(&self) -> Nanos {
        let of = |meter: Option<(Limit, Bucket)>, tokens| meter.map_or(Nanos(0), |(limit, _)| limit.span(tokens));
        of(self.bits, RATE_BURST_BITS).max(of(self.frames, 1))
    }
}

/// The limits of one direction at work.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) whole: Meter,
    /// By class, where one has a limit.
    classes: Option<Box<[Meter; CLASSES]>>,
}

impl Meters {
    pub(crate) fn new(whole: Rate, classes: [Rate; CLASSES]) -> Meters {
        let classes = classes.map(Meter::new);
        Meters { whole: Meter::new(whole), classes: classes.iter().any(Meter::is_on).then(|| Box::new(classes)) }
    }

    /// Whether there is a limit of a class.
    #[inline]
    pub(crate) fn has_classes(&self) -> bool {
        self.classes.is_some()
    }

    /// Whether the limit of its class lets the frame pass, which it is charged for then.
    pub(crate) fn class_passes(&mut self, now: Nanos, batch: &Batch<'_>, frame: &Frame) -> bool {
        let Some(classes) = &mut self.classes else { return true };
        let meter = &mut classes[batch.class_of(frame) as usize];
        let passes = meter.is_free(now);
        if passes {
            meter.charge(now, 1, frame.len() as u64);
        }
        passes
    }

    /// Writes to `passed` those of the frames `which` that the limits of their classes let pass;
    /// counts the others in `drops`.
    pub(crate) fn pass_classes(
        &mut self,
        now: Nanos,
        batch: &Batch<'_>,
        which: &[u16],
        passed: &mut Vec<u16>,
        drops: &mut Drops,
    ) {
        passed.clear();
        for index in which {
            let frame = &batch.frames()[usize::from(*index)];
            if self.class_passes(now, batch, frame) {
                passed.push(*index);
            }
        }
        drops.count(Reason::RateLimit, (which.len() - passed.len()) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = Nanos::SECOND;

    #[test]
    fn a_bucket_holds_its_burst_and_fills_at_its_rate() {
        let limit = Limit { per_second: 10, burst: 3 };
        let mut bucket = Bucket::default();
        let start = SECOND;
        let taken = (0..10).filter(|_| bucket.take(start, 1, limit)).count();
        assert_eq!(taken, 3);
        assert!(!bucket.take(start.after(Nanos::MILLI.times(99)), 1, limit));
        assert!(bucket.take(start.after(Nanos::MILLI.times(100)), 1, limit));
        // After a long pause there is a burst, not more.
        let late = start.after(SECOND.times(1000));
        assert_eq!((0..10).filter(|_| bucket.take(late, 1, limit)).count(), 3);
        assert!(!bucket.take(late.after(SECOND.times(1000)), 4, limit), "more than it ever holds");
    }

    #[test]
    fn a_bucket_that_was_overcharged_says_how_long_it_owes() {
        let limit = Limit { per_second: 10, burst: 3 };
        let mut bucket = Bucket::default();
        bucket.charge(SECOND, 8, limit);
        assert_eq!(bucket.owes(SECOND, limit), Nanos::MILLI.times(500));
        assert_eq!(bucket.owes(SECOND.times(2), limit), Nanos(0));
    }

    #[test]
    fn limits_are_found_by_the_names_they_are_listed_with() {
        let mut rates = Rates::default();
        let names: Vec<_> = rates.named().map(|(name, _)| name).collect();
        for (n, name) in names.iter().enumerate() {
            *rates.named_mut(name).unwrap() = Rate { bits: Some(n as u64), ..Rate::default() };
        }
        assert!(rates.named().enumerate().all(|(n, (_, rate))| rate.bits == Some(n as u64)));
        assert_eq!((names.len(), rates.receive.bits), (10, Some(5)));
        assert_eq!(rates.send_class[Class::Urgent as usize].bits, Some(4));
        for name in ["", "sent", "send_", "send_fast", "receive_urgent_"] {
            assert_eq!(rates.named_mut(name), None, "{name}");
        }
    }

    #[test]
    fn a_burst_that_is_given_takes_the_place_of_that_of_20_ms() {
        for (burst, want) in [(None, 524_288 / 8_000 + 1), (Some(80_000), 11), (Some(1_000), 1)] {
            let mut meter = Meter::new(Rate { bits: Some(1_000_000), frames: None, burst });
            let mut passed = 0;
            while meter.is_free(SECOND) {
                meter.charge(SECOND, 1, 1_000);
                passed += 1;
            }
            assert_eq!(passed, want, "{burst:?}");
        }
    }

    #[test]
    fn a_storm_of_others_leaves_each_port_its_share() {
        let mut floods = Floods::default();
        let ports = 64u16;
        (0..=ports).for_each(|port| floods.set(port, Storm::default()));
        let network = (u64::from(ports), u64::from(ports) + 1);
        let mut copies = 0;
        // One second in which all but the last port flood without pause.
        for ms in 0..1000 {
            let now = SECOND.after(Nanos::MILLI.times(ms));
            for port in 0..ports {
                let passed = (0..64).filter(|_| floods.admit(now, port, Flooded::Broadcast, network).is_ok()).count();
                copies += passed as u64 * network.0;
            }
            if ms % 100 == 99 {
                let modest = floods.admit(now, ports, Flooded::Broadcast, network);
                assert_eq!(modest, Ok(()), "at {ms} ms");
            }
        }
        let bursts = u64::from(ports) * SHARE_BURST + POOL_BURST;
        assert!(copies <= 2 * FLOOD_COPIES + bursts, "{copies} copies");
        let lost = (0..1000).find_map(|_| floods.admit(SECOND.times(2), 0, Flooded::Multicast, network).err());
        assert_eq!(lost, Some(Reason::FloodBudget));
    }

    #[test]
    fn each_class_has_its_own_limit_and_reason() {
        let mut floods = Floods::default();
        let each = Some(Limit { per_second: 1, burst: 2 });
        floods.set(3, Storm { broadcast: each, multicast: each, unknown: each, shared: true });
        let classes = [
            (Flooded::Broadcast, Reason::BroadcastStorm),
            (Flooded::Multicast, Reason::MulticastStorm),
            (Flooded::Unknown, Reason::UnknownStorm),
        ];
        for (class, reason) in classes {
            let said: Vec<_> = (0..3).map(|_| floods.admit(SECOND, 3, class, (1, 2))).collect();
            assert_eq!(said, [Ok(()), Ok(()), Err(reason)]);
        }
        floods.set(3, Storm::OFF);
        assert!((0..100_000).all(|_| floods.admit(SECOND, 3, Flooded::Unknown, (100, 101)).is_ok()));
    }
}
