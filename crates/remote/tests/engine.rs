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

suite::each! {
    OverTcp:
    bytes_of_any_length_arrive_as_they_were
    many_long_calls_at_a_time_to_a_slow_service_lose_nothing
    a_deadline_crosses_as_the_time_that_is_left
    the_provider_serves_the_earliest_deadline_first
    the_provider_refuses_by_name_what_it_cannot_meet
    a_call_that_is_cancelled_here_is_cancelled_there
    an_export_that_ends_ends_its_calls_at_once_and_is_found_again
    an_engine_that_is_killed_ends_its_calls_by_name_and_is_found_again
    only_machines_that_the_export_names_and_that_prove_it_are_served
    who_speaks_something_else_or_does_not_read_harms_no_one_else
}
