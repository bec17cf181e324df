//! The network stack and the main loop that drives it.
//!
//! ```text
//!   take up to `budget` frames -> let woken tasks run -> send what is to be sent -> under budget? arm, look again, sleep
//! ```
//!
//! After a sleep of 100 µs it looks at the device once more, and sleeps on. With `busy_poll_us` it goes round for so long after the last frame before it arms.
//!
//! All state is in [`Stack`], borrowed for the length of one call; tasks hold a [`Net`](crate::Net), a reference to it.

use crate::config::{Config, Ipv4Config, VifConfig};
use crate::device::NetDevice;
use crate::executor::Executor;
use crate::ivshmem::link::Links;
use crate::machine::Platform;
use crate::neighbor::{NeighborEvent, Neighbors, Question};
use crate::println;
use crate::tcp::{Closing, ListenState};
use crate::virtio::net::DeviceStats;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::task::Waker;
use smoltcp::iface::{Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::phy::{Device, TxToken};
use smoltcp::socket::{dhcpv4, dns};
use smoltcp::time::Instant;
use smoltcp::wire::{DhcpOption, EthernetAddress, IpAddress, IpCidr, Ipv4Address, Ipv4Cidr, Ipv6Address, Ipv6Cidr};
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
}

/// Everything that the tasks share.
pub(crate) struct Stack {
    pub(crate) interface: Interface,
    pub(crate) sockets: SocketSet<'static>,
    pub(crate) listeners: Vec<ListenState>,
    pub(crate) closing: Vec<Closing>,
    /// TCP streams that the app holds.
    pub(crate) streams: usize,
    /// By time, then by a number that tells those of the same time apart.
    pub(crate) timers: BTreeMap<(u64, u64), Waker>,
    pub(crate) next_timer: u64,
    pub(crate) dns: SocketHandle,
    pub(crate) stats: NetStats,
    pub(crate) next_port: u16,
    device: NetDevice,
    neighbors: Neighbors,
    dhcp: Option<SocketHandle>,
    is_up: bool,
    waiting_for_up: Vec<Waker>,
}

/// What a [`Net`](crate::Net) refers to.
pub(crate) struct Shared {
    pub(crate) stack: RefCell<Stack>,
    pub(crate) executor: Executor,
    pub(crate) links: Links,
    pub(crate) platform: Platform,
    pub(crate) config: Config,
}

impl Shared {
    /// Nanoseconds since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        self.platform.clock.now_ns()
    }

    fn now(&self) -> Instant {
        instant(self.now_ns())
    }
}

/// The word of the command line that asks for addresses by router advertisement.
const SLAAC: &str = "slaac";
/// With it the stack is looked at so often: smoltcp 0.14 then names the time of the last router solicitation for ever after it, or no
/// time at all, and hides behind that what its sockets wait for.
const SLAAC_LOOK_NS: u64 = 10_000_000;

/// The stack's clock counts microseconds.
pub(crate) fn instant(ns: u64) -> Instant {
    Instant::from_micros((ns / 1000) as i64)
}

fn link_local(mac: EthernetAddress) -> Ipv6Address {
    let [a, b, c, d, e, f] = mac.0;
    // RFC 4291 appendix A: the modified EUI-64 identifier.
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ipv6Address::new(0xfe80, 0, 0, 0, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

impl Stack {
    /// Brings the interface up with what the command line says; DHCP begins at once.
    pub(crate) fn new(mut device: NetDevice, config: &Config, now_ns: u64, seed: u64) -> Stack {
        let mac = device.mac();
        let mut interface_config = smoltcp::iface::Config::new(mac.into());
        interface_config.random_seed = seed;
        interface_config.slaac = config.has(SLAAC);
        let mut interface = Interface::new(interface_config, &mut device, instant(now_ns));
        let mut sockets = SocketSet::new(Vec::new());
        interface.update_ip_addrs(|addresses| {
            let link_local = IpCidr::Ipv6(Ipv6Cidr::new(link_local(mac), LINK_LOCAL_PREFIX));
            // Seven addresses at most, of the eight that there is room for.
            let _ = addresses.push(link_local);
            if let Ipv4Config::Static(cidr) = config.ipv4 {
                let _ = addresses.push(IpCidr::Ipv4(cidr));
            }
            if let Some(cidr) = config.ipv6 {
                let _ = addresses.push(IpCidr::Ipv6(cidr));
            }
            for address in config.vifs.iter().flat_map(VifConfig::addresses) {
                let _ = addresses.push(address);
            }
        });
        device.set_addresses(interface.ip_addrs());
        if let Some(gateway) = config.gateway {
            // Cannot fail: the table is empty.
            let _ = interface.routes_mut().add_default_ipv4_route(gateway);
        }
        if let Some(gateway) = config.gateway6 {
            let _ = interface.routes_mut().add_default_ipv6_route(gateway);
        }
        let queries: Vec<Option<dns::DnsQuery>> = (0..DNS_QUERIES).map(|_| None).collect();
        let dns = sockets.add(dns::Socket::new(&config.dns[..config.dns.len().min(1)], queries));
        let dhcp = (config.ipv4 == Ipv4Config::Dhcp).then(|| {
            let mut socket = dhcpv4::Socket::new();
            // For as long as the cell lives.
            let name: &'static [u8] = Box::leak(config.hostname.clone().into_boxed_str()).as_bytes();
            let options: &'static [DhcpOption<'static>] =
                Box::leak(Box::new([DhcpOption { kind: DHCP_HOST_NAME, data: name }]));
            socket.set_outgoing_options(options);
            sockets.add(socket)
        });
        Stack {
            interface,
            sockets,
            listeners: Vec::new(),
            closing: Vec::new(),
            streams: 0,
            timers: BTreeMap::new(),
            next_timer: 0,
            dns,
            stats: NetStats::default(),
            // Of the dynamic ports (RFC 6335 §6), begun at a random place.
            next_port: 0xc000 | (seed >> 17) as u16 & 0x3fff,
            device,
            neighbors: Neighbors::default(),
            dhcp,
            is_up: false,
            waiting_for_up: Vec::new(),
        }
    }

    pub(crate) fn stats(&self) -> NetStats {
        let mut stats = self.stats;
        stats.device = self.device.stats();
        stats.interrupts = self.device.interrupts().unwrap_or(0);
        stats
    }

    /// Payload bytes that fit into the device's transmit buffers.
    pub(crate) fn transmit_bytes(&self) -> usize {
        self.device.transmit_bytes()
    }

    /// Payload bytes that may arrive before the cell has its turn.
    pub(crate) fn receive_bytes(&self) -> usize {
        self.device.receive_bytes()
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

    /// Says that packets are about to be sent to `to`, so that its neighbour's address is asked for in time.
    pub(crate) fn expect_sending_to(&mut self, to: IpAddress, now_ns: u64) {
        let Some(next) = self.next_hop(to) else { return };
        let question = match next {
            IpAddress::Ipv4(to) => match self.interface.get_source_address_ipv4(&to) {
                Some(own) => Question::Arp { to, own },
                None => return,
            },
            IpAddress::Ipv6(to) => Question::Solicitation { to, own: self.interface.get_source_address_ipv6(&to) },
        };
        if !self.neighbors.want(next, now_ns) {
            return;
        }
        let mac = self.device.mac();
        // Where the transmit ring is full the stack asks later.
        if let Some(permit) = self.device.transmit(instant(now_ns)) {
            permit.consume(question.frame_bytes(mac), |frame| question.emit(mac, frame));
        }
    }

    /// The device is another one, or has another place: takes its address, and tells the neighbours of the own IPv4 addresses
    /// (gratuitous ARP, RFC 5227 §3).
    fn announce(&mut self, now_ns: u64) {
        let mac = self.device.mac();
        self.interface.set_hardware_addr(mac.into());
        self.neighbors.clear();
        let own: Vec<Ipv4Address> = self
            .interface
            .ip_addrs()
            .iter()
            .filter_map(|own| if let IpCidr::Ipv4(own) = own { Some(own.address()) } else { None })
            .collect();
        for own in own {
            let question = Question::Arp { to: own, own };
            if let Some(permit) = self.device.transmit(instant(now_ns)) {
                permit.consume(question.frame_bytes(mac), |frame| question.emit(mac, frame));
            }
        }
    }

    /// The neighbour that a packet to `to` goes through; `None` for groups, own addresses, and what no route leads to.
    fn next_hop(&mut self, to: IpAddress) -> Option<IpAddress> {
        let addresses = self.interface.ip_addrs();
        let is_group = to.is_multicast() || to == IpAddress::Ipv4(Ipv4Address::BROADCAST) || to.is_unspecified();
        if is_group || addresses.iter().any(|own| own.address() == to) {
            return None;
        }
        if addresses.iter().any(|own| own.contains_addr(&to)) {
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

    fn see(&mut self, event: NeighborEvent, now_ns: u64) {
        match event {
            NeighborEvent::Packet(from) => self.expect_sending_to(from, now_ns),
            NeighborEvent::Answer { from, to } => {
                // As the stack below: what is not for one of the own addresses is not believed.
                if to.is_none_or(|to| self.interface.has_ip_addr(to)) {
                    self.neighbors.answered(from, now_ns);
                }
            }
        }
    }

    fn come_up(&mut self, now_ns: u64, how: &str) {
        if !self.is_up {
            self.is_up = true;
            let (ms, tenths) = (now_ns / 1_000_000, now_ns / 100_000 % 10);
            match self.interface.ip_addrs().iter().find(|a| matches!(a, IpCidr::Ipv4(_))) {
                Some(address) => println!("tombolo-cell: net up {address} in {ms}.{tenths} ms{how}"),
                None => println!("tombolo-cell: net up {} in {ms}.{tenths} ms", self.interface.ip_addrs()[0]),
            }
        }
        for waker in self.waiting_for_up.drain(..) {
            waker.wake();
        }
    }

    fn poll_dhcp(&mut self, config: &Config, now_ns: u64) {
        let Some(handle) = self.dhcp else { return };
        let (address, router, servers): (Option<Ipv4Cidr>, Option<Ipv4Address>, Vec<IpAddress>) =
            match self.sockets.get_mut::<dhcpv4::Socket<'_>>(handle).poll() {
                None => return,
                Some(dhcpv4::Event::Deconfigured) => (None, None, Vec::new()),
                Some(dhcpv4::Event::Configured(lease)) => {
                    (Some(lease.address), lease.router, lease.dns_servers.iter().map(|s| IpAddress::Ipv4(*s)).collect())
                }
            };
        self.interface.update_ip_addrs(|addresses| {
            // Those of further vifs stay, and come after it: the first one is also for packets to other networks.
            let stays = |a: &IpCidr| config.vifs.iter().any(|vif| vif.ipv4.map(IpCidr::Ipv4) == Some(*a));
            addresses.retain(|a| !matches!(a, IpCidr::Ipv4(_)) || stays(a));
            if let Some(address) = address {
                let _ = addresses.insert(0, IpCidr::Ipv4(address));
            }
        });
        self.device.set_addresses(self.interface.ip_addrs());
        self.neighbors.clear();
        match config.gateway.or(router) {
            Some(router) => {
                let _ = self.interface.routes_mut().add_default_ipv4_route(router);
            }
            None => {
                self.interface.routes_mut().remove_default_ipv4_route();
            }
        }
        if config.dns.is_empty() {
            // As many as the socket has room for.
            self.sockets.get_mut::<dns::Socket<'_>>(self.dns).update_servers(&servers[..servers.len().min(1)]);
        }
        match address {
            Some(_) => self.come_up(now_ns, " (DHCP)"),
            None if self.is_up => {
                self.is_up = false;
                println!("tombolo-cell: the DHCP lease is gone");
            }
            None => {}
        }
    }

    fn fire_timers(&mut self, now_ns: u64) {
        while let Some(timer) = self.timers.first_entry()
            && timer.key().0 <= now_ns
        {
            timer.remove().wake();
        }
    }
}

/// Takes up to `budget` frames; returns how many there were.
fn ingress(shared: &Shared, budget: usize) -> usize {
    let stack = &mut *shared.stack.borrow_mut();
    let now = shared.now();
    let mut taken = 0;
    while taken < budget {
        match stack.interface.poll_ingress_single(now, &mut stack.device, &mut stack.sockets) {
            PollIngressSingleResult::None => break,
            PollIngressSingleResult::PacketProcessed | PollIngressSingleResult::SocketStateChanged => taken += 1,
        }
        if let Some(event) = stack.device.take_sighting() {
            stack.see(event, shared.now_ns());
        }
        if stack.device.take_syn() {
            stack.refill_listeners();
        }
    }
    taken
}

/// Sends; returns whether there may be more to send.
fn egress(shared: &Shared) -> bool {
    let stack = &mut *shared.stack.borrow_mut();
    let now = shared.now();
    let mut more = true;
    for _ in 0..EGRESS_ROUNDS {
        more =
            stack.interface.poll_egress(now, &mut stack.device, &mut stack.sockets) == PollResult::SocketStateChanged;
        if !more {
            break;
        }
    }
    stack.device.flush();
    more
}

pub(crate) fn drive(shared: &Rc<Shared>) -> ! {
    let (budget, busy_poll_ns) = (shared.config.budget, shared.config.busy_poll_ns);
    let mut busy_until_ns = 0;
    // The app's listeners are there before the first frame is looked at, which would be refused else.
    shared.executor.run_round();
    if shared.config.ipv4 != Ipv4Config::Dhcp {
        shared.stack.borrow_mut().come_up(shared.now_ns(), "");
    }
    loop {
        if let Some(domain) = &shared.platform.xen {
            domain.begin_turn();
        }
        {
            let stack = &mut *shared.stack.borrow_mut();
            stack.device.begin_turn(shared.now_ns());
            if stack.device.take_up() {
                stack.announce(shared.now_ns());
            }
        }
        let taken = ingress(shared, budget);
        {
            let stack = &mut *shared.stack.borrow_mut();
            let now_ns = shared.now_ns();
            stack.stats.turns += 1;
            stack.stats.exhausted_budgets += u64::from(taken == budget);
            stack.interface.poll_maintenance(instant(now_ns));
            stack.poll_dhcp(&shared.config, now_ns);
            stack.promote_connections();
            stack.reap_connections(now_ns);
            stack.fire_timers(now_ns);
            shared.links.wake(now_ns);
        }
        shared.executor.run_round();
        if egress(shared) || taken == budget || shared.executor.is_ready() {
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
            if shared.config.has(SLAAC) {
                stack.device.set_addresses(stack.interface.ip_addrs());
            }
            if stack.device.arm() {
                continue;
            }
            stack.stats.sleeps += 1;
            let now_ns = shared.now_ns();
            // What cannot be sent now is looked at again when the device has room or its link comes up.
            let stack_at = stack
                .interface
                .poll_at(instant(now_ns), &stack.sockets)
                .map(|at| at.total_micros() as u64 * 1000)
                .filter(|at| *at > now_ns || !stack.device.is_blocked());
            let slaac_at = shared.config.has(SLAAC).then_some(now_ns + SLAAC_LOOK_NS);
            let stack_at = match slaac_at {
                Some(look) => Some(stack_at.filter(|at| *at > now_ns).map_or(look, |at| at.min(look))),
                None => stack_at,
            };
            let timer_at = stack.timers.first_key_value().map(|((at, _), _)| *at);
            let closing_at = stack.closing.iter().map(|c| c.deadline_ns).min();
            let poll_at = stack.device.poll_at(now_ns);
            let look_at = shared.links.look_at_ns();
            [stack_at, timer_at, closing_at, poll_at, look_at].into_iter().flatten().min()
        };
        sleep(shared, until_ns);
    }
}

/// Sleeps until an interrupt comes, or until `until_ns`. A little later it looks at the device once more, since a machine's
/// memory fences may do nothing ([`tombolo_ring::virtio::notify`]).
fn sleep(shared: &Shared, until_ns: Option<u64>) {
    let recheck_ns = shared.now_ns() + RECHECK_NS;
    if !shared.stack.borrow().device.wants_recheck() || until_ns.is_some_and(|until| until <= recheck_ns) {
        return shared.platform.sleep(until_ns);
    }
    let interrupts = shared.platform.interrupts();
    while shared.platform.interrupts() == interrupts && shared.now_ns() < recheck_ns {
        shared.platform.sleep(Some(recheck_ns));
    }
    if shared.platform.interrupts() == interrupts && !shared.stack.borrow_mut().device.recheck() {
        shared.platform.sleep(until_ns);
    }
}
