//! `tombolo service bridge`: a service of a cell's or guest's becomes one of this machine, and the
//! reverse.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tombolo_host::api::client::ClientError;
use tombolo_host::rundir;
use tombolo_remote::bridge::{self, BridgeError};
use tombolo_remote::{Calls, RemoteError, ServeOptions};

use crate::exit::{Exit, Failure};
use crate::select::Select;

/// How long a link's server, or the other side of a connection, may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("peer").args(["link", "tcp"]).required(true))]
pub(crate) struct Bridge {
    /// Direct link of the fabric with a free peer ID: its name, or the path of its socket
    #[arg(conflicts_with = "tcp")]
    link: Option<String>,
    /// Use TCP instead of a link: connect to a peer that listens for calls, such as a forwarded
    /// port of a cell
    #[arg(long, value_name = "ADDRESS:PORT")]
    tcp: Option<String>,
    /// Name under which the peer's service is registered here [default: the link's]
    #[arg(long = "as", value_name = "NAME", conflicts_with = "no_service")]
    service: Option<String>,
    /// Register no service; only serve the peer
    #[arg(long, requires = "to")]
    no_service: bool,
    /// Service of this machine that answers the peer's calls [default: none, so they fail]
    #[arg(long, value_name = "NAME")]
    to: Option<String>,
    /// Most requests passed on at a time, each way
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Let anyone who can reach the folder of services call, not only the owner
    #[arg(long)]
    everybody: bool,
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    let mut found = text.to_socket_addrs().map_err(|e| {
        Failure::misused(format!("--tcp {text}: {e}; expected an address or name and a port, such as 127.0.0.1:7000"))
    })?;
    found.next().ok_or_else(|| Failure::misused(format!("--tcp {text}: this name has no address")))
}

impl From<RemoteError> for Failure {
    fn from(error: RemoteError) -> Self {
        Failure::failed(error.to_string())
    }
}

impl Bridge {
    /// The socket of the link, and the name that the service has if none is given.
    fn link(&self, select: &Select) -> Result<Option<(PathBuf, String)>, Failure> {
        let Some(link) = &self.link else { return Ok(None) };
        if link.contains('/') {
            let path = PathBuf::from(link);
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let name = name.split('.').next().unwrap_or_default().to_string();
            return Ok(Some((path, name)));
        }
        let root = rundir::runtime_root()?;
        let fabric = select.name(&root)?;
        if !rundir::running(&root).contains(&fabric) {
            let socket = rundir::api_socket(&root, &fabric);
            let was_killed = socket.exists();
            let absent = if was_killed {
                ClientError::Stale { fabric, socket }
            } else {
                ClientError::not_running(fabric, socket)
            };
            return Err(absent.into());
        }
        let socket = rundir::link_socket(&root.join(&fabric), link);
        if !Path::new(&socket).exists() {
            return Err(Failure::failed(format!(
                "fabric {fabric} has no direct link \"{link}\" with room for processes (looked for {}); expected a \
                 section [link.{link}] with seats = 1",
                socket.display()
            )));
        }
        Ok(Some((socket, link.clone())))
    }

    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let options = ServeOptions { workers: self.workers, ..ServeOptions::default() };
        let (calls, default) = match (self.link(select)?, &self.tcp) {
            (Some((socket, name)), _) => (Calls::join(socket, TIMEOUT, &options)?, Some(name)),
            (None, tcp) => (Calls::connect(address(tcp.as_deref().unwrap_or_default())?, TIMEOUT, &options)?, None),
        };
        let service = if self.no_service { None } else { self.service.clone().or(default) };
        if service.is_none() && self.to.is_none() {
            return Err(Failure::misused("nothing to pass on: expected --as NAME, --to NAME, or both"));
        }
        let mut bridge =
            bridge::Bridge { service, target: self.to.clone(), workers: self.workers, ..Default::default() };
        bridge.access.everybody = self.everybody;
        let error = bridge.run(&calls, |there| {
            // A line for a user who watches; it is no failure if there is none.
            match (there, &bridge.service) {
                (true, Some(name)) => crate::out::tell!("tombolo: the peer is there: service {name} is registered"),
                (true, None) => crate::out::tell!("tombolo: the peer is there"),
                (false, _) => crate::out::tell!("tombolo: the peer has disconnected"),
            }
        });
        match error {
            BridgeError::Over if self.tcp.is_some() => {
                crate::out::tell!("tombolo: {error}");
                Ok(Exit::Done)
            }
            error => Err(Failure::failed(error.to_string())),
        }
    }
}
