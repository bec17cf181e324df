//! What the backend asks of the hypervisor, behind two small traits: Linux's device files, or a
//! stand-in in tests.

use crate::sys::{self, GrantCopy, GrantedPage};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tombolo_ring::mem::ForeignMut;

/// The machine: a dom0 or a driver domain.
pub(super) trait Machine: Send + Sync {
    /// A stream of XenStore messages, both ways.
    fn store(&self) -> Result<OwnedFd, Errno>;

    /// The way to one guest's event channels and grants. All of them end when it is dropped.
    fn guest(&self, domain: u16) -> Result<Box<dyn Guest>, Errno>;
}

pub(super) trait Guest: Send {
    /// Maps a granted page.
    fn map(&self, gref: u32) -> Result<Box<dyn Page>, Errno>;

    /// Binds to the guest's event channel port; returns ours.
    fn bind(&self, remote_port: u32) -> Result<u32, Errno>;

    /// Sends an event by our port.
    fn notify(&self, port: u32);

    /// Readable when an event came to any of our ports.
    fn events(&self) -> BorrowedFd<'_>;

    /// Lets further events through: each port is silent from its first event to this.
    fn unmask(&self);

    /// Copies between pages of the guest and local memory, all in one system call. Each copy says
    /// by itself whether it was made.
    fn copy(&self, copies: &mut [GrantCopy<'_>]) -> Result<(), Errno>;
}

/// A mapped page.
pub(super) trait Page: Send {
    /// Its bytes, the same ones at each call.
    fn bytes(&self) -> ForeignMut<'_>;
}

/// `/dev/xen`.
pub(super) struct Linux;

impl Machine for Linux {
    fn store(&self) -> Result<OwnedFd, Errno> {
        device("/dev/xen/xenbus")
    }

    fn guest(&self, domain: u16) -> Result<Box<dyn Guest>, Errno> {
        let (evtchn, gntdev) = (device("/dev/xen/evtchn")?, device("/dev/xen/gntdev")?);
        Ok(Box::new(LinuxGuest { domain, evtchn, gntdev }))
    }
}

fn device(path: &str) -> Result<OwnedFd, Errno> {
    open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
}

/// Event channels and grants by two descriptors of their own: closing them ends all that they hold.
struct LinuxGuest {
    domain: u16,
    evtchn: OwnedFd,
    gntdev: OwnedFd,
}

impl Guest for LinuxGuest {
    fn map(&self, gref: u32) -> Result<Box<dyn Page>, Errno> {
        Ok(Box::new(GrantedPage::map(&self.gntdev, self.domain, gref)?))
    }

    fn bind(&self, remote_port: u32) -> Result<u32, Errno> {
        sys::bind_interdomain(&self.evtchn, self.domain, remote_port)
    }

    fn notify(&self, port: u32) {
        // It fails for a port that is not bound, which the connection rules out.
        let _ = sys::notify_port(&self.evtchn, port);
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.evtchn.as_fd()
    }

    fn unmask(&self) {
        // A vif has two ports per queue and one for its control ring, so a few calls take all.
        let mut ports = [0; 4 * 64];
        while let Ok(bytes @ 4..) = rustix::io::read(&self.evtchn, &mut ports) {
            let _ = rustix::io::write(&self.evtchn, &ports[..bytes]);
            if bytes < ports.len() {
                break;
            }
        }
    }

    fn copy(&self, copies: &mut [GrantCopy<'_>]) -> Result<(), Errno> {
        sys::grant_copy(&self.gntdev, copies)
    }
}

impl Page for GrantedPage {
    fn bytes(&self) -> ForeignMut<'_> {
        GrantedPage::bytes(self)
    }
}
