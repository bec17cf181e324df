//! Addresses that members gave themselves (SLAAC), as heard from their neighbour discovery: what
//! AAAA and PTR are answered from besides leases and the file.
//!
//! A host that takes an address asks all others whether they have it (RFC 4862 §5.4), and the
//! gateway hears that. Whether the host may claim it was checked before, by the guard of its port.
//! An address belongs to the MAC address that it was first heard from. It is given up when the host
//! does not answer for it any more: that is looked into when somebody asks for the name or the
//! address, so that no member is woken for nothing. It is also given up when the file gives it to
//! another member, and not heard for one that the file does not give it to.
//!
//! Limits: [`PER_SOURCE`] addresses of one port of the switch, where a new one takes the place of
//! the one that was not heard from for longest; [`MAX_ADDRESSES`] in all.

use crate::Nanos;
use crate::frame::Mac;
use crate::limit::ChargedTo;
use std::collections::HashMap;
use std::net::Ipv6Addr;

/// Most addresses of one source.
pub(super) const PER_SOURCE: usize = 16;
/// Most addresses of all.
pub(super) const MAX_ADDRESSES: usize = 16_384;
/// An address that was heard from within this time is taken to be in use.
pub(super) const FRESH_SPAN: Nanos = Nanos::SECOND.times(300);
/// Within this time after a claim, the address's earlier holder may object (RFC 4862 §5.4.5).
const CLAIM_SPAN: Nanos = Nanos::SECOND.times(2);
/// How often, and after which time each, an address is asked whether it is there.
const PROBES: u8 = 3;
const PROBE_SPAN: Nanos = Nanos::SECOND;

#[derive(Clone, Copy, Debug)]
struct Entry {
    mac: Mac,
    source: ChargedTo,
    claimed: Nanos,
    heard: Nanos,
    probes: u8,
    next_probe: Option<Nanos>,
}

#[derive(Debug, Default)]
pub(super) struct Learned {
    by_address: HashMap<Ipv6Addr, Entry>,
    by_source: HashMap<ChargedTo, Vec<Ipv6Addr>>,
    by_mac: HashMap<Mac, Vec<Ipv6Addr>>,
    /// Addresses that are being asked; few.
    probed: Vec<Ipv6Addr>,
    /// How often all were looked at.
    #[cfg(test)]
    pub(super) revoked: usize,
}

impl Learned {
    pub(super) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// `mac` uses, or is about to use, `address`; `defends` if it says that it has had it before.
    pub(super) fn hear(&mut self, address: Ipv6Addr, mac: Mac, source: ChargedTo, defends: bool, now: Nanos) {
        if let Some(entry) = self.by_address.get_mut(&address) {
            if entry.mac == mac && entry.source == source {
                (entry.heard, entry.probes, entry.next_probe) = (now, 0, None);
                return;
            }
            if !(defends && now.since(entry.claimed) <= CLAIM_SPAN) {
                // The next claim gets it if the holder is gone.
                self.check(address, now);
                return;
            }
            self.forget(address);
        }
        let own = self.by_source.get(&source).map_or(&[][..], |list| list);
        if own.len() >= PER_SOURCE {
            let oldest = own.iter().min_by_key(|a| self.by_address.get(*a).map(|e| e.heard)).copied();
            oldest.into_iter().for_each(|address| self.forget(address));
        }
        if self.by_address.len() >= MAX_ADDRESSES {
            return;
        }
        let entry = Entry { mac, source, claimed: now, heard: now, probes: 0, next_probe: None };
        self.by_address.insert(address, entry);
        self.by_source.entry(source).or_default().push(address);
        self.by_mac.entry(mac).or_default().push(address);
    }

    /// Forgets the addresses that, with their MAC address, `is_others` names.
    pub(super) fn revoke(&mut self, is_others: impl Fn(Ipv6Addr, Mac) -> bool) {
        #[cfg(test)]
        {
            self.revoked += 1;
        }
        let gone = self.by_address.iter().filter(|(address, entry)| is_others(**address, entry.mac));
        let gone: Vec<Ipv6Addr> = gone.map(|(address, _)| *address).collect();
        gone.into_iter().for_each(|address| self.forget(address));
    }

    fn forget(&mut self, address: Ipv6Addr) {
        let Some(entry) = self.by_address.remove(&address) else { return };
        if let Some(list) = self.by_source.get_mut(&entry.source) {
            list.retain(|a| *a != address);
            if list.is_empty() {
                self.by_source.remove(&entry.source);
            }
        }
        if let Some(list) = self.by_mac.get_mut(&entry.mac) {
            list.retain(|a| *a != address);
            if list.is_empty() {
                self.by_mac.remove(&entry.mac);
            }
        }
        self.probed.retain(|a| *a != address);
    }

    /// Has `address` asked whether it is there, unless it was heard from lately.
    pub(super) fn check(&mut self, address: Ipv6Addr, now: Nanos) {
        let Some(entry) = self.by_address.get_mut(&address) else { return };
        if now.since(entry.heard) >= FRESH_SPAN && entry.next_probe.is_none() {
            entry.next_probe = Some(now);
            self.probed.push(address);
        }
    }

    /// All addresses with their MAC addresses. None is asked whether it is there: a listing is no
    /// reason to wake a member.
    pub(super) fn list(&self) -> Vec<(Ipv6Addr, Mac)> {
        self.by_address.iter().map(|(address, entry)| (*address, entry.mac)).collect()
    }

    /// Addresses of `mac`, oldest first.
    pub(super) fn of_mac(&self, mac: Mac) -> &[Ipv6Addr] {
        self.by_mac.get(&mac).map_or(&[], |list| list)
    }

    pub(super) fn mac_of(&self, address: Ipv6Addr) -> Option<Mac> {
        self.by_address.get(&address).map(|entry| entry.mac)
    }

    /// Addresses to ask now, each with its MAC address; what did not answer is forgotten.
    pub(super) fn due(&mut self, now: Nanos) -> Vec<(Ipv6Addr, Mac)> {
        let mut ask = Vec::new();
        let mut gone = Vec::new();
        let Learned { by_address, probed, .. } = self;
        probed.retain(|address| {
            let Some(entry) = by_address.get_mut(address) else { return false };
            match entry.next_probe {
                None => return false,
                Some(at) if at > now => {}
                Some(_) if entry.probes >= PROBES => gone.push(*address),
                Some(_) => {
                    entry.probes += 1;
                    entry.next_probe = Some(now.after(PROBE_SPAN));
                    ask.push((*address, entry.mac));
                }
            }
            true
        });
        gone.into_iter().for_each(|address| self.forget(address));
        ask
    }

    /// When [`Learned::due`] is to be called.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.probed.iter().filter_map(|a| self.by_address.get(a)?.next_probe).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::Token;

    fn ip(n: u16) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n)
    }

    const A: Mac = [2, 0, 0, 0, 0, 1];
    const B: Mac = [2, 0, 0, 0, 0, 2];

    #[test]
    fn the_first_holder_stays_until_it_does_not_answer() {
        let (mut learned, port) = (Learned::default(), |n| ChargedTo::Port(Token(n)));
        let mut now = Nanos::SECOND;
        learned.hear(ip(1), A, port(1), false, now);
        learned.hear(ip(1), B, port(2), false, now);
        assert_eq!(learned.mac_of(ip(1)), Some(A));
        assert_eq!((learned.deadline(), learned.due(now)), (None, vec![]), "it was heard just now");
        now = now.after(FRESH_SPAN);
        learned.hear(ip(1), B, port(2), true, now);
        for _ in 0..PROBES {
            assert_eq!(learned.due(now), [(ip(1), A)]);
            now = now.after(PROBE_SPAN);
        }
        assert_eq!((learned.due(now), learned.len()), (vec![], 0));
        learned.hear(ip(1), B, port(2), false, now);
        assert_eq!(learned.of_mac(B), [ip(1)]);
        // One that answers stays.
        now = now.after(FRESH_SPAN);
        learned.check(ip(1), now);
        assert_eq!(learned.due(now).len(), 1);
        learned.hear(ip(1), B, port(2), true, now);
        assert_eq!((learned.due(now.after(PROBE_SPAN)), learned.deadline(), learned.len()), (vec![], None, 1));
    }

    #[test]
    fn a_claim_is_given_up_where_the_holder_objects() {
        let mut learned = Learned::default();
        let now = Nanos::SECOND;
        learned.hear(ip(1), B, ChargedTo::Mac(B), false, now);
        learned.hear(ip(1), A, ChargedTo::Mac(A), true, now.after(Nanos::MILLI));
        assert_eq!(learned.mac_of(ip(1)), Some(A));
        assert!(learned.of_mac(B).is_empty());
    }

    #[test]
    fn one_source_has_its_share_and_the_oldest_goes() {
        let mut learned = Learned::default();
        for n in 0..1000u16 {
            learned.hear(ip(n), A, ChargedTo::Port(Token(1)), false, Nanos(u64::from(n)));
        }
        learned.hear(ip(5000), B, ChargedTo::Port(Token(2)), false, Nanos::SECOND);
        assert_eq!((learned.len(), learned.of_mac(A).len()), (PER_SOURCE + 1, PER_SOURCE));
        assert_eq!((learned.mac_of(ip(999)), learned.mac_of(ip(0))), (Some(A), None));
    }
}
