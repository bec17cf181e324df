//! For tests: a port that moves nothing and shows a bug, or a fault, as soon as it is served.

use tombolo_switch::Nanos;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::Batch;
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Sent};

pub(super) enum Injected {
    /// A bug in our code, with these words.
    Bug(&'static str),
    /// Of a peer that breaks the rules, with these words.
    Fault(&'static str),
}

/// The port: what it says of itself, and what is held as long as it is there.
pub(super) struct InjectedPort {
    pub(super) kind: &'static str,
    pub(super) link: Carrier,
    pub(super) shows: Injected,
    pub(super) _holds: Option<Box<dyn Port>>,
}

impl Port for InjectedPort {
    fn kind(&self) -> &'static str {
        self.kind
    }
    fn link(&self) -> Carrier {
        self.link
    }
    fn caps(&self) -> Caps {
        Caps::plain(1500)
    }
    fn service(&mut self, _: Nanos) -> Result<Option<Nanos>, Fault> {
        match self.shows {
            Injected::Bug(words) => panic!("{words}"),
            Injected::Fault(words) => Err(Fault { kind: FaultKind::Protocol, detail: words.into() }),
        }
    }
    fn receive<'m>(&'m mut self, _: usize, _: &mut Batch<'m>, _: &mut Drops) -> Result<usize, Fault> {
        Ok(0)
    }
    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn transmit(&mut self, _: &Batch<'_>, _: &[u16], _: &mut Drops) -> Result<Sent, Fault> {
        Ok(Sent::default())
    }
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }
    fn disarm(&mut self) {}
    fn reset(&mut self, _: &Fault) {}
}
