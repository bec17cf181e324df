//! What this machine does for networks with a kernel uplink: nftables' rules, forwarding by the
//! kernel, the host's ends of the taps, and the relay of forwards that the kernel does not
//! translate.
//!
//! Forwarding is a setting of the whole network namespace. The first fabric that needs it records
//! the values from before, and the last one that needs it restores them. Each change of the rules
//! is made under a lock that all fabrics of this machine share.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Weak;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tombolo_port::link::{Interface, LinkError as TapError};
use tombolo_switch::guard::link_local;

use super::{FabricError, Running, Say, dir_of};
use crate::file::{self, Fabric};
use crate::kernel::{self, KernelError};
use crate::plan::{self, Plan};
use crate::process::Liveness;
use crate::relay::{self, Relay};
use crate::rundir::{self, Owner, RunDir, Sysctl};

/// How often the host's routes are looked at.
const ROUTES_LOOK: Duration = Duration::from_secs(2);

/// What is in force for the kernel uplinks of a fabric.
#[derive(Default)]
pub(crate) struct Uplinks {
    /// Passes connections of forwards on that the kernel does not translate.
    relay: Option<Relay>,
    /// Forwards that are not in force, since their machines do not run.
    away: Vec<(file::Proto, SocketAddr)>,
    /// The fixed IPv6 addresses of members that the kernel's rules know.
    fixed6: kernel::Fixed6,
    /// Looks for routes out of this machine.
    routes6_watch: Option<AbortHandle>,
}

impl Uplinks {
    /// Puts the rules of `plan` in force, in one transaction, and has the kernel forward what they
    /// need. Without an uplink in it nothing is changed.
    fn put(&mut self, plan: &Plan, spec: &Fabric, dir: &mut RunDir) -> Result<(), FabricError> {
        if plan.kernel.is_empty() {
            return Ok(());
        }
        let _turn = rundir::shared_turn(&rundir::runtime_root()?)?;
        dir.record(|o| o.nft_table = Some(kernel::table(&spec.name)));
        let (forwarded, unset) = record_forwarding(&spec.name, dir, kernel::IP_FORWARD, kernel::forwarding()?)?;
        let routes6 = kernel::has_ipv6() && plan.kernel.iter().any(|uplink| uplink.network.router6().is_some());
        let (forwarded6, unset6) = match routes6 {
            true => record_forwarding(&spec.name, dir, kernel::FORWARD6, kernel::forwarding6()?)?,
            false => {
                restore_forwarding(&spec.name, dir, kernel::FORWARD6)?;
                (true, vec![])
            }
        };
        let networks = plan.kernel.iter().map(|uplink| &uplink.network);
        let fixed: kernel::Fixed6 = networks.filter_map(|network| fixed6(spec, network)).collect();
        kernel::apply(&spec.name, &plan.kernel, &fixed, [forwarded, forwarded6])?;
        self.fixed6 = fixed;
        if !unset.is_empty() {
            kernel::set(kernel::IP_FORWARD, "1")?;
        }
        if !unset6.is_empty() {
            kernel::forward6(&unset6)?;
        }
        Ok(())
    }

    /// Takes the rules away, and ends the forwarding that no other fabric needs.
    fn remove(&mut self, table: &str, fabric: &str, dir: &mut RunDir) -> Result<(), FabricError> {
        let _turn = rundir::shared_turn(&rundir::runtime_root()?)?;
        // It is off before the chain that bounds it is gone.
        restore_forwarding(fabric, dir, kernel::IP_FORWARD)?;
        restore_forwarding(fabric, dir, kernel::FORWARD6)?;
        kernel::remove(table)?;
        self.fixed6.clear();
        dir.record(|o| {
            o.nft_table = None;
            o.sysctls.clear();
        });
        Ok(())
    }

    /// Has the kernel's rules know the fixed IPv6 addresses of the members of now.
    pub(crate) fn settle_fixed6(&mut self, spec: &Fabric, say: &Say) {
        for (network, known) in &mut self.fixed6 {
            let Some((_, now)) = spec.network(network).and_then(|network| fixed6(spec, network)) else { continue };
            if now == *known {
                continue;
            }
            match kernel::set_fixed6(&spec.name, network, &now) {
                Ok(()) => *known = now,
                Err(error) => say(&format!("network {network}: {error}; connections to its new members are bounded")),
            }
        }
    }

    /// Looks every now and then whether this machine has a default route for IPv6, and so members
    /// have a way out. No daemon wakes for that in whose fabric no network depends on it.
    pub(super) fn watch_routes6(&mut self, spec: &Fabric, me: &Weak<Mutex<Running>>) {
        if !spec.networks.iter().any(kernel::follows_routes6) {
            if let Some(watch) = self.routes6_watch.take() {
                watch.abort();
            }
        } else if self.routes6_watch.is_none() {
            let me = me.clone();
            let watch = tokio::spawn(async move {
                loop {
                    tokio::time::sleep(ROUTES_LOOK).await;
                    let Some(running) = me.upgrade() else { return };
                    running.lock().await.settle_routers6();
                }
            });
            self.routes6_watch = Some(watch.abort_handle());
        }
    }

    /// Has the relay pass these routes on. Its thread runs only while there are some.
    fn set_relay(&mut self, routes: Vec<relay::Route>, say: &Say) {
        if routes.is_empty() {
            self.relay = None;
            return;
        }
        let relay = match self.relay.take().map_or_else(Relay::start, Ok) {
            Ok(relay) => self.relay.insert(relay),
            Err(error) => return say(&format!("forwards that change the address family: no thread: {error}")),
        };
        relay.set(routes);
    }

    /// Ends the relay and the connections that it passes on.
    pub(crate) fn end_relay(&mut self) {
        self.relay = None;
    }
}

/// Sysctls of the family of `key`, and the others.
fn by_family(sysctls: Vec<Sysctl>, key: &str) -> (Vec<Sysctl>, Vec<Sysctl>) {
    let family = &key[.."net/ipv4/".len()];
    sysctls.into_iter().partition(|sysctl| sysctl.key.starts_with(family))
}

/// Whether a fabric has the machine forward the family whose sysctl is `key`.
fn needs_forwarding(owner: &Owner, key: &str) -> bool {
    owner.nft_table.is_some() && owner.sysctls.iter().any(|sysctl| sysctl.key == key)
}

/// The table of a fabric, if it is in this network namespace. One that is not is of another
/// namespace, or of before a restart of the machine.
fn table_here(owner: &Owner) -> Result<Option<String>, KernelError> {
    match &owner.nft_table {
        Some(table) if kernel::has_table(table)? => Ok(Some(table.clone())),
        _ => Ok(None),
    }
}

/// Ends the forwarding of a family, whose sysctl `key` names it, unless another fabric needs it
/// still.
fn restore_forwarding(fabric: &str, dir: &mut RunDir, key: &str) -> Result<(), FabricError> {
    if !other_owners(fabric)?.iter().any(|owner| needs_forwarding(owner, key)) {
        let (own, _) = by_family(dir.owner().sysctls.clone(), key);
        kernel::restore(&own)?;
    }
    dir.record(|o| o.sysctls = by_family(std::mem::take(&mut o.sysctls), key).1);
    Ok(())
}

/// Records how a family was forwarded before there were fabrics. Returns whether it was, and what
/// is to be set still.
fn record_forwarding(
    fabric: &str,
    dir: &mut RunDir,
    key: &str,
    mut before: Vec<Sysctl>,
) -> Result<(bool, Vec<Sysctl>), FabricError> {
    let set = before.iter().any(|s| s.key == key && s.before == "1");
    // Where another fabric has set it, the values from before are those that it found: the last one
    // down restores them. The other one may have been killed: then it has not restored them yet.
    let was_off = |s: &Sysctl| s.key == key && s.before != "1";
    let killed = if set { killed_owners()? } else { vec![] };
    let others = other_owners(fabric)?.into_iter().chain(killed);
    if let Some(theirs) = others.into_iter().find(|o| o.sysctls.iter().any(was_off)) {
        before = by_family(theirs.sysctls, key).0;
    }
    dir.record(|o| {
        // Values recorded by a killed daemon are those from before the fabric.
        if !o.sysctls.iter().any(|s| s.key == key) {
            o.sysctls.extend(before.iter().cloned());
        }
    });
    let forwarded = !dir.owner().sysctls.iter().any(was_off);
    Ok((forwarded, if set { vec![] } else { before }))
}

/// The owner records of other fabrics whose daemons were killed, and whose rules are still here.
fn killed_owners() -> Result<Vec<Owner>, FabricError> {
    let mut found = vec![];
    for owner in rundir::left_owners(&rundir::runtime_root()?) {
        if !owner.sysctls.is_empty() && table_here(&owner)?.is_some() {
            found.push(owner);
        }
    }
    Ok(found)
}

/// The owner records of the fabrics that run, but for that of `fabric`. A killed one's lock may be
/// held by who looks after it.
fn other_owners(fabric: &str) -> Result<Vec<Owner>, FabricError> {
    let root = rundir::runtime_root()?;
    let others = rundir::running(&root).into_iter().filter(|n| n != fabric);
    let owners = others.filter_map(|name| rundir::read_owner(&root.join(name)));
    Ok(owners.filter(|owner| owner.liveness() != Liveness::Gone).collect())
}

/// Undoes the kernel uplinks that killed daemons of other fabrics left in this network namespace,
/// but for the forwarding of a family that a fabric which runs needs: whichever comes or goes next
/// looks again. Returns what was done, a sentence each.
fn undo_killed(fabric: &str, own: Option<&Owner>) -> Result<Vec<String>, FabricError> {
    let root = rundir::runtime_root()?;
    let is_left = |owner: &Owner| owner.nft_table.is_some();
    if rundir::left_owners(&root).iter().all(|owner| !is_left(owner)) {
        return Ok(vec![]);
    }
    let _turn = rundir::shared_turn(&root)?;
    let mut live = other_owners(fabric)?;
    live.extend(own.cloned());
    let mut done = vec![];
    for mut killed in rundir::Killed::all(&root, is_left) {
        let Some(table) = table_here(killed.owner())? else { continue };
        for key in [kernel::IP_FORWARD, kernel::FORWARD6] {
            if !live.iter().any(|owner| needs_forwarding(owner, key)) {
                let (theirs, rest) = by_family(killed.owner().sysctls.clone(), key);
                kernel::restore(&theirs)?;
                killed.record(|owner| owner.sysctls = rest)?;
            }
        }
        if killed.owner().sysctls.is_empty() {
            kernel::remove(&table)?;
            killed.record(|owner| owner.nft_table = None)?;
            let why = match killed.owner().left {
                true => "its daemon left it to the next one, which makes it again",
                false => "its daemon was killed",
            };
            done.push(format!("nftables table {table}: removed, and forwarding is as before it: {why}"));
        }
    }
    Ok(done)
}

/// The fixed IPv6 addresses of a network's members, if its rules have them. Containers come and go,
/// and are known by what they send.
fn fixed6(spec: &Fabric, network: &file::Network) -> Option<(String, BTreeSet<Ipv6Addr>)> {
    let base = kernel::bounded(network)?;
    let contained: BTreeSet<&str> = spec.contained().map(|member| member.name).collect();
    let members = spec.addresses6(&network.name).into_iter().filter(|(name, ..)| !contained.contains(&**name));
    let is_within = |ip: &Ipv6Addr| ip.segments()[..4] == base.segments()[..4];
    Some((network.name.clone(), members.flat_map(|(.., all)| all).filter(is_within).collect()))
}

/// Sets up the host's ends of the kernel uplinks of the fabric `name`. With `reset` the IPv6
/// addresses that they had go.
pub(crate) fn set_up_taps(name: &str, plan: &Plan, reset: bool) -> Result<(), FabricError> {
    for uplink in &plan.kernel {
        let router6 = uplink.network.router6();
        if reset || router6.is_some() {
            kernel::open_ipv6(&uplink.device, reset)?;
        }
        if let Some(router6) = router6.filter(|_| kernel::has_ipv6()) {
            let port = plan::uplink_name(&uplink.network.name);
            let failed = |error: TapError| FabricError::Port { port: port.clone(), why: error.to_string() };
            let tap = Interface::open(None, &uplink.device).map_err(failed)?;
            // The one that members are told as the router's, whichever this machine would choose by
            // itself.
            let own = link_local(&file::Mac::derived(&[name, &uplink.network.name, "router"]).0);
            [own, router6].into_iter().try_for_each(|ip| tap.add_address(ip.into(), 64)).map_err(failed)?;
            forwards("ipv6", &uplink.device)?;
        }
        kernel::set(&format!("net/ipv4/conf/{}/route_localnet", uplink.device), "1")?;
        forwards("ipv4", &uplink.device)?;
    }
    Ok(())
}

/// Has the kernel forward what comes from a tap, and look for its neighbours as a fabric's need it.
fn forwards(family: &str, device: &str) -> Result<(), KernelError> {
    kernel::set(&format!("net/{family}/conf/{device}/forwarding"), "1")?;
    kernel::NEIGHBOURS
        .iter()
        .try_for_each(|(key, value)| kernel::set(&format!("net/{family}/neigh/{device}/{key}"), value))
}

impl Running {
    /// The kernel's part of the uplinks of what runs.
    pub(super) fn kernel_plan(&self) -> Plan {
        let kernel = self.spec.networks.iter().filter_map(|n| plan::uplink(&self.spec, n).1).collect();
        Plan { ports: vec![], machines: vec![], kernel, links: vec![] }
    }

    /// Puts the kernel's rules of a plan in force, in one transaction.
    pub(super) fn kernel_rules(&mut self, plan: &Plan) -> Result<(), FabricError> {
        self.uplinks.put(plan, &self.spec, dir_of(&mut self.dir))
    }

    /// Puts the kernel's rules in force for what runs, in one transaction, or takes them away.
    pub(super) fn kernel_again(&mut self) -> Result<(), FabricError> {
        let (mut plan, away) = (self.kernel_plan(), self.forwards_away());
        for uplink in &mut plan.kernel {
            uplink.forwards.retain(|f| !away.contains(&(f.proto, f.listen)));
        }
        match self.dir().owner().nft_table.clone() {
            Some(table) if plan.kernel.is_empty() => self.undo_kernel(&table)?,
            _ => self.kernel_rules(&plan)?,
        }
        self.uplinks.away = away;
        Ok(())
    }

    pub(super) fn undo_kernel(&mut self, table: &str) -> Result<(), FabricError> {
        self.uplinks.remove(table, &self.spec.name, dir_of(&mut self.dir))
    }

    /// Undoes what killed daemons of other fabrics left; a failure is said.
    pub(super) fn undo_killed(&mut self) {
        match undo_killed(&self.spec.name, self.dir.as_ref().map(RunDir::owner)) {
            Ok(done) => done.into_iter().for_each(|what| self.took_over(what)),
            Err(error) => (self.say)(&format!("the kernel uplink of a fabric without a daemon: {error}")),
        }
    }

    /// Has the kernel and the relay forward what the file and the additions of now say.
    pub(super) fn forwards_again(&mut self) -> Result<(), FabricError> {
        self.kernel_again()?;
        self.settle_relay();
        Ok(())
    }

    /// Takes the forwards of machines that have ended out of force, and puts those of machines that
    /// run back.
    pub(crate) fn settle_away(&mut self) {
        // Without rules there is nothing to change: they are not made yet, or are gone already.
        let has_rules = self.dir.as_ref().is_some_and(|dir| dir.owner().nft_table.is_some() && !dir.owner().ending);
        if has_rules
            && self.forwards_away() != self.uplinks.away
            && let Err(error) = self.forwards_again()
        {
            (self.say)(&format!(
                "the forwards of machines that started or ended: {error}; the next change tries again"
            ));
        }
    }

    /// Has the relay pass on what the forwards of now need.
    pub(crate) fn settle_relay(&mut self) {
        let routes = self.spec.forwards.iter().filter_map(|f| self.relay_route(f)).collect();
        self.uplinks.set_relay(routes, &self.say);
    }

    /// The forward as the relay has it, where it has a part in it.
    fn relay_route(&self, forward: &file::Forward) -> Option<relay::Route> {
        let network = self.spec.network(&forward.network).filter(|n| n.uplink == file::Uplink::Kernel)?;
        if self.uplinks.away.contains(&(forward.proto, forward.listen)) {
            return None;
        }
        let to = SocketAddr::new(forward.ip, forward.port);
        let listen = forward.relayed().filter(|_| self.ports.contains_key(&plan::uplink_name(&network.name)))?;
        Some(relay::Route { proto: forward.proto, listen, to })
    }

    /// Why the relay does not do its part in a forward.
    pub(crate) fn relay_fault(&self, forward: &file::Forward) -> Option<String> {
        self.uplinks.relay.as_ref()?.fault(&self.relay_route(forward)?)
    }

    /// How the relay's part in a forward is used, where it has one.
    pub(crate) fn relay_use(&self, forward: &file::Forward) -> Option<relay::Use> {
        self.uplinks.relay.as_ref()?.used(&self.relay_route(forward)?)
    }

    /// The forwards of kernel uplinks that lead to machines which do not run: the host answers for
    /// itself at their ports, and nothing that takes a machine's address gets its connections.
    pub(crate) fn forwards_away(&self) -> Vec<(file::Proto, SocketAddr)> {
        let is_away = |f: &&file::Forward| self.is_of_kernel(f) && self.resting_target(f).is_some();
        self.spec.forwards.iter().filter(is_away).map(|f| (f.proto, f.listen)).collect()
    }

    fn is_of_kernel(&self, forward: &file::Forward) -> bool {
        self.spec.network(&forward.network).is_some_and(|network| network.uplink == file::Uplink::Kernel)
    }

    /// The machine that a forward leads to, if it does not run.
    fn resting_target<'f>(&self, forward: &'f file::Forward) -> Option<&'f str> {
        let file::Target::Name(name) = &forward.target else { return None };
        self.machines.get(name).filter(|machine| machine.pid.is_none()).map(|_| name.as_str())
    }

    /// Why a forward leads to nothing, where the machine that it leads to does not run.
    pub(crate) fn resting_fault(&self, forward: &file::Forward) -> Option<String> {
        let name = self.resting_target(forward)?;
        let what = if self.is_of_kernel(forward) { "connections are refused until it does" } else { "nothing answers" };
        Some(format!("{name} does not run: {what}"))
    }
}
