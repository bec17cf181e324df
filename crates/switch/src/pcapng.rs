//! Captured frames as pcapng (draft-ietf-opsawg-pcapng, version 1.0), the form that Wireshark,
//! tshark and tcpdump read.
//!
//! One section, little-endian; one interface per port with its name and nanosecond timestamps; one
//! enhanced packet block per frame with its direction, and a comment where the frame carries
//! offload state or was dropped; one statistics block at the end that says how many frames the
//! capture lost.

const BLOCK_SECTION: u32 = 0x0a0d_0d0a;
const BLOCK_INTERFACE: u32 = 1;
const BLOCK_STATISTICS: u32 = 5;
const BLOCK_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;
const OPTION_END: u16 = 0;
const OPTION_COMMENT: u16 = 1;
const OPTION_SECTION_APPLICATION: u16 = 4;
const OPTION_INTERFACE_NAME: u16 = 2;
const OPTION_INTERFACE_RESOLUTION: u16 = 9;
const OPTION_PACKET_FLAGS: u16 = 2;
const OPTION_STATISTICS_RECEIVED: u16 = 4;
const OPTION_STATISTICS_DROPPED: u16 = 5;

/// Which way a frame went, seen from the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the port's peer into the switch.
    Received,
    /// From the switch to the port's peer.
    Transmitted,
}

/// One frame for [`packet`].
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Number of the interface, counted from 0 in the order of [`interface`].
    pub interface: u32,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Which way it went.
    pub direction: Direction,
    /// The bytes that were captured.
    pub bytes: &'a [u8],
    /// Length of the whole frame; more than what was captured if it was cut.
    pub original_bytes: u32,
    /// What else is known, or empty.
    pub comment: &'a str,
}

/// Appends the head of a section.
pub fn section(out: &mut Vec<u8>, application: &str) {
    block(out, BLOCK_SECTION, |out| {
        out.extend_from_slice(&BYTE_ORDER_MAGIC.to_le_bytes());
        out.extend_from_slice(&[1, 0, 0, 0]);
        // The section's length: not known.
        out.extend_from_slice(&u64::MAX.to_le_bytes());
        option(out, OPTION_SECTION_APPLICATION, application.as_bytes());
        option(out, OPTION_END, &[]);
    });
}

/// Appends the description of an interface.
pub fn interface(out: &mut Vec<u8>, name: &str, snap_bytes: u32) {
    block(out, BLOCK_INTERFACE, |out| {
        out.extend_from_slice(&LINKTYPE_ETHERNET.to_le_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&snap_bytes.to_le_bytes());
        option(out, OPTION_INTERFACE_NAME, name.as_bytes());
        // Units of 10^-9 s.
        option(out, OPTION_INTERFACE_RESOLUTION, &[9]);
        option(out, OPTION_END, &[]);
    });
}

/// Appends one frame as an enhanced packet block.
pub fn packet(out: &mut Vec<u8>, packet: &Packet<'_>) {
    block(out, BLOCK_PACKET, |out| {
        out.extend_from_slice(&packet.interface.to_le_bytes());
        time(out, packet.time_ns);
        out.extend_from_slice(&(packet.bytes.len() as u32).to_le_bytes());
        out.extend_from_slice(&packet.original_bytes.to_le_bytes());
        out.extend_from_slice(packet.bytes);
        pad(out);
        let flags: u32 = match packet.direction {
            Direction::Received => 1,
            Direction::Transmitted => 2,
        };
        option(out, OPTION_PACKET_FLAGS, &flags.to_le_bytes());
        if !packet.comment.is_empty() {
            option(out, OPTION_COMMENT, packet.comment.as_bytes());
        }
        option(out, OPTION_END, &[]);
    });
}

/// Appends what became of an interface's frames: how many there were, and how many of these are not
/// in the capture.
pub fn statistics(out: &mut Vec<u8>, interface: u32, time_ns: u64, frames: u64, lost: u64) {
    block(out, BLOCK_STATISTICS, |out| {
        out.extend_from_slice(&interface.to_le_bytes());
        time(out, time_ns);
        option(out, OPTION_STATISTICS_RECEIVED, &frames.to_le_bytes());
        option(out, OPTION_STATISTICS_DROPPED, &lost.to_le_bytes());
        option(out, OPTION_END, &[]);
    });
}

fn time(out: &mut Vec<u8>, time_ns: u64) {
    out.extend_from_slice(&((time_ns >> 32) as u32).to_le_bytes());
    out.extend_from_slice(&(time_ns as u32).to_le_bytes());
}

/// Type and length come before a block, and the length once more behind it. All blocks have whole
/// words.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    body(out);
    let len = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    // A name or comment is ours and short; a longer one is cut rather than broken.
    let value = &value[..value.len().min(u16::MAX as usize)];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out);
}

/// Fills up to a whole word. Blocks start at whole words, so the position in `out` will do where
/// `out` itself started at one; each read starts with an empty buffer or after whole blocks.
fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_blocks() {
        let mut out = Vec::new();
        interface(&mut out, "vm1", 96);
        let want = [
            [1, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 96, 0, 0, 0, 2, 0, 3, 0],
            [b'v', b'm', b'1', 0, 9, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 40, 0, 0, 0],
        ];
        assert_eq!(out, want.concat());
        out.clear();
        let frame = Packet {
            interface: 0,
            time_ns: 0x0102_0304_0506_0708,
            direction: Direction::Transmitted,
            bytes: &[0xaa; 5],
            original_bytes: 60,
            comment: "x",
        };
        packet(&mut out, &frame);
        let want = [
            &[6, 0, 0, 0, 60, 0, 0, 0, 0, 0, 0, 0, 4, 3, 2, 1, 8, 7, 6, 5, 5, 0, 0, 0, 60, 0, 0, 0][..],
            &[0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0, 0, 0, 2, 0, 4, 0, 2, 0, 0, 0, 1, 0, 1, 0, b'x', 0, 0, 0],
            &[0, 0, 0, 0, 60, 0, 0, 0],
        ];
        assert_eq!(out, want.concat());
        out.clear();
        statistics(&mut out, 1, 1, 7, 2);
        let want = [
            &[5, 0, 0, 0, 52, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0][..],
            &[4, 0, 8, 0, 7, 0, 0, 0, 0, 0, 0, 0, 5, 0, 8, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            &[0, 0, 0, 0, 52, 0, 0, 0],
        ];
        assert_eq!(out, want.concat());
    }
}
