//! The DHCP messages (RFC 2131, options RFC 2132) that the gateway reads and writes.
//!
//! Reading takes what a server needs of a message and refuses what no direct client sends: relayed
//! messages (`giaddr`), other hardware than Ethernet, a wrong magic number. Unknown and malformed
//! options are skipped, option 82 (relay agent information) among them.

use super::boot::{BootClient, FIELD_BYTES, HTTP_CLIENT};
use crate::frame::Mac;
use crate::gateway::names;
use smoltcp::wire::{DhcpMessageType, DhcpOpCode, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress};
use std::net::Ipv4Addr;

/// Port of servers (RFC 2131 §4.1).
pub(super) const SERVER_PORT: u16 = 67;
pub(super) const CLIENT_PORT: u16 = 68;
/// Messages are padded to this; some clients take nothing shorter (BOOTP's 300 bytes, RFC 1542
/// §2.1).
const MIN_MESSAGE_BYTES: usize = 300;
/// Bytes of the fixed part, with the magic number.
const FIXED_BYTES: usize = 240;
const MAGIC: u32 = 0x6382_5363;
const HARDWARE_ETHERNET: u16 = 1;

// Option codes of RFC 2132.
const OPTION_HOST_NAME: u8 = 12;
const OPTION_DOMAIN: u8 = 15;
const OPTION_MTU: u8 = 26;
const OPTION_BROADCAST: u8 = 28;
const OPTION_REQUESTED: u8 = 50;
const OPTION_MESSAGE_TYPE: u8 = 53;
const OPTION_SERVER: u8 = 54;
const OPTION_PARAMETERS: u8 = 55;
const OPTION_MESSAGE: u8 = 56;
const OPTION_MAX_SIZE: u8 = 57;
const OPTION_RENEWAL: u8 = 58;
const OPTION_REBINDING: u8 = 59;
const OPTION_VENDOR_CLASS: u8 = 60;
const OPTION_TFTP_SERVER: u8 = 66;
const OPTION_BOOT_FILE: u8 = 67;
const OPTION_USER_CLASS: u8 = 77;
/// RFC 4578 §2.1.
const OPTION_ARCHITECTURES: u8 = 93;
/// What every client takes as a message, with the headers of IP and UDP (RFC 2131 §2).
const EVERY_CLIENTS_BYTES: u16 = 576;
const HEADERS_BYTES: usize = 28;
// Fields that smoltcp's view does not have (RFC 2131 §2).
const FLAGS_FIELD: usize = 10;
const FILE_FIELD: usize = 108;
const FLAG_BROADCAST: u8 = 0x80;

/// What a client sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: DhcpMessageType,
    pub(super) transaction: u32,
    pub(super) broadcast: bool,
    /// The address that it says it has; zero where it has none.
    pub(super) client: Ipv4Addr,
    pub(super) mac: Mac,
    pub(super) requested: Option<Ipv4Addr>,
    pub(super) server: Option<Ipv4Addr>,
    /// The first label of its host name, in small letters, where that is a valid one.
    pub(super) name: Option<String>,
    /// Longest message that it takes, with the headers of IP and UDP.
    pub(super) max_bytes: u16,
    pub(super) boot: BootClient,
}

/// Reads a client's message; `None` where it is none.
pub(super) fn read(bytes: &[u8]) -> Option<Message> {
    let packet = DhcpPacket::new_checked(bytes).ok()?;
    let direct = packet.opcode() == DhcpOpCode::Request && packet.relay_agent_ip().is_unspecified();
    let ethernet = u16::from(packet.hardware_type()) == HARDWARE_ETHERNET && packet.hardware_len() == 6;
    if !direct || !ethernet || packet.magic_number() != MAGIC {
        return None;
    }
    let (mut kind, mut requested, mut server, mut name) = (None, None, None, None);
    let (mut max_bytes, mut boot) = (EVERY_CLIENTS_BYTES, BootClient::default());
    let address = |data: &[u8]| <[u8; 4]>::try_from(data).ok().map(Ipv4Addr::from);
    for DhcpOption { kind: code, data } in packet.options() {
        match code {
            OPTION_MESSAGE_TYPE if data.len() == 1 => kind = Some(DhcpMessageType::from(data[0])),
            OPTION_REQUESTED => requested = address(data),
            OPTION_SERVER => server = address(data),
            OPTION_HOST_NAME => {
                let text = std::str::from_utf8(data).ok().map(|t| t.trim_end_matches('\0'));
                name = text.and_then(|t| names::label(t.split('.').next().unwrap_or(t)));
            }
            OPTION_PARAMETERS => boot.asks |= data.contains(&OPTION_TFTP_SERVER) || data.contains(&OPTION_BOOT_FILE),
            OPTION_MAX_SIZE => {
                let said = data.try_into().map(u16::from_be_bytes).unwrap_or_default();
                max_bytes = said.max(EVERY_CLIENTS_BYTES);
            }
            OPTION_VENDOR_CLASS => boot.read_vendor_class(data),
            OPTION_USER_CLASS => boot.read_user_class(data),
            OPTION_ARCHITECTURES => boot.read_architectures(data),
            _ => {}
        }
    }
    boot.asks |= boot.ipxe || !boot.architectures.is_empty();
    Some(Message {
        kind: kind?,
        transaction: packet.transaction_id(),
        broadcast: bytes[FLAGS_FIELD] & FLAG_BROADCAST != 0,
        client: packet.client_ip(),
        mac: packet.client_hardware_address().0,
        requested,
        server,
        name,
        max_bytes,
        boot,
    })
}

/// What a network tells each of its clients.
#[derive(Clone, Debug)]
pub(super) struct Facts<'a> {
    pub(super) server: Ipv4Addr,
    pub(super) mask: Ipv4Addr,
    pub(super) broadcast: Ipv4Addr,
    pub(super) router: Option<Ipv4Addr>,
    pub(super) dns: &'a [Ipv4Addr],
    pub(super) domain: &'a str,
    pub(super) mtu: u16,
}

/// What an answer grants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grant<'a> {
    /// The address; `None` in the answer to INFORM, which leases nothing.
    pub(super) lease: Option<(Ipv4Addr, u32)>,
    /// The name by which the client goes.
    pub(super) name: Option<&'a str>,
    /// What the client boots, if anything.
    pub(super) boot: Option<Boot<'a>>,
}

/// What a client is told to boot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Boot<'a> {
    pub(super) server: Option<Ipv4Addr>,
    pub(super) file: &'a str,
}

/// An OFFER or ACK (`kind`) for `to`.
pub(super) fn grant(to: &Message, kind: DhcpMessageType, facts: &Facts<'_>, grant: &Grant<'_>) -> Vec<u8> {
    let seconds = grant.lease.map_or(0, |(_, seconds)| seconds);
    // The defaults of RFC 2131 §4.4.5: half of the time and seven eighths of it.
    let (renewal, rebinding) = ((seconds / 2).to_be_bytes(), (seconds - seconds / 8).to_be_bytes());
    let (mtu, broadcast) = (facts.mtu.to_be_bytes(), facts.broadcast.octets());
    let mut more = Vec::with_capacity(6);
    if grant.lease.is_some() {
        more.push(DhcpOption { kind: OPTION_RENEWAL, data: &renewal });
        more.push(DhcpOption { kind: OPTION_REBINDING, data: &rebinding });
    }
    more.push(DhcpOption { kind: OPTION_MTU, data: &mtu });
    more.push(DhcpOption { kind: OPTION_BROADCAST, data: &broadcast });
    if !facts.domain.is_empty() {
        more.push(DhcpOption { kind: OPTION_DOMAIN, data: facts.domain.as_bytes() });
    }
    if let Some(name) = grant.name {
        more.push(DhcpOption { kind: OPTION_HOST_NAME, data: name.as_bytes() });
    }
    let boot = grant.boot;
    if boot.is_some() && to.boot.http {
        more.push(DhcpOption { kind: OPTION_VENDOR_CLASS, data: HTTP_CLIENT });
    }
    let server = boot.and_then(|boot| boot.server);
    let server_text = server.map(|address| address.to_string());
    // The fields of the header say the same; a client that asks for options may read only these.
    let needs_options = boot.is_some_and(|boot| to.boot.asks || boot.file.len() > FIELD_BYTES);
    let plain = more.len();
    if let Some(boot) = boot.filter(|_| needs_options) {
        if let Some(text) = &server_text {
            more.push(DhcpOption { kind: OPTION_TFTP_SERVER, data: text.as_bytes() });
        }
        more.push(DhcpOption { kind: OPTION_BOOT_FILE, data: boot.file.as_bytes() });
    }
    let mut repr = DhcpRepr {
        server_ip: server.unwrap_or(Ipv4Addr::UNSPECIFIED),
        your_ip: grant.lease.map_or(Ipv4Addr::UNSPECIFIED, |(address, _)| address),
        router: facts.router,
        subnet_mask: Some(facts.mask),
        dns_servers: (!facts.dns.is_empty()).then(|| facts.dns.iter().copied().take(3).collect()),
        lease_duration: grant.lease.map(|(_, seconds)| seconds),
        additional_options: &more,
        ..blank(to, kind, facts.server)
    };
    if repr.buffer_len() + HEADERS_BYTES > usize::from(to.max_bytes.min(facts.mtu)) {
        repr.additional_options = &more[..plain];
    }
    let mut bytes = write(&repr);
    if let Some(boot) = boot.filter(|boot| boot.file.len() <= FIELD_BYTES) {
        bytes[FILE_FIELD..FILE_FIELD + boot.file.len()].copy_from_slice(boot.file.as_bytes());
    }
    bytes
}

/// A refusal of what `to` asked for.
pub(super) fn nak(to: &Message, server: Ipv4Addr, why: &str) -> Vec<u8> {
    let more = [DhcpOption { kind: OPTION_MESSAGE, data: why.as_bytes() }];
    let repr = DhcpRepr {
        client_ip: Ipv4Addr::UNSPECIFIED,
        additional_options: &more,
        ..blank(to, DhcpMessageType::Nak, server)
    };
    write(&repr)
}

fn blank(to: &Message, kind: DhcpMessageType, server: Ipv4Addr) -> DhcpRepr<'static> {
    DhcpRepr {
        message_type: kind,
        transaction_id: to.transaction,
        secs: 0,
        client_hardware_address: EthernetAddress(to.mac),
        client_ip: to.client,
        your_ip: Ipv4Addr::UNSPECIFIED,
        server_ip: Ipv4Addr::UNSPECIFIED,
        router: None,
        subnet_mask: None,
        relay_agent_ip: Ipv4Addr::UNSPECIFIED,
        broadcast: to.broadcast,
        requested_ip: None,
        client_identifier: None,
        server_identifier: Some(server),
        parameter_request_list: None,
        dns_servers: None,
        max_size: None,
        lease_duration: None,
        renew_duration: None,
        rebind_duration: None,
        additional_options: &[],
    }
}

fn write(repr: &DhcpRepr<'_>) -> Vec<u8> {
    debug_assert!(repr.buffer_len() >= FIXED_BYTES);
    let mut bytes = vec![0; repr.buffer_len().max(MIN_MESSAGE_BYTES)];
    let written = repr.emit(&mut DhcpPacket::new_unchecked(&mut bytes[..]));
    debug_assert!(written.is_ok(), "the buffer has the length that the message asked for");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_testing::hex;

    // Recorded between dhclient 4.4.3-P1 and dnsmasq 2.90 on both ends of a veth pair. The client
    // sent its host name and asked for options (`request` of dhclient.conf); dnsmasq had a host
    // with a fixed address and name, a router, a domain, an MTU, and the renewal times of RFC 2131
    // §4.4.5 without its random part.

    /// op, htype, hlen, hops, xid, secs, flags; ciaddr, yiaddr, siaddr, giaddr; chaddr. The 192
    /// bytes of sname and file, which follow, are zero.
    const FROM_CLIENT: &str = "01 01 06 00 bde5c975 0000 0000 00000000 00000000 00000000 00000000
        020000000001 00000000000000000000";
    const FROM_SERVER: &str = "02 01 06 00 bde5c975 0000 0000 00000000 0a09004d 0a090001 00000000
        020000000001 00000000000000000000";
    const DISCOVER: &str = "
        35 01 01
        0c 03 776562
        37 07 01 1c 03 0f 06 0c 1a # the options that it would like
        ff";
    const REQUEST: &str = "
        35 01 03
        36 04 0a090001 # server
        32 04 0a09004d # the address that was offered
        0c 03 776562
        37 07 01 1c 03 0f 06 0c 1a
        ff";
    /// The OFFER; the ACK has 5 for 2 in the first option.
    const OFFER: &str = "
        35 01 02
        36 04 0a090001 # server
        33 04 00000e10 # lease: 3600 s
        3a 04 00000708 # renewal: 1800 s
        3b 04 00000c4e # rebinding: 3150 s
        01 04 ffffff00 # mask
        1c 04 0a0900ff # broadcast
        06 04 0a090001 # name server
        0f 0c 6c61622e696e7465726e616c # lab.internal
        0c 03 776562
        1a 02 05dc # MTU: 1500
        03 04 0a090002 # router
        ff";

    fn recorded(fixed: &str, options: &str) -> Vec<u8> {
        let mut bytes = [hex(fixed), vec![0; 192], hex("63825363"), hex(options)].concat();
        bytes.resize(bytes.len().max(MIN_MESSAGE_BYTES), 0);
        bytes
    }

    /// The options in the order of their codes.
    fn sorted(mut options: &[u8]) -> Vec<(u8, &[u8])> {
        let mut all = vec![];
        while let [code, length, rest @ ..] = options {
            let (data, after) = rest.split_at(usize::from(*length));
            all.push((*code, data));
            options = after;
        }
        assert_eq!(options, [0xff], "an end mark, and nothing behind it");
        all.sort_unstable();
        all
    }

    fn message(kind: DhcpMessageType) -> Message {
        let is_request = kind == DhcpMessageType::Request;
        Message {
            kind,
            transaction: 0xbde5_c975,
            broadcast: false,
            client: Ipv4Addr::UNSPECIFIED,
            mac: [2, 0, 0, 0, 0, 1],
            requested: is_request.then_some(Ipv4Addr::new(10, 9, 0, 77)),
            server: is_request.then_some(Ipv4Addr::new(10, 9, 0, 1)),
            name: Some("web".into()),
            max_bytes: 576,
            boot: BootClient::default(),
        }
    }

    #[test]
    fn what_dhclient_sends_is_read() {
        for (options, kind) in [(DISCOVER, DhcpMessageType::Discover), (REQUEST, DhcpMessageType::Request)] {
            let bytes = recorded(FROM_CLIENT, options);
            assert_eq!((bytes.len(), read(&bytes)), (300, Some(message(kind))));
        }
        let mut broadcast = recorded(FROM_CLIENT, DISCOVER);
        broadcast[FLAGS_FIELD] = FLAG_BROADCAST;
        assert_eq!(read(&broadcast), Some(Message { broadcast: true, ..message(DhcpMessageType::Discover) }));
    }

    #[test]
    fn a_cut_message_is_none_until_it_says_its_kind_and_has_no_option_that_is_cut() {
        let bytes = recorded(FROM_CLIENT, REQUEST);
        // Where each option ends.
        let [kind, server, requested, name] = [3, 9, 15, 20].map(|end| FIXED_BYTES + end);
        for len in 0..bytes.len() {
            let whole = message(DhcpMessageType::Request);
            let expected = (len >= kind).then(|| Message {
                server: whole.server.filter(|_| len >= server),
                requested: whole.requested.filter(|_| len >= requested),
                name: whole.name.clone().filter(|_| len >= name),
                ..whole
            });
            assert_eq!(read(&bytes[..len]), expected, "{len} bytes");
        }
    }

    #[test]
    fn an_answer_has_the_bytes_that_dnsmasq_sends_for_the_same_facts() {
        let ours = Ipv4Addr::new(10, 9, 0, 1);
        let facts = Facts {
            server: ours,
            mask: Ipv4Addr::new(255, 255, 255, 0),
            broadcast: Ipv4Addr::new(10, 9, 0, 255),
            router: Some(Ipv4Addr::new(10, 9, 0, 2)),
            dns: &[ours],
            domain: "lab.internal",
            mtu: 1500,
        };
        // dnsmasq names itself as the next server in any case.
        let boot = Some(Boot { server: Some(ours), file: "" });
        let granted = Grant { lease: Some((Ipv4Addr::new(10, 9, 0, 77), 3600)), name: Some("web"), boot };
        let offer = recorded(FROM_SERVER, OFFER);
        let mut ack = offer.clone();
        ack[FIXED_BYTES + 2] = 5;
        for (asked, kind, golden) in [
            (DhcpMessageType::Discover, DhcpMessageType::Offer, offer),
            (DhcpMessageType::Request, DhcpMessageType::Ack, ack),
        ] {
            let answer = grant(&message(asked), kind, &facts, &granted);
            assert_eq!((answer.len(), golden.len()), (315, 315));
            assert_eq!(answer[..FIXED_BYTES], golden[..FIXED_BYTES]);
            // The order of options is each server's own (RFC 2131 §4.1); that of ours is in the
            // golden exchange of tests/dhcp.rs.
            assert_eq!(sorted(&answer[FIXED_BYTES..]), sorted(&golden[FIXED_BYTES..]));
            assert_eq!(read(&answer), None, "an answer is no client's message");
        }
    }

    #[test]
    fn a_refusal_has_the_bytes_of_the_rfc() {
        // Written out from RFC 2131 §2 and table 3 (of the addresses only chaddr; message type,
        // server and a text), and RFC 2132 §9.9 (the text).
        let fixed = "02 01 06 00 bde5c975 0000 0000 00000000 00000000 00000000 00000000
            020000000001 00000000000000000000";
        let golden = recorded(fixed, "35 01 06  36 04 0a090001  38 05 74616b656e  ff");
        assert_eq!(nak(&message(DhcpMessageType::Request), Ipv4Addr::new(10, 9, 0, 1), "taken"), golden);
    }
}
