//! What an app is given: the network, tasks, time, the command line.

use crate::calls::{Calls, CallsError};
use crate::config::Config;
use crate::icmp::Pinger;
use crate::ivshmem::channel::{Channel, ChannelError, ChannelOptions};
use crate::ivshmem::link::{Link, LinkError};
use crate::stack::{NetInner, NetStats, Stack};
use crate::tcp::{TcpError, TcpListener, TcpOptions, TcpStream};
use crate::udp::{DEFAULT_BYTES, UdpError, UdpSocket};
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::fmt;
use core::future::{Future, poll_fn};
use core::pin::{Pin, pin};
use core::task::{Context, Poll};
use smoltcp::socket::dns;
use smoltcp::wire::{DnsQueryType, IpAddress, IpCidr, IpEndpoint};
use tombolo_calls::session::ServeOptions;

/// The cell as its app sees it. A clone refers to the same one.
#[derive(Clone)]
pub struct Net(Rc<NetInner>);

/// A name has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveError {
    /// It is not a name.
    InvalidName,
    /// No server is known, or none answered, or the name has no address.
    NotFound,
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ResolveError::InvalidName => "this is not a host name",
            ResolveError::NotFound => "no DNS server knows this name",
        })
    }
}

impl Net {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Stack) -> R) -> R {
        f(&mut self.0.stack.borrow_mut())
    }

    pub(crate) fn shared(&self) -> &NetInner {
        &self.0
    }

    /// Adds a task: it runs until its future is done.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.0.executor.spawn(task);
    }

    /// The options that the command line sets.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Nanoseconds since the start.
    pub fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    /// Counters that only grow.
    pub fn stats(&self) -> NetStats {
        self.with(|stack| stack.stats())
    }

    /// The addresses of the cell, with their prefix lengths.
    pub fn addresses(&self) -> Vec<IpCidr> {
        self.with(|stack| stack.addresses())
    }

    /// Waits until the cell has an IPv4 address at one of its devices, or at once where it is to
    /// have none.
    pub async fn up(&self) {
        poll_fn(|cx| self.with(|stack| if stack.poll_up(cx.waker()) { Poll::Ready(()) } else { Poll::Pending })).await
    }

    /// Sleeps until `at_ns` by [`Net::now_ns`].
    pub fn sleep_until(&self, at_ns: u64) -> Sleep {
        Sleep { net: self.clone(), at_ns, timer: None }
    }

    /// What `future` gives, or `None` where it is not done within `ns`.
    pub async fn within<T>(&self, ns: u64, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut sleep = self.sleep_until(self.now_ns().saturating_add(ns));
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => Pin::new(&mut sleep).poll(cx).map(|()| None),
        })
        .await
    }

    /// The memory that the machine gave to the cell, in bytes.
    pub fn memory_bytes(&self) -> usize {
        crate::machine::heap::bytes()
    }

    /// Reads what is typed at the console, as it comes: at least one byte, and as many as there are
    /// and `to` has room for. One task at a time. `None` where the console is output only: on every
    /// machine but Xen.
    pub async fn read_console(&self, to: &mut [u8]) -> Option<usize> {
        let domain = self.0.platform.xen.as_ref().filter(|domain| domain.has_console())?;
        if to.is_empty() {
            return Some(0);
        }
        let read = poll_fn(|cx| match domain.read_console(to, cx.waker()) {
            0 => Poll::Pending,
            read => Poll::Ready(read),
        });
        Some(read.await)
    }

    /// Lets the network and the other tasks have their turn.
    pub async fn pause(&self) {
        let mut again = false;
        poll_fn(|cx| {
            if core::mem::replace(&mut again, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// Listens for TCP connections on `port`.
    ///
    /// # Panics
    /// Port 0, or a port that another listener has.
    pub fn listen(&self, port: u16, options: TcpOptions) -> TcpListener {
        TcpListener::new(self.clone(), port, options)
    }

    /// Listens on `port` and lets each connection have a task of its own.
    ///
    /// # Panics
    /// As [`Net::listen`].
    pub fn serve<H, F>(&self, port: u16, options: TcpOptions, handle: H)
    where
        H: Fn(TcpStream) -> F + 'static,
        F: Future<Output = ()> + 'static,
    {
        let mut listener = self.listen(port, options);
        let net = self.clone();
        self.spawn(async move {
            loop {
                net.spawn(handle(listener.accept().await));
            }
        });
    }

    /// Opens a TCP connection.
    pub async fn connect(&self, to: IpEndpoint, options: TcpOptions) -> Result<TcpStream, TcpError> {
        TcpStream::connect(self.clone(), to, options).await
    }

    /// A UDP socket on `port`, or on one of the stack's choice if that is 0.
    pub fn udp(&self, port: u16) -> Result<UdpSocket, UdpError> {
        UdpSocket::new(self.clone(), port, DEFAULT_BYTES)
    }

    /// A UDP socket that holds `bytes` each way.
    pub fn udp_with(&self, port: u16, bytes: usize) -> Result<UdpSocket, UdpError> {
        UdpSocket::new(self.clone(), port, bytes)
    }

    /// Sends ICMP echo requests.
    pub fn pinger(&self) -> Pinger {
        Pinger::new(self.clone())
    }

    /// Takes the ivshmem link called `name`, for code that speaks a protocol of its own over it.
    ///
    /// # Errors
    /// No device has such a link, or it is taken: by the network, by a channel, or by another call
    /// of this.
    pub fn link(&self, name: &str) -> Result<Link, LinkError> {
        Link::open(self, name)
    }

    /// Opens a channel for records over the ivshmem link called `name`. It comes up when the peer
    /// has opened its end.
    ///
    /// # Errors
    /// There is no such link, it was made for something else, or the channel does not fit its
    /// sections.
    pub fn channel(&self, name: &str, options: ChannelOptions) -> Result<Channel, ChannelError> {
        Channel::open(self, name, options)
    }

    /// Calls and serves the peer of the ivshmem link called `name`, which comes and goes.
    ///
    /// # Errors
    /// There is no such link, or it was made for something else.
    pub fn calls(&self, name: &str, options: &ServeOptions) -> Result<Calls, CallsError> {
        Calls::open(self, name, options)
    }

    /// Calls and serves the other side of a TCP connection, whichever of the two opened it, until
    /// that ends.
    ///
    /// # Errors
    /// [`CallsError::Greeting`]: the other side is no peer of calls.
    pub async fn calls_over(&self, stream: TcpStream, options: &ServeOptions) -> Result<Calls, CallsError> {
        Calls::over(self, stream, options).await
    }

    /// The address of a name: itself if it is one, its A record, or its AAAA record.
    pub async fn resolve(&self, name: &str) -> Result<IpAddress, ResolveError> {
        if let Ok(address) = name.parse() {
            return Ok(address);
        }
        let mut error = ResolveError::NotFound;
        // Each network may have its own server, for its own names; the first one's counts first.
        for nic in 0..self.with(|stack| stack.nics.len()) {
            if !self.with(|stack| stack.nics[nic].has_dns(&self.0.config)) {
                continue;
            }
            for kind in [DnsQueryType::A, DnsQueryType::Aaaa] {
                match self.query(nic, name, kind).await {
                    Ok(address) => return Ok(address),
                    Err(e) => error = e,
                }
            }
        }
        Err(error)
    }

    async fn query(&self, nic: usize, name: &str, kind: DnsQueryType) -> Result<IpAddress, ResolveError> {
        let handle = self.with(|stack| {
            let nic = &mut stack.nics[nic];
            let socket = nic.sockets.get_mut::<dns::Socket<'_>>(nic.dns);
            socket.start_query(nic.interface.context(), name, kind).map_err(|error| match error {
                dns::StartQueryError::NoFreeSlot => ResolveError::NotFound,
                _ => ResolveError::InvalidName,
            })
        })?;
        poll_fn(|cx| {
            self.with(|stack| {
                let nic = &mut stack.nics[nic];
                let socket = nic.sockets.get_mut::<dns::Socket<'_>>(nic.dns);
                match socket.get_query_result(handle) {
                    Ok(addresses) => Poll::Ready(addresses.first().copied().ok_or(ResolveError::NotFound)),
                    Err(dns::GetQueryResultError::Failed) => Poll::Ready(Err(ResolveError::NotFound)),
                    Err(dns::GetQueryResultError::Pending) => {
                        socket.register_query_waker(handle, cx.waker());
                        Poll::Pending
                    }
                }
            })
        })
        .await
    }
}

/// Waits for a point in time; see [`Net::sleep_until`].
pub struct Sleep {
    net: Net,
    at_ns: u64,
    /// The key of the timer that is set.
    timer: Option<(u64, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.net.now_ns() >= self.at_ns {
            return Poll::Ready(());
        }
        if self.timer.is_none() {
            let at_ns = self.at_ns;
            let key = self.net.with(|stack| {
                stack.next_timer += 1;
                let key = (at_ns, stack.next_timer);
                stack.timers.insert(key, cx.waker().clone());
                key
            });
            self.timer = Some(key);
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.timer {
            self.net.with(|stack| stack.timers.remove(&key));
        }
    }
}

#[cfg(not(test))]
mod start {
    use super::*;
    use crate::config::{MAX_NICS, NetChoice};
    use crate::device::NetDevice;
    use crate::executor::Executor;
    use crate::ivshmem::link::Links;
    use crate::ivshmem::net::IvshmemNet;
    use crate::machine::startup::Machine;
    use crate::machine::{Platform, cpu};
    use crate::pci::Pci;
    use crate::virtio::mmio::MmioTransport;
    use crate::virtio::net::VirtioNet;
    use crate::virtio::pci::PciTransport;
    use crate::virtio::{DEVICE_NET, Transport};
    use crate::xen::Domain;
    use crate::xen::net::XenNet;
    use crate::{ExitCode, app, exit, ivshmem, println, selftest, stack};
    use alloc::boxed::Box;
    use alloc::string::ToString;
    use core::cell::RefCell;
    use tombolo_ring::ivshmem::protocol::NETWORK;

    /// The virtio network devices: by MMIO if the command line names some, by PCI, and `everywhere`
    /// by MMIO in microvm's places.
    fn find_virtio(
        platform: &Platform,
        pci: Option<&mut Pci<'_>>,
        line: &str,
        everywhere: bool,
    ) -> Vec<Box<dyn Transport>> {
        let mmio = |with_scan| {
            let found = MmioTransport::find(platform, line, with_scan, DEVICE_NET, MAX_NICS);
            found.into_iter().map(|transport| Box::new(transport) as Box<dyn Transport>)
        };
        let mut all: Vec<Box<dyn Transport>> = mmio(false).collect();
        if let Some(pci) = pci {
            let left = MAX_NICS - all.len();
            let found = PciTransport::find(platform, pci, DEVICE_NET, left);
            all.extend(found.into_iter().map(|transport| Box::new(transport) as Box<dyn Transport>));
        }
        if all.is_empty() && everywhere {
            all.extend(mmio(true));
        }
        all
    }

    /// The links over shared memory that are the network, `most` at most, taken out of `links`.
    fn take_links(
        links: &mut Vec<ivshmem::device::Device>,
        choice: &NetChoice,
        most: usize,
    ) -> Vec<ivshmem::device::Device> {
        let mut taken = Vec::new();
        while taken.len() < most {
            let Some(at) = links.iter().position(|link| match choice {
                NetChoice::Any => link.protocol() == NETWORK,
                NetChoice::Link(name) => link.name() == name.as_str(),
                NetChoice::Virtio | NetChoice::None => false,
            }) else {
                break;
            };
            taken.push(links.remove(at));
        }
        taken
    }

    fn fail(why: core::fmt::Arguments<'_>) -> ! {
        println!("tombolo-cell: {why}");
        exit(ExitCode::Failure)
    }

    fn xen_network(domain: &Rc<Domain>, config: &Config, seed: u64) -> NetDevice {
        match &config.net {
            NetChoice::None => NetDevice::None,
            NetChoice::Any => {
                let device = XenNet::new(domain, config, seed);
                if config.verbose {
                    let (mac, mtu, queues) = (device.mac(), device.mtu(), device.queues());
                    println!("tombolo-cell: network of Xen: {mac}, MTU {mtu}, queues {queues}");
                }
                NetDevice::Xen(Box::new(device))
            }
            _ => fail(format_args!("a domain of Xen has no virtio and no ivshmem; leave net= out, or say net=none")),
        }
    }

    fn virtio_network(transport: Box<dyn Transport>, config: &Config, seed: u64, devices: usize) -> NetDevice {
        let Some(device) = VirtioNet::new(transport, seed, devices) else {
            fail(format_args!("the network device refused the features"))
        };
        if config.verbose {
            let (name, mac, features, mtu) = (device.name(), device.mac(), device.features(), device.mtu());
            println!("tombolo-cell: {name}: {mac}, features {features:#x}, MTU {mtu}");
        }
        if !device.link_is_up() {
            println!("tombolo-cell: the network device says that its link is down");
        }
        NetDevice::Virtio(Box::new(device))
    }

    fn link_network(device: ivshmem::device::Device, config: &Config, seed: u64) -> NetDevice {
        let name = device.name().to_string();
        match IvshmemNet::new(device, config, seed) {
            Ok(device) => {
                if config.verbose {
                    let (name, mac, mtu) = (device.name(), device.mac(), device.mtu());
                    println!("tombolo-cell: network over ivshmem link {name:?}: {mac}, MTU {mtu}");
                }
                NetDevice::Ivshmem(Box::new(device))
            }
            Err(refusal) => fail(format_args!("ivshmem link {name:?}: {refusal}")),
        }
    }

    /// The network devices that the command line asks for, or all that there are, in the order that
    /// it says; never none.
    fn find_networks(
        platform: &Platform,
        pci: Option<&mut Pci<'_>>,
        links: &mut Vec<ivshmem::device::Device>,
        line: &str,
        config: &Config,
        seed: u64,
    ) -> Vec<NetDevice> {
        if let Some(domain) = &platform.xen {
            return alloc::vec![xen_network(domain, config, seed)];
        }
        let has_link = links.iter().any(|link| link.protocol() == NETWORK);
        let transports = match config.net {
            NetChoice::Any => find_virtio(platform, pci, line, !has_link),
            NetChoice::Virtio => find_virtio(platform, pci, line, true),
            NetChoice::Link(_) | NetChoice::None => Vec::new(),
        };
        let taken = take_links(links, &config.net, MAX_NICS - transports.len());
        let count = transports.len() + taken.len();
        let seed_of = |at: usize| seed.rotate_left(13 * at as u32);
        let mut devices: Vec<NetDevice> = Vec::with_capacity(count.max(1));
        for transport in transports {
            devices.push(virtio_network(transport, config, seed_of(devices.len()), count));
        }
        for link in taken {
            devices.push(link_network(link, config, seed_of(devices.len())));
        }
        if devices.is_empty() {
            match &config.net {
                NetChoice::None => {}
                NetChoice::Any if !links.is_empty() => {
                    println!("tombolo-cell: no network: {} ivshmem links, none of them a network", links.len());
                }
                NetChoice::Link(name) => fail(format_args!("net={name}: no such link over ivshmem")),
                NetChoice::Any | NetChoice::Virtio => fail(format_args!(
                    "no virtio network device on PCI or MMIO, and no link over ivshmem; add one to the machine"
                )),
            }
            devices.push(NetDevice::None);
        }
        let place = |device: &NetDevice| {
            let mac = device.mac();
            config.order.iter().position(|listed| *listed == mac).unwrap_or(config.order.len())
        };
        // Stable: what is not listed keeps its order.
        devices.sort_by_key(place);
        devices
    }

    /// From a machine that is set up to the app; never returns.
    pub(crate) fn run(platform: Platform, machine: Machine) -> ! {
        let config = match Config::parse(&machine.command_line) {
            Ok(config) => config,
            Err(error) => {
                println!("tombolo-cell: {error}");
                exit(ExitCode::Failure)
            }
        };
        if config.verbose {
            let clock = &platform.clock;
            println!(
                "tombolo-cell: clock {} kHz from {:?}, heap {} KiB",
                clock.khz(),
                clock.source,
                crate::machine::heap::bytes() >> 10
            );
            if let Some(domain) = &platform.xen {
                println!("tombolo-cell: {} event channels", domain.event_form());
            }
        }
        selftest::run(&config);
        let window = config.number("pcimem");
        // A domain of Xen that was built as PVH has no PCI.
        let mut pci = if platform.xen.is_none() { Pci::find(&platform, machine.ecam, window) } else { None };
        let mut links = match &mut pci {
            Some(pci) => ivshmem::device::Device::find(&platform, pci, &config),
            None => Vec::new(),
        };
        let seed = cpu::seed();
        let devices = find_networks(&platform, pci.as_mut(), &mut links, &machine.command_line, &config, seed);
        let macs = devices.iter().flat_map(|device| device.mac().0);
        let seed = macs.fold(seed, |seed, byte| seed.rotate_left(9) ^ u64::from(byte));
        let stack = RefCell::new(Stack::new(devices, &config, platform.clock.now_ns(), seed));
        let shared =
            Rc::new(NetInner { stack, executor: Executor::default(), links: Links::new(links), platform, config });
        app::start(Net(shared.clone()));
        stack::drive(&shared)
    }
}

#[cfg(not(test))]
pub(crate) use start::run;
