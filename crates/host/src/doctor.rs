//! What this machine can do, found out by doing it, and what to do about the rest.
//!
//! A probe never trusts a file's presence: KVM runs a guest, a tap is made, rules are checked by
//! nft in a namespace of its own, passt is run. Each says what depends on it, so that a missing
//! part is judged by who needs it.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use tombolo_bypass::probe::ProbeError;

use crate::qemu::probe::{self, which};
use crate::run::{LIMIT, run};

/// How a probe came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The probe succeeded.
    Works,
    /// It does not, and there is a way without it.
    Degraded,
    /// It does not, and what needs it will not work.
    Missing,
}

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The probe, in a few words.
    pub what: String,
    /// Whether it works, works in part, or is missing.
    pub outcome: Outcome,
    /// Versions, limits or error texts that the probe found.
    pub seen: String,
    /// Features of tombolo that depend on it.
    pub needed_for: String,
    /// What to do; empty if it works.
    pub advice: String,
}

/// Everything that was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this document.
    pub schema: u32,
    /// In the order of trying.
    pub findings: Vec<Finding>,
}

impl Report {
    /// True if nothing that every fabric needs is missing.
    pub fn is_usable(&self) -> bool {
        self.findings.iter().all(|f| f.outcome != Outcome::Missing || f.needed_for != EVERY_FABRIC)
    }
}

const EVERY_FABRIC: &str = "every fabric";

fn finding(what: &str, needed_for: &str, result: Result<String, (Outcome, String, &str)>) -> Finding {
    let (outcome, seen, advice) = match result {
        Ok(seen) => (Outcome::Works, seen, ""),
        Err((outcome, seen, advice)) => (outcome, seen, advice),
    };
    Finding { what: what.into(), outcome, seen, needed_for: needed_for.into(), advice: advice.into() }
}

/// The first line that a program says, or why it does not run.
fn first_line(program: &Path, args: &[&str]) -> Result<String, String> {
    let out = run(Command::new(program).args(args), b"", LIMIT).map_err(|e| e.to_string())?;
    let text = if out.stdout.is_empty() { out.stderr } else { out.stdout };
    Ok(String::from_utf8_lossy(&text).lines().next().unwrap_or("").to_string())
}

/// All that a program says; nothing where it does not run.
fn all_lines(program: &Path, args: &[&str]) -> String {
    let out = run(Command::new(program).args(args), b"", LIMIT);
    out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default()
}

/// Runs a program in a user and network namespace of its own.
fn in_namespace(args: &[&str], input: &str) -> Result<(), String> {
    let unshare = which("unshare").ok_or("no unshare (util-linux)")?;
    let own: &[&str] = if rustix::process::geteuid().is_root() { &["-n"] } else { &["-rn"] };
    let out = run(Command::new(unshare).args(own).args(args), input.as_bytes(), LIMIT).map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&out.stderr).lines().next().unwrap_or("").to_string();
    if out.status.success() { Ok(()) } else { Err(said) }
}

fn runtime() -> Finding {
    let check = || -> Result<String, String> {
        let root = crate::rundir::runtime_root().map_err(|e| e.to_string())?;
        let mut folder = std::fs::DirBuilder::new();
        folder.recursive(true).mode(0o700).create(&root).map_err(|e| format!("{}: {e}", root.display()))?;
        let probe = root.join(format!("probe-{}", std::process::id()));
        crate::rundir::private_file(&probe).map_err(|e| format!("{}: {e}", probe.display()))?;
        std::fs::remove_file(&probe).map_err(|e| format!("{}: {e}", probe.display()))?;
        Ok(root.display().to_string())
    };
    let advice = "set $TOMBOLO_RUNTIME to a folder that you may write to, on a short path";
    finding("runtime folder", EVERY_FABRIC, check().map_err(|e| (Outcome::Missing, e, advice)))
}

fn sealed_memory() -> Finding {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let check = || -> Result<String, rustix::io::Errno> {
        let fd = memfd_create("tombolo-probe", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, 4096)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(match ftruncate(&fd, 0) {
            Err(_) => "a sealed region cannot be shrunk".into(),
            Ok(()) => "seals are taken and not kept".into(),
        })
    };
    let advice = "use a kernel of 4.14 or later";
    finding("sealed shared memory", EVERY_FABRIC, check().map_err(|e| (Outcome::Missing, e.to_string(), advice)))
}

fn pidfd() -> Finding {
    let check = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    let advice = "use a kernel of 5.3 or later";
    let result = check.map(|_| "opened".into()).map_err(|e| (Outcome::Missing, e.to_string(), advice));
    finding("pidfd", EVERY_FABRIC, result)
}

fn qemu() -> Vec<Finding> {
    let machines = "cells and VMs";
    let advice = "install QEMU (Debian: apt install qemu-system-x86) or name one with $TOMBOLO_QEMU";
    let qemu = match probe::find() {
        Ok(qemu) => qemu,
        Err(e) => return vec![finding("QEMU", machines, Err((Outcome::Missing, e.to_string(), advice)))],
    };
    let (a, b, c) = qemu.version;
    let mut out = vec![finding("QEMU", machines, Ok(format!("{a}.{b}.{c} at {}", qemu.path.display())))];
    let emulation = probe::emulation(&qemu.path);
    let text = |d: std::time::Duration| format!("a guest of a few instructions ran in {} ms", d.as_millis());
    let advice = "this QEMU is broken or lacks emulation, or the machine is overloaded: try again when it is not, or \
        install another one, or name one with $TOMBOLO_QEMU";
    out.push(finding("emulation", machines, emulation.map(text).map_err(|e| (Outcome::Missing, e, advice))));
    let kvm = probe::kvm(&qemu.path);
    let works = kvm.is_ok();
    let advice = "machines run under emulation, ten times slower; for KVM load kvm_intel or kvm_amd, join the group kvm, \
                  and enable nested virtualisation if this is a VM";
    let seen = kvm.map(text).map_err(|e| (Outcome::Degraded, e, advice));
    out.push(finding("KVM", "speed of cells and VMs", seen));
    let trap = if !works && qemu.msix_trap() {
        let seen = format!("QEMU {a}.{b} crashes on MSI-X over vhost-user under emulation");
        Err((
            Outcome::Degraded,
            seen,
            "q35 machines get vectors=0 (INTx) automatically; QEMU 10 does not need this \
            workaround",
        ))
    } else {
        Ok("not affected".into())
    };
    out.push(finding("MSI-X over vhost-user", "speed of q35 machines", trap));
    let fences = if !works && qemu.drops_fences() {
        let seen = format!("QEMU {a}.{b} drops the memory fences of an emulated guest with one CPU");
        let advice = "tombolo finds a wake-up that is lost by that within 0.2 ms (late_wakeups, late_signals of a port); \
                      KVM or QEMU 8.1 loses none";
        Err((Outcome::Degraded, seen, advice))
    } else {
        Ok("kept".into())
    };
    out.push(finding("memory fences", "latency of cells and VMs with one CPU", fences));
    let stream = if qemu.stream_reconnects() {
        Ok("they connect again by themselves".into())
    } else {
        let seen = format!("QEMU {a}.{b} does not connect a stream again");
        Err((
            Outcome::Degraded,
            seen,
            "keep attach = \"vhost-user\", or such machines restart with the daemon; QEMU 9.2 connects again",
        ))
    };
    let devices = all_lines(&qemu.path, &["-device", "help"]);
    let missing: Vec<&str> = ["ivshmem-doorbell", "ivshmem-plain"]
        .into_iter()
        .filter(|name| !devices.contains(&format!("name \"{name}\"")))
        .collect();
    let ivshmem = if missing.is_empty() {
        Ok("it has ivshmem-doorbell and ivshmem-plain".into())
    } else {
        let advice = "this build of QEMU lacks them: install another, or keep attach = \"vhost-user\"";
        Err((Outcome::Missing, format!("QEMU {a}.{b} has no {}", missing.join(", no ")), advice))
    };
    out.push(finding("ivshmem devices", "machines with attach = \"ivshmem\", direct links", ivshmem));
    out.push(finding("streams after a restart", "machines with attach = \"stream\"", stream));
    out
}

fn confinement() -> Vec<Finding> {
    let needed = "confinement of the daemon and its machines";
    let part = |what: &str, probe: Result<(), String>, seen: &str, option: &'static str| {
        finding(what, needed, probe.map(|()| seen.to_string()).map_err(|e| (Outcome::Degraded, e, option)))
    };
    vec![
        part(
            "seccomp",
            crate::confine::probe_seccomp(),
            "system calls can be denied",
            "fabrics work all the same, less confined; the kernel needs CONFIG_SECCOMP_FILTER",
        ),
        part(
            "Landlock",
            crate::confine::probe_landlock(),
            "QEMU can be kept from writing files",
            "fabrics work all the same, less confined; the kernel needs CONFIG_SECURITY_LANDLOCK and landlock in lsm=, 6.2 or later",
        ),
    ]
}

fn passt() -> Finding {
    let needed = "uplink = \"user\"";
    let advice = "install passt (Debian: apt install passt)";
    let Some(program) = which("passt") else {
        return finding("passt", needed, Err((Outcome::Missing, "not in PATH".into(), advice)));
    };
    // With its stream at an end at once, it sets itself up and leaves.
    let check = || -> Result<String, String> {
        let uplink = crate::plan::UserUplink {
            mac: crate::file::Mac::derived(&["doctor"]),
            router: std::net::Ipv4Addr::new(10, 87, 0, 2),
            ipv6: None,
            forwards: vec![],
        };
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|e| e.to_string())?;
        drop(ours);
        let argv = crate::plan::passt_argv(&program, &uplink, (1500, 0), false);
        let mut child = Command::new(&argv[0])
            .args(&argv[1..])
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let ended = crate::process::Process::open(child.id()).is_none_or(|p| p.wait(std::time::Duration::from_secs(3)));
        if !ended {
            let _ = child.kill();
        }
        let out = child.wait_with_output().map_err(|e| e.to_string())?;
        let said = String::from_utf8_lossy(&out.stderr).lines().last().unwrap_or("").to_string();
        match (ended, out.status.success()) {
            (true, true) => Ok(format!("set itself up and left ({})", program.display())),
            (true, false) => Err(format!("{}: {said}", out.status)),
            (false, _) => Err("it did not end with its stream".into()),
        }
    };
    let advice = "passt takes its template from the interface with the default route: this machine needs one";
    finding("passt", needed, check().map_err(|e| (Outcome::Missing, e, advice)))
}

fn tun() -> Finding {
    let needed = "taps, uplink = \"kernel\"";
    let root = rustix::process::geteuid().is_root();
    if let Err(error) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        let advice = "load the module tun, and make /dev/net/tun readable and writable";
        return finding("tap devices", needed, Err((Outcome::Missing, format!("/dev/net/tun: {error}"), advice)));
    }
    let Some(ip) = which("ip") else {
        let advice = "install iproute2, with which this probe makes a tap; the fabric itself does not need it";
        return finding("tap devices", needed, Err((Outcome::Degraded, "not tried: no `ip`".into(), advice)));
    };
    let made = in_namespace(&[&ip.display().to_string(), "tuntap", "add", "dev", "tb-probe", "mode", "tap"], "");
    let result = match made {
        Ok(()) if root => Ok("one was made in a namespace of its own".into()),
        Ok(()) => {
            let advice = "run as root, or have root make taps for you and set adopt = true";
            Err((Outcome::Degraded, "made in a namespace of its own, not in the host's: not root".into(), advice))
        }
        Err(e) => Err((Outcome::Missing, e, "run as root, or allow user namespaces")),
    };
    finding("tap devices", needed, result)
}

fn nft() -> Finding {
    let needed = "uplink = \"kernel\"";
    let Some(program) = which("nft") else {
        let advice = "install nftables (Debian: apt install nftables)";
        return finding("nftables", needed, Err((Outcome::Missing, "no nft in PATH".into(), advice)));
    };
    let rules = crate::kernel::rules("doctor", &[], &crate::kernel::Fixed6::new(), [false; 2]);
    let result = match in_namespace(&[&program.display().to_string(), "-f", "-"], &rules) {
        Ok(()) if rustix::process::geteuid().is_root() => {
            Ok("a table with the fabric's chains was made in a namespace".into())
        }
        Ok(()) => Err((
            Outcome::Degraded,
            "it works in a namespace of its own; not root here".into(),
            "run as root, or use uplink = \"user\"",
        )),
        Err(e) => Err((Outcome::Missing, e, "load nf_tables and nft_chain_nat, or use uplink = \"user\"")),
    };
    finding("nftables", needed, result)
}

fn bypass() -> Finding {
    bypass_finding(tombolo_bypass::probe::probe())
}

fn bypass_finding(probed: Result<tombolo_bypass::probe::Found, ProbeError>) -> Finding {
    let result = match probed {
        Ok(found) => {
            let seen =
                format!("Linux {}: the kernel took the programs of both modes, {} and xdp", found.release, found.hook);
            if found.limits.is_empty() {
                Ok(seen)
            } else {
                let seen = format!("{seen}; {}", found.limits.join("; "));
                Err((Outcome::Degraded, seen, "it works with that; Linux 6.17 is without these limits"))
            }
        }
        Err(e @ ProbeError::NotRoot) => Err((
            Outcome::Degraded,
            e.to_string(),
            "run `tombolo doctor` as root, as `tombolo bypass` must be (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON)",
        )),
        Err(e) => {
            let advice = "traffic takes the kernel's path without it; it needs Linux 5.14 or later (older ones are not tested), with BTF and connection tracking";
            Err((Outcome::Missing, e.to_string(), advice))
        }
    };
    finding("bypass", "tombolo bypass, bypass = true", result)
}

fn packet_socket() -> Finding {
    let needed = "uplink = { bridge = … }, ports of kind \"packet\"";
    // AF_PACKET is 17, which rustix has no name for.
    let family = rustix::net::AddressFamily::from_raw(17);
    let opened = rustix::net::socket(family, rustix::net::SocketType::RAW, None);
    let result = opened.map(|_| "opened".into());
    finding(
        "packet sockets",
        needed,
        result.map_err(|e| (Outcome::Missing, e.to_string(), "run as root (CAP_NET_RAW)")),
    )
}

fn cpus() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let result = if count > 1 {
        Ok(format!("{count} CPUs"))
    } else {
        let advice = "leave busy_poll_us at 0: polling takes the only CPU from the guests";
        Err((Outcome::Degraded, "1 CPU".into(), advice))
    };
    finding("CPUs", "busy polling", result)
}

fn meminfo() -> String {
    std::fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

/// Nothing of Tombolo's takes huge pages, but a DPDK program at a vhost-user port has its memory in
/// them.
fn hugepages(meminfo: &str) -> Finding {
    let number = |key: &str| -> u64 {
        let value = meminfo.lines().find_map(|l| l.strip_prefix(key)?.split_whitespace().next()?.parse().ok());
        value.unwrap_or(0)
    };
    let (free, all) = (number("HugePages_Free:"), number("HugePages_Total:"));
    let seen = format!("{free} free of {all}, of {} KiB", number("Hugepagesize:"));
    let advice =
        "a fabric takes none, and the benches reserve their own; for such a program: sysctl vm.nr_hugepages=512";
    let result = if free > 0 { Ok(seen) } else { Err((Outcome::Degraded, seen, advice)) };
    finding("huge pages", "DPDK programs at vhost-user ports", result)
}

fn files() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    let result = if current >= 4096 {
        Ok(format!("{current} open files"))
    } else {
        let advice = "a vhost-user port takes about ten: raise it with ulimit -n for more than a hundred ports";
        Err((Outcome::Degraded, format!("{current} open files"), advice))
    };
    finding("limit on open files", "many ports", result)
}

fn resolv() -> Finding {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let first = text.lines().find_map(|l| l.strip_prefix("nameserver")).map(|s| s.trim().to_string());
    let advice = "give `dns` in the network's section; members' names are served without it";
    let result = first.ok_or((Outcome::Degraded, "no nameserver in /etc/resolv.conf".into(), advice));
    finding("name servers", "names of elsewhere", result)
}

/// The name of the program that tells other machines of members.
const SPAN: &str = "tombolo-span";

fn span() -> Finding {
    let version = which(SPAN).map(|path| first_line(&path, &["--version"]).map(|text| (text, path)));
    let is_it = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(entry.ok()?.path().join("comm")).ok()?;
        (name.trim_end() == SPAN).then_some(())
    };
    span_finding(version, std::fs::read_dir("/proc").into_iter().flatten().filter_map(is_it).count())
}

/// By what it says of its version and where it is, and how many of it run.
fn span_finding(version: Option<Result<(String, std::path::PathBuf), String>>, running: usize) -> Finding {
    let installs = "install the package tombolo-span (Debian: apt install tombolo-span); without it, tunnels to other \
        machines learn who is where from frames";
    let starts = "write /etc/tombolo/NAME.span.toml, and run `systemctl enable --now tombolo-span@NAME`, or with \
        `--user` for a fabric of your own (docs/span.md); one machine alone needs none";
    let result = match version {
        None => Err((Outcome::Degraded, "not in PATH".into(), installs)),
        Some(Err(why)) => Err((Outcome::Degraded, why, installs)),
        Some(Ok((version, path))) if running == 0 => {
            Err((Outcome::Degraded, format!("{version} at {} is there, and does not run", path.display()), starts))
        }
        Some(Ok((version, path))) => Ok(format!("{version} at {}, {running} of it run", path.display())),
    };
    finding(SPAN, "networks across machines whose members are known everywhere", result)
}

/// What a machine shows of Xen.
struct XenFacts {
    /// "4.17", where the kernel tells.
    version: String,
    /// What `/proc/xen/capabilities` says, or why it cannot be read.
    capabilities: Result<String, String>,
    /// Device files that cannot be used: which, why.
    refused: Vec<(String, String)>,
    /// Whether the kernel's xen-netback is there.
    netback: bool,
    xl: Option<std::path::PathBuf>,
}

/// `None` on a machine that Xen does not run.
fn xen_facts() -> Option<XenFacts> {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_string());
    if read("/sys/hypervisor/type").ok()? != "xen" {
        return None;
    }
    let part = |name: &str| read(&format!("/sys/hypervisor/version/{name}")).unwrap_or_else(|_| "?".into());
    let refused = tombolo_port::xen::DEVICES.iter().chain(&["/dev/xen/privcmd"]).filter_map(|path| {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
        opened.err().map(|error| (path.to_string(), error.to_string()))
    });
    Some(XenFacts {
        version: format!("{}.{}", part("major"), part("minor")),
        capabilities: read("/proc/xen/capabilities").map_err(|error| error.to_string()),
        refused: refused.collect(),
        netback: Path::new(tombolo_port::xen::NETBACK).exists(),
        xl: which("xl"),
    })
}

fn xen_findings(facts: Option<XenFacts>) -> Vec<Finding> {
    let needed = "machines with attach = \"xen\", ports of kind \"xen\"";
    let Some(XenFacts { version, capabilities, refused, netback, xl }) = facts else {
        let advice = "boot Xen with this system as its dom0 (docs/xen.md)";
        return vec![finding(
            "Xen",
            needed,
            Err((Outcome::Missing, "no Xen host: Xen does not run here".into(), advice)),
        )];
    };
    let dom0 = capabilities.as_ref().is_ok_and(|text| text.contains("control_d"));
    let place = match capabilities {
        Ok(_) if dom0 => Ok(format!("this is the dom0 of Xen {version}")),
        Ok(_) => Err((
            Outcome::Degraded,
            format!("this is a guest of Xen {version}, and not its dom0"),
            "it can serve as a driver domain: the guests' vif lines name it with backend=NAME",
        )),
        Err(why) => Err((
            Outcome::Degraded,
            format!("Xen {version}; whether this is its dom0 is not known: /proc/xen/capabilities: {why}"),
            "mount -t xenfs xenfs /proc/xen (module xenfs)",
        )),
    };
    let mut out = vec![finding("Xen", needed, place)];
    let (privcmd, own): (Vec<_>, Vec<_>) = refused.into_iter().partition(|(path, _)| path.ends_with("privcmd"));
    let list = |refused: &[(String, String)]| {
        refused.iter().map(|(path, why)| format!("{path}: {why}")).collect::<Vec<_>>().join("; ")
    };
    let devices = if own.is_empty() {
        Ok("xenbus, evtchn and gntdev can be opened".into())
    } else {
        Err((Outcome::Missing, list(&own), "run as root, and load the modules: modprobe -a xen-evtchn xen-gntdev"))
    };
    out.push(finding("Xen devices", needed, devices));
    let kernels = if netback {
        let advice =
            "it would take every vif: rmmod xen-netback, and `blacklist xen-netback` in a file of /etc/modprobe.d";
        Err((Outcome::Missing, "xen-netback is loaded".into(), advice))
    } else {
        Ok("xen-netback is not loaded".into())
    };
    out.push(finding("the kernel's backend", needed, kernels));
    if dom0 {
        let tools = match (xl, privcmd.is_empty()) {
            (None, _) => {
                Err((Outcome::Missing, "no xl in PATH".into(), "install Xen's tools (Debian: apt install xen-utils)"))
            }
            (Some(_), false) => {
                Err((Outcome::Missing, list(&privcmd), "run as root, and load the module: modprobe xen-privcmd"))
            }
            (Some(path), true) => Ok(format!("{}, with /dev/xen/privcmd", path.display())),
        };
        out.push(finding("xl", "machines with attach = \"xen\"", tools));
    }
    out
}

/// Tries everything. `before` is told what is tried next.
pub fn examine(mut before: impl FnMut(&str)) -> Report {
    let mut findings = Vec::new();
    let mut step = |name: &str, probe: &dyn Fn() -> Vec<Finding>| {
        before(name);
        findings.extend(probe());
    };
    step("the kernel", &|| vec![runtime(), sealed_memory(), pidfd(), cpus(), files(), hugepages(&meminfo())]);
    step("QEMU and KVM", &qemu);
    step("confinement", &confinement);
    step("uplinks", &|| vec![passt(), tun(), nft(), bypass(), packet_socket(), resolv()]);
    step("Xen", &|| xen_findings(xen_facts()));
    step("tombolo-span", &|| vec![span()]);
    let kernel = first_line(Path::new("/bin/uname"), &["-r"]).unwrap_or_default();
    findings.insert(0, finding("system", EVERY_FABRIC, Ok(format!("Linux {kernel}"))));
    Report { schema: crate::api::report::SCHEMA, findings }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_says_what_it_saw_and_what_to_do_about_a_failure() {
        let mut steps = Vec::new();
        let report = examine(|name| steps.push(name.to_string()));
        assert_eq!(steps.len(), 6);
        assert!(report.findings.len() >= 14);
        for f in &report.findings {
            assert!(!f.seen.is_empty(), "{f:?}");
            assert_eq!(f.outcome == Outcome::Works, f.advice.is_empty(), "{f:?}");
        }
        assert!(report.is_usable());
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }

    #[test]
    fn a_xen_host_is_told_what_its_ports_need() {
        let [none] = &xen_findings(None)[..] else { panic!("one line elsewhere") };
        assert!(none.outcome == Outcome::Missing && none.seen.starts_with("no Xen host"), "{none:?}");
        let facts = |capabilities: Result<&str, &str>, refused: &[&str], netback| XenFacts {
            version: "4.17".into(),
            capabilities: capabilities.map(String::from).map_err(String::from),
            refused: refused.iter().map(|path| (path.to_string(), "ENOENT".into())).collect(),
            netback,
            xl: Some("/usr/sbin/xl".into()),
        };
        let judged = |facts| -> Vec<_> {
            xen_findings(Some(facts)).into_iter().map(|f| (f.outcome, f.seen, f.advice)).collect()
        };
        let good = judged(facts(Ok("control_d"), &[], false));
        assert!(good.len() == 4 && good.iter().all(|(outcome, ..)| *outcome == Outcome::Works), "{good:?}");
        assert!(good[0].1.contains("dom0 of Xen 4.17"), "{good:?}");
        let driver = judged(facts(Ok(""), &[], false));
        assert!(driver.len() == 3 && driver[0].2.contains("backend=NAME"), "{driver:?}");
        assert!(judged(facts(Err("no such file"), &[], false))[0].2.contains("mount -t xenfs"));
        let bare = judged(facts(Ok("control_d"), &["/dev/xen/gntdev", "/dev/xen/privcmd"], true));
        assert!(
            bare[1].1.contains("gntdev") && !bare[1].1.contains("privcmd") && bare[1].2.contains("xen-gntdev"),
            "{bare:?}"
        );
        assert!(bare[2].2.contains("rmmod xen-netback") && bare[3].2.contains("xen-privcmd"), "{bare:?}");
    }

    #[test]
    fn the_bypass_is_judged_by_what_the_kernel_took() {
        let found = |limits| Ok(tombolo_bypass::probe::Found { release: "6.12.1".into(), hook: "tcx", limits });
        assert_eq!(bypass_finding(found(vec![])).outcome, Outcome::Works);
        let limited = bypass_finding(found(vec!["something goes up"]));
        assert_eq!(limited.outcome, Outcome::Degraded);
        assert!(limited.seen.contains("6.12.1") && limited.seen.contains("something goes up"), "{limited:?}");
        let refused = bypass_finding(Err(ProbeError::NotRoot));
        assert!(refused.outcome == Outcome::Degraded && refused.advice.contains("root"), "{refused:?}");
        let old = bypass_finding(Err(ProbeError::Load(tombolo_bypass::object::LoadError::Missing("net"))));
        assert!(old.outcome == Outcome::Missing && old.advice.contains("5.14 "), "{old:?}");
    }

    #[test]
    fn the_program_for_other_machines_is_named_with_its_package_and_its_unit() {
        let there = || Some(Ok(("tombolo-span 0.1.0".into(), "/usr/bin/tombolo-span".into())));
        let none = span_finding(None, 0);
        assert!(none.outcome == Outcome::Degraded && none.advice.contains("apt install tombolo-span"), "{none:?}");
        let broken = span_finding(Some(Err("Exec format error".into())), 0);
        assert!(broken.seen == "Exec format error" && broken.advice == none.advice, "{broken:?}");
        let idle = span_finding(there(), 0);
        assert!(idle.seen.ends_with("does not run") && idle.outcome == Outcome::Degraded, "{idle:?}");
        assert!(idle.advice.contains("systemctl enable --now tombolo-span@NAME"), "{idle:?}");
        let runs = span_finding(there(), 2);
        assert_eq!(
            (runs.outcome, &*runs.seen),
            (Outcome::Works, "tombolo-span 0.1.0 at /usr/bin/tombolo-span, 2 of it run")
        );
    }

    #[test]
    fn huge_pages_are_for_others_and_free_or_not() {
        let said = |free: u64| {
            let f =
                hugepages(&format!("HugePages_Total:     4\nHugePages_Free:      {free}\nHugepagesize:    2048 kB\n"));
            (f.outcome, f.seen, f.advice.contains("a fabric takes none"))
        };
        assert_eq!(said(3), (Outcome::Works, "3 free of 4, of 2048 KiB".into(), false));
        assert_eq!(said(0), (Outcome::Degraded, "0 free of 4, of 2048 KiB".into(), true));
        assert_eq!(hugepages("").seen, "0 free of 0, of 0 KiB");
    }
}
