//! The suite of engines, for TCP.

#[path = "engine/suite.rs"]
mod suite;

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use suite::{Passing, Relay, World};
use tombolo_remote::machine::{Engine, Remote, Tcp};

/// `b` listens; a relay is on the way to it.
struct OverTcp {
    listener: TcpListener,
    relay: Relay,
}

impl World for OverTcp {
    fn new(_: &Path) -> OverTcp {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::new(listener.local_addr().unwrap());
        OverTcp { listener, relay }
    }

    fn engine(&self, machine: &str) -> Arc<dyn Engine> {
        match machine {
            "b" => Arc::new(Tcp::at(self.listener.try_clone().unwrap())),
            _ => Arc::new(Tcp::default()),
        }
    }

    fn remote(&self, machine: &str) -> Remote {
        Remote { machine: machine.into(), address: self.relay.address.to_string() }
    }

    fn relay(&self) -> &Relay {
        &self.relay
    }

    /// The engine is the connections.
    fn kill(&self, _: &str) {
        self.relay.pass(Passing::Closed);
    }

    fn start(&self, _: &str) {
        self.relay.pass(Passing::All);
    }
}

suite::each!(OverTcp);
