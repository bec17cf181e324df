//! Memory that begins at a page. The kernel copies between a guest of Xen and a process page by
//! page of the process's memory (gntdev, drivers/xen/gntdev.c). So a page of a guest that lies
//! across two of our pages costs two copies.

use std::ops::{Deref, DerefMut};

pub(crate) use tombolo_ring::xen::PAGE_BYTES;

/// Zeroed bytes whose first one begins a page of 4096 bytes.
pub(crate) struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Pages {
        let bytes = vec![0; len + PAGE_BYTES - 1];
        // The vector is never resized, so its memory stays where it is.
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE_BYTES) - bytes.as_ptr().addr();
        Pages { bytes, start, len }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_begins_a_page() {
        for len in [0, 1, 4096, 5000] {
            let mut pages = Pages::new(len);
            assert_eq!((pages.len(), pages.as_ptr().addr() % PAGE_BYTES), (len, 0));
            pages.fill(1);
        }
    }
}
