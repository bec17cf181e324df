//! The bridge of a link with `service` or `to`: a process of its own beside the daemon, which takes the link's one seat for
//! processes and passes calls on ([`tombolo_remote::bridge`]). It needs nothing of the daemon once it has its seat: the link's
//! memory and doorbells are its own, and the server's end of its connection is in the fd store. So calls go on while the
//! daemon is replaced, or killed and started again.
//!
//! # Liveness
//! It begins when the daemon has written it down and says so on its standard input, and not at all where that ends first. It
//! ends when its connection to the link's server does: the link is closed, or another one now, or a killed daemon's last machine
//! has ended and the fd store with it. It ends as well where it can get no seat or name. Its standard error has the reason, and
//! the daemon starts another ([`crate::fabric`]).

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tombolo_remote::bridge::Bridge;
use tombolo_remote::{Calls, ServeOptions};
use tombolo_rpc::folder;

use crate::{confine, file, rundir};

/// The subcommand of the program that is a bridge.
pub const COMMAND: &str = "link-bridge";
/// What the daemon says when it has written the bridge down.
pub(crate) const GO: u8 = b'\n';
/// How long the link's server may take to answer: it may be a daemon that stops for another one.
const ANSWER: Duration = Duration::from_secs(10);
/// Requests that are passed on at a time, each way.
const WORKERS: u32 = 16;

/// What the bridge of a link is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where the link's server listens.
    pub socket: PathBuf,
    /// The name under which the machine's service is registered here.
    pub service: Option<String>,
    /// The service of this machine that serves the link's machine.
    pub to: Option<String>,
    /// Whether every user may call `service`.
    pub everybody: bool,
}

impl Spec {
    /// That of a link of the fabric with this runtime directory; `None` for a link that has no bridge.
    pub fn of(link: &file::Link, runtime: &Path) -> Option<Spec> {
        link.is_bridged().then(|| Spec {
            socket: rundir::link_socket(runtime, &link.name),
            service: link.service.clone(),
            to: link.to.clone(),
            everybody: link.everybody,
        })
    }

    /// The arguments of the program that are this.
    pub fn words(&self) -> Vec<String> {
        let mut out = vec![COMMAND.to_string(), self.socket.display().to_string()];
        for (flag, value) in [(AS, &self.service), ("--to", &self.to)] {
            out.extend(value.iter().flat_map(|value| [flag.to_string(), value.clone()]));
        }
        out.extend(self.everybody.then(|| "--everybody".to_string()));
        out
    }
}

const AS: &str = "--as";

/// The name that a bridge with these arguments registers.
pub(crate) fn service_of(words: &[String]) -> Option<&str> {
    words.windows(2).find(|pair| pair[0] == AS).map(|pair| pair[1].as_str())
}

/// What the hidden subcommand of the program runs, while the process has a single thread. Comes back with why it ended.
pub fn run(spec: &Spec) -> String {
    // A terminal's ^C is for the daemon; and a daemon that is killed would take a stopped process of its own session along.
    let _ = rustix::process::setsid();
    let mut go = [0];
    if std::io::stdin().read_exact(&mut go).is_err() || go != [GO] {
        return "its daemon ended before this bridge could begin".into();
    }
    if let Err(why) = detach() {
        return why;
    }
    let services = match folder::services() {
        Ok(services) => services,
        Err(error) => return error.to_string(),
    };
    if let Err(error) = folder::make(&services) {
        return format!("making the folder {}: {error}", services.display());
    }
    confine::bridge(&services);
    let mut bridge =
        Bridge { service: spec.service.clone(), target: spec.to.clone(), workers: WORKERS, ..Bridge::default() };
    bridge.access.everybody = spec.everybody;
    let options = ServeOptions { workers: WORKERS, ..ServeOptions::default() };
    match Calls::join(&spec.socket, ANSWER, &options) {
        Ok(calls) => bridge.run(&calls, |_| ()).to_string(),
        Err(error) => error.to_string(),
    }
}

/// Has nothing of the daemon any more, and room for its clients' descriptors.
fn detach() -> Result<(), String> {
    let null = std::fs::File::open("/dev/null").map_err(|error| format!("opening /dev/null: {error}"))?;
    rustix::stdio::dup2_stdin(null).map_err(|error| format!("closing the standard input: {error}"))?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // Where it may not be raised, clients beyond it are refused.
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
    Ok(())
}

/// The program that is a bridge: the one that runs, also if another one is installed by now.
pub(crate) fn program() -> OsString {
    "/proc/self/exe".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_name_the_link_and_the_service() {
        let spec = Spec { socket: "/run/t/a.link.sock".into(), service: None, to: Some("x".into()), everybody: false };
        assert_eq!(spec.words().join(" "), "link-bridge /run/t/a.link.sock --to x");
        assert_eq!(service_of(&spec.words()), None);
        let spec = Spec { service: Some("sums".into()), everybody: true, ..spec };
        assert_eq!(spec.words().join(" "), "link-bridge /run/t/a.link.sock --as sums --to x --everybody");
        assert_eq!(service_of(&spec.words()), Some("sums"));
    }
}
