//! One queue of a network device: a transmit and a receive ring, the pages behind them, and their
//! event channels.
//!
//! Frames are copied between local memory and pages that were granted to the backend once, so a
//! frame costs no grant operation, and no reference of Rust's leads to where the backend writes. A
//! device that comes back, after its backend died or `xl network-attach`, finds the same pages
//! granted. For a backend in another domain they are granted again; a page that the old backend
//! still uses is replaced.

use super::Domain;
use super::grants::Access;
use super::vif::Rings;
use crate::machine::{dma, hypercall};
use crate::virtio::net::DeviceStats;
use alloc::boxed::Box;
use alloc::vec::Vec;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::netif::Extra;
use tombolo_ring::xen::{Checksum, Gso, Received, RingPage, RxFront, TxFront, TxPart, XenError};

pub(super) const PAGE: usize = 4096;
/// The largest frame that the backend is given to cut: 15 pages.
pub(super) const MAX_PARTS: usize = 15;
/// Slots that the largest frame takes: its pages, and how it is to be cut.
const MAX_SLOTS: u32 = MAX_PARTS as u32 + 1;

/// Pages that stay granted for as long as the device lives.
pub(super) struct Granted {
    pub(super) pages: Vec<ForeignMut<'static>>,
    /// A reference for each page; empty before the first backend is known.
    pub(super) references: Vec<u32>,
    to: u16,
    access: Access,
}

impl Granted {
    pub(super) fn new(pages: usize, access: Access) -> Granted {
        let memory = dma::alloc_buffers(pages * PAGE);
        Granted {
            pages: (0..pages).map(|page| memory.skip(page * PAGE).take(PAGE)).collect(),
            references: Vec::new(),
            to: 0,
            access,
        }
    }

    /// The domain was restored: nothing is granted any more, and no other domain has any of the
    /// pages.
    fn restored(&mut self) {
        self.references.clear();
    }

    /// Grants all pages to `backend`, if they are not already. False where the grant table is full.
    pub(super) fn grant(&mut self, domain: &Domain, backend: u16) -> bool {
        if self.references.len() == self.pages.len() && self.to == backend {
            return true;
        }
        for (page, reference) in self.pages.iter_mut().zip(self.references.drain(..)) {
            if !domain.end_grant(reference) {
                // The other domain still has it: it keeps it.
                *page = dma::alloc_buffers(PAGE);
            }
        }
        self.to = backend;
        for page in &self.pages {
            let Some(reference) = domain.grant(backend, *page, self.access) else { return false };
            self.references.push(reference);
        }
        true
    }
}

/// Both rings, for a backend or between two of them.
pub(super) struct Queue {
    /// The page of each ring: transmit, receive.
    pub(super) rings: Granted,
    pub(super) transmit_page: RingPage<'static>,
    pub(super) receive_page: RingPage<'static>,
    transmit: Box<TxFront>,
    receive: Box<RxFront>,
    pub(super) transmit_pool: Granted,
    pub(super) receive_pool: Granted,
    /// Pages of the transmit pool that are free.
    free_pages: Vec<u32>,
    /// Buffers of the frame that is being received, to be posted again.
    returned: Vec<u32>,
    posted: usize,
    unpublished: usize,
    /// Of the transmit and the receive ring; equal where there is one for both. `None` between two
    /// backends.
    channels: Option<(u32, u32)>,
    /// How the backend broke the rings.
    fault: Option<XenError>,
}

impl Queue {
    /// With so many pages for each direction.
    pub(super) fn new(pages: usize) -> Queue {
        let rings = Granted::new(2, Access::ReadWrite);
        let ring = |index: usize| RingPage::new(rings.pages[index]).expect("whole pages");
        Queue {
            transmit_page: ring(0),
            receive_page: ring(1),
            rings,
            transmit: Box::default(),
            receive: Box::default(),
            transmit_pool: Granted::new(pages, Access::Read),
            receive_pool: Granted::new(pages, Access::ReadWrite),
            free_pages: Vec::new(),
            returned: Vec::new(),
            posted: 0,
            unpublished: 0,
            channels: None,
            fault: None,
        }
    }

    /// Makes rings and event channels for `backend`, one or two, with all buffers posted; `None`
    /// where Xen refuses something.
    pub(super) fn open(&mut self, domain: &Domain, backend: u16, split_channels: bool) -> Option<Rings> {
        let granted = self.rings.grant(domain, backend)
            && self.receive_pool.grant(domain, backend)
            && self.transmit_pool.grant(domain, backend);
        if !granted {
            return None;
        }
        // Other pages than before where a backend has kept the old ones.
        self.transmit_page = RingPage::new(self.rings.pages[0]).ok()?;
        self.receive_page = RingPage::new(self.rings.pages[1]).ok()?;
        self.transmit_page.initialise();
        self.receive_page.initialise();
        let transmit = hypercall::alloc_unbound(backend).ok()?;
        let receive = if split_channels { hypercall::alloc_unbound(backend) } else { Ok(transmit) };
        let Ok(receive) = receive else {
            hypercall::close(transmit);
            return None;
        };
        *self.transmit = TxFront::new();
        *self.receive = RxFront::new();
        self.free_pages = (0..self.transmit_pool.pages.len() as u32).rev().collect();
        self.unpublished = 0;
        self.fault = None;
        self.channels = Some((transmit, receive));
        domain.listen(transmit);
        domain.listen(receive);
        self.returned = (0..self.receive_pool.pages.len() as u32).collect();
        self.post();
        // No notification is needed: the backend looks at the ring when it connects.
        self.receive.publish(&self.receive_page);
        self.posted = 0;
        let references = &self.rings.references;
        Some(Rings { transmit: references[0], receive: references[1], channels: (transmit, receive) })
    }

    /// Lets go of the rings; what was under way is lost.
    pub(super) fn close(&mut self) {
        let Some((transmit, receive)) = self.channels.take() else { return };
        hypercall::close(transmit);
        if receive != transmit {
            hypercall::close(receive);
        }
        self.fault = None;
    }

    /// Whether the backend has not bound to an event channel, or has let go of it.
    pub(super) fn is_unbound(&self) -> bool {
        self.channels.is_some_and(|(transmit, receive)| {
            hypercall::is_unbound(transmit) || receive != transmit && hypercall::is_unbound(receive)
        })
    }

    /// The domain was restored: its event channels and grants are those of another one, and not to
    /// be closed.
    pub(super) fn restored(&mut self) {
        self.channels = None;
        self.fault = None;
        for pool in [&mut self.rings, &mut self.transmit_pool, &mut self.receive_pool] {
            pool.restored();
        }
    }

    /// How many events came since the last call.
    pub(super) fn take_events(&self, domain: &Domain) -> u64 {
        self.channels.map_or(0, |(transmit, receive)| {
            u64::from(domain.has_fired(transmit)) + u64::from(domain.has_fired(receive))
        })
    }

    /// How the backend broke the rings, if it did.
    pub(super) fn fault(&self) -> Option<XenError> {
        self.fault
    }

    /// Posts the buffers that came back.
    fn post(&mut self) {
        for token in self.returned.drain(..) {
            let Some(reference) = self.receive_pool.references.get(token as usize) else { continue };
            self.receive.post(&self.receive_page, *reference, token);
            self.posted += 1;
        }
    }

    /// Copies the next packet into `frame`. Its length, what the backend says of it, and whether
    /// all of it had room.
    pub(super) fn receive(&mut self, frame: &mut [u8]) -> Option<(usize, Received, bool)> {
        if self.fault.is_some() || self.channels.is_none() {
            return None;
        }
        let (pages, returned) = (&self.receive_pool.pages, &mut self.returned);
        let mut bytes = 0;
        let mut fits = true;
        let received = self.receive.receive(&self.receive_page, |part| {
            let Some(page) = pages.get(part.token as usize) else { return };
            if let Some(to) = frame.get_mut(bytes..bytes + usize::from(part.len)) {
                bytes += page.skip(part.offset.into()).take(part.len.into()).as_foreign().read_into(to);
            } else {
                fits = false;
            }
            returned.push(part.token);
        });
        match received {
            Ok(received) => {
                self.post();
                received.map(|received| (bytes, received, fits))
            }
            Err(fault) => {
                self.fault = Some(fault);
                None
            }
        }
    }

    /// What was added to both rings and not shown yet.
    pub(super) fn unpublished(&self) -> usize {
        self.posted.max(self.unpublished)
    }

    /// Shows the backend all that was added to both rings, and notifies it where it wants that.
    pub(super) fn flush(&mut self, stats: &mut DeviceStats) {
        let Some((transmit, receive)) = self.channels else { return };
        if self.posted > 0 {
            self.posted = 0;
            if self.receive.publish(&self.receive_page) {
                stats.notifications += 1;
                hypercall::send(receive);
            }
        }
        if self.unpublished > 0 {
            self.unpublished = 0;
            if self.transmit.publish(&self.transmit_page) {
                stats.notifications += 1;
                hypercall::send(transmit);
            }
        }
    }

    /// Asks for an event when a frame comes, and, if the transmit ring is full, when it no longer
    /// is. Returns whether there is something to do already.
    pub(super) fn arm(&mut self, stats: &mut DeviceStats) -> bool {
        if self.channels.is_none() || self.fault.is_some() {
            return self.fault.is_some();
        }
        let arrived = match self.receive.arm(&self.receive_page) {
            Ok(may_sleep) => !may_sleep,
            Err(fault) => {
                self.fault = Some(fault);
                true
            }
        };
        arrived | self.arm_transmit(stats)
    }

    fn arm_transmit(&mut self, stats: &mut DeviceStats) -> bool {
        if !self.has_room(1) && self.fault.is_none() {
            self.reap(stats);
            // Half of what is under way, so that one event makes room for more than one frame.
            let after = self.transmit.ring().outstanding() / 2;
            match self.transmit.arm(&self.transmit_page, after.max(1)) {
                Ok(may_sleep) => return !may_sleep || self.has_room(1),
                Err(fault) => self.fault = Some(fault),
            }
        }
        self.fault.is_some()
    }

    /// Whether so many of the largest frames would find pages and slots.
    fn has_room(&self, frames: usize) -> bool {
        self.free_pages.len() >= frames * MAX_PARTS && self.transmit.free() as usize >= frames * MAX_SLOTS as usize
    }

    /// Frees the pages of what the backend has sent.
    fn reap(&mut self, stats: &mut DeviceStats) {
        loop {
            match self.transmit.complete(&self.transmit_page) {
                Ok(Some(completed)) => {
                    self.free_pages.push(completed.token);
                    stats.tx_dropped += u64::from(completed.status < 0);
                }
                Ok(None) => return,
                Err(fault) => {
                    self.fault = Some(fault);
                    return;
                }
            }
        }
    }

    /// Makes room for so many of the largest frames, if that is possible.
    pub(super) fn prepare(&mut self, frames: usize, stats: &mut DeviceStats) -> bool {
        if self.channels.is_none() {
            return false;
        }
        if !self.has_room(frames) {
            self.reap(stats);
        }
        self.has_room(frames) && self.fault.is_none()
    }

    /// Sends a frame, for which [`Queue::prepare`] has found room.
    pub(super) fn send(&mut self, frame: &[u8], checksum: Checksum, gso: Option<Gso>) {
        let mut parts = [TxPart { gref: 0, offset: 0, len: 0, token: 0 }; MAX_PARTS];
        let mut count = 0;
        for (part, bytes) in parts.iter_mut().zip(frame.chunks(PAGE)) {
            let page = self.free_pages.pop().expect("`prepare` found pages for the largest frame");
            self.transmit_pool.pages[page as usize].write_from(bytes);
            let gref = self.transmit_pool.references[page as usize];
            *part = TxPart { gref, offset: 0, len: bytes.len() as u16, token: page };
            count += 1;
        }
        match self.transmit.push(&self.transmit_page, &parts[..count], checksum, gso) {
            Ok(was_pushed) => debug_assert!(was_pushed, "`prepare` found slots for the largest frame"),
            Err(fault) => self.fault = Some(fault),
        }
        self.unpublished += 1;
    }

    /// Asks for a multicast address, or not for it any more. False where there is no room now.
    pub(super) fn ask_multicast(&mut self, extra: Extra) -> bool {
        let was_pushed = self.transmit.push_multicast(&self.transmit_page, extra) == Ok(true);
        self.unpublished += usize::from(was_pushed);
        was_pushed
    }
}
