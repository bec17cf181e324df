//! Calls between machines: one exports services ([`Export`]), another imports them ([`Import`]).
//! There, a client connects to an imported service by its name, as to any other of its machine.
//!
//! Their bytes go by an [`Engine`]: TCP, or zenoh in `tombolo-span`.
//!
//! # The way of a call
//! client → imported service's queue → this module's connection → exporting machine's queue → the
//! service. Each queue serves the earliest deadline first. A deadline crosses as the time that is
//! left, less half of the shortest round trip seen ([`tombolo_calls::session`]). Clocks are never
//! compared.
//!
//! # Trust
//! Both machines prove who they are by certificates of one authority ([`keys`]), over TLS 1.3. An
//! export says which machines may use it. Without TLS, anyone who can reach the port can call the
//! exported services, and anyone on the way can read and change the calls.
//!
//! # Failure
//! A call ends once, with one named result. If a machine dies or its network does, that is noticed
//! [`DEAD_AFTER`] after it was last heard, or after the first thing that was sent since then; its
//! calls under way end with `ProviderGone`. A machine that is there and leaves a call without an
//! answer, or whose service has gone, is asked after the others for a while. No call is ever sent
//! twice: another machine is tried only if nothing was sent. An imported service's name is there
//! while at least one of its machines is. A service that is itself imported is not exported, so
//! calls cannot go round in circles.
//!
//! # Limits
//! An export has at most [`Export::connections`] connections; at most [`HANDSHAKES`] that have not
//! said yet who they are, [`HANDSHAKES_PER_ADDRESS`] of one address, each for at most
//! [`HANDSHAKE`].

pub mod engine;
mod export;
mod import;
pub mod keys;
mod told;
pub(crate) mod wire;

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, Connection, ServerConnection};
use tombolo_calls::hello::{self, HelloError, Verdict};

use crate::transport::RemoteError;
pub use engine::{Engine, Origin, Socket, Tcp};
pub use export::{Export, ExportEvent, ExportStats, Exporter, HANDSHAKES, HANDSHAKES_PER_ADDRESS, Offer};
pub use import::{Import, ImportEvent, Importer, Pick, Remote};
use keys::{Identity, KeyError};
pub use told::told;
pub use wire::DEAD_AFTER;
use wire::{StreamEnd, Timed};

/// How long a connection may take until calls can begin: TLS, hello and greeting together. Before,
/// the engine has as long for the connection itself.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Why two machines did not come together.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum MachineError {
    /// A name without an address.
    #[error("{address}: {source}; expected an address or name and a port, such as 192.0.2.7:7000")]
    Address { address: String, source: io::Error },
    /// Nothing listens, or no way there.
    #[error("connecting to {to}: {source}")]
    Connect { to: SocketAddr, source: io::Error },
    /// The engine has no way to the machine.
    #[error("connecting to {machine}: {why}")]
    Unreachable { machine: String, why: String },
    /// TLS: another authority, another machine, or something else than TLS.
    #[error("the TLS handshake: {0}; expected keys of the same authority at both ends, and the machine's own name")]
    Tls(io::Error),
    /// Keys.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The connection.
    #[error("{what}: {source}")]
    Stream { what: &'static str, source: io::Error },
    /// The other side speaks something else.
    #[error("the other side is no export of services: {0}")]
    Hello(#[from] HelloError),
    /// The other side declined.
    #[error("the service \"{service}\": {verdict}")]
    Declined { service: String, verdict: Verdict },
    /// The greeting of calls.
    #[error(transparent)]
    Remote(#[from] RemoteError),
}

fn stream(what: &'static str) -> impl Fn(io::Error) -> MachineError {
    move |source| MachineError::Stream { what, source }
}

/// Reads until `parse` has what it wants.
fn read_until<T>(
    timed: &mut Timed<'_>,
    most: usize,
    parse: impl Fn(&[u8]) -> Result<Option<T>, HelloError>,
) -> Result<T, MachineError> {
    let mut bytes = Vec::with_capacity(most);
    loop {
        // A byte at a time where a greeting may follow: it must stay in the connection.
        let mut next = [0; 1];
        match timed.read(&mut next).map_err(stream("the hello"))? {
            0 => return Err(stream("the hello")(io::ErrorKind::UnexpectedEof.into())),
            n => bytes.extend_from_slice(&next[..n]),
        }
        if let Some(found) = parse(&bytes)? {
            return Ok(found);
        }
        if bytes.len() >= most {
            return Err(HelloError::Name.into());
        }
    }
}

/// Asks a machine's export for a service. Returns the connection, and how long the answer took.
fn dial(
    socket: Socket,
    machine: Option<(&Identity, &str)>,
    service: &str,
    until: Instant,
) -> Result<(StreamEnd, Duration), MachineError> {
    let hello = hello::hello(service)?;
    socket.set_nodelay().map_err(stream("TCP_NODELAY"))?;
    let mut end = match machine {
        None => StreamEnd::plain(socket),
        Some((identity, name)) => {
            let tls = ClientConnection::new(identity.client.clone(), keys::server_name(name)?);
            StreamEnd::within(
                socket,
                Connection::Client(tls.map_err(|error| MachineError::Tls(io::Error::other(error)))?),
            )
        }
    };
    end.socket().watch().map_err(stream("watching the connection"))?;
    let mut timed = Timed { end: &mut end, until };
    timed.handshake().map_err(MachineError::Tls)?;
    let began = Instant::now();
    timed.write_all(&hello).map_err(stream("the hello"))?;
    let verdict = read_until(&mut timed, hello::VERDICT_BYTES, hello::parse_verdict);
    let verdict = verdict.map_err(|error| match error {
        // A listener that does not accept our certificate says so after our side of the handshake.
        MachineError::Stream { source, .. } if source.kind() == io::ErrorKind::InvalidData => MachineError::Tls(source),
        error => error,
    })?;
    match verdict {
        Verdict::Welcome => Ok((end, began.elapsed())),
        verdict => Err(MachineError::Declined { service: service.into(), verdict }),
    }
}

/// What a connection asks for: its machine's names (none without TLS), and the service.
fn answer(
    socket: Socket,
    identity: Option<&Identity>,
    until: Instant,
) -> Result<(StreamEnd, Option<Vec<String>>, String), MachineError> {
    socket.set_nodelay().map_err(stream("TCP_NODELAY"))?;
    let mut end = match identity {
        None => StreamEnd::plain(socket),
        Some(identity) => {
            let tls = ServerConnection::new(identity.server.clone());
            StreamEnd::within(
                socket,
                Connection::Server(tls.map_err(|error| MachineError::Tls(io::Error::other(error)))?),
            )
        }
    };
    end.socket().watch().map_err(stream("watching the connection"))?;
    let mut timed = Timed { end: &mut end, until };
    timed.handshake().map_err(MachineError::Tls)?;
    let machines = timed.machines();
    let service = read_until(&mut timed, hello::MAX_HELLO_BYTES, hello::parse_hello)?;
    Ok((end, machines, service))
}
