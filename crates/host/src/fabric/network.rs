//! Workers and networks: a thread with its reactor, a switch in it, a gateway on it, its leases
//! kept.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tombolo_switch::Nanos;
use tombolo_switch::control::{NetworkId, PortSettings, WorkerSettings};
use tombolo_switch::gateway::{
    DhcpConfig, Gateway, GatewayConfig, GatewayHandle, GatewayPort, Ipv6Config, Member, Name6, Start,
};
use tombolo_switch::guard::{Guard, Protected, Roles, link_local};
use tombolo_switch::limit::Storm;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::policy::Labels;
use tombolo_switch::worker::Restart;
use tombolo_worker::thread::{WorkerConfig, WorkerThread};

use super::events::{GivenLeases, LeaseWatch};
use super::leases::{LeaseFiles, LeaseKeeper};
use super::{FabricError, Running, RunningWorker, Say};
use crate::file::{self, Mac, Uplink};
use crate::kernel;
use crate::plan;
use crate::resolver::{Resolver, Servers, Timing};
use crate::rundir::RunDirError;

/// For how long members may use the router after an advertisement, in seconds: three intervals
/// between those.
const ROUTER_SECS: u16 = 5400;
/// How long the withdrawal of a prefix is waited for.
const WITHDRAWAL: Duration = Duration::from_millis(200);

/// A network that runs.
pub(crate) struct Net {
    pub(crate) id: NetworkId,
    /// None in a network that joins a real one and asks for none.
    pub(crate) gateway: Option<GatewayHandle>,
    /// Writes the gateway's leases.
    leases: Option<LeaseKeeper>,
    /// When the gateway gave them.
    pub(super) given: GivenLeases,
    /// Names that the gateway has from us.
    names: Vec<String>,
    /// The router that the gateway was told to advertise, if it was told.
    router6: Option<Option<[u8; 6]>>,
    /// Addresses of IPv6 that the switch was told that this network has lost to another machine.
    pub(super) lost6: Vec<Ipv6Addr>,
    /// What serves the gateway's events.
    serving: Option<AbortHandle>,
}

impl Net {
    /// The gateway's counters by name.
    pub(crate) fn counters(&self) -> BTreeMap<String, u64> {
        let all = self.gateway.iter().flat_map(|g| g.counters().all());
        all.map(|(name, _, n)| (name.to_string(), n)).collect()
    }

    /// Has what the gateway advertises for IPv6 withdrawn; [`Net::finish_withdrawal`] waits for
    /// that.
    pub(crate) fn withdraw(&self) {
        self.gateway.iter().for_each(GatewayHandle::withdraw);
    }

    /// Waits a moment for the withdrawal to reach the ports: a worker's turn takes far less.
    pub(crate) fn finish_withdrawal(&self) {
        let until = Instant::now() + WITHDRAWAL;
        while self.gateway.as_ref().is_some_and(|g| !g.is_withdrawn()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has the last changes of leases written; [`Net::finish_leases`] waits for that.
    pub(crate) fn stop_leases(&self) {
        self.leases.iter().for_each(LeaseKeeper::stop);
    }

    /// Waits a little for the last changes of leases to be written.
    pub(crate) fn finish_leases(&self, say: &Say) {
        if self.leases.as_ref().is_some_and(|keeper| !keeper.finish()) {
            say("the last changes of leases are not written: the disk does not answer");
        }
    }
}

fn random() -> u64 {
    // The standard library seeds each RandomState from the system's randomness.
    RandomState::new().build_hasher().finish()
}

impl Running {
    pub(crate) fn start_worker(&mut self, spec: file::Worker) -> Result<(), FabricError> {
        let busy_poll = Nanos::MICRO.times(spec.busy_poll_us.into());
        let config = WorkerConfig {
            name: format!("tb-{}", spec.name),
            cpus: spec.cpu.into_iter().collect(),
            settings: WorkerSettings { budget: spec.budget as usize, busy_poll },
        };
        let thread = WorkerThread::start(&config)?;
        let worker = RunningWorker { spec, thread, started: Instant::now() };
        self.watch_worker(&worker);
        self.workers.push(worker);
        Ok(())
    }

    /// A file of the state folder. Without the folder, as on a full disk, what belongs there is in
    /// memory alone.
    fn state_file(&mut self, name: &str) -> Result<PathBuf, FabricError> {
        match self.dir().make_state() {
            Err(error @ RunDirError::Foreign { .. }) => return Err(error.into()),
            Err(error) => {
                let what = format!("leases do not outlive this start: {error}");
                (self.say)(&what);
                if !self.notes.contains(&what) {
                    self.notes.push(what);
                }
            }
            Ok(()) => {}
        }
        Ok(self.dir().state_path(name))
    }

    pub(crate) fn start_network(&mut self, spec: &file::Network) -> Result<(), FabricError> {
        let fail = |why: String| FabricError::Network { network: spec.name.clone(), why };
        let (_, worker) = self.worker_of(&spec.name).ok_or_else(|| fail("it has no worker".into()))?;
        let handle = worker.thread.handle().clone();
        let id = handle.add_network(&spec.name, MacSettings::default())?;
        let net = Net {
            id,
            gateway: None,
            leases: None,
            given: GivenLeases::default(),
            names: vec![],
            router6: None,
            lost6: vec![],
            serving: None,
        };
        self.networks.insert(spec.name.clone(), net);
        self.start_gateway(spec, id)
    }

    /// Starts the gateway of a network that has none yet, if the file asks for one.
    fn start_gateway(&mut self, spec: &file::Network, id: NetworkId) -> Result<(), FabricError> {
        let fail = |why: String| FabricError::Network { network: spec.name.clone(), why };
        let handed = self.store.take_state(format!("leases/{}", spec.name));
        let handed = handed.and_then(|(text, _)| serde_json::from_slice(&text).ok());
        let files = LeaseFiles::new(self.state_file(&format!("{}.leases.json", spec.name))?);
        let (_, worker) = self.worker_of(&spec.name).ok_or_else(|| fail("it has no worker".into()))?;
        let handle = worker.thread.handle().clone();
        handle.protect(id, self.protected(spec))?;
        handle.set_policy(id, self.spec.policy(&spec.name))?;
        let Some(address) = spec.gateway else { return Ok(()) };
        let config = GatewayConfig {
            mac: Mac::derived(&[&self.spec.name, &spec.name, "gateway"]).0,
            address,
            prefix: spec.subnet.prefix,
            mtu: spec.mtu,
            router: spec.router,
            dns: vec![],
            domain: spec.domain.clone(),
            name: "gateway".into(),
            forward: spec.uplink != Uplink::None,
            dhcp: spec.dhcp.map(|d| DhcpConfig { range: (d.from, d.to), lease_secs: d.lease_s, leases_per_port: None }),
            ipv6: spec.ipv6.map(Ipv6Config::new),
        };
        let stored = handed.unwrap_or_else(|| files.load(&self.say));
        let now = clock_gettime(ClockId::Monotonic);
        let mut entropy = [0; 16];
        entropy[..8].copy_from_slice(&random().to_le_bytes());
        entropy[8..].copy_from_slice(&random().to_le_bytes());
        let start = Start {
            now: Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64),
            unix_secs: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            entropy,
        };
        let gateway = Gateway::new(config, &stored, start).map_err(|e| fail(e.to_string()))?;
        let (port, gateway) = GatewayPort::new(gateway);
        let reserved = handle.reserve()?;
        let registration = worker.thread.registration(&reserved);
        gateway.set_port_waker(Arc::new(move || registration.wake()));
        let guard = Guard::new(&[gateway.config().mac], &[]).pinned().with_roles(Roles::ALL);
        // The gateway serves every member, whatever the policy.
        let labels = Labels { exempt: true, ..Labels::default() };
        let settings = PortSettings { guard, storm: Storm::OFF, labels, ..PortSettings::default() };
        let again = gateway.clone();
        let restart: Restart = Box::new(move |now| match again.restart(now) {
            Ok(port) => Ok(Box::new(port)),
            Err(error) => Err(error.to_string()),
        });
        handle.add_lasting_port(reserved, id, &format!("gateway-{}", spec.name), Box::new(port), restart, settings)?;
        let given = self.networks.get(&spec.name).map(|net| net.given.clone()).unwrap_or_default();
        let watch =
            LeaseWatch::new(&spec.name, self.events.clone(), &stored, given.clone()).telling(self.span.news.clone());
        let keeper = LeaseKeeper::start(files, gateway.clone(), self.say.clone(), watch)
            .map_err(|error| fail(format!("starting the thread that keeps leases: {error}")))?;
        let serving = Some(self.serve_gateway(spec, gateway.clone(), &keeper));
        let lost6 = self.networks.remove(&spec.name).map(|net| net.lost6).unwrap_or_default();
        let (gateway, leases) = (Some(gateway), Some(keeper));
        let net = Net { id, gateway, leases, given, names: vec![], router6: None, lost6, serving };
        self.networks.insert(spec.name.clone(), net);
        Ok(())
    }

    /// Takes the gateway off a network; its leases are on the disk afterwards.
    fn stop_gateway(&mut self, network: &str) {
        let Some(net) = self.networks.get_mut(network) else { return };
        net.stop_leases();
        net.finish_leases(&self.say);
        net.serving.take().into_iter().for_each(|task| task.abort());
        (net.gateway, net.leases, net.names, net.router6) = (None, None, vec![], None);
        let port = format!("gateway-{network}");
        let Some((_, worker)) = self.worker_of(network) else { return };
        let handle = worker.thread.handle();
        // A worker that has ended has dropped the port already.
        let ports = handle.status().map(|status| status.ports).unwrap_or_default();
        for found in ports.iter().filter(|p| *p.name == *port) {
            let _ = handle.remove_port(found.token);
        }
    }

    /// Gives a network that runs another gateway; leases stay, and the members' ports are not
    /// touched.
    pub(crate) fn restart_gateway(&mut self, spec: &file::Network) -> Result<(), FabricError> {
        let changed =
            |net: &Net| net.gateway.as_ref().and_then(|g| Some(g.config().ipv6.as_ref()?.prefix)) != spec.ipv6;
        // The gateway that comes speaks for itself, and cannot withdraw the router of before.
        let routed = |net: &Net| matches!(net.router6, Some(Some(_))) && spec.prefix_out().is_none();
        if let Some(net) = self.networks.get(&spec.name).filter(|net| changed(net) || routed(net)) {
            net.withdraw();
            net.finish_withdrawal();
        }
        self.stop_gateway(&spec.name);
        let Some(id) = self.networks.get(&spec.name).map(|net| net.id) else { return Ok(()) };
        self.start_gateway(spec, id)
    }

    /// Takes a network down that has no ports but its gateway.
    pub(crate) fn stop_network(&mut self, network: &str) -> Result<(), FabricError> {
        self.stop_gateway(network);
        let Some(id) = self.networks.get(network).map(|net| net.id) else { return Ok(()) };
        if let Some((_, worker)) = self.worker_of(network) {
            worker.thread.handle().remove_network(id)?;
        }
        self.networks.remove(network);
        Ok(())
    }

    /// The addresses of the gateway and the router, which no other port may claim: IPv4, and the
    /// IPv6 ones that their MACs give.
    fn protected(&self, spec: &file::Network) -> Protected {
        let link_local_of =
            |role: &str| IpAddr::from(link_local(&Mac::derived(&[&self.spec.name, &spec.name, role]).0));
        let six = spec.ipv6.map(|prefix| IpAddr::from(Ipv6Config::new(prefix).address()));
        let gateway = spec.gateway.into_iter().flat_map(|ip| [IpAddr::from(ip), link_local_of("gateway")]).chain(six);
        let router = spec.router.into_iter().flat_map(|ip| [IpAddr::from(ip), link_local_of("router")]);
        let router = router.chain(spec.router6().map(IpAddr::from));
        Protected::new(&gateway.chain(router).collect::<Vec<_>>()).with_prefix6(spec.ipv6)
    }

    /// Has each gateway advertise the router as the way out for IPv6, where there is one now.
    pub(crate) fn settle_routers6(&mut self) {
        self.uplinks.watch_routes6(&self.spec, &self.me);
        for spec in &self.spec.networks {
            let Some(net) = self.networks.get_mut(&spec.name) else { continue };
            let Some(gateway) = &net.gateway else { continue };
            let uplink = self.ports.get(&plan::uplink_name(&spec.name));
            let leads_out = uplink.is_some_and(|uplink| match spec.uplink {
                Uplink::Kernel => kernel::leads_out6(spec),
                Uplink::User => uplink.leads_out6(),
                Uplink::None | Uplink::Bridge { .. } => false,
            });
            let own = Mac::derived(&[&self.spec.name, &spec.name, "router"]).0;
            let router = leads_out.then_some(own);
            // A gateway that is made again is told again.
            if net.router6 != Some(router) {
                if net.router6.is_none() && router.is_none() {
                    // A daemon before this one may have advertised it and gone without a word:
                    // withdrawn in its name.
                    gateway.set_router6(Some(own), 0);
                }
                gateway.set_router6(router, if leads_out { ROUTER_SECS } else { 0 });
                net.router6 = Some(router);
            }
        }
    }

    /// Takes what the gateway leaves for the host: changed leases to their keeper, queries to the
    /// name servers.
    fn serve_gateway(&self, spec: &file::Network, gateway: GatewayHandle, keeper: &LeaseKeeper) -> AbortHandle {
        let news = Arc::new(Notify::new());
        let (doorbell, wake_keeper) = (news.clone(), keeper.waker());
        gateway.set_event_waker(Arc::new(move || {
            doorbell.notify_one();
            wake_keeper();
        }));
        let me = self.me.clone();
        let mut resolver = Resolver::new(Servers::or_host(spec.dns.clone()), Timing::default());
        let serving = tokio::spawn(async move {
            loop {
                news.notified().await;
                // The fabric has gone, and the gateway with it.
                if me.strong_count() == 0 {
                    return;
                }
                resolver.serve(&gateway);
            }
        });
        serving.abort_handle()
    }

    /// Tells each gateway the members that the file names.
    pub(crate) fn update_names(&mut self) {
        let mut members: Vec<(String, Member)> = Vec::new();
        for (network, mac, ip, name) in self.spec.addresses() {
            let member = Member { name: name.into(), mac: mac.map(|m| m.0), address: Some(ip) };
            members.push((network.into(), member));
        }
        for (network, net) in &mut self.networks {
            let Some(gateway) = &net.gateway else { continue };
            for name in std::mem::take(&mut net.names) {
                if !members.iter().any(|(n, m)| n == network && m.name == name) {
                    gateway.remove_member(&name);
                }
            }
            for (_, member) in members.iter().filter(|(n, _)| n == network) {
                match gateway.set_member(member.clone()) {
                    Ok(()) => net.names.push(member.name.clone()),
                    Err(error) => (self.say)(&format!("{}: {error}", member.name)),
                }
            }
            gateway.set_boot(self.spec.network(network).map(|n| self.spec.boots(n)).unwrap_or_default());
            let ours = |all: Vec<Ipv6Addr>| match &gateway.config().ipv6 {
                Some(six) => all.into_iter().filter(|address| six.holds(*address)).collect(),
                None => vec![],
            };
            let names = self.spec.addresses6(network).into_iter();
            gateway.set_names6(
                names.map(|(name, mac, all)| Name6 { name, mac: mac.map(|mac| mac.0), addresses: ours(all) }).collect(),
            );
        }
        self.uplinks.settle_fixed6(&self.spec, &self.say);
        self.settle_span();
    }
}
