//! The gateway: the inner port of a network that answers for its one address. ARP, ICMP echo, a
//! DHCP server, and a DNS server for the names of the network's members.
//!
//! It is not a router: it forwards no packet. A setting says which router clients are told. With a
//! user uplink that is the NAT's port, with a kernel uplink the host's tap. For a network with an
//! IPv6 prefix it advertises that, and serves DHCPv6 and DNS over IPv6 as well (`six`).
//!
//! # Parts
//! [`Gateway`] is the pure core. Frames and instants go in. Out come frames, queries for the host's
//! name servers, and changes of leases that must be kept. [`GatewayPort`] puts it behind the
//! switch's port trait. [`GatewayHandle`] is the host's end, for any thread: members, leases,
//! queries, answers.
//!
//! ```text
//! guest -> switch -> GatewayPort::transmit -> Gateway::input -+-> answer -> queue -> GatewayPort::receive -> switch
//!                                                             +-> UpstreamQuery -> GatewayHandle -> host's resolver
//!                                                             +-> LeaseChange -> GatewayHandle -> host's journal
//! ```
//!
//! # Invariants
//! * An answer goes to the MAC address that the question came from, and a question's source must be
//!   of the subnet. So nothing is reflected or amplified to a third party, and there is no
//!   neighbour cache.
//! * A MAC address holds at most one lease. The client's hardware address must be the frame's
//!   source address.
//! * What the configuration says (members, the gateway's and the router's address) wins over what
//!   clients say, and what this machine has wins over what is said of others (`elsewhere`).
//! * No input from a guest causes a panic or unbounded memory. Every table has a limit, and a share
//!   per source.
//!
//! # Limits
//! | what | limit |
//! | --- | --- |
//! | answers waiting to be sent | 1024 frames, then `gateway_full` |
//! | dynamic leases | the range, at most 65,536; half of it per source port unless set otherwise |
//! | DHCP messages | 100 a second and 300 at once of one source port, then `dhcp_rate` |
//! | an offer | is valid for 10 s; a declined address rests 600 s |
//! | members | 16,384 |
//! | router solicitations | one a second and 8 at once of one source port |
//! | learned IPv6 addresses | 16 of one source port, 16,384 in all |
//! | forwarded queries | 256 outstanding, 64 of one source and no more than are left, 4.5 s each, then SERVFAIL |
//! | DNS over UDP | 512 bytes, or what EDNS names up to the MTU; then truncated |
//! | DNS over TCP | 16 connections, 4 of one source and no more than are left, 10 s of silence, queries of 4096 bytes |
//! | ICMP errors and TCP resets | 50 a second |
//!
//! # Failure
//! A message that cannot be read is dropped as `gateway_refused` or answered with an error, and
//! counted. If the host does not take the queries, they run out and their clients get SERVFAIL.
//! Times of stored leases are wall-clock seconds. If the host's clock is set while the fabric is
//! down, the ends of leases move by the same amount.

mod boot;
mod config;
mod counters;
mod dhcp;
mod dns;
mod elsewhere;
mod forward;
mod lease;
mod names;
mod packet;
mod port;
mod rate;
mod six;
mod tcp;
#[cfg(test)]
mod tests;

pub use boot::{ARCHITECTURES, BootConfig, BootTable, MAX_BOOT_BYTES};
pub use config::{ConfigError, DhcpConfig, GatewayConfig, Ipv6Config, MAX_DOMAIN_BYTES, MIN_LEASE_SECS};
pub use counters::GatewayCounters;
pub use elsewhere::{Elsewhere, Remote, is_host_name};
pub use forward::UpstreamQuery;
pub use lease::{LeaseChange, LeaseRecord, LeaseStore, MAX_POOL};
pub use names::{MAX_MEMBERS, Member, Name6, is_reserved};
pub use port::{GatewayHandle, GatewayPort, Wake};

use crate::Nanos;
use crate::detail::Details;
use crate::drop::Reason;
use crate::frame::{Checksum, Mac};
use crate::guard::Reservations;
use crate::limit::ChargedTo;
use crate::wait::Token;
use forward::{Client, Delivery, Forwarder, NotForwarded};
use lease::{Claim, LeaseState, Leases, Refusal};
use names::Members;
use packet::{Inbound, Route};
use rate::Rates;
use smoltcp::wire::{DhcpMessageType, Icmpv4DstUnreachable, IpProtocol, TcpPacket};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Answers that may wait to be sent.
pub const QUEUE_FRAMES: usize = 1024;
/// ICMP errors and TCP resets per second.
const ERRORS_PER_SECOND: u32 = 50;
/// Queries of one connection that are answered in one go.
const STREAM_ROUNDS: usize = 8;
/// The router's name in DNS, where no member has it.
const ROUTER_NAME: &str = "router";
/// IPv6 leases of one port, unless set otherwise.
const SIX_QUOTA: u32 = 4096;

/// The clock and the randomness that a gateway starts with.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The worker's clock now.
    pub now: Nanos,
    /// Seconds since 1970 at the same moment.
    pub unix_secs: u64,
    /// Bytes that no guest can guess.
    pub entropy: [u8; 16],
}

/// Numbers that cannot be guessed: a keyed hash (SipHash) of a counter.
#[derive(Debug)]
struct Entropy {
    key: [u8; 16],
    counter: u64,
}

impl Entropy {
    fn next(&mut self) -> u64 {
        self.counter += 1;
        let mut hasher = DefaultHasher::new();
        (self.key, self.counter, self.key).hash(&mut hasher);
        hasher.finish()
    }
}

/// The pure core of a gateway.
pub struct Gateway {
    config: GatewayConfig,
    domain: Vec<String>,
    dns_servers: Vec<Ipv4Addr>,
    members: Members,
    leases: Option<Leases>,
    dhcp_rates: Rates,
    forwarder: Forwarder,
    streams: tcp::Server,
    /// What it does for IPv6, if anything.
    six: Option<six::Six>,
    /// What clients boot.
    boot: BootTable,
    /// What is known of other machines.
    elsewhere: Arc<Elsewhere>,
    /// Whether all owners of IPv6 addresses are to be told, and those whose leases have changed.
    reserves_anew: bool,
    reserves: Vec<Ipv6Addr>,
    /// Whether learned addresses may have become others' by what the file says.
    revokes: bool,
    entropy: Entropy,
    start: Start,
    counters: Arc<GatewayCounters>,
    queue: VecDeque<Vec<u8>>,
    queries: Vec<UpstreamQuery>,
    /// Errors left in the second that began at the instant.
    errors_left: (Nanos, u32),
}

impl Gateway {
    /// A gateway with the leases of an earlier one. Stored leases that ran out or no longer fit are
    /// left out.
    ///
    /// # Errors
    /// What is wrong with `config`.
    pub fn new(mut config: GatewayConfig, stored: &LeaseStore, start: Start) -> Result<Gateway, ConfigError> {
        config.check()?;
        config.name.make_ascii_lowercase();
        let domain = config.domain_labels()?;
        config.domain = domain.join(".");
        let mut entropy = Entropy { key: start.entropy, counter: 0 };
        let leases = config.dhcp.as_ref().map(|dhcp| {
            let (first, last) = dhcp.range;
            let size = last.to_bits() - first.to_bits() + 1;
            Leases::new(dhcp.range, dhcp.leases_per_port.unwrap_or((size / 2).max(1)), network_key(&config))
        });
        let dns_servers = if config.dns.is_empty() { vec![config.address] } else { config.dns.clone() };
        let streams =
            tcp::Server::new(config.mac, &six::stack_addresses(&config), config.mtu, entropy.next(), start.now);
        let key = network_key(&config);
        let quota = config.dhcp.as_ref().map(|dhcp| (dhcp.leases_per_port.unwrap_or(SIX_QUOTA), key));
        let six = config.ipv6.clone().map(|ipv6| six::Six::new(ipv6, config.mac, quota, start.now));
        let mut gateway = Gateway {
            domain,
            dns_servers,
            members: Members::default(),
            leases,
            dhcp_rates: Rates::default(),
            forwarder: Forwarder::default(),
            streams,
            six,
            boot: BootTable::default(),
            elsewhere: Arc::default(),
            reserves_anew: true,
            reserves: Vec::new(),
            revokes: false,
            entropy,
            start,
            counters: Arc::default(),
            queue: VecDeque::new(),
            queries: Vec::new(),
            errors_left: (start.now, ERRORS_PER_SECOND),
            config,
        };
        gateway.restore(stored);
        Ok(gateway)
    }

    fn restore(&mut self, stored: &LeaseStore) {
        let Start { now, unix_secs, .. } = self.start;
        let Some(mut leases) = self.leases.take() else { return };
        for record in &stored.leases {
            let IpAddr::V4(address) = record.address else { continue };
            let left = record.expires_unix_secs.saturating_sub(unix_secs);
            // An end further away than a lease lasts is a clock that was set, not a lease.
            let span = Nanos::SECOND.times(left.min(self.lease_secs().into()));
            let fits = self.config.has_host(address) && !packet::is_group(record.mac);
            if left == 0 || !fits || leases.of_mac(record.mac).is_some() {
                continue;
            }
            // Members are not known yet; an address that is none of the range can only have been
            // one of theirs.
            let own = [Some(self.config.address), self.config.router];
            let claim = Claim { mac: record.mac, port: None, fixed: Some(address) };
            if own.contains(&Some(address)) {
                continue;
            }
            let name = record.name.as_deref().and_then(names::label).filter(|name| !names::is_reserved(name));
            // Refused where another record has the address; the first one remains.
            let _ = leases.bind(&claim, address, name, &|_| false, now, now.after(span));
        }
        // What was read is kept already; what no longer fits goes with the next snapshot.
        leases.take_changes(|_| 0);
        self.leases = Some(leases);
        for record in &stored.leases {
            let IpAddr::V6(address) = record.address else { continue };
            let left = record.expires_unix_secs.saturating_sub(unix_secs);
            if left > 0 && !packet::is_group(record.mac) {
                let span = Nanos::SECOND.times(left.min(self.lease_secs().into()));
                self.restore6(record.mac, address, record.name.clone(), now.after(span));
            }
        }
    }

    /// The settings that it was created with.
    pub fn config(&self) -> &GatewayConfig {
        &self.config
    }

    /// Shared with the shell, which reads them for status and metrics.
    pub fn counters(&self) -> &Arc<GatewayCounters> {
        &self.counters
    }

    /// Adds a member, or replaces the one of its name. A lease of somebody else for the member's
    /// address ends, and a client that went by its name loses the name.
    ///
    /// # Errors
    /// A name that is none, an address outside the network, or a MAC address or address that
    /// another member has.
    pub fn set_member(&mut self, member: Member) -> Result<(), ConfigError> {
        check_member(&self.config, &member)?;
        let (mac, address) = (member.mac, member.address);
        let name = member.name.to_ascii_lowercase();
        self.members.set(member)?;
        (self.reserves_anew, self.revokes) = (true, true);
        if let Some(leases) = &mut self.leases {
            let holder = leases.named(&name);
            let is_own = holder.is_some_and(|a| {
                Some(a) == address || mac.is_some_and(|m| leases.of_mac(m).is_some_and(|(b, _)| b == a))
            });
            if holder.is_some() && !is_own {
                leases.strip_name(&name);
            }
            if let (Some(address), Some(_)) = (address, mac) {
                leases.revoke(address, mac);
            }
            leases.reservations_changed();
        }
        if let Some(leases) = self.six.as_mut().and_then(|six| six.leases.as_mut()) {
            if leases.named(&name).is_some_and(|a| mac.is_none_or(|m| leases.of_mac(m).is_none_or(|(b, _)| b != a))) {
                leases.strip_name(&name);
            }
            if let (Some(address), Some(_)) = (address, mac) {
                leases.revoke(address, mac);
            }
            leases.reservations_changed();
        }
        Ok(())
    }

    /// Sets all names of the file under which IPv6 addresses are found.
    pub fn set_names6(&mut self, names: &[Name6]) {
        self.members.set_names6(names);
        (self.reserves_anew, self.revokes) = (true, true);
        if let Some(leases) = self.six.as_mut().and_then(|six| six.leases.as_mut()) {
            leases.reservations_changed();
        }
    }

    /// Sets what members boot from the network.
    pub fn set_boot(&mut self, table: BootTable) {
        self.boot = table;
    }

    /// Ends the names of learned addresses that have become other members'. Once for all changes of
    /// members since the last call, since it looks at every learned address.
    fn revoke_learned(&mut self) {
        if std::mem::take(&mut self.revokes)
            && let Some(six) = &mut self.six
        {
            six.revoke_others(&self.members);
        }
    }

    /// Removes the member of that name; whether there was one. Its lease, if any, runs on until it
    /// ends.
    pub fn remove_member(&mut self, name: &str) -> bool {
        if let Some(leases) = &mut self.leases {
            leases.reservations_changed();
        }
        self.reserves_anew = true;
        self.members.remove(name).is_some()
    }

    /// Whether names of elsewhere are handed out to be asked for.
    pub fn set_forward(&mut self, forward: bool) {
        self.config.forward = forward;
    }

    /// Handles a frame that reached the gateway's port.
    ///
    /// # Errors
    /// Why the frame is lost; it is counted by the caller.
    pub fn input(
        &mut self,
        now: Nanos,
        frame: &[u8],
        checksum: Checksum,
        ingress: Option<Token>,
    ) -> Result<(), Reason> {
        self.revoke_learned();
        if self.six.is_some() && frame.get(12..14) == Some(&[0x86, 0xdd]) {
            return self.input6(now, frame, checksum, ingress);
        }
        match packet::read(frame, self.config.mac)? {
            Inbound::Other => self.counters.ignored_frames.add(1),
            Inbound::Arp { asker_mac, asker, target, is_request } => {
                if asker == self.config.address {
                    self.counters.address_conflicts.add(1);
                }
                if !is_request || target != self.config.address {
                    self.counters.ignored_frames.add(1);
                    return Ok(());
                }
                self.send(packet::arp_reply(self.config.mac, self.config.address, asker_mac, asker))?;
                self.counters.arp_replies.add(1);
            }
            Inbound::Ipv4 { route, protocol, packet, payload } => {
                let source = ingress.map_or(ChargedTo::Mac(route.source_mac), ChargedTo::Port);
                return self.ipv4(now, &route, protocol, packet, payload, checksum, source);
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // the parts of one packet, from one caller
    fn ipv4(
        &mut self,
        now: Nanos,
        route: &Route,
        protocol: IpProtocol,
        packet: &[u8],
        payload: &[u8],
        checksum: Checksum,
        source: ChargedTo,
    ) -> Result<(), Reason> {
        let to_all = route.destination.is_broadcast() || route.destination == self.config.broadcast();
        let to_us = route.destination == self.config.address && route.destination_mac == self.config.mac;
        if protocol == IpProtocol::Udp && (to_all || to_us) {
            let (from, to, data) = packet::read_udp(payload, route, checksum)?;
            if to == dhcp::SERVER_PORT && self.leases.is_some() {
                return self.dhcp(now, route, data, source);
            }
            if to_all {
                self.counters.ignored_frames.add(1);
                return Ok(());
            }
            self.check_source(route)?;
            if to == dns::PORT && from != 0 {
                let client = Client::Udp { mac: route.source_mac, address: route.source, port: from };
                if let Some(answer) = self.dns(now, client, source, data) {
                    return self.deliver(now, Delivery { client, bytes: answer });
                }
                return Ok(());
            }
            return self.icmp_error(now, route, packet, Icmpv4DstUnreachable::PortUnreachable);
        }
        if route.destination_mac != self.config.mac || to_all {
            self.counters.ignored_frames.add(1);
            return Ok(());
        }
        self.check_source(route)?;
        if !to_us {
            self.counters.not_routed_packets.add(1);
            // No error about a group's address, nor about an error (RFC 1122 §3.2.2).
            if route.destination.is_multicast() || protocol == IpProtocol::Icmp {
                return Ok(());
            }
            return self.icmp_error(now, route, packet, Icmpv4DstUnreachable::NetUnreachable);
        }
        match protocol {
            IpProtocol::Icmp => {
                if let Some(reply) = packet::echo_reply(route, payload, checksum)? {
                    self.send(reply)?;
                    self.counters.echo_replies.add(1);
                }
                Ok(())
            }
            IpProtocol::Tcp => self.tcp(now, route, packet, payload, checksum, source),
            _ => self.icmp_error(now, route, packet, Icmpv4DstUnreachable::ProtoUnreachable),
        }
    }

    /// A question's source must be a host of the network other than the gateway.
    fn check_source(&self, route: &Route) -> Result<(), Reason> {
        let good = self.config.has_host(route.source) && route.source != self.config.address;
        if good { Ok(()) } else { Err(Reason::GatewayRefused) }
    }

    /// Whether an error or a reset may be sent within the rate.
    fn may_complain(&mut self, now: Nanos) -> bool {
        if now.since(self.errors_left.0) >= Nanos::SECOND {
            self.errors_left = (now, ERRORS_PER_SECOND);
        }
        let may = self.errors_left.1 > 0;
        self.errors_left.1 -= u32::from(may);
        may
    }

    fn icmp_error(
        &mut self,
        now: Nanos,
        route: &Route,
        packet: &[u8],
        reason: Icmpv4DstUnreachable,
    ) -> Result<(), Reason> {
        if !self.may_complain(now) {
            return Ok(());
        }
        self.counters.icmp_errors.add(1);
        self.send(packet::unreachable(route, self.config.address, packet, reason))
    }

    fn send(&mut self, frame: Vec<u8>) -> Result<(), Reason> {
        if self.queue.len() >= QUEUE_FRAMES {
            self.counters.lost_answers.add(1);
            return Err(Reason::GatewayFull);
        }
        self.queue.push_back(frame);
        Ok(())
    }

    // DHCP

    fn lease_secs(&self) -> u32 {
        self.config.dhcp.as_ref().map_or(0, |dhcp| dhcp.lease_secs)
    }

    fn dhcp(&mut self, now: Nanos, route: &Route, data: &[u8], source: ChargedTo) -> Result<(), Reason> {
        // Before anything else, so that a flood costs one look-up per message.
        if !self.dhcp_rates.take(source, now) {
            self.counters.dhcp_throttled.add(1);
            return Err(Reason::DhcpRate);
        }
        let message = dhcp::read(data).filter(|m| m.mac == route.source_mac);
        let Some(message) = message else {
            self.counters.dhcp_refused_messages.add(1);
            return Err(Reason::GatewayRefused);
        };
        let Some(mut leases) = self.leases.take() else { return Ok(()) };
        let answer = self.dhcp_message(now, &mut leases, &message, source);
        self.leases = Some(leases);
        let Some((bytes, to)) = answer else { return Ok(()) };
        // To all where the client asked for that or has no address to be reached at (RFC 2131
        // §4.1).
        let (destination_mac, destination) = match to {
            Some(address) => (route.source_mac, address),
            None => ([0xff; 6], Ipv4Addr::BROADCAST),
        };
        let to = Route { source_mac: self.config.mac, destination_mac, source: self.config.address, destination };
        self.send(packet::udp(&to, dhcp::SERVER_PORT, dhcp::CLIENT_PORT, &bytes))
    }

    /// The address that the configuration gives to a client with this MAC address and host name.
    fn fixed(&self, leases: &Leases, mac: Mac, name: Option<&str>) -> Option<Ipv4Addr> {
        if let Some(member) = self.members.of_mac(mac) {
            return member.address;
        }
        let member = self.members.named(name?).filter(|m| m.mac.is_none())?;
        let free = |address: &Ipv4Addr| leases.at(*address).is_none_or(|lease| lease.mac == mac);
        member.address.filter(free)
    }

    /// The name that a client is to go by, and whether it asked for one that is not its to have.
    fn name_for(&self, mac: Mac, asked: Option<&str>, fixed: Option<Ipv4Addr>) -> (Option<String>, bool) {
        if let Some(member) = self.members.of_mac(mac) {
            return (Some(member.name.clone()), false);
        }
        let Some(asked) = asked else { return (None, false) };
        let by_name = self.members.named(asked).is_some_and(|m| m.address.is_some() && m.address == fixed);
        let taken = self.members.named(asked).is_some()
            || asked == self.config.name
            || asked == ROUTER_NAME
            || names::is_reserved(asked);
        if taken && !by_name { (None, true) } else { (Some(asked.to_owned()), false) }
    }

    /// The answer to a DHCP message and where it goes: an address, or everybody.
    fn dhcp_message(
        &mut self,
        now: Nanos,
        leases: &mut Leases,
        message: &dhcp::Message,
        source: ChargedTo,
    ) -> Option<(Vec<u8>, Option<Ipv4Addr>)> {
        let Self { config, members, elsewhere, .. } = &*self;
        let held =
            leases.of_mac(message.mac).filter(|(_, lease)| lease.state == LeaseState::Bound).map(|(held, _)| held);
        let reserved = |address: Ipv4Addr| {
            address == config.address
                || Some(address) == config.router
                || members.of_address(address).is_some()
                || elsewhere.refuses(address.into(), message.mac, held == Some(address))
        };
        let port = match source {
            ChargedTo::Port(port) => Some(port),
            ChargedTo::Mac(_) => None,
        };
        let fixed = self.fixed(leases, message.mac, message.name.as_deref());
        let claim = Claim { mac: message.mac, port, fixed };
        let counters = &self.counters;
        match message.kind {
            DhcpMessageType::Discover => {
                counters.dhcp_discovers.add(1);
                // One that has moved here gets the address that it had.
                let wants = message.requested.or_else(|| elsewhere.ipv4_of(message.mac));
                match leases.offer(&claim, wants, &reserved, now) {
                    Ok(address) => {
                        counters.dhcp_offers.add(1);
                        let (name, _) = self.name_for(message.mac, message.name.as_deref(), fixed);
                        let name = name.filter(|name| leases.name_is_free(name, message.mac));
                        Some(self.grant(message, DhcpMessageType::Offer, Some(address), name.as_deref()))
                    }
                    Err(refusal) => {
                        self.count_refusal(refusal);
                        None
                    }
                }
            }
            DhcpMessageType::Request => {
                counters.dhcp_requests.add(1);
                if message.server.is_some_and(|server| server != config.address) {
                    // It took another server's offer; ours is free again.
                    if let Some((address, lease)) = leases.of_mac(message.mac)
                        && lease.state == LeaseState::Offered
                    {
                        leases.release(message.mac, address);
                    }
                    return None;
                }
                // Selecting and init-reboot name the address in an option, renewing and rebinding
                // in the header.
                let held = Some(message.client).filter(|address| !address.is_unspecified());
                let Some(wanted) = message.requested.or(held) else {
                    counters.dhcp_refused_messages.add(1);
                    return None;
                };
                let expires = now.after(Nanos::SECOND.times(self.lease_secs().into()));
                let (name, conflict) = self.name_for(message.mac, message.name.as_deref(), fixed);
                let asked = name.is_some();
                // A client that the configuration has moved meanwhile is sent back to ask again.
                let moved =
                    fixed.is_some_and(|fixed| fixed != wanted && leases.at(fixed).is_none_or(|l| l.mac == message.mac));
                let bound = if moved {
                    Err(Refusal::NotFree)
                } else {
                    leases.bind(&claim, wanted, name, &reserved, now, expires)
                };
                match bound {
                    Ok(()) => {
                        counters.dhcp_acks.add(1);
                        let name = leases.at(wanted).and_then(|lease| lease.name.clone());
                        if conflict || asked && name.is_none() {
                            counters.dhcp_name_conflicts.add(1);
                        }
                        Some(self.grant(message, DhcpMessageType::Ack, Some(wanted), name.as_deref()))
                    }
                    Err(refusal) => {
                        self.count_refusal(refusal);
                        counters.dhcp_naks.add(1);
                        Some((dhcp::nak(message, config.address, "that address is not yours to have"), None))
                    }
                }
            }
            DhcpMessageType::Release => {
                if leases.release(message.mac, message.client) {
                    counters.dhcp_releases.add(1);
                }
                None
            }
            DhcpMessageType::Decline => {
                if message.requested.is_some_and(|address| leases.decline(message.mac, address, now)) {
                    counters.dhcp_declines.add(1);
                }
                None
            }
            DhcpMessageType::Inform if config.has_host(message.client) => {
                counters.dhcp_acks.add(1);
                Some(self.grant(message, DhcpMessageType::Ack, None, None))
            }
            _ => {
                counters.dhcp_refused_messages.add(1);
                None
            }
        }
    }

    fn count_refusal(&self, refusal: Refusal) {
        match refusal {
            Refusal::Exhausted => self.counters.dhcp_exhausted.add(1),
            Refusal::Quota => self.counters.dhcp_over_quota.add(1),
            Refusal::NotFree => {}
        }
    }

    fn grant(
        &self,
        message: &dhcp::Message,
        kind: DhcpMessageType,
        address: Option<Ipv4Addr>,
        name: Option<&str>,
    ) -> (Vec<u8>, Option<Ipv4Addr>) {
        let facts = dhcp::Facts {
            server: self.config.address,
            mask: self.config.mask(),
            broadcast: self.config.broadcast(),
            router: self.config.router,
            dns: &self.dns_servers,
            domain: &self.config.domain,
            mtu: self.config.mtu,
        };
        let lease = address.map(|address| (address, self.lease_secs()));
        let boot = self.boot.find(message.mac).and_then(|config| {
            let file = message.boot.file(config)?;
            Some(dhcp::Boot { server: config.server, file })
        });
        self.counters.boot_answers.add(boot.is_some().into());
        let bytes = dhcp::grant(message, kind, &facts, &dhcp::Grant { lease, name, boot });
        let held = Some(message.client).filter(|client| self.config.has_host(*client));
        let to = held.or(if message.broadcast { None } else { address });
        (bytes, to)
    }

    // DNS

    /// The answer to a query, unless it has to wait for the host's name servers or is none.
    fn dns(&mut self, now: Nanos, client: Client, source: ChargedTo, bytes: &[u8]) -> Option<Vec<u8>> {
        let recursion = self.config.forward;
        let counters = self.counters.clone();
        let query = match dns::read(bytes) {
            Ok(query) => query,
            Err(dns::Unread::Silence) => {
                counters.dns_malformed.add(1);
                return None;
            }
            Err(dns::Unread::Answer { id, flags, code }) => {
                counters.dns_malformed.add(1);
                return Some(dns::bare(id, flags, code, recursion));
            }
        };
        let subject = query.subject(&self.domain);
        let name = if let dns::Subject::Member(name) = &subject { name.as_str() } else { "" };
        let found6 = self.resolve6(now, name);
        if let dns::Subject::Address(IpAddr::V6(address)) = subject
            && let Some(six) = &mut self.six
        {
            six.check(address, now);
        }
        let local = |records: &[dns::AnswerRecord<'_>]| {
            counters.dns_local_answers.add(1);
            Some(query.answer(dns::Code::NoError, records, &self.domain, recursion))
        };
        let unknown = |zone: &[String]| {
            counters.dns_unknown_names.add(1);
            Some(query.answer(dns::Code::NameError, &[], zone, recursion))
        };
        match subject {
            dns::Subject::Domain => local(&[]),
            dns::Subject::Nobody => unknown(&self.domain),
            // A name without an address of the family that is asked for is known all the same:
            // NXDOMAIN would end the search for the other one.
            dns::Subject::Member(name) => match self.resolve(&name) {
                None if found6.is_empty() && !self.knows6(&name) => match self.resolve_elsewhere(&name) {
                    None => unknown(&self.domain),
                    Some(found) => {
                        let (four, six) = query.wants_addresses();
                        let found = found.filter(|address| if address.is_ipv4() { four } else { six });
                        local(&found.map(dns::AnswerRecord::Address).collect::<Vec<_>>())
                    }
                },
                found => {
                    let (four, six) = query.wants_addresses();
                    let four = found.flatten().filter(|_| four).map(IpAddr::from);
                    let six = found6.into_iter().filter(|_| six).map(IpAddr::from);
                    local(&four.into_iter().chain(six).map(dns::AnswerRecord::Address).collect::<Vec<_>>())
                }
            },
            dns::Subject::Address(address) if self.is_ours(address) => match self.name_for_address(address) {
                Some(name) => {
                    let record = query.wants_name().then_some(dns::AnswerRecord::Name(name, &self.domain));
                    local(record.as_slice())
                }
                None => unknown(&[]),
            },
            dns::Subject::Address(_) | dns::Subject::Elsewhere if self.config.forward => {
                let room = match client {
                    Client::Udp { .. } | Client::Udp6 { .. } => query.udp_room(self.config.mtu),
                    Client::Tcp(_) => usize::from(u16::MAX),
                };
                let id = self.entropy.next() as u16;
                match self.forwarder.ask(client, source, &query, bytes, room, id, now) {
                    Ok(upstream) => {
                        counters.dns_forwarded.add(1);
                        self.queries.push(upstream);
                        None
                    }
                    Err(NotForwarded::Repeated) => None,
                    Err(NotForwarded::Full) => {
                        counters.dns_failures.add(1);
                        Some(query.answer(dns::Code::ServerFailure, &[], &[], recursion))
                    }
                }
            }
            dns::Subject::Address(_) | dns::Subject::Elsewhere | dns::Subject::Barred => {
                counters.dns_refused.add(1);
                Some(query.answer(dns::Code::Refused, &[], &[], recursion))
            }
        }
    }

    /// What a name resolves to: `None` where no member has it, `Some(None)` where its owner has no
    /// address now.
    fn resolve(&self, name: &str) -> Option<Option<Ipv4Addr>> {
        if let Some(member) = self.members.named(name) {
            let leased = || Some(self.leases.as_ref()?.of_mac(member.mac?)?.0);
            return Some(member.address.or_else(leased));
        }
        if name == self.config.name {
            return Some(Some(self.config.address));
        }
        if name == ROUTER_NAME && self.config.router.is_some() {
            return Some(self.config.router);
        }
        self.leases.as_ref()?.named(name).map(Some)
    }

    /// Whether `address` is one of this network, about which the gateway knows all that there is.
    fn is_ours(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.config.has_host(address),
            IpAddr::V6(address) => self.holds6(address),
        }
    }

    /// The name of a member of this machine, or else of another one.
    fn name_for_address(&self, address: IpAddr) -> Option<&str> {
        self.name_of(address).or_else(|| self.name_elsewhere(address))
    }

    fn name_of(&self, address: IpAddr) -> Option<&str> {
        let address = match address {
            IpAddr::V4(address) => address,
            IpAddr::V6(address) => return self.name_of6(address),
        };
        if let Some(member) = self.members.of_address(address) {
            return Some(&member.name);
        }
        if address == self.config.address {
            return Some(&self.config.name);
        }
        if Some(address) == self.config.router {
            return Some(ROUTER_NAME);
        }
        let lease = self.leases.as_ref()?.at(address)?;
        let member = self.members.of_mac(lease.mac).map(|m| m.name.as_str());
        member.or(lease.name.as_deref()).filter(|_| lease.state == LeaseState::Bound)
    }

    fn tcp(
        &mut self,
        now: Nanos,
        route: &Route,
        packet: &[u8],
        payload: &[u8],
        checksum: Checksum,
        source: ChargedTo,
    ) -> Result<(), Reason> {
        let segment = TcpPacket::new_checked(payload).map_err(|_| Reason::GatewayRefused)?;
        let sum_is_right = segment.verify_checksum(&route.source.into(), &route.destination.into());
        if packet::must_verify(checksum) && !sum_is_right {
            return Err(Reason::GatewayRefused);
        }
        match self.streams.input(now, packet, route.source_mac, source, dns::PORT) {
            tcp::Taken::Yes => {}
            tcp::Taken::Stray => {
                self.counters.tcp_strays.add(1);
                if self.may_complain(now)
                    && let Some(reset) = packet::tcp_reset(route, &segment)
                {
                    self.send(reset)?;
                }
            }
            tcp::Taken::Full => self.counters.tcp_refused.add(1),
        }
        self.serve_streams(now);
        Ok(())
    }

    /// Answers what TCP clients asked, and sends what the stack has to say.
    fn serve_streams(&mut self, now: Nanos) {
        // Each round answers one query per connection at most, and costs a poll of the stack. What
        // is left after some rounds has its turn with the next frame or `poll`, so that one frame
        // full of queries costs others little.
        self.streams.unserved = true;
        for _ in 0..STREAM_ROUNDS {
            let queries = self.streams.serve(now);
            if queries.is_empty() {
                self.streams.unserved = false;
                break;
            }
            for (stream, source, bytes) in queries {
                match self.dns(now, Client::Tcp(stream), source, &bytes) {
                    Some(answer) => self.streams.answer(stream, &answer),
                    // Not a query, or one repeated while it is asked: the connection may ask on.
                    None if dns::read(&bytes).is_err() => self.streams.give_up(stream),
                    None => {}
                }
            }
        }
        for frame in self.streams.output() {
            // A lost segment is sent again by the stack.
            let _ = self.send(frame);
        }
    }

    fn deliver(&mut self, now: Nanos, delivery: Delivery) -> Result<(), Reason> {
        match delivery.client {
            Client::Udp { mac, address, port } => {
                let to = Route {
                    source_mac: self.config.mac,
                    destination_mac: mac,
                    source: self.config.address,
                    destination: address,
                };
                self.send(packet::udp(&to, dns::PORT, port, &delivery.bytes))
            }
            Client::Udp6 { mac, address, port, own } => {
                let (route, bytes) = ((mac, address, own), &delivery.bytes);
                self.answer6(route, port, bytes)
            }
            Client::Tcp(stream) => {
                self.streams.answer(stream, &delivery.bytes);
                self.serve_streams(now);
                Ok(())
            }
        }
    }

    /// The host's answer to a query of [`Gateway::take_queries`]; empty where no name server
    /// answered.
    pub fn answer(&mut self, now: Nanos, id: u64, bytes: Vec<u8>) {
        let failed = bytes.is_empty();
        let Some(delivery) = self.forwarder.answer(id, bytes) else {
            self.counters.dns_upstream_strays.add(1);
            return;
        };
        let counter = if failed { &self.counters.dns_failures } else { &self.counters.dns_upstream_answers };
        counter.add(1);
        // A full queue was counted; the client asks again.
        let _ = self.deliver(now, delivery);
    }

    /// Whether it has a prefix for IPv6, and has not withdrawn it.
    pub fn serves_ipv6(&self) -> bool {
        self.six.is_some()
    }

    /// Whether what was advertised is withdrawn.
    pub fn has_withdrawn(&self) -> bool {
        self.config.ipv6.is_some() && self.six.is_none()
    }

    // What comes out

    /// Runs timers. Returns when to be called again although nothing happens.
    pub fn poll(&mut self, now: Nanos) -> Option<Nanos> {
        self.revoke_learned();
        if let Some(leases) = &mut self.leases {
            leases.expire(now);
        }
        self.poll6(now);
        while let Some(delivery) = self.forwarder.expired(now) {
            self.counters.dns_failures.add(1);
            let _ = self.deliver(now, delivery);
        }
        if self.streams.deadline(now).is_some_and(|at| at <= now) {
            self.serve_streams(now);
        }
        self.deadline(now)
    }

    /// When [`Gateway::poll`] is due, if ever.
    pub fn deadline(&mut self, now: Nanos) -> Option<Nanos> {
        let leases = self.leases.as_ref().and_then(Leases::next_expiry);
        let six = self.six.as_ref().and_then(six::Six::deadline);
        [leases, six, self.forwarder.deadline(), self.streams.deadline(now)].into_iter().flatten().min()
    }

    /// The next frame to send.
    pub fn output(&mut self) -> Option<Vec<u8>> {
        self.queue.pop_front()
    }

    /// How many frames wait to be sent.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Queries for the host's name servers since the last call.
    pub fn take_queries(&mut self) -> Vec<UpstreamQuery> {
        std::mem::take(&mut self.queries)
    }

    /// What became of the leases that changed since the last call, to be kept.
    pub fn take_lease_changes(&mut self) -> Vec<LeaseChange> {
        let to_unix = self.to_unix();
        let mut changes = self.leases.as_mut().map(|leases| leases.take_changes(&to_unix)).unwrap_or_default();
        if let Some(six) = &mut self.six {
            let changes6 = six.take_changes(&to_unix);
            if !self.reserves_anew {
                self.reserves.extend(changes6.iter().filter_map(|change| match change.address() {
                    IpAddr::V6(address) => Some(address),
                    IpAddr::V4(_) => None,
                }));
            }
            changes.extend(changes6);
        }
        self.counters.lease_changes.add(changes.len() as u64);
        changes
    }

    /// What is new of whose IPv6 addresses are, as of the last [`Gateway::take_lease_changes`].
    pub fn take_reservations(&mut self) -> Option<Reservations> {
        let six = self.six.as_ref()?;
        let changed = std::mem::take(&mut self.reserves);
        if std::mem::take(&mut self.reserves_anew) {
            return Some(six.reservations(&self.members));
        }
        (!changed.is_empty()).then(|| six.reservations_of(&self.members, changed))
    }

    /// Wall-clock seconds of the worker's instants, rounded up.
    fn to_unix(&self) -> impl Fn(Nanos) -> u64 + use<> {
        let Start { now, unix_secs, .. } = self.start;
        move |at| unix_secs + at.since(now).0.div_ceil(Nanos::SECOND.0)
    }

    fn lease_at(&self, address: IpAddr) -> Option<&lease::Lease> {
        match address {
            IpAddr::V4(address) => self.leases.as_ref()?.at(address),
            IpAddr::V6(address) => self.six.as_ref()?.lease_at(address),
        }
    }

    /// The bound leases now.
    pub fn leases(&self) -> LeaseStore {
        let mut store = self.leases.as_ref().map(|leases| leases.store(self.to_unix())).unwrap_or_default();
        store.leases.extend(self.six.iter().flat_map(|six| six.store(self.to_unix())));
        store
    }

    /// Facts for status.
    pub fn details(&self) -> Details {
        let (used, size) = self.leases.as_ref().map_or((0, 0), Leases::usage);
        let mut all = vec![
            ("address", format!("{}/{}", self.config.address, self.config.prefix).into()),
            ("dynamic_leases", used.into()),
            ("dynamic_leases_max", size.into()),
            ("queries_outstanding", self.forwarder.outstanding().into()),
        ];
        all.extend(self.six.iter().flat_map(six::Six::details));
        all
    }
}

/// Where the search for an address starts; it outlives a restart, so it hangs on the network only.
fn network_key(config: &GatewayConfig) -> u64 {
    let mut hasher = DefaultHasher::new();
    (config.mac, config.network()).hash(&mut hasher);
    hasher.finish()
}

/// Whether `member` can be one of a network with `config`.
fn check_member(config: &GatewayConfig, member: &Member) -> Result<(), ConfigError> {
    let Some(address) = member.address else { return Ok(()) };
    config.inside("member's address", address)?;
    let other = if address == config.address {
        &config.name
    } else if Some(address) == config.router && !member.name.eq_ignore_ascii_case(ROUTER_NAME) {
        ROUTER_NAME
    } else {
        return Ok(());
    };
    Err(ConfigError::Taken { what: "address", name: member.name.clone(), other: other.to_owned() })
}
