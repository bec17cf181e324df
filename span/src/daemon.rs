//! The fabric's daemon of this machine, over the HTTP API on its Unix socket (docs/api.md of the
//! project has all of it; `GET /v1/openapi.json` gives the schema).

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

/// How long an answer is waited for.
const LIMIT: Duration = Duration::from_secs(10);
/// Bytes of the longest answer.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Why the daemon did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// It does not run, or is being replaced.
    #[error("the fabric does not answer at {}: {why}", socket.display())]
    Absent {
        /// Its socket.
        socket: PathBuf,
        /// What happened.
        why: String,
    },
    /// This program lacks descriptors or memory to ask it.
    #[error("the fabric cannot be asked: {0}; other machines hear what was known before")]
    Shortage(io::Error),
    /// It refused.
    #[error("the fabric refused {what}: {error}")]
    Refused {
        /// What it was asked.
        what: String,
        /// The HTTP status.
        status: StatusCode,
        /// Its words.
        error: String,
    },
    /// It answered something else.
    #[error("the fabric's answer to {what}: {why}")]
    Strange {
        /// What it was asked.
        what: String,
        /// What is wrong.
        why: String,
    },
}

/// `GET /v1/tables`, what is used of it.
#[derive(Debug, Default, Deserialize)]
pub struct Tables {
    /// Forwarding tables.
    pub macs: Vec<MacEntry>,
    /// Known IP addresses.
    pub neighbours: Vec<Neighbour>,
    /// What a file for several machines gives to which of them.
    #[serde(skip)]
    pub homes: Arc<Vec<HomeEntry>>,
    /// The same, where it has changed.
    #[serde(default, rename = "homes")]
    changed: Option<Vec<HomeEntry>>,
    #[serde(default)]
    homes_revision: String,
}

/// The homes that the daemon sent last: many machines have many, and they rarely change.
#[derive(Debug, Default)]
pub struct KnownHomes {
    revision: String,
    homes: Arc<Vec<HomeEntry>>,
}

impl KnownHomes {
    /// Takes what has changed out of the tables, and puts in what did not.
    pub fn settle(&mut self, tables: &mut Tables) {
        if let Some(homes) = tables.changed.take() {
            *self = KnownHomes { revision: std::mem::take(&mut tables.homes_revision), homes: Arc::new(homes) };
        }
        tables.homes = self.homes.clone();
    }
}

/// What belongs to one machine.
#[derive(Clone, Debug, Deserialize)]
pub struct HomeEntry {
    /// The network.
    pub network: String,
    /// The machine.
    pub machine: String,
    /// A member's name.
    pub name: Option<String>,
    /// The first address.
    pub from: Option<IpAddr>,
    /// The last address.
    pub to: Option<IpAddr>,
    /// A member's MAC address.
    #[serde(default)]
    pub mac: Option<String>,
}

/// Where a MAC address is.
#[derive(Clone, Debug, Deserialize)]
pub struct MacEntry {
    /// The network.
    pub network: String,
    /// Such as "52:54:00:12:34:56".
    pub mac: String,
    /// The port that it is behind.
    pub port: String,
    /// Since its last frame; `None` if it is pinned to the port.
    pub age_ms: Option<u64>,
    /// The VLAN, where the network has them.
    pub vlan: Option<u16>,
}

/// Whose an IP address is.
#[derive(Clone, Debug, Deserialize)]
pub struct Neighbour {
    /// The network.
    pub network: String,
    /// The address.
    pub ip: IpAddr,
    /// The member's MAC address.
    pub mac: Option<String>,
    /// The member's name.
    pub name: Option<String>,
    /// "lease", "file", "learned", "gateway" or "router".
    pub source: String,
    /// Whether the file gives it to the member, which may have it as a lease too.
    #[serde(default)]
    pub fixed: bool,
}

/// `GET /v1/ports`.
#[derive(Debug, Default, Deserialize)]
pub struct Ports {
    /// All ports.
    pub ports: Vec<Port>,
}

/// A port of the switch.
#[derive(Clone, Debug, Deserialize)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Its network.
    pub network: String,
    /// "vxlan", "tap", "gateway", …
    pub kind: String,
    /// Whether frames flow.
    pub up: bool,
    /// Facts of its kind.
    #[serde(default)]
    pub details: std::collections::BTreeMap<String, serde_json::Value>,
}

/// Body of `PUT /v1/networks/{network}/remotes/{machine}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remote {
    /// Where the machine receives the network's tunnel.
    pub address: IpAddr,
    /// Its members.
    pub members: Vec<RemoteMember>,
}

/// A member of another machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteMember {
    /// Its name.
    pub name: Option<String>,
    /// Its MAC address.
    pub mac: String,
    /// Its IP addresses.
    pub ips: Vec<IpAddr>,
}

#[derive(Deserialize)]
struct Remotes {
    machines: Vec<RemoteName>,
}

#[derive(Deserialize)]
struct RemoteName {
    machine: String,
}

impl DaemonError {
    /// Whether it does not run, or does not answer now.
    pub fn is_absent(&self) -> bool {
        matches!(self, DaemonError::Absent { .. })
    }

    /// Whether it was not asked, for want of something here. That says nothing of the daemon.
    pub fn is_shortage(&self) -> bool {
        matches!(self, DaemonError::Shortage(_))
    }

    fn connecting(socket: &Path, error: io::Error) -> DaemonError {
        match Errno::from_io_error(&error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => DaemonError::Shortage(error),
            _ => DaemonError::Absent { socket: socket.into(), why: error.to_string() },
        }
    }
}

#[derive(Deserialize)]
struct Fault {
    error: String,
}

/// The daemon. Each request has a connection of its own, so that a replaced daemon is no special
/// case.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// Its socket.
    pub socket: PathBuf,
}

impl Daemon {
    fn absent(&self, why: impl ToString) -> DaemonError {
        DaemonError::Absent { socket: self.socket.clone(), why: why.to_string() }
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Incoming>, DaemonError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| DaemonError::connecting(&self.socket, e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.absent(e))?;
        tokio::task::spawn_local(async move { drop(connection.await) });
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| self.absent(e))?;
        sender.send_request(request).await.map_err(|e| self.absent(e))
    }

    async fn ask(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, DaemonError> {
        let what = format!("{method} {path}");
        let whole = async {
            let response = self.send(method, path, body).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| self.absent(error))?.to_bytes();
            if status.is_success() {
                return Ok(body);
            }
            let fault: Result<Fault, _> = serde_json::from_slice(&body);
            let error = fault.map_or_else(|_| status.to_string(), |fault| fault.error);
            Err(DaemonError::Refused { what: what.clone(), status, error })
        };
        tokio::time::timeout(LIMIT, whole).await.unwrap_or_else(|_| Err(self.absent("no answer within 10 s")))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, DaemonError> {
        let body = self.ask(Method::GET, path, Vec::new()).await?;
        serde_json::from_slice(&body)
            .map_err(|error| DaemonError::Strange { what: format!("GET {path}"), why: error.to_string() })
    }

    async fn put(&self, path: &str, body: &impl Serialize) -> Result<(), DaemonError> {
        let strange = |error: serde_json::Error| DaemonError::Strange { what: path.into(), why: error.to_string() };
        self.ask(Method::PUT, path, serde_json::to_vec(body).map_err(strange)?).await.map(drop)
    }

    /// The tables of all networks.
    pub async fn tables(&self, known: &mut KnownHomes) -> Result<Tables, DaemonError> {
        // An older daemon gives no revision, and takes none.
        let path = match known.revision.as_str() {
            "" => "/v1/tables".to_string(),
            revision => format!("/v1/tables?homes={revision}"),
        };
        // It may be another daemon that answers next.
        let mut tables: Tables = self.get(&path).await.inspect_err(|_| known.revision.clear())?;
        known.settle(&mut tables);
        Ok(tables)
    }

    /// All ports.
    pub async fn ports(&self) -> Result<Vec<Port>, DaemonError> {
        self.get("/v1/ports").await.map(|ports: Ports| ports.ports)
    }

    /// Sets what a machine has in a network.
    pub async fn set_remote(&self, network: &str, machine: &str, remote: &Remote) -> Result<(), DaemonError> {
        self.put(&format!("/v1/networks/{network}/remotes/{machine}"), remote).await
    }

    /// The machines of which it has members of a network.
    pub async fn remotes(&self, network: &str) -> Result<Vec<String>, DaemonError> {
        let remotes: Remotes = self.get(&format!("/v1/networks/{network}/remotes")).await?;
        Ok(remotes.machines.into_iter().map(|remote| remote.machine).collect())
    }

    /// A machine has left a network.
    pub async fn forget_remote(&self, network: &str, machine: &str) -> Result<(), DaemonError> {
        self.ask(Method::DELETE, &format!("/v1/networks/{network}/remotes/{machine}"), Vec::new()).await.map(drop)
    }

    /// Sets the addresses that this machine has lost to others.
    pub async fn set_lost(&self, network: &str, addresses: &[IpAddr]) -> Result<(), DaemonError> {
        self.put(&format!("/v1/networks/{network}/lost"), &serde_json::json!({ "ips": addresses })).await
    }

    /// Gives the daemon the report that `tombolo span status` shows.
    pub async fn report(&self, report: &serde_json::Value) -> Result<(), DaemonError> {
        self.put("/v1/span", report).await
    }

    /// Whether the daemon has a report. One that has none has started since the last one.
    pub async fn has_report(&self) -> Result<bool, DaemonError> {
        match self.ask(Method::GET, "/v1/span", Vec::new()).await {
            Ok(_) => Ok(true),
            Err(DaemonError::Refused { status: StatusCode::NOT_FOUND, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the daemon says that something happened, or its stream of events ends.
    pub async fn next_event(&self, events: &mut Option<Response<Incoming>>) -> Result<(), DaemonError> {
        if events.is_none() {
            *events = Some(self.send(Method::GET, "/v1/events?follow=1", Vec::new()).await?);
        }
        let frame = match events {
            Some(response) => response.body_mut().frame().await,
            None => None,
        };
        match frame {
            Some(Ok(_)) => Ok(()),
            _ => {
                *events = None;
                Err(self.absent("its stream of events has ended"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_that_did_not_change_are_those_of_the_last_answer() {
        let answer = |homes: serde_json::Value, revision: &str| -> Tables {
            let text = serde_json::json!({ "macs": [], "neighbours": [], "homes": homes, "homes_revision": revision });
            serde_json::from_value(text).unwrap()
        };
        let one = serde_json::json!([{ "network": "lan", "machine": "a", "name": null, "from": null, "to": null }]);
        let mut known = KnownHomes::default();
        let mut count = |mut tables: Tables| {
            known.settle(&mut tables);
            (tables.homes.len(), known.revision.clone())
        };
        assert_eq!(count(answer(one, "x")), (1, "x".into()));
        assert_eq!(count(answer(serde_json::Value::Null, "x")), (1, "x".into()));
        assert_eq!(count(answer(serde_json::json!([]), "y")), (0, "y".into()));
        // Of an older daemon.
        let old = serde_json::json!({ "macs": [], "neighbours": [], "homes": [] });
        assert_eq!(count(serde_json::from_value(old).unwrap()), (0, String::new()));
    }

    #[test]
    fn a_program_without_descriptors_does_not_take_the_daemon_for_absent() {
        let of = |errno: Errno| DaemonError::connecting(Path::new("/run/x/api.sock"), errno.into());
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS] {
            assert!(of(errno).is_shortage() && !of(errno).is_absent(), "{errno}");
        }
        for errno in [Errno::NOENT, Errno::CONNREFUSED, Errno::AGAIN] {
            assert!(of(errno).is_absent() && !of(errno).is_shortage(), "{errno}");
        }
    }
}
