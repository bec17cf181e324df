//! A peer's section when a connection begins: checked without touching its pages, then faulted in.
//!
//! Reading a hole of a memfd through a mapping allocates a page of it. A peer that sends a sparse
//! section would have us make all of its pages. That takes tens of milliseconds for 64 MiB, and
//! uses memory that is not needed. So the header is read with `pread`, which allocates nothing.
//! Then the queue is faulted in, which is small (1 MiB with the most entries). The arena is faulted
//! in only if its owner has made its pages already. Pages of a sparse arena are made when a payload
//! in them is read, and are part of what its owner is charged.

use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, seek};
use tombolo_ring::rpc::{Geometry, Role};
use tombolo_shm::memory::Mapping;

/// Whether a section begins with the header that `role` and its geometry ask. The descriptor is a
/// memfd (`section::adopt`), so nothing blocks.
pub(crate) fn has_header(section: impl AsFd, geometry: Geometry, role: Role) -> bool {
    let expected = geometry.header(role);
    let mut found = [0; Geometry::HEADER_BYTES];
    rustix::io::pread(section, &mut found, 0) == Ok(found.len()) && found == expected
}

/// Faults in what a connection uses at once: the queue, and the arena where no page of it has to be
/// made for that.
pub(crate) fn fault_in(section: impl AsFd, mapping: &Mapping, geometry: Geometry) {
    let bytes = geometry.section_bytes();
    // Moves the offset of the peer's open file, which mappings do not use.
    let whole = seek(section, SeekFrom::Hole(0)).is_ok_and(|hole| hole >= bytes);
    mapping.populate_first(if whole { bytes } else { geometry.arena() as u64 });
}
