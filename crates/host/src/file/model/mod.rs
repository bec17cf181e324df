//! What a fabric file means, as owned values. Every default has been filled in.

mod address;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use tombolo_ring::vxlan::Vni;
use tombolo_switch::class::Marking;
use tombolo_switch::gateway::{BootConfig, BootTable};
use tombolo_switch::guard::Roles;
use tombolo_switch::limit::{Rates, Storm};
use tombolo_switch::policy::{Action, Isolation, Mirror, Rule};
use tombolo_switch::vlan::Membership;

use super::across::{Export, Import};
use super::hosts::{Elsewhere, Here, Which};

pub(super) use address::derived_prefix;
pub use address::{Ipv6, Mac, Prefix6, Subnet};

/// The way out of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uplink {
    /// Guests and each other only.
    None,
    /// Rootless, through passt.
    User,
    /// A tap in the host's namespace, nftables masquerade. Needs CAP_NET_ADMIN.
    Kernel,
    /// A real or veth interface joins the network. Needs CAP_NET_RAW.
    Bridge {
        /// Name of the host's interface.
        device: String,
    },
}

impl Uplink {
    /// The word that the file uses for it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::User => "user",
            Self::Kernel => "kernel",
            Self::Bridge { .. } => "bridge",
        }
    }

    /// True if forwards can be made on it.
    pub fn forwards(&self) -> bool {
        matches!(self, Self::User | Self::Kernel)
    }
}

/// How an uplink carries IPv6. The user uplink only knows the first two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uplink6 {
    /// Not at all.
    Off,
    /// Members' addresses become the host's. The user uplink has passt do that.
    Masquerade,
    /// Members' addresses stay: their prefix is routed to the host.
    Routed,
    /// The network's prefix becomes this one, a /64, and back (RFC 6296).
    Prefix(Ipv6Addr),
}

impl Uplink6 {
    /// Whether connections from outside are let in, besides those of forwards.
    pub fn lets_in(self) -> bool {
        matches!(self, Self::Routed | Self::Prefix(_))
    }

    /// As in the file.
    pub fn text(self) -> String {
        match self {
            Self::Off => "off".into(),
            Self::Masquerade => "masquerade".into(),
            Self::Routed => "routed".into(),
            Self::Prefix(prefix) => format!("prefix {prefix}/64"),
        }
    }
}

/// The DHCP server of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dhcp {
    /// First address handed out.
    pub from: Ipv4Addr,
    /// Last address handed out.
    pub to: Ipv4Addr,
    /// Lease time in seconds.
    pub lease_s: u32,
}

/// A thread that runs the switches of one or more networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its name in the file.
    pub name: String,
    /// CPU to stay on; `None` lets the scheduler choose.
    pub cpu: Option<usize>,
    /// Frames taken from one port in a turn.
    pub budget: u32,
    /// How long to poll with nothing to do before sleeping, in microseconds.
    pub busy_poll_us: u32,
}

/// One Ethernet network: a switch, a gateway, an uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Its name in the file.
    pub name: String,
    /// Its IPv4 addresses.
    pub subnet: Subnet,
    /// The gateway port's address: DHCP, DNS, ICMP. A network that joins a real one has a gateway
    /// only if asked for.
    pub gateway: Option<Ipv4Addr>,
    /// The address that guests route through: the NAT port (`user`) or the host's tap (`kernel`).
    pub router: Option<Ipv4Addr>,
    /// The DHCP server, if it runs.
    pub dhcp: Option<Dhcp>,
    /// How members reach other networks.
    pub uplink: Uplink,
    /// Domain under which members' names are served.
    pub domain: String,
    /// Largest IP packet in bytes.
    pub mtu: u16,
    /// Upstream name servers; empty means the host's own, from /etc/resolv.conf.
    pub dns: Vec<SocketAddr>,
    /// Name of the worker that runs its switch.
    pub worker: String,
    /// Interfaces between which and the host's tap traffic skips the kernel's forwarding; empty:
    /// those of the host's default route.
    pub bypass: Option<Vec<String>>,
    /// What happens to a connection between its members that no rule is about.
    pub policy: Action,
    /// Its IPv6 prefix, a /64; `None`: its gateway does nothing for IPv6.
    pub ipv6: Option<Ipv6Addr>,
    /// What its DHCP server tells clients to boot.
    pub boot: Option<BootConfig>,
    /// Its way out for IPv6; off without a prefix.
    pub uplink6: Uplink6,
}

impl Network {
    /// Its IPv6 prefix, where that has a way out.
    pub fn prefix_out(&self) -> Option<Ipv6Addr> {
        self.ipv6.filter(|_| self.uplink6 != Uplink6::Off)
    }

    /// The address of the kernel uplink's router in the prefix: ::2, beside the gateway's ::1. That
    /// of the user uplink has a link-local address only.
    pub fn router6(&self) -> Option<Ipv6Addr> {
        let prefix = self.prefix_out().filter(|_| self.uplink == Uplink::Kernel)?;
        Some(Ipv6Addr::from_bits(prefix.to_bits() | 2))
    }

    /// Whether a host of the network may have the address.
    pub fn has_host(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.subnet.has_host(ip),
            IpAddr::V6(ip) => self.ipv6.is_some_and(|p| ip != p && (p.to_bits() ^ ip.to_bits()) >> 64 == 0),
        }
    }
}

/// Which accelerator a machine is to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// KVM where it really runs a guest, else emulation.
    Auto,
    /// KVM; without it `up` fails.
    Kvm,
    /// QEMU's emulation (TCG).
    Tcg,
}

/// QEMU's machine type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineType {
    /// The small one: virtio-mmio, no PCI.
    Microvm,
    /// A PC with PCI Express.
    Q35,
}

impl MachineType {
    /// QEMU's and the file's word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Microvm => "microvm",
            Self::Q35 => "q35",
        }
    }
}

/// What a port lets through by source address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Only the port's own MAC, and its own IP addresses as far as they are known.
    Ip,
    /// Only the port's own MAC.
    Mac,
    /// Every source address may pass.
    Off,
}

impl Guard {
    /// As the fabric file spells it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Mac => "mac",
            Self::Off => "off",
        }
    }
}

/// The IPv6 addresses that a port with the guard "ip" may use besides the link-local one of its
/// MAC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ip6 {
    /// The file says nothing: what it claims of the network's prefix; none without a prefix, where
    /// it is held to an IPv4 address.
    Unsaid,
    /// Every source address may pass (`ip6 = "any"`).
    Any,
    /// Only source addresses in these prefixes may pass.
    Only(Vec<Prefix6>),
}

/// What a port may do beyond sending as itself, and how much of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// What it may do that ordinary members do not.
    pub roles: Roles,
    /// What it may flood.
    pub storm: Storm,
    /// What it may send and receive.
    pub rates: Rates,
    /// By what its frames get their class.
    pub marking: Marking,
    /// Names by which rules know it, besides its own.
    pub groups: Vec<String>,
    /// Whom it can reach.
    pub isolation: Isolation,
    /// The VLANs that it is in; `None` where the file does not say.
    pub vlans: Option<Membership>,
    /// Most IPv6 addresses that it may claim at a time; `None` for
    /// [`tombolo_switch::guard::LIMIT`].
    pub ip6_limit: Option<u8>,
}

/// A rule, and the network that it is for; every one where none is named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleDecl {
    /// The name of a network.
    pub network: Option<String>,
    /// The rule as the switch takes it.
    pub rule: Rule,
}

/// A mirror, and the network that it is for; every one where none is named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorDecl {
    /// The name of a network.
    pub network: Option<String>,
    /// The mirror as the switch takes it.
    pub mirror: Mirror,
}

/// How a machine's network device reaches the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attach {
    /// Shared memory; survives a restart of either side.
    VhostUser,
    /// QEMU's framed stream over a Unix socket.
    Stream,
    /// Shared memory of an ivshmem device, with doorbells; survives a restart of the fabric.
    Ivshmem,
    /// Shared memory of an ivshmem device, without; both sides look at it by a timer.
    IvshmemPlain,
    /// A vif: the machine is a domain of this Xen host, started by `xl` in place of QEMU.
    Xen,
}

impl Attach {
    /// As the fabric file spells it.
    pub fn word(self) -> &'static str {
        match self {
            Self::VhostUser => "vhost-user",
            Self::Stream => "stream",
            Self::Ivshmem => "ivshmem",
            Self::IvshmemPlain => "ivshmem-plain",
            Self::Xen => "xen",
        }
    }

    /// Whether the devices are ivshmem's.
    pub fn is_ivshmem(self) -> bool {
        matches!(self, Self::Ivshmem | Self::IvshmemPlain)
    }
}

/// When an ended machine is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// It stays down.
    No,
    /// When it ended with anything but success, at most once a second.
    OnFailure,
    /// However it ended, likewise.
    Always,
}

/// A unikernel of this project, or any other guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineKind {
    /// `[cell.NAME]`
    Cell,
    /// `[vm.NAME]`
    Vm,
}

impl MachineKind {
    /// As the fabric file spells it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Cell => "cell",
            Self::Vm => "vm",
        }
    }
}

/// Where a cell's image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// One of the project's apps, found by name.
    App(String),
    /// An image file on the host.
    Path(PathBuf),
}

/// What a machine boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Boot {
    /// A unikernel of this repository or of the user.
    Cell(Image),
    /// Any guest: kernel and initrd, or a disk, or both.
    Vm {
        /// Image that QEMU boots directly; needs no boot loader.
        kernel: Option<PathBuf>,
        /// Initial RAM disk for that kernel.
        initrd: Option<PathBuf>,
        /// Disk images, with QEMU's format words; the first is the one to boot from where there is
        /// no kernel.
        disks: Vec<(PathBuf, String)>,
        /// What cloud-init in the guest is given as user-data (its NoCloud source).
        cloud_init: Option<PathBuf>,
    },
}

/// One network device of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Name of the network.
    pub network: String,
    /// Given in the file, or derived from the names of fabric, machine and network.
    pub mac: Mac,
    /// The address leased to it. Filled for every device of a network with DHCP.
    pub ip: Option<Ipv4Addr>,
}

/// A cell or VM that the fabric starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Its name: port, host name, DNS name.
    pub name: String,
    /// The section that it is from, like "cell.web": with `count` several machines have one.
    pub section: String,
    /// Whether it is a `[cell.NAME]` or a `[vm.NAME]`.
    pub kind: MachineKind,
    /// Image, kernel or disk.
    pub boot: Boot,
    /// Its network devices, in order.
    pub nics: Vec<Nic>,
    /// Memory of the guest.
    pub memory_mib: u32,
    /// Virtual CPUs of the guest.
    pub cpus: u16,
    /// QEMU's machine type; microvm or a PC.
    pub machine: MachineType,
    /// Whether KVM is required, wanted or not used.
    pub accel: Accel,
    /// Kernel command line (a cell's own words are put before it).
    pub cmdline: String,
    /// More arguments for QEMU, as they are.
    pub qemu: Vec<String>,
    /// More lines for the configuration that `xl` gets, as they are.
    pub xl: Vec<String>,
    /// Whether it has an IOMMU, by which the guest may hand devices to programs.
    pub iommu: bool,
    /// Whether it has the device over which `tombolo exec` reaches the QEMU guest agent.
    pub agent: bool,
    /// How the devices attach.
    pub attach: Attach,
    /// Bytes of the region of each ivshmem device.
    pub region: u64,
    /// Queue pairs of each device.
    pub queues: u16,
    /// Source-address guard of its ports.
    pub guard: Guard,
    /// The IPv6 addresses that the guard lets its ports use besides those that their MACs give.
    pub ip6: Ip6,
    /// What each of its ports may do.
    pub traffic: Traffic,
    /// What happens when it ends by itself.
    pub restart: Restart,
    /// Machines that have to be on the network before it is started.
    pub depends_on: Vec<String>,
    /// Whether its firmware boots from the network before it tries disks.
    pub from_network: bool,
    /// What it boots from there, in place of what its networks say.
    pub netboot: Option<BootConfig>,
}

/// A tap device on a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tap {
    /// The NAME in `[tap.NAME]`, which is also that of its port.
    pub name: String,
    /// Name of the network that the tap joins.
    pub network: String,
    /// Name of the interface on the host.
    pub device: String,
    /// True: the device is there already and stays; false: it is made and goes with the fabric.
    pub adopt: bool,
    /// Name or path of the network namespace that holds the device.
    pub netns: Option<String>,
    /// Address set on the device.
    pub ip: Option<Ipv4Addr>,
    /// MAC of the device's own (host) side, and of its name's lease.
    pub mac: Mac,
    /// Source-address guard.
    pub guard: Guard,
    /// The IPv6 addresses that the guard lets its host side use besides that of its MAC.
    pub ip6: Ip6,
    /// What the port may do.
    pub traffic: Traffic,
    /// Whether the device takes IPv6 addresses and routes from router advertisements.
    pub accept_ra: bool,
    /// The container that the device belongs to: the port goes with the namespace.
    pub container: Option<String>,
    /// Whether a monitor of virtual machines opens the device; the fabric is then on the kernel's
    /// side of it.
    pub monitor: bool,
    /// What its guest boots from the network, in place of what the network says.
    pub boot: Option<BootConfig>,
}

/// What a bare port speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortKind {
    /// A vhost-user backend on a socket.
    VhostUser {
        /// The socket; in the runtime directory if the file says nothing.
        socket: Option<PathBuf>,
        /// Queue pairs that the frontend may use.
        queues: u16,
        /// True: the frontend listens and the fabric connects.
        connect: bool,
    },
    /// QEMU's framed stream on a socket.
    Stream {
        /// The socket; in the runtime directory if the file says nothing.
        socket: Option<PathBuf>,
        /// True: the peer listens and the fabric connects.
        connect: bool,
    },
    /// A raw packet socket on an interface.
    Packet {
        /// Name of the host's interface.
        device: String,
    },
    /// A server of an ivshmem link on a socket.
    Ivshmem {
        /// The socket; in the runtime directory if the file says nothing.
        socket: Option<PathBuf>,
        /// The server protocol's version, 1 or 2.
        version: u8,
        /// Bytes of the region.
        region: u64,
        /// Vectors of each peer.
        vectors: u32,
    },
    /// The network device of a Xen guest.
    Xen {
        /// Name of the guest in `xl list`.
        domain: String,
        /// Which of its devices.
        vif: u32,
        /// Most queue pairs that it may have.
        queues: u16,
    },
    /// A tunnel to other machines.
    Vxlan(Vxlan),
}

/// A VXLAN tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vxlan {
    /// The network's identifier.
    pub vni: Vni,
    /// The address of this machine that the other ends send to.
    pub local: IpAddr,
    /// The addresses of the other ends.
    pub remotes: Vec<IpAddr>,
    /// UDP's port, of all ends.
    pub udp_port: u16,
    /// Whether it learns which remote has which MAC.
    pub learning: bool,
}

/// Shared memory between machines, without a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkDecl {
    /// The NAME in `[link.NAME]`, unique in the file.
    pub name: String,
    /// The machines, in the order of their seats.
    pub between: Vec<String>,
    /// Seats for processes of the user's own, behind those of the machines.
    pub seats: u32,
    /// The region has no doorbells, so peers poll.
    pub plain: bool,
    /// Bytes of the region.
    pub region: u64,
    /// Bytes of the section that all may write.
    pub rw: u64,
    /// The number that tells what is spoken in it.
    pub protocol: u32,
    /// Vectors of each peer.
    pub vectors: u32,
    /// The name under which processes of this machine call what the link's machine serves.
    pub service: Option<String>,
    /// The service of this machine that serves what the link's machine asks.
    pub to: Option<String>,
    /// Every user of this machine may call `service`, not only the fabric's.
    pub everybody: bool,
}

impl LinkDecl {
    /// Whether the fabric itself takes the seat, to pass calls on.
    pub fn is_bridged(&self) -> bool {
        self.service.is_some() || self.to.is_some()
    }

    /// Peers that the region has room for.
    pub fn max_peers(&self) -> u32 {
        self.between.len() as u32 + self.seats
    }

    /// Peer ID of a machine on this link. `None`: it is not one of `between`.
    pub fn seat(&self, machine: &str) -> Option<u32> {
        self.between.iter().position(|m| m == machine).map(|i| i as u32)
    }
}

/// A bare attachment for anyone's own VMM or process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortDecl {
    /// The NAME in `[port.NAME]`, unique in the file.
    pub name: String,
    /// Name of the network that it joins.
    pub network: String,
    /// Protocol and socket of the attachment.
    pub kind: PortKind,
    /// The peer's MAC, if known: for the guard and the lease.
    pub mac: Option<Mac>,
    /// The address leased to that MAC.
    pub ip: Option<Ipv4Addr>,
    /// Source-address guard.
    pub guard: Guard,
    /// The IPv6 addresses that the guard lets the peer use besides that of its MAC.
    pub ip6: Ip6,
    /// What the port may do.
    pub traffic: Traffic,
    /// What the peer boots from the network, in place of what the network says.
    pub boot: Option<BootConfig>,
    /// The container whose virtual machine the peer is: the port goes with the container's
    /// namespace.
    pub container: Option<String>,
    /// Name or path of that namespace. The port has nothing in it.
    pub netns: Option<String>,
}

/// A member that belongs to a container, which a runtime made by CNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contained<'f> {
    /// "tap" or "port".
    pub word: &'static str,
    /// The member's name.
    pub name: &'f str,
    /// The network that it joins.
    pub network: &'f str,
    /// The name of the network in the runtime's configuration, the container's ID and the
    /// interface.
    pub container: &'f str,
    /// Name or path of the container's namespace.
    pub netns: &'f str,
    /// Its MAC address; `None` where a port takes any.
    pub mac: Option<Mac>,
    /// The IPv6 addresses that its guard lets it use.
    pub ip6: &'f Ip6,
}

/// Transport of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proto {
    /// Forwards TCP connections.
    Tcp,
    /// Forwards UDP datagrams.
    Udp,
}

impl Proto {
    /// The file's and nftables' word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Where a forward goes, as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A member, by its name.
    Name(String),
    /// An address inside the network.
    Ip(IpAddr),
}

impl Target {
    /// With a port, as in the file.
    pub fn with_port(&self, port: u16) -> String {
        match self {
            Self::Name(name) => format!("{name}:{port}"),
            Self::Ip(ip) => SocketAddr::new(*ip, port).to_string(),
        }
    }
}

/// One port forward, host → guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// TCP or UDP.
    pub proto: Proto,
    /// Address and port on the host.
    pub listen: SocketAddr,
    /// The member that connections go to.
    pub target: Target,
    /// Port number at that member.
    pub port: u16,
    /// Filled by the check: the network it goes through.
    pub network: String,
    /// Filled by the check: the member's address.
    pub ip: IpAddr,
}

impl Forward {
    /// The addresses at which the daemon passes connections on itself, where the kernel uplink
    /// cannot translate them: those of the other family, and ::1, whose answers Linux does not
    /// route. `None`: translation does it all.
    pub fn relayed(&self) -> Option<SocketAddr> {
        let listen = self.listen.ip();
        match (listen, self.ip) {
            (IpAddr::V4(_), IpAddr::V4(_)) => None,
            (IpAddr::V6(_), IpAddr::V6(_)) => {
                let local = listen.is_unspecified() || listen.is_loopback();
                local.then(|| SocketAddr::new(Ipv6Addr::LOCALHOST.into(), self.listen.port()))
            }
            _ => Some(self.listen),
        }
    }
}

/// The contents of a fabric file, checked and with defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// Its name: of the runtime directory, rules, devices.
    pub name: String,
    /// The folder that relative paths start from.
    pub dir: PathBuf,
    /// Workers, in the file's order; at least one.
    pub workers: Vec<Worker>,
    /// Networks, in the file's order.
    pub networks: Vec<Network>,
    /// `[cell.NAME]` and `[vm.NAME]` sections, in the file's order.
    pub machines: Vec<Machine>,
    /// `[tap.NAME]` sections, in the file's order.
    pub taps: Vec<Tap>,
    /// `[port.NAME]` sections, in the file's order.
    pub ports: Vec<PortDecl>,
    /// `[[forward]]` sections, in the file's order.
    pub forwards: Vec<Forward>,
    /// What members may exchange, in the file's order.
    pub rules: Vec<RuleDecl>,
    /// Members that get copies of others' frames.
    pub mirrors: Vec<MirrorDecl>,
    /// `[link.NAME]` sections, in the file's order.
    pub links: Vec<LinkDecl>,
    /// `[export.NAME]` sections, in the file's order.
    pub exports: Vec<Export>,
    /// `[import.NAME]` sections, in the file's order.
    pub imports: Vec<Import>,
    /// This machine, in a file for several.
    pub here: Option<Here>,
    /// What the file has on others.
    pub elsewhere: Elsewhere,
}

impl Fabric {
    /// Finds a network by its name in the file.
    pub fn network(&self, name: &str) -> Option<&Network> {
        self.networks.iter().find(|n| n.name == name)
    }

    /// The machine that this is, for a file for several that is read again.
    pub fn which(&self) -> Which<'_> {
        Which::of(self.here.as_ref().map(|here| here.host.name.as_str()))
    }

    /// A fabric of nothing.
    pub fn empty(name: impl Into<String>, dir: PathBuf) -> Fabric {
        Fabric {
            name: name.into(),
            dir,
            workers: vec![],
            networks: vec![],
            machines: vec![],
            taps: vec![],
            ports: vec![],
            forwards: vec![],
            rules: vec![],
            mirrors: vec![],
            links: vec![],
            exports: vec![],
            imports: vec![],
            here: None,
            elsewhere: Elsewhere::default(),
        }
    }

    /// What each member may do beyond sending as itself, with the path of its section.
    pub fn traffic(&self) -> impl Iterator<Item = (String, &Traffic)> {
        let machines = self.machines.iter().map(|m| (format!("{}.{}", m.kind.word(), m.name), &m.traffic));
        let taps = self.taps.iter().map(|t| (format!("tap.{}", t.name), &t.traffic));
        machines.chain(taps).chain(self.ports.iter().map(|p| (format!("port.{}", p.name), &p.traffic)))
    }

    /// Names of all members, in the order machines, taps, ports.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        let machines = self.machines.iter().map(|m| m.name.as_str());
        let taps = self.taps.iter().map(|t| t.name.as_str());
        machines.chain(taps).chain(self.ports.iter().map(|p| p.name.as_str()))
    }

    /// Every (network, MAC, address, name) that is fixed by the file: the gateway's static leases
    /// and names.
    pub fn addresses(&self) -> Vec<(&str, Option<Mac>, Ipv4Addr, &str)> {
        let mut out = Vec::new();
        for m in &self.machines {
            out.extend(m.nics.iter().filter_map(|n| Some((n.network.as_str(), Some(n.mac), n.ip?, m.name.as_str()))));
        }
        out.extend(self.taps.iter().filter_map(|t| Some((t.network.as_str(), Some(t.mac), t.ip?, t.name.as_str()))));
        out.extend(self.ports.iter().filter_map(|p| Some((p.network.as_str(), p.mac, p.ip?, p.name.as_str()))));
        out
    }

    /// The members of a network: name, MAC address, and fixed IPv6 addresses (those of `ip6` that
    /// are no prefixes).
    pub fn addresses6(&self, network: &str) -> Vec<(String, Option<Mac>, Vec<Ipv6Addr>)> {
        let fixed = |ip6: &Ip6| match ip6 {
            Ip6::Only(list) => list.iter().filter(|p| p.bits == 128).map(|p| p.base).collect(),
            Ip6::Unsaid | Ip6::Any => vec![],
        };
        let machines = self.machines.iter().filter_map(|m| {
            let nic = m.nics.iter().find(|nic| nic.network == network)?;
            Some((m.name.clone(), Some(nic.mac), fixed(&m.ip6)))
        });
        let taps = self.taps.iter().filter(|t| t.network == network);
        let ports = self.ports.iter().filter(|p| p.network == network);
        let taps = taps.map(|t| (t.name.clone(), Some(t.mac), fixed(&t.ip6)));
        machines.chain(taps).chain(ports.map(|p| (p.name.clone(), p.mac, fixed(&p.ip6)))).collect()
    }

    /// The members that belong to containers.
    pub fn contained(&self) -> impl Iterator<Item = Contained<'_>> {
        let taps =
            self.taps.iter().map(|t| ("tap", &t.name, &t.network, (&t.container, &t.netns), Some(t.mac), &t.ip6));
        let ports = self.ports.iter().map(|p| ("port", &p.name, &p.network, (&p.container, &p.netns), p.mac, &p.ip6));
        taps.chain(ports).filter_map(|(word, name, network, (container, netns), mac, ip6)| {
            let (container, netns) = (container.as_deref()?, netns.as_deref()?);
            Some(Contained { word, name, network, container, netns, mac, ip6 })
        })
    }

    /// What the DHCP server of a network tells clients to boot. A member's own settings take the
    /// place of the network's, but for the server where they name none.
    pub fn boots(&self, network: &Network) -> BootTable {
        let with_server = |own: &BootConfig| {
            let server = own.server.or(network.boot.as_ref().and_then(|all| all.server));
            BootConfig { server, ..own.clone() }
        };
        let of = |mac: Mac, own: &Option<BootConfig>| own.as_ref().map(|own| (mac.0, with_server(own)));
        let nics = self.machines.iter().flat_map(|m| m.nics.iter().map(move |nic| (nic, &m.netboot)));
        let machines = nics.filter(|(nic, _)| nic.network == network.name).filter_map(|(nic, own)| of(nic.mac, own));
        let taps = self.taps.iter().filter(|t| t.network == network.name).filter_map(|t| of(t.mac, &t.boot));
        let ports = self.ports.iter().filter(|p| p.network == network.name).filter_map(|p| of(p.mac?, &p.boot));
        BootTable { all: network.boot.clone(), of: machines.chain(taps).chain(ports).collect() }
    }

    /// True if a forward listens where this one would: same transport and port, and one of the
    /// addresses is the other or a wildcard of its family.
    pub fn same_listener(a: &Forward, b: &Forward) -> bool {
        a.proto == b.proto && overlap(a.listen, b.listen)
    }
}

/// Whether two listeners of one transport are in each other's way: the same port and family, and
/// the same address or all addresses.
pub(crate) fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let any = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && (any || a.ip() == b.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_prefixes_are_stable_unique_local_and_differ() {
        let prefix = derived_prefix("lab", "lan");
        assert_eq!(prefix.to_string(), derived_prefix("lab", "lan").to_string());
        let bits = |p: Ipv6Addr| p.to_bits();
        assert_eq!((bits(prefix) >> 120, bits(prefix) as u64), (0xfd, 0));
        assert_eq!(bits(prefix) >> 80, bits(derived_prefix("lab", "dmz")) >> 80, "one /48");
        assert_ne!(prefix, derived_prefix("lab", "dmz"));
        assert_ne!(bits(prefix) >> 80, bits(derived_prefix("lab2", "lan")) >> 80);
    }

    #[test]
    fn ipv6_of_a_network_is_read_strictly() {
        assert_eq!(Ipv6::parse("fd00:1:2:3::/64"), Some(Ipv6::Prefix("fd00:1:2:3::".parse().unwrap())));
        for bad in ["", "on", "fd00::/48", "fd00::1/64", "fe80::/64", "ff02::/64", "::/64", "fd00::"] {
            assert_eq!(Ipv6::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn subnets_are_read_strictly() {
        let s = Subnet::parse("10.87.0.0/24").unwrap();
        assert_eq!((s.netmask(), s.broadcast()), ("255.255.255.0".parse().unwrap(), "10.87.0.255".parse().unwrap()));
        assert!(s.has_host(s.nth(1)) && !s.has_host(s.base) && !s.has_host(s.broadcast()));
        assert_eq!(s.hosts(), 254);
        for bad in ["10.87.0.1/24", "10.87.0.0/31", "10.0.0.0/7", "10.87.0.0", "x/24", "10.87.0.0/240"] {
            assert_eq!(Subnet::parse(bad), None, "{bad}");
        }
        assert!(s.overlaps(Subnet::parse("10.87.0.128/25").unwrap()));
        assert!(!s.overlaps(Subnet::parse("10.87.1.0/24").unwrap()));
    }

    #[test]
    fn prefixes_of_ipv6_are_read_strictly() {
        let read = |text| Prefix6::parse(text).map(|p| (p.base.to_string(), p.bits));
        assert_eq!(read("fd00::7"), Some(("fd00::7".into(), 128)));
        assert_eq!(read("2001:db8:1::/64"), Some(("2001:db8:1::".into(), 64)));
        assert_eq!(read("fe80::1/128"), Some(("fe80::1".into(), 128)));
        for bad in ["2001:db8::1/64", "::", "ff02::1", "fd00::/0", "fd00::/129", "10.0.0.1", "fd00::7/", "x"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn macs_are_read_strictly_and_derived_ones_are_stations() {
        assert_eq!(Mac::parse("52:54:00:12:34:56").unwrap().to_string(), "52:54:00:12:34:56");
        for bad in
            ["52:54:00:12:34", "53:54:00:12:34:56", "00:00:00:00:00:00", "5:54:00:12:34:561", "52-54-00-12-34-56"]
        {
            assert_eq!(Mac::parse(bad), None, "{bad}");
        }
        let m = Mac::derived(&["demo", "web", "lan"]);
        assert_eq!(m.0[0] & 3, 2);
        assert_ne!(m, Mac::derived(&["demo", "we", "blan"]), "words do not run into each other");
    }
}
