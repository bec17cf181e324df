//! A link to one peer over shared memory: a cell, a guest such as Jailhouse's or Zephyr's, or a
//! process. We are one of the region's two peers; frames go by [`tombolo_ring::ivshmem::net`]. The
//! port is a shell around [`NetworkEnd`], as a process that joins a link is
//! ([`tombolo_ivshmem::peer`]).
//!
//! # Theory of operation
//!
//! The maker of the region and its doorbells hands them over as a [`LinkEnd`]. It is a server, a
//! plan of the file's, or the driver inside a guest. The two ends then agree by their state words
//! on when each has cleared its own output section ([`tombolo_ring::ivshmem::state`]). Frames flow
//! while both are in RUN. Each end writes its own section only: a frame to the peer is copied into
//! ours, and one from the peer is read in place in the peer's.
//!
//! ```text
//!   server's thread                     worker (this file)                    peer
//!   ---------------                     ------------------                    ----
//!   Handle::peer_joined  ──mailbox──►   service(): state machine    ◄─words─►  its driver
//!   Handle::peer_left                   receive, release            ◄─rings──
//!                                       transmit, flush             ─rings─►
//! ```
//!
//! # Without a doorbell
//! A link whose [`LinkEnd::doorbells`] are empty is looked at by a timer: often while frames flow,
//! seldom when idle ([`poll`](PollSettings)). A frame that we send makes it look often again, since
//! an answer is likely.
//!
//! # What a peer can do to us
//!
//! | a peer that | costs | and is counted as |
//! | --- | --- | --- |
//! | writes nonsense into its rings or state | its own link, which goes to RESET until it follows | fault `ring`; `resets_…` |
//! | stops, restarts, dies | its own link, until it is in RUN again | `resets_peer_reset`, `resets_peer_left` |
//! | never takes frames | the frames for it | drops `no_buffer` |
//! | rings without end | its own doorbell: the link is looked at by a timer for a while | `ring_storms` |
//! | writes into *our* section (v1 devices allow it) | its own frames; we never read back what we wrote | – |
//!
//! # Limits
//! Two peers. Frames are as they are on a wire, or behind their offload state if both ends agreed
//! on that ([`LinkEnd::offloads`]), of an MTU up to a quarter of the section's data area. 4096
//! frames out, of which no more than the section's ring and data area hold (290 of 1500 bytes on
//! the default link); 512 held at a time.

mod poll;
#[cfg(test)]
mod tests;

pub use poll::PollSettings;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use tombolo_ivshmem::doorbells::OwnDoorbells;
use tombolo_ivshmem::end::{EndError, LinkEnd, Memory, NetworkEnd, PeerDoorbells};
use tombolo_ivshmem::handshake::PeerWord;
use tombolo_ring::ivshmem::backoff::{LookTimes, Wakes};
use tombolo_ring::ivshmem::net::{MAX_HELD, NetError, OFFLOAD_HEADER_BYTES};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::{Detail, Details};
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, MAX_FRAME_BYTES, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Rechecked, RingFill, Sent};
use tombolo_switch::vnet::VNET_HEADER_BYTES;

use poll::{DOWN_INTERVAL, Poller, Storm, Verdict, grid};
use tombolo_worker::reactor::{Registration, Watch};

/// Frames taken from the ring before they are looked at: as many cache misses are under way at a
/// time.
const CHUNK: usize = 32;

/// Why a port could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum OpenError {
    /// Its parts do not fit together.
    #[error(transparent)]
    End(#[from] EndError),
    /// A doorbell cannot be waited for.
    #[error("ivshmem link: watching doorbell {vector}: {source}")]
    Watch { vector: usize, source: Errno },
}

/// What the server's side left for the port.
#[derive(Default)]
struct PeerChange {
    left: bool,
    joined: Option<Option<Box<dyn PeerDoorbells>>>,
}

struct PeerMailbox {
    /// Whether something is in the slot. A hint to look; the slot's lock orders everything.
    waiting: AtomicBool,
    slot: Mutex<PeerChange>,
    /// On a link whose region we made.
    peer_word: Option<PeerWord>,
    registration: Registration,
}

/// Tells a port of its peer's coming and going, from any thread.
#[derive(Clone)]
pub struct Handle(Arc<PeerMailbox>);

impl Handle {
    /// The peer is there. `doorbells` ring it; `None` where it polls. In place of an earlier one,
    /// if there was one.
    pub fn peer_joined(&self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        self.leave(|slot| slot.joined = Some(doorbells));
    }

    /// The peer is gone: its process ended, or its connection to the server did. On a link whose
    /// region we made its state word is cleared, before this returns.
    pub fn peer_left(&self) {
        if let Some(word) = &self.0.peer_word {
            word.clear();
        }
        self.leave(|slot| *slot = PeerChange { left: true, joined: None });
    }

    /// Has the worker look at the link now.
    pub fn wake(&self) {
        self.0.registration.wake();
    }

    fn leave(&self, what: impl FnOnce(&mut PeerChange)) {
        what(&mut self.0.slot.lock().unwrap_or_else(PoisonError::into_inner));
        // Relaxed: the worker that sees it takes the lock, and the wake-up makes it look.
        self.0.waiting.store(true, Ordering::Relaxed);
        self.0.registration.wake();
    }
}

/// A link as a port of a network. See the module's head.
pub struct Ivshmem {
    end: NetworkEnd,
    shared: Arc<PeerMailbox>,
    doorbells: OwnDoorbells,
    /// One per doorbell, or none while they are not listened to.
    watches: Vec<Watch>,
    poller: Poller,
    storm: Storm,
    /// Frames received and transmitted since the last service.
    exchanged: u64,
    /// It was armed, or the peer was not rung, since this was last asked.
    wants_recheck: bool,
    /// Before the first ring.
    unheard: LookTimes,
    /// The region's pages are gone, which was said: the link is down for good.
    lost: bool,
}

impl Ivshmem {
    /// A port from the parts of its link, and the handle by which it hears of its peer.
    /// `registration` is the port's in its worker's reactor; `poll` matters only where nothing
    /// wakes it.
    ///
    /// # Errors
    /// [`OpenError`], which says what does not fit.
    pub fn new(
        mut parts: LinkEnd,
        poll: PollSettings,
        registration: Registration,
    ) -> Result<(Ivshmem, Handle), OpenError> {
        let owns_region = parts.owns_region;
        let doorbells = OwnDoorbells::from(std::mem::take(&mut parts.doorbells));
        let end = NetworkEnd::new(parts)?;
        let shared = Arc::new(PeerMailbox {
            waiting: AtomicBool::new(false),
            slot: Mutex::default(),
            peer_word: owns_region.then(|| end.handshake.peer_word()),
            registration,
        });
        let handle = Handle(shared.clone());
        let mut port = Ivshmem {
            end,
            shared,
            doorbells,
            watches: Vec::new(),
            poller: Poller::new(poll),
            storm: Storm::default(),
            exchanged: 0,
            wants_recheck: false,
            unheard: LookTimes::default(),
            lost: false,
        };
        port.listen().map_err(|(vector, source)| OpenError::Watch { vector, source })?;
        Ok((port, handle))
    }

    fn listen(&mut self) -> Result<(), (usize, Errno)> {
        let doorbells = self.doorbells.all();
        if self.watches.len() != doorbells.len() {
            let watch =
                |(vector, doorbell)| self.shared.registration.watch(doorbell).map_err(|source| (vector, source));
            self.watches = doorbells.iter().enumerate().map(watch).collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    fn serve(&mut self) {
        // Relaxed: a hint; see `Handle::leave`.
        if !self.shared.waiting.load(Ordering::Relaxed) {
            return;
        }
        self.shared.waiting.store(false, Ordering::Relaxed);
        let slot = std::mem::take(&mut *self.shared.slot.lock().unwrap_or_else(PoisonError::into_inner));
        if slot.left {
            self.end.left();
        }
        if let Some(doorbells) = slot.joined {
            self.end.handshake.joined(doorbells);
            self.doorbells.peer_joined();
            self.unheard = LookTimes::default();
        }
    }

    /// What an error of the rings means: a fault, or only that the peer has stopped meanwhile,
    /// which the state machine follows.
    #[cold]
    fn classify(&mut self, error: NetError) -> Result<(), Fault> {
        if let Some(fault) = self.memory_fault() {
            return Err(fault);
        }
        if self.end.handshake.peer_stopped() {
            self.end.step();
            return Ok(());
        }
        Err(Fault { kind: FaultKind::Ring, detail: format!("peer {}: {error}", self.end.handshake.peer_id()) })
    }

    fn memory_fault(&self) -> Option<Fault> {
        (self.end.handshake.memory().is_lost() && !self.lost).then(|| Fault {
            kind: FaultKind::Memory,
            detail: "pages of the link's region are gone: its file was truncated, or has no space".into(),
        })
    }
}

const _: () = assert!(OFFLOAD_HEADER_BYTES == VNET_HEADER_BYTES);

/// The frame in what a peer has sent, and its offload state.
#[inline]
fn classify_frame(view: Foreign<'_>, with_headers: bool) -> Result<(Foreign<'_>, Offload), Reason> {
    if with_headers {
        let frame = view.skip(OFFLOAD_HEADER_BYTES);
        return Ok((frame, Offload::from_guest(view.read_array(0), frame.len())?));
    }
    match view.len() {
        ..ETHERNET_HEADER_BYTES => Err(Reason::Runt),
        ETHERNET_HEADER_BYTES..=MAX_FRAME_BYTES => Ok((view, Offload::NONE)),
        _ => Err(Reason::TooLong),
    }
}

impl Port for Ivshmem {
    fn kind(&self) -> &'static str {
        "ivshmem"
    }

    fn link(&self) -> Carrier {
        if self.end.handshake.machine().is_up() { Carrier::Up } else { Carrier::Down }
    }

    fn caps(&self) -> Caps {
        if !self.end.handshake.machine().uses_offloads() {
            return Caps::plain(self.end.mtu);
        }
        let segments = self.end.geometry.takes_segments();
        Caps { tso4: segments, tso6: segments, ecn: segments, ..Caps::full(self.end.mtu) }
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.serve();
        let changed = self.end.step();
        if let Some(fault) = self.memory_fault() {
            return Err(fault);
        }
        let exchanged = std::mem::take(&mut self.exchanged);
        if self.doorbells.all().is_empty() {
            return Ok(Some(self.poller.next(now, changed || exchanged != 0)));
        }
        match self.storm.look(now, exchanged) {
            Verdict::Listen => {
                let failed = |(vector, source)| Fault {
                    kind: FaultKind::System,
                    detail: format!("watching doorbell {vector}: {source}"),
                };
                self.listen().map_err(failed)?;
                if !self.end.handshake.machine().is_up() {
                    return Ok(self.end.handshake.is_present().then(|| grid(now, DOWN_INTERVAL)));
                }
                if self.doorbells.wakes() == Wakes::Unheard {
                    self.doorbells.take(|_| true);
                }
                if self.doorbells.wakes() != Wakes::Unheard {
                    return Ok(None);
                }
                Ok(self.unheard.next(now.0, Wakes::Unheard, changed || exchanged != 0).map(Nanos))
            }
            Verdict::Hold(until) => {
                self.watches.clear();
                Ok(Some(until))
            }
        }
    }

    #[inline]
    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        if !self.end.handshake.machine().may_use_rings() {
            return Ok(0);
        }
        let with_headers = self.end.handshake.machine().uses_offloads();
        let memory: &'m Memory = self.end.handshake.memory();
        let mut taken = 0;
        let result = loop {
            let want = CHUNK.min(budget - taken).min(MAX_HELD - self.end.receiver.held());
            let mut views = [Foreign::empty(); CHUNK];
            let mut count = 0;
            let got = self.end.places.of(memory).and_then(|sections| {
                self.end.receiver.receive(&sections, want, |view| {
                    view.prefetch();
                    view.skip(64).prefetch();
                    views[count] = view;
                    count += 1;
                })
            });
            let got = match got {
                Ok(got) => got,
                Err(error) => break Err(error),
            };
            for view in &views[..got] {
                match classify_frame(*view, with_headers) {
                    Ok((frame, offload)) => batch.push(frame, offload),
                    Err(reason) => drops.count(reason, 1),
                }
            }
            taken += got;
            if got < want || want == 0 {
                break Ok(());
            }
        };
        self.exchanged += taken as u64;
        if taken != 0 && self.unheard.is_late() && self.doorbells.wakes() == Wakes::Unheard {
            // The next frame's ring may get lost too, and `service` came before this one.
            self.shared.registration.wake();
        }
        if let Err(error) = result {
            // Without `classify`, which needs all of the port, of which the batch has a part: the
            // worker services a port that it wakes, and `service` follows the peer.
            if self.end.handshake.memory().is_lost() || !self.end.handshake.peer_stopped() {
                let fault =
                    Fault { kind: FaultKind::Ring, detail: format!("peer {}: {error}", self.end.handshake.peer_id()) };
                return Err(self.memory_fault().unwrap_or(fault));
            }
            self.shared.registration.wake();
        }
        Ok(taken)
    }

    #[inline]
    fn release(&mut self) -> Result<(), Fault> {
        let held = self.end.receiver.held();
        if held == 0 || !self.end.handshake.machine().may_use_rings() {
            return Ok(());
        }
        let ring = match self.end.places.of(self.end.handshake.memory()) {
            Ok(sections) => self.end.receiver.release(&sections, held),
            Err(error) => return self.classify(error),
        };
        if ring {
            self.end.handshake.ring_traffic();
        }
        self.wants_recheck |= !ring;
        Ok(())
    }

    #[inline]
    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        if !self.end.handshake.machine().is_up() {
            drops.count(Reason::LinkDown, which.len() as u64);
            return Ok(sent);
        }
        let longest = self.caps().max_frame_bytes as usize;
        let with_headers = self.end.handshake.machine().uses_offloads();
        let header_bytes = if with_headers { OFFLOAD_HEADER_BYTES } else { 0 };
        let NetworkEnd { handshake, places, sender, .. } = &mut self.end;
        let (mut too_long, mut refused) = (0, &[][..]);
        let result = places.of(handshake.memory()).and_then(|sections| {
            sender.reclaim(&sections)?;
            for (at, index) in which.iter().enumerate() {
                let frame = &batch.frames()[usize::from(*index)];
                if frame.len() > longest && frame.offload.segmentation.is_none() {
                    too_long += 1;
                    continue;
                }
                let bytes = header_bytes + frame.len();
                let mut place = sender.push(&sections, bytes);
                if place.is_none() && sender.reclaim(&sections)? != 0 {
                    place = sender.push(&sections, bytes);
                }
                let Some(place) = place else {
                    // Those behind it, too, so that their order is kept.
                    refused = &which[at..];
                    break;
                };
                if with_headers {
                    // Cannot fail: the place has room for it.
                    let _ = place.write_array(0, frame.offload.to_vnet());
                }
                batch.copy(frame, place.skip(header_bytes));
                sent.frames += 1;
                sent.bytes += frame.len() as u64;
            }
            Ok(())
        });
        drops.count(Reason::TooLong, too_long);
        drops.refuse(refused);
        self.exchanged += sent.frames;
        let Err(error) = result else { return Ok(sent) };
        let lost = which.len() as u64 - too_long - refused.len() as u64;
        match self.classify(error) {
            Ok(()) => {
                drops.count(Reason::LinkDown, lost);
                Ok(Sent::default())
            }
            // The caller counts all that `drops` does not hold.
            Err(fault) => Err(fault),
        }
    }

    #[inline]
    fn flush(&mut self) -> Result<(), Fault> {
        if !self.end.handshake.machine().may_use_rings() {
            return Ok(());
        }
        let ring = match self.end.places.of(self.end.handshake.memory()) {
            Ok(sections) => self.end.sender.publish(&sections),
            Err(error) => return self.classify(error),
        };
        if ring {
            self.end.handshake.ring_traffic();
        }
        self.wants_recheck |= self.end.sender.is_in_doubt();
        if self.doorbells.all().is_empty() && self.exchanged != 0 && self.poller.is_slow() {
            // An answer is likely, and the next look may be far away.
            self.poller.hurry();
            self.shared.registration.wake();
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if !self.end.handshake.machine().may_use_rings() {
            return Ok(false);
        }
        // Where nothing rings us the memory is polled anyway.
        self.wants_recheck |= !self.doorbells.all().is_empty();
        match self.end.places.of(self.end.handshake.memory()).and_then(|sections| self.end.receiver.arm(&sections)) {
            Ok(more) => Ok(more),
            Err(error) => self.classify(error).map(|()| false),
        }
    }

    #[inline]
    fn take_recheck(&mut self) -> bool {
        std::mem::take(&mut self.wants_recheck)
    }

    fn recheck(&mut self) -> Result<Rechecked, Fault> {
        if !self.end.handshake.machine().may_use_rings() {
            return Ok(Rechecked::default());
        }
        let NetworkEnd { handshake, places, sender, receiver, .. } = &mut self.end;
        let found = places.of(handshake.memory()).and_then(|sections| {
            let signalled = sender.recheck_ring(&sections) | receiver.recheck_ring(&sections);
            Ok(Rechecked { signalled, work: receiver.has_available(&sections)? })
        });
        match found {
            Ok(found) => {
                if found.signalled {
                    self.end.handshake.ring_traffic();
                }
                Ok(found)
            }
            Err(error) => self.classify(error).map(|()| Rechecked::default()),
        }
    }

    fn disarm(&mut self) {
        // The index that was armed for lies behind by now.
    }

    fn reset(&mut self, _fault: &Fault) {
        self.end.reset();
        if self.end.handshake.memory().is_lost() {
            self.lost = true;
            self.end.left();
        }
    }

    fn details(&self) -> Details {
        let NetworkEnd { handshake, geometry, .. } = &self.end;
        let (machine, resets) = (handshake.machine(), handshake.resets());
        let peer: Detail = match (self.end.handshake.is_present(), machine.state_of(self.end.handshake.look())) {
            (false, _) => "absent".into(),
            (true, Some(state)) => state.name().into(),
            (true, None) => format!("{:#x}", self.end.handshake.look()).into(),
        };
        let wakes = match (self.doorbells.all().len(), self.watches.len()) {
            (0, _) => format!("poll every {} us", self.poller.interval.0 / 1000),
            (n, 0) => format!("{n} doorbells, held: the peer rings without end"),
            (n, _) => format!("{n} doorbells"),
        };
        vec![
            ("own_id", self.end.handshake.own_id().into()),
            ("own_state", machine.own().name().into()),
            ("peer_id", self.end.handshake.peer_id().into()),
            ("peer_state", peer),
            ("vectors", self.end.handshake.vectors().into()),
            ("woken_by", wakes.into()),
            ("ring_entries", geometry.num().into()),
            ("section_bytes", geometry.section_bytes().into()),
            ("mtu", self.end.mtu.into()),
            ("offloads", if machine.uses_offloads() { "carried" } else { "none" }.into()),
            ("rings_sent", self.end.handshake.rings().into()),
            ("ring_storms", self.storm.count.into()),
            ("resets_peer_reset", resets.peer_reset.into()),
            ("resets_peer_left", resets.peer_left.into()),
            ("resets_peer_skipped", resets.peer_skipped.into()),
            ("resets_peer_word", resets.peer_word.into()),
            ("resets_fault", resets.fault.into()),
        ]
    }

    fn fill(&self) -> Option<RingFill> {
        let NetworkEnd { sender, receiver, geometry, .. } = &self.end;
        Some(RingFill {
            frames_out: sender.outstanding() as u64,
            frames_out_max: sender.depth() as u64,
            bytes_out: sender.taken_bytes() as u64,
            bytes_out_max: geometry.data_bytes() as u64,
            frames_waiting: receiver.waiting() as u64,
            frames_waiting_max: u64::from(geometry.num()),
        })
    }
}

impl Drop for Ivshmem {
    fn drop(&mut self) {
        // The peer is not to wait for one that will not come back.
        self.end.handshake.close();
    }
}
