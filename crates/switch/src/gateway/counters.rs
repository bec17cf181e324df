//! What a gateway counts. Each counter has one writer: the worker that owns its port.
//! `lease_writes` and the counters after it are written by the thread that keeps leases. Any thread
//! reads.

use crate::counters::Counter;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counters of a gateway; they only grow.
        #[derive(Debug, Default)]
        pub struct GatewayCounters { $($(#[doc = $doc])+ pub $name: Counter,)+ }

        impl GatewayCounters {
            /// Every counter: its name, what it counts, its value.
            pub fn all(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), concat!($($doc),+).trim_ascii(), self.$name.get()),)+]
            }
        }
    };
}

counters! {
    /// Frames that are none of the gateway's business: other stations', multicast, IPv6 without a
    /// prefix.
    ignored_frames,
    /// ARP requests for the gateway's address that were answered.
    arp_replies,
    /// ARP and neighbour discovery messages in which a guest claimed the gateway's own address.
    address_conflicts,
    /// ICMP echo requests answered.
    echo_replies,
    /// Packets sent to the gateway to be routed, which it does not do; answered with an ICMP error
    /// within a rate.
    not_routed_packets,
    /// ICMP errors sent.
    icmp_errors,
    /// Router solicitations of members.
    router_solicitations,
    /// Router solicitations that were not answered, since their port sent more than its rate
    /// allows.
    router_solicitations_throttled,
    /// Router advertisements sent, to all and to those that asked.
    router_advertisements,
    /// Router advertisements that withdrew the prefix and the router.
    router_withdrawals,
    /// Neighbour advertisements sent, for the gateway's IPv6 addresses.
    neighbour_advertisements,
    /// DHCPv6 messages that were cut short, relayed, or not as a message of their kind has to be.
    dhcp6_refused_messages,
    /// DHCPv6 solicitations without rapid commit.
    dhcp6_solicits,
    /// DHCPv6 messages that ask for a lease, or to keep one.
    dhcp6_requests,
    /// DHCPv6 answers that bound an address.
    dhcp6_replies,
    /// DHCPv6 messages that ask for the name server and the domain only.
    dhcp6_informations,
    /// DHCP messages that were cut short, relayed, or not of the station that sent them.
    dhcp_refused_messages,
    /// DHCP DISCOVER messages.
    dhcp_discovers,
    /// DHCP OFFER messages sent.
    dhcp_offers,
    /// DHCP REQUEST messages.
    dhcp_requests,
    /// DHCP ACK messages sent.
    dhcp_acks,
    /// DHCP NAK messages sent.
    dhcp_naks,
    /// DHCP RELEASE messages that ended a lease.
    dhcp_releases,
    /// DHCP DECLINE messages that put an address aside.
    dhcp_declines,
    /// Clients that got no address because none was free.
    dhcp_exhausted,
    /// Clients that got no address because their port holds its quota.
    dhcp_over_quota,
    /// Leases whose client asked for a name that is somebody else's.
    dhcp_name_conflicts,
    /// DHCP and DHCPv6 answers that told a client what to boot.
    boot_answers,
    /// DHCP messages dropped because their port sent more than its rate allows.
    dhcp_throttled,
    /// Changes of leases that were handed to the host to be kept.
    lease_changes,
    /// DNS messages that could not be read; those that are queries were answered with an error.
    dns_malformed,
    /// DNS queries answered from the network's own names.
    dns_local_answers,
    /// DNS queries about names or addresses of the network that no member has.
    dns_unknown_names,
    /// DNS queries refused: names of elsewhere without an uplink, classes and types that are not
    /// served.
    dns_refused,
    /// DNS queries handed to the host's name servers.
    dns_forwarded,
    /// Answers of the host's name servers that were delivered.
    dns_upstream_answers,
    /// Answers of name servers that fit no query: late, or not to the question that was asked.
    dns_upstream_strays,
    /// Forwarded queries answered with a failure: no name server answered in time, or too many were
    /// outstanding.
    dns_failures,
    /// TCP packets to the gateway that belong to no connection; answered with a reset within a
    /// rate.
    tcp_strays,
    /// TCP connections not let in because there were too many.
    tcp_refused,
    /// Frames that the gateway wanted to send while its queue was full.
    lost_answers,
    /// Times that changes of leases were appended to the journal.
    lease_writes,
    /// Times that the lease table was written as a snapshot, with which the journal starts afresh.
    lease_snapshots,
    /// Times that leases could not be written; it is tried again every second.
    lease_write_failures,
}
