//! The trait that every attachment implements.
//!
//! # Life of a turn
//! The worker that owns a port calls, always from its one thread:
//!
//! ```text
//! service(now)                      take what the control side left (new rings, new socket); run timers
//! disarm()                          no more wake-ups: this port is polled now
//! loop {
//!     receive(budget, batch)        up to budget frames, views into the source's memory
//!     … decide, dest.transmit(…) for each destination, dest.flush() once per turn …
//!     release()                     the batch is gone: give the source its buffers back, notify it once
//!     under budget? arm() -> work came meanwhile? go on : sleep
//! }
//! ```
//!
//! # The window that `arm` closes
//! ```text
//! worker: receive -> nothing        arm: wake-ups on  ->  look again -> nothing -> sleep
//! peer:                     adds a frame ^ sees wake-ups off, does not ring
//! ```
//! A port that looked only before it armed would sleep on that frame. So `arm` first turns wake-ups
//! on, then looks again, and says what it found.
//!
//! # The window that `recheck` closes
//! `arm` needs memory fences on both sides, and a peer's fences may do nothing. QEMU before 8.1
//! drops those of a guest with one CPU ([`tombolo_ring::virtio::notify`] draws it). So a port whose
//! peer shares memory asks for one more look ([`Port::take_recheck`]) when it was armed and when it
//! did not signal its peer. The worker has it look ([`Port::recheck`])
//! [`RECHECK_DELAY`](crate::recheck::RECHECK_DELAY) later, once.
//!
//! # Faults
//! A peer that breaks its protocol makes a method return a [`Fault`]. The worker counts it, calls
//! [`Port::reset`], and continues with the other ports. No method blocks, and none panics over what
//! a peer wrote.

use crate::Nanos;
use crate::detail::Details;
use crate::drop::Drops;
use crate::frame::{Batch, Frame, SegmentKind};
use crate::guard::Reservations;
use std::os::fd::OwnedFd;

/// What a destination takes as it is. What it does not, the switch does in software before it
/// transmits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Takes frames whose checksum is partial.
    pub checksum: bool,
    /// Takes TCP over IPv4 frames that represent several segments.
    pub tso4: bool,
    /// Takes TCP over IPv6 frames that represent several segments.
    pub tso6: bool,
    /// Takes segmented frames with the ECN flag.
    pub ecn: bool,
    /// Takes frames that represent several datagrams of one UDP flow.
    pub uso: bool,
    /// Takes all of this also of frames with a VLAN tag. Those of a destination that does not are
    /// finished in software.
    pub tagged: bool,
    /// Longest frame without segmentation state, in bytes with Ethernet header (and one VLAN tag).
    pub max_frame_bytes: u32,
}

impl Caps {
    /// A destination that takes frames only as they are on a wire, for an MTU in bytes.
    pub const fn plain(mtu: u32) -> Caps {
        Caps {
            checksum: false,
            tso4: false,
            tso6: false,
            ecn: false,
            uso: false,
            tagged: true,
            max_frame_bytes: mtu + 14 + 4,
        }
    }

    /// Whether it takes frames of this kind, given that it takes partial checksums.
    pub const fn takes(&self, kind: SegmentKind) -> bool {
        match kind {
            SegmentKind::Tcp4 => self.tso4,
            SegmentKind::Tcp6 => self.tso6,
            SegmentKind::Udp => self.uso,
        }
    }

    /// A destination that takes all offloads of TCP, for an MTU in bytes.
    pub const fn full(mtu: u32) -> Caps {
        Caps { checksum: true, tso4: true, tso6: true, ecn: true, ..Caps::plain(mtu) }
    }
}

/// What went wrong with a port; its worker resets the port and counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Whose doing it is.
    pub kind: FaultKind,
    /// One sentence: which ring or message, what was expected, what was found.
    pub detail: String,
}

/// Classes of faults, each with its own counter in status and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The peer broke the rules of a ring in shared memory.
    Ring,
    /// The peer broke the rules of its control socket or of a framed stream.
    Protocol,
    /// Memory that the peer shared is gone.
    Memory,
    /// The operating system refused an operation on the port's file descriptors.
    System,
}

impl FaultKind {
    /// The name in status and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::Ring => "ring",
            FaultKind::Protocol => "protocol",
            FaultKind::Memory => "memory",
            FaultKind::System => "system",
        }
    }
}

/// Whether a port can carry frames now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Connected; frames flow.
    Up,
    /// Waiting for its peer; frames to it are dropped as `link_down`.
    Down,
}

/// Rings of a peer that the worker tells apart ([`Port::ring_of`]).
pub const MAX_RINGS: usize = 64;

/// An attachment. See the head of this module for who calls what when.
pub trait Port: Send {
    /// The kind in status and metrics: "vhost-user", "tap", "stream", "pair", "gateway".
    fn kind(&self) -> &'static str;

    /// Whether frames flow.
    fn link(&self) -> Carrier;

    /// What it takes as a destination now; may change when a guest renegotiates, never within a
    /// turn.
    fn caps(&self) -> Caps;

    /// Takes what the control side left and runs timers. Called at each wake-up and at least every
    /// few milliseconds of polling; costs one relaxed load when there is nothing. Returns when to
    /// be called again although nothing happens, if ever.
    ///
    /// # Errors
    /// A [`Fault`] of the control side.
    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault>;

    /// Appends up to `budget` frames to `batch`, as views into the port's memory. Frames that
    /// cannot be taken as they are (a runt, offload fields that lie) are counted in `drops` and
    /// count against the budget. Returns how much of the budget was used: less than `budget` means
    /// that there was no more.
    ///
    /// # Errors
    /// A [`Fault`]; frames already appended are still delivered.
    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault>;

    /// Gives the buffers of all frames received since the last call back to the peer and rings it
    /// where it wants that. Called once per turn, after the batch is gone.
    ///
    /// # Errors
    /// A [`Fault`] of the ring.
    fn release(&mut self) -> Result<(), Fault>;

    /// Copies the frames `which` (indices into `batch`, in order) into the peer's buffers; the peer
    /// sees them at [`Port::flush`] at the latest. Frames that do not fit are counted in `drops`.
    /// Those for which the peer has no buffer *now* are best refused ([`Drops::refuse`]), and then
    /// wait a little in a queue of the worker's. Each frame is within what [`Port::caps`] said.
    /// Returns frames and bytes taken.
    ///
    /// Each frame is accounted for once: it is one of [`Sent::frames`] or one of `drops`.
    ///
    /// # Errors
    /// A [`Fault`]. What was counted in `drops` before it stays counted. The caller counts every
    /// other frame as [`Reason::Reset`], including those already written, since the peer does not
    /// see them any more. The port counts none of them itself.
    ///
    /// [`Reason::Reset`]: crate::drop::Reason::Reset
    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault>;

    /// Which of the peer's rings a frame goes to, below [`MAX_RINGS`]; the same for all frames of a
    /// flow. Where one ring is full, the frames for the others go on. Asked only while frames wait.
    /// Rings may share a number; their frames then wait for each other.
    fn ring_of(&self, frame: &Frame) -> u8 {
        let _ = frame;
        0
    }

    /// Publishes what was transmitted and rings the peer where it wants that.
    ///
    /// # Errors
    /// A [`Fault`] of the ring or the socket.
    fn flush(&mut self) -> Result<(), Fault>;

    /// Whether what was transmitted left frames to be received from this port: true only of ports
    /// whose peer is this process, such as the gateway, which answers within [`Port::transmit`].
    /// The worker then gives the port a turn, beginning with [`Port::service`], without any
    /// wake-up.
    fn answers(&self) -> bool {
        false
    }

    /// What it knows anew of whose IPv6 addresses are, where it is the network's gateway. Asked
    /// after each [`Port::service`].
    fn take_reservations(&mut self) -> Option<Reservations> {
        None
    }

    /// Turns wake-ups on and looks once more: `true` means that work is there, wake-ups may be on
    /// or off, and the caller polls on.
    ///
    /// # Errors
    /// A [`Fault`] of the ring.
    fn arm(&mut self) -> Result<bool, Fault>;

    /// Whether a look is due some time after what happened since the last call: the port was armed,
    /// or its peer was not signalled. Asked at the end of each turn and after each [`Port::flush`].
    /// Ports whose peer cannot miss a wake-up (the kernel's, or this process itself) never want
    /// one.
    #[inline]
    fn take_recheck(&mut self) -> bool {
        false
    }

    /// Looks again, some time after [`Port::take_recheck`] asked for it: whether work waits though
    /// no wake-up came, and whether the peer wishes for a signal by now, which it then gets.
    /// Changes nothing of what `arm` or `disarm` set up. Asks for no further look.
    ///
    /// # Errors
    /// A [`Fault`] of the ring.
    fn recheck(&mut self) -> Result<Rechecked, Fault> {
        Ok(Rechecked::default())
    }

    /// Turns wake-ups off where that saves the peer work.
    fn disarm(&mut self);

    /// Drops everything held for the peer and returns to waiting for one, after `fault`.
    fn reset(&mut self, fault: &Fault);

    /// The state that the port of another process needs to continue from here. The worker is
    /// stopped meanwhile. The port must be able to continue itself, since a handover can be called
    /// off. `None` where the kind starts from scratch.
    fn hand_over(&self) -> Option<HandOver> {
        None
    }

    /// Facts of this kind for status: names and values, such as negotiated features or ring sizes.
    fn details(&self) -> Details {
        Vec::new()
    }

    /// How full its rings are, for status; `None` where it does not tell.
    fn fill(&self) -> Option<RingFill> {
        None
    }
}

/// How full a port's rings are at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFill {
    /// Frames on their way to the peer.
    pub frames_out: u64,
    /// How many there can be.
    pub frames_out_max: u64,
    /// Bytes that they take.
    pub bytes_out: u64,
    /// Room for bytes in the ring to the peer.
    pub bytes_out_max: u64,
    /// Frames of the peer that wait to be taken.
    pub frames_waiting: u64,
    /// Entries of its ring.
    pub frames_waiting_max: u64,
}

/// What a [`Port::recheck`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rechecked {
    /// Frames wait to be received.
    pub work: bool,
    /// The peer was signalled late.
    pub signalled: bool,
}

/// The state of a port at a planned handover.
#[derive(Debug, Default)]
pub struct HandOver {
    /// In the format of the port's kind, which begins with a version.
    pub state: Vec<u8>,
    /// Its descriptors, in the order of the format.
    pub fds: Vec<OwnedFd>,
}

/// What a [`Port::transmit`] took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// How many frames were taken.
    pub frames: u64,
    /// Length of those frames in bytes.
    pub bytes: u64,
}
