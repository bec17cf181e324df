//! What a fabric file comes to on this machine: ports, processes and rules, with nothing done yet.
//! Pure: the facts about the machine come in as [`Facts`].

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use tombolo_ivshmem::links::{Config, Door};
use tombolo_ivshmem::server::{self, Dialect, Shape};
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::{Header, Layout, Name, PAGE_BYTES, RegionError};

use tombolo_switch::guard::{self, Guard, Learn, Roles};
use tombolo_switch::policy::Labels;

use crate::file::{
    self, Accel, Attach, Boot, Fabric, Image, Ip6, Mac, Machine, PortKind, Prefix6, Proto, Traffic, Uplink,
};
use crate::qemu::agent;
use crate::qemu::argv::{self, Device, SharedMemory, Surroundings};
use crate::qemu::probe::{Qemu, Tsc};
use crate::rundir;
use crate::xen;
use crate::xen::config::Domain;

/// What was found out about the machine.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The QEMU to use; an error's text if there is none.
    pub qemu: Result<Qemu, String>,
    /// Whether KVM runs a guest; why not, if it does not.
    pub kvm: Result<(), String>,
    /// Xen's toolstack; why no domain can be started here, if none can.
    pub xl: Result<PathBuf, String>,
    /// The fabric's runtime directory.
    pub runtime: PathBuf,
    /// Rate of this machine's time-stamp counter, where the system tells.
    pub tsc: Option<Tsc>,
}

/// Why a file that is right cannot be carried out here.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum PlanError {
    /// A machine without QEMU.
    #[error("{machine} needs QEMU: {why}")]
    NoQemu {
        /// The first machine that needs it.
        machine: String,
        /// What the probe said.
        why: String,
    },
    /// A domain where Xen starts none.
    #[error("{machine} has attach = \"xen\", and no domain can be started: {why}")]
    NoXen {
        /// The first machine that needs it.
        machine: String,
        why: String,
    },
    /// accel = "kvm" where it does not run.
    #[error(
        "{machine} asks for accel = \"kvm\", which does not run guests here: {why}; leave accel out to fall back to emulation"
    )]
    NoKvm {
        machine: String,
        /// What the probe said.
        why: String,
    },
    /// A cell's image that is gone since the file was checked.
    #[error("no image of the app \"{app}\": looked at {tried}; build the cells or set $TOMBOLO_APPS")]
    NoImage {
        app: String,
        /// Where it was looked for.
        tried: String,
    },
    /// A region without room.
    #[error("{what}: {why}; make `region` larger")]
    Region {
        /// Which member or link.
        what: String,
        /// What does not fit.
        why: RegionError,
    },
    /// A Unix socket's path has at most 107 bytes.
    #[error("the socket path {} has {} bytes, and the system allows 107; set $TOMBOLO_RUNTIME to a shorter folder", path.display(), path.as_os_str().len())]
    LongPath { path: PathBuf },
}

/// How a port is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attachment {
    /// A vhost-user backend, for a frontend such as QEMU.
    VhostUser {
        /// Path of the Unix socket.
        socket: PathBuf,
        /// Connect instead of listening.
        connect: bool,
        /// Queue pairs that the frontend may use.
        queues: u16,
        /// MAC told to the guest.
        mac: Option<Mac>,
    },
    /// QEMU's framed stream.
    Stream {
        /// Path of the Unix socket.
        socket: PathBuf,
        /// Connect instead of listening.
        connect: bool,
    },
    /// A tap device of the host.
    Tap {
        /// Name of the interface.
        device: String,
        /// Found instead of made.
        adopt: bool,
        /// Network namespace of the interface; `None`: the daemon's own.
        netns: Option<String>,
        /// Address and prefix length set on it.
        ip: Option<(Ipv4Addr, u8)>,
        /// MAC of its host side; an adopted one keeps its own.
        mac: Option<Mac>,
        /// Whether it takes addresses and routes from router advertisements; an adopted one keeps
        /// its setting.
        accept_ra: bool,
    },
    /// A packet socket on an interface.
    Packet {
        /// Name of the host's interface.
        device: String,
        /// Namespace that it is in; the daemon's own where there is none.
        netns: Option<String>,
    },
    /// A link of shared memory, of which this process is peer 0.
    Ivshmem {
        /// Layout, peers and server socket of the region.
        link: Box<Config>,
    },
    /// The network device of a Xen guest.
    Xen {
        /// Name of the guest in `xl list`.
        domain: String,
        /// Which of its devices.
        vif: u32,
        /// The device's MAC.
        mac: Option<Mac>,
        /// Most queue pairs that it may have.
        queues: u16,
    },
    /// A tunnel to other machines.
    Vxlan(file::Vxlan),
    /// The NAT before a passt of our own.
    User(UserUplink),
}

/// The user uplink of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserUplink {
    /// MAC address of the NAT router inside the network.
    pub mac: Mac,
    /// IPv4 address of the NAT router inside the network.
    pub router: Ipv4Addr,
    /// The network's IPv6 prefix, a /64, where that has a way out as well.
    pub ipv6: Option<Ipv6Addr>,
    /// What passt forwards to members.
    pub forwards: Vec<UserForward>,
}

/// A forward of a user uplink. Both its ends are of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserForward {
    /// Its transport.
    pub proto: Proto,
    /// Where passt listens.
    pub listen: SocketAddr,
    /// The port at passt's one guest that stands for it. passt has one for each transport and port,
    /// so the two that listen at all addresses of either family share theirs.
    pub number: u16,
    /// The member.
    pub to: SocketAddr,
}

/// The source addresses of a guarded port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortGuard {
    /// The only source MAC address that may pass.
    pub mac: Mac,
    /// Its IPv4 address, where it is held to that too.
    pub ip: Option<Ipv4Addr>,
    /// Its IPv6 addresses besides that of its MAC, where it is held to them.
    pub ip6: Option<Vec<Prefix6>>,
    /// The prefix of which it may claim addresses in place of a list, and how many.
    pub learn6: Option<(Ipv6Addr, u8)>,
}

impl PortGuard {
    fn new(
        guard: file::Guard,
        mac: Mac,
        ip: Option<Ipv4Addr>,
        (ip6, limit): (&Ip6, Option<u8>),
        prefix: Option<Ipv6Addr>,
    ) -> Option<PortGuard> {
        let learn6 = prefix.filter(|_| *ip6 == Ip6::Unsaid).map(|prefix| (prefix, limit.unwrap_or(guard::LIMIT)));
        let ip6 = match ip6 {
            Ip6::Unsaid if learn6.is_some() => None,
            Ip6::Unsaid => ip.map(|_| vec![]),
            Ip6::Any => None,
            Ip6::Only(list) => Some(list.clone()),
        };
        match guard {
            file::Guard::Ip => Some(PortGuard { mac, ip, ip6, learn6 }),
            file::Guard::Mac => Some(PortGuard { mac, ip: None, ip6: None, learn6: None }),
            file::Guard::Off => None,
        }
    }

    /// The same for the switch.
    pub(crate) fn to_switch(&self) -> Guard {
        let guard = Guard::new(&[self.mac.0], self.ip.as_slice());
        let guard = match &self.ip6 {
            Some(list) => guard.with_ipv6(&list.iter().map(|p| (p.base, p.bits)).collect::<Vec<_>>()),
            None => guard,
        };
        let guard = match self.learn6 {
            Some((prefix, limit)) => guard.learning(Learn { prefix, limit, strict: self.ip.is_some() }),
            None => guard,
        };
        guard.pinned()
    }
}

/// How the fabric makes one port of the switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortPlan {
    /// Unique in the fabric.
    pub name: String,
    /// Name of the network that it joins.
    pub network: String,
    /// How it is made.
    pub attachment: Attachment,
    /// The only source addresses that may pass.
    pub guard: Option<PortGuard>,
    /// What it may do.
    pub traffic: Traffic,
    /// MTU of its network.
    pub mtu: u16,
    /// The machine that it belongs to.
    pub machine: Option<String>,
}

impl PortPlan {
    /// The guard of its port of the switch.
    pub(crate) fn guard(&self) -> Guard {
        let guard = self.guard.as_ref().map(PortGuard::to_switch).unwrap_or_default().with_roles(self.traffic.roles);
        // Behind these is a network of any number of hosts.
        let is_crowded = matches!(self.attachment, Attachment::Vxlan(_) | Attachment::Packet { .. });
        if is_crowded { guard.crowded() } else { guard }
    }

    /// What the policy of its network knows of it: its own name and its machine's, its groups, and
    /// of an uplink that it is the outside.
    pub fn labels(&self) -> Labels {
        let outside = (self.name == uplink_name(&self.network)).then_some(file::OUTSIDE);
        let own = [Some(self.name.as_str()), self.machine.as_deref(), outside];
        let names = own.into_iter().flatten().chain(self.traffic.groups.iter().map(String::as_str));
        Labels { names: names.map(Into::into).collect(), isolation: self.traffic.isolation.clone(), exempt: false }
    }
}

/// One process to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachinePlan {
    /// As in the fabric file.
    pub name: String,
    /// Its arguments, the program first.
    pub argv: Vec<String>,
    /// Whether KVM runs it.
    pub kvm: bool,
    /// Whether it finds its way back by itself when the daemon was restarted.
    pub survives: bool,
    /// Its seats on links of shared memory.
    pub seats: Vec<Seat>,
    /// The domain of Xen that it is, where QEMU does not run it.
    pub domain: Option<Domain>,
}

impl MachinePlan {
    /// "kvm" or "tcg", for `status`.
    pub fn accel(&self) -> &'static str {
        match (&self.domain, self.kvm) {
            (Some(_), _) => "xen",
            (None, true) => "kvm",
            (None, false) => "tcg",
        }
    }
}

/// A machine's seat on a link of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// Layout, peers and server socket of the region.
    pub link: Config,
    /// Peer ID of the machine on that link.
    pub id: u32,
}

impl Seat {
    /// Whether the machine has the memory only: then its process is what shows that it is there.
    pub fn is_plain(&self) -> bool {
        self.link.shape.vectors == 0
    }
}

/// The kernel uplink of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelUplink {
    /// Addresses and settings, as in the fabric file.
    pub network: file::Network,
    /// Name of the tap device on the host.
    pub device: String,
    /// Port forwards that nftables carries out.
    pub forwards: Vec<file::Forward>,
}

/// All that a fabric file comes to on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Ports, those of machines first.
    pub ports: Vec<PortPlan>,
    /// Machines to start.
    pub machines: Vec<MachinePlan>,
    /// Networks with a kernel uplink.
    pub kernel: Vec<KernelUplink>,
    /// Links between machines that carry no network.
    pub links: Vec<Config>,
}

impl Plan {
    /// Every link of shared memory.
    pub fn all_links(&self) -> impl Iterator<Item = &Config> {
        let ports = self.ports.iter().filter_map(|p| match &p.attachment {
            Attachment::Ivshmem { link } => Some(&**link),
            _ => None,
        });
        ports.chain(&self.links)
    }
}

/// The name of a machine's `i`-th port.
pub fn port_name(machine: &str, i: usize) -> String {
    if i == 0 { machine.to_string() } else { format!("{machine}.{i}") }
}

/// The host's tap of a kernel uplink: `tb-FABRIC-NETWORK` where that fits the 15 bytes of an
/// interface name, else a name that starts alike and ends in a hash of both.
pub fn kernel_device(fabric: &str, network: &str) -> String {
    let full = format!("tb-{fabric}-{network}");
    if full.len() <= 15 {
        return full;
    }
    let [.., a, b, c] = Mac::derived(&[fabric, network]).0;
    let head: String = full.chars().take(8).collect();
    format!("{head}-{a:02x}{b:02x}{c:02x}")
}

fn socket(facts: &Facts, port: &str) -> Result<PathBuf, PlanError> {
    short(facts.runtime.join(format!("{port}.sock")))
}

fn short(path: PathBuf) -> Result<PathBuf, PlanError> {
    if path.as_os_str().len() > 107 { Err(PlanError::LongPath { path }) } else { Ok(path) }
}

/// The words of a cell's command line that give it its fixed IPv6 addresses: in each of its first
/// `nics` networks the first one of `ip6` within the prefix. Words of the file's own go before
/// them.
pub(crate) fn words6(fabric: &Fabric, m: &Machine, nics: usize) -> Vec<String> {
    let Ip6::Only(list) = &m.ip6 else { return vec![] };
    let word = |(i, nic): (usize, &file::Nic)| {
        let network = fabric.network(&nic.network)?;
        let mut fixed = list.iter().filter(|p| p.bits == 128).map(|p| p.base);
        let ip6 = fixed.find(|ip| network.has_host((*ip).into()))?;
        let key = if i == 0 { "ip6=".to_string() } else { format!("ip6.{i}=") };
        let is_own = m.cmdline.split_whitespace().any(|word| word.starts_with(&key));
        (!is_own).then(|| format!("{key}{ip6}/64"))
    };
    m.nics.iter().enumerate().take(nics).filter_map(word).collect()
}

/// The image of a cell; `None` for a VM.
fn image(m: &Machine) -> Result<Option<PathBuf>, PlanError> {
    match &m.boot {
        Boot::Cell(Image::Path(path)) => Ok(Some(path.clone())),
        Boot::Cell(Image::App(app)) => file::find_app(app).map(Some).map_err(|tried| PlanError::NoImage {
            app: app.clone(),
            tried: tried.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "),
        }),
        Boot::Vm { .. } => Ok(None),
    }
}

/// The ports of a machine, and what of them QEMU is told: devices with sockets, and seats on links.
type Attached = (Vec<PortPlan>, Vec<Device>, Vec<Seat>);

fn attached(fabric: &Fabric, m: &Machine, facts: &Facts, at: &str) -> Result<Attached, PlanError> {
    let (mut ports, mut devices, mut seats) = (Vec::new(), Vec::new(), Vec::new());
    for (i, nic) in m.nics.iter().enumerate() {
        let name = port_name(&m.name, i);
        let socket = socket(facts, &name)?;
        let mtu = fabric.network(&nic.network).map_or(1500, |n| n.mtu);
        if matches!(m.attach, Attach::VhostUser | Attach::Stream) {
            devices.push(Device { port: name.clone(), socket: socket.clone(), mac: nic.mac.to_string(), mtu });
        }
        let attachment = match m.attach {
            Attach::VhostUser => Attachment::VhostUser { socket, connect: false, queues: m.queues, mac: Some(nic.mac) },
            Attach::Stream => Attachment::Stream { socket, connect: false },
            Attach::Xen => {
                let domain = xen::config::domain_of(&fabric.name, &m.name);
                Attachment::Xen { domain, vif: i as u32, mac: Some(nic.mac), queues: m.queues }
            }
            Attach::Ivshmem | Attach::IvshmemPlain => {
                let vectors = if m.attach == Attach::Ivshmem { VECTORS } else { 0 };
                let socket = (vectors > 0).then_some(socket);
                let to = NetworkEnd { network: &nic.network, mac: Some(nic.mac), mtu };
                let link = network_link(&name, &to, (1, m.region, vectors), socket, at)?;
                seats.push(Seat { link: link.clone(), id: 1 });
                Attachment::Ivshmem { link: Box::new(link) }
            }
        };
        let prefix = fabric.network(&nic.network).and_then(|n| n.ipv6);
        let guard = PortGuard::new(m.guard, nic.mac, nic.ip, (&m.ip6, m.traffic.ip6_limit), prefix);
        ports.push(PortPlan {
            name,
            network: nic.network.clone(),
            attachment,
            guard,
            traffic: m.traffic.clone(),
            mtu,
            machine: Some(m.name.clone()),
        });
    }
    Ok((ports, devices, seats))
}

/// Plans the process of one machine, and the ports that it needs.
pub fn machine(fabric: &Fabric, m: &Machine, facts: &Facts) -> Result<(MachinePlan, Vec<PortPlan>), PlanError> {
    let at = format!("{}.{}", m.kind.word(), m.name);
    let (ports, devices, seats) = attached(fabric, m, facts, &at)?;
    let plan = match m.attach {
        Attach::Xen => domain(fabric, m, facts, at)?,
        _ => process(fabric, m, facts, &devices, seats)?,
    };
    Ok((plan, ports))
}

/// A machine that is a domain of Xen.
fn domain(fabric: &Fabric, m: &Machine, facts: &Facts, at: String) -> Result<MachinePlan, PlanError> {
    let xl = facts.xl.as_ref().map_err(|why| PlanError::NoXen { machine: at, why: why.clone() })?;
    let program = std::iter::once(xl.display().to_string());
    Ok(MachinePlan {
        name: m.name.clone(),
        argv: program.chain(xen::config::words(&facts.runtime, &m.name)).collect(),
        kvm: false,
        survives: true,
        seats: vec![],
        domain: Some(xen::config::build(fabric, m, image(m)?.as_deref(), &facts.runtime)),
    })
}

/// A machine that is a process of QEMU.
fn process(
    fabric: &Fabric,
    m: &Machine,
    facts: &Facts,
    devices: &[Device],
    mut seats: Vec<Seat>,
) -> Result<MachinePlan, PlanError> {
    let at = format!("{}.{}", m.kind.word(), m.name);
    let qemu = facts.qemu.as_ref().map_err(|why| PlanError::NoQemu { machine: at.clone(), why: why.clone() })?;
    let kvm = match (m.accel, &facts.kvm) {
        (Accel::Tcg, _) | (Accel::Auto, Err(_)) => false,
        (Accel::Auto | Accel::Kvm, Ok(())) => true,
        (Accel::Kvm, Err(why)) => return Err(PlanError::NoKvm { machine: at, why: why.clone() }),
    };
    for link in &fabric.links {
        if let Some(id) = link.seat(&m.name) {
            seats.push(Seat { link: direct_link(link, facts)?, id });
        }
    }
    short(argv::monitor_path(&facts.runtime, &m.name))?;
    if m.agent {
        short(agent::socket_path(&facts.runtime, &m.name))?;
    }
    let shared: Vec<SharedMemory> = seats.iter().map(shared_memory).collect();
    let image = image(m)?;
    let (image, tsc) = (image.as_deref(), facts.tsc);
    let words = words6(fabric, m, m.nics.len()).join(" ");
    let with = Surroundings { qemu, kvm, fabric: &fabric.name, runtime: &facts.runtime, image, tsc, words: &words };
    Ok(MachinePlan {
        name: m.name.clone(),
        argv: argv::build(m, devices, &shared, &with),
        kvm,
        survives: m.attach != Attach::Stream || qemu.stream_reconnects(),
        seats,
        domain: None,
    })
}

/// Doorbells of each peer of a machine's network link: one for states, one for frames.
const VECTORS: u32 = 2;

struct NetworkEnd<'a> {
    network: &'a str,
    mac: Option<Mac>,
    mtu: u16,
}

/// The link of a port: this process is peer 0, the machine peer 1. `kind` is the server's version,
/// the region's bytes and the vectors.
fn network_link(
    port: &str,
    to: &NetworkEnd<'_>,
    (version, region, vectors): (u8, u64, u32),
    socket: Option<PathBuf>,
    at: &str,
) -> Result<Config, PlanError> {
    let shape = |dialect| Shape { dialect, max_peers: 2, vectors };
    let doors = socket.into_iter().map(|path| Door { path, seat: server::Seat::Fixed(1) }).collect();
    let name = format!("port:{port}");
    if version == 2 {
        // The state table is one page, as Jailhouse has it; what is left is shared out in whole
        // pages.
        let output_bytes = (region - PAGE_BYTES) / 2 / PAGE_BYTES * PAGE_BYTES;
        let dialect = Dialect::V2 { protocol: protocol::NETWORK, output_bytes };
        let layout = Layout::v2(PAGE_BYTES, region - PAGE_BYTES - 2 * output_bytes, output_bytes, 2);
        let (header, host) = (None, Some(0));
        return Ok(Config {
            name,
            shape: shape(dialect),
            layout,
            region_bytes: region,
            header,
            host,
            helper: None,
            doors,
        });
    }
    let layout = Layout::v1(region, 0, 2).map_err(|why| PlanError::Region { what: at.into(), why })?;
    let header = Header {
        protocol: protocol::NETWORK,
        vectors,
        layout,
        mac: to.mac.map_or([0; 6], |m| m.0),
        mtu: to.mtu,
        // Names of the file have at most 24 bytes.
        name: Name::new(to.network).unwrap_or_else(|| Name::new("").expect("an empty name fits")),
        offloads: true,
    };
    let shape = shape(Dialect::V1);
    let (header, host) = (Some(header), Some(0));
    Ok(Config { name, shape, layout, region_bytes: region, header, host, helper: None, doors })
}

/// A direct link: each machine has its seat and a way in of its own.
pub(crate) fn direct_link(link: &file::LinkDecl, facts: &Facts) -> Result<Config, PlanError> {
    let max_peers = link.max_peers();
    let vectors = if link.plain { 0 } else { link.vectors };
    let what = format!("link.{}", link.name);
    let layout = Layout::v1(link.region, link.rw, max_peers).map_err(|why| PlanError::Region { what, why })?;
    let header = Header {
        protocol: link.protocol,
        vectors,
        layout,
        mac: [0; 6],
        mtu: 0,
        name: Name::new(&link.name).unwrap_or_else(|| Name::new("").expect("an empty name fits")),
        offloads: false,
    };
    let mut doors = Vec::new();
    if !link.plain {
        for (id, machine) in (0..).zip(&link.between) {
            let path = short(facts.runtime.join(format!("{}.{machine}.link.sock", link.name)))?;
            doors.push(Door { path, seat: server::Seat::Fixed(id) });
        }
        if link.seats > 0 {
            let path = short(rundir::link_socket(&facts.runtime, &link.name))?;
            doors.push(Door { path, seat: server::Seat::From(link.between.len() as u32) });
        }
    }
    Ok(Config {
        name: format!("link:{}", link.name),
        shape: Shape { dialect: Dialect::V1, max_peers, vectors },
        layout,
        region_bytes: link.region,
        header: Some(header),
        host: None,
        // The seat that the fabric's own bridge takes.
        helper: link.is_bridged().then_some(link.between.len() as u32),
        doors,
    })
}

fn shared_memory(seat: &Seat) -> SharedMemory {
    let door = seat.link.doors.iter().find(|d| d.seat == server::Seat::Fixed(seat.id));
    // What a plain device cannot tell its guest, on a link where it is not clear.
    let number = (seat.is_plain() && seat.link.host.is_none()).then(|| {
        let name = seat.link.header.map(|h| h.name.as_str().to_string()).unwrap_or_default();
        format!("ivshmem.{name}.id={}", seat.id)
    });
    SharedMemory {
        link: seat.link.name.clone(),
        socket: door.map(|d| d.path.clone()),
        vectors: seat.link.shape.vectors,
        bytes: seat.link.region_bytes,
        word: number,
    }
}

/// Plans the port of a tap section.
pub fn tap(fabric: &Fabric, t: &file::Tap) -> PortPlan {
    let network = fabric.network(&t.network);
    let attachment = match t.monitor {
        // Its descriptor is the monitor's: the fabric is on the other side, as a packet socket.
        true => Attachment::Packet { device: t.device.clone(), netns: t.netns.clone() },
        false => Attachment::Tap {
            device: t.device.clone(),
            adopt: t.adopt,
            netns: t.netns.clone(),
            ip: t.ip.zip(network.map(|n| n.subnet.prefix)),
            mac: (!t.adopt).then_some(t.mac),
            accept_ra: t.accept_ra,
        },
    };
    PortPlan {
        name: t.name.clone(),
        network: t.network.clone(),
        attachment,
        guard: PortGuard::new(t.guard, t.mac, t.ip, (&t.ip6, t.traffic.ip6_limit), network.and_then(|n| n.ipv6)),
        traffic: t.traffic.clone(),
        mtu: network.map_or(1500, |n| n.mtu),
        machine: None,
    }
}

/// The plan of a bare port.
pub fn port(fabric: &Fabric, p: &file::PortDecl, facts: &Facts) -> Result<PortPlan, PlanError> {
    let path = |given: &Option<PathBuf>| match given {
        Some(path) => short(path.clone()),
        None => socket(facts, &p.name),
    };
    let attachment = match &p.kind {
        PortKind::VhostUser { socket, queues, connect } => {
            Attachment::VhostUser { socket: path(socket)?, connect: *connect, queues: *queues, mac: p.mac }
        }
        PortKind::Stream { socket, connect } => Attachment::Stream { socket: path(socket)?, connect: *connect },
        PortKind::Packet { device } => Attachment::Packet { device: device.clone(), netns: None },
        PortKind::Xen { domain, vif, queues } => {
            Attachment::Xen { domain: domain.clone(), vif: *vif, mac: p.mac, queues: *queues }
        }
        PortKind::Vxlan(tunnel) => Attachment::Vxlan(tunnel.clone()),
        PortKind::Ivshmem { socket, version, region, vectors } => {
            let mtu = fabric.network(&p.network).map_or(1500, |n| n.mtu);
            let to = NetworkEnd { network: &p.network, mac: p.mac, mtu };
            let kind = (*version, *region, *vectors);
            let link = network_link(&p.name, &to, kind, Some(path(socket)?), &format!("port.{}", p.name))?;
            Attachment::Ivshmem { link: Box::new(link) }
        }
    };
    Ok(PortPlan {
        name: p.name.clone(),
        network: p.network.clone(),
        attachment,
        guard: p.mac.and_then(|mac| {
            PortGuard::new(
                p.guard,
                mac,
                p.ip,
                (&p.ip6, p.traffic.ip6_limit),
                fabric.network(&p.network).and_then(|n| n.ipv6),
            )
        }),
        traffic: p.traffic.clone(),
        mtu: fabric.network(&p.network).map_or(1500, |n| n.mtu),
        machine: None,
    })
}

/// The name of the port of a network's uplink.
pub fn uplink_name(network: &str) -> String {
    format!("uplink-{network}")
}

/// Forwards of a user uplink with the ports that stand for them: those below 1024 of passt's guest;
/// see `switch::nat`.
fn numbered(forwards: &[file::Forward]) -> Vec<UserForward> {
    let mut out: Vec<UserForward> = Vec::new();
    let mut last = 0;
    for f in forwards {
        let known = out.iter().find(|o| (o.proto, o.listen.port()) == (f.proto, f.listen.port()));
        let number = known.map_or(last + 1, |known| known.number);
        last = last.max(number);
        out.push(UserForward { proto: f.proto, listen: f.listen, number, to: SocketAddr::new(f.ip, f.port) });
    }
    out
}

/// The port of a network's uplink, and the kernel's part of it.
pub fn uplink(fabric: &Fabric, n: &file::Network) -> (Option<PortPlan>, Option<KernelUplink>) {
    let forwards: Vec<_> = fabric.forwards.iter().filter(|f| f.network == n.name).cloned().collect();
    let mac = Mac::derived(&[&fabric.name, &n.name, "router"]);
    // The router's MAC belongs to it alone, even if a port without a guard sends with it; what it
    // forwards comes from anywhere.
    let guard = PortGuard::new(file::Guard::Mac, mac, None, (&Ip6::Any, None), None);
    // The host and passt are trusted. Behind a bridge is a real network, whose routers and DHCP
    // servers are not ours to refuse.
    let roles = Roles { gateway: !matches!(n.uplink, Uplink::Bridge { .. }), ..Roles::ALL };
    let port = |attachment| PortPlan {
        name: uplink_name(&n.name),
        network: n.name.clone(),
        attachment,
        guard: None,
        traffic: Traffic { roles, ..Traffic::default() },
        mtu: n.mtu,
        machine: None,
    };
    match (&n.uplink, n.router) {
        (Uplink::User, Some(router)) => {
            let user = UserUplink { mac, router, ipv6: n.prefix_out(), forwards: numbered(&forwards) };
            (Some(PortPlan { guard, ..port(Attachment::User(user)) }), None)
        }
        (Uplink::Kernel, Some(router)) => {
            let device = kernel_device(&fabric.name, &n.name);
            let ip = Some((router, n.subnet.prefix));
            let tap = Attachment::Tap {
                device: device.clone(),
                adopt: false,
                netns: None,
                ip,
                mac: Some(mac),
                accept_ra: false,
            };
            (Some(PortPlan { guard, ..port(tap) }), Some(KernelUplink { network: n.clone(), device, forwards }))
        }
        (Uplink::Bridge { device }, _) => {
            (Some(port(Attachment::Packet { device: device.clone(), netns: None })), None)
        }
        _ => (None, None),
    }
}

/// The plan of the whole fabric.
pub fn plan(fabric: &Fabric, facts: &Facts) -> Result<Plan, PlanError> {
    let mut plan = Plan { ports: vec![], machines: vec![], kernel: vec![], links: vec![] };
    for link in &fabric.links {
        plan.links.push(direct_link(link, facts)?);
    }
    for m in &fabric.machines {
        let (process, ports) = machine(fabric, m, facts)?;
        plan.machines.push(process);
        plan.ports.extend(ports);
    }
    plan.ports.extend(fabric.taps.iter().map(|t| tap(fabric, t)));
    for p in &fabric.ports {
        plan.ports.push(port(fabric, p, facts)?);
    }
    for n in &fabric.networks {
        let (port, kernel) = uplink(fabric, n);
        plan.ports.extend(port);
        plan.kernel.extend(kernel);
    }
    Ok(plan)
}

/// The arguments of the passt that serves a user uplink, the program first; it takes its end of the
/// stream as descriptor `fd`. With `ipv6` it serves IPv6 where the network has a way out for that,
/// which only works where this machine has a default route for IPv6: without one passt ends at the
/// first IPv6 listener. It leads the host's side: leases, names and router advertisements are the
/// gateway's. It maps its own address to the host's loopback, without which it loses the answers of
/// UDP forwards; the NAT before it lets nothing but such answers go there (`switch::nat`), so
/// guests do not reach the host's loopback.
pub fn passt_argv(program: &Path, uplink: &UserUplink, (mtu, fd): (u16, i32), ipv6: bool) -> Vec<String> {
    let ipv6 = ipv6 && uplink.ipv6.is_some();
    let mut out: Vec<String> = vec![program.display().to_string()];
    let mac = Mac::derived(&[&uplink.mac.to_string(), "passt"]).to_string();
    let mut say = |words: &[&str]| out.extend(words.iter().map(ToString::to_string));
    // Without IPv6 all is as earlier versions had it: a passt that they started goes on under this
    // one.
    say(&["-f", "-q"]);
    say(if ipv6 { &[] } else { &["-4"] });
    say(&["-a", &OUTSIDE.to_string(), "-n", "29", "-g", &PEER.to_string()]);
    say(&["--no-dhcp", "--no-dhcp-dns", "--no-dhcp-search"]);
    if ipv6 {
        say(&["-a", &OUTSIDE6.to_string(), "-g", &PEER6.to_string()]);
    } else {
        say(&["--no-ndp"]);
    }
    say(&["--no-dhcpv6", "--no-ra", "-e"]);
    say(&["-F", &fd.to_string(), "-M", &mac, "-m", &mtu.to_string()]);
    let served: Vec<_> = uplink.forwards.iter().filter(|f| ipv6 || f.listen.is_ipv4()).collect();
    for (i, forward) in served.iter().enumerate() {
        // One argument for both that share a number.
        if served[..i].iter().any(|before| before.number == forward.number) {
            continue;
        }
        let is_shared = served.iter().filter(|other| other.number == forward.number).count() > 1;
        let is_all = is_shared || !ipv6 && forward.listen.ip().is_unspecified();
        let address = if is_all { String::new() } else { format!("{}/", forward.listen.ip()) };
        let flag = if forward.proto == Proto::Tcp { "-t" } else { "-u" };
        say(&[flag, &format!("{address}{}:{}", forward.listen.port(), forward.number)]);
    }
    out
}

/// The address that passt knows, and its own: of 192.0.0.0/29, which RFC 7335 sets aside for
/// translation on one host.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// passt's own address on that link.
pub const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);
/// The same for IPv6: of 64:ff9b:1::/48, which RFC 8215 sets aside for translation by anyone who
/// needs one.
pub const OUTSIDE6: Ipv6Addr = Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 2);
/// As whom members see this machine, where it connects to them through passt.
pub const HOST6: Ipv6Addr = Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 1);
/// passt's own address on that link.
pub const PEER6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kvm: bool) -> Facts {
        Facts {
            qemu: Ok(Qemu { path: "/usr/bin/qemu".into(), version: (7, 2, 22) }),
            kvm: if kvm { Ok(()) } else { Err("stalls".into()) },
            xl: Ok("/usr/sbin/xl".into()),
            runtime: "/run/t/demo".into(),
            tsc: Some(Tsc { khz: 2_300_000, told: true }),
        }
    }

    fn fabric(text: &str) -> Fabric {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        file::parse(&format!("name = \"demo\"\n{text}"), &path).unwrap()
    }

    const FILE: &str = r#"
[network.lan]
uplink = "user"
[network.ops]
uplink = "kernel"
[network.out]
uplink = { bridge = "eth9" }
[cell.web]
image = "Cargo.toml"
network = ["lan", "ops"]
[vm.old]
kernel = "Cargo.toml"
network = "lan"
attach = "stream"
guard = "off"
[tap.host]
network = "lan"
ip = "10.87.0.3"
[port.guest]
kind = "vhost-user"
network = "out"
mac = "02:00:00:00:00:07"
[[forward]]
listen = "127.0.0.1:8080"
to = "web:80"
[[forward]]
proto = "udp"
listen = "0.0.0.0:5353"
to = "host:53"
[[forward]]
listen = "127.0.0.1:8081"
to = "web:80"
network = "ops"
"#;

    #[test]
    fn a_file_comes_to_its_ports_processes_and_rules() {
        let fabric = fabric(FILE);
        let plan = plan(&fabric, &facts(false)).unwrap();
        let names: Vec<_> = plan.ports.iter().map(|p| (p.name.as_str(), p.network.as_str())).collect();
        let expected = [
            ("web", "lan"),
            ("web.1", "ops"),
            ("old", "lan"),
            ("host", "lan"),
            ("guest", "out"),
            ("uplink-lan", "lan"),
            ("uplink-ops", "ops"),
            ("uplink-out", "out"),
        ];
        assert_eq!(names, expected);
        let web = &fabric.machines[0];
        let guard = |at: usize| plan.ports[at].guard.as_ref().map(|g| (g.mac, g.ip));
        assert_eq!(guard(0), Some((web.nics[0].mac, web.nics[0].ip)));
        assert_eq!(guard(1), Some((web.nics[1].mac, web.nics[1].ip)));
        assert_eq!(guard(2), None);
        assert_eq!(guard(4), Mac::parse("02:00:00:00:00:07").map(|mac| (mac, None)));
        assert!(plan.machines[0].survives && !plan.machines[1].survives && !plan.machines[0].kvm);
        let Attachment::User(user) = &plan.ports[5].attachment else { panic!() };
        assert_eq!(user.router, Ipv4Addr::new(10, 87, 0, 2));
        assert_eq!(guard(5), Some((user.mac, None)), "the router's MAC is its own");
        assert!(plan.ports[6].guard.is_some() && plan.ports[7].guard.is_none());
        let ip = web.nics[0].ip.unwrap();
        let listen = "127.0.0.1:8080".parse().unwrap();
        assert_eq!(user.forwards[0], UserForward { proto: Proto::Tcp, listen, number: 1, to: (ip, 80).into() });
        assert_eq!(user.forwards[1].to, (Ipv4Addr::new(10, 87, 0, 3), 53).into());
        assert_eq!(user.ipv6, fabric.networks[0].ipv6);
        assert!(user.ipv6.is_some());
        let argv = passt_argv(Path::new("passt"), user, (1500, 7), false);
        assert!(argv.windows(2).any(|w| w == ["-t", "127.0.0.1/8080:1"]), "{argv:?}");
        assert!(argv.windows(2).any(|w| w == ["-u", "5353:2"]), "{argv:?}");
        let first = "-f -q -4 -a 192.0.0.2 -n 29 -g 192.0.0.1 --no-dhcp --no-dhcp-dns --no-dhcp-search --no-ndp";
        assert_eq!(argv[1..14].join(" "), first, "as the daemons before had it");
        assert_eq!(plan.kernel.len(), 1);
        assert_eq!(plan.kernel[0].device, "tb-demo-ops");
        assert_eq!(plan.kernel[0].forwards[0].ip, web.nics[1].ip.unwrap());
    }

    #[test]
    fn a_cell_is_told_the_first_fixed_address_of_each_network_unless_the_file_tells_another() {
        let words = |more: &str, nics| {
            let text = format!(
                "name = \"demo\"\n[network.lan]\nipv6 = \"fd00:1:2:3::/64\"\n[network.ops]\nsubnet = \"10.88.0.0/24\"\n\
                 ipv6 = \"fd00:1:2:4::/64\"\n[cell.web]\nimage = \"Cargo.toml\"\nnetwork = [\"lan\", \"ops\"]\n{more}"
            );
            let fabric = file::parse(&text, Path::new("demo.toml")).unwrap();
            words6(&fabric, &fabric.machines[0], nics).join(" ")
        };
        let list =
            "ip6 = [\"fd00:1:2:4::/64\", \"fd00:1:2:4::7\", \"fe80::7\", \"fd00:1:2:3::7\", \"fd00:1:2:3::8\"]\n";
        assert_eq!(words(list, 2), "ip6=fd00:1:2:3::7/64 ip6.1=fd00:1:2:4::7/64");
        assert_eq!(words(list, 1), "ip6=fd00:1:2:3::7/64");
        assert_eq!(words(&format!("{list}args = \"x ip6=none\"\n"), 2), "ip6.1=fd00:1:2:4::7/64");
        assert_eq!(words("ip6 = \"any\"\n", 2), "");
        assert_eq!(words("", 2), "");
    }

    #[test]
    fn passt_listens_once_at_each_port_and_at_ipv6_only_where_it_can() {
        let forward = |proto: &str, listen: &str, to: &str| {
            format!("[[forward]]\nproto = \"{proto}\"\nlisten = \"{listen}\"\nto = \"{to}:80\"\n")
        };
        let net = "[network.lan]\nuplink = \"user\"\nipv6 = \"fd00:1:2:3::/64\"\n\
            [tap.t]\nip = \"10.87.0.9\"\nguard = \"ip\"\nip6 = \"fd00:1:2:3::9\"\n";
        let text = [
            net.to_string(),
            forward("tcp", "[::]:80", "t"),
            forward("udp", "[::]:53", "t"),
            forward("tcp", "[::1]:81", "[fd00:1:2:3::9]"),
            forward("tcp", "0.0.0.0:80", "t"),
            forward("tcp", "127.0.0.1:82", "t"),
            forward("udp", "0.0.0.0:83", "t"),
        ];
        let fabric = fabric(&text.concat());
        let (port, _) = uplink(&fabric, &fabric.networks[0]);
        let Attachment::User(user) = port.unwrap().attachment else { panic!() };
        let numbers: Vec<_> = user.forwards.iter().map(|f| (f.number, f.to.is_ipv6())).collect();
        assert_eq!(numbers, [(1, true), (2, true), (3, true), (1, false), (4, false), (5, false)]);
        let listeners = |ipv6| {
            let argv = passt_argv(Path::new("passt"), &user, (1500, 7), ipv6);
            assert_eq!(argv.iter().any(|w| w == "-4"), !ipv6);
            assert_eq!(argv.iter().any(|w| w == "64:ff9b:1::2"), ipv6);
            let at = argv.windows(2).filter(|w| ["-t", "-u"].contains(&&w[0][..]));
            at.map(|w| w.join(" ")).collect::<Vec<_>>()
        };
        let all = ["-t 80:1", "-u ::/53:2", "-t ::1/81:3", "-t 127.0.0.1/82:4", "-u 0.0.0.0/83:5"];
        assert_eq!(listeners(true), all);
        assert_eq!(listeners(false), ["-t 80:1", "-t 127.0.0.1/82:4", "-u 83:5"]);
    }

    #[test]
    fn acceleration_is_what_was_asked_and_found() {
        let text = |accel: &str| format!("[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\naccel = \"{accel}\"\n");
        let kvm = |accel: &str, found| plan(&fabric(&text(accel)), &facts(found)).map(|p| p.machines[0].kvm);
        assert!(kvm("auto", true).unwrap() && !kvm("auto", false).unwrap() && !kvm("tcg", true).unwrap());
        assert!(kvm("kvm", true).unwrap());
        let said = kvm("kvm", false).unwrap_err().to_string();
        assert!(said.contains("vm.v") && said.contains("stalls") && said.contains("leave accel out"), "{said}");
    }

    #[test]
    fn a_port_of_xen_is_a_vif_of_a_domain_named_like_it_or_otherwise() {
        let text = "[network.lan]\n[port.web]\nkind = \"xen\"\n[port.db]\nkind = \"xen\"\n";
        let db = |more: &str| {
            let plan = plan(&fabric(&format!("{text}{more}")), &facts(false)).unwrap();
            plan.ports.into_iter().find(|p| p.name == "db").unwrap().attachment
        };
        let vif = |domain: &str, vif, queues| Attachment::Xen { domain: domain.into(), vif, mac: None, queues };
        assert_eq!(db(""), vif("db", 0, 1));
        assert_eq!(db("domain = \"web\"\nvif = 1\nqueues = 4\n"), vif("web", 1, 4));
        let complaint = |more: &str| {
            file::parse(&format!("name = \"demo\"\n{text}{more}"), Path::new("t.toml")).unwrap_err().to_string()
        };
        assert!(complaint("domain = \"web\"\n").contains("a vif of its own"), "{}", complaint("domain = \"web\"\n"));
        assert!(complaint("domain = \"a/b\"\n").contains("the name of a Xen domain"));
        assert!(complaint("device = \"eth0\"\n").contains("device"));
    }

    #[test]
    fn a_machine_of_xen_is_a_domain_whose_vifs_are_its_ports() {
        let text = "[network.lan]\n[network.ops]\n[cell.web]\nimage = \"Cargo.toml\"\nattach = \"xen\"\nqueues = 2\nnetwork = [\"lan\", \"ops\"]\n";
        let fabric = fabric(text);
        // Without QEMU.
        let facts = Facts { qemu: Err("not looked for".into()), ..facts(false) };
        let made = plan(&fabric, &facts).unwrap();
        let vif = |vif| {
            let mac = fabric.machines[0].nics[vif as usize].mac;
            Attachment::Xen { domain: "demo.web".into(), vif, mac: Some(mac), queues: 2 }
        };
        let ports: Vec<_> = made.ports.iter().map(|p| (p.name.as_str(), p.attachment.clone())).collect();
        assert_eq!(ports, [("web", vif(0)), ("web.1", vif(1))]);
        let [web] = &made.machines[..] else { panic!("{:?}", made.machines) };
        assert_eq!(web.argv, ["/usr/sbin/xl", "create", "-q", "-F", "-c", "/run/t/demo/web.xl"]);
        assert!(web.survives && web.domain.as_ref().is_some_and(|d| d.name == "demo.web") && web.accel() == "xen");
        let facts = Facts { xl: Err("this is not a Xen host".into()), ..facts };
        let said = plan(&fabric, &facts).unwrap_err().to_string();
        assert_eq!(said, "cell.web has attach = \"xen\", and no domain can be started: this is not a Xen host");
    }

    #[test]
    fn what_means_nothing_to_xen_is_refused_where_it_stands() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let vm = "[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\nattach = \"xen\"\n";
        let told = |more: &str| file::parse(&format!("name = \"demo\"\n{vm}{more}"), &path).unwrap_err().to_string();
        for line in [
            "machine = \"q35\"",
            "accel = \"tcg\"",
            "qemu = [\"-s\"]",
            "iommu = true",
            "disk = \"Cargo.toml\"",
            "region = \"1M\"",
        ] {
            let key = line.split(' ').next().unwrap();
            let text = told(&format!("{line}\n"));
            assert!(
                text.contains("t.toml:6:") && text.contains(&format!("expected no `{key}` with attach = \"xen\"")),
                "{text}"
            );
        }
        assert!(told("xl = [\"a\\nb\"]\n").contains("a list of strings"));
        let linked = told("[link.a]\nbetween = [\"v\"]\nseats = 1\n");
        assert!(linked.contains("t.toml:7:") && linked.contains("machines that QEMU runs"), "{linked}");
        let twice = told("[port.p]\nkind = \"xen\"\ndomain = \"demo.v\"\n");
        assert!(twice.contains("vif 0 of \"demo.v\", as in [vm.v]"), "{twice}");
        let qemu = "name = \"demo\"\n[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\nxl = [\"a=1\"]\n";
        let text = file::parse(qemu, &path).unwrap_err().to_string();
        assert!(text.contains("no `xl` with attach = \"vhost-user\""), "{text}");
    }

    #[test]
    fn a_machine_may_be_without_a_network() {
        let link = "[cell.a]\nimage = \"Cargo.toml\"\n[link.l]\nbetween = [\"a\"]\nseats = 1\n";
        for text in [link.to_string(), link.replace("[link", "network = []\n[link") + "[network.lan]\n"] {
            let made = plan(&fabric(&text), &facts(false)).unwrap();
            assert!(made.ports.is_empty(), "{:?}", made.ports);
            let argv = &made.machines[0].argv;
            assert!(!argv.iter().any(|w| w == "-netdev") && argv.iter().any(|w| w.starts_with("ivshmem-")), "{argv:?}");
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let told = |text: &str| file::parse(&format!("name = \"demo\"\n{text}"), &path).unwrap_err().to_string();
        for text in ["", "[tap.t]\n", "[cell.a]\nimage = \"Cargo.toml\"\nnetwork = \"lan\"\n"] {
            assert!(told(text).contains("at least one section [network.NAME]"), "{}", told(text));
        }
    }

    #[test]
    fn a_section_with_count_is_several_machines_of_their_own() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let text = "[network.lan]\n[cell.web]\nimage = \"Cargo.toml\"\ncount = 3\nargs = \"id={n}\"\n\
                    [cell.db]\nimage = \"Cargo.toml\"\ndepends_on = \"web\"\n";
        let fabric = fabric(text);
        let names: Vec<_> = fabric.machines.iter().map(|m| (m.name.as_str(), m.cmdline.as_str())).collect();
        assert_eq!(names, [("db", ""), ("web-1", "id=1"), ("web-2", "id=2"), ("web-3", "id=3")]);
        assert_eq!(fabric.machines[0].depends_on, ["web-1", "web-2", "web-3"]);
        let made = plan(&fabric, &facts(false)).unwrap();
        let ports: Vec<_> = made.ports.iter().map(|p| (p.name.as_str(), p.guard.as_ref().unwrap().mac)).collect();
        assert_eq!(ports.len(), 4);
        assert!((1..4).all(|i| ports[i].1 != ports[i - 1].1), "{ports:?}");
        let told = |more: &str| {
            let text = format!("name = \"demo\"\n[network.lan]\n[vm.web]\nkernel = \"Cargo.toml\"\ncount = 2\n{more}");
            file::parse(&text, &path).unwrap_err().to_string()
        };
        assert!(
            told("mac = \"02:00:00:00:00:01\"\n").contains("6:7: vm.web.mac: "),
            "{}",
            told("mac = \"02:00:00:00:00:01\"\n")
        );
        assert!(told("disk = \"Cargo.toml\"\n").contains("one disk for 2 machines"));
        assert!(told("[cell.web-1]\nimage = \"Cargo.toml\"\n").contains("a name that no other member has"));
    }

    #[test]
    fn who_depends_on_whom_is_checked() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let text = |a: &str, b: &str| {
            let cell = |name, on| format!("[cell.{name}]\nimage = \"Cargo.toml\"\ndepends_on = \"{on}\"\n");
            format!("name = \"demo\"\n[network.lan]\n{}{}", cell("a", a), cell("bee", b))
        };
        let told = |a, b| file::parse(&text(a, b), &path).unwrap_err().to_string();
        assert!(told("bee", "a").contains("a → bee → a"), "{}", told("bee", "a"));
        assert!(told("bea", "bea").contains("did you mean \"bee\"?"), "{}", told("bea", "bea"));
        assert!(told("a", "a").contains("a → a"));
    }

    #[test]
    fn device_names_fit_and_differ() {
        assert_eq!(kernel_device("demo", "lan"), "tb-demo-lan");
        let (a, b) = (kernel_device("a-long-name", "lan"), kernel_device("a-long-name", "lon"));
        assert!(a.len() <= 15 && b.len() <= 15 && a != b, "{a} {b}");
    }

    #[test]
    fn a_socket_path_that_is_too_long_is_told() {
        let mut facts = facts(false);
        facts.runtime = format!("/run/{}", "x".repeat(100)).into();
        let error = plan(&fabric("[network.lan]\n[port.p]\nkind = \"stream\"\n"), &facts).unwrap_err();
        assert!(error.to_string().contains("the system allows 107"), "{error}");
    }
}
