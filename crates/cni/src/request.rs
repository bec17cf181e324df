//! What a container runtime asks for: the environment and the configuration on standard input.
//!
//! Both are hostile: each value is checked before anything is made, and every length has a limit.
//! What passes here can be written into a section of a fabric file as it is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::CniError;

/// Longest configuration that is read. With the results of other plugins they are a few kilobytes;
/// a list of attachments for GC has about 100 bytes for each.
pub(crate) const MAX_INPUT_BYTES: u64 = 8 << 20;
/// Longest value of a variable.
const MAX_VARIABLE_BYTES: usize = 4096;
/// Longest name of a network and ID of a container; file names of runtimes end at 255 bytes.
const MAX_NAME_BYTES: usize = 180;
/// Most port mappings of a container.
const MAX_MAPPINGS: usize = 256;

/// Versions, the oldest first.
pub(crate) const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

impl Command {
    pub(crate) fn parse(word: Option<&str>) -> Result<Command, CniError> {
        match word {
            Some("ADD") => Ok(Command::Add),
            Some("DEL") => Ok(Command::Del),
            Some("CHECK") => Ok(Command::Check),
            Some("STATUS") => Ok(Command::Status),
            Some("GC") => Ok(Command::Gc),
            Some("VERSION") => Ok(Command::Version),
            Some(other) => {
                let what = format!("expected ADD, DEL, CHECK, STATUS, GC or VERSION, found {:?}", short(other));
                Err(CniError::Environment { name: "CNI_COMMAND", what })
            }
            None => Err(CniError::Environment { name: "CNI_COMMAND", what: "is not set".into() }),
        }
    }
}

/// The variables that a runtime sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    pub(crate) command: Option<String>,
    pub(crate) container: Option<String>,
    pub(crate) netns: Option<String>,
    pub(crate) interface: Option<String>,
    pub(crate) args: Option<String>,
}

impl Environment {
    /// That of this process.
    pub(crate) fn of_process() -> Environment {
        let get = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
        Environment {
            command: get("CNI_COMMAND"),
            container: get("CNI_CONTAINERID"),
            netns: get("CNI_NETNS"),
            interface: get("CNI_IFNAME"),
            args: get("CNI_ARGS"),
        }
    }

    /// CNI_ARGS: `KEY=VALUE;KEY=VALUE`.
    pub(crate) fn arg(&self, key: &str) -> Option<&str> {
        let args = self.args.as_deref().filter(|args| args.len() <= MAX_VARIABLE_BYTES)?;
        args.split(';').filter_map(|pair| pair.split_once('=')).find(|(k, _)| *k == key).map(|(_, value)| value)
    }

    /// Whether container and interface are set, right or not.
    pub(crate) fn names_attachment(&self) -> bool {
        [&self.container, &self.interface]
            .into_iter()
            .all(|value| value.as_deref().is_some_and(|text| !text.is_empty()))
    }

    /// The name of the interface in the container.
    pub(crate) fn interface(&self) -> Result<&str, CniError> {
        let name = "CNI_IFNAME";
        let text = self.interface.as_deref().filter(|t| !t.is_empty());
        let text = text.ok_or_else(|| CniError::Environment { name, what: "is not set".into() })?;
        interface_name(name, text)
    }

    /// The name that the device is to have: of a microVM's tap it may be another than that of the
    /// interface.
    pub(crate) fn device(&self, vm: Option<Vm>) -> Result<&str, CniError> {
        match self.arg("TC_REDIRECT_TAP_NAME").filter(|_| vm == Some(Vm::Tap)) {
            Some(name) => interface_name("CNI_ARGS", name),
            None => self.interface(),
        }
    }

    /// The container's ID.
    pub(crate) fn container(&self) -> Result<&str, CniError> {
        let name = "CNI_CONTAINERID";
        let text = self.container.as_deref().filter(|t| !t.is_empty());
        let text = text.ok_or_else(|| CniError::Environment { name, what: "is not set".into() })?;
        if is_name(text) {
            return Ok(text);
        }
        Err(CniError::Environment { name, what: format!("expected {NAME}, found {:?}", short(text)) })
    }

    /// The path of the container's namespace; `None` where it is gone.
    pub(crate) fn netns(&self) -> Result<Option<&str>, CniError> {
        let Some(text) = self.netns.as_deref().filter(|t| !t.is_empty()) else { return Ok(None) };
        let ok = text.starts_with('/')
            && text.len() <= MAX_VARIABLE_BYTES
            && text.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
        if ok {
            return Ok(Some(text));
        }
        let what = format!("expected an absolute path of printable characters, found {:?}", short(text));
        Err(CniError::Environment { name: "CNI_NETNS", what })
    }

    pub(crate) fn need_netns(&self) -> Result<&str, CniError> {
        self.netns()?.ok_or_else(|| CniError::Environment { name: "CNI_NETNS", what: "is not set".into() })
    }
}

/// Checks the name of an interface that the variable has.
fn interface_name<'t>(name: &'static str, text: &'t str) -> Result<&'t str, CniError> {
    let ok = (1..=15).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if ok && text != "." && text != ".." && text != "lo" {
        return Ok(text);
    }
    let what = format!("expected 1 to 15 letters, digits, \"-\", \"_\" and \".\", found {:?}", short(text));
    Err(CniError::Environment { name, what })
}

const NAME: &str = "a letter or digit, then letters, digits, \"_\", \".\" and \"-\", at most 180";

fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME_BYTES
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// The beginning of a text that may be long, for messages.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(60).collect()
}

/// Bits per second, and bits that may pass at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Bandwidth {
    pub(crate) ingress_rate: Option<u64>,
    pub(crate) egress_rate: Option<u64>,
    pub(crate) ingress_burst: Option<u64>,
    pub(crate) egress_burst: Option<u64>,
}

/// A port mapping as the runtime gives it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawMapping {
    host_port: u32,
    container_port: u32,
    protocol: String,
    #[serde(rename = "hostIP")]
    host_ip: String,
}

/// A port of the host that leads to one of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// "tcp" or "udp".
    pub(crate) protocol: &'static str,
    /// Where the host listens.
    pub(crate) listen: SocketAddr,
    /// Whether the runtime left the host's address out, which means all of both families. `listen`
    /// is then all of IPv4.
    pub(crate) anywhere: bool,
    /// The container's port.
    pub(crate) port: u16,
}

/// How the virtual machine of a container reaches the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vm {
    /// By a tap in the container's namespace, which its monitor opens.
    Tap,
    /// By a vhost-user socket.
    VhostUser,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeConfig {
    port_mappings: Option<Vec<RawMapping>>,
    bandwidth: Option<Bandwidth>,
    ips: Option<Vec<String>>,
    mac: Option<String>,
}

/// One attachment of a list for GC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct AttachmentId {
    #[serde(rename = "containerID")]
    pub(crate) container: String,
    #[serde(rename = "ifname")]
    pub(crate) interface: String,
}

/// Where attachments are: what every command needs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawPlace {
    cni_version: Option<String>,
    name: Option<String>,
    fabric: Option<String>,
    runtime: Option<PathBuf>,
    vm: Option<String>,
    dan: Option<PathBuf>,
}

/// What a container is to have.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawWishes {
    runtime_config: RuntimeConfig,
    prev_result: Option<Value>,
    default_route: Option<bool>,
}

/// The network, which needs no other key to be right.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawNetwork {
    network: Option<String>,
}

/// The lists for GC.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawLists {
    #[serde(rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<Vec<AttachmentId>>,
    // The name in libcni before 1.2.
    #[serde(rename = "cni.dev/attachments")]
    attachments: Option<Vec<AttachmentId>>,
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The version that answers have.
    pub(crate) version: &'static str,
    /// The name of the network in the runtime's configuration.
    pub(crate) name: String,
    pub(crate) fabric: String,
    /// The fabric's network; its only one where it is not given.
    pub(crate) network: Option<String>,
    /// The folder of fabrics' sockets.
    pub(crate) runtime: Option<PathBuf>,
    /// Whether the container's default route leads to the fabric.
    pub(crate) default_route: bool,
    /// What the interface is for a virtual machine; `None` for a container.
    pub(crate) vm: Option<Vm>,
    /// Folder of the files that Kata Containers reads.
    pub(crate) dan: Option<PathBuf>,
    pub(crate) bandwidth: Bandwidth,
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) ip: Option<Ipv4Addr>,
    pub(crate) ip6: Option<Ipv6Addr>,
    pub(crate) prev_result: Option<Value>,
    /// For GC: what is to stay. `None` where no list came.
    pub(crate) valid: Option<Vec<AttachmentId>>,
}

impl Config {
    /// Whether answers have at least this version.
    pub(crate) fn is_at_least(&self, version: &str) -> bool {
        let place = |v: &str| VERSIONS.iter().position(|known| *known == v);
        place(self.version) >= place(version)
    }

    /// The configuration with the addresses of CNI_ARGS, which podman's `--ip` gives, where it has
    /// none itself.
    ///
    /// # Errors
    /// They are no addresses, or two of one family; or CNI_ARGS has a MAC address.
    pub(crate) fn with_args(&self, environment: &Environment) -> Result<Config, CniError> {
        let mut config = self.clone();
        if let Some(mac) = environment.arg("MAC") {
            return Err(no_mac("CNI_ARGS: MAC", mac));
        }
        if let Some(text) = environment.arg("IP").filter(|_| (self.ip, self.ip6) == (None, None)) {
            (config.ip, config.ip6) = addresses("CNI_ARGS: IP", text.split(','), self.vm)?;
        }
        Ok(config)
    }

    /// Where the host listens for the container, and the container's ports. Mappings without an
    /// address of the host are also at all IPv6 addresses, for a container that is reached by IPv6,
    /// unless the runtime gives others of that port itself.
    pub(crate) fn listeners(&self, by_ipv6: bool) -> impl Iterator<Item = (&'static str, SocketAddr, u16)> {
        let all: Vec<_> = self.mappings.iter().map(|m| (m.protocol, m.listen, m.port)).collect();
        let given = |proto, port| all.iter().any(|(p, at, _)| (*p, at.port()) == (proto, port) && at.is_ipv6());
        let anywhere = self.mappings.iter().filter(|m| by_ipv6 && m.anywhere);
        let six = anywhere.map(|m| (m.protocol, SocketAddr::from((Ipv6Addr::UNSPECIFIED, m.listen.port())), m.port));
        let six: Vec<_> = six.filter(|(proto, at, _)| !given(*proto, at.port())).collect();
        all.into_iter().chain(six)
    }

    /// What the fabric knows the container's interface by.
    pub(crate) fn identity(&self, container: &str, interface: &str) -> String {
        format!("{}/{container}/{interface}", self.name)
    }
}

/// The version that an error is told in, where the configuration cannot be read otherwise.
pub(crate) fn version_of(input: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Only {
        #[serde(rename = "cniVersion")]
        version: Option<String>,
    }
    let given = serde_json::from_slice::<Only>(input).ok().and_then(|only| only.version);
    given.filter(|v| VERSIONS.contains(&&v[..])).unwrap_or_else(|| "1.0.0".into())
}

/// Checks port mappings. Two equal ones are one: dual-stack runtimes give some twice.
fn mappings(raw: Vec<RawMapping>) -> Result<Vec<Mapping>, CniError> {
    let wrong = |i: usize, key: &str, expected: &str, found: &str| {
        let found = short(found);
        CniError::Config(format!("runtimeConfig.portMappings[{i}].{key}: expected {expected}, found {found:?}"))
    };
    if raw.len() > MAX_MAPPINGS {
        let text = format!("runtimeConfig.portMappings: expected at most {MAX_MAPPINGS}, found {}", raw.len());
        return Err(CniError::Config(text));
    }
    let mut out: Vec<Mapping> = Vec::new();
    for (i, raw) in raw.iter().enumerate() {
        let port = |key: &str, number: u32| {
            let port = u16::try_from(number).ok().filter(|port| *port != 0);
            port.ok_or_else(|| wrong(i, key, "a number from 1 to 65535", &number.to_string()))
        };
        let protocol = match &raw.protocol.to_ascii_lowercase()[..] {
            "" | "tcp" => "tcp",
            "udp" => "udp",
            other => return Err(wrong(i, "protocol", "\"tcp\" or \"udp\"", other)),
        };
        let host: IpAddr = match &raw.host_ip[..] {
            "" => Ipv4Addr::UNSPECIFIED.into(),
            text => text.parse().map_err(|_| wrong(i, "hostIP", "an address of the host", text))?,
        };
        let (anywhere, target) = (raw.host_ip.is_empty(), port("containerPort", raw.container_port)?);
        let listen = SocketAddr::from((host, port("hostPort", raw.host_port)?));
        match out.iter_mut().find(|m| (m.protocol, m.listen, m.port) == (protocol, listen, target)) {
            Some(same) => same.anywhere |= anywhere,
            None => out.push(Mapping { protocol, listen, anywhere, port: target }),
        }
    }
    Ok(out)
}

fn wrong(key: &str, expected: &str, found: &str) -> CniError {
    CniError::Config(format!("{key}: expected {expected}, found {:?}", short(found)))
}

fn no_mac(key: &str, mac: &str) -> CniError {
    let why = "the address follows from the container's ID";
    CniError::Unsupported(format!("{key}: expected none, found {:?}: {why}", short(mac)))
}

/// The address of each family that `key` has, each with or without a prefix length.
fn addresses<'t>(
    key: &str,
    texts: impl Iterator<Item = &'t str>,
    vm: Option<Vm>,
) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), CniError> {
    let (mut ip, mut ip6) = (None, None);
    for text in texts {
        let address = text.split_once('/').map_or(text, |(address, _)| address);
        let is_second = match address.parse() {
            Ok(IpAddr::V4(v4)) => ip.replace(v4).is_some(),
            Ok(IpAddr::V6(v6)) => ip6.replace(v6).is_some(),
            Err(_) => return Err(wrong(key, "addresses of the network", text)),
        };
        if is_second {
            return Err(wrong(key, "at most one address of each family", text));
        }
    }
    match ip6.filter(|_| vm == Some(Vm::Tap)) {
        Some(ip6) => {
            let expected = "no IPv6 address with vm \"tap\": a guest configures IPv6 itself";
            Err(wrong(key, expected, &ip6.to_string()))
        }
        None => Ok((ip, ip6)),
    }
}

/// A path that is absolute, and can be written into a fabric file between quotes.
pub(crate) fn is_path(path: &Path) -> bool {
    let fit = |text: &str| text.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
    path.is_absolute() && path.to_str().is_some_and(|text| text.len() <= MAX_VARIABLE_BYTES && fit(text))
}

/// Keys that this plugin reads, beside those of the runtime.
const OWN_KEYS: [&str; 6] = ["fabric", "network", "runtime", "defaultRoute", "vm", "dan"];

/// Keys of every configuration (CNI 1.1, section 1), which the runtime reads or writes.
const RUNTIME_KEYS: [&str; 11] = [
    "cniVersion",
    "cniVersions",
    "name",
    "type",
    "args",
    "capabilities",
    "runtimeConfig",
    "prevResult",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
];

/// Keys of the specification that mean something to other plugins, and what does it here.
const ELSEWHERE: [(&str, &str); 4] = [
    ("ipam", "the fabric gives the addresses; `runtimeConfig.ips` chooses them"),
    ("dns", "the name server and the domain are those of the network, by `dns` and `domain` in the fabric's file"),
    ("ipMasq", "`uplink` and `uplink6` of the network in the fabric's file decide it"),
    ("mtu", "it is that of the network, by `mtu` in the fabric's file"),
];

/// Whether a value says nothing: programs write the keys of the specification with such ones.
fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(says_nothing),
        Value::Bool(true) => false,
    }
}

/// Refuses keys that nothing would come of: a container would get something else than its
/// configuration says.
fn refuse_unknown(input: &[u8]) -> Result<(), CniError> {
    let all: serde_json::Map<String, Value> =
        serde_json::from_slice(input).map_err(|e| CniError::Decode(e.to_string()))?;
    // Those with a domain are of the runtime, or of other programs.
    let known = |key: &str| OWN_KEYS.contains(&key) || RUNTIME_KEYS.contains(&key) || key.contains('/');
    let elsewhere = |key: &str| ELSEWHERE.iter().find(|(other, _)| *other == key).map(|(_, why)| (*why).to_string());
    let is_harmless = |key: &str, value| known(key) || elsewhere(key).is_some() && says_nothing(value);
    let Some((key, value)) = all.iter().find(|(key, value)| !is_harmless(key, value)) else { return Ok(()) };
    let near = || tombolo_host::file::nearest(key, OWN_KEYS).map(|near| format!("did you mean \"{near}\"?"));
    let why = elsewhere(key).or_else(near).unwrap_or_else(|| format!("the plugin's keys are {}", OWN_KEYS.join(", ")));
    let (key, value) = (short(key), short(&value.to_string()));
    Err(CniError::Unsupported(format!("{key:?}: expected no such key, found it with the value {value}: {why}")))
}

/// Whether the input is a JSON object of a length that is read.
pub(crate) fn is_object(input: &[u8]) -> bool {
    type Any = std::collections::BTreeMap<String, serde::de::IgnoredAny>;
    input.len() as u64 <= MAX_INPUT_BYTES && serde_json::from_slice::<Any>(input).is_ok()
}

/// Reads what `command` needs of a configuration. Other keys are not looked at: a container that
/// ADD refused because of them must still come to its end by DEL.
pub(crate) fn parse(command: Command, input: &[u8]) -> Result<Config, CniError> {
    if input.len() as u64 > MAX_INPUT_BYTES {
        return Err(CniError::Decode(format!("it is longer than {MAX_INPUT_BYTES} bytes")));
    }
    fn part<T: serde::de::DeserializeOwned>(input: &[u8]) -> Result<T, CniError> {
        serde_json::from_slice(input).map_err(|e| CniError::Decode(e.to_string()))
    }
    let is_whole = matches!(command, Command::Add | Command::Check);
    let raw: RawPlace = part(input)?;
    let network = if is_whole || command == Command::Status { part(input)? } else { RawNetwork::default() }.network;
    let wishes = if is_whole { part(input)? } else { RawWishes::default() };
    if is_whole {
        refuse_unknown(input)?;
    }
    let lists = if is_whole || command == Command::Gc { part(input)? } else { RawLists::default() };
    let given = raw.cni_version.unwrap_or_else(|| "0.1.0".into());
    let version = VERSIONS.into_iter().find(|v| *v == given);
    let version = version.ok_or_else(|| CniError::Version { found: short(&given) })?;
    let name = raw.name.unwrap_or_default();
    if !is_name(&name) {
        return Err(wrong("name", NAME, &name));
    }
    const FABRIC: &str = "the name of a running fabric (`tombolo ls`)";
    let Some(fabric) = raw.fabric else {
        return Err(CniError::Config(format!("fabric: expected {FABRIC}, found no such key")));
    };
    let is_word = |text: &str| {
        (1..=24).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    if !is_word(&fabric) {
        return Err(wrong("fabric", FABRIC, &fabric));
    }
    if let Some(network) = network.as_deref().filter(|n| !is_word(n)) {
        return Err(wrong("network", "the name of a network of the fabric", network));
    }
    if let Some(path) = raw.runtime.as_ref().filter(|p| !p.is_absolute()) {
        return Err(wrong("runtime", "an absolute path", &path.display().to_string()));
    }
    let vm = match raw.vm.as_deref() {
        None => None,
        Some("tap") => Some(Vm::Tap),
        Some("vhost-user") => Some(Vm::VhostUser),
        Some(other) => return Err(wrong("vm", "\"tap\" or \"vhost-user\", or no such key", other)),
    };
    if let Some(dan) = &raw.dan {
        let text = dan.display().to_string();
        if vm != Some(Vm::VhostUser) {
            return Err(wrong("dan", "it beside vm \"vhost-user\" alone", &text));
        }
        if !is_path(dan) {
            return Err(wrong("dan", "an absolute path of printable characters", &text));
        }
    }
    if is_whole && vm == Some(Vm::VhostUser) && raw.dan.is_none() && version != "1.1.0" {
        // Answers of other versions have no place for the socket's path.
        return Err(wrong("cniVersion", "1.1.0 with vm \"vhost-user\", or the key dan", version));
    }
    let runtime = wishes.runtime_config;
    let mappings = mappings(runtime.port_mappings.unwrap_or_default())?;
    if let Some(mac) = &runtime.mac {
        return Err(no_mac("runtimeConfig.mac", mac));
    }
    let bandwidth = runtime.bandwidth.unwrap_or_default();
    for (key, rate) in [("ingressRate", bandwidth.ingress_rate), ("egressRate", bandwidth.egress_rate)] {
        // 0 is none in the reference plugin.
        if let Some(rate) = rate.filter(|r| *r != 0 && !(1_000..=1_000_000_000_000).contains(r)) {
            let expected = "0 for none, or 1000 to 10^12 bits per second";
            return Err(wrong(&format!("runtimeConfig.bandwidth.{key}"), expected, &rate.to_string()));
        }
    }
    let ips = runtime.ips.iter().flatten().map(String::as_str);
    let (ip, ip6) = addresses("runtimeConfig.ips", ips, vm)?;
    Ok(Config {
        version,
        name,
        fabric,
        network,
        runtime: raw.runtime,
        default_route: wishes.default_route.unwrap_or(true),
        vm,
        dan: raw.dan,
        bandwidth,
        mappings,
        ip,
        ip6,
        prev_result: wishes.prev_result,
        valid: lists.valid_attachments.or(lists.attachments),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn config(more: Value) -> Result<Config, CniError> {
        let mut all = json!({ "cniVersion": "1.0.0", "name": "pods", "type": "tombolo-cni", "fabric": "demo" });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(Command::Add, all.to_string().as_bytes())
    }

    #[test]
    fn each_version_is_taken_and_others_are_told_with_code_1() {
        for version in VERSIONS {
            assert_eq!(config(json!({ "cniVersion": version })).unwrap().version, version);
        }
        for version in ["0.1.0", "0.2.0", "2.0.0", "1.0", "", "x"] {
            let error = config(json!({ "cniVersion": version })).unwrap_err();
            assert_eq!(error.code(), 1, "{error}");
        }
        assert_eq!(parse(Command::Add, b"{}").unwrap_err().code(), 1, "no version is 0.1.0");
        assert!(!config(json!({})).unwrap().is_at_least("1.1.0"));
        assert!(config(json!({ "cniVersion": "1.1.0" })).unwrap().is_at_least("0.4.0"));
    }

    fn mapping(protocol: &str, host: &str) -> Value {
        let one = json!({ "hostPort": 80, "containerPort": 8080, "protocol": protocol, "hostIP": host });
        json!({ "runtimeConfig": { "portMappings": [one] } })
    }

    #[test]
    fn port_mappings_are_read_with_their_defaults() {
        let read = |protocol: &str, host: &str| config(mapping(protocol, host)).unwrap().mappings;
        let expected = |protocol, listen: &str, anywhere| {
            vec![Mapping { protocol, listen: listen.parse().unwrap(), anywhere, port: 8080 }]
        };
        assert_eq!(read("", ""), expected("tcp", "0.0.0.0:80", true));
        assert_eq!(read("TCP", "127.0.0.1"), expected("tcp", "127.0.0.1:80", false));
        assert_eq!(read("udp", "0.0.0.0"), expected("udp", "0.0.0.0:80", false));
        assert_eq!(read("tcp", "fd00::1"), expected("tcp", "[fd00::1]:80", false));
        assert!(config(json!({ "runtimeConfig": { "portMappings": [] } })).unwrap().mappings.is_empty());
        let twice = vec![json!({ "hostPort": 1, "containerPort": 2 }); 2];
        assert_eq!(config(json!({ "runtimeConfig": { "portMappings": twice } })).unwrap().mappings.len(), 1);
    }

    #[test]
    fn a_mapping_without_an_address_of_the_host_is_at_all_addresses_of_the_containers_families() {
        let listeners = |hosts: &[&str], by_ipv6| -> Vec<String> {
            let one = |host: &&str| json!({ "hostPort": 80, "containerPort": 8080, "hostIP": host });
            let all: Vec<Value> = hosts.iter().map(one).collect();
            let config = config(json!({ "runtimeConfig": { "portMappings": all } })).unwrap();
            config.listeners(by_ipv6).map(|(proto, at, port)| format!("{proto} {at} {port}")).collect()
        };
        let (four, six) = ("tcp 0.0.0.0:80 8080", "tcp [::]:80 8080");
        assert_eq!(listeners(&[""], false), [four]);
        assert_eq!(listeners(&["0.0.0.0"], true), [four]);
        for hosts in [&[""][..], &["", ""], &["", "0.0.0.0"], &["0.0.0.0", ""], &["", "::"], &["0.0.0.0", "::"]] {
            assert_eq!(listeners(hosts, true), [four, six], "{hosts:?}");
        }
        // The runtime says which IPv6 address.
        assert_eq!(listeners(&["", "::1"], true), [four, "tcp [::1]:80 8080"]);
    }

    #[test]
    fn values_that_could_not_be_right_are_named() {
        for (more, code, word) in [
            (json!({ "name": "a b" }), 7, "name"),
            (json!({ "name": "../x" }), 7, "name"),
            (json!({ "fabric": "A" }), 7, "fabric"),
            (json!({ "network": "\"]\n" }), 7, "network"),
            (json!({ "runtime": "run" }), 7, "runtime"),
            (json!({ "vm": "kata" }), 7, "vm"),
            (json!({ "vm": "vhost-user" }), 7, "1.1.0"),
            (json!({ "vm": "vhost-user", "dan": "dans" }), 7, "absolute"),
            (json!({ "vm": "vhost-user", "dan": "/a\"b" }), 7, "printable"),
            (json!({ "vm": "tap", "dan": "/run/dans" }), 7, "dan"),
            (json!({ "runtimeConfig": { "ips": ["fd00::g"] } }), 7, "fd00::g"),
            (json!({ "runtimeConfig": { "ips": ["10.0.0.1", "10.0.0.2"] } }), 7, "one address of each family"),
            (json!({ "runtimeConfig": { "ips": ["fd00::1", "10.0.0.1", "fd00::2"] } }), 7, "fd00::2"),
            (json!({ "vm": "tap", "runtimeConfig": { "ips": ["fd00::1"] } }), 7, "vm"),
            (json!({ "runtimeConfig": { "bandwidth": { "egressRate": 5 } } }), 7, "egressRate"),
            (json!({ "runtimeConfig": { "portMappings": [{ "hostPort": 80 }] } }), 7, "containerPort"),
            (json!({ "runtimeConfig": { "portMappings": [{ "hostPort": 0, "containerPort": 1 }] } }), 7, "hostPort"),
            (json!({ "runtimeConfig": { "portMappings": [{ "hostPort": 65536, "containerPort": 1 }] } }), 7, "65536"),
            (json!({ "runtimeConfig": { "portMappings": [{ "hostPort": -1, "containerPort": 1 }] } }), 6, "decoded"),
            (mapping("sctp", ""), 7, "protocol"),
            (mapping("tcp", "host\"\n"), 7, "hostIP"),
            (
                json!({ "runtimeConfig": { "portMappings": vec![json!({ "hostPort": 1, "containerPort": 1 }); 257] } }),
                7,
                "257",
            ),
            (json!({ "runtimeConfig": { "mac": "02:00:00:00:00:01" } }), 2, "mac"),
            (json!({ "runtimeConfig": 7 }), 6, "decoded"),
            (json!({ "cni.dev/valid-attachments": [{}] }), 6, "containerID"),
        ] {
            let error = config(more.clone()).unwrap_err();
            assert_eq!(error.code(), code, "{more}: {error}");
            assert!(error.to_string().contains(word), "{more}: {error}");
        }
        let taken = json!({ "runtimeConfig": { "ips": ["fd00::7/64", "10.0.0.7/24"], "portMappings": [],
            "bandwidth": { "ingressRate": 8_000_000, "ingressBurst": 1, "egressRate": 0 } } });
        let config = config(taken).unwrap();
        assert_eq!((config.ip, config.ip6), (Some(Ipv4Addr::new(10, 0, 0, 7)), "fd00::7".parse().ok()));
        assert_eq!(
            config.bandwidth,
            Bandwidth {
                ingress_rate: Some(8_000_000),
                egress_rate: Some(0),
                ingress_burst: Some(1),
                egress_burst: None
            }
        );
    }

    #[test]
    fn keys_that_nothing_would_come_of_are_refused_with_what_to_do() {
        for (more, word) in [
            (json!({ "ipam": { "type": "host-local", "subnet": "10.1.0.0/16" } }), "runtimeConfig.ips"),
            (json!({ "dns": { "nameservers": ["192.0.2.1"] } }), "`domain`"),
            (json!({ "ipMasq": true }), "`uplink`"),
            (json!({ "mtu": 1300 }), "`mtu`"),
            (json!({ "nettwork": "lan" }), "did you mean \"network\"?"),
            (json!({ "defaultroute": false }), "did you mean \"defaultRoute\"?"),
            (json!({ "bridge\"\n": "cni0" }), "the plugin's keys are fabric, network"),
        ] {
            let error = config(more.clone()).unwrap_err();
            assert_eq!(error.code(), 2, "{more}: {error}");
            assert!(error.to_string().contains(word) && !error.to_string().contains('\n'), "{more}: {error}");
            // What a container had before, it can still lose.
            let text = json!({ "cniVersion": "1.1.0", "name": "pods", "fabric": "demo", "ipam": { "type": "x" } });
            for command in [Command::Del, Command::Gc, Command::Status] {
                assert!(parse(command, text.to_string().as_bytes()).is_ok());
            }
        }
        // What runtimes and programs write, also where it says nothing.
        let written = json!({
            "type": "tombolo-cni", "capabilities": { "ips": true }, "args": { "cni": {} }, "ipam": { "type": "" }, "dns": {},
            "ipMasq": false, "cni.dev/attachments": [], "example.com/x": 1, "disableCheck": true, "cniVersions": ["1.0.0"],
        });
        config(written).unwrap();
    }

    #[test]
    fn addresses_of_the_arguments_are_taken_where_the_configuration_has_none() {
        let with = |args: &str| Environment { args: Some(args.into()), ..Environment::default() };
        let own = config(json!({ "runtimeConfig": { "ips": ["10.0.0.7"] } })).unwrap();
        let none = config(json!({})).unwrap();
        let ips = |config: &Config, args: &str| config.with_args(&with(args)).map(|config| (config.ip, config.ip6));
        let (ten, six) = (Some(Ipv4Addr::new(10, 0, 0, 9)), "fd00::9".parse().ok());
        assert_eq!(ips(&none, "IgnoreUnknown=1;IP=10.0.0.9").unwrap(), (ten, None));
        assert_eq!(ips(&none, "IP=10.0.0.9/24,fd00::9/64").unwrap(), (ten, six));
        assert_eq!(ips(&own, "IP=10.0.0.9").unwrap(), (own.ip, None));
        assert_eq!(ips(&none, "IgnoreUnknown=1").unwrap(), (None, None));
        for (args, code) in [("IP=", 7), ("IP=10.0.0.9,10.0.0.8", 7), ("IP=x\"", 7), ("MAC=02:00:00:00:00:01", 2)] {
            assert_eq!(ips(&none, args).unwrap_err().code(), code, "{args}");
        }
    }

    #[test]
    fn a_list_for_gc_is_known_by_both_names_and_none_is_not_an_empty_one() {
        assert_eq!(config(json!({})).unwrap().valid, None);
        assert_eq!(config(json!({ "cni.dev/valid-attachments": [] })).unwrap().valid, Some(vec![]));
        let one = json!([{ "containerID": "c", "ifname": "eth0" }]);
        for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
            assert_eq!(config(json!({ key: one })).unwrap().valid.unwrap().len(), 1);
        }
    }

    #[test]
    fn the_environment_is_checked() {
        let with = |container: &str, netns: &str, interface: &str| Environment {
            container: Some(container.into()),
            netns: Some(netns.into()),
            interface: Some(interface.into()),
            ..Environment::default()
        };
        let good = with("c1", "/run/netns/x", "eth0");
        assert!(good.container().is_ok() && good.interface().is_ok());
        assert_eq!(good.netns().unwrap(), Some("/run/netns/x"));
        assert_eq!(with("c1", "", "eth0").netns().unwrap(), None);
        let long = "x".repeat(200);
        let bad = with(&long, "x\"y", "a/b");
        assert!(bad.container().is_err() && bad.netns().is_err() && bad.interface().is_err());
        assert!(with("-c", "/a\nb", "lo").container().is_err());
        assert!(with("c", "/a\nb", "lo").netns().is_err());
        assert!(with("c", "/a\nb", "lo").interface().is_err());
        let args = Environment { args: Some("IgnoreUnknown=1;K8S_POD_NAME=web;=;x".into()), ..good };
        assert_eq!(args.arg("K8S_POD_NAME"), Some("web"));
        assert_eq!(args.arg("x"), None);
    }

    /// Any JSON, some of it with keys that matter.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".{0,20}".prop_map(Value::from),
            Just(Value::from("1.1.0")),
            Just(Value::from("pods")),
        ];
        let keys = [
            "cniVersion",
            "name",
            "fabric",
            "network",
            "runtime",
            "runtimeConfig",
            "ips",
            "bandwidth",
            "egressRate",
            "portMappings",
            "prevResult",
            "cni.dev/valid-attachments",
            "containerID",
            "ifname",
        ];
        leaf.prop_recursive(4, 64, 8, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::btree_map(proptest::sample::select(keys.to_vec()), inner, 0..8)
                    .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_string(), v)).collect::<Value>()),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            for command in [Command::Add, Command::Del, Command::Gc, Command::Status] {
                let _ = parse(command, &bytes);
            }
            prop_assert!(VERSIONS.contains(&&version_of(&bytes)[..]));
        }

        #[test]
        fn no_json_breaks_the_reader_and_what_passes_is_fit_for_a_section(more in any_json()) {
            let mut all = json!({ "cniVersion": "1.1.0", "name": "pods", "fabric": "demo" });
            if let Some(map) = more.as_object() {
                all.as_object_mut().unwrap().extend(map.clone());
            }
            for command in [Command::Add, Command::Del, Command::Gc, Command::Status] {
                let Ok(config) = parse(command, all.to_string().as_bytes()) else { continue };
                let text = format!("{}{}{:?}", config.name, config.fabric, config.network);
                prop_assert!(!text.contains(['\n', '\\', '/', ']']));
            }
        }

        #[test]
        fn no_variable_passes_that_would_break_out_of_a_section(text in ".{0,300}") {
            let variable = Some(text.clone());
            let environment = Environment {
                command: variable.clone(), container: variable.clone(), netns: variable.clone(),
                interface: variable.clone(), args: variable,
            };
            let fit = |t: &str| t.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
            prop_assert!(environment.container().map_or(true, fit));
            prop_assert!(environment.interface().map_or(true, fit));
            prop_assert!(environment.netns().map_or(true, |t| t.is_none_or(fit)));
            let _ = environment.arg("K8S_POD_NAME");
            let args = Environment { args: Some(format!("IP={text}")), ..environment };
            let _ = config(json!({})).unwrap().with_args(&args);
        }
    }
}
