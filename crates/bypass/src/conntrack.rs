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

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_PROTOINFO: u16 = 4;
const CTA_TIMEOUT: u16 = 7;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
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

/// A TCP connection by its first direction, addresses of 4 or 16 bytes, ports in the wire's byte order.
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
        for (kind, value) in attributes(body.get(4..).unwrap_or_default()) {
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
    /// Frames outside of the window are accepted from now on, as for connections that a flowtable takes: the kernel will see a few of its
    /// segments only. Its states (FIN, RST) are tracked on.
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
        let request = Message::new(GET_STATS, NLM_F_ACK, &[0; 4]).finish();
        self.0.ask(&request, |_, _| {}).map_err(failed("conntrack"))
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
        self.0.ask(&update_request(connection, update), |_, _| {}).map_err(failed("conntrack update"))
    }
}

/// A request about a connection, without more than its tuple.
fn request(kind: u16, connection: &Connection) -> Message {
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let v4 = connection.source.len() == 4;
    let family = if v4 { AF_INET } else { AF_INET6 };
    // CTA_IP_V4_SRC and _DST, CTA_IP_V6_SRC and _DST.
    let (source, destination) = if v4 { (1, 2) } else { (3, 4) };
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

fn update_request(connection: &Connection, update: Update) -> Vec<u8> {
    let mut message = request(NEW, connection);
    if let Some(timeout_s) = update.timeout_s {
        message.put(CTA_TIMEOUT, &timeout_s.to_be_bytes());
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
    message.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> Connection {
        Connection {
            source: vec![10, 0, 0, 1],
            destination: vec![10, 0, 0, 2],
            source_port: [0x12, 0x34],
            destination_port: [0, 80],
        }
    }

    #[test]
    fn the_request_about_a_connection_is_what_the_kernel_documents() {
        let bytes = update_request(&connection(), Update::LIBERAL);
        let top: Vec<_> = attributes(&bytes[20..]).collect();
        assert_eq!(top.iter().map(|a| a.0).collect::<Vec<_>>(), [CTA_TUPLE_ORIG, CTA_PROTOINFO]);
        let tuple: Vec<_> = attributes(top[0].1).collect();
        assert_eq!(attributes(tuple[1].1).collect::<Vec<_>>(), [(1, &[6][..]), (2, &[0x12, 0x34]), (3, &[0, 80])]);
        let closed = Update { state: Some(CLOSED), timeout_s: Some(10), ..Update::default() };
        let bytes = update_request(&connection(), closed);
        let top: Vec<_> = attributes(&bytes[20..]).collect();
        assert_eq!(top[1], (CTA_TIMEOUT, &[0, 0, 0, 10][..]));
        assert_eq!(attributes(top[2].1).next(), Some((CTA_PROTOINFO_TCP, &[5, 0, 1, 0, 8, 0, 0, 0][..])));
    }

    #[test]
    fn an_answer_is_read_and_a_cut_one_does_no_harm() {
        let update = Update { flags: Some(([0x18, 0x0a], 0)), state: Some(ESTABLISHED), timeout_s: Some(432_000) };
        let bytes = update_request(&connection(), update);
        let entry = Entry::parse(&bytes[16..]);
        assert_eq!(entry, Entry { state: ESTABLISHED, flags: [0x18, 0x0a], timeout_s: 432_000 });
        for end in 16..bytes.len() {
            let cut = Entry::parse(&bytes[16..end]);
            assert!(cut.timeout_s == 0 || cut.timeout_s == 432_000, "{cut:?}");
        }
    }
}
