//! The rings of the hostile frontend: slots as it likes them, and indices as it likes them.

use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use tombolo_cell::ForeignMut;

pub(crate) const RING_SLOTS: u32 = 256;
const SLOTS_AT: usize = 64;
const TX_SLOT_BYTES: usize = 12;
const RX_SLOT_BYTES: usize = 8;
pub(crate) const REQ_PROD: usize = 0;
pub(crate) const REQ_EVENT: usize = 4;
pub(crate) const RSP_PROD: usize = 8;
pub(crate) const RSP_EVENT: usize = 12;
pub(crate) const FRAME_BYTES: u16 = 60;
pub(crate) const BLANK: u16 = 1;
pub(crate) const MORE: u16 = 4;
pub(crate) const EXTRA: u16 = 8;

/// What to write to the transmit ring.
#[derive(Clone, Copy)]
pub(crate) enum RingSlot {
    /// Grant, offset, flags, size.
    Request(u32, u16, u16, u16),
    /// Type, flags, and six further bytes.
    Info(u8, u8, [u8; 6]),
}

use RingSlot::{Info, Request};

/// The rings of one connection.
pub(crate) struct Rings {
    pub(crate) transmit: ForeignMut<'static>,
    pub(crate) receive: ForeignMut<'static>,
    /// Grants of the two rings.
    pub(crate) references: [u32; 2],
    pub(crate) channel: u32,
    /// A page with a frame, and its grant.
    pub(crate) page: ForeignMut<'static>,
    pub(crate) gref: u32,
    pub(crate) produced: u32,
    /// All grants, the rings' first, and all event channels, for the end.
    pub(crate) grants: Vec<u32>,
    pub(crate) channels: Vec<u32>,
}

impl Rings {
    /// Writes a slot at the producer's index, without publishing it.
    pub(crate) fn push(&mut self, slot: RingSlot) {
        let mut bytes = [0; TX_SLOT_BYTES];
        match slot {
            Request(gref, offset, flags, size) => {
                bytes[..4].copy_from_slice(&gref.to_le_bytes());
                for (at, half) in [(4, offset), (6, flags), (8, self.produced as u16), (10, size)] {
                    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
            Info(kind, flags, rest) => {
                bytes[..2].copy_from_slice(&[kind, flags]);
                bytes[2..8].copy_from_slice(&rest);
            }
        }
        let _ = self.transmit.write_array(Self::transmit_slot(self.produced), bytes);
        self.produced = self.produced.wrapping_add(1);
    }

    fn transmit_slot(index: u32) -> usize {
        SLOTS_AT + TX_SLOT_BYTES * (index % RING_SLOTS) as usize
    }

    pub(crate) fn publish(&self) {
        let _ = self.transmit.store_u32(REQ_PROD, self.produced, Ordering::Release);
    }

    /// How many responses there are on the transmit ring.
    pub(crate) fn answered(&self) -> u32 {
        self.transmit.as_foreign().load_u32(RSP_PROD, Ordering::Acquire).unwrap_or(0)
    }

    /// How many responses there are on the receive ring.
    pub(crate) fn received(&self) -> u32 {
        self.receive.as_foreign().load_u32(RSP_PROD, Ordering::Acquire).unwrap_or(0)
    }

    /// The status of the response at an index.
    pub(crate) fn status(&self, index: u32) -> i16 {
        self.transmit.as_foreign().load_u16(Self::transmit_slot(index) + 2, Ordering::Acquire).unwrap_or(0x7fff) as i16
    }

    /// The bytes of the slot at an index of the transmit ring.
    pub(crate) fn slot(&self, index: u32) -> [u8; TX_SLOT_BYTES] {
        self.transmit.as_foreign().read_array(Self::transmit_slot(index)).unwrap_or([0xff; TX_SLOT_BYTES])
    }

    /// A frame of one slot, as it should be.
    pub(crate) fn sound(&self) -> RingSlot {
        Request(self.gref, 0, 0, FRAME_BYTES)
    }

    /// Names a grant in all receive buffers, posted or not.
    pub(crate) fn fill_receive(&self, gref: u32) {
        for index in 0..RING_SLOTS as usize {
            let mut bytes = [0; RX_SLOT_BYTES];
            bytes[..2].copy_from_slice(&(index as u16).to_le_bytes());
            bytes[4..].copy_from_slice(&gref.to_le_bytes());
            let _ = self.receive.write_array(SLOTS_AT + RX_SLOT_BYTES * index, bytes);
        }
    }

    /// Posts receive buffers up to an index.
    pub(crate) fn post(&self, up_to: u32) {
        let _ = self.receive.store_u32(REQ_PROD, up_to, Ordering::Release);
    }
}
