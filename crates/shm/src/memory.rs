//! Memory shared by descriptor: this process's own sealed regions, and mappings of what a peer
//! handed over.
//!
//! A mapping lives as long as its [`Mapping`]. Views borrow from it, so none outlives it. This
//! module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use tombolo_ring::mem::{Foreign, ForeignMut};

use crate::foreign::{self, Kind};

/// Why memory could not be shared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum MemoryError {
    /// The kernel refused.
    #[error("{what} of {bytes} bytes: {source}")]
    System { what: &'static str, bytes: u64, source: Errno },
    /// The peer named a range that its file does not have.
    #[error("the peer's file has {file_bytes} bytes, but bytes {offset} to {offset}+{bytes} were to be mapped")]
    OutsideFile {
        /// Start of the range in the file.
        offset: u64,
        /// Length of the range.
        bytes: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// The file is on a file system whose pages somebody else may hold back.
    #[error("the peer's memory is {found}, expected a memfd, or a file of tmpfs or hugetlbfs")]
    FileSystem {
        /// What it is, as the kernel names it.
        found: String,
    },
    /// A range that cannot be mapped on any machine.
    #[error("a mapping of {bytes} bytes at file offset {offset} is empty, not page-aligned, or too large")]
    Shape {
        /// Start of the range in the file.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    },
}

/// A region of our own, in a memfd that can neither shrink nor grow any more.
///
/// # Errors
/// The kernel's, where memory or descriptors are short.
pub fn sealed_region(name: &str, bytes: u64) -> Result<OwnedFd, MemoryError> {
    let system = |what| move |source| MemoryError::System { what, bytes, source };
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(system("memfd_create"))?;
    ftruncate(&fd, bytes).map_err(system("ftruncate"))?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(system("sealing"))?;
    Ok(fd)
}

/// Refuses a file of any file system except tmpfs and hugetlbfs, without asking the file system. A
/// peer's own (FUSE) could block a process for ever that asks it anything or touches its pages.
pub fn expect_memory(fd: impl AsFd) -> Result<(), MemoryError> {
    match foreign::kind(&fd) {
        Kind::Memory => Ok(()),
        _ => Err(MemoryError::FileSystem { found: foreign::name(fd) }),
    }
}

/// Whether the file behind `fd` is sealed against shrinking: only then can no peer take its pages
/// away under a mapping, which would raise SIGBUS at the next access.
pub fn cannot_shrink(fd: impl AsFd) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// A shared mapping of a part of a file, for reading and writing, or for reading only.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: a mapping is an address range that stays valid until Drop, from whichever thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping hands out views whose accesses are atomics and copies only; see
// tombolo_ring::mem.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` at `offset` of the file, shared. The range has to lie inside the file as it is
    /// now.
    ///
    /// # Errors
    /// [`MemoryError::FileSystem`], [`MemoryError::OutsideFile`] and [`MemoryError::Shape`] for
    /// what a peer got wrong, else the kernel's.
    pub fn new(fd: impl AsFd, offset: u64, bytes: u64, writable: bool) -> Result<Mapping, MemoryError> {
        let system = |what| move |source| MemoryError::System { what, bytes, source };
        Self::shape(offset, bytes)?;
        expect_memory(&fd)?;
        let file_bytes = fstat(&fd).map_err(system("fstat"))?.st_size as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            return Err(MemoryError::OutsideFile { offset, bytes, file_bytes });
        }
        Self::map(fd, offset, bytes, writable)
    }

    /// The length as an address space has it, of a range that can be mapped at all.
    fn shape(offset: u64, bytes: u64) -> Result<usize, MemoryError> {
        let len = usize::try_from(bytes).ok().filter(|len| *len != 0 && *len <= isize::MAX as usize);
        len.filter(|_| offset.is_multiple_of(4096)).ok_or(MemoryError::Shape { offset, bytes })
    }

    fn map(fd: impl AsFd, offset: u64, bytes: u64, writable: bool) -> Result<Mapping, MemoryError> {
        let system = |what| move |source| MemoryError::System { what, bytes, source };
        let len = Self::shape(offset, bytes)?;
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses; no existing memory is
        // touched.
        let start = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) };
        let start = start.map_err(system("mmap"))?.cast();
        let start = NonNull::new(start).ok_or(MemoryError::Shape { offset, bytes })?;
        Ok(Mapping { start, len, writable })
    }

    /// Maps `bytes` at `offset` of a device's file, shared, for reading and writing. Such a file
    /// has no size that could be asked for: its driver refuses what the device does not have.
    ///
    /// # Errors
    /// [`MemoryError::Shape`], else the kernel's.
    pub fn of_device(fd: impl AsFd, offset: u64, bytes: u64) -> Result<Mapping, MemoryError> {
        Self::map(fd, offset, bytes, true)
    }

    /// Zeroed memory of this process alone, which a forked child finds zeroed again
    /// (`MADV_WIPEONFORK`).
    ///
    /// # Errors
    /// [`MemoryError::Shape`], else the kernel's.
    pub fn wiped_on_fork(bytes: u64) -> Result<Mapping, MemoryError> {
        let system = |what| move |source| MemoryError::System { what, bytes, source };
        let len = Self::shape(0, bytes)?;
        // SAFETY: a new mapping at an address that the kernel chooses; no existing memory is
        // touched.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let start =
            NonNull::new(start.map_err(system("mmap"))?.cast()).ok_or(MemoryError::Shape { offset: 0, bytes })?;
        let mapping = Mapping { start, len, writable: true };
        // SAFETY: start and len are those of a live mapping; the advice is for children and changes
        // no byte of it here.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxWipeOnFork) }.map_err(system("madvise"))?;
        Ok(mapping)
    }

    /// Address of the first byte, for the modules of this crate that share it with the kernel.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an empty range is not mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Has the kernel fill in the pages now, so that no access faults later. What it cannot fill
    /// stays to be faulted in.
    pub fn populate(&self) {
        self.populate_first(self.len as u64);
    }

    /// The same for the first `bytes` only.
    pub fn populate_first(&self, bytes: u64) {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX).min(self.len);
        let advice = if self.writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // SAFETY: start is that of a live mapping of at least len bytes; populating changes no byte
        // of it.
        let _ = unsafe { madvise(self.start.as_ptr().cast(), len, advice) };
    }

    /// The mapping, for reading.
    pub fn view(&self) -> Foreign<'_> {
        // SAFETY: start and len are those of a live mapping (constructor, Drop), and no reference
        // into it is made.
        unsafe { Foreign::new(self.start, self.len) }
    }

    /// The mapping, for writing; `None` where it was mapped for reading only.
    pub fn view_mut(&self) -> Option<ForeignMut<'_>> {
        // SAFETY: as for `view`, and the mapping is writable.
        self.writable.then(|| unsafe { ForeignMut::new(self.start, self.len) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and len are those of the mapping made in the constructor, and views cannot
        // outlive self. A failure would leak address space only, and no caller could act on it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_region_are_the_same_memory() {
        let fd = sealed_region("test", 8192).unwrap();
        assert!(cannot_shrink(&fd));
        let (a, b) = (Mapping::new(&fd, 0, 8192, true).unwrap(), Mapping::new(&fd, 4096, 4096, false).unwrap());
        a.view_mut().unwrap().write_array(4100, [1, 2, 3]).unwrap();
        assert_eq!(b.view().read_array::<3>(4), Some([1, 2, 3]));
        assert!(b.view_mut().is_none());
    }

    #[test]
    fn a_sealed_region_cannot_shrink() {
        let fd = sealed_region("test", 8192).unwrap();
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
    }

    #[test]
    fn ranges_outside_the_file_are_refused() {
        let fd = sealed_region("test", 8192).unwrap();
        for (offset, bytes) in [(0, 8193), (8192, 4096), (4096, 8192), (!4095, 8192)] {
            assert!(matches!(Mapping::new(&fd, offset, bytes, true), Err(MemoryError::OutsideFile { .. })));
        }
        for (offset, bytes) in [(0, 0), (1, 4096), (0, u64::MAX)] {
            assert!(matches!(Mapping::new(&fd, offset, bytes, true), Err(MemoryError::Shape { .. })));
        }
    }
}
