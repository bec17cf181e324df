//! `tombolo-span`: the control plane of networks across machines. One runs beside the daemon of
//! each machine. They tell each other over zenoh which member is where, and each tells its daemon.
//!
//! What is decided, and why, is in the crate `tombolo-span`; here is what touches the world:
//! [`options`] and [`file`](mod@file) (what it is told), [`carrier`] (zenoh), [`daemon`] (the daemon's API),
//! [`members`] (what is announced), [`teller`] (what the daemon is told), [`notify`] (what a
//! service manager is told), and the loop in [`run`]. Besides, it passes on calls between machines:
//! [`streams`] is the engine, and the rest is in the crate `tombolo-remote`. The daemon does not
//! depend on this program: if it ends, the daemon keeps what it was told, and frames for members
//! that it does not know go to all machines.

mod carrier;
mod daemon;
mod file;
mod members;
mod notify;
mod options;
mod ration;
mod run;
mod services;
mod streams;
#[cfg(test)]
#[path = "../../crates/remote/tests/engine/suite.rs"]
mod suite;
mod teller;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use tokio::signal::unix::{SignalKind, signal};
use tombolo_span::Settings;

use carrier::{Carrier, RUNTIMES, RUNTIMES_VARIABLE};
use daemon::Daemon;
use notify::Manager;
use options::{Args, Options};
use run::Run;
use services::Services;
use streams::Streams;

/// What it ends with where it was called wrongly, or its settings are wrong: trying again does not
/// help. As clap has it.
const MISUSED: u8 = 2;

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

/// Allows as many descriptors as the system lets this program have: strangers hold some until zenoh
/// gives them up.
fn allow_descriptors() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = rustix::process::Rlimit { current: limit.maximum, ..limit };
    // It goes on with what it has.
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, most);
}

fn serve(options: &Options) -> Result<(), String> {
    allow_descriptors();
    let daemon = Daemon { socket: socket(&options.fabric)? };
    let lease = Duration::from_secs(options.lease);
    let settings = Settings { lease, beat: lease / 5, ..Settings::new(&options.machine) };
    let carriage = options.carriage();
    let streams = Streams::new(&carriage.base(), &options.machine, options.peers.iter().map(|peer| peer.name.clone()));
    let streams = streams.map_err(|error| format!("starting a thread: {error}"))?;
    let services = Services::of(options)?;
    let (carrier, heard) = Carrier::start(&carriage, &streams).map_err(|error| error.to_string())?;
    // Ends before the carrier.
    let services = services.start(streams)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("setting up the runtime: {error}"))?;
    say(&format!("{} {} for {} machines", options.machine, way(options), options.peers.len()));
    let manager = Manager::of_environment();
    manager.ready();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let run = Run::new(&options.site, settings, daemon, carrier, &options.peers, manager);
        run.run(heard, async {
            ended().await;
            drop(services)
        })
        .await
    })
}

/// How it reaches the others, in words.
fn way(options: &Options) -> String {
    match options.listen {
        Some(listen) => format!("listens at {listen}"),
        None => {
            let routers: Vec<_> = options.routers.iter().map(ToString::to_string).collect();
            format!("uses the router {}", routers.join(" or "))
        }
    }
}

/// Looks at the keys, and says what the settings are.
fn check(options: &Options) -> Result<(), String> {
    options.carriage().check().map_err(|error| error.to_string())?;
    Services::of(options)?;
    let Options { fabric, machine, peers, keys, .. } = options;
    let security = keys.as_ref().map_or("without TLS".into(), |keys| format!("with the keys of {}", keys.display()));
    let text = format!("{machine} of the fabric {fabric}: {} for {} machines, {security}", way(options), peers.len());
    // A reader that has gone needs no answer.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

/// Prints what a router is to be told.
fn router_config(options: &Options) -> Result<(), String> {
    let settings = options.carriage().router();
    let settings = settings.ok_or("no router: expected router in the settings, or --router, found none")?;
    // A reader that has gone needs no answer.
    let _ = writeln!(std::io::stdout(), "{settings:#}");
    Ok(())
}

/// Tells the operator something.
fn say(text: &str) {
    // That it cannot be told ends nothing.
    let _ = writeln!(std::io::stderr(), "tombolo-span: {text}");
}

/// Begins again with what zenoh reads from the environment, where that is not as it must be.
/// Returns only if that fails.
fn with_runtimes() -> Result<(), String> {
    if std::env::var(RUNTIMES_VARIABLE).is_ok_and(|value| value == RUNTIMES) {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|error| format!("finding the own program: {error}"))?;
    let mut again = std::process::Command::new(program);
    let error = again.args(std::env::args_os().skip(1)).env(RUNTIMES_VARIABLE, RUNTIMES).exec();
    Err(format!("starting again with {RUNTIMES_VARIABLE}={RUNTIMES}: {error}"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(shell) = args.completions {
        clap_complete::generate(shell, &mut Args::command(), "tombolo-span", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    let (is_check, is_router_config) = (args.check, args.router_config);
    // Before settings are read, which may come from a pipe.
    if let Err(error) = if is_check || is_router_config { Ok(()) } else { with_runtimes() } {
        say(&error);
        return ExitCode::FAILURE;
    }
    let options = match args.options() {
        Ok(options) => options,
        Err(error) => {
            say(&error.to_string());
            return ExitCode::from(MISUSED);
        }
    };
    let done = match (is_router_config, is_check) {
        (true, _) => router_config(&options),
        (_, true) => check(&options),
        _ => serve(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error);
            ExitCode::FAILURE
        }
    }
}
