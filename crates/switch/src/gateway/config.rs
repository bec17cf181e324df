//! What a gateway is told, and what is wrong with it where it cannot be.

use super::lease::MAX_POOL;
use super::names::{self, MAX_MEMBERS};
use crate::frame::Mac;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Longest domain, so that no DHCP answer exceeds the 576 bytes that every client takes (RFC 2131
/// §2).
pub const MAX_DOMAIN_BYTES: usize = 100;
/// Shortest lease: clients renew at half of it.
pub const MIN_LEASE_SECS: u32 = 10;

/// Settings of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Source MAC address of all that the gateway sends.
    pub mac: Mac,
    /// IPv4 address at which it answers ARP, ICMP echo, DHCP and DNS.
    pub address: Ipv4Addr,
    /// Length of the subnet's prefix, 8 to 30.
    pub prefix: u8,
    /// MTU of the network in bytes, 576 to 65,000; clients are told (option 26).
    pub mtu: u16,
    /// The router that clients are told (option 3), which need not be the gateway; `None`: they get
    /// none.
    pub router: Option<Ipv4Addr>,
    /// The name servers that clients are told (option 6), at most 3; empty: the gateway itself.
    pub dns: Vec<Ipv4Addr>,
    /// The domain of the members' names (option 15); empty: names have one label only.
    pub domain: String,
    /// Label under which the gateway itself is found in DNS.
    pub name: String,
    /// Whether names of elsewhere go to the shell as [`super::UpstreamQuery`]; otherwise they are
    /// refused.
    pub forward: bool,
    /// The DHCP server; `None`: none.
    pub dhcp: Option<DhcpConfig>,
    /// What it does for IPv6; `None`: nothing.
    pub ipv6: Option<Ipv6Config>,
}

/// Settings of IPv6.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipv6Config {
    /// The network's prefix, a /64. The gateway has its address ::1, and the link-local one of its
    /// MAC address.
    pub prefix: Ipv6Addr,
    /// MAC address of the router that advertisements speak for; `None`: the gateway's.
    pub router: Option<Mac>,
    /// How long members may use that as their default router, in seconds; 0: it is none, and
    /// members have no default route for IPv6.
    pub router_secs: u16,
}

impl Ipv6Config {
    /// The prefix without a way out.
    pub fn new(prefix: Ipv6Addr) -> Ipv6Config {
        Ipv6Config { prefix, router: None, router_secs: 0 }
    }

    /// The address with these last 64 bits.
    pub fn host(&self, host: u64) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.prefix.to_bits() & !u128::from(u64::MAX) | u128::from(host))
    }

    /// The gateway's address.
    pub fn address(&self) -> Ipv6Addr {
        self.host(1)
    }

    /// Whether the prefix is that of `address`.
    pub fn holds(&self, address: Ipv6Addr) -> bool {
        (self.prefix.to_bits() ^ address.to_bits()) >> 64 == 0
    }

    fn check(&self) -> Result<(), ConfigError> {
        let prefix = self.prefix;
        let usable = prefix.to_bits() as u64 == 0
            && !prefix.is_unspecified()
            && !prefix.is_multicast()
            && !prefix.is_unicast_link_local();
        if usable && self.router_secs <= 9000 { Ok(()) } else { Err(ConfigError::Ipv6(prefix)) }
    }
}

/// Settings of the DHCP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhcpConfig {
    /// First and last address of the dynamic leases.
    pub range: (Ipv4Addr, Ipv4Addr),
    /// Time of a lease in seconds.
    pub lease_secs: u32,
    /// Most dynamic leases of one port of the switch; `None`: half of the range, so that one port
    /// never takes all.
    pub leases_per_port: Option<u32>,
}

/// Why a configuration, or a change of it, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ConfigError {
    /// The prefix is out of bounds.
    #[error("a network's prefix is /8 to /30; /{0} was given")]
    Prefix(u8),
    /// The MTU is out of bounds.
    #[error("a network's MTU is 576 to 65000 bytes; {0} was given")]
    Mtu(u16),
    /// An address is not a host's address of the subnet.
    #[error("the {what} {address} is not an address of a host in the network {subnet}; choose one inside")]
    Outside {
        /// What the address is for.
        what: &'static str,
        address: Ipv4Addr,
        /// The subnet, as `10.0.0.0/24`.
        subnet: String,
    },
    /// The range of dynamic leases is empty, too long, or reversed.
    #[error("the DHCP range {0} to {1} is not a range of 1 to 65536 addresses; give the lower address first")]
    Range(Ipv4Addr, Ipv4Addr),
    /// The lease time is too short.
    #[error("a lease lasts at least 10 seconds; {0} was given")]
    LeaseTime(u32),
    /// The quota is zero.
    #[error("a port must be allowed at least 1 lease; 0 was given")]
    Quota,
    /// The MAC address is a group's or zero.
    #[error("the gateway's MAC address must be one station's and not zero")]
    Mac,
    /// A name is not a host's name.
    #[error("{0:?} is not a host name: up to 63 letters, digits and inner hyphens, without a dot")]
    Name(String),
    /// The domain is not one.
    #[error("{0:?} is not a domain: host names with dots between them, up to 100 bytes")]
    Domain(String),
    /// Too many name servers.
    #[error("expected at most 3 name servers for clients, found {0}")]
    NameServers(usize),
    /// Another member has the MAC address or the address.
    #[error("the {what} of {name:?} is that of {other:?} already; give each member its own")]
    Taken {
        /// MAC address or address.
        what: &'static str,
        /// The member that was to be added.
        name: String,
        /// The member that has it.
        other: String,
    },
    /// The IPv6 prefix cannot be served.
    #[error(
        "{0}/64 is not an IPv6 prefix of a network; give one like fd00:1:2:3::/64, and a router for at most 9000 s"
    )]
    Ipv6(Ipv6Addr),
    #[error("a network has at most {MAX_MEMBERS} named members")]
    TooManyMembers,
}

impl GatewayConfig {
    /// The mask of the subnet.
    pub fn mask(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32::MAX << (32 - u32::from(self.prefix.clamp(1, 32))))
    }

    /// The broadcast address of the subnet.
    pub fn broadcast(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() | !self.mask().to_bits())
    }

    /// The address of the subnet itself.
    pub fn network(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() & self.mask().to_bits())
    }

    /// Whether `address` is a host's address of the subnet.
    pub fn has_host(&self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.mask().to_bits() == self.network().to_bits()
            && address != self.network()
            && address != self.broadcast()
    }

    /// The range of dynamic leases for a subnet whose file names none: from the sixteenth address
    /// on, or from the second in a subnet of fewer than 32.
    pub fn default_range(&self) -> (Ipv4Addr, Ipv4Addr) {
        let (network, broadcast) = (self.network().to_bits(), self.broadcast().to_bits());
        let first = network + if self.prefix <= 27 { 16 } else { 1 };
        let last = (broadcast - 1).min(first.saturating_add(MAX_POOL - 1));
        (Ipv4Addr::from_bits(first), Ipv4Addr::from_bits(last))
    }

    pub(super) fn domain_labels(&self) -> Result<Vec<String>, ConfigError> {
        let wrong = || ConfigError::Domain(self.domain.clone());
        if self.domain.is_empty() {
            return Ok(Vec::new());
        }
        if self.domain.len() > MAX_DOMAIN_BYTES {
            return Err(wrong());
        }
        self.domain.split('.').map(|label| names::label(label).ok_or_else(wrong)).collect()
    }

    /// Whether it can be served.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(8..=30).contains(&self.prefix) {
            return Err(ConfigError::Prefix(self.prefix));
        }
        if !(576..=65_000).contains(&self.mtu) {
            return Err(ConfigError::Mtu(self.mtu));
        }
        if super::packet::is_group(self.mac) || self.mac == [0; 6] {
            return Err(ConfigError::Mac);
        }
        self.inside("gateway's address", self.address)?;
        if let Some(router) = self.router {
            self.inside("router", router)?;
        }
        if self.dns.len() > 3 {
            return Err(ConfigError::NameServers(self.dns.len()));
        }
        names::label(&self.name).ok_or_else(|| ConfigError::Name(self.name.clone()))?;
        self.domain_labels()?;
        if let Some(ipv6) = &self.ipv6 {
            ipv6.check()?;
        }
        let Some(dhcp) = &self.dhcp else { return Ok(()) };
        let (first, last) = dhcp.range;
        self.inside("first address of the DHCP range", first)?;
        self.inside("last address of the DHCP range", last)?;
        if first > last || last.to_bits() - first.to_bits() >= MAX_POOL {
            return Err(ConfigError::Range(first, last));
        }
        if dhcp.lease_secs < MIN_LEASE_SECS {
            return Err(ConfigError::LeaseTime(dhcp.lease_secs));
        }
        if dhcp.leases_per_port == Some(0) {
            return Err(ConfigError::Quota);
        }
        Ok(())
    }

    /// Whether `address` may be given to a member or a role.
    pub(super) fn inside(&self, what: &'static str, address: Ipv4Addr) -> Result<(), ConfigError> {
        if self.has_host(address) {
            return Ok(());
        }
        let subnet = format!("{}/{}", self.network(), self.prefix);
        Err(ConfigError::Outside { what, address, subnet })
    }
}
