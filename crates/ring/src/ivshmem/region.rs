//! Where the sections of a region are, and the header page with which a v1 region begins.
//!
//! IVSHMEM v2 tells a driver the layout by registers. The devices of stock QEMU (v1) have no such
//! registers. So a v1 region of this project begins with a page that says the same. The region's
//! maker writes this page before the first peer joins and never after. A v1 guest can write it all
//! the same, so the host uses its own copy and never reads the page back.
//!
//! ```text
//!   bytes     field                        little-endian
//!   0..8      magic "TMBLIVS1"
//!   8..12     version, 1
//!   12..16    protocol
//!   16..20    max_peers, 2 to 64
//!   20..24    vectors; 0: no doorbell, peers poll
//!   24..32    state_table_offset
//!   32..40    rw_offset
//!   40..48    rw_bytes
//!   48..56    output_offset
//!   56..64    output_bytes, of each
//!   64..70    mac: the address that the guest should use on a network link; zero: any
//!   70..72    mtu of a network link; 0: 1500
//!   72..104   name of the link, UTF-8, padded with zeros
//!   104..108  offers of a network link's maker: bit 0, offloads (crate::ivshmem::net); other bits zero
//!   108..     zero; to be ignored by readers
//! ```

use core::fmt;
use core::ops::Range;

use super::protocol;
use crate::mem::Foreign;

/// Sections begin and end at multiples of this.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of a state word.
pub const STATE_BYTES: u64 = 4;
/// The magic number of a header page.
pub const MAGIC: [u8; 8] = *b"TMBLIVS1";
/// The version of the header page that is spoken here.
pub const VERSION: u32 = 1;
/// Bytes of a header's fields; the rest of its page is zero.
pub const HEADER_BYTES: usize = 108;
/// Bit of a header's offers: offloads.
const OFFERS_OFFLOADS: u32 = 1;
/// Bytes of a link's name in a header.
pub const NAME_BYTES: usize = 32;
/// Most peers of a region of this project.
pub const MAX_PEERS: u32 = 64;
/// Largest region that is laid out here: far more than any of its rings can use.
pub const MAX_REGION_BYTES: u64 = 1 << 40;

const fn page_multiple(n: u64) -> bool {
    n.is_multiple_of(PAGE_BYTES)
}

/// Why a layout or a header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum RegionError {
    /// Fewer bytes than a header has.
    #[error("a header of {got} bytes, expected {HEADER_BYTES} or more")]
    Truncated {
        /// Bytes that were there.
        got: usize,
    },
    /// Not a header page of this project.
    #[error("the region begins with {got:02x?}, expected the header \"TMBLIVS1\": not a v1 link of this fabric")]
    Magic { got: [u8; 8] },
    /// A header of another version.
    #[error("header version {got}, expected {VERSION}")]
    Version { got: u32 },
    /// A number of peers that no region has.
    #[error("{got} peers, expected 2 to {MAX_PEERS}")]
    Peers { got: u32 },
    /// A section does not begin or end at a page, is empty though it may not be, or overlaps the
    /// one before.
    #[error(
        "the {part} ({bytes} bytes at {offset:#x}) must be pages from {free_from:#x} on, and not be empty \
         where needed"
    )]
    Section {
        part: Section,
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The first byte at which it may begin.
        free_from: u64,
    },
    /// The sections do not fit the region.
    #[error("the sections end at {needed:#x}, but the region has {got:#x} bytes")]
    Region {
        /// The end of the last section.
        needed: u64,
        /// Bytes of the region.
        got: u64,
    },
    /// The name is no UTF-8.
    #[error("the link's name in the header is not UTF-8")]
    Name,
}

/// A part of a region, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The table of state words.
    StateTable,
    /// The section that all peers write.
    ReadWrite,
    /// The sections of one writer each.
    Outputs,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Section::StateTable => "state table",
            Section::ReadWrite => "R/W section",
            Section::Outputs => "output sections",
        })
    }
}

/// Where the sections of a region are. All in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The table of state words.
    pub state_table_offset: u64,
    /// The section that all peers write.
    pub rw_offset: u64,
    /// Its length; 0 where there is none.
    pub rw_bytes: u64,
    /// The first output section; the others follow.
    pub output_offset: u64,
    /// Length of each output section.
    pub output_bytes: u64,
    /// Peers, and so output sections.
    pub max_peers: u32,
}

impl Layout {
    /// The layout of IVSHMEM v2, from what the device's registers or the server's message say.
    pub const fn v2(state_table_bytes: u64, rw_bytes: u64, output_bytes: u64, max_peers: u32) -> Layout {
        Layout {
            state_table_offset: 0,
            rw_offset: state_table_bytes,
            rw_bytes,
            output_offset: state_table_bytes.saturating_add(rw_bytes),
            output_bytes,
            max_peers,
        }
    }

    /// The layout of a v1 region of this project: header page, state table of one page, R/W
    /// section, and output sections as large as whole pages allow.
    ///
    /// # Errors
    /// [`RegionError`] where not a page is left for each output section.
    pub const fn v1(region_bytes: u64, rw_bytes: u64, max_peers: u32) -> Result<Layout, RegionError> {
        if max_peers < 2 || max_peers > MAX_PEERS {
            return Err(RegionError::Peers { got: max_peers });
        }
        let output_offset = (2 * PAGE_BYTES).saturating_add(rw_bytes);
        let room = region_bytes.saturating_sub(output_offset);
        let output_bytes = room / max_peers as u64 / PAGE_BYTES * PAGE_BYTES;
        let layout = Layout {
            state_table_offset: PAGE_BYTES,
            rw_offset: 2 * PAGE_BYTES,
            rw_bytes,
            output_offset,
            output_bytes,
            max_peers,
        };
        match layout.check(region_bytes) {
            Ok(()) => Ok(layout),
            Err(error) => Err(error),
        }
    }

    /// The default network link: 1 MiB, two peers, the output sections of Jailhouse's network link.
    pub const fn default_network() -> Layout {
        match Layout::v1(1 << 20, 0, 2) {
            Ok(layout) => layout,
            Err(_) => unreachable!(),
        }
    }

    /// Checks that the sections are whole pages, in order, do not overlap, and fit a region of
    /// `region_bytes`. A caller that takes a layout from elsewhere calls this before anything else;
    /// the other methods rely on it.
    ///
    /// # Errors
    /// [`RegionError`] with what was found.
    pub const fn check(&self, region_bytes: u64) -> Result<(), RegionError> {
        if self.max_peers < 2 || self.max_peers > 65536 {
            return Err(RegionError::Peers { got: self.max_peers });
        }
        let peers = self.max_peers as u64;
        let (offset, bytes) = (self.state_table_offset, peers * STATE_BYTES);
        if !page_multiple(offset) || offset > MAX_REGION_BYTES {
            return Err(RegionError::Section { part: Section::StateTable, offset, bytes, free_from: 0 });
        }
        let free_from = (offset + bytes).next_multiple_of(PAGE_BYTES);
        let (offset, bytes) = (self.rw_offset, self.rw_bytes);
        let pages = page_multiple(offset) && page_multiple(bytes);
        if !pages || offset < free_from || offset > MAX_REGION_BYTES || bytes > MAX_REGION_BYTES {
            return Err(RegionError::Section { part: Section::ReadWrite, offset, bytes, free_from });
        }
        let free_from = offset + bytes;
        let (offset, bytes) = (self.output_offset, self.output_bytes);
        let pages = page_multiple(offset) && page_multiple(bytes) && bytes != 0;
        if !pages || offset < free_from || offset > 2 * MAX_REGION_BYTES || bytes > MAX_REGION_BYTES {
            return Err(RegionError::Section { part: Section::Outputs, offset, bytes, free_from });
        }
        // No overflow: at most 2^41 + 2^16 * 2^40.
        let needed = offset + bytes * peers;
        if needed > region_bytes {
            return Err(RegionError::Region { needed, got: region_bytes });
        }
        Ok(())
    }

    /// The end of the last section: bytes that a region needs.
    pub const fn bytes(&self) -> u64 {
        self.output_offset.saturating_add(self.output_bytes.saturating_mul(self.max_peers as u64))
    }

    /// The bytes of `peer`'s output section; `None` where there is no such peer, or the layout was
    /// not checked and is absurd.
    pub const fn output(&self, peer: u32) -> Option<Range<usize>> {
        if peer >= self.max_peers || self.bytes() > MAX_REGION_BYTES {
            return None;
        }
        // In range: below bytes(), at most 2^40.
        let start = (self.output_offset + peer as u64 * self.output_bytes) as usize;
        Some(start..start + self.output_bytes as usize)
    }

    /// The offset of `peer`'s state word; `None` where there is no such peer, or the layout was not
    /// checked and is absurd.
    pub const fn state(&self, peer: u32) -> Option<usize> {
        if peer >= self.max_peers || self.bytes() > MAX_REGION_BYTES {
            return None;
        }
        Some((self.state_table_offset + peer as u64 * STATE_BYTES) as usize)
    }
}

/// A link's name as a header holds it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name([u8; NAME_BYTES]);

impl Name {
    /// The name `text`; `None` where it is longer than [`NAME_BYTES`] or has a zero byte.
    pub fn new(text: &str) -> Option<Name> {
        let bytes = text.as_bytes();
        let mut name = [0; NAME_BYTES];
        name.get_mut(..bytes.len())?.copy_from_slice(bytes);
        (!bytes.contains(&0)).then_some(Name(name))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        // Checked when it was made.
        core::str::from_utf8(&self.0[..end]).unwrap_or("")
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// What the header page of a v1 region says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`protocol::NETWORK`], [`protocol::CHANNEL`], or a number of the users' own.
    pub protocol: u32,
    /// Vectors of each peer; 0 where there is no doorbell.
    pub vectors: u32,
    /// Offsets and sizes of all sections.
    pub layout: Layout,
    /// The address that the guest should use on a network link; zero where it may choose.
    pub mac: [u8; 6],
    /// MTU of a network link; 0 means 1500.
    pub mtu: u16,
    /// As the fabric file names the link.
    pub name: Name,
    /// Whether peer 0 of a network link takes and gives frames with their offload state, if the
    /// guest wants that too ([`Offloads`](super::state::Offloads)).
    pub offloads: bool,
}

impl Header {
    /// A header of the default network link called `name`.
    pub const fn network(name: Name, vectors: u32) -> Header {
        let layout = Layout::default_network();
        Header { protocol: protocol::NETWORK, vectors, layout, mac: [0; 6], mtu: 0, name, offloads: false }
    }

    /// The MTU of a network link, with its default.
    pub const fn mtu(&self) -> u16 {
        if self.mtu == 0 { 1500 } else { self.mtu }
    }

    /// Writes the header to the start of `page` and zeros to the rest of it.
    ///
    /// # Errors
    /// [`RegionError::Truncated`] where `page` has no room.
    pub fn encode(&self, page: &mut [u8]) -> Result<(), RegionError> {
        let got = page.len();
        let Some(fields) = page.first_chunk_mut::<HEADER_BYTES>() else { return Err(RegionError::Truncated { got }) };
        let l = &self.layout;
        fields[0..8].copy_from_slice(&MAGIC);
        for (at, word) in [(8, VERSION), (12, self.protocol), (16, l.max_peers), (20, self.vectors)] {
            fields[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let longs = [l.state_table_offset, l.rw_offset, l.rw_bytes, l.output_offset, l.output_bytes];
        for (chunk, long) in fields[24..64].chunks_exact_mut(8).zip(longs) {
            chunk.copy_from_slice(&long.to_le_bytes());
        }
        fields[64..70].copy_from_slice(&self.mac);
        fields[70..72].copy_from_slice(&self.mtu.to_le_bytes());
        fields[72..104].copy_from_slice(&self.name.0);
        let offers = if self.offloads { OFFERS_OFFLOADS } else { 0 };
        fields[104..108].copy_from_slice(&offers.to_le_bytes());
        page[HEADER_BYTES..].fill(0);
        Ok(())
    }

    /// Reads the header at the start of `page`, which belongs to a region of `region_bytes`.
    ///
    /// # Errors
    /// [`RegionError`] with what was expected and found: too short, not a header, another version,
    /// sections that do not fit.
    pub fn decode(page: &[u8], region_bytes: u64) -> Result<Header, RegionError> {
        let truncated = RegionError::Truncated { got: page.len() };
        let fields: &[u8; HEADER_BYTES] = page.first_chunk().ok_or(truncated)?;
        let word = |at: usize| u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let [m0, m1, m2, m3, m4, m5, m6, m7, ..] = *fields;
        let magic = [m0, m1, m2, m3, m4, m5, m6, m7];
        if magic != MAGIC {
            return Err(RegionError::Magic { got: magic });
        }
        if word(8) != VERSION {
            return Err(RegionError::Version { got: word(8) });
        }
        let layout = Layout {
            state_table_offset: long(24),
            rw_offset: long(32),
            rw_bytes: long(40),
            output_offset: long(48),
            output_bytes: long(56),
            max_peers: word(16),
        };
        if layout.max_peers > MAX_PEERS {
            return Err(RegionError::Peers { got: layout.max_peers });
        }
        layout.check(region_bytes)?;
        let mut mac = [0; 6];
        mac.copy_from_slice(&fields[64..70]);
        let mut name = [0; NAME_BYTES];
        name.copy_from_slice(&fields[72..104]);
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        core::str::from_utf8(&name[..end]).map_err(|_| RegionError::Name)?;
        let mtu = u16::from_le_bytes([fields[70], fields[71]]);
        let offloads = word(104) & OFFERS_OFFLOADS != 0;
        Ok(Header { protocol: word(12), vectors: word(20), layout, mac, mtu, name: Name(name), offloads })
    }

    /// As [`Header::decode`], from a mapped region: the fields are copied once and judged by the
    /// copy.
    ///
    /// # Errors
    /// As for [`Header::decode`].
    pub fn read(region: Foreign<'_>) -> Result<Header, RegionError> {
        match region.read_array::<HEADER_BYTES>(0) {
            Some(fields) => Header::decode(&fields, region.len() as u64),
            None => Err(RegionError::Truncated { got: region.len() }),
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { protocol, vectors, layout, mtu, name, .. } = self;
        let (peers, bytes) = (layout.max_peers, layout.output_bytes);
        write!(
            f,
            "link {name:?}: protocol {protocol:#x}, {peers} peers, {vectors} vectors, outputs of {bytes:#x} bytes, "
        )?;
        write!(f, "mtu {mtu}")
    }
}
