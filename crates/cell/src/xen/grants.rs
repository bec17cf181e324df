//! The grant table, version 1 (public/grant_table.h): which pages of this domain which other domain
//! may map or copy.
//!
//! An entry is `flags` u16, `domid` u16, `frame` u32; the flags are written last. Xen sets
//! `reading` and `writing` while the other domain uses the page. The table grows by a page of 512
//! entries as they are needed.

use crate::machine::{dma, hypercall};
use alloc::vec::Vec;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use tombolo_ring::mem::ForeignMut;

const PAGE: usize = 4096;
const ENTRY_BYTES: usize = 8;
const ENTRIES: u32 = (PAGE / ENTRY_BYTES) as u32;
const DOMID: usize = 2;
const FRAME: usize = 4;
const PERMIT_ACCESS: u16 = 1;
const READ_ONLY: u16 = 4;
const READING: u16 = 8;
const WRITING: u16 = 16;
/// The first entries belong to the toolstack: console, XenStore.
const FIRST: u32 = 8;

/// What the other domain may do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

#[derive(Default)]
pub(super) struct Grants {
    pages: Vec<ForeignMut<'static>>,
    free: Vec<u32>,
}

impl Grants {
    /// Lets `domain` use `page`; the reference by which it does so. `None` where the table cannot
    /// grow any more.
    pub(super) fn grant(&mut self, domain: u16, page: ForeignMut<'static>, access: Access) -> Option<u32> {
        self.grant_frame(domain, u32::try_from(hypercall::frame(page)).ok()?, access)
    }

    pub(super) fn grant_frame(&mut self, domain: u16, frame: u32, access: Access) -> Option<u32> {
        if self.free.is_empty() {
            self.grow()?;
        }
        let reference = self.free.pop()?;
        let (table, at) = self.entry(reference)?;
        let flags = PERMIT_ACCESS | if access == Access::Read { READ_ONLY } else { 0 };
        table.store_u32(at + FRAME, frame, Relaxed)?;
        table.store_u16(at + DOMID, domain, Relaxed)?;
        // Release: the entry is whole before it holds.
        table.store_u16(at, flags, Release)?;
        Some(reference)
    }

    /// Takes a grant back; false while the other domain uses the page, which then stays granted.
    pub(super) fn end(&mut self, reference: u32) -> bool {
        let Some((table, at)) = self.entry(reference) else { return false };
        loop {
            let flags = table.as_foreign().load_u16(at, Acquire).unwrap_or(READING);
            if flags & (READING | WRITING) != 0 {
                return false;
            }
            if table.compare_exchange_u16(at, flags, 0, AcqRel) == Some(true) {
                self.free.push(reference);
                return true;
            }
        }
    }

    /// The domain was restored and its table is a new one: no page is granted any more.
    ///
    /// # Panics
    /// Where Xen refuses what it has granted to every domain.
    pub(super) fn restored(&mut self) {
        self.free.clear();
        for (index, page) in self.pages.iter().enumerate() {
            let index = index as u32;
            if let Err(refused) = hypercall::map_grant_table(u64::from(index), *page) {
                panic!("Xen refused page {index} of the grant table after a restore: {refused:?}");
            }
            self.free.extend(references(index));
        }
    }

    /// Marks a grant as Xen does while the other domain writes to the page.
    #[cfg(test)]
    pub(super) fn played_use(&self, reference: u32) {
        let (table, at) = self.entry(reference).unwrap();
        table.store_u16(at, PERMIT_ACCESS | WRITING, Release).unwrap();
    }

    fn entry(&self, reference: u32) -> Option<(ForeignMut<'static>, usize)> {
        let page = self.pages.get((reference / ENTRIES) as usize)?;
        Some((*page, (reference % ENTRIES) as usize * ENTRY_BYTES))
    }

    fn grow(&mut self) -> Option<()> {
        let index = self.pages.len() as u32;
        let page = dma::alloc(PAGE);
        hypercall::map_grant_table(u64::from(index), page).ok()?;
        self.pages.push(page);
        self.free.extend(references(index));
        Some(())
    }
}

/// The references of a page of the table that are the domain's own, the lowest last.
fn references(page: u32) -> impl Iterator<Item = u32> {
    (page * ENTRIES..(page + 1) * ENTRIES).rev().filter(|reference| *reference >= FIRST)
}
