//! What the API says, as types. One documented schema: docs/api.md and `openapi.json` describe the same fields, and a
//! test compares them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the documents below; raised when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// The program and the schema of its documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Always "tombolo".
    pub program: String,
    /// The program's version.
    pub version: String,
    /// [`SCHEMA`].
    pub schema: u32,
}

/// A fabric at one instant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The fabric's name.
    pub fabric: String,
    /// The program's version.
    pub version: String,
    /// Process number of the daemon.
    pub pid: u32,
    /// The fabric file.
    pub file: String,
    /// The runtime directory.
    pub runtime: String,
    /// Seconds since the daemon started.
    pub uptime_s: f64,
    /// Its workers.
    pub workers: Vec<Worker>,
    /// Its networks.
    pub networks: Vec<Network>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// Its cells and VMs.
    pub machines: Vec<Machine>,
    /// Its forwards.
    pub forwards: Vec<Forward>,
}

/// A switch thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// The CPU that it stays on, if one was given.
    pub cpu: Option<usize>,
    /// Frames per turn.
    pub budget: usize,
    /// Busy-poll time in microseconds.
    pub busy_poll_us: u64,
    /// Rounds in which a port had a turn.
    pub rounds: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Times that it asked for wake-ups without sleeping.
    pub polls: u64,
    /// Nanoseconds slept.
    pub slept_ns: u64,
}

/// A network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Its subnet.
    pub subnet: String,
    /// The gateway's address.
    pub gateway: String,
    /// The address that guests route through.
    pub router: Option<String>,
    /// "none", "user", "kernel" or "bridge".
    pub uplink: String,
    /// Domain of its names.
    pub domain: String,
    /// MTU in bytes.
    pub mtu: u16,
    /// Its worker.
    pub worker: String,
    /// MAC addresses known.
    pub macs: usize,
    /// Copies of frames on their way to a destination.
    pub copies: u64,
    /// Frames flooded because nobody was known to have the address.
    pub flooded_unknown: u64,
    /// Frames flooded because of a group address.
    pub flooded_group: u64,
    /// Leases held now.
    pub leases: Vec<Lease>,
}

/// A lease of the DHCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The client.
    pub mac: String,
    /// Its address.
    pub ip: String,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// End, in seconds since 1970.
    pub expires_unix_s: u64,
}

/// A port. "rx" is what came from its peer, "tx" what went to the peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Its network.
    pub network: String,
    /// "vhost-user", "tap", "stream", "packet", "gateway", "uplink".
    pub kind: String,
    /// "up" or "down".
    pub link: String,
    /// The machine that it belongs to.
    pub machine: Option<String>,
    /// Its socket, if it has one.
    pub socket: Option<String>,
    /// Source addresses that may pass; empty means any.
    pub guard: Vec<String>,
    /// MAC addresses learned behind it.
    pub macs: u32,
    /// Frames from the peer.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Frames to the peer.
    pub tx_frames: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames from the peer that were dropped, by reason; zeros are left out.
    pub rx_drops: BTreeMap<String, u64>,
    /// Frames to the peer that were dropped, by reason; zeros are left out.
    pub tx_drops: BTreeMap<String, u64>,
    /// Times that it was found ready after it had slept.
    pub wakeups: u64,
    /// Turns in which it was asked for frames.
    pub turns: u64,
    /// Turns that used the whole budget.
    pub exhausted_budgets: u64,
    /// Histogram: turns with 0, 1, 2–3, 4–7, … frames.
    pub frames_per_turn: Vec<u64>,
    /// Times that the peer broke its protocol.
    pub faults: u64,
    /// The last fault.
    pub last_fault: Option<Fault>,
    /// Text of a panic that took it out of service.
    pub panic: Option<String>,
    /// Checksums completed in software.
    pub software_checksums: u64,
    /// Segments cut in software.
    pub software_segments: u64,
    /// Frames copied to captures.
    pub captured: u64,
    /// Frames that a capture could not keep up with.
    pub capture_lost: u64,
    /// Facts of its kind.
    pub details: BTreeMap<String, String>,
}

/// A broken protocol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// "ring", "protocol", "memory" or "system".
    pub kind: String,
    /// One sentence.
    pub detail: String,
    /// Seconds since then.
    pub age_s: f64,
}

/// A cell or VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// "cell" or "vm".
    pub kind: String,
    /// "running", "stopped" (asked to), "ended" (by itself, well) or "failed".
    pub state: String,
    /// Process number of its QEMU.
    pub pid: Option<u32>,
    /// "kvm" or "tcg".
    pub accel: String,
    /// Whether it was running already when the daemon started.
    pub adopted: bool,
    /// Times that it was started again after a failure.
    pub restarts: u32,
    /// How it ended last.
    pub exit: Option<Exit>,
    /// Its devices.
    pub nics: Vec<Nic>,
    /// The file that keeps its console.
    pub console: String,
}

/// The end of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exit {
    /// In words: "exit code 3", "signal 9".
    pub how: String,
    /// The last lines of its console, and of QEMU's own complaints.
    pub last_lines: Vec<String>,
}

/// A device of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// Network.
    pub network: String,
    /// MAC.
    pub mac: String,
    /// The address leased to it.
    pub ip: Option<String>,
}

/// A port forward.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// "tcp" or "udp".
    pub proto: String,
    /// Where the host listens.
    pub listen: String,
    /// The member's address and port.
    pub to: String,
    /// Its network.
    pub network: String,
}

/// Why a request was refused; the body of every answer that is not 2xx.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What was tried, expected, found, and what to do.
    pub error: String,
}

/// The body of a request that adds a member: the keys of its section in the fabric file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Add {
    /// "cell", "vm", "tap" or "port".
    pub section: String,
    /// The member's name.
    pub name: String,
    /// Keys of the section.
    #[serde(default)]
    pub keys: serde_json::Map<String, serde_json::Value>,
}

impl Add {
    /// The request as a section of a fabric file.
    ///
    /// # Errors
    /// What is wrong with a value that TOML has no form for.
    pub fn to_toml(&self) -> Result<String, String> {
        if !["cell", "vm", "tap", "port"].contains(&self.section.as_str()) {
            return Err(format!("section: expected \"cell\", \"vm\", \"tap\" or \"port\", found {:?}", self.section));
        }
        // JSON's strings are basic strings of TOML, but for DEL, which serde_json leaves as it is.
        let quote = |text: &str| serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f");
        let mut out = format!("[{}.{}]\n", self.section, quote(&self.name));
        for (key, value) in &self.keys {
            out.push_str(&format!("{} = {}\n", quote(key), toml_value(value, &quote).map_err(|e| format!("{key}: {e}"))?));
        }
        Ok(out)
    }
}

fn toml_value(value: &serde_json::Value, quote: &impl Fn(&str) -> String) -> Result<String, String> {
    use serde_json::Value;
    Ok(match value {
        Value::Null => return Err("expected a value, found null; leave the key out".into()),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(s) => quote(s),
        Value::Array(items) => {
            let items: Result<Vec<_>, _> = items.iter().map(|v| toml_value(v, quote)).collect();
            format!("[{}]", items?.join(", "))
        }
        Value::Object(map) => {
            let pairs = map.iter().map(|(k, v)| Ok(format!("{} = {}", quote(k), toml_value(v, quote)?)));
            format!("{{ {} }}", pairs.collect::<Result<Vec<_>, String>>()?.join(", "))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;

    #[test]
    fn a_request_is_read_as_a_section() {
        let base = file::parse("[network.lan]\n", std::path::Path::new("x.toml")).unwrap();
        let add: Add = serde_json::from_str(
            r#"{"section":"port","name":"p","keys":{"kind":"vhost-user","queues":2,"socket":"a \"b\"\n\u007f"}}"#,
        )
        .unwrap();
        let fabric = file::add(&add.to_toml().unwrap(), std::path::Path::new("request"), &base).unwrap();
        let file::PortKind::VhostUser { socket, queues } = &fabric.ports[0].kind else { panic!() };
        assert_eq!(*queues, 2);
        assert!(socket.as_ref().unwrap().ends_with("a \"b\"\n\u{7f}"));
        for bad in [
            r#"{"section":"network","name":"n"}"#,
            r#"{"section":"port","name":"p","keys":{"kind":null}}"#,
        ] {
            serde_json::from_str::<Add>(bad).unwrap().to_toml().unwrap_err();
        }
        let injected = Add { section: "port".into(), name: "p]\n[tap.q".into(), keys: serde_json::Map::new() };
        file::add(&injected.to_toml().unwrap(), std::path::Path::new("request"), &base).unwrap_err();
    }
}
