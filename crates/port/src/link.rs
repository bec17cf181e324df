//! Network interfaces of the kernel that attachments use: how they are found (network namespaces),
//! configured, and watched for changes.
//!
//! Three things that belong together because each needs the right namespace:
//! * [`Netns`]: a network namespace by name, path or descriptor. Work in it is done by a thread
//!   that is made for it and ends with it, so no other thread can be left in the wrong namespace.
//! * [`Interface`]: up and down, MTU, hardware address, addresses. A netlink socket stays in the
//!   namespace where it was made, so it is used for every later question.
//! * `Monitor`: hears that something about links changed in a namespace, and wakes a port. It reads
//!   which interface the change is about, since asking for a state takes a lock of the whole
//!   namespace, which is busy while others make and remove links. It does not read what changed:
//!   messages can be lost when many come, so the port asks for the state it needs. A
//!   level-triggered interrupt is served in the same way.

use crate::sys::{self, IfReq, InterfaceRequest as Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::Mac;
use tombolo_switch::port::Carrier;
use tombolo_worker::reactor::{Registration, Watch};

const IFF_UP: u16 = 1;
const IFF_RUNNING: u16 = 0x40;
const ARPHRD_ETHER: u16 = 1;
/// linux/magic.h: the file system that namespaces are in.
const NSFS_MAGIC: rustix::fs::FsWord = 0x6e73_6673;

/// What to do where a namespace is not found by its name, or by its path.
const NAMES: &str = "; `ip netns list` shows those that have names";
const PATHS: &str = "; its container has ended, or the path is one of another mount namespace than this program's";

/// Why an interface could not be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum LinkError {
    /// The namespace cannot be opened.
    #[error("network namespace {}: {source}{}", path.display(), if *named { NAMES } else { PATHS })]
    Namespace {
        path: PathBuf,
        /// Whether it was given as a name, and not as a path.
        named: bool,
        source: std::io::Error,
    },
    /// What is at the path is no network namespace.
    #[error(
        "network namespace {}: expected a network namespace, found another kind of file or of namespace; such a path \
         is like /proc/1234/ns/net or /run/netns/NAME", path.display()
    )]
    NotANamespace { path: PathBuf },
    /// A thread could not enter the namespace.
    #[error("entering a network namespace: {source}; that needs CAP_SYS_ADMIN over it")]
    Enter { source: Errno },
    /// The system gave no thread for work in a namespace.
    #[error(
        "starting a thread that enters a network namespace: {source}; there are too many threads: raise `TasksMax=` of this \
         program's unit, the limit of pids of its container, or `ulimit -u`"
    )]
    Thread { source: std::io::Error },
    /// A name that no interface can have.
    #[error("`{name}` cannot be the name of an interface: 1 to 15 bytes without `/` are expected")]
    Name { name: String },
    /// There is no such interface.
    #[error("there is no interface `{name}` in this network namespace")]
    Absent { name: String },
    /// A sysctl that keeps peers from configuring this machine could not be set.
    #[error(
        "writing {}: {source}; without it a peer on the link could change the routes there. Make /proc/sys/net writable for \
         this program. A tap of the fabric's file that is in a namespace, or in a network without a way out for IPv6, may have \
         accept_ra = true instead, which accepts that", path.display()
    )]
    Closed { path: PathBuf, source: Errno },
    /// The kernel refused an operation.
    #[error("{what} of interface `{name}`: {source}")]
    System { what: &'static str, name: String, source: Errno },
}

/// A network namespace.
#[derive(Clone, Debug)]
pub struct Netns(Arc<OwnedFd>);

impl Netns {
    /// The namespace called `name_or_path`: a name as `ip netns` gives them, or a path such as
    /// `/proc/1234/ns/net`.
    ///
    /// It does not wait for the other end of a FIFO, which the author of the path may have put
    /// there.
    ///
    /// # Errors
    /// [`LinkError::Namespace`] where nothing is there, [`LinkError::NotANamespace`] where
    /// something else is.
    pub fn open(name_or_path: &str) -> Result<Netns, LinkError> {
        let named = !name_or_path.contains('/');
        let path = if named { Path::new("/run/netns").join(name_or_path) } else { PathBuf::from(name_or_path) };
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::empty());
        let opened = opened.and_then(|fd| Ok((rustix::fs::fstatfs(&fd)?.f_type, fd)));
        match opened {
            Ok((kind, fd)) if kind == NSFS_MAGIC && sys::is_network_namespace(&fd) => Ok(Netns(Arc::new(fd))),
            Ok(_) => Err(LinkError::NotANamespace { path }),
            Err(source) => Err(LinkError::Namespace { path, named, source: source.into() }),
        }
    }

    /// Whether it is the namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_here(&self) -> Result<bool, LinkError> {
        let of = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd).map_err(|source| LinkError::Enter { source })?;
            Ok::<_, LinkError>((stat.st_dev, stat.st_ino))
        };
        Ok(of(self.as_fd())? == of(Netns::open("/proc/thread-self/ns/net")?.as_fd())?)
    }

    /// What the kernel calls each of the namespaces (`SO_NETNS_COOKIE`): no other one of this boot
    /// has the same number, also after this one ended. `None` for one that cannot be entered, and
    /// for all before Linux 5.14. One thread visits all of them.
    ///
    /// # Errors
    /// [`LinkError::Thread`].
    pub fn cookies(all: impl IntoIterator<Item = Option<Netns>> + Send) -> Result<Vec<Option<u64>>, LinkError> {
        let cookie = |netns: Option<Netns>| {
            move_into_link_name_space(netns?.as_fd(), Some(LinkNameSpaceType::Network)).ok()?;
            sys::netns_cookie(sys::netlink_socket(0).ok()?).ok()
        };
        apart(|| all.into_iter().map(cookie).collect())
    }

    /// A new namespace without a name: it goes away with the last descriptor, process or device in
    /// it.
    ///
    /// # Errors
    /// The kernel's; needs `CAP_SYS_ADMIN`. [`LinkError::Thread`].
    pub fn anonymous() -> Result<Netns, LinkError> {
        apart(|| {
            sys::unshare_network().map_err(|source| LinkError::Enter { source })?;
            Netns::open("/proc/thread-self/ns/net")
        })?
    }

    /// Runs `work` in this namespace, on a thread of its own; processes that it starts are in it
    /// too.
    ///
    /// # Errors
    /// [`LinkError::Enter`], [`LinkError::Thread`].
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LinkError> {
        apart(|| {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|source| LinkError::Enter { source })?;
            Ok(work())
        })?
    }

    /// Runs `work` in the namespace where there is one, else here.
    pub(crate) fn run_in<T: Send>(netns: Option<&Netns>, work: impl FnOnce() -> T + Send) -> Result<T, LinkError> {
        match netns {
            Some(netns) => netns.run(work),
            None => Ok(work()),
        }
    }
}

/// Runs `work` on a thread of its own, since a thread that has entered a namespace stays there.
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, LinkError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".into()).spawn_scoped(scope, work);
        let thread = thread.map_err(|source| LinkError::Thread { source })?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Netns {
    fn from(fd: OwnedFd) -> Self {
        Netns(Arc::new(fd))
    }
}

/// What is known of an interface at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// Set up by its administrator.
    pub up: bool,
    /// Up, and the other side (cable, peer) is there.
    pub running: bool,
    /// Longest payload of a frame, in bytes.
    pub mtu: u32,
}

/// What a port knows of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Up,
    Down,
    /// The interface was deleted; one of its name may come.
    Gone,
}

impl Condition {
    /// Of an interface that is there.
    pub(crate) fn of(state: &LinkState) -> Condition {
        if state.up && state.running { Condition::Up } else { Condition::Down }
    }

    pub(crate) fn link(self) -> Carrier {
        if self == Condition::Up { Carrier::Up } else { Carrier::Down }
    }
}

/// The detail `state` of a port whose interface is gone.
pub const DELETED: &str = "deleted; waiting for one of that name";

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Condition::Up => "up",
            Condition::Down => "down",
            Condition::Gone => DELETED,
        })
    }
}

/// An interface by its name, in its namespace.
#[derive(Debug)]
pub struct Interface {
    socket: OwnedFd,
    name: String,
}

impl Interface {
    /// The interface `name` of the namespace, or of the calling thread's.
    ///
    /// # Errors
    /// [`LinkError::Absent`] where there is none of that name, and the kernel's.
    pub fn open(netns: Option<&Netns>, name: &str) -> Result<Interface, LinkError> {
        let socket = Netns::run_in(netns, || sys::netlink_socket(0))?;
        let socket =
            socket.map_err(|source| LinkError::System { what: "netlink socket", name: name.into(), source })?;
        let interface = Interface { socket, name: name.to_owned() };
        interface.index().map(|_| interface)
    }

    /// The name given at opening; a rename of the interface does not change it.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn ask(&self, what: &'static str, request: Request, fill: impl FnOnce(&mut IfReq)) -> Result<IfReq, LinkError> {
        let name = || self.name.clone();
        let mut argument = IfReq::new(&self.name).ok_or_else(|| LinkError::Name { name: name() })?;
        fill(&mut argument);
        match sys::interface(&self.socket, request, &mut argument) {
            Ok(()) => Ok(argument),
            Err(Errno::NODEV) => Err(LinkError::Absent { name: name() }),
            Err(source) => Err(LinkError::System { what, name: name(), source }),
        }
    }

    /// Its index.
    ///
    /// # Errors
    /// [`LinkError::Absent`], or the kernel's.
    pub fn index(&self) -> Result<u32, LinkError> {
        self.ask("asking for the index", Request::GetIndex, |_| {}).map(|a| u32::from_ne_bytes(a.value()))
    }

    /// Whether it is up, and its MTU.
    ///
    /// # Errors
    /// [`LinkError::Absent`], or the kernel's.
    pub fn state(&self) -> Result<LinkState, LinkError> {
        self.index()?;
        let absent = || LinkError::Absent { name: self.name.clone() };
        state_of(&self.socket, &self.name).ok_or_else(absent)
    }

    /// Its hardware address.
    ///
    /// # Errors
    /// [`LinkError::Absent`], or the kernel's.
    pub fn mac(&self) -> Result<Mac, LinkError> {
        let argument = self.ask("asking for the address", Request::GetHardwareAddress, |_| {})?;
        let [_, _, mac @ ..] = argument.value::<8>();
        Ok(mac)
    }

    /// Sets it up or down.
    ///
    /// # Errors
    /// [`LinkError::Absent`], or the kernel's: `EPERM` without `CAP_NET_ADMIN`.
    pub fn set_up(&self, up: bool) -> Result<(), LinkError> {
        let flags = u16::from_ne_bytes(self.ask("asking for the flags", Request::GetFlags, |_| {})?.value());
        let flags = if up { flags | IFF_UP } else { flags & !IFF_UP };
        self.ask("setting the flags", Request::SetFlags, |a| a.set(&flags.to_ne_bytes())).map(drop)
    }

    /// Sets its MTU in bytes.
    ///
    /// # Errors
    /// As for [`Interface::set_up`]; `EINVAL` where the device cannot do it.
    pub fn set_mtu(&self, mtu: u32) -> Result<(), LinkError> {
        self.ask("setting the MTU", Request::SetMtu, |a| a.set(&mtu.to_ne_bytes())).map(drop)
    }

    /// Sets its hardware address.
    ///
    /// # Errors
    /// As for [`Interface::set_up`].
    pub fn set_mac(&self, mac: Mac) -> Result<(), LinkError> {
        let mut address = [0; 8];
        address[..2].copy_from_slice(&ARPHRD_ETHER.to_ne_bytes());
        address[2..].copy_from_slice(&mac);
        self.ask("setting the address", Request::SetHardwareAddress, |a| a.set(&address)).map(drop)
    }

    /// Gives it an IP address with a prefix length; one that it has already is fine.
    ///
    /// # Errors
    /// As for [`Interface::set_up`].
    pub fn add_address(&self, address: IpAddr, prefix: u8) -> Result<(), LinkError> {
        let index = self.index()?;
        self.request("adding an address", &address_request(index, address, prefix), libc::EEXIST)
    }

    /// Routes what goes to `to` (address and prefix length) through it, by way of the router `via`
    /// where there is one. Returns whether the route is new: the kernel keeps the one that is
    /// there, which may be through another interface.
    ///
    /// # Errors
    /// As for [`Interface::set_up`]; `ENETUNREACH` where the router is not on the link.
    pub fn add_route(&self, to: (IpAddr, u8), via: Option<IpAddr>) -> Result<bool, LinkError> {
        let index = self.index()?;
        self.request_new("adding a route", &route_request(index, to, via), libc::EEXIST)
    }

    /// Deletes it; one that is gone meanwhile is fine.
    ///
    /// # Errors
    /// The kernel's: `EPERM` without `CAP_NET_ADMIN`, `EOPNOTSUPP` for a device that cannot be
    /// deleted.
    pub fn delete(&self) -> Result<(), LinkError> {
        const RTM_DELLINK: u16 = 17;
        let index = self.index()?;
        let mut m = message(RTM_DELLINK, 0);
        m.extend_from_slice(&[0; 4]); // ifinfomsg: family, type
        m.extend_from_slice(&index.to_ne_bytes());
        m.extend_from_slice(&[0; 8]);
        self.request("deleting", &finished(m), libc::ENODEV)
    }

    /// Deletes the interface `name` of the namespace, if it has this MAC address; whether it had.
    /// So an interface of the same name that another program made stays. One that goes meanwhile is
    /// fine.
    ///
    /// # Errors
    /// As for [`Interface::delete`].
    pub fn delete_own(netns: &Netns, name: &str, mac: Mac) -> Result<bool, LinkError> {
        let delete = || {
            let link = Interface::open(Some(netns), name)?;
            let is_own = link.mac()? == mac;
            if is_own {
                link.delete()?;
            }
            Ok(is_own)
        };
        match delete() {
            Err(LinkError::Absent { .. }) => Ok(false),
            done => done,
        }
    }

    /// Sends a request of rtnetlink, and takes the answer. The error `fine` is none.
    fn request(&self, what: &'static str, request: &[u8], fine: i32) -> Result<(), LinkError> {
        self.request_new(what, request, fine).map(drop)
    }

    /// As [`Self::request`]; whether the kernel did it, rather than answer with `fine`.
    fn request_new(&self, what: &'static str, request: &[u8], fine: i32) -> Result<bool, LinkError> {
        let failed = |source| LinkError::System { what, name: self.name.clone(), source };
        rustix::io::write(&self.socket, request).map_err(failed)?;
        // The kernel handles a request within the send, so its answer is there; nlmsghdr 16 bytes,
        // then the error.
        let mut answer = [0; 256];
        let n = rustix::io::read(&self.socket, &mut answer).map_err(failed)?;
        let error = answer[..n].get(16..20).and_then(|b| b.try_into().ok()).map_or(-libc::EIO, i32::from_ne_bytes);
        match error.saturating_neg() {
            0 => Ok(true),
            errno if errno == fine => Ok(false),
            errno => Err(failed(Errno::from_raw_os_error(errno))),
        }
    }
}

/// Sysctls by which a peer on the link could change this machine's configuration, and the values
/// that prevent it.
const CLOSED: [(&str, &str); 6] = [
    ("ipv6/conf/{}/accept_ra", "0"),
    ("ipv6/conf/{}/autoconf", "0"),
    ("ipv6/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/secure_redirects", "0"),
    ("ipv4/conf/{}/accept_source_route", "0"),
];

/// Sets [`CLOSED`] for the interface `name` of the calling thread's namespace. A machine without
/// IPv6 has nothing to close there.
///
/// # Errors
/// The system's, such as for a read-only `/proc/sys`.
pub(crate) fn close_configuration(name: &str) -> Result<(), LinkError> {
    for (key, value) in CLOSED {
        // /proc/sys/net shows the namespace of the thread that looks.
        let path = format!("/proc/sys/net/{}", key.replace("{}", name));
        match std::fs::write(&path, value) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let source = error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
                return Err(LinkError::Closed { path: path.into(), source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The state of the interface `name` in the namespace of `socket`; `None` where there is none.
fn state_of(socket: &OwnedFd, name: &str) -> Option<LinkState> {
    let carrier = sys::carrier(socket, name);
    let mut flags = IfReq::new(name)?;
    let mut mtu = flags;
    sys::interface(socket, Request::GetFlags, &mut flags).ok()?;
    sys::interface(socket, Request::GetMtu, &mut mtu).ok()?;
    let bits = u16::from_ne_bytes(flags.value());
    let running = bits & IFF_RUNNING != 0 && carrier.unwrap_or(true);
    Some(LinkState { up: bits & IFF_UP != 0, running, mtu: u32::from_ne_bytes(mtu.value()) })
}

/// The head of a request of rtnetlink that is acknowledged; its length is filled in by
/// [`finished`].
fn message(kind: u16, flags: u16) -> Vec<u8> {
    const NLM_F_REQUEST_ACK: u16 = 0x1 | 0x4;
    let mut m = vec![0; 4];
    m.extend_from_slice(&kind.to_ne_bytes());
    m.extend_from_slice(&(NLM_F_REQUEST_ACK | flags).to_ne_bytes());
    m.extend_from_slice(&[0; 8]); // sequence, port
    m
}

fn finished(mut message: Vec<u8>) -> Vec<u8> {
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message
}

/// The message that adds a route (rtnetlink(7)): nlmsghdr, rtmsg, attributes.
fn route_request(index: u32, (to, prefix): (IpAddr, u8), via: Option<IpAddr>) -> Vec<u8> {
    const RTM_NEWROUTE: u16 = 24;
    const NLM_F_CREATE: u16 = 0x400;
    const RT_TABLE_MAIN: u8 = 254;
    const RTPROT_STATIC: u8 = 4;
    const RT_SCOPE_UNIVERSE: u8 = 0;
    const RT_SCOPE_LINK: u8 = 253;
    const RTN_UNICAST: u8 = 1;
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    let bytes = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let scope = if via.is_some() || to.is_ipv6() { RT_SCOPE_UNIVERSE } else { RT_SCOPE_LINK };
    let mut m = message(RTM_NEWROUTE, NLM_F_CREATE | 0x200); // NLM_F_EXCL: one that is there stays
    m.extend_from_slice(&[family, prefix, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, 0, 0, 0, 0]);
    let destination = (prefix != 0).then(|| (RTA_DST, bytes(to)));
    let router = via.map(|via| (RTA_GATEWAY, bytes(via)));
    for (kind, value) in destination.into_iter().chain(router).chain([(RTA_OIF, index.to_ne_bytes().to_vec())]) {
        m.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        m.extend_from_slice(&kind.to_ne_bytes());
        m.extend_from_slice(&value);
    }
    finished(m)
}

/// The message that adds an address (rtnetlink(7)): nlmsghdr, ifaddrmsg, attributes.
fn address_request(index: u32, address: IpAddr, prefix: u8) -> Vec<u8> {
    const RTM_NEWADDR: u16 = 20;
    const NLM_F_REQUEST_ACK_CREATE: u16 = 0x1 | 0x4 | 0x400;
    const IFA_F_NODAD: u8 = 0x02;
    const ATTRIBUTES: [u16; 2] = [1, 2]; // IFA_ADDRESS, IFA_LOCAL
    let (family, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET as u8, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6 as u8, v6.octets().to_vec()),
    };
    let attribute_bytes = 4 + bytes.len();
    let total = 16 + 8 + ATTRIBUTES.len() * attribute_bytes;
    let mut m = Vec::with_capacity(total);
    m.extend_from_slice(&(total as u32).to_ne_bytes());
    m.extend_from_slice(&RTM_NEWADDR.to_ne_bytes());
    m.extend_from_slice(&NLM_F_REQUEST_ACK_CREATE.to_ne_bytes());
    m.extend_from_slice(&[0; 8]); // sequence, port
    m.extend_from_slice(&[family, prefix, if address.is_ipv6() { IFA_F_NODAD } else { 0 }, 0]);
    m.extend_from_slice(&index.to_ne_bytes());
    for attribute in ATTRIBUTES {
        m.extend_from_slice(&(attribute_bytes as u16).to_ne_bytes());
        m.extend_from_slice(&attribute.to_ne_bytes());
        m.extend_from_slice(&bytes);
    }
    m
}

/// Why a frame is lost that the kernel refused with `errno`, on a tap or a packet socket.
pub(crate) fn drop_reason(errno: Errno) -> Reason {
    match errno {
        Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM => Reason::NoBuffer,
        // A tap that is down; a packet socket's interface that is down; a device that is gone, in
        // three voices.
        Errno::IO | Errno::NETDOWN | Errno::NXIO | Errno::NODEV | Errno::BADFD => Reason::LinkDown,
        Errno::MSGSIZE => Reason::TooLong,
        _ => Reason::SystemRefused,
    }
}

/// Whether one of the messages of rtnetlink(7) in `bytes` is about the interface `index`, or one
/// called `name`; of what cannot be read, that is assumed.
fn concerns(mut bytes: &[u8], index: u32, name: &str) -> bool {
    const IFLA_IFNAME: u16 = 3;
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let short = |bytes: &[u8], at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
    while !bytes.is_empty() {
        let length = word(bytes, 0).map_or(0, |n| n as usize);
        // nlmsghdr 16 bytes, ifinfomsg 16 bytes, attributes.
        let (Some(message), Some(about)) = (bytes.get(..length), word(bytes, 20)) else { return true };
        let Some(mut attributes) = message.get(32..) else { return true };
        if about == index {
            return true;
        }
        while let (Some(length), Some(kind)) = (short(attributes, 0), short(attributes, 2)) {
            let length = usize::from(length);
            let Some(value) = attributes.get(4..length) else { return true };
            if kind == IFLA_IFNAME && value.strip_suffix(&[0]).unwrap_or(value) == name.as_bytes() {
                return true;
            }
            attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    false
}

/// Hears of changes of the links of one namespace.
#[derive(Debug)]
pub(crate) struct Monitor {
    socket: OwnedFd,
    _watch: Watch,
}

impl Monitor {
    /// Wakes `registration` whenever a link of the namespace changes.
    pub(crate) fn open(netns: Option<&Netns>, registration: &Registration) -> Result<Monitor, LinkError> {
        Self::of(netns, registration, libc::RTMGRP_LINK)
    }

    /// As [`Monitor::open`], also whenever an address of a link changes: those messages have the
    /// index at the same place.
    pub(crate) fn with_addresses(netns: Option<&Netns>, registration: &Registration) -> Result<Monitor, LinkError> {
        Self::of(netns, registration, libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR)
    }

    fn of(netns: Option<&Netns>, registration: &Registration, groups: i32) -> Result<Monitor, LinkError> {
        let failed = |source| LinkError::System { what: "monitoring", name: "*".into(), source };
        let socket = Netns::run_in(netns, || sys::netlink_socket(groups as u32))?.map_err(failed)?;
        let watch = registration.watch(&socket).map_err(failed)?;
        Ok(Monitor { socket, _watch: watch })
    }

    /// Whether anything changed since the last time about the interface `index`, or about one that
    /// is called `name`.
    pub(crate) fn changed(&self, index: u32, name: &str) -> bool {
        let mut changed = false;
        let mut message = [0; 8192];
        loop {
            match rustix::io::read(&self.socket, &mut message) {
                Ok(n) if n > 0 => changed |= concerns(&message[..n], index, name),
                // Messages were lost, which is news enough.
                Err(Errno::NOBUFS) => changed = true,
                Err(Errno::INTR) => {}
                _ => return changed,
            }
        }
    }

    /// What waits at a port's socket, and whether links changed, in one call: the second look of a
    /// port that arms. `None` where a signal interrupted it.
    pub(crate) fn poll(&self, socket: impl AsFd) -> Result<Option<(PollFlags, bool)>, Errno> {
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN), PollFd::new(self, PollFlags::IN)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => Ok(Some((fds[0].revents(), !fds[1].revents().is_empty()))),
            Err(Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The state of the interface `name`; `None` where there is none.
    pub(crate) fn state(&self, name: &str) -> Option<LinkState> {
        state_of(&self.socket, name)
    }

    /// The index of the interface `name`.
    pub(crate) fn index(&self, name: &str) -> Option<u32> {
        let mut argument = IfReq::new(name)?;
        sys::interface(&self.socket, Request::GetIndex, &mut argument).ok()?;
        Some(u32::from_ne_bytes(argument.value()))
    }

    /// The name that the interface `index` has now.
    pub(crate) fn name(&self, index: u32) -> Option<String> {
        let mut argument = IfReq([0; 40]);
        argument.set(&index.to_ne_bytes());
        sys::interface(&self.socket, Request::GetName, &mut argument).ok()?;
        Some(argument.name())
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_and_an_absent_one_is_named() {
        let lo = Interface::open(None, "lo").unwrap();
        assert_eq!(lo.index().unwrap(), 1);
        assert!(lo.state().unwrap().mtu >= 1500);
        let error = Interface::open(None, "tmb-absent").unwrap_err().to_string();
        assert_eq!(error, "there is no interface `tmb-absent` in this network namespace");
        assert!(matches!(Interface::open(None, "much-too-long-a-name"), Err(LinkError::Name { .. })));
        let absent = |name: &str| Netns::open(name).unwrap_err().to_string();
        assert!(absent("tmb-no-such").ends_with("(os error 2); `ip netns list` shows those that have names"));
        assert!(
            absent("/run/netns/tmb-no-such")
                .ends_with("the path is one of another mount namespace than this program's")
        );
    }

    #[test]
    fn a_change_of_another_interface_is_none_of_ours() {
        let message = |index: u32, name: &[u8]| {
            let mut m = [&[0; 4][..], &16u16.to_ne_bytes(), &[0; 10], &[0; 4], &index.to_ne_bytes(), &[0; 8]].concat();
            m.extend_from_slice(&8u16.to_ne_bytes());
            m.extend_from_slice(&[4u16.to_ne_bytes(), [0; 2], [5, 0]].concat()); // an MTU
            m.extend_from_slice(&(4 + name.len() as u16).to_ne_bytes());
            m.extend_from_slice(&3u16.to_ne_bytes());
            m.extend_from_slice(name);
            let length = m.len() as u32;
            m[..4].copy_from_slice(&length.to_ne_bytes());
            m.resize(m.len().next_multiple_of(4), 0);
            m
        };
        let other = message(8, b"veth12\0");
        assert!(!concerns(&other, 7, "va"));
        assert!(!concerns(&[&other[..], &other].concat(), 7, "veth1"));
        assert!(concerns(&other, 8, "va"), "the index");
        assert!(concerns(&other, 7, "veth12"), "the name, where one that was deleted comes again");
        assert!(concerns(&[&other[..], &message(7, b"va\0")].concat(), 7, "va"), "the second of two");
        // What cannot be read may be ours.
        for cut in 1..other.len() - 1 {
            assert!(concerns(&other[..cut], 7, "va"), "{cut}");
        }
        assert!(concerns(&[0; 64], 7, "va"));
    }

    #[test]
    fn an_address_request_has_the_bytes_of_rtnetlink() {
        let m = address_request(7, "10.1.2.3".parse().unwrap(), 24);
        let mut golden = vec![40, 0, 0, 0, 20, 0, 5, 4, 0, 0, 0, 0, 0, 0, 0, 0];
        golden.extend([2, 24, 0, 0, 7, 0, 0, 0]);
        golden.extend([8, 0, 1, 0, 10, 1, 2, 3, 8, 0, 2, 0, 10, 1, 2, 3]);
        assert_eq!(m, golden);
        assert_eq!(address_request(7, "fd00::1".parse().unwrap(), 64).len(), 64);
    }

    #[test]
    fn a_route_request_has_the_bytes_of_rtnetlink() {
        let all = ("0.0.0.0".parse().unwrap(), 0);
        let m = route_request(7, all, Some("10.1.2.1".parse().unwrap()));
        let mut golden = vec![44, 0, 0, 0, 24, 0, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0];
        golden.extend([2, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0]);
        golden.extend([8, 0, 5, 0, 10, 1, 2, 1, 8, 0, 4, 0, 7, 0, 0, 0]);
        assert_eq!(m, golden);
        assert_eq!(route_request(7, ("10.2.0.0".parse().unwrap(), 16), None)[22], 253, "of the link");
        assert_eq!(route_request(7, ("fd00::".parse().unwrap(), 64), None).len(), 16 + 12 + 20 + 8);
    }

    #[test]
    fn a_path_to_something_else_is_no_namespace_and_a_fifo_is_not_waited_for() {
        let dir = std::env::temp_dir().join(format!("tombolo-link-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let fifo = dir.join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::from_raw_mode(0o600)).unwrap();
        let file = dir.join("file");
        std::fs::write(&file, "").unwrap();
        for path in [&fifo, &file, &dir, Path::new("/proc/thread-self/ns/uts")] {
            let error = Netns::open(path.to_str().unwrap()).unwrap_err();
            assert!(matches!(error, LinkError::NotANamespace { .. }), "{error}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(Netns::open("/proc/thread-self/ns/net").unwrap().is_here().unwrap());
    }

    #[test]
    fn no_two_namespaces_have_one_cookie_though_one_has_the_inode_of_another() {
        let (first, second) = match (Netns::anonymous(), Netns::anonymous()) {
            (Ok(first), Ok(second)) => (first, second),
            (Err(error), _) | (_, Err(error)) => return tombolo_testing::skip(error),
        };
        let inode = |netns: &Netns| rustix::fs::fstat(netns).unwrap().st_ino;
        let [one, two, none, again] =
            Netns::cookies([Some(first.clone()), Some(second), None, Some(first.clone())]).unwrap()[..]
        else {
            panic!()
        };
        assert!(one.is_some() && one == again && one != two && none.is_none(), "{one:?} {two:?} {again:?}");
        assert!(!first.is_here().unwrap());
        let was = inode(&first);
        drop(first);
        // The kernel gives the lowest free number, once it has cleaned up.
        for _ in 0..2000 {
            let next = Netns::anonymous().unwrap();
            assert_ne!(Netns::cookies([Some(next.clone())]).unwrap(), [one]);
            if inode(&next) == was {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// The kernel counts the threads of a user, but root's. The child of this test is another user,
    /// who may have one.
    #[test]
    fn without_a_thread_to_enter_a_namespace_there_is_an_error_and_no_panic() {
        const CHILD: &str = "TOMBOLO_TEST_ONE_THREAD";
        if std::env::var_os(CHILD).is_none() {
            if !rustix::process::geteuid().is_root() {
                return tombolo_testing::skip("it takes root to become another user");
            }
            let name = std::thread::current().name().unwrap().to_string();
            // Open now: the other user may have no way to the file.
            let program = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&program));
            rustix::io::fcntl_setfd(&program, rustix::io::FdFlags::empty()).unwrap();
            let mut child = std::process::Command::new("prlimit");
            child.args(["--nproc=1", &path, "--exact", &name, "--nocapture"]).env(CHILD, "1");
            std::os::unix::process::CommandExt::uid(&mut child, 4_000_000_016);
            let done = child.output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let here = Netns::open("/proc/thread-self/ns/net").unwrap();
        let no_thread = |error| matches!(error, LinkError::Thread { .. });
        assert!(no_thread(here.run(|| ()).unwrap_err()));
        assert!(no_thread(Netns::anonymous().unwrap_err()));
        let error = Netns::cookies([Some(here)]).unwrap_err();
        assert!(error.to_string().contains("TasksMax="), "{error}");
    }

    #[test]
    fn routes_come_and_an_interface_goes() {
        let netns = match Netns::anonymous() {
            Ok(netns) => netns,
            Err(error) => return tombolo_testing::skip(error),
        };
        let config =
            crate::tap::TapConfig { netns: Some(netns.clone()), persist: true, ..crate::tap::TapConfig::new("t") };
        crate::tap::make(&config).unwrap();
        let link = Interface::open(Some(&netns), "t").unwrap();
        link.add_address("10.1.2.3".parse().unwrap(), 24).unwrap();
        let route = || link.add_route(("0.0.0.0".parse().unwrap(), 0), Some("10.1.2.1".parse().unwrap()));
        assert!(route().unwrap() && !route().unwrap());
        // Not that of another interface either.
        let second =
            crate::tap::TapConfig { netns: Some(netns.clone()), persist: true, ..crate::tap::TapConfig::new("u") };
        crate::tap::make(&second).unwrap();
        let second = Interface::open(Some(&netns), "u").unwrap();
        second.add_address("10.1.3.3".parse().unwrap(), 24).unwrap();
        assert!(!second.add_route(("0.0.0.0".parse().unwrap(), 0), Some("10.1.3.1".parse().unwrap())).unwrap());
        let away = link.add_route(("10.9.0.0".parse().unwrap(), 16), Some("10.8.0.1".parse().unwrap()));
        assert!(away.unwrap_err().to_string().contains("adding a route"));
        let mac = link.mac().unwrap();
        let delete = |mac| Interface::delete_own(&netns, "t", mac).unwrap();
        assert!(!delete([2, 0, 0, 0, 0, 9]) && link.index().is_ok(), "another one of that name");
        assert!(delete(mac) && !delete(mac), "there is none for the second time");
        assert!(matches!(Interface::open(Some(&netns), "t"), Err(LinkError::Absent { .. })));
        assert!(matches!(link.delete(), Err(LinkError::Absent { .. })));
    }
}
