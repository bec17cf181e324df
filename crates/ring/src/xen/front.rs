//! The frontend's ends of the two rings: for cells, and as the peer in tests.
//!
//! The caller owns the buffers, as pages that it has granted to the backend for as long as the
//! device lives. With each buffer goes a token of its choice, which comes back when the backend has
//! answered. So buffers can be given back in any order, and the caller needs no table by slot.
//!
//! ```text
//!   transmit:  push … push, publish → notify?     complete … complete, arm, sleep
//!   receive:   post … post, publish → notify?     receive … receive, arm, sleep
//! ```

use super::XenError;
use super::netif::{self, Checksum, Extra, Gso, MAX_DATA_SLOTS, MAX_EXTRAS, RSP_NULL, RxRequest, RxResponse};
use super::netif::{PacketHash, SLOT_BYTES, TX_RESPONSE_BYTES, TxRequest, TxResponse};
use super::ring::{FrontIndices, PAGE_BYTES, RING_SLOTS, RX_SLOT_BYTES, RingPage, TX_SLOT_BYTES, slot_of};

/// A piece of a packet to send: bytes of one granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPart {
    /// The page's grant reference.
    pub gref: u32,
    /// Where in the page the piece starts, in bytes.
    pub offset: u16,
    /// Its length in bytes; at least 1, and not beyond the page.
    pub len: u16,
    /// Comes back with [`Completed`].
    pub token: u32,
}

/// A piece that the backend has answered: its buffer may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The caller's name for the piece.
    pub token: u32,
    /// [`RSP_OKAY`](netif::RSP_OKAY), [`RSP_ERROR`](netif::RSP_ERROR) or
    /// [`RSP_DROPPED`](netif::RSP_DROPPED): what the backend says became of the packet.
    pub status: i16,
}

/// The token of a multicast request, which has no buffer; [`TxFront::complete`] hands out nothing
/// for it.
const NO_BUFFER: u64 = u64::MAX;
const FREE: u64 = u64::MAX - 1;

/// The frontend's end of a transmit ring.
#[derive(Clone, Debug)]
pub struct TxFront {
    ring: FrontIndices,
    /// Token by identifier, [`NO_BUFFER`], or [`FREE`].
    tokens: [u64; RING_SLOTS as usize],
    /// Identifiers that are free, as a stack.
    ids: [u8; RING_SLOTS as usize],
    free_ids: u16,
}

impl Default for TxFront {
    fn default() -> Self {
        TxFront::new()
    }
}

impl TxFront {
    /// For a page that was [`RingPage::initialise`]d. To connect again, initialise the page and
    /// make a new one.
    pub fn new() -> Self {
        TxFront {
            ring: FrontIndices::new(),
            tokens: [FREE; RING_SLOTS as usize],
            ids: core::array::from_fn(|id| (RING_SLOTS as usize - 1 - id) as u8),
            free_ids: RING_SLOTS as u16,
        }
    }

    /// The count of slots.
    pub const fn ring(&self) -> &FrontIndices {
        &self.ring
    }

    /// Slots that are free. A packet needs one for each piece and one for segmentation.
    #[inline]
    pub fn free(&self) -> u32 {
        self.ring.free().min(u32::from(self.free_ids))
    }

    fn take_id(&mut self, token: u64) -> u16 {
        // The callers look at `free` first.
        let id = self.free_ids.checked_sub(1).map_or(0, |top| {
            self.free_ids = top;
            self.ids[usize::from(top)]
        });
        self.tokens[usize::from(id)] = token;
        u16::from(id)
    }

    /// Writes the requests of a packet. Returns whether there was room; nothing is written
    /// otherwise.
    ///
    /// # Errors
    /// [`XenError::TooManySlots`] for more than [`MAX_DATA_SLOTS`] pieces or none,
    /// [`XenError::Buffer`] for a piece that is empty or beyond its page, [`XenError::Length`] for
    /// a packet of more than 65535 bytes.
    pub fn push(
        &mut self,
        page: &RingPage<'_>,
        parts: &[TxPart],
        checksum: Checksum,
        gso: Option<Gso>,
    ) -> Result<bool, XenError> {
        let index = self.ring.next_request();
        let (Some((first, rest)), true) = (parts.split_first(), parts.len() <= MAX_DATA_SLOTS) else {
            return Err(XenError::TooManySlots { index });
        };
        let mut total = 0u32;
        for part in parts {
            if part.len == 0 || usize::from(part.offset) + usize::from(part.len) > PAGE_BYTES {
                return Err(XenError::Buffer { index, offset: part.offset, len: part.len });
            }
            // No overflow: at most 18 times 4096.
            total += u32::from(part.len);
        }
        let Ok(total) = u16::try_from(total) else { return Err(XenError::Length { index, total: u16::MAX }) };
        if (self.free() as usize) < parts.len() + usize::from(gso.is_some()) {
            return Ok(false);
        }
        let more = |rest: usize| if rest > 0 { netif::TX_MORE_DATA } else { 0 };
        let extra = if gso.is_some() { netif::TX_EXTRA_INFO } else { 0 };
        let flags = checksum.tx_flags() | more(rest.len()) | extra;
        self.push_part(page, first, flags, total);
        if let Some(gso) = gso {
            self.push_extra(page, Extra::Gso(gso));
        }
        for (at, part) in rest.iter().enumerate() {
            self.push_part(page, part, more(rest.len() - at - 1), part.len);
        }
        Ok(true)
    }

    fn push_part(&mut self, page: &RingPage<'_>, part: &TxPart, flags: u16, size: u16) {
        let id = self.take_id(u64::from(part.token));
        let request = TxRequest { gref: part.gref, offset: part.offset, flags, id, size };
        self.ring.push(page, TX_SLOT_BYTES, request.emit());
    }

    fn push_extra(&mut self, page: &RingPage<'_>, extra: Extra) {
        let mut slot = [0; TX_SLOT_BYTES];
        slot[..SLOT_BYTES].copy_from_slice(&extra.emit(false));
        self.ring.push(page, TX_SLOT_BYTES, slot);
    }

    /// Writes a request to let a multicast address pass, or not any more. Returns whether there was
    /// room for its two slots.
    ///
    /// # Errors
    /// [`XenError::ExtraType`] for what belongs to a packet.
    pub fn push_multicast(&mut self, page: &RingPage<'_>, extra: Extra) -> Result<bool, XenError> {
        if !matches!(extra, Extra::MulticastAdd(_) | Extra::MulticastDel(_)) {
            return Err(XenError::ExtraType { got: extra.emit(false)[0] });
        }
        if self.free() < 2 {
            return Ok(false);
        }
        let id = self.take_id(NO_BUFFER);
        let request = TxRequest { flags: netif::TX_EXTRA_INFO, id, ..TxRequest::default() };
        self.ring.push(page, TX_SLOT_BYTES, request.emit());
        self.push_extra(page, extra);
        Ok(true)
    }

    /// Makes the requests visible. Returns whether the backend has to be notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.publish(page)
    }

    /// Whether [`TxFront::recheck`] is due some time after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.ring.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the backend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.recheck(page)
    }

    /// Takes the next response that gives a buffer back; `None` where there is none.
    ///
    /// # Errors
    /// [`XenError::IndexJump`] and [`XenError::ResponseId`]: the backend is broken, and so is the
    /// ring.
    pub fn complete(&mut self, page: &RingPage<'_>) -> Result<Option<Completed>, XenError> {
        while self.ring.responses(page)? > 0 {
            let index = self.ring.consume();
            let response = TxResponse::parse(&page.read::<TX_RESPONSE_BYTES>(TX_SLOT_BYTES, index));
            // The slot of an extra info: its identifier means nothing.
            if response.status == RSP_NULL {
                continue;
            }
            let bad = XenError::ResponseId { index, got: response.id };
            let token = self.tokens.get_mut(usize::from(response.id)).ok_or(bad)?;
            let token = core::mem::replace(token, FREE);
            // `free_ids` is below RING_SLOTS while one of the identifiers is in use.
            if token == FREE {
                return Err(bad);
            }
            self.ids[usize::from(self.free_ids)] = response.id as u8;
            self.free_ids += 1;
            if token != NO_BUFFER {
                return Ok(Some(Completed { token: token as u32, status: response.status }));
            }
        }
        Ok(None)
    }

    /// Asks to be notified when `after` more responses are there, and looks once more. Returns
    /// whether the caller may sleep; otherwise there are responses to complete.
    pub fn arm(&mut self, page: &RingPage<'_>, after: u32) -> Result<bool, XenError> {
        self.ring.arm(page, after)
    }

    /// Hands out the tokens of all buffers that the backend has not answered, for a frontend that
    /// disconnects. The backend may still read them until it is known to be gone.
    pub fn outstanding(&self) -> impl Iterator<Item = u32> + '_ {
        self.tokens.iter().filter(|token| **token < FREE).map(|token| *token as u32)
    }
}

/// A received packet, without its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its length in bytes: the sum of its pieces.
    pub len: usize,
    /// What the backend says about its checksum.
    pub checksum: Checksum,
    /// How it is to be cut, where it is too large for one frame.
    pub gso: Option<Gso>,
    /// The hash by which the backend chose the queue, where it was asked for one.
    pub hash: Option<PacketHash>,
    /// Whether the backend reported an error for one of its pieces: the packet is to be dropped.
    pub failed: bool,
}

/// A piece of a received packet, or a buffer that comes back unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxPart {
    /// What was posted with the buffer.
    pub token: u32,
    /// Where in the page the piece starts, in bytes.
    pub offset: u16,
    /// Its length in bytes; 0 where the buffer comes back unused.
    pub len: u16,
}

/// The frontend's end of a receive ring.
#[derive(Clone, Debug)]
pub struct RxFront {
    ring: FrontIndices,
    tokens: [u32; RING_SLOTS as usize],
}

impl Default for RxFront {
    fn default() -> Self {
        RxFront::new()
    }
}

impl RxFront {
    /// For a page that was [`RingPage::initialise`]d. To connect again, initialise the page and
    /// make a new one.
    pub const fn new() -> Self {
        RxFront { ring: FrontIndices::new(), tokens: [0; RING_SLOTS as usize] }
    }

    /// The count of slots.
    pub const fn ring(&self) -> &FrontIndices {
        &self.ring
    }

    /// Slots that are free for empty buffers.
    #[inline]
    pub fn free(&self) -> u32 {
        self.ring.free()
    }

    /// Posts an empty page. Returns whether there was room.
    #[inline]
    pub fn post(&mut self, page: &RingPage<'_>, gref: u32, token: u32) -> bool {
        if self.ring.free() == 0 {
            return false;
        }
        let slot = slot_of(self.ring.next_request());
        self.tokens[slot] = token;
        self.ring.push(page, RX_SLOT_BYTES, RxRequest { id: slot as u16, gref }.emit());
        true
    }

    /// Makes the posted pages visible. Returns whether the backend has to be notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.publish(page)
    }

    /// Whether [`RxFront::recheck`] is due some time after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.ring.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the backend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.recheck(page)
    }

    /// Takes the next packet, piece by piece into `part`; `None` where there is none. Each buffer
    /// that the packet took comes back, with a length of 0 where its slot carried an extra info or
    /// an error.
    ///
    /// # Errors
    /// The backend is broken, and so is the ring; buffers that were handed out by then are the
    /// caller's.
    pub fn receive(&mut self, page: &RingPage<'_>, mut part: impl FnMut(RxPart)) -> Result<Option<Received>, XenError> {
        if self.ring.responses(page)? == 0 {
            return Ok(None);
        }
        let first_index = self.ring.next_response();
        let mut received = Received { len: 0, checksum: Checksum::None, gso: None, hash: None, failed: false };
        let (mut pieces, mut extras) = (0usize, 0usize);
        loop {
            let index = self.next_of_packet(page, first_index)?;
            let response = RxResponse::parse(&page.read::<SLOT_BYTES>(RX_SLOT_BYTES, index));
            let token = self.tokens[slot_of(index)];
            if usize::from(response.id) != slot_of(index) {
                return Err(XenError::ResponseId { index, got: response.id });
            }
            let len = u16::try_from(response.status).unwrap_or(0);
            if usize::from(response.offset) + usize::from(len) > PAGE_BYTES {
                return Err(XenError::Buffer { index, offset: response.offset, len });
            }
            if response.flags & netif::RX_GSO_PREFIX != 0 {
                return Err(XenError::ExtraType { got: 0 });
            }
            received.failed |= response.status < 0;
            received.len += usize::from(len);
            part(RxPart { token, offset: response.offset, len });
            pieces += 1;
            if pieces == 1 {
                received.checksum = Checksum::from_rx(response.flags);
                let mut more = response.flags & netif::RX_EXTRA_INFO != 0;
                while more {
                    extras += 1;
                    if extras > MAX_EXTRAS {
                        return Err(XenError::TooManySlots { index: first_index });
                    }
                    let index = self.next_of_packet(page, first_index)?;
                    let (extra, another) = Extra::parse(&page.read::<SLOT_BYTES>(RX_SLOT_BYTES, index))?;
                    match extra {
                        Extra::Gso(gso) => received.gso = Some(gso),
                        Extra::Hash(hash) => received.hash = Some(hash),
                        // Where the packet begins is told by its offset too, by a backend that was
                        // not asked for room.
                        Extra::Headroom(_) => {}
                        other => return Err(XenError::ExtraType { got: other.emit(false)[0] }),
                    }
                    part(RxPart { token: self.tokens[slot_of(index)], offset: 0, len: 0 });
                    more = another;
                }
            }
            if response.flags & netif::RX_MORE_DATA == 0 {
                return Ok(Some(received));
            }
            // As many as the largest packet takes where each piece starts at an odd place.
            if pieces > MAX_DATA_SLOTS {
                return Err(XenError::TooManySlots { index: first_index });
            }
        }
    }

    /// The index of the packet's next slot.
    fn next_of_packet(&mut self, page: &RingPage<'_>, first: u32) -> Result<u32, XenError> {
        // The first look may have been long ago: the rest of a packet whose start it saw can be
        // there by now.
        if self.ring.responses(page)? == 0 {
            return Err(XenError::Incomplete { index: first });
        }
        Ok(self.ring.consume())
    }

    /// Asks to be notified at the next response, and looks once more. Returns whether the caller
    /// may sleep; otherwise there are packets to receive.
    pub fn arm(&mut self, page: &RingPage<'_>) -> Result<bool, XenError> {
        self.ring.arm(page, 1)
    }

    /// Hands out the tokens of all pages that are posted, for a frontend that disconnects. The
    /// backend may still write them until it is known to be gone.
    pub fn outstanding(&self) -> impl Iterator<Item = u32> + '_ {
        let next = self.ring.next_request();
        (0..self.ring.outstanding()).map(move |back| self.tokens[slot_of(next.wrapping_sub(1 + back))])
    }
}
