//! Services of cells and VMs by name: what `service` and `to` of a `[link.NAME]` ask for.
//!
//! For each such link a thread takes the link's one seat for processes and runs a bridge there ([`tombolo_remote::bridge`]): while the machine
//! is there, what it serves is a service of this machine, and what it asks goes to one. The thread sleeps where nobody calls.
//!
//! # Failure
//! A name that is taken, or a seat that is, is said once and tried again every [`AGAIN`], until it works or the fabric ends. The machine
//! and whoever calls it never hold up the fabric: threads that do not end in [`PATIENCE`] are left behind.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tombolo_remote::bridge::{Bridge, BridgeError};
use tombolo_remote::{Calls, ServeOptions};

use super::{FabricError, Running, Say};
use crate::rundir;

/// How long the link's server, which is a thread of ours, may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two attempts.
const AGAIN: Duration = Duration::from_secs(1);
/// How long the threads may take to end.
const PATIENCE: Duration = Duration::from_secs(1);
/// Requests that are passed on at a time, each way.
const WORKERS: u32 = 16;

/// The bridges of a running fabric.
#[derive(Default)]
pub(crate) struct Bridges {
    /// Dropped when the fabric ends.
    stops: Vec<Sender<()>>,
    /// Each ends with its thread.
    ends: Vec<Receiver<()>>,
}

impl Running {
    /// Starts the bridges that the file asks for. Their links are served by now.
    pub(crate) fn start_bridges(&mut self) -> Result<(), FabricError> {
        for link in self.spec.links.iter().filter(|link| link.is_bridged()) {
            let mut bridge = Bridge {
                service: link.service.clone(),
                target: link.to.clone(),
                workers: WORKERS,
                ..Bridge::default()
            };
            bridge.access.everybody = link.everybody;
            let (name, say) = (link.name.clone(), self.say.clone());
            let socket = rundir::link_socket(&self.facts.runtime, &name);
            let (stop, stopped) = channel();
            let (ending, end) = channel();
            let work = move || {
                pass_on(&bridge, &name, &socket, &say, &stopped);
                drop(ending);
            };
            let spawned = std::thread::Builder::new().name(format!("bridge-{}", link.name)).spawn(work);
            spawned.map_err(|source| FabricError::Spawn {
                what: format!("the bridge of link {}", link.name),
                source,
                hint: "end other programs, or raise the limit of threads",
            })?;
            self.bridges.stops.push(stop);
            self.bridges.ends.push(end);
        }
        Ok(())
    }

    /// Waits for the bridges to end, which they do when the links have: to be called after that.
    pub(crate) fn end_bridges(&mut self) {
        let Bridges { stops, ends } = std::mem::take(&mut self.bridges);
        drop(stops);
        let until = Instant::now() + PATIENCE;
        for end in ends {
            // Nothing is ever sent: it ends with the thread, or with our patience.
            let _ = end.recv_timeout(until.saturating_duration_since(Instant::now()));
        }
    }
}

/// A bridge's life.
fn pass_on(bridge: &Bridge, link: &str, socket: &PathBuf, say: &Say, stopped: &Receiver<()>) {
    let options = ServeOptions { workers: WORKERS, ..ServeOptions::default() };
    let mut said = String::new();
    loop {
        let why = match Calls::join(socket, ANSWER, &options).map(|calls| bridge.run(&calls, |_| ())) {
            // With the fabric, or with the thread that serves its links, which is told of elsewhere.
            Ok(BridgeError::ServerGone) => String::new(),
            Ok(error) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if !why.is_empty() && why != said {
            say(&format!("link {link}: its service is not passed on, and this is tried again: {why}"));
            said = why;
        }
        if stopped.recv_timeout(AGAIN) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}
