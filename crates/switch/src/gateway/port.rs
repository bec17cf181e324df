//! The gateway behind the switch's port trait, and the host's handle on it.
//!
//! ```text
//! host's threads                                    worker
//! GatewayHandle: push command, set flag, wake  -->  service: flag set? take the commands, run them
//! GatewayHandle: take queries, lease changes   <--  service, flush: leave them, notify
//! ```
//!
//! The port is never asleep in the sense of a ring. Its frames come from its own `transmit`, after
//! which it says so ([`Port::answers`]). Its handle wakes it whenever the handle leaves something.
//!
//! Both boxes are behind a mutex that is held for a move of a vector or for one entry per change,
//! never for work. The worker never copies the lease table. It leaves the changes, by address, and
//! the handle applies them to its own table when it is asked. Changes that are not fetched are
//! merged by address, so there are never more of them than addresses.
//!
//! Some state is shared by both ends and outlives the port: settings, members, counters, and the
//! leases as of the last flush. No answer leaves before the lease that it grants is in this state.
//! So after a panic in the old port, [`GatewayHandle::restart`] makes a port that knows every lease
//! a guest was told of. The old port's unfinished work is lost as if on a wire: frames not received
//! from it yet, offers, queries and TCP connections. Guests repeat them.

use super::{
    BootTable, ConfigError, Elsewhere, Entropy, Gateway, GatewayConfig, GatewayCounters, LeaseChange, LeaseRecord,
    LeaseStore, Member, Name6, Start, UpstreamQuery, check_member, packet, six,
};
use crate::Nanos;
use crate::detail::Details;
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Mac, Offload};
use crate::gateway::forward::{Forwarder, MAX_OUTSTANDING};
use crate::gateway::names::Members;
use crate::guard::Reservations;
use crate::port::{Caps, Carrier, Fault, Port, Sent};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Called to wake somebody, from any thread; must not block.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

enum Command {
    SetMember(Member),
    RemoveMember(String),
    Answer(u64, Vec<u8>),
    SetForward(bool),
    SetNames6(Vec<Name6>),
    SetBoot(BootTable),
    SetElsewhere(Arc<Elsewhere>),
    SetRouter6(Option<Mac>, u16),
    Withdraw,
}

#[derive(Default)]
struct Outbox {
    queries: Vec<UpstreamQuery>,
    /// What the handle has not applied to its table yet.
    leases: HashMap<IpAddr, LeaseChange>,
}

/// The control side's copy of the lease table. The worker's thread never waits for it, since others
/// copy it whole under its lock; only [`GatewayHandle::restart`] does, after a panic.
#[derive(Default)]
struct Table {
    leases: BTreeMap<IpAddr, LeaseRecord>,
    /// Changes that [`GatewayHandle::take_lease_changes`] has not handed out.
    pending: BTreeSet<IpAddr>,
}

impl Table {
    fn apply(&mut self, change: LeaseChange) {
        self.pending.insert(change.address());
        match change {
            LeaseChange::Bound(record) => drop(self.leases.insert(record.address, record)),
            LeaseChange::Freed(address) => drop(self.leases.remove(&address)),
        }
    }
}

struct GatewayExchange {
    commands: Mutex<Vec<Command>>,
    /// Set after a command was pushed; Release, with the Acquire swap of `service`.
    mail: AtomicBool,
    outbox: Mutex<Outbox>,
    /// Locked before `outbox`, where both are.
    table: Mutex<Table>,
    wake_port: Mutex<Option<Wake>>,
    wake_host: Mutex<Option<Wake>>,
    /// The control side's copy, by which a change is checked before it is sent.
    members: Mutex<Members>,
    /// As the gateway started, except for `forward`.
    config: GatewayConfig,
    /// What the handle said last.
    forward: AtomicBool,
    /// The router for IPv6 that the handle set last.
    router6: Mutex<Option<(Option<Mac>, u16)>>,
    boot: Mutex<BootTable>,
    /// The last that the handle set, and the one before: so that its memory is given up by the
    /// handle, and not by the worker.
    elsewhere: Mutex<(Arc<Elsewhere>, Arc<Elsewhere>)>,
    /// What the gateway's [`Gateway::learned6`] was when it was asked for last.
    learned: Mutex<Arc<Vec<(Ipv6Addr, Mac)>>>,
    /// It is asked for; a flag, so that no list of questions grows while the port is out of
    /// service.
    wants_learned: AtomicBool,
    /// The last advertisement has left.
    withdrawn: AtomicBool,
    start: Start,
    /// Times that the port was restarted.
    remade: AtomicU64,
    counters: Arc<GatewayCounters>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn call(wake: &Mutex<Option<Wake>>) {
    let wake = lock(wake).clone();
    if let Some(wake) = wake {
        wake();
    }
}

/// The host's end of a gateway, for any thread.
#[derive(Clone)]
pub struct GatewayHandle(Arc<GatewayExchange>);

impl GatewayHandle {
    /// Sets what wakes the gateway's port (its registration with the worker).
    pub fn set_port_waker(&self, wake: Wake) {
        *lock(&self.0.wake_port) = Some(wake);
        // What was left before there was a waker is seen now.
        call(&self.0.wake_port);
    }

    /// Sets what is called when there are queries or changed leases to take. It is called from the
    /// worker.
    pub fn set_event_waker(&self, wake: Wake) {
        *lock(&self.0.wake_host) = Some(wake);
        call(&self.0.wake_host);
    }

    fn send(&self, command: Command) {
        lock(&self.0.commands).push(command);
        self.0.mail.store(true, Ordering::Release);
        call(&self.0.wake_port);
    }

    /// As [`Gateway::set_member`]; takes effect within the worker's next turn.
    ///
    /// # Errors
    /// As for [`Gateway::set_member`].
    pub fn set_member(&self, member: Member) -> Result<(), ConfigError> {
        check_member(&self.0.config, &member)?;
        lock(&self.0.members).set(member.clone())?;
        self.send(Command::SetMember(member));
        Ok(())
    }

    /// Queues [`Gateway::remove_member`] for the worker. `false`: there is no such member.
    pub fn remove_member(&self, name: &str) -> bool {
        let found = lock(&self.0.members).remove(name).is_some();
        if found {
            self.send(Command::RemoveMember(name.to_owned()));
        }
        found
    }

    /// Queues [`Gateway::set_forward`] for the worker.
    pub fn set_forward(&self, forward: bool) {
        // Relaxed: read only when a port is restarted, which then also finds the command.
        self.0.forward.store(forward, Ordering::Relaxed);
        self.send(Command::SetForward(forward));
    }

    /// Queues [`Gateway::set_names6`] for the worker.
    pub fn set_names6(&self, names: Vec<Name6>) {
        lock(&self.0.members).set_names6(&names);
        self.send(Command::SetNames6(names));
    }

    /// Queues [`Gateway::set_boot`] for the worker.
    pub fn set_boot(&self, table: BootTable) {
        lock(&self.0.boot).clone_from(&table);
        self.send(Command::SetBoot(table));
    }

    /// Queues [`Gateway::set_elsewhere`] for the worker.
    pub fn set_elsewhere(&self, elsewhere: Elsewhere) {
        let elsewhere = Arc::new(elsewhere);
        let gone = {
            let (now, before) = &mut *lock(&self.0.elsewhere);
            let last = std::mem::replace(now, elsewhere.clone());
            std::mem::replace(before, last)
        };
        drop(gone);
        self.send(Command::SetElsewhere(elsewhere));
    }

    /// What was set last.
    pub fn elsewhere(&self) -> Arc<Elsewhere> {
        lock(&self.0.elsewhere).0.clone()
    }

    /// Queues [`Gateway::set_router6`] for the worker: an uplink for IPv6 came or went.
    pub fn set_router6(&self, router: Option<Mac>, secs: u16) {
        *lock(&self.0.router6) = Some((router, secs));
        self.send(Command::SetRouter6(router, secs));
    }

    /// Has the worker leave [`Gateway::learned6`] for [`GatewayHandle::learned6`] within its next
    /// turn.
    pub fn ask_learned6(&self) {
        // Relaxed: `mail` hands it over.
        self.0.wants_learned.store(true, Ordering::Relaxed);
        self.0.mail.store(true, Ordering::Release);
        call(&self.0.wake_port);
    }

    /// What the worker has left last. Never waits for it.
    pub fn learned6(&self) -> Arc<Vec<(Ipv6Addr, Mac)>> {
        lock(&self.0.learned).clone()
    }

    /// The name of the member with this MAC address.
    pub fn name_of(&self, mac: Mac) -> Option<String> {
        let members = lock(&self.0.members);
        members.of_mac(mac).map(|m| m.name.as_str()).or_else(|| members.name_of_mac6(mac)).map(str::to_owned)
    }

    /// Queues [`Gateway::withdraw`] for the worker; [`GatewayHandle::is_withdrawn`] tells when it
    /// is done.
    pub fn withdraw(&self) {
        self.send(Command::Withdraw);
    }

    /// Whether what was advertised has been withdrawn, and all answers have left; also if nothing
    /// ever was advertised.
    pub fn is_withdrawn(&self) -> bool {
        // Acquire, partner of the port's store: the frames were received before.
        self.0.config.ipv6.is_none() || self.0.withdrawn.load(Ordering::Acquire)
    }

    /// Queues [`Gateway::answer`] for the worker.
    pub fn answer(&self, id: u64, bytes: Vec<u8>) {
        self.send(Command::Answer(id, bytes));
    }

    /// Queries for the host's name servers since the last call.
    pub fn take_queries(&self) -> Vec<UpstreamQuery> {
        std::mem::take(&mut lock(&self.0.outbox).queries)
    }

    /// The table with all that the worker has left for it.
    fn table(&self) -> MutexGuard<'_, Table> {
        let mut table = lock(&self.0.table);
        let changes = std::mem::take(&mut lock(&self.0.outbox).leases);
        changes.into_values().for_each(|change| table.apply(change));
        table
    }

    /// What became of the leases that changed since the last call, one change for each address.
    pub fn take_lease_changes(&self) -> Vec<LeaseChange> {
        let mut table = self.table();
        let change = |address| match table.leases.get(&address) {
            Some(record) => LeaseChange::Bound(record.clone()),
            None => LeaseChange::Freed(address),
        };
        let changes = table.pending.iter().copied().map(change).collect();
        table.pending.clear();
        changes
    }

    /// A copy of the bound leases as of the worker's last turn, in the order of their addresses.
    pub fn leases(&self) -> LeaseStore {
        LeaseStore { leases: self.table().leases.values().cloned().collect() }
    }

    /// A port in place of one whose code panicked, with its leases, members, settings and counters;
    /// `now` is the worker's clock. Handles stay what they are.
    ///
    /// # Errors
    /// As for [`Gateway::new`]; not for settings that worked before.
    pub fn restart(&self, now: Nanos) -> Result<GatewayPort, ConfigError> {
        let shared = &self.0;
        let epoch = shared.remade.fetch_add(1, Ordering::Relaxed) + 1;
        let first = shared.start;
        let mut entropy = Entropy { key: first.entropy, counter: epoch << 40 };
        let mut key = [0; 16];
        key[..8].copy_from_slice(&entropy.next().to_le_bytes());
        key[8..].copy_from_slice(&entropy.next().to_le_bytes());
        // Leases are kept by the time of day as this clock tells it, so that one that was set
        // meanwhile moves none.
        let unix_secs = first.unix_secs + now.since(first.now).0 / Nanos::SECOND.0;
        let start = Start { now, unix_secs, entropy: key };
        let mut config = GatewayConfig { forward: shared.forward.load(Ordering::Relaxed), ..shared.config.clone() };
        if let (Some(ipv6), Some((router, secs))) = (&mut config.ipv6, *lock(&shared.router6)) {
            (ipv6.router, ipv6.router_secs) = (router, secs.min(9000));
        }
        let mut gateway = Gateway::new(config, &self.leases(), start)?;
        // Leases that ended meanwhile are not restored.
        let mut table = self.table();
        let gone: Vec<_> =
            table.leases.keys().copied().filter(|address| gateway.lease_at(*address).is_none()).collect();
        gone.into_iter().for_each(|address| table.apply(LeaseChange::Freed(address)));
        drop(table);
        gateway.members = lock(&shared.members).clone();
        gateway.reserves_anew = true;
        gateway.counters = shared.counters.clone();
        gateway.boot = lock(&shared.boot).clone();
        let elsewhere = lock(&shared.elsewhere).0.clone();
        gateway.set_elsewhere(elsewhere);
        gateway.forwarder = Forwarder::of_epoch(epoch);
        // No client waits for the answers any more.
        lock(&shared.outbox).queries.clear();
        Ok(GatewayPort::of(gateway, shared.clone()))
    }

    /// Readable at any time; the worker adds to them.
    pub fn counters(&self) -> &GatewayCounters {
        &self.0.counters
    }

    /// The gateway's settings, as it started.
    pub fn config(&self) -> &GatewayConfig {
        &self.0.config
    }
}

/// A gateway as a port of the switch.
pub struct GatewayPort {
    gateway: Gateway,
    shared: Arc<GatewayExchange>,
    now: Nanos,
    /// Frames that the current turn's batch looks into.
    sending: Vec<Vec<u8>>,
    scratch: Vec<u8>,
    /// When the worker was told to come back.
    promised: Option<Nanos>,
    /// Something was transmitted since the last flush.
    touched: bool,
    /// A timer was set that is due before `promised`.
    early: bool,
}

impl GatewayPort {
    /// The port for `gateway`, which has no member yet, and the handle on it.
    pub fn new(gateway: Gateway) -> (GatewayPort, GatewayHandle) {
        let shared = Arc::new(GatewayExchange {
            commands: Mutex::default(),
            mail: AtomicBool::new(false),
            outbox: Mutex::default(),
            table: Mutex::new(Table {
                leases: gateway.leases().leases.into_iter().map(|record| (record.address, record)).collect(),
                pending: BTreeSet::new(),
            }),
            wake_port: Mutex::default(),
            wake_host: Mutex::default(),
            members: Mutex::new(gateway.members.clone()),
            forward: AtomicBool::new(gateway.config().forward),
            router6: Mutex::default(),
            boot: Mutex::default(),
            elsewhere: Mutex::default(),
            learned: Mutex::default(),
            wants_learned: AtomicBool::new(false),
            withdrawn: AtomicBool::new(false),
            config: gateway.config().clone(),
            start: gateway.start,
            remade: AtomicU64::new(0),
            counters: gateway.counters().clone(),
        });
        let handle = GatewayHandle(shared.clone());
        (GatewayPort::of(gateway, shared), handle)
    }

    fn of(gateway: Gateway, shared: Arc<GatewayExchange>) -> GatewayPort {
        let now = gateway.start.now;
        GatewayPort {
            gateway,
            shared,
            now,
            sending: Vec::new(),
            scratch: Vec::new(),
            promised: None,
            touched: false,
            early: false,
        }
    }

    /// What a remote member's name resolves to.
    #[cfg(test)]
    pub(super) fn gateway_names(&self, name: &str) -> Vec<IpAddr> {
        self.gateway.resolve_elsewhere(name).into_iter().flatten().collect()
    }

    fn run_commands(&mut self) {
        for command in std::mem::take(&mut *lock(&self.shared.commands)) {
            match command {
                // The handle has checked it against the same members.
                Command::SetMember(member) => drop(self.gateway.set_member(member)),
                Command::RemoveMember(name) => drop(self.gateway.remove_member(&name)),
                Command::Answer(id, bytes) => self.gateway.answer(self.now, id, bytes),
                Command::SetForward(forward) => self.gateway.set_forward(forward),
                Command::SetNames6(names) => self.gateway.set_names6(&names),
                Command::SetBoot(table) => self.gateway.set_boot(table),
                Command::SetElsewhere(elsewhere) => self.gateway.set_elsewhere(elsewhere),
                Command::SetRouter6(router, secs) => self.gateway.set_router6(router, secs),
                Command::Withdraw => self.gateway.withdraw(),
            }
        }
    }

    /// Leaves what came up for the host.
    fn publish(&mut self) {
        let (mut queries, leases) = (self.gateway.take_queries(), self.gateway.take_lease_changes());
        if queries.is_empty() && leases.is_empty() {
            return;
        }
        {
            let mut outbox = lock(&self.shared.outbox);
            outbox.queries.append(&mut queries);
            // The host does not take them: the oldest have run out long ago.
            let excess = outbox.queries.len().saturating_sub(MAX_OUTSTANDING);
            outbox.queries.drain(..excess);
            outbox.leases.extend(leases.into_iter().map(|change| (change.address(), change)));
        }
        call(&self.shared.wake_host);
    }
}

impl Port for GatewayPort {
    fn kind(&self) -> &'static str {
        "gateway"
    }

    fn link(&self) -> Carrier {
        Carrier::Up
    }

    /// Partial sums are taken: the frame never left this machine. Segmented frames are not, there
    /// is no bulk here.
    fn caps(&self) -> Caps {
        Caps { checksum: true, ..Caps::plain(self.gateway.config().mtu.into()) }
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.now = now;
        if self.shared.mail.swap(false, Ordering::Acquire) {
            self.run_commands();
            self.gateway.revoke_learned();
            if self.shared.wants_learned.swap(false, Ordering::Relaxed) {
                *lock(&self.shared.learned) = Arc::new(self.gateway.learned6());
            }
        }
        self.promised = self.gateway.poll(now);
        self.early = false;
        self.publish();
        Ok(self.promised)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, _: &mut Drops) -> Result<usize, Fault> {
        self.sending.clear();
        self.sending.extend(std::iter::from_fn(|| self.gateway.output()).take(budget));
        for frame in &self.sending {
            // The sums are ours and nothing has carried the frame yet.
            let offload = Offload { checksum: crate::frame::Checksum::Valid, segmentation: None };
            batch.push(frame[..].into(), offload);
        }
        Ok(self.sending.len())
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.sending.clear();
        if self.gateway.queued() == 0 && self.gateway.has_withdrawn() {
            // Release, partner of the handle's load.
            self.shared.withdrawn.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        for index in which {
            let frame = &batch.frames()[usize::from(*index)];
            let destination = frame.destination();
            let is_group = packet::is_group(destination) && destination != [0xff; 6];
            if is_group && !(self.gateway.serves_ipv6() && six::is_for_gateway(frame.head())) {
                // Multicast, the bulk of what is flooded: not worth a copy.
                self.gateway.counters().ignored_frames.add(1);
            } else if frame.len() > self.caps().max_frame_bytes as usize {
                drops.count(Reason::TooLong, 1);
                continue;
            } else {
                let checksum = frame.offload.checksum;
                let done = if frame.len() == frame.head().len() {
                    self.gateway.input(self.now, frame.head(), checksum, batch.ingress())
                } else {
                    self.scratch.clear();
                    batch.append_to(frame, &mut self.scratch);
                    self.gateway.input(self.now, &self.scratch, checksum, batch.ingress())
                };
                self.touched = true;
                if let Err(reason) = done {
                    drops.count(reason, 1);
                    continue;
                }
            }
            sent.frames += 1;
            sent.bytes += frame.len() as u64;
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        if std::mem::take(&mut self.touched) {
            self.publish();
            let due = self.gateway.deadline(self.now);
            self.early |= due.is_some_and(|due| self.promised.is_none_or(|promised| due < promised));
        }
        Ok(())
    }

    fn answers(&self) -> bool {
        self.early || self.gateway.queued() > 0
    }

    fn take_reservations(&mut self) -> Option<Reservations> {
        self.gateway.take_reservations()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(self.answers() || self.shared.mail.load(Ordering::Acquire))
    }

    fn disarm(&mut self) {}

    /// There is no peer to wait for; what waits to be sent is let go.
    fn reset(&mut self, _: &Fault) {
        self.sending.clear();
        while self.gateway.output().is_some() {}
    }

    fn details(&self) -> Details {
        self.gateway.details()
    }
}
