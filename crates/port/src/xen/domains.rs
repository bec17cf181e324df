//! What XenStore tells of domains: that some came or went, and where the console of one is.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;

use tombolo_ring::xen::store::Request;

use super::platform::{Linux, Machine};
use super::store::{AskError, Store};

/// The terminal at which xenconsoled takes what is typed at a domain's first console; `None` where
/// there is none. Asks XenStore, which may take seconds on a busy host.
pub fn console_of(domain: u32) -> Option<PathBuf> {
    DomainEvents::open(&[]).ok()?.console(domain)
}

/// What [`DomainEvents`] hears of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainEvent {
    /// A domain was created or restored, up to where XenStore serves it.
    Introduced,
    /// A domain has shut down, was suspended, or is gone.
    Released,
    /// The console of the domain of this number has got its terminal.
    Console(u32),
}

impl DomainEvent {
    fn path(self) -> String {
        match self {
            DomainEvent::Introduced => "@introduceDomain".into(),
            DomainEvent::Released => "@releaseDomain".into(),
            DomainEvent::Console(domain) => format!("/local/domain/{domain}/console/tty"),
        }
    }
}

/// A connection to XenStore that is readable once something has happened to a domain. The first
/// event comes at once, so a program that looks at each event misses nothing. An event says neither
/// which domain nor what.
pub struct DomainEvents {
    store: Store,
}

fn failed(error: AskError) -> io::Error {
    match error {
        AskError::Connection(errno) => errno.into(),
        other => io::Error::other(other.to_string()),
    }
}

impl DomainEvents {
    /// Connects, and asks for these events. It may take seconds on a busy host.
    ///
    /// # Errors
    /// XenStore does not answer; this is no dom0.
    pub fn open(events: &[DomainEvent]) -> io::Result<DomainEvents> {
        let mut store = Store::new(Linux.store()?);
        for event in events {
            let path = event.path();
            store.ask(&Request::Watch(&path, &path)).map_err(failed)?;
        }
        Ok(DomainEvents { store })
    }

    /// Takes the events that came, without waiting; whether there were any.
    ///
    /// # Errors
    /// The connection failed.
    pub fn take(&mut self) -> io::Result<bool> {
        self.store.poll_events().map_err(failed)
    }

    /// The terminal of a domain's first console; `None` where there is none, or XenStore does not
    /// tell.
    pub fn console(&mut self, domain: u32) -> Option<PathBuf> {
        let node = DomainEvent::Console(domain).path();
        terminal(&self.store.ask(&Request::Read(&node)).ok()?)
    }
}

impl AsFd for DomainEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}

impl AsRawFd for DomainEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A pseudoterminal by its path, and nothing else. The toolstack keeps the guest from writing this
/// node. A guest that could write it would choose a file that the daemon writes.
fn terminal(path: &[u8]) -> Option<PathBuf> {
    let path = std::str::from_utf8(path).ok()?;
    let number = path.strip_prefix("/dev/pts/")?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pseudoterminal_is_taken() {
        assert_eq!(terminal(b"/dev/pts/12"), Some("/dev/pts/12".into()));
        for other in [&b""[..], b"/dev/pts/", b"/dev/pts/../mem", b"/etc/passwd", b"/dev/pts/1\0", b"/dev/pts/\xff"] {
            assert_eq!(terminal(other), None, "{other:?}");
        }
    }
}
