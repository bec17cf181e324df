//! `tombolo-span`: the control plane of networks across machines. One runs beside the daemon of each
//! machine. They tell each other over zenoh which member is where, and each tells its daemon.
//!
//! What is decided, and why, is in the crate `tombolo-span`; here is what touches the world:
//! [`carrier`] (zenoh), [`daemon`] (the daemon's API), [`members`] (what is announced), [`teller`]
//! (what the daemon is told), and the loop in [`run`]. The daemon does not depend on this program: if it ends, the daemon keeps what it was
//! told, and frames for members that it does not know go to all machines.

mod carrier;
mod daemon;
mod members;
mod run;
mod teller;

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tombolo_span::Settings;
use tombolo_span::member::is_name;

use carrier::{Carriage, Carrier, Peer};
use daemon::Daemon;
use run::Run;

const AFTER: &str = "\
Examples:
  tombolo-span --fabric demo-1 --machine node-1 --listen 192.0.2.1:7447 \\
      --peer node-2=192.0.2.2:7447 --peer node-3=192.0.2.3:7447 --keys keys
  tombolo span status

It runs until SIGINT or SIGTERM. `tombolo service keys --keys keys node-1 node-2 node-3` makes the keys.";

/// Tells the fabrics of several machines which member is where.
#[derive(Debug, Parser)]
#[command(name = "tombolo-span", version, after_help = AFTER)]
struct Args {
    /// Name of this machine's fabric
    #[arg(long, value_name = "NAME", env = "TOMBOLO_FABRIC", value_parser = name)]
    fabric: String,
    /// Name of this machine, as in its certificate
    #[arg(long, value_name = "NAME", value_parser = name)]
    machine: String,
    /// Address and port at which the other machines reach this one
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Another machine, and where its tombolo-span listens; once for each
    #[arg(long = "peer", value_name = "MACHINE=ADDRESS:PORT", required = true, value_parser = peer)]
    peers: Vec<Peer>,
    /// Folder with ca.pem, MACHINE.pem and MACHINE.key
    #[arg(long, value_name = "FOLDER", required_unless_present = "no_tls", conflicts_with = "no_tls")]
    keys: Option<PathBuf>,
    /// Encrypt nothing, and believe each machine's name: only where everyone is trusted
    #[arg(long)]
    no_tls: bool,
    /// Name that all these machines have in common
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = name)]
    site: String,
    /// Seconds after which a machine that is not heard is forgotten
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(5..=3600))]
    lease: u64,
}

fn name(text: &str) -> Result<String, String> {
    if is_name(text) {
        Ok(text.into())
    } else {
        Err(format!("expected 1 to 63 of a-z, 0-9 and -, not at the beginning or end, found \"{text}\""))
    }
}

fn peer(text: &str) -> Result<Peer, String> {
    let wrong = || format!("expected MACHINE=ADDRESS:PORT such as node-2=192.0.2.2:7447, found \"{text}\"");
    let (machine, address) = text.split_once('=').ok_or_else(wrong)?;
    Ok(Peer { name: name(machine)?, address: address.parse().map_err(|_| wrong())? })
}

/// Where the daemon's socket is: as docs/install.md has it for all of the project's programs.
fn socket(fabric: &str) -> Result<PathBuf, String> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let root = match variable("TOMBOLO_RUNTIME") {
        Some(root) => root,
        None if rustix::process::geteuid().is_root() => PathBuf::from("/run/tombolo"),
        None => variable("XDG_RUNTIME_DIR").map(|root| root.join("tombolo")).ok_or(
            "no place for runtime files: expected $XDG_RUNTIME_DIR or $TOMBOLO_RUNTIME to be set (not running as root); set one",
        )?,
    };
    Ok(root.join(fabric).join("api.sock"))
}

impl Args {
    /// What the parser cannot see.
    fn check(&self) -> Result<(), String> {
        if self.listen.ip().is_unspecified() || self.listen.port() == 0 {
            return Err(format!(
                "--listen: expected an address and a port that the other machines can reach, found {}",
                self.listen
            ));
        }
        for (at, peer) in self.peers.iter().enumerate() {
            let is_twice =
                self.peers[..at].iter().any(|other| other.name == peer.name || other.address == peer.address);
            if is_twice || peer.name == self.machine || peer.address == self.listen {
                return Err(format!(
                    "--peer {}={}: expected each other machine once, and not this one",
                    peer.name, peer.address
                ));
            }
        }
        let most = tombolo_span::control::MAX_MACHINES - 1;
        if self.peers.len() > most {
            return Err(format!("--peer: expected at most {most} machines, found {}", self.peers.len()));
        }
        Ok(())
    }
}

async fn ended() {
    let (interrupt, terminate) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    match (interrupt, terminate) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        }
        // Without handlers the signals end the process themselves.
        _ => std::future::pending().await,
    }
}

fn serve(args: &Args) -> Result<(), String> {
    args.check()?;
    let daemon = Daemon { socket: socket(&args.fabric)? };
    let lease = Duration::from_secs(args.lease);
    let settings = Settings { lease, beat: lease / 5, ..Settings::new(&args.machine) };
    let carriage = Carriage {
        site: &args.site,
        machine: &args.machine,
        listen: args.listen,
        peers: &args.peers,
        keys: args.keys.as_deref(),
    };
    let (carrier, heard) = Carrier::start(&carriage).map_err(|error| error.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("setting up the runtime: {error}"))?;
    say(&format!("{} listens at {} for {} machines", args.machine, args.listen, args.peers.len()));
    tokio::task::LocalSet::new().block_on(&runtime, async {
        Run::new(&args.site, settings, daemon, carrier, &args.peers).run(heard, ended()).await
    })
}

/// Tells the operator something.
fn say(text: &str) {
    // That it cannot be told ends nothing.
    let _ = writeln!(std::io::stderr(), "tombolo-span: {text}");
}

fn main() -> ExitCode {
    let args = Args::parse();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error);
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(more: &[&str]) -> Result<Args, clap::Error> {
        let base = ["tombolo-span", "--fabric", "demo", "--machine", "a", "--listen", "192.0.2.1:7447"];
        Args::try_parse_from(base.iter().chain(more))
    }

    #[test]
    fn what_cannot_work_is_said_before_anything_starts() {
        let fine = args(&["--peer", "b=192.0.2.2:7447", "--no-tls"]).unwrap();
        fine.check().unwrap();
        for (more, word) in [
            (&["--no-tls"][..], "--peer"),
            (&["--peer", "b=192.0.2.2:7447"], "--keys"),
            (&["--peer", "b=nowhere", "--no-tls"], "node-2=192.0.2.2:7447"),
            (&["--peer", "B=192.0.2.2:7447", "--no-tls"], "a-z"),
            (&["--peer", "b=192.0.2.2:7447", "--no-tls", "--lease", "1"], "5..=3600"),
        ] {
            let text = args(more).unwrap_err().to_string();
            assert!(text.contains(word), "{text}: no {word}");
        }
        for peers in [&["a=192.0.2.2:7447"][..], &["b=192.0.2.1:7447"], &["b=192.0.2.2:7447", "b=192.0.2.3:7447"]] {
            let more: Vec<&str> = peers.iter().flat_map(|peer| ["--peer", peer]).chain(["--no-tls"]).collect();
            assert!(args(&more).unwrap().check().is_err(), "{peers:?}");
        }
    }
}
