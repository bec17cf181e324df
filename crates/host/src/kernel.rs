//! The kernel uplink's part in the host: one nftables table named by the fabric, and IPv4
//! forwarding.
//!
//! The tap itself is a port and goes with the process. The table and the sysctl stay when the
//! process is killed. They are in the owner record, and the next `up` or `down` undoes them.
//!
//! # Theory of operation
//! Guests route through the tap's address. Outwards they are masqueraded. A forward is a DNAT at
//! `prerouting` for connections from elsewhere and at `output` for those of the host itself. A
//! connection from 127.0.0.1 can leave through the tap only with `route_localnet` on it, and its
//! source must become the tap's address. `route_localnet` would also let a guest reach the host's
//! loopback services (CVE-2020-8558 elsewhere). So the table drops what comes from a tap for 127/8,
//! before any other rule looks at it.
//!
//! Guests need `ip_forward`, which makes the host forward between all of its networks. The chain
//! `forward` accepts only what the fabric needs: packets of a network's subnet outwards, answers to
//! them, and connections of its forwards. It drops everything else from or to one of the fabric's
//! taps. If the host did not forward IPv4 before, it also drops traffic from and to other
//! interfaces, except for taps of other fabrics, which have chains of their own. The chain exists
//! before `ip_forward` is set, and is removed after `ip_forward` is restored.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use crate::plan::KernelUplink;
use crate::qemu::probe::which;
use crate::run::{LIMIT, run};
use crate::rundir::Sysctl;

/// Why the host's part could not be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum KernelError {
    #[error(
        "the kernel uplink needs nft, which is not in PATH; install it (Debian: apt install nftables), or use uplink = \"user\""
    )]
    NoNft,
    /// `nft` refused the rules.
    #[error(
        "nft {what}: {said}; the kernel uplink needs CAP_NET_ADMIN (run as root) and nf_tables in the kernel, or use uplink = \"user\""
    )]
    Nft { what: &'static str, said: String },
    /// A sysctl could not be read or written.
    #[error("sysctl {key}: {source}; run as root, or use uplink = \"user\"")]
    Sysctl { key: String, source: std::io::Error },
}

/// The name of a fabric's table. Fabric names have no underscore, so two of them never meet.
pub fn table(fabric: &str) -> String {
    format!("tombolo_{}", fabric.replace('-', "_"))
}

/// How the names of all taps of kernel uplinks begin ([`crate::plan::kernel_device`]).
const DEVICES: &str = "tb-*";

/// The rules of all kernel uplinks of a fabric, as input for `nft -f -`. They replace the table, in
/// one transaction. `forwarding` tells whether the host forwarded IPv4 before there were fabrics.
pub fn rules(fabric: &str, uplinks: &[KernelUplink], forwarding: bool) -> String {
    let table = table(fabric);
    let (mut inwards, mut outwards) = (String::new(), String::new());
    let mut early = String::new();
    let mut dnat = String::new();
    let mut source = String::new();
    for uplink in uplinks {
        let (device, subnet) = (&uplink.device, uplink.network.subnet);
        let _ = writeln!(early, "    iifname \"{device}\" ip daddr 127.0.0.0/8 counter drop");
        let _ = writeln!(source, "    ip saddr {subnet} oifname != \"{device}\" counter masquerade");
        let _ = writeln!(source, "    ip saddr 127.0.0.0/8 oifname \"{device}\" counter masquerade");
        // Answers and forwards come in, nothing else; what leaves has an address of the network. IPv6 is not routed.
        let _ = writeln!(inwards, "    oifname \"{device}\" ip daddr {subnet} ct state established,related accept");
        let _ = writeln!(inwards, "    oifname \"{device}\" ip daddr {subnet} ct status dnat accept");
        let _ = writeln!(inwards, "    oifname \"{device}\" counter drop");
        let _ = writeln!(outwards, "    iifname \"{device}\" ip saddr {subnet} accept");
        let _ = writeln!(outwards, "    iifname \"{device}\" counter drop");
        for f in &uplink.forwards {
            let (ip, port) = (f.listen.ip(), f.listen.port());
            let host = if ip.is_unspecified() { "fib daddr type local".into() } else { format!("ip daddr {ip}") };
            let _ = writeln!(dnat, "    {host} {} dport {port} counter dnat ip to {}:{}", f.proto.word(), f.ip, f.port);
        }
    }
    let rest = match forwarding {
        true => String::new(),
        false => format!(
            "    iifname \"{DEVICES}\" accept\n    oifname \"{DEVICES}\" accept\n    meta nfproto ipv4 counter drop\n"
        ),
    };
    format!(
        "table inet {table} {{}}\ndelete table inet {table}\ntable inet {table} {{\n  \
         chain early {{\n    type filter hook prerouting priority raw; policy accept;\n{early}  }}\n  \
         chain forward {{\n    type filter hook forward priority filter; policy accept;\n{inwards}{outwards}{rest}  }}\n  \
         chain forwards {{\n    type nat hook prerouting priority dstnat; policy accept;\n{dnat}  }}\n  \
         chain own {{\n    type nat hook output priority -100; policy accept;\n{dnat}  }}\n  \
         chain source {{\n    type nat hook postrouting priority srcnat; policy accept;\n{source}  }}\n}}\n"
    )
}

fn nft(what: &'static str, text: &str) -> Result<(), KernelError> {
    let program = which("nft").ok_or(KernelError::NoNft)?;
    let failed = |said: String| KernelError::Nft { what, said };
    let mut command = Command::new(program);
    let output = run(command.args(["-f", "-"]), text.as_bytes(), LIMIT).map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("no word").to_string()))
}

/// Puts the rules in force.
pub fn apply(fabric: &str, uplinks: &[KernelUplink], forwarding: bool) -> Result<(), KernelError> {
    nft("-f - (making the table)", &rules(fabric, uplinks, forwarding))
}

/// Removes a table; one that is not there is no error.
pub fn remove(table: &str) -> Result<(), KernelError> {
    nft("-f - (removing the table)", &format!("table inet {table} {{}}\ndelete table inet {table}\n"))
}

/// How the host looks for guests on its tap (arp(7)): a connection to one that is gone is refused within about a second if it
/// was silent before, and within four if it was just spoken to; with the kernel's defaults that takes up to a minute. The
/// neighbours of a guest on the same machine answer within milliseconds. The settings go with the tap.
pub const NEIGHBOURS: [(&str, &str); 3] =
    [("base_reachable_time_ms", "1000"), ("delay_first_probe_time", "1"), ("retrans_time_ms", "250")];

/// Whether this machine forwards IPv4.
pub const IP_FORWARD: &str = "net/ipv4/ip_forward";

/// The sysctls that setting and restoring [`IP_FORWARD`] changes, with their values, itself first. The kernel's own changes
/// (ip-sysctl.rst, "ip_forward"; `inet_forward_change` of net/ipv4/devinet.c): each interface's `forwarding` follows it, and
/// `accept_redirects` of all becomes its opposite. A machine that forwards already is left as it is.
pub fn forwarding() -> Result<Vec<Sysctl>, KernelError> {
    let own = get(IP_FORWARD)?;
    if own.before == "1" {
        return Ok(vec![own]);
    }
    let mut all = vec![own, get("net/ipv4/conf/all/accept_redirects")?];
    let interfaces = std::fs::read_dir(sysctl_path("net/ipv4/conf"));
    let names = interfaces.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    // An interface may go meanwhile.
    let each =
        names.filter(|name| name != "all").filter_map(|name| get(&format!("net/ipv4/conf/{name}/forwarding")).ok());
    all.extend(each.filter(|sysctl| sysctl.before == "1"));
    Ok(all)
}

/// Puts sysctls back, in order. One that was not changed is left alone, and one of an interface that is gone is forgotten.
pub fn restore(sysctls: &[Sysctl]) -> Result<(), KernelError> {
    for sysctl in sysctls {
        match get(&sysctl.key) {
            Ok(now) if now.before == sysctl.before => {}
            Ok(_) => set(&sysctl.key, &sysctl.before)?,
            Err(KernelError::Sysctl { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn sysctl_path(key: &str) -> PathBuf {
    PathBuf::from("/proc/sys").join(key)
}

/// The value of a sysctl, which is to be recorded before [`set`] changes it.
pub fn get(key: &str) -> Result<Sysctl, KernelError> {
    let read = std::fs::read_to_string(sysctl_path(key));
    let before = read.map_err(|source| KernelError::Sysctl { key: key.into(), source })?.trim().to_string();
    Ok(Sysctl { key: key.into(), before })
}

/// Sets a sysctl.
pub fn set(key: &str, value: &str) -> Result<(), KernelError> {
    std::fs::write(sysctl_path(key), value).map_err(|source| KernelError::Sysctl { key: key.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::Stdio;

    fn uplinks() -> Vec<KernelUplink> {
        let text = "name = \"a-b\"\n[network.lan]\nuplink = \"kernel\"\n\
            [[forward]]\nlisten = \"127.0.0.1:8080\"\nto = \"10.87.0.9:80\"\n\
            [[forward]]\nproto = \"udp\"\nlisten = \"0.0.0.0:53\"\nto = \"10.87.0.9:5353\"\n";
        let fabric = file::parse(text, Path::new("t.toml")).unwrap();
        fabric.networks.iter().filter_map(|n| crate::plan::uplink(&fabric, n).1).collect()
    }

    #[test]
    fn the_table_says_what_the_file_says() {
        let text = rules("a-b", &uplinks(), false);
        assert!(text.starts_with("table inet tombolo_a_b {}\ndelete table inet tombolo_a_b\n"));
        for line in [
            "iifname \"tb-a-b-lan\" ip daddr 127.0.0.0/8 counter drop",
            "ip daddr 127.0.0.1 tcp dport 8080 counter dnat ip to 10.87.0.9:80",
            "fib daddr type local udp dport 53 counter dnat ip to 10.87.0.9:5353",
            "ip saddr 10.87.0.0/24 oifname != \"tb-a-b-lan\" counter masquerade",
            "iifname \"tb-a-b-lan\" ip saddr 10.87.0.0/24 accept",
            "iifname \"tb-a-b-lan\" counter drop",
            "oifname \"tb-a-b-lan\" counter drop",
            "meta nfproto ipv4 counter drop",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let text = rules("a-b", &uplinks(), true);
        assert!(!text.contains("meta nfproto ipv4 counter drop"), "a host that forwarded before goes on\n{text}");
    }

    #[test]
    fn nft_takes_the_rules() {
        let Some(nft) = which("nft") else {
            eprintln!("SKIPPED nft_takes_the_rules: no nft");
            return;
        };
        // In a namespace of its own, checked without being put in force.
        let mut child = match Command::new("unshare")
            .args(["-rn", &nft.display().to_string(), "-c", "-f", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
        {
            Ok(child) => child,
            Err(error) => {
                eprintln!("SKIPPED nft_takes_the_rules: unshare: {error}");
                return;
            }
        };
        child.stdin.take().unwrap().write_all(rules("a-b", &uplinks(), false).as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        if said.contains("unshare failed") || said.contains("Operation not permitted") {
            eprintln!("SKIPPED nft_takes_the_rules: {said}");
            return;
        }
        assert!(out.status.success(), "{said}");
    }
}
