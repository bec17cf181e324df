//! Ports: opened as planned, handed to their worker, and taken out again.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use tombolo_port::ivshmem::Handle;
use tombolo_port::link::{Interface, Netns};
use tombolo_port::packet::{PacketConfig, PacketPort};
use tombolo_port::stream::{Address, StreamPort};
use tombolo_port::tap::{Existing, TapConfig, TapPort};
use tombolo_port::vhost_user::{Shelf, Socket, VhostUserConfig, VhostUserPort};
use tombolo_port::vxlan::{Directory, VxlanConfig, VxlanPort};
use tombolo_port::xen::{XenConfig, XenPort};
use tombolo_switch::control::PortSettings;
use tombolo_switch::port::{HandOver, Port};
use tombolo_switch::wait::{CONTROL, Token};
use tombolo_switch::worker::Restart;
use tombolo_worker::reactor::Registration;

use super::containers::check_place;
use super::parked::Parked;
use super::passt::Passt;
use super::{FabricError, Running, RunningWorker, Say, describe};
use crate::file;
use crate::plan::{self, Attachment, PortPlan};

/// The token of a port that no worker has. It is none that a worker gives, so it names no other
/// port.
pub(super) const NOWHERE: Token = CONTROL;

/// A port that a worker runs.
pub(crate) struct RunningPort {
    pub(crate) plan: PortPlan,
    pub(crate) worker: usize,
    pub(crate) token: Token,
    /// The passt behind a user uplink.
    pub(super) passt: Option<Passt>,
    /// What a tunnel is told of the members behind it.
    pub(super) directory: Option<Directory>,
    /// Where it stands for a container's port that could not be attached.
    pub(super) parked: Option<Parked>,
}

impl RunningPort {
    /// The passt behind it.
    pub(crate) fn passt_pid(&self) -> Option<u32> {
        self.passt.as_ref().filter(|p| p.fault.is_none()).map(|p| p.process.id())
    }

    /// Counters of the passt behind it.
    pub(crate) fn passt_counters(&self) -> Vec<(String, u64)> {
        self.passt.iter().flat_map(Passt::counters).map(|(name, n)| (name.to_string(), n)).collect()
    }

    /// What is wrong with the passt behind it.
    pub(crate) fn fault(&self) -> Option<String> {
        self.passt.as_ref().and_then(|p| p.fault.clone())
    }

    /// What is wrong with the passt behind it, for a forward from `listen`.
    pub(crate) fn fault_of(&self, listen: SocketAddr) -> Option<String> {
        self.passt.as_ref().and_then(|p| p.fault_of(listen))
    }

    /// Whether the passt behind it has said that it has IPv6.
    pub(crate) fn leads_out6(&self) -> bool {
        self.passt.as_ref().is_some_and(Passt::has_ipv6)
    }
}

/// What the daemon before left of a port, and of the passt behind it.
pub(super) struct Handed {
    pub(super) port: HandOver,
    pub(super) passt: Option<(Vec<u8>, Vec<OwnedFd>)>,
}

/// A port that was opened for a worker.
pub(super) struct Opened {
    pub(super) port: Box<dyn Port>,
    /// How it comes back after a panic in its code. The server of an ivshmem link has greeted the
    /// peer of a port that is gone, and does not greet it again.
    pub(super) restart: Option<Restart>,
    pub(super) passt: Option<Passt>,
    /// By what the port of a link hears of its peer.
    pub(super) handle: Option<Handle>,
    /// What a tunnel is told of the members behind it.
    pub(super) directory: Option<Directory>,
}

fn error(port: &PortPlan) -> impl Fn(&dyn std::fmt::Display) -> FabricError {
    let name = port.name.clone();
    move |why| FabricError::Port { port: name.clone(), why: why.to_string() }
}

impl Running {
    pub(crate) fn worker_of(&self, network: &str) -> Option<(usize, &RunningWorker)> {
        let name = &self.spec.network(network)?.worker;
        self.workers.iter().enumerate().find(|(_, w)| w.spec.name == *name)
    }

    /// The settings that a port begins with.
    fn settings_of(&self, plan: &PortPlan) -> PortSettings {
        let file::Traffic { storm, rates, marking, ref vlans, .. } = plan.traffic;
        let rates = self.changed_rates(&plan.name).unwrap_or(rates);
        let guard = plan.guard();
        PortSettings { guard, mac_limit: None, storm, rates, labels: plan.labels(), vlans: vlans.clone(), marking }
    }

    /// Hands a port that is open to the worker of its network, as the planned one. Its token there.
    pub(super) fn hand_to_worker(&self, plan: &PortPlan, port: Box<dyn Port>) -> Result<(usize, Token), FabricError> {
        let fail = error(plan);
        let (worker, running) = self.worker_of(&plan.network).ok_or_else(|| fail(&"its network has no worker"))?;
        let net = self.networks.get(&plan.network).ok_or_else(|| fail(&"its network is not there"))?;
        let reserved = running.thread.handle().reserve()?;
        let token = reserved.token();
        running.thread.handle().add_port(reserved, net.id, &plan.name, port, self.settings_of(plan))?;
        Ok((worker, token))
    }

    /// Opens a planned port and hands it to its network's worker. One of a container has to be what
    /// was noted of it.
    pub(crate) fn add_port(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        if let Some(place) = self.containers.get(&plan.name) {
            check_place(place).map_err(|why| error(plan)(&why))?;
        }
        self.add_checked_port(plan)
    }

    /// As [`Running::add_port`], where the container was looked at. It takes the place of the same
    /// port that is parked.
    pub(super) fn add_checked_port(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        let handed = self.take_handed(plan);
        self.add_handed_port(plan, handed)
    }

    /// What the daemon before has handed over of a port. Ports of a vhost-user frontend take it
    /// themselves.
    pub(super) fn take_handed(&mut self, plan: &PortPlan) -> Option<HandOver> {
        let own = matches!(plan.attachment, Attachment::VhostUser { .. });
        if own { None } else { self.store.take_port(&plan.name) }
    }

    /// As [`Running::add_checked_port`], with what was handed over.
    pub(super) fn add_handed_port(&mut self, plan: &PortPlan, handed: Option<HandOver>) -> Result<(), FabricError> {
        let fail = error(plan);
        let passt = self.store.take_state(format!("passt/{}", plan.name));
        let handed = handed.map(|port| Handed { port, passt });
        let (index, worker) = self.worker_of(&plan.network).ok_or_else(|| fail(&"its network has no worker"))?;
        let net = self.networks.get(&plan.network).ok_or_else(|| fail(&"its network is not there"))?;
        let reserved = worker.thread.handle().reserve()?;
        let token = reserved.token();
        let registration = worker.thread.registration(&reserved);
        let Opened { port, restart, passt, handle: told, directory } = self.open(plan, registration, handed)?;
        let settings = self.settings_of(plan);
        let handle = worker.thread.handle();
        // The one that is parked under this name has its addresses until here.
        let parked = self.is_parked(&plan.name);
        if let Some(port) = self.ports.get(&plan.name).filter(|_| parked) {
            let _ = handle.remove_port(port.token);
        }
        let added = match restart {
            Some(restart) => handle.add_lasting_port(reserved, net.id, &plan.name, port, restart, settings),
            None => handle.add_port(reserved, net.id, &plan.name, port, settings),
        };
        if let (Attachment::Ivshmem { link }, Some(told)) = (&plan.attachment, told) {
            if let (Err(_), Some(links)) = (&added, self.links()) {
                links.close(&link.name);
            } else if let Err(error) = self.serve_link(link, told) {
                // A worker that has ended has dropped the port already.
                let _ = handle.remove_port(token);
                return Err(error);
            }
        }
        if let (Err(_), Some(port)) = (&added, self.ports.get_mut(&plan.name).filter(|_| parked)) {
            // The one that was parked has left the worker.
            port.token = NOWHERE;
        }
        added?;
        let watched = passt.as_ref().map(|p| p.process.id());
        let running = RunningPort { plan: plan.clone(), worker: index, token, passt, directory, parked: None };
        self.ports.insert(plan.name.clone(), running);
        if let Some(pid) = watched {
            self.record_passt(&plan.name, pid);
            self.watch_passt(plan.name.clone(), pid);
        }
        (self.say)(&format!("port {} on {}: {}", plan.name, plan.network, describe(plan)));
        Ok(())
    }

    /// Takes a port out of its worker, if it is there.
    pub(crate) fn drop_port(&mut self, name: &str) {
        let Some(port) = self.ports.remove(name) else { return };
        self.watched.news.notify_one();
        if let Some(worker) = self.workers.get(port.worker) {
            // A worker that has ended has dropped the port already.
            let _ = worker.thread.handle().remove_port(port.token);
        }
        if let Attachment::VhostUser { socket, connect: false, .. } | Attachment::Stream { socket, connect: false } =
            &port.plan.attachment
        {
            let _ = std::fs::remove_file(socket);
        }
        if let (Attachment::Ivshmem { link }, Some(links)) = (&port.plan.attachment, self.links()) {
            links.close(&link.name);
        }
    }

    fn open(&self, plan: &PortPlan, registration: Registration, handed: Option<Handed>) -> Result<Opened, FabricError> {
        let fail = error(plan);
        match &plan.attachment {
            Attachment::Ivshmem { link } => {
                let (port, handle) = self.open_link(link, plan.mtu, registration)?;
                let (port, handle) = (Box::new(port), Some(handle));
                Ok(Opened { port, restart: None, passt: None, handle, directory: None })
            }
            Attachment::User(user) => {
                let network = self.spec.network(&plan.network).ok_or_else(|| fail(&"its network is not there"))?;
                self.open_user(plan, user, network, registration, handed)
            }
            _ => {
                let shelf = self.store.shelf(&plan.name);
                let handed = handed.map(|handed| handed.port);
                let directory = matches!(plan.attachment, Attachment::Vxlan(_)).then(Directory::default);
                let told = directory.clone().unwrap_or_default();
                let attached = attach(plan, registration.clone(), shelf.clone(), handed, &told, &self.say);
                let port = attached.map_err(|why| fail(&why))?;
                // Rules, routes and a bypass hang on the tap of a kernel uplink, and not on a
                // member's.
                let hung =
                    matches!(plan.attachment, Attachment::Tap { .. }) && plan.name == plan::uplink_name(&plan.network);
                let restart = (!hung).then(|| restart_of(plan, registration, shelf, told, self.say.clone()));
                Ok(Opened { port, restart, passt: None, handle: None, directory })
            }
        }
    }

    pub(crate) fn log_path(&self, name: &str) -> std::path::PathBuf {
        self.facts.runtime.join(format!("{name}.log"))
    }

    /// The file of a child's complaints. Where it cannot be made, as on a full disk, they are lost;
    /// the child is not.
    pub(crate) fn complaints(&self, name: &str) -> std::io::Result<std::fs::File> {
        crate::rundir::private_file(&self.log_path(name)).or_else(|error| {
            (self.say)(&format!("{name}: its log is not kept: {error}"));
            std::fs::OpenOptions::new().write(true).open("/dev/null")
        })
    }
}

/// Opens a port that needs nothing of the fabric but its plan.
///
/// `handed` is what the port of the daemon before left; where it cannot be continued the peer
/// connects again.
fn attach(
    plan: &PortPlan,
    registration: Registration,
    shelf: Option<Shelf>,
    mut handed: Option<HandOver>,
    directory: &Directory,
    say: &Say,
) -> Result<Box<dyn Port>, String> {
    fn text(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let mtu = u32::from(plan.mtu);
    let lost = |why: String| say(&format!("port {}: its peer has to connect again: {why}", plan.name));
    let go_on = |mut port: StreamPort, handed: Option<HandOver>| {
        if let Some(Err(why)) = handed.map(|handed| port.take_up(handed)) {
            lost(why);
        }
        Box::new(port)
    };
    Ok(match &plan.attachment {
        Attachment::VhostUser { socket, connect, queues, .. } => {
            let socket = if *connect { Socket::Connect(socket.clone()) } else { Socket::Listen(socket.clone()) };
            let config = VhostUserConfig { socket, queue_pairs: *queues, mtu };
            Box::new(VhostUserPort::open_kept(config, registration, shelf).map_err(text)?)
        }
        Attachment::Stream { socket, connect: true } => {
            go_on(StreamPort::connect(&Address::Unix(socket.clone()), mtu, registration), handed)
        }
        Attachment::Stream { socket, connect: false } => {
            let address = Address::Unix(socket.clone());
            let taken = handed.as_mut().map(|h| StreamPort::listen_on(h, &address, 0o600, mtu, registration.clone()));
            match taken {
                Some(Ok(port)) => go_on(port, handed),
                // What the port before it was of another kind, or listened elsewhere.
                taken => {
                    if let Some(Err(why)) = taken {
                        lost(why.to_string());
                    }
                    Box::new(StreamPort::listen(&address, 0o600, mtu, registration).map_err(text)?)
                }
            }
        }
        Attachment::Tap { device, adopt, netns, ip, mac, accept_ra } => {
            if let Some(fd) = handed.and_then(|handed| handed.fds.into_iter().next()) {
                // Addresses, routes and rules are on it as they were.
                match TapPort::adopt(fd, registration.clone()) {
                    Ok(port) if port.name() == device => return Ok(Box::new(port)),
                    Ok(port) => say(&format!(
                        "port {}: expected the tap {device}, found {}: opening it again",
                        plan.name,
                        port.name()
                    )),
                    // What the port before it was of another kind.
                    Err(why) => say(&format!("port {}: opening {device} again: {why}", plan.name)),
                }
            }
            let netns = netns.as_deref().map(Netns::open).transpose().map_err(text)?;
            let existing = if *adopt { Existing::Adopt } else { Existing::Create };
            let mac = mac.map(|m| m.0);
            let closed = !*accept_ra && !*adopt;
            let config =
                TapConfig { netns: netns.clone(), existing, mtu: Some(mtu), mac, closed, ..TapConfig::new(device) };
            let port = TapPort::open(&config, registration).map_err(text)?;
            if let Some((ip, prefix)) = ip {
                let link = Interface::open(netns.as_ref(), device).map_err(text)?;
                link.add_address((*ip).into(), *prefix).map_err(text)?;
            }
            Box::new(port)
        }
        Attachment::Packet { device, netns } => {
            let netns = netns.as_deref().map(Netns::open).transpose().map_err(text)?;
            let config = PacketConfig { netns, ..PacketConfig::new(device) };
            Box::new(PacketPort::open(&config, registration).map_err(text)?)
        }
        // Nothing is handed over: the rings and the nodes in XenStore say where the port before it
        // stood.
        Attachment::Xen { domain, vif, mac, queues } => {
            let (domain, device, mac) = (domain.clone(), *vif, mac.map(|mac| mac.0));
            let config = XenConfig { domain, device, mac, max_queues: u32::from(*queues), mtu };
            Box::new(XenPort::open(config, registration).map_err(text)?)
        }
        // The socket goes on receiving; what was learned is learned again.
        Attachment::Vxlan(tunnel) => {
            let at = |ip| SocketAddr::new(ip, tunnel.udp_port);
            let config = VxlanConfig {
                vni: tunnel.vni,
                local: at(tunnel.local),
                remotes: tunnel.remotes.iter().copied().map(at).collect(),
                mtu,
                learning: tunnel.learning,
                directory: directory.clone(),
                storm: plan.traffic.storm,
                netns: None,
            };
            Box::new(VxlanPort::open(&config, registration, handed).map_err(text)?)
        }
        Attachment::Ivshmem { .. } | Attachment::User(_) => return Err("its peer is the fabric's own to start".into()),
    })
}

/// A port of [`attach`] comes back after a panic as one that was just added: at the same socket,
/// which its peer finds when it connects the next time, or with the same device. Opening takes a
/// few system calls of the worker's time.
fn restart_of(
    plan: &PortPlan,
    registration: Registration,
    shelf: Option<Shelf>,
    directory: Directory,
    say: Say,
) -> Restart {
    let plan = plan.clone();
    Box::new(move |_| attach(&plan, registration.clone(), shelf.clone(), None, &directory, &say))
}

#[cfg(test)]
mod tests {
    use super::super::injected::{Injected, InjectedPort};
    use super::*;
    use std::os::unix::net::UnixStream;
    use tombolo_switch::mac::MacSettings;
    use tombolo_switch::port::Carrier;
    use tombolo_testing::until;
    use tombolo_worker::thread::{WorkerConfig, WorkerThread};

    #[test]
    fn a_port_in_which_a_bug_showed_is_open_again_to_its_peers_next_connection() {
        let dir = tempfile::tempdir().unwrap();
        let thread = WorkerThread::start(&WorkerConfig { name: "again".into(), ..WorkerConfig::default() }).unwrap();
        let handle = thread.handle();
        let network = handle.add_network("lan", MacSettings::default()).unwrap();
        let sockets = ["vhost-user", "stream"].map(|name| dir.path().join(name));
        let attachments = [
            Attachment::VhostUser { socket: sockets[0].clone(), connect: false, queues: 1, mac: None },
            Attachment::Stream { socket: sockets[1].clone(), connect: false },
        ];
        for (attachment, socket) in attachments.into_iter().zip(&sockets) {
            let name = socket.file_name().unwrap().to_str().unwrap().to_string();
            let network_name = "lan".to_string();
            let plan = PortPlan {
                name,
                network: network_name,
                attachment,
                guard: None,
                traffic: file::Traffic::default(),
                mtu: 1500,
                machine: None,
            };
            let reserved = handle.reserve().unwrap();
            let (token, registration) = (reserved.token(), thread.registration(&reserved));
            // The real one has its socket, behind a bug.
            let say: Say = std::sync::Arc::new(|_| ());
            let told = Directory::default();
            let real = attach(&plan, registration.clone(), None, None, &told, &say).unwrap();
            let (kind, shows) = (real.kind(), Injected::Bug("injected"));
            let port = Box::new(InjectedPort { kind, link: Carrier::Down, shows, _holds: Some(real) });
            let first = UnixStream::connect(socket).unwrap();
            let restart = restart_of(&plan, registration, None, told, say);
            let counters =
                handle.add_lasting_port(reserved, network, &plan.name, port, restart, PortSettings::default()).unwrap();
            until("the port made again", || counters.restarts.get() == 1);
            let status = handle.status().unwrap();
            let port = status.ports.iter().find(|p| p.token == token).unwrap();
            // The injected one says nothing of itself.
            assert!(port.panic.is_none() && port.lasting && !port.details.is_empty(), "{port:?}");
            drop(first);
            let _again = UnixStream::connect(socket).unwrap();
            handle.remove_port(token).unwrap();
            assert!(UnixStream::connect(socket).is_err());
        }
        thread.stop().unwrap();
    }
}
