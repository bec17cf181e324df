//! `[cell.NAME]` and `[vm.NAME]`, and the images of cells.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use tombolo_shm::environment::variable;
use toml::de::{DeTable, DeValue};

use super::network::{guard, ip6};
use super::words::{clean_name, format_of, size_mib};
use super::{Reader, no_network, region};
use crate::file::boot::boot;
use crate::file::model::*;
use crate::file::read::{Section, found};
use crate::file::traffic::traffic;

/// What `{n}` stands for in a section with `count`: the number of each machine.
const NUMBER: &str = "{n}";

impl Reader<'_, '_> {
    pub(super) fn machine(
        &mut self,
        kind: MachineKind,
        name: String,
        span: Range<usize>,
        table: &DeTable<'_>,
        base: &str,
    ) {
        let fabric = self.mac_base(&format!("{}.{name}", kind.word()), base);
        let (only, none_at_all) = (self.only_network(), self.fabric.networks.is_empty());
        let dir = self.fabric.dir.clone();
        let file = |text: &str| (!text.is_empty()).then(|| dir.join(text));
        let mut s = self.open(kind.word(), &(name.clone(), span, table));
        let cell = kind == MachineKind::Cell;
        let attach = s
            .word(
                "attach",
                &[
                    ("vhost-user", Attach::VhostUser),
                    ("stream", Attach::Stream),
                    ("ivshmem", Attach::Ivshmem),
                    ("ivshmem-plain", Attach::IvshmemPlain),
                    ("xen", Attach::Xen),
                ],
            )
            .unwrap_or(Attach::VhostUser);
        s.applies("attach", Some(attach.word()));
        let from_network = !cell && matches!(s.raw("boot"), Some((DeValue::Boolean(true) | DeValue::Table(_), _)));
        let netboot = if cell { None } else { boot(&mut s) };
        let (boot, cmdline) = if cell {
            let app = s.string("app");
            let image = match s.text("image", file) {
                Some(path) => {
                    if app.is_some() {
                        let spot = s.raw("app").map(|(_, span)| span).unwrap_or(0..0);
                        s.wrong("app", &spot, "both app and image", Some("keep one of them".into()));
                    }
                    Image::Path(path)
                }
                None => Image::App(app.unwrap_or_else(|| name.clone())),
            };
            (Boot::Cell(image), s.text("args", |t| Some(t.to_string())).unwrap_or_default())
        } else {
            let kernel = s.text("kernel", file);
            let initrd = s.text("initrd", file);
            let format = s.word("disk_format", &[("raw", "raw"), ("qcow2", "qcow2")]).unwrap_or("raw");
            let first = s.text("disk", file).map(|path| (path, format.to_string()));
            let more = s.list("disks", true, file).unwrap_or_default();
            let disks =
                first.into_iter().chain(more.into_iter().map(|path| (path.clone(), format_of(&path)))).collect();
            let cloud_init = s.text("cloud_init", file);
            if s.raw("kernel").is_none() && s.raw("disk").is_none() && !s.doubted("disk") && !from_network {
                s.missing("kernel");
            }
            let console = if attach == Attach::Xen { "console=hvc0" } else { "console=ttyS0" };
            let cmdline = s.text("cmdline", |t| Some(t.to_string())).unwrap_or_else(|| console.into());
            for on in ["kernel", "disk"] {
                let given = s.raw(on).map(|_| "");
                s.applies(on, given);
            }
            (Boot::Vm { kernel, initrd, disks, cloud_init }, cmdline)
        };
        let networks = s.list("network", true, |t| Some(t.to_string())).or(only.map(|n| vec![n])).unwrap_or_default();
        if s.raw("network").is_none() {
            no_network(&mut s, networks.is_empty(), none_at_all);
        }
        let counted = s.number("count", 1, 256);
        if let Some(n) = counted {
            alone_in_its_section(&mut s, &name, n);
        }
        let count = networks.len();
        let macs = s.list("mac", true, Mac::parse).unwrap_or_default();
        let ips: Vec<Ipv4Addr> = s.list("ip", true, |t| t.parse().ok()).unwrap_or_default();
        for (key, len) in [("mac", macs.len()), ("ip", ips.len())] {
            if len > count && !s.doubted("network") {
                let spot = s.raw(key).map(|(_, span)| span).unwrap_or(0..0);
                s.wrong(key, &spot, format!("{len} of them for {count} network(s)"), None);
            }
        }
        let nics = networks
            .into_iter()
            .enumerate()
            .map(|(i, network)| Nic {
                mac: macs.get(i).copied().unwrap_or_else(|| Mac::derived(&[&fabric, &name, &network, &i.to_string()])),
                ip: ips.get(i).copied(),
                network,
            })
            .collect();
        let machine = Machine {
            section: format!("{}.{name}", kind.word()),
            kind,
            boot,
            nics,
            memory_mib: s.text("memory", size_mib).unwrap_or(if cell { 32 } else { 256 }),
            cpus: s.number("cpus", 1, 64).unwrap_or(1) as u16,
            machine: s
                .word("machine", &[("microvm", MachineType::Microvm), ("q35", MachineType::Q35)])
                .unwrap_or(if cell { MachineType::Microvm } else { MachineType::Q35 }),
            accel: s
                .word("accel", &[("auto", Accel::Auto), ("kvm", Accel::Kvm), ("tcg", Accel::Tcg)])
                .unwrap_or(Accel::Auto),
            cmdline,
            iommu: !cell && s.flag("iommu").unwrap_or(false),
            agent: !cell && s.flag("agent").unwrap_or(false),
            qemu: s.list("qemu", false, |t| Some(t.to_string())).unwrap_or_default(),
            xl: s.list("xl", false, |t| (!t.contains('\n')).then(|| t.to_string())).unwrap_or_default(),
            attach,
            region: region(&mut s, 1 << 20, 16 << 20),
            queues: s.number("queues", 1, 8).unwrap_or(1) as u16,
            guard: guard(&mut s).unwrap_or(Guard::Ip),
            ip6: ip6(&mut s),
            traffic: traffic(&mut s),
            restart: s
                .word(
                    "restart",
                    &[("no", Restart::No), ("on-failure", Restart::OnFailure), ("always", Restart::Always)],
                )
                .unwrap_or(Restart::No),
            depends_on: s.list("depends_on", true, |t| Some(t.to_string())).unwrap_or_default(),
            from_network,
            netboot,
            name,
        };
        match counted {
            None => self.fabric.machines.push(machine),
            Some(last) => self.fabric.machines.extend((1..=last).map(|n| numbered(&machine, n, &fabric))),
        }
    }

    /// Gives a `depends_on` that names a section with `count` the names of its machines.
    pub(super) fn depend_on_all_of_a_section(&mut self) {
        let known: Vec<(String, String)> =
            self.fabric.machines.iter().map(|m| (m.name.clone(), m.section.clone())).collect();
        let meant = |name: &String| -> Vec<String> {
            let of_it = |section: &str| section.split_once('.').is_some_and(|(_, s)| s == name);
            match known.iter().any(|(other, _)| other == name) {
                true => vec![name.clone()],
                false => {
                    let all: Vec<_> = known.iter().filter(|(_, s)| of_it(s)).map(|(n, _)| n.clone()).collect();
                    if all.is_empty() { vec![name.clone()] } else { all }
                }
            }
        };
        for machine in &mut self.fabric.machines {
            machine.depends_on = machine.depends_on.iter().flat_map(meant).collect();
        }
    }
}

/// Complains about keys that several machines of one section cannot share.
fn alone_in_its_section(s: &mut Section<'_, '_, '_, '_>, name: &str, count: i64) {
    if clean_name(&format!("{name}-{count}")).is_none() {
        let spot = s.raw("count").map(|(_, span)| span).unwrap_or(0..0);
        let hint = Some("give the section a shorter name: the machines are NAME-1 and so on".into());
        s.wrong("count", &spot, format!("one that makes the name {name}-{count} longer than 24"), hint);
    }
    for key in ["mac", "ip"] {
        if let Some((value, span)) = s.raw(key).filter(|_| count > 1) {
            let hint = Some(format!("leave `{key}` out: each machine gets its own"));
            s.wrong(key, &span, format!("{} for {count} machines", found(value)), hint);
        }
    }
    let has_disks = count > 1 && s.has_key("disk");
    for key in ["disk", "disks"].into_iter().filter(|_| has_disks) {
        let Some((value, span)) = s.raw(key) else { continue };
        let alone = |value: &DeValue<'_>| value.as_str().is_some_and(|text| !text.contains(NUMBER));
        let shared = alone(value) || value.as_array().is_some_and(|list| list.iter().any(|v| alone(v.get_ref())));
        if shared {
            let hint = Some(format!("put {NUMBER} into the name: it is the number of each machine"));
            s.wrong(key, &span, format!("one disk for {count} machines"), hint);
        }
    }
}

/// The `n`-th machine of a section with `count`.
fn numbered(machine: &Machine, n: i64, fabric: &str) -> Machine {
    let number = n.to_string();
    let text = |text: &str| text.replace(NUMBER, &number);
    let path = |path: &Path| path.to_str().map_or_else(|| path.to_path_buf(), |p| text(p).into());
    let mut out = machine.clone();
    out.name = format!("{}-{n}", machine.name);
    out.cmdline = text(&machine.cmdline);
    for (i, nic) in out.nics.iter_mut().enumerate() {
        // One machine may have been given an address.
        let derived = Mac::derived(&[fabric, &machine.name, &nic.network, &i.to_string()]);
        if nic.mac == derived {
            nic.mac = Mac::derived(&[fabric, &out.name, &nic.network, &i.to_string()]);
        }
    }
    if let Boot::Vm { disks, cloud_init, .. } = &mut out.boot {
        disks.iter_mut().for_each(|(disk, _)| *disk = path(disk));
        *cloud_init = cloud_init.as_deref().map(path);
    }
    out
}

/// Where apps are looked for: `$TOMBOLO_APPS`, beside the program, the source tree,
/// `lib/tombolo/apps` of the prefix that the program is installed in, `/usr/lib/tombolo/apps`.
fn app_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = variable("TOMBOLO_APPS").map(PathBuf::from).into_iter().collect();
    if let Ok(exe) = std::env::current_exe() {
        for up in exe.ancestors().skip(1).take(4) {
            folders.push(up.join("apps"));
            folders.push(up.join("cells/target/x86_64-unknown-linux-gnu/release"));
        }
        folders.extend(exe.ancestors().nth(2).map(|prefix| prefix.join("lib/tombolo/apps")));
        folders.retain(|f| f.is_dir());
    }
    let debians = PathBuf::from("/usr/lib/tombolo/apps");
    if !folders.contains(&debians) {
        folders.push(debians);
    }
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// The names of the apps that are built, sorted.
pub fn apps() -> Vec<String> {
    let entries = app_folders().into_iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    let files = entries.filter(|e| e.path().is_file()).filter_map(|e| e.file_name().into_string().ok());
    // Beside the images Cargo leaves files with a dot in their names. Two folders may have one app.
    files.filter(|name| !name.contains('.')).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The path of a cell app's image.
pub(crate) fn find_app(app: &str) -> Result<PathBuf, Vec<PathBuf>> {
    let mut tried = Vec::new();
    for folder in app_folders() {
        let path = folder.join(app);
        if path.is_file() {
            return Ok(path);
        }
        tried.push(path);
    }
    Err(tried)
}
