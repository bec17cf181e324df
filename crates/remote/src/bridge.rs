//! The bridge between calls with a peer and the services of this machine. It offers the peer's
//! service on this machine, and one of this machine's services to the peer.
//!
//! The peer's service is in the folder of services only while the peer is there. So each name in
//! the folder can be served. Its requests are ordered by their deadlines here, then by the peer. A
//! deadline crosses as the time that is left when a request is passed on. A call ends here with the
//! same result as at the peer: `late`, `refused`, and so on. When the peer goes, the bridge closes
//! the connections of the clients whose requests it had. They see that as "provider gone".
//!
//! The peer's requests are passed on to one service of this machine, with their deadlines. While
//! that service is not running the peer's requests are answered as failed.
//!
//! If a caller cancels its request (or dies), the request is cancelled at the other side too. It
//! ends as cancelled if its service had not begun. What is left of its time to live is passed on
//! with it. Memory that is handed over is not passed on: payloads are copied, up to what the link
//! carries.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use tombolo_calls::{CallError, CallOptions, Deadline, Request, Response};
use tombolo_ring::rpc::entry::{Refusal, Status};
use tombolo_rpc::client::{self, Client, ConnectOptions};
use tombolo_rpc::clock::now_ns;
use tombolo_rpc::provider::{self, Access, Options, RegisterError, Service};

use crate::calls::Calls;
use crate::transport::RemoteError;

/// How long a request without a deadline is waited for that is passed on: as long as requests live
/// by default.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long the answer to a call is waited for that its caller has cancelled.
pub(crate) const GRACE: Duration = Duration::from_secs(4);
/// A look at whether all still is as it was.
const LOOK: Duration = Duration::from_secs(3600);

/// What a bridge passes on.
#[derive(Clone, Debug, Default)]
pub struct Bridge {
    /// The name under which the peer's service is registered here; none: it is not.
    pub service: Option<String>,
    /// Who may call it.
    pub access: Access,
    /// The service of this machine that serves the peer; none: the peer's requests are answered as
    /// failed.
    pub target: Option<String>,
    /// The peer is another machine: `target` must be served by this one, and not be passed on
    /// again.
    pub is_export: bool,
    /// Requests that are passed on at a time, each way.
    pub workers: u32,
    /// The folder of services; the user's own where there is none.
    pub folder: Option<PathBuf>,
}

/// Why a bridge ended.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The peer's service could not be registered here.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// Threads.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The link's server has ended: the fabric is down, and its machines with it.
    #[error("the link's server has ended; start the bridge again when the fabric is up again")]
    ServerGone,
    /// The connection to the peer has ended.
    #[error("the connection to the peer has ended")]
    Over,
}

impl Bridge {
    /// Passes calls on until the connection, or the link's server, ends. `tell` hears when the peer
    /// comes (true) and goes.
    ///
    /// # Errors
    /// [`BridgeError`]: always one, since it has no other end.
    pub fn run(&self, calls: &Calls, mut tell: impl FnMut(bool)) -> BridgeError {
        match self.pass_on(calls, &mut tell) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    fn pass_on(&self, calls: &Calls, tell: &mut dyn FnMut(bool)) -> Result<std::convert::Infallible, BridgeError> {
        let _server = match &self.target {
            Some(name) => {
                let (target, peer) = (Target::new(name, self), calls.clone());
                Some(calls.serve(move |request| target.serve(&peer, request))?)
            }
            None => None,
        };
        loop {
            if calls.is_over() {
                return Err(BridgeError::Over);
            }
            if calls.server_is_gone() {
                return Err(BridgeError::ServerGone);
            }
            if !calls.wait_up(LOOK) {
                continue;
            }
            let service = self.service.as_ref().map(|name| self.register(name, calls)).transpose()?;
            tell(true);
            // What arrives wakes a thread that serves, where there is one.
            while !(if self.target.is_some() { calls.wait_end(LOOK) } else { calls.wait_down(LOOK) }) {}
            // Those whose requests are under way have been hung up on by now; the name goes.
            drop(service);
            tell(false);
        }
    }

    fn register(&self, name: &str, calls: &Calls) -> Result<Service, RegisterError> {
        let options = Options {
            workers: self.workers,
            access: self.access.clone(),
            folder: self.folder.clone(),
            ..Options::default()
        };
        let calls = calls.clone();
        Service::register(name, options, move |request: &provider::Request<'_>, reply: &mut provider::Reply<'_>| {
            let options = passed_on(request);
            let begun = |token| {
                let calls = calls.clone();
                request.on_cancelled(move || calls.cancel_within(token, GRACE));
            };
            give(calls.call_in_turn(&request.to_vec(), &options, begun), reply);
        })
    }
}

/// How long a request is waited for that has so much left: until its deadline, and then as long as
/// a late reply may take.
fn patience(left_ns: Option<u64>) -> Duration {
    left_ns.map_or(TIMEOUT, |left| Duration::from_nanos(left).saturating_add(TIMEOUT))
}

/// How a request is passed on.
pub(crate) fn passed_on(request: &provider::Request<'_>) -> CallOptions {
    let left_ns = request.left_ns();
    CallOptions {
        deadline: left_ns.map(Duration::from_nanos).into(),
        // Whether a late reply is of use is its caller's choice, who takes the call back if not.
        wait_late: TIMEOUT,
        timeout: patience(left_ns),
        trace: request.trace(),
        ttl: request.ttl_left(),
    }
}

/// Answers a request by what it ended with at the peer.
pub(crate) fn give(end: Result<tombolo_calls::Reply, CallError>, reply: &mut provider::Reply<'_>) {
    match end {
        Ok(answer) => {
            reply.set_code(answer.code);
            // No room for the reply is answered as such.
            let _ = reply.write(&answer.bytes);
        }
        Err(CallError::ProviderGone | CallError::Broken(_)) => reply.hang_up(),
        Err(error) => reply.end(status(error)),
    }
}

/// How a request ends at one side that ended so at the other.
fn status(error: CallError) -> Status {
    match error {
        CallError::Late | CallError::DeadlineExceeded => Status::Late,
        CallError::Refused(why) => Status::Refused(why),
        CallError::Cancelled => Status::Cancelled,
        CallError::Expired | CallError::Timeout => Status::Expired,
        CallError::Busy(_) => Status::Refused(Refusal::QueueFull),
        CallError::TooLong { .. } => Status::Refused(Refusal::Memory),
        CallError::ReplyTooLarge { .. } => Status::Refused(Refusal::ReplyMemory),
        CallError::Failed
        | CallError::ProviderGone
        | CallError::Broken(_)
        | CallError::Memory(_)
        | CallError::Share { .. }
        | CallError::Range { .. }
        | CallError::Reclaimed
        | CallError::ReplyMemory
        | CallError::Unknown => Status::Failed,
    }
}

/// The service of this machine that serves the peer. It is connected to when it is needed, and
/// again after it went.
struct Target {
    name: String,
    /// It must not be passed on to another machine.
    is_export: bool,
    options: ConnectOptions,
    client: Mutex<Option<Client>>,
}

impl Target {
    fn new(name: &str, bridge: &Bridge) -> Target {
        let options = ConnectOptions { folder: bridge.folder.clone(), ..ConnectOptions::default() };
        Target { name: name.into(), is_export: bridge.is_export, options, client: Mutex::default() }
    }

    fn client(&self) -> Option<Client> {
        let mut client = self.client.lock().unwrap_or_else(|e| e.into_inner());
        if client.is_none() {
            *client = Client::connect_with(&self.name, &self.options).ok();
            // Asked after that: a service that has taken the name since belongs to another
            // connection. Who does not say that may pass calls on: the next request asks again.
            let is_here = || client::report(&self.name, &self.options).is_ok_and(|report| !report.is_imported());
            if client.is_some() && self.is_export && !is_here() {
                *client = None;
            }
        }
        client.clone()
    }

    fn serve(&self, peer: &Calls, request: &Request) -> Response {
        let Some(client) = self.client() else { return Response::end(Status::Failed) };
        let patience = patience(request.left_ns(now_ns()));
        let options = CallOptions {
            // Best effort is an instant too, the last one.
            deadline: Deadline::At(request.deadline_ns),
            wait_late: TIMEOUT,
            timeout: patience,
            trace: request.trace,
            ttl: request.ttl_left(),
        };
        let called = client.submit(&request.bytes, &options).and_then(|token| {
            let canceller = client.clone();
            peer.on_cancelled(request, move || _ = canceller.cancel(token));
            client.wait(token, patience)
        });
        let end = called.and_then(|reply| {
            let code = reply.code();
            reply.to_vec().map(|bytes| Response::new(bytes).with_code(code))
        });
        end.unwrap_or_else(|error| {
            if matches!(error, CallError::ProviderGone | CallError::Broken(_)) {
                // The next request looks for the next service of that name.
                *self.client.lock().unwrap_or_else(|e| e.into_inner()) = None;
            }
            Response::end(status(error))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_waited_for_until_its_deadline_and_for_a_late_reply() {
        assert_eq!(patience(None), TIMEOUT);
        assert_eq!(patience(Some(0)), TIMEOUT);
        assert_eq!(patience(Some(90_000_000_000)), Duration::from_secs(150));
        assert!(patience(Some(u64::MAX)) > TIMEOUT);
    }
}
