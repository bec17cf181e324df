//! The control thread of a port: it finds the vif in XenStore, goes through the handshake, and
//! hands the connection to the worker.
//!
//! It acts by the table in [`tombolo_ring::xen::bus`]. Every event has it read the few nodes that
//! matter and take one step, so an event that was lost or came twice changes nothing. It blocks on
//! XenStore and on the worker, never the worker on it.
//!
//! While there is no vif it watches the folder of all of them, and then only its own, so what other
//! guests do wakes it no more.
//!
//! The nodes of a vif are the toolstack's. What is written below them is written in a transaction
//! that looks whether they are still there, so nothing is left of a device that was removed
//! meanwhile.

use super::connection::{Connection, Features, Queue, Requested};
use super::exchange::{Exchange, Gone};
use super::hash::ControlRing;
use super::platform::Machine;
use super::store::{AskError, Store};
use super::{MAX_QUEUES, XenConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::time::{Duration, Instant};
use tombolo_ring::xen::XenError;
use tombolo_ring::xen::bus::{BackAction, BusState, back_step};
use tombolo_ring::xen::store::{Request, StoreError};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::frame::Mac;
use tombolo_switch::port::FaultKind;

/// Where a backend's nodes are, below the domain's own.
const FOLDER: &str = "backend/vif";
/// A node that each vif's backend has from the toolstack; without it the device is gone.
const GUARD: &str = "frontend";
/// Nodes of a frontend that it may change while it is connected.
const MULTICAST: &str = "request-multicast-control";
const HEADROOM: &str = "xdp-headroom";
const CHANGING: [&str; 3] = ["state", MULTICAST, HEADROOM];
/// Token of the watch of a frontend's folder. One watch is enough for all of its nodes, and a driver
/// domain may have few.
const FRONTEND: &str = "frontend";
/// How long XenStore is left alone when it refused something, or its connection failed.
const RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long what the backend before this one held is waited for. A process that is ending lets go
/// of an event channel only when its last descriptor is closed.
const HELD: Duration = Duration::from_secs(10);
/// How often it is looked whether that is over, or whether XenStore is less busy; and how long what
/// a frontend writes right after its state may take.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Steps that may follow each other at once. Where there were more, the event about what the last
/// one wrote leads to the next look.
const STEPS_PER_LOOK: usize = 3;
/// Looks that come one soon after the other and cost no pause: several handshakes.
const FREE_LOOKS: u32 = 40;
/// The first pause after them, which doubles, and the longest: a guest that flips its state for
/// ever costs a look a second.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// After so long without a look the next ones are free again. Longer than [`LAST_PAUSE`].
const CALM: Duration = Duration::from_secs(2);
/// Longest path in XenStore that a frontend may have: "/local/domain/65535/device/vif/4294967295".
const MAX_FRONT_BYTES: usize = 64;

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("{0}")]
    Ask(#[from] AskError),
    #[error("the port is gone")]
    Gone,
    /// What the backend before this one had is still held by its process, which is ending.
    #[error("the previous backend has not released the device yet")]
    Held,
}

impl From<Gone> for StepError {
    fn from(_: Gone) -> Self {
        StepError::Gone
    }
}

/// Why a frontend could not be connected.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("{0}")]
    Ask(#[from] AskError),
    #[error("the frontend did not write `{0}`, or no number")]
    Missing(String),
    #[error("the frontend does not set `{0}`, which is needed to serve it")]
    Unserved(&'static str),
    #[error("the frontend asks for {wanted} queues; at most {offered} are offered")]
    Queues { wanted: u32, offered: u32 },
    #[error("mapping the {ring}, grant {gref}: {source}")]
    Map { ring: String, gref: u32, source: Errno },
    #[error("binding event channel {port} of {of}: {source}")]
    Bind { of: String, port: u32, source: Errno },
    #[error("{of}: {source}")]
    Ring { of: String, source: XenError },
    #[error("the device files of Xen: {0}")]
    Device(Errno),
}

/// The vif that the port serves.
struct Vif {
    domain: u16,
    /// Below this domain's folder.
    back: String,
    /// Absolute.
    front: String,
    /// As it was written last.
    own: BusState,
    /// Why it was disconnected, if that was the frontend's doing.
    trouble: Option<String>,
    /// The frontend was found connected, or nearly, to the backend before this one; until when that
    /// one may hold what it had.
    held_until: Option<Instant>,
    /// The frontend is connected already, and is not to notice that its backend is another one.
    goes_on: bool,
    /// It was so when it was connected: what it asked the backend before for is not known.
    was_taken_over: bool,
    /// What the worker's connection does for it.
    requested: Requested,
}

/// How often events make the thread look.
#[derive(Default)]
struct LookBackoff {
    looks: u32,
    last: Option<Instant>,
}

impl LookBackoff {
    /// The pause that is due before the look that an event at `now` asks for.
    fn pause(&mut self, now: Instant) -> Option<Duration> {
        if self.last.replace(now).is_some_and(|last| now.saturating_duration_since(last) >= CALM) {
            self.looks = 0;
        }
        self.looks = self.looks.saturating_add(1);
        let over = self.looks.checked_sub(FREE_LOOKS + 1)?;
        Some(FIRST_PAUSE.saturating_mul(1 << over.min(16)).min(LAST_PAUSE))
    }
}

/// Runs until the port is gone.
pub(super) fn run(machine: &dyn Machine, config: &XenConfig, exchange: &Exchange) {
    let mut control = Control { machine, config, exchange, vif: None, backoff: LookBackoff::default() };
    while !exchange.is_closed() {
        match control.serve() {
            Ok(()) | Err(StepError::Gone | StepError::Held) => {}
            Err(StepError::Ask(error)) => {
                // Without XenStore nothing is known of the frontend; frames go on.
                exchange.say(match error {
                    AskError::Refused(error) => refusal(error),
                    error => format!("no XenStore: {error}"),
                });
                sleep(exchange.doorbell(), &RETRY);
            }
        }
    }
}

/// Waits for so long, or until the doorbell is rung.
fn sleep(doorbell: &Doorbell, time: &Timespec) {
    let _ = poll(&mut [PollFd::new(doorbell, PollFlags::IN)], Some(time));
    doorbell.take();
}

struct Control<'c> {
    machine: &'c dyn Machine,
    config: &'c XenConfig,
    exchange: &'c Exchange,
    vif: Option<Vif>,
    backoff: LookBackoff,
}

/// What the port says while XenStore refuses what it asks for.
fn refusal(error: StoreError) -> String {
    let then = match error {
        StoreError::Quota => {
            ". In dom0, `xenstore-control quota` shows the limits, `xenstore-control quota NUMBER` what the domain of that number \
             uses, and `xenstore-control quota set NAME VALUE` raises one"
        }
        StoreError::Access => {
            ". The vif's nodes are written by dom0 and by the domain that is its `backend`: see that line of its `vif`"
        }
        _ => "",
    };
    format!("XenStore refuses the port's request: {error}{then}. The port asks again every second")
}

/// Begins a watch, if it is not there from a look that failed later on.
fn watch(store: &mut Store, path: &str, token: &str) -> Result<(), AskError> {
    match store.ask(&Request::Watch(path, token)) {
        Ok(_) | Err(AskError::Refused(StoreError::Exists)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether an event is to be looked after. Of what a frontend writes only the nodes that it may
/// change are, and its folder itself, which goes with its domain.
fn counts(token: &str, path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    token != FRONTEND || CHANGING.contains(&name) || name.parse::<u32>().is_ok()
}

/// Ends a watch, if it is there.
fn unwatch(store: &mut Store, path: &str, token: &str) -> Result<(), AskError> {
    match store.ask(&Request::Unwatch(path, token)) {
        Err(error) if !error.is_refusal() => Err(error),
        _ => Ok(()),
    }
}

impl Vif {
    /// Watches what the toolstack and the guest change about it.
    fn watch(&self, store: &mut Store) -> Result<(), AskError> {
        watch(store, &self.back, "backend")?;
        watch(store, &self.front, FRONTEND)
    }

    /// Ends that. A watch does not end with its node.
    fn unwatch(&self, store: &mut Store) -> Result<(), AskError> {
        unwatch(store, &self.back, "backend")?;
        unwatch(store, &self.front, FRONTEND)
    }

    /// What the frontend asks for now.
    fn requested(&self, store: &mut Store) -> Result<Requested, AskError> {
        let mut number = |name: &str| store.number(&format!("{}/{name}", self.front));
        // One that was taken over has asked another backend for addresses, and will not ask again.
        let multicast = number(MULTICAST)?.is_some_and(|value| value != 0) && !self.was_taken_over;
        Ok(Requested::new(multicast, number(HEADROOM)?.unwrap_or(0)))
    }
}

impl Control<'_> {
    /// Over one connection to XenStore, until it fails or the port is gone.
    fn serve(&mut self) -> Result<(), StepError> {
        let stream = self.machine.store().map_err(AskError::from)?;
        let mut store = Store::hearing(stream, counts);
        match &self.vif {
            Some(vif) => vif.watch(&mut store)?,
            None => watch(&mut store, FOLDER, "backends")?,
        }
        while !self.exchange.is_closed() {
            store.take_events();
            match self.look(&mut store) {
                // No event tells when these are over.
                Err(StepError::Held | StepError::Ask(AskError::Refused(StoreError::Again))) => {
                    sleep(self.exchange.doorbell(), &LOOK);
                    continue;
                }
                // A node that vanished between two questions: the event about it is on its way.
                Err(StepError::Ask(AskError::Refused(StoreError::NoEntry))) => {}
                Err(StepError::Ask(AskError::Refused(error))) => {
                    self.exchange.say(refusal(error));
                    sleep(self.exchange.doorbell(), &RETRY);
                    continue;
                }
                other => other?,
            }
            store.wait(self.exchange.doorbell())?;
            if let Some(pause) = self.backoff.pause(Instant::now()) {
                sleep(self.exchange.doorbell(), &Timespec::try_from(pause).unwrap_or(RETRY));
            }
        }
        Ok(())
    }

    /// Finds the vif if there is none, and takes the steps that are due.
    fn look(&mut self, store: &mut Store) -> Result<(), StepError> {
        if let Some(vif) = &self.vif
            && store.text(&format!("{}/{GUARD}", vif.back))? != vif.front
        {
            // Before the other watches end, so that no vif comes unseen.
            watch(store, FOLDER, "backends")?;
            vif.unwatch(store)?;
            self.disconnect()?;
            self.vif = None;
            self.backoff = LookBackoff::default();
        }
        if self.vif.is_none()
            && let Some(vif) = self.find(store)?
        {
            if let Err(error) = vif.watch(store) {
                vif.unwatch(store)?;
                return Err(error.into());
            }
            unwatch(store, FOLDER, "backends")?;
            self.vif = Some(vif);
            self.backoff = LookBackoff::default();
        }
        for _ in 0..STEPS_PER_LOOK {
            if !self.step(store)? {
                break;
            }
        }
        Ok(())
    }

    /// The vif of the domain's name and device number. Where XenStore does not tell names, the one
    /// of the MAC and the device number.
    fn find(&self, store: &mut Store) -> Result<Option<Vif>, AskError> {
        let device = self.config.device.to_string();
        let mut is_nameless = false;
        for child in store.children(FOLDER)? {
            let Ok(domain) = child.parse::<u16>() else { continue };
            let back = format!("{FOLDER}/{domain}/{device}");
            let is_ours = match store.text(&format!("/local/domain/{domain}/name")) {
                Err(AskError::Refused(StoreError::Access)) => {
                    is_nameless = true;
                    let mac = store.text(&format!("{back}/mac"))?;
                    self.config.mac.is_some_and(|own| mac.eq_ignore_ascii_case(&mac_text(own)))
                }
                name => name? == self.config.domain,
            };
            if !is_ours {
                continue;
            }
            let front = store.text(&format!("{back}/{GUARD}"))?;
            // The path goes into further ones: it is where a domain of this number has its devices,
            // and nowhere else.
            let expected = format!("/local/domain/{domain}/");
            if !front.starts_with(&expected) || front.len() > MAX_FRONT_BYTES || front.contains("..") {
                continue;
            }
            let own = store.read(&format!("{back}/state"))?.map_or(BusState::Unknown, |text| BusState::parse(&text));
            // Connected was the backend before this one; what it had is to be connected again. One
            // that was about to write so has bound the channels already.
            let may_hold = own.has_rings() || own == BusState::InitWait;
            let held_until = may_hold.then(|| Instant::now() + HELD);
            let its_state = store.read(&format!("{front}/state"))?.map(|text| BusState::parse(&text));
            let goes_on = may_hold && matches!(its_state, Some(BusState::Connected | BusState::Reconfiguring));
            let own = if own.has_rings() { BusState::Initialising } else { own };
            let (trouble, was_taken_over, requested) = (None, false, Requested::default());
            return Ok(Some(Vif { domain, back, front, own, trouble, held_until, goes_on, was_taken_over, requested }));
        }
        self.exchange.say(if is_nameless && self.config.mac.is_none() {
            "waiting for the domain, whose name cannot be read here: the port needs the `mac` of its vif line".into()
        } else {
            "waiting for the domain".into()
        });
        Ok(None)
    }

    /// One step by the table; returns whether another one may follow.
    fn step(&mut self, store: &mut Store) -> Result<bool, StepError> {
        let Some(vif) = &mut self.vif else { return Ok(false) };
        if let Some((broken, fault)) = self.exchange.given_up() {
            drop(broken);
            match fault.kind {
                // Not the guest's doing: as another process would, this one attaches to the rings
                // where they stand.
                FaultKind::System if vif.own.has_rings() => {
                    (vif.own, vif.goes_on) = (BusState::Initialising, true);
                    vif.held_until = Some(Instant::now() + HELD);
                }
                _ if vif.own.has_rings() => {
                    vif.trouble = Some(format!("the frontend broke the protocol: {}", fault.detail));
                }
                _ => {}
            }
        }
        let front = store.read(&format!("{}/state", vif.front))?;
        let front = front.map_or(BusState::Unknown, |text| BusState::parse(&text));
        let online = store.text(&format!("{}/online", vif.back))? != "0";
        let mut step = back_step(vif.own, front, online);
        // A frontend that was refused has to close before it is tried again.
        if vif.trouble.is_some() {
            match front {
                BusState::Initialising | BusState::Closed | BusState::Unknown => vif.trouble = None,
                _ => {
                    step.action = BackAction::Wait;
                    step.next = BusState::Closing;
                }
            }
        }
        let changes = step.next != vif.own;
        if step.disconnect && (changes || step.action != BackAction::Wait) {
            drop(self.exchange.hand_over(None)?);
        }
        let Some(vif) = &mut self.vif else { return Ok(false) };
        let mut nodes = Vec::new();
        if changes {
            match step.action {
                BackAction::Advertise => {
                    vif.goes_on = false;
                    nodes = advertise(self.config);
                }
                BackAction::Connect => match connect(self.machine, self.config, self.exchange, store, vif) {
                    Ok(connection) => {
                        vif.requested = connection.requested();
                        drop(self.exchange.hand_over(Some(Box::new(connection)))?);
                        // Should the next write fail, the worker has had requests of this frontend.
                        vif.goes_on = true;
                    }
                    Err(ConnectError::Ask(error)) => return Err(error.into()),
                    Err(ConnectError::Bind { .. }) if vif.held_until.is_some_and(|until| Instant::now() < until) => {
                        return Err(StepError::Held);
                    }
                    Err(error) => {
                        vif.trouble = Some(error.to_string());
                        step.next = BusState::Closing;
                    }
                },
                BackAction::Wait | BackAction::Forget => {}
            }
        }
        let is_connected = vif.own.has_rings() || (changes && step.action == BackAction::Connect);
        if is_connected && step.next.has_rings() {
            let mut requested = vif.requested(store)?;
            if changes && step.next == BusState::Reconfigured && requested == vif.requested {
                // Linux's frontend writes its state first, and what it wants after it.
                sleep(self.exchange.doorbell(), &LOOK);
                requested = vif.requested(store)?;
            }
            if requested != vif.requested {
                self.exchange.change(requested)?;
                vif.requested = requested;
            }
        }
        if changes {
            // Now that all is done that the state promises.
            nodes.push(("state", step.next.text().to_owned()));
            store.write_below(&vif.back, GUARD, &nodes)?;
            // Only now: a write that failed is tried again with the next look.
            vif.own = step.next;
            if vif.own.has_rings() {
                (vif.held_until, vif.goes_on) = (None, false);
            }
        }
        let trouble = vif.trouble.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        self.exchange.say(format!("domain {}, {}{trouble}", vif.domain, vif.own));
        Ok(changes)
    }

    /// Releases rings and event channels.
    fn disconnect(&mut self) -> Result<(), StepError> {
        drop(self.exchange.given_up());
        drop(self.exchange.hand_over(None)?);
        Ok(())
    }
}

/// As libxl writes it.
fn mac_text([a, b, c, d, e, f]: Mac) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// What the backend offers.
fn advertise(config: &XenConfig) -> Vec<(&'static str, String)> {
    let mut nodes: Vec<_> = [
        ("feature-sg", "1"),
        ("feature-gso-tcpv4", "1"),
        ("feature-gso-tcpv6", "1"),
        ("feature-ipv6-csum-offload", "1"),
        ("feature-rx-copy", "1"),
        ("feature-rx-flip", "0"),
        ("feature-multicast-control", "1"),
        ("feature-dynamic-multicast-control", "1"),
        ("feature-xdp-headroom", "1"),
        ("feature-ctrl-ring", "1"),
        ("feature-split-event-channels", "1"),
    ]
    .map(|(name, value)| (name, value.to_owned()))
    .into();
    nodes.push(("multi-queue-max-queues", config.max_queues.to_string()));
    nodes.push(("mtu", config.mtu.to_string()));
    nodes
}

/// Reads what the frontend wrote, maps its rings, and binds its event channels. What was done is
/// undone where it fails.
fn connect(
    machine: &dyn Machine,
    config: &XenConfig,
    exchange: &Exchange,
    store: &mut Store,
    vif: &mut Vif,
) -> Result<Connection, ConnectError> {
    let mut flag = |name: &str, absent: bool| -> Result<bool, AskError> {
        Ok(store.number(&format!("{}/{name}", vif.front))?.map_or(absent, |value| value != 0))
    };
    for name in ["request-rx-copy", "feature-rx-notify"] {
        if !flag(name, false)? {
            return Err(ConnectError::Unserved(name));
        }
    }
    let features = Features {
        sg: flag("feature-sg", false)?,
        tso4: flag("feature-gso-tcpv4", false)?,
        tso6: flag("feature-gso-tcpv6", false)?,
        checksum: !flag("feature-no-csum-offload", false)? && flag("feature-ipv6-csum-offload", false)?,
    };
    vif.was_taken_over = vif.goes_on;
    let requested = vif.requested(store)?;
    let wanted = store.number(&format!("{}/multi-queue-num-queues", vif.front))?.unwrap_or(1);
    // What the one before offered may have been more.
    let offered = if vif.goes_on { MAX_QUEUES } else { config.max_queues };
    if !(1..=offered).contains(&wanted) {
        return Err(ConnectError::Queues { wanted, offered });
    }
    let guest = machine.guest(vif.domain).map_err(ConnectError::Device)?;
    let bind = |of: &str, port| guest.bind(port).map_err(|source| ConnectError::Bind { of: of.into(), port, source });
    let map = |ring: String, gref| guest.map(gref).map_err(|source| ConnectError::Map { ring, gref, source });
    let mut queues = Vec::new();
    for queue in 0..wanted {
        let folder = if wanted == 1 { vif.front.clone() } else { format!("{}/queue-{queue}", vif.front) };
        let mut number = |name: &str| -> Result<Option<u32>, AskError> { store.number(&format!("{folder}/{name}")) };
        let (tx_ref, rx_ref) = (number("tx-ring-ref")?, number("rx-ring-ref")?);
        let missing = |name: &str| ConnectError::Missing(format!("{folder}/{name}"));
        let tx_ref = tx_ref.ok_or_else(|| missing("tx-ring-ref"))?;
        let rx_ref = rx_ref.ok_or_else(|| missing("rx-ring-ref"))?;
        let split = (number("event-channel-tx")?, number("event-channel-rx")?);
        let shared = number("event-channel")?;
        let of = format!("queue {queue}");
        let ports = match (split, shared) {
            ((Some(tx), Some(rx)), _) => [bind(&of, tx)?, bind(&of, rx)?],
            (_, Some(both)) => [bind(&of, both)?; 2],
            _ => return Err(missing("event-channel")),
        };
        let pages = [map(format!("transmit ring of {of}"), tx_ref)?, map(format!("receive ring of {of}"), rx_ref)?];
        queues.push(Queue::attach(pages, ports).map_err(|source| ConnectError::Ring { of, source })?);
    }
    let mut number = |name: &str| store.number(&format!("{}/{name}", vif.front));
    let control = match (number("ctrl-ring-ref")?, number("event-channel-ctrl")?) {
        (None, _) => None,
        (Some(_), None) => return Err(ConnectError::Missing(format!("{}/event-channel-ctrl", vif.front))),
        (Some(gref), Some(port)) => {
            let of = "the control ring";
            let (port, page) = (bind(of, port)?, map("control ring".into(), gref)?);
            Some(ControlRing::attach(page, port).map_err(|source| ConnectError::Ring { of: of.into(), source })?)
        }
    };
    let watch = exchange.registration().watch(guest.events()).map_err(ConnectError::Device)?;
    Ok(Connection::new(guest, vif.domain, (queues, control), (features, requested), config.mtu, watch))
}

/// How long the end of a port waits for that of its control thread.
pub(super) const THREAD_END: Duration = Duration::from_millis(500);
