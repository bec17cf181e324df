//! System calls that no safe crate offers: gathered writes from foreign memory, the tun and
//! interface ioctls, packet sockets with several messages per call, network namespaces, a death
//! signal and inherited descriptors between fork and exec, and Xen's event channels and grants.
//!
//! Everything here returns what the kernel said and decides nothing. This module is on the list of
//! modules that may use `unsafe` (ARCHITECTURE.md). Memory that a peer shares reaches the kernel as
//! a bare address in an iovec; no reference to it is made.
#![allow(unsafe_code)]
#![allow(clippy::unnecessary_cast)] // the type of an ioctl's number differs between C libraries

pub(crate) mod udp;

use rustix::io::Errno;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::xen::PAGE_BYTES;

/// Pieces that one gathered write may have (`UIO_MAXIOV` of the kernel).
pub(crate) const MAX_PIECES: usize = 1024;

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn check(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| errno())
}

/// See [`crate::child::die_with_parent`].
pub(crate) fn die_with_parent(command: &mut Command) -> &mut Command {
    use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
    let parent = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // One that had gone before this was asked sends nothing any more.
        if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec `ask` makes two system calls and nothing else: it neither
    // allocates nor locks.
    unsafe { command.pre_exec(ask) }
}

/// See [`crate::child::inherit_only`].
pub(crate) fn inherit_only<'c>(command: &'c mut Command, fds: &[c_int]) -> &'c mut Command {
    let fds = fds.to_vec();
    let close = move || {
        // Kernels before 5.11 refuse it: there all depends on the descriptors' own flags.
        // SAFETY: the call changes flags of descriptors, and is given no memory.
        let _ = unsafe { libc::syscall(libc::SYS_close_range, 3, c_int::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        for fd in &fds {
            // SAFETY: as above; the caller keeps the descriptor open.
            check(unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } as isize)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec `close` makes system calls and nothing else: it neither
    // allocates nor locks.
    unsafe { command.pre_exec(close) }
}

/// A piece of memory that the kernel is to read, in the layout of an iovec.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Piece<'m> {
    iovec: libc::iovec,
    lifetime: PhantomData<Foreign<'m>>,
}

// SAFETY: a piece is an address with a length, as Foreign is, which is Send; only the kernel
// dereferences it.
unsafe impl Send for Piece<'_> {}

impl<'m> From<Foreign<'m>> for Piece<'m> {
    #[inline]
    fn from(bytes: Foreign<'m>) -> Self {
        let iovec = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        Piece { iovec, lifetime: PhantomData }
    }
}

impl<'m> From<&'m [u8]> for Piece<'m> {
    #[inline]
    fn from(bytes: &'m [u8]) -> Self {
        Foreign::from(bytes).into()
    }
}

/// Empties a list of pieces and gives its allocation to pieces of another lifetime.
pub(crate) fn recycle<'b>(mut pieces: Vec<Piece<'_>>) -> Vec<Piece<'b>> {
    pieces.clear();
    // Mapped in place, an empty vector keeps its allocation; see `Batch::recycle`.
    pieces.into_iter().map(|_| unreachable!("the vector was cleared")).collect()
}

/// Writes the pieces as one unit, such as one frame to a tap. At most [`MAX_PIECES`].
#[inline]
pub(crate) fn write_pieces(fd: impl AsFd, pieces: &[Piece<'_>]) -> Result<usize, Errno> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: `Piece` is an iovec (repr transparent), and each one was made of a Foreign whose
    // bytes stay readable for its lifetime, which outlives this call; the kernel only reads them.
    check(unsafe { libc::writev(fd, pieces.as_ptr().cast(), pieces.len() as c_int) })
}

/// Sends the pieces on a stream socket without blocking and without SIGPIPE. At most
/// [`MAX_PIECES`].
#[inline]
pub(crate) fn send_pieces(socket: impl AsFd, pieces: &[Piece<'_>]) -> Result<usize, Errno> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: all-zero bytes are a valid msghdr: null pointers and no lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: as for `write_pieces`; the message and its list of pieces live through the call.
    check(unsafe { libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

/// Message headers for [`send_many`] and [`Slots`], kept so that no turn allocates.
#[derive(Default)]
pub(crate) struct Headers(Vec<libc::mmsghdr>);

// SAFETY: the pointers in the headers are rewritten before each call that uses them.
unsafe impl Send for Headers {}

/// Sends messages on a datagram socket without blocking: message `i` is the pieces up to `ends[i]`
/// from where the one before ended. Returns how many were sent; an error only where the first could
/// not be.
pub(crate) fn send_many(
    socket: impl AsFd,
    pieces: &[Piece<'_>],
    ends: &[usize],
    headers: &mut Headers,
) -> Result<usize, Errno> {
    // SAFETY: nothing is put into the headers but what they have.
    unsafe { send_with(socket, pieces, (0, ends.iter().copied()), headers, |_| ()) }
}

/// As [`send_many`], from the piece `first` on. `complete` adds to the header of each message in
/// turn.
///
/// # Safety
/// What `complete` puts into a header is valid until this returns, and is only read.
unsafe fn send_with(
    socket: impl AsFd,
    pieces: &[Piece<'_>],
    (first, ends): (usize, impl Iterator<Item = usize>),
    Headers(headers): &mut Headers,
    mut complete: impl FnMut(&mut libc::msghdr),
) -> Result<usize, Errno> {
    headers.clear();
    let mut start = first;
    for end in ends {
        let part = &pieces[start..end];
        // SAFETY: all-zero bytes are a valid mmsghdr.
        let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
        header.msg_hdr.msg_iov = part.as_ptr().cast_mut().cast();
        header.msg_hdr.msg_iovlen = part.len() as _;
        complete(&mut header.msg_hdr);
        headers.push(header);
        start = end;
    }
    let fd = socket.as_fd().as_raw_fd();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the headers point at `pieces`, which live through the call and are readable as
    // `Piece` promises, and at what the caller promises; the kernel writes only msg_len of the
    // headers, which are ours alone.
    check(unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), headers.len() as _, flags) } as isize)
}

// Packet sockets (linux/if_packet.h).
const PACKET_ADD_MEMBERSHIP: c_int = 1;
const PACKET_STATISTICS: c_int = 6;
const PACKET_AUXDATA: c_int = 8;
const PACKET_VNET_HDR: c_int = 15;
const PACKET_QDISC_BYPASS: c_int = 20;
const PACKET_IGNORE_OUTGOING: c_int = 23;
const PACKET_MR_PROMISC: u16 = 1;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;
const ETH_P_ALL: u16 = 3;
const ETH_P_8021Q: u16 = 0x8100;

/// `struct tpacket_auxdata`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AuxData {
    status: u32,
    len: u32,
    snap_len: u32,
    mac: u16,
    net: u16,
    vlan_tci: u16,
    vlan_tpid: u16,
}

/// Room for one control message with [`AuxData`]: cmsghdr of 16 bytes, 20 bytes of data, padded to 8.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 40]);

/// What came in one slot of [`Slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes in the slot.
    pub(crate) bytes: usize,
    /// Whether the message was longer than the slot.
    pub(crate) truncated: bool,
    /// Type and control information of the VLAN tag that the kernel took out of the frame.
    pub(crate) vlan: Option<[u16; 2]>,
}

/// Memory for several messages per call, in slots of one stride. Only memory that messages were
/// written to is ever touched, so the stride may be generous.
struct Arena {
    bytes: Vec<u8>,
    stride: usize,
    headers: Headers,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the pointers in the iovecs are rewritten before each call that uses them.
unsafe impl Send for Arena {}

impl Arena {
    fn new(count: usize, stride: usize) -> Arena {
        let bytes = vec![0; count * stride];
        Arena { bytes, stride, headers: Headers::default(), iovecs: Vec::with_capacity(count) }
    }

    /// Receives up to `count` messages without blocking, each from the byte `at` of its slot on.
    /// `complete` adds to the header of each in turn. Returns the headers of those that came; an
    /// error only where there is no first one.
    ///
    /// # Safety
    /// What `complete` puts into a header is valid until this returns, to be written by the kernel,
    /// and used by nothing else.
    unsafe fn receive(
        &mut self,
        socket: impl AsFd,
        count: usize,
        at: usize,
        mut complete: impl FnMut(&mut libc::msghdr),
    ) -> Result<&[libc::mmsghdr], Errno> {
        let Arena { bytes, stride, headers: Headers(headers), iovecs } = self;
        headers.clear();
        iovecs.clear();
        for slot in bytes.chunks_exact_mut(*stride).take(count) {
            let room = &mut slot[at..];
            iovecs.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() });
        }
        for iovec in iovecs.iter_mut() {
            // SAFETY: all-zero bytes are a valid mmsghdr.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = iovec;
            header.msg_hdr.msg_iovlen = 1;
            complete(&mut header.msg_hdr);
            headers.push(header);
        }
        let (fd, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: each header points at one iovec over its own part of the memory, with its true
        // length, and at what the caller promises; all of it lives through the call.
        let n =
            unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), headers.len() as _, flags as _, std::ptr::null_mut()) };
        Ok(&headers[..check(n as isize)?])
    }
}

/// Whether a message was longer than its slot.
fn is_truncated(header: &libc::mmsghdr) -> bool {
    header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0
}

/// Buffers for several frames of a packet socket per call.
pub(crate) struct Slots {
    arena: Arena,
    controls: Vec<Control>,
}

impl Slots {
    /// `count` slots of `stride` bytes.
    pub(crate) fn new(count: usize, stride: usize) -> Slots {
        Slots { arena: Arena::new(count, stride), controls: vec![Control([0; 40]); count] }
    }

    /// The slots' bytes, in order.
    pub(crate) fn chunks_mut(&mut self) -> std::slice::ChunksExactMut<'_, u8> {
        self.arena.bytes.chunks_exact_mut(self.arena.stride)
    }

    /// Receives up to `count` messages without blocking, each from the byte `at` of its slot on,
    /// and reports each. An error only where there is no first one.
    pub(crate) fn receive(
        &mut self,
        socket: impl AsFd,
        count: usize,
        at: usize,
        got: &mut Vec<Received>,
    ) -> Result<(), Errno> {
        got.clear();
        let Slots { arena, controls } = self;
        let count = count.min(controls.len());
        let mut each = controls.iter_mut();
        let complete = |header: &mut libc::msghdr| {
            if let Some(control) = each.next() {
                header.msg_control = control.0.as_mut_ptr().cast();
                header.msg_controllen = size_of::<Control>() as _;
            }
        };
        // SAFETY: each header has its own control buffer of self, with its true length.
        for header in unsafe { arena.receive(socket, count, at, complete) }? {
            let bytes = header.msg_len as usize;
            got.push(Received { bytes, truncated: is_truncated(header), vlan: vlan_of(&header.msg_hdr) });
        }
        Ok(())
    }
}

/// The VLAN tag in a message's control data.
fn vlan_of(message: &libc::msghdr) -> Option<[u16; 2]> {
    // SAFETY: the kernel filled in msg_control and msg_controllen of a buffer that lives in
    // `Slots::controls`.
    let first = unsafe { libc::CMSG_FIRSTHDR(message) };
    if first.is_null() {
        return None;
    }
    // SAFETY: CMSG_FIRSTHDR is non-null only where a whole cmsghdr fits the control buffer.
    let header = unsafe { first.read_unaligned() };
    let wanted = (libc::SOL_PACKET, PACKET_AUXDATA);
    // SAFETY: CMSG_LEN only computes.
    let bytes = unsafe { libc::CMSG_LEN(size_of::<AuxData>() as u32) } as usize;
    if (header.cmsg_level, header.cmsg_type) != wanted || (header.cmsg_len as usize) < bytes {
        return None;
    }
    // SAFETY: the length just checked covers the data; AuxData is plain integers.
    let aux = unsafe { libc::CMSG_DATA(first).cast::<AuxData>().read_unaligned() };
    let tpid = if aux.status & TP_STATUS_VLAN_TPID_VALID != 0 { aux.vlan_tpid } else { ETH_P_8021Q };
    (aux.status & TP_STATUS_VLAN_VALID != 0).then_some([tpid, aux.vlan_tci])
}

fn set_option<T>(socket: impl AsFd, level: c_int, option: c_int, value: &T) -> Result<(), Errno> {
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the value is size_of::<T>() readable bytes, and every caller below passes plain
    // integers or a repr(C) struct without padding.
    let result =
        unsafe { libc::setsockopt(fd, level, option, std::ptr::from_ref(value).cast(), size_of::<T>() as u32) };
    check(result as isize).map(drop)
}

/// A raw packet socket that receives nothing until [`bind_packet`]: with offload headers and VLAN
/// tags told, and without what this host itself sends.
pub(crate) fn packet_socket(vnet_header: bool, qdisc_bypass: bool) -> Result<OwnedFd, Errno> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer is passed; the descriptor, where there is one, is new and ours.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) } as isize)?;
    // SAFETY: as above: nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
    let one: c_int = 1;
    if vnet_header {
        set_option(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, &one)?;
    }
    if qdisc_bypass {
        set_option(&socket, libc::SOL_PACKET, PACKET_QDISC_BYPASS, &one)?;
    }
    set_option(&socket, libc::SOL_PACKET, PACKET_AUXDATA, &one)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &one)?;
    Ok(socket)
}

/// Binds a packet socket to an interface, all protocols; again where it was bound to another.
pub(crate) fn bind_packet(socket: impl AsFd, index: u32) -> Result<(), Errno> {
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ETH_P_ALL.to_be();
    address.sll_ifindex = index as c_int;
    let (fd, bytes) = (socket.as_fd().as_raw_fd(), size_of::<libc::sockaddr_ll>() as u32);
    // SAFETY: the address is a sockaddr_ll of the length given.
    check(unsafe { libc::bind(fd, std::ptr::from_ref(&address).cast(), bytes) } as isize).map(drop)
}

/// Has the interface receive frames for every address, as long as the socket lives.
pub(crate) fn join_promiscuous(socket: impl AsFd, index: u32) -> Result<(), Errno> {
    /// `struct packet_mreq`.
    #[repr(C)]
    struct Membership {
        index: c_int,
        kind: u16,
        address_len: u16,
        address: [u8; 8],
    }
    let membership = Membership { index: index as c_int, kind: PACKET_MR_PROMISC, address_len: 0, address: [0; 8] };
    set_option(socket, libc::SOL_PACKET, PACKET_ADD_MEMBERSHIP, &membership)
}

/// What the kernel calls the network namespace of a socket; no two of one boot have the same
/// number.
pub(crate) fn netns_cookie(socket: impl AsFd) -> Result<u64, Errno> {
    /// asm-generic/socket.h, since Linux 5.14. The constant of libc is not there for each C
    /// library.
    const SO_NETNS_COOKIE: c_int = 71;
    let (mut cookie, mut bytes) = (0u64, size_of::<u64>() as u32);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `bytes` says how much room `cookie` has; both are ours and live through the call.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut bytes) };
    check(result as isize).map(|_| cookie)
}

/// Frames that the kernel dropped since the last time because the socket's buffer was full.
pub(crate) fn packet_drops(socket: impl AsFd) -> Result<u32, Errno> {
    // struct tpacket_stats: all frames, dropped frames.
    let mut stats = [0u32; 2];
    let mut bytes = size_of_val(&stats) as u32;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: `bytes` says how much room `stats` has; both are ours and live through the call.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_PACKET, PACKET_STATISTICS, stats.as_mut_ptr().cast(), &raw mut bytes) };
    check(result as isize).map(|_| stats[1])
}

/// Sets the size of a socket's buffers; beyond the system's limit where we may.
pub(crate) fn set_buffers(socket: impl AsFd, bytes: u32) -> Result<(), Errno> {
    let value = bytes as c_int;
    for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        if set_option(&socket, libc::SOL_SOCKET, force, &value).is_err() {
            set_option(&socket, libc::SOL_SOCKET, plain, &value)?;
        }
    }
    Ok(())
}

/// `struct ifreq`: 16 bytes of name, 24 bytes of union.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct IfReq(pub(crate) [u8; 40]);

impl IfReq {
    /// A request for the interface `name`; `None` where that is no interface name.
    pub(crate) fn new(name: &str) -> Option<IfReq> {
        let fits = !name.is_empty() && name.len() < 16 && !name.bytes().any(|b| b == 0 || b == b'/');
        let mut request = IfReq([0; 40]);
        request.0[..name.len().min(16)].copy_from_slice(&name.as_bytes()[..name.len().min(16)]);
        fits.then_some(request)
    }

    /// The name that the kernel filled in.
    pub(crate) fn name(&self) -> String {
        let name = &self.0[..16];
        let end = name.iter().position(|b| *b == 0).unwrap_or(16);
        String::from_utf8_lossy(&name[..end]).into_owned()
    }

    /// `N` bytes of the union.
    pub(crate) fn value<const N: usize>(&self) -> [u8; N] {
        std::array::from_fn(|i| self.0[16 + i])
    }

    /// Sets the first bytes of the union.
    pub(crate) fn set(&mut self, value: &[u8]) {
        self.0[16..16 + value.len()].copy_from_slice(value);
    }
}

/// Requests that take a [`IfReq`]; see netdevice(7) and linux/if_tun.h.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum InterfaceRequest {
    GetName = 0x8910,
    GetFlags = 0x8913,
    SetFlags = 0x8914,
    GetMtu = 0x8921,
    SetMtu = 0x8922,
    SetHardwareAddress = 0x8924,
    GetHardwareAddress = 0x8927,
    GetIndex = 0x8933,
    TunSetInterface = libc::TUNSETIFF as u64,
    TunGetInterface = libc::TUNGETIFF as u64,
}

/// Asks the kernel about an interface, or changes it.
pub(crate) fn interface(fd: impl AsFd, request: InterfaceRequest, argument: &mut IfReq) -> Result<(), Errno> {
    // SAFETY: every request of the enum takes a struct ifreq, for which IfReq has the size and
    // alignment.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, argument.0.as_mut_ptr()) } as isize).map(drop)
}

/// Whether the interface has a carrier. Asking makes the kernel catch up with changes of it that it
/// has put off, so that an interface that is said to have one also sends (Linux 6.8 and later).
pub(crate) fn carrier(fd: impl AsFd, name: &str) -> Result<bool, Errno> {
    const SIOCETHTOOL: u64 = 0x8946;
    const ETHTOOL_GLINK: u32 = 0x0a;
    let mut value = [ETHTOOL_GLINK, 0];
    let mut argument = IfReq::new(name).ok_or(Errno::INVAL)?;
    argument.set(&(value.as_mut_ptr() as usize).to_ne_bytes());
    // SAFETY: the request takes a struct ifreq whose pointer leads to a struct ethtool_value, which
    // is two u32, both alive and writable through the call.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), SIOCETHTOOL as _, argument.0.as_mut_ptr()) };
    check(result as isize)?;
    // SAFETY: a plain read of our own array, which the kernel may have written through the pointer
    // above.
    Ok(unsafe { std::ptr::read_volatile(&raw const value[1]) } != 0)
}

/// Requests of a tun descriptor that take an integer by value.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum TunValue {
    Persist = libc::TUNSETPERSIST as u64,
    Owner = libc::TUNSETOWNER as u64,
    Group = libc::TUNSETGROUP as u64,
    Offload = libc::TUNSETOFFLOAD as u64,
}

/// Sets a property of a tap.
pub(crate) fn tun_value(fd: impl AsFd, request: TunValue, value: u32) -> Result<(), Errno> {
    // SAFETY: every request of the enum takes an integer, no pointer.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, libc::c_ulong::from(value)) } as isize).map(drop)
}

/// Requests of a tun descriptor that take a pointer to an integer.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum TunWord {
    GetHeaderBytes = libc::TUNGETVNETHDRSZ as u64,
    SetHeaderBytes = libc::TUNSETVNETHDRSZ as u64,
    SetLittleEndian = libc::TUNSETVNETLE as u64,
}

/// Sets or reads a property of a tap.
pub(crate) fn tun_word(fd: impl AsFd, request: TunWord, word: &mut c_int) -> Result<(), Errno> {
    // SAFETY: every request of the enum takes a pointer to an int, which `word` is.
    let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, std::ptr::from_mut(word)) };
    check(result as isize).map(drop)
}

/// The network namespace in which a tap's interface is now.
pub(crate) fn tun_namespace(fd: impl AsFd) -> Result<OwnedFd, Errno> {
    // SAFETY: the request takes no argument and returns a new descriptor, which nothing else owns.
    let fd = check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNGETDEVNETNS) } as isize)?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Whether a namespace's file is that of a network namespace (ioctl_nsfs(2)).
pub(crate) fn is_network_namespace(fd: impl AsFd) -> bool {
    const NS_GET_NSTYPE: u64 = 0xb703;
    // SAFETY: the request takes no argument; on a file of another kind it fails.
    let kind = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), NS_GET_NSTYPE as _) };
    kind == libc::CLONE_NEWNET
}

/// A rtnetlink socket that hears of every change of a link in the calling thread's network
/// namespace, where `groups` is `RTMGRP_LINK`, or of nothing with 0.
pub(crate) fn netlink_socket(groups: u32) -> Result<OwnedFd, Errno> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer is passed.
    let fd = check(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) } as isize)?;
    // SAFETY: a new descriptor, which nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
    // SAFETY: all-zero bytes are a valid sockaddr_nl.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address.nl_groups = groups;
    let bytes = size_of::<libc::sockaddr_nl>() as u32;
    // SAFETY: the address is a sockaddr_nl of the length given.
    let result = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), bytes) };
    check(result as isize)?;
    Ok(socket)
}

/// Gives the calling thread a new network namespace of its own.
pub(crate) fn unshare_network() -> Result<(), Errno> {
    // SAFETY: the flag does not unshare the table of descriptors, which is what makes the call
    // unsafe.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
}

// Xen (linux/include/uapi/xen/evtchn.h, gntdev.h): numbers of `_IOC(_IOC_NONE, letter, number,
// size)`.
const IOCTL_EVTCHN_BIND_INTERDOMAIN: u32 = 8 << 16 | (b'E' as u32) << 8 | 1;
const IOCTL_EVTCHN_NOTIFY: u32 = 4 << 16 | (b'E' as u32) << 8 | 4;
const IOCTL_GNTDEV_MAP_GRANT_REF: u32 = 24 << 16 | (b'G' as u32) << 8;
const IOCTL_GNTDEV_UNMAP_GRANT_REF: u32 = 16 << 16 | (b'G' as u32) << 8 | 1;
const IOCTL_GNTDEV_GRANT_COPY: u32 = 16 << 16 | (b'G' as u32) << 8 | 8;
/// Flag of a copy: the source is a grant.
const GNTCOPY_SOURCE_GREF: u16 = 1;
/// Flag of a copy: the destination is a grant.
const GNTCOPY_DEST_GREF: u16 = 2;

/// Binds a local event channel port to a domain's unbound one, until the descriptor is closed;
/// returns the local port.
pub(crate) fn bind_interdomain(evtchn: impl AsFd, domain: u16, remote_port: u32) -> Result<u32, Errno> {
    let argument = [u32::from(domain), remote_port];
    let fd = evtchn.as_fd().as_raw_fd();
    // SAFETY: the request reads two u32 from the pointer, which `argument` holds.
    let port = check(unsafe { libc::ioctl(fd, IOCTL_EVTCHN_BIND_INTERDOMAIN as _, argument.as_ptr()) } as isize)?;
    Ok(port as u32)
}

/// Sends an event to the other end of a local port.
pub(crate) fn notify_port(evtchn: impl AsFd, port: u32) -> Result<(), Errno> {
    let fd = evtchn.as_fd().as_raw_fd();
    // SAFETY: the request reads a u32 from the pointer.
    check(unsafe { libc::ioctl(fd, IOCTL_EVTCHN_NOTIFY as _, std::ptr::from_ref(&port)) } as isize).map(drop)
}

/// A page of another domain's, mapped by its grant until this is dropped.
#[derive(Debug)]
pub(crate) struct GrantedPage {
    address: NonNull<u8>,
    gntdev: OwnedFd,
    index: u64,
}

// SAFETY: the mapping belongs to this value alone, and is reached through foreign views only.
unsafe impl Send for GrantedPage {}

impl GrantedPage {
    /// Maps the page that `domain` granted as `gref`, for reading and writing.
    pub(crate) fn map(gntdev: impl AsFd, domain: u16, gref: u32) -> Result<GrantedPage, Errno> {
        /// `struct ioctl_gntdev_map_grant_ref` with one reference.
        #[repr(C)]
        struct Map {
            count: u32,
            padding: u32,
            index: u64,
            domain: u32,
            gref: u32,
        }
        let gntdev = rustix::io::fcntl_dupfd_cloexec(gntdev, 3)?;
        let mut map = Map { count: 1, padding: 0, index: 0, domain: domain.into(), gref };
        // SAFETY: the request reads and writes a Map with `count` references, which is what it is
        // given.
        let result =
            unsafe { libc::ioctl(gntdev.as_raw_fd(), IOCTL_GNTDEV_MAP_GRANT_REF as _, std::ptr::from_mut(&mut map)) };
        check(result as isize)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let offset = map.index as libc::off_t;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), PAGE_BYTES, access, libc::MAP_SHARED, gntdev.as_raw_fd(), offset)
        };
        if address == libc::MAP_FAILED {
            let error = errno();
            forget_grant(&gntdev, map.index);
            return Err(error);
        }
        let Some(address) = NonNull::new(address.cast()) else { return Err(Errno::NOMEM) };
        Ok(GrantedPage { address, gntdev, index: map.index })
    }

    pub(crate) fn bytes(&self) -> ForeignMut<'_> {
        // SAFETY: PAGE_BYTES are mapped at `address` until `drop`, and no reference to them is ever
        // made.
        unsafe { ForeignMut::new(self.address, PAGE_BYTES) }
    }
}

/// Removes a grant from the list of a gntdev descriptor. It fails for one that is not there, which
/// does no harm.
fn forget_grant(gntdev: &OwnedFd, index: u64) {
    /// `struct ioctl_gntdev_unmap_grant_ref`.
    #[repr(C)]
    struct Unmap {
        index: u64,
        count: u32,
        padding: u32,
    }
    let unmap = Unmap { index, count: 1, padding: 0 };
    // SAFETY: the request reads an Unmap.
    unsafe { libc::ioctl(gntdev.as_raw_fd(), IOCTL_GNTDEV_UNMAP_GRANT_REF as _, std::ptr::from_ref(&unmap)) };
}

impl Drop for GrantedPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and all views of it borrowed this
        // value.
        unsafe { libc::munmap(self.address.as_ptr().cast(), PAGE_BYTES) };
        forget_grant(&self.gntdev, self.index);
    }
}

/// One end of a copy: `union` in `struct gntdev_grant_copy_segment`.
#[derive(Clone, Copy)]
#[repr(C)]
union CopyEnd {
    local: *mut u8,
    foreign: CopyPage,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CopyPage {
    gref: u32,
    offset: u16,
    domain: u16,
}

/// A copy between a piece of a granted page and memory here, in the layout of `struct
/// gntdev_grant_copy_segment`.
#[repr(C)]
pub(crate) struct GrantCopy<'m> {
    source: CopyEnd,
    destination: CopyEnd,
    len: u16,
    flags: u16,
    status: i16,
    lifetime: PhantomData<ForeignMut<'m>>,
}

const _: () = assert!(size_of::<GrantCopy<'_>>() == 24 && size_of::<CopyPage>() == 8);

// SAFETY: a copy is an address with a length, as ForeignMut is, which is Send; only the kernel
// dereferences it.
unsafe impl Send for GrantCopy<'_> {}

impl<'m> GrantCopy<'m> {
    /// From `offset` of the page `gref` of `domain` to all of `to`, which is no longer than the
    /// rest of the page.
    #[inline]
    pub(crate) fn from_guest(domain: u16, gref: u32, offset: u16, to: ForeignMut<'m>) -> Self {
        GrantCopy {
            source: CopyEnd { foreign: CopyPage { gref, offset, domain } },
            destination: CopyEnd { local: to.as_mut_ptr() },
            len: to.len().min(PAGE_BYTES) as u16,
            flags: GNTCOPY_SOURCE_GREF,
            status: 0,
            lifetime: PhantomData,
        }
    }

    /// From all of `from` to `offset` of the page `gref` of `domain`.
    #[inline]
    pub(crate) fn to_guest(domain: u16, gref: u32, offset: u16, from: Foreign<'m>) -> Self {
        GrantCopy {
            source: CopyEnd { local: from.as_ptr().cast_mut() },
            destination: CopyEnd { foreign: CopyPage { gref, offset, domain } },
            len: from.len().min(PAGE_BYTES) as u16,
            flags: GNTCOPY_DEST_GREF,
            status: 0,
            lifetime: PhantomData,
        }
    }

    /// Whether the hypervisor made the copy (GNTST_okay).
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.status == 0
    }

    /// What the hypervisor would do, for tests without one: `page` finds a domain's page by its
    /// grant.
    #[cfg(test)]
    pub(crate) fn imitate(&mut self, page: impl FnOnce(u16, u32) -> Option<ForeignMut<'static>>) {
        let from_guest = self.flags == GNTCOPY_SOURCE_GREF;
        let (foreign, local) = match from_guest {
            // SAFETY: the constructor that sets this flag writes these two.
            true => unsafe { (self.source.foreign, self.destination.local) },
            // SAFETY: as above.
            false => unsafe { (self.destination.foreign, self.source.local) },
        };
        let len = usize::from(self.len);
        let piece = page(foreign.domain, foreign.gref).and_then(|page| page.slice(foreign.offset.into(), len));
        let Some((piece, local)) = piece.zip(NonNull::new(local)) else {
            self.status = -3;
            return;
        };
        match from_guest {
            // SAFETY: the constructor was given a writable view of this length, whose lifetime
            // lasts.
            true => piece.as_foreign().copy_to(unsafe { ForeignMut::new(local, len) }),
            // SAFETY: as above, of a readable view.
            false => unsafe { Foreign::new(local, len) }.copy_to(piece),
        };
    }
}

/// Empties a list of copies and gives its allocation to copies of another lifetime, as [`recycle`]
/// does.
pub(crate) fn recycle_copies<'b>(mut copies: Vec<GrantCopy<'_>>) -> Vec<GrantCopy<'b>> {
    copies.clear();
    copies.into_iter().map(|_| unreachable!("the vector was cleared")).collect()
}

/// Makes all copies in one call. Each says by itself whether it was made.
pub(crate) fn grant_copy(gntdev: impl AsFd, copies: &mut [GrantCopy<'_>]) -> Result<(), Errno> {
    /// `struct ioctl_gntdev_grant_copy`.
    #[repr(C)]
    struct Copies<'c, 'm> {
        count: u32,
        segments: *mut GrantCopy<'m>,
        lifetime: PhantomData<&'c mut GrantCopy<'m>>,
    }
    let request = Copies { count: copies.len() as u32, segments: copies.as_mut_ptr(), lifetime: PhantomData };
    let fd = gntdev.as_fd().as_raw_fd();
    // SAFETY: the request reads `count` segments, which are there, and writes their statuses. Each
    // local address was made of a view that is readable, or writable where it is the destination,
    // for its length and as long as `copies`.
    check(unsafe { libc::ioctl(fd, IOCTL_GNTDEV_GRANT_COPY as _, std::ptr::from_ref(&request)) } as isize).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_go_out_in_order_as_one_write() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (a, b) = ([1u8, 2], [3u8, 4, 5]);
        let pieces = [Piece::from(&a[..]), Piece::from(Foreign::from(&b[..]))];
        assert_eq!(write_pieces(&writer, &pieces), Ok(5));
        let mut out = [0; 8];
        assert_eq!(rustix::io::read(&reader, &mut out[..]), Ok(5));
        assert_eq!(out[..5], [1, 2, 3, 4, 5]);
    }

    #[test]
    fn names_that_are_no_interface_names_are_refused() {
        for name in ["", "0123456789abcdef", "a/b", "a\0b"] {
            assert!(IfReq::new(name).is_none(), "{name:?}");
        }
        assert_eq!(IfReq::new("0123456789abcde").unwrap().name(), "0123456789abcde");
    }
}
