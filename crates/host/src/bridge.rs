//! Processes beside the daemon that pass calls on. So calls go on while the daemon is replaced, or
//! killed and started again.
//!
//! - The bridge of a link with `service` or `to` takes the link's one seat for processes
//!   ([`tombolo_remote::bridge`]). It needs nothing of the daemon once it has its seat: the link's
//!   memory and doorbells are its own, and the server's end of its connection is in the fd store.
//! - The bridge of an `[export.NAME]` or `[import.NAME]` connects services of this machine and of
//!   others ([`tombolo_remote::machine`]).
//!
//! # Liveness
//! A bridge begins when the daemon has written it down and says so on its standard input, and not
//! at all where that ends first. That of a link ends when its connection to the link's server does:
//! the link is closed, or another one now, or a killed daemon's last machine has ended and the fd
//! store with it. A bridge ends as well where it can get no seat, name, key or listener. Its
//! standard error has the reason, and the daemon starts another ([`crate::fabric`]).

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use tombolo_remote::bridge::Bridge;
use tombolo_remote::machine::keys::{Identity, KeyError, KeyFiles};
use tombolo_remote::machine::{self, ImportEvent, Offer, Remote, Tcp};
use tombolo_remote::{Calls, ServeOptions};
use tombolo_rpc::folder;
use tombolo_rpc::provider::Access;

use crate::{confine, file, rundir};

/// The subcommands of the program that are bridges: of links, and to other machines.
pub const COMMANDS: [&str; 2] = ["link-bridge", "machine-bridge"];
/// What the daemon says when it has written the bridge down.
pub(crate) const GO: u8 = b'\n';
/// How long the link's server may take to answer: it may be a daemon that stops for another one.
const ANSWER: Duration = Duration::from_secs(10);
/// Requests that are passed on at a time, each way.
const WORKERS: u32 = 16;
/// Requests of one connection of another machine that are served at a time, and connections.
const EXPORT_WORKERS: u32 = 8;
const EXPORT_CONNECTIONS: usize = 64;

/// What a bridge is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spec {
    /// Of a link.
    Link(LinkSpec),
    /// To other machines.
    Machines(MachinesSpec),
}

/// What an export or import of the file is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachinesSpec {
    /// Marks the process as one of the fabric's: a path in its runtime directory, which is no file.
    pub mark: PathBuf,
    /// What crosses, and in which direction.
    pub direction: Direction,
}

/// In which direction services cross.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Direction {
    /// Others use services of this machine.
    Export(file::Export),
    /// This machine uses a service of others.
    Import(file::Import),
}

/// What the bridge of a link is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
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
    /// All bridges of a fabric with this runtime directory, by the path of their section.
    pub fn all(fabric: &file::Fabric, runtime: &Path) -> Vec<(String, Spec)> {
        let links = fabric.links.iter().filter(|link| link.is_bridged()).map(|link| {
            let spec = LinkSpec {
                socket: rundir::link_socket(runtime, &link.name),
                service: link.service.clone(),
                to: link.to.clone(),
                everybody: link.everybody,
            };
            (format!("link.{}", link.name), Spec::Link(spec))
        });
        let machines = |name: &str, kind: &str, direction: Direction| {
            let spec = MachinesSpec { mark: runtime.join(format!("{name}.{kind}")), direction };
            (format!("{kind}.{name}"), Spec::Machines(spec))
        };
        let exports = fabric.exports.iter().map(|e| machines(&e.name, "export", Direction::Export(e.clone())));
        let imports = fabric.imports.iter().map(|i| machines(&i.name, "import", Direction::Import(i.clone())));
        links.chain(exports).chain(imports).collect()
    }

    /// The arguments of the program that are this.
    pub fn words(&self) -> Vec<String> {
        match self {
            Spec::Link(spec) => spec.words(),
            Spec::Machines(spec) => spec.words(),
        }
    }
}

impl MachinesSpec {
    /// The arguments of the program that are this.
    pub fn words(&self) -> Vec<String> {
        let mut out = vec![COMMANDS[1].to_string(), self.mark.display().to_string()];
        let mut add = |flag: &str, value: String| out.extend([flag.to_string(), value]);
        let proof = match &self.direction {
            Direction::Export(export) => {
                add(LISTEN, export.listen.to_string());
                export.services.iter().for_each(|service| add("--service", service.clone()));
                export.allow.iter().for_each(|machine| add("--allow", machine.clone()));
                &export.proof
            }
            Direction::Import(import) => {
                add(AS, import.as_name.clone());
                add("--service", import.service.clone());
                import.from.iter().for_each(|(machine, address)| add("--from", format!("{machine}={address}")));
                add("--pick", file::pick_word(import.pick).into());
                &import.proof
            }
        };
        if let Some(proof) = proof {
            add("--machine", proof.machine.clone());
            add("--keys", proof.keys.display().to_string());
            add("--keys-digest", format!("{:016x}", proof.digest));
        }
        let everybody = matches!(&self.direction, Direction::Import(import) if import.everybody);
        out.extend(everybody.then(|| "--everybody".to_string()));
        out
    }

    /// What the hidden subcommand of the program runs, while the process has a single thread. Comes
    /// back with why it ended.
    pub fn run(&self) -> String {
        let services = match begin() {
            Ok(services) => services,
            Err(why) => return why,
        };
        let proof = match &self.direction {
            Direction::Export(export) => &export.proof,
            Direction::Import(import) => &import.proof,
        };
        let identity = proof.as_ref().map(|proof| Identity::load(&KeyFiles::of(&proof.keys, &proof.machine)));
        match identity.transpose() {
            Ok(identity) => self.serve(identity, &services),
            Err(error) => KeyError::to_string(&error),
        }
    }

    fn serve(&self, identity: Option<Identity>, services: &Path) -> String {
        match &self.direction {
            Direction::Export(export) => {
                let listener = match listener(export.listen) {
                    Ok(listener) => listener,
                    Err(error) => return format!("listening at {}: {error}", export.listen),
                };
                confine::bridge(services);
                let offer = |service: &String| Offer { service: service.clone(), allow: export.allow.clone() };
                let wanted = machine::Export {
                    offers: export.services.iter().map(offer).collect(),
                    workers: EXPORT_WORKERS,
                    connections: EXPORT_CONNECTIONS,
                    folder: None,
                };
                match wanted.start(&Tcp::at(listener), identity, machine::told(|text| say(&text))) {
                    Ok(_exporter) => forever(),
                    Err(error) => error.to_string(),
                }
            }
            Direction::Import(import) => {
                confine::bridge(services);
                let remote = |(machine, address): &(String, String)| Remote {
                    machine: machine.clone(),
                    address: address.clone(),
                };
                let wanted = machine::Import {
                    service: import.service.clone(),
                    name: import.as_name.clone(),
                    remotes: import.from.iter().map(remote).collect(),
                    pick: import.pick,
                    workers: WORKERS,
                    access: Access { everybody: import.everybody, ..Access::default() },
                    folder: None,
                };
                let (end, ended) = mpsc::channel();
                let tell = move |event| match event {
                    ImportEvent::Unregistered { why } => {
                        // Once this process ends, nothing listens.
                        let _ = end.send(why);
                    }
                    event => say(&event),
                };
                match wanted.start(Arc::new(Tcp::default()), identity, tell) {
                    Ok(importer) => {
                        let why = ended.recv().unwrap_or_else(|_| "the import has ended".into());
                        // Dropped, it would wait for connections that are being made. The process
                        // ends now.
                        std::mem::forget(importer);
                        why
                    }
                    Err(error) => error.to_string(),
                }
            }
        }
    }
}

/// Writes a line into the log. One that cannot be written, such as to a full disk, is lost.
fn say(what: &dyn Display) {
    let _ = writeln!(io::stderr(), "{what}");
}

/// Connections of an export that wait to be accepted, as in the standard library.
const BACKLOG: i32 = 128;

/// Listens there, at an IPv6 address for IPv6 alone: `[::]` does not take the port of 0.0.0.0.
pub(crate) fn listener(at: SocketAddr) -> io::Result<TcpListener> {
    if at.is_ipv4() {
        return TcpListener::bind(at);
    }
    let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_ipv6_v6only(&socket, true)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &at)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Until the process is ended.
fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

impl LinkSpec {
    /// The arguments of the program that are this.
    pub fn words(&self) -> Vec<String> {
        let mut out = vec![COMMANDS[0].to_string(), self.socket.display().to_string()];
        for (flag, value) in [(AS, &self.service), ("--to", &self.to)] {
            out.extend(value.iter().flat_map(|value| [flag.to_string(), value.clone()]));
        }
        out.extend(self.everybody.then(|| "--everybody".to_string()));
        out
    }
}

const AS: &str = "--as";
const LISTEN: &str = "--listen";

/// Where a bridge with these arguments listens.
pub(crate) fn listen_of(words: &[String]) -> Option<SocketAddr> {
    words.windows(2).find(|pair| pair[0] == LISTEN).and_then(|pair| pair[1].parse().ok())
}

/// The name that a bridge with these arguments registers.
pub(crate) fn service_of(words: &[String]) -> Option<&str> {
    words.windows(2).find(|pair| pair[0] == AS).map(|pair| pair[1].as_str())
}

/// Waits for the daemon's word, and leaves it. Returns the folder of services, which is there.
fn begin() -> Result<PathBuf, String> {
    // A terminal's ^C is for the daemon; and a daemon that is killed would take a stopped process
    // of its own session along.
    let _ = rustix::process::setsid();
    let mut go = [0];
    if std::io::stdin().read_exact(&mut go).is_err() || go != [GO] {
        return Err("its daemon ended before this bridge could begin".into());
    }
    detach()?;
    let services = folder::services().map_err(|error| error.to_string())?;
    folder::make(&services).map_err(|error| format!("making the folder {}: {error}", services.display()))?;
    Ok(services)
}

/// What the hidden subcommand for a link runs, while the process has a single thread. Comes back
/// with why it ended.
pub fn run(spec: &LinkSpec) -> String {
    match begin() {
        Ok(services) => confine::bridge(&services),
        Err(why) => return why,
    }
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
        let spec =
            LinkSpec { socket: "/run/t/a.link.sock".into(), service: None, to: Some("x".into()), everybody: false };
        assert_eq!(spec.words().join(" "), "link-bridge /run/t/a.link.sock --to x");
        assert_eq!(service_of(&spec.words()), None);
        let spec = LinkSpec { service: Some("sums".into()), everybody: true, ..spec };
        assert_eq!(spec.words().join(" "), "link-bridge /run/t/a.link.sock --as sums --to x --everybody");
        assert_eq!(service_of(&spec.words()), Some("sums"));
    }

    #[test]
    fn the_arguments_of_a_bridge_to_machines_are_what_its_section_says() {
        let proof = Some(file::Proof { machine: "node-1".into(), keys: "/keys".into(), digest: 0 });
        let text = "[export.calc]\nservices = [\"a\", \"b\"]\nlisten = \"0.0.0.0:7000\"\nallow = \"node-2\"\n\
                    machine = \"node-1\"\nkeys = \"/keys\"\n[import.far]\nfrom = \"192.0.2.2:7000\"\ntls = false\n\
                    callers = \"everybody\"\nas = \"near\"\n";
        let fabric = file::parse(text, Path::new("/x/tombolo.toml")).unwrap();
        assert_eq!(fabric.exports[0].proof, proof);
        let all = Spec::all(&fabric, Path::new("/run/t"));
        let words: Vec<_> = all.iter().map(|(at, spec)| format!("{at}: {}", spec.words().join(" "))).collect();
        assert_eq!(
            words,
            [
                "export.calc: machine-bridge /run/t/calc.export --listen 0.0.0.0:7000 --service a --service b \
                 --allow node-2 --machine node-1 --keys /keys --keys-digest 0000000000000000",
                "import.far: machine-bridge /run/t/far.import --as near --service far \
                 --from 192.0.2.2:7000=192.0.2.2:7000 --pick nearest --everybody",
            ]
        );
        assert_eq!(service_of(&all[1].1.words()), Some("near"));
        assert_eq!(listen_of(&all[0].1.words()), Some(([0; 4], 7000).into()));
    }
    #[test]
    fn an_export_at_all_ipv6_addresses_leaves_the_port_of_all_ipv4_addresses_free() {
        let four = listener("0.0.0.0:0".parse().unwrap()).unwrap();
        let mut at: SocketAddr = "[::]:0".parse().unwrap();
        at.set_port(four.local_addr().unwrap().port());
        let six = match listener(at) {
            // A kernel without IPv6.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) => return,
            six => six.unwrap(),
        };
        assert_eq!(six.local_addr().unwrap(), at);
        assert_eq!(listener(at).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
