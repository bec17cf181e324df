//! `tombolo cell`: cells and VMs of a running fabric.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tombolo_host::api::client::{Client, ClientError, Ending};
use tombolo_host::api::report::{MachineReport, Machines, SCHEMA};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::port::{read_sections, whole};
use crate::section::{Section, origin, told};
use crate::select::Select;
use crate::status;
use crate::terminal::{Raw, Typing};

#[derive(Subcommand, Debug)]
pub(crate) enum Cell {
    /// Run a cell, the machines of a file, or a machine that has ended
    Run(Box<Run>),
    /// List cells and VMs
    Ls(Ls),
    /// Connect to a machine's console, with input from the terminal (Ctrl-] leaves) or a pipe
    Console(Console),
    /// Stop machines; those that were added at run time are also removed from the fabric
    Stop(Stop),
    /// Stop machines that run, and start them again
    Restart(Stop),
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// A machine of the fabric that has ended, an app such as `httpd`, or the path of an image
    #[arg(required_unless_present = "sections", conflicts_with = "sections", value_name = "APP|IMAGE|MACHINE")]
    what: Option<String>,
    /// Name of the new cell [default: that of the app or image]
    #[arg(long, conflicts_with = "sections")]
    name: Option<String>,
    /// Words for the cell's command line, such as "budget=32"
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true, conflicts_with = "sections")]
    args: Option<String>,
    /// Network to join; repeat it for another device [default: the only one]
    #[arg(long, conflicts_with = "sections")]
    network: Vec<String>,
    /// Memory, such as 64M
    #[arg(long, value_name = "SIZE", conflicts_with = "sections")]
    memory: Option<String>,
    /// Virtual CPUs
    #[arg(long, value_name = "N", value_parser = number::whole, allow_hyphen_values = true, conflicts_with = "sections")]
    cpus: Option<u32>,
    /// Ethernet address
    #[arg(long, conflicts_with = "sections")]
    mac: Option<String>,
    /// IPv4 address that is leased to it
    #[arg(long, conflicts_with = "sections")]
    ip: Option<String>,
    /// IPv6 address or prefix that the guard allows, besides the link-local one of its MAC; repeat
    /// it for more
    #[arg(long, value_name = "ADDRESS", conflicts_with = "sections")]
    ip6: Vec<String>,
    /// QEMU's machine type: microvm or q35
    #[arg(long, value_name = "TYPE", conflicts_with = "sections")]
    machine: Option<String>,
    /// auto, kvm or tcg
    #[arg(long, conflicts_with = "sections")]
    accel: Option<String>,
    /// vhost-user, stream, ivshmem, ivshmem-plain or xen
    #[arg(long, conflicts_with = "sections")]
    attach: Option<String>,
    /// Queue pairs of each device
    #[arg(long, value_name = "N", value_parser = number::whole, allow_hyphen_values = true, conflicts_with = "sections")]
    queues: Option<u32>,
    /// ip, mac or off
    #[arg(long, conflicts_with = "sections")]
    guard: Option<String>,
    /// no, on-failure or always
    #[arg(long, conflicts_with = "sections")]
    restart: Option<String>,
    /// Extra argument for QEMU; repeat it for more
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true, conflicts_with = "sections")]
    qemu: Vec<String>,
    /// Extra line for xl's configuration; repeat it for more
    #[arg(long, value_name = "LINE", conflicts_with = "sections")]
    xl: Vec<String>,
    /// Run all [cell.NAME] and [vm.NAME] sections of this file, or none if one fails; - is standard
    /// input
    #[arg(long, value_name = "FILE")]
    sections: Option<PathBuf>,
    /// Print the new machines as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Ls {
    /// Print the machines as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Console {
    /// Name of the machine
    name: String,
    /// Print the output so far and exit
    #[arg(long)]
    log: bool,
    /// Only read, until the machine ends
    #[arg(long, conflicts_with = "log")]
    follow: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Stop {
    /// Names of the machines
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print their states as JSON: one report, or those of several
    #[arg(long)]
    json: bool,
}

impl Run {
    /// What is sent, given the names of the machines that there are.
    fn text(&self, known: &[&str]) -> Result<String, Failure> {
        if let Some(path) = &self.sections {
            return read_sections(path);
        }
        let what = self.what.as_deref().unwrap_or_default();
        if self.name.is_none() && known.contains(&what) {
            return Ok(what.into());
        }
        let path = Path::new(what);
        let is_path = what.contains('/') || path.is_file();
        if is_path && path.extension().is_some_and(|e| e == "toml") {
            return Err(Failure::misused(format!(
                "{what} is not an image; run the sections of a file with --sections {what}"
            )));
        }
        let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or(what).to_lowercase();
        let name = self.name.clone().unwrap_or(if is_path { stem } else { what.into() });
        let image = is_path.then(|| whole(path)).transpose()?;
        Ok(Section::new("cell", &name)
            .text("app", (!is_path).then_some(what))
            .text("image", image.as_deref())
            .text("args", self.args.as_deref())
            .list("network", &self.network)
            .text("memory", self.memory.as_deref())
            .number("cpus", self.cpus)
            .text("mac", self.mac.as_deref())
            .text("ip", self.ip.as_deref())
            .list("ip6", &self.ip6)
            .text("machine", self.machine.as_deref())
            .text("accel", self.accel.as_deref())
            .text("attach", self.attach.as_deref())
            .number("queues", self.queues)
            .text("guard", self.guard.as_deref())
            .text("restart", self.restart.as_deref())
            .list("qemu", &self.qemu)
            .list("xl", &self.xl)
            .finish())
    }
}

impl Cell {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let mut client = select.client()?;
        match self {
            Cell::Run(run) => {
                let status = client.status()?;
                let known: Vec<_> = status.machines.iter().map(|m| m.name.as_str()).collect();
                let started =
                    client.run_machine(&run.text(&known)?).map_err(|e| told(e, origin(run.sections.as_deref())))?;
                if run.json {
                    out::json(&started)?;
                } else {
                    let line = status::done("machine", "started", started.machines.iter().map(|m| m.name.as_str()));
                    out::print(&line)?;
                }
            }
            Cell::Ls(ls) => {
                let machines = client.status()?.machines;
                if ls.json {
                    out::json(&Machines { schema: SCHEMA, machines })?;
                } else {
                    out::print(&status::machines(&machines).render(out::colour()))?;
                }
            }
            Cell::Console(console) => return console.run(&mut client),
            Cell::Stop(stop) => return stop.run("stopped", |name| client.stop_machine(name)),
            Cell::Restart(restart) => return restart.run("restarted", |name| client.restart_machine(name)),
        }
        Ok(Exit::Done)
    }
}

impl Stop {
    /// Does it for one after the other. What fails for one does not keep the others from it.
    fn run(&self, verb: &str, one: impl Fn(&str) -> Result<MachineReport, ClientError>) -> Result<Exit, Failure> {
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        for name in &self.names {
            match one(name) {
                Ok(machine) => done.push(MachineReport { name: name.clone(), ..machine }),
                Err(error) => failed.push(error),
            }
        }
        match (self.json, done.as_slice()) {
            (true, [one]) if self.names.len() == 1 => out::json(one)?,
            (true, [_, ..]) => out::json(&Machines { schema: SCHEMA, machines: done.clone() })?,
            (false, [_, ..]) => out::print(&status::done("machine", verb, done.iter().map(|m| m.name.as_str())))?,
            (_, []) => {}
        }
        let Some(last) = failed.pop() else { return Ok(Exit::Done) };
        if done.is_empty() && failed.is_empty() {
            return Err(last.into());
        }
        failed.iter().chain([&last]).for_each(|error| out::tell!("tombolo: {error}"));
        Ok(if done.is_empty() { Exit::Failed } else { Exit::Partly })
    }
}

/// The same bytes with a carriage return before each line feed that has none: a raw terminal adds
/// none, and the next line would begin below the end of this one. `last` is the byte before.
fn with_returns(piece: &[u8], last: &mut u8) -> Vec<u8> {
    let mut out = Vec::with_capacity(piece.len() + piece.len() / 16);
    for byte in piece {
        if *byte == b'\n' && *last != b'\r' {
            out.push(b'\r');
        }
        out.push(*byte);
        *last = *byte;
    }
    out
}

/// Prints what comes, except for the first `skip` bytes, and counts it. `raw`: to a terminal that
/// is raw.
fn printer(skip: usize, seen: &std::cell::Cell<usize>, raw: bool) -> impl FnMut(&[u8]) -> io::Result<ControlFlow<()>> {
    let (mut skip, mut last) = (skip, 0);
    move |piece| {
        let known = piece.len().min(skip);
        skip -= known;
        seen.set(seen.get() + piece.len());
        let mut out = io::stdout().lock();
        if raw {
            out.write_all(&with_returns(&piece[known..], &mut last))?;
        } else {
            out.write_all(&piece[known..])?;
        }
        out.flush()?;
        Ok(ControlFlow::Continue(()))
    }
}

impl Console {
    fn run(&self, client: &mut Client) -> Result<Exit, Failure> {
        let seen = std::cell::Cell::new(0);
        if self.log || self.follow {
            client.console(&self.name, self.follow, printer(0, &seen, false))?;
            return Ok(Exit::Done);
        }
        let terminal = io::stdin().is_terminal();
        // Asked for before the terminal is changed, so that its error is read as it should be.
        let known = client.status()?;
        if !known.machines.iter().any(|m| m.name == self.name) {
            client.console(&self.name, false, |_| Ok(ControlFlow::Break(())))?;
        }
        let raw = if terminal {
            out::tell!("the console of {}; Ctrl-] leaves it", self.name);
            Some(Raw::new()?)
        } else {
            None
        };
        let end = client.attach(
            &self.name,
            Typing::new(io::stdin(), terminal),
            printer(0, &seen, terminal && io::stdout().is_terminal()),
        );
        drop(raw);
        let end = match end {
            Err(ClientError::Refused { status: 409, fault }) => {
                out::tell!("tombolo: {}; reading only", fault.error);
                // It has been told from the start until then.
                client.console(&self.name, true, printer(seen.get(), &seen, false))?
            }
            end => end?,
        };
        if end == Ending::Fabric {
            out::tell!("tombolo: {} has ended; `tombolo cell ls` says how", self.name);
        } else if terminal {
            out::tell!();
        }
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        cell: Cell,
    }

    fn parse(line: &[&str]) -> Result<Cell, clap::Error> {
        Line::try_parse_from([&["cell"], line].concat()).map(|l| l.cell)
    }

    fn text(line: &[&str]) -> String {
        let Cell::Run(run) = parse(&[&["run"], line].concat()).unwrap() else { panic!() };
        run.text(&["old"]).unwrap()
    }

    #[test]
    fn every_flag_of_run_becomes_its_key() {
        assert_eq!(text(&["httpd"]), "[cell.\"httpd\"]\napp = \"httpd\"\n");
        assert!(text(&["httpd", "--name", "web"]).starts_with("[cell.\"web\"]\napp = \"httpd\"\n"));
        for (flag, value, key) in [
            ("--args", "host=a count=3", "args = \"host=a count=3\""),
            ("--network", "lan", "network = [\"lan\"]"),
            ("--memory", "64M", "memory = \"64M\""),
            ("--cpus", "2", "cpus = 2"),
            ("--mac", "02:00:00:00:00:01", "mac = \"02:00:00:00:00:01\""),
            ("--ip", "10.87.0.9", "ip = \"10.87.0.9\""),
            ("--ip6", "fd00::/64", "ip6 = [\"fd00::/64\"]"),
            ("--machine", "q35", "machine = \"q35\""),
            ("--accel", "tcg", "accel = \"tcg\""),
            ("--attach", "stream", "attach = \"stream\""),
            ("--queues", "2", "queues = 2"),
            ("--guard", "off", "guard = \"off\""),
            ("--restart", "on-failure", "restart = \"on-failure\""),
            ("--qemu", "-snapshot", "qemu = [\"-snapshot\"]"),
            ("--xl", "cpus=1", "xl = [\"cpus=1\"]"),
        ] {
            assert!(text(&["x", flag, value]).lines().any(|l| l == key), "{flag}");
        }
        let two = text(&["x", "--network", "a", "--network", "b"]);
        assert!(two.contains("network = [\"a\", \"b\"]"), "{two}");
    }

    #[test]
    fn an_image_is_told_by_its_path_and_a_machine_by_its_name() {
        let image = text(&["./build/My.elf"]);
        assert!(image.starts_with("[cell.\"my\"]\nimage = \"/") && !image.contains("app ="), "{image}");
        assert_eq!(text(&["old"]), "old");
        assert!(text(&["old", "--name", "new"]).starts_with("[cell.\"new\"]\napp = \"old\""));
        let Cell::Run(run) = parse(&["run", "./x.toml"]).unwrap() else { panic!() };
        assert!(run.text(&[]).is_err());
        assert!(parse(&["run"]).is_err() && parse(&["run", "x", "--sections", "y"]).is_err());
        assert!(parse(&["run", "--sections", "y"]).is_ok());
    }

    #[test]
    fn a_raw_terminal_gets_each_line_at_its_start() {
        let mut last = 0;
        assert_eq!(with_returns(b"a\nb\r\n\nc\r", &mut last), b"a\r\nb\r\n\r\nc\r");
        assert_eq!(with_returns(b"\nd", &mut last), b"\nd", "the return came with the piece before");
    }

    #[test]
    fn the_other_commands_flags() {
        assert!(matches!(parse(&["ls", "--json"]), Ok(Cell::Ls(Ls { json: true }))));
        assert!(matches!(parse(&["stop", "web", "--json"]), Ok(Cell::Stop(Stop { json: true, .. }))));
        assert!(matches!(parse(&["restart", "web", "db"]), Ok(Cell::Restart(Stop { names, .. })) if names.len() == 2));
        assert!(parse(&["stop"]).is_err());
        assert!(matches!(parse(&["run", "x", "--json"]), Ok(Cell::Run(run)) if run.json));
        assert!(matches!(parse(&["console", "web", "--log"]), Ok(Cell::Console(Console { log: true, .. }))));
        assert!(matches!(parse(&["console", "web", "--follow"]), Ok(Cell::Console(Console { follow: true, .. }))));
        assert!(parse(&["console", "web", "--follow", "--log"]).is_err() && parse(&["console"]).is_err());
    }
}
