//! What the gateway does for IPv6: router advertisements, neighbour discovery of its own addresses,
//! echo, DHCPv6, and DNS at its address.
//!
//! # Addresses
//! The gateway has ::1 of the network's prefix and the link-local address of its MAC address.
//! DHCPv6 leases addresses whose last 32 bits are a number: for a member with a fixed IPv4 address
//! they are that address, for others one of [`DYNAMIC`]. So one table of leases ([`super::lease`])
//! serves both families, with the same quota, names and store. A client is known by its MAC
//! address, as over IPv4. Its DUID is echoed and otherwise ignored: a client can invent any number
//! of them, and a machine's firmware uses another one than its system.
//!
//! # Invariants
//! * Every answer goes to the MAC address that the question came from, as a frame to one station.
//! * Neighbour discovery counts only with a hop limit of 255, a right checksum and whole options.

mod advertise;
mod dhcp;
mod learned;
#[cfg(test)]
mod tests;
mod wire;

pub(super) use wire::is_for_gateway;

use super::Gateway;
use super::config::{Ipv6Config, MAX_DOMAIN_BYTES};
use super::dns;
use super::forward::{Client, Delivery};
use super::lease::{Claim, Lease, LeaseChange, LeaseRecord, Leases, Refusal};
use super::names::{self, Members};
use super::rate::Rates;
use super::tcp;
use crate::Nanos;
use crate::detail::Details;
use crate::drop::Reason;
use crate::frame::{Checksum, Mac};
use crate::guard::{Reservations, link_local, options_tell};
use crate::limit::ChargedTo;
use advertise::{Advert, INTERVAL};
use dhcp::{Answer, Grant, Kind, Message, Status};
use learned::Learned;
use smoltcp::wire::{Icmpv6DstUnreachable, TcpPacket};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use wire::{Inbound, ON_LINK, Route};

/// The last 32 bits of the addresses that are leased to members without a fixed IPv4 address.
pub(super) const DYNAMIC: (u32, u32) = (0x1_0000, 0x1_ffff);
/// Most addresses of one name in an answer.
const MAX_ANSWERS: usize = 8;
/// One solicitation of a source is answered in that time, and so many at once. A Linux guest sends
/// three, 4 s apart.
const SOLICITATION_SPAN: Nanos = Nanos::SECOND;
const SOLICITATION_BURST: u64 = 8;

const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const ECHO_REQUEST: u8 = 128;
const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;
// Flags of a neighbour advertisement (RFC 4861 §4.4).
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const TO_ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

const _: () = assert!(MAX_DOMAIN_BYTES < 240, "a domain fits an option of an advertisement");

/// The gateway's state for IPv6.
pub(super) struct Six {
    config: Ipv6Config,
    address: Ipv6Addr,
    link_local: Ipv6Addr,
    /// When the next advertisement goes to all.
    next_advert: Nanos,
    solicitations: Rates,
    learned: Learned,
    pub(super) leases: Option<Leases>,
}

impl Six {
    pub(super) fn new(config: Ipv6Config, mac: Mac, leases: Option<(u32, u64)>, now: Nanos) -> Six {
        let range = (Ipv4Addr::from_bits(DYNAMIC.0), Ipv4Addr::from_bits(DYNAMIC.1));
        Six {
            address: config.address(),
            link_local: link_local(&mac),
            next_advert: now,
            solicitations: Rates::new(SOLICITATION_SPAN, SOLICITATION_BURST),
            learned: Learned::default(),
            leases: leases.map(|(quota, key)| Leases::new(range, quota, key)),
            config,
        }
    }

    /// The address that a number of the lease table stands for.
    pub(super) fn leased(&self, number: Ipv4Addr) -> Ipv6Addr {
        self.config.host(number.to_bits().into())
    }

    /// The number that stands for an address in the lease table.
    pub(super) fn number(&self, address: Ipv6Addr) -> Option<Ipv4Addr> {
        let number = u32::try_from(address.to_bits() as u64).ok()?;
        self.config.holds(address).then(|| Ipv4Addr::from_bits(number))
    }

    /// Whether `address` is the gateway's.
    pub(super) fn is_own(&self, address: Ipv6Addr) -> bool {
        address == self.address || address == self.link_local
    }

    pub(super) fn lease_at(&self, address: Ipv6Addr) -> Option<&Lease> {
        self.leases.as_ref()?.at(self.number(address)?)
    }

    /// What became of the leases that changed since the last call.
    pub(super) fn take_changes(&mut self, unix_secs: impl Fn(Nanos) -> u64) -> Vec<LeaseChange> {
        let changes = self.leases.as_mut().map(|leases| leases.take_changes(unix_secs)).unwrap_or_default();
        let change = |change| match change {
            LeaseChange::Bound(record) => LeaseChange::Bound(self.record(record)),
            LeaseChange::Freed(number) => LeaseChange::Freed(self.told(number)),
        };
        changes.into_iter().map(change).collect()
    }

    /// The bound leases as they are kept.
    pub(super) fn store(&self, unix_secs: impl Fn(Nanos) -> u64) -> Vec<LeaseRecord> {
        let store = self.leases.as_ref().map(|leases| leases.store(unix_secs)).unwrap_or_default();
        store.leases.into_iter().map(|record| self.record(record)).collect()
    }

    fn record(&self, record: LeaseRecord) -> LeaseRecord {
        LeaseRecord { address: self.told(record.address), ..record }
    }

    fn told(&self, number: IpAddr) -> IpAddr {
        match number {
            IpAddr::V4(number) => self.leased(number).into(),
            six @ IpAddr::V6(_) => six,
        }
    }

    /// Has an address asked whether it is there, if it was learned and not heard from lately.
    pub(super) fn check(&mut self, address: Ipv6Addr, now: Nanos) {
        self.learned.check(address, now);
    }

    /// Gives up the learned addresses that are others'.
    pub(super) fn revoke_others(&mut self, members: &Members) {
        let mut learned = std::mem::take(&mut self.learned);
        learned.revoke(|address, mac| self.is_others(members, address, mac));
        self.learned = learned;
    }

    /// The MAC address that has `address`: by the file, by a lease, or since it shows it.
    fn owner(&self, members: &Members, address: Ipv6Addr) -> Option<Mac> {
        let leased =
            || self.lease_at(address).filter(|lease| lease.state == super::LeaseState::Bound).map(|lease| lease.mac);
        let fixed = members.fixed6(address, self.number(address));
        fixed.or_else(leased).or_else(|| members.shown6(address))
    }

    fn is_others(&self, members: &Members, address: Ipv6Addr, mac: Mac) -> bool {
        self.owner(members, address).is_some_and(|owner| owner != mac)
    }

    /// All owners, except by what addresses show.
    pub(super) fn reservations(&self, members: &Members) -> Reservations {
        let leases = self.leases.as_ref().map(|leases| leases.store(|_| 0)).unwrap_or_default();
        let leased = leases.leases.into_iter().map(|record| self.record(record).address);
        let leased = leased.filter_map(|address| match address {
            IpAddr::V6(address) => Some(address),
            IpAddr::V4(_) => None,
        });
        let derived = members.addresses().map(|address| self.leased(address));
        let all = derived.chain(members.addresses6()).chain(leased);
        let owners = all.filter_map(|address| Some((address, Some(self.owner(members, address)?)))).collect();
        Reservations { macs: Some(members.macs().collect()), owners }
    }

    /// The owners of addresses whose leases have changed.
    pub(super) fn reservations_of(&self, members: &Members, addresses: Vec<Ipv6Addr>) -> Reservations {
        let owners = addresses.into_iter().map(|address| (address, self.owner(members, address))).collect();
        Reservations { macs: None, owners }
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        let leases = self.leases.as_ref().and_then(Leases::next_expiry);
        [Some(self.next_advert), leases, self.learned.deadline()].into_iter().flatten().min()
    }

    pub(super) fn details(&self) -> Details {
        let mut all: Details = vec![
            ("address6", format!("{}/64", self.address).into()),
            ("learned_addresses6", self.learned.len().into()),
        ];
        if let Some(leases) = &self.leases {
            let (used, size) = leases.usage();
            all.extend([("dynamic_leases6", used.into()), ("dynamic_leases6_max", size.into())]);
        }
        all
    }
}

impl Gateway {
    fn advert(&self, six: &Six, withdrawn: bool) -> Vec<u8> {
        let advert = Advert {
            router: six.config.router.unwrap_or(self.config.mac),
            router_secs: six.config.router_secs,
            prefix: six.config.prefix,
            mtu: self.config.mtu.max(1280),
            dns: six.address,
            domain: &self.domain,
            dhcp: six.leases.is_some(),
            withdrawn,
        };
        advert.message()
    }

    /// The source of advertisements: the link-local address of the router that they speak for.
    fn advertiser(&self, six: &Six) -> Ipv6Addr {
        six.config.router.map_or(six.link_local, |mac| link_local(&mac))
    }

    fn advertise(&mut self, withdrawn: bool) {
        let Some(six) = &self.six else { return };
        let route = Route {
            source_mac: self.config.mac,
            destination_mac: wire::group_mac(TO_ALL),
            source: self.advertiser(six),
            destination: TO_ALL,
        };
        let frame = wire::icmp_bytes(&route, ON_LINK, &self.advert(six, withdrawn));
        self.counters.router_advertisements.add(1);
        // A full queue was counted; another one follows.
        let _ = self.send(frame);
    }

    /// Tells members that the router, the prefix and the name server are no longer there. Nothing
    /// is advertised after that.
    pub fn withdraw(&mut self) {
        self.advertise(true);
        self.counters.router_withdrawals.add(u64::from(self.six.is_some()));
        self.six = None;
    }

    /// Sets the router that advertisements speak for, and for how long members may use it; 0: there
    /// is no way out.
    pub fn set_router6(&mut self, router: Option<Mac>, secs: u16) {
        let Some(six) = &mut self.six else { return };
        let secs = secs.min(9000);
        if (six.config.router, six.config.router_secs) == (router, secs) {
            return;
        }
        if six.config.router != router && six.config.router_secs > 0 {
            six.config.router_secs = 0;
            self.advertise(false);
        }
        if let Some(six) = &mut self.six {
            (six.config.router, six.config.router_secs) = (router, secs);
            if let Some(ipv6) = &mut self.config.ipv6 {
                (ipv6.router, ipv6.router_secs) = (router, secs);
            }
        }
        self.advertise(false);
    }

    pub(super) fn poll6(&mut self, now: Nanos) {
        let Some(six) = &mut self.six else { return };
        if let Some(leases) = &mut six.leases {
            leases.expire(now);
        }
        let asked = six.learned.due(now);
        let (due, own) = (six.next_advert <= now, six.link_local);
        if due {
            six.next_advert = now.after(INTERVAL);
        }
        for (address, mac) in asked {
            let route = Route { source_mac: self.config.mac, destination_mac: mac, source: own, destination: address };
            let message = self.neighbour(NEIGHBOUR_SOLICITATION, 0, address, SOURCE_LINK_LAYER);
            let _ = self.send(wire::icmp_bytes(&route, ON_LINK, &message));
        }
        if due {
            self.advertise(false);
        }
    }

    /// A neighbour solicitation or advertisement with our MAC address.
    fn neighbour(&self, kind: u8, flags: u8, target: Ipv6Addr, option: u8) -> Vec<u8> {
        [&[kind, 0, 0, 0, flags, 0, 0, 0][..], &target.octets(), &[option, 1], &self.config.mac].concat()
    }

    pub(super) fn input6(
        &mut self,
        now: Nanos,
        frame: &[u8],
        checksum: Checksum,
        ingress: Option<crate::wait::Token>,
    ) -> Result<(), Reason> {
        let Some(inbound) = wire::read(frame, self.config.mac)? else {
            self.counters.ignored_frames.add(1);
            return Ok(());
        };
        let source = ingress.map_or(ChargedTo::Mac(inbound.route.source_mac), ChargedTo::Port);
        let Some(six) = &self.six else { return Ok(()) };
        let to = inbound.route.destination;
        let to_us = inbound.route.destination_mac == self.config.mac && (to == six.address || to == six.link_local);
        match inbound.protocol {
            58 if inbound.hop_limit == ON_LINK && wire::icmp_kind(&inbound, checksum)? != ECHO_REQUEST => {
                self.discovery(now, &inbound, source)
            }
            17 if to == dhcp::SERVERS => {
                let (_, port, data) = wire::read_udp(&inbound, checksum)?;
                if port == dhcp::SERVER_PORT { self.dhcp6(now, &inbound.route, data, source) } else { Ok(()) }
            }
            _ if to.is_multicast() => {
                self.counters.ignored_frames.add(1);
                Ok(())
            }
            _ => {
                self.check_source6(inbound.route.source)?;
                if let Some(six) = &mut self.six
                    && six.config.holds(inbound.route.source)
                    && !six.is_others(&self.members, inbound.route.source, inbound.route.source_mac)
                {
                    six.learned.hear(inbound.route.source, inbound.route.source_mac, source, false, now);
                }
                if to_us {
                    self.take_ours6(now, &inbound, checksum, source)
                } else {
                    self.counters.not_routed_packets.add(1);
                    if inbound.protocol == 58 {
                        return Ok(());
                    }
                    self.error6(now, &inbound, Icmpv6DstUnreachable::NoRoute)
                }
            }
        }
    }

    /// A question's source must be a host of the network other than the gateway, or a link-local
    /// address.
    fn check_source6(&self, source: Ipv6Addr) -> Result<(), Reason> {
        let Some(six) = &self.six else { return Err(Reason::GatewayRefused) };
        let own = source == six.address || source == six.link_local;
        let good = six.config.holds(source) || source.is_unicast_link_local();
        if good && !own { Ok(()) } else { Err(Reason::GatewayRefused) }
    }

    fn error6(&mut self, now: Nanos, inbound: &Inbound<'_>, reason: Icmpv6DstUnreachable) -> Result<(), Reason> {
        let Some(own) = self.six.as_ref().map(|six| six.address) else { return Ok(()) };
        if !self.may_complain(now) {
            return Ok(());
        }
        self.counters.icmp_errors.add(1);
        self.send(wire::unreachable(inbound, own, self.config.mac, reason))
    }

    fn take_ours6(
        &mut self,
        now: Nanos,
        inbound: &Inbound<'_>,
        checksum: Checksum,
        source: ChargedTo,
    ) -> Result<(), Reason> {
        let route = &inbound.route;
        match inbound.protocol {
            58 => {
                wire::icmp_kind(inbound, checksum)?;
                if let Some(reply) = wire::echo_reply(inbound) {
                    self.send(reply)?;
                    self.counters.echo_replies.add(1);
                }
                Ok(())
            }
            17 => {
                let (from, to, data) = wire::read_udp(inbound, checksum)?;
                if to != dns::PORT || from == 0 {
                    return self.error6(now, inbound, Icmpv6DstUnreachable::PortUnreachable);
                }
                let (mac, address, own) = (route.source_mac, route.source, route.destination);
                let client = Client::Udp6 { mac, address, port: from, own };
                match self.dns(now, client, source, data) {
                    Some(answer) => self.deliver(now, Delivery { client, bytes: answer }),
                    None => Ok(()),
                }
            }
            6 => {
                let segment = TcpPacket::new_checked(inbound.payload).map_err(|_| Reason::GatewayRefused)?;
                let right = segment.verify_checksum(&route.source.into(), &route.destination.into());
                // The stack reads the packet again, and expects its segment right behind the
                // header.
                let plain = inbound.packet.len() == inbound.payload.len() + 40;
                if super::packet::must_verify(checksum) && !right || !plain {
                    return Err(Reason::GatewayRefused);
                }
                let is_served = self.six.as_ref().is_some_and(|six| route.destination == six.address);
                let taken = match is_served {
                    true => self.streams.input(now, inbound.packet, route.source_mac, source, dns::PORT),
                    false => tcp::Taken::Stray,
                };
                match taken {
                    tcp::Taken::Yes => {}
                    tcp::Taken::Stray => {
                        self.counters.tcp_strays.add(1);
                        if self.may_complain(now)
                            && let Some(reset) = wire::tcp_reset(route, &segment)
                        {
                            self.send(reset)?;
                        }
                    }
                    tcp::Taken::Full => self.counters.tcp_refused.add(1),
                }
                self.serve_streams(now);
                Ok(())
            }
            _ => self.error6(now, inbound, Icmpv6DstUnreachable::PortUnreachable),
        }
    }

    // Neighbour discovery

    fn discovery(&mut self, now: Nanos, inbound: &Inbound<'_>, source: ChargedTo) -> Result<(), Reason> {
        let (route, message) = (&inbound.route, inbound.payload);
        if message[1] != 0 {
            return Err(Reason::GatewayRefused);
        }
        let anonymous = route.source.is_unspecified();
        match message[0] {
            ROUTER_SOLICITATION => {
                let whole = message.len() >= 8 && options_tell(&message[8..], SOURCE_LINK_LAYER, &route.source_mac);
                if !whole || !anonymous && self.check_source6(route.source).is_err() {
                    return Err(Reason::GatewayRefused);
                }
                self.counters.router_solicitations.add(1);
                let Some(six) = &mut self.six else { return Ok(()) };
                if !six.solicitations.take(source, now) {
                    self.counters.router_solicitations_throttled.add(1);
                    return Ok(());
                }
                let Some(six) = &self.six else { return Ok(()) };
                let to = Route {
                    source_mac: self.config.mac,
                    destination_mac: route.source_mac,
                    source: self.advertiser(six),
                    destination: if anonymous { TO_ALL } else { route.source },
                };
                let frame = wire::icmp_bytes(&to, ON_LINK, &self.advert(six, false));
                self.counters.router_advertisements.add(1);
                self.send(frame)
            }
            kind @ (NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT) => {
                let option = if kind == NEIGHBOUR_SOLICITATION { SOURCE_LINK_LAYER } else { TARGET_LINK_LAYER };
                let target = message.get(8..24).and_then(|b| <[u8; 16]>::try_from(b).ok()).map(Ipv6Addr::from);
                let target = target.filter(|_| options_tell(&message[24..], option, &route.source_mac));
                let Some(target) = target.filter(|t| !t.is_multicast()) else { return Err(Reason::GatewayRefused) };
                self.heard(now, kind, route, target, source)
            }
            _ => {
                self.counters.ignored_frames.add(1);
                Ok(())
            }
        }
    }

    /// A neighbour solicitation or advertisement for `target` that is well formed.
    fn heard(
        &mut self,
        now: Nanos,
        kind: u8,
        route: &Route,
        target: Ipv6Addr,
        source: ChargedTo,
    ) -> Result<(), Reason> {
        let Some(six) = &mut self.six else { return Ok(()) };
        let ours = target == six.address || target == six.link_local;
        let (mac, anonymous) = (route.source_mac, route.source.is_unspecified());
        // An announcement, an answer to us, or somebody who wants to know whether it may have the
        // address.
        let claims = kind == NEIGHBOUR_ADVERTISEMENT || anonymous;
        if claims && !ours && six.config.holds(target) && !six.is_others(&self.members, target, mac) {
            six.learned.hear(target, mac, source, kind == NEIGHBOUR_ADVERTISEMENT, now);
        }
        if claims && ours {
            self.counters.address_conflicts.add(1);
        }
        if kind == NEIGHBOUR_ADVERTISEMENT || !ours {
            return Ok(());
        }
        if !anonymous {
            self.check_source6(route.source)?;
            if let Some(six) = &mut self.six
                && six.config.holds(route.source)
                && !six.is_others(&self.members, route.source, mac)
            {
                six.learned.hear(route.source, mac, source, false, now);
            }
        }
        // To whom asks whether it may have our address, it goes as one to all (RFC 4861 §7.2.4).
        let routes = self.six.as_ref().is_some_and(|s| s.config.router.is_none() && s.config.router_secs > 0);
        let flags = OVERRIDE | if anonymous { 0 } else { SOLICITED } | if routes { ROUTER } else { 0 };
        let to = Route {
            source_mac: self.config.mac,
            destination_mac: mac,
            source: target,
            destination: if anonymous { TO_ALL } else { route.source },
        };
        let message = self.neighbour(NEIGHBOUR_ADVERTISEMENT, flags, target, TARGET_LINK_LAYER);
        self.counters.neighbour_advertisements.add(1);
        self.send(wire::icmp_bytes(&to, ON_LINK, &message))
    }

    // DHCPv6

    fn dhcp6(&mut self, now: Nanos, route: &Route, data: &[u8], source: ChargedTo) -> Result<(), Reason> {
        if self.six.as_ref().is_none_or(|six| six.leases.is_none()) {
            self.counters.ignored_frames.add(1);
            return Ok(());
        }
        // Before anything else, so that a flood costs one look-up per message.
        if !self.dhcp_rates.take(source, now) {
            self.counters.dhcp_throttled.add(1);
            return Err(Reason::DhcpRate);
        }
        let own = dhcp::duid(self.config.mac);
        let message = dhcp::read(data).filter(|_| route.source.is_unicast_link_local());
        let Some(message) = message else {
            self.counters.dhcp6_refused_messages.add(1);
            return Err(Reason::GatewayRefused);
        };
        if message.server.as_ref().is_some_and(|server| *server != own) {
            // It is another server's.
            return Ok(());
        }
        let Some(mut leases) = self.six.as_mut().and_then(|six| six.leases.take()) else { return Ok(()) };
        let answer = self.dhcp6_message(now, &mut leases, &message, route.source_mac, source);
        let Some(six) = &mut self.six else { return Ok(()) };
        six.leases = Some(leases);
        let Some(answer) = answer else { return Ok(()) };
        let to = Route {
            source_mac: self.config.mac,
            destination_mac: route.source_mac,
            source: six.link_local,
            destination: route.source,
        };
        self.send(wire::udp(&to, dhcp::SERVER_PORT, dhcp::CLIENT_PORT, &answer))
    }

    /// The number of the address that the file gives to this client: that of its IPv6 address, or
    /// of its IPv4 one.
    fn fixed6(&self, six: &Six, leases: &Leases, mac: Mac, name: Option<&str>) -> Option<Ipv4Addr> {
        let named = || self.members.named(name?).filter(|member| member.mac.is_none());
        let member = self.members.of_mac(mac).or_else(named);
        let name = member.map(|member| member.name.as_str()).or_else(|| self.members.name_of_mac6(mac))?;
        let of_file = self.members.static6(name).iter().find_map(|address| six.number(*address));
        let number = of_file.or(member.and_then(|member| member.address))?;
        leases.at(number).is_none_or(|lease| lease.mac == mac).then_some(number)
    }

    fn dhcp6_message(
        &mut self,
        now: Nanos,
        leases: &mut Leases,
        message: &Message,
        mac: Mac,
        source: ChargedTo,
    ) -> Option<Vec<u8>> {
        let six = self.six.as_ref()?;
        let counters = self.counters.clone();
        let asked = message.name.as_deref();
        let fixed = self.fixed6(six, leases, mac, asked);
        let port = match source {
            ChargedTo::Port(port) => Some(port),
            ChargedTo::Mac(_) => None,
        };
        let claim = Claim { mac, port, fixed };
        let held =
            leases.of_mac(mac).filter(|(_, lease)| lease.state == super::LeaseState::Bound).map(|(held, _)| held);
        let reserved = |number: Ipv4Addr| {
            let address = six.leased(number);
            self.members.of_address(number).is_some()
                || self.members.has_static6(address)
                || self.elsewhere.refuses(address.into(), mac, held == Some(number))
                || six.learned.mac_of(address).is_some_and(|holder| holder != mac)
        };
        let (name, conflict) = self.name_for(mac, asked, fixed);
        let free = |name: &String| {
            leases.name_is_free(name, mac) && self.leases.as_ref().is_none_or(|leases| leases.name_is_free(name, mac))
        };
        let (name, conflict) = match name {
            Some(name) if free(&name) => (Some(name), conflict),
            Some(_) => (None, true),
            None => (None, conflict),
        };
        let secs = self.lease_secs();
        let expires = now.after(Nanos::SECOND.times(secs.into()));
        let begin = |kind| {
            let mut answer = Answer::new(message, kind, self.config.mac);
            message.prefixes.iter().for_each(|id| answer.no_prefix(*id));
            answer
        };
        let finish = |mut answer: Answer| {
            answer.facts(six.address, &self.domain);
            let url = self.boot.find(mac).and_then(|config| message.boot.url6(config));
            if let Some(url) = url.filter(|_| message.boot.asks) {
                counters.boot_answers.add(1);
                answer.boot(&message.boot, url);
            }
            Some(answer.into_bytes())
        };
        match message.kind {
            Kind::Solicit | Kind::Request => {
                let binds = message.kind == Kind::Request || message.rapid;
                let counter = if binds { &counters.dhcp6_requests } else { &counters.dhcp6_solicits };
                counter.add(1);
                let mut answer = begin(if binds { Kind::Reply } else { Kind::Advertise });
                let mut first = true;
                for association in &message.associations {
                    let wants = association.addresses.iter().find_map(|address| six.number(*address));
                    // One that has moved here gets the address that it had.
                    let wants = wants.or_else(|| self.elsewhere.ipv6_of(mac).find_map(|address| six.number(address)));
                    // A client has one address, whatever it numbers its associations.
                    let got = if first { leases.offer(&claim, wants, &reserved, now) } else { Err(Refusal::NotFree) };
                    let got = got.and_then(|number| {
                        if binds {
                            leases.bind(&claim, number, name.clone(), &reserved, now, expires)?;
                        }
                        Ok(number)
                    });
                    match got {
                        Ok(number) => {
                            first = false;
                            answer.association(association.id, &[Grant { address: six.leased(number), secs }], None);
                        }
                        Err(refusal) => {
                            match refusal {
                                Refusal::Exhausted => counters.dhcp_exhausted.add(1),
                                Refusal::Quota => counters.dhcp_over_quota.add(1),
                                Refusal::NotFree => {}
                            }
                            let why = "this client gets no address, or has one already";
                            answer.association(association.id, &[], Some((Status::NoAddress, why)));
                        }
                    }
                }
                if binds && !first {
                    counters.dhcp6_replies.add(1);
                    if conflict {
                        counters.dhcp_name_conflicts.add(1);
                    }
                }
                finish(answer)
            }
            Kind::Renew | Kind::Rebind => {
                counters.dhcp6_requests.add(1);
                let mut answer = begin(Kind::Reply);
                let mut bound = false;
                for association in &message.associations {
                    let mut grants = Vec::new();
                    for address in &association.addresses {
                        // A client that the file has moved meanwhile loses the address of before.
                        let number = six.number(*address).filter(|n| fixed.is_none_or(|fixed| fixed == *n));
                        let kept = !bound
                            && number.is_some_and(|number| {
                                leases.bind(&claim, number, name.clone(), &reserved, now, expires).is_ok()
                            });
                        bound |= kept;
                        grants.push(Grant { address: *address, secs: if kept { secs } else { 0 } });
                    }
                    if !bound
                        && let Ok(number) = leases.offer(&claim, None, &reserved, now)
                        && leases.bind(&claim, number, name.clone(), &reserved, now, expires).is_ok()
                    {
                        bound = true;
                        grants.push(Grant { address: six.leased(number), secs });
                    }
                    let none = grants.iter().all(|g| g.secs == 0);
                    let status = none.then_some((Status::NoBinding, "no address of this association is known"));
                    answer.association(association.id, &grants, status);
                }
                counters.dhcp6_replies.add(u64::from(bound));
                finish(answer)
            }
            Kind::Confirm => {
                let mut addresses = message.associations.iter().flat_map(|a| &a.addresses).peekable();
                addresses.peek()?;
                let mut answer = Answer::new(message, Kind::Reply, self.config.mac);
                match addresses.all(|address| six.config.holds(*address)) {
                    true => answer.status(Status::Success, "all addresses are of this link"),
                    false => answer.status(Status::NotOnLink, "an address is not of this link"),
                }
                Some(answer.into_bytes())
            }
            Kind::Release | Kind::Decline => {
                let mut answer = Answer::new(message, Kind::Reply, self.config.mac);
                for number in message.associations.iter().flat_map(|a| &a.addresses).filter_map(|a| six.number(*a)) {
                    let (done, counter) = match message.kind {
                        Kind::Release => (leases.release(mac, number), &counters.dhcp_releases),
                        _ => (leases.decline(mac, number, now), &counters.dhcp_declines),
                    };
                    counter.add(u64::from(done));
                }
                answer.status(Status::Success, "done");
                Some(answer.into_bytes())
            }
            Kind::Information => {
                counters.dhcp6_informations.add(1);
                finish(begin(Kind::Reply))
            }
            Kind::Advertise | Kind::Reply => None,
        }
    }

    /// Sends an answer of DNS from `own`.
    pub(super) fn answer6(
        &mut self,
        (mac, address, own): (Mac, Ipv6Addr, Ipv6Addr),
        port: u16,
        bytes: &[u8],
    ) -> Result<(), Reason> {
        let to = Route { source_mac: self.config.mac, destination_mac: mac, source: own, destination: address };
        self.send(wire::udp(&to, dns::PORT, port, bytes))
    }

    // Names

    /// The IPv6 addresses of the member or client of that name: of the file, leased, and heard of.
    pub(super) fn resolve6(&mut self, now: Nanos, name: &str) -> Vec<Ipv6Addr> {
        let Some(six) = &mut self.six else { return vec![] };
        if name == self.config.name && self.members.named(name).is_none() {
            return vec![six.address];
        }
        let member = self.members.named(name);
        let mut all = self.members.static6(name).to_vec();
        let four = || self.leases.as_ref().and_then(|leases| Some(leases.at(leases.named(name)?)?.mac));
        let leased = || six.leases.as_ref().and_then(|leases| Some(leases.at(leases.named(name)?)?.mac));
        let mac = match member {
            Some(member) => member.mac.or_else(|| {
                // A member without a MAC address of the file is the client that leases its address
                // by its name.
                let lease = self.leases.as_ref()?.at(member.address?)?;
                (lease.name.as_deref() == Some(name)).then_some(lease.mac)
            }),
            None => four().or_else(leased),
        };
        let Some(mac) = mac.or_else(|| self.members.mac6(name)) else { return all };
        if let Some((number, lease)) = six.leases.as_ref().and_then(|leases| leases.of_mac(mac))
            && lease.state == super::LeaseState::Bound
        {
            all.push(six.leased(number));
        }
        all.extend_from_slice(six.learned.of_mac(mac));
        let mut seen = Vec::with_capacity(MAX_ANSWERS);
        all.retain(|address| {
            let new = !seen.contains(address) && seen.len() < MAX_ANSWERS;
            if new {
                seen.push(*address);
            }
            new
        });
        all.iter().for_each(|address| six.learned.check(*address, now));
        all
    }

    /// Whether somebody without an IPv4 address goes by `name`.
    pub(super) fn knows6(&self, name: &str) -> bool {
        let leases = self.six.as_ref().and_then(|six| six.leases.as_ref());
        let listed = self.six.is_some() && self.members.lists6(name);
        listed || leases.is_some_and(|leases| leases.named(name).is_some())
    }

    /// The IPv6 addresses that members gave themselves (SLAAC), each with the MAC address that it
    /// was first heard from, in no order. What the file gives, or DHCPv6 leases, is in it too where
    /// a member has announced it.
    pub fn learned6(&self) -> Vec<(Ipv6Addr, Mac)> {
        self.six.as_ref().map(|six| six.learned.list()).unwrap_or_default()
    }

    /// Whether `address` is of the network.
    pub(super) fn holds6(&self, address: Ipv6Addr) -> bool {
        self.six.as_ref().is_some_and(|six| six.config.holds(address))
    }

    pub(super) fn name_of6(&self, address: Ipv6Addr) -> Option<&str> {
        let six = self.six.as_ref()?;
        if address == six.address {
            return Some(&self.config.name);
        }
        if let Some(name) = self.members.name_of6(address) {
            return Some(name);
        }
        let lease = six.leases.as_ref().and_then(|leases| leases.at(six.number(address)?));
        let bound = lease.filter(|lease| lease.state == super::LeaseState::Bound);
        let mac = bound.map(|lease| lease.mac).or_else(|| six.learned.mac_of(address))?;
        if let Some(member) = self.members.of_mac(mac) {
            return Some(&member.name);
        }
        let four = self.leases.as_ref().and_then(|leases| leases.of_mac(mac)?.1.name.as_deref());
        bound.and_then(|lease| lease.name.as_deref()).or(four).or_else(|| self.members.name_of_mac6(mac))
    }

    /// Puts a stored lease back; the caller has checked its time.
    pub(super) fn restore6(&mut self, mac: Mac, address: Ipv6Addr, name: Option<String>, expires: Nanos) {
        let now = self.start.now;
        let Some(six) = &mut self.six else { return };
        let Some(number) = six.number(address).filter(|n| n.to_bits() > 1) else { return };
        let Some(leases) = &mut six.leases else { return };
        if leases.of_mac(mac).is_some() {
            return;
        }
        let claim = Claim { mac, port: None, fixed: Some(number) };
        let name = name.as_deref().and_then(names::label).filter(|name| !names::is_reserved(name));
        let _ = leases.bind(&claim, number, name, &|_| false, now, expires);
        leases.take_changes(|_| 0);
    }
}

/// Addresses of the gateway's TCP stack.
pub(super) fn stack_addresses(config: &super::GatewayConfig) -> Vec<(IpAddr, u8)> {
    let six = config.ipv6.as_ref().map(|ipv6| (IpAddr::from(ipv6.address()), 64));
    [Some((IpAddr::from(config.address), config.prefix)), six].into_iter().flatten().collect()
}
