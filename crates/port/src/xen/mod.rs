//! A guest of Xen with a paravirtual network frontend. We are the backend, in a dom0 or a driver
//! domain, in place of the kernel's xen-netback.
//!
//! # Theory of operation
//!
//! The toolstack (`xl`) makes a vif's nodes in XenStore, for the frontend in the guest and for the
//! backend here. The two ends meet there ([`tombolo_ring::xen::bus`]): the backend writes what it
//! offers, the frontend writes the grants of its ring pages and its event channels. From then on
//! frames go through the rings.
//!
//! ```text
//!   control thread (control.rs)             worker (connection.rs)
//!   ---------------------------             ----------------------
//!   watches backend/vif in XenStore
//!   finds the vif by its domain's name
//!   writes features, reads rings
//!   maps pages, binds event channels
//!   hands over the connection      ──────►  service(): runs it from now on
//!                                           fault: gives it back
//!   writes Closing                 ◄──────
//!   frontend closes, or is gone
//!   takes the connection back      ◄──────  service(): runs nothing
//! ```
//!
//! # What is carried
//!
//! Frames in up to 18 slots, blank checksums and segmentation of TCP over IPv4 and IPv6 both ways;
//! several queues, one event channel or two for each; only the multicast frames that the frontend
//! asks for, where it wants that; room before each frame for the frontend's XDP program; frames
//! spread over the queues by a hash and a table of the frontend's, which it gives by a control ring.
//! All of these it may change while it is connected.
//!
//! # Copies
//!
//! Of a guest's memory only its ring pages are mapped. The bytes of all packets of a turn are
//! copied by the hypervisor in one system call, which checks each grant. A grant that is not there,
//! or was revoked, costs its own packet.
//!
//! # Life
//!
//! A vif is named by its domain's name and its number in the domain's `vif=` list, so it is found
//! again after the domain was started again. In a driver domain, which cannot read names, its MAC
//! is looked for instead. A port whose process ends leaves the guest's nodes as they are, and the
//! kernel closes its event channels, mappings and watches. The next port finds the frontend
//! connected and attaches to its rings where they stand: the guest is told nothing and keeps its
//! link. Frames that were answered are not taken again. Which multicast frames the guest asked for
//! is not known to it, so all of them pass until the guest connects again, nor how it wanted its
//! frames spread. It may have more queues than are offered now.
//!
//! A frontend that breaks the protocol is disconnected and told to close; others notice nothing.
//! Where this system refuses an operation, the port attaches to the rings again, as another process
//! would.
//!
//! # Needs
//!
//! `/dev/xen/xenbus`, `/dev/xen/evtchn` and `/dev/xen/gntdev`, which belong to root, and a kernel
//! in which xen-netback is not loaded: it would take every vif. The `vif=` line names a script that
//! does nothing, such as `script=/bin/true`, since no interface of this kernel is to be configured.

mod connection;
mod control;
mod domains;
mod exchange;
mod hash;
mod platform;
mod store;
#[cfg(test)]
mod tests;
mod transport;

use std::sync::{Arc, mpsc};

use connection::{ARENA_BYTES, Connection, FIRSTS_BYTES};
pub use domains::{DomainEvent, DomainEvents, console_of};
use exchange::Exchange;
use platform::{Linux, Machine};
use rustix::io::Errno;
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Frame, Mac};
use tombolo_switch::port::{Caps, Carrier, Fault, MAX_RINGS, Port, Rechecked, Sent};

use crate::pages::Pages;
use tombolo_worker::reactor::Registration;

/// The device files of Xen that a port needs.
pub const DEVICES: [&str; 3] = ["/dev/xen/xenbus", "/dev/xen/evtchn", "/dev/xen/gntdev"];
/// There while the kernel's own backend, which takes every vif, is registered.
pub const NETBACK: &str = "/sys/bus/xen-backend/drivers/vif";

/// Most queues of a vif.
pub const MAX_QUEUES: u32 = 64;

/// Which vif, and what it is offered.
#[derive(Clone, Debug)]
pub struct XenConfig {
    /// The domain's name, as in its `xl` configuration.
    pub domain: String,
    /// The vif's number: its place in the domain's `vif=` list, from 0.
    pub device: u32,
    /// Its MAC address in that list, by which it is found in a driver domain: XenStore does not
    /// tell that one the names of other domains.
    pub mac: Option<Mac>,
    /// Queues that the frontend may have, 1 to [`MAX_QUEUES`].
    pub max_queues: u32,
    /// The network's MTU in bytes.
    pub mtu: u32,
}

/// Why a port could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum XenOpenError {
    /// More queues than a port may have, or none.
    #[error("{got} queues: 1 to {MAX_QUEUES} are expected")]
    Queues {
        /// How many were asked for.
        got: u32,
    },
    /// A device file of Xen's is missing or not allowed.
    #[error(
        "{path}: {source}; expected a dom0 or driver domain of Xen, and root. There `modprobe -a xen-evtchn xen-gntdev` loads what is missing; \
         `tombolo doctor` says more"
    )]
    Device { path: &'static str, source: Errno },
    /// The kernel's backend would serve the vif as well.
    #[error(
        "the kernel's xen-netback is loaded and takes every vif: `rmmod xen-netback`, and `blacklist xen-netback` in /etc/modprobe.d \
         keeps it from being loaded again"
    )]
    Netback,
    /// No descriptor or thread is left.
    #[error("the port's control thread: {0}")]
    Thread(std::io::Error),
}

/// A port that is the network backend of one Xen vif.
pub struct XenPort {
    exchange: Arc<Exchange>,
    connection: Option<Box<Connection>>,
    arena: Pages,
    firsts: Pages,
    config: XenConfig,
    /// Closed when the control thread has ended.
    thread_ends: Option<mpsc::Receiver<()>>,
}

impl XenPort {
    /// A port for a vif that is there, or will be.
    ///
    /// # Errors
    /// [`XenOpenError`].
    pub fn open(config: XenConfig, registration: Registration) -> Result<XenPort, XenOpenError> {
        Self::check_machine()?;
        Self::open_on(Box::new(Linux), config, registration)
    }

    /// Whether this is a machine on which such a port can be opened. Nothing is opened.
    ///
    /// # Errors
    /// [`XenOpenError::Device`], [`XenOpenError::Netback`].
    pub fn check_machine() -> Result<(), XenOpenError> {
        for path in DEVICES {
            rustix::fs::access(path, rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK)
                .map_err(|source| XenOpenError::Device { path, source })?;
        }
        match rustix::fs::access(NETBACK, rustix::fs::Access::EXISTS) {
            Ok(()) => Err(XenOpenError::Netback),
            Err(_) => Ok(()),
        }
    }

    fn open_on(
        machine: Box<dyn Machine>,
        config: XenConfig,
        registration: Registration,
    ) -> Result<XenPort, XenOpenError> {
        if !(1..=MAX_QUEUES).contains(&config.max_queues) {
            return Err(XenOpenError::Queues { got: config.max_queues });
        }
        let doorbell = Doorbell::new().map_err(|errno| XenOpenError::Thread(errno.into()))?;
        let exchange = Arc::new(Exchange::new(registration, Arc::new(doorbell)));
        let (running, ends) = mpsc::channel();
        let (for_thread, its_config) = (exchange.clone(), config.clone());
        let run = move || {
            let _running: mpsc::Sender<()> = running;
            control::run(&*machine, &its_config, &for_thread);
        };
        std::thread::Builder::new().name("xen-vif".into()).spawn(run).map_err(XenOpenError::Thread)?;
        let (arena, firsts) = (Pages::new(ARENA_BYTES), Pages::new(FIRSTS_BYTES));
        Ok(XenPort { exchange, connection: None, arena, firsts, config, thread_ends: Some(ends) })
    }
}

impl Port for XenPort {
    fn kind(&self) -> &'static str {
        "xen"
    }

    fn link(&self) -> Carrier {
        if self.connection.is_some() { Carrier::Up } else { Carrier::Down }
    }

    fn caps(&self) -> Caps {
        self.connection.as_ref().map_or(Caps::plain(self.config.mtu), |connection| connection.caps())
    }

    fn service(&mut self, _now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.exchange.serve(&mut self.connection);
        Ok(None)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        match &mut self.connection {
            Some(connection) => connection.receive(&mut self.arena, budget, batch, drops),
            None => Ok(0),
        }
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.connection.as_mut().map_or(Ok(()), |connection| connection.release())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        match &mut self.connection {
            Some(connection) => connection.transmit(&mut self.firsts, batch, which, drops),
            None => {
                drops.count(Reason::LinkDown, which.len() as u64);
                Ok(Sent::default())
            }
        }
    }

    fn ring_of(&self, frame: &Frame) -> u8 {
        let queue = self.connection.as_ref().map_or(0, |connection| connection.queue_of(frame));
        (queue % MAX_RINGS) as u8
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.connection.as_mut().map_or(Ok(()), |connection| connection.flush())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.connection.as_mut().map_or(Ok(false), |connection| connection.arm())
    }

    fn take_recheck(&mut self) -> bool {
        self.connection.as_mut().is_some_and(|connection| connection.take_recheck())
    }

    fn recheck(&mut self) -> Result<Rechecked, Fault> {
        self.connection.as_mut().map_or(Ok(Rechecked::default()), |connection| connection.recheck())
    }

    fn disarm(&mut self) {
        // An event channel is silent from its first event to the next `arm`.
    }

    fn reset(&mut self, fault: &Fault) {
        if let Some(connection) = self.connection.take() {
            self.exchange.give_up(connection, fault.clone());
        }
    }

    fn details(&self) -> Details {
        let mut details: Details = vec![
            ("domain", self.config.domain.clone().into()),
            ("device", self.config.device.into()),
            ("state", self.exchange.state().into()),
        ];
        if let Some(connection) = &self.connection {
            details.push(("domain_id", connection.domain().into()));
            details.push(("queues", connection.queues().into()));
            details.push(("features", format!("{:?}", connection.features()).into()));
            let requested = connection.requested();
            details.push(("multicast", if requested.multicast { "what the guest asks for" } else { "all" }.into()));
            details.push(("headroom", requested.headroom.into()));
        }
        details
    }
}

impl Drop for XenPort {
    fn drop(&mut self) {
        // Unmapped and unbound here; the nodes are left for the next port, or for the toolstack.
        self.connection = None;
        self.exchange.close();
        if let Some(ends) = self.thread_ends.take() {
            let _ = ends.recv_timeout(control::THREAD_END);
        }
    }
}
