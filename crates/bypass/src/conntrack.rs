//! The kernel's connection tracking: one TCP connection's entry, read and altered by ctnetlink
//! (`linux/netfilter/nfnetlink_conntrack.h`). Numbers in its messages are big-endian.

use crate::netlink::{Message, NLM_F_ACK, NetlinkError, Socket, attributes, failed};
use rustix::io::Errno;
use rustix::net::netlink;

/// IPCTNL_MSG_CT_NEW and IPCTNL_MSG_CT_GET of NFNL_SUBSYS_CTNETLINK.
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
/// IPCTNL_MSG_CT_GET_STATS.
const GET_STATS: u16 = 1 << 8 | 5;

/// `struct nfgenmsg`: the address family, a version, a resource.
const FIXED_BYTES: usize = 4;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_PROTOINFO: u16 = 4;
const CTA_TIMEOUT: u16 = 7;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_PROTOINFO_TCP_FLAGS_ORIGINAL: u16 = 4;
const CTA_PROTOINFO_TCP_FLAGS_REPLY: u16 = 5;

/// IP_CT_TCP_FLAG_WINDOW_SCALE: this direction's windows are scaled (RFC 7323).
pub const WINDOW_SCALE: u8 = 0x01;
/// IP_CT_TCP_FLAG_SACK_PERM: this direction takes selective acknowledgements (RFC 2018).
pub const SACK_PERMITTED: u8 = 0x02;
/// IP_CT_TCP_FLAG_BE_LIBERAL: frames outside of the window are accepted.
pub const BE_LIBERAL: u8 = 0x08;
/// IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED: this direction has sent data that was not acknowledged.
pub const UNACKNOWLEDGED: u8 = 0x10;
/// TCP_CONNTRACK_SYN_RECV.
pub const SYN_RECV: u8 = 2;
/// TCP_CONNTRACK_ESTABLISHED.
pub const ESTABLISHED: u8 = 3;
/// TCP_CONNTRACK_CLOSE.
pub const CLOSED: u8 = 8;

/// A TCP connection by its first direction, addresses of 4 or 16 bytes, ports in the wire's byte
/// order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Address of the side that opened the connection, 4 or 16 bytes.
    pub source: Vec<u8>,
    /// Address of the other side, 4 or 16 bytes.
    pub destination: Vec<u8>,
    /// Big-endian, as on the wire.
    pub source_port: [u8; 2],
    /// Big-endian, as on the wire.
    pub destination_port: [u8; 2],
}

/// What conntrack holds of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// `ESTABLISHED` and the like: enum tcp_conntrack.
    pub state: u8,
    /// `BE_LIBERAL` and the like, of each direction.
    pub flags: [u8; 2],
    /// Seconds until it expires.
    pub timeout_s: u32,
}

impl Entry {
    /// Whether both ends take selective acknowledgements.
    pub fn has_sack(&self) -> bool {
        self.flags.iter().all(|f| f & SACK_PERMITTED != 0)
    }

    /// Takes an answer apart; fields that are not in it stay zero.
    fn parse(body: &[u8]) -> Entry {
        let mut entry = Entry::default();
        let byte = |value: &[u8]| value.first().copied().unwrap_or(0);
        for (kind, value) in attributes(body.get(FIXED_BYTES..).unwrap_or_default()) {
            match kind {
                CTA_TIMEOUT => entry.timeout_s = value.try_into().map(u32::from_be_bytes).unwrap_or(0),
                CTA_PROTOINFO => {
                    for (kind, value) in
                        attributes(value).filter(|a| a.0 == CTA_PROTOINFO_TCP).flat_map(|a| attributes(a.1))
                    {
                        match kind {
                            CTA_PROTOINFO_TCP_STATE => entry.state = byte(value),
                            CTA_PROTOINFO_TCP_FLAGS_ORIGINAL => entry.flags[0] = byte(value),
                            CTA_PROTOINFO_TCP_FLAGS_REPLY => entry.flags[1] = byte(value),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        entry
    }
}

/// What is to be altered of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Flags of each direction: values, and a mask of those to set.
    pub flags: Option<([u8; 2], u8)>,
    /// `CLOSED` and the like.
    pub state: Option<u8>,
    /// Seconds until it expires.
    pub timeout_s: Option<u32>,
}

impl Update {
    /// Frames outside of the window are accepted from now on, as for connections that a flowtable
    /// takes: the kernel will see a few of its segments only. Its states (FIN, RST) are tracked on.
    pub const LIBERAL: Update = Update { flags: Some(([BE_LIBERAL; 2], BE_LIBERAL)), state: None, timeout_s: None };
    /// All data was acknowledged.
    pub const ACKNOWLEDGED: Update = Update { flags: Some(([0; 2], UNACKNOWLEDGED)), state: None, timeout_s: None };
}

/// Speaks to the kernel's connection tracking.
#[derive(Debug)]
pub struct Conntrack(Socket);

impl Conntrack {
    /// Opens a netlink socket for the calling thread's network namespace.
    pub fn open() -> Result<Conntrack, NetlinkError> {
        Socket::open(Some(netlink::NETFILTER), 0).map(Conntrack).map_err(failed("conntrack socket"))
    }

    /// Asks it something harmless, for which the kernel loads its module where it is one.
    pub fn load_module(&self) -> Result<(), NetlinkError> {
        self.0.ask(&statistics_request().finish(), |_, _| {}).map_err(failed("conntrack"))
    }

    /// Asks the kernel for the connection's entry. `None`: conntrack has none.
    pub fn entry(&self, connection: &Connection) -> Result<Option<Entry>, NetlinkError> {
        let mut entry = None;
        match self.0.ask(&request(GET, connection).finish(), |_, body| entry = Some(Entry::parse(body))) {
            Ok(()) | Err(Errno::NOENT) => Ok(entry),
            Err(cause) => Err(failed("conntrack entry")(cause)),
        }
    }

    /// Alters the entry of a connection.
    pub fn update(&self, connection: &Connection, update: Update) -> Result<(), NetlinkError> {
        self.0.ask(&update_request(connection, update).finish(), |_, _| {}).map_err(failed("conntrack update"))
    }
}

/// Asks how many entries there are.
fn statistics_request() -> Message {
    Message::new(GET_STATS, NLM_F_ACK, &[0; FIXED_BYTES])
}

/// A request about a connection, without more than its tuple.
fn request(kind: u16, connection: &Connection) -> Message {
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let v4 = connection.source.len() == 4;
    let family = if v4 { AF_INET } else { AF_INET6 };
    let (source, destination) = if v4 { (CTA_IP_V4_SRC, CTA_IP_V4_DST) } else { (CTA_IP_V6_SRC, CTA_IP_V6_DST) };
    let mut message = Message::new(kind, NLM_F_ACK, &[family, 0, 0, 0]);
    message.nest(CTA_TUPLE_ORIG, |tuple| {
        tuple.nest(CTA_TUPLE_IP, |ip| {
            ip.put(source, &connection.source).put(destination, &connection.destination);
        });
        tuple.nest(CTA_TUPLE_PROTO, |proto| {
            proto
                .put(CTA_PROTO_NUM, &[6])
                .put(CTA_PROTO_SRC_PORT, &connection.source_port)
                .put(CTA_PROTO_DST_PORT, &connection.destination_port);
        });
    });
    message
}

fn update_request(connection: &Connection, update: Update) -> Message {
    let mut message = request(NEW, connection);
    put_update(&mut message, update);
    message
}

fn put_update(message: &mut Message, update: Update) {
    if let Some(timeout_s) = update.timeout_s {
        message.put(CTA_TIMEOUT, &timeout_s.to_be_bytes());
    }
    if update.state.is_none() && update.flags.is_none() {
        return;
    }
    message.nest(CTA_PROTOINFO, |info| {
        info.nest(CTA_PROTOINFO_TCP, |tcp| {
            if let Some(state) = update.state {
                tcp.put(CTA_PROTOINFO_TCP_STATE, &[state]);
            }
            if let Some((values, mask)) = update.flags {
                tcp.put(CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, &[values[0], mask]);
                tcp.put(CTA_PROTOINFO_TCP_FLAGS_REPLY, &[values[1], mask]);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_testing::hex;

    // Recorded at `send` and `recvmsg` of conntrack 1.4.7 (libnetfilter_conntrack 1.0.9) and kernel
    // 6.18, about a TCP connection to port 8080 from port 4660 in a network namespace. The sequence
    // numbers of requests are compared as zero: ours have none.

    /// CTA_TUPLE_ORIG of the connection over 127.0.0.1.
    const TUPLE: &str = "
        3400 0180
          1400 0180
            0800 0100 7f000001
            0800 0200 7f000001
          1c00 0280
            0500 0100 06 000000
            0600 0200 1234 0000
            0600 0300 1f90 0000";
    /// The same over ::1.
    const TUPLE6: &str = "
        4c00 0180
          2c00 0180
            1400 0300 00000000000000000000000000000001
            1400 0400 00000000000000000000000000000001
          1c00 0280
            0500 0100 06 000000
            0600 0200 1234 0000
            0600 0300 1f90 0000";
    /// CTA_PROTOINFO that sets the flags 0x0a of each direction: `conntrack` adds it to each
    /// request about TCP.
    const LIBERAL_AND_SACK: &str = "
        1800 0480
          1400 0180
            0600 0400 0a0a 0000
            0600 0500 0a0a 0000";
    /// The kernel's answer: struct nlmsghdr, struct nfgenmsg, and CTA_TUPLE_ORIG, CTA_TUPLE_REPLY,
    /// CTA_STATUS, CTA_MARK, CTA_ID, CTA_USE, CTA_TIMEOUT, CTA_PROTOINFO.
    const ANSWER: &str = "
        d4000000 0001 0200 52f30a6b a5360000  02 00 0000
        34000180 14000180 08000100 7f000001 08000200 7f000001
        1c000280 05000100 06000000 06000200 12340000 06000300 1f900000
        34000280 14000180 08000100 7f000001 08000200 7f000001
        1c000280 05000100 06000000 06000200 1f900000 06000300 12340000
        08000300 0000000e
        08000800 00000000
        08000c00 02beb33c
        08000b00 00000002
        08000700 0006977e
        30000480
          2c000180
            0500 0100 03 000000 # state: ESTABLISHED
            0500 0200 0a 000000 # window scale of the first direction
            0500 0300 0a 000000
            0600 0400 2300 0000 # flags
            0600 0500 2300 0000";

    fn connection() -> Connection {
        Connection {
            source: vec![127, 0, 0, 1],
            destination: vec![127, 0, 0, 1],
            source_port: [0x12, 0x34],
            destination_port: [0x1f, 0x90],
        }
    }

    fn connection6() -> Connection {
        let loopback = std::net::Ipv6Addr::LOCALHOST.octets().to_vec();
        Connection { source: loopback.clone(), destination: loopback, ..connection() }
    }

    /// A recorded request, with the sequence number 0.
    fn recorded(texts: &[&str]) -> Vec<u8> {
        let mut bytes = hex(&texts.join("\n"));
        bytes[8..12].fill(0);
        bytes
    }

    #[test]
    fn requests_are_those_of_conntrack() {
        let flags = Update { flags: Some(([0x0a; 2], 0x0a)), ..Update::default() };
        // `conntrack -G -p tcp --orig-src 127.0.0.1 --orig-dst 127.0.0.1 --sport 4660 --dport
        // 8080`, and the same with ::1.
        let mut get = request(GET, &connection());
        put_update(&mut get, flags);
        let head = "60000000 0101 0500 52f30a6b 00000000  02 00 0000";
        assert_eq!(get.finish(), recorded(&[head, TUPLE, LIBERAL_AND_SACK]));
        let mut get = request(GET, &connection6());
        put_update(&mut get, flags);
        let head = "78000000 0101 0500 91f30a6b 00000000  0a 00 0000";
        assert_eq!(get.finish(), recorded(&[head, TUPLE6, LIBERAL_AND_SACK]));

        // `conntrack -U … --timeout 432000`
        let update = Update { timeout_s: Some(432_000), ..flags };
        let head = "68000000 0001 0500 52f30a6b 00000000  02 00 0000";
        let timeout = "0800 0700 00069780";
        let golden = recorded(&[head, TUPLE, timeout, LIBERAL_AND_SACK]);
        assert_eq!(update_request(&connection(), update).finish(), golden);

        // `conntrack -U … --state CLOSE --timeout 10`
        let update = Update { state: Some(CLOSED), timeout_s: Some(10), flags: Some(([0x0e; 2], 0x0e)) };
        let head = "70000000 0001 0500 52f30a6b 00000000  02 00 0000";
        let rest = "0800 0700 0000000a
            2000 0480
              1c00 0180
                0500 0100 08 000000
                0600 0400 0e0e 0000
                0600 0500 0e0e 0000";
        assert_eq!(update_request(&connection(), update).finish(), recorded(&[head, TUPLE, rest]));

        // `conntrack -C`
        let golden = recorded(&["14000000 0501 0100 52f30a6b 00000000  00 00 0000"]);
        let mut request = statistics_request().finish();
        // It wants no acknowledgement.
        request[6] &= !(NLM_F_ACK as u8);
        assert_eq!(request, golden);
    }

    #[test]
    fn the_kernels_answer_is_read_and_a_cut_one_has_zeros_for_what_is_cut() {
        let answer = hex(ANSWER);
        let mut all = crate::netlink::messages(&answer);
        let (kind, body) = all.next().unwrap();
        assert_eq!((kind, all.count()), (NEW, 0));
        let entry = Entry { state: ESTABLISHED, flags: [0x23; 2], timeout_s: 431_998 };
        assert_eq!(Entry::parse(body), entry);
        assert!(entry.has_sack());
        for len in 0..answer.len() {
            assert_eq!(crate::netlink::messages(&answer[..len]).count(), 0, "{len} bytes");
        }
        // A message with less in it than it should have: the protocol's part is the last, and all
        // or nothing.
        let timeout_ends = body.len() - 0x30;
        for len in 0..body.len() {
            let timeout_s = if len < timeout_ends { 0 } else { entry.timeout_s };
            assert_eq!(Entry::parse(&body[..len]), Entry { timeout_s, ..Entry::default() }, "{len} bytes");
        }
    }
}
