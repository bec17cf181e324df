//! `tombolo service` and `tombolo call` against services that run in this process.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tombolo_rpc::provider::{Options, Reply, Request, Service};

fn tombolo(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    command.args(args).env("TOMBOLO_RUNTIME", dir).stdin(Stdio::null());
    command.output().unwrap()
}

/// What it printed, where it ended with this code.
fn says(dir: &Path, args: &[&str], code: i32) -> String {
    let out = tombolo(dir, args);
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {error}");
    if code == 0 { String::from_utf8(out.stdout).unwrap() } else { error }
}

fn serve(request: &Request<'_>, reply: &mut Reply<'_>) {
    let mut bytes = request.to_vec();
    if bytes == b"slow" {
        std::thread::sleep(Duration::from_secs(1));
    }
    reply.set_code(u32::from(bytes == b"bad"));
    bytes.reverse();
    let _ = reply.write(&bytes);
}

fn service(dir: &Path, name: &str) -> Service {
    let options = Options { folder: Some(dir.join("services")), ..Options::default() };
    Service::register(name, options, serve).unwrap()
}

#[test]
fn a_service_is_called_with_text_digits_and_files() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path(), "mirror");
    let file = dir.path().join("data");
    std::fs::write(&file, vec![b'a'; 100_000]).unwrap();
    assert_eq!(says(dir.path(), &["call", "mirror", "abc", "--deadline", "5s"], 0), "cba\n");
    assert_eq!(says(dir.path(), &["call", "mirror", "--hex", "00 ff 41", "--output", "hex"], 0), "41ff00\n");
    let raw = says(dir.path(), &["call", "mirror", "--file", file.to_str().unwrap(), "--output", "raw"], 0);
    assert_eq!(raw.len(), 100_000);
    let json: serde_json::Value =
        serde_json::from_str(&says(dir.path(), &["call", "mirror", "abc", "--json"], 0)).unwrap();
    assert_eq!((json["text"].as_str(), json["code"].as_u64()), (Some("cba"), Some(0)));
    assert!(says(dir.path(), &["call", "mirror", "bad"], 1).contains("code 1, the application's own: dab"));
    assert!(says(dir.path(), &["call", "mirror", "x", "--deadline", "0ns"], 1).contains("deadline"));
    assert!(says(dir.path(), &["call", "mirror", "slow", "--timeout", "1ms"], 1).contains("time limit"));
    let late = tombolo(dir.path(), &["call", "mirror", "x", "--deadline", "0ns", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&late.stdout).unwrap();
    assert_eq!((late.status.code(), json["end"].as_str()), (Some(1), Some("deadline exceeded")));
}

#[test]
fn a_call_ends_at_its_limit_where_the_service_takes_the_connection_and_says_nothing() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let dir = tempfile::tempdir().unwrap();
    let services = dir.path().join("services");
    std::fs::create_dir(&services).unwrap();
    let stopped = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&stopped, &SocketAddrUnix::new(services.join("stopped")).unwrap()).unwrap();
    listen(&stopped, 8).unwrap();
    for (limit, word) in [(["--deadline", "200ms"], "deadline"), (["--timeout", "200ms"], "time limit")] {
        let call = ["call", "stopped", "x", limit[0], limit[1]];
        let begun = std::time::Instant::now();
        let said = says(dir.path(), &call, 1);
        // Five seconds are what connecting may take otherwise.
        assert!(begun.elapsed() < Duration::from_secs(4), "{limit:?} took {:?}", begun.elapsed());
        assert!(said.contains(word) && said.contains("may be stopped"), "{said}");
    }
    let out = tombolo(dir.path(), &["call", "stopped", "x", "--deadline", "200ms", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), json["end"].as_str()), (Some(1), Some("deadline exceeded")));
}

#[test]
fn a_service_that_is_not_there_yet_is_waited_for_as_long_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let refused = says(dir.path(), &["call", "mirror", "abc", "--wait", "30ms"], 1);
    assert!(refused.contains("no service \"mirror\" is running"), "{refused}");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| says(dir.path(), &["call", "mirror", "abc", "--wait", "60s"], 0));
        // It has looked in vain by then, as a rule; it need not have.
        std::thread::sleep(Duration::from_millis(50));
        let _service = service(dir.path(), "mirror");
        assert_eq!(waits.join().unwrap(), "cba\n");
    });
}

#[test]
fn slow_calls_are_shown_with_their_times() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path(), "mirror");
    says(dir.path(), &["call", "mirror", "slow"], 0);
    let shown = says(dir.path(), &["service", "slow", "mirror"], 0);
    let expected = "slow       1 call took longer than 10.00 ms; the last 1:\n";
    assert!(shown.starts_with(expected) && shown.contains(" served "), "{shown}");
    assert!(says(dir.path(), &["service", "stats", "mirror"], 0).contains(expected));
    let json: serde_json::Value =
        serde_json::from_str(&says(dir.path(), &["service", "slow", "mirror", "--json"], 0)).unwrap();
    assert!(json["slow_calls"][0]["service_ns"].as_u64() >= Some(20_000_000), "{json}");
}

#[test]
fn a_bridge_says_that_its_fabric_is_not_running() {
    let dir = tempfile::tempdir().unwrap();
    let said = says(dir.path(), &["service", "bridge", "calls", "--fabric", "gone"], 1);
    assert!(said.contains("no fabric named \"gone\" runs"), "{said}");
}

#[test]
fn repeated_calls_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path(), "mirror");
    let report = says(dir.path(), &["call", "mirror", "abc", "--repeat", "50"], 0);
    assert!(report.starts_with("50 calls of 3 bytes: 50 served\n") && report.contains("p99.9"), "{report}");
    let json = says(dir.path(), &["call", "mirror", "abc", "--repeat", "5", "--interval", "1ms", "--json"], 0);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["outcomes"]["served"].as_u64(), Some(5));
    assert!(json["times"]["max_ns"].as_u64() >= json["times"]["min_ns"].as_u64());
    assert!(json.get("after_deadline").is_none(), "there was none");
    let report =
        says(dir.path(), &["call", "mirror", "slow", "--repeat", "1", "--deadline", "500ms", "--wait-late", "30s"], 0);
    assert!(report.contains("1 served; 1 of the replies came after the deadline\n"), "{report}");
    let json = says(dir.path(), &["call", "mirror", "abc", "--repeat", "3", "--deadline", "60s", "--json"], 0);
    assert!(json.contains("\"after_deadline\": 0"), "{json}");
    says(dir.path(), &["call", "mirror", "abc", "--repeat", "5", "--deadline", "0ns"], 1);
}

#[test]
fn services_are_listed_and_tell_what_they_did() {
    let dir = tempfile::tempdir().unwrap();
    let none = tombolo(dir.path(), &["service", "ls"]);
    assert_eq!(String::from_utf8_lossy(&none.stdout).lines().count(), 1, "headings only");
    let looked = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(none.status.success() && looked.contains(dir.path().join("services").to_str().unwrap()), "{looked}");
    let services = ["b", "a"].map(|name| service(dir.path(), name));
    // As a killed process leaves it.
    let stale = dir.path().join("services/stale");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    says(dir.path(), &["call", "a", "abc", "--repeat", "7"], 0);
    let list = says(dir.path(), &["service", "ls"], 0);
    let names: Vec<&str> = list.lines().skip(1).map(|l| l.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(!stale.exists());
    let json: serde_json::Value =
        serde_json::from_str(&says(dir.path(), &["service", "stats", "a", "--json"], 0)).unwrap();
    assert_eq!(json["answers"]["served"].as_u64(), Some(7));
    let stats = says(dir.path(), &["service", "stats", "a"], 0);
    assert!(stats.contains("7 served") && stats.contains("workers    1 normal"), "{stats}");
    let watched = says(dir.path(), &["service", "watch", "a", "--interval", "0.01", "--count", "2"], 0);
    assert_eq!(watched.lines().filter(|l| l.starts_with('a')).count(), 2, "{watched}");
    drop(services);
    assert!(says(dir.path(), &["service", "stats", "a"], 1).contains("no service \"a\" is running"));
    assert!(says(dir.path(), &["call", "a/b", "x"], 2).contains("not a valid service name"));
}

#[test]
fn what_is_typed_wrongly_is_told_with_what_is_expected() {
    let dir = tempfile::tempdir().unwrap();
    let _service = service(dir.path(), "mirror");
    let wrong: [(&[&str], i32, &str); 14] = [
        (&["call", "mirrow", "x"], 1, "did you mean \"mirror\"?"),
        (&["call", "mirror", "x", "--deadline", "5"], 2, "expected a number with ns, us, ms or s"),
        (&["call", "mirror", "x", "--deadline", "-5ms"], 2, "expected at least 0"),
        (&["call", "mirror", "x", "--deadline", "--json"], 2, "expected a number with ns, us, ms or s"),
        (&["call", "mirror", "x", "--repeat", "0"], 2, "expected a whole number of at least 1"),
        (&["call", "mirror", "x", "--repeat", "-1"], 2, "expected a whole number of at least 1"),
        (&["call", "mirror", "x", "--output", "hex", "--json"], 2, "cannot be used with"),
        (&["call", "mirror", "--file", "/no/such/file"], 1, "reading /no/such/file"),
        (&["service", "stats", "Mirror"], 1, "did you mean \"mirror\"?"),
        (&["service", "watch", "mirror", "--count", "0"], 2, "expected a whole number of at least 1"),
        (&["service", "watch", "mirror", "-i", "-1"], 2, "expected seconds"),
        (&["service", "bridge"], 2, "LINK|--tcp"),
        (&["service", "bridge", "--tcp", "nonsense"], 2, "expected an address or name and a port"),
        (&["service", "bridge", "--tcp", "127.0.0.1:1", "--as", "x"], 1, "connecting to 127.0.0.1:1"),
    ];
    for (args, code, words) in wrong {
        let said = says(dir.path(), args, code);
        assert!(said.contains(words), "{args:?}: {said}");
    }
    assert_eq!(says(dir.path(), &["call", "mirror", "--deadline", "5s", "--", "-3"], 0), "3-\n");
}

#[test]
fn whom_a_service_does_not_let_in_is_told_whose_it_is() {
    if !rustix::process::geteuid().is_root() {
        return tombolo_testing::skip("it takes root to be another user");
    }
    const NOBODY: u32 = 65534;
    let dir = tempfile::tempdir().unwrap();
    // The tree may be where that user cannot go.
    let program = dir.path().join("tombolo");
    std::fs::copy(env!("CARGO_BIN_EXE_tombolo"), &program).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let _service = service(dir.path(), "mirror");
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.args(args).env("TOMBOLO_RUNTIME", dir.path()).current_dir("/").stdin(Stdio::null());
        let out = command.uid(NOBODY).gid(NOBODY).output().unwrap();
        let text = [out.stdout, out.stderr].concat();
        (out.status.code(), String::from_utf8(text).unwrap())
    };
    for args in [&["call", "mirror", "x"][..], &["service", "stats", "mirror"], &["service", "ls"]] {
        let (code, said) = as_nobody(args);
        assert_eq!(code, Some(1), "{args:?}: {said}");
        assert!(
            said.contains("open only to its owner, user 0, and this process runs as user 65534"),
            "{args:?}: {said}"
        );
    }
    std::fs::set_permissions(dir.path().join("services"), std::fs::Permissions::from_mode(0o700)).unwrap();
    let (_, said) = as_nobody(&["call", "mirror", "x"]);
    assert!(said.contains("user 65534 may not enter a folder on this path"), "{said}");
}
