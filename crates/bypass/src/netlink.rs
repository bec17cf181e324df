//! The little of netlink that the bypass needs: what an interface is, and when a neighbour's
//! address changes. `conntrack` builds on it.
//!
//! Messages are built and read here by hand: attributes are (length, type, value), padded to four
//! bytes, in the machine's byte order (rtnetlink(7), `linux/rtnetlink.h`). A message that is too
//! short for what it says is skipped, never indexed out of bounds.

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

// Lengths and fields of the fixed parts: `struct nlmsghdr`, `nlattr`, `ifinfomsg`, `ndmsg`,
// `tcmsg`, `netconfmsg` (padded) and `nlmsgerr`. A length and a type of `u16` come first in an
// attribute.
const HEADER_BYTES: usize = 16;
const HEADER_LENGTH: usize = 0;
const HEADER_TYPE: usize = 4;
const HEADER_FLAGS: usize = 6;
const ATTRIBUTE_BYTES: usize = 4;
const ATTRIBUTE_TYPE: usize = 2;
const LINK_BYTES: usize = 16;
const LINK_TYPE: usize = 2;
const LINK_INDEX: usize = 4;
const NEIGHBOUR_BYTES: usize = 12;
const NEIGHBOUR_INDEX: usize = 4;
const NEIGHBOUR_STATE: usize = 8;
const FILTER_BYTES: usize = 20;
const FILTER_HANDLE: usize = 8;
const FILTER_INFO: usize = 16;
const NETCONF_BYTES: usize = 4;
const ERROR_CODE: usize = 0;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
pub(crate) const NLM_F_ACK: u16 = 4;
pub(crate) const NLM_F_DUMP: u16 = 0x300;
const NLA_F_NESTED: u16 = 0x8000;
/// The other flag of a type: the value is in network byte order. Only ipset's attributes have it.
const NLA_F_NET_BYTEORDER: u16 = 0x4000;

const RTM_GETLINK: u16 = 18;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;
const RTM_NEWNETCONF: u16 = 80;
/// Groups that are bits of the address: RTNLGRP_LINK, RTNLGRP_NEIGH, RTNLGRP_IPV4_NETCONF,
/// RTNLGRP_IPV6_NETCONF.
const GROUP_LINK: u32 = 1 << 0;
const GROUP_NEIGH: u32 = 1 << 2;
const GROUP_NETCONF: u32 = 1 << 23 | 1 << 24;

const ARPHRD_ETHER: u16 = 1;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_QDISC: u16 = 6;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_GROUP: u16 = 27;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_XDP: u16 = 43;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;

const NETCONFA_IFINDEX: u16 = 1;

const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
/// Neighbour states in which the address does not serve: NUD_INCOMPLETE, NUD_FAILED.
const NUD_UNUSABLE: u16 = 0x01 | 0x20;

/// TC_H_CLSACT's filters, by their parent.
pub(crate) const TC_INGRESS: u32 = 0xffff_fff2;
pub(crate) const TC_EGRESS: u32 = 0xffff_fff3;
/// The qdisc itself: its handle, and its own parent.
const TC_CLSACT: u32 = 0xffff_0000;
const TC_CLSACT_PARENT: u32 = 0xffff_fff1;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;

/// What went wrong with the kernel.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum NetlinkError {
    /// A system call failed.
    #[error("netlink {what}: {cause}")]
    Call { what: &'static str, cause: Errno },
    #[error(
        "no interface {0} in the network namespace; `ip link` lists them, and `ip -n NAME link` those of the one that --netns names"
    )]
    NoInterface(String),
}

pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> NetlinkError {
    move |cause| NetlinkError::Call { what, cause }
}

/// A message under construction.
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn new(kind: u16, flags: u16, body: &[u8]) -> Message {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[HEADER_TYPE..HEADER_TYPE + 2].copy_from_slice(&kind.to_ne_bytes());
        bytes[HEADER_FLAGS..HEADER_FLAGS + 2].copy_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend_from_slice(body);
        let mut message = Message(bytes);
        message.pad();
        message
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    pub(crate) fn put(&mut self, kind: u16, value: &[u8]) -> &mut Message {
        self.0.extend_from_slice(&((ATTRIBUTE_BYTES + value.len()) as u16).to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.pad();
        self
    }

    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Message)) -> &mut Message {
        let at = self.0.len();
        self.put(kind | NLA_F_NESTED, &[]);
        fill(self);
        let length = (self.0.len() - at) as u16;
        self.0[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[HEADER_LENGTH..HEADER_LENGTH + 4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// The attributes in `bytes`: (type, value). Ends at the first that does not fit.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, ATTRIBUTE_TYPE)?;
        let value = bytes.get(ATTRIBUTE_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !(NLA_F_NESTED | NLA_F_NET_BYTEORDER), value))
    })
}

/// The messages in a datagram: (type, body).
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32_at(bytes, HEADER_LENGTH)? as usize;
        let kind = u16_at(bytes, HEADER_TYPE)?;
        let body = bytes.get(HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    })
}

/// What the body of an NLMSG_ERROR says: an acknowledgement is the error 0.
fn outcome(body: &[u8]) -> Result<(), Errno> {
    match u32_at(body, ERROR_CODE).ok_or(Errno::BADMSG)? as i32 {
        0 => Ok(()),
        code => Err(Errno::from_raw_os_error(code.wrapping_neg())),
    }
}

/// What an interface is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// Its number in this namespace.
    pub index: u32,
    /// As `ip link` shows it, without `@peer`.
    pub name: String,
    /// The driver's kind as `ip -d link` shows it: "veth", "tun", "bridge"; empty for a card.
    pub kind: String,
    /// Name of the root queueing discipline, such as "noqueue".
    pub qdisc: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its Ethernet address, if it is an Ethernet interface.
    pub mac: Option<[u8; 6]>,
    /// The interface that it is a member of: a bridge, a bond, a VRF.
    pub master: Option<u32>,
    /// The group that it is in, which rules may go by.
    pub group: u32,
    /// Where its other end is, if in another network namespace: that one's id in this one, and its
    /// number there.
    pub peer_elsewhere: Option<(i32, u32)>,
    /// The XDP program on it: (mode as in `IFLA_XDP_ATTACHED`, program's id).
    pub xdp: Option<(u8, u32)>,
}

impl InterfaceInfo {
    fn parse(body: &[u8]) -> Option<InterfaceInfo> {
        let text = |v: &[u8]| String::from_utf8_lossy(v.strip_suffix(&[0]).unwrap_or(v)).into_owned();
        let mut link = InterfaceInfo { index: u32_at(body, LINK_INDEX)?, ..InterfaceInfo::default() };
        let (mut peer, mut space) = (None, None);
        for (kind, value) in attributes(body.get(LINK_BYTES..)?) {
            match kind {
                IFLA_IFNAME => link.name = text(value),
                IFLA_QDISC => link.qdisc = text(value),
                IFLA_MTU => link.mtu = u32_at(value, 0)?,
                IFLA_ADDRESS if u16_at(body, LINK_TYPE)? == ARPHRD_ETHER => link.mac = value.try_into().ok(),
                IFLA_GROUP => link.group = u32_at(value, 0)?,
                IFLA_MASTER => link.master = u32_at(value, 0),
                IFLA_LINK => peer = u32_at(value, 0),
                IFLA_LINK_NETNSID => space = u32_at(value, 0).map(|id| id as i32),
                IFLA_LINKINFO => {
                    link.kind =
                        attributes(value).find(|a| a.0 == IFLA_INFO_KIND).map(|a| text(a.1)).unwrap_or_default();
                }
                IFLA_XDP => {
                    let get = |wanted| attributes(value).find(|a| a.0 == wanted).map(|a| a.1);
                    let mode = get(IFLA_XDP_ATTACHED).and_then(|v| v.first().copied()).unwrap_or(0);
                    if mode != 0 {
                        link.xdp = Some((mode, get(IFLA_XDP_PROG_ID).and_then(|v| u32_at(v, 0)).unwrap_or(0)));
                    }
                }
                _ => {}
            }
        }
        link.peer_elsewhere = space.map(|space| (space, peer.unwrap_or(0)));
        Some(link)
    }
}

/// A tc filter (of the older kind, behind a clsact or ingress qdisc).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    /// The lowest runs first.
    pub(crate) priority: u16,
    /// Its number within its priority. The kernel also tells of a priority by itself: then 0.
    pub(crate) handle: u32,
    /// The EtherType that it is for, as in the kernel's answer.
    pub(crate) protocol: u16,
    /// Its kind: "bpf", "flower".
    pub(crate) kind: String,
    /// The name of its program, or else its kind.
    pub(crate) name: String,
    /// The number of its program, if it has one.
    pub(crate) program: Option<u32>,
}

impl Filter {
    /// From the body of a message: `struct tcmsg`, then attributes.
    fn parse(body: &[u8]) -> Option<Filter> {
        let text = |v: &[u8]| String::from_utf8_lossy(v.strip_suffix(&[0]).unwrap_or(v)).into_owned();
        let (handle, info) = (u32_at(body, FILTER_HANDLE)?, u32_at(body, FILTER_INFO)?);
        let get =
            |wanted| attributes(body.get(FILTER_BYTES..).unwrap_or_default()).find(|a| a.0 == wanted).map(|a| a.1);
        let kind = text(get(TCA_KIND)?);
        let option = |wanted| attributes(get(TCA_OPTIONS)?).find(|a| a.0 == wanted).map(|a| a.1);
        let is_bpf = kind == "bpf";
        let program = option(TCA_BPF_ID).filter(|_| is_bpf).and_then(|v| u32_at(v, 0));
        let name = option(TCA_BPF_NAME).filter(|_| is_bpf).map(text).unwrap_or_else(|| kind.clone());
        Some(Filter { priority: (info >> 16) as u16, handle, protocol: info as u16, kind, name, program })
    }
}

/// `struct tcmsg`.
fn tc_message(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, index, handle, parent, info].map(u32::to_ne_bytes).concat()
}

/// Asks for all interfaces.
fn links_request() -> Message {
    Message::new(RTM_GETLINK, NLM_F_DUMP, &[0; LINK_BYTES])
}

/// Asks for the interface `index` of the namespace that has the id `space` in this one.
fn link_elsewhere_request(space: i32, index: u32) -> Message {
    let mut body = [0; LINK_BYTES];
    body[LINK_INDEX..LINK_INDEX + 4].copy_from_slice(&index.to_ne_bytes());
    let mut request = Message::new(RTM_GETLINK, NLM_F_ACK, &body);
    request.put(IFLA_TARGET_NETNSID, &space.to_ne_bytes());
    request
}

/// Asks for the neighbour table.
fn neighbours_request() -> Message {
    Message::new(RTM_GETNEIGH, NLM_F_DUMP, &[0; NEIGHBOUR_BYTES])
}

/// Asks for the filters at a hook.
fn filters_request(index: u32, parent: u32) -> Message {
    Message::new(RTM_GETTFILTER, NLM_F_DUMP, &tc_message(index, 0, parent, 0))
}

/// Removes a filter.
fn remove_filter_request(index: u32, parent: u32, filter: &Filter) -> Message {
    let info = u32::from(filter.priority) << 16 | u32::from(filter.protocol);
    let mut request = Message::new(RTM_DELTFILTER, NLM_F_ACK, &tc_message(index, filter.handle, parent, info));
    request.put(TCA_KIND, &[filter.kind.as_bytes(), &[0]].concat());
    request
}

/// Removes a clsact qdisc.
fn remove_clsact_request(index: u32) -> Message {
    let mut request = Message::new(RTM_DELQDISC, NLM_F_ACK, &tc_message(index, TC_CLSACT, TC_CLSACT_PARENT, 0));
    request.put(TCA_KIND, b"clsact\0");
    request
}

/// What an interface's monitor told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A neighbour has this Ethernet address now, or none that serves.
    Neighbour {
        /// Index of the interface behind which it is.
        index: u32,
        /// The neighbour's address, 4 or 16 bytes.
        address: Vec<u8>,
        /// The neighbour's Ethernet address; `None` if it cannot be reached now.
        mac: Option<[u8; 6]>,
    },
    /// Something about an interface changed, or it went.
    Link(InterfaceInfo),
    /// How an interface (-1: all of them) forwards was set: forwarding itself, or which sources it
    /// believes.
    Forwarding(i32),
    /// The kernel told more than was read: anything may have changed.
    Missed,
}

fn parse_change(kind: u16, body: &[u8]) -> Option<Change> {
    match kind {
        RTM_NEWNEIGH | RTM_DELNEIGH => {
            let index = u32_at(body, NEIGHBOUR_INDEX)?;
            let state = u16_at(body, NEIGHBOUR_STATE)?;
            let get = |wanted| {
                attributes(body.get(NEIGHBOUR_BYTES..).unwrap_or_default()).find(|a| a.0 == wanted).map(|a| a.1)
            };
            let serves = kind == RTM_NEWNEIGH && state & NUD_UNUSABLE == 0;
            let mac = get(NDA_LLADDR).filter(|_| serves).and_then(|v| v.try_into().ok());
            Some(Change::Neighbour { index, address: get(NDA_DST)?.to_vec(), mac })
        }
        RTM_NEWLINK | RTM_DELLINK => Some(Change::Link(InterfaceInfo::parse(body)?)),
        RTM_NEWNETCONF => {
            let index = attributes(body.get(NETCONF_BYTES..)?).find(|a| a.0 == NETCONFA_IFINDEX)?.1;
            Some(Change::Forwarding(u32_at(index, 0)? as i32))
        }
        _ => None,
    }
}

/// A socket to the kernel.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
}

impl Socket {
    pub(crate) fn open(family: Option<rustix::net::Protocol>, groups: u32) -> Result<Socket, Errno> {
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, family)?;
        bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        Ok(Socket { fd })
    }

    /// Sends a request and hands each message of the answer to `each`, up to the acknowledgement or
    /// the dump's end.
    pub(crate) fn ask(&self, request: &[u8], mut each: impl FnMut(u16, &[u8])) -> Result<(), Errno> {
        self.ask_while(request, |kind, body| {
            each(kind, body);
            true
        })
    }

    /// The same for as long as `each` says so. Then the rest of the answer is still to be read: the
    /// socket is of no more use.
    pub(crate) fn ask_while(&self, request: &[u8], mut each: impl FnMut(u16, &[u8]) -> bool) -> Result<(), Errno> {
        send(&self.fd, request, SendFlags::empty())?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let (got, _) = recv(&self.fd, &mut buffer[..], RecvFlags::empty())?;
            for (kind, body) in messages(&buffer[..got]) {
                match kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return outcome(body),
                    kind if each(kind, body) => {}
                    _ => return Ok(()),
                }
            }
        }
    }
}

/// Questions about interfaces, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Routes(Socket);

impl Routes {
    /// Opens a route netlink socket for the calling thread's network namespace.
    pub fn open() -> Result<Routes, NetlinkError> {
        Socket::open(None, 0).map(Routes).map_err(failed("socket"))
    }

    /// Dumps all interfaces of the namespace.
    pub fn links(&self) -> Result<Vec<InterfaceInfo>, NetlinkError> {
        let mut links = vec![];
        let each =
            |kind, body: &[u8]| links.extend((kind == RTM_NEWLINK).then(|| InterfaceInfo::parse(body)).flatten());
        self.0.ask(&links_request().finish(), each).map_err(failed("list of interfaces"))?;
        Ok(links)
    }

    /// The interface of that name.
    pub fn link(&self, name: &str) -> Result<InterfaceInfo, NetlinkError> {
        let found = self.links()?.into_iter().find(|link| link.name == name);
        found.ok_or_else(|| NetlinkError::NoInterface(name.into()))
    }

    /// Whether an XDP program is on the interface's other end, in another namespace.
    pub fn has_peer_xdp(&self, link: &InterfaceInfo) -> Result<bool, NetlinkError> {
        let Some((space, index)) = link.peer_elsewhere else { return Ok(false) };
        let mut found = false;
        let each = |kind, body: &[u8]| {
            found |= kind == RTM_NEWLINK && InterfaceInfo::parse(body).is_some_and(|peer| peer.xdp.is_some())
        };
        match self.0.ask(&link_elsewhere_request(space, index).finish(), each) {
            Ok(()) => Ok(found),
            // The namespace or the interface went meanwhile.
            Err(Errno::INVAL | Errno::NODEV) => Ok(false),
            Err(cause) => Err(NetlinkError::Call { what: "the other end's XDP program", cause }),
        }
    }

    /// The tc filters at an interface's hook, in the order in which they run; `parent` is
    /// `TC_INGRESS` or `TC_EGRESS`.
    pub(crate) fn filters(&self, index: u32, parent: u32) -> Result<Vec<Filter>, NetlinkError> {
        let mut found = vec![];
        let each = |kind, body: &[u8]| found.extend((kind == RTM_NEWTFILTER).then(|| Filter::parse(body)).flatten());
        match self.0.ask(&filters_request(index, parent).finish(), each) {
            Ok(()) => Ok(found),
            // No such qdisc, or no such interface any more: so no filters.
            Err(Errno::INVAL | Errno::NOENT | Errno::OPNOTSUPP | Errno::NODEV) => Ok(vec![]),
            Err(cause) => Err(NetlinkError::Call { what: "list of filters", cause }),
        }
    }

    /// Whether the interface's ingress has tc filters.
    pub fn has_ingress_filters(&self, index: u32) -> Result<bool, NetlinkError> {
        Ok(!self.filters(index, TC_INGRESS)?.is_empty())
    }

    pub(crate) fn remove_filter(&self, index: u32, parent: u32, filter: &Filter) -> Result<(), NetlinkError> {
        let request = remove_filter_request(index, parent, filter).finish();
        self.0.ask(&request, |_, _| {}).map_err(failed("removal of a filter"))
    }

    /// Removes an interface's clsact qdisc.
    pub(crate) fn remove_clsact(&self, index: u32) -> Result<(), NetlinkError> {
        self.0.ask(&remove_clsact_request(index).finish(), |_, _| {}).map_err(failed("removal of a qdisc"))
    }

    /// Dumps the neighbour table, one [`Change::Neighbour`] per entry.
    pub fn neighbours(&self) -> Result<Vec<Change>, NetlinkError> {
        let mut found = vec![];
        self.0
            .ask(&neighbours_request().finish(), |kind, body| found.extend(parse_change(kind, body)))
            .map_err(failed("list of neighbours"))?;
        Ok(found)
    }
}

/// Tells of changes of neighbours, interfaces and forwarding.
#[derive(Debug)]
pub struct Monitor(Socket);

impl Monitor {
    /// Opens the socket; from here on changes are kept for `changes`.
    pub fn open() -> Result<Monitor, NetlinkError> {
        Socket::open(None, GROUP_LINK | GROUP_NEIGH | GROUP_NETCONF).map(Monitor).map_err(failed("monitor"))
    }

    /// What has changed since it was asked last; does not wait.
    pub fn changes(&self) -> Result<Vec<Change>, NetlinkError> {
        let mut changes = vec![];
        let mut buffer = vec![0; 64 << 10];
        loop {
            match recv(&self.0.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((got, _)) => {
                    changes.extend(messages(&buffer[..got]).filter_map(|(kind, body)| parse_change(kind, body)))
                }
                Err(Errno::AGAIN) => return Ok(changes),
                Err(Errno::INTR) => {}
                Err(Errno::NOBUFS) => changes.push(Change::Missed),
                Err(cause) => return Err(NetlinkError::Call { what: "monitor", cause }),
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

#[cfg(test)]
mod golden;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_lie_about_their_length_end_the_list() {
        for bytes in [&[5, 0][..], &[200, 0, 1, 0, 9], &[0, 0, 1, 0], &[3, 0, 1, 0]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
        }
        let two = [6, 0, 1, 0, 7, 8, 0, 0, 5, 0, 2, 0, 9];
        assert_eq!(attributes(&two).collect::<Vec<_>>(), [(1, &[7, 8][..]), (2, &[9])]);
    }

    #[test]
    fn nested_attributes_know_their_length() {
        let mut message = Message::new(1, 0, &[]);
        message.nest(5, |m| {
            m.put(6, b"abc").put(7, b"d");
        });
        let bytes = message.finish();
        assert_eq!(u32_at(&bytes, 0), Some(bytes.len() as u32));
        let (kind, value) = attributes(&bytes[16..]).next().unwrap();
        assert_eq!((kind, attributes(value).collect::<Vec<_>>()), (5, vec![(6, &b"abc"[..]), (7, b"d")]));
    }

    #[test]
    fn a_failed_or_deleted_neighbour_has_no_address() {
        let message = |kind, state: u16| {
            let mut body = vec![2, 0, 0, 0, 7, 0, 0, 0];
            body.extend_from_slice(&state.to_ne_bytes());
            body.extend_from_slice(&[0, 0]);
            let mut message = Message(body);
            message.put(NDA_DST, &[10, 0, 0, 1]).put(NDA_LLADDR, &[2, 0, 0, 0, 0, 9]);
            parse_change(kind, &message.0).unwrap()
        };
        let is = |mac| Change::Neighbour { index: 7, address: vec![10, 0, 0, 1], mac };
        assert_eq!(message(RTM_NEWNEIGH, 0x02), is(Some([2, 0, 0, 0, 0, 9])));
        assert_eq!(message(RTM_NEWNEIGH, 0x20), is(None));
        assert_eq!(message(RTM_DELNEIGH, 0x02), is(None));
    }

    #[test]
    fn a_setting_of_forwarding_is_of_an_interface_or_of_all() {
        for index in [-1i32, 7] {
            let mut message = Message(vec![2, 0, 0, 0]);
            message.put(3, &[1, 0, 0, 0]).put(NETCONFA_IFINDEX, &index.to_ne_bytes());
            assert_eq!(parse_change(RTM_NEWNETCONF, &message.0), Some(Change::Forwarding(index)));
        }
        assert_eq!(parse_change(RTM_NEWNETCONF, &[2]), None);
    }

    #[test]
    fn the_loopback_interface_is_found_and_a_name_that_is_none_is_named() {
        let routes = Routes::open().unwrap();
        let lo = routes.link("lo").unwrap();
        assert_eq!((lo.index, lo.peer_elsewhere, lo.xdp, lo.mac), (1, None, None, None));
        let error = routes.link("no-such-if").unwrap_err().to_string();
        assert!(error.contains("no-such-if"), "{error}");
    }

    #[test]
    fn a_filter_is_told_by_its_program_and_one_without_by_its_kind() {
        let message = |kind: &[u8]| {
            let mut message = Message(tc_message(7, 1, TC_INGRESS, 0xc000_0300));
            message.put(TCA_KIND, kind).nest(TCA_OPTIONS, |options| {
                options.put(TCA_BPF_NAME, b"tcx_in\0").put(TCA_BPF_ID, &9u32.to_ne_bytes());
            });
            Filter::parse(&message.0)
        };
        let bpf = Filter {
            priority: 0xc000,
            handle: 1,
            protocol: 0x300,
            kind: "bpf".into(),
            name: "tcx_in".into(),
            program: Some(9),
        };
        assert_eq!(message(b"bpf\0"), Some(bpf.clone()));
        let other = Filter { kind: "u32".into(), name: "u32".into(), program: None, ..bpf };
        assert_eq!(message(b"u32\0"), Some(other));
        assert_eq!(Filter::parse(&tc_message(7, 1, TC_INGRESS, 0)), None);
    }
}
