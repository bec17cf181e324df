//! The control ring, by which a frontend says how its backend spreads packets over its queues
//! (xen/include/public/io/netif.h, "Control ring").
//!
//! ```text
//!              0     1     2     3     4     5     6     7     8 … 11        12 … 15
//!   request  | id        | kind      | data[0]               | data[1]     | data[2]
//!   response | id        | kind      | status                | data        |
//! ```
//!
//! Little-endian. Each request has one response, in the order of the requests here. A slot is as
//! long as a request, so the ring has 128 of them.

use super::XenError;
use super::netif::{long, word};
use super::ring::{BackIndices, CTRL_SLOT_BYTES, CTRL_SLOTS, FrontIndices, RingPage};

mod field {
    use core::ops::Range;
    pub(super) const ID: Range<usize> = 0..2;
    pub(super) const KIND: Range<usize> = 2..4;
    pub(super) const DATA: Range<usize> = 4..16;
    pub(super) const STATUS: Range<usize> = 4..8;
    pub(super) const ANSWER: Range<usize> = 8..12;
}

// --- the header's ---

/// Bytes of a request.
pub const REQUEST_BYTES: usize = field::DATA.end;
/// Bytes of a response.
pub const RESPONSE_BYTES: usize = field::ANSWER.end;

/// Kind of request: which packets the backend could compute a hash of.
pub const GET_HASH_FLAGS: u16 = 1;
/// Kind of request: of which packets a hash is wanted. `data[0]` has [`HASH_IPV4`] and the like.
pub const SET_HASH_FLAGS: u16 = 2;
/// Kind of request: the hash's key. `data[0]` is the grant of a page that begins with it, `data[1]`
/// its length in bytes.
pub const SET_HASH_KEY: u16 = 3;
/// Kind of request: how many entries a table from hashes to queues may have.
pub const GET_HASH_MAPPING_SIZE: u16 = 4;
/// Kind of request: how many entries the table has; none where a hash's remainder is the queue.
pub const SET_HASH_MAPPING_SIZE: u16 = 5;
/// Kind of request: entries of the table. `data[0]` is the grant of a page that begins with them, 4
/// bytes each, `data[1]` their number, `data[2]` the place of the first one in the table.
pub const SET_HASH_MAPPING: u16 = 6;
/// Kind of request: the hash's algorithm, [`ALGORITHM_NONE`] or [`ALGORITHM_TOEPLITZ`], in
/// `data[0]`.
pub const SET_HASH_ALGORITHM: u16 = 7;

/// Status: done.
pub const STATUS_SUCCESS: u32 = 0;
/// Status: the backend cannot do it, or not now.
pub const STATUS_NOT_SUPPORTED: u32 = 1;
/// Status: a value that may not be.
pub const STATUS_INVALID_PARAMETER: u32 = 2;
/// Status: more than the backend has room for.
pub const STATUS_BUFFER_OVERFLOW: u32 = 3;

/// Algorithm: no hash; the backend spreads packets as it likes.
pub const ALGORITHM_NONE: u32 = 0;
/// Algorithm: [`toeplitz`].
pub const ALGORITHM_TOEPLITZ: u32 = 1;

/// Flag: a hash of the addresses of an IPv4 packet.
pub const HASH_IPV4: u32 = 1 << 0;
/// Flag: of addresses and ports of TCP over IPv4.
pub const HASH_IPV4_TCP: u32 = 1 << 1;
/// Flag: of the addresses of an IPv6 packet.
pub const HASH_IPV6: u32 = 1 << 2;
/// Flag: of addresses and ports of TCP over IPv6.
pub const HASH_IPV6_TCP: u32 = 1 << 3;

/// A request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtrlRequest {
    /// What the response repeats.
    pub id: u16,
    /// [`GET_HASH_FLAGS`] to [`SET_HASH_ALGORITHM`].
    pub kind: u16,
    /// What it means depends on the kind.
    pub data: [u32; 3],
}

impl CtrlRequest {
    /// The request in a slot's bytes. Every bit pattern is one.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Self {
        let at = |n: usize| field::DATA.start + 4 * n;
        let data = core::array::from_fn(|n| long(bytes, at(n)..at(n + 1)));
        CtrlRequest { id: word(bytes, field::ID), kind: word(bytes, field::KIND), data }
    }

    /// Serialises into the layout of a ring slot.
    pub fn emit(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[field::ID].copy_from_slice(&self.id.to_le_bytes());
        bytes[field::KIND].copy_from_slice(&self.kind.to_le_bytes());
        for (to, value) in bytes[field::DATA].chunks_exact_mut(4).zip(self.data) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// A response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtrlResponse {
    /// `id` of the request that it answers.
    pub id: u16,
    /// Its kind.
    pub kind: u16,
    /// [`STATUS_SUCCESS`] to [`STATUS_BUFFER_OVERFLOW`].
    pub status: u32,
    /// What was asked for.
    pub data: u32,
}

impl CtrlResponse {
    /// The response in the first bytes of a slot.
    pub fn parse(bytes: &[u8; RESPONSE_BYTES]) -> Self {
        CtrlResponse {
            id: word(bytes, field::ID),
            kind: word(bytes, field::KIND),
            status: long(bytes, field::STATUS),
            data: long(bytes, field::ANSWER),
        }
    }

    /// Serialises into the layout of a ring slot.
    pub fn emit(&self) -> [u8; RESPONSE_BYTES] {
        let mut bytes = [0; RESPONSE_BYTES];
        bytes[field::ID].copy_from_slice(&self.id.to_le_bytes());
        bytes[field::KIND].copy_from_slice(&self.kind.to_le_bytes());
        bytes[field::STATUS].copy_from_slice(&self.status.to_le_bytes());
        bytes[field::ANSWER].copy_from_slice(&self.data.to_le_bytes());
        bytes
    }
}

/// The Toeplitz hash of `data` under a key whose missing bytes are zero. For each bit of the data
/// that is set, counted from the left, the 32 bits of the key that begin at its place are added.
pub fn toeplitz(key: &[u8], data: &[u8]) -> u32 {
    let byte = |at: usize| u64::from(key.get(at).copied().unwrap_or(0));
    // The key's bits from the place of the next bit of the data on.
    let mut window = (0..8).fold(0u64, |window, at| window << 8 | byte(at));
    let mut hash = 0u64;
    for (at, value) in data.iter().enumerate() {
        for bit in (0..8).rev() {
            // Without a branch, which would be mispredicted every other time.
            hash ^= window & 0u64.wrapping_sub(u64::from(value >> bit & 1));
            window <<= 1;
        }
        window |= byte(at + 8);
    }
    (hash >> 32) as u32
}

/// The backend's end.
#[derive(Clone, Debug)]
pub struct CtrlBack {
    ring: BackIndices<CTRL_SLOTS>,
}

impl CtrlBack {
    /// Attaches to a ring, new or left by another backend ([`BackIndices::attach`]).
    pub fn attach(page: &RingPage<'_>) -> Result<Self, XenError> {
        Ok(CtrlBack { ring: BackIndices::attach(page)? })
    }

    /// Takes the next request, if there is one.
    ///
    /// # Errors
    /// The frontend broke the protocol: the vif is to be disconnected.
    pub fn take(&mut self, page: &RingPage<'_>) -> Result<Option<CtrlRequest>, XenError> {
        if self.ring.known_requests() == 0 && self.ring.requests(page)? == 0 {
            return Ok(None);
        }
        let request = CtrlRequest::parse(&page.read(CTRL_SLOT_BYTES, self.ring.next_request()));
        self.ring.consume(1);
        Ok(Some(request))
    }

    /// Answers the request that was taken last, visible at once.
    ///
    /// # Errors
    /// [`XenError::OutOfOrder`] where there is no request without an answer; nothing is written.
    pub fn answer(&mut self, page: &RingPage<'_>, response: CtrlResponse) -> Result<(), XenError> {
        if self.ring.held() == 0 {
            let expected = self.ring.next_response();
            return Err(XenError::OutOfOrder { got: expected, expected });
        }
        self.ring.respond(page, CTRL_SLOT_BYTES, response.emit());
        self.ring.reveal(page);
        Ok(())
    }

    /// Decides about the answers since the last call, which are visible already. Returns whether
    /// the frontend has to be notified.
    pub fn publish(&mut self, page: &RingPage<'_>) -> bool {
        self.ring.publish(page)
    }

    /// Whether [`CtrlBack::recheck`] is due some time after the last `publish`.
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
    /// sleep.
    pub fn arm(&mut self, page: &RingPage<'_>) -> Result<bool, XenError> {
        self.ring.arm(page, 1)
    }
}

/// The frontend's end.
#[derive(Clone, Debug, Default)]
pub struct CtrlFront {
    ring: FrontIndices<CTRL_SLOTS>,
}

impl CtrlFront {
    /// For a page that was [`RingPage::initialise`]d.
    pub const fn new() -> Self {
        CtrlFront { ring: FrontIndices::new() }
    }

    /// Writes a request and makes it visible. Returns whether the backend has to be notified;
    /// `None` where there is no room.
    pub fn ask(&mut self, page: &RingPage<'_>, request: CtrlRequest) -> Option<bool> {
        if self.ring.free() == 0 {
            return None;
        }
        self.ring.push(page, CTRL_SLOT_BYTES, request.emit());
        Some(self.ring.publish(page))
    }

    /// Takes the next response, if there is one.
    ///
    /// # Errors
    /// [`XenError::IndexJump`]: the backend is broken.
    pub fn answer(&mut self, page: &RingPage<'_>) -> Result<Option<CtrlResponse>, XenError> {
        if self.ring.responses(page)? == 0 {
            return Ok(None);
        }
        let index = self.ring.consume();
        Ok(Some(CtrlResponse::parse(&page.read(CTRL_SLOT_BYTES, index))))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::xen::ring::REQ_PROD;
    use crate::xen::tests::fresh;
    use core::sync::atomic::Ordering;

    #[test]
    fn golden_messages_both_ways() {
        let golden = [0x07, 0x01, 6, 0, 0x21, 3, 0, 0, 128, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff];
        let request = CtrlRequest { id: 0x107, kind: SET_HASH_MAPPING, data: [0x321, 128, 0xffff_fffe] };
        assert_eq!((CtrlRequest::parse(&golden), request.emit()), (request, golden));
        let golden = [0x07, 0x01, 1, 0, 3, 0, 0, 0, 0x0f, 0, 0, 0];
        let response = CtrlResponse { id: 0x107, kind: GET_HASH_FLAGS, status: STATUS_BUFFER_OVERFLOW, data: 0xf };
        assert_eq!((CtrlResponse::parse(&golden), response.emit()), (response, golden));
    }

    /// The examples that Microsoft publishes for receive-side scaling, with the key of theirs
    /// ("Verifying the RSS Hash Calculation").
    #[test]
    fn the_hash_is_that_of_the_published_examples() {
        const KEY: [u8; 40] = [
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
            0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
            0xbe, 0xac, 0x01, 0xfa,
        ];
        // 66.9.149.187:2794 to 161.142.100.80:1766.
        let data = [66, 9, 149, 187, 161, 142, 100, 80, 0x0a, 0xea, 0x06, 0xe6];
        assert_eq!(toeplitz(&KEY, &data[..8]), 0x323e_8fc2);
        assert_eq!(toeplitz(&KEY, &data), 0x51cc_c178);
        // 199.92.111.2:14230 to 65.69.140.83:4739.
        let data = [199, 92, 111, 2, 65, 69, 140, 83, 0x37, 0x96, 0x12, 0x83];
        assert_eq!(toeplitz(&KEY, &data[..8]), 0xd718_262a);
        assert_eq!(toeplitz(&KEY, &data), 0xc626_b0ea);
        assert_eq!((toeplitz(&[], &data), toeplitz(&KEY, &[])), (0, 0));
    }

    #[test]
    fn each_request_has_its_answer_over_many_rounds_of_the_ring() {
        let (_, page) = fresh();
        let (mut front, mut back) = (CtrlFront::new(), CtrlBack::attach(&page).unwrap());
        let request = |id: u16| CtrlRequest { id, kind: id % 9, data: [id.into(), 0, 7] };
        for round in 0..5u16 {
            for n in 0..128 {
                assert_eq!(front.ask(&page, request(round * 128 + n)).is_some(), n < 128);
            }
            assert_eq!(front.ask(&page, request(0)), None, "128 slots");
            for n in 0..128 {
                let taken = back.take(&page).unwrap().unwrap();
                assert_eq!(taken, request(round * 128 + n));
                let response = CtrlResponse { id: taken.id, kind: taken.kind, status: 1, data: taken.data[0] };
                back.answer(&page, response).unwrap();
                back.publish(&page);
                assert_eq!(front.answer(&page), Ok(Some(response)));
            }
            assert_eq!((back.take(&page), front.answer(&page)), (Ok(None), Ok(None)));
            assert_eq!(back.arm(&page), Ok(true));
        }
        assert!(back.answer(&page, CtrlResponse::default()).is_err(), "none is held");
    }

    #[test]
    fn an_index_beyond_the_slots_is_refused() {
        let (memory, page) = fresh();
        let mut back = CtrlBack::attach(&page).unwrap();
        memory.store_u32(REQ_PROD, 128, Ordering::Relaxed).unwrap();
        assert!(back.take(&page).unwrap().is_some());
        for _ in 1..128 {
            back.take(&page).unwrap();
        }
        memory.store_u32(REQ_PROD, 129, Ordering::Relaxed).unwrap();
        assert!(back.take(&page).is_err(), "none was answered");
        assert!(CtrlBack::attach(&page).is_err(), "129 requests in 128 slots");
    }
}
