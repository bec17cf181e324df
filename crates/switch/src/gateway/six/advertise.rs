//! Router advertisements (RFC 4861 §6.2, RFC 8106): what they say, and when they are sent.
//!
//! One is sent to all when the gateway starts, and then every [`INTERVAL`]. The interval is the
//! longest that the RFC allows: nothing here changes by itself, and a sleeping cell is woken by
//! each. A solicitation is answered at once, to the station that sent it alone, so that it wakes
//! no other one.
//!
//! Lifetimes are multiples of the interval, so that one or two lost advertisements end nothing. The
//! router's lifetime is that of the configuration: zero as long as the network has no way out for
//! IPv6, so that no guest has a default route to nowhere. What is withdrawn is advertised once more
//! with lifetimes of zero.

use crate::Nanos;
use crate::frame::Mac;
use std::net::Ipv6Addr;

/// Time between advertisements to all.
pub(super) const INTERVAL: Nanos = Nanos::SECOND.times(1800);
/// How long the prefix is valid, and preferred for new connections, in seconds (RFC 4861 §6.2.1 has
/// a month and a week).
pub(super) const VALID_SECS: u32 = 7 * 86_400;
pub(super) const PREFERRED_SECS: u32 = 86_400;
/// How long the name server may be used: three intervals (RFC 8106 §5.1).
const DNS_SECS: u32 = 5400;

const KIND: u8 = 134;
const FLAG_MANAGED: u8 = 0x80;
const FLAG_OTHER: u8 = 0x40;
const PREFIX_ON_LINK: u8 = 0x80;
const PREFIX_AUTONOMOUS: u8 = 0x40;

// Options (RFC 4861 §4.6, RFC 8106 §5).
const SOURCE_LINK_LAYER: u8 = 1;
const PREFIX: u8 = 3;
const MTU: u8 = 5;
const DNS_SERVERS: u8 = 25;
const DNS_DOMAINS: u8 = 31;

/// What an advertisement says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Advert<'a> {
    /// MAC address of the router that it speaks for.
    pub(super) router: Mac,
    /// How long that is a default router, in seconds; 0: it is none.
    pub(super) router_secs: u16,
    pub(super) prefix: Ipv6Addr,
    pub(super) mtu: u16,
    pub(super) dns: Ipv6Addr,
    /// The labels of the domain; empty: none.
    pub(super) domain: &'a [String],
    /// Whether addresses and settings are to be had by DHCPv6.
    pub(super) dhcp: bool,
    /// Everything that it said before is no longer so.
    pub(super) withdrawn: bool,
}

impl Advert<'_> {
    /// The message, without its checksum.
    pub(super) fn message(&self) -> Vec<u8> {
        let secs = |secs: u32| if self.withdrawn { 0 } else { secs };
        let router_secs = if self.withdrawn { 0 } else { self.router_secs };
        let flags = if self.dhcp { FLAG_MANAGED | FLAG_OTHER } else { 0 };
        let mut bytes = vec![KIND, 0, 0, 0, 64, flags];
        bytes.extend_from_slice(&router_secs.to_be_bytes());
        // Reachable time and retransmission timer: unspecified.
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&[SOURCE_LINK_LAYER, 1]);
        bytes.extend_from_slice(&self.router);
        bytes.extend_from_slice(&[MTU, 1, 0, 0]);
        bytes.extend_from_slice(&u32::from(self.mtu).to_be_bytes());
        bytes.extend_from_slice(&[PREFIX, 4, 64, PREFIX_ON_LINK | PREFIX_AUTONOMOUS]);
        bytes.extend_from_slice(&secs(VALID_SECS).to_be_bytes());
        bytes.extend_from_slice(&secs(PREFERRED_SECS).to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&self.prefix.octets());
        bytes.extend_from_slice(&[DNS_SERVERS, 3, 0, 0]);
        bytes.extend_from_slice(&secs(DNS_SECS).to_be_bytes());
        bytes.extend_from_slice(&self.dns.octets());
        if !self.domain.is_empty() {
            let mut name = Vec::with_capacity(64);
            write_name(&mut name, self.domain);
            // A domain has at most 100 bytes, and so the option 15 units.
            name.resize(name.len().next_multiple_of(8), 0);
            bytes.extend_from_slice(&[DNS_DOMAINS, 1 + (name.len() / 8) as u8, 0, 0]);
            bytes.extend_from_slice(&secs(DNS_SECS).to_be_bytes());
            bytes.extend_from_slice(&name);
        }
        bytes
    }
}

/// A domain name in the form of DNS, without compression.
pub(super) fn write_name(bytes: &mut Vec<u8>, labels: &[String]) {
    for label in labels {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertisement_says_all_in_whole_units() {
        let domain = vec!["lab".to_owned(), "internal".to_owned()];
        let advert = Advert {
            router: [2, 0, 0, 0, 0, 1],
            router_secs: 0,
            prefix: "fd00:1:2:3::".parse().unwrap(),
            mtu: 1450,
            dns: "fd00:1:2:3::1".parse().unwrap(),
            domain: &domain,
            dhcp: true,
            withdrawn: false,
        };
        let bytes = advert.message();
        assert_eq!(bytes[..8], [134, 0, 0, 0, 64, 0xc0, 0, 0], "no default router");
        let (mut at, mut kinds) = (16, vec![]);
        while at < bytes.len() {
            let units = usize::from(bytes[at + 1]);
            kinds.push((bytes[at], units));
            at += 8 * units;
        }
        assert_eq!(at, bytes.len());
        assert_eq!(kinds, [(1, 1), (5, 1), (3, 4), (25, 3), (31, 3)]);
        assert!(bytes.windows(14).any(|w| w == b"\x03lab\x08internal\0"));
        assert_eq!(bytes[24..32], [5, 1, 0, 0, 0, 0, 5, 0xaa]);
        let gone = Advert { withdrawn: true, router_secs: 1800, ..advert }.message();
        assert_eq!((&gone[6..8], &gone[36..44]), (&[0, 0][..], &[0; 8][..]), "valid and preferred for no time");
        let plain = Advert { domain: &[], dhcp: false, router_secs: 5400, ..advert }.message();
        assert_eq!((plain[5], &plain[6..8], plain.len()), (0, &5400u16.to_be_bytes()[..], 16 + 8 * 9));
    }
}
