//! Memory of a guest, which its owner can take away.
//!
//! A guest's memory comes as a descriptor of another process's file. That file can shrink unless it
//! is sealed. Seals cannot be demanded, because memory of `memory-backend-file` and of hugepages
//! has none. Huge pages or a full tmpfs can also fail at the first touch. The next access to such a
//! page raises SIGBUS. That would end this process, and with it the network of every other guest.
//! So:
//!
//! * each mapping is entered in a table of the process before it is used;
//! * the handler of SIGBUS finds the mapping whose page is gone, puts zeroed private memory over
//!   **all** of it (a mapping of huge pages cannot be replaced in part), and marks it lost; the
//!   access that failed continues there;
//! * the owner of the mapping looks at [`GuestMapping::is_lost`] once per batch and resets its
//!   port.
//!
//! An address outside the table does not belong to this module. Then the earlier handler (Rust's
//! own, which reports a stack overflow) gets it, or the process dies as it would have.
//!
//! The handler is async-signal-safe: it reads atomics and makes one system call. The access itself
//! raises this kind of SIGBUS, in the accessing thread. Entering and removing touch no guest
//! memory. So the handler never interrupts a change of the table by the same thread.
//!
//! Limits: [`MAX_MAPPINGS`] in a process. This module is on the list of modules that may use
//! `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use crate::memory::{MemoryError, expect_memory};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::Backing;

/// Most guest mappings of a process at a time.
pub const MAX_MAPPINGS: usize = 4096;
/// Longest mapping: an address space of 128 TiB has room for the guests of 64 ports of this size.
pub const MAX_BYTES: u64 = 1 << 40;

struct Entry {
    /// Address of the first byte; 0 in a free entry. Written last on entering, and first on
    /// removing.
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Entry; MAX_MAPPINGS] =
    [const { Entry { start: AtomicUsize::new(0), end: AtomicUsize::new(0), lost: AtomicBool::new(false) } };
        MAX_MAPPINGS];
/// Held while an entry is taken.
static ENTERING: Mutex<()> = Mutex::new(());
/// What handled SIGBUS before; set once the handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A shared, writable mapping of a part of a guest's memory that survives the loss of its pages.
#[derive(Debug)]
pub struct GuestMapping {
    /// What was mapped: the wanted range, widened to whole blocks of the file.
    start: NonNull<u8>,
    mapped: usize,
    /// The wanted range inside it.
    offset: usize,
    bytes: usize,
    entry: usize,
}

// SAFETY: a mapping is an address range that stays valid until Drop, from whichever thread.
unsafe impl Send for GuestMapping {}
// SAFETY: it hands out views whose accesses are atomics and copies only; see tombolo_ring::mem.
unsafe impl Sync for GuestMapping {}

impl GuestMapping {
    /// Maps `bytes` at `offset` of the peer's file, which need not be aligned. The range has to lie
    /// inside the file as it is now.
    ///
    /// # Errors
    /// [`MemoryError::OutsideFile`] and [`MemoryError::Shape`] for what a peer got wrong, else the
    /// kernel's.
    pub fn new(fd: impl AsFd, offset: u64, bytes: u64) -> Result<GuestMapping, MemoryError> {
        let system = |what| move |source| MemoryError::System { what, bytes, source };
        let shape = MemoryError::Shape { offset, bytes };
        // On a file system of the peer's own making (FUSE) the first touch of a page could wait for
        // the peer for ever.
        expect_memory(&fd)?;
        let stat = fstat(&fd).map_err(system("fstat"))?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        // The block of a file of huge pages is the page, of which offset and length of a mapping
        // have to be multiples.
        let block = u64::try_from(stat.st_blksize).ok().filter(|b| b.is_power_of_two()).unwrap_or(4096).max(4096);
        if bytes == 0 || bytes > MAX_BYTES || block > 1 << 30 {
            return Err(shape);
        }
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= file_bytes) else {
            return Err(MemoryError::OutsideFile { offset, bytes, file_bytes });
        };
        let first = offset & !(block - 1);
        // No overflow: end is at most the size of a file, which is below 2^63.
        let len = end.next_multiple_of(block) - first;
        let len = usize::try_from(len).map_err(|_| shape)?;
        install().map_err(system("installing the handler of SIGBUS"))?;
        // SAFETY: a new mapping at an address that the kernel chooses; no existing memory is
        // touched.
        let start =
            unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, first) };
        let start = start.map_err(system("mmap"))?.cast::<u8>();
        let start = NonNull::new(start).ok_or(MemoryError::Shape { offset, bytes })?;
        let Some(entry) = enter(start.as_ptr() as usize, len) else {
            // SAFETY: exactly what was mapped above, and nothing refers to it yet.
            let _ = unsafe { munmap(start.as_ptr().cast(), len) };
            return Err(system("entering a guest mapping in the table")(Errno::NOBUFS));
        };
        // In range: offset - first < block, and both fit the mapping.
        Ok(GuestMapping { start, mapped: len, offset: (offset - first) as usize, bytes: bytes as usize, entry })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: an empty range is not mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether pages were gone when they were touched. What was read and written since went
    /// nowhere.
    #[inline]
    pub fn is_lost(&self) -> bool {
        // Relaxed: set in the thread that touched the page, and a mapping is worked on by one
        // thread.
        TABLE[self.entry].lost.load(Ordering::Relaxed)
    }
}

impl Backing for GuestMapping {
    #[inline]
    fn bytes(&self) -> ForeignMut<'_> {
        // SAFETY: offset + bytes <= mapped bytes of a live writable mapping (constructor, Drop),
        // into which no reference is made.
        unsafe { ForeignMut::new(self.start.add(self.offset), self.bytes) }
    }
}

impl Drop for GuestMapping {
    fn drop(&mut self) {
        // Before the address range can be used for something else. Release: partner is the
        // handler's acquire.
        TABLE[self.entry].start.store(0, Ordering::Release);
        // SAFETY: exactly what the constructor mapped (or the handler put in its place), and views
        // cannot outlive self. A failure would leak address space only, and no caller could act on
        // it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

fn enter(start: usize, len: usize) -> Option<usize> {
    let _one = ENTERING.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = TABLE.iter().position(|entry| entry.start.load(Ordering::Relaxed) == 0)?;
    TABLE[entry].lost.store(false, Ordering::Relaxed);
    TABLE[entry].end.store(start + len, Ordering::Relaxed);
    // Release: the handler that sees the start sees the end.
    TABLE[entry].start.store(start, Ordering::Release);
    Some(entry)
}

/// Installs the handler, once in a process.
fn install() -> Result<(), Errno> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if PREVIOUS.get().is_some() {
        return Ok(());
    }
    let mut previous = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: reads the present action into a struct of the right size, for which zeros are a valid
    // value.
    let previous = unsafe {
        if libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) != 0 {
            return Err(errno());
        }
        previous.assume_init()
    };
    // Before the handler can run, since it reads it.
    let _ = PREVIOUS.set(previous);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    // SAFETY: zeros are a valid sigaction; the handler has the signature that SA_SIGINFO asks for
    // and is async-signal-safe (module head); SA_ONSTACK uses the alternate stack of threads that
    // have one.
    let done = unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(errno()) }
}

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    for entry in &TABLE {
        // Acquire: partner is the release in `enter`.
        let start = entry.start.load(Ordering::Acquire);
        let end = entry.end.load(Ordering::Acquire);
        // An entry that was reused between the two loads has another start now.
        let same = entry.start.load(Ordering::Acquire) == start;
        if same && start != 0 && start <= address && address < end {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
            // SAFETY: replaces exactly one mapping of guest memory, whose owner is inside an access
            // to it and so keeps it; views of it stay valid, since the range stays mapped, readable
            // and writable.
            let replaced = unsafe { mmap_anonymous(start as *mut _, end - start, protection, flags) };
            if replaced.is_ok() {
                entry.lost.store(true, Ordering::Relaxed);
                return;
            }
            break;
        }
    }
    // Not ours: as if this handler had never been.
    if let Some(previous) = PREVIOUS.get() {
        let action = previous.sa_sigaction;
        // SAFETY: calls what the previous action named, with what the kernel passed, in the form
        // that its flags name; or puts the action back, so that the access, repeated on return,
        // ends the process.
        unsafe {
            if action == libc::SIG_DFL || action == libc::SIG_IGN {
                libc::signal(signal, libc::SIG_DFL);
            } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
                let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(action);
                call(signal, info, context);
            } else {
                let call: extern "C" fn(libc::c_int) = std::mem::transmute(action);
                call(signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::sync::atomic::Ordering;

    #[test]
    fn a_range_need_not_be_aligned_and_must_be_inside_the_file() {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 3 * 4096).unwrap();
        let whole = GuestMapping::new(&fd, 0, 3 * 4096).unwrap();
        let part = GuestMapping::new(&fd, 4096 + 100, 200).unwrap();
        assert_eq!(part.len(), 200);
        part.bytes().write_array(10, [1, 2, 3]).unwrap();
        assert_eq!(whole.bytes().as_foreign().read_array::<3>(4096 + 110), Some([1, 2, 3]));
        for (offset, bytes) in [(0, 3 * 4096 + 1), (3 * 4096, 1), (u64::MAX, 2)] {
            assert!(matches!(GuestMapping::new(&fd, offset, bytes), Err(MemoryError::OutsideFile { .. })));
        }
        for bytes in [0, MAX_BYTES + 1, u64::MAX] {
            assert!(matches!(GuestMapping::new(&fd, 0, bytes), Err(MemoryError::Shape { .. })));
        }
    }

    #[test]
    fn files_of_other_file_systems_are_refused() {
        let proc = std::fs::File::open("/proc/self/maps").unwrap();
        assert!(matches!(GuestMapping::new(&proc, 0, 4096), Err(MemoryError::FileSystem { .. })));
    }

    #[test]
    fn memory_taken_away_is_lost_and_not_fatal() {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 1 << 20).unwrap();
        let mapping = GuestMapping::new(&fd, 0, 1 << 20).unwrap();
        let other = GuestMapping::new(&fd, 0, 4096).unwrap();
        let view = mapping.bytes();
        assert_eq!(view.store_u32(0x8_0000, 7, Ordering::Relaxed), Some(()));
        ftruncate(&fd, 4096).unwrap();
        assert!(!mapping.is_lost());
        assert_eq!(view.as_foreign().load_u32(0x8_0000, Ordering::Relaxed), Some(0));
        assert!(mapping.is_lost());
        assert!(!other.is_lost());
        // All of it is memory of our own now; the neighbour still has the file.
        other.bytes().write_array(0, [9]).unwrap();
        assert_eq!(view.as_foreign().read_array::<1>(0), Some([0]));
        view.write_array(0xf_ffff, [5]).unwrap();
        assert_eq!(view.as_foreign().read_array::<1>(0xf_ffff), Some([5]));
        drop(mapping);
        let again = GuestMapping::new(&fd, 0, 4096).unwrap();
        assert!(!again.is_lost(), "a new mapping starts unharmed");
        assert_eq!(again.bytes().as_foreign().read_array::<1>(0), Some([9]));
    }
}
