//! The disk by which cloud-init in a guest is given its user-data and its network devices: the
//! NoCloud source.
//!
//! A small FAT volume with the label that cloud-init looks for ("cidata", in either case), the file
//! `user-data` as it is, a `meta-data` with the machine's name, and a `network-config`. It is
//! written when the machine starts, into the runtime directory. The instance ID depends on the
//! user-data, so that a guest does again what belongs to a new instance when that has changed. It
//! does not depend on the networks: a new instance gets new SSH host keys.
//!
//! # network-config
//! Without it, cloud-init configures the first device only. It has version 2 (that of netplan),
//! with one entry for each device, known by its MAC address. There is no `set-name`: since version
//! 20.1 cloud-init finds the name by the MAC address, and user-data may rely on the names that a
//! guest's devices had before.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};

use crate::file::{Attach, Fabric, Machine, Network, Nic, Uplink};
use crate::hash::fnv1a;
use crate::rundir::private_file;

/// The volume's label, padded as FAT has it.
const LABEL: [u8; 11] = *b"CIDATA     ";
/// The size of a volume is a multiple of this.
const STEP_BYTES: usize = 1 << 20;
/// Room for the tables, the directory and `meta-data`.
const OWN_BYTES: usize = 256 << 10;
/// No user-data is so long: cloud sources allow some 16 KiB.
const MAX_BYTES: u64 = 8 << 20;

/// Where a machine's volume is.
pub fn path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.seed"))
}

/// What cloud-init is told of a machine's network devices; `None` where it is to find out itself:
/// the devices of a machine that attaches by ivshmem are made by the agent in the guest, and
/// cloud-init would wait for them.
pub fn network_config(fabric: &Fabric, machine: &Machine) -> Option<String> {
    if matches!(machine.attach, Attach::Ivshmem | Attach::IvshmemPlain) {
        return None;
    }
    let mut text = String::from("version: 2\nethernets:");
    if machine.nics.is_empty() {
        text.push_str(" {}\n");
        return Some(text);
    }
    text.push('\n');
    for (i, nic) in machine.nics.iter().enumerate() {
        // The quotes keep YAML 1.1 from reading a number to the base of 60.
        let _ = writeln!(text, "  eth{i}:\n    match:\n      macaddress: \"{}\"", nic.mac);
        if let Some(network) = fabric.network(&nic.network) {
            device(&mut text, i, nic, network);
        }
    }
    Some(text)
}

/// How one device gets its addresses.
fn device(text: &mut String, i: usize, nic: &Nic, network: &Network) {
    // A network that joins a real one has the servers and routers of that.
    let is_real = matches!(network.uplink, Uplink::Bridge { .. }) && network.gateway.is_none();
    let dhcp4 = network.dhcp.is_some() || is_real;
    let dhcp6 = network.dhcp.is_some() && network.ipv6.is_some();
    let _ = writeln!(text, "    dhcp4: {dhcp4}\n    dhcp6: {dhcp6}");
    if network.ipv6.is_some() || is_real {
        text.push_str("    accept-ra: true\n");
    }
    // Of several default routes the one of the first device is the best. Renderers want the same
    // for both families.
    let metric = 100 + i;
    if i > 0 && dhcp4 {
        let _ = writeln!(text, "    dhcp4-overrides:\n      route-metric: {metric}");
    }
    if i > 0 && dhcp6 {
        let _ = writeln!(text, "    dhcp6-overrides:\n      route-metric: {metric}");
    }
    let Some(ip) = nic.ip.filter(|_| !dhcp4) else { return };
    let _ = writeln!(text, "    mtu: {}\n    addresses:\n      - \"{ip}/{}\"", network.mtu, network.subnet.prefix);
    if let Some(router) = network.router {
        let _ = writeln!(
            text,
            "    routes:\n      - to: \"0.0.0.0/0\"\n        via: \"{router}\"\n        metric: {metric}"
        );
    }
    if let Some(gateway) = network.gateway {
        let _ = writeln!(
            text,
            "    nameservers:\n      addresses: [\"{gateway}\"]\n      search: [\"{}\"]",
            network.domain
        );
    }
}

/// What a file of user-data has to be.
pub const EXPECTED: &str = "a file of at most 8 MiB";

/// What is too long of a file of user-data, for the [`EXPECTED`]. One that cannot be looked at has
/// a fault of its own.
pub fn too_long(user_data: &Path) -> Option<String> {
    let length = fs::metadata(user_data).ok()?.len();
    (length > MAX_BYTES).then(|| format!("{}, which has {length} bytes", user_data.display()))
}

/// Writes the volume of a machine from its file of user-data.
///
/// # Errors
/// The system's; a file of more than 8 MiB.
pub fn write(place: &Path, machine: &str, user_data: &Path, network_config: Option<&str>) -> io::Result<()> {
    if let Some(found) = too_long(user_data) {
        let text = format!("the user-data of cloud-init: expected {EXPECTED}, found {found}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    let volume = volume(machine, &fs::read(user_data)?, network_config)?;
    private_file(place)?.write_all(&volume)
}

/// The bytes of a volume with this user-data.
fn volume(machine: &str, user_data: &[u8], network_config: Option<&str>) -> io::Result<Vec<u8>> {
    let bytes = (user_data.len() + OWN_BYTES).next_multiple_of(STEP_BYTES);
    let mut disk = Cursor::new(vec![0; bytes]);
    // The same content gives the same bytes.
    format_volume(&mut disk, FormatVolumeOptions::new().volume_label(LABEL).volume_id(0x746d_626f))?;
    let meta_data =
        format!("instance-id: {machine}-{:016x}\nlocal-hostname: {machine}\n", fnv1a(user_data.iter().copied()));
    {
        let volume = FileSystem::new(&mut disk, FsOptions::new())?;
        let root = volume.root_dir();
        let files = [("user-data", user_data), ("meta-data", meta_data.as_bytes())];
        let network_config = network_config.map(|text| ("network-config", text.as_bytes()));
        for (name, content) in files.into_iter().chain(network_config) {
            root.create_file(name)?.write_all(content)?;
        }
    }
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::Command;

    #[test]
    fn a_volume_has_its_files_and_depends_on_the_content_alone() {
        let user_data = b"#cloud-config\nhostname: x\n".repeat(50_000);
        let bytes = volume("web", &user_data, Some("version: 2\n")).unwrap();
        assert_eq!(bytes, volume("web", &user_data, Some("version: 2\n")).unwrap());
        let mut disk = Cursor::new(bytes);
        let volume = FileSystem::new(&mut disk, FsOptions::new()).unwrap();
        let read = |name: &str| {
            let mut content = Vec::new();
            volume.root_dir().open_file(name).unwrap().read_to_end(&mut content).unwrap();
            content
        };
        assert_eq!(read("user-data"), user_data);
        assert_eq!(read("network-config"), b"version: 2\n");
        let meta_data = String::from_utf8(read("meta-data")).unwrap();
        assert!(
            meta_data.starts_with("instance-id: web-") && meta_data.ends_with("\nlocal-hostname: web\n"),
            "{meta_data}"
        );
    }

    #[test]
    fn a_volume_is_found_by_its_label_as_cloud_init_does_it() {
        let dir = tempfile::tempdir().unwrap();
        let (source, place) = (dir.path().join("user-data"), path(dir.path(), "web"));
        fs::write(&source, "#cloud-config\n").unwrap();
        write(&place, "web", &source, None).unwrap();
        let found = match Command::new("blkid")
            .args(["-p", "-s", "LABEL", "-s", "TYPE", "-o", "export"])
            .arg(&place)
            .output()
        {
            Ok(found) => String::from_utf8_lossy(&found.stdout).into_owned(),
            Err(error) => return tombolo_testing::skip(format!("blkid: {error}")),
        };
        assert!(found.lines().any(|l| l == "LABEL=CIDATA") && found.lines().any(|l| l == "TYPE=vfat"), "{found}");
        assert!(write(&place, "web", &dir.path().join("absent"), None).is_err());
    }

    /// The network-config of the VM "v" of a file.
    fn config(networks: &str, vm: &str) -> Option<String> {
        let text = format!("name = \"t\"\n{networks}\n[vm.v]\ndisk = \"Cargo.toml\"\n{vm}");
        let fabric = crate::file::parse(&text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml")).unwrap();
        network_config(&fabric, &fabric.machines[0])
    }

    #[test]
    fn each_device_is_configured_as_its_network_needs() {
        let networks = r#"
[network.lan]
[network.quiet]
subnet = "10.9.0.0/24"
dhcp = false
ipv6 = "off"
mtu = 9000
uplink = "kernel"
[network.real]
uplink = { bridge = "eth7" }
"#;
        let vm = r#"network = ["quiet", "lan", "real"]
mac = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"]
ip = "10.9.0.7"
"#;
        let expected = r#"version: 2
ethernets:
  eth0:
    match:
      macaddress: "02:00:00:00:00:01"
    dhcp4: false
    dhcp6: false
    mtu: 9000
    addresses:
      - "10.9.0.7/24"
    routes:
      - to: "0.0.0.0/0"
        via: "10.9.0.2"
        metric: 100
    nameservers:
      addresses: ["10.9.0.1"]
      search: ["t.internal"]
  eth1:
    match:
      macaddress: "02:00:00:00:00:02"
    dhcp4: true
    dhcp6: true
    accept-ra: true
    dhcp4-overrides:
      route-metric: 101
    dhcp6-overrides:
      route-metric: 101
  eth2:
    match:
      macaddress: "02:00:00:00:00:03"
    dhcp4: true
    dhcp6: false
    accept-ra: true
    dhcp4-overrides:
      route-metric: 102
"#;
        assert_eq!(config(networks, vm).unwrap(), expected);
        let alone = config("[network.lan]", "mac = \"02:00:00:00:00:01\"\n").unwrap();
        assert!(
            !alone.contains("metric") && alone.ends_with("dhcp4: true\n    dhcp6: true\n    accept-ra: true\n"),
            "{alone}"
        );
        let none = config("[network.lan]\ndhcp = false\nipv6 = \"off\"", "").unwrap();
        assert!(none.ends_with("dhcp4: false\n    dhcp6: false\n"), "{none}");
    }

    #[test]
    fn devices_that_come_later_or_not_at_all_are_not_waited_for() {
        assert_eq!(config("[network.lan]", "attach = \"ivshmem\"\n"), None);
        assert_eq!(config("[network.lan]", "network = []\n").unwrap(), "version: 2\nethernets: {}\n");
    }
}
