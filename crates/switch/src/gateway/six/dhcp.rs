//! The DHCPv6 messages (RFC 8415, name servers RFC 3646, names RFC 4704) that the gateway reads and
//! writes.
//!
//! Reading takes what a server needs of a message, checks that a message of its kind may have it
//! (RFC 8415 §16), and skips unknown options. Lists are bounded: a message asks for at most
//! [`MAX_ASSOCIATIONS`] associations with [`MAX_ADDRESSES`] addresses each. Relayed messages are
//! refused.
//!
//! There is no library for this that fits: smoltcp has no DHCPv6, and the crate dhcproto brings a
//! DNS implementation with it.

use super::super::boot::{BootClient, HTTP_CLIENT};
use super::advertise::write_name;
use crate::frame::Mac;
use crate::gateway::names;
use std::net::Ipv6Addr;

pub(super) const SERVER_PORT: u16 = 547;
pub(super) const CLIENT_PORT: u16 = 546;
/// All servers and relays of the link.
pub(super) const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Most bytes of a DUID (RFC 8415 §11.1).
const MAX_DUID_BYTES: usize = 130;
pub(super) const MAX_ASSOCIATIONS: usize = 8;
pub(super) const MAX_ADDRESSES: usize = 8;

const CLIENT_ID: u16 = 1;
const SERVER_ID: u16 = 2;
const IA_NA: u16 = 3;
const IA_ADDRESS: u16 = 5;
const REQUESTED: u16 = 6;
const STATUS: u16 = 13;
const RAPID_COMMIT: u16 = 14;
const USER_CLASS: u16 = 15;
const VENDOR_CLASS: u16 = 16;
const DNS_SERVERS: u16 = 23;
const DOMAINS: u16 = 24;
const IA_PD: u16 = 25;
const NAME: u16 = 39;
// RFC 5970 §3.
const BOOT_URL: u16 = 59;
const ARCHITECTURES: u16 = 61;
/// The enterprise number that UEFI has in a vendor class.
const ENTERPRISE: u32 = 343;

// A message: its kind, the transaction's number, and options (RFC 8415 §8). An option: code and
// length, each a big-endian u16, and as many bytes (§21.1).
const HEAD_BYTES: usize = 4;
const OPTION_HEAD_BYTES: usize = 4;
/// An association's ID, and with the two times behind it (§21.4, §21.21).
const ASSOCIATION_ID_BYTES: usize = 4;
const ASSOCIATION_BYTES: usize = 12;
/// An address, before its two times (§21.6).
const ADDRESS_BYTES: usize = 16;

/// Kinds of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Solicit = 1,
    Advertise = 2,
    Request = 3,
    Confirm = 4,
    Renew = 5,
    Rebind = 6,
    Reply = 7,
    Release = 8,
    Decline = 9,
    Information = 11,
}

/// Status codes (RFC 8415 §21.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Status {
    Success = 0,
    NoAddress = 2,
    NoBinding = 3,
    NotOnLink = 4,
    NoPrefix = 6,
}

/// An identity association: what a client holds addresses by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Association {
    pub(super) id: [u8; 4],
    pub(super) addresses: Vec<Ipv6Addr>,
}

/// What a client sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) transaction: [u8; 3],
    pub(super) client: Option<Vec<u8>>,
    pub(super) server: Option<Vec<u8>>,
    pub(super) associations: Vec<Association>,
    /// Associations for prefixes, which are not delegated here.
    pub(super) prefixes: Vec<[u8; 4]>,
    pub(super) rapid: bool,
    /// The first label of its name, in small letters, where that is a valid one.
    pub(super) name: Option<String>,
    pub(super) boot: BootClient,
}

/// Splits the first option off: its code, its data, what follows.
fn option(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(OPTION_HEAD_BYTES)?;
    let (data, rest) = rest.split_at_checked(usize::from(u16::from_be_bytes([head[2], head[3]])))?;
    Some((u16::from_be_bytes([head[0], head[1]]), data, rest))
}

fn association(data: &[u8]) -> Option<Association> {
    // Its ID, then the two times that the client would like, which a server may ignore.
    let (id, mut rest) = (data.get(..ASSOCIATION_ID_BYTES)?.try_into().ok()?, data.get(ASSOCIATION_BYTES..)?);
    let mut addresses = Vec::new();
    while !rest.is_empty() {
        let (code, data, after) = option(rest)?;
        if code == IA_ADDRESS && addresses.len() < MAX_ADDRESSES {
            addresses.push(Ipv6Addr::from(<[u8; 16]>::try_from(data.get(..ADDRESS_BYTES)?).ok()?));
        }
        rest = after;
    }
    Some(Association { id, addresses })
}

/// The first label of a name in DNS form, behind the flags of option 39.
fn label(data: &[u8]) -> Option<String> {
    let length = usize::from(*data.get(1)?);
    names::label(std::str::from_utf8(data.get(2..2 + length)?).ok()?)
}

/// Reads a client's message; `None` where it is none, or is not as its kind has to be.
pub(super) fn read(bytes: &[u8]) -> Option<Message> {
    let (&[kind, a, b, c], mut rest) = bytes.split_first_chunk::<HEAD_BYTES>()?;
    let kind = match kind {
        1 => Kind::Solicit,
        3 => Kind::Request,
        4 => Kind::Confirm,
        5 => Kind::Renew,
        6 => Kind::Rebind,
        8 => Kind::Release,
        9 => Kind::Decline,
        11 => Kind::Information,
        _ => return None,
    };
    let mut message = Message {
        kind,
        transaction: [a, b, c],
        client: None,
        server: None,
        associations: Vec::new(),
        prefixes: Vec::new(),
        rapid: false,
        name: None,
        boot: BootClient::default(),
    };
    let duid = |data: &[u8]| (3..=MAX_DUID_BYTES).contains(&data.len()).then(|| data.to_vec());
    while !rest.is_empty() {
        let (code, data, after) = option(rest)?;
        match code {
            CLIENT_ID if message.client.is_none() => message.client = Some(duid(data)?),
            SERVER_ID if message.server.is_none() => message.server = Some(duid(data)?),
            CLIENT_ID | SERVER_ID => return None,
            IA_NA if message.associations.len() < MAX_ASSOCIATIONS => message.associations.push(association(data)?),
            IA_PD if message.prefixes.len() < MAX_ASSOCIATIONS => {
                message.prefixes.push(data.get(..ASSOCIATION_ID_BYTES)?.try_into().ok()?);
            }
            RAPID_COMMIT => message.rapid = true,
            NAME => message.name = label(data),
            REQUESTED => {
                message.boot.asks |= data.as_chunks::<2>().0.iter().any(|code| u16::from_be_bytes(*code) == BOOT_URL);
            }
            USER_CLASS => message.boot.read_user_class6(data),
            // Behind the enterprise number and a length.
            VENDOR_CLASS => message.boot.read_vendor_class(data.get(6..).unwrap_or_default()),
            ARCHITECTURES => message.boot.read_architectures(data),
            _ => {}
        }
        rest = after;
    }
    let (client, server) = (message.client.is_some(), message.server.is_some());
    let valid = match kind {
        Kind::Solicit | Kind::Confirm | Kind::Rebind => client && !server,
        Kind::Information => message.associations.is_empty() && message.prefixes.is_empty(),
        _ => client && server,
    };
    valid.then_some(message)
}

/// The gateway's DUID: by its MAC address (type 3).
pub(super) fn duid(mac: Mac) -> Vec<u8> {
    [&[0, 3, 0, 1][..], &mac].concat()
}

/// An address that an answer grants, and for how long; zero takes it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) address: Ipv6Addr,
    pub(super) secs: u32,
}

/// Writes an answer.
pub(super) struct Answer(Vec<u8>);

impl Answer {
    pub(super) fn new(to: &Message, kind: Kind, own: Mac) -> Answer {
        let [a, b, c] = to.transaction;
        let mut answer = Answer(vec![kind as u8, a, b, c]);
        if let Some(client) = &to.client {
            answer.option(CLIENT_ID, client);
        }
        answer.option(SERVER_ID, &duid(own));
        if to.rapid && to.kind == Kind::Solicit && kind == Kind::Reply {
            answer.option(RAPID_COMMIT, &[]);
        }
        answer
    }

    fn option(&mut self, code: u16, data: &[u8]) {
        self.0.extend_from_slice(&code.to_be_bytes());
        self.0.extend_from_slice(&(data.len() as u16).to_be_bytes());
        self.0.extend_from_slice(data);
    }

    fn status_data(status: Status, text: &str) -> Vec<u8> {
        [&(status as u16).to_be_bytes()[..], text.as_bytes()].concat()
    }

    pub(super) fn status(&mut self, status: Status, text: &str) {
        self.option(STATUS, &Answer::status_data(status, text));
    }

    /// An association with its addresses, and a status where there is something to say.
    pub(super) fn association(&mut self, id: [u8; 4], grants: &[Grant], status: Option<(Status, &str)>) {
        let secs = grants.iter().map(|g| g.secs).max().unwrap_or(0);
        // RFC 8415 §21.4: half of the time and eight tenths of it.
        let (renew, rebind) = (secs / 2, secs - secs / 5);
        let mut data = Answer([&id[..], &renew.to_be_bytes(), &rebind.to_be_bytes()].concat());
        for Grant { address, secs } in grants {
            let times = [secs.to_be_bytes(), secs.to_be_bytes()].concat();
            data.option(IA_ADDRESS, &[&address.octets()[..], &times].concat());
        }
        if let Some((status, text)) = status {
            data.option(STATUS, &Answer::status_data(status, text));
        }
        self.option(IA_NA, &data.0);
    }

    /// That no prefix is delegated for this association.
    pub(super) fn no_prefix(&mut self, id: [u8; 4]) {
        let mut data = Answer([&id[..], &[0; 8]].concat());
        data.option(STATUS, &Answer::status_data(Status::NoPrefix, "no prefixes are delegated here"));
        self.option(IA_PD, &data.0);
    }

    /// What every member may know: the name server and the domain.
    pub(super) fn facts(&mut self, dns: Ipv6Addr, domain: &[String]) {
        self.option(DNS_SERVERS, &dns.octets());
        if !domain.is_empty() {
            let mut name = Vec::with_capacity(64);
            write_name(&mut name, domain);
            self.option(DOMAINS, &name);
        }
    }

    /// What the client boots.
    pub(super) fn boot(&mut self, to: &BootClient, url: &str) {
        if to.http {
            let length = (HTTP_CLIENT.len() as u16).to_be_bytes();
            self.option(VENDOR_CLASS, &[&ENTERPRISE.to_be_bytes()[..], &length, HTTP_CLIENT].concat());
        }
        self.option(BOOT_URL, url.as_bytes());
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tombolo_testing::hex;

    // Recorded between dhclient 4.4.3-P1 and dnsmasq 2.90 on both ends of a veth pair. The client
    // sent a name and asked for name servers and domains; dnsmasq had a host with a fixed address,
    // a name server and a domain.

    const SOLICIT: &str = "
        01 b4a52d
        0001 000a 0003 0001 020000000001 # client: a DUID by its MAC address
        0006 0008 0017 0018 0017 0018 # it would like name servers and domains, twice
        0008 0002 0000 # elapsed time
        0027 0006 00 03 776562 00
        0003 000c 00000001 00000e10 00001518 # an association";
    const REQUEST: &str = "
        03 a9c4d5
        0001 000a 0003 0001 020000000001
        0002 000e 0001 0001 329daf7c 0200000000fe # server: dnsmasq's DUID, by MAC address and time
        0006 0008 0017 0018 0017 0018
        0008 0002 0000
        0027 0006 00 03 776562 00
        0003 0028 00000001 00000e10 00001518
          0005 0018 fd00000100020003000000000000004d 00001c20 00001d4c";
    const REPLY: &str = "
        07 a9c4d5
        0001 000a 0003 0001 020000000001
        0002 000e 0001 0001 329daf7c 0200000000fe
        0003 0028 00000001 00000708 00000c4e
          0005 0018 fd00000100020003000000000000004d 00000e10 00000e10
        000d 0009 0000 73756363657373 # success
        0018 000e 03 6c6162 08 696e7465726e616c 00
        0017 0010 fd000001000200030000000000000001
        0027 0013 03 03 776562 03 6c6162 08 696e7465726e616c 00";
    const ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0x4d);

    fn message(kind: Kind, transaction: [u8; 3]) -> Message {
        let is_request = kind == Kind::Request;
        Message {
            kind,
            transaction,
            client: Some(vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 1]),
            server: is_request.then(|| vec![0, 1, 0, 1, 0x32, 0x9d, 0xaf, 0x7c, 2, 0, 0, 0, 0, 0xfe]),
            associations: vec![Association {
                id: [0, 0, 0, 1],
                addresses: is_request.then_some(ADDRESS).into_iter().collect(),
            }],
            prefixes: vec![],
            rapid: false,
            name: Some("web".into()),
            boot: BootClient::default(),
        }
    }

    #[test]
    fn what_dhclient_sends_is_read() {
        assert_eq!(read(&hex(SOLICIT)), Some(message(Kind::Solicit, [0xb4, 0xa5, 0x2d])));
        assert_eq!(read(&hex(REQUEST)), Some(message(Kind::Request, [0xa9, 0xc4, 0xd5])));
        assert_eq!(read(&hex(REPLY)), None, "a server's");
    }

    #[test]
    fn a_message_that_is_cut_inside_an_option_is_none() {
        for (text, needed) in [(SOLICIT, CLIENT_ID), (REQUEST, SERVER_ID)] {
            let bytes = hex(text);
            // Where an option ends, and whether all that the message must have came before.
            let mut ends = vec![(HEAD_BYTES, false)];
            while let Some((end, complete)) = ends.last().copied().filter(|(end, _)| *end < bytes.len()) {
                let (code, data, _) = option(&bytes[end..]).unwrap();
                ends.push((end + OPTION_HEAD_BYTES + data.len(), complete || code == needed));
            }
            for len in 0..bytes.len() {
                assert_eq!(read(&bytes[..len]).is_some(), ends.contains(&(len, true)), "{len} bytes");
            }
        }
    }

    #[test]
    fn an_answer_has_the_bytes_that_dnsmasq_sends_for_the_same_facts() {
        let own = [2, 0, 0, 0, 0, 0xfe];
        let mut answer = Answer::new(&message(Kind::Request, [0xa9, 0xc4, 0xd5]), Kind::Reply, own);
        answer.association([0, 0, 0, 1], &[Grant { address: ADDRESS, secs: 3600 }], None);
        answer.status(Status::Success, "success");
        answer.facts(Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 1), &["lab".into(), "internal".into()]);
        let golden = REPLY
            // Our DUID has no time in it (RFC 8415 §11.4).
            .replace("0002 000e 0001 0001 329daf7c 0200000000fe", "0002 000a 0003 0001 0200000000fe")
            // We rebind after eight tenths, as RFC 8415 §21.4 recommends; dnsmasq after seven
            // eighths, as over DHCPv4.
            .replace("00000c4e", "00000b40");
        // dnsmasq tells the client its whole name, in the last option.
        let golden = hex(golden.rsplit_once("0027").unwrap().0);
        let options = |bytes: &[u8]| {
            let (mut all, mut rest) = (vec![], &bytes[HEAD_BYTES..]);
            while let Some((code, data, after)) = option(rest) {
                all.push((code, data.to_vec()));
                rest = after;
            }
            assert!(rest.is_empty());
            all.sort_unstable();
            all
        };
        let bytes = answer.into_bytes();
        assert_eq!((bytes.len(), &bytes[..HEAD_BYTES]), (golden.len(), &golden[..HEAD_BYTES]));
        // The order of options is each server's own (RFC 8415 §21.1).
        assert_eq!(options(&bytes), options(&golden));
    }

    #[test]
    fn refusals_and_boot_options_are_those_of_the_rfcs() {
        let own = [2, 0, 0, 0, 0, 0xfe];
        let mut answer = Answer::new(&message(Kind::Solicit, [1, 2, 3]), Kind::Advertise, own);
        answer.association([0, 0, 0, 1], &[], Some((Status::NoAddress, "none")));
        answer.no_prefix([0, 0, 0, 9]);
        answer.boot(&BootClient { http: true, ..BootClient::default() }, "http://b/a");
        // Written out from RFC 8415 §8, §21.2 to §21.4, §21.13, §21.16 and §21.21, and RFC 5970
        // §3.1.
        let golden = "
            02 010203
            0001 000a 0003 0001 020000000001
            0002 000a 0003 0001 0200000000fe
            0003 0016 00000001 00000000 00000000 # an association without an address or times
              000d 0006 0002 6e6f6e65 # NoAddrsAvail
            0019 0030 00000009 00000000 00000000 # a delegation
              000d 0020 0006 6e6f2070726566697865732061726520 64656c65676174656420 68657265 # NoPrefixAvail
            0010 0010 00000157 000a 48545450436c69656e74 # vendor class of enterprise 343: HTTPClient
            003b 000a 687474703a2f2f622f61";
        assert_eq!(answer.into_bytes(), hex(golden));
    }

    fn solicit() -> Vec<u8> {
        let mut bytes = vec![1, 9, 8, 7];
        bytes.extend_from_slice(&[0, 1, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 7]);
        bytes.extend_from_slice(&[0, 3, 0, 12, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(b"\x00\x27\x00\x06\x00\x04WeB1");
        bytes.extend_from_slice(&[0, 14, 0, 0]);
        bytes
    }

    #[test]
    fn a_solicitation_is_read_and_every_cut_is_harmless() {
        let bytes = solicit();
        let message = read(&bytes).unwrap();
        assert_eq!((message.kind, message.transaction, message.rapid), (Kind::Solicit, [9, 8, 7], true));
        assert_eq!((message.client.unwrap().len(), message.name.as_deref()), (10, Some("web1")));
        assert_eq!(message.associations, [Association { id: [0, 0, 0, 5], addresses: vec![] }]);
        (0..bytes.len()).for_each(|cut| drop(read(&bytes[..cut])));
        assert_eq!(read(&bytes[..17]), None, "half of a DUID");
    }

    #[test]
    fn messages_that_lack_or_have_too_much_are_refused() {
        let with = |kind: u8, options: &[u8]| read(&[&[kind, 0, 0, 0][..], options].concat()).is_some();
        let (client, server) = ([0, 1, 0, 3, 0, 3, 9], [0, 2, 0, 3, 0, 3, 8]);
        let both = [client, server].concat();
        for kind in [1, 4, 6] {
            assert!(with(kind, &client) && !with(kind, &both) && !with(kind, &[]), "{kind}");
        }
        for kind in [3, 5, 8, 9] {
            assert!(with(kind, &both) && !with(kind, &client) && !with(kind, &server), "{kind}");
        }
        assert!(with(11, &[]) && with(11, &both) && !with(11, &[0, 3, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert!(!with(1, &[client, client].concat()), "two identities");
        assert!(!with(1, &[&[0, 1, 0, 131][..], &[7; 131]].concat()), "a DUID that is too long");
        assert!(!with(12, &client) && !with(2, &both) && !with(7, &both), "relays and servers");
        let many = [&client[..], &[0, 3, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].repeat(80)].concat();
        assert_eq!(read(&[&[1, 0, 0, 0][..], &many].concat()).unwrap().associations.len(), MAX_ASSOCIATIONS);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), kind in 0u8..14) {
            let _ = read(&bytes);
            let _ = read(&[&[kind, 0, 0, 0][..], &bytes].concat());
        }
    }
}
