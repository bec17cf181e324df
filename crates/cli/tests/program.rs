//! The program as its users run it: fabrics of bare ports, which need no privilege, in folders of
//! their own.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tombolo_host::api::client::Client;
use tombolo_host::api::report::{Ports, Status};
use tombolo_testing::{TIMEOUT, found, until};

const FILE: &str = "\
name = \"t\"
[network.lan]
[port.guest]
kind = \"stream\"
mac = \"02:00:00:00:00:07\"
[port.vm]
kind = \"vhost-user\"
";

/// A folder with a fabric file, its runtime files and its leases.
struct Home(tempfile::TempDir);

impl Home {
    fn new(text: &str) -> Home {
        let home = Home(tempfile::tempdir().unwrap());
        std::fs::write(home.path("tombolo.toml"), text).unwrap();
        home
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(words.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command.env("TOMBOLO_RUNTIME", self.path("run")).env("TOMBOLO_STATE", self.path("state"));
        command.env_remove("TOMBOLO_FABRIC");
        command
    }

    fn run(&self, words: &str) -> Output {
        self.command(words).output().unwrap()
    }

    /// Runs it and expects exit code 0; gives what it printed.
    fn ok(&self, words: &str) -> String {
        let out = self.run(words);
        assert!(out.status.success(), "{words}: {}, {}", out.status, text(&out.stderr));
        text(&out.stdout)
    }

    /// Runs it and expects this exit code; gives what it complained.
    fn refused(&self, words: &str, code: i32) -> String {
        let out = self.run(words);
        assert_eq!(out.status.code(), Some(code), "{words}: {}{}", text(&out.stdout), text(&out.stderr));
        text(&out.stderr)
    }

    fn status(&self) -> Status {
        serde_json::from_str(&self.ok("status --json")).unwrap()
    }

    fn client(&self) -> Client {
        Client::new("t", &self.path("run/t/api.sock")).unwrap()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Ends what a failed test has left; a test that passed leaves nothing.
        let running = tombolo_host::rundir::running(&self.path("run"));
        for fabric in running {
            let _ = self.run(&format!("down --fabric {fabric}"));
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn end(child: &mut Child) -> ExitStatus {
    found("the end of a process", || child.try_wait().unwrap())
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

#[test]
fn a_daemon_stands_before_its_starter_ends_and_leaves_nothing() {
    let home = Home::new(FILE);
    let said = home.ok("up -d");
    assert!(said.starts_with("t is up after ") && said.contains("1 network, 0 machines"), "{said}");
    let status = home.status();
    assert_eq!((status.name.as_str(), status.networks.len()), ("t", 1));
    assert!(status.ports.iter().any(|p| p.name == "guest" && p.kind == "stream"));
    let again = home.refused("up -d", 1);
    assert!(again.contains("is running already") && again.contains(&status.pid.to_string()), "{again}");
    assert_eq!(home.status().pid, status.pid, "and it still stands");
    let table = home.ok("status");
    assert!(table.contains("guest") && table.contains("10.87.0.0/24") && !table.contains('\x1b'), "{table}");
    let log = std::fs::read_to_string(home.path("run/t/log")).unwrap();
    assert!(log.lines().all(|l| l.as_bytes()[10] == b'T') && log.contains("t is up"), "{log}");
    home.ok("down");
    assert!(!home.path("run/t").exists());
    let gone = home.refused("status", 1);
    assert!(gone.contains("no fabric named \"t\" runs") && gone.contains("tombolo up"), "{gone}");
    assert!(home.refused("down", 1).contains("no fabric named"));
}

#[test]
fn check_and_up_tell_all_faults_of_this_machine_with_their_lines() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap();
    let file = format!(
        "name = \"t\"\n[worker.w]\ncpu = 4095\n[network.lan]\nuplink = \"user\"\n[port.p]\nkind = \"packet\"\n\
         device = \"l0\"\n[[forward]]\nlisten = \"{at}\"\nto = \"10.87.0.9:80\"\n"
    );
    let home = Home::new(&file);
    let line = |word: &str| file.lines().position(|l| l.contains(word)).unwrap() + 1;
    for command in ["check", "up -d", "up"] {
        let told = home.refused(command, 1);
        for (word, expected) in [
            ("l0", "did you mean \"lo\"?"),
            ("cpu =", "expected a CPU of this machine"),
            ("listen =", "another program listens there (process "),
        ] {
            let at = format!("tombolo.toml:{}:", line(word));
            let found = told.lines().find(|l| l.contains(&at)).unwrap_or_else(|| panic!("{command}: {at}: {told}"));
            assert!(found.contains(expected), "{command}: {found}");
        }
        assert!(!home.path("run/t/owner.json").exists(), "{command} left something");
    }
    drop(taken);
    let right = file.replace("cpu = 4095\n", "").replace("\"l0\"", "\"lo\"");
    std::fs::write(home.path("tombolo.toml"), right).unwrap();
    let missing = home.run("check");
    // Without passt or the right to open packet sockets this machine lacks something still.
    if missing.status.success() {
        assert!(text(&missing.stdout).starts_with("tombolo.toml: no faults: 1 network"), "{}", text(&missing.stdout));
    }
}

#[test]
fn ports_come_and_go_while_it_runs() {
    let home = Home::new(FILE);
    home.ok("up -d");
    let added: Ports = serde_json::from_str(&home.ok("port add extra --kind vhost-user --json")).unwrap();
    assert_eq!(added.ports[0].name, "extra");
    UnixStream::connect(home.path("run/t/extra.sock")).unwrap();
    let listed: Ports = serde_json::from_str(&home.ok("port ls --json")).unwrap();
    assert!(listed.ports.iter().any(|p| p.name == "extra"));
    assert!(home.ok("port ls").contains("extra") && home.ok("port stats extra").contains("rx frames"));
    let twice = home.refused("port add extra --kind vhost-user", 2);
    assert!(twice.contains("extra") && !twice.contains("request:"), "{twice}");
    assert!(home.refused("port add p --queues 99", 2).contains("expected a number from 1 to 8"));
    std::fs::write(home.path("more.toml"), "[port.a]\nkind = \"stream\"\n[port.b]\nkind = \"vhost-user\"\n").unwrap();
    assert_eq!(home.ok("port add --sections more.toml").lines().next(), Some("2 ports added: a, b"));
    for name in ["extra", "a", "b"] {
        home.ok(&format!("port del {name}"));
    }
    assert!(home.refused("port del extra", 1).contains("extra"));
    let names: Vec<_> = home.status().ports.into_iter().map(|p| p.name).collect();
    assert!(!names.iter().any(|n| ["extra", "a", "b"].contains(&n.as_str())), "{names:?}");
    assert!(home.refused("port stats nobody", 1).contains("there are: "));
    assert!(home.ok("port ls").contains("gateway-lan"));
    let own = home.refused("port del gateway-lan", 1);
    assert!(own.contains("is the gateway of its network, which only `down` ends"), "{own}");
    home.ok("down");
}

/// What the port `guest` says in `status`: its rate limits, and the frames that they cost it.
fn limits(home: &Home) -> (Option<String>, u64) {
    let port = home.status().ports.into_iter().find(|p| p.name == "guest").expect("a port of the file");
    (
        port.details.get("rate").map(|rate| rate["receive"].to_string()),
        port.counters.tx_drops.get("rate_limit").copied().unwrap_or(0),
    )
}

/// Asks the gateway `n` times from the port `guest`, and waits until each answer has come or was
/// counted as dropped.
fn answers(home: &Home, peer: &mut UnixStream, n: u64) -> u64 {
    let answered = |home: &Home| {
        let port = home.status().ports.into_iter().find(|p| p.name == "guest").expect("a port of the file");
        (port.counters.tx_frames, port.counters.tx_drops.values().sum::<u64>())
    };
    let before = answered(home);
    let frame = arp_request();
    for _ in 0..n {
        peer.write_all(&(frame.len() as u32).to_be_bytes()).unwrap();
        peer.write_all(&frame).unwrap();
    }
    until("an answer or a drop for each", || {
        let now = answered(home);
        now.0 + now.1 == before.0 + before.1 + n
    });
    answered(home).0 - before.0
}

#[test]
fn rate_limits_change_on_a_running_port_and_are_kept() {
    const LIMIT: &str = r#"{"frames":1}"#;
    let home = Home::new(FILE);
    home.ok("up -d");
    let connect = || UnixStream::connect(home.path("run/t/guest.sock")).unwrap();
    let mut peer = connect();
    assert_eq!((answers(&home, &mut peer, 200), limits(&home)), (200, (None, 0)));
    assert_eq!(home.ok("port set guest --rate receive_frames=1"), "guest: receive 1 frames/s\n");
    let came = answers(&home, &mut peer, 200);
    // A burst of 64, and one more for each second that this took.
    assert!((64..150).contains(&came), "{came}");
    assert_eq!(limits(&home), (Some(LIMIT.into()), 200 - came));

    let wrong = home.refused("port set guest --rate sent=100M", 2);
    assert!(wrong.starts_with("tombolo: --rate: expected") && wrong.contains("did you mean \"send\"?"), "{wrong}");
    assert!(home.refused("port set guest --rate fast", 2).contains("like send=100M"));
    assert!(home.refused("port set absent --rate off", 1).contains("there are guest"));
    assert!(home.refused("port set gateway-lan --rate off", 1).contains("is the gateway of its network"));
    assert_eq!(limits(&home).0.as_deref(), Some(LIMIT), "as before what was refused");

    let old = home.status().pid;
    signal(old, Signal::KILL);
    home.ok("up -d");
    assert_eq!(limits(&home).0.as_deref(), Some(LIMIT), "after a crash");
    home.ok("up -d --replace");
    assert_eq!(limits(&home).0.as_deref(), Some(LIMIT), "after a handover");
    let mut peer = connect();
    let came = answers(&home, &mut peer, 200);
    assert!((64..150).contains(&came), "the kept limit works: {came}");

    assert_eq!(home.ok("port set guest --rate off"), "guest: no limits\n");
    assert_eq!(answers(&home, &mut peer, 200), 200);
    home.ok("port set guest --rate send=64K,send_frames=5");
    home.ok("port del guest");
    std::fs::write(home.path("same.toml"), "[port.guest]\nkind = \"stream\"\n").unwrap();
    home.ok("port add --sections same.toml");
    assert_eq!(limits(&home).0, None, "the limits went with the port");
    home.ok("port set guest --rate send=64K");
    home.ok("down");
    home.ok("up -d");
    assert_eq!(limits(&home).0, None, "and with the fabric");
    home.ok("down");
}

/// An ARP request of 10.87.0.7 for the gateway, 10.87.0.1 (RFC 826), padded to 60 bytes.
#[test]
fn a_peer_that_breaks_the_rules_is_told_of_with_the_reason() {
    let home = Home::new(FILE);
    home.ok("up -d");
    let mut peer = UnixStream::connect(home.path("run/t/vm.sock")).unwrap();
    peer.write_all(&[0xa5; 64]).unwrap();
    peer.set_read_timeout(Some(TIMEOUT)).unwrap();
    // It is hung up on: by an end, or by a reset where it had more to say than was read.
    assert!(!matches!(peer.read(&mut [0; 64]), Ok(1..)), "nothing is answered");
    let faulty = found("the fault", || home.status().ports.into_iter().find(|p| p.counters.faults > 0));
    assert_eq!((faulty.name.as_str(), faulty.counters.faults), ("vm", 1));
    for command in ["status", "port ls", "port stats vm"] {
        let said = home.ok(command);
        let squeezed = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(squeezed.contains("protocol: vhost-user: request "), "{said}");
    }
    let warned = home.ok("status");
    assert!(warned.contains("! port vm was reset: its peer broke the rules, last: protocol: "), "{warned}");
    UnixStream::connect(home.path("run/t/vm.sock")).expect("the port takes the next peer");
    home.ok("down");
}

fn arp_request() -> Vec<u8> {
    let mac = [2, 0, 0, 0, 0, 7];
    let mut frame = [[0xff; 6], mac].concat();
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend([mac.as_slice(), &[10, 87, 0, 7], &[0; 6], &[10, 87, 0, 1]].concat());
    frame.resize(60, 0);
    frame
}

/// Sends a frame in QEMU's stream framing and reads the answer.
fn exchange(stream: &mut UnixStream, frame: &[u8]) -> Vec<u8> {
    stream.write_all(&(frame.len() as u32).to_be_bytes()).unwrap();
    stream.write_all(frame).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    answer
}

#[test]
fn a_capture_is_a_file_that_tshark_reads() {
    let home = Home::new(FILE);
    home.ok("up -d");
    let mut guest = UnixStream::connect(home.path("run/t/guest.sock")).unwrap();
    guest.set_read_timeout(Some(TIMEOUT)).unwrap();
    until("the port's link", || home.client().port("guest").unwrap().up);
    let mut capture = home.command("capture guest -w c.pcapng --count 2 --seconds 60").spawn().unwrap();
    // The file's head is written once the capture runs.
    found("the start of the capture", || std::fs::metadata(home.path("c.pcapng")).ok().filter(|m| m.len() > 0));
    let answer = exchange(&mut guest, &arp_request());
    assert_eq!((answer[12..14].to_vec(), &answer[28..32]), (vec![8, 6], &[10u8, 87, 0, 1][..]));
    assert!(end(&mut capture).success());
    let port = home.client().port("guest").unwrap();
    assert!(port.counters.rx_frames >= 1 && port.counters.tx_frames >= 1 && port.counters.captured >= 2);
    let metrics = home.client().text("/metrics").unwrap();
    let line = format!("tombolo_port_rx_frames_total{{port=\"guest\",network=\"lan\"}} {}", port.counters.rx_frames);
    assert!(metrics.lines().any(|l| l == line), "{metrics}");
    // A pipe gets the file too.
    let mut piped = home.command("capture guest --seconds 3").stdout(Stdio::piped()).spawn().unwrap();
    let mut bytes = Vec::new();
    piped.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    assert!(end(&mut piped).success() && bytes.starts_with(&0x0a0d_0d0a_u32.to_le_bytes()));
    assert!(home.refused("capture nobody -w x.pcapng", 1).contains("nobody"));
    assert!(!home.path("x.pcapng").exists(), "a file of a port that is not there");
    home.ok("down");
    let mut tshark = Command::new("tshark");
    tshark.args(["-r", "c.pcapng", "-T", "fields", "-e", "arp.opcode"]);
    match tshark.current_dir(home.0.path()).env("HOME", home.0.path()).output() {
        Ok(out) => assert_eq!(text(&out.stdout), "1\n2\n", "{}", text(&out.stderr)),
        Err(error) => tombolo_testing::skip(format!("reading the capture with tshark: {error}")),
    }
}

#[test]
fn what_outlives_a_fabric_is_not_kept_where_its_end_removes_everything() {
    let home = Home::new(FILE);
    std::os::unix::fs::symlink(home.path("run"), home.path("link")).unwrap();
    for state in ["run", "link", "other/../run"] {
        let out = home.command("up").env("TOMBOLO_STATE", home.path(state)).output().unwrap();
        let said = text(&out.stderr);
        assert!(
            !out.status.success() && said.contains("$TOMBOLO_STATE") && said.contains("$TOMBOLO_RUNTIME"),
            "{said}"
        );
        assert!(!home.path("run/t").exists(), "nothing was made");
        std::fs::create_dir_all(home.path("run")).unwrap();
        std::fs::create_dir_all(home.path("other")).unwrap();
    }
}

#[test]
fn a_killed_daemon_is_told_and_cleared_up_by_the_next_up_or_down() {
    let home = Home::new(FILE);
    home.ok("up -d");
    home.ok("port add later --kind vhost-user");
    for _ in 0..2 {
        let pid = home.status().pid;
        signal(pid, Signal::KILL);
        until("the daemon's end", || !Path::new(&format!("/proc/{pid}")).exists());
        let stale = home.refused("status", 1);
        assert!(
            stale.contains("has no daemon at the moment") && stale.contains("`tombolo up` with its file"),
            "{stale}"
        );
        assert!(stale.contains("`tombolo down --fabric t` ends them"), "{stale}");
        home.ok("up -d");
        assert!(home.status().ports.iter().any(|p| p.name == "later"), "what was added is there again");
    }
    let pid = home.status().pid;
    signal(pid, Signal::KILL);
    until("the daemon's end", || !Path::new(&format!("/proc/{pid}")).exists());
    home.ok("down");
    assert!(!home.path("run/t").exists());
    home.ok("up -d");
    assert!(!home.status().ports.iter().any(|p| p.name == "later"), "down forgets what was added");
    home.ok("down");
}

/// Processes whose command line has this word.
fn processes_with(word: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
    let has = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|w| w == word.as_bytes())
    };
    pids.filter(has).collect()
}

#[test]
fn a_probe_that_stalls_dies_with_the_program_that_was_killed_over_it() {
    let Ok(qemu) = tombolo_host::qemu::probe::find() else {
        return tombolo_testing::skip("no QEMU");
    };
    let home = Home::new(FILE);
    // The real one, whose processor is never started.
    let (mark, script) = (format!("stalled-{}", std::process::id()), home.path("qemu"));
    let qemu = qemu.path.display();
    let lines =
        format!("#!/bin/sh\n[ \"$1\" = --version ] && exec {qemu} --version\nexec {qemu} \"$@\" -S -name {mark}\n");
    std::fs::write(&script, lines).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut doctor = home.command("doctor").env("TOMBOLO_QEMU", &script).stdout(Stdio::null()).spawn().unwrap();
    let probes = found("the probe's QEMU", || Some(processes_with(&mark)).filter(|p| !p.is_empty()));
    signal(doctor.id(), Signal::KILL);
    end(&mut doctor);
    let deadline = Instant::now() + TIMEOUT;
    while !processes_with(&mark).is_empty() && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let left = processes_with(&mark);
    left.iter().for_each(|pid| signal(*pid, Signal::KILL));
    assert!(left.is_empty(), "of {probes:?} there is still {left:?}");
}

#[test]
fn the_foreground_ends_well_with_either_signal() {
    let home = Home::new(FILE);
    for number in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut up = home.command("up").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("the fabric", || home.run("status").status.success());
        signal(up.id(), number);
        assert!(end(&mut up).success(), "{number:?}");
        let mut said = String::new();
        up.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with("t is up after"), "{said}");
        let mut noise = String::new();
        up.stderr.take().unwrap().read_to_string(&mut noise).unwrap();
        assert_eq!(noise, "tombolo: received a signal: taking the fabric down\n", "no progress in a pipe");
        assert!(!home.path("run/t").exists());
    }
    let mut up = home.command("up").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the fabric", || home.run("status").status.success());
    home.ok("down");
    assert!(end(&mut up).success(), "after down from elsewhere");
}

#[test]
fn a_faulty_file_starts_nothing() {
    let home = Home::new("name = \"t\"\n[network.lan]\n[port.p]\nkind = \"vhost-user\"\nqueus = 2\n");
    for words in ["up", "up -d"] {
        let said = home.refused(words, 2);
        assert!(said.contains("tombolo.toml:5:1: port.p.queus") && said.contains("queues"), "{said}");
    }
    assert!(!home.path("run").exists());
    assert!(home.refused("up absent.toml", 2).contains("absent.toml"));
    assert!(home.refused("up -d --fabric other", 2).contains("queus"), "the file's faults come first");
    // What only starting shows comes back over the daemon's pipe.
    let home = Home::new("name = \"t\"\n[network.lan]\n[port.p]\nkind = \"packet\"\ndevice = \"tb-absent0\"\n");
    let said = home.refused("up -d", 1);
    assert!(said.contains("tb-absent0"), "{said}");
    assert!(!home.path("run/t/api.sock").exists());
    assert!(!home.path("run/t").exists(), "it leaves a folder");
    assert!(home.path("state/t/logs/log").is_file(), "its log is kept");
}

#[test]
fn an_app_with_a_near_name_is_offered() {
    let home = Home::new("name = \"t\"\n[network.lan]\n[cell.web]\napp = \"htpd\"\n");
    std::fs::create_dir(home.path("apps")).unwrap();
    std::fs::write(home.path("apps/httpd"), "").unwrap();
    let out = home.command("up").env("TOMBOLO_APPS", home.path("apps")).output().unwrap();
    let said = text(&out.stderr);
    assert!(said.contains("4:7: cell.web.app: ") && said.contains("; did you mean \"httpd\"?"), "{said}");
}

#[test]
fn the_only_one_running_is_meant_and_of_two_one_must_be_named() {
    let home = Home::new(FILE);
    home.ok("up -d");
    std::fs::rename(home.path("tombolo.toml"), home.path("t.toml")).unwrap();
    assert_eq!(home.status().name, "t");
    std::fs::write(home.path("u.toml"), "name = \"u\"\n[network.lan]\n").unwrap();
    home.ok("up u.toml -d");
    let said = home.refused("status", 2);
    assert!(said.contains("t, u") && said.contains("--fabric"), "{said}");
    assert!(home.ok("status --fabric u").starts_with("u "));
    assert!(home.ok("status -f t.toml").starts_with("t "));
    let env = home.command("status").env("TOMBOLO_FABRIC", "u").output().unwrap();
    assert!(text(&env.stdout).starts_with("u "));
    home.ok("down --fabric u");
    home.ok("down");
    assert!(home.refused("status", 1).contains("no fabric runs"));
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let home = Home::new(FILE);
    home.ok("up -d");
    for words in [
        "status",
        "status --json",
        "port ls",
        "top -i 0.01",
        "top --json -i 0.01",
        "completions bash",
        "man",
        "capture guest",
    ] {
        let mut child = home.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        assert_eq!(end(&mut child).code(), Some(0), "{words}");
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "", "{words}");
    }
    home.ok("down");
}

#[test]
fn reports_are_there_for_people_and_programs() {
    let home = Home::new(FILE);
    home.ok("up -d --json");
    let top = home.ok("top --once -i 0.05");
    assert!(top.contains("guest") && top.contains("WORKER") && !top.contains('\x1b'), "{top}");
    let line: Status = serde_json::from_str(home.ok("top --once --json").trim()).unwrap();
    assert_eq!(line.name, "t");
    // Repeated until a signal, which is no failure.
    let mut top = home.command("top -i 0.02").stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 64];
    top.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    signal(top.id(), Signal::INT);
    assert!(end(&mut top).success());
    assert!(home.ok("cell ls").starts_with("MACHINE"));
    assert!(home.ok("cell ls --json").contains("\"machines\": []"));
    assert!(home.refused("cell console nobody --log", 1).contains("nobody"));
    assert!(home.refused("cell stop nobody", 1).contains("nobody"));
    assert!(home.refused("cell run no-such-app", 2).contains("no-such-app"));
    home.ok("down");
    assert!(home.ok("version").starts_with("tombolo "));
    assert!(home.refused("status --frob", 2).contains("--frob"));
    assert!(home.ok("--help").contains("Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done in part"));
}

#[test]
fn the_lab_gets_its_arguments_as_they_are_and_is_told_the_program() {
    let home = Home::new(FILE);
    let missing = home.command("lab ls").env("TOMBOLO_LAB", home.path("lab")).output().unwrap();
    assert_eq!(missing.status.code(), Some(2), "{}", text(&missing.stderr));
    assert!(text(&missing.stderr).starts_with("tombolo: $TOMBOLO_LAB: expected the folder `lab`"));
    std::fs::create_dir_all(home.path("lab/tombolo_lab")).unwrap();
    std::fs::write(home.path("lab/tombolo_lab/__init__.py"), "").unwrap();
    let main = "import os, sys\nprint(sys.argv[1:], os.environ['TOMBOLO_PROGRAM'])\nsys.exit(130)\n";
    std::fs::write(home.path("lab/tombolo_lab/__main__.py"), main).unwrap();
    let lab = |words| home.command(words).env("TOMBOLO_LAB", home.path("lab")).output().unwrap();
    let out = lab("lab --help -f x --fabric y -- -V");
    let program = env!("CARGO_BIN_EXE_tombolo");
    assert_eq!(text(&out.stdout), format!("['--help', '-f', 'x', '--fabric', 'y', '--', '-V'] {program}\n"));
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    let other =
        home.command("lab ls").env("TOMBOLO_LAB", home.path("lab")).env("TOMBOLO_PROGRAM", "/p").output().unwrap();
    assert_eq!(text(&other.stdout), "['ls'] /p\n");
}
