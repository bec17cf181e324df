//! What the frames of a flow have in common, at a chain's place in the kernel: what a rule loads.
//!
//! The frames that the bypass takes are untagged, have neither IPv4 options nor IPv6 extension
//! headers, and carry TCP with ACK and without SYN, FIN and RST, UDP or an ICMP echo. All frames of
//! a flow have the same addresses, ports, TOS, TTL, fragment bits, flow label and mark
//! (ebpf/validate.h).

use super::ruleset::{Hook, INET, IPV4, IPV6, NETDEV};
use super::value::{Cell, Field};
use serde::{Deserialize, Serialize};

/// Hooks of ip, ip6 and inet.
const PREROUTING: u32 = 0;
const FORWARD: u32 = 2;
const POSTROUTING: u32 = 4;
const INET_INGRESS: u32 = 5;
/// Hooks of netdev.
const INGRESS: u32 = 0;
const EGRESS: u32 = 1;
/// Where connection tracking and both translations are among the chains of a hook.
const PRIORITY_CONNTRACK: i32 = -200;
const PRIORITY_DNAT: i32 = -100;
const PRIORITY_SNAT: i32 = 100;

/// Headers that a payload expression counts from.
pub(crate) const LINK_HEADER: u32 = 0;
pub(crate) const NETWORK_HEADER: u32 = 1;
pub(crate) const TRANSPORT_HEADER: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
    Echo,
}

/// A kind of flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct World {
    pub v6: bool,
    pub protocol: Protocol,
    /// 0 established, 1 related, 2 new, 3 untracked, 4 invalid or without connection tracking.
    pub state: usize,
}

/// The bits of `ct state` in the order of `World::state`.
const STATES: [u32; 5] = [1 << 1, 1 << 2, 1 << 3, 1 << 6, 1 << 0];

impl World {
    pub(crate) fn all() -> Vec<World> {
        let mut worlds = vec![];
        for v6 in [false, true] {
            for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
                worlds.extend((0..STATES.len()).map(|state| World { v6, protocol, state }));
            }
        }
        // Of TCP only established connections are learned.
        worlds.retain(|w| w.protocol != Protocol::Tcp || !(1..3).contains(&w.state));
        worlds
    }

    /// As `world_of` in ebpf/judges.h.
    pub(crate) fn bit(self) -> u32 {
        1 << ((3 * usize::from(self.v6) + self.protocol as usize) * STATES.len() + self.state)
    }

    pub(crate) fn number(self) -> u8 {
        match (self.protocol, self.v6) {
            (Protocol::Tcp, _) => 6,
            (Protocol::Udp, _) => 17,
            (Protocol::Echo, false) => 1,
            (Protocol::Echo, true) => 58,
        }
    }

    /// The bit of `ct state`.
    pub(crate) fn state_bit(self) -> u32 {
        STATES[self.state]
    }

    /// Whether the flow belongs to a connection.
    pub(crate) fn is_tracked(self) -> bool {
        self.state < 3
    }

    fn ethernet_type(self) -> [u8; 2] {
        if self.v6 { [0x86, 0xdd] } else { [0x08, 0x00] }
    }
}

/// An attached interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Port {
    pub slot: u32,
    pub index: u32,
    pub name: String,
}

/// What is known at a base chain's place in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub is_ingress: bool,
    pub is_egress: bool,
    /// `ct state` is that of the flow.
    pub knows_state: bool,
    pub knows_output: bool,
    /// `meta nfproto` is the family of the packet.
    pub knows_family: bool,
    /// Whether addresses are those behind the translation; none: not known.
    pub source_is_out: Option<bool>,
    pub destination_is_out: Option<bool>,
}

impl Position {
    /// None: forwarded frames do not pass it.
    pub(crate) fn of(family: u8, hook: &Hook) -> Option<Position> {
        let forward = Position {
            is_ingress: false,
            is_egress: false,
            knows_state: true,
            knows_output: true,
            knows_family: true,
            source_is_out: Some(false),
            destination_is_out: Some(true),
        };
        let behind = |own: i32| (hook.priority != own).then_some(hook.priority > own);
        let ingress = Position {
            is_ingress: true,
            knows_state: false,
            knows_output: false,
            knows_family: false,
            destination_is_out: Some(false),
            ..forward
        };
        match (family, hook.number) {
            (INET | IPV4 | IPV6, PREROUTING) => Some(Position {
                knows_state: hook.priority > PRIORITY_CONNTRACK,
                knows_output: false,
                destination_is_out: behind(PRIORITY_DNAT),
                ..forward
            }),
            (INET | IPV4 | IPV6, FORWARD) => Some(forward),
            (INET | IPV4 | IPV6, POSTROUTING) => Some(Position { source_is_out: behind(PRIORITY_SNAT), ..forward }),
            (INET, INET_INGRESS) | (NETDEV, INGRESS) => Some(ingress),
            (NETDEV, EGRESS) => {
                Some(Position { is_egress: true, knows_family: false, source_is_out: Some(true), ..forward })
            }
            _ => None,
        }
    }

    fn field(is_known: bool, field: Field, byte: usize) -> Cell {
        if is_known { Cell::of(field, byte as u8) } else { Cell::STABLE }
    }
}

/// A byte of the packet, `n` bytes behind where a header begins.
pub(crate) fn payload(world: World, at: Position, header: u32, n: usize) -> Cell {
    let source = |field, byte| Position::field(at.source_is_out.is_some(), field, byte);
    let destination = |field, byte| Position::field(at.destination_is_out.is_some(), field, byte);
    match (header, world.v6, n) {
        (LINK_HEADER, _, 0..6) => Cell::STABLE,
        // What goes out has the interface's own.
        (LINK_HEADER, _, 6..12) if at.is_egress => Cell::STABLE,
        (LINK_HEADER, _, 6..12) => Cell::varying("the source's Ethernet address"),
        (LINK_HEADER, _, 12..14) => Cell::exact(world.ethernet_type()[n - 12]),
        (LINK_HEADER, ..) => payload(world, at, NETWORK_HEADER, n - 14),
        (NETWORK_HEADER, false, 0) => Cell::exact(0x45),
        (NETWORK_HEADER, false, 2 | 3) => Cell::varying("IPv4's length"),
        (NETWORK_HEADER, false, 4 | 5) => Cell::varying("IPv4's id"),
        // No fragment; DF and the reserved bit are the flow's.
        (NETWORK_HEADER, false, 6) => Cell::partly(0x3f, 0),
        (NETWORK_HEADER, false, 7) => Cell::exact(0),
        (NETWORK_HEADER, false, 1 | 8) => Cell::STABLE,
        (NETWORK_HEADER, false, 9) => Cell::exact(world.number()),
        (NETWORK_HEADER, false, 10 | 11) => Cell::varying("IPv4's checksum"),
        (NETWORK_HEADER, false, 12..16) => source(Field::Source, n - 12),
        (NETWORK_HEADER, false, 16..20) => destination(Field::Destination, n - 16),
        (NETWORK_HEADER, false, _) => payload(world, at, TRANSPORT_HEADER, n - 20),
        (NETWORK_HEADER, true, 0) => Cell::partly(0xf0, 0x60),
        (NETWORK_HEADER, true, 1..4 | 7) => Cell::STABLE,
        (NETWORK_HEADER, true, 4 | 5) => Cell::varying("IPv6's length"),
        (NETWORK_HEADER, true, 6) => Cell::exact(world.number()),
        (NETWORK_HEADER, true, 8..24) => source(Field::Source, n - 8),
        (NETWORK_HEADER, true, 24..40) => destination(Field::Destination, n - 24),
        (NETWORK_HEADER, true, _) => payload(world, at, TRANSPORT_HEADER, n - 40),
        (TRANSPORT_HEADER, ..) => match (world.protocol, n) {
            (Protocol::Tcp | Protocol::Udp, 0 | 1) => source(Field::SourcePort, n),
            (Protocol::Tcp | Protocol::Udp, 2 | 3) => destination(Field::DestinationPort, n - 2),
            (Protocol::Tcp, 4..12) => Cell::varying("TCP's sequence numbers"),
            (Protocol::Tcp, 12) => Cell::varying("TCP's header length"),
            // ACK, and neither FIN, SYN nor RST.
            (Protocol::Tcp, 13) => Cell { varies: 0xe8, what: "TCP's flags", ..Cell::partly(0x17, 0x10) },
            (Protocol::Tcp, 14 | 15) => Cell::varying("TCP's window"),
            (Protocol::Tcp, 16 | 17) => Cell::varying("TCP's checksum"),
            (Protocol::Tcp, _) => Cell::varying("TCP's options or payload"),
            (Protocol::Udp, 4 | 5) => Cell::varying("UDP's length"),
            (Protocol::Udp, 6 | 7) => Cell::varying("UDP's checksum"),
            // A request or a reply.
            (Protocol::Echo, 0) if world.v6 => Cell::partly(0xfe, 0x80),
            (Protocol::Echo, 0) => Cell::partly(0xf7, 0),
            (Protocol::Echo, 1) => Cell::exact(0),
            (Protocol::Echo, 2 | 3) => Cell::varying("ICMP's checksum"),
            (Protocol::Echo, 4 | 5) => Cell::STABLE,
            (Protocol::Echo, 6 | 7) => Cell::varying("ICMP's sequence number"),
            (Protocol::Udp | Protocol::Echo, _) => Cell::varying("the payload"),
        },
        _ => Cell::varying("the payload"),
    }
}

/// Whether what a rule writes there is seen when a flow is learned. It is seen if a frame that
/// already has the written value is told from one that has not (ebpf/validate.h,
/// `differs_in_fields`), or if the kernel itself rewrites the value. Other fields that vary in a
/// packet may not be written.
pub(crate) fn may_be_written(world: World, header: u32, n: usize) -> bool {
    match (header, world.v6) {
        (LINK_HEADER, _) => n < 14 || may_be_written(world, NETWORK_HEADER, n - 14),
        (NETWORK_HEADER, false) if n < 20 => !(2..4).contains(&n),
        (NETWORK_HEADER, false) => may_be_written(world, TRANSPORT_HEADER, n - 20),
        (NETWORK_HEADER, true) if n < 40 => !(4..6).contains(&n),
        (NETWORK_HEADER, true) => may_be_written(world, TRANSPORT_HEADER, n - 40),
        (TRANSPORT_HEADER, _) => n < 4 && world.protocol != Protocol::Echo,
        _ => false,
    }
}

/// What a load has in a register: these bytes, or each byte so.
pub(crate) enum Loaded {
    Exact(Vec<u8>),
    Cells(Vec<Cell>),
    Each(Cell),
    /// There is no such thing, which ends the rule.
    Nothing,
}

/// `enum nft_meta_keys`.
pub(crate) mod meta {
    pub(crate) const LEN: u32 = 0;
    pub(crate) const PROTOCOL: u32 = 1;
    pub(crate) const IIF: u32 = 4;
    pub(crate) const OIF: u32 = 5;
    pub(crate) const IIFNAME: u32 = 6;
    pub(crate) const OIFNAME: u32 = 7;
    pub(crate) const NFTRACE: u32 = 12;
    pub(crate) const NFPROTO: u32 = 15;
    pub(crate) const L4PROTO: u32 = 16;
    pub(crate) const CPU: u32 = 20;
    pub(crate) const PRANDOM: u32 = 24;
    pub(crate) const TIME_NS: u32 = 30;
    pub(crate) const TIME_DAY: u32 = 31;
    pub(crate) const TIME_HOUR: u32 = 32;
    /// Keys behind this one are not known here.
    pub(crate) const SDIFNAME: u32 = 34;
}

fn all_of(field: Field, bytes: u8) -> Loaded {
    Loaded::Cells((0..bytes).map(|n| Cell::of(field, n)).collect())
}

pub(crate) fn meta(world: World, at: Position, key: u32) -> Loaded {
    match key {
        meta::LEN => Loaded::Each(Cell::varying("meta length")),
        meta::PROTOCOL => Loaded::Exact(world.ethernet_type().to_vec()),
        meta::IIF if !at.is_egress => all_of(Field::Input, 4),
        meta::IIFNAME if !at.is_egress => all_of(Field::InputName, 16),
        meta::OIF if at.knows_output => all_of(Field::Output, 4),
        meta::OIFNAME if at.knows_output => all_of(Field::OutputName, 16),
        meta::NFPROTO if at.knows_family => Loaded::Exact(vec![if world.v6 { IPV6 } else { IPV4 }]),
        meta::L4PROTO => Loaded::Exact(vec![world.number()]),
        meta::NFTRACE => Loaded::Each(Cell::varying("meta nftrace")),
        meta::CPU => Loaded::Each(Cell::varying("meta cpu")),
        meta::PRANDOM => Loaded::Each(Cell::varying("meta random")),
        meta::TIME_NS | meta::TIME_DAY | meta::TIME_HOUR => Loaded::Each(Cell::varying("the time")),
        _ if key <= meta::SDIFNAME => Loaded::Each(Cell::STABLE),
        _ => Loaded::Each(Cell::varying("a meta key that is not known here")),
    }
}

/// `ct KEY` (`enum nft_ct_keys`).
pub(crate) fn ct(world: World, at: Position, key: u32) -> Loaded {
    const STATE: u32 = 0;
    const EXPIRATION: u32 = 5;
    const PACKETS: u32 = 14;
    const BYTES: u32 = 15;
    const AVERAGE: u32 = 16;
    const ID: u32 = 23;
    match key {
        STATE if at.knows_state => Loaded::Exact(world.state_bit().to_ne_bytes().to_vec()),
        STATE => Loaded::Each(Cell::STABLE),
        _ if at.knows_state && !world.is_tracked() => Loaded::Nothing,
        EXPIRATION => Loaded::Each(Cell::varying("ct expiration")),
        PACKETS => Loaded::Each(Cell::varying("ct packets")),
        BYTES => Loaded::Each(Cell::varying("ct bytes")),
        AVERAGE => Loaded::Each(Cell::varying("ct avgpkt")),
        _ if key <= ID => Loaded::Each(Cell::STABLE),
        _ => Loaded::Each(Cell::varying("a ct key that is not known here")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARDED: Hook = Hook { number: FORWARD, priority: 0, devices: vec![] };

    fn world(v6: bool, protocol: Protocol) -> World {
        World { v6, protocol, state: 0 }
    }

    #[test]
    fn each_kind_of_flow_has_a_bit_of_its_own() {
        let bits = World::all().into_iter().fold(0, |all: u32, w| {
            assert_eq!(all & w.bit(), 0);
            all | w.bit()
        });
        assert_eq!((World::all().len(), bits), (26, 0b11111_11111_11001_11111_11111_11001));
    }

    #[test]
    fn of_each_header_what_the_flow_has_is_stable_and_the_rest_varies() {
        let at = Position::of(INET, &FORWARDED).unwrap();
        let varies = |w, header, bytes| -> Vec<usize> {
            (0..bytes).filter(|n| payload(w, at, header, *n).varies != 0).collect()
        };
        let udp = world(false, Protocol::Udp);
        assert_eq!(varies(udp, NETWORK_HEADER, 30), [2, 3, 4, 5, 10, 11, 24, 25, 26, 27, 28, 29]);
        assert_eq!(varies(udp, TRANSPORT_HEADER, 10), [4, 5, 6, 7, 8, 9]);
        assert_eq!(varies(udp, LINK_HEADER, 18), [6, 7, 8, 9, 10, 11, 16, 17]);
        assert_eq!(varies(world(true, Protocol::Udp), NETWORK_HEADER, 46), [4, 5, 44, 45]);
        assert_eq!(varies(world(false, Protocol::Tcp), TRANSPORT_HEADER, 22), (4..22).collect::<Vec<_>>());
        assert_eq!(varies(world(true, Protocol::Echo), TRANSPORT_HEADER, 10), [2, 3, 6, 7, 8, 9]);
        assert_eq!(varies(udp, 3, 2), [0, 1]);
    }

    #[test]
    fn addresses_are_known_by_which_side_of_the_translation_a_chain_is() {
        let at = |family, number, priority| {
            Position::of(family, &Hook { number, priority, devices: vec![] })
                .map(|p| (p.source_is_out, p.destination_is_out, p.knows_state))
        };
        let (before, behind) = (Some(false), Some(true));
        assert_eq!(at(IPV4, PREROUTING, -300), Some((before, before, false)));
        assert_eq!(at(IPV4, PREROUTING, -150), Some((before, before, true)));
        assert_eq!(at(IPV4, PREROUTING, -100), Some((before, None, true)));
        assert_eq!(at(IPV6, FORWARD, 0), Some((before, behind, true)));
        assert_eq!(at(INET, POSTROUTING, 101), Some((behind, behind, true)));
        assert_eq!(at(NETDEV, EGRESS, 0), Some((behind, behind, true)));
        assert_eq!(at(NETDEV, INGRESS, 0), Some((before, before, false)));
        // Input and output of the host itself, bridges, ARP.
        assert_eq!([at(INET, 1, 0), at(INET, 3, 0), at(7, 0, 0), at(3, 0, 0)], [None; 4]);
    }
}
