//! The control side of a worker: what other threads may ask of it.
//!
//! A [`WorkerHandle`] sends commands through a queue and wakes the worker. The worker runs them
//! between two turns of its ports, and the call returns when the command is done. So an answer
//! waits for one turn at most, however many ports are busy. Nothing in a frame's path takes a lock,
//! and a command sees a worker at rest. Calls are for control threads. A port must never call its
//! own worker's handle, because the call would wait for itself.

use crate::Nanos;
use crate::capture::{self, Capture, CaptureSettings};
use crate::class::Marking;
use crate::counters::{Counter, PortCounters};
use crate::detail::Details;
use crate::frame::Mac;
use crate::guard::{Guard, Protected};
use crate::limit::{Rates, Storm};
use crate::mac::{Address, MacEntry, MacSettings, MacStats, Tick};
use crate::network::Network;
use crate::policy::{self, Labels};
use crate::port::{Caps, Carrier, HandOver, Port, RingFill};
use crate::vlan::Membership;
use crate::wait::Token;
use crate::worker::{Core, FaultRecord, MAX_BUDGET, NetworkSlot, PortSlot, Restart};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) type Command = Box<dyn FnOnce(&mut Core) + Send>;

/// Settings of a worker; all can be changed while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerSettings {
    /// Frames that a port may give in one turn, at most 65,535.
    pub budget: usize,
    /// How long a port is polled on after its last frame before it sleeps.
    pub busy_poll: Nanos,
}

impl Default for WorkerSettings {
    fn default() -> Self {
        WorkerSettings { budget: 64, busy_poll: Nanos(0) }
    }
}

/// Names a network of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkId(pub u16);

/// What a network's owner decides about one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSettings {
    /// What it may claim to be.
    pub guard: Guard,
    /// MAC addresses that may be learned behind it; `None` for the network's limit.
    pub mac_limit: Option<u32>,
    /// What it may flood.
    pub storm: Storm,
    /// What it may carry.
    pub rates: Rates,
    /// What the network's policy knows of it.
    pub labels: Labels,
    /// Its VLANs; see [`crate::network::Network::set_vlans`].
    pub vlans: Option<Membership>,
    /// By what its frames get their class.
    pub marking: Marking,
}

/// Why a worker did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ControlError {
    /// The worker's thread has ended.
    #[error("the switch worker has ended; restart the fabric")]
    Gone,
    #[error("the worker has no network number {}; it was removed, or belongs to another worker", .0.0)]
    NoSuchNetwork(NetworkId),
    #[error("the worker has no port number {}; it was removed, or belongs to another worker", .0.0)]
    NoSuchPort(Token),
    /// The network still has ports.
    #[error("network {name} still has {ports} ports; remove them first")]
    NetworkInUse { name: String, ports: usize },
    /// Every token is in use.
    #[error("a worker holds at most 65535 ports, and all are in use; start another worker")]
    TooManyPorts,
    /// Every network number is in use.
    #[error("a worker holds at most 65535 networks, and all are in use; start another worker")]
    TooManyNetworks,
    /// A token that another worker gave.
    #[error("port {0} was given a token that another worker reserved; reserve it at the worker that gets the port")]
    ForeignToken(String),
    /// A budget of 0 or beyond 65,535.
    #[error("a budget of {0} frames per turn was asked for; expected 1 to 65535")]
    BadBudget(usize),
    /// Some addresses of a guard belong to others.
    #[error("{0} source addresses of the guard are pinned to other ports; the others are in force")]
    PinnedElsewhere(usize),
}

/// What the loop of a worker counts. One writer, any number of readers.
#[derive(Debug, Default)]
pub struct LoopCounters {
    /// Rounds in which at least one port had a turn.
    pub rounds: Counter,
    /// Times that the worker slept until it was woken or a timer ran out.
    pub sleeps: Counter,
    /// Times that it asked for wake-ups without sleeping.
    pub polls: Counter,
    /// Nanoseconds slept; the rest of its time was work.
    pub slept_ns: Counter,
}

/// A port as the worker sees it.
#[derive(Clone, Debug)]
pub struct PortStatus {
    /// Names the port in control commands.
    pub token: Token,
    /// As given when the port was added.
    pub name: Arc<str>,
    /// The network that it is a member of.
    pub network: NetworkId,
    /// Kind of attachment, such as "vhost-user" or "tap".
    pub kind: &'static str,
    /// Whether frames flow between port and peer.
    pub link: Carrier,
    /// What it takes; `None` where its code panicked.
    pub caps: Option<Caps>,
    /// Facts of its kind.
    pub details: Details,
    /// How full its rings are, where it tells.
    pub fill: Option<RingFill>,
    /// Source addresses that it may use.
    pub guard: Guard,
    /// What it may flood.
    pub storm: Storm,
    /// What it may carry.
    pub rates: Rates,
    /// By what its frames get their class.
    pub marking: Marking,
    /// MAC addresses learned behind it.
    pub macs: u32,
    /// Whether it is being polled.
    pub active: bool,
    /// Its counters, which go on counting.
    pub counters: Arc<PortCounters>,
    /// The last fault; `counters.faults` says how many.
    pub last_fault: Option<FaultRecord>,
    /// The text of a panic in its code, while that keeps it out of service; `counters.restarts`
    /// says how often it came back from one.
    pub panic: Option<String>,
    /// Whether it comes back from a panic by itself.
    pub lasting: bool,
}

/// A network as the worker sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkStatus {
    /// Names the network in control commands.
    pub id: NetworkId,
    /// As in the fabric file.
    pub name: Arc<str>,
    /// Tokens of the member ports.
    pub ports: Vec<Token>,
    /// MAC addresses that the table holds now.
    pub macs: usize,
    /// What became of addresses.
    pub mac_stats: MacStats,
    /// Limits of the table.
    pub mac_settings: MacSettings,
    /// Copies of frames on their way to a destination.
    pub copies: u64,
    /// Frames flooded because no port was known to have the address.
    pub flooded_unknown: u64,
    /// Frames flooded because of a group address.
    pub flooded_group: u64,
    /// What its members may exchange.
    pub policy: policy::Settings,
    /// What the policy has counted.
    pub policy_counts: policy::Counts,
}

/// A worker at one instant.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// The instant, by the worker's clock.
    pub now: Nanos,
    /// When it began; what of the time since then was not slept was work.
    pub started: Nanos,
    /// Batch size and busy polling.
    pub settings: WorkerSettings,
    /// Turns, sleeps and frames; shared with the running loop.
    pub counters: Arc<LoopCounters>,
    /// Networks that this worker forwards for.
    pub networks: Vec<NetworkStatus>,
    /// Its ports, by token.
    pub ports: Vec<PortStatus>,
}

#[derive(Debug, Default)]
struct Tokens {
    free: Vec<u16>,
    next: u16,
}

/// A token that belongs to no other port until this is dropped. The port's wake-ups are registered
/// under it before the port is made. Then both go to [`WorkerHandle::add_port`].
#[derive(Debug)]
pub struct Reserved {
    token: Token,
    tokens: Arc<Mutex<Tokens>>,
}

impl Reserved {
    /// Names the port once it is added.
    pub fn token(&self) -> Token {
        self.token
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.token.0 as u16);
    }
}

struct HandleInner {
    commands: Sender<Command>,
    wake: Box<dyn Fn() + Send + Sync>,
    tokens: Arc<Mutex<Tokens>>,
    counters: Arc<LoopCounters>,
}

impl Drop for HandleInner {
    /// No handle can send requests to the worker any more, so it ends.
    fn drop(&mut self) {
        let _ = self.commands.send(Box::new(|core| core.stopped = true));
        (self.wake)();
    }
}

/// A paused worker, and the state of its ports.
#[derive(Debug)]
pub struct Paused {
    /// The ports that can be continued by another process, by name.
    pub ports: Vec<(Arc<str>, HandOver)>,
    /// What each network has learned: its name, and addresses with the names of their ports.
    pub macs: Learned,
    /// The worker goes on when this is dropped.
    _go_on: Sender<()>,
}

/// The control side of a worker; clones share it. When the last one is dropped, the worker ends.
#[derive(Clone)]
pub struct WorkerHandle(Arc<HandleInner>);

impl WorkerHandle {
    pub(crate) fn new(
        wake: impl Fn() + Send + Sync + 'static,
        counters: Arc<LoopCounters>,
    ) -> (WorkerHandle, Receiver<Command>) {
        let (commands, receiver) = mpsc::channel();
        let tokens = Arc::new(Mutex::new(Tokens::default()));
        (WorkerHandle(Arc::new(HandleInner { commands, wake: Box::new(wake), tokens, counters })), receiver)
    }

    /// Has the worker do `command` and waits for what it returns.
    fn call<T: Send + 'static>(
        &self,
        command: impl FnOnce(&mut Core) -> T + Send + 'static,
    ) -> Result<T, ControlError> {
        let (reply, result) = mpsc::sync_channel(1);
        let command = Box::new(move |core: &mut Core| {
            // The caller waits, so this cannot fail unless its thread died.
            let _ = reply.send(command(core));
        });
        self.0.commands.send(command).map_err(|_| ControlError::Gone)?;
        (self.0.wake)();
        result.recv().map_err(|_| ControlError::Gone)
    }

    /// A token for a port that is about to be made.
    ///
    /// # Errors
    /// [`ControlError::TooManyPorts`].
    pub fn reserve(&self) -> Result<Reserved, ControlError> {
        let mut tokens = self.0.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match tokens.free.pop() {
            Some(index) => index,
            None => {
                let index = tokens.next;
                tokens.next = index.checked_add(1).ok_or(ControlError::TooManyPorts)?;
                index
            }
        };
        Ok(Reserved { token: Token(index.into()), tokens: self.0.tokens.clone() })
    }

    /// Adds a network without ports.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::TooManyNetworks`].
    pub fn add_network(&self, name: &str, macs: MacSettings) -> Result<NetworkId, ControlError> {
        let name: Arc<str> = name.into();
        self.call(move |core| {
            let free = core.networks.iter().position(Option::is_none).unwrap_or(core.networks.len());
            let id = u16::try_from(free).map_err(|_| ControlError::TooManyNetworks)?;
            let network = Network::new(macs, core.seed.wrapping_add(id.into()));
            let slot = Some(NetworkSlot { name, network });
            match core.networks.get_mut(free) {
                Some(place) => *place = slot,
                None => core.networks.push(slot),
            }
            Ok(NetworkId(id))
        })?
    }

    /// Sets the addresses of a network that only ports with the role of the gateway may use.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn protect(&self, id: NetworkId, protected: Protected) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            slot.network.protect(protected);
            Ok(())
        })?
    }

    /// Sets the IPv6 addresses that this network has lost to another machine: guards that learn
    /// forget them, and let no frame from them pass.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn lose(&self, id: NetworkId, addresses: Vec<std::net::Ipv6Addr>) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            slot.network.lose(&addresses);
            Ok(())
        })?
    }

    /// Sets what the members of a network may exchange, from the next frame on. Connections that
    /// exist are judged again.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn set_policy(&self, id: NetworkId, settings: policy::Settings) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            slot.network.set_policy(settings);
            Ok(())
        })?
    }

    /// Sets what the policy of its network knows of a port.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn set_labels(&self, token: Token, labels: Labels) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.slots.get(token.0 as usize).and_then(Option::as_ref);
            let id = slot.ok_or(ControlError::NoSuchPort(token))?.network;
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            network.network.set_labels(token.0 as u16, labels);
            Ok(())
        })?
    }

    /// Sets the VLANs of a port; see [`Network::set_vlans`].
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn set_vlans(&self, token: Token, membership: Option<Membership>) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.slots.get(token.0 as usize).and_then(Option::as_ref);
            let id = slot.ok_or(ControlError::NoSuchPort(token))?.network;
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            network.network.set_vlans(token.0 as u16, membership);
            Ok(())
        })?
    }

    /// Removes a network that has no ports.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`], [`ControlError::NetworkInUse`].
    pub fn remove_network(&self, id: NetworkId) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            let ports = slot.network.members().len();
            if ports != 0 {
                return Err(ControlError::NetworkInUse { name: slot.name.to_string(), ports });
            }
            core.networks[id.0 as usize] = None;
            Ok(())
        })?
    }

    /// Adds a port to a network, under the token that it was made with. Its first turn follows at
    /// once. Returns its counters.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`], [`ControlError::ForeignToken`], and
    /// [`ControlError::PinnedElsewhere`] where its guard asks for addresses that others have; in
    /// each case the port was not added and is dropped.
    pub fn add_port(
        &self,
        reserved: Reserved,
        network: NetworkId,
        name: &str,
        port: Box<dyn Port>,
        settings: PortSettings,
    ) -> Result<Arc<PortCounters>, ControlError> {
        self.add(reserved, network, name, port, None, settings)
    }

    /// As [`WorkerHandle::add_port`], for a port that `restart` can restart after a panic in its
    /// code.
    ///
    /// # Errors
    /// As for [`WorkerHandle::add_port`].
    pub fn add_lasting_port(
        &self,
        reserved: Reserved,
        network: NetworkId,
        name: &str,
        port: Box<dyn Port>,
        restart: Restart,
        settings: PortSettings,
    ) -> Result<Arc<PortCounters>, ControlError> {
        self.add(reserved, network, name, port, Some(restart), settings)
    }

    fn add(
        &self,
        reserved: Reserved,
        network: NetworkId,
        name: &str,
        port: Box<dyn Port>,
        restart: Option<Restart>,
        settings: PortSettings,
    ) -> Result<Arc<PortCounters>, ControlError> {
        if !Arc::ptr_eq(&reserved.tokens, &self.0.tokens) {
            return Err(ControlError::ForeignToken(name.into()));
        }
        let mut slot = PortSlot::new(reserved, network, name, port, restart, settings.guard);
        slot.limit(settings.storm, settings.rates);
        slot.marking = settings.marking;
        // What could not be added comes back, to be dropped by the caller's thread.
        let refused = self.call(move |core| {
            let number = slot.token.token().0 as u16;
            let Some(NetworkSlot { network, .. }) = core.network(network) else {
                return Err((ControlError::NoSuchNetwork(network), slot));
            };
            network.join(number, settings.mac_limit);
            network.set_storm(number, settings.storm);
            network.set_labels(number, settings.labels);
            network.set_vlans(number, settings.vlans);
            let elsewhere = network.set_pins(number, &slot.guard);
            if elsewhere != 0 {
                network.leave(number);
                return Err((ControlError::PinnedElsewhere(elsewhere), slot));
            }
            let counters = slot.counters.clone();
            core.insert(slot);
            Ok(counters)
        })?;
        refused.map_err(|(error, _slot)| error)
    }

    /// Removes a port and forgets the addresses behind it; the port is dropped on the caller's
    /// thread.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn remove_port(&self, token: Token) -> Result<(), ControlError> {
        self.call(move |core| core.remove(token))?.map(drop).ok_or(ControlError::NoSuchPort(token))
    }

    /// Gives a port another guard, from its next turn on.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`]; [`ControlError::PinnedElsewhere`]
    /// where the guard is in force but some addresses could not be pinned.
    pub fn set_guard(&self, token: Token, guard: Guard) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.slots.get_mut(token.0 as usize).and_then(Option::as_mut);
            let slot = slot.ok_or(ControlError::NoSuchPort(token))?;
            slot.guard = guard.clone();
            let id = slot.network;
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            match network.network.set_pins(token.0 as u16, &guard) {
                0 => Ok(()),
                n => Err(ControlError::PinnedElsewhere(n)),
            }
        })?
    }

    /// Gives a port other limits, from its next turn on.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn set_limits(&self, token: Token, storm: Storm, rates: Rates) -> Result<(), ControlError> {
        self.call(move |core| {
            let slot = core.slots.get_mut(token.0 as usize).and_then(Option::as_mut);
            let slot = slot.ok_or(ControlError::NoSuchPort(token))?;
            slot.limit(storm, rates);
            let id = slot.network;
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            network.network.set_storm(token.0 as u16, storm);
            // A pause of the old rate is over.
            core.activate(token.0 as u16);
            Ok(())
        })?
    }

    /// Gives a port's frames other classes, from its next turn on. Those that wait keep theirs.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn set_marking(&self, token: Token, marking: Marking) -> Result<(), ControlError> {
        self.call(move |core| core.set_marking(token, marking))?.ok_or(ControlError::NoSuchPort(token))
    }

    /// Captures a port's frames from now on, until the capture or the port is dropped.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn capture(&self, token: Token, settings: CaptureSettings) -> Result<Capture, ControlError> {
        self.call(move |core| {
            let slot = core.slots.get_mut(token.0 as usize).and_then(Option::as_mut);
            let slot = slot.ok_or(ControlError::NoSuchPort(token))?;
            let (mut taps, capture) = capture::start([slot.name.clone()], settings);
            slot.taps.append(&mut taps);
            Ok(capture)
        })?
    }

    /// Captures each frame that enters a network once, where it enters, until the capture is
    /// dropped or the ports that there are now have gone.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn capture_network(&self, id: NetworkId, settings: CaptureSettings) -> Result<Capture, ControlError> {
        let settings = CaptureSettings { received: true, transmitted: false, ..settings };
        self.call(move |core| {
            core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            let own = |slot: &&mut Box<crate::worker::PortSlot>| slot.network == id;
            let names: Vec<_> = core.slots.iter_mut().flatten().filter(own).map(|slot| slot.name.clone()).collect();
            let (taps, capture) = capture::start(names, settings);
            for (slot, tap) in core.slots.iter_mut().flatten().filter(own).zip(taps) {
                slot.taps.push(tap);
            }
            Ok(capture)
        })?
    }

    /// Changes the settings, from the next turn on.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::BadBudget`].
    pub fn set(&self, settings: WorkerSettings) -> Result<(), ControlError> {
        if !(1..=MAX_BUDGET).contains(&settings.budget) {
            return Err(ControlError::BadBudget(settings.budget));
        }
        self.call(move |core| core.set(settings))
    }

    /// Stops the worker between two turns, and asks its ports for what another process needs to
    /// continue. The worker goes on when the [`Paused`] is dropped.
    ///
    /// # Errors
    /// [`ControlError::Gone`].
    pub fn pause(&self) -> Result<Paused, ControlError> {
        let (go_on, waits) = mpsc::channel::<()>();
        let (reply, result) = mpsc::sync_channel(1);
        let command = Box::new(move |core: &mut Core| {
            if reply.send(core.hand_over()).is_ok() {
                // Ends when the sender is dropped.
                let _ = waits.recv();
            }
        });
        self.0.commands.send(command).map_err(|_| ControlError::Gone)?;
        (self.0.wake)();
        let (ports, macs) = result.recv().map_err(|_| ControlError::Gone)?;
        Ok(Paused { ports, macs, _go_on: go_on })
    }

    /// Teaches a network addresses that another process had learned: address and the port behind
    /// which it is.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn teach(&self, id: NetworkId, addresses: Vec<(Mac, Token)>) -> Result<(), ControlError> {
        self.call(move |core| {
            let now = Tick::of(core.now);
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            for (mac, token) in addresses {
                let (address, port) = (Address::from(mac), token.0 as u16);
                if address.is_station() && network.network.members().contains(&port) {
                    // Beyond a limit it is learned from its next frame, or not.
                    let _ = network.network.macs.learn(now, address, port);
                }
            }
            Ok(())
        })?
    }

    /// The loop's counters, without asking the worker.
    pub fn counters(&self) -> &Arc<LoopCounters> {
        &self.0.counters
    }

    /// Everything about the worker, its networks and ports, at one instant.
    ///
    /// # Errors
    /// [`ControlError::Gone`].
    pub fn status(&self) -> Result<WorkerStatus, ControlError> {
        self.call(|core| core.status())
    }

    /// Calls `then` once as soon as frames flow through a port: at once where they do already. It
    /// is called on the worker's thread, so it must neither block nor panic. It takes the place of
    /// one that waits already; with the port it is dropped.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchPort`].
    pub fn when_up(&self, token: Token, then: impl FnOnce() + Send + 'static) -> Result<(), ControlError> {
        self.call(move |core| core.when_up(token, Box::new(then)))?.ok_or(ControlError::NoSuchPort(token))
    }

    /// Has `tell` called after each change of a port's link and each of its faults and restarts,
    /// from now on. It is called on the worker's thread, possibly often, so it must neither block
    /// nor panic, and leave all work to another thread. It takes the place of an earlier one.
    ///
    /// # Errors
    /// [`ControlError::Gone`].
    pub fn on_change(&self, tell: impl Fn() + Send + Sync + 'static) -> Result<(), ControlError> {
        self.call(move |core| core.set_on_change(Arc::new(tell)))
    }

    /// The MAC addresses of a network with the ports behind which they were seen, and their ages.
    ///
    /// # Errors
    /// [`ControlError::Gone`], [`ControlError::NoSuchNetwork`].
    pub fn macs(&self, id: NetworkId) -> Result<Vec<MacEntry>, ControlError> {
        self.call(move |core| {
            let now = core.now;
            let network = core.network(id).ok_or(ControlError::NoSuchNetwork(id))?;
            let age = network.network.macs.settings().age;
            // An idle worker forgets lazily; a listing does not show what is too old.
            Ok(network.network.macs.entries(now).filter(|e| e.age.is_none_or(|a| a <= age)).collect())
        })?
    }

    /// Ends the worker and waits until it has taken note; its ports are dropped on its thread.
    ///
    /// # Errors
    /// [`ControlError::Gone`] where it had ended already.
    pub fn stop(&self) -> Result<(), ControlError> {
        self.call(|core| core.stopped = true)
    }
}

/// By the network's name: addresses with the names of their ports.
pub type Learned = Vec<(Arc<str>, Vec<(Mac, Arc<str>)>)>;

impl Core {
    fn hand_over(&self) -> (Vec<(Arc<str>, HandOver)>, Learned) {
        let ports = self.slots.iter().flatten().filter_map(|slot| {
            let port = slot.port.as_ref()?;
            // A panic here must not end the worker; the port starts afresh in the other process.
            let state = catch_unwind(AssertUnwindSafe(|| port.hand_over())).ok()??;
            Some((slot.name.clone(), state))
        });
        let name = |port: u16| self.slots.get(usize::from(port))?.as_ref().map(|slot| slot.name.clone());
        let macs = self.networks.iter().flatten().map(|slot| {
            let learned = slot.network.macs.entries(self.now).filter(|entry| entry.age.is_some());
            (slot.name.clone(), learned.filter_map(|e| Some((e.address.bytes(), name(e.port)?))).collect())
        });
        (ports.collect(), macs.collect())
    }

    fn status(&mut self) -> WorkerStatus {
        let networks = self.networks.iter().enumerate().filter_map(|(id, slot)| {
            let NetworkSlot { name, network } = slot.as_ref()?;
            Some(NetworkStatus {
                id: NetworkId(id as u16),
                name: name.clone(),
                ports: network.members().iter().map(|p| Token((*p).into())).collect(),
                macs: network.macs.len(),
                mac_stats: network.macs.stats(),
                mac_settings: network.macs.settings(),
                copies: network.counters.copies.get(),
                flooded_unknown: network.counters.flooded_unknown.get(),
                flooded_group: network.counters.flooded_group.get(),
                policy: network.policy().clone(),
                policy_counts: network.policy_counts(),
            })
        });
        let ports = self.slots.iter().flatten().map(|slot| {
            let number = slot.token.token().0 as u16;
            let network = self.networks.get(slot.network.0 as usize).and_then(Option::as_ref);
            // A panic while a port describes itself must not end the worker either.
            let tells = |port: &dyn Port| (port.link(), port.caps(), port.details(), port.fill());
            let told = slot.port.as_ref().and_then(|port| catch_unwind(AssertUnwindSafe(|| tells(&**port))).ok());
            let (link, caps, details, fill) = match told {
                Some((link, caps, details, fill)) => (link, Some(caps), details, fill),
                None => (Carrier::Down, None, Vec::new(), None),
            };
            PortStatus {
                token: slot.token.token(),
                name: slot.name.clone(),
                network: slot.network,
                kind: slot.kind,
                link,
                caps,
                details,
                fill,
                guard: slot.guard.clone(),
                storm: slot.storm,
                rates: slot.rates,
                marking: slot.marking,
                macs: network.map_or(0, |n| n.network.macs.behind(number)),
                active: slot.active,
                counters: slot.counters.clone(),
                last_fault: slot.last_fault.clone(),
                panic: slot.panic.clone(),
                lasting: slot.restart.is_some(),
            }
        });
        WorkerStatus {
            now: self.now,
            started: self.started.unwrap_or(self.now),
            settings: self.settings,
            counters: self.counters.clone(),
            networks: networks.collect(),
            ports: ports.collect(),
        }
    }
}
