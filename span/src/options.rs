//! What the program is told: its flags, the settings file, and what both mean together. A flag wins
//! over the file.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use clap_complete::Shell;
use tombolo_rpc::folder;
use tombolo_span::member::is_name;

use crate::carrier::{Carriage, Peer};
use crate::file::{self, File, FileError, Said};

/// What a name is.
pub const NAME: &str = "1 to 63 of a-z, 0-9 and -, not at the beginning or end";
/// What another machine is.
pub const PEER: &str = "MACHINE=ADDRESS:PORT such as node-2=192.0.2.2:7447, or MACHINE alone where there is a router";
/// What a router is.
pub const ROUTER: &str = "MACHINE=ADDRESS:PORT of a router of zenoh, such as hub=192.0.2.9:7447";
/// What is exported.
pub const EXPORT: &str = "SERVICE for all machines, or SERVICE=MACHINE,… for some, such as calculator=node-2";
/// What is imported.
pub const IMPORT: &str = "SERVICE=MACHINE,… such as calculator=node-1";
/// Who may call what is imported.
pub const CALLERS: &str = "\"owner\" or \"everybody\"";
/// What `--lease` may be, in seconds.
pub const LEASE_S: RangeInclusive<u64> = 5..=3600;
/// What it is where it is left out.
const DEFAULT_LEASE_S: u64 = 15;
const DEFAULT_SITE: &str = "default";

const AFTER: &str = "\
Examples:
  tombolo-span --config /etc/tombolo/home.span.toml
  tombolo-span --config /etc/tombolo/home.span.toml --check
  tombolo-span --fabric demo-1 --machine node-1 --listen 192.0.2.1:7447 \\
      --peer node-2=192.0.2.2:7447 --peer node-3=192.0.2.3:7447 --keys keys
  tombolo span status

It runs until SIGINT or SIGTERM. `tombolo service keys --keys keys node-1 node-2 node-3` makes the keys.
As a service: systemctl enable --now tombolo-span@home
It ends with 0 when it was asked to, 1 when it failed, 2 when it was called wrongly or its settings are wrong.";

/// A service, and the machines that may use it or have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedService {
    /// The service's name on all machines.
    pub service: String,
    /// Machines; of an export none means all.
    pub machines: Vec<String>,
}

impl std::fmt::Display for SharedService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let equals = if self.machines.is_empty() { "" } else { "=" };
        write!(f, "{}{equals}{}", self.service, self.machines.join(","))
    }
}

/// Who may call what is imported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Callers {
    /// The user that runs this program, and root.
    #[default]
    Owner,
    /// Every user of this machine.
    Everybody,
}

/// Tells the fabrics of several machines which member is where, and passes calls on between them.
#[derive(Debug, Parser)]
#[command(name = "tombolo-span", version, after_help = AFTER)]
pub struct Args {
    /// TOML file with the other settings: fabric, machine, listen, peer, keys, no_tls, site, lease,
    /// router, export, import, callers; flags win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only read and check the settings and the keys; start nothing
    #[arg(long)]
    pub check: bool,
    /// Only print the settings of the first router, for zenohd; start nothing
    #[arg(long)]
    pub router_config: bool,
    /// Name of this machine's fabric
    #[arg(long, value_name = "NAME", env = "TOMBOLO_FABRIC", hide_env_values = true, required_unless_present = "config", value_parser = name)]
    fabric: Option<String>,
    /// Name of this machine, as in its certificate
    #[arg(long, value_name = "NAME", required_unless_present = "config", value_parser = name)]
    machine: Option<String>,
    /// Address and port at which the other machines reach this one; not with --router
    #[arg(long, value_name = "ADDRESS:PORT", required_unless_present_any = ["config", "routers"])]
    listen: Option<SocketAddr>,
    /// Another machine, and where its tombolo-span listens (with --router only its name); once for
    /// each, instead of those of the file
    #[arg(long = "peer", value_name = "MACHINE=ADDRESS:PORT", required_unless_present = "config", value_parser = peer)]
    peers: Vec<Peer>,
    /// Router of zenoh that all machines connect to, since they do not reach each other; more than
    /// one is used in turn
    #[arg(long = "router", value_name = "MACHINE=ADDRESS:PORT", value_parser = router)]
    routers: Vec<Peer>,
    /// Service of this machine that all other machines may call, or those that are named; once for
    /// each
    #[arg(long = "export", value_name = "SERVICE[=MACHINE,…]", value_parser = export)]
    exports: Vec<SharedService>,
    /// Service of other machines that can be called here, and the machines that have it; once for
    /// each
    #[arg(long = "import", value_name = "SERVICE=MACHINE,…", value_parser = import)]
    imports: Vec<SharedService>,
    /// Who may call what is imported [default: owner]
    #[arg(long, value_name = "WHO", value_enum)]
    callers: Option<Callers>,
    /// Folder with ca.pem, MACHINE.pem and MACHINE.key
    #[arg(long, value_name = "FOLDER", required_unless_present_any = ["no_tls", "config"], conflicts_with = "no_tls")]
    keys: Option<PathBuf>,
    /// Encrypt nothing, and believe each machine's name: only where everyone is trusted
    #[arg(long)]
    no_tls: bool,
    /// Name that all these machines have in common [default: default]
    #[arg(long, value_name = "NAME", value_parser = name)]
    site: Option<String>,
    /// Seconds after which a machine that is not heard is forgotten [default: 15]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(5..=3600))]
    lease: Option<u64>,
    /// Print completions for a shell
    #[arg(long, value_name = "SHELL", hide = true, exclusive = true)]
    pub completions: Option<Shell>,
}

/// All settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// This machine's fabric.
    pub fabric: String,
    /// This machine.
    pub machine: String,
    /// Where it listens; `None` where there is a router.
    pub listen: Option<SocketAddr>,
    /// The other machines.
    pub peers: Vec<Peer>,
    /// Routers that connect them.
    pub routers: Vec<Peer>,
    /// Services of this machine that others may call.
    pub exports: Vec<SharedService>,
    /// Services of others that can be called here.
    pub imports: Vec<SharedService>,
    /// By whom.
    pub callers: Callers,
    /// The folder of keys; `None`: nothing is encrypted.
    pub keys: Option<PathBuf>,
    /// What the machines have in common.
    pub site: String,
    /// Seconds after which a machine is forgotten.
    pub lease: u64,
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The settings together, one fault a line.
    #[error("{}", listed(.0))]
    Faulty(Vec<String>),
}

/// Faults, one a line, and what came of them.
pub fn listed(faults: &[String]) -> String {
    let s = if faults.len() == 1 { "" } else { "s" };
    format!("{}\n{} fault{s} in the settings; nothing was started", faults.join("\n"), faults.len())
}

/// Reads a name.
///
/// # Errors
/// The text is none.
pub fn name(text: &str) -> Result<String, String> {
    if is_name(text) { Ok(text.into()) } else { Err(format!("expected {NAME}, found \"{text}\"")) }
}

/// Reads another machine.
///
/// # Errors
/// The text is none.
pub fn peer(text: &str) -> Result<Peer, String> {
    let wrong = || format!("expected {PEER}, found \"{text}\"");
    let Some((machine, address)) = text.split_once('=') else {
        return Ok(Peer { name: name(text).map_err(|_| wrong())?, address: None });
    };
    Ok(Peer { name: name(machine)?, address: Some(address.parse().map_err(|_| wrong())?) })
}

/// Reads a router.
///
/// # Errors
/// The text is none.
pub fn router(text: &str) -> Result<Peer, String> {
    let found = peer(text).ok().filter(|router| router.address.is_some());
    found.ok_or_else(|| format!("expected {ROUTER}, found \"{text}\""))
}

fn shared(text: &str) -> Option<SharedService> {
    let (service, machines) = match text.split_once('=') {
        Some((service, machines)) => (service, machines.split(',').map(|machine| name(machine).ok()).collect()),
        None => (text, Some(Vec::new())),
    };
    folder::socket_path(Path::new(""), service).ok()?;
    Some(SharedService { service: service.into(), machines: machines? })
}

/// Reads what is exported.
///
/// # Errors
/// The text is none of that.
pub fn export(text: &str) -> Result<SharedService, String> {
    shared(text).ok_or_else(|| format!("expected {EXPORT}, found \"{text}\""))
}

/// Reads what is imported.
///
/// # Errors
/// The text is none of that.
pub fn import(text: &str) -> Result<SharedService, String> {
    let found = shared(text).filter(|import| !import.machines.is_empty());
    found.ok_or_else(|| format!("expected {IMPORT}, found \"{text}\""))
}

/// The flag, or what the file says.
fn either<T>(flag: Option<T>, name: &str, file: Option<Said<T>>) -> Option<Said<T>> {
    flag.map(|value| Said { value, at: format!("--{name}") }).or(file)
}

/// A list of flags, or the list of the file.
fn lists<T: std::fmt::Display>(flags: Vec<T>, name: &str, file: Option<Vec<Said<T>>>) -> Vec<Said<T>> {
    let flags: Vec<_> = flags.into_iter().map(|value| Said { at: format!("--{name} {value}"), value }).collect();
    if flags.is_empty() { file.unwrap_or_default() } else { flags }
}

impl Args {
    /// The settings that flags and file give.
    ///
    /// # Errors
    /// [`OptionsError`]: every fault of the file, or of what the settings mean together.
    pub fn options(self) -> Result<Options, OptionsError> {
        let file = self.config.as_deref().map(file::read).transpose()?.unwrap_or_default();
        let config = self.config.clone().unwrap_or_default();
        self.merged(file, &config)
    }

    fn merged(self, file: File, path: &Path) -> Result<Options, OptionsError> {
        let mut faults = Vec::new();
        let mut missing = |key: &str, expected: &str| {
            let path = path.display();
            faults.push(format!("{path}: {key}: expected {expected}, found nothing; add {key} = …, or give --{key}"));
        };
        let fabric = either(self.fabric, "fabric", file.fabric);
        let machine = either(self.machine, "machine", file.machine);
        let listen = either(self.listen, "listen", file.listen);
        // Flags replace the whole list.
        let peers = lists(self.peers, "peer", file.peer);
        let routers = lists(self.routers, "router", file.router);
        let exports = lists(self.exports, "export", file.export);
        let imports = lists(self.imports, "import", file.import);
        let (keys, no_tls) = match (self.keys, self.no_tls) {
            (None, false) => (file.keys, file.no_tls.filter(|no_tls| no_tls.value)),
            (keys, no_tls) => {
                let no_tls = no_tls.then(|| Said { value: true, at: "--no-tls".into() });
                (either(keys, "keys", None), no_tls)
            }
        };
        if fabric.is_none() {
            missing("fabric", "the name of this machine's fabric");
        }
        if machine.is_none() {
            missing("machine", "the name of this machine, as in its certificate");
        }
        if listen.is_none() && routers.is_empty() {
            missing("listen", "the address and port at which the other machines reach this one, or a router");
        }
        if peers.is_empty() {
            missing("peer", "the other machines");
        }
        match (&keys, &no_tls) {
            (None, None) => missing("keys", "a folder of keys, or no_tls = true"),
            (Some(keys), Some(_)) => faults
                .push(format!("{}: expected no keys with no_tls = true, found some; leave one of them out", keys.at)),
            _ => {}
        }
        if let (Some(Said { value, at }), false) = (&listen, routers.is_empty()) {
            faults.push(format!(
                "{at}: expected nothing where there is a router, since all connections go to it, found {value}"
            ));
        } else if let Some(Said { value, at }) = &listen
            && (value.ip().is_unspecified() || value.port() == 0)
        {
            faults
                .push(format!("{at}: expected an address and a port that the other machines can reach, found {value}"));
        }
        for (number, Said { value, at }) in peers.iter().enumerate() {
            let is_at = |other: Option<SocketAddr>| other.is_some() && other == value.address;
            let is_same = |other: &Said<Peer>| other.value.name == value.name || is_at(other.value.address);
            let is_here = machine.as_ref().is_some_and(|machine| machine.value == value.name)
                || is_at(listen.as_ref().map(|listen| listen.value));
            if is_here || peers[..number].iter().any(is_same) {
                faults.push(format!("{at}: expected each other machine once, and not this one, found {value}"));
            } else if routers.is_empty() && value.address.is_none() {
                faults.push(format!("{at}: expected {PEER}, found \"{value}\" and no router"));
            } else if !routers.is_empty() && value.address.is_some() {
                faults.push(format!(
                    "{at}: expected the machine's name alone, since all connections go to the router, found {value}"
                ));
            }
        }
        for Said { value, at } in &routers {
            let is = |other: &String| *other == value.name;
            if machine.as_ref().is_some_and(|machine| is(&machine.value))
                || peers.iter().any(|peer| is(&peer.value.name))
            {
                // Its certificate would be a machine's, which may call services.
                faults.push(format!("{at}: expected a name that no machine has, found {value}"));
            }
        }
        for list in [&exports, &imports] {
            for (number, Said { value, at }) in list.iter().enumerate() {
                let is_peer = |machine: &&String| peers.iter().any(|peer| peer.value.name == **machine);
                if let Some(stranger) = value.machines.iter().find(|machine| !is_peer(machine)) {
                    faults.push(format!("{at}: expected machines that peer names, found {stranger}"));
                } else if list[..number].iter().any(|other| other.value.service == value.service) {
                    faults.push(format!("{at}: expected each service once, found {} again", value.service));
                }
            }
        }
        for Said { value, at } in &imports {
            if exports.iter().any(|export| export.value.service == value.service) {
                faults.push(format!(
                    "{at}: expected a service that this machine does not export, found {}",
                    value.service
                ));
            }
        }
        if let (Some(_), Some(first)) = (&no_tls, exports.iter().find(|export| !export.value.machines.is_empty())) {
            faults.push(format!(
                "{}: expected no machines with no_tls = true, since none proves its name, found {}",
                first.at, first.value
            ));
        }
        let most = tombolo_span::control::MAX_MACHINES - 1;
        if let Some(first) = peers.get(most) {
            faults.push(format!("{}: expected at most {most} machines, found {}", first.at, peers.len()));
        }
        match (fabric, machine) {
            (Some(fabric), Some(machine)) if faults.is_empty() => Ok(Options {
                fabric: fabric.value,
                machine: machine.value,
                listen: listen.map(|listen| listen.value),
                peers: peers.into_iter().map(|peer| peer.value).collect(),
                routers: routers.into_iter().map(|router| router.value).collect(),
                exports: exports.into_iter().map(|export| export.value).collect(),
                imports: imports.into_iter().map(|import| import.value).collect(),
                callers: self.callers.or(file.callers.map(|callers| callers.value)).unwrap_or_default(),
                keys: keys.map(|keys| keys.value),
                site: self.site.or(file.site.map(|site| site.value)).unwrap_or_else(|| DEFAULT_SITE.into()),
                lease: self.lease.or(file.lease.map(|lease| lease.value)).unwrap_or(DEFAULT_LEASE_S),
            }),
            _ => Err(OptionsError::Faulty(faults)),
        }
    }
}

impl Options {
    /// How this machine connects to the others.
    pub fn carriage(&self) -> Carriage<'_> {
        Carriage {
            site: &self.site,
            machine: &self.machine,
            listen: self.listen,
            peers: &self.peers,
            routers: &self.routers,
            keys: self.keys.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 7] = ["tombolo-span", "--fabric", "demo", "--machine", "a", "--listen", "192.0.2.1:7447"];

    fn args(more: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from(ALL.iter().chain(more))
    }

    fn with_file(text: &str, more: &[&str]) -> Result<Options, OptionsError> {
        let folder =
            std::env::temp_dir().join(format!("tombolo-span-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("home.span.toml");
        std::fs::write(&path, text).unwrap();
        let line = ["tombolo-span", "--config", path.to_str().unwrap()];
        let options = Args::try_parse_from(line.iter().chain(more)).unwrap().options();
        std::fs::remove_dir_all(&folder).unwrap();
        options
    }

    #[test]
    fn what_cannot_work_is_said_before_anything_starts() {
        let fine = args(&["--peer", "b=192.0.2.2:7447", "--no-tls"]).unwrap().options().unwrap();
        assert_eq!((fine.site.as_str(), fine.lease), ("default", 15));
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
            let error = args(&more).unwrap().options().unwrap_err().to_string();
            assert!(error.starts_with("--peer ") && error.contains("1 fault in the settings"), "{error}");
        }
    }

    const FILE: &str = "fabric = \"home\"\nmachine = \"node-1\"\nlisten = \"192.0.2.1:7447\"\n\
        peer = [\"node-2=192.0.2.2:7447\", \"node-3=192.0.2.3:7447\"]\nkeys = \"keys\"\nsite = \"lab\"\nlease = 20\n";

    #[test]
    fn a_flag_wins_over_the_file() {
        let of_file = with_file(FILE, &[]).unwrap();
        assert_eq!((of_file.fabric.as_str(), of_file.site.as_str(), of_file.lease), ("home", "lab", 20));
        assert!(of_file.keys.as_ref().unwrap().ends_with("keys") && of_file.keys.unwrap().is_absolute());
        let flags = ["--fabric", "f", "--machine", "m", "--listen", "192.0.2.9:1", "--peer", "p=192.0.2.8:1"];
        let flags = flags.into_iter().chain(["--no-tls", "--site", "s", "--lease", "5"]).collect::<Vec<_>>();
        // No machine proves its name without TLS.
        let named = flags.iter().copied().chain(["--export", "calc=p"]).collect::<Vec<_>>();
        assert!(with_file(FILE, &named).unwrap_err().to_string().contains("none proves its name, found calc=p"));
        let flags = flags
            .into_iter()
            .chain(["--export", "calc", "--import", "time=p", "--callers", "everybody"])
            .collect::<Vec<_>>();
        let expected = Options {
            fabric: "f".into(),
            machine: "m".into(),
            listen: Some("192.0.2.9:1".parse().unwrap()),
            peers: vec![peer("p=192.0.2.8:1").unwrap()],
            routers: vec![],
            exports: vec![export("calc").unwrap()],
            imports: vec![import("time=p").unwrap()],
            callers: Callers::Everybody,
            keys: None,
            site: "s".into(),
            lease: 5,
        };
        assert_eq!(with_file(FILE, &flags).unwrap(), expected);
        assert_eq!(with_file("no_tls = true\n", &["--keys", "k"]).unwrap_err().to_string().matches("keys").count(), 0);
    }

    #[test]
    fn what_the_file_leaves_out_or_contradicts_is_said_with_its_place() {
        let error = with_file("", &[]).unwrap_err().to_string();
        for key in ["fabric", "machine", "listen", "peer", "keys"] {
            let hint = format!("found nothing; add {key} = …, or give --{key}");
            assert!(error.contains(&format!("home.span.toml: {key}: expected ")) && error.contains(&hint), "{error}");
        }
        assert!(error.ends_with("5 faults in the settings; nothing was started"), "{error}");
        let text = FILE.replace("node-3=192.0.2.3", "node-1=192.0.2.3").replace("192.0.2.1:7447", "0.0.0.0:7447")
            + "no_tls = true\n";
        let error = with_file(&text, &[]).unwrap_err().to_string();
        for part in [
            "home.span.toml:3:10: listen: expected an address and a port that the other machines can reach, found 0.0.0.0:7447",
            "home.span.toml:4:34: peer: expected each other machine once, and not this one, found node-1=192.0.2.3:7447",
            "home.span.toml:5:8: keys: expected no keys with no_tls = true",
        ] {
            assert!(error.contains(part), "{error}: no {part}");
        }
        // What a flag replaces is no fault of the file.
        let fine = with_file(&text, &["--listen", "192.0.2.1:7447", "--peer", "node-2=192.0.2.2:7447", "--no-tls"]);
        assert_eq!(fine.unwrap().keys, None);
    }

    #[test]
    fn with_a_router_machines_have_names_alone_and_listen_nowhere() {
        let router = ["--router", "hub=192.0.2.9:7447", "--no-tls"];
        let line = |more: &[&str]| {
            let base = ["tombolo-span", "--fabric", "demo", "--machine", "a"];
            Args::try_parse_from(base.iter().chain(&router).chain(more)).unwrap().options()
        };
        let fine = line(&["--peer", "b", "--peer", "c", "--import", "calc=b,c"]).unwrap();
        assert_eq!((fine.listen, fine.routers.len(), fine.peers.len()), (None, 1, 2));
        assert_eq!(fine.imports[0].machines, ["b", "c"]);
        for (more, fault) in [
            (&["--peer", "b=192.0.2.2:1"][..], "--peer b=192.0.2.2:1: expected the machine's name alone"),
            (&["--peer", "b", "--listen", "192.0.2.1:1"], "--listen: expected nothing where there is a router"),
            (&["--peer", "hub"], "--router hub=192.0.2.9:7447: expected a name that no machine has"),
            (&["--peer", "b", "--peer", "b"], "--peer b: expected each other machine once"),
            (&["--peer", "b", "--import", "calc=c"], "--import calc=c: expected machines that peer names, found c"),
            (&["--peer", "b", "--export", "x", "--export", "x"], "--export x: expected each service once"),
            (
                &["--peer", "b", "--export", "x", "--import", "x=b"],
                "expected a service that this machine does not export",
            ),
        ] {
            let error = line(more).unwrap_err().to_string();
            assert!(error.contains(fault), "{error}: no {fault}");
        }
        let alone = args(&["--peer", "b", "--no-tls"]).unwrap().options().unwrap_err().to_string();
        assert!(alone.contains("found \"b\" and no router"), "{alone}");
    }
}
