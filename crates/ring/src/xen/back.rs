//! The backend's ends of the two rings, for the fabric.
//!
//! ```text
//!   transmit ring:  take packet … take, copy, answer … answer, publish → notify?   arm, sleep
//!   receive ring:   reserve slots, copy, respond … respond, publish → notify?      arm for slots, sleep
//! ```
//!
//! A packet is taken whole or not at all. One that breaks the protocol is a [`XenError`]; one that
//! is merely not acceptable has a [`Packet::refusal`], and is answered like any other.

use core::fmt;

use super::XenError;
use super::netif::{
    self, Checksum, Extra, FATAL_DATA_SLOTS, Gso, MAX_DATA_SLOTS, MAX_EXTRAS, MIN_PACKET_BYTES, PacketHash,
};
use super::netif::{RSP_ERROR, RSP_NULL, RxRequest, RxResponse, SLOT_BYTES, TX_REQUEST_BYTES, TxRequest, TxResponse};
use super::ring::{BackIndices, PAGE_BYTES, RX_SLOT_BYTES, RingPage, TX_SLOT_BYTES};

/// A piece of a packet: bytes of one page of the frontend's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The page's grant reference. Whether it is a good one shows when it is used.
    pub gref: u32,
    /// Where in the page it starts, in bytes.
    pub offset: u16,
    /// Its length in bytes; it ends within the page.
    pub len: u16,
    id: u16,
}

/// Why a packet is not acceptable, although its slots are well-formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It takes more than [`MAX_DATA_SLOTS`] slots.
    TooManySlots,
    /// It is shorter than an Ethernet header.
    Short,
    /// A piece is empty, or the pieces behind the first are as long as the whole packet, or longer.
    Length,
    /// It wants segmentation without saying that its checksum is blank.
    GsoWithoutChecksum,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::TooManySlots => "too many slots",
            Refusal::Short => "shorter than an Ethernet header",
            Refusal::Length => "the lengths of its pieces do not add up",
            Refusal::GsoWithoutChecksum => "segmentation with a checksum that is not blank",
        })
    }
}

/// A packet that was taken from a transmit ring, or a request about multicast addresses.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    index: u32,
    pieces: [Piece; FATAL_DATA_SLOTS],
    count: u8,
    extras: u8,
    /// Its length in bytes: the sum of its pieces, unless it is refused.
    pub len: u16,
    /// What the frontend says about its checksum.
    pub checksum: Checksum,
    /// How it is to be cut, where it is too large for one frame.
    pub gso: Option<Gso>,
    /// Not a packet, but a request to let an address pass ([`Extra::MulticastAdd`]), or not any
    /// more.
    pub multicast: Option<Extra>,
    /// Why it has to be dropped.
    pub refusal: Option<Refusal>,
}

impl Default for Packet {
    fn default() -> Self {
        Packet::new()
    }
}

impl Packet {
    /// Without any piece, for [`TxBack::take`] to fill.
    pub const fn new() -> Self {
        Packet {
            index: 0,
            pieces: [Piece { gref: 0, offset: 0, len: 0, id: 0 }; FATAL_DATA_SLOTS],
            count: 0,
            extras: 0,
            len: 0,
            checksum: Checksum::None,
            gso: None,
            multicast: None,
            refusal: None,
        }
    }

    /// Its pieces, in order; none for a request about multicast addresses or a packet that is
    /// refused.
    pub fn pieces(&self) -> &[Piece] {
        if self.multicast.is_some() || self.refusal.is_some() { &[] } else { &self.pieces[..usize::from(self.count)] }
    }

    /// The slots that it takes.
    pub fn slots(&self) -> u32 {
        u32::from(self.count) + u32::from(self.extras)
    }
}

/// The backend's end of a transmit ring.
#[derive(Clone, Debug)]
pub struct TxBack {
    ring: BackIndices,
}

impl TxBack {
    /// Attaches to a ring, new or left by another backend ([`BackIndices::attach`]). Notify the
    /// frontend once after that: the last backend may have published responses without doing so.
    pub fn attach(page: &RingPage<'_>) -> Result<Self, XenError> {
        Ok(TxBack { ring: BackIndices::attach(page)? })
    }

    /// The count of slots.
    pub const fn ring(&self) -> &BackIndices {
        &self.ring
    }

    /// Takes the next packet; `false` where there is none, and `packet` then means nothing.
    ///
    /// # Errors
    /// The frontend broke the protocol: the vif is to be disconnected.
    pub fn take(&mut self, page: &RingPage<'_>, packet: &mut Packet) -> Result<bool, XenError> {
        if self.ring.known_requests() == 0 && self.ring.requests(page)? == 0 {
            return Ok(false);
        }
        let index = self.ring.next_request();
        let mut looked = false;
        // How far into the packet requests are there; a packet is published as a whole, but perhaps
        // after the last look.
        let mut there = |ring: &mut BackIndices, slots: u32| -> Result<(), XenError> {
            if ring.known_requests() > slots {
                return Ok(());
            }
            if !looked {
                looked = true;
                if ring.requests(page)? > slots {
                    return Ok(());
                }
            }
            Err(XenError::Incomplete { index })
        };
        let read = |slots: u32| page.read::<TX_REQUEST_BYTES>(TX_SLOT_BYTES, index.wrapping_add(slots));
        let first = TxRequest::parse(&read(0));
        let mut slots = 1u32;
        *packet = Packet { index, count: 1, len: first.size, checksum: Checksum::from_tx(first.flags), ..*packet };
        (packet.extras, packet.gso, packet.multicast, packet.refusal) = (0, None, None, None);
        let mut more = first.flags & netif::TX_EXTRA_INFO != 0;
        while more {
            there(&mut self.ring, slots)?;
            if usize::from(packet.extras) == MAX_EXTRAS {
                return Err(XenError::TooManySlots { index });
            }
            let mut bytes = [0; SLOT_BYTES];
            bytes.copy_from_slice(&read(slots)[..SLOT_BYTES]);
            let (extra, another) = Extra::parse(&bytes)?;
            match extra {
                Extra::Gso(gso) => packet.gso = Some(gso),
                Extra::MulticastAdd(_) | Extra::MulticastDel(_) => packet.multicast = Some(extra),
                // Nothing that is needed of a packet that is sent. Linux's backend takes them too.
                Extra::Hash(_) | Extra::Headroom(_) => {}
            }
            packet.extras += 1;
            slots += 1;
            more = another;
        }
        packet.pieces[0] = Piece { gref: first.gref, offset: first.offset, len: first.size, id: first.id };
        if packet.multicast.is_some() {
            self.ring.consume(slots);
            return Ok(true);
        }
        let (mut flags, mut rest) = (first.flags, 0u32);
        while flags & netif::TX_MORE_DATA != 0 {
            there(&mut self.ring, slots)?;
            if usize::from(packet.count) == FATAL_DATA_SLOTS {
                return Err(XenError::TooManySlots { index });
            }
            let request = TxRequest::parse(&read(slots));
            let piece = Piece { gref: request.gref, offset: request.offset, len: request.size, id: request.id };
            check_piece(index.wrapping_add(slots), piece)?;
            if piece.len == 0 {
                packet.refusal = Some(Refusal::Length);
            }
            // No overflow: at most 20 times 4096.
            rest += u32::from(piece.len);
            packet.pieces[usize::from(packet.count)] = piece;
            packet.count += 1;
            slots += 1;
            flags = request.flags;
        }
        // The first request's size is the whole packet's; its own piece is what the others leave.
        match u32::from(first.size).checked_sub(rest) {
            Some(own) if own > 0 => packet.pieces[0].len = own as u16,
            _ => packet.refusal = Some(Refusal::Length),
        }
        if packet.refusal.is_none() {
            check_piece(index, packet.pieces[0])?;
        }
        if first.size < MIN_PACKET_BYTES {
            packet.refusal = Some(Refusal::Short);
        } else if usize::from(packet.count) > MAX_DATA_SLOTS {
            packet.refusal = Some(Refusal::TooManySlots);
        } else if packet.refusal.is_none() && packet.gso.is_some() && packet.checksum != Checksum::Blank {
            packet.refusal = Some(Refusal::GsoWithoutChecksum);
        }
        self.ring.consume(slots);
        Ok(true)
    }

    /// Answers a packet with `status`, in the slots of its requests, and makes the answer visible.
    /// Packets are answered in the order in which they were taken.
    ///
    /// # Errors
    /// [`XenError::OutOfOrder`] for any other packet than the next one; nothing is written.
    pub fn answer(&mut self, page: &RingPage<'_>, packet: &Packet, status: i16) -> Result<(), XenError> {
        let expected = self.ring.next_response();
        if packet.index != expected || packet.slots() > self.ring.held() {
            return Err(XenError::OutOfOrder { got: packet.index, expected });
        }
        for (at, piece) in packet.pieces[..usize::from(packet.count)].iter().enumerate() {
            self.ring.respond(page, TX_SLOT_BYTES, TxResponse { id: piece.id, status }.emit());
            if at == 0 {
                for _ in 0..packet.extras {
                    self.ring.respond(page, TX_SLOT_BYTES, TxResponse { id: 0, status: RSP_NULL }.emit());
                }
            }
        }
        self.ring.reveal(page);
        Ok(())
    }

    /// Decides about the answers since the last call, which are visible already. Returns whether
    /// the frontend has to be notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.publish(page)
    }

    /// Whether [`TxBack::recheck`] is due some time after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.ring.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the frontend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.recheck(page)
    }

    /// Whether requests wait that were not taken.
    pub fn look(&mut self, page: &RingPage<'_>) -> Result<bool, XenError> {
        Ok(self.ring.requests(page)? > 0)
    }

    /// Asks to be notified at the next request, and looks once more. Returns whether the caller may
    /// sleep; otherwise there are packets to take.
    pub fn arm(&mut self, page: &RingPage<'_>) -> Result<bool, XenError> {
        self.ring.arm(page, 1)
    }
}

/// Checks that a piece lies within its page.
fn check_piece(index: u32, piece: Piece) -> Result<(), XenError> {
    let Piece { offset, len, .. } = piece;
    if usize::from(offset) + usize::from(len) > PAGE_BYTES {
        return Err(XenError::Buffer { index, offset, len });
    }
    Ok(())
}

/// What the slots of a packet to the frontend say of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxContent {
    /// Its length in bytes.
    pub len: usize,
    /// What is known of its checksum.
    pub checksum: Checksum,
    /// How it is to be cut, where it is too large for one frame.
    pub gso: Option<Gso>,
    /// The hash by which it was given to its queue.
    pub hash: Option<PacketHash>,
    /// Bytes that stay free before it, in its first page; below [`PAGE_BYTES`].
    pub headroom: u16,
}

impl RxContent {
    /// Slots that it takes: one per page, and one for each extra info.
    #[inline]
    pub const fn slots(&self) -> usize {
        let pages = (self.len + self.headroom as usize).div_ceil(PAGE_BYTES);
        (if pages == 0 { 1 } else { pages }) + self.extras()
    }

    /// Its extra infos. Their slots are the second and those behind it; their pages stay unused.
    #[inline]
    pub const fn extras(&self) -> usize {
        self.gso.is_some() as usize + self.hash.is_some() as usize + (self.headroom > 0) as usize
    }

    /// The extra info of slot `at`, and whether another one follows.
    fn extra(&self, at: usize) -> Option<(Extra, bool)> {
        let headroom = (self.headroom > 0).then_some(Extra::Headroom(self.headroom));
        let all = [self.gso.map(Extra::Gso), self.hash.map(Extra::Hash), headroom];
        let extra = all.into_iter().flatten().nth(at.checked_sub(1)?)?;
        Some((extra, at < self.extras()))
    }
}

/// The backend's end of a receive ring.
#[derive(Clone, Debug)]
pub struct RxBack {
    ring: BackIndices,
}

impl RxBack {
    /// Attaches to a ring, new or left by another backend ([`BackIndices::attach`]). Notify the
    /// frontend once after that.
    pub fn attach(page: &RingPage<'_>) -> Result<Self, XenError> {
        Ok(RxBack { ring: BackIndices::attach(page)? })
    }

    /// The count of slots.
    pub const fn ring(&self) -> &BackIndices {
        &self.ring
    }

    /// Takes as many posted pages as `requests` has room for, if there are so many; otherwise takes
    /// none and returns `false`. What is taken is answered by [`RxBack::respond`], in the same
    /// groups and the same order.
    ///
    /// With extra infos ([`RxContent::extras`]) the second request is the first one's, and so on:
    /// their pages stay unused.
    ///
    /// # Errors
    /// The frontend broke the protocol: the vif is to be disconnected.
    pub fn reserve(&mut self, page: &RingPage<'_>, requests: &mut [RxRequest]) -> Result<bool, XenError> {
        let needed = requests.len();
        if (self.ring.known_requests() as usize) < needed && (self.ring.requests(page)? as usize) < needed {
            return Ok(false);
        }
        let first = self.ring.next_request();
        for (at, request) in requests.iter_mut().enumerate() {
            *request = RxRequest::parse(&page.read::<SLOT_BYTES>(RX_SLOT_BYTES, first.wrapping_add(at as u32)));
        }
        self.ring.consume(needed as u32);
        Ok(true)
    }

    /// Answers the requests of one packet, visible at once: its bytes fill their pages one after
    /// the other, the first one from its headroom on. A packet that could not be copied is
    /// `failed`: its pages go back with an error.
    ///
    /// # Errors
    /// [`XenError::OutOfOrder`] where `requests` are not as many as [`RxContent::slots`] says, or
    /// more than are held; nothing is written.
    pub fn respond(
        &mut self,
        page: &RingPage<'_>,
        requests: &[RxRequest],
        content: &RxContent,
        failed: bool,
    ) -> Result<(), XenError> {
        let index = self.ring.next_response();
        if requests.len() != content.slots() || requests.len() > self.ring.held() as usize {
            return Err(XenError::OutOfOrder { got: requests.len() as u32, expected: index });
        }
        let mut left = content.len;
        for (at, request) in requests.iter().enumerate() {
            if failed {
                // Each slot by itself, so that nothing is left for the frontend to put together.
                let response = RxResponse { id: request.id, status: RSP_ERROR, ..RxResponse::default() };
                self.ring.respond(page, RX_SLOT_BYTES, response.emit());
                continue;
            }
            if let Some((extra, more)) = content.extra(at) {
                self.ring.respond(page, RX_SLOT_BYTES, extra.emit(more));
                continue;
            }
            let offset = if at == 0 { content.headroom } else { 0 };
            let piece = left.min(PAGE_BYTES.saturating_sub(offset.into()));
            left -= piece;
            let mut flags = if left > 0 { netif::RX_MORE_DATA } else { 0 };
            if at == 0 {
                flags |= content.checksum.rx_flags() | if content.extras() > 0 { netif::RX_EXTRA_INFO } else { 0 };
            }
            let response = RxResponse { id: request.id, offset, flags, status: piece as i16 };
            self.ring.respond(page, RX_SLOT_BYTES, response.emit());
        }
        self.ring.reveal(page);
        Ok(())
    }

    /// Decides about the answers since the last call, which are visible already. Returns whether
    /// the frontend has to be notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.publish(page)
    }

    /// Whether [`RxBack::recheck`] is due some time after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.ring.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the frontend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.recheck(page)
    }

    /// Asks to be notified when `slots` pages are posted, and looks once more. Returns whether the
    /// caller may sleep; otherwise so many are there.
    pub fn arm(&mut self, page: &RingPage<'_>, slots: u32) -> Result<bool, XenError> {
        self.ring.arm(page, slots)
    }
}
