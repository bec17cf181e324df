//! IPv6 addresses from router advertisements (RFC 4862), routers, the MTU and DNS servers with them
//! (RFC 4861, RFC 8106). Pure.
//!
//! The stack below can do the first part, but then its time of the next look no longer says what
//! its sockets wait for, and a cell that is idle would have to look every few milliseconds. This
//! module names each time at which it has something to do: the next solicitation while no router
//! has answered, the next question after an address that another host claims, and the end of a
//! lifetime. Nothing else wakes the cell.
//!
//! The interface identifier is made of the Ethernet address (RFC 4291 appendix A), so the fabric
//! knows the addresses beforehand. An address is used at once, as RFC 4429 allows; the question
//! whether another has it is sent when it is taken, and an answer within a second ends its use. The
//! answer may be a lie. So the question is repeated after 8 s, then after twice that each time, up
//! to an hour; without an answer the address is used from then on.
//!
//! What is received is not trusted: messages that RFC 4861 §6.1.2 calls invalid change nothing, the
//! tables have limits ([`MAX_PREFIXES`], [`MAX_ROUTERS`], [`MAX_SERVERS`]), and no single message
//! can end the life of an address within two hours.

use alloc::vec::Vec;
use smoltcp::wire::{EthernetAddress, Icmpv6Packet, IpProtocol, Ipv6Address, Ipv6Cidr, Ipv6Packet};

/// Prefixes that addresses are taken of.
pub(crate) const MAX_PREFIXES: usize = 3;
/// Routers that are remembered.
const MAX_ROUTERS: usize = 2;
/// DNS servers that are remembered.
const MAX_SERVERS: usize = 2;

const SECOND_NS: u64 = 1_000_000_000;
/// RFC 4861 §10, RTR_SOLICITATION_INTERVAL; doubled each time, up to RFC 7559's MRT.
const FIRST_INTERVAL_NS: u64 = 4 * SECOND_NS;
const LONGEST_INTERVAL_NS: u64 = 3600 * SECOND_NS;
/// RFC 4862 §5.5.3 e): what an unauthenticated message cannot shorten a life to less than.
const TWO_HOURS_NS: u64 = 7200 * SECOND_NS;
/// How long the answer of another owner of an address counts.
const DUPLICATE_NS: u64 = SECOND_NS;
/// When the address is asked for again after that; doubled each time, up to the longest interval.
const FIRST_RETRY_NS: u64 = 8 * SECOND_NS;

const ETHERNET_HEADER_BYTES: usize = 14;
const IPV6_HEADER_BYTES: usize = 40;
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ICMPV6: u8 = 58;
const ROUTER_ADVERT: u8 = 134;
/// Of the message before its options (RFC 4861 §4.2).
const ADVERT_BYTES: usize = 16;
const HOP_LIMIT: u8 = 255;
/// Longer advertisements are ignored.
const MAX_ADVERT_BYTES: usize = 1500;
const PREFIX_INFORMATION: u8 = 3;
const LINK_MTU: u8 = 5;
const RECURSIVE_DNS: u8 = 25;
const ON_LINK: u8 = 0x80;
const AUTONOMOUS: u8 = 0x40;
const PREFIX_BITS: u8 = 64;
/// RFC 8200 §5: every link of IPv6 takes packets of this size. A smaller MTU is not believed.
const LEAST_MTU: u32 = 1280;
const FOREVER: u64 = u64::MAX;

/// Whether a frame is a router advertisement, as far as its types tell.
pub(crate) fn is_router_advert(frame: &[u8]) -> bool {
    frame.len() <= ETHERNET_HEADER_BYTES + MAX_ADVERT_BYTES
        && frame.get(12..14) == Some(&TYPE_IPV6)
        && frame.get(ETHERNET_HEADER_BYTES + 6) == Some(&ICMPV6)
        && frame.get(ETHERNET_HEADER_BYTES + IPV6_HEADER_BYTES) == Some(&ROUTER_ADVERT)
}

/// The address with the modified EUI-64 identifier of `mac` (RFC 4291 appendix A).
pub(crate) fn address(prefix: [u16; 4], mac: EthernetAddress) -> Ipv6Address {
    let [a, b, c, d, e, f] = mac.0;
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    let [p, q, r, s] = prefix;
    Ipv6Address::new(p, q, r, s, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lease<T> {
    value: T,
    until_ns: u64,
}

/// Enters or removes a value with a lifetime; returns whether the set of values changed.
fn keep<T: PartialEq>(table: &mut Vec<Lease<T>>, most: usize, value: T, seconds: u32, now_ns: u64) -> bool {
    let at = table.iter().position(|lease| lease.value == value);
    match (at, seconds) {
        (Some(at), 0) => {
            table.remove(at);
            true
        }
        (None, 0) => false,
        (Some(at), seconds) => {
            table[at].until_ns = end(seconds, now_ns);
            false
        }
        (None, seconds) if table.len() < most => {
            table.push(Lease { value, until_ns: end(seconds, now_ns) });
            true
        }
        (None, _) => false,
    }
}

fn end(seconds: u32, now_ns: u64) -> u64 {
    if seconds == u32::MAX { FOREVER } else { now_ns.saturating_add(u64::from(seconds) * SECOND_NS) }
}

/// What is known of whether another host has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detection {
    /// It is used, and was asked for at that time.
    Used { since_ns: u64 },
    /// Another host claims it; it is asked for again then.
    Claimed { retry_ns: u64 },
    /// It was asked for again; without an answer it is used from then on.
    Asked { until_ns: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    cidr: Ipv6Cidr,
    detection: Detection,
    /// How long the next claim of another host keeps it from being asked for.
    backoff_ns: u64,
}

impl Taken {
    /// When its detection goes on by itself.
    fn poll_at(&self) -> Option<u64> {
        match self.detection {
            Detection::Used { .. } => None,
            Detection::Claimed { retry_ns: at } | Detection::Asked { until_ns: at } => Some(at),
        }
    }
}

/// The state of one interface.
#[derive(Debug)]
pub(crate) struct Slaac {
    mac: EthernetAddress,
    /// The address that the command line gives. None is formed in its prefix: a fabric may let its
    /// address alone pass.
    given: Option<Ipv6Cidr>,
    addresses: Vec<Lease<Taken>>,
    routers: Vec<Lease<Ipv6Address>>,
    servers: Vec<Lease<Ipv6Address>>,
    /// What the last router that told one has as the MTU of the link. It has no lifetime.
    mtu: Option<u32>,
    /// When routers are asked for the next time; `None` when one has answered.
    solicit_at_ns: Option<u64>,
    interval_ns: u64,
}

impl Slaac {
    /// `enabled`: whether routers are asked for and heard.
    pub(crate) fn new(mac: EthernetAddress, enabled: bool, now_ns: u64) -> Slaac {
        Slaac {
            mac,
            given: None,
            addresses: Vec::new(),
            routers: Vec::new(),
            servers: Vec::new(),
            mtu: None,
            solicit_at_ns: enabled.then_some(now_ns),
            interval_ns: if enabled { FIRST_INTERVAL_NS } else { 0 },
        }
    }

    /// The same, beside the address that the command line gives.
    pub(crate) fn beside(self, given: Option<Ipv6Cidr>) -> Slaac {
        Slaac { given, ..self }
    }

    fn is_enabled(&self) -> bool {
        self.interval_ns > 0
    }

    /// The link is another one, or up again: asks once more. What is known stays until its end.
    pub(crate) fn restart(&mut self, mac: EthernetAddress, now_ns: u64) {
        self.mac = mac;
        if self.is_enabled() {
            self.solicit_at_ns = Some(now_ns);
            self.interval_ns = FIRST_INTERVAL_NS;
        }
        for lease in &mut self.addresses {
            let detection = &mut lease.value.detection;
            // A question that was under way may be lost with the link.
            if matches!(detection, Detection::Claimed { .. } | Detection::Asked { .. }) {
                *detection = Detection::Claimed { retry_ns: now_ns };
            }
        }
    }

    /// The addresses of the interface.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Ipv6Cidr> {
        let is_used = |taken: &Taken| matches!(taken.detection, Detection::Used { .. });
        self.addresses.iter().map(|lease| lease.value).filter(is_used).map(|taken| taken.cidr)
    }

    /// Where packets to other networks go.
    pub(crate) fn router(&self) -> Option<Ipv6Address> {
        self.routers.first().map(|lease| lease.value)
    }

    /// The DNS server.
    pub(crate) fn server(&self) -> Option<Ipv6Address> {
        self.servers.first().map(|lease| lease.value)
    }

    /// The MTU of the link in bytes, as routers have it. That of the device is the most.
    pub(crate) fn mtu(&self) -> Option<usize> {
        self.mtu.map(|mtu| mtu as usize)
    }

    /// Whether a solicitation is to be sent now.
    pub(crate) fn must_solicit(&self, now_ns: u64) -> bool {
        self.solicit_at_ns.is_some_and(|at| at <= now_ns)
    }

    /// Notes that a solicitation was sent, or could not be.
    pub(crate) fn solicited(&mut self, now_ns: u64) {
        self.solicit_at_ns = Some(now_ns.saturating_add(self.interval_ns));
        self.interval_ns = (self.interval_ns * 2).min(LONGEST_INTERVAL_NS);
    }

    /// When there is something to do next.
    pub(crate) fn poll_at(&self) -> Option<u64> {
        let detections = self.addresses.iter().filter_map(|lease| lease.value.poll_at());
        let addresses = self.addresses.iter().map(|lease| lease.until_ns).chain(detections);
        let others = self.routers.iter().chain(&self.servers).map(|lease| lease.until_ns);
        addresses.chain(others).filter(|at| *at != FOREVER).chain(self.solicit_at_ns).min()
    }

    /// The next address to ask for again, which counts as asked for.
    pub(crate) fn ask_again(&mut self, now_ns: u64) -> Option<Ipv6Address> {
        let is_due = |taken: &Taken| matches!(taken.detection, Detection::Claimed { retry_ns } if retry_ns <= now_ns);
        let taken = self.addresses.iter_mut().map(|lease| &mut lease.value).find(|taken| is_due(taken))?;
        taken.detection = Detection::Asked { until_ns: now_ns.saturating_add(DUPLICATE_NS) };
        Some(taken.cidr.address())
    }

    /// Forgets what has ended, and uses the addresses that no host has claimed again; returns
    /// whether anything changed by that.
    pub(crate) fn expire(&mut self, now_ns: u64) -> bool {
        let count = |slaac: &Slaac| slaac.addresses.len() + slaac.routers.len() + slaac.servers.len();
        let before = count(self);
        self.addresses.retain(|lease| lease.until_ns > now_ns);
        self.routers.retain(|lease| lease.until_ns > now_ns);
        self.servers.retain(|lease| lease.until_ns > now_ns);
        let mut changed = count(self) < before;
        for taken in self.addresses.iter_mut().map(|lease| &mut lease.value) {
            if matches!(taken.detection, Detection::Asked { until_ns } if until_ns <= now_ns) {
                taken.detection = Detection::Used { since_ns: now_ns };
                changed = true;
            }
        }
        changed
    }

    /// Another host says that it has `address`. If that counts, the address is not used, and is
    /// asked for again after the time that is returned.
    pub(crate) fn claimed(&mut self, address: Ipv6Address, now_ns: u64) -> Option<u64> {
        let mut all = self.addresses.iter_mut().map(|lease| &mut lease.value);
        let taken = all.find(|taken| taken.cidr.address() == address)?;
        let counts = match taken.detection {
            Detection::Used { since_ns } => now_ns < since_ns.saturating_add(DUPLICATE_NS),
            Detection::Asked { .. } => true,
            Detection::Claimed { .. } => false,
        };
        let wait_ns = counts.then_some(taken.backoff_ns)?;
        taken.detection = Detection::Claimed { retry_ns: now_ns.saturating_add(wait_ns) };
        taken.backoff_ns = (wait_ns * 2).min(LONGEST_INTERVAL_NS);
        Some(wait_ns)
    }

    /// Takes a router advertisement, from its IPv6 header on. Returns whether addresses, routers,
    /// servers or the MTU changed.
    pub(crate) fn receive(&mut self, packet: &[u8], now_ns: u64) -> bool {
        if !self.is_enabled() {
            return false;
        }
        let Some((router, message)) = check(packet) else { return false };
        self.solicit_at_ns = None;
        self.interval_ns = FIRST_INTERVAL_NS;
        let lifetime = u16::from_be_bytes([message[6], message[7]]);
        let mut changed = keep(&mut self.routers, MAX_ROUTERS, router, u32::from(lifetime), now_ns);
        let mut options = &message[ADVERT_BYTES..];
        while let [kind, units, ..] = *options {
            // `check` has seen that each option is whole.
            let (option, rest) = options.split_at(usize::from(units) * 8);
            options = rest;
            changed |= match kind {
                PREFIX_INFORMATION if option.len() == 32 => self.take_prefix(option, now_ns),
                RECURSIVE_DNS if option.len() >= 24 => self.take_servers(option, now_ns),
                LINK_MTU if option.len() == 8 => self.take_mtu(word(option, 4)),
                _ => false,
            };
        }
        changed
    }

    /// RFC 4861 §6.3.4.
    fn take_mtu(&mut self, mtu: u32) -> bool {
        let changed = mtu >= LEAST_MTU && self.mtu != Some(mtu);
        if changed {
            self.mtu = Some(mtu);
        }
        changed
    }

    fn take_servers(&mut self, option: &[u8], now_ns: u64) -> bool {
        let seconds = word(option, 4);
        let mut changed = false;
        for octets in option[8..].chunks_exact(16) {
            if let Ok(octets) = <[u8; 16]>::try_from(octets) {
                let server = Ipv6Address::from(octets);
                if !server.is_multicast() && !server.is_unspecified() {
                    changed |= keep(&mut self.servers, MAX_SERVERS, server, seconds, now_ns);
                }
            }
        }
        changed
    }

    /// RFC 4862 §5.5.3.
    fn take_prefix(&mut self, option: &[u8], now_ns: u64) -> bool {
        let (bits, flags, valid, preferred) = (option[2], option[3], word(option, 4), word(option, 8));
        let half = |at: usize| u16::from_be_bytes([option[16 + 2 * at], option[17 + 2 * at]]);
        let prefix = [half(0), half(1), half(2), half(3)];
        let is_usable = prefix[0] & 0xffc0 != 0xfe80 && prefix[0] >> 8 != 0xff && prefix != [0; 4];
        if flags & AUTONOMOUS == 0 || bits != PREFIX_BITS || preferred > valid || !is_usable {
            return false;
        }
        // Without the flag its neighbours are behind the router.
        let bits = if flags & ON_LINK != 0 { PREFIX_BITS } else { 128 };
        let cidr = Ipv6Cidr::new(address(prefix, self.mac), bits);
        let until_ns = end(valid, now_ns);
        if let Some(known) = self.addresses.iter_mut().find(|lease| lease.value.cidr.address() == cidr.address()) {
            let left_ns = known.until_ns.saturating_sub(now_ns);
            if until_ns > known.until_ns || until_ns.saturating_sub(now_ns) > TWO_HOURS_NS {
                known.until_ns = until_ns;
            } else if left_ns > TWO_HOURS_NS {
                known.until_ns = now_ns + TWO_HOURS_NS;
            }
            let changed = known.value.cidr != cidr;
            known.value.cidr = cidr;
            return changed;
        }
        let is_given = self.given.is_some_and(|given| given.contains_addr(&cidr.address()));
        if valid == 0 || is_given || self.addresses.len() == MAX_PREFIXES {
            return false;
        }
        let detection = Detection::Used { since_ns: now_ns };
        self.addresses.push(Lease { value: Taken { cidr, detection, backoff_ns: FIRST_RETRY_NS }, until_ns });
        true
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The sender and the message of a valid advertisement (RFC 4861 §6.1.2).
fn check(packet: &[u8]) -> Option<(Ipv6Address, &[u8])> {
    let packet = Ipv6Packet::new_checked(packet).ok()?;
    let source = packet.src_addr();
    if !source.is_unicast_link_local() || packet.hop_limit() != HOP_LIMIT || packet.next_header() != IpProtocol::Icmpv6
    {
        return None;
    }
    let message = packet.payload();
    if message.len() < ADVERT_BYTES || message[0] != ROUTER_ADVERT || message[1] != 0 {
        return None;
    }
    if !Icmpv6Packet::new_unchecked(message).verify_checksum(&source, &packet.dst_addr()) {
        return None;
    }
    let mut options = &message[ADVERT_BYTES..];
    while !options.is_empty() {
        let bytes = usize::from(*options.get(1)?) * 8;
        if bytes == 0 {
            return None;
        }
        options = options.get(bytes..)?;
    }
    Some((source, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    const MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 9]);
    const ROUTER: Ipv6Address = Ipv6Address::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

    fn prefix(first: u16, valid: u32, preferred: u32) -> Vec<u8> {
        let mut option = vec![PREFIX_INFORMATION, 4, 64, ON_LINK | AUTONOMOUS];
        option.extend(valid.to_be_bytes());
        option.extend(preferred.to_be_bytes());
        option.extend([0; 4]);
        option.extend(Ipv6Address::new(first, 0, 0, 0, 0, 0, 0, 0).octets());
        option
    }

    fn rdnss(seconds: u32) -> Vec<u8> {
        let mut option = vec![RECURSIVE_DNS, 3, 0, 0];
        option.extend(seconds.to_be_bytes());
        option.extend(Ipv6Address::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x53).octets());
        option
    }

    /// An advertisement, from its IPv6 header on, with a right checksum.
    fn advert(lifetime: u16, options: &[Vec<u8>]) -> Vec<u8> {
        let mut message = vec![ROUTER_ADVERT, 0, 0, 0, 64, 0];
        message.extend(lifetime.to_be_bytes());
        message.extend([0; 8]);
        message.extend(options.concat());
        let all_nodes = Ipv6Address::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        Icmpv6Packet::new_unchecked(&mut message).fill_checksum(&ROUTER, &all_nodes);
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((message.len() as u16).to_be_bytes());
        packet.extend([ICMPV6, HOP_LIMIT]);
        packet.extend(ROUTER.octets());
        packet.extend(all_nodes.octets());
        packet.extend(message);
        packet
    }

    fn own(first: u16) -> Ipv6Cidr {
        Ipv6Cidr::new(address([first, 0, 0, 0], MAC), 64)
    }

    #[test]
    fn an_advertisement_gives_address_router_and_server_and_ends_the_asking() {
        let mut slaac = Slaac::new(MAC, true, 0);
        assert!(slaac.must_solicit(0) && slaac.poll_at() == Some(0));
        slaac.solicited(0);
        assert_eq!(slaac.poll_at(), Some(4 * SECOND_NS));
        slaac.solicited(4 * SECOND_NS);
        assert_eq!(slaac.poll_at(), Some(12 * SECOND_NS), "the interval doubles");
        let packet = advert(1800, &[prefix(0xfd01, 7200, 3600), rdnss(600)]);
        assert!(slaac.receive(&packet, SECOND_NS));
        assert_eq!(slaac.addresses().collect::<Vec<_>>(), [own(0xfd01)]);
        assert_eq!(own(0xfd01).address().octets()[8..], [0, 0, 0, 0xff, 0xfe, 0, 0, 9]);
        assert_eq!((slaac.router(), slaac.server().map(|s| s.octets()[15])), (Some(ROUTER), Some(0x53)));
        assert_eq!(slaac.poll_at(), Some(601 * SECOND_NS), "nothing to do before a lifetime ends");
        assert!(!slaac.receive(&packet, 2 * SECOND_NS), "the same again is no change");
        assert!(slaac.expire(602 * SECOND_NS) && slaac.server().is_none() && slaac.router().is_some());
        assert!(slaac.expire(7202 * SECOND_NS) && slaac.addresses().next().is_none() && slaac.poll_at().is_none());
    }

    #[test]
    fn the_mtu_of_a_router_is_taken_where_ipv6_has_such_links() {
        let option = |mtu: u32| [&[LINK_MTU, 1, 0, 0][..], &mtu.to_be_bytes()].concat();
        let mut slaac = Slaac::new(MAC, true, 0);
        assert!(slaac.receive(&advert(1800, &[]), 0) && slaac.mtu().is_none());
        assert!(slaac.receive(&advert(1800, &[option(1400)]), 0));
        assert!(!slaac.receive(&advert(1800, &[option(1400)]), 0), "the same again is no change");
        for wrong in [0, 1, 1279] {
            assert!(!slaac.receive(&advert(1800, &[option(wrong)]), 0), "{wrong}");
        }
        let long = [&[LINK_MTU, 2, 0, 0][..], &1500u32.to_be_bytes(), &[0; 8]].concat();
        assert!(!slaac.receive(&advert(1800, &[long]), 0), "an option of another length");
        assert_eq!(slaac.mtu(), Some(1400));
        assert!(!slaac.receive(&advert(1800, &[]), 0) && slaac.mtu() == Some(1400), "it stays");
        assert!(slaac.receive(&advert(1800, &[option(u32::MAX)]), 0));
        assert_eq!(slaac.mtu(), Some(u32::MAX as usize), "the device's is less");
    }

    #[test]
    fn a_network_without_a_router_gives_an_address_and_a_farewell_takes_the_route() {
        let mut slaac = Slaac::new(MAC, true, 0);
        assert!(slaac.receive(&advert(0, &[prefix(0xfd01, u32::MAX, u32::MAX)]), 0));
        assert!(slaac.router().is_none() && slaac.addresses().count() == 1 && slaac.poll_at().is_none());
        assert!(slaac.receive(&advert(1800, &[]), 0) && slaac.router().is_some());
        assert!(slaac.receive(&advert(0, &[]), 0) && slaac.router().is_none());
    }

    #[test]
    fn no_address_is_formed_in_the_prefix_of_one_that_the_command_line_gives() {
        let given = Ipv6Cidr::new(Ipv6Address::new(0xfd01, 0, 0, 0, 0, 0, 0, 7), 64);
        let mut slaac = Slaac::new(MAC, true, 0).beside(Some(given));
        slaac.receive(&advert(1800, &[prefix(0xfd01, 7200, 3600), prefix(0xfd02, 7200, 3600)]), 0);
        assert_eq!(slaac.addresses().collect::<Vec<_>>(), [own(0xfd02)]);
        assert_eq!(slaac.router(), Some(ROUTER), "routers are heard");
    }

    #[test]
    fn a_message_cannot_end_an_address_within_two_hours() {
        let mut slaac = Slaac::new(MAC, true, 0);
        slaac.receive(&advert(0, &[prefix(0xfd01, 86_400, 86_400)]), 0);
        slaac.receive(&advert(0, &[prefix(0xfd01, 0, 0)]), 0);
        assert_eq!(slaac.poll_at(), Some(TWO_HOURS_NS));
        slaac.receive(&advert(0, &[prefix(0xfd01, 60, 60)]), SECOND_NS);
        assert_eq!(slaac.poll_at(), Some(TWO_HOURS_NS), "less than two hours stay as they are");
    }

    /// Options of any kind, length and content, in advertisements whose checksum is right.
    #[test]
    fn no_options_get_more_out_of_it_than_it_has_room_for() {
        let mut state = 11u64;
        let mut next = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let (mut changes, mut slaac) = (0, Slaac::new(MAC, true, 0));
        for round in 0..20_000u64 {
            if round % 64 == 0 {
                slaac = Slaac::new(MAC, true, 0);
            }
            let mut options = Vec::new();
            for _ in 0..next(5) {
                let mut option = match next(4) {
                    0 => {
                        prefix([0xfd01, 0xfd02, 0xfe80, 0xff02, 0x2001][next(5)], next(9000) as u32, next(9000) as u32)
                    }
                    1 => rdnss(next(9000) as u32),
                    2 => [&[LINK_MTU, 1, 0, 0][..], &(next(3000) as u32).to_be_bytes()].concat(),
                    _ => (0..8 * (1 + next(4))).map(|_| next(256) as u8).collect(),
                };
                for _ in 0..next(3) {
                    let at = next(option.len());
                    option[at] = next(256) as u8;
                }
                // Its end may be missing.
                option.truncate(option.len() - if next(16) == 0 { next(option.len()) } else { 0 });
                options.push(option);
            }
            let now = round * SECOND_NS / 8;
            changes += usize::from(slaac.receive(&advert(next(10_000) as u16, &options), now));
            slaac.expire(now);
            assert!(slaac.addresses().count() <= MAX_PREFIXES);
            for own in slaac.addresses() {
                let octets = own.address().octets();
                let is_local = octets[0] == 0xff || octets[0] == 0xfe && octets[1] & 0xc0 == 0x80;
                assert!(matches!(own.prefix_len(), 64 | 128) && !is_local && octets[..8] != [0; 8], "{own}");
            }
            assert!(slaac.mtu().is_none_or(|mtu| mtu >= 1280));
            assert!(slaac.router().is_none_or(|router| router == ROUTER));
            assert!(
                slaac.poll_at().is_none_or(|at| at > now || slaac.must_solicit(now)),
                "{round}: it does not ask for the past"
            );
        }
        assert!(changes > 1_000, "{changes}");
    }

    #[test]
    fn what_is_invalid_changes_nothing_and_the_tables_are_bounded() {
        let good = advert(1800, &[prefix(0xfd01, 7200, 3600), rdnss(600)]);
        for len in 0..good.len() {
            assert!(!Slaac::new(MAC, true, 0).receive(&good[..len], 0), "{len} bytes");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            // The version, traffic class and flow label are not looked at, but for the version's
            // high bit.
            let changed = Slaac::new(MAC, true, 0).receive(&bad, 0);
            assert!(!changed || at < 4, "byte {at}");
        }
        let mut slaac = Slaac::new(MAC, true, 0);
        for option in [
            prefix(0xfe80, 60, 60),
            prefix(0xff02, 60, 60),
            prefix(0, 60, 60),
            prefix(0xfd01, 60, 61),
            vec![9, 0, 0, 0, 0, 0, 0, 0],
        ] {
            assert!(!slaac.receive(&advert(0, &[option]), 0));
        }
        for first in 0xfd00..0xfd20 {
            slaac.receive(&advert(0, &[prefix(first, 60, 60)]), 0);
        }
        assert_eq!(slaac.addresses().count(), MAX_PREFIXES);
        let mut off = Slaac::new(MAC, false, 0);
        assert!(!off.receive(&good, 0) && off.poll_at().is_none());
        off.restart(MAC, 5);
        assert!(off.poll_at().is_none());
    }

    #[test]
    fn only_an_answer_soon_after_the_question_ends_the_use_of_an_address() {
        let taken = own(0xfd01).address();
        let mut slaac = Slaac::new(MAC, true, 0);
        slaac.receive(&advert(0, &[prefix(0xfd01, 60, 60)]), 0);
        assert_eq!((slaac.claimed(taken, DUPLICATE_NS), slaac.claimed(ROUTER, 0)), (None, None));
        assert_eq!(slaac.claimed(taken, DUPLICATE_NS - 1), Some(FIRST_RETRY_NS));
        assert!(slaac.addresses().next().is_none());
        assert!(!slaac.receive(&advert(0, &[prefix(0xfd01, 60, 60)]), 1), "it is not taken a second time");
        assert!(slaac.addresses().next().is_none());
    }

    #[test]
    fn an_address_that_another_host_claims_is_asked_for_again_and_more_seldom_each_time() {
        let (taken, mut now) = (own(0xfd01).address(), 0);
        let mut slaac = Slaac::new(MAC, true, 0);
        slaac.receive(&advert(0, &[prefix(0xfd01, u32::MAX, u32::MAX)]), 0);
        let mut wait = FIRST_RETRY_NS;
        assert_eq!(slaac.claimed(taken, now), Some(wait));
        for round in 0..14 {
            assert_eq!(slaac.poll_at(), Some(now + wait), "round {round}: nothing wakes the cell before");
            assert_eq!(slaac.claimed(taken, now), None, "a further claim lengthens nothing");
            assert_eq!(slaac.ask_again(now + wait - 1), None);
            now += wait;
            assert!(!slaac.expire(now));
            assert_eq!((slaac.ask_again(now), slaac.ask_again(now)), (Some(taken), None));
            assert_eq!((slaac.poll_at(), slaac.addresses().count()), (Some(now + DUPLICATE_NS), 0));
            wait = (wait * 2).min(LONGEST_INTERVAL_NS);
            assert_eq!(slaac.claimed(taken, now), Some(wait), "round {round}");
        }
        assert_eq!(wait, LONGEST_INTERVAL_NS);
        // The link comes up again, and once more while the question is under way.
        slaac.restart(MAC, now);
        assert_eq!(slaac.ask_again(now), Some(taken));
        now += DUPLICATE_NS / 2;
        slaac.restart(MAC, now);
        assert!(!slaac.expire(now + DUPLICATE_NS));
        // No host claims the address.
        assert_eq!(slaac.ask_again(now), Some(taken));
        assert!(!slaac.expire(now + DUPLICATE_NS - 1) && slaac.addresses().next().is_none());
        assert!(slaac.expire(now + DUPLICATE_NS));
        assert_eq!(slaac.addresses().collect::<Vec<_>>(), [own(0xfd01)]);
        assert_eq!((slaac.ask_again(u64::MAX), slaac.claimed(taken, now + 2 * DUPLICATE_NS)), (None, None));
    }
}
