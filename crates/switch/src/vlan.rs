//! VLANs: which of them a port belongs to, and how frames get and lose their tags (IEEE 802.1Q).
//!
//! A network has VLANs as soon as one of its ports has a [`Membership`]. Its other ports then are
//! access ports of [`DEFAULT`]. So are its own services: the gateway (DHCP, DNS) and the uplink. A
//! network without any passes tags on like other bytes, and its frames pay nothing.
//!
//! | a frame comes | by an access port | by a trunk |
//! | --- | --- | --- |
//! | without a tag, or with VLAN 0 (a priority only) | its VLAN | the native VLAN, else dropped, `vlan_denied` |
//! | with a VLAN of the port | dropped, `vlan_denied` | that VLAN |
//! | with another VLAN | dropped, `vlan_denied` | dropped, `vlan_denied` |
//! | with two tags, or one of 802.1ad (0x88a8, 0x9100) | dropped, `vlan_tags` | dropped, `vlan_tags` |
//!
//! A frame goes only to ports of its VLAN. It has no tag where the VLAN is the port's native one
//! (an access port has no other), and else one with its VLAN and the priority that it came with. A
//! mirror's port is in every VLAN in this respect.
//!
//! # How a frame is changed
//! Tags are in the local copy of the head ([`crate::frame`]). All frames of a batch lose theirs
//! before the network decides. So what decides (guard, policy) sees no tags, and a frame that the
//! switch passes on never has a second one that a receiver could take for the first. Before a batch
//! goes to a destination, its frames get the form for that one. Checksum and segmentation state
//! follow. Only the head moves, nothing of the payload.

use crate::drop::Reason;
use crate::frame::{Batch, ETHERNET_HEADER_BYTES, Frame, MAX_FRAME_BYTES, TAG_BYTES};
use crate::mac::PortNumber;
use std::collections::HashMap;
use std::ops::RangeInclusive;

/// The VLAN of ports without a membership of their own, in a network that has VLANs.
pub const DEFAULT: u16 = 1;
/// The highest VLAN; 4095 is reserved.
pub const HIGHEST: u16 = 4094;

const VLAN_BITS: u16 = 0xfff;

/// The VLANs of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The VLAN of frames without a tag, 1 to [`HIGHEST`]; without one such frames are dropped.
    pub native: Option<u16>,
    /// The VLANs of frames with a tag; `None` for an access port, which takes no tags. The native
    /// one is among them.
    pub trunk: Option<Vec<RangeInclusive<u16>>>,
}

impl Membership {
    /// An access port.
    pub const fn access(vlan: u16) -> Membership {
        Membership { native: Some(vlan), trunk: None }
    }
}

/// The VLANs of a port, for look-ups.
#[derive(Debug)]
struct Compiled {
    /// 0 where there is none.
    native: u16,
    /// One bit for each VLAN; `None` for an access port.
    trunk: Option<Box<[u64; 64]>>,
}

impl Compiled {
    fn new(membership: &Membership) -> Compiled {
        let native = membership.native.filter(|vlan| (1..=HIGHEST).contains(vlan)).unwrap_or(0);
        let trunk = membership.trunk.as_ref().map(|ranges| {
            let mut bits = Box::new([0u64; 64]);
            let listed = ranges.iter().cloned().flatten().filter(|vlan| (1..=HIGHEST).contains(vlan));
            for vlan in listed.chain((native != 0).then_some(native)) {
                bits[usize::from(vlan / 64)] |= 1 << (vlan % 64);
            }
            bits
        });
        Compiled { native, trunk }
    }

    /// Whether the port belongs to `vlan`, which is not 0.
    #[inline]
    fn has(&self, vlan: u16) -> bool {
        match &self.trunk {
            None => vlan == self.native,
            Some(bits) => bits.get(usize::from(vlan / 64)).is_some_and(|word| word & (1 << (vlan % 64)) != 0),
        }
    }

    /// Whether a frame that comes by this port is of its native VLAN, since it has no tag, and can
    /// be given one.
    #[inline]
    fn is_plain(&self, frame: &Frame) -> bool {
        let kind = frame.head().get(ETHERNET_HEADER_BYTES - 2..ETHERNET_HEADER_BYTES);
        let kind = kind.map(|field| u16::from_be_bytes([field[0], field[1]]));
        kind.is_some_and(|kind| !is_tag(kind)) && frame.len() <= MAX_FRAME_BYTES - TAG_BYTES
    }

    /// The VLAN of a frame that comes by this port.
    #[inline]
    fn admit(&self, frame: &Frame) -> Result<u16, Reason> {
        let head = frame.head();
        let kind = |at: usize| head.get(at..at + 2).map(|field| u16::from_be_bytes([field[0], field[1]]));
        let vlan = match kind(ETHERNET_HEADER_BYTES - 2).ok_or(Reason::Runt)? {
            0x8100 => {
                let inner = kind(ETHERNET_HEADER_BYTES - 2 + TAG_BYTES).ok_or(Reason::Runt)?;
                if is_tag(inner) {
                    return Err(Reason::VlanTags);
                }
                match frame.tag().unwrap_or_default() & VLAN_BITS {
                    0 => self.native,
                    vlan if self.trunk.is_some() && self.has(vlan) => vlan,
                    _ => 0,
                }
            }
            other if is_tag(other) => return Err(Reason::VlanTags),
            _ if frame.len() > MAX_FRAME_BYTES - TAG_BYTES => return Err(Reason::TooLong),
            _ => self.native,
        };
        if vlan == 0 { Err(Reason::VlanDenied) } else { Ok(vlan) }
    }
}

#[inline]
const fn is_tag(kind: u16) -> bool {
    matches!(kind, 0x8100 | 0x88a8 | 0x9100)
}

/// What is known of a frame of the batch in hand.
#[derive(Clone, Copy, Debug)]
struct Came {
    vlan: Result<u16, Reason>,
    /// The tag with which it came.
    tag: Option<u16>,
}

/// The VLANs of one network that has any.
#[derive(Debug)]
pub(crate) struct Vlans {
    ports: Vec<Compiled>,
    /// Of each frame of the batch in hand; none where all came without a tag, to this VLAN.
    came: Vec<Came>,
    plain: Option<u16>,
    /// Whether frames of the batch in hand may have a tag now.
    tagged: bool,
}

impl Vlans {
    /// For ports with these memberships; `None` where no port has one.
    pub(crate) fn new(memberships: &HashMap<PortNumber, Membership>) -> Option<Vlans> {
        let highest = memberships.keys().copied().max()?;
        let default = Membership::access(DEFAULT);
        let of = |port| Compiled::new(memberships.get(&port).unwrap_or(&default));
        Some(Vlans { ports: (0..=highest).map(of).collect(), came: Vec::new(), plain: None, tagged: false })
    }

    #[inline]
    fn native(&self, port: PortNumber) -> u16 {
        self.ports.get(usize::from(port)).map_or(DEFAULT, |port| port.native)
    }

    /// Whether `port` belongs to `vlan`.
    #[inline]
    pub(crate) fn has(&self, port: PortNumber, vlan: u16) -> bool {
        match self.ports.get(usize::from(port)) {
            None => vlan == DEFAULT,
            Some(port) => port.has(vlan),
        }
    }

    /// Finds the VLAN of each frame of a batch from `from`, and takes the tags out of those that
    /// have one.
    pub(crate) fn untag(&mut self, from: PortNumber, batch: &mut Batch<'_>) {
        let plain = Compiled { native: DEFAULT, trunk: None };
        let port = self.ports.get(usize::from(from)).unwrap_or(&plain);
        self.came.clear();
        self.tagged = false;
        // Most batches are of this kind. Of one VLAN, without tags, they cost one look at each
        // frame.
        self.plain =
            (port.native != 0 && batch.frames().iter().all(|frame| port.is_plain(frame))).then_some(port.native);
        if self.plain.is_some() {
            return;
        }
        for frame in batch.frames_mut() {
            let (vlan, tag) = (port.admit(frame), frame.tag());
            if vlan.is_ok() && tag.is_some() {
                frame.set_tag(None);
            }
            self.came.push(Came { vlan, tag });
        }
    }

    /// The VLAN of a frame of the batch, and its bytes when it came.
    #[inline]
    pub(crate) fn of(&self, index: usize, frame: &Frame) -> (Result<u16, Reason>, usize) {
        if let Some(vlan) = self.plain {
            return (Ok(vlan), frame.len());
        }
        let Came { vlan, tag } = self.came[index];
        let taken = if vlan.is_ok() && tag.is_some() { TAG_BYTES } else { 0 };
        (vlan, frame.len() + taken)
    }

    /// Gives the frames of the batch the form in which they came.
    pub(crate) fn restore(&mut self, batch: &mut Batch<'_>) {
        if self.plain.is_some() {
            if std::mem::take(&mut self.tagged) {
                batch.frames_mut().iter_mut().for_each(|frame| frame.set_tag(None));
            }
            return;
        }
        for (frame, came) in batch.frames_mut().iter_mut().zip(&self.came) {
            if came.vlan.is_ok() {
                frame.set_tag(came.tag);
            }
        }
    }

    /// Gives the frames `which` of the batch the form that `to` gets.
    pub(crate) fn shape(&mut self, to: PortNumber, batch: &mut Batch<'_>, which: &[u16]) {
        let native = self.native(to);
        if let Some(vlan) = self.plain {
            let tag = (vlan != native).then_some(vlan);
            self.tagged |= tag.is_some();
            if self.tagged {
                let frames = batch.frames_mut();
                which.iter().for_each(|index| frames[usize::from(*index)].set_tag(tag));
            }
            return;
        }
        let frames = batch.frames_mut();
        for index in which {
            let index = usize::from(*index);
            let Came { vlan: Ok(vlan), tag } = self.came[index] else { continue };
            let tag = (vlan != native).then(|| vlan | tag.unwrap_or_default() & !VLAN_BITS);
            frames[index].set_tag(tag);
        }
    }
}

#[cfg(test)]
#[path = "vlan_tests.rs"]
mod tests;
