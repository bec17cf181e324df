//! Stock QEMU's two ivshmem devices as peers of this project's links. There is no guest. The tests
//! access the device's registers through QEMU's qtest protocol, and see its interrupts as what
//! MSI-X is, writes to memory.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use tombolo_ivshmem::links::{Config, Door, Event, Links};
use tombolo_ivshmem::server::{Dialect, Seat, Shape};
use tombolo_ring::ivshmem::region::{Header, Layout, Name};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::Mapping;
use tombolo_testing::{TIMEOUT, found, until};

/// Where the test puts the devices' BARs: in q35's window for PCI below 4 GiB.
const REGISTERS: u64 = 0xe000_0000;
const MSIX: u64 = 0xe000_1000;
const MEMORY: u64 = 0xe100_0000;
/// Where interrupts are to be written: ordinary memory.
const MESSAGE: u64 = 0x10_0000;

/// A QEMU whose one device of interest is at 00:04.0.
struct Qemu {
    child: Child,
    qtest: BufReader<UnixStream>,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    fn start(place: &Path, name: &str, words: &[&str]) -> Option<Qemu> {
        let socket = place.join(format!("{name}.qtest"));
        let child = Command::new("qemu-system-x86_64")
            .args(["-machine", "q35,accel=tcg", "-S", "-m", "64", "-display", "none", "-nodefaults", "-no-user-config"])
            .args(["-qtest", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                tombolo_testing::skip(format!("qemu-system-x86_64: {error}"));
                return None;
            }
        };
        let stream = found("QEMU's qtest socket", || {
            assert_eq!(child.try_wait().unwrap(), None, "QEMU ended");
            UnixStream::connect(&socket).ok()
        });
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut qemu = Qemu { child, qtest: BufReader::new(stream) };
        qemu.set_up();
        Some(qemu)
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.qtest.get_mut(), "{line}").unwrap();
        let mut answer = String::new();
        self.qtest.read_line(&mut answer).unwrap();
        let rest = answer.trim().strip_prefix("OK").unwrap_or_else(|| panic!("{line}: {answer:?}"));
        rest.trim().to_string()
    }

    fn number(&mut self, line: &str) -> u64 {
        let text = self.ask(line);
        u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
    }

    fn config(&mut self, register: u32, value: u32) {
        self.ask(&format!("outl 0xcf8 {:#x}", 0x8000_0000 | 4 << 11 | register));
        self.ask(&format!("outl 0xcfc {value:#x}"));
    }

    fn config_of(&mut self, register: u32) -> u32 {
        self.ask(&format!("outl 0xcf8 {:#x}", 0x8000_0000 | 4 << 11 | register));
        self.number("inl 0xcfc") as u32
    }

    fn set_up(&mut self) {
        assert_eq!(self.config_of(0), 0x1110_1af4, "the device at 00:04.0");
        for (register, value) in [(0x10, REGISTERS), (0x14, MSIX), (0x18, MEMORY), (0x1c, 0)] {
            self.config(register, value as u32);
        }
        // Memory decoding and bus mastering.
        self.config(4, 6);
    }

    /// Has vector `i` write 0x100 + i to MESSAGE + 4 * i.
    fn enable_msix(&mut self, vectors: u64) {
        for i in 0..vectors {
            let entry = MSIX + 16 * i;
            for (offset, value) in [(0, MESSAGE + 4 * i), (4, 0), (8, 0x100 + i), (12, 0)] {
                self.ask(&format!("writel {:#x} {value:#x}", entry + offset));
            }
        }
        // The capability's place: walk the list for id 0x11.
        let mut at = self.config_of(0x34) & 0xfc;
        loop {
            let word = self.config_of(at);
            if word & 0xff == 0x11 {
                self.config(at, word | 1 << 31);
                return;
            }
            at = word >> 8 & 0xfc;
            assert_ne!(at, 0, "no MSI-X capability");
        }
    }

    /// Waits for an interrupt of that vector, and forgets it.
    fn interrupted(&mut self, vector: u64) {
        let address = MESSAGE + 4 * vector;
        until("an interrupt", || self.number(&format!("readl {address:#x}")) == 0x100 + vector);
        self.ask(&format!("writel {address:#x} 0"));
    }

    fn position(&mut self) -> u64 {
        self.number(&format!("readl {:#x}", REGISTERS + 8))
    }

    fn ring(&mut self, peer: u64, vector: u64) {
        self.ask(&format!("writel {:#x} {:#x}", REGISTERS + 12, peer << 16 | vector));
    }

    fn memory(&mut self, offset: u64) -> u64 {
        self.number(&format!("readl {:#x}", MEMORY + offset))
    }
}

fn config(place: &Path, max_peers: u32, vectors: u32, host: bool) -> Config {
    let layout = Layout::v1(1 << 20, 0, max_peers).unwrap();
    let door = |id| Door { path: place.join(format!("{id}.sock")), seat: Seat::Fixed(id) };
    let doors = if vectors == 0 { vec![] } else { (u32::from(host)..max_peers).map(door).collect() };
    Config {
        name: "lan".into(),
        shape: Shape { dialect: Dialect::V1, max_peers, vectors },
        layout,
        region_bytes: 1 << 20,
        header: Some(Header { layout, ..Header::network(Name::new("lan").unwrap(), vectors) }),
        host: host.then_some(0),
        helper: None,
        doors,
    }
}

fn doorbell(place: &Path, id: u32) -> Option<Qemu> {
    let chardev = format!("socket,id=c0,path={}", place.join(format!("{id}.sock")).display());
    let words = ["-chardev", &chardev, "-device", "ivshmem-doorbell,chardev=c0,vectors=2,addr=4.0"];
    Qemu::start(place, &format!("q{id}"), &words)
}

fn links() -> Links {
    Links::start("test", None, Box::new(|text| panic!("{text}"))).unwrap()
}

fn rung(doorbell: &Doorbell) {
    until("a ring", || doorbell.take());
}

fn read_u32(mapping: &Mapping, offset: usize) -> u32 {
    mapping.view().load_u32(offset, Ordering::Acquire).unwrap()
}

#[test]
fn doorbells_of_two_machines_and_the_host() {
    let place = tempfile::tempdir().unwrap();
    let links = links();
    let config = config(place.path(), 3, 2, true);
    let layout = config.layout;
    let opened = links.open(config).unwrap();
    let (sender, events) = channel();
    links.serve("lan", Some(Box::new(move |event| sender.send(event).unwrap()))).unwrap();
    // The second seat is taken before the first: seats do not depend on who comes first.
    let Some(mut b) = doorbell(place.path(), 2) else { return };
    let Event::Joined { id: 2, doorbells: to_b } = events.recv_timeout(TIMEOUT).unwrap() else { panic!() };
    let Some(mut a) = doorbell(place.path(), 1) else { return };
    let Event::Joined { id: 1, doorbells: to_a } = events.recv_timeout(TIMEOUT).unwrap() else { panic!() };
    assert_eq!((a.position(), b.position()), (1, 2));
    // Each sees the header, and what another writes.
    let ours = Mapping::new(&opened.region, 0, 1 << 20, true).unwrap();
    for qemu in [&mut a, &mut b] {
        assert_eq!(
            (qemu.memory(0), qemu.memory(4)),
            (u64::from(u32::from_le_bytes(*b"TMBL")), u64::from(u32::from_le_bytes(*b"IVS1")))
        );
        assert_eq!(qemu.memory(16), 3);
    }
    let at = layout.output(1).unwrap().start;
    a.ask(&format!("writel {:#x} 0x12345678", MEMORY + at as u64));
    assert_eq!((read_u32(&ours, at), b.memory(at as u64)), (0x1234_5678, 0x1234_5678));
    // Interrupts both ways, between each two, by vector.
    a.enable_msix(2);
    b.enable_msix(2);
    to_a[0].ring();
    a.interrupted(0);
    to_b[1].ring();
    b.interrupted(1);
    a.ring(0, 1);
    rung(&opened.own[1]);
    assert!(!opened.own[0].take());
    b.ring(0, 0);
    rung(&opened.own[0]);
    a.ring(2, 1);
    b.interrupted(1);
    b.ring(1, 0);
    a.interrupted(0);
    // A machine that goes: the others are told, its state word is 0.
    b.ask(&format!("writel {:#x} 3", MEMORY + layout.state(2).unwrap() as u64));
    assert_eq!(read_u32(&ours, layout.state(2).unwrap()), 3);
    drop(b);
    assert!(matches!(events.recv_timeout(TIMEOUT).unwrap(), Event::Left { id: 2 }));
    a.interrupted(0);
    rung(&opened.own[0]);
    assert_eq!(read_u32(&ours, layout.state(2).unwrap()), 0);
    // Ringing a peer that is gone does no harm; another peer takes the seat and is told of all.
    a.ring(2, 0);
    let Some(mut c) = doorbell(place.path(), 2) else { return };
    c.enable_msix(2);
    let Event::Joined { id: 2, .. } = events.recv_timeout(TIMEOUT).unwrap() else { panic!() };
    until("a's view of c", || {
        a.ring(2, 1);
        c.number(&format!("readl {:#x}", MESSAGE + 4)) == 0x101
    });
    let status = links.status().remove(0);
    assert_eq!((status.joins, status.leaves, status.cut_slow + status.cut_talking + status.refused), (3, 1, 0));
    assert_eq!(status.peers[1].pid, a.child.id());
}

#[test]
fn a_plain_device_has_the_memory_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let links = links();
    let opened = links.open(config(place.path(), 2, 0, true)).unwrap();
    links.serve("lan", None).unwrap();
    // Inherited: without close-on-exec.
    let inherited = rustix::io::dup(&opened.region).unwrap();
    let backend =
        format!("memory-backend-file,id=m0,size=1M,share=on,mem-path=/proc/self/fd/{}", inherited.as_raw_fd());
    let words = ["-object", &backend, "-device", "ivshmem-plain,memdev=m0,addr=4.0"];
    let Some(mut qemu) = Qemu::start(place.path(), "plain", &words) else { return };
    drop(inherited);
    assert_eq!((qemu.memory(0), qemu.memory(20)), (u64::from(u32::from_le_bytes(*b"TMBL")), 0));
    let ours = Mapping::new(&opened.region, 0, 1 << 20, true).unwrap();
    qemu.ask(&format!("writel {:#x} 0xcafe", MEMORY + 0x2000));
    assert_eq!(read_u32(&ours, 0x2000), 0xcafe);
    let pid = rustix::process::Pid::from_child(&qemu.child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    links.occupy("lan", 1, qemu.child.id(), pidfd.as_fd()).unwrap();
    assert_eq!(links.status()[0].peers.len(), 2);
    drop(qemu);
    until("its end", || links.status()[0].peers.len() == 1);
    // No process shrank or grew it meanwhile.
    assert_eq!(rustix::fs::fstat(&opened.region).unwrap().st_size, 1 << 20);
}
