//! What the running fabric can be asked, and how it answers.
//!
//! The fabric is one task that owns its state. All others send it a [`Request`] and wait for the
//! reply: the HTTP server on the Unix socket, and tests. The reports are the JSON of the API and of
//! every `--json`: one schema, described in docs/api.md and by the OpenAPI document.

pub mod apply;
pub mod blocks;
pub mod client;
pub mod config;
pub mod connections;
mod events;
pub mod metrics;
mod query;
pub mod report;
#[cfg(test)]
pub(crate) mod samples;
pub mod server;
pub mod services;
mod span;
#[cfg(test)]
mod tests;

use report::{MachineReport, PortReport, Status};
use std::path::PathBuf;
use tokio::sync::{mpsc, oneshot};

/// Where the answer to a request goes. An answer that is no longer awaited is dropped.
pub type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// The sending end of the fabric's requests.
pub type Requests = mpsc::Sender<Request>;

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The thing named does not exist; HTTP 404, exit code 1.
    #[error("{0}")]
    NotFound(String),
    /// The request is wrong in itself; HTTP 400, exit code 2.
    #[error("{0}")]
    Invalid(String),
    /// What was sent has faults; HTTP 400, exit code 2.
    #[error("{text}")]
    Faulty {
        /// All of them, a line each.
        text: String,
        /// The same, field by field.
        problems: Vec<report::ProblemReport>,
    },
    /// It is right in itself, and does not fit what the file says; HTTP 422, exit code 1.
    #[error("{0}")]
    Unfit(String),
    /// It conflicts with what runs, such as a name in use; HTTP 409, exit code 1.
    #[error("{0}")]
    Conflict(String),
    /// Something else changes the fabric or ends its machine at the moment, and nothing of this was
    /// done; HTTP 503 with Retry-After, exit code 1.
    #[error("{0}")]
    Busy(String),
    /// It was tried and failed; HTTP 500, exit code 1.
    #[error("{0}")]
    Failed(String),
}

/// One thing asked of the fabric.
#[derive(Debug)]
pub enum Request {
    /// Everything about it at this instant.
    Status(Reply<Status>),
    /// What happened; a caller that has the log reads it without asking the fabric again.
    Events(Reply<crate::fabric::events::Events>),
    /// Adds what the sections of this piece of a fabric file name (`[port.x]`, `[tap.x]`); all of
    /// it or nothing.
    AddPorts {
        /// Sections of a fabric file, as TOML text.
        sections: String,
        /// The ports that were added.
        reply: Reply<Vec<PortReport>>,
    },
    /// Changes a running port's rate limits, and keeps the change for daemons that follow.
    ChangePort {
        /// As in `status`.
        name: String,
        /// The key `rate`, as TOML text.
        change: String,
        /// The port as it is now.
        reply: Reply<PortReport>,
    },
    /// Removes a port that was added, or a tap or bare port of the file. A machine's port goes with
    /// its machine.
    RemovePort {
        /// As in `status`.
        name: String,
        /// Sent once the port is gone.
        reply: Reply<()>,
    },
    /// Starts the machines that the sections of this piece of a fabric file name (`[cell.x]`,
    /// `[vm.x]`), or one that the fabric knows and that has ended.
    RunMachine {
        /// TOML text, or only the name of a known machine.
        sections: String,
        /// The machines that were started.
        reply: Reply<Vec<MachineReport>>,
    },
    /// Changes the fabric to what the text of a whole fabric file says; with `query.dry_run` only
    /// tells what that would do.
    Apply {
        /// The whole file, as TOML text.
        text: String,
        /// Where it is from, and whether it is done.
        query: apply::ApplyQuery,
        /// What was done.
        reply: Reply<apply::ApplyReport>,
    },
    /// The configuration that runs.
    Config(Reply<config::ConfigReport>),
    /// Changes the configuration that runs; with `query.dry_run` only tells what that would do.
    ChangeConfig {
        /// A JSON merge patch (RFC 7386).
        patch: serde_json::Value,
        /// Whether it is done, and of which revision it is a change.
        query: config::ConfigQuery,
        /// What was done.
        reply: Reply<apply::ApplyReport>,
    },
    /// Stops a machine and waits for its end.
    StopMachine {
        /// As in `status`.
        name: String,
        /// Done; the machine's last state.
        reply: Reply<MachineReport>,
    },
    /// Stops a machine that runs, waits for its end, and starts it again.
    RestartMachine {
        /// As in `status`.
        name: String,
        /// The machine as it was started.
        reply: Reply<MachineReport>,
    },
    /// Where a machine's console is.
    Console {
        /// As in `status`.
        name: String,
        /// Where its console can be read and written.
        reply: Reply<Console>,
    },
    /// Which addresses are where.
    Tables {
        /// The revision of `homes` that the client has.
        homes: Option<String>,
        /// Where the answer goes.
        reply: Reply<report::Tables>,
    },
    /// Replaces what another machine has in a network.
    PutRemotes {
        /// As in `status`.
        network: String,
        /// The machine's name.
        machine: String,
        /// Its end of the tunnel, and its members.
        body: report::RemotesRequest,
        /// What of that is in use here.
        reply: Reply<report::RemoteConflicts>,
    },
    /// Forgets what another machine has in a network.
    DeleteRemotes {
        /// As in `status`.
        network: String,
        /// The machine's name.
        machine: String,
        /// Sent also where there is none.
        reply: Reply<()>,
    },
    /// What other machines have in a network.
    Remotes {
        /// As in `status`.
        network: String,
        /// All of them.
        reply: Reply<report::RemotesReport>,
    },
    /// Replaces the list of addresses that a network of this machine has lost to other machines.
    PutLost {
        /// As in `status`.
        network: String,
        /// The list.
        body: report::LostRequest,
        /// Those that the file fixes, and that stay.
        reply: Reply<report::LostAnswer>,
    },
    /// Keeps the control plane's report of itself.
    PutSpan {
        /// The report.
        report: Box<report::SpanReport>,
        /// Sent once it is kept.
        reply: Reply<()>,
    },
    /// The control plane's last report, if one ever came.
    Span(Reply<Option<report::Span>>),
    /// Starts a capture.
    Capture {
        /// Of what.
        of: CaptureOf,
        /// Bytes kept of each frame; the whole frame with `None`.
        snaplen: Option<u32>,
        /// Which frames; all with `None`.
        filter: Option<tombolo_switch::filter::Filter>,
        /// Pieces of a pcapng file, in order, until the receiver is dropped or the port goes.
        reply: Reply<mpsc::Receiver<Vec<u8>>>,
    },
    /// Another daemon of the same user wants to take the fabric over; see
    /// [`crate::fabric::handover`]. The process ends if it does.
    HandOver {
        /// The connection to it.
        socket: std::os::unix::net::UnixStream,
    },
    /// Leaves the guests to the next daemon. The process ends; only why it does not is answered.
    Leave(Reply<()>),
    /// Stops everything and removes all that the fabric made; the daemon ends after the reply.
    Down(Reply<()>),
}

/// What is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaptureOf {
    /// A port, both ways, by its name in `status`.
    Port(String),
    /// Each frame that enters a network once, where it enters.
    Network(String),
}

/// Where a machine's console can be read and written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Console {
    /// All that it printed; grows while it runs.
    pub log: PathBuf,
    /// A named pipe or terminal that takes what is typed, where there is one.
    pub input: Option<PathBuf>,
}
