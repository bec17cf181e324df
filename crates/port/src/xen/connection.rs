//! A vif that is connected: its rings, and how frames go through them.
//!
//! Only ring pages are mapped. A packet's bytes are copied by the hypervisor, which checks each
//! grant as it does so; all packets of a turn go in one system call. What is copied from the guest
//! lies in an arena of the port's, so the guest gets its pages back in the same turn and cannot
//! change a frame that is being judged.

use super::hash::{ControlRing, Hashing};
use super::platform::{Guest, Page};
use super::transport;
use crate::spread;
use crate::sys::{GrantCopy, recycle_copies};
use rustix::io::Errno;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::xen::back::Piece;
use tombolo_ring::xen::netif::{Extra, RSP_DROPPED, RSP_ERROR, RSP_OKAY, RxRequest};
use tombolo_ring::xen::{
    Checksum, Gso, GsoKind, PAGE_BYTES, Packet, PacketHash, RingPage, RxBack, RxContent, TxBack, XenError, back,
};
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, Frame, Mac};
use tombolo_switch::port::{Caps, Fault, FaultKind, Rechecked, Sent};
use tombolo_worker::reactor::Watch;

/// Memory for the packets of one turn: eight of the longest, wherever in a page they begin.
pub(super) const ARENA_BYTES: usize = 8 * LONGEST_BYTES;
/// Room for the longest packet of a guest, in whole pages, and for its beginning (`place`).
const LONGEST_BYTES: usize = 65_536 + PAGE_BYTES;
/// Memory for the first pages of the frames of one turn to the guest. Frames that find no room are
/// copied in more pieces.
pub(super) const FIRSTS_BYTES: usize = 32 * PAGE_BYTES;
/// Slots of the longest frame to a guest: 17 pages, its segmentation and its hash.
const MAX_RX_SLOTS: usize = 19;
/// Most bytes that stay free before a frame, of which Linux asks for 256: half a page, so that a
/// frame of an Ethernet's MTU has room behind them.
const MAX_HEADROOM: u32 = PAGE_BYTES as u32 / 2;
/// Multicast addresses that a guest may ask for, as many as with Linux's backend.
const MAX_ADDRESSES: usize = 64;

/// What a frontend takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// Packets in several slots.
    pub(super) sg: bool,
    /// TCP over IPv4 not cut.
    pub(super) tso4: bool,
    /// TCP over IPv6 not cut.
    pub(super) tso6: bool,
    /// Blank checksums.
    pub(super) checksum: bool,
}

/// What a frontend asks for, and may change while it is connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Requested {
    /// Only the multicast frames that it asks for. Not where another backend was asked: then it
    /// gets all of them.
    pub(super) multicast: bool,
    /// Bytes that stay free before each frame, for its XDP program; 0 where it has none. Linux's
    /// driver drops frames of several slots while it has a program, so segments are cut. It asks for
    /// the bytes also when a program has gone, so whole frames of a large MTU are not refused.
    pub(super) headroom: u16,
}

impl Requested {
    /// From what the frontend wrote.
    pub(super) fn new(multicast: bool, headroom: u32) -> Requested {
        Requested { multicast, headroom: headroom.min(MAX_HEADROOM) as u16 }
    }
}

impl Features {
    fn caps(self, mtu: u32, headroom: u16) -> Caps {
        let checksum = self.checksum;
        let caps = Caps::plain(mtu);
        let page = (PAGE_BYTES - usize::from(headroom)) as u32;
        let max_frame_bytes = if self.sg { caps.max_frame_bytes } else { caps.max_frame_bytes.min(page) };
        // Segmentation implies a blank checksum, and several slots.
        let tso = self.sg && checksum && headroom == 0;
        // The ring does not say where a blank checksum is. Linux's frontend looks for it behind the
        // Ethernet header and drops the frame if that is followed by a VLAN tag.
        Caps { checksum, tso4: self.tso4 && tso, tso6: self.tso6 && tso, tagged: false, max_frame_bytes, ..caps }
    }
}

/// One pair of rings.
pub(super) struct Queue {
    tx_page: Box<dyn Page>,
    rx_page: Box<dyn Page>,
    tx: TxBack,
    rx: RxBack,
    tx_port: u32,
    rx_port: u32,
    wants_recheck: bool,
}

/// The ring in a mapped page.
pub(super) fn ring(page: &dyn Page) -> Result<RingPage<'_>, XenError> {
    RingPage::new(page.bytes())
}

impl Queue {
    /// Attaches to the rings in two mapped pages.
    pub(super) fn attach(
        [tx_page, rx_page]: [Box<dyn Page>; 2],
        [tx_port, rx_port]: [u32; 2],
    ) -> Result<Queue, XenError> {
        let (tx, rx) = (TxBack::attach(&ring(&*tx_page)?)?, RxBack::attach(&ring(&*rx_page)?)?);
        Ok(Queue { tx_page, rx_page, tx, rx, tx_port, rx_port, wants_recheck: false })
    }
}

/// A packet that was taken in this turn.
struct Taken {
    queue: usize,
    packet: Packet,
    /// Where in the arena it begins, and how many copies bring it there.
    start: usize,
    copies: usize,
    /// Why it goes no further.
    lost: Option<Reason>,
}

/// A frame that waits for the copies of this turn.
struct Staged {
    queue: usize,
    requests: [RxRequest; MAX_RX_SLOTS],
    copies: usize,
    content: RxContent,
}

/// What the worker runs. Dropping it unmaps the rings and closes the event channels.
pub(super) struct Connection {
    /// First, so that pages are unmapped before the guest's descriptors close.
    queues: Vec<Queue>,
    control: Option<ControlRing>,
    guest: Box<dyn Guest>,
    domain: u16,
    features: Features,
    requested: Requested,
    mtu: u32,
    caps: Caps,
    /// Multicast addresses that the guest asked for.
    addresses: Vec<Mac>,
    /// The queue that is looked at first.
    first: usize,
    /// How the guest wants its frames spread.
    hashing: Hashing,
    copies: Vec<GrantCopy<'static>>,
    taken: Vec<Taken>,
    staged: Vec<Staged>,
    /// Frames that found no room in the turn.
    refused: Vec<u16>,
    _watch: Watch,
}

#[cold]
pub(super) fn ring_fault(queue: usize, side: &str, error: XenError) -> Fault {
    Fault { kind: FaultKind::Ring, detail: format!("queue {queue}, {side} ring: {error}") }
}

#[cold]
pub(super) fn copy_fault(errno: Errno) -> Fault {
    let detail = format!("the system refused to copy from the guest's pages: {errno}");
    Fault { kind: FaultKind::System, detail }
}

/// Where in the arena, whose first byte begins a page, a packet is put: at `at` or soon behind it,
/// so that its pieces cross none of our pages if possible. Each crossing costs the hypervisor one
/// copy more.
fn place(at: usize, pieces: &[Piece]) -> usize {
    match pieces {
        // Linux gives headers in the first piece and whole pages behind it.
        [first, second, ..] => {
            let phase = (usize::from(second.offset) + PAGE_BYTES - usize::from(first.len) % PAGE_BYTES) % PAGE_BYTES;
            at + (phase + PAGE_BYTES - at % PAGE_BYTES) % PAGE_BYTES
        }
        [only] if at % PAGE_BYTES + usize::from(only.len) > PAGE_BYTES => at.next_multiple_of(PAGE_BYTES),
        _ => at,
    }
}

/// The queue of a frame to the guest, and the hash that led to it.
fn spread_to(hashing: &Hashing, frame: &Frame, queues: usize) -> (usize, Option<PacketHash>) {
    let ours = || if queues > 1 { spread::queue_of(frame, queues) } else { 0 };
    hashing.place(frame.head(), queues).unwrap_or_else(|| (ours(), None))
}

impl Connection {
    /// With queues that are attached; the guest is told once, since what the last backend told it
    /// is not known.
    pub(super) fn new(
        guest: Box<dyn Guest>,
        domain: u16,
        (queues, control): (Vec<Queue>, Option<ControlRing>),
        (features, requested): (Features, Requested),
        mtu: u32,
        watch: Watch,
    ) -> Connection {
        for queue in &queues {
            guest.notify(queue.tx_port);
            if queue.rx_port != queue.tx_port {
                guest.notify(queue.rx_port);
            }
        }
        if let Some(control) = &control {
            guest.notify(control.port());
        }
        Connection {
            queues,
            guest,
            domain,
            features,
            requested,
            mtu,
            caps: features.caps(mtu, requested.headroom),
            addresses: Vec::new(),
            first: 0,
            control,
            hashing: Hashing::new(),
            copies: Vec::new(),
            taken: Vec::new(),
            staged: Vec::new(),
            refused: Vec::new(),
            _watch: watch,
        }
    }

    pub(super) fn caps(&self) -> Caps {
        self.caps
    }

    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    pub(super) fn features(&self) -> Features {
        self.features
    }

    pub(super) fn requested(&self) -> Requested {
        self.requested
    }

    /// From the next frame on.
    pub(super) fn change(&mut self, requested: Requested) {
        self.requested = requested;
        self.caps = self.features.caps(self.mtu, requested.headroom);
    }

    pub(super) fn domain(&self) -> u16 {
        self.domain
    }

    /// Takes a guest's request about a multicast address; returns the answer to it.
    fn subscribe(addresses: &mut Vec<Mac>, extra: Extra) -> i16 {
        match extra {
            Extra::MulticastAdd(address) if addresses.contains(&address) => RSP_OKAY,
            Extra::MulticastAdd(address) if addresses.len() < MAX_ADDRESSES => {
                addresses.push(address);
                RSP_OKAY
            }
            Extra::MulticastDel(address) => {
                addresses.retain(|one| *one != address);
                RSP_OKAY
            }
            Extra::MulticastAdd(_) | Extra::Gso(_) | Extra::Hash(_) | Extra::Headroom(_) => RSP_ERROR,
        }
    }

    /// Serves requests on the control ring, if there is one.
    #[inline]
    fn serve_control(&mut self) -> Result<(), Fault> {
        match &mut self.control {
            Some(control) => control.serve(&*self.guest, self.domain, self.queues.len(), &mut self.hashing),
            None => Ok(()),
        }
    }

    /// Takes packets from the rings, has them copied into `arena`, answers them, and puts their
    /// frames into the batch.
    pub(super) fn receive<'m>(
        &mut self,
        arena: &'m mut [u8],
        budget: usize,
        batch: &mut Batch<'m>,
        drops: &mut Drops,
    ) -> Result<usize, Fault> {
        self.serve_control()?;
        let Connection { queues, guest, domain, addresses, first, copies, taken, .. } = self;
        let mut ops: Vec<GrantCopy<'_>> = recycle_copies(std::mem::take(copies));
        taken.clear();
        let (mut used, mut at, mut fault) = (0, 0, None);
        let space = ForeignMut::from(&mut *arena);
        let count = queues.len().max(1);
        'queues: for turn in 0..queues.len() {
            let index = (*first + turn) % count;
            let queue = &mut queues[index];
            let page = ring(&*queue.tx_page).map_err(|error| ring_fault(index, "transmit", error))?;
            while used < budget {
                if space.len() - at < LONGEST_BYTES {
                    // There is no room to see whether there is more, so say that there is.
                    used = budget;
                    break 'queues;
                }
                let mut one = Taken { queue: index, packet: Packet::new(), start: at, copies: 0, lost: None };
                match queue.tx.take(&page, &mut one.packet) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        fault = Some(ring_fault(index, "transmit", error));
                        break 'queues;
                    }
                }
                used += 1;
                one.start = place(at, one.packet.pieces());
                let mut place = one.start;
                for piece in one.packet.pieces() {
                    // No more than 65535 bytes in all, for which there is room.
                    let Some(to) = space.slice(place, piece.len.into()) else { break };
                    ops.push(GrantCopy::from_guest(*domain, piece.gref, piece.offset, to));
                    place += usize::from(piece.len);
                    one.copies += 1;
                }
                at = place.next_multiple_of(64);
                taken.push(one);
            }
        }
        *first = (*first + 1) % count;
        let copied = if ops.is_empty() { Ok(()) } else { guest.copy(&mut ops) };
        let mut rest = &ops[..];
        for one in taken.iter_mut() {
            let (own, others) = rest.split_at(one.copies);
            rest = others;
            if !own.iter().all(GrantCopy::is_done) {
                one.lost = Some(Reason::BadGrant);
            }
        }
        *copies = recycle_copies(ops);
        if let Err(errno) = copied {
            // Not the guest's doing, so nothing is answered: the port takes these packets again
            // when it has attached again.
            return Err(fault.unwrap_or_else(|| copy_fault(errno)));
        }
        // Nothing is written to the arena any more in this turn.
        let arena: &'m [u8] = arena;
        for one in taken.drain(..) {
            let packet = &one.packet;
            let status = match packet.multicast {
                Some(extra) => Self::subscribe(addresses, extra),
                None => {
                    let frame = &arena[one.start..one.start + usize::from(packet.len)];
                    let offload = match (one.lost, packet.refusal) {
                        (Some(reason), _) => Err(reason),
                        (None, Some(back::Refusal::Short)) => Err(Reason::Runt),
                        (None, Some(back::Refusal::TooManySlots)) => Err(Reason::TooLong),
                        (None, Some(_)) => Err(Reason::BadOffload),
                        (None, None) => transport::from_ring(frame, packet.checksum, packet.gso),
                    };
                    match offload {
                        Ok(offload) => {
                            batch.push(Foreign::from(frame), offload);
                            RSP_OKAY
                        }
                        Err(reason) => {
                            drops.count(reason, 1);
                            if packet.refusal.is_some() || one.lost.is_some() { RSP_ERROR } else { RSP_DROPPED }
                        }
                    }
                }
            };
            let queue = &mut queues[one.queue];
            let answered = ring(&*queue.tx_page).and_then(|page| queue.tx.answer(&page, packet, status));
            if let Err(error) = answered {
                fault.get_or_insert_with(|| ring_fault(one.queue, "transmit", error));
            }
        }
        fault.map_or(Ok(used), Err)
    }

    /// Notifies the guest of the answers of the turn.
    pub(super) fn release(&mut self) -> Result<(), Fault> {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let page = ring(&*queue.tx_page).map_err(|error| ring_fault(index, "transmit", error))?;
            if queue.tx.publish(&page) {
                self.guest.notify(queue.tx_port);
            }
            queue.wants_recheck |= queue.tx.is_in_doubt();
        }
        Ok(())
    }

    pub(super) fn queue_of(&self, frame: &Frame) -> usize {
        spread_to(&self.hashing, frame, self.queues.len()).0
    }

    /// Copies frames into the guest's pages, all in one call. `firsts` is memory that begins at a
    /// page.
    pub(super) fn transmit(
        &mut self,
        firsts: &mut [u8],
        batch: &Batch<'_>,
        which: &[u16],
        drops: &mut Drops,
    ) -> Result<Sent, Fault> {
        let mut ops: Vec<GrantCopy<'_>> = recycle_copies(std::mem::take(&mut self.copies));
        let mut firsts = Firsts { free: firsts };
        self.staged.clear();
        // Queues that had no pages left; frames of at most 64 queues are kept apart.
        let mut full = 0u64;
        self.refused.clear();
        for &i in which {
            let frame = &batch.frames()[usize::from(i)];
            if frame.len() > self.caps.max_frame_bytes as usize && frame.offload.segmentation.is_none() {
                drops.count(Reason::TooLong, 1);
                continue;
            }
            let destination = frame.destination();
            let is_multicast = destination[0] & 1 != 0 && destination != [0xff; 6];
            if self.requested.multicast && is_multicast && !self.addresses.contains(&destination) {
                drops.count(Reason::Unsubscribed, 1);
                continue;
            }
            let (checksum, gso) = match transport::to_ring(frame.head(), &frame.offload) {
                Ok(offload) => offload,
                Err(reason) => {
                    drops.count(reason, 1);
                    continue;
                }
            };
            let (index, hash) = spread_to(&self.hashing, frame, self.queues.len());
            let content = RxContent { len: frame.len(), checksum, gso, hash, headroom: self.requested.headroom };
            let slots = content.slots();
            let pages = slots - content.extras();
            if slots > MAX_RX_SLOTS || (pages > 1 && !self.features.sg) {
                drops.count(Reason::TooLong, 1);
                continue;
            }
            if full & 1 << (index % 64) != 0 {
                self.refused.push(i);
                continue;
            }
            let queue = &mut self.queues[index];
            let mut requests = [RxRequest::default(); MAX_RX_SLOTS];
            let reserved = ring(&*queue.rx_page).and_then(|page| queue.rx.reserve(&page, &mut requests[..slots]));
            match reserved {
                Ok(true) => {}
                Ok(false) => {
                    full |= 1 << (index % 64);
                    self.refused.push(i);
                    continue;
                }
                Err(error) => return Err(ring_fault(index, "receive", error)),
            }
            let before = ops.len();
            let (extras, at) = (content.extras(), content.headroom.into());
            let mut fill = Fill { domain: self.domain, requests: &requests[..slots], extras, at };
            fill.add_frame(batch, frame, &mut firsts, &mut ops);
            let copies = ops.len() - before;
            self.staged.push(Staged { queue: index, requests, copies, content });
        }
        drops.refuse(&self.refused);
        let copied = if ops.is_empty() { Ok(()) } else { self.guest.copy(&mut ops) };
        let (mut sent, mut rest) = (Sent::default(), &ops[..]);
        let mut fault = copied.err().map(|errno| Fault {
            kind: FaultKind::System,
            detail: format!("the system refused to copy to the guest's pages: {errno}"),
        });
        for staged in self.staged.drain(..) {
            // Where it was the system, nothing is answered: the pages are used when the port has
            // attached again.
            if fault.is_some() {
                break;
            }
            let (own, others) = rest.split_at(staged.copies);
            rest = others;
            let failed = !own.iter().all(GrantCopy::is_done);
            if failed {
                drops.count(Reason::BadGrant, 1);
            } else {
                sent.frames += 1;
                sent.bytes += staged.content.len as u64;
            }
            let queue = &mut self.queues[staged.queue];
            let requests = &staged.requests[..staged.content.slots()];
            let answered =
                ring(&*queue.rx_page).and_then(|page| queue.rx.respond(&page, requests, &staged.content, failed));
            if let Err(error) = answered {
                fault = Some(ring_fault(staged.queue, "receive", error));
            }
        }
        self.copies = recycle_copies(ops);
        match fault {
            Some(fault) => Err(fault),
            None => Ok(sent),
        }
    }

    /// Notifies the guest of what was transmitted.
    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let page = ring(&*queue.rx_page).map_err(|error| ring_fault(index, "receive", error))?;
            if queue.rx.publish(&page) {
                self.guest.notify(queue.rx_port);
            }
            queue.wants_recheck |= queue.rx.is_in_doubt();
        }
        Ok(())
    }

    /// Turns wake-ups on and looks once more. Rings to the guest need none: frames that wait for
    /// pages are tried again by the worker.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        self.guest.unmask();
        let mut more = false;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let armed = ring(&*queue.tx_page).and_then(|page| queue.tx.arm(&page));
            more |= !armed.map_err(|error| ring_fault(index, "transmit", error))?;
            queue.wants_recheck = true;
        }
        if let Some(control) = &mut self.control {
            more |= !control.arm()?;
        }
        Ok(more)
    }

    pub(super) fn take_recheck(&mut self) -> bool {
        let control = self.control.as_mut().is_some_and(ControlRing::take_recheck);
        self.queues.iter_mut().fold(control, |wanted, queue| wanted | std::mem::take(&mut queue.wants_recheck))
    }

    /// Looks again, some time after [`Connection::take_recheck`].
    pub(super) fn recheck(&mut self) -> Result<Rechecked, Fault> {
        let mut found = Rechecked::default();
        if let Some(control) = &mut self.control {
            (found.work, found.signalled) = control.recheck(&*self.guest)?;
        }
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let broken = |side| move |error| ring_fault(index, side, error);
            let (tx, rx) = (ring(&*queue.tx_page), ring(&*queue.rx_page));
            let (tx, rx) = (tx.map_err(broken("transmit"))?, rx.map_err(broken("receive"))?);
            found.work |= queue.tx.look(&tx).map_err(broken("transmit"))?;
            if queue.tx.is_in_doubt() && queue.tx.recheck(&tx) {
                self.guest.notify(queue.tx_port);
                found.signalled = true;
            }
            if queue.rx.is_in_doubt() && queue.rx.recheck(&rx) {
                self.guest.notify(queue.rx_port);
                found.signalled = true;
            }
        }
        Ok(found)
    }
}

/// The first bytes of frames, up to a page of each, together with their heads.
///
/// The head of a frame is not where its other bytes are, and each piece is a copy of the
/// hypervisor's, of which the kernel makes at most 16 in a hypercall. With the head in one piece
/// with what follows it, a frame of 1514 bytes is one copy in place of two, and one of 64 KiB is
/// 16, one hypercall, in place of 17. Copying a few hundred bytes here takes less time than one
/// copy more.
struct Firsts<'a> {
    /// Of memory whose first byte begins a page, what is not used in this turn.
    free: &'a mut [u8],
}

impl<'a> Firsts<'a> {
    /// The frame's first page; `None` where there is no room for it.
    fn take(&mut self, batch: &Batch<'_>, frame: &Frame) -> Option<&'a [u8]> {
        let len = frame.len().min(PAGE_BYTES);
        // In one page of ours.
        let at = self.free.as_ptr().addr() % PAGE_BYTES;
        let skipped = if at + len > PAGE_BYTES { PAGE_BYTES - at } else { 0 };
        let room = (skipped + len).next_multiple_of(64);
        if room > self.free.len() {
            return None;
        }
        let (used, rest) = std::mem::take(&mut self.free).split_at_mut(room);
        self.free = rest;
        let first = &mut used[skipped..skipped + len];
        let copied = batch.copy(frame, ForeignMut::from(&mut *first));
        debug_assert_eq!(copied, len);
        Some(first)
    }
}

/// Spreads a frame's pieces over the pages that were reserved for it.
struct Fill<'r> {
    domain: u16,
    requests: &'r [RxRequest],
    /// Pages behind the first one that stay empty.
    extras: usize,
    /// Bytes so far, with those before the frame.
    at: usize,
}

impl Fill<'_> {
    fn add_frame<'m>(
        &mut self,
        batch: &Batch<'m>,
        frame: &'m Frame,
        firsts: &mut Firsts<'m>,
        ops: &mut Vec<GrantCopy<'m>>,
    ) {
        let first = firsts.take(batch, frame);
        let mut skipped = first.map_or(0, |first| first.len() - frame.head().len());
        self.add(Foreign::from(first.unwrap_or(frame.head())), ops);
        for piece in batch.tail(frame) {
            self.add(piece.skip(skipped), ops);
            skipped = skipped.saturating_sub(piece.len());
        }
    }

    fn add<'m>(&mut self, mut piece: Foreign<'m>, ops: &mut Vec<GrantCopy<'m>>) {
        while !piece.is_empty() {
            let (page, offset) = (self.at / PAGE_BYTES, self.at % PAGE_BYTES);
            let slot = page + if page > 0 { self.extras } else { 0 };
            // `RxContent::slots` counted a page for each of the frame's bytes.
            let Some(request) = self.requests.get(slot) else { return };
            let part = piece.take(PAGE_BYTES - offset);
            ops.push(GrantCopy::to_guest(self.domain, request.gref, offset as u16, part));
            piece = piece.skip(part.len());
            self.at += part.len();
        }
    }
}

const LONGEST: RxContent = RxContent {
    len: tombolo_switch::frame::MAX_FRAME_BYTES,
    checksum: Checksum::Blank,
    gso: Some(Gso { kind: GsoKind::TcpV4, size: 1 }),
    hash: Some(PacketHash { kind: 0, algorithm: 1, value: 0 }),
    headroom: 0,
};
const _: () = assert!(LONGEST.slots() == MAX_RX_SLOTS);
const _: () = assert!(ETHERNET_HEADER_BYTES == tombolo_ring::xen::netif::MIN_PACKET_BYTES as usize);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Pages;
    use tombolo_switch::frame::Offload;

    /// Number of our pages that a packet's pieces touch, one copy of the hypervisor for each.
    fn copies(at: usize, pieces: &[Piece]) -> usize {
        let mut from = place(at, pieces);
        assert!((at..=at + PAGE_BYTES).contains(&from), "{at} {from}");
        pieces
            .iter()
            .map(|piece| {
                let to = from + usize::from(piece.len);
                let pages = to.div_ceil(PAGE_BYTES) - from / PAGE_BYTES;
                from = to;
                pages
            })
            .sum()
    }

    #[test]
    fn a_frame_to_the_guest_costs_one_copy_a_page_of_it() {
        // A frame of a tap, which begins at a page of ours if it is long.
        let mut source = Pages::new(66_000);
        source.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
        let requests = [RxRequest::default(); MAX_RX_SLOTS];
        for (len, gso, copies) in
            [(60, false, 1), (1514, false, 1), (4096, false, 1), (4097, false, 2), (65_226, true, 16)]
        {
            let (mut memory, mut ops) = (Pages::new(FIRSTS_BYTES), Vec::new());
            let mut batch = Batch::with_capacity(1);
            batch.push(Foreign::from(&source[..len]), Offload::NONE);
            let mut firsts = Firsts { free: &mut memory };
            let mut fill = Fill { domain: 1, requests: &requests, extras: gso.into(), at: 0 };
            fill.add_frame(&batch, &batch.frames()[0], &mut firsts, &mut ops);
            assert_eq!((ops.len(), fill.at), (copies, len), "{len} bytes");
        }
        // Each is whole and in one page of ours, and the memory's end is no fault.
        let (mut memory, mut batch) = (Pages::new(2 * PAGE_BYTES), Batch::with_capacity(1));
        batch.push(Foreign::from(&source[..1514]), Offload::NONE);
        let mut firsts = Firsts { free: &mut memory };
        let taken: Vec<_> = std::iter::from_fn(|| firsts.take(&batch, &batch.frames()[0])).collect();
        assert_eq!(taken.len(), 4);
        for first in taken {
            assert!(first == &source[..1514] && first.as_ptr().addr() % PAGE_BYTES + 1514 <= PAGE_BYTES);
        }
    }

    #[test]
    fn a_packet_of_a_linux_guest_costs_one_copy_a_piece() {
        let piece = |offset: u16, len: u16| {
            let mut piece = Piece::default();
            (piece.offset, piece.len) = (offset, len);
            piece
        };
        let whole = [[piece(2, 66)].as_slice(), &[piece(0, 4096); 15]].concat();
        let within = [piece(130, 66), piece(700, 3396), piece(0, 4096), piece(0, 812)];
        for at in [0, 64, 100, 4032, 4095, 4096, 40_000] {
            assert_eq!(copies(at, &whole), 16, "{at}");
            assert_eq!(copies(at, &within), 4, "{at}");
            for len in [60, 1514, 4096] {
                assert_eq!(copies(at, &[piece(0, len)]), 1, "{len} at {at}");
            }
        }
        assert_eq!(place(64, &[]), 64);
    }
}
