//! What a fabric file needs of this machine: looked at before anything is made, all of it at once.
//!
//! # Purpose
//! A file can be right and still ask for what this machine does not have: an interface that is not
//! there, a port that another program listens at, a disk that may not be written, a CPU that does
//! not exist. [`faults`] finds all of that, so `tombolo check`, `up`, `apply` and a handover refuse
//! with every fault and its place in the file before they start or stop anything.
//!
//! # Limits
//! What is looked at here may change before it is used; then the step that uses it fails. Nothing
//! is created, except that a listener of a forward or an export is bound for an instant.

mod disks;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};
use tombolo_port::link::{Interface, LinkError, Netns};
use tombolo_port::vxlan;
use tombolo_port::xen::XenPort;
use tombolo_remote::machine::keys::{Identity, KeyFiles};
use tombolo_ring::vxlan::overhead_bytes;

use crate::bridge;
use crate::fabric::standing::{self, Standing};
use crate::file::{
    self, Boot, Fabric, FileError, Image, Machine, Part, Places, PortKind, Problem, Proto, Readable, Tap, Uplink,
    Vxlan, Which, nearest,
};
use crate::kernel;
use crate::plan::{self, Facts, PlanError};
use crate::process;
use crate::qemu::cloud_init;
use crate::qemu::probe::which;
use crate::routes::{self, Clash};
use crate::rundir;

/// Something that this machine does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFault {
    /// Dotted path of the section that asks for it.
    pub section: String,
    /// The key of that section; empty for the section as a whole.
    pub key: &'static str,
    /// What would have been right.
    pub expected: String,
    /// What there is instead.
    pub found: String,
    /// A near name, or what to do.
    pub hint: Option<String>,
    /// Whether a daemon that was killed an instant ago may be the cause: the kernel still takes
    /// back its taps, sockets and locks.
    pub(crate) may_pass: bool,
}

/// Why a listener cannot be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Taken {
    /// What is there instead.
    pub(crate) found: String,
    /// What to do.
    pub(crate) hint: String,
    /// See [`HostFault::may_pass`].
    pub(crate) may_pass: bool,
}

impl HostFault {
    /// With its place in the file.
    pub fn placed(self, places: &Places) -> Problem {
        places.problem((&self.section, self.key), self.expected, self.found, self.hint)
    }
}

/// Reads the file at `path`, as [`file::load_on`] does.
///
/// # Errors
/// All faults of the file, and of this machine those of sections without one.
pub fn load(path: &Path, which: Which<'_>) -> Result<Fabric, FileError> {
    // Read once: the path may be a pipe's.
    let text = file::text_of(path)?;
    let running = |name: &str| standing::of_running(&rundir::runtime_root().ok()?.join(name));
    file::parse_on(&text, path, which).map_err(|error| beside(error, &text, which, running))
}

/// The faults of a file with those that [`of_readable`] finds.
pub fn beside(
    error: FileError,
    text: &str,
    which: Which<'_>,
    standing: impl FnOnce(&str) -> Option<Standing>,
) -> FileError {
    let FileError::Faulty { path, mut problems, part: Part::File } = error else { return error };
    let found = of_readable(text, &path, which, standing);
    let part = if found.is_empty() { Part::File } else { Part::Both };
    problems.extend(found);
    problems.sort_by(|a, b| (a.line, a.column, &a.key).cmp(&(b.line, b.column, &b.key)));
    FileError::Faulty { path, problems, part }
}

/// What this machine does not have of what a faulty file asks for in the sections that can be read.
/// What machines are run by (QEMU, Xen) is not looked for. `standing` is what the fabric of that
/// name has already.
pub fn of_readable(
    text: &str,
    path: &Path,
    which: Which<'_>,
    standing: impl FnOnce(&str) -> Option<Standing>,
) -> Vec<Problem> {
    let Some(readable) = Readable::of(text, path, which) else { return vec![] };
    let standing = standing(&readable.fabric.name);
    let found = faults(&readable.fabric, standing.as_ref()).into_iter().filter(|f| !readable.doubts(&f.section));
    let mut problems: Vec<_> = found.map(|fault| fault.placed(&readable.places)).collect();
    problems.sort_by_key(|p| (p.line, p.column));
    problems
}

/// All that the fabric needs and this machine does not have. `standing` is what the fabric has
/// already, where it runs.
pub fn faults(fabric: &Fabric, standing: Option<&Standing>) -> Vec<HostFault> {
    let mut look = Look { fabric, standing, out: vec![] };
    look.workers();
    look.machines();
    look.disks();
    look.networks();
    look.taps();
    look.ports();
    look.forwards();
    look.across();
    look.routes();
    look.out
}

/// What keeps the plan of a fabric from being made: each machine, port and link by itself.
pub fn plan_faults(fabric: &Fabric, facts: &Facts) -> Vec<HostFault> {
    let mut out: Vec<HostFault> = Vec::new();
    let mut add = |section: String, key: &'static str, error: PlanError| {
        let fault = HostFault {
            section,
            key,
            expected: "what this machine can run".into(),
            found: error.to_string(),
            hint: None,
            may_pass: false,
        };
        // Without QEMU the first machine tells it for all.
        if !matches!(error, PlanError::NoQemu { .. }) || !out.iter().any(|f| f.found.contains("needs QEMU")) {
            out.push(fault);
        }
    };
    for m in &fabric.machines {
        if let Err(error) = plan::machine(fabric, m, facts) {
            let key = match error {
                PlanError::NoKvm { .. } => "accel",
                PlanError::NoXen { .. } => "attach",
                PlanError::Region { .. } => "region",
                _ => "",
            };
            add(section_of(m), key, error);
        }
    }
    for p in &fabric.ports {
        if let Err(error) = plan::port(fabric, p, facts) {
            add(format!("port.{}", p.name), "", error);
        }
    }
    out
}

fn section_of(m: &Machine) -> String {
    m.section.clone()
}

struct Look<'a> {
    fabric: &'a Fabric,
    standing: Option<&'a Standing>,
    out: Vec<HostFault>,
}

impl Look<'_> {
    fn say(
        &mut self,
        (section, key): (&str, &'static str),
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: Option<String>,
    ) {
        let (expected, found) = (expected.into(), found.into());
        self.out.push(HostFault { section: section.into(), key, expected, found, hint, may_pass: false });
    }

    /// The same of what the kernel may be about to take back; see [`HostFault::may_pass`].
    fn say_passing(
        &mut self,
        at: (&str, &'static str),
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: Option<String>,
    ) {
        self.say(at, expected, found, hint);
        self.out.iter_mut().next_back().into_iter().for_each(|fault| fault.may_pass = true);
    }

    /// A listener that cannot be had.
    fn say_taken(&mut self, at: (&str, &'static str), expected: &str, Taken { found, hint, may_pass }: Taken) {
        match may_pass {
            true => self.say_passing(at, expected, found, Some(hint)),
            false => self.say(at, expected, found, Some(hint)),
        }
    }

    /// Whether the running fabric has this device in that place already.
    fn stands(&self, section: &str, device: &str, netns: Option<&str>) -> bool {
        let has = |key, value| self.standing.is_some_and(|standing| standing.has(section, key, value));
        has("device", device) && has("netns", netns.unwrap_or("none"))
    }

    fn workers(&mut self) {
        let (there, allowed) = (cpus_there(), cpus_allowed());
        for worker in &self.fabric.workers {
            let Some(cpu) = worker.cpu else { continue };
            let at = format!("worker.{}", worker.name);
            if !there.is_empty() && !there.contains(&cpu) {
                self.say((&at, "cpu"), format!("a CPU of this machine ({})", ranges(&there)), cpu.to_string(), None);
            } else if !allowed.is_empty() && !allowed.contains(&cpu) {
                let hint = "a cpuset or `taskset` of this process or its service leaves the others out";
                let expected = format!("a CPU that this process may use ({})", ranges(&allowed));
                self.say((&at, "cpu"), expected, cpu.to_string(), Some(hint.into()));
            }
        }
    }

    fn machines(&mut self) {
        for m in &self.fabric.machines {
            let at = section_of(m);
            match &m.boot {
                Boot::Cell(Image::Path(path)) => self.file((&at, "image"), path, Access::READ_OK),
                Boot::Cell(Image::App(app)) => {
                    // One that is not there is a fault of the file.
                    if let Ok(path) = file::find_app(app) {
                        self.file((&at, "app"), &path, Access::READ_OK);
                    }
                }
                Boot::Vm { kernel, initrd, disks, cloud_init } => {
                    kernel.iter().for_each(|path| self.file((&at, "kernel"), path, Access::READ_OK));
                    initrd.iter().for_each(|path| self.file((&at, "initrd"), path, Access::READ_OK));
                    let both = Access::READ_OK | Access::WRITE_OK;
                    disks.iter().zip(disks::keys()).for_each(|((path, _), key)| self.file((&at, key), path, both));
                    if let Some(path) = cloud_init {
                        self.file((&at, "cloud_init"), path, Access::READ_OK);
                        if let Some(found) = cloud_init::too_long(path) {
                            self.say((&at, "cloud_init"), cloud_init::EXPECTED, found, None);
                        }
                    }
                }
            }
        }
    }

    fn file(&mut self, at: (&str, &'static str), path: &Path, wanted: Access) {
        let refused = |access| accessat(CWD, path, access, AtFlags::EACCESS).err();
        let (verb, error) = match refused(Access::READ_OK) {
            Some(error) => ("read", error),
            None if wanted.contains(Access::WRITE_OK) => match refused(Access::WRITE_OK) {
                Some(error) => ("write", error),
                None => return,
            },
            None => return,
        };
        let found = match error {
            Errno::ACCESS | Errno::PERM => {
                format!("{}, which {} may not {verb}{}", path.display(), user(), owner(path))
            }
            Errno::ROFS => format!("{}, which is on a file system that is mounted read-only", path.display()),
            error => format!("{}: {error}", path.display()),
        };
        let hint = match error {
            Errno::ACCESS | Errno::PERM => Some("change its mode or owner, or run this as a user who may".into()),
            Errno::ROFS => Some("use a copy on a file system that can be written".into()),
            _ => None,
        };
        let expected = match verb {
            "write" => "a disk that can be written",
            _ => "the path of a file that can be read",
        };
        self.say(at, expected, found, hint);
    }

    fn networks(&mut self) {
        for n in &self.fabric.networks {
            let at = format!("network.{}", n.name);
            match &n.uplink {
                Uplink::None => {}
                Uplink::User if which("passt").is_none() => {
                    let hint = "Debian: apt install passt; or use uplink = \"none\"";
                    self.say((&at, "uplink"), "passt in PATH, for the user uplink", "none", Some(hint.into()));
                }
                Uplink::User => {}
                Uplink::Kernel => {
                    if which("nft").is_none() {
                        let hint = "Debian: apt install nftables; or use uplink = \"user\"";
                        self.say((&at, "uplink"), "nft in PATH, for a kernel uplink", "none", Some(hint.into()));
                    }
                    let device = plan::kernel_device(&self.fabric.name, &n.name);
                    if !self.stands(&at, &device, None) && Interface::open(None, &device).is_ok() {
                        let expected = format!("no interface {device} yet, for its own tap");
                        let hint = format!("`ip link del {device}` removes one that another program left");
                        self.say_passing((&at, "uplink"), expected, "one", Some(hint));
                    }
                    self.capability(
                        (&at, "uplink"),
                        CapabilitySet::NET_ADMIN,
                        "CAP_NET_ADMIN",
                        "uplink = \"user\" needs none",
                    );
                }
                Uplink::Bridge { device } => {
                    self.interface((&at, "uplink"), None, device);
                    self.capability(
                        (&at, "uplink"),
                        CapabilitySet::NET_RAW,
                        "CAP_NET_RAW",
                        "uplink = \"user\" needs none",
                    );
                }
            }
        }
    }

    fn capability(&mut self, at: (&str, &'static str), wanted: CapabilitySet, name: &str, instead: &str) {
        if capabilities(None).is_ok_and(|sets| !sets.effective.contains(wanted)) {
            let hint = format!("run this as root, or give it that capability; {instead}");
            self.say(at, format!("a process with {name}"), format!("{} without it", user()), Some(hint));
        }
    }

    /// Complains unless the interface is there.
    fn interface(&mut self, at: (&str, &'static str), netns: Option<&Netns>, name: &str) {
        let Err(error) = Interface::open(netns, name) else { return };
        let names = interfaces(netns);
        let hint = nearest(name, names.iter().map(String::as_str)).map(|near| format!("did you mean \"{near}\"?"));
        let hint = hint.or_else(|| (!names.is_empty()).then(|| format!("there are {}", names.join(", "))));
        match error {
            LinkError::Absent { .. } => {
                self.say(at, "the name of an interface that is there", format!("{name:?}, which is not"), hint)
            }
            error => self.say(at, "an interface that can be used", error.to_string(), None),
        }
    }

    fn taps(&mut self) {
        for tap in &self.fabric.taps {
            let at = format!("tap.{}", tap.name);
            if !self.stands(&at, &tap.device, tap.netns.as_deref()) {
                self.tap(&at, tap);
            }
        }
    }

    fn tap(&mut self, at: &str, tap: &Tap) {
        let netns = match tap.netns.as_deref().map(|name| (name, Netns::open(name))) {
            Some((name, Err(error))) => return self.no_namespace(at, name, &error),
            Some((_, Ok(netns))) => Some(netns),
            None => None,
        };
        if let Some(Err(error)) = netns.as_ref().map(|netns| netns.run(|| ())) {
            return self.say((at, "netns"), "a namespace that this process may enter", error.to_string(), None);
        }
        let device = &tap.device;
        if tap.adopt {
            return self.interface((at, "device"), netns.as_ref(), device);
        }
        match Interface::open(netns.as_ref(), device) {
            Ok(_) => {
                let hint = "choose another `device`, or set `adopt = true`";
                self.say_passing((at, "device"), format!("no interface {device} yet"), "one", Some(hint.into()));
            }
            Err(LinkError::Absent { .. }) => {}
            Err(error) => self.say((at, "device"), "an interface that can be used", error.to_string(), None),
        }
        self.capability(
            (at, ""),
            CapabilitySet::NET_ADMIN,
            "CAP_NET_ADMIN",
            "an existing tap of its own user, with `adopt = true`, needs none",
        );
        if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
            let hint = "`modprobe tun` loads the driver; a container has to be given the device";
            self.say((at, ""), "/dev/net/tun, by which taps are made", error.to_string(), Some(hint.into()));
        }
    }

    fn no_namespace(&mut self, at: &str, name: &str, error: &LinkError) {
        let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        let near = nearest(name, names.iter().map(String::as_str)).map(|near| format!("did you mean \"{near}\"?"));
        let hint = near.unwrap_or_else(|| match names.is_empty() {
            true => format!("there is none with a name; `ip netns add {name}` makes one"),
            false => format!("there are {}", names.join(", ")),
        });
        let found = match error {
            LinkError::Namespace { source, .. } if source.kind() == ErrorKind::NotFound => {
                format!("{name:?}, which is not there")
            }
            error => error.to_string(),
        };
        self.say((at, "netns"), "the name or path of a network namespace", found, Some(hint));
    }

    fn ports(&mut self) {
        for port in &self.fabric.ports {
            let at = format!("port.{}", port.name);
            match &port.kind {
                PortKind::Packet { device } => {
                    self.interface((&at, "device"), None, device);
                    self.capability((&at, "kind"), CapabilitySet::NET_RAW, "CAP_NET_RAW", "the other kinds need none");
                }
                PortKind::VhostUser { socket: Some(path), connect: false, .. }
                | PortKind::Stream { socket: Some(path), connect: false }
                | PortKind::Ivshmem { socket: Some(path), .. } => self.folder(&at, path),
                PortKind::Xen { .. } => {
                    if let Err(error) = XenPort::check_machine() {
                        self.say((&at, "kind"), "a Xen host", error.to_string(), None);
                    }
                }
                PortKind::Vxlan(tunnel) => self.tunnel(&at, &port.network, tunnel),
                _ => {}
            }
        }
    }

    /// Complains unless the tunnel can receive, has a way to each remote, and frames of its network
    /// fit the paths.
    fn tunnel(&mut self, at: &str, network: &str, tunnel: &Vxlan) {
        let listen = SocketAddr::new(tunnel.local, tunnel.udp_port);
        if !self.standing.is_some_and(|s| s.listens(Proto::Udp, listen))
            && let Err(error) = UdpSocket::bind(listen)
        {
            let key = if error.kind() == ErrorKind::AddrInUse { "udp_port" } else { "local" };
            let expected = "an address and UDP port at which this machine can receive";
            return self.say_taken((at, key), expected, why_not(Proto::Udp, listen, &error));
        }
        let mut narrowest: Option<(u32, IpAddr)> = None;
        for remote in &tunnel.remotes {
            match vxlan::path_mtu(tunnel.local, SocketAddr::new(*remote, tunnel.udp_port)) {
                Ok(mtu) if narrowest.is_none_or(|(least, _)| mtu < least) => narrowest = Some((mtu, *remote)),
                Ok(_) => {}
                Err(error) => {
                    let expected = format!("addresses that there is a route to from {}", tunnel.local);
                    let hint = format!("`ip route get {remote} from {}` asks the kernel", tunnel.local);
                    self.say((at, "remotes"), expected, format!("{remote}: {error}"), Some(hint));
                }
            }
        }
        let Some(((path, remote), network)) = narrowest.zip(self.fabric.network(network)) else { return };
        let overhead = overhead_bytes(tunnel.local.is_ipv6());
        let most = path.saturating_sub(overhead);
        if u32::from(network.mtu) > most {
            let expected = format!(
                "an MTU of at most {most} for a network with [{at}]: the path to {remote} has {path}, and the tunnel's \
                 headers take {overhead}"
            );
            let hint =
                format!("set `mtu = {most}` in [network.{}], and in the networks at the other ends", network.name);
            self.say((&format!("network.{}", network.name), "mtu"), expected, network.mtu.to_string(), Some(hint));
        }
    }

    fn folder(&mut self, at: &str, socket: &Path) {
        let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return };
        let expected = format!("a folder for its socket {}", socket.display());
        if !folder.is_dir() {
            self.say((at, "socket"), expected, "none", Some(format!("make {}", folder.display())));
        } else if accessat(CWD, folder, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_err() {
            let found = format!("one that {} may not write{}", user(), owner(folder));
            self.say((at, "socket"), expected, found, Some("leave `socket` out, or choose another folder".into()));
        }
    }

    fn forwards(&mut self) {
        // Asked for once, and only where there is something to compare.
        let mut others = None;
        for (i, f) in self.fabric.forwards.iter().enumerate() {
            if self.standing.is_some_and(|s| s.listens(f.proto, f.listen)) {
                continue;
            }
            let taken = match self.fabric.network(&f.network).map(|n| &n.uplink) {
                Some(Uplink::User) => free_in_family(f.proto, f.listen).err(),
                Some(Uplink::Kernel) => {
                    let others = others.get_or_insert_with(|| kernel::listeners_of_others(&self.fabric.name));
                    forwarded_by(others, f.proto, f.listen)
                }
                _ => None,
            };
            let Some(taken) = taken else { continue };
            let expected = "an address and port at which this machine can listen";
            self.say_taken((&format!("forward[{i}]"), "listen"), expected, taken);
        }
    }

    /// Keys of services that cross to other machines, and where they listen.
    fn across(&mut self) {
        let fabric = self.fabric;
        let exports = fabric.exports.iter().map(|export| (format!("export.{}", export.name), &export.proof));
        let imports = fabric.imports.iter().map(|import| (format!("import.{}", import.name), &import.proof));
        for (at, proof) in exports.chain(imports) {
            let Some(proof) = proof else { continue };
            if let Err(error) = Identity::load(&KeyFiles::of(&proof.keys, &proof.machine)) {
                let hint = "`tombolo service keys --keys FOLDER MACHINE…` makes the keys of all machines".to_string();
                self.say((&at, "keys"), "keys of this machine", error.to_string(), Some(hint));
            }
        }
        // As for forwards.
        let mut others = None;
        for export in &fabric.exports {
            if self.standing.is_some_and(|s| s.listens(Proto::Tcp, export.listen)) {
                continue;
            }
            let taken = free_in_family(Proto::Tcp, export.listen).err().or_else(|| {
                let others = others.get_or_insert_with(|| kernel::listeners_of_others(&fabric.name));
                forwarded_by(others, Proto::Tcp, export.listen)
            });
            let Some(taken) = taken else { continue };
            let expected = "an address and port at which this machine can listen";
            self.say_taken((&format!("export.{}", export.name), "listen"), expected, taken);
        }
    }

    fn routes(&mut self) {
        let host = routes::host();
        let six = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
        for network in &self.fabric.networks {
            let Some(prefix) = network.ipv6.filter(|_| network.router6().is_some()) else { continue };
            let own = crate::plan::kernel_device(&self.fabric.name, &network.name);
            if let Some((to, device)) = routes::taken6(&six, prefix, &own) {
                let found = format!("{prefix}/64: the host's route to {to} goes through {device}");
                let hint = "a prefix is either on that interface or in the network: give another, or uplink6 = \"off\"";
                let at = format!("network.{}", network.name);
                self.say((&at, "ipv6"), "a prefix that the host has no route to", found, Some(hint.into()));
            }
        }
        for (network, clash) in routes::clashes(self.fabric, &host) {
            let at = format!("network.{}", network.name);
            if let Clash::Taken(route) = clash
                && !self.standing.is_some_and(|s| s.is_on_host(&network.name))
            {
                let found = format!("{}: its route to {} goes through {}", network.subnet, route.subnet, route.device);
                let like = routes::free(self.fabric, &host).map_or_else(String::new, |s| format!(", like \"{s}\""));
                let hint = format!("set another `subnet`{like}");
                self.say((&at, "subnet"), "a subnet that the host has no route to", found, Some(hint));
            }
        }
    }
}

/// Whether the listener is free.
fn free(proto: Proto, listen: SocketAddr) -> Result<(), Taken> {
    let bound = match proto {
        Proto::Tcp => TcpListener::bind(listen).map(drop),
        Proto::Udp => UdpSocket::bind(listen).map(drop),
    };
    bound.map_err(|error| why_not(proto, listen, &error))
}

/// Whether another fabric forwards what comes to the listener.
pub(crate) fn forwarded_by(others: &[(String, Proto, SocketAddr)], proto: Proto, listen: SocketAddr) -> Option<Taken> {
    let (name, _, other) = others.iter().find(|(_, p, other)| *p == proto && file::overlap(*other, listen))?;
    let found = format!("{} {listen}: fabric \"{name}\" of this machine forwards {other}", proto.word());
    // Its rules stay while that fabric does: the kernel takes nothing back.
    Some(Taken { found, hint: "choose another port, or end that fabric".into(), may_pass: false })
}

/// As [`free`], for forwards and exports, which listen at an IPv6 address for IPv6 alone.
pub(crate) fn free_in_family(proto: Proto, listen: SocketAddr) -> Result<(), Taken> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
    if listen.is_ipv4() {
        return free(proto, listen);
    }
    let bound = || -> std::io::Result<()> {
        if proto == Proto::Tcp {
            return bridge::listener(listen).map(drop);
        }
        let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_ipv6_v6only(&socket, true)?;
        Ok(bind(&socket, &listen)?)
    };
    bound().map_err(|error| why_not(proto, listen, &error))
}

/// Why a listener cannot be had.
fn why_not(proto: Proto, listen: SocketAddr, error: &std::io::Error) -> Taken {
    let it = format!("{} {listen}", proto.word());
    let (found, hint) = match error.kind() {
        ErrorKind::AddrInUse => {
            let who = holder(proto, listen).map_or_else(String::new, |(pid, name)| format!(" (process {pid}, {name})"));
            (format!("{it}: another program listens there{who}"), "end it or choose another port".into())
        }
        ErrorKind::PermissionDenied => privileged(&it, listen.port()),
        ErrorKind::AddrNotAvailable => {
            (format!("{it}, which is no address of this machine"), "choose one that `ip address` lists".into())
        }
        _ => (format!("{it}: {error}"), "choose another address or port".into()),
    };
    Taken { found, hint, may_pass: error.kind() == ErrorKind::AddrInUse }
}

/// Why a port was refused: its number is below the first that every user may take, or something
/// else forbids it.
fn privileged(it: &str, port: u16) -> (String, String) {
    let path = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    let first: u16 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024);
    let has = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_BIND_SERVICE));
    if port < first && !has {
        let hint = format!(
            "choose a port from {first} on, give this process CAP_NET_BIND_SERVICE, or set the sysctl \
             net.ipv4.ip_unprivileged_port_start to {port}"
        );
        return (format!("{it}: ports below {first} need CAP_NET_BIND_SERVICE, which {} does not have", user()), hint);
    }
    (
        format!("{it}: permission denied, though the port is none that needs a capability"),
        "a security module (AppArmor, SELinux, a container's policy) forbids it".into(),
    )
}

/// The process that listens there, if its owner may be asked.
fn holder(proto: Proto, listen: SocketAddr) -> Option<(u32, String)> {
    let inode = inode_of(&fs::read_to_string(format!("/proc/thread-self/net/{}", proto.word())).ok()?, proto, listen)?;
    holding(&PathBuf::from(format!("socket:[{inode}]")))
}

/// A process that has this file or socket open, if its owner may be asked.
fn holding(wanted: &Path) -> Option<(u32, String)> {
    let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.into_iter().any(|file| fs::read_link(file.path()).is_ok_and(|to| to == wanted))
    };
    let pid = pids.into_iter().find(has)?;
    let name = process::arguments(pid)
        .and_then(|words| Some(Path::new(words.first()?).file_name()?.to_string_lossy().into_owned()));
    Some((pid, name.unwrap_or_else(|| "a process of the kernel's".into())))
}

/// The inode of the socket that listens at an IPv4 address (proc(5), /proc/net/tcp).
fn inode_of(table: &str, proto: Proto, listen: SocketAddr) -> Option<u64> {
    // State LISTEN of TCP; UDP's sockets without a peer are in state 7.
    let state = if proto == Proto::Tcp { "0A" } else { "07" };
    let IpAddr::V4(wanted) = listen.ip() else { return None };
    table.lines().skip(1).find_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let (address, port) = words.get(1)?.split_once(':')?;
        let address = std::net::Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.to_ne_bytes());
        let same = address == wanted || address.is_unspecified() || wanted.is_unspecified();
        let fits = words.get(3) == Some(&state) && u16::from_str_radix(port, 16) == Ok(listen.port()) && same;
        fits.then(|| words.get(9)?.parse().ok()).flatten()
    })
}

/// This process's user, for people.
fn user() -> String {
    match rustix::process::geteuid() {
        uid if uid.is_root() => "root".into(),
        uid => format!("user {}", uid.as_raw()),
    }
}

/// Mode and owner of a file, as far as they can be seen: the folder that hides it is the cause
/// otherwise.
fn owner(path: &Path) -> String {
    match fs::metadata(path) {
        Ok(meta) => format!(" (mode {:04o}, owner {}, group {})", meta.mode() & 0o7777, meta.uid(), meta.gid()),
        Err(_) => " (a folder on its path hides it)".into(),
    }
}

/// Names of the interfaces of a namespace; empty where the system does not tell.
fn interfaces(netns: Option<&Netns>) -> Vec<String> {
    let read = || fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    let table = match netns {
        Some(netns) => netns.run(read).unwrap_or_default(),
        None => read(),
    };
    let names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_string()));
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The CPUs of a list such as "0-3,8" (cpuset(7), "List format").
fn listed(text: &str) -> BTreeSet<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// As [`listed`] reads it.
fn ranges(cpus: &BTreeSet<usize>) -> String {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match out.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => out.push((cpu, cpu)),
        }
    }
    let word = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    out.iter().map(word).collect::<Vec<_>>().join(",")
}

/// CPUs that are there and on; empty where the system does not tell.
fn cpus_there() -> BTreeSet<usize> {
    fs::read_to_string("/sys/devices/system/cpu/online").map(|text| listed(&text)).unwrap_or_default()
}

/// CPUs on which this process may run; empty where the system does not tell.
fn cpus_allowed() -> BTreeSet<usize> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.map(listed).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(text: &str) -> Vec<HostFault> {
        let fabric = file::parse(&format!("name = \"demo\"\n{text}"), Path::new("t.toml")).unwrap();
        faults(&fabric, None)
    }

    #[test]
    fn all_faults_are_found_at_once_with_their_keys() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = format!(
            "[worker.a]\ncpu = 4000\n[network.lan]\nsubnet = \"10.213.0.0/24\"\nworker = \"a\"\nuplink = \"user\"\n\
             [network.out]\nsubnet = \"10.214.0.0/24\"\nuplink = {{ bridge = \"l0\" }}\nworker = \"a\"\n\
             [tap.t]\nnetwork = \"lan\"\nnetns = \"tmb-absent\"\n[tap.u]\nnetwork = \"lan\"\ndevice = \"lo\"\n\
             [port.p]\nnetwork = \"lan\"\nkind = \"stream\"\nsocket = \"/proc/absent/p\"\nmac = \"02:00:00:00:00:07\"\nip = \"10.213.0.7\"\n\
             [[forward]]\nlisten = \"{}\"\nto = \"p:80\"\n[[forward]]\nlisten = \"192.0.2.7:80\"\nto = \"p:80\"\n",
            taken.local_addr().unwrap()
        );
        let found = look(&text);
        let told = |section: &str, key: &str| {
            let fault = found.iter().find(|f| f.section == section && f.key == key);
            let fault = fault.unwrap_or_else(|| panic!("{section}.{key} is not in {found:#?}"));
            format!("expected {}, found {}; {}", fault.expected, fault.found, fault.hint.clone().unwrap_or_default())
        };
        assert!(told("worker.a", "cpu").contains("a CPU of this machine (0"));
        assert!(told("network.out", "uplink").contains("did you mean \"lo\"?"));
        assert!(told("tap.t", "netns").contains("\"tmb-absent\", which is not there"));
        assert!(told("tap.u", "device").contains("expected no interface lo yet, found one"));
        assert!(told("port.p", "socket").contains("a folder for its socket"));
        let own = format!("another program listens there (process {}, ", std::process::id());
        assert!(told("forward[0]", "listen").contains(&own), "{}", told("forward[0]", "listen"));
        assert!(told("forward[1]", "listen").contains("no address of this machine"));
    }

    #[test]
    fn faults_of_the_file_hide_none_of_the_machine_in_other_sections() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.toml");
        let told = |text: &str| {
            let text = format!("name = \"demo\"\n{text}");
            fs::write(&path, &text).unwrap();
            let Err(FileError::Faulty { problems, part, .. }) = load(&path, Which::This) else { panic!("{text}") };
            (part, problems.into_iter().map(|p| (p.line, p.key)).collect::<Vec<_>>())
        };
        let at = |line: usize, key: &str| (line, key.to_string());
        let lan = "[network.lan]\nsubnet = \"10.213.0.0/24\"\n";
        let tap = "[tap.t]\nnetwork = \"lan\"\nnetns = \"tmb-absent\"\n";
        // The rule is wrong, and the namespace is not there.
        let rule = "[[rule]]\naction = \"deny\"\nfrom = \"nobody\"\n";
        let (part, found) = told(&format!("{lan}{tap}{rule}"));
        assert_eq!((part, found), (Part::Both, vec![at(6, "tap.t.netns"), at(9, "rule[0].from")]));
        // A section with a fault is not looked for: what it means is open.
        let (part, found) = told(&format!("{lan}{tap}netms = \"x\"\n"));
        assert_eq!((part, found), (Part::File, vec![at(7, "tap.t.netms")]));
        // So is all of a file that is no TOML.
        let (part, found) = told(&format!("{lan}{tap}x = \n"));
        assert_eq!((part, found.len()), (Part::File, 1));
        let member = "[port.p]\nkind = \"stream\"\nmac = \"02:00:00:00:00:07\"\nip = \"10.213.0.7\"\n";
        let lan = format!("{lan}uplink = \"user\"\n{member}");
        let away = "[[forward]]\nlisten = \"192.0.2.7:80\"\nto = \"p:80\"\n";
        let (part, found) = told(&format!("{lan}{rule}{away}"));
        assert_eq!((part, found), (Part::Both, vec![at(11, "rule[0].from"), at(13, "forward[0].listen")]));
        let (part, found) = told(&format!("{lan}[[forward]]\nlisten = \"192.0.2.7:81\"\nto = \"q:80\"\n{away}"));
        assert_eq!((part, found), (Part::Both, vec![at(11, "forward[0].to"), at(13, "forward[1].listen")]));
    }

    #[test]
    fn waiting_helps_where_something_has_it_and_not_where_it_is_mistyped() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = format!(
            "[network.lan]\nsubnet = \"10.213.0.0/24\"\nuplink = \"user\"\n[network.out]\nsubnet = \"10.214.0.0/24\"\n\
             uplink = {{ bridge = \"l0\" }}\n[tap.t]\nnetwork = \"lan\"\ndevice = \"absent0\"\nadopt = true\n\
             [tap.u]\nnetwork = \"lan\"\ndevice = \"lo\"\n[port.p]\nnetwork = \"lan\"\nkind = \"stream\"\nmac = \"02:00:00:00:00:07\"\n\
             ip = \"10.213.0.7\"\n[[forward]]\nlisten = \"{}\"\nto = \"p:80\"\n[[forward]]\nlisten = \"192.0.2.7:80\"\nto = \"p:80\"\n",
            taken.local_addr().unwrap()
        );
        let mut fabric = file::parse(&format!("name = \"demo\"\n{text}"), Path::new("t.toml")).unwrap();
        let vm = "name = \"demo\"\n[network.lan]\nsubnet = \"10.213.0.0/24\"\n[vm.v]\ndisk = \"Cargo.toml\"\n";
        fabric.machines = file::parse(vm, Path::new("t.toml")).unwrap().machines;
        let Boot::Vm { disks, .. } = &mut fabric.machines[0].boot else { panic!() };
        disks[0].0 = "/absent/disk.raw".into();
        let found = faults(&fabric, None);
        let others = [("other".to_string(), Proto::Tcp, "127.0.0.1:80".parse().unwrap())];
        let forwarded = forwarded_by(&others, Proto::Tcp, "127.0.0.1:80".parse().unwrap());
        assert!(forwarded.is_some_and(|taken| !taken.may_pass), "the kernel does not take back what runs");
        let passes = |section: &str| found.iter().find(|f| f.section == section).map(|f| f.may_pass);
        assert_eq!(passes("forward[0]"), Some(true), "{found:#?}");
        assert_eq!(passes("tap.u"), Some(true), "{found:#?}");
        for mistyped in ["vm.v", "tap.t", "network.out", "forward[1]"] {
            assert_eq!(passes(mistyped), Some(false), "{mistyped}: {found:#?}");
        }
    }

    #[test]
    fn what_is_there_is_no_fault() {
        let fabric =
            "[network.lan]\nsubnet = \"10.213.0.0/24\"\n[port.p]\nkind = \"stream\"\n[vm.v]\nkernel = \"Cargo.toml\"\n";
        assert_eq!(look(fabric), []);
    }

    #[test]
    fn a_disk_that_cannot_be_written_is_told_with_its_cause() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        fs::write(&disk, "x").unwrap();
        let text = format!("[network.lan]\nsubnet = \"10.213.0.0/24\"\n[vm.v]\ndisk = \"{}\"\n", disk.display());
        assert_eq!(look(&text), []);
        fs::set_permissions(&disk, fs::Permissions::from_mode(0o400)).unwrap();
        let found = look(&text);
        if rustix::process::geteuid().is_root() {
            // Root may write what its mode forbids others.
            assert_eq!(found, []);
            return;
        }
        assert_eq!((found[0].section.as_str(), found[0].key), ("vm.v", "disk"));
        assert!(found[0].found.contains("may not write (mode 0400"), "{found:?}");
    }

    #[test]
    fn user_data_that_is_too_long_is_told_before_anything_starts() {
        let dir = tempfile::tempdir().unwrap();
        let user_data = dir.path().join("user-data");
        let file = fs::File::create(&user_data).unwrap();
        let text = format!(
            "[network.lan]\nsubnet = \"10.213.0.0/24\"\n[vm.v]\nkernel = \"Cargo.toml\"\ncloud_init = \"{}\"\n",
            user_data.display()
        );
        file.set_len(8 << 20).unwrap();
        assert_eq!(look(&text), []);
        file.set_len((8 << 20) + 1).unwrap();
        let found = look(&text);
        assert_eq!((found.len(), found[0].section.as_str(), found[0].key), (1, "vm.v", "cloud_init"));
        assert_eq!(found[0].expected, "a file of at most 8 MiB");
        assert!(found[0].found.ends_with("user-data, which has 8388609 bytes"), "{found:?}");
    }

    #[test]
    fn the_holder_of_a_port_is_read_from_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 x\n   \
            1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 x\n   \
            2: 0200007F:1F91 0100007F:0016 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 x\n";
        let at = |listen: &str| inode_of(table, Proto::Tcp, listen.parse().unwrap());
        assert_eq!(at("127.0.0.1:8080"), Some(4711));
        assert_eq!(at("0.0.0.0:8080"), Some(4711), "a wildcard meets every address");
        assert_eq!(at("127.0.0.9:80"), Some(4712));
        assert_eq!(at("127.0.0.2:8080"), None);
        assert_eq!(at("127.0.0.2:8081"), None, "a connection is no listener");
    }

    #[test]
    fn lists_of_cpus_are_read_and_written() {
        let cpus = listed("0-3,8,10-11\n");
        assert_eq!(cpus.len(), 7);
        assert_eq!(ranges(&cpus), "0-3,8,10-11");
        assert_eq!(ranges(&listed("5")), "5");
        assert!(listed("").is_empty());
    }

    #[test]
    fn a_refused_port_is_explained_by_what_refused_it() {
        let (found, hint) = privileged("tcp 127.0.0.1:0", 65000);
        assert!(found.contains("none that needs a capability") && hint.contains("security module"));
    }
}
