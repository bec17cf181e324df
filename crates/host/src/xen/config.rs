//! A machine of the file and the runtime folder → the configuration of a domain, as xl.cfg(5) has
//! it. Pure.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::file::{Boot, Fabric, Machine, MachineKind};
use crate::log::shown;
use crate::plan;

/// Vifs of a cell, beside the first, that its command line can name (`ip.N=`).
const NAMED_VIFS: usize = 2;

/// A domain that the fabric creates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// Name of the machine in the fabric file.
    pub machine: String,
    /// Its name in `xl list`.
    pub name: String,
    /// What it is found by.
    pub uuid: String,
    /// The configuration that `xl` gets.
    pub config: String,
}

/// The name of a machine's domain. Fabrics and machines have no dot in their names, so no two have
/// the same.
pub fn domain_of(fabric: &str, machine: &str) -> String {
    format!("{fabric}.{machine}")
}

/// The file of a machine's configuration. It is on the command line of its `xl`, which is found by
/// that.
pub fn config_path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.xl"))
}

/// What `xl` is started with, behind the program: it stays in the foreground until the domain's
/// end, with the console.
pub fn words(runtime: &Path, machine: &str) -> Vec<String> {
    let path = config_path(runtime, machine).display().to_string();
    vec!["create".into(), "-q".into(), "-F".into(), "-c".into(), path]
}

/// The domain of a machine. `image` is a cell's.
pub fn build(fabric: &Fabric, machine: &Machine, image: Option<&Path>, runtime: &Path) -> Domain {
    let (kernel, ramdisk, cmdline) = match &machine.boot {
        Boot::Cell(_) => (image, None, cell_words(fabric, machine)),
        Boot::Vm { kernel, initrd, .. } => (kernel.as_deref(), initrd.as_deref(), machine.cmdline.clone()),
    };
    let (name, uuid) = (domain_of(&fabric.name, &machine.name), uuid(runtime, &machine.name));
    // A path that is no UTF-8 is one that the file cannot name.
    let path = |path: &Path| quoted(&path.to_string_lossy());
    // Of two lines for one key `xl` takes the last, so the fabric's own come behind the file's.
    let mut lines = machine.xl.clone();
    lines.push(format!("name = {}", quoted(&name)));
    lines.push(format!("uuid = {}", quoted(&uuid)));
    lines.push("type = 'pvh'".into());
    lines.extend(kernel.map(|kernel| format!("kernel = {}", path(kernel))));
    lines.extend(ramdisk.map(|ramdisk| format!("ramdisk = {}", path(ramdisk))));
    lines.push(format!("cmdline = {}", quoted(&cmdline)));
    lines.push(format!("memory = {}", machine.memory_mib));
    lines.push(format!("vcpus = {}", machine.cpus));
    // The fabric's port is the backend: there is nothing for a script to do.
    let vifs: Vec<_> = machine.nics.iter().map(|nic| format!("'mac={},script=/bin/true'", nic.mac)).collect();
    lines.push(format!("vif = [{}]", vifs.join(", ")));
    // Each end is the fabric's to report, and to start again what the file says so of.
    lines.extend(["poweroff", "reboot", "crash", "watchdog", "soft_reset"].map(|end| format!("on_{end} = 'destroy'")));
    Domain { machine: machine.name.clone(), name, uuid, config: lines.join("\n") + "\n" }
}

/// The domain of a machine of which only the runtime folder is left.
pub fn unrecorded(fabric: &str, machine: &str, runtime: &Path) -> Domain {
    let (name, uuid) = (domain_of(fabric, machine), uuid(runtime, machine));
    Domain { machine: machine.into(), name, uuid, config: String::new() }
}

/// What a domain's configuration has that another has not, for people: "now memory = 48, before
/// memory = 32".
pub fn difference(before: &Domain, now: &Domain) -> String {
    /// Characters of each side that are shown.
    const SHOWN: usize = 160;
    let only = |of: &Domain, not_in: &Domain| {
        let lines = of.config.lines().filter(|line| !not_in.config.lines().any(|other| other == *line));
        let text = lines.collect::<Vec<_>>().join("; ");
        shown(&text, SHOWN)
    };
    let sides = [("now", only(now, before)), ("before", only(before, now))];
    let told = sides.iter().filter(|(_, text)| !text.is_empty()).map(|(when, text)| format!("{when} {text}"));
    told.collect::<Vec<_>>().join(", ")
}

/// A cell's command line: what the fabric knows of it, then its own words.
fn cell_words(fabric: &Fabric, machine: &Machine) -> String {
    debug_assert!(machine.kind == MachineKind::Cell);
    let mut out = vec![format!("hostname={}", machine.name)];
    // The first vif asks by DHCP; the others have only what they are told.
    for (i, nic) in machine.nics.iter().enumerate().skip(1).take(NAMED_VIFS) {
        let prefix = fabric.network(&nic.network).map(|n| n.subnet.prefix);
        if let (Some(ip), Some(prefix)) = (nic.ip, prefix)
            && !machine.cmdline.contains(&format!("ip.{i}="))
        {
            out.push(format!("ip.{i}={ip}/{prefix}"));
        }
    }
    if machine.queues > 1 && !machine.cmdline.contains("queues=") {
        out.push(format!("queues={}", machine.queues));
    }
    out.extend(plan::words6(fabric, machine, 1 + NAMED_VIFS));
    out.push(machine.cmdline.clone());
    out.join(" ").trim_end().to_string()
}

/// A version 8 UUID (RFC 9562 §5.8) that depends only on the fabric's runtime folder and the
/// machine's name. FNV-1a of 128 bits.
fn uuid(runtime: &Path, machine: &str) -> String {
    const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = runtime.as_os_str().as_bytes().iter().chain(&[0]).chain(machine.as_bytes());
    let mut hash = bytes.fold(OFFSET_BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME)).to_be_bytes();
    hash[6] = 0x80 | hash[6] & 0x0f;
    hash[8] = 0x80 | hash[8] & 0x3f;
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// A string of xl's configuration (libxlu_cfg.c, `xlu__cfgl_dequote`). Numeric escapes must not be
/// used: libxlutil takes them and forgets the character. A character without an escape is written
/// as it is.
fn quoted(text: &str) -> String {
    let mut out = String::from("'");
    for char in text.chars() {
        match char {
            '\'' | '\\' => out.extend(['\\', char]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            _ => out.push(char),
        }
    }
    out.push('\'');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;

    fn domain(text: &str) -> Domain {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let text = format!("name = \"demo\"\n[network.lan]\n[network.ops]\n{text}attach = \"xen\"\n");
        let fabric = file::parse(&text, &path).unwrap();
        build(&fabric, &fabric.machines[0], Some(Path::new("/i'm/a cell")), Path::new("/run/t/demo"))
    }

    #[test]
    fn a_cell_is_a_pvh_domain_with_a_vif_for_each_network() {
        let web = domain(
            "[cell.web]\nimage = \"Cargo.toml\"\nnetwork = [\"lan\", \"ops\"]\nargs = \"verbose\"\nqueues = 2\nmac = [\"00:16:3e:00:00:01\", \"00:16:3e:00:00:02\"]\nip = [\"10.87.0.9\", \"10.87.1.9\"]\nxl = [\"tsc_mode='native'\"]\n",
        );
        let expected = format!(
            "tsc_mode='native'\n\
             name = 'demo.web'\n\
             uuid = '{}'\n\
             type = 'pvh'\n\
             kernel = '/i\\'m/a cell'\n\
             cmdline = 'hostname=web ip.1=10.87.1.9/24 queues=2 verbose'\n\
             memory = 32\n\
             vcpus = 1\n\
             vif = ['mac=00:16:3e:00:00:01,script=/bin/true', 'mac=00:16:3e:00:00:02,script=/bin/true']\n\
             on_poweroff = 'destroy'\n\
             on_reboot = 'destroy'\n\
             on_crash = 'destroy'\n\
             on_watchdog = 'destroy'\n\
             on_soft_reset = 'destroy'\n",
            web.uuid
        );
        assert_eq!(web.config, expected);
        assert_eq!((web.machine.as_str(), web.name.as_str()), ("web", "demo.web"));
        assert_eq!(words(Path::new("/run/t/demo"), "web"), ["create", "-q", "-F", "-c", "/run/t/demo/web.xl"]);
    }

    #[test]
    fn a_vm_boots_its_own_kernel_with_its_own_words() {
        let guest =
            domain("[vm.guest]\nkernel = \"Cargo.toml\"\ninitrd = \"src/lib.rs\"\nnetwork = []\ncpus = 2\n").config;
        let dir = env!("CARGO_MANIFEST_DIR");
        assert!(guest.contains(&format!("kernel = '{dir}/Cargo.toml'\nramdisk = '{dir}/src/lib.rs'\n")), "{guest}");
        assert!(guest.contains("cmdline = 'console=hvc0'\nmemory = 256\nvcpus = 2\nvif = []\n"), "{guest}");
        let own = domain("[vm.guest]\nkernel = \"Cargo.toml\"\nnetwork = \"lan\"\ncmdline = \"it's\"\n").config;
        assert!(own.contains("cmdline = 'it\\'s'\n"), "{own}");
    }

    #[test]
    fn a_changed_section_is_told_by_its_lines() {
        let text = "[cell.web]\nimage = \"Cargo.toml\"\nnetwork = \"lan\"\n";
        let (before, now) = (domain(text), domain(&format!("{text}memory = \"48M\"\n")));
        assert_eq!(difference(&before, &now), "now memory = 48, before memory = 32");
        let bare = unrecorded("demo", "web", Path::new("/run/t/demo"));
        assert_eq!((bare.name, bare.uuid), (before.name, before.uuid));
    }

    #[test]
    fn a_uuid_is_one_machines_of_one_folder() {
        let one = uuid(Path::new("/run/a"), "web");
        assert_eq!(one, uuid(Path::new("/run/a"), "web"));
        assert!(one != uuid(Path::new("/run/b"), "web") && one != uuid(Path::new("/run/a"), "db"));
        let lengths: Vec<_> = one.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert_eq!(&one[14..15], "8");
    }

    #[test]
    fn text_of_the_file_stays_inside_its_string() {
        assert_eq!(quoted("a'\nb\\x ä\"\t"), "'a\\'\\nb\\\\x ä\"\\t'");
    }
}
