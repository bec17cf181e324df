//! Classes of frames: which go first where frames wait.
//!
//! A frame's class matters in two places. Where frames wait for a destination's buffers, those of a
//! higher class go first (`overflow.rs`), and a port whose frames are all [`Class::Urgent`] gets
//! its turn between those of other ports ([`crate::worker`]). Neither starves the classes below: of
//! eight frames or of two turns, one is theirs.
//!
//! Frames are of the class that the owner of the network gave to the port they come from. A port
//! may also be trusted to mark its own frames ([`Marking::Marks`]). Anyone can mark frames, so no
//! port is trusted unless it is said.
//!
//! | 802.1p priority of the tag, if it is not 0 | else the DSCP (RFC 2474, 4594, 8622) | class |
//! | --- | --- | --- |
//! | 1 | 1 (LE), 8 (CS1) | background |
//! | 2, 3 | others | normal |
//! | 4 | 16 to 39 (CS2 to CS4, AF2x to AF4x) | high |
//! | 5, 6, 7 | 40 to 63 (CS5 to CS7, EF) | urgent |

use crate::frame::{ETHERNET_HEADER_BYTES, Frame, TAG_BYTES};

/// Number of classes.
pub(crate) const CLASSES: usize = 4;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// How much a frame is in a hurry; higher ones go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// What may wait for all others, such as a backup.
    Background,
    /// Frames of ports that nothing is said of.
    #[default]
    Normal,
    /// Before others, such as video.
    High,
    /// First, such as control loops and voice.
    Urgent,
}

impl Class {
    /// All of them, the first to wait first.
    pub const ALL: [Class; CLASSES] = [Class::Background, Class::Normal, Class::High, Class::Urgent];

    /// As in the fabric file.
    pub const fn word(self) -> &'static str {
        match self {
            Class::Background => "background",
            Class::Normal => "normal",
            Class::High => "high",
            Class::Urgent => "urgent",
        }
    }
}

/// By what the frames of a port get their class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// All are of this class, whatever they say.
    Fixed(Class),
    /// By the 802.1p priority of their tag, or their DSCP.
    Marks,
}

impl Default for Marking {
    fn default() -> Self {
        Marking::Fixed(Class::Normal)
    }
}

impl Marking {
    /// The class of a frame. `priority` is that of the tag it came with; 0 without one.
    pub(crate) fn class(self, priority: u8, frame: &Frame) -> Class {
        match (self, priority) {
            (Marking::Fixed(class), _) => class,
            (Marking::Marks, 1) => Class::Background,
            (Marking::Marks, 2 | 3) => Class::Normal,
            (Marking::Marks, 4) => Class::High,
            (Marking::Marks, 5..) => Class::Urgent,
            (Marking::Marks, 0) => match dscp(frame.head()) {
                1 | 8 => Class::Background,
                16..=39 => Class::High,
                40.. => Class::Urgent,
                _ => Class::Normal,
            },
        }
    }

    /// Whether the port's turns go before those of others.
    pub(crate) fn is_urgent(self) -> bool {
        self == Marking::Fixed(Class::Urgent)
    }
}

/// The differentiated services code point of an IP packet, 0 to 63; 0 of other frames.
fn dscp(head: &[u8]) -> u8 {
    let kind = |at: usize| head.get(at..at + 2);
    let mut at = ETHERNET_HEADER_BYTES;
    if kind(at - 2) == Some(&[0x81, 0x00]) {
        at += TAG_BYTES;
    }
    let Some(&[first, second]) = head.get(at..at + 2) else { return 0 };
    match kind(at - 2) {
        Some(kind) if kind == ETHERTYPE_IPV4 && first >> 4 == 4 => second >> 2,
        Some(kind) if kind == ETHERTYPE_IPV6 && first >> 4 == 6 => (first & 0xf) << 2 | second >> 6,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Batch, Offload};

    fn class(head: &[u8], marking: Marking) -> Class {
        let mut batch = Batch::with_capacity(1);
        batch.push(head.into(), Offload::NONE);
        let frame = &batch.frames()[0];
        let priority = frame.tag().map_or(0, |tag| (tag >> 13) as u8);
        marking.class(priority, frame)
    }

    fn frame(tag: Option<u16>, kind: [u8; 2], ip: [u8; 2]) -> Vec<u8> {
        let mut head = vec![2; 12];
        if let Some(tag) = tag {
            head.extend([0x81, 0x00]);
            head.extend(tag.to_be_bytes());
        }
        head.extend(kind);
        head.extend(ip);
        head.resize(60, 0);
        head
    }

    #[test]
    fn marks_are_read_only_where_the_port_is_trusted() {
        let ipv4 = |dscp: u8| frame(None, ETHERTYPE_IPV4, [0x45, dscp << 2 | 3]);
        let ipv6 = |dscp: u8| frame(None, ETHERTYPE_IPV6, [0x60 | dscp >> 2, dscp << 6]);
        let want = |dscp: u8| match dscp {
            1 | 8 => Class::Background,
            16..=39 => Class::High,
            40..=63 => Class::Urgent,
            _ => Class::Normal,
        };
        for dscp in 0..64 {
            for head in [ipv4(dscp), ipv6(dscp)] {
                assert_eq!(class(&head, Marking::Marks), want(dscp), "{dscp}");
                assert_eq!(class(&head, Marking::default()), Class::Normal);
                assert_eq!(class(&head, Marking::Fixed(Class::Background)), Class::Background);
            }
        }
        // EF, CS1 and AF41 by their names.
        assert_eq!(
            [46, 8, 34].map(|dscp| class(&ipv4(dscp), Marking::Marks)),
            [Class::Urgent, Class::Background, Class::High]
        );
    }

    #[test]
    fn the_priority_of_a_tag_comes_before_the_dscp() {
        let want = [Class::Urgent, Class::Background, Class::Normal, Class::Normal, Class::High];
        let want = want.into_iter().chain([Class::Urgent; 3]);
        for (priority, want) in (0u16..8).zip(want) {
            // Priority 0 says nothing, so the DSCP below the tag does.
            let head = frame(Some(priority << 13 | 7), ETHERTYPE_IPV4, [0x45, 46 << 2]);
            assert_eq!(class(&head, Marking::Marks), want, "{priority}");
        }
    }

    #[test]
    fn what_is_no_ip_packet_or_too_short_is_normal() {
        let arp = frame(None, [0x08, 0x06], [0x45, 46 << 2]);
        let wrong_version = frame(None, ETHERTYPE_IPV4, [0x65, 46 << 2]);
        for head in [&arp[..], &wrong_version, &arp[..14], &frame(None, ETHERTYPE_IPV4, [0x45, 0xb8])[..15], &[1]] {
            assert_eq!(class(head, Marking::Marks), Class::Normal, "{head:?}");
        }
    }
}
