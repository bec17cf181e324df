//! The program `tombolo`.
//!
//! One definition per flag (clap's derive) gives the parser, the help, the completions and the man
//! pages. Each group of commands has a file, with its flags, what they do, and their tests.

mod apply;
mod bridge;
mod bypass;
mod bypass_capture;
mod call;
mod capture;
mod cell;
mod check;
mod complete;
mod confine;
mod doctor;
mod domain_watch;
mod down;
mod events;
mod examples;
mod exec;
mod exit;
mod fd_store;
mod forward;
mod lab;
mod link_bridge;
mod logs;
mod ls;
mod machine_bridge;
mod machines;
mod manual;
mod metrics;
mod number;
mod out;
mod page;
mod port;
mod schema;
mod section;
mod select;
mod service;
mod set;
mod span;
mod status;
mod table;
mod terminal;
mod top;
mod up;
mod wait;
mod web;

use std::ffi::OsString;
use std::path::Path;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit::{Exit, Failure};

const AFTER: &str = "\
Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done in part.

Fabric: --fabric or $TOMBOLO_FABRIC, else that of --file, else that of ./tombolo.toml, else the only one running.

Files: runtime files are in $TOMBOLO_RUNTIME, else /run/tombolo (root) or $XDG_RUNTIME_DIR/tombolo; leases in
$TOMBOLO_STATE, else /var/lib/tombolo (root) or $XDG_STATE_HOME/tombolo.

Variables (one that is set to nothing is not set):
  TOMBOLO_FABRIC   the fabric to use, same as --fabric
  TOMBOLO_RUNTIME  folder of runtime files: locks, sockets, consoles, logs; its path must be short
  TOMBOLO_STATE    folder of files that outlive a fabric: leases and logs
  TOMBOLO_CONFINE  off: do not confine the daemon and its machines (docs/security.md)
  TOMBOLO_QEMU     the QEMU to use instead of qemu-system-x86_64 in PATH; a script must exec it
  TOMBOLO_APPS     folder of cell images, searched before those beside the program, in the source tree and in
                   /usr/lib/tombolo/apps
  TOMBOLO_LAB      folder of the lab, instead of that of the checkout or of ../share/tombolo/lab beside the program
  TOMBOLO_PROGRAM  the program that the lab measures, instead of this one";

/// Connects VMs, unikernels, taps and processes of one machine to one Ethernet network, through
/// shared memory.
#[derive(Debug, Parser)]
#[command(name = "tombolo", version, after_help = AFTER, max_term_width = 100, propagate_version = false)]
struct Cli {
    #[command(flatten)]
    select: select::Select,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a fabric from its file
    Up(up::Up),
    /// Find every fault of a fabric file, and of what it needs of this machine, without starting
    /// anything
    Check(check::Check),
    /// Change a running fabric to what its edited file says; what did not change runs on
    Apply(apply::Apply),
    /// Change keys of a running fabric without its file; the next `apply` makes it what the file
    /// says
    Set(set::Set),
    /// Remove keys or sections from a running fabric without its file
    Unset(set::Unset),
    /// Print the configuration that a fabric runs with, as a fabric file
    Config(set::Config),
    /// Stop a fabric and remove all that it created
    Down(down::Down),
    /// Show networks, machines, ports, forwards, leases, drops and faults
    Status(status::StatusArgs),
    /// List all fabrics of this user
    Ls(ls::Ls),
    /// Show what happened: starts, deaths, ports, leases, faults and changes
    Events(events::Events),
    /// Show the daemon's log and the consoles of machines, in the order of time
    Logs(logs::Logs),
    /// Wait until a machine, port or service is as a script needs it
    Wait(wait::Wait),
    /// Show rates per port and worker, updated every interval
    Top(top::Top),
    /// Show the fabric in a browser: networks, ports, consoles, captures, services
    Web(web::Web),
    /// Print the metrics, or serve them to Prometheus
    Metrics(metrics::Metrics),
    /// Add, remove, list and inspect ports of a running fabric
    #[command(subcommand)]
    Port(port::Port),
    /// Add, remove and list forwards of a running fabric
    #[command(subcommand)]
    Forward(forward::Forward),
    /// Add, remove and list rules of a running fabric
    #[command(subcommand)]
    Rule(forward::Rule),
    /// Show which MAC and IP addresses are where
    #[command(subcommand)]
    Table(table::Table),
    /// Record the frames of a port or network as pcapng
    Capture(capture::Capture),
    /// Run, list, restart, stop and talk to cells and VMs of a running fabric
    #[command(subcommand)]
    Cell(cell::Cell),
    /// Run a command in a VM, by the QEMU guest agent
    Exec(exec::Exec),
    /// Let traffic between taps, veths and cards skip the kernel's forwarding; NAT and firewall
    /// still apply
    #[command(subcommand)]
    Bypass(bypass::Bypass),
    /// List and watch the services that run, and bridge them to cells and guests
    #[command(subcommand)]
    Service(service::Service),
    /// Call a service with a deadline
    Call(call::Call),
    /// Show what is known of the networks on other machines
    #[command(subcommand)]
    Span(span::Span),
    /// Check what this machine can do, and how to get the rest
    Doctor(doctor::Doctor),
    /// Measure: run experiments that anyone can repeat, and compare their results
    Lab(lab::Lab),
    /// Print the version
    Version(manual::Version),
    /// Print the JSON Schema of the fabric file, for editors
    Schema(schema::Schema),
    /// Print a completion script for a shell
    Completions(manual::Completions),
    /// Print the manual page, or write the pages of all commands into a folder
    Man(manual::Man),
    /// Keep the links of shared memory of a fabric while its daemon restarts; the daemon starts it
    #[command(name = "keeper", hide = true)]
    FdStore(fd_store::FdStore),
    /// Pass calls on between a link of a fabric and the services of this machine; the daemon starts
    /// it
    #[command(hide = true)]
    LinkBridge(link_bridge::LinkBridge),
    /// Pass calls on between this machine and others; started by a daemon
    #[command(hide = true)]
    MachineBridge(machine_bridge::MachineBridge),
    /// Watch a domain of Xen that was restored, and copy its console; the daemon starts it
    #[command(hide = true)]
    DomainWatch(domain_watch::DomainWatch),
    /// Start a machine's QEMU confined; the daemon uses it
    #[command(hide = true)]
    Confine(confine::Confine),
}

fn run(cli: Cli) -> Result<Exit, Failure> {
    // What the program and its children make is for its own user: sockets of QEMU, folders of the
    // bypass. This is the one instant at which the process has a single thread. Manual pages are
    // for everybody; files of the lab are its user's affair.
    if !matches!(cli.command, Command::Man(_) | Command::Lab(_)) {
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    }
    let select = &cli.select;
    match cli.command {
        Command::Up(up) => up.run(select),
        Command::Check(check) => check.run(select),
        Command::Apply(apply) => apply.run(select),
        Command::Set(set) => set.run(select),
        Command::Unset(unset) => unset.run(select),
        Command::Config(config) => config.run(select),
        Command::Down(down) => down.run(select),
        Command::Status(status) => status.run(select),
        Command::Ls(ls) => ls.run(),
        Command::Events(events) => events.run(select),
        Command::Logs(logs) => logs.run(select),
        Command::Wait(wait) => wait.run(select),
        Command::Top(top) => top.run(select),
        Command::Web(web) => web.run(select),
        Command::Metrics(metrics) => metrics.run(select),
        Command::Port(port) => port.run(select),
        Command::Forward(forward) => forward.run(select),
        Command::Rule(rule) => rule.run(select),
        Command::Table(table) => table.run(select),
        Command::Capture(capture) => capture.run(select),
        Command::Cell(cell) => cell.run(select),
        Command::Exec(exec) => exec.run(select),
        Command::Bypass(bypass) => bypass.run(),
        Command::Service(service) => service.run(select),
        Command::Call(call) => call.run(),
        Command::Span(span) => span.run(select),
        Command::Doctor(doctor) => doctor.run(),
        Command::Lab(lab) => lab.run(),
        Command::Version(version) => version.run(),
        Command::Schema(schema) => schema.run(),
        Command::Completions(completions) => completions.run(),
        Command::Man(man) => man.run(),
        Command::FdStore(fd_store) => fd_store.run(),
        Command::LinkBridge(bridge) => bridge.run(),
        Command::MachineBridge(bridge) => bridge.run(),
        Command::DomainWatch(watch) => watch.run(),
        Command::Confine(confine) => confine.run(),
    }
}

/// The command line. What stands behind `lab` is not read here, so that also `--help` and flags of
/// ours reach the lab.
fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let words: Vec<_> = words.into_iter().collect();
    match words.get(1) {
        Some(word) if word == "lab" => {
            let mut cli = taken(&words[..2])?;
            cli.command = Command::Lab(lab::Lab { arguments: words[2..].to_vec() });
            Ok(cli)
        }
        _ => taken(&followed(words)),
    }
}

/// `-f` is `--file` of every command, and what other programs' `logs -f` follows with. So after
/// `logs` and `events` it is `-F`, unless a file follows it.
fn followed(mut words: Vec<OsString>) -> Vec<OsString> {
    let is_file = |word: &OsString| {
        let path = Path::new(word);
        path.extension().is_some_and(|end| end == "toml") || path.is_file()
    };
    // The command is the first word that is neither a flag nor the value of one.
    let mut at = 1;
    while let Some(word) = words.get(at).filter(|word| word.as_encoded_bytes().starts_with(b"-")) {
        at += if ["-f", "--file", "--fabric"].iter().any(|flag| word == flag) { 2 } else { 1 };
    }
    if words.get(at).is_some_and(|word| word == "logs" || word == "events") {
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        for at in at + 1..end {
            if words[at] == "-f" && !words.get(at + 1).is_some_and(is_file) {
                words[at] = "-F".into();
            }
        }
    }
    words
}

/// The definition of the flags, with the examples of each command.
fn command() -> clap::Command {
    let command = examples::add(Cli::command());
    // One that is set to nothing is not set.
    match std::env::var_os("TOMBOLO_FABRIC") {
        Some(empty) if empty.is_empty() => {
            command.mut_arg("fabric", |fabric| fabric.env(clap::builder::Resettable::Reset))
        }
        _ => command,
    }
}

fn taken(words: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(words)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

fn main() -> std::process::ExitCode {
    complete::answer();
    match run(parse(std::env::args_os()).unwrap_or_else(|error| error.exit())) {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_has_a_help_text_and_no_name_is_used_twice() {
        fn look(command: &clap::Command) {
            for argument in command.get_arguments().filter(|a| !a.is_hide_set()) {
                let help = argument.get_help().map(|h| h.to_string()).unwrap_or_default();
                assert!(help.len() > 5, "{} {}: no help", command.get_name(), argument.get_id());
            }
            assert!(command.get_about().is_some(), "{}", command.get_name());
            command.get_subcommands().for_each(look);
        }
        let command = Cli::command();
        command.clone().debug_assert();
        look(&command);
    }

    #[test]
    fn logs_and_events_follow_by_the_flag_of_other_programs_too() {
        let read = |line: &str| followed(line.split(' ').map(OsString::from).collect());
        for (line, as_if) in [
            ("tombolo logs -f", "tombolo logs -F"),
            ("tombolo logs -f web db", "tombolo logs -F web db"),
            ("tombolo --fabric lab events web -f", "tombolo --fabric lab events web -F"),
            ("tombolo logs -f lab.toml", "tombolo logs -f lab.toml"),
            ("tombolo -f lab.toml logs -f", "tombolo -f lab.toml logs -F"),
            ("tombolo exec db -- docker logs -f web", "tombolo exec db -- docker logs -f web"),
            ("tombolo exec logs tail -f events", "tombolo exec logs tail -f events"),
            ("tombolo status -f lab", "tombolo status -f lab"),
        ] {
            assert_eq!(read(line), as_if.split(' ').map(OsString::from).collect::<Vec<_>>(), "{line}");
            assert!(parse(line.split(' ').map(OsString::from)).is_ok(), "{line}");
        }
    }

    #[test]
    fn the_fabric_may_be_named_before_or_after_the_command() {
        for line in ["tombolo --fabric demo status", "tombolo status --fabric demo"] {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(cli.select.fabric.as_deref(), Some("demo"));
        }
        assert_eq!(Cli::try_parse_from(["tombolo", "frobnicate"]).unwrap_err().exit_code(), 2);
    }
}
