//! Addresses as values: Ethernet addresses, subnets and prefixes.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::hash::fnv1a_of_words;

/// An Ethernet address of a member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// A locally administered unicast address that depends only on the words given, so that a guest
    /// keeps its address from one start to the next. FNV-1a of 64 bits, folded to 32.
    pub fn derived(words: &[&str]) -> Self {
        let hash = fnv1a_of_words(words);
        let [a, b, c, d] = ((hash ^ (hash >> 32)) as u32).to_be_bytes();
        Self([0x02, 0x54, a, b, c, d])
    }

    /// Parses `aa:bb:cc:dd:ee:ff`; refuses group addresses and the null address, which no station
    /// may own.
    pub fn parse(text: &str) -> Option<Self> {
        Self::bytes(text).filter(|bytes| bytes[0] & 1 == 0 && *bytes != [0; 6]).map(Self)
    }

    /// The six bytes of `aa:bb:cc:dd:ee:ff`, without a check of their meaning.
    pub(in crate::file) fn bytes(text: &str) -> Option<[u8; 6]> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2)?;
            *byte = u8::from_str_radix(part, 16).ok()?;
        }
        parts.next().is_none().then_some(bytes)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// An IPv4 network: base address and prefix length, 8 to 29.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    /// The base address, host bits zero.
    pub base: Ipv4Addr,
    /// Prefix length in bits.
    pub prefix: u8,
}

impl Subnet {
    /// Parses `10.87.0.0/24`. Host bits must be zero and the prefix 8 to 29.
    pub fn parse(text: &str) -> Option<Self> {
        let (base, prefix) = text.split_once('/')?;
        let base: Ipv4Addr = base.parse().ok()?;
        let prefix: u8 = prefix.parse().ok().filter(|p| (8..=29).contains(p))?;
        let subnet = Self { base, prefix };
        (u32::from(base) & !subnet.mask() == 0).then_some(subnet)
    }

    /// The subnet that was probably meant by a text that is none, as a hint: that of an address
    /// with bits behind the prefix.
    pub(in crate::file) fn near(text: &str) -> Option<String> {
        let (base, prefix) = text.trim().split_once('/')?;
        let base: Ipv4Addr = base.parse().ok()?;
        let prefix: u8 = prefix.parse().ok().filter(|p| (8..=29).contains(p))?;
        let base = Ipv4Addr::from(u32::from(base) & u32::MAX << (32 - prefix));
        Some(format!("{text} is an address in it: did you mean \"{base}/{prefix}\"?"))
    }

    fn mask(self) -> u32 {
        u32::MAX << (32 - self.prefix)
    }

    /// Such as 255.255.255.0 for a /24.
    pub fn netmask(self) -> Ipv4Addr {
        Ipv4Addr::from(self.mask())
    }

    /// The highest address of the subnet.
    pub fn broadcast(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) | !self.mask())
    }

    /// True for addresses a station may own: inside, neither base nor broadcast.
    pub fn has_host(self, ip: Ipv4Addr) -> bool {
        let v = u32::from(ip);
        v & self.mask() == u32::from(self.base) && ip != self.base && ip != self.broadcast()
    }

    /// The `n`-th address after the base.
    pub fn nth(self, n: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base) + n)
    }

    /// How many addresses stations may own.
    pub fn hosts(self) -> u32 {
        !self.mask() - 1
    }

    /// True if the two share an address.
    pub fn overlaps(self, other: Self) -> bool {
        let mask = self.mask() & other.mask();
        u32::from(self.base) & mask == u32::from(other.base) & mask
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix)
    }
}

/// IPv6 addresses: one, or those of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix6 {
    /// The address, its other bits zero.
    pub base: Ipv6Addr,
    /// How many leading bits count; 128 for one address.
    pub bits: u8,
}

impl Prefix6 {
    /// Parses `fd00::7` or `2001:db8:1::/64`. Bits behind the prefix must be zero, and groups and
    /// `::` have no member.
    pub fn parse(text: &str) -> Option<Self> {
        let (base, bits) = match text.split_once('/') {
            Some((base, bits)) => (base, bits.parse().ok().filter(|bits| (1..=128).contains(bits))?),
            None => (text, 128),
        };
        let base: Ipv6Addr = base.parse().ok()?;
        let rest = u128::MAX.checked_shr(u32::from(bits)).unwrap_or(0);
        let fits = base.to_bits() & rest == 0 && !base.is_multicast() && !base.is_unspecified();
        fits.then_some(Self { base, bits })
    }
}

/// The IPv6 addresses of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ipv6 {
    /// A prefix that is derived from the fabric's and the network's name.
    Auto,
    /// This /64.
    Prefix(Ipv6Addr),
    /// None: the gateway does nothing for IPv6.
    Off,
}

impl Ipv6 {
    /// Parses "auto", "off" or a /64.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "off" => Some(Self::Off),
            text => {
                let prefix = Prefix6::parse(text).filter(|p| p.bits == 64 && !p.base.is_unicast_link_local())?;
                Some(Self::Prefix(prefix.base))
            }
        }
    }
}

/// A unique local /64 (RFC 4193) that depends only on the names: 40 bits from the fabric's, 16 from
/// the network's. So members keep their addresses from one start to the next, and the networks of a
/// fabric share a /48.
pub(in crate::file) fn derived_prefix(fabric: &str, network: &str) -> Ipv6Addr {
    let hash = |words: &[&str]| {
        let mut hash = fnv1a_of_words(words);
        // The finaliser of splitmix64, so that names of a few letters reach all bits.
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    };
    let (global, subnet) = (hash(&["tombolo", fabric]) >> 24, hash(&["tombolo", fabric, network]) >> 48);
    Ipv6Addr::from_bits(0xfd << 120 | u128::from(global) << 80 | u128::from(subnet) << 64)
}
