//! Payloads that are handed over as whole memory, written in place: for what is large, up to GiB,
//! at the price of no copy.
//!
//! A [`SharedBuffer`] is made once and used for many calls; its descriptor crosses the socket of a
//! connection once. What its maker writes while the other side reads is the other side's nonsense:
//! nothing is frozen.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::memory::{Mapping, MemoryError};
use tombolo_shm::section;
pub use tombolo_shm::section::AdoptError;

use crate::message::Message;
use crate::quota::{Charge, Quota};
use crate::socket;

/// Most memories that one side may hand over in a connection at a time.
pub(crate) const MAX_MEMORIES: usize = 64;

static NUMBERS: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
struct Memory {
    fd: OwnedFd,
    mapping: Mapping,
    number: u32,
}

/// Memory that is written here and read by whom it is handed to. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct SharedBuffer(Arc<Memory>);

impl SharedBuffer {
    /// Zeroed memory of so many bytes. Pages are there when they are first written, or at once with
    /// `populate`.
    ///
    /// # Errors
    /// The kernel's, where memory is short.
    pub fn new(bytes: u64, populate: bool) -> Result<SharedBuffer, MemoryError> {
        let (fd, mapping) = section::make("tombolo-rpc-payload", bytes, populate)?;
        Ok(SharedBuffer::over(fd, mapping))
    }

    /// Uses the whole of an existing memfd. It must be sealed against shrinking and growing, or its
    /// maker could kill its readers. If it is also sealed against writing, no process can change it
    /// under the reader.
    ///
    /// # Errors
    /// [`AdoptError`]: it is no memfd of ordinary pages, lacks those two seals or is empty, or
    /// cannot be mapped.
    pub fn of_memfd(fd: OwnedFd) -> Result<SharedBuffer, AdoptError> {
        let bytes = section::sealed_bytes(&fd)?;
        // Where it is sealed against writing, it is mapped for reading.
        let mapping = Mapping::new(&fd, 0, bytes, true).or_else(|_| Mapping::new(&fd, 0, bytes, false))?;
        Ok(SharedBuffer::over(fd, mapping))
    }

    fn over(fd: OwnedFd, mapping: Mapping) -> SharedBuffer {
        // Unique in this process, which is all that a connection asks. It comes round after 2^32
        // buffers.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        SharedBuffer(Arc::new(Memory { fd, mapping, number }))
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.0.mapping.len() as u64
    }

    /// Never: empty memory cannot be mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memory, for writing and reading. Empty where it may not be written: a memfd that was
    /// sealed against that ([`SharedBuffer::read`]).
    pub fn view(&self) -> ForeignMut<'_> {
        self.0.mapping.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..]))
    }

    /// The memory, for reading.
    pub fn read(&self) -> Foreign<'_> {
        self.0.mapping.view()
    }

    /// Whether it may be written here: not so for a memfd that was sealed against that.
    pub fn is_writable(&self) -> bool {
        self.0.mapping.view_mut().is_some()
    }

    pub(crate) fn number(&self) -> u32 {
        self.0.number
    }
}

/// The memories that one side has handed over in a connection.
#[derive(Debug, Default)]
pub(crate) struct Given(Vec<(u32, std::sync::Weak<Memory>)>);

impl Given {
    /// Hands the memory over unless that was done before. Memories that are gone are reclaimed
    /// first.
    pub(crate) fn give(&mut self, to: impl AsFd, buffer: &SharedBuffer) -> Result<(), rustix::io::Errno> {
        if self.0.iter().any(|(number, _)| *number == buffer.number()) {
            return Ok(());
        }
        self.0.retain(|(number, memory)| {
            memory.strong_count() > 0 || socket::send(&to, &Message::Forget { number: *number }, &[], false).is_err()
        });
        if self.0.len() >= MAX_MEMORIES {
            return Err(rustix::io::Errno::NOBUFS);
        }
        let message = Message::Share { number: buffer.number(), bytes: buffer.len() };
        socket::send(&to, &message, &[buffer.0.fd.as_fd()], false)?;
        self.0.push((buffer.number(), Arc::downgrade(&buffer.0)));
        Ok(())
    }

    /// The other side has not taken it. The next use hands it over again: there may be room for it
    /// then.
    pub(crate) fn refused(&mut self, buffer: &SharedBuffer) {
        self.0.retain(|(number, _)| *number != buffer.number());
    }
}

/// Memory that the other side has handed over, mapped for reading. Every reader holds it. Its share
/// of the bounds becomes free when the last reader is done, not when the other side forgets it.
#[derive(Debug)]
pub(crate) struct Lent {
    mapping: Mapping,
    _charges: [Charge; 2],
}

impl Lent {
    pub(crate) fn view(&self) -> Foreign<'_> {
        self.mapping.view()
    }
}

/// Memory that was not taken, since it goes beyond the connection's bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooLarge {
    /// Its size.
    pub(crate) bytes: u64,
    /// What was in use by then.
    pub(crate) in_use: u64,
}

/// The memories that the other side has handed over in a connection.
#[derive(Debug)]
pub(crate) struct Taken {
    memories: HashMap<u32, Arc<Lent>>,
    /// So that a caller that asks for one is told why it is not there; at most [`MAX_MEMORIES`].
    too_large: HashMap<u32, TooLarge>,
    bound: Quota,
    quota: Quota,
}

impl Taken {
    /// At most `max_bytes` of this connection, and what the quota has left.
    pub(crate) fn new(max_bytes: u64, quota: Quota) -> Taken {
        Taken { memories: HashMap::new(), too_large: HashMap::new(), bound: Quota::new(max_bytes), quota }
    }

    pub(crate) fn get(&self, number: u32) -> Option<Arc<Lent>> {
        self.memories.get(&number).cloned()
    }

    /// Whether and why [`Taken::get`] has none of that number.
    pub(crate) fn too_large(&self, number: u32) -> Option<TooLarge> {
        self.too_large.get(&number).copied()
    }

    /// Acts on a message; false where it is no message about memory. What is not sealed, too large
    /// or one too many is not taken, and closed at once: requests and replies that name it are
    /// refused.
    pub(crate) fn message(&mut self, message: &Message, fds: &[ForeignFd]) -> bool {
        match (message, fds) {
            (Message::Share { number, bytes }, [fd]) => {
                self.forget(*number);
                self.take(*number, *bytes, fd);
                true
            }
            (Message::Forget { number }, _) => {
                self.forget(*number);
                true
            }
            _ => false,
        }
    }

    fn forget(&mut self, number: u32) {
        self.memories.remove(&number);
        self.too_large.remove(&number);
    }

    fn take(&mut self, number: u32, bytes: u64, fd: &ForeignFd) {
        if self.memories.len() >= MAX_MEMORIES {
            return;
        }
        let Some(charges) = self.bound.take(bytes).and_then(|bound| Some([bound, self.quota.take(bytes)?])) else {
            if self.too_large.len() < MAX_MEMORIES {
                self.too_large.insert(number, TooLarge { bytes, in_use: self.bound.used() });
            }
            return;
        };
        if let Ok(mapping) = section::adopt(fd, bytes, false) {
            self.memories.insert(number, Arc::new(Lent { mapping, _charges: charges }));
        }
    }
}
