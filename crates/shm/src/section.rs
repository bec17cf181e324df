//! Sections: memory that its maker writes, that another process can only read, and that neither can
//! take away.
//!
//! The maker maps its memfd for writing and then seals it. The memfd can neither shrink nor grow,
//! and no new writable mapping can be made (`F_SEAL_FUTURE_WRITE`, Linux 5.1). A process that gets
//! the descriptor cannot write by any means. A process that adopts one checks the seals first, so
//! that no access can raise SIGBUS.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::foreign;
use crate::memory::{Mapping, MemoryError};

const TMPFS_MAGIC: u64 = 0x0102_1994;
/// What an adopted section must be sealed against.
const NEEDED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Why memory that another made was not taken.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum AdoptError {
    /// Somebody else may hold back or take away its pages: a pipe, a file of a disk, huge pages.
    #[error("the descriptor is {found}, expected a memfd of ordinary pages; create it with memfd_create")]
    NoMemfd {
        /// What it is, as the kernel names it.
        found: String,
    },
    /// Its pages could be taken away under the mapping.
    #[error("the memory has {}, expected seals SHRINK and GROW; create it with MFD_ALLOW_SEALING and add them with \
        fcntl(F_ADD_SEALS)", seals(*found))]
    Unsealed { found: SealFlags },
    /// It was sealed before it had a size.
    #[error("the memory has 0 bytes, expected some; give it its size with ftruncate before it is sealed")]
    Empty,
    /// The size is not what was agreed on.
    #[error("the peer's section has {found} bytes, expected {wanted}")]
    Size {
        found: u64,
        /// Bytes it should have.
        wanted: u64,
    },
    /// It could not be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Seals in words.
fn seals(found: SealFlags) -> String {
    let names: Vec<_> = found.iter_names().map(|(name, _)| name).collect();
    if names.is_empty() { "no seals".into() } else { format!("seals {}", names.join(" and ")) }
}

/// Makes a section of zeros: its descriptor, to be handed over, and the only mapping that can write
/// it. All pages are there already where `populate` is set.
///
/// # Errors
/// The kernel's, where memory or descriptors are short.
pub fn make(name: &str, bytes: u64, populate: bool) -> Result<(OwnedFd, Mapping), MemoryError> {
    let system = |what| move |source| MemoryError::System { what, bytes, source };
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(system("memfd_create"))?;
    ftruncate(&fd, bytes).map_err(system("ftruncate"))?;
    let mapping = Mapping::new(&fd, 0, bytes, true)?;
    fcntl_add_seals(&fd, NEEDED | SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(system("sealing"))?;
    if populate {
        mapping.populate();
    }
    Ok((fd, mapping))
}

/// The size of memory that another made, where it is a memfd on ordinary pages that can neither
/// shrink nor grow.
///
/// # Errors
/// [`AdoptError::NoMemfd`], [`AdoptError::Unsealed`] and [`AdoptError::Empty`] for anything else.
pub fn sealed_bytes(fd: impl AsFd) -> Result<u64, AdoptError> {
    // Before anything else is asked: a file whose file system is the peer's own (FUSE) answers the
    // other questions when the peer likes, but only memory has seals.
    let Ok(found) = fcntl_get_seals(&fd) else { return Err(AdoptError::NoMemfd { found: foreign::name(&fd) }) };
    // Files of a mounted tmpfs cannot be sealed, and huge pages can run out, which is SIGBUS too.
    if !fstatfs(&fd).is_ok_and(|fs| fs.f_type as u64 == TMPFS_MAGIC) {
        return Err(AdoptError::NoMemfd { found: "memory of huge pages".into() });
    }
    if !found.contains(NEEDED) {
        return Err(AdoptError::Unsealed { found });
    }
    let system = |source: Errno| MemoryError::System { what: "fstat", bytes: 0, source };
    match fstat(&fd).map_err(system)?.st_size as u64 {
        0 => Err(AdoptError::Empty),
        bytes => Ok(bytes),
    }
}

/// Maps a peer's section of exactly `wanted` bytes, for reading only.
///
/// # Errors
/// [`AdoptError`], where the peer's descriptor is not what was agreed on.
pub fn adopt(fd: impl AsFd, wanted: u64, populate: bool) -> Result<Mapping, AdoptError> {
    let found = sealed_bytes(&fd)?;
    if found != wanted {
        return Err(AdoptError::Size { found, wanted });
    }
    let mapping = Mapping::new(fd, 0, wanted, false)?;
    if populate {
        mapping.populate();
    }
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::sealed_region;

    #[test]
    fn only_the_maker_can_write() {
        let (fd, own) = make("test", 8192, true).unwrap();
        own.view_mut().unwrap().write_array(100, *b"abc").unwrap();
        let peer = adopt(&fd, 8192, true).unwrap();
        assert_eq!(peer.view().read_array(100), Some(*b"abc"));
        own.view_mut().unwrap().write_array(100, *b"def").unwrap();
        assert_eq!(peer.view().read_array(100), Some(*b"def"));
        assert!(peer.view_mut().is_none());
        assert!(Mapping::new(&fd, 0, 8192, true).is_err(), "a second writable mapping");
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn what_could_be_taken_away_is_not_adopted() {
        let open = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 8192).unwrap();
        let error = adopt(&open, 8192, false).unwrap_err();
        assert!(error.to_string().starts_with("the memory has no seals, expected seals SHRINK and GROW"), "{error}");
        fcntl_add_seals(&open, SealFlags::GROW).unwrap();
        let error = adopt(&open, 8192, false).unwrap_err();
        assert!(error.to_string().starts_with("the memory has seals GROW, expected"), "{error}");
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert!(matches!(adopt(&pipe, 8192, false), Err(AdoptError::NoMemfd { found }) if found.starts_with("pipe:")));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(adopt(&file, 8192, false), Err(AdoptError::NoMemfd { found }) if found.starts_with('/')));
        let empty = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&empty, NEEDED).unwrap();
        assert!(matches!(adopt(&empty, 8192, false), Err(AdoptError::Empty)));
        let sealed = sealed_region("test", 4096).unwrap();
        assert!(matches!(adopt(&sealed, 8192, false), Err(AdoptError::Size { found: 4096, wanted: 8192 })));
    }
}
