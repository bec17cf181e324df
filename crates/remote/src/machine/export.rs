//! The exporting side: connections of other machines, each of which gets one service of this
//! machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use tombolo_calls::hello::{self, Verdict};
use tombolo_calls::session::ServeOptions;
use tombolo_rpc::client::{self, ConnectError, ConnectOptions};

use super::engine::{Engine, Listening, Origin, Socket};
use super::keys::Identity;
use super::wire::Timed;
use super::{HANDSHAKE, MachineError, answer, stream};
use crate::bridge::Bridge;
use crate::calls::Calls;
use crate::transport::RemoteError;

/// Most connections at a time that have not said yet what they want.
pub const HANDSHAKES: usize = 64;
/// And most of these from one address or, where the engine has none, from one machine.
pub const HANDSHAKES_PER_ADDRESS: usize = 8;

/// A service, and to whom it is exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Name of a service of this machine. It need not run yet.
    pub service: String,
    /// Machines that may use it; empty: each with a certificate of the authority.
    pub allow: Vec<String>,
}

/// What is exported.
#[derive(Clone, Debug)]
pub struct Export {
    /// The services, each once.
    pub offers: Vec<Offer>,
    /// Requests of one connection that are served at a time.
    pub workers: u32,
    /// Most connections at a time.
    pub connections: usize,
    /// The folder of services; the user's own where there is none.
    pub folder: Option<PathBuf>,
}

impl Default for Export {
    fn default() -> Self {
        Export { offers: Vec::new(), workers: 8, connections: 64, folder: None }
    }
}

/// What a listener tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportEvent {
    /// A machine uses a service.
    Connected {
        /// Its name; its address without TLS.
        machine: String,
        /// The service.
        service: String,
    },
    /// It does not use it any more.
    Disconnected {
        /// As in [`ExportEvent::Connected`].
        machine: String,
        /// The service.
        service: String,
    },
    /// A connection was not accepted.
    Refused {
        /// From where.
        from: Origin,
        /// Why.
        why: String,
    },
}

/// Counters of a listener, all monotonic but `open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// Connections that got a service.
    pub accepted: u64,
    /// Connections that did not.
    pub refused: u64,
    /// Connections now, those that have said nothing yet among them.
    pub open: u64,
}

struct Open {
    from: Origin,
    socket: Socket,
    /// It has said what it wants, and got it.
    accepted: bool,
}

#[derive(Default)]
struct Connections {
    open: BTreeMap<u64, Open>,
    next: u64,
    stats: ExportStats,
}

impl Connections {
    fn handshakes(&self, of: Option<&Origin>) -> usize {
        let waits = |open: &&Open| !open.accepted && of.is_none_or(|from| open.from.is_same_host(from));
        self.open.values().filter(waits).count()
    }
}

struct ExporterInner {
    export: Export,
    identity: Option<Identity>,
    connections: Mutex<Connections>,
    ended: Condvar,
    tell: Box<dyn Fn(ExportEvent) + Send + Sync>,
}

/// Accepts connections until it is dropped, which ends them.
pub struct Exporter {
    shared: Arc<ExporterInner>,
    listening: Option<Box<dyn Listening>>,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").field("offers", &self.shared.export.offers).finish_non_exhaustive()
    }
}

impl Export {
    /// Accepts connections that come by the engine, within TLS where there is an identity. `tell`
    /// is called from several threads.
    ///
    /// # Errors
    /// [`RemoteError::System`].
    pub fn start(
        self,
        engine: &dyn Engine,
        identity: Option<Identity>,
        tell: impl Fn(ExportEvent) + Send + Sync + 'static,
    ) -> Result<Exporter, RemoteError> {
        let connections = Mutex::default();
        let shared = Arc::new(ExporterInner {
            export: self,
            identity,
            connections,
            ended: Condvar::new(),
            tell: Box::new(tell),
        });
        let own = shared.clone();
        let listening = engine.listen(Arc::new(move |socket, from| own.begin(socket, from)))?;
        Ok(Exporter { shared, listening: Some(listening) })
    }
}

impl Exporter {
    /// Counters.
    pub fn stats(&self) -> ExportStats {
        let connections = self.shared.lock();
        ExportStats { open: connections.open.len() as u64, ..connections.stats }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.listening = None;
        let mut connections = self.shared.lock();
        connections.open.values().for_each(|open| open.socket.end());
        while !connections.open.is_empty() {
            connections = self.shared.ended.wait(connections).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl ExporterInner {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        // Each change under the lock is whole.
        self.connections.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn refuse(&self, from: Origin, why: impl ToString) {
        self.lock().stats.refused += 1;
        (self.tell)(ExportEvent::Refused { from, why: why.to_string() });
    }

    fn begin(self: &Arc<Self>, socket: Socket, from: Origin) {
        let kept = match socket.try_clone() {
            Ok(kept) => kept,
            Err(error) => return self.refuse(from, error),
        };
        let id = {
            let mut connections = self.lock();
            let crowded = connections.handshakes(None) >= HANDSHAKES
                || connections.handshakes(Some(&from)) >= HANDSHAKES_PER_ADDRESS;
            if crowded {
                drop(connections);
                return self.refuse(from, "too many connections there have not said yet what they want");
            }
            connections.next += 1;
            let id = connections.next;
            connections.open.insert(id, Open { from: from.clone(), socket: kept, accepted: false });
            id
        };
        let (shared, of) = (self.clone(), from.clone());
        let spawned = std::thread::Builder::new().name("tombolo-machine".into()).spawn(move || {
            // Whatever happens to the connection, it leaves the list.
            let _entry = Entry { shared: &shared, id };
            if let Err(error) = shared.serve(socket, &of, id) {
                shared.refuse(of, error);
            }
        });
        if let Err(error) = spawned {
            self.end(id);
            self.refuse(from, error);
        }
    }

    fn end(&self, id: u64) {
        self.lock().open.remove(&id);
        self.ended.notify_all();
    }

    /// From a connection's first byte to its end.
    fn serve(&self, socket: Socket, from: &Origin, id: u64) -> Result<(), MachineError> {
        let until = Instant::now() + HANDSHAKE;
        let (mut end, machines, service) = answer(socket, self.identity.as_ref(), until)?;
        // A way that is another machine's, such as a router's, proves nothing of who speaks: the
        // certificate does.
        let verdict = match from.is_proven_by(machines.as_deref()) {
            true => self.judge(machines.as_deref(), &service, id),
            false => Verdict::Denied,
        };
        let mut timed = Timed { end: &mut end, until };
        timed.write_all(&hello::verdict(verdict)).map_err(stream("the verdict"))?;
        if verdict != Verdict::Welcome {
            return Err(MachineError::Declined { service, verdict });
        }
        let machine = machines.and_then(|names| names.into_iter().next()).unwrap_or_else(|| from.to_string());
        let options = ServeOptions { workers: self.export.workers, ..ServeOptions::default() };
        let calls = Calls::on(end, until, &options)?;
        self.lock().stats.accepted += 1;
        (self.tell)(ExportEvent::Connected { machine: machine.clone(), service: service.clone() });
        let bridge = Bridge {
            target: Some(service.clone()),
            workers: self.export.workers,
            folder: self.export.folder.clone(),
            is_export: true,
            ..Bridge::default()
        };
        let _over = bridge.run(&calls, |_| ());
        (self.tell)(ExportEvent::Disconnected { machine, service });
        Ok(())
    }

    /// Whether this connection gets the service; from then on it counts as accepted.
    fn judge(&self, machines: Option<&[String]>, service: &str, id: u64) -> Verdict {
        let offer = self.export.offers.iter().find(|offer| offer.service == service);
        let is_allowed = offer.is_some_and(|Offer { allow, .. }| {
            allow.is_empty() || machines.is_some_and(|names| names.iter().any(|n| allow.contains(n)))
        });
        // Which services there are beside the exported ones is not for others to know.
        if !is_allowed {
            return Verdict::Denied;
        }
        // Well within the time of a handshake.
        let timeout = HANDSHAKE / 4;
        let options = ConnectOptions { folder: self.export.folder.clone(), timeout, ..ConnectOptions::default() };
        match client::report(service, &options) {
            Ok(report) if report.is_imported() => return Verdict::Elsewhere,
            Err(ConnectError::NoService { .. }) => return Verdict::Absent,
            // A service that is too busy to report is there; whether it is served here is asked
            // again with the first request.
            Ok(_) | Err(_) => {}
        }
        let mut connections = self.lock();
        if connections.open.values().filter(|open| open.accepted).count() >= self.export.connections {
            return Verdict::Full;
        }
        if let Some(open) = connections.open.get_mut(&id) {
            open.accepted = true;
        }
        Verdict::Welcome
    }
}

/// A connection's place in the list.
struct Entry<'a> {
    shared: &'a ExporterInner,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.shared.end(self.id);
    }
}
