//! IPv6 addresses of ports that have no guard for them.
//!
//! Such a port may use any address. A memory of those is needed all the same:
//!
//! - Hosts and routers keep an entry for each neighbour. Linux has room for 1024, of all its links
//!   together (`gc_thresh3`), and entries younger than 5 s do not make room. So a port may bring
//!   [`BURST`] new addresses at once, and [`RATE`] a second. Frames from more are dropped,
//!   `address_limit`. That is 104 entries of 5 s, so one member cannot fill the table.
//! - A port whose guard learns may not claim an address that such a port has used.
//!
//! Only addresses on the link count: those of the network's prefix, link-local ones, and each source
//! of neighbour discovery. What a member routes from elsewhere makes no neighbours.
//!
//! Limits: each port has two sets of at most [`MOST`] addresses. When the younger one is full, or
//! half of the lifetime is over, it takes the place of the older one. One index over all ports says
//! whether an address is in use: a frame from a refused address costs one look-up, however many
//! ports there are.

use super::bindings::{LIFETIME, Place};
use super::ipv6::{self, Upper};
use crate::Nanos;
use crate::mac::PortNumber;
use std::collections::{HashMap, HashSet};
use std::net::Ipv6Addr;

/// New addresses of a port in a second, and at once.
const RATE: u64 = 8;
const BURST: u64 = 64;
/// Addresses in one of a port's two sets.
const MOST: usize = 512;

#[derive(Debug)]
struct Addresses {
    young: HashSet<Place>,
    old: HashSet<Place>,
    /// When the sets changed places.
    turned: Nanos,
    /// The source of the last frame.
    last: Place,
    /// When the port would have its whole burst again.
    whole: Nanos,
}

/// How many ports have an address in their sets, and when one of them entered it last, which each
/// does at least each half of the lifetime while it uses it.
#[derive(Debug, Default)]
struct Used(HashMap<Place, (u32, Nanos)>);

impl Used {
    fn enter(&mut self, now: Nanos, place: Place, is_new: bool) {
        let used = self.0.entry(place).or_insert((0, now));
        *used = (used.0 + u32::from(is_new), now);
    }

    /// A port has these in no set any more.
    fn forget(&mut self, places: impl Iterator<Item = Place>) {
        for place in places {
            let Some(used) = self.0.get_mut(&place) else { continue };
            used.0 = used.0.saturating_sub(1);
            if used.0 == 0 {
                self.0.remove(&place);
            }
        }
    }
}

impl Addresses {
    /// Enters an address; false where it is new, and there were too many new ones.
    fn enter(&mut self, now: Nanos, place: Place, used: &mut Used) -> bool {
        if self.young.len() >= MOST || now.since(self.turned).0 >= LIFETIME.0 / 2 {
            let gone = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
            self.turned = now;
            used.forget(gone.into_iter().filter(|place| !self.old.contains(place)));
        }
        if self.young.contains(&place) {
            return true;
        }
        let is_new = !self.old.contains(&place);
        if is_new {
            let whole = self.whole.max(now).after(Nanos(Nanos::SECOND.0 / RATE));
            if whole.since(now) > Nanos(Nanos::SECOND.0 / RATE).times(BURST) {
                return false;
            }
            self.whole = whole;
        }
        used.enter(now, place, is_new);
        self.young.insert(place)
    }
}

/// The addresses of a network's ports.
#[derive(Debug, Default)]
pub(super) struct Unguarded {
    ports: Vec<Option<Box<Addresses>>>,
    used: Used,
}

impl Unguarded {
    /// Whether an IPv6 packet (the first bytes of it, or all) may pass from `port`.
    pub(super) fn admit(
        &mut self,
        now: Nanos,
        (port, vlan): (PortNumber, u16),
        prefix: Ipv6Addr,
        packet: &[u8],
    ) -> bool {
        let Some(source) = packet.get(..40).and_then(|header| ipv6::address(&header[8..])) else { return true };
        if source == 0
            || source >> 120 == 0xff
            || self.is_last(now, port, (source, vlan))
            || !is_on_link(source, prefix, packet)
        {
            return true;
        }
        let at = usize::from(port);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        let none = || {
            let (young, old) = (HashSet::new(), HashSet::new());
            Box::new(Addresses { young, old, turned: now, last: (0, vlan), whole: now })
        };
        let addresses = self.ports[at].get_or_insert_with(none);
        let is_in = addresses.enter(now, (source, vlan), &mut self.used);
        if is_in {
            addresses.last = (source, vlan);
        }
        is_in
    }

    /// Whether this source is what the port has used last, and needs not be entered once more.
    #[inline]
    pub(super) fn is_last(&self, now: Nanos, port: PortNumber, source: Place) -> bool {
        let addresses = self.ports.get(usize::from(port)).and_then(Option::as_ref);
        addresses.is_some_and(|addresses| addresses.last == source && now.since(addresses.turned).0 < LIFETIME.0 / 2)
    }

    /// Whether a port has used an address lately, in that VLAN.
    pub(super) fn is_used(&self, now: Nanos, place: Place) -> bool {
        self.used.0.get(&place).is_some_and(|(_, entered)| now.since(*entered) < LIFETIME)
    }

    /// Forgets `port`.
    pub(super) fn leave(&mut self, port: PortNumber) {
        if let Some(addresses) = self.ports.get_mut(usize::from(port)).and_then(Option::take) {
            let Addresses { young, old, .. } = *addresses;
            self.used.forget(young.union(&old).copied());
        }
    }
}

fn is_on_link(source: u128, prefix: Ipv6Addr, packet: &[u8]) -> bool {
    let is_local = source >> 118 == 0xfe80 >> 6;
    let discovers = || match ipv6::upper_layer(packet) {
        Upper::Icmp { message: &[kind, ..], .. } => {
            (ipv6::ROUTER_SOLICITATION..=ipv6::NEIGHBOUR_ADVERTISEMENT).contains(&kind)
        }
        _ => false,
    };
    is_local || (source ^ prefix.to_bits()) >> 64 == 0 || discovers()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, 0);

    fn packet(source: Ipv6Addr, next: u8, kind: u8) -> Vec<u8> {
        let mut packet = vec![0; 64];
        (packet[0], packet[5], packet[6], packet[7], packet[40]) = (0x60, 24, next, 255, kind);
        packet[8..24].copy_from_slice(&source.octets());
        packet
    }

    fn host(n: u64) -> Ipv6Addr {
        Ipv6Addr::from_bits(PREFIX.to_bits() | u128::from(n))
    }

    #[test]
    fn a_port_brings_new_addresses_at_its_rate_and_known_ones_at_any() {
        let (mut all, mut now) = (Unguarded::default(), Nanos::SECOND.times(10));
        let mut passed = |now, port, from: u64| {
            (from..from + 200).filter(|n| all.admit(now, (port, 0), PREFIX, &packet(host(*n), 6, 0))).count() as u64
        };
        assert_eq!(passed(now, 1, 0), BURST);
        assert_eq!(passed(now, 1, 0), BURST, "the same ones pass again");
        assert_eq!(passed(now, 2, 1000), BURST, "another port has its own burst");
        for second in 1..5 {
            now = now.after(Nanos::SECOND);
            assert_eq!(passed(now, 1, 10_000 * second), RATE, "second {second}");
        }
        assert_eq!(passed(now.after(Nanos::SECOND.times(60)), 1, 500_000), BURST);
    }

    #[test]
    fn what_is_routed_from_elsewhere_makes_no_neighbours_but_discovery_from_anywhere_does() {
        let (mut all, now) = (Unguarded::default(), Nanos::SECOND);
        let far = |n: u64| Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(n));
        for n in 0..1000 {
            assert!(all.admit(now, (1, 0), PREFIX, &packet(far(n), 6, 0)));
            assert!(all.admit(now, (1, 0), PREFIX, &packet(far(n), 58, 128)), "an echo request");
        }
        let asks = (0..1000).filter(|n| all.admit(now, (1, 0), PREFIX, &packet(far(*n), 58, 135))).count() as u64;
        assert_eq!(asks, BURST);
        assert!(all.admit(now, (1, 0), PREFIX, &packet(Ipv6Addr::UNSPECIFIED, 58, 135)));
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 7);
        assert!(!all.admit(now, (1, 0), PREFIX, &packet(link_local, 6, 0)));
    }

    #[test]
    fn an_address_in_use_stays_known() {
        let (mut all, start) = (Unguarded::default(), Nanos::SECOND);
        for second in 0..3 * LIFETIME.0 / Nanos::SECOND.0 {
            let now = start.after(Nanos::SECOND.times(second));
            assert!(all.admit(now, (1, 0), PREFIX, &packet(host(1), 6, 0)));
            assert!(all.is_used(now, (host(1).to_bits(), 0)), "{second}");
        }
    }

    #[test]
    fn an_address_is_in_use_as_long_as_one_port_uses_it() {
        for order in [[1, 2], [2, 1]] {
            let (mut all, mut now) = (Unguarded::default(), Nanos::SECOND);
            let victim = host(1_000_000);
            for port in order {
                assert!(all.admit(now, (port, 0), PREFIX, &packet(victim, 6, 0)));
            }
            // Port 2 lets it go by using very many others, whether it was the first to use it or not.
            for n in 0..3 * MOST as u64 {
                now = now.after(Nanos(Nanos::SECOND.0 / RATE));
                assert!(all.admit(now, (2, 0), PREFIX, &packet(host(n), 6, 0)));
                assert!(all.admit(now, (1, 0), PREFIX, &packet(victim, 6, 0)));
            }
            assert!(all.is_used(now, (victim.to_bits(), 0)), "{order:?}");
            all.leave(2);
            assert!(all.is_used(now, (victim.to_bits(), 0)), "{order:?}");
            all.leave(1);
            assert!(!all.is_used(now, (victim.to_bits(), 0)) && all.used.0.is_empty(), "{order:?}");
        }
    }

    #[test]
    fn memory_is_bounded_and_an_address_is_forgotten_after_an_hour() {
        let (mut all, mut now) = (Unguarded::default(), Nanos::SECOND);
        for n in 0..4 * MOST as u64 {
            now = now.after(Nanos::SECOND);
            assert!(all.admit(now, (1, 0), PREFIX, &packet(host(n), 6, 0)));
            let addresses = all.ports[1].as_ref().unwrap();
            assert!(addresses.young.len() <= MOST && addresses.old.len() <= MOST);
            let both: HashSet<Place> = addresses.young.union(&addresses.old).copied().collect();
            assert_eq!(both, all.used.0.keys().copied().collect(), "the index has what a set has");
        }
        let last = (host(4 * MOST as u64 - 1).to_bits(), 0);
        assert!(all.is_used(now, last) && !all.is_used(now, (host(0).to_bits(), 0)));
        assert!(!all.is_used(now.after(LIFETIME), last));
        all.leave(1);
        assert!(!all.is_used(now, last) && all.used.0.is_empty());
    }
}
