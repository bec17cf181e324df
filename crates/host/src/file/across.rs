//! `[export.NAME]` and `[import.NAME]`: services that cross to other machines.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tombolo_remote::machine::{Pick, keys};
use toml::de::{DeTable, DeValue};

use super::hosts::{Here, Hosts};
use super::parse::words::{listener, near_listener};
use super::read::Section;

/// How a machine proves who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// Its name.
    pub machine: String,
    /// The folder with `ca.pem`, `MACHINE.pem` and `MACHINE.key`.
    pub keys: PathBuf,
    /// Of the bytes of these files when the section was read, so that other keys in the same folder
    /// are a change. 0 where one of them cannot be read.
    pub digest: u64,
}

/// Services of this machine that others may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// The NAME in `[export.NAME]`, unique in the file.
    pub name: String,
    /// The services' names here.
    pub services: Vec<String>,
    /// Where this machine listens.
    pub listen: SocketAddr,
    /// `None`: no TLS.
    pub proof: Option<Proof>,
    /// The machines that may use them; empty for each one of the authority.
    pub allow: Vec<String>,
}

/// A service of other machines that is one of this machine too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// The NAME in `[import.NAME]`, unique in the file.
    pub name: String,
    /// Its name at the machines that export it.
    pub service: String,
    /// Its name here.
    pub as_name: String,
    /// The machines: name, and address with port. Without TLS the name is the address.
    pub from: Vec<(String, String)>,
    /// `None`: no TLS.
    pub proof: Option<Proof>,
    /// Which machine a call goes to.
    pub pick: Pick,
    /// Every user of this machine may call it, not only the fabric's.
    pub everybody: bool,
}

/// The words of `pick`.
pub(super) const PICKS: [(&str, Pick); 3] =
    [("nearest", Pick::Nearest), ("least-loaded", Pick::LeastLoaded), ("sticky", Pick::Sticky)];

/// The word of a rule.
pub fn pick_word(pick: Pick) -> &'static str {
    PICKS.iter().find(|(_, known)| *known == pick).map_or("nearest", |(word, _)| word)
}

/// A service's name.
pub(super) fn service_name(text: &str) -> Option<String> {
    tombolo_rpc::folder::socket_path(Path::new(""), text).is_ok().then(|| text.to_string())
}

fn machine_name(text: &str) -> Option<String> {
    keys::is_machine_name(text).then(|| text.to_string())
}

/// An address or name, and a port.
fn place(text: &str) -> Option<String> {
    let (host, port) = text.rsplit_once(':')?;
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    (!host.is_empty() && !host.contains('=') && is_port).then(|| text.to_string())
}

/// Longest key file that is looked at, in bytes.
const KEY_FILE_MOST: u64 = 1 << 20;

/// Of the bytes of a machine's key files; 0 where one cannot be read, or is no file.
fn digest(folder: &Path, machine: &str) -> u64 {
    let files = keys::KeyFiles::of(folder, machine);
    let read = |path: &Path| {
        // Opening a FIFO would wait for its other end.
        path.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(KEY_FILE_MOST).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    };
    let mut hasher = DefaultHasher::new();
    for path in [&files.ca, &files.certificate, &files.key] {
        let Some(bytes) = read(path) else { return 0 };
        hasher.write_usize(bytes.len());
        hasher.write(&bytes);
    }
    hasher.finish()
}

/// The machine's name is that of its section, and its keys are those of `[span]`, where the section
/// says nothing else.
fn proof(s: &mut Section<'_, '_, '_, '_>, dir: &Path, here: Option<&Here>) -> Option<Proof> {
    let tls = s.flag("tls").unwrap_or(true);
    s.applies("tls", Some(if tls { "true" } else { "false" }));
    let machine = s.text("machine", machine_name);
    let keys = s.text("keys", |text| (!text.is_empty()).then(|| dir.join(text)));
    if !tls {
        return None;
    }
    let machine_here = here.map(|here| here.host.name.clone());
    let keys_here = here.and_then(|here| here.span.as_ref()?.keys.clone());
    for (key, is_known) in [("machine", machine_here.is_some()), ("keys", keys_here.is_some())] {
        if s.raw(key).is_none() && !is_known {
            s.missing(key);
        }
    }
    let (machine, keys) = (machine.or(machine_here), keys.or(keys_here));
    // With a fault the file is not used.
    let digest = keys.as_deref().zip(machine.as_deref()).map_or(0, |(keys, machine)| digest(keys, machine));
    Some(Proof { machine: machine.unwrap_or_default(), keys: keys.unwrap_or_default(), digest })
}

/// The machines that export a service, by its name: their names, and where they listen for the
/// others.
pub(super) type Exporters = HashMap<String, Vec<(String, String)>>;

/// Those of a file for several machines.
pub(super) fn exporters(root: &DeTable<'_>, hosts: &Hosts) -> Exporters {
    let mut out = Exporters::new();
    let sections = root.get("export").and_then(|value| value.get_ref().as_table());
    for (name, table) in sections.into_iter().flatten() {
        let Some(table) = table.get_ref().as_table() else { continue };
        let listen = table.get("listen").and_then(|value| listener(value.get_ref().as_str()?));
        let services: Vec<&str> = match table.get("services").map(|value| value.get_ref()) {
            Some(DeValue::Array(list)) => list.iter().filter_map(|item| item.get_ref().as_str()).collect(),
            Some(one) => one.as_str().into_iter().collect(),
            None => vec![name.get_ref()],
        };
        let Some(listen) = listen else { continue };
        for (index, host) in hosts.list.iter().enumerate() {
            if !hosts.has(index, &format!("export.{}", name.get_ref())) {
                continue;
            }
            let ip = if listen.ip().is_unspecified() { host.address } else { listen.ip() };
            let at = (host.name.clone(), SocketAddr::new(ip, listen.port()).to_string());
            services.iter().for_each(|service| out.entry(service.to_string()).or_default().push(at.clone()));
        }
    }
    out
}

pub(super) fn export(s: &mut Section<'_, '_, '_, '_>, name: String, dir: &Path, here: Option<&Here>) -> Export {
    let services = s.list("services", true, service_name);
    if let Some((_, span)) = s.raw("services").filter(|_| services.as_ref().is_some_and(Vec::is_empty)) {
        s.wrong("services", &span, "an empty list", None);
    }
    let listen = s.text_or("listen", listener, near_listener);
    if s.raw("listen").is_none() {
        s.missing("listen");
    }
    Export {
        services: services.unwrap_or_else(|| vec![name.clone()]),
        listen: listen.unwrap_or_else(|| ([0, 0, 0, 0], 0).into()),
        proof: proof(s, dir, here),
        allow: s.list("allow", true, machine_name).unwrap_or_default(),
        name,
    }
}

pub(super) fn import(
    s: &mut Section<'_, '_, '_, '_>,
    name: String,
    dir: &Path,
    here: Option<&Here>,
    exporters: &Exporters,
) -> Import {
    let proof = proof(s, dir, here);
    let of_machine = |text: &str| match text.split_once('=') {
        Some((machine, address)) => Some((machine_name(machine)?, place(address)?)),
        // Without TLS the address alone is enough: no name is proven.
        None if proof.is_none() => place(text).map(|place| (place.clone(), place)),
        None => None,
    };
    let mut from = s.list("from", true, of_machine);
    let service = s.text("service", service_name).unwrap_or_else(|| name.clone());
    match s.raw("from") {
        None => {
            from = exporters.get(&service).cloned();
            if from.is_none() {
                s.missing("from");
            }
        }
        Some((_, span)) if from.as_ref().is_some_and(Vec::is_empty) => s.wrong("from", &span, "an empty list", None),
        Some(_) => {}
    }
    Import {
        as_name: s.text("as", service_name).unwrap_or_else(|| service.clone()),
        from: from.unwrap_or_default(),
        pick: s.word("pick", &PICKS).unwrap_or_default(),
        everybody: s.word("callers", &[("owner", false), ("everybody", true)]).unwrap_or(false),
        service,
        proof,
        name,
    }
}
