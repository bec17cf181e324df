//! The shared page of a ring (xen/include/public/io/ring.h), and how each side counts in it.
//!
//! Indices are 32 bits and run free; the low 8 bits name the slot, and the low 7 on the control ring. `req_event` and `rsp_event` hold
//! the value of the index at which their writer wants to be notified. This is one more than
//! VirtIO's event index would be. The wake-up protocol is that of
//! [`virtio::notify`](crate::virtio::notify), and so is the second look at
//! [`RECHECK_NS`](notify::RECHECK_NS).
//!
//! The code that decides about signals keeps the low 16 bits of the indices. So an event index that
//! was not renewed costs one notification too many in 65536 slots, and none is ever missed.

use core::num::Wrapping;
use core::sync::atomic::Ordering;

use super::XenError;
use crate::mem::ForeignMut;
use crate::virtio::notify::{self, Signals, Suppression, Word};

// --- the header's ---

/// Bytes of a ring's page, and of each page that a grant names.
pub const PAGE_BYTES: usize = 4096;
/// Offset of `req_prod`; the frontend writes it.
pub const REQ_PROD: usize = 0;
/// Offset of `req_event`; the backend writes it.
pub const REQ_EVENT: usize = 4;
/// Offset of `rsp_prod`; the backend writes it.
pub const RSP_PROD: usize = 8;
/// Offset of `rsp_event`; the frontend writes it.
pub const RSP_EVENT: usize = 12;
/// Offset of the first slot.
pub const SLOTS: usize = 64;
/// Bytes of a slot on the transmit ring: the larger of its request (12) and its response (4).
pub const TX_SLOT_BYTES: usize = 12;
/// Bytes of a slot on the receive ring.
pub const RX_SLOT_BYTES: usize = 8;
/// Bytes of a slot on the control ring.
pub const CTRL_SLOT_BYTES: usize = 16;
/// Slots of the transmit and of the receive ring.
pub const RING_SLOTS: u32 = slots_of(TX_SLOT_BYTES);
/// Slots of the control ring.
pub const CTRL_SLOTS: u32 = slots_of(CTRL_SLOT_BYTES);

/// Slots of a ring: the largest power of two that fits.
const fn slots_of(slot_bytes: usize) -> u32 {
    1 << ((PAGE_BYTES - SLOTS) / slot_bytes).ilog2()
}

const _: () = assert!(RING_SLOTS == 256 && slots_of(RX_SLOT_BYTES) == RING_SLOTS && CTRL_SLOTS == 128);

/// Maps a free-running index to its place in the transmit or receive ring.
#[inline]
pub const fn slot_of(index: u32) -> usize {
    (index % RING_SLOTS) as usize
}

/// A ring's page, taken once per call of a ring's method.
///
/// Constructed only with a whole page that is aligned to 64 bytes, so a masked index is always
/// inside.
#[derive(Clone, Copy, Debug)]
pub struct RingPage<'m>(ForeignMut<'m>);

/// One of the four words. Reads as 0 and ignores writes if it were outside, which [`RingPage`]
/// rules out.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageWord<'m>(ForeignMut<'m>, usize);

impl Word for PageWord<'_> {
    type Value = u32;
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.0.as_foreign().load_u32(self.1, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        let _ = self.0.store_u32(self.1, value, order);
    }
}

impl<'m> RingPage<'m> {
    /// The ring in `page`, which is at least [`PAGE_BYTES`] long and aligned to 64 bytes.
    pub fn new(page: ForeignMut<'m>) -> Result<Self, XenError> {
        let aligned = (page.as_mut_ptr() as usize).is_multiple_of(SLOTS);
        if page.len() < PAGE_BYTES || !aligned {
            return Err(XenError::Page { bytes: page.len() });
        }
        Ok(RingPage(page.take(PAGE_BYTES)))
    }

    /// Prepares the page for a new connection. The frontend does this before it grants the page.
    pub fn initialise(&self) {
        for at in (0..PAGE_BYTES).step_by(64) {
            let _ = self.0.write_array(at, [0u8; 64]);
        }
        // Both event indices start at 1: the first entry is announced.
        self.req_event().store(1, Ordering::Relaxed);
        self.rsp_event().store(1, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn req_prod(&self) -> PageWord<'m> {
        PageWord(self.0, REQ_PROD)
    }
    #[inline]
    pub(super) fn req_event(&self) -> PageWord<'m> {
        PageWord(self.0, REQ_EVENT)
    }
    #[inline]
    pub(super) fn rsp_prod(&self) -> PageWord<'m> {
        PageWord(self.0, RSP_PROD)
    }
    #[inline]
    pub(super) fn rsp_event(&self) -> PageWord<'m> {
        PageWord(self.0, RSP_EVENT)
    }

    /// Copies the first `N` bytes of an index's slot, on a ring with slots of `slot_bytes`.
    #[inline]
    pub(super) fn read<const N: usize>(&self, slot_bytes: usize, index: u32) -> [u8; N] {
        // Never outside (see the constructor and `slots_of`), so the default is never taken.
        self.0.as_foreign().read_array(Self::place(slot_bytes, index)).unwrap_or([0; N])
    }

    /// Writes the first `N` bytes of an index's slot.
    #[inline]
    pub(super) fn write<const N: usize>(&self, slot_bytes: usize, index: u32, bytes: [u8; N]) {
        let _ = self.0.write_array(Self::place(slot_bytes, index), bytes);
    }

    /// Where in the page an index's slot begins.
    #[inline]
    const fn place(slot_bytes: usize, index: u32) -> usize {
        SLOTS + slot_bytes * (index % slots_of(slot_bytes)) as usize
    }
}

/// A request as the event word says it, in the terms of [`notify`].
#[inline]
pub(super) fn suppression_of(event: u32) -> Suppression {
    Suppression::After(event.wrapping_sub(1) as u16)
}

/// Checks a peer's producer index: up to `room` entries from `from` on.
#[inline]
fn check_index(got: u32, from: Wrapping<u32>, room: u32) -> Result<u32, XenError> {
    let entries = got.wrapping_sub(from.0);
    if entries > room { Err(XenError::IndexJump { got, from: from.0, room }) } else { Ok(entries) }
}

/// The frontend's count on a ring of so many slots: it produces requests and consumes responses.
#[derive(Clone, Debug)]
pub struct FrontIndices<const COUNT: u32 = RING_SLOTS> {
    /// The next request to write.
    req: Wrapping<u32>,
    /// `req_prod` as last published.
    published: Wrapping<u32>,
    /// The next response to read.
    rsp: Wrapping<u32>,
    /// `rsp_prod` as last read and checked.
    seen: Wrapping<u32>,
    signals: Signals,
}

impl<const COUNT: u32> Default for FrontIndices<COUNT> {
    fn default() -> Self {
        FrontIndices::new()
    }
}

impl<const COUNT: u32> FrontIndices<COUNT> {
    /// For a page that was [`RingPage::initialise`]d.
    pub const fn new() -> Self {
        let zero = Wrapping(0);
        FrontIndices { req: zero, published: zero, rsp: zero, seen: zero, signals: Signals::new(0) }
    }

    /// Slots that are free for requests.
    #[inline]
    pub fn free(&self) -> u32 {
        COUNT - self.outstanding()
    }

    /// Requests whose response was not consumed, published or not.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        (self.req - self.rsp).0
    }

    /// Index of the next request.
    #[inline]
    pub fn next_request(&self) -> u32 {
        self.req.0
    }

    /// Index of the next response.
    #[inline]
    pub fn next_response(&self) -> u32 {
        self.rsp.0
    }

    /// Writes the next request. The caller has looked at [`FrontIndices::free`].
    #[inline]
    pub(super) fn push<const N: usize>(&mut self, page: &RingPage<'_>, slot_bytes: usize, bytes: [u8; N]) -> u32 {
        debug_assert!(self.free() > 0);
        let index = self.req.0;
        page.write(slot_bytes, index, bytes);
        self.req += 1;
        index
    }

    /// Makes the requests visible. Returns whether the backend has to be notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        if self.published == self.req {
            return false;
        }
        self.published = self.req;
        notify::publish(&page.req_prod(), self.req.0);
        let event = notify::suppression(&page.req_event());
        self.signals.decide(suppression_of(event), self.req.0 as u16)
    }

    /// Whether [`FrontIndices::recheck`] is due [`notify::RECHECK_NS`] after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the backend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        let event = notify::suppression(&page.req_event());
        self.signals.recheck(suppression_of(event), self.published.0 as u16)
    }

    /// Responses that can be consumed.
    #[inline]
    pub fn responses(&mut self, page: &RingPage<'_>) -> Result<u32, XenError> {
        if self.seen == self.rsp {
            self.accept(notify::available(&page.rsp_prod()))?;
        }
        Ok((self.seen - self.rsp).0)
    }

    fn accept(&mut self, rsp_prod: u32) -> Result<(), XenError> {
        let room = (self.published - self.seen).0;
        check_index(rsp_prod, self.seen, room)?;
        self.seen = Wrapping(rsp_prod);
        Ok(())
    }

    /// Takes the next response's index; there is one ([`FrontIndices::responses`]).
    #[inline]
    pub(super) fn consume(&mut self) -> u32 {
        debug_assert!(self.rsp != self.seen);
        let index = self.rsp.0;
        self.rsp += 1;
        index
    }

    /// Asks to be notified when `after` more responses are there (at least 1), and looks once more.
    /// Returns whether the caller may sleep; otherwise there are responses to consume.
    pub fn arm(&mut self, page: &RingPage<'_>, after: u32) -> Result<bool, XenError> {
        let after = after.clamp(1, self.outstanding().max(1));
        let event = self.rsp + Wrapping(after);
        let rsp_prod = notify::arm(&page.rsp_event(), event.0, &page.rsp_prod());
        self.accept(rsp_prod)?;
        Ok((self.seen - self.rsp).0 < after)
    }
}

/// The backend's count on a ring of so many slots: it consumes requests and produces responses.
#[derive(Clone, Debug)]
pub struct BackIndices<const COUNT: u32 = RING_SLOTS> {
    /// The next request to read.
    req: Wrapping<u32>,
    /// `req_prod` as last read and checked.
    seen: Wrapping<u32>,
    /// The next response to write.
    rsp: Wrapping<u32>,
    /// `rsp_prod` as last published.
    published: Wrapping<u32>,
    /// The responses up to which it was decided whether to notify.
    decided: Wrapping<u32>,
    signals: Signals,
}

impl<const COUNT: u32> BackIndices<COUNT> {
    /// Attaches to a ring: a new one, or one whose last backend is gone. Everything before
    /// `rsp_prod` is answered; requests behind it are taken (again).
    ///
    /// # Errors
    /// [`XenError::IndexJump`] where the ring's indices do not fit each other.
    pub fn attach(page: &RingPage<'_>) -> Result<Self, XenError> {
        let rsp_prod = Wrapping(notify::available(&page.rsp_prod()));
        let mut ring = BackIndices {
            req: rsp_prod,
            seen: rsp_prod,
            rsp: rsp_prod,
            published: rsp_prod,
            decided: rsp_prod,
            signals: Signals::new(rsp_prod.0 as u16),
        };
        ring.accept(notify::available(&page.req_prod()))?;
        Ok(ring)
    }

    /// Requests that are published and were not taken. One read of `req_prod`.
    #[inline]
    pub fn requests(&mut self, page: &RingPage<'_>) -> Result<u32, XenError> {
        self.accept(notify::available(&page.req_prod()))?;
        Ok(self.known_requests())
    }

    /// As [`BackIndices::requests`], without a look at the page.
    #[inline]
    pub fn known_requests(&self) -> u32 {
        (self.seen - self.req).0
    }

    /// Requests that were taken and not answered.
    #[inline]
    pub fn held(&self) -> u32 {
        (self.req - self.rsp).0
    }

    fn accept(&mut self, req_prod: u32) -> Result<(), XenError> {
        // A frontend has at most so many requests without a published response.
        let room = COUNT - (self.seen - self.published).0.min(COUNT);
        check_index(req_prod, self.seen, room)?;
        self.seen = Wrapping(req_prod);
        Ok(())
    }

    /// Index of the next request.
    #[inline]
    pub(super) fn next_request(&self) -> u32 {
        self.req.0
    }

    /// Takes `count` requests, which are there ([`BackIndices::known_requests`]).
    #[inline]
    pub(super) fn consume(&mut self, count: u32) {
        debug_assert!(count <= self.known_requests());
        self.req += Wrapping(count);
    }

    /// Index of the next response.
    #[inline]
    pub(super) fn next_response(&self) -> u32 {
        self.rsp.0
    }

    /// Writes the next response, into the slot of its request. There is a request without one
    /// ([`BackIndices::held`]).
    #[inline]
    pub(super) fn respond<const N: usize>(&mut self, page: &RingPage<'_>, slot_bytes: usize, bytes: [u8; N]) {
        debug_assert!(self.held() > 0);
        page.write(slot_bytes, self.rsp.0, bytes);
        self.rsp += 1;
    }

    /// Makes the responses of one packet visible, without a notification. A response takes the
    /// place of its request. So a backend that ends between the two would leave slots that the next
    /// one takes for requests. Therefore this runs packet by packet, and at once.
    #[inline]
    pub(super) fn reveal(&mut self, page: &RingPage<'_>) {
        self.published = self.rsp;
        notify::publish(&page.rsp_prod(), self.rsp.0);
    }

    /// Decides about the responses since the last call. Returns whether the frontend has to be
    /// notified.
    #[inline]
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        if self.decided == self.published {
            return false;
        }
        self.decided = self.published;
        let event = notify::suppression(&page.rsp_event());
        self.signals.decide(suppression_of(event), self.published.0 as u16)
    }

    /// Whether [`BackIndices::recheck`] is due [`notify::RECHECK_NS`] after the last `publish`.
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the decision of the last `publish`. Returns whether the frontend has to be notified
    /// after all.
    pub fn recheck(&mut self, page: &RingPage<'_>) -> bool {
        let event = notify::suppression(&page.rsp_event());
        self.signals.recheck(suppression_of(event), self.published.0 as u16)
    }

    /// Asks to be notified when `after` requests are there that were not taken (at least 1), and
    /// looks once more. Returns whether the caller may sleep; otherwise so many are there.
    pub fn arm(&mut self, page: &RingPage<'_>, after: u32) -> Result<bool, XenError> {
        let after = after.clamp(1, COUNT);
        let event = self.req + Wrapping(after);
        let req_prod = notify::arm(&page.req_event(), event.0, &page.req_prod());
        self.accept(req_prod)?;
        Ok(self.known_requests() < after)
    }
}
