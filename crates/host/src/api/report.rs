//! The reports: one documented JSON schema for the API and for every `--json`. Fields are only ever
//! added.
//!
//! Counters only grow while the daemon runs. "rx" is what came from the peer of a port, "tx" what
//! went to it. Bytes are of Ethernet frames without frame check sequence. Times are seconds or
//! nanoseconds as the name says.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The version of this schema.
pub const SCHEMA: u32 = 1;

/// State of a running fabric: the answer to `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// Version of the program.
    pub version: String,
    /// As in the fabric file.
    pub name: String,
    /// The file it was started from.
    pub file: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Seconds since it came up.
    pub uptime_s: f64,
    /// Networks, in the order of the file.
    pub networks: Vec<NetworkReport>,
    /// Cells and VMs, running or not.
    pub machines: Vec<MachineReport>,
    /// Ports of all networks.
    pub ports: Vec<PortReport>,
    /// Port forwards of all uplinks.
    pub forwards: Vec<ForwardReport>,
    /// Links of shared memory: of ports, and direct ones.
    #[serde(default)]
    pub links: Vec<LinkReport>,
    /// Threads that forward frames.
    pub workers: Vec<WorkerReport>,
    /// What peers' descriptors cost the daemon.
    #[serde(default)]
    pub descriptors: DescriptorReport,
    /// What is known of other machines; null where no control plane has said anything.
    #[serde(default)]
    pub span: Option<SpanSummary>,
    /// What does not work as the file asks, in sentences; empty when all is well.
    pub warnings: Vec<String>,
    /// What this start kept, started again, ended or removed of what an earlier daemon had left,
    /// and why, in sentences.
    #[serde(default)]
    pub takeover: Vec<String>,
}

/// What became of signals to peers, and of descriptors that peers handed over, where the usual way
/// was not open.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DescriptorReport {
    /// Signals that went through io_uring, since the system's limit of asynchronous I/O
    /// (fs.aio-max-nr) was used up.
    pub signals_by_io_uring: u64,
    /// Signals that were left to a helper thread, since there was no io_uring either.
    pub signals_by_helper: u64,
    /// Signals that were lost, since no helper thread was free.
    pub signals_dropped: u64,
    /// Descriptors whose closing waits for a peer's file system now, or for a thread that does.
    pub held: u64,
}

/// One network of the fabric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkReport {
    /// As in the fabric file.
    pub name: String,
    /// Its addresses, such as "10.87.0.0/24".
    pub subnet: String,
    /// The gateway's address: DHCP, DNS, ICMP echo; null where a network that joins a real one has
    /// none.
    pub gateway: Option<Ipv4Addr>,
    /// The address that guests route through, where there is an uplink.
    pub router: Option<Ipv4Addr>,
    /// The addresses that this machine may give to its containers, where the network spans machines
    /// of one file; null: all.
    #[serde(default)]
    pub own_range: Option<RangeReport>,
    /// Its IPv6 prefix, such as "fd00:1:2:3::/64"; null where the gateway does nothing for IPv6.
    #[serde(default)]
    pub prefix6: Option<String>,
    /// The gateway's IPv6 address: DHCPv6, DNS, router advertisements.
    #[serde(default)]
    pub gateway6: Option<Ipv6Addr>,
    /// The address that members route IPv6 through, where the uplink carries it.
    #[serde(default)]
    pub router6: Option<Ipv6Addr>,
    /// "none", "user", "kernel" or "bridge INTERFACE".
    pub uplink: String,
    /// Whether the uplink works; a sentence where it does not.
    pub uplink_fault: Option<String>,
    /// Domain of the members' names.
    pub domain: String,
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// The worker that runs it.
    pub worker: String,
    /// MAC addresses known to its switch.
    pub macs: u64,
    /// Frames flooded because no port was known to have the address.
    pub flooded_unknown: u64,
    /// DHCP leases in force, static ones included.
    pub leases: Vec<LeaseReport>,
    /// Counters of the gateway and of the user uplink by name.
    pub counters: BTreeMap<String, u64>,
    /// What skips the kernel's forwarding, where the file asks for it.
    #[serde(default)]
    pub bypass: Option<BypassReport>,
}

/// Addresses that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeReport {
    /// The first one.
    pub from: Ipv4Addr,
    /// The last one.
    pub to: Ipv4Addr,
}

/// The bypass of a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BypassReport {
    /// Whether it works; a sentence where it does not. Traffic flows the kernel's way then.
    pub fault: Option<String>,
    /// The interfaces that it is attached to: the host's tap and the ways out.
    pub interfaces: Vec<BypassInterfaceReport>,
    /// What else a user should act on, in sentences: as `tombolo bypass status` has it.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// One interface that a bypass is attached to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BypassInterfaceReport {
    /// As `ip link` shows it on the host.
    pub name: String,
    /// "tcx" or "xdp".
    pub mode: String,
    /// Why it has that mode.
    pub why: String,
    /// Frames that came in here and skipped the kernel's forwarding.
    pub taken_frames: u64,
    /// Bytes of `taken_frames`, from the Ethernet header on.
    pub taken_bytes: u64,
    /// Frames that took the kernel's path.
    pub passed_frames: u64,
    /// Frames by path and reason, by the names of docs/bypass.md; those without any are left out.
    pub by_reason: BTreeMap<String, u64>,
}

impl From<tombolo_bypass::report::InterfaceReport> for BypassInterfaceReport {
    fn from(i: tombolo_bypass::report::InterfaceReport) -> Self {
        BypassInterfaceReport {
            name: i.name,
            mode: i.mode.word().into(),
            why: i.why.into(),
            taken_frames: i.taken,
            taken_bytes: i.taken_bytes,
            passed_frames: i.passed,
            by_reason: i.by_reason.into_iter().map(|(reason, n)| (reason.to_string(), n)).collect(),
        }
    }
}

/// One DHCP lease of the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeaseReport {
    /// The client's MAC address, such as "52:54:00:12:34:56".
    pub mac: String,
    /// IPv4 address that the client may use.
    pub ip: IpAddr,
    /// Host name, where the client gave one or the file names it.
    pub name: Option<String>,
    /// Whether the file reserves the address for the MAC.
    pub fixed: bool,
    /// Seconds until it ends; `None` for one that has not been asked for yet or does not end.
    pub expires_s: Option<u64>,
    /// Seconds since it was given or renewed; `None` for one that an earlier daemon gave, or that
    /// has not been asked for yet.
    #[serde(default)]
    pub given_s: Option<f64>,
}

/// A cell or VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineReport {
    /// As in the fabric file.
    pub name: String,
    /// "cell" or "vm".
    pub kind: String,
    /// "starting", "running", "stopped", "failed".
    pub state: String,
    /// Process id of its QEMU, or of the `xl` of its domain, while it runs.
    pub pid: Option<u32>,
    /// "kvm", "tcg" or "xen".
    pub accel: String,
    /// QEMU's machine type; "pvh" for a domain of Xen.
    pub machine: String,
    /// IPv4 address by name of the network.
    pub addresses: BTreeMap<String, Ipv4Addr>,
    /// Seconds since its start, while it runs.
    pub uptime_s: Option<f64>,
    /// How it ended, with QEMU's words and the last lines of its console, where it ended by itself.
    pub last_end: Option<String>,
    /// How often it was started again after it had failed.
    pub restarts: u32,
    /// Seconds until it is started again, where it failed and `restart` asks for that.
    #[serde(default)]
    pub restart_in_s: Option<f64>,
    /// Whether it was found running from before this daemon's start.
    pub adopted: bool,
    /// The domain of Xen that it is, where QEMU does not run it.
    #[serde(default)]
    pub domain: Option<DomainReport>,
}

/// A domain of Xen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainReport {
    /// Its name in `xl list`.
    pub name: String,
    /// Its number there, once it is created and while it runs.
    pub id: Option<u32>,
    /// Whether it is suspended: by itself, or because it is being saved.
    #[serde(default)]
    pub suspended: bool,
}

/// One port of the switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortReport {
    /// Unique in the fabric, as `tombolo port` takes it.
    pub name: String,
    /// Name of the network that the port belongs to.
    pub network: String,
    /// "vhost-user", "tap", "stream", "packet", "gateway", …
    pub kind: String,
    /// Whether frames flow between port and peer.
    pub up: bool,
    /// What it takes as a destination: "checksum", "tso4", "tso6", "ecn", "uso".
    pub offloads: Vec<String>,
    /// Source addresses that it may use; empty where any may.
    pub guard: Vec<String>,
    /// Facts of its kind: numbers, flags, texts and lists. docs/api.md lists the keys.
    pub details: BTreeMap<String, Value>,
    /// Fill of its rings, where its kind tells (ivshmem).
    #[serde(default)]
    pub rings: Option<RingReport>,
    /// MAC addresses learned behind it.
    pub macs: u64,
    /// Frames, bytes and drops, both ways.
    pub counters: CounterReport,
    /// What its peer last did against the rules, in a sentence.
    pub last_fault: Option<String>,
}

/// Counters of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterReport {
    /// Frames from the peer.
    pub rx_frames: u64,
    /// Bytes of `rx_frames`.
    pub rx_bytes: u64,
    /// Frames to the peer.
    pub tx_frames: u64,
    /// Bytes of `tx_frames`.
    pub tx_bytes: u64,
    /// Frames from the peer that were dropped, by reason (docs/drops.md); reasons without a drop
    /// are left out.
    pub rx_drops: BTreeMap<String, u64>,
    /// Frames for the peer that were dropped, by reason.
    pub tx_drops: BTreeMap<String, u64>,
    /// Frames that waited for a buffer of the peer or for the rate limit before they were given to
    /// it or dropped.
    #[serde(default)]
    pub queued_frames: u64,
    /// Times it was found ready after it had slept.
    pub wakeups: u64,
    /// Times that frames waited without a wake-up, at the one look that follows each sleep: a
    /// wake-up was lost, or still on its way.
    #[serde(default)]
    pub late_wakeups: u64,
    /// Times that its peer was signalled only at that look.
    #[serde(default)]
    pub late_signals: u64,
    /// Turns in which the port was polled for frames.
    pub turns: u64,
    /// Turns that used up the budget.
    pub exhausted_budgets: u64,
    /// Turns by frames given: 0, 1, 2–3, 4–7, …
    pub frames_per_turn: Vec<u64>,
    /// Faults of its peer, after each of which the port was reset, and of the system.
    pub faults: u64,
    /// Times that it was restarted after a panic in its code.
    #[serde(default)]
    pub restarts: u64,
    /// Checksums completed in software for it.
    pub software_checksums: u64,
    /// Segments cut in software for it.
    pub software_segments: u64,
    /// Segments of TCP streams, and datagrams, that became parts of longer frames to it.
    #[serde(default)]
    pub software_merged: u64,
    /// Frames copied to captures.
    pub captured: u64,
    /// Frames that captures could not keep up with.
    pub capture_lost: u64,
}

/// One port forward of an uplink.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForwardReport {
    /// "tcp" or "udp".
    pub proto: String,
    /// Where the host listens.
    pub listen: SocketAddr,
    /// The member and port it goes to, such as "web:80".
    pub to: String,
    /// Address of that member.
    pub address: IpAddr,
    /// Whether it works; a sentence where it does not.
    pub fault: Option<String>,
    /// Connections, or UDP peers, that the daemon passes on itself. None where passt or the kernel
    /// forwards.
    #[serde(default)]
    pub open: Option<u64>,
    /// Connections that were reset, or datagrams that were dropped, since there was no place for
    /// them.
    #[serde(default)]
    pub refused: Option<u64>,
}

/// A link of shared memory (ivshmem).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The port's name, or that of the direct link.
    pub name: String,
    /// "network" or "direct".
    pub kind: String,
    /// Version of the server protocol: 1 or 2.
    pub version: u32,
    /// What is spoken in it: 1 is the network protocol.
    pub protocol: u32,
    /// Whether it has no doorbells.
    pub plain: bool,
    /// Size of the shared memory, all sections included.
    pub region_bytes: u64,
    /// Doorbells of each peer.
    pub vectors: u32,
    /// Peers that there can be.
    pub max_peers: u32,
    /// Peers that are connected now.
    pub peers: Vec<LinkPeerReport>,
    /// Fill of the rings of a network link.
    pub rings: Option<RingReport>,
    /// Peers that have joined since the daemon started.
    pub joins: u64,
    /// Peers that have left since the daemon started.
    pub leaves: u64,
    /// Clients that were cut off because they took nothing from the server's socket.
    pub cut_slow: u64,
    /// Clients that were cut off because they said something to it.
    pub cut_talking: u64,
    /// Connections for which no peer ID was free.
    pub refused: u64,
    /// Whether the fd store has it, so that it survives a restart of the daemon.
    pub kept: bool,
}

/// One connected peer of a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkPeerReport {
    /// Peer ID, unique on the link.
    pub id: u32,
    /// The machine, or "fabric"; none for a process of the user's own.
    pub name: Option<String>,
    /// Process ID, if the kernel tells it.
    pub pid: Option<u32>,
    /// Its state: "reset", "init", "ready", "run", or the word in hexadecimal.
    pub state: String,
    /// The state as the number in the region.
    pub state_word: u32,
    /// Messages of the server that it has not taken.
    pub waiting_messages: u64,
}

/// Fill of the rings of a port or of its network link, as the fabric sees them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingReport {
    /// Frames on their way to the peer.
    pub frames_out: u64,
    /// How many there can be.
    pub frames_out_max: u64,
    /// Bytes that they take.
    pub bytes_out: u64,
    /// Room for bytes in the ring to the peer.
    pub bytes_out_max: u64,
    /// Frames of the peer that wait to be taken.
    pub frames_waiting: u64,
    /// Entries of its ring.
    pub frames_waiting_max: u64,
}

/// One thread that forwards frames.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// As in the fabric file.
    pub name: String,
    /// CPU that it stays on.
    pub cpu: Option<u32>,
    /// Frames per turn and port.
    pub budget: u32,
    /// Microseconds of polling before it sleeps.
    pub busy_poll_us: u64,
    /// How often it slept.
    pub sleeps: u64,
    /// Total time asleep.
    pub slept_ns: u64,
    /// Nanoseconds since its start.
    pub lifetime_ns: u64,
}

/// Answer of requests for ports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ports {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// The ports asked for, or those added.
    pub ports: Vec<PortReport>,
}

/// Answer of requests for machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machines {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// The machines asked for, or those started.
    pub machines: Vec<MachineReport>,
}

/// Which addresses are where: the answer to `GET /v1/tables`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tables {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// The forwarding tables of all networks, sorted.
    pub macs: Vec<MacReport>,
    /// Addresses of the members that the fabric knows, sorted.
    pub neighbours: Vec<NeighbourReport>,
    /// What a file for several machines gives to which of them, sorted; `None` where the request
    /// names its revision.
    #[serde(default)]
    pub homes: Option<Vec<HomeReport>>,
    /// Differs from that of every other list of these.
    #[serde(default)]
    pub homes_revision: String,
}

/// What the address of a request for [`Tables`] may say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TablesQuery {
    /// The revision of [`Tables::homes`] that the client has.
    pub homes: Option<String>,
}

/// What belongs to one machine of a file for several: a member's name, or addresses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HomeReport {
    /// Name of the network.
    pub network: String,
    /// The machine.
    pub machine: String,
    /// The name of a member.
    pub name: Option<String>,
    /// The first address.
    pub from: Option<std::net::IpAddr>,
    /// The last address.
    pub to: Option<std::net::IpAddr>,
    /// The MAC address of a member.
    #[serde(default)]
    pub mac: Option<String>,
}

/// One entry of a network's forwarding table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MacReport {
    /// Name of the network.
    pub network: String,
    /// Such as "52:54:00:12:34:56".
    pub mac: String,
    /// The port to which frames for it go.
    pub port: String,
    /// Milliseconds since a frame from it came; null for one that is pinned to its port.
    pub age_ms: Option<u64>,
    /// The VLAN in which it was seen; null where the network has no VLANs, or for one that is
    /// pinned in all.
    pub vlan: Option<u16>,
}

/// An address of IP, and who has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NeighbourReport {
    /// Name of the network.
    pub network: String,
    /// The address.
    pub ip: std::net::IpAddr,
    /// The MAC address that has it, where that is known.
    pub mac: Option<String>,
    /// The port behind which that is, where it has sent something.
    pub port: Option<String>,
    /// The member's name, where it has one.
    pub name: Option<String>,
    /// How it is known: "lease", "file" (reserved, and not asked for), "learned" (an IPv6 address
    /// that the member gave itself), "gateway" or "router".
    pub source: String,
    /// Whether the file gives it to the member, which may have asked for it since.
    #[serde(default)]
    pub fixed: bool,
}

/// What is known of other machines, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanSummary {
    /// Seconds since the control plane's last report; null where none has come.
    pub age_s: Option<f64>,
    /// Machines in that report, by state.
    pub machines: BTreeMap<String, u64>,
    /// Members on other machines that this one knows, by network.
    pub members: BTreeMap<String, u64>,
    /// Conflicts in the report.
    pub conflicts: u64,
    /// Lists of the control plane that this daemon has refused since its start.
    #[serde(default)]
    pub lists_refused: u64,
    /// Messages of other machines that the control plane has refused, by its report.
    #[serde(default)]
    pub messages_refused: u64,
}

/// What one machine has in a network: the body of `PUT /v1/networks/NAME/remotes/MACHINE`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemotesRequest {
    /// The machine's end of the tunnel: one of the `remotes` of a vxlan port of the network.
    pub address: String,
    /// At most 4,096. A MAC address that comes twice is the first one's.
    pub members: Vec<RemoteMember>,
}

/// A member on another machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteMember {
    /// Its name in the network's domain, one label; null where it has none.
    #[serde(default)]
    pub name: Option<String>,
    /// Such as "02:00:00:00:00:01".
    pub mac: String,
    /// Its addresses, at most 16.
    #[serde(default)]
    pub ips: Vec<String>,
}

/// Answer to `PUT /v1/networks/NAME/remotes/MACHINE`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteConflicts {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// Parts of the entries that are in use on this machine now.
    pub conflicts: Vec<RemoteConflict>,
}

/// A MAC or IP address of a member on another machine that is in use on this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteConflict {
    /// The member's name, where it has one.
    pub member: Option<String>,
    /// Its MAC address.
    pub mac: String,
    /// The address that is in use here; null where the MAC address is.
    pub ip: Option<IpAddr>,
    /// Who has it here, in a sentence.
    pub with: String,
}

/// Answer to `GET /v1/networks/NAME/remotes`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RemotesReport {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// Name of the network.
    pub network: String,
    /// The other machines, by name.
    pub machines: Vec<RemoteMachineReport>,
    /// Addresses that this machine has lost to others, sorted.
    pub lost: Vec<IpAddr>,
}

/// What one other machine has in a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteMachineReport {
    /// The machine's name.
    pub machine: String,
    /// Its end of the tunnel.
    pub address: IpAddr,
    /// Seconds since its list came last.
    pub age_s: f64,
    /// Its members.
    pub members: Vec<RemoteMemberReport>,
}

/// A member on another machine, and whether it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteMemberReport {
    /// Its name, where it has one.
    pub name: Option<String>,
    /// Its MAC address.
    pub mac: String,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// Whether all of it is used: nothing of it is in use on this machine.
    pub used: bool,
    /// The first conflict with something of this machine, in a sentence.
    pub conflict: Option<String>,
}

/// The addresses that this machine has lost to others, all of them: the body of `PUT
/// /v1/networks/NAME/lost`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LostRequest {
    /// At most 16,384.
    pub ips: Vec<String>,
}

/// Answer to `PUT /v1/networks/NAME/lost`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostAnswer {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// Those that the file fixes: they stay, and the status warns of them.
    pub fixed: Vec<IpAddr>,
}

/// Answer to `GET /v1/span`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// Seconds since the report came.
    pub age_s: f64,
    /// The last report.
    pub report: SpanReport,
}

/// The control plane's report of itself: the body of `PUT /v1/span`. Fields that are not known here
/// are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanReport {
    /// The name of this machine.
    pub machine: String,
    /// Process id of tombolo-span.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: f64,
    /// What all machines that belong together have in common.
    pub site: String,
    /// The other machines of the site.
    #[serde(default)]
    pub machines: Vec<SpanMachine>,
    /// The networks of this machine that are on others too.
    #[serde(default)]
    pub networks: Vec<SpanNetwork>,
    /// Addresses that more than one machine has.
    #[serde(default)]
    pub conflicts: Vec<SpanConflict>,
    /// Counters of tombolo-span by name.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
}

/// Whether a machine is heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpanState {
    /// It was never heard since tombolo-span was started.
    Unheard,
    /// It is heard.
    Up,
    /// It has not been heard for a while; what it said is kept.
    Stale,
    /// It has not been heard for so long that what it said is forgotten.
    #[default]
    Gone,
}

impl SpanState {
    /// As in the report.
    pub fn word(self) -> &'static str {
        match self {
            SpanState::Unheard => "unheard",
            SpanState::Up => "up",
            SpanState::Stale => "stale",
            SpanState::Gone => "gone",
        }
    }
}

/// Another machine of the site.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanMachine {
    /// Its name.
    pub name: String,
    /// Whether it is heard.
    pub state: SpanState,
    /// Round trip to it in microseconds; null where it is not known.
    #[serde(default)]
    pub rtt_us: Option<u64>,
    /// Seconds since it was heard last; since tombolo-span was started, where it was never heard.
    pub heard_s: f64,
    /// Members that it has in networks that this machine has too.
    pub members: u64,
    /// The networks of this machine that it is on.
    #[serde(default)]
    pub networks: Vec<String>,
    /// Its ends of tunnels.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
}

/// A network that is on other machines too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanNetwork {
    /// As in the fabric file.
    pub name: String,
    /// Members on this machine.
    pub local: u64,
    /// Members on the other machines.
    pub remote: u64,
}

/// An address that more than one machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanConflict {
    /// Name of the network.
    pub network: String,
    /// The IP or MAC address, or the name.
    pub what: String,
    /// The machines that have it.
    pub machines: Vec<String>,
    /// The machine that keeps it.
    pub winner: String,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// Its number: the first of a fabric is 1, and they go on over restarts of the daemon.
    pub id: u64,
    /// When, in UTC, such as "2026-11-21T21:43:05.123Z".
    pub time: String,
    /// The same in milliseconds since 1970.
    pub unix_ms: u64,
    /// "up", "down", "apply", "recovery", "start", "stop", "exit", "death", "port-up", "port-down",
    /// "link", "lease", "release", "forward", "span" or "fault"; others may come.
    pub kind: String,
    /// The machine, port, link or network that it is about.
    #[serde(default)]
    pub name: Option<String>,
    /// The network of a port or lease.
    #[serde(default)]
    pub network: Option<String>,
    /// The process that was started or has ended.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Why, where that is known.
    #[serde(default)]
    pub cause: Option<String>,
    /// What happened, in a sentence.
    pub text: String,
}

/// Answer to `GET /v1/events`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Version of this document: [`SCHEMA`].
    pub schema: u32,
    /// The number of the oldest event that is kept.
    pub first: u64,
    /// The number of the newest one: `after` of the next request, unless this answer ends before
    /// it.
    pub last: u64,
    /// Events that were asked for and are not kept any more.
    pub lost: u64,
    /// Events of this daemon that could not be written to the disk.
    pub unwritten: u64,
    /// The oldest first.
    pub events: Vec<EventReport>,
}

/// The body of every answer that is not what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What was tried, expected and found.
    pub error: String,
    /// What the user can do about it.
    pub hint: Option<String>,
    /// The faults of the sections or the change that was sent, one by one; `error` has all of them
    /// as text.
    #[serde(default)]
    pub problems: Vec<ProblemReport>,
}

/// One fault of what was sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemReport {
    /// "file" where what was sent has to change, "request" where the address has to, and "machine"
    /// where this machine lacks something.
    #[serde(default)]
    pub of: String,
    /// Line of the text that was sent, from 1; 0 for a key of the address.
    pub line: u64,
    /// Column of that line in characters, from 1; 0 for a key of the address.
    pub column: u64,
    /// Dotted path of the key, such as "cell.web.memory"; empty for a fault of TOML's syntax.
    pub key: String,
    /// What would have been right.
    pub expected: String,
    /// What is there instead.
    pub found: String,
    /// A near name, or what to do.
    pub hint: Option<String>,
}

impl From<&crate::file::Problem> for ProblemReport {
    fn from(p: &crate::file::Problem) -> Self {
        ProblemReport {
            line: p.line as u64,
            column: p.column as u64,
            key: p.key.clone(),
            expected: p.expected.clone(),
            found: p.found.clone(),
            hint: p.hint.clone(),
            of: p.of.word().into(),
        }
    }
}
