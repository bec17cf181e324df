//! `tombolo machine-bridge`: what a daemon starts for an `[export.NAME]` or `[import.NAME]`; not
//! for people, who have `tombolo service export` and `import`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use tombolo_host::bridge::{Direction, MachinesSpec};
use tombolo_host::file;

use crate::exit::{Exit, Failure};
use crate::machines::PickName;

#[derive(Args, Debug)]
pub(crate) struct MachineBridge {
    /// Marks the process as one of the fabric's
    mark: PathBuf,
    /// Services that cross
    #[arg(long = "service", required = true, allow_hyphen_values = true)]
    services: Vec<String>,
    /// Where an export listens
    #[arg(long, required_unless_present = "from")]
    listen: Option<SocketAddr>,
    /// Machines that may use it
    #[arg(long, allow_hyphen_values = true)]
    allow: Vec<String>,
    /// Machines that an import connects to
    #[arg(long)]
    from: Vec<String>,
    /// The name of what is imported here
    #[arg(long = "as", default_value = "", allow_hyphen_values = true)]
    name: String,
    /// Which machine a call goes to
    #[arg(long, default_value = "nearest")]
    pick: PickName,
    /// Every user may call
    #[arg(long)]
    everybody: bool,
    /// This machine
    #[arg(long, requires = "keys")]
    machine: Option<String>,
    /// Its keys
    #[arg(long, requires = "machine")]
    keys: Option<PathBuf>,
    /// Of its keys' bytes: for the daemon, which compares the arguments
    #[arg(long, value_name = "HEX", default_value_t = 0, value_parser = digest)]
    keys_digest: u64,
}

fn digest(text: &str) -> Result<u64, std::num::ParseIntError> {
    u64::from_str_radix(text, 16)
}

impl MachineBridge {
    pub(crate) fn run(self) -> Result<Exit, Failure> {
        Err(Failure::failed(self.spec().run()))
    }

    fn spec(self) -> MachinesSpec {
        let digest = self.keys_digest;
        let proof = self.machine.zip(self.keys).map(|(machine, keys)| file::Proof { machine, keys, digest });
        // The section's name is in the mark only.
        let name = String::new();
        let direction = match self.listen {
            Some(listen) => {
                Direction::Export(file::Export { name, services: self.services, listen, proof, allow: self.allow })
            }
            None => Direction::Import(file::Import {
                name,
                service: self.services.into_iter().next().unwrap_or_default(),
                as_name: self.name,
                from: self
                    .from
                    .iter()
                    .filter_map(|text| text.split_once('='))
                    .map(|(m, a)| (m.into(), a.into()))
                    .collect(),
                proof,
                pick: self.pick.into(),
                everybody: self.everybody,
            }),
        };
        MachinesSpec { mark: self.mark, direction }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tombolo_host::bridge::{LinkSpec, Spec};
    use tombolo_remote::machine::Pick;

    use super::*;
    use crate::link_bridge::LinkBridge;

    #[derive(Parser)]
    enum Bridge {
        MachineBridge(MachineBridge),
        LinkBridge(LinkBridge),
    }

    #[test]
    fn a_bridge_gets_each_setting_from_its_arguments_also_names_that_look_like_flags() {
        let proof = Some(file::Proof { machine: "a".into(), keys: "/keys".into(), digest: 0xfe << 56 | 7 });
        let export = |proof| file::Export {
            name: String::new(),
            services: vec!["-a".into(), "--everybody".into(), "--".into()],
            listen: ([192, 0, 2, 1], 7000).into(),
            proof,
            allow: vec!["b".into(), "c".into()],
        };
        let import = |proof| file::Import {
            name: String::new(),
            service: "-a".into(),
            as_name: "--pick".into(),
            from: vec![("b".into(), "192.0.2.2:7000".into()), ("c".into(), "[2001:db8::1]:7000".into())],
            proof,
            pick: Pick::Sticky,
            everybody: true,
        };
        let ways = [
            Direction::Export(export(proof.clone())),
            Direction::Export(export(None)),
            Direction::Import(import(proof)),
            Direction::Import(import(None)),
        ];
        let machines = ways.map(|direction| Spec::Machines(MachinesSpec { mark: "/run/t/x.export".into(), direction }));
        let (service, to) = (Some("-a".to_string()), Some("--as".to_string()));
        let link = LinkSpec { socket: "/run/t/a.link.sock".into(), service, to, everybody: true };
        for spec in machines.into_iter().chain([Spec::Link(link)]) {
            let words = spec.words();
            let parsed = Bridge::try_parse_from(["tombolo".to_string()].iter().chain(&words));
            let found = match parsed.unwrap_or_else(|error| panic!("{words:?}: {error}")) {
                Bridge::MachineBridge(bridge) => Spec::Machines(bridge.spec()),
                Bridge::LinkBridge(bridge) => Spec::Link(bridge.spec()),
            };
            assert_eq!(found, spec);
        }
    }
}
