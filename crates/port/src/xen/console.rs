//! Where a domain's console takes what is typed.

use std::path::PathBuf;

use tombolo_ring::xen::store::Request;

use super::platform::{Linux, Machine};
use super::store::Store;

/// The terminal at which xenconsoled takes what is typed at a domain's first console; `None` where there is none. Asks
/// XenStore, which may take seconds on a busy host.
pub fn console_of(domain: u32) -> Option<PathBuf> {
    let mut store = Store::new(Linux.store().ok()?);
    let node = format!("/local/domain/{domain}/console/tty");
    terminal(&store.ask(&Request::Read(&node)).ok()?)
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
