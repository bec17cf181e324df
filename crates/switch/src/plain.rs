//! The fields of the most common frames: TCP or UDP in a whole IP packet, without VLAN tags,
//! options and extension headers. They are read at fixed places of the frame's head, for checks
//! that each frame has to pass. Frames of any other form are read by each check itself.

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// What [`read`] looks at: Ethernet 14, IPv4 20 or IPv6 40, and of TCP what goes up to its flags.
const FOUR: usize = 14 + 20;
const SIX: usize = 14 + 40;
const TRANSPORT: usize = 14;

/// What such a frame says of its connection, as it stands in the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plain {
    /// IPv4: source and destination address in one word.
    Four(Fields<1>),
    /// IPv6: two words each.
    Six(Fields<4>),
}

/// The fields of a [`Plain`] frame that name its connection and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields<const WORDS: usize> {
    pub(crate) addresses: [u64; WORDS],
    /// Source port above, destination port below.
    pub(crate) ports: u32,
    /// [`TCP`] or [`UDP`].
    pub(crate) protocol: u8,
}

/// The fields of the frame that starts with `head`, and its TCP flags (0 for UDP). `None` for a
/// frame of another form.
#[inline(always)]
pub(crate) fn read(head: &[u8]) -> Option<(Plain, u8)> {
    match head.get(12..14)? {
        [0x08, 0x00] => match head.first_chunk() {
            Some(frame) => four(frame, head.len()),
            None => four(&padded(head), head.len()),
        },
        [0x86, 0xdd] => match head.first_chunk() {
            Some(frame) => six(frame, head.len()),
            None => six(&padded(head), head.len()),
        },
        _ => None,
    }
}

/// A head that is shorter, which few are.
#[cold]
fn padded<const BYTES: usize>(head: &[u8]) -> [u8; BYTES] {
    std::array::from_fn(|at| head.get(at).copied().unwrap_or(0))
}

#[inline(always)]
fn four(frame: &[u8; FOUR + TRANSPORT], len: usize) -> Option<(Plain, u8)> {
    let [.., version, _, _, _, _, _, fragment, offset, _, protocol, _, _] = *frame.first_chunk::<26>()?;
    if version != 0x45 || u16::from_be_bytes([fragment, offset]) & 0x3fff != 0 {
        return None;
    }
    let [ports @ .., _, _, _, _, _, _, _, _, _, flags] = *frame.last_chunk::<TRANSPORT>()?;
    let flags = flags_of(protocol, flags, len, FOUR)?;
    let addresses = [u64::from_be_bytes(*frame[26..].first_chunk()?)];
    Some((Plain::Four(Fields { addresses, ports: u32::from_be_bytes(ports), protocol }), flags))
}

#[inline(always)]
fn six(frame: &[u8; SIX + TRANSPORT], len: usize) -> Option<(Plain, u8)> {
    let [.., version, _, _, _, high, low, protocol, _] = *frame.first_chunk::<22>()?;
    // A payload that is no header of these protocols hides what it is.
    if version >> 4 != 6 || u16::from_be_bytes([high, low]) < 8 {
        return None;
    }
    let [ports @ .., _, _, _, _, _, _, _, _, _, flags] = *frame.last_chunk::<TRANSPORT>()?;
    let flags = flags_of(protocol, flags, len, SIX)?;
    let word = |at: usize| frame[at..].first_chunk().copied().map(u64::from_be_bytes);
    let addresses = [word(22)?, word(30)?, word(38)?, word(46)?];
    Some((Plain::Six(Fields { addresses, ports: u32::from_be_bytes(ports), protocol }), flags))
}

/// The flags of a frame of `len` bytes, whose transport header begins `at`.
#[inline(always)]
fn flags_of(protocol: u8, flags: u8, len: usize, at: usize) -> Option<u8> {
    match protocol {
        TCP if len >= at + TRANSPORT => Some(flags),
        UDP if len >= at + 4 => Some(0),
        _ => None,
    }
}
