//! The network stack and the main loop that drives it.
//!
//! ```text
//!   take up to `budget` frames -> let woken tasks run -> send what is to be sent -> under budget? arm, look again, sleep
//! ```
//!
//! After a sleep of 100 µs it looks at the device once more, and sleeps on. With `busy_poll_us` it
//! goes round for so long after the last frame before it arms.
//!
//! Each network device has an interface of its own, with its own sockets ([`Nic`]): what comes in
//! by one is answered by it, whatever routes the others have. A connection that the cell opens
//! leaves by the first device that has the peer on its network, else by the first that has a router
//! ([`Stack::route`]).
//!
//! All state is in [`Stack`], borrowed for the length of one call; tasks hold a
//! [`Net`](crate::Net), a reference to it.

use crate::config::{Config, Ipv4Config, NicConfig, VifConfig};
use crate::device::{ETHERNET_HEADER_BYTES, Narrowed, NetDevice};
use crate::executor::Executor;
use crate::ivshmem::link::Links;
use crate::loss::{LossDetector, Watched};
use crate::machine::Platform;
use crate::neighbor::{NeighborEvent, Neighbors, Question};
use crate::println;
use crate::slaac::{self, Slaac};
use crate::tcp::{Closing, ListenState};
use crate::virtio::net::DeviceStats;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::task::Waker;
use smoltcp::config::IFACE_MAX_ADDR_COUNT;
use smoltcp::iface::{Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, TxToken};
use smoltcp::socket::{dhcpv4, dns};
use smoltcp::time::Instant;
use smoltcp::wire::{DhcpOption, IpAddress, IpCidr, Ipv4Address, Ipv4Cidr, Ipv6Address, Ipv6Cidr};
use tombolo_ring::virtio::notify::RECHECK_NS;

/// DHCP option 12, the host's name (RFC 2132 §3.14).
const DHCP_HOST_NAME: u8 = 12;
/// Rounds of sending in one turn; a socket sends one segment in each.
const EGRESS_ROUNDS: usize = 16;
const LINK_LOCAL_PREFIX: u8 = 64;
/// DNS questions that can be open at a time.
const DNS_QUERIES: usize = 8;

/// Counters of the main loop and the device, all monotonic.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetStats {
    /// Frames and drops of the network device.
    pub device: DeviceStats,
    /// Turns of the main loop.
    pub turns: u64,
    /// Turns that ended with the budget used up.
    pub exhausted_budgets: u64,
    /// How often the cell slept.
    pub sleeps: u64,
    /// Interrupts of the device.
    pub interrupts: u64,
    /// TCP connections that were accepted.
    pub accepted: u64,
    /// Connections that were refused, since the listener had its limit.
    pub refused: u64,
    /// TCP segments that were found lost before the timeout of a second.
    pub tcp_losses: u64,
}

/// A socket, and the device whose interface it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) nic: usize,
    pub(crate) socket: SocketHandle,
}

/// A network device with its interface and its sockets.
pub(crate) struct Nic {
    pub(crate) interface: Interface,
    pub(crate) sockets: SocketSet<'static>,
    pub(crate) dns: SocketHandle,
    device: NetDevice,
    losses: RefCell<LossDetector>,
    neighbors: Neighbors,
    config: NicConfig,
    dhcp: Option<SocketHandle>,
    slaac: Slaac,
    /// The addresses that are there by `slaac`.
    formed: Vec<IpCidr>,
    /// The DNS server that DHCP told.
    dhcp_server: Option<IpAddress>,
    /// Largest packet that the interface sends, in bytes: that of the device, or a smaller one that
    /// a router tells.
    mtu: usize,
    seed: u64,
    is_up: bool,
}

/// Everything that the tasks share.
pub(crate) struct Stack {
    /// In the order of their numbers on the command line; never none.
    pub(crate) nics: Vec<Nic>,
    pub(crate) listeners: Vec<ListenState>,
    pub(crate) closing: Vec<Closing>,
    /// TCP streams that the app holds.
    pub(crate) streams: usize,
    /// By time, then by a number that tells those of the same time apart.
    pub(crate) timers: BTreeMap<(u64, u64), Waker>,
    pub(crate) next_timer: u64,
    pub(crate) stats: NetStats,
    pub(crate) next_port: u16,
    /// The device that is looked at first in the next turn.
    first: usize,
    is_up: bool,
    waiting_for_up: Vec<Waker>,
}

/// What a [`Net`](crate::Net) refers to.
pub(crate) struct NetInner {
    pub(crate) stack: RefCell<Stack>,
    pub(crate) executor: Executor,
    pub(crate) links: Links,
    pub(crate) platform: Platform,
    pub(crate) config: Config,
}

impl NetInner {
    /// Nanoseconds since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        self.platform.clock.now_ns()
    }

    fn now(&self) -> Instant {
        instant(self.now_ns())
    }
}

/// The largest packet that a device sends, in bytes.
fn packet_bytes(caps: &DeviceCapabilities) -> usize {
    caps.max_transmission_unit - ETHERNET_HEADER_BYTES
}

/// The stack's clock counts microseconds.
pub(crate) fn instant(ns: u64) -> Instant {
    Instant::from_micros((ns / 1000) as i64)
}

impl Nic {
    /// Brings an interface up with what the command line says; DHCP begins at once. `more` are
    /// addresses of further vifs of Xen, which are in the same device.
    fn new(mut device: NetDevice, nic: &NicConfig, more: &[VifConfig], config: &Config, now_ns: u64, seed: u64) -> Nic {
        let mac = device.mac();
        let mut interface_config = smoltcp::iface::Config::new(mac.into());
        interface_config.random_seed = seed;
        let mut interface = Interface::new(interface_config, &mut device, instant(now_ns));
        let mut sockets = SocketSet::new(Vec::new());
        interface.update_ip_addrs(|addresses| {
            let link_local = IpCidr::Ipv6(Ipv6Cidr::new(slaac::address([0xfe80, 0, 0, 0], mac), LINK_LOCAL_PREFIX));
            // Seven addresses at most, of the eight that there is room for.
            let _ = addresses.push(link_local);
            for address in nic.addresses().into_iter().chain(more.iter().flat_map(VifConfig::addresses)) {
                let _ = addresses.push(address);
            }
        });
        device.set_addresses(interface.ip_addrs());
        if let Some(gateway) = nic.gateway {
            // Cannot fail: the table is empty.
            let _ = interface.routes_mut().add_default_ipv4_route(gateway);
        }
        if let Some(gateway) = nic.gateway6 {
            let _ = interface.routes_mut().add_default_ipv6_route(gateway);
        }
        let queries: Vec<Option<dns::DnsQuery>> = (0..DNS_QUERIES).map(|_| None).collect();
        let dns = sockets.add(dns::Socket::new(&config.dns[..config.dns.len().min(1)], queries));
        let has_device = !matches!(device, NetDevice::None);
        let dhcp = (nic.ipv4 == Ipv4Config::Dhcp).then(|| {
            let mut socket = dhcpv4::Socket::new();
            // For as long as the cell lives.
            let name: &'static [u8] = Box::leak(config.hostname.clone().into_boxed_str()).as_bytes();
            let options: &'static [DhcpOption<'static>] =
                Box::leak(Box::new([DhcpOption { kind: DHCP_HOST_NAME, data: name }]));
            socket.set_outgoing_options(options);
            sockets.add(socket)
        });
        Nic {
            interface,
            sockets,
            dns,
            slaac: Slaac::new(mac, has_device && nic.slaac, now_ns).beside(nic.ipv6),
            losses: RefCell::new(LossDetector::new(mac)),
            neighbors: Neighbors::default(),
            config: nic.clone(),
            dhcp,
            formed: Vec::new(),
            dhcp_server: None,
            mtu: packet_bytes(&device.capabilities()),
            device,
            seed,
            is_up: false,
        }
    }

    /// Lets the stack take one frame.
    fn poll_ingress(&mut self, now: Instant) -> PollIngressSingleResult {
        let mut device = Watched { device: &mut self.device, detector: &self.losses };
        self.interface.poll_ingress_single(now, &mut device, &mut self.sockets)
    }

    /// Lets each socket send a frame.
    fn poll_egress(&mut self, now: Instant) -> PollResult {
        let mut device = Watched { device: &mut self.device, detector: &self.losses };
        self.interface.poll_egress(now, &mut device, &mut self.sockets)
    }

    /// Payload bytes that fit into the device's transmit buffers.
    pub(crate) fn transmit_bytes(&self) -> usize {
        self.device.transmit_bytes()
    }

    /// Payload bytes that may arrive before the cell has its turn.
    pub(crate) fn receive_bytes(&self) -> usize {
        self.device.receive_bytes()
    }

    /// Whether a DNS server is known.
    pub(crate) fn has_dns(&self, config: &Config) -> bool {
        !config.dns.is_empty() || self.dhcp_server.is_some() || self.slaac.server().is_some()
    }

    /// Sends a frame of the cell's own; false where the transmit ring is full or the link down.
    fn ask(&mut self, question: &Question, now_ns: u64) -> bool {
        let mac = self.device.mac();
        let permit = self.device.transmit(instant(now_ns));
        permit.map(|permit| permit.consume(question.frame_bytes(mac), |frame| question.emit(mac, frame))).is_some()
    }

    /// Says that packets are about to be sent to `to`, so that its neighbour's address is asked for
    /// in time.
    fn expect_sending_to(&mut self, to: IpAddress, now_ns: u64) {
        let Some(next) = self.next_hop(to) else { return };
        let question = match next {
            IpAddress::Ipv4(to) => match self.interface.get_source_address_ipv4(&to) {
                Some(own) => Question::Arp { to, own },
                None => return,
            },
            IpAddress::Ipv6(to) => Question::Solicitation { to, own: self.interface.get_source_address_ipv6(&to) },
        };
        if self.neighbors.want(next, now_ns) {
            // Where it cannot be sent the stack asks later.
            self.ask(&question, now_ns);
        }
    }

    /// The device is another one, or has another place: takes its address, and tells the neighbours
    /// of the own IPv4 addresses (gratuitous ARP, RFC 5227 §3).
    fn announce(&mut self, now_ns: u64) {
        let mac = self.device.mac();
        self.interface.set_hardware_addr(mac.into());
        self.losses.get_mut().set_mac(mac);
        self.neighbors.clear();
        self.slaac.restart(mac, now_ns);
        let own: Vec<Ipv4Address> = self
            .interface
            .ip_addrs()
            .iter()
            .filter_map(|own| if let IpCidr::Ipv4(own) = own { Some(own.address()) } else { None })
            .collect();
        for own in own {
            self.ask(&Question::Arp { to: own, own }, now_ns);
        }
    }

    /// Whether `to` is an own address, or on the network of one.
    fn is_near(&self, to: IpAddress) -> bool {
        self.interface.ip_addrs().iter().any(|own| own.contains_addr(&to))
    }

    /// The neighbour that a packet to `to` goes through; `None` for groups, own addresses, and what
    /// no route leads to.
    fn next_hop(&mut self, to: IpAddress) -> Option<IpAddress> {
        let addresses = self.interface.ip_addrs();
        let is_group = to.is_multicast() || to == IpAddress::Ipv4(Ipv4Address::BROADCAST) || to.is_unspecified();
        if is_group || addresses.iter().any(|own| own.address() == to) {
            return None;
        }
        if self.is_near(to) {
            let is_broadcast =
                |own: &IpCidr| matches!(own, IpCidr::Ipv4(own) if own.broadcast().map(IpAddress::Ipv4) == Some(to));
            return (!addresses.iter().any(is_broadcast)).then_some(to);
        }
        let mut best = None;
        self.interface.routes_mut().update(|routes| {
            let fitting = routes.iter().filter(|route| route.cidr.contains_addr(&to));
            best = fitting.max_by_key(|route| route.cidr.prefix_len()).map(|route| route.via_router);
        });
        best
    }

    /// Takes what the frame that was received last says of its sender.
    fn see(&mut self, config: &Config, now_ns: u64) {
        if let Some(packet) = self.device.take_router_advert()
            && self.slaac.receive(&packet, now_ns)
        {
            self.apply_slaac(config, now_ns);
        }
        match self.device.take_neighbor_event() {
            Some(NeighborEvent::Packet(from)) => self.expect_sending_to(from, now_ns),
            Some(NeighborEvent::Claim(address)) => self.claimed(address, config, now_ns),
            // As the stack below: what is not for one of the own addresses is not believed.
            Some(NeighborEvent::Answer { from, to }) if to.is_none_or(|to| self.interface.has_ip_addr(to)) => {
                self.neighbors.answered(from, now_ns);
            }
            Some(NeighborEvent::Answer { .. }) | None => {}
        }
    }

    /// Another host says that it has an address.
    fn claimed(&mut self, address: Ipv6Address, config: &Config, now_ns: u64) {
        if let Some(wait_ns) = self.slaac.claimed(address, now_ns) {
            let seconds = wait_ns / 1_000_000_000;
            println!("tombolo-cell: another host on this network has {address}; it is tried again in {seconds} s");
            self.apply_slaac(config, now_ns);
        }
    }

    /// Uses the MTU that a router tells, if the device's is larger. The stack reads that of a
    /// device when an interface is made. So the interface is made again, with its addresses and
    /// routes. Sockets ask it for each segment.
    fn fit_mtu(&mut self, now_ns: u64) {
        let mtu = packet_bytes(&self.device.capabilities()).min(self.slaac.mtu().unwrap_or(usize::MAX));
        if mtu == self.mtu {
            return;
        }
        let mut config = smoltcp::iface::Config::new(self.device.mac().into());
        config.random_seed = self.seed ^ now_ns;
        let mut next = Interface::new(config, &mut Narrowed { device: &mut self.device, mtu }, instant(now_ns));
        let addresses = self.interface.ip_addrs();
        next.update_ip_addrs(|all| all.extend(addresses.iter().copied()));
        self.interface.routes_mut().update(|before| next.routes_mut().update(|routes| routes.clone_from(before)));
        self.interface = next;
        self.neighbors.clear();
        self.mtu = mtu;
        println!("tombolo-cell: MTU {mtu} by router advertisement");
    }

    /// What router advertisements say becomes the interface's addresses, route and DNS server.
    fn apply_slaac(&mut self, config: &Config, now_ns: u64) {
        self.fit_mtu(now_ns);
        let Nic { interface, slaac, config: nic, formed, .. } = self;
        let wanted: Vec<IpCidr> = slaac.addresses().map(IpCidr::Ipv6).collect();
        let gone: Vec<IpCidr> = formed.iter().filter(|own| !wanted.contains(own)).copied().collect();
        let before: Vec<IpCidr> = interface.ip_addrs().to_vec();
        // An advertisement with nothing new keeps the neighbours. The stack forgets them at each
        // update, and the next echo request then gets no reply, since the stack asks for its sender
        // instead.
        let new = wanted.iter().any(|address| !before.contains(address)) && before.len() < IFACE_MAX_ADDR_COUNT;
        if new || !gone.is_empty() {
            interface.update_ip_addrs(|addresses| {
                addresses.retain(|own| !gone.contains(own));
                formed.retain(|own| !gone.contains(own));
                for address in &wanted {
                    // Where there is no room for it, or the command line gives it, it is not of
                    // these.
                    if !addresses.contains(address) && addresses.push(*address).is_ok() {
                        formed.push(*address);
                    }
                }
            });
            self.neighbors.clear();
        }
        if nic.gateway6.is_none() {
            match slaac.router() {
                Some(router) => {
                    let _ = interface.routes_mut().add_default_ipv6_route(router);
                }
                None => {
                    interface.routes_mut().remove_default_ipv6_route();
                }
            }
        }
        self.device.set_addresses(self.interface.ip_addrs());
        self.update_dns(config);
        for own in self.interface.ip_addrs().to_vec() {
            if let IpCidr::Ipv6(cidr) = own
                && !before.contains(&own)
            {
                println!("tombolo-cell: {cidr} by router advertisement");
                self.ask(&Question::Solicitation { to: cidr.address(), own: Ipv6Address::UNSPECIFIED }, now_ns);
            }
        }
    }

    fn update_dns(&mut self, config: &Config) {
        if config.dns.is_empty() {
            // One, as many as the socket has room for.
            let server = self.dhcp_server.or(self.slaac.server().map(IpAddress::Ipv6));
            self.sockets.get_mut::<dns::Socket<'_>>(self.dns).update_servers(server.as_slice());
        }
    }

    fn poll_slaac(&mut self, config: &Config, now_ns: u64) {
        if self.slaac.expire(now_ns) {
            self.apply_slaac(config, now_ns);
        }
        while let Some(to) = self.slaac.ask_again(now_ns) {
            self.ask(&Question::Solicitation { to, own: Ipv6Address::UNSPECIFIED }, now_ns);
        }
        if self.slaac.must_solicit(now_ns) {
            let own = slaac::address([0xfe80, 0, 0, 0], self.device.mac());
            self.ask(&Question::Routers { own }, now_ns);
            self.slaac.solicited(now_ns);
        }
    }

    /// Whether DHCP has news: `Some(true)` for an address, `Some(false)` for the end of one.
    fn poll_dhcp(&mut self, config: &Config) -> Option<bool> {
        let handle = self.dhcp?;
        let (address, router, server): (Option<Ipv4Cidr>, Option<Ipv4Address>, Option<IpAddress>) =
            match self.sockets.get_mut::<dhcpv4::Socket<'_>>(handle).poll()? {
                dhcpv4::Event::Deconfigured => (None, None, None),
                dhcpv4::Event::Configured(lease) => {
                    (Some(lease.address), lease.router, lease.dns_servers.first().map(|s| IpAddress::Ipv4(*s)))
                }
            };
        self.interface.update_ip_addrs(|addresses| {
            // Those of further vifs stay, and come after it: the first one is also for packets to
            // other networks.
            let stays = |a: &IpCidr| config.vifs.iter().any(|vif| vif.addresses().contains(a));
            addresses.retain(|a| !matches!(a, IpCidr::Ipv4(_)) || stays(a));
            if let Some(address) = address {
                let _ = addresses.insert(0, IpCidr::Ipv4(address));
            }
        });
        self.device.set_addresses(self.interface.ip_addrs());
        self.neighbors.clear();
        match self.config.gateway.or(router) {
            Some(router) => {
                let _ = self.interface.routes_mut().add_default_ipv4_route(router);
            }
            None => {
                self.interface.routes_mut().remove_default_ipv4_route();
            }
        }
        self.dhcp_server = server;
        self.update_dns(config);
        Some(address.is_some())
    }

    /// When there is something to do next without a frame.
    fn poll_at(&mut self, now_ns: u64) -> Option<u64> {
        // What cannot be sent now is looked at again when the device has room or its link comes up.
        let stack_at = self
            .interface
            .poll_at(instant(now_ns), &self.sockets)
            .map(|at| at.total_micros() as u64 * 1000)
            .filter(|at| *at > now_ns || !self.device.is_blocked());
        let device_at = self.device.poll_at(now_ns);
        [stack_at, device_at, self.slaac.poll_at(), self.losses.borrow().poll_at()].into_iter().flatten().min()
    }
}

impl Stack {
    /// An interface for each of `devices`, with what the command line says of it.
    pub(crate) fn new(devices: Vec<NetDevice>, config: &Config, now_ns: u64, seed: u64) -> Stack {
        let nics = devices.into_iter().zip(&config.nics).enumerate();
        let nics = nics.map(|(at, (device, nic))| {
            let more: &[VifConfig] = if matches!(device, NetDevice::Xen(_)) { &config.vifs } else { &[] };
            Nic::new(device, nic, more, config, now_ns, seed.rotate_left(at as u32))
        });
        Stack {
            nics: nics.collect(),
            listeners: Vec::new(),
            closing: Vec::new(),
            streams: 0,
            timers: BTreeMap::new(),
            next_timer: 0,
            stats: NetStats::default(),
            // Of the dynamic ports (RFC 6335 §6), begun at a random place.
            next_port: 0xc000 | (seed >> 17) as u16 & 0x3fff,
            first: 0,
            is_up: false,
            waiting_for_up: Vec::new(),
        }
    }

    pub(crate) fn stats(&self) -> NetStats {
        let mut stats = self.stats;
        for nic in &self.nics {
            stats.device.add(&nic.device.stats());
            stats.interrupts += nic.device.interrupts().unwrap_or(0);
            stats.tcp_losses += nic.losses.borrow().losses();
        }
        stats
    }

    /// All addresses, device by device.
    pub(crate) fn addresses(&self) -> Vec<IpCidr> {
        self.nics.iter().flat_map(|nic| nic.interface.ip_addrs()).copied().collect()
    }

    /// Whether the cell has an address; if not, `waker` is woken when it gets one.
    pub(crate) fn poll_up(&mut self, waker: &Waker) -> bool {
        if !self.is_up {
            self.waiting_for_up.push(waker.clone());
        }
        self.is_up
    }

    /// A local port for a connection or a socket that does not care.
    pub(crate) fn ephemeral_port(&mut self) -> u16 {
        self.next_port = if self.next_port == u16::MAX { 0xc000 } else { self.next_port + 1 };
        self.next_port
    }

    /// The device that packets to `to` leave by, where they answer none: the first with that
    /// network, else the first with a router, else the first.
    pub(crate) fn route(&mut self, to: IpAddress) -> usize {
        if to.is_multicast() || to.is_unspecified() {
            return 0;
        }
        let near = self.nics.iter().position(|nic| nic.is_near(to));
        near.or_else(|| self.nics.iter_mut().position(|nic| nic.next_hop(to).is_some())).unwrap_or(0)
    }

    /// Says that packets are about to be sent to `to` by a device, so that its neighbour's address
    /// is asked for in time.
    pub(crate) fn expect_sending_to(&mut self, nic: usize, to: IpAddress, now_ns: u64) {
        self.nics[nic].expect_sending_to(to, now_ns);
    }

    fn come_up(&mut self, at: usize, now_ns: u64, how: &str) {
        let nic = &mut self.nics[at];
        if !nic.is_up {
            nic.is_up = true;
            let (ms, tenths) = (now_ns / 1_000_000, now_ns / 100_000 % 10);
            let addresses = nic.interface.ip_addrs();
            let address = addresses.iter().find(|a| matches!(a, IpCidr::Ipv4(_)));
            let device = if at > 0 { alloc::format!(", device {at}") } else { alloc::string::String::new() };
            match address {
                Some(address) => println!("tombolo-cell: net up {address} in {ms}.{tenths} ms{how}{device}"),
                None => println!("tombolo-cell: net up {} in {ms}.{tenths} ms{device}", addresses[0]),
            }
        }
        self.is_up = true;
        for waker in self.waiting_for_up.drain(..) {
            waker.wake();
        }
    }

    fn poll_dhcp(&mut self, config: &Config, now_ns: u64) {
        for at in 0..self.nics.len() {
            match self.nics[at].poll_dhcp(config) {
                Some(true) => self.come_up(at, now_ns, " (DHCP)"),
                Some(false) if self.nics[at].is_up => {
                    self.nics[at].is_up = false;
                    self.is_up = self.nics.iter().any(|nic| nic.is_up);
                    let device = if at > 0 { alloc::format!(" of device {at}") } else { alloc::string::String::new() };
                    println!("tombolo-cell: the DHCP lease{device} is gone");
                }
                _ => {}
            }
        }
    }

    fn fire_timers(&mut self, now_ns: u64) {
        while let Some(timer) = self.timers.first_entry()
            && timer.key().0 <= now_ns
        {
            timer.remove().wake();
        }
    }

    /// Asks all devices for a wake-up; returns whether one has something to do already.
    fn arm(&mut self) -> bool {
        self.nics.iter_mut().fold(false, |has_work, nic| has_work | nic.device.arm())
    }
}

/// Takes up to `budget` frames of each device; returns how many there were, and whether a budget
/// was used up.
fn ingress(shared: &NetInner, budget: usize) -> (usize, bool) {
    let stack = &mut *shared.stack.borrow_mut();
    let now = shared.now();
    let count = stack.nics.len();
    let (mut total, mut exhausted) = (0, false);
    for turn in 0..count {
        let at = (stack.first + turn) % count;
        let mut taken = 0;
        while taken < budget {
            let nic = &mut stack.nics[at];
            match nic.poll_ingress(now) {
                PollIngressSingleResult::None => break,
                PollIngressSingleResult::PacketProcessed | PollIngressSingleResult::SocketStateChanged => taken += 1,
            }
            nic.see(&shared.config, shared.now_ns());
            if nic.device.take_syn() {
                stack.refill_listeners();
            }
        }
        total += taken;
        exhausted |= taken == budget;
    }
    stack.first = (stack.first + 1) % count;
    (total, exhausted)
}

/// Sends; returns whether there may be more to send.
fn egress(shared: &NetInner) -> bool {
    let stack = &mut *shared.stack.borrow_mut();
    let now = shared.now();
    let mut any = false;
    for nic in &mut stack.nics {
        let mut more = true;
        for _ in 0..EGRESS_ROUNDS {
            more = nic.poll_egress(now) == PollResult::SocketStateChanged;
            if !more {
                break;
            }
        }
        nic.device.flush();
        any |= more;
    }
    any
}

pub(crate) fn drive(shared: &Rc<NetInner>) -> ! {
    let (budget, busy_poll_ns) = (shared.config.budget, shared.config.busy_poll_ns);
    let mut busy_until_ns = 0;
    // The app's listeners are there before the first frame is looked at, which would be refused
    // else.
    shared.executor.run_round();
    {
        let stack = &mut *shared.stack.borrow_mut();
        for at in 0..stack.nics.len() {
            if stack.nics[at].dhcp.is_none() && (at == 0 || stack.nics[at].config.ipv4 != Ipv4Config::None) {
                stack.come_up(at, shared.now_ns(), "");
            }
        }
    }
    loop {
        if let Some(domain) = &shared.platform.xen {
            domain.begin_turn();
        }
        {
            let stack = &mut *shared.stack.borrow_mut();
            for nic in &mut stack.nics {
                nic.device.begin_turn(shared.now_ns());
                if nic.device.take_up() {
                    nic.announce(shared.now_ns());
                }
            }
        }
        let (taken, exhausted) = ingress(shared, budget);
        {
            let stack = &mut *shared.stack.borrow_mut();
            let now_ns = shared.now_ns();
            stack.stats.turns += 1;
            stack.stats.exhausted_budgets += u64::from(exhausted);
            for nic in &mut stack.nics {
                nic.interface.poll_maintenance(instant(now_ns));
                nic.poll_slaac(&shared.config, now_ns);
            }
            stack.poll_dhcp(&shared.config, now_ns);
            stack.promote_connections();
            stack.reap_connections(now_ns);
            stack.fire_timers(now_ns);
            shared.links.wake(now_ns);
        }
        shared.executor.run_round();
        if egress(shared) || exhausted || shared.executor.is_ready() {
            continue;
        }
        if busy_poll_ns > 0 {
            let now_ns = shared.now_ns();
            if taken > 0 {
                busy_until_ns = now_ns + busy_poll_ns;
            }
            if now_ns < busy_until_ns {
                continue;
            }
        }
        let until_ns = {
            let stack = &mut *shared.stack.borrow_mut();
            if stack.arm() {
                continue;
            }
            stack.stats.sleeps += 1;
            let now_ns = shared.now_ns();
            let nics_at = stack.nics.iter_mut().filter_map(|nic| nic.poll_at(now_ns)).min();
            let timer_at = stack.timers.first_key_value().map(|((at, _), _)| *at);
            let closing_at = stack.closing.iter().map(|c| c.deadline_ns).min();
            let look_at = shared.links.look_at_ns();
            [nics_at, timer_at, closing_at, look_at].into_iter().flatten().min()
        };
        sleep(shared, until_ns);
    }
}

/// Sleeps until an interrupt comes, or until `until_ns`. A little later it looks at the device once
/// more, since a machine's memory fences may do nothing ([`tombolo_ring::virtio::notify`]).
fn sleep(shared: &NetInner, until_ns: Option<u64>) {
    let recheck_ns = shared.now_ns() + RECHECK_NS;
    if !shared.stack.borrow().nics.iter().any(|nic| nic.device.wants_recheck())
        || until_ns.is_some_and(|until| until <= recheck_ns)
    {
        return shared.platform.sleep(until_ns);
    }
    let interrupts = shared.platform.interrupts();
    while shared.platform.interrupts() == interrupts && shared.now_ns() < recheck_ns {
        shared.platform.sleep(Some(recheck_ns));
    }
    if shared.platform.interrupts() == interrupts && !recheck(shared) {
        shared.platform.sleep(until_ns);
    }
}

/// The second look at all devices: whether one has something to do.
fn recheck(shared: &NetInner) -> bool {
    let nics = &mut shared.stack.borrow_mut().nics;
    nics.iter_mut().fold(false, |has_work, nic| has_work | (nic.device.wants_recheck() && nic.device.recheck()))
}
