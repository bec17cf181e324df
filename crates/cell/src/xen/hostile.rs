//! What a cell needs to play a frontend that breaks every rule: for tests of backends, behind the
//! feature `hostile`.
//!
//! No image that is shipped has it. Nothing here checks anything; Xen and XenStore do, for
//! themselves.

use super::Domain;
use super::grants::Access;
use crate::machine::{dma, hypercall};
use crate::net::Net;
use alloc::rc::Rc;
use alloc::string::String;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::store::Request;

/// The domain, without any network device of its own (`net=none`).
#[derive(Clone)]
pub struct Hostile(Rc<Domain>);

impl Hostile {
    /// `None` where the cell is no domain of Xen.
    pub fn new(net: &Net) -> Option<Hostile> {
        net.shared().platform.xen.clone().map(Hostile)
    }

    /// A node of XenStore, by its path; `None` where there is none or it is no text.
    pub fn read(&self, path: &str) -> Option<String> {
        String::from_utf8(self.0.ask(&[Request::Read(path)]).pop()?.ok()?).ok()
    }

    /// Writes a node; whether XenStore took it.
    pub fn write(&self, path: &str, value: &str) -> bool {
        self.0.ask(&[Request::Write(path, value.as_bytes())]).pop().is_some_and(|reply| reply.is_ok())
    }

    /// Removes a node; whether XenStore did.
    pub fn remove(&self, path: &str) -> bool {
        self.0.ask(&[Request::Remove(path)]).pop().is_some_and(|reply| reply.is_ok())
    }

    /// A page of zeros, for ever.
    pub fn page(&self) -> ForeignMut<'static> {
        dma::alloc(super::PAGE)
    }

    /// Lets `domain` use a page, for reading only or for both; the grant reference.
    pub fn grant(&self, domain: u16, page: ForeignMut<'static>, is_read_only: bool) -> Option<u32> {
        self.0.grant(domain, page, if is_read_only { Access::Read } else { Access::ReadWrite })
    }

    /// Lets `domain` use any frame of this domain's, whether there is memory or not; the grant
    /// reference.
    pub fn grant_frame(&self, domain: u16, frame: u64) -> Option<u32> {
        self.0.grant_frame(domain, frame)
    }

    /// Takes a grant back; false while it is in use.
    pub fn revoke(&self, reference: u32) -> bool {
        self.0.end_grant(reference)
    }

    /// A new event channel that `domain` may bind to.
    pub fn channel(&self, domain: u16) -> Option<u32> {
        hypercall::alloc_unbound(domain).ok()
    }

    /// Sends an event.
    pub fn notify(&self, port: u32) {
        hypercall::send(port);
    }

    /// Closes an event channel.
    pub fn close(&self, port: u32) {
        hypercall::close(port);
    }
}
