//! A machine of the file, what the probe found, and the runtime directory → QEMU's arguments. Pure.

use std::path::{Path, PathBuf};

use super::probe::{Qemu, Tsc};
use crate::file::{Attach, Boot, Machine, MachineKind, MachineType};

/// One network device: the socket that its port listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name of the port.
    pub port: String,
    /// The Unix socket between QEMU and the switch.
    pub socket: PathBuf,
    /// MAC, in text.
    pub mac: String,
    /// MTU in bytes, offered to the guest over vhost-user.
    pub mtu: u16,
}

/// One ivshmem device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedMemory {
    /// Name of the link.
    pub link: String,
    /// The socket of its server; `None` for a plain device, whose memory is inherited.
    pub socket: Option<PathBuf>,
    /// Doorbells of each peer.
    pub vectors: u32,
    /// Size of the memory.
    pub bytes: u64,
    /// What the guest is told on its command line.
    pub word: Option<String>,
}

/// The placeholder for a plain device's memory in the arguments, until the descriptor's number is
/// known.
pub fn memory_place(link: &str) -> String {
    format!("/proc/self/fd/{link}")
}

/// What the arguments depend on besides the machine.
#[derive(Debug, Clone)]
pub struct Surroundings<'a> {
    /// The QEMU to run.
    pub qemu: &'a Qemu,
    /// Whether to use KVM.
    pub kvm: bool,
    /// Name of the fabric.
    pub fabric: &'a str,
    /// Where the monitor's socket goes.
    pub runtime: &'a Path,
    /// The image of a cell.
    pub image: Option<&'a Path>,
    /// Rate of the time-stamp counter, which emulation hands on as it is.
    pub tsc: Option<Tsc>,
    /// What a cell's command line has of the fabric besides.
    pub words: &'a str,
}

/// The socket of a machine's monitor (QMP).
pub fn monitor_path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.qmp"))
}

/// Whether a QEMU with these arguments has a disk, which its guest should leave in order: the
/// file's `disk`, or one among its own arguments (`qemu`).
pub fn has_disk(words: &[String]) -> bool {
    let is_disk = |word: &String| matches!(word.as_str(), "-drive" | "-blockdev" | "-hda" | "-hdb" | "-hdc" | "-hdd");
    // What cloud-init reads is written by no guest.
    let is_seed = |word: &String| word.starts_with("if=none,id=seed,");
    words.iter().enumerate().any(|(i, word)| is_disk(word) && !words.get(i + 1).is_some_and(is_seed))
}

/// What QEMU is called with after `-name`: how a running one is recognised as this fabric's.
pub fn cookie(fabric: &str, machine: &str) -> String {
    format!("tombolo/{fabric}/{machine}")
}

/// QEMU escapes a comma in an option's value by doubling it.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// The whole argument list, the program first.
pub fn build(machine: &Machine, devices: &[Device], shared: &[SharedMemory], with: &Surroundings<'_>) -> Vec<String> {
    let mut out: Vec<String> = vec![with.qemu.path.display().to_string()];
    let mut add = |words: &[&str]| out.extend(words.iter().map(|w| w.to_string()));
    let accel = if with.kvm { "kvm" } else { "tcg" };
    let microvm = machine.machine == MachineType::Microvm;
    add(&["-name", &cookie(with.fabric, &machine.name)]);
    add(&["-nodefaults", "-no-user-config", "-display", "none"]);
    // What a guest that breaks out of QEMU finds: no new programs, no new privileges.
    add(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    // microvm: without ACPI the virtio-mmio devices are on the kernel's command line, where a cell
    // looks for them. Debian's kernels look in the ACPI tables only, which the small firmware hands
    // on (QEMU 10 takes another if not told). An ivshmem device is PCI's: microvm has a bus only if
    // asked, which a cell finds by the tables too.
    let chipset = match (microvm, machine.kind, shared.is_empty()) {
        (true, MachineKind::Cell, true) => "microvm,acpi=off,pit=on,rtc=on",
        (true, MachineKind::Vm, true) => "microvm,acpi=on,pit=on,rtc=on",
        (true, _, false) => "microvm,acpi=on,pcie=on,pit=on,rtc=on",
        // KVM remaps interrupts only with the I/O APIC in QEMU.
        // What the firmware says is seen on the console, since there is no screen.
        (false, ..) if machine.from_network && !(machine.iommu && with.kvm) => "q35,graphics=off",
        (false, ..) if machine.iommu && with.kvm => "q35,kernel-irqchip=split",
        (false, ..) => "q35",
    };
    if microvm {
        add(&["-bios", "qboot.rom"]);
    }
    add(&["-M", &format!("{chipset},accel={accel},memory-backend=mem")]);
    if machine.iommu {
        // It must come before the devices that it serves.
        add(&["-device", "intel-iommu"]);
    }
    if with.kvm {
        add(&["-cpu", "host"]);
    }
    let memory = format!("{}M", machine.memory_mib);
    add(&["-m", &memory, "-smp", &machine.cpus.to_string()]);
    // Shared and named by nothing: the fabric maps it through the vhost-user socket.
    add(&["-object", &format!("memory-backend-memfd,id=mem,size={memory},share=on")]);
    // Its standard streams are what `crate::console` makes; a ^C that is typed is the guest's.
    add(&["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    let monitor = escape(&monitor_path(with.runtime, &machine.name));
    add(&["-qmp", &format!("unix:{monitor},server=on,wait=off")]);
    let told: String = shared.iter().filter_map(|s| s.word.as_ref()).map(|word| format!(" {word}")).collect();
    match &machine.boot {
        Boot::Cell(_) => {
            let image = with.image.map(|p| p.display().to_string()).unwrap_or_default();
            let given = if with.words.is_empty() { String::new() } else { format!(" {}", with.words) };
            let mut words = format!("hostname={}{told}{given} {}", machine.name, machine.cmdline);
            // Machines differ in the order in which a guest finds its devices; the first network's
            // is to be the first.
            if machine.nics.len() > 1 && !words.contains("macs=") {
                let macs: Vec<String> = machine.nics.iter().map(|nic| nic.mac.to_string()).collect();
                words = format!("macs={} {words}", macs.join(","));
            }
            // An emulated guest reads the counter as it is; told its rate, a cell need not measure
            // it, which is a noticeable part of its start.
            if let Some(Tsc { khz, .. }) = with.tsc.filter(|tsc| tsc.told && !with.kvm && !words.contains("tsc_khz=")) {
                words = format!("tsc_khz={khz} {words}");
            }
            add(&["-kernel", &image, "-append", words.trim_end()]);
            // A cell that ends itself says with which code.
            add(&["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04", "-no-reboot"]);
        }
        Boot::Vm { kernel, initrd, disks, cloud_init } => {
            if let Some(kernel) = kernel {
                let words = match with.tsc.filter(|_| microvm && !with.kvm) {
                    // A Linux kernel there finds no clock to measure the counter's rate by, and
                    // hangs over that.
                    Some(Tsc { khz, .. }) if !machine.cmdline.contains("tsc_early_khz=") => {
                        format!("tsc_early_khz={khz} {}", machine.cmdline)
                    }
                    _ => machine.cmdline.clone(),
                };
                add(&["-kernel", &kernel.display().to_string(), "-append", format!("{words}{told}").trim_end()]);
            }
            if let Some(initrd) = initrd {
                add(&["-initrd", &initrd.display().to_string()]);
            }
            let device = if microvm { "virtio-blk-device" } else { "virtio-blk-pci" };
            for (i, (path, format)) in disks.iter().enumerate() {
                let id = if i == 0 { "disk".to_string() } else { format!("disk{i}") };
                add(&["-drive", &format!("if=none,id={id},format={format},file={}", escape(path))]);
                // Behind the network devices.
                let order = machine.from_network.then(|| format!(",bootindex={}", machine.nics.len() + 1 + i));
                add(&["-device", &format!("{device},drive={id}{}", order.unwrap_or_default())]);
            }
            if cloud_init.is_some() {
                let path = escape(&super::cloud_init::path(with.runtime, &machine.name));
                add(&["-drive", &format!("if=none,id=seed,format=raw,readonly=on,file={path}")]);
                add(&["-device", &format!("{device},drive=seed")]);
            }
        }
    }
    for (i, device) in devices.iter().enumerate() {
        let path = escape(&device.socket);
        let queues = machine.queues;
        let shared = machine.attach == Attach::VhostUser;
        if shared {
            add(&["-chardev", &format!("socket,id=net{i}c,path={path},reconnect=1")]);
            add(&["-netdev", &format!("vhost-user,id=net{i},chardev=net{i}c,queues={queues}")]);
        } else {
            let again = if with.qemu.stream_reconnects() { ",reconnect-ms=1000" } else { "" };
            add(&["-netdev", &format!("stream,id=net{i},server=off,addr.type=unix,addr.path={path}{again}")]);
        }
        let mut nic = match (microvm, machine.from_network) {
            (true, _) => "virtio-net-device".to_string(),
            // Firmware that boots from the network runs the boot ROM (iPXE) of QEMU's packages.
            (false, true) => format!("virtio-net-pci,bootindex={}", i + 1),
            (false, false) => "virtio-net-pci,romfile=".to_string(),
        };
        nic.push_str(&format!(",netdev=net{i},mac={}", device.mac));
        if shared {
            nic.push_str(&format!(",host_mtu={}", device.mtu));
        }
        if queues > 1 {
            nic.push_str(",mq=on");
        }
        if !microvm {
            if shared && !with.kvm && with.qemu.msix_trap() {
                // This QEMU crashes when a guest's driver starts MSI-X over vhost-user under
                // emulation; INTx works.
                nic.push_str(",vectors=0");
            } else if queues > 1 {
                nic.push_str(&format!(",vectors={}", 2 * queues + 2));
            }
        }
        add(&["-device", &nic]);
    }
    for (i, device) in shared.iter().enumerate() {
        match &device.socket {
            Some(socket) => {
                add(&["-chardev", &format!("socket,id=ivc{i},path={}", escape(socket))]);
                add(&["-device", &format!("ivshmem-doorbell,chardev=ivc{i},vectors={}", device.vectors)]);
            }
            None => {
                let (bytes, place) = (device.bytes, memory_place(&device.link));
                add(&["-object", &format!("memory-backend-file,id=ivm{i},share=on,size={bytes},mem-path={place}")]);
                add(&["-device", &format!("ivshmem-plain,memdev=ivm{i}")]);
            }
        }
    }
    if machine.agent {
        // Behind all others, so that no other device changes its place by it.
        let path = escape(&super::agent::socket_path(with.runtime, &machine.name));
        let bus = if microvm { "virtio-serial-device" } else { "virtio-serial-pci" };
        add(&["-chardev", &format!("socket,id=agent,path={path},server=on,wait=off")]);
        add(&["-device", &format!("{bus},max_ports=2")]);
        add(&["-device", &format!("virtserialport,chardev=agent,name={}", super::agent::PORT)]);
    }
    if microvm && machine.kind == MachineKind::Cell {
        add(&["-global", "virtio-mmio.force-legacy=false"]);
    }
    out.extend(machine.qemu.iter().cloned());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;

    fn machine(text: &str) -> (file::Fabric, Machine) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
        let fabric = file::parse(&format!("name = \"f\"\n[network.lan]\n{text}"), &path).unwrap();
        let machine = fabric.machines[0].clone();
        (fabric, machine)
    }

    fn argv(text: &str, version: (u32, u32, u32), kvm: bool) -> Vec<String> {
        let (_, m) = machine(text);
        let qemu = Qemu { path: "/usr/bin/qemu".into(), version };
        let devices: Vec<_> = m
            .nics
            .iter()
            .map(|n| Device { port: m.name.clone(), socket: "/run/a,b.sock".into(), mac: n.mac.to_string(), mtu: 1500 })
            .collect();
        let with = surroundings(&qemu, kvm);
        build(&m, &devices, &[], &with)
    }

    fn surroundings(qemu: &Qemu, kvm: bool) -> Surroundings<'_> {
        Surroundings {
            qemu,
            kvm,
            fabric: "f",
            runtime: Path::new("/run/t"),
            image: Some(Path::new("/i")),
            tsc: Some(Tsc { khz: 2_300_000, told: true }),
            words: "",
        }
    }

    #[test]
    fn a_cell_on_several_networks_is_told_the_order_of_its_devices() {
        let text = "[network.ops]\n[cell.web]\nimage = \"Cargo.toml\"\nnetwork = [\"ops\", \"lan\"]\nmac = [\"02:00:00:00:00:02\", \"02:00:00:00:00:01\"]\n";
        let line = after(&argv(text, (7, 2, 22), true), "-append", 0).to_string();
        assert_eq!(line, "macs=02:00:00:00:00:02,02:00:00:00:00:01 hostname=web");
    }

    #[test]
    fn shared_memory_is_a_device_by_its_socket_or_by_inheritance() {
        let (_, m) = machine("[cell.web]\nimage = \"Cargo.toml\"\n");
        let qemu = Qemu { path: "/usr/bin/qemu".into(), version: (7, 2, 22) };
        let doorbell =
            SharedMemory { link: "a".into(), socket: Some("/run/a".into()), vectors: 2, bytes: 1 << 20, word: None };
        let word = Some("ivshmem.b.id=1".into());
        let plain = SharedMemory { link: "b".into(), socket: None, vectors: 0, bytes: 2 << 20, word };
        let planned = build(&m, &[], &[doorbell, plain], &surroundings(&qemu, true));
        assert!(after(&planned, "-M", 0).contains("acpi=on,pcie=on"));
        assert_eq!(after(&planned, "-append", 0), "hostname=web ivshmem.b.id=1");
        assert_eq!(after(&planned, "-chardev", 1), "socket,id=ivc0,path=/run/a");
        assert_eq!(after(&planned, "-device", 1), "ivshmem-doorbell,chardev=ivc0,vectors=2");
        assert_eq!(
            after(&planned, "-object", 1),
            "memory-backend-file,id=ivm1,share=on,size=2097152,mem-path=/proc/self/fd/b"
        );
    }

    fn after<'a>(argv: &'a [String], flag: &str, n: usize) -> &'a str {
        let at = argv
            .iter()
            .enumerate()
            .filter(|(_, w)| *w == flag)
            .nth(n)
            .unwrap_or_else(|| panic!("{flag} in {argv:?}"))
            .0;
        &argv[at + 1]
    }

    #[test]
    fn a_cell_gets_a_microvm_with_shared_memory_and_its_name() {
        let argv = argv("[cell.web]\nimage = \"Cargo.toml\"\nargs = \"budget=32\"\n", (7, 2, 22), false);
        assert_eq!(after(&argv, "-name", 0), "tombolo/f/web");
        assert_eq!(after(&argv, "-append", 0), "tsc_khz=2300000 hostname=web budget=32");
        assert!(after(&argv, "-M", 0).starts_with("microvm,acpi=off,") && after(&argv, "-M", 0).contains("accel=tcg"));
        assert_eq!(after(&argv, "-object", 0), "memory-backend-memfd,id=mem,size=32M,share=on");
        assert_eq!(after(&argv, "-chardev", 1), "socket,id=net0c,path=/run/a,,b.sock,reconnect=1");
        assert!(!argv.iter().any(|w| w.contains("vectors")), "virtio-mmio has no MSI-X");
    }

    #[test]
    fn the_counters_rate_is_told_to_emulated_cells_that_were_not_told_another() {
        let line = |args: &str, kvm| {
            let text = format!("[cell.web]\nimage = \"Cargo.toml\"\nargs = \"{args}\"\n");
            after(&argv(&text, (7, 2, 22), kvm), "-append", 0).to_string()
        };
        assert_eq!(line("x", true), "hostname=web x");
        assert_eq!(line("tsc_khz=7", false), "hostname=web tsc_khz=7");
    }

    #[test]
    fn msix_is_avoided_exactly_where_it_crashes_qemu() {
        let text = "[vm.v]\nkernel = \"Cargo.toml\"\n";
        let nic = |version, kvm| argv(text, version, kvm).iter().any(|w| w.contains("vectors=0"));
        assert!(nic((7, 2, 22), false));
        assert!(!nic((7, 2, 22), true) && !nic((10, 0, 2), false));
        let stream = argv(&format!("{text}attach = \"stream\"\n"), (7, 2, 22), false);
        assert!(!stream.iter().any(|w| w.contains("vectors=0")));
    }

    #[test]
    fn an_emulated_microvm_is_told_the_rate_of_its_counter() {
        let append = |more: &str, kvm| {
            let argv = argv(&format!("[vm.v]\nkernel = \"Cargo.toml\"\n{more}"), (7, 2, 22), kvm);
            after(&argv, "-append", 0).to_string()
        };
        let micro = "machine = \"microvm\"\n";
        assert_eq!(append(micro, false), "tsc_early_khz=2300000 console=ttyS0");
        assert_eq!(append(micro, true), "console=ttyS0", "KVM tells it by itself");
        assert_eq!(append("", false), "console=ttyS0", "q35 has clocks");
        let own = format!("{micro}cmdline = \"quiet\"\n");
        assert_eq!(append(&own, false), "tsc_early_khz=2300000 quiet");
        let told = format!("{micro}cmdline = \"tsc_early_khz=1 quiet\"\n");
        assert_eq!(append(&told, false), "tsc_early_khz=1 quiet");
    }

    #[test]
    fn a_vm_has_its_disks_in_order_and_what_cloud_init_reads() {
        let text = "[vm.v]\ndisk = \"Cargo.toml\"\ndisks = [\"Cargo.toml\"]\ncloud_init = \"Cargo.toml\"\n";
        let argv = argv(text, (7, 2, 22), false);
        assert!(after(&argv, "-drive", 0).starts_with("if=none,id=disk,format=raw,file="));
        assert!(after(&argv, "-drive", 1).starts_with("if=none,id=disk1,format=raw,file="));
        assert_eq!(after(&argv, "-drive", 2), "if=none,id=seed,format=raw,readonly=on,file=/run/t/v.seed");
        assert_eq!(after(&argv, "-device", 2), "virtio-blk-pci,drive=seed");
        assert!(has_disk(&argv));
        let words: Vec<String> = argv.into_iter().skip_while(|w| !w.contains("id=disk1")).skip(1).collect();
        assert!(!has_disk(&words), "cloud-init's alone is no disk to leave in order: {words:?}");
    }

    #[test]
    fn a_vm_has_a_port_for_its_agent_only_where_the_file_says_so() {
        let text = "[vm.v]\nkernel = \"Cargo.toml\"\n";
        assert!(!argv(text, (7, 2, 22), false).iter().any(|w| w.contains("serial-")));
        for (more, bus) in [("", "virtio-serial-pci"), ("machine = \"microvm\"\n", "virtio-serial-device")] {
            let argv = argv(&format!("{text}agent = true\n{more}"), (7, 2, 22), false);
            assert_eq!(after(&argv, "-chardev", 2), "socket,id=agent,path=/run/t/v.qga,server=on,wait=off");
            assert_eq!(after(&argv, "-device", 1), format!("{bus},max_ports=2"));
            assert_eq!(after(&argv, "-device", 2), "virtserialport,chardev=agent,name=org.qemu.guest_agent.0");
        }
    }

    #[test]
    fn a_vm_that_boots_from_the_network_has_a_boot_rom_and_tries_it_first() {
        let argv = argv("[vm.v]\nboot = true\ndisk = \"Cargo.toml\"\n", (10, 0, 2), false);
        assert!(after(&argv, "-M", 0).starts_with("q35,graphics=off,"), "{argv:?}");
        assert_eq!(after(&argv, "-device", 0), "virtio-blk-pci,drive=disk,bootindex=2");
        assert!(after(&argv, "-device", 1).starts_with("virtio-net-pci,bootindex=1,netdev=net0,"), "{argv:?}");
    }

    #[test]
    fn a_vm_gets_its_own_words_last() {
        let argv = argv(
            "[vm.v]\nkernel = \"Cargo.toml\"\ncmdline = \"quiet\"\nqueues = 2\nqemu = [\"-snapshot\"]\n",
            (10, 0, 2),
            true,
        );
        assert_eq!(argv.last().unwrap(), "-snapshot");
        assert_eq!(after(&argv, "-append", 0), "quiet");
        assert!(after(&argv, "-device", 0).contains("mq=on,vectors=6"));
        assert_eq!(after(&argv, "-cpu", 0), "host");
    }
}
