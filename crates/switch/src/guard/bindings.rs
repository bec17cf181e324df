//! Which port has which IPv6 address, learned from use: first come, first served (after RFC 6620).
//!
//! IPv6 hosts give themselves addresses: stable ones that do not show the MAC address (RFC 7217),
//! and ones that change daily (RFC 8981). So a guard cannot know them beforehand. A port whose
//! guard learns ([`Learn`]) may claim addresses of the network's prefix, and link-local ones, that
//! no other port has:
//!
//! | frame | what becomes of it |
//! | --- | --- |
//! | duplicate address detection of a free address | the address is the port's from now on |
//! | the same of an address that the port may not claim | dropped, `nd_inspection` |
//! | any packet from a free address | the same as the first: hosts do not ask again after a restart of the switch |
//! | any packet from an address that another port has | dropped, `source6` |
//! | neighbour advertisement for such an address, or with another MAC address than the frame's | dropped, `nd_inspection` |
//! | any packet from an address that this machine has lost to another one, and advertisements for it | dropped, `source6` and `nd_inspection` |
//! | a claim beyond the port's limit | dropped, `address_limit` |
//!
//! A host that asks for an address gives it up if another one asks for it at the same time (RFC 4862
//! §5.4.3). So a question is a weapon as well as an answer, and both are dropped. So a host that
//! is given another member's address by hand is not told of it.
//!
//! VLANs are links of their own: the same address may be one port's in one VLAN and another's in
//! another. What follows holds in all of them.
//!
//! The network's gateway knows further owners ([`Reservations`]): of fixed addresses of the file, of
//! those that follow from fixed IPv4 addresses or from MAC addresses of the file, and of leases.
//! They are kept for the MAC address of their owner, whether or not its port has a guard.
//!
//! An address that is written into another guard's list is that port's. An interface identifier
//! that shows a MAC address which is locked to another port is not to be claimed either. Both hold
//! from the moment at which the list is set or the MAC address locked: a port that claimed such an
//! address earlier loses it then. An address that was not used for [`LIFETIME`] is free again.

use super::ipv6::{self, Upper};
use super::unguarded::Unguarded;
use super::{Guard, Roles, ipv6::link_local};
use crate::Nanos;
use crate::drop::Reason;
use crate::frame::Mac;
use crate::mac::PortNumber;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::Ipv6Addr;

/// Addresses of one port, unless set otherwise. A host has a link-local, a leased and a stable one,
/// and a temporary one for each of the last seven days.
pub const LIMIT: u8 = 16;
/// How long an address stays a port's without being used.
pub(super) const LIFETIME: Nanos = Nanos::SECOND.times(3600);

/// What a port may claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learn {
    /// The network's prefix, a /64.
    pub prefix: Ipv6Addr,
    /// Most addresses at a time.
    pub limit: u8,
    /// Whether sources outside the prefix are refused.
    pub strict: bool,
}

/// What a network's gateway says of whose IPv6 addresses are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    /// The MAC addresses of the file, in place of those before; no owner said before is one any
    /// longer. `None` where only `owners` change.
    pub macs: Option<Vec<Mac>>,
    /// The MAC address that has an IPv6 address from now on, or that none has it.
    pub owners: Vec<(Ipv6Addr, Option<Mac>)>,
}

/// An address in a VLAN.
pub(super) type Place = (u128, u16);

#[derive(Clone, Copy, Debug)]
struct Own {
    place: Place,
    mac: Mac,
    used: Nanos,
}

/// The addresses of a network's ports.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    /// In order, so that those of one address in all VLANs are found.
    holders: BTreeMap<Place, PortNumber>,
    /// At most the limit for each port.
    own: HashMap<PortNumber, Vec<Own>>,
    /// Addresses of guards' lists.
    listed: HashMap<u128, PortNumber>,
    /// Addresses that another machine has.
    lost: HashSet<u128>,
    /// The gateway's port, and what it has said.
    reserver: Option<PortNumber>,
    reserved: HashMap<u128, Mac>,
    macs: HashSet<Mac>,
    unguarded: Unguarded,
}

/// The MAC address that an interface identifier shows (modified EUI-64), if it does.
pub(crate) fn shown_mac(address: u128) -> Option<Mac> {
    let bytes = address.to_be_bytes();
    (bytes[11..13] == [0xff, 0xfe]).then(|| [bytes[8] ^ 2, bytes[9], bytes[10], bytes[13], bytes[14], bytes[15]])
}

impl Bindings {
    /// Sets which addresses the list of `port`'s guard names. Ports that claimed them lose them.
    pub(crate) fn list(&mut self, port: PortNumber, addresses: impl Iterator<Item = Ipv6Addr>) {
        self.listed.retain(|_, holder| *holder != port);
        for address in addresses.map(Ipv6Addr::to_bits) {
            self.listed.insert(address, port);
            self.free(address);
        }
    }

    /// Takes the addresses that show `mac`, which is locked to `port` from now on, from ports that
    /// claimed them.
    pub(crate) fn lock(&mut self, port: PortNumber, mac: Mac) {
        let shows = |(place, holder): (&Place, &PortNumber)| {
            (*holder != port && shown_mac(place.0) == Some(mac)).then_some(*place)
        };
        let taken: Vec<Place> = self.holders.iter().filter_map(shows).collect();
        taken.into_iter().for_each(|place| self.free_in(place));
    }

    /// Ends the claims to `address`, in every VLAN.
    fn free(&mut self, address: u128) {
        let taken: Vec<Place> = self.places(address).collect();
        taken.into_iter().for_each(|place| self.free_in(place));
    }

    fn free_in(&mut self, place: Place) {
        if let Some(own) = self.holders.remove(&place).and_then(|port| self.own.get_mut(&port)) {
            own.retain(|own| own.place != place);
        }
    }

    /// Where there are claims to `address`.
    fn places(&self, address: u128) -> impl Iterator<Item = Place> {
        self.holders.range((address, 0)..=(address, u16::MAX)).map(|(place, _)| *place)
    }

    /// Sets the addresses that no port may claim, since another machine has them. What was learned
    /// of them is forgotten.
    pub(crate) fn lose(&mut self, addresses: impl Iterator<Item = Ipv6Addr>) {
        let lost: HashSet<u128> = addresses.map(Ipv6Addr::to_bits).collect();
        lost.iter().for_each(|address| self.free(*address));
        self.lost = lost;
    }

    /// Takes what the gateway behind `port` says of owners. Others that claimed their addresses
    /// lose them.
    pub(crate) fn reserve(&mut self, port: PortNumber, said: Reservations) {
        self.reserver = Some(port);
        let is_whole = said.macs.is_some();
        if let Some(macs) = said.macs {
            self.reserved.clear();
            self.macs = macs.into_iter().collect();
        }
        for (address, mac) in said.owners.iter().map(|(address, mac)| (address.to_bits(), *mac)) {
            match mac {
                Some(mac) => drop(self.reserved.insert(address, mac)),
                None => drop(self.reserved.remove(&address)),
            }
        }
        let is_anothers = |own: &Own| self.owner(own.place.0).is_some_and(|owner| owner != own.mac);
        let taken: Vec<Place> = match is_whole {
            true => self.own.values().flatten().filter(|own| is_anothers(own)).map(|own| own.place).collect(),
            false => {
                let said = said.owners.iter().flat_map(|(address, _)| self.places(address.to_bits()));
                said.filter(|place| self.claimed(*place).is_some_and(is_anothers)).collect()
            }
        };
        taken.into_iter().for_each(|place| self.free_in(place));
    }

    /// The claim to an address in a VLAN, if there is one.
    fn claimed(&self, place: Place) -> Option<&Own> {
        self.own.get(self.holders.get(&place)?)?.iter().find(|own| own.place == place)
    }

    /// Who has `address` by what the gateway said.
    fn owner(&self, address: u128) -> Option<Mac> {
        let shown = || shown_mac(address).filter(|mac| self.macs.contains(mac));
        self.reserved.get(&address).copied().or_else(shown)
    }

    /// Forgets `port`.
    pub(crate) fn leave(&mut self, port: PortNumber) {
        if self.reserver == Some(port) {
            self.reserver = None;
            self.reserved.clear();
            self.macs.clear();
        }
        self.listed.retain(|_, holder| *holder != port);
        self.unguarded.leave(port);
        for own in self.own.remove(&port).unwrap_or_default() {
            self.holders.remove(&own.place);
        }
    }

    /// Why `address` cannot be `port`'s, if it cannot; it is from now on otherwise.
    fn claim(
        &mut self,
        now: Nanos,
        (port, vlan): (PortNumber, u16),
        learn: Learn,
        (address, mac): (u128, &Mac),
        locked_to: &dyn Fn(Mac) -> Option<PortNumber>,
    ) -> Result<(), Option<Reason>> {
        if self.lost.contains(&address) {
            return Err(None);
        }
        // Before the claims: what is listed or locked meanwhile was taken from its claimant, and it
        // may not claim it again.
        let other = |holder: Option<PortNumber>| holder.is_some_and(|holder| holder != port);
        if other(self.listed.get(&address).copied()) || other(shown_mac(address).and_then(locked_to)) {
            return Err(None);
        }
        if self.owner(address).is_some_and(|owner| owner != *mac) {
            return Err(None);
        }
        let place = (address, vlan);
        let list = self.own.entry(port).or_default();
        if let Some(own) = list.iter_mut().find(|own| own.place == place) {
            (own.used, own.mac) = (now, *mac);
            return Ok(());
        }
        let is_local = address >> 118 == 0xfe80 >> 6;
        if !is_local && (address ^ learn.prefix.to_bits()) >> 64 != 0 {
            return if learn.strict { Err(None) } else { Ok(()) };
        }
        if let Some(holder) = self.holders.get(&place).copied() {
            // Not this port's, as its own list does not have it.
            let theirs = self.own.get_mut(&holder);
            let stale = theirs.is_none_or(|theirs| {
                let stale = theirs.iter().any(|o| o.place == place && now.since(o.used) >= LIFETIME);
                theirs.retain(|o| !(stale && o.place == place));
                stale
            });
            if !stale {
                return Err(None);
            }
            // Also where this port may not have it.
            self.holders.remove(&place);
        }
        let is_own = self.owner(address) == Some(*mac) || shown_mac(address) == Some(*mac);
        let list = self.own.entry(port).or_default();
        let mut gone = None;
        if list.len() >= usize::from(learn.limit) {
            let oldest = list.iter().enumerate().min_by_key(|(_, own)| own.used);
            gone = oldest.filter(|(_, own)| now.since(own.used) >= LIFETIME).map(|(at, _)| at);
            if gone.is_none() {
                return Err(Some(Reason::AddressLimit));
            }
        }
        if !is_own && self.unguarded.is_used(now, place) {
            return Err(None);
        }
        if let Some(at) = gone {
            self.holders.remove(&list.swap_remove(at).place);
        }
        list.push(Own { place, mac: *mac, used: now });
        self.holders.insert(place, port);
        Ok(())
    }

    /// Why an IPv6 packet (the first bytes of it, or all) may not pass from `port`, whose `guard`
    /// does not know its IPv6 addresses: it announces, or asks for, an address that another port
    /// holds, or it is from one new address too many.
    pub(crate) fn refuse_unguarded(
        &mut self,
        now: Nanos,
        (port, vlan): (PortNumber, u16),
        guard: &Guard,
        prefix: Ipv6Addr,
        packet: &[u8],
    ) -> Option<Reason> {
        if guard.ipv6.is_some() || guard.is_crowded || guard.roles.router || guard.roles.gateway {
            return None;
        }
        let source = packet.get(..40).and_then(|header| ipv6::address(&header[8..]))?;
        // Most packets: TCP or UDP, from where the one before came.
        let is_data = matches!(packet[6], 6 | 17);
        if is_data && self.unguarded.is_last(now, port, (source, vlan)) {
            return None;
        }
        if !is_data && ipv6::claimed(source, packet).is_some_and(|target| self.holders.contains_key(&(target, vlan))) {
            return Some(Reason::NdInspection);
        }
        let may_pass =
            self.holders.contains_key(&(source, vlan)) || self.unguarded.admit(now, (port, vlan), prefix, packet);
        (!may_pass).then_some(Reason::AddressLimit)
    }

    /// Why an IPv6 packet (the first bytes of it, or all) from that Ethernet source may not pass
    /// from `port`, whose guard learns. `locked_to` says to which port a MAC address is locked.
    pub(crate) fn refuse(
        &mut self,
        now: Nanos,
        from: (PortNumber, u16),
        (learn, roles): (Learn, Roles),
        packet: &[u8],
        mac: &Mac,
        locked_to: &dyn Fn(Mac) -> Option<PortNumber>,
    ) -> Option<Reason> {
        let Some(source) = packet.get(..40).and_then(|header| ipv6::address(&header[8..])) else {
            return Some(Reason::Source6);
        };
        let anonymous = source == 0;
        if packet[0] >> 4 != 6 {
            return Some(Reason::Source6);
        }
        let mut owns = |address: u128, reason: Reason| match address == link_local(mac) {
            true => None,
            false => self.claim(now, from, learn, (address, mac), locked_to).err().map(|why| why.unwrap_or(reason)),
        };
        if !anonymous && let Some(reason) = owns(source, Reason::Source6) {
            return Some(reason);
        }
        match ipv6::upper_layer(packet) {
            Upper::Hidden => Some(Reason::NdInspection),
            Upper::Other | Upper::Udp { .. } => anonymous.then_some(Reason::Source6),
            Upper::Icmp { message, whole } => {
                let &kind = message.first()?;
                let options =
                    |from: usize, kind| whole && message.get(from..).is_some_and(|o| ipv6::options_tell(o, kind, mac));
                let target = message.get(8..).and_then(ipv6::address);
                match (kind, target) {
                    (ipv6::ROUTER_ADVERTISEMENT | ipv6::REDIRECT, _) => (!roles.router).then_some(Reason::RogueRouter),
                    (ipv6::ROUTER_SOLICITATION, _) => {
                        (!options(8, ipv6::SOURCE_LINK_LAYER)).then_some(Reason::NdInspection)
                    }
                    (ipv6::NEIGHBOUR_SOLICITATION, Some(target)) => {
                        if !options(24, ipv6::SOURCE_LINK_LAYER) {
                            return Some(Reason::NdInspection);
                        }
                        anonymous.then(|| owns(target, Reason::NdInspection)).flatten()
                    }
                    (ipv6::NEIGHBOUR_ADVERTISEMENT, Some(target)) => {
                        if anonymous || !options(24, ipv6::TARGET_LINK_LAYER) {
                            return Some(Reason::NdInspection);
                        }
                        owns(target, Reason::NdInspection)
                    }
                    (ipv6::NEIGHBOUR_SOLICITATION | ipv6::NEIGHBOUR_ADVERTISEMENT, None) => Some(Reason::NdInspection),
                    (ipv6::MLD_REPORT | ipv6::MLD_DONE | ipv6::MLD2_REPORT, _) => None,
                    _ => anonymous.then_some(Reason::Source6),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: Mac = [2, 0, 0, 0, 0, 7];
    const B: Mac = [2, 0, 0, 0, 0, 8];

    fn ip(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    fn learn() -> Learn {
        Learn { prefix: ip("fd00::"), limit: 4, strict: true }
    }

    fn packet(source: &str, next: u8, payload: &[u8]) -> Vec<u8> {
        let mut p = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next, 255];
        p.extend_from_slice(&ip(source).octets());
        p.extend_from_slice(&ip("ff02::1").octets());
        p.extend_from_slice(payload);
        p
    }

    fn about(kind: u8, source: &str, target: &str, option: &[u8]) -> Vec<u8> {
        packet(source, 58, &[&[kind, 0, 0, 0, 0, 0, 0, 0][..], &ip(target).octets(), option].concat())
    }

    struct Ports(Bindings, Nanos);

    impl Ports {
        fn new() -> Ports {
            Ports(Bindings::default(), Nanos::SECOND)
        }

        fn put(&mut self, port: PortNumber, packet: &[u8]) -> Option<Reason> {
            self.put_in(0, port, packet)
        }

        fn put_in(&mut self, vlan: u16, port: PortNumber, packet: &[u8]) -> Option<Reason> {
            let mac = if port == 1 { A } else { B };
            let locked = |mac| [(A, 1), (B, 2)].into_iter().find(|(m, _)| *m == mac).map(|(_, port)| port);
            self.0.refuse(self.1, (port, vlan), (learn(), Roles::default()), packet, &mac, &locked)
        }
    }

    #[test]
    fn the_first_port_has_the_address_and_others_neither_use_nor_advertise_it() {
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), None);
        assert_eq!(ports.put(1, &data("fd00::5")), None);
        assert_eq!(ports.put(2, &data("fd00::5")), Some(Reason::Source6));
        assert_eq!(ports.put(2, &about(136, "fe80::ff:fe00:8", "fd00::5", &[])), Some(Reason::NdInspection));
        assert_eq!(ports.put(2, &about(135, "::", "fd00::5", &[])), Some(Reason::NdInspection), "1 may be asking too");
        assert_eq!(ports.put(2, &about(135, "::", "fd00::ff:fe00:7", &[])), Some(Reason::NdInspection));
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), None, "1 asks again");
        assert_eq!(
            ports.put(2, &about(135, "fe80::ff:fe00:8", "fd00::5", &[])),
            None,
            "a question for its MAC address"
        );
        assert_eq!(ports.put(2, &data("fd00::5")), Some(Reason::Source6));
        let tells = |mac: Mac| [&[2, 1][..], &mac].concat();
        assert_eq!(ports.put(1, &about(136, "fd00::5", "fd00::5", &tells(A))), None);
        assert_eq!(ports.put(1, &about(136, "fd00::5", "fd00::5", &tells(B))), Some(Reason::NdInspection));
        assert_eq!(ports.put(2, &data("fe80::ff:fe00:7")), Some(Reason::Source6), "the address of A's card");
        assert_eq!(ports.put(2, &data("fd00::ff:fe00:7")), Some(Reason::Source6));
        assert_eq!(ports.put(2, &data("2001:db8::1")), Some(Reason::Source6));
        assert_eq!(ports.put(2, &packet("::", 6, &[0; 20])), Some(Reason::Source6));
        ports.1 = ports.1.after(LIFETIME);
        assert_eq!(ports.put(2, &data("fd00::5")), None, "nobody used it for an hour");
        assert_eq!(ports.put(1, &data("fd00::5")), Some(Reason::Source6));
        ports.0.leave(2);
        assert_eq!(ports.put(1, &data("fd00::5")), None);
    }

    #[test]
    fn an_address_that_was_lost_is_forgotten_and_not_to_be_claimed_until_it_is_given_back() {
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        assert_eq!((ports.put(1, &data("fd00::5")), ports.put(1, &data("fd00::6"))), (None, None));
        ports.0.lose([ip("fd00::5")].into_iter());
        for port in [1, 2] {
            assert_eq!(ports.put(port, &data("fd00::5")), Some(Reason::Source6));
            let advertisement = about(136, "fe80::ff:fe00:7", "fd00::5", &[]);
            assert_eq!(ports.put(1, &advertisement), Some(Reason::NdInspection));
        }
        assert_eq!((ports.0.own[&1].len(), ports.put(1, &data("fd00::6"))), (1, None));
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), Some(Reason::NdInspection));
        ports.0.lose(std::iter::empty());
        assert_eq!((ports.put(2, &data("fd00::5")), ports.put(1, &data("fd00::5"))), (None, Some(Reason::Source6)));
    }

    #[test]
    fn an_address_that_is_listed_for_another_port_or_shows_its_mac_address_is_lost_to_it() {
        const C: Mac = [2, 0, 0, 0, 0, 9];
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        let shown = ["fe80::ff:fe00:9", "fd00::ff:fe00:9"];
        for source in ["fd00::9", "fd00::8", shown[0], shown[1]] {
            assert_eq!(ports.put(1, &data(source)), None, "{source} is free, and no port has the MAC address {C:?}");
        }
        // Another port comes, whose guard has a list and locks its MAC address.
        ports.0.list(3, [ip("fd00::9")].into_iter());
        ports.0.lock(3, C);
        assert_eq!((ports.0.own[&1].len(), ports.0.holders.len()), (1, 1), "the claims are gone at once");
        let locked = |mac| (mac == C).then_some(3);
        for source in ["fd00::9", shown[0], shown[1]] {
            let now = ports.1;
            let mut refuse =
                |packet: &[u8]| ports.0.refuse(now, (1, 0), (learn(), Roles::default()), packet, &A, &locked);
            assert_eq!(refuse(&data(source)), Some(Reason::Source6), "{source}");
            let advertisement = about(136, "fe80::ff:fe00:7", source, &[]);
            assert_eq!(refuse(&advertisement), Some(Reason::NdInspection), "{source}");
            assert_eq!(refuse(&about(135, "::", source, &[])), Some(Reason::NdInspection), "{source}");
            assert_eq!(refuse(&data(source)), Some(Reason::Source6), "asking for {source} gains nothing");
        }
        assert_eq!(ports.put(1, &data("fd00::8")), None, "what nobody else has stays");
        // A port that keeps its own MAC address keeps what shows it.
        assert_eq!(ports.put(2, &data("fd00::ff:fe00:8")), None);
        ports.0.lock(2, B);
        assert_eq!(ports.0.holders.get(&(ip("fd00::ff:fe00:8").to_bits(), 0)), Some(&2));
        // With the list, its own earlier claim is of no use: the address is free once the list no
        // longer has it.
        ports.0.list(1, [ip("fd00::8")].into_iter());
        ports.0.list(1, std::iter::empty());
        assert_eq!(ports.put(2, &data("fd00::8")), None);
    }

    #[test]
    fn what_the_gateway_says_of_an_owner_holds_before_it_has_used_the_address() {
        const C: Mac = [2, 0, 0, 0, 0, 9];
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        let whole = |owners: &[(&str, Mac)]| Reservations {
            macs: Some(vec![B, C]),
            owners: owners.iter().map(|(address, mac)| (ip(address), Some(*mac))).collect(),
        };
        let shown = "fd00::ff:fe00:9";
        for source in ["fd00::9", shown, "fd00::8"] {
            assert_eq!(ports.put(1, &data(source)), None, "{source} is nobody's");
        }
        ports.0.reserve(7, whole(&[("fd00::9", C), ("fd00::8", A), ("fd00::7", B)]));
        assert_eq!((ports.0.own[&1].len(), ports.0.holders.len()), (1, 1), "claims to others' addresses end");
        for source in ["fd00::9", shown, "fd00::7"] {
            assert_eq!(ports.put(1, &data(source)), Some(Reason::Source6), "{source}");
            assert_eq!(ports.put(1, &about(135, "::", source, &[])), Some(Reason::NdInspection), "{source}");
            assert_eq!(ports.put(1, &about(136, "fe80::ff:fe00:7", source, &[])), Some(Reason::NdInspection));
        }
        assert_eq!((ports.put(1, &data("fd00::8")), ports.put(2, &data("fd00::7"))), (None, None), "its own");
        // A lease comes, for an address that another port has claimed, and goes.
        assert_eq!(ports.put(1, &data("fd00::1:5")), None);
        ports.0.reserve(7, Reservations { macs: None, owners: vec![(ip("fd00::1:5"), Some(B))] });
        assert_eq!(ports.put(1, &data("fd00::1:5")), Some(Reason::Source6));
        assert_eq!(ports.put(2, &data("fd00::1:5")), None);
        ports.0.reserve(7, Reservations { macs: None, owners: vec![(ip("fd00::1:5"), None)] });
        assert_eq!(ports.put(1, &data("fd00::1:5")), Some(Reason::Source6), "2 still uses it");
        ports.0.leave(2);
        assert_eq!(ports.put(1, &data("fd00::1:5")), None);
        // With the gateway goes what it said.
        ports.0.leave(7);
        assert_eq!((ports.put(1, &data("fd00::9")), ports.put(1, &data(shown))), (None, None));
    }

    #[test]
    fn what_a_port_without_a_guard_uses_is_not_claimed_by_one_with_a_guard() {
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        let admit = |ports: &mut Ports, guard: &Guard, source: &str| {
            let (now, prefix) = (ports.1, ip("fd00::"));
            ports.0.refuse_unguarded(now, (5, 0), guard, prefix, &data(source)).is_none()
        };
        assert_eq!(ports.put(1, &data("fd00::1")), None);
        for source in ["fd00::1", "fd00::5", "fd00::ff:fe00:8"] {
            assert!(admit(&mut ports, &Guard::default(), source));
        }
        assert_eq!(ports.put(2, &data("fd00::5")), Some(Reason::Source6));
        assert_eq!(ports.put(2, &about(135, "::", "fd00::5", &[])), Some(Reason::NdInspection));
        assert_eq!(ports.put(1, &data("fd00::1")), None, "it had that one before");
        assert_eq!(ports.put(2, &data("fd00::ff:fe00:8")), None, "its MAC address shows that this one is its own");
        // It neither announces an address of theirs nor keeps them from it.
        let told = |ports: &mut Ports, packet: &[u8]| {
            let (now, prefix) = (ports.1, ip("fd00::"));
            ports.0.refuse_unguarded(now, (5, 0), &Guard::default(), prefix, packet)
        };
        for (kind, source) in [(136, "fd00::5"), (136, "fe80::5"), (135, "::")] {
            assert_eq!(told(&mut ports, &about(kind, source, "fd00::1", &[])), Some(Reason::NdInspection), "{source}");
            assert_eq!(told(&mut ports, &about(kind, source, "fd00::5", &[])), None, "{source}");
        }
        assert_eq!(told(&mut ports, &about(135, "fd00::5", "fd00::1", &[])), None, "who has it?");
        ports.0.leave(5);
        assert_eq!(ports.put(2, &data("fd00::5")), None);
        // Those that may have any number of neighbours behind them, or are held to a list.
        let router = Roles { router: true, ..Roles::default() };
        let listed = Guard::default().with_ipv6(&[]);
        for guard in [Guard::default().crowded(), Guard::default().with_roles(router), listed] {
            assert!((0..1000).all(|n| admit(&mut ports, &guard, &format!("fd00::a:{n}"))));
        }
        assert!(!(0..1000).all(|n| admit(&mut ports, &Guard::default(), &format!("fd00::a:{n}"))));
    }

    #[test]
    fn an_address_that_ended_is_free_though_a_port_at_its_limit_asked_for_it() {
        let mut ports = Ports::new();
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), None);
        ports.1 = ports.1.after(LIFETIME);
        for n in 11..=14 {
            assert_eq!(ports.put(2, &about(135, "::", &format!("fd00::{n}"), &[])), None);
        }
        assert_eq!(ports.put(2, &about(135, "::", "fd00::5", &[])), Some(Reason::AddressLimit));
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), None, "nobody has it");
    }

    #[test]
    fn an_address_is_one_ports_in_each_vlan_and_an_owners_in_all() {
        let mut ports = Ports::new();
        let data = |source: &str| packet(source, 6, &[0; 20]);
        for source in ["fe80::1", "fd00::5"] {
            for (vlan, holder, other) in [(10, 1, 2), (20, 2, 1)] {
                assert_eq!(ports.put_in(vlan, holder, &about(135, "::", source, &[])), None, "{source} in {vlan}");
                assert_eq!(ports.put_in(vlan, other, &data(source)), Some(Reason::Source6), "{source} in {vlan}");
            }
        }
        // What a port without a guard uses, and may not announce, is in a VLAN too.
        let (now, prefix) = (ports.1, ip("fd00::"));
        let unguarded = |ports: &mut Ports, vlan, packet: &[u8]| {
            ports.0.refuse_unguarded(now, (5, vlan), &Guard::default(), prefix, packet)
        };
        for vlan in [10, 30] {
            assert_eq!(unguarded(&mut ports, vlan, &data("fd00::6")), None);
        }
        let announces = about(136, "fd00::6", "fd00::5", &[]);
        assert_eq!(unguarded(&mut ports, 20, &announces), Some(Reason::NdInspection));
        assert_eq!(unguarded(&mut ports, 30, &announces), None);
        assert_eq!(ports.put_in(30, 1, &data("fd00::6")), Some(Reason::Source6));
        assert_eq!(ports.put_in(40, 1, &data("fd00::6")), None);
        // The file's lists, and what the gateway says, hold for all VLANs.
        ports.0.list(3, [ip("fd00::5")].into_iter());
        ports.0.reserve(7, Reservations { macs: None, owners: vec![(ip("fe80::1"), Some(B))] });
        for vlan in [10, 20, 30] {
            for port in [1, 2] {
                assert_eq!(ports.put_in(vlan, port, &data("fd00::5")), Some(Reason::Source6), "{port} in {vlan}");
            }
            assert_eq!(ports.put_in(vlan, 1, &data("fe80::1")), Some(Reason::Source6), "{vlan}");
            assert_eq!(ports.put_in(vlan, 2, &data("fe80::1")), None, "{vlan}");
        }
        ports.0.leave(2);
        assert!(ports.0.holders.values().all(|holder| *holder == 1));
    }

    #[test]
    fn a_port_has_its_limit_and_lists_go_first() {
        let mut ports = Ports::new();
        for n in 1..=4 {
            assert_eq!(ports.put(1, &about(135, "::", &format!("fd00::{n}"), &[])), None);
        }
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), Some(Reason::AddressLimit));
        assert_eq!(ports.put(1, &packet("fd00::5", 6, &[0; 20])), Some(Reason::AddressLimit));
        assert_eq!(ports.put(1, &packet("fd00::4", 6, &[0; 20])), None);
        ports.0.list(3, [ip("fd00::9")].into_iter());
        assert_eq!(ports.put(2, &packet("fd00::9", 6, &[0; 20])), Some(Reason::Source6));
        ports.1 = ports.1.after(LIFETIME);
        assert_eq!(ports.put(1, &about(135, "::", "fd00::5", &[])), None, "the oldest makes room");
        assert_eq!(ports.0.own[&1].len(), 4);
    }

    proptest! {
        #[test]
        fn whatever_comes_the_tables_agree(
            frames in proptest::collection::vec((1u16..4, 0u8..8, 0usize..100, any::<[u8; 48]>()), 0..60),
        ) {
            let mut ports = Ports::new();
            for (port, n, cut, bytes) in frames {
                let source = if n & 4 != 0 { "::".to_string() } else { format!("fd00::{n}") };
                let whole = match n & 3 {
                    0 => about(135, &source, &format!("fd00::{}", bytes[0] % 9), &bytes[..8]),
                    1 => about(136, &source, &format!("fd00::{}", bytes[0] % 9), &[]),
                    2 => packet(&source, bytes[0], &bytes),
                    _ => bytes.to_vec(),
                };
                ports.put(port, &whole[..whole.len().min(cut)]);
                ports.1 = ports.1.after(Nanos::SECOND.times(u64::from(bytes[1]) * 8));
                let held: usize = ports.0.own.values().map(Vec::len).sum();
                prop_assert_eq!(held, ports.0.holders.len());
                prop_assert!(ports.0.own.values().all(|own| own.len() <= 4));
                prop_assert!(ports.0.own.iter().all(|(p, l)| l.iter().all(|o| ports.0.holders[&o.place] == *p)));
            }
        }
    }
}
