//! `tombolo service keys`, `export` and `import`: services that one machine offers to others.

use std::net::{TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use tombolo_remote::machine::keys::{self, Identity, KeyError, KeyFiles};
use tombolo_remote::machine::{Export, Import, ImportEvent, Offer, Pick, Remote, Tcp, told};
use tombolo_rpc::folder;
use tombolo_rpc::provider::Access;

use crate::exit::{Exit, Failure};
use crate::out;

#[derive(Args, Debug)]
pub(crate) struct Keys {
    /// Names of machines: 1 to 63 of a-z 0-9 and -
    #[arg(required = true, value_name = "MACHINE")]
    machines: Vec<String>,
    /// Folder for the keys; with a ca.key there, machines are added to those that trust it
    #[arg(long, value_name = "FOLDER")]
    keys: PathBuf,
}

/// How a machine proves who it is.
#[derive(Args, Debug)]
struct Proof {
    /// Folder with ca.pem and this machine's .pem and .key (tombolo service keys)
    #[arg(long, value_name = "FOLDER", requires = "machine", required_unless_present = "no_tls")]
    keys: Option<PathBuf>,
    /// This machine's name
    #[arg(long, value_name = "MACHINE", requires = "keys")]
    machine: Option<String>,
    /// No encryption and no proof of who calls, for networks where everybody is trusted
    #[arg(long, conflicts_with = "keys")]
    no_tls: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ExportCommand {
    /// Names of services of this machine. They need not run yet
    #[arg(required = true, value_name = "NAME")]
    services: Vec<String>,
    /// Address and port to listen at
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: String,
    #[command(flatten)]
    proof: Proof,
    /// Machine that may use them [default: every machine with a key of the same authority]
    #[arg(long, value_name = "MACHINE", conflicts_with = "no_tls")]
    allow: Vec<String>,
    /// Most requests of one connection that are served at a time
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Most connections at a time
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PickName {
    /// The machine with the shortest round trip
    Nearest,
    /// The machine with the fewest calls from here under way
    LeastLoaded,
    /// The first one of the list that is there, until it goes
    Sticky,
}

impl From<PickName> for Pick {
    fn from(name: PickName) -> Pick {
        match name {
            PickName::Nearest => Pick::Nearest,
            PickName::LeastLoaded => Pick::LeastLoaded,
            PickName::Sticky => Pick::Sticky,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct ImportCommand {
    /// Name of the service at the machines that export it
    service: String,
    /// A machine that exports it: its name and where it listens; without TLS the address alone
    #[arg(long, required = true, value_name = "MACHINE=ADDRESS:PORT")]
    from: Vec<String>,
    #[command(flatten)]
    proof: Proof,
    /// Name of the service here [default: the same]
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,
    /// Which machine a call goes to, of several
    #[arg(long, value_name = "RULE", default_value = "nearest")]
    pick: PickName,
    /// Most calls passed on at a time
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Let anyone who can reach the folder of services call, not only the owner
    #[arg(long)]
    everybody: bool,
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        match error {
            error @ KeyError::Name(_) => Failure::misused(error.to_string()),
            error => Failure::failed(error.to_string()),
        }
    }
}

impl Keys {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        keys::make(&self.keys, &self.machines)?;
        let folder = self.keys.display();
        out::tell!(
            "tombolo: keys of {} are in {folder}. Each machine needs {folder}/ca.pem and its own .pem and .key; keep \
             {folder}/ca.key here, since its owner can be any machine",
            self.machines.join(", ")
        );
        Ok(Exit::Done)
    }
}

impl Proof {
    fn identity(&self) -> Result<Option<Identity>, Failure> {
        let (Some(keys), Some(machine)) = (&self.keys, &self.machine) else { return Ok(None) };
        if !keys::is_machine_name(machine) {
            return Err(KeyError::Name(machine.clone()).into());
        }
        Ok(Some(Identity::load(&KeyFiles::of(keys, machine))?))
    }
}

/// Waits for the end, which is a signal.
fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

fn checked(name: &str) -> Result<(), Failure> {
    let services = folder::services()?;
    folder::socket_path(&services, name).map(|_| ()).map_err(|error| Failure::misused(error.to_string()))
}

impl ExportCommand {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let Self { services, listen, proof, allow, workers, connections } = self;
        services.iter().try_for_each(|name| checked(name))?;
        if let Some(bad) = allow.iter().find(|name| !keys::is_machine_name(name)) {
            return Err(KeyError::Name(bad.clone()).into());
        }
        let identity = proof.identity()?;
        let misused = |error| {
            Failure::misused(format!(
                "--listen {listen}: {error}; expected an address and a port, such as 0.0.0.0:7000"
            ))
        };
        let addresses: Vec<_> = listen.to_socket_addrs().map_err(misused)?.collect();
        let failed = |error| Failure::failed(format!("listening at {listen}: {error}"));
        let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let offer = |service: &String| Offer { service: service.clone(), allow: allow.clone() };
        let export = Export {
            offers: services.iter().map(offer).collect(),
            workers: *workers,
            connections: *connections as usize,
            folder: None,
        };
        let _exporter = export.start(&Tcp::at(listener), identity, told(|text| out::tell!("tombolo: {text}")))?;
        out::tell!("tombolo: {} at {address}", services.join(", "));
        forever()
    }
}

impl ImportCommand {
    fn remotes(&self) -> Result<Vec<Remote>, Failure> {
        let remote = |text: &String| match text.split_once('=') {
            Some((machine, address)) if keys::is_machine_name(machine) => {
                Ok(Remote { machine: machine.into(), address: address.into() })
            }
            Some((machine, _)) => Err(Failure::from(KeyError::Name(machine.into()))),
            None if self.proof.no_tls => Ok(Remote { machine: text.clone(), address: text.clone() }),
            None => Err(Failure::misused(format!(
                "--from {text}: expected MACHINE=ADDRESS:PORT, such as node-2=192.0.2.7:7000; the machine's name is what \
                 its key proves"
            ))),
        };
        let remotes: Vec<Remote> = self.from.iter().map(remote).collect::<Result<_, _>>()?;
        for (at, remote) in remotes.iter().enumerate() {
            let has_port = remote
                .address
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
            if !has_port {
                return Err(Failure::misused(format!(
                    "--from {}: expected an address or name and a port, such as 192.0.2.7:7000",
                    remote.address
                )));
            }
            if remotes[..at].iter().any(|other| other.address == remote.address) {
                return Err(Failure::misused(format!("--from: {} is named twice", remote.address)));
            }
        }
        Ok(remotes)
    }

    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let name = self.name.as_ref().unwrap_or(&self.service);
        checked(&self.service)?;
        checked(name)?;
        let services = folder::services()?;
        folder::make(&services).map_err(|error| Failure::failed(format!("making {}: {error}", services.display())))?;
        let import = Import {
            service: self.service.clone(),
            name: name.clone(),
            remotes: self.remotes()?,
            pick: self.pick.into(),
            workers: self.workers,
            access: Access { everybody: self.everybody, ..Access::default() },
            folder: None,
        };
        let service = name.clone();
        let importer = import.start(Arc::new(Tcp::default()), self.proof.identity()?, move |event| match event {
            ImportEvent::Registered => out::tell!("tombolo: service {service} is registered"),
            event => out::tell!("tombolo: {event}"),
        });
        let _importer = importer?;
        forever()
    }
}
