//! Datagrams to and from many addresses, several per call, and the interface that has an address.
//!
//! Like its parent, this module decides nothing and is on the list of modules that may use `unsafe`
//! (ARCHITECTURE.md).
#![allow(unsafe_code)]

use super::{Arena, Headers, Piece, check, is_truncated, send_with, set_option};
use rustix::io::Errno;
use std::ffi::{CStr, c_int};
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

/// linux/udp.h, since Linux 4.18.
const UDP_SEGMENT: c_int = 103;
/// linux/udp.h, since Linux 5.0.
const UDP_GRO: c_int = 104;
/// Datagrams that one message may be cut into; 64 is the limit of all kernels that cut.
pub(crate) const MAX_SEGMENTS: usize = 64;

/// An address as the kernel wants it.
#[derive(Clone, Copy)]
#[repr(C)]
union Address {
    four: libc::sockaddr_in,
    six: libc::sockaddr_in6,
}

impl Address {
    /// All-zero bytes are of no family.
    fn none() -> Address {
        // SAFETY: both members are plain integers.
        unsafe { std::mem::zeroed() }
    }

    fn of(address: SocketAddr) -> Address {
        let mut out = Address::none();
        match address {
            SocketAddr::V4(v4) => {
                out.four = libc::sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
            }
            SocketAddr::V6(v6) => {
                out.six = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as _,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
            }
        }
        out
    }

    /// The first `len` bytes were written by the kernel.
    fn get(&self, len: usize) -> Option<SocketAddr> {
        // SAFETY: all bytes of the union are initialised (`none`), and each value of each is a
        // valid integer.
        let (four, six) = unsafe { (self.four, self.six) };
        match c_int::from(four.sin_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                let ip = Ipv4Addr::from(four.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(four.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                let ip = Ipv6Addr::from(six.sin6_addr.s6_addr);
                Some(SocketAddrV6::new(ip, u16::from_be(six.sin6_port), 0, six.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// Control data of one message: UDP_SEGMENT with a u16, or UDP_GRO with an int. cmsghdr of 16 bytes, 2 or 4 bytes, padded to 8.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; 24]);

impl Control {
    fn segment(bytes: u16) -> Control {
        let mut out = [0; 24];
        // SAFETY: CMSG_LEN only computes.
        let len = unsafe { libc::CMSG_LEN(size_of::<u16>() as u32) } as usize;
        out[..8].copy_from_slice(&len.to_ne_bytes());
        out[8..12].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
        out[12..16].copy_from_slice(&UDP_SEGMENT.to_ne_bytes());
        out[16..18].copy_from_slice(&bytes.to_ne_bytes());
        Control(out)
    }

    /// How long each datagram of a message is that came with so many bytes of control data; `None`
    /// where it is one datagram.
    fn joined(&self, bytes: usize) -> Option<usize> {
        // SAFETY: CMSG_LEN only computes.
        let expected = unsafe { libc::CMSG_LEN(size_of::<c_int>() as u32) } as usize;
        let word = |at: usize| self.0[at..].first_chunk().map(|word| c_int::from_ne_bytes(*word));
        let is_it = bytes >= expected && word(8) == Some(libc::SOL_UDP) && word(12) == Some(UDP_GRO);
        word(16).filter(|_| is_it).and_then(|segment| usize::try_from(segment).ok()).filter(|segment| *segment > 0)
    }
}

/// One message of [`Outbox::send`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    /// Where it goes.
    pub(crate) to: SocketAddr,
    /// Where its pieces end, in the list of all; they begin where those of the message before end.
    pub(crate) end: usize,
    /// The kernel cuts it into datagrams of so many bytes; 0: it is one datagram.
    pub(crate) segment: u16,
}

/// Lists for [`Outbox::send`], kept so that no turn allocates.
#[derive(Default)]
pub(crate) struct Outbox {
    headers: Headers,
    addresses: Vec<Address>,
    controls: Vec<Control>,
}

impl Outbox {
    /// Sends messages without blocking; `first` is where the pieces of the first begin. Returns how
    /// many were sent; an error only where the first could not be.
    pub(crate) fn send(
        &mut self,
        socket: impl AsFd,
        pieces: &[Piece<'_>],
        first: usize,
        messages: &[Message],
    ) -> Result<usize, Errno> {
        let Outbox { headers, addresses, controls } = self;
        addresses.clear();
        controls.clear();
        // Both lists are complete before anything points into them.
        addresses.extend(messages.iter().map(|message| Address::of(message.to)));
        controls.extend(messages.iter().map(|message| Control::segment(message.segment)));
        let mut each = messages.iter().zip(addresses.iter_mut().zip(controls.iter_mut()));
        let complete = |header: &mut libc::msghdr| {
            let Some((message, (address, control))) = each.next() else { return };
            header.msg_name = std::ptr::from_mut(address).cast();
            header.msg_namelen = match message.to {
                SocketAddr::V4(_) => size_of::<libc::sockaddr_in>(),
                SocketAddr::V6(_) => size_of::<libc::sockaddr_in6>(),
            } as _;
            if message.segment != 0 {
                header.msg_control = control.0.as_mut_ptr().cast();
                header.msg_controllen = size_of::<Control>() as _;
            }
        };
        let ends = messages.iter().map(|message| message.end);
        // SAFETY: addresses and control data are ours, and do not move any more.
        unsafe { send_with(socket, pieces, (first, ends), headers, complete) }
    }
}

/// What came in one slot of [`Inbox`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    /// From where.
    pub(crate) from: Option<SocketAddr>,
    /// Bytes in the slot.
    pub(crate) bytes: usize,
    /// Bytes of each datagram in the slot, of which the last one may be shorter. All are from the
    /// same sender.
    pub(crate) segment: usize,
    /// Whether the last one was longer than the room for it.
    pub(crate) truncated: bool,
}

/// Buffers for several datagrams per call.
pub(crate) struct Inbox {
    arena: Arena,
    addresses: Vec<Address>,
    controls: Vec<Control>,
}

impl Inbox {
    /// `count` slots of `stride` bytes.
    pub(crate) fn new(count: usize, stride: usize) -> Inbox {
        Inbox {
            arena: Arena::new(count, stride),
            addresses: vec![Address::none(); count],
            controls: vec![Control([0; 24]); count],
        }
    }

    /// The bytes of a slot; none of one that there is not.
    pub(crate) fn slot(&self, at: usize) -> &[u8] {
        let begin = at * self.arena.stride;
        self.arena.bytes.get(begin..begin + self.arena.stride).unwrap_or_default()
    }

    /// Receives up to `count` messages without blocking, and reports each. A message is a datagram,
    /// or several that the kernel has joined ([`join`]). An error only where there is no first one.
    pub(crate) fn receive(&mut self, socket: impl AsFd, count: usize, got: &mut Vec<Datagram>) -> Result<(), Errno> {
        got.clear();
        let Inbox { arena, addresses, controls } = self;
        let count = count.min(addresses.len());
        let mut each = addresses.iter_mut().zip(controls.iter_mut());
        let complete = |header: &mut libc::msghdr| {
            if let Some((address, control)) = each.next() {
                *address = Address::none();
                header.msg_name = std::ptr::from_mut(address).cast();
                header.msg_namelen = size_of::<Address>() as _;
                header.msg_control = control.0.as_mut_ptr().cast();
                header.msg_controllen = size_of::<Control>() as _;
            }
        };
        // SAFETY: each header has its own address and control data of self, with their true lengths.
        let headers = unsafe { arena.receive(socket, count, 0, complete) }?;
        for (header, (address, control)) in headers.iter().zip(addresses.iter().zip(controls.iter())) {
            let bytes = header.msg_len as usize;
            got.push(Datagram {
                from: address.get(header.msg_hdr.msg_namelen as usize),
                bytes,
                segment: control.joined(header.msg_hdr.msg_controllen as usize).unwrap_or(bytes),
                truncated: is_truncated(header),
            });
        }
        Ok(())
    }
}

/// Has the kernel hand over datagrams of one sender and one length as one message, where it has them
/// so. Since Linux 5.0.
pub(crate) fn join(socket: impl AsFd) -> Result<(), Errno> {
    set_option(socket, libc::SOL_UDP, UDP_GRO, &1)
}

/// Has the kernel send no datagram in fragments, and refuse one that does not fit the path.
pub(crate) fn never_fragment(socket: impl AsFd, is_ipv6: bool) -> Result<(), Errno> {
    match is_ipv6 {
        false => set_option(socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, &libc::IP_PMTUDISC_DO),
        true => set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, &libc::IPV6_PMTUDISC_DO),
    }
}

/// What the kernel knows of the MTU of the path from an address to another one, in bytes. Nothing
/// is sent.
pub(crate) fn path_mtu(local: IpAddr, remote: SocketAddr) -> std::io::Result<u32> {
    let socket = UdpSocket::bind((local, 0))?;
    socket.connect(remote)?;
    let (level, option) = match local {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let (mut value, mut bytes): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `value` is `bytes` writable bytes of ours, and the kernel writes at most so many.
    let result = unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut bytes) };
    check(result as isize)?;
    Ok(value.unsigned_abs())
}

/// The interface that has this address, in the calling thread's namespace, by its name.
pub(crate) fn interface_of(address: IpAddr) -> Result<Option<String>, Errno> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is ours to be written.
    check(unsafe { libc::getifaddrs(&raw mut list) } as isize)?;
    let (mut found, mut entry) = (None, list);
    while !entry.is_null() {
        // SAFETY: getifaddrs made the list, whose entries live until freeifaddrs below.
        let one = unsafe { &*entry };
        // SAFETY: as above; an address has the size that its family says, and a mask that of its
        // address.
        let (own, mask) = unsafe { (ip_of(one.ifa_addr), ip_of(one.ifa_netmask)) };
        let is_loopback = one.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
        let is_it = match (own, mask, address) {
            // All of 127.0.0.0/8 is of the loopback interface.
            (Some(IpAddr::V4(own)), Some(IpAddr::V4(mask)), IpAddr::V4(wanted)) if is_loopback => {
                own.to_bits() & mask.to_bits() == wanted.to_bits() & mask.to_bits()
            }
            (own, ..) => own == Some(address),
        };
        if is_it && !one.ifa_name.is_null() {
            // SAFETY: a name is a C string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(one.ifa_name) };
            found = name.to_str().ok().map(str::to_string);
            break;
        }
        entry = one.ifa_next;
    }
    // SAFETY: getifaddrs made it, and nothing of it is used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// # Safety
/// `address` is null, or points at an address of the size that its family says.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family; the caller promises the rest of it.
    match c_int::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: as the family says.
            let four = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(four.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as the family says.
            let six = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(six.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn one_message_becomes_several_datagrams_and_the_sender_is_known() {
        for ip in ["127.0.0.1", "::1"] {
            let (a, b) = (UdpSocket::bind((ip, 0)).unwrap(), UdpSocket::bind((ip, 0)).unwrap());
            let (to, from) = (b.local_addr().unwrap(), a.local_addr().unwrap());
            let bytes: Vec<u8> = (0..250).map(|n| n as u8).collect();
            let pieces = [Piece::from(&bytes[..130]), Piece::from(&bytes[130..]), Piece::from(&b"one"[..])];
            let messages = [Message { to, end: 2, segment: 100 }, Message { to, end: 3, segment: 0 }];
            assert_eq!(Outbox::default().send(&a, &pieces, 0, &messages), Ok(2));
            let (mut inbox, mut got) = (Inbox::new(8, 256), Vec::new());
            inbox.receive(&b, 8, &mut got).unwrap();
            let expected = [&bytes[..100], &bytes[100..200], &bytes[200..], b"one"];
            assert_eq!(got.len(), 4);
            for ((at, got), expected) in got.iter().enumerate().zip(expected) {
                let slot = &inbox.slot(at)[..got.bytes];
                assert_eq!((got.from, got.truncated, got.segment, slot), (Some(from), false, got.bytes, expected));
            }
            assert_eq!(inbox.receive(&b, 8, &mut got), Err(Errno::AGAIN));
            // The same in one message, where the receiver takes them joined.
            join(&b).unwrap();
            assert_eq!(Outbox::default().send(&a, &pieces, 0, &messages), Ok(2));
            inbox.receive(&b, 8, &mut got).unwrap();
            let shapes: Vec<_> = got.iter().map(|got| (got.bytes, got.segment, got.from)).collect();
            assert_eq!(shapes, [(250, 100, Some(from)), (3, 3, Some(from))]);
            assert_eq!((&inbox.slot(0)[..250], &inbox.slot(1)[..3], inbox.slot(8)), (&bytes[..], &b"one"[..], &[][..]));
            assert_eq!(inbox.receive(&b, 8, &mut got), Err(Errno::AGAIN));
            a.send_to(&[7; 300], to).unwrap();
            inbox.receive(&b, 8, &mut got).unwrap();
            assert_eq!((got[0].bytes, got[0].truncated), (256, true));
        }
    }

    #[test]
    fn the_path_to_this_machine_has_the_mtu_of_the_loopback_interface() {
        let text = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
        // A packet of IPv4 has 65,535 bytes at most.
        let expected: u32 = text.trim().parse::<u32>().unwrap().min(65_535);
        let local = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(path_mtu(local, SocketAddr::new(local, 9)).unwrap(), expected);
        let error = path_mtu(IpAddr::from([192, 0, 2, 1]), SocketAddr::new(local, 9)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrNotAvailable);
    }

    #[test]
    fn the_loopback_interface_has_its_addresses() {
        for address in ["127.0.0.1", "127.9.8.7"] {
            assert_eq!(interface_of(address.parse().unwrap()), Ok(Some("lo".into())), "{address}");
        }
        assert_eq!(interface_of("192.0.2.77".parse().unwrap()), Ok(None));
    }
}
