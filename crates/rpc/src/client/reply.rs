//! What a call brings back.

use std::sync::Arc;

use rustix::io::Errno;
use tombolo_calls::{self as calls, NoMemory};
use tombolo_ring::mem::Foreign;
use tombolo_ring::rpc::INLINE_BYTES;
use tombolo_ring::rpc::entry::Payload;

use super::CallError;
use super::connection::ClientConnection;
use crate::shared::Lent;

#[derive(Debug)]
pub(super) enum Bytes {
    Inline([u8; INLINE_BYTES]),
    Arena,
    Memory(Arc<Lent>),
}

/// The reply to a call. If it is in the provider's memory, it is given back when this is dropped.
#[derive(Debug)]
pub struct Reply {
    pub(super) connection: Arc<ClientConnection>,
    /// Where the bytes are, as the provider says.
    pub(super) payload: Payload,
    pub(super) bytes: Bytes,
    pub(super) head: calls::Reply<()>,
}

impl Reply {
    /// Length of the payload in bytes.
    pub fn len(&self) -> usize {
        self.payload.len() as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.payload.is_empty()
    }

    /// The application's code; 0 is success.
    pub fn code(&self) -> u32 {
        self.head.code
    }

    /// How long after the call's deadline this side took the reply, ns; 0 where that was in time,
    /// or the call had no deadline.
    pub fn late_by_ns(&self) -> u64 {
        self.head.late_by_ns
    }

    /// Whether it came after the call's deadline.
    pub fn is_late(&self) -> bool {
        self.head.is_late()
    }

    /// How long the request waited at the provider, ns.
    pub fn queued_ns(&self) -> u64 {
        self.head.queued_ns
    }

    /// How long it was served, ns.
    pub fn service_ns(&self) -> u64 {
        self.head.service_ns
    }

    /// The bytes, where they are. The provider can change those of a large reply while they are
    /// read, and takes them back when they are held for too long; [`Reply::is_current`] tells
    /// afterwards.
    pub fn view(&self) -> Foreign<'_> {
        let (view, offset, len) = match (&self.bytes, self.payload) {
            (Bytes::Inline(bytes), Payload::Inline { len }) => {
                return Foreign::from(&bytes[..(len as usize).min(bytes.len())]);
            }
            (Bytes::Arena, Payload::Arena { offset, len, .. }) => {
                return self.connection.reply_view(offset, len);
            }
            (Bytes::Memory(memory), Payload::Shared { offset, len, .. }) => (memory.view(), offset, len),
            _ => return Foreign::empty(),
        };
        // Checked when the reply was made.
        view.slice(offset as usize, len as usize).unwrap_or(Foreign::empty())
    }

    /// Whether what was read until now was this reply's: false once the provider has taken it back.
    pub fn is_current(&self) -> bool {
        self.connection.is_current(self.payload)
    }

    /// Copies the first bytes into `to`, as many as both have; returns how many.
    ///
    /// # Errors
    /// [`CallError::Reclaimed`], where it was held for too long.
    pub fn copy_to(&self, to: &mut [u8]) -> Result<usize, CallError> {
        let copied = self.view().read_into(to);
        if self.is_current() { Ok(copied) } else { Err(CallError::Reclaimed) }
    }

    /// A copy of the bytes.
    ///
    /// # Errors
    /// As for [`Reply::copy_to`]; and [`CallError::Memory`] where there is no memory for a copy:
    /// how long a reply in memory of its own is, the provider says.
    pub fn to_vec(&self) -> Result<Vec<u8>, CallError> {
        let len = self.view().len();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| {
            let source = calls::Errno(Errno::NOMEM.raw_os_error());
            CallError::Memory(NoMemory { what: "a copy of a reply", bytes: len as u64, source })
        })?;
        bytes.resize(len, 0);
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.connection.release(self.payload);
    }
}
