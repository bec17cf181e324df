//! The gateway at a real client: busybox's udhcpc and nslookup, and the kernel's ping, ARP and TCP,
//! in a network namespace behind a tap, with a worker, its reactor and the resolver as they run in
//! the fabric.
#![allow(missing_docs)]

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;
use tombolo_host::resolver::{Resolver, Servers, Timing};
use tombolo_port::link::Netns;
use tombolo_port::tap::{TapConfig, TapPort};
use tombolo_switch::Nanos;
use tombolo_switch::control::{PortSettings, PortStatus};
use tombolo_switch::drop::Reason;
use tombolo_switch::gateway::{
    DhcpConfig, Gateway, GatewayConfig, GatewayHandle, GatewayPort, LeaseStore, Member, Start,
};
use tombolo_switch::guard::{Guard, Roles};
use tombolo_switch::mac::MacSettings;
use tombolo_worker::thread::{WorkerConfig, WorkerThread};

const TAP: &str = "tmbgw0";
const TAP_MAC: [u8; 6] = [2, 0x7b, 0, 0, 0, 1];
/// Every command ends by itself within this.
const TIMEOUT_SECS: u64 = 10;

/// Why the test cannot run here.
fn missing() -> Option<String> {
    let namespaces = Netns::anonymous().err().map(|error| format!("{error}; run as root"));
    let device = || std::fs::File::options().read(true).write(true).open("/dev/net/tun").err();
    let device = || device().map(|error| format!("/dev/net/tun: {error}"));
    let busybox = || Command::new("busybox").output().err().map(|error| format!("busybox: {error}"));
    namespaces.or_else(device).or_else(busybox)
}

fn ip(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 213, 7, last)
}

struct Fabric {
    netns: Netns,
    gateway: GatewayHandle,
    worker: WorkerThread,
    folder: tempfile::TempDir,
}

impl Fabric {
    /// A network of a gateway and a tap, whose other side is in a namespace of its own.
    fn start(stored: &LeaseStore) -> Fabric {
        let netns = Netns::anonymous().unwrap();
        let config = WorkerConfig { name: "gwtest".into(), ..WorkerConfig::default() };
        let thread = WorkerThread::start(&config).unwrap();
        let handle = thread.handle();
        let now = clock_gettime(ClockId::Monotonic);
        let now = Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64);
        let network = handle.add_network("gwtest", MacSettings::default()).unwrap();

        let config = GatewayConfig {
            mac: [2, 0x7b, 0, 0, 0, 0xfe],
            address: ip(1),
            prefix: 24,
            mtu: 1400,
            router: Some(ip(2)),
            dns: Vec::new(),
            domain: "lab.internal".into(),
            name: "gateway".into(),
            forward: true,
            dhcp: Some(DhcpConfig { range: (ip(16), ip(60)), lease_secs: 600, leases_per_port: None }),
            ipv6: None,
        };
        let unix_secs = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let start = Start { now, unix_secs, entropy: [3; 16] };
        let (port, gateway) = GatewayPort::new(Gateway::new(config, stored, start).unwrap());
        let reserved = handle.reserve().unwrap();
        let registration = thread.registration(&reserved);
        gateway.set_port_waker(Arc::new(move || registration.wake()));
        let guard = Guard::default().with_roles(Roles::ALL);
        let settings = PortSettings { guard, ..PortSettings::default() };
        handle.add_port(reserved, network, "gateway", Box::new(port), settings).unwrap();
        gateway.set_member(Member { name: "db".into(), mac: None, address: Some(ip(100)) }).unwrap();

        let reserved = handle.reserve().unwrap();
        let registration = thread.registration(&reserved);
        let tap = TapConfig { netns: Some(netns.clone()), mac: Some(TAP_MAC), ..TapConfig::new(TAP) };
        let tap = TapPort::open(&tap, registration).unwrap();
        handle.add_port(reserved, network, "tap", Box::new(tap), PortSettings::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        Fabric { netns, gateway, worker: thread, folder }
    }

    fn stop(self) {
        self.worker.stop().unwrap();
    }

    /// Runs a command in the namespace, for at most [`TIMEOUT_SECS`].
    fn output(&self, line: &str) -> Output {
        let mut command = Command::new("timeout");
        command.arg(TIMEOUT_SECS.to_string()).args(line.split_whitespace());
        self.netns.run(move || command.output()).unwrap().unwrap()
    }

    fn run(&self, line: &str) -> String {
        let output = self.output(line);
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {}\n{text}", output.status);
        text
    }

    /// What udhcpc's script was told, as `name=value` lines; the address and the route are set.
    fn udhcpc(&self, more: &str) -> String {
        let (script, told) = (self.folder.path().join("script"), self.folder.path().join("told"));
        std::fs::write(&script, script_text(&told)).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let _ = std::fs::remove_file(&told);
        self.run(&format!("busybox udhcpc -f -n -q -t 5 -T 1 -i {TAP} -s {} {more}", script.display()));
        std::fs::read_to_string(&told).unwrap()
    }
}

fn script_text(told: &Path) -> String {
    format!(
        "#!/bin/sh\n\
        case $1 in deconfig) busybox ip addr flush dev $interface; busybox ip link set $interface up;;\n\
        bound|renew) set > {told}; busybox ip addr add $ip/$mask dev $interface;\n\
        busybox ip route add default via $router;;\nesac\n",
        told = told.display()
    )
}

/// A process that ends with the test, however that ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A name server for `example.test`: an answer over UDP that is cut, over TCP one of 3000 bytes.
fn name_server() -> SocketAddr {
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = udp.local_addr().unwrap();
    let tcp = std::net::TcpListener::bind(address).unwrap();
    let answer = |query: &[u8], cut: bool| {
        let end = 12 + query[12..].iter().position(|b| *b == 0).unwrap() + 5;
        let mut bytes = query[..end].to_vec();
        let big = query[13..].starts_with(b"big");
        (bytes[2], bytes[3]) = (0x81 | (u8::from(cut && big) * 2), 0x80);
        bytes[6..12].copy_from_slice(&[0, 1, 0, 0, 0, 0]);
        bytes.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x05\x00\x04\xc0\x00\x02\x07");
        if big && !cut {
            bytes.resize(3000, 0);
        }
        bytes
    };
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok((n, from)) = udp.recv_from(&mut buffer) {
            udp.send_to(&answer(&buffer[..n], true), from).unwrap();
        }
    });
    std::thread::spawn(move || {
        for stream in tcp.incoming() {
            let mut stream = stream.unwrap();
            let mut length = [0; 2];
            stream.read_exact(&mut length).unwrap();
            let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut query).unwrap();
            let answer = answer(&query, false);
            stream.write_all(&[&(answer.len() as u16).to_be_bytes()[..], &answer].concat()).unwrap();
        }
    });
    address
}

/// Serves the gateway's queries on a thread of its own, as the host's task does.
fn serve(gateway: &GatewayHandle, server: SocketAddr) {
    let doorbell = Arc::new(Notify::new());
    let ring = doorbell.clone();
    gateway.set_event_waker(Arc::new(move || ring.notify_one()));
    let gateway = gateway.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let mut resolver = Resolver::new(Servers::Fixed(vec![server]), Timing::default());
            loop {
                doorbell.notified().await;
                resolver.serve(&gateway);
            }
        });
    });
}

#[test]
fn busybox_gets_a_lease_resolves_and_pings() {
    if let Some(reason) = missing() {
        return tombolo_testing::skip(reason);
    }
    let fabric = Fabric::start(&LeaseStore::default());
    serve(&fabric.gateway, name_server());
    fabric.run("busybox ip link set lo up");
    let began = Instant::now();
    let told = fabric.udhcpc("-x hostname:alpha");
    println!("a lease after {:?}", began.elapsed());
    let said = |name: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("no {name} in\n{told}")).trim_matches('\'').to_owned()
    };
    let facts = ["router", "dns", "domain", "subnet", "broadcast", "lease", "serverid", "mtu"].map(said);
    let want = ["10.213.7.2", "10.213.7.1", "lab.internal", "255.255.255.0", "10.213.7.255", "600", "10.213.7.1"];
    assert_eq!(facts[..7], want);
    assert_eq!(facts[7], "1400");
    let address: Ipv4Addr = said("ip").parse().unwrap();
    let leases = fabric.gateway.leases();
    assert_eq!((leases.leases.len(), leases.leases[0].mac, leases.leases[0].address), (1, TAP_MAC, address.into()));
    assert_eq!(leases.leases[0].name.as_deref(), Some("alpha"));

    let ping = fabric.run("busybox ping -c 3 -i 0.1 -s 1300 10.213.7.1");
    assert!(ping.contains("3 packets received"), "{ping}");

    let lookup = |name: &str| fabric.run(&format!("busybox nslookup {name} 10.213.7.1"));
    assert!(lookup("db.lab.internal").contains("10.213.7.100"));
    assert!(lookup("ALPHA.lab.internal").contains(&address.to_string()));
    assert!(lookup(&address.to_string()).contains("alpha.lab.internal"), "the way back");
    assert!(lookup("small.example.test").contains("192.0.2.7"), "through the host's name server");
    let unknown = fabric.output("busybox nslookup nobody.lab.internal 10.213.7.1");
    assert!(String::from_utf8_lossy(&unknown.stdout).contains("NXDOMAIN"));

    // The kernel's TCP, for an answer that UDP does not carry.
    let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03big\x07example\x04test\x00\x00\x01\x00\x01";
    let answer = fabric.netns.run(|| {
        let mut stream = TcpStream::connect("10.213.7.1:53")?;
        stream.set_read_timeout(Some(Duration::from_secs(TIMEOUT_SECS)))?;
        stream.write_all(&[&(query.len() as u16).to_be_bytes()[..], query].concat())?;
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut answer).map(|()| answer)
    });
    let answer = answer.unwrap().unwrap();
    assert_eq!((answer.len(), &answer[..4], &answer[12..query.len()]), (3000, &b"\x43\x21\x81\x80"[..], &query[12..]));

    // A client that asks for a UDP port without a server hears so at once.
    let refused = fabric.netns.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(Duration::from_secs(TIMEOUT_SECS)))?;
        socket.connect("10.213.7.1:9")?;
        socket.send(b"anybody?")?;
        socket.recv(&mut [0; 8])
    });
    assert_eq!(refused.unwrap().unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);

    // A fabric that starts again with these leases gives the same client the same address, even if
    // it asks otherwise.
    let stored = fabric.gateway.leases();
    fabric.stop();
    let fabric = Fabric::start(&stored);
    let told = fabric.udhcpc("");
    assert!(told.contains(&format!("ip='{address}'")), "{told}");
    // Asked to, it gives the address back. It takes the address off the interface right after, so
    // the kernel has to know the gateway's hardware address beforehand.
    let told = fabric.folder.path().join("told");
    std::fs::remove_file(&told).unwrap();
    let script = fabric.folder.path().join("script");
    let mut command = Command::new("busybox");
    command.args(["udhcpc", "-f", "-n", "-i", TAP, "-s"]).arg(script);
    let client = Running(fabric.netns.run(move || command.spawn()).unwrap().unwrap());
    let end = Instant::now() + Duration::from_secs(TIMEOUT_SECS);
    // The script writes what it was told before it sets the address.
    let pings = || fabric.output("busybox ping -c 1 10.213.7.1").status.success();
    while !(told.exists() && pings()) {
        assert!(Instant::now() < end, "no address, or no answer of the gateway");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&client.0), Signal::USR2).unwrap();
    let end = Instant::now() + Duration::from_secs(TIMEOUT_SECS);
    while !fabric.gateway.leases().leases.is_empty() {
        if Instant::now() >= end {
            let counters = fabric.gateway.counters().all();
            let counted: Vec<_> = counters.iter().filter(|(_, _, n)| *n != 0).map(|(name, _, n)| (name, n)).collect();
            let ports = fabric.worker.handle().status().unwrap().ports;
            let drops =
                |p: &PortStatus| Reason::ALL.iter().map(|r| p.counters.tx_drops[*r as usize].get()).sum::<u64>();
            let drops: Vec<_> = ports.iter().map(drops).collect();
            panic!("the released lease is still there: {counted:?}, drops {drops:?}");
        }
        std::thread::yield_now();
    }
    drop(client);
    for port in fabric.worker.handle().status().unwrap().ports {
        assert_eq!((&port.last_fault, &port.panic), (&None, &None), "{}", port.name);
    }
    fabric.stop();
}
