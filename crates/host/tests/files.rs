//! Fabric files, good and bad, against what is said about them.
//!
//! `files/errors/NAME.toml` holds one fault each, named by the file; `files/errors.golden` holds
//! what is said. `TOMBOLO_BLESS=1 cargo test -p tombolo-host --test files` rewrites the golden
//! file. Read the difference before committing it.

use std::path::{Path, PathBuf};

use tombolo_host::file::{self, Ip6, Which};
use tombolo_switch::guard::Roles;
use tombolo_switch::limit::{Limit, Rate, Rates, Storm};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")
}

#[test]
fn every_bad_file_gets_its_complaint() {
    let mut names: Vec<_> = std::fs::read_dir(folder().join("errors"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() > 75);
    let mut said = String::new();
    for name in names {
        let path = folder().join("errors").join(&name);
        // Those of a file for several machines do not depend on this host's name.
        let error = file::load_on(&path, Which::Any).expect_err(&name);
        let text = error.to_string().replace(&folder().display().to_string(), "…");
        // Where apps are looked for, and which are built, depends on the machine.
        let mut parts = text.split("(looked at ");
        let first = parts.next().unwrap_or_default().to_string();
        let text = parts.fold(first, |said, part| {
            let from = part.find("`./x cells`").expect("a missing app has advice");
            format!("{said}(looked at …); … {}", &part[from..])
        });
        said.push_str(&format!("== {name}\n{text}\n"));
    }
    let golden = folder().join("errors.golden");
    if std::env::var_os("TOMBOLO_BLESS").is_some() {
        std::fs::write(&golden, &said).unwrap();
    }
    let expected = std::fs::read_to_string(golden).unwrap();
    for (a, b) in said.lines().zip(expected.lines()) {
        assert_eq!(a, b);
    }
    assert_eq!(said, expected);
}

#[test]
fn all_faults_of_a_file_are_told_at_once() {
    let text = "[network.lan]\nmtu = 1\nuplink = \"usr\"\n[tap.t]\nnetwork = \"lam\"\nadop = true\n";
    let error = file::parse(text, Path::new("x.toml")).unwrap_err();
    let file::FileError::Faulty { problems, .. } = error else { panic!("{error}") };
    let lines: Vec<_> = problems.iter().map(|p| (p.line, p.key.as_str())).collect();
    assert_eq!(lines, [(2, "network.lan.mtu"), (3, "network.lan.uplink"), (5, "tap.t.network"), (6, "tap.t.adop")]);
}

#[test]
fn additions_are_checked_with_the_whole() {
    let base = file::parse("[network.lan]\n[tap.a]\nip = \"10.87.0.9\"\n", Path::new("x.toml")).unwrap();
    let more = file::add("[tap.b]\nip = \"10.87.0.10\"\n", Path::new("request"), &base).unwrap();
    assert_eq!(more.taps.len(), 2);
    let error = file::add("[tap.c]\nip = \"10.87.0.9\"\n", Path::new("request"), &base).unwrap_err();
    assert!(
        error.to_string().contains("request:2:6: tap.c.ip: expected an address that no other member has"),
        "{error}"
    );
    assert!(error.to_string().ends_with("\n1 fault in the addition; nothing was added"), "{error}");
}

#[test]
fn a_range_has_an_address_for_each_machine_of_the_file() {
    let read = |subnet: &str| {
        let text = format!("[network.lan]\nsubnet = \"{subnet}\"\n[cell.v]\nimage = \"Cargo.toml\"\ncount = 20\n");
        file::parse(&text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml")).map_err(|error| error.to_string())
    };
    assert!(read("10.87.0.0/24").is_ok());
    let error = read("10.87.0.0/29").unwrap_err();
    assert!(
        error.contains("network.lan.dhcp: expected a range with an address for each cell, found 10.87.0."),
        "{error}"
    );
    assert!(error.contains("too few"), "{error}");
}

#[test]
fn a_machine_without_a_network_is_not_called_a_mistyped_name() {
    let text = "[vm.web]\nkernel = \"Cargo.toml\"\n[[forward]]\nlisten = \"127.0.0.1:8080\"\nto = \"web:80\"\n";
    let error = file::parse(text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml")).unwrap_err().to_string();
    assert!(error.contains("found \"web\", which is on no network") || error.contains("[network.NAME]"), "{error}");
    assert!(!error.contains("did you mean \"web\""), "{error}");
}

#[test]
fn a_folder_gives_its_fabric_a_legal_name_or_none() {
    let name = |path: &str| file::parse("[network.lan]\n", Path::new(path)).map(|f| f.name);
    for (path, expected) in [
        ("/srv/lab/x.toml", "lab"),
        ("/srv/My Lab_2/x.toml", "my-lab-2"),
        ("/srv/--a--/x.toml", "a"),
        ("/srv/a-very-long-name-of-a-folder/x.toml", "a-very-long-name-of-a-fo"),
    ] {
        assert_eq!(name(path).unwrap(), expected);
    }
    for path in ["/srv/…/x.toml", "/x.toml"] {
        let error = name(path).unwrap_err().to_string();
        assert!(
            error.contains(":1:1: name: expected 1 to 24 of a-z, 0-9 and -, not services, found none, and the folder"),
            "{error}"
        );
        assert!(error.contains("add name = "), "{error}");
        let named = file::parse("name = \"n\"\n[network.lan]\n", Path::new(path)).unwrap();
        assert_eq!((named.name.as_str(), named.networks[0].domain.as_str()), ("n", "n.internal"));
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("Über uns");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("x.toml"), "faulty = true\n").unwrap();
    assert_eq!(file::name_of(&folder.join("x.toml"), Which::This).unwrap(), "ber-uns");
}

#[test]
fn a_fabric_is_not_named_as_the_folder_of_services_is() {
    // Both are folders of $TOMBOLO_RUNTIME.
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("services");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("x.toml");
    for text in ["name = \"services\"\n[network.lan]\n", "[network.lan]\n"] {
        let error = file::parse(text, &path).unwrap_err().to_string();
        assert!(error.contains("1 to 24 of a-z, 0-9 and -, not services"), "{error}");
        std::fs::write(&path, text).unwrap();
        assert!(file::name_of(&path, Which::This).is_err());
    }
    let named = file::parse("name = \"lab\"\n[network.services]\n", &path).unwrap();
    assert_eq!((named.name.as_str(), named.networks[0].name.as_str()), ("lab", "services"));
}

#[test]
fn a_network_that_joins_a_real_one_has_a_gateway_only_if_asked_for() {
    let gateway = |more: &str| {
        let text = format!("[network.lan]\nuplink = {{ bridge = \"eth0\" }}\n{more}");
        let fabric = file::parse(&text, Path::new("x.toml")).unwrap();
        fabric.networks[0].gateway.map(|g| g.to_string())
    };
    assert_eq!(gateway(""), None);
    assert_eq!(gateway("gateway = \"10.87.0.5\"\n").as_deref(), Some("10.87.0.5"));
    assert_eq!(gateway("dhcp = true\n").as_deref(), Some("10.87.0.1"), "a DHCP server has an address");
    assert_eq!(gateway("dhcp = false\n"), None);
    assert_eq!(gateway("[port.p]\nkind = \"stream\"\nmac = \"02:00:00:00:00:07\"\nip = \"10.87.0.1\"\n"), None);
}

#[test]
fn members_are_held_to_the_address_that_is_known_of_them() {
    let read = |text: &str| file::parse(text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml")).unwrap();
    let vm = |more: &str| read(&format!("[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\n{more}")).machines[0].guard;
    assert_eq!(vm(""), file::Guard::Ip);
    assert_eq!(vm("guard = \"mac\"\n"), file::Guard::Mac);
    assert_eq!(vm("guard = \"off\"\n"), file::Guard::Off);
    let port = |more: &str| read(&format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{more}")).ports[0].guard;
    let mac = "mac = \"02:00:00:00:00:07\"\n";
    assert_eq!((port(""), port(mac)), (file::Guard::Off, file::Guard::Mac));
    assert_eq!(port(&format!("{mac}ip = \"10.87.0.9\"\n")), file::Guard::Ip);
    let listed = read(&format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{mac}ip = \"10.87.0.9\"\nip6 = []\n"));
    assert_eq!(listed.ports[0].ip6, Ip6::Only(vec![]), "no address but that of its MAC");
    assert_eq!(read(&format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{mac}")).ports[0].ip6, Ip6::Unsaid);
    assert_eq!(read("[network.lan]\n[tap.t]\nip = \"10.87.0.9\"\n").taps[0].guard, file::Guard::Off);
    let any = read(&format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{mac}ip = \"10.87.0.9\"\nip6 = \"any\"\n"));
    assert_eq!(any.ports[0].ip6, Ip6::Any);
}

#[test]
fn what_a_port_may_do_and_how_much_is_what_the_file_says() {
    let read = |more: &str| {
        let text = format!("[network.lan]\n[tap.t]\n{more}");
        file::parse(&text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml")).map(|f| f.taps[0].traffic.clone())
    };
    let plain = read("").unwrap();
    assert_eq!((plain.roles, plain.storm, plain.rates), (Roles::default(), Storm::default(), Rates::default()));
    let all = read("allow = [\"router-advertisements\", \"dhcp-server\", \"gateway-addresses\"]\n").unwrap();
    assert_eq!(all.roles, Roles::ALL);
    assert_eq!(read("allow = \"dhcp-server\"\n").unwrap().roles, Roles { dhcp_server: true, ..Roles::default() });
    assert_eq!(read("storm = false\n").unwrap().storm, Storm::OFF);
    let storm = read("storm = { broadcast = 50, unknown = false }\n").unwrap().storm;
    assert_eq!(storm, Storm { broadcast: Some(Limit::frames(50)), unknown: None, ..Storm::default() });
    let rates = read("rate = { send = \"100M\", receive = 5000, receive_frames = 7 }\n").unwrap().rates;
    assert_eq!(rates.send, Rate { bits: Some(100_000_000), ..Rate::default() });
    assert_eq!(rates.receive, Rate { bits: Some(5000), frames: Some(7), burst: None });
    for bad in [
        "rate = { up = 1 }",
        "rate = { send = 1 }",
        "rate = 7",
        "storm = { broadcast = 0 }",
        "storm = 9",
        "allow = [\"all\"]",
    ] {
        assert!(read(&format!("{bad}\n")).is_err(), "{bad}");
    }
}

#[test]
fn a_bypass_is_of_a_kernel_uplink_and_names_interfaces() {
    let parse = |text: &str| file::parse(&format!("name = \"b\"\n[network.lan]\n{text}"), Path::new("t.toml"));
    let bypass = |text: &str| parse(text).unwrap().networks[0].bypass.clone();
    assert_eq!(bypass("uplink = \"kernel\""), None);
    assert_eq!(bypass("uplink = \"kernel\"\nbypass = false"), None);
    assert_eq!(bypass("uplink = \"kernel\"\nbypass = true"), Some(vec![]));
    assert_eq!(bypass("uplink = \"kernel\"\nbypass = [\"eth0\"]"), Some(vec!["eth0".into()]));
    for bad in [
        "bypass = true",
        "uplink = \"user\"\nbypass = true",
        "uplink = \"kernel\"\nbypass = []",
        "uplink = \"kernel\"\nbypass = 1",
    ] {
        let error = parse(bad).unwrap_err().to_string();
        assert!(error.contains("network.lan.bypass"), "{bad}: {error}");
    }
}

#[test]
fn keys_that_do_something_are_taken_and_a_fault_of_what_they_lean_on_is_the_only_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml");
    let mac = "mac = \"02:00:00:00:00:07\"";
    let bridge = "[network.lan]\nuplink = { bridge = \"eth0\" }\n";
    for good in [
        "[network.lan]\nuplink = \"user\"\ndhcp = false\ndns = [\"9.9.9.9\"]\ndomain = \"a.b\"\n".to_string(),
        format!("{bridge}gateway = \"10.87.0.1\"\ndns = [\"9.9.9.9\"]\n[tap.t]\nallow = \"gateway-addresses\"\n"),
        "[worker.a]\n[worker.b]\ncpu = 0\n[network.lan]\n[network.other]\nworker = \"b\"\n".into(),
        format!("{bridge}[vm.v]\nkernel = \"Cargo.toml\"\nip = \"10.87.0.9\"\n"),
        "[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\nip = \"10.87.0.9\"\nguard = \"off\"\n".into(),
        "[network.lan]\n[vm.v]\nkernel = \"Cargo.toml\"\nnetwork = []\nrestart = \"no\"\n".into(),
        format!("[network.lan]\n[tap.t]\nadopt = true\n{mac}\nguard = \"mac\"\n"),
        format!("[network.lan]\n[tap.t]\nadopt = true\n{mac}\nip = \"10.87.0.9\"\n"),
        format!("[network.lan]\n[tap.t]\nadopt = false\n{mac}\naccept_ra = true\n"),
        format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{mac}\nip = \"10.87.0.9\"\nguard = \"off\"\n"),
        format!("[network.lan]\n[port.p]\nkind = \"ivshmem\"\n{mac}\nguard = \"off\"\n"),
        format!("{bridge}[port.p]\nkind = \"stream\"\n{mac}\n"),
    ] {
        file::parse(&good, &path).unwrap_or_else(|error| panic!("{good}\n{error}"));
    }
    for (bad, key) in [
        ("[network.lan]\nuplink = \"usr\"\ndns = [\"9.9.9.9\"]\n".to_string(), "network.lan.uplink"),
        ("[worker.a]\n[worker.b]\n[network.lan]\nworker = \"c\"\n".into(), "network.lan.worker"),
        (format!("[network.lan]\n[tap.t]\nadopt = 1\n{mac}\naccept_ra = true\n"), "tap.t.adopt"),
        (format!("[network.lan]\n[port.p]\nkind = \"stream\"\n{mac}\nguard = \"of\"\n"), "port.p.guard"),
        (format!("{bridge}gateway = \"x\"\n[tap.t]\nallow = \"gateway-addresses\"\n"), "network.lan.gateway"),
    ] {
        let error = file::parse(&bad, &path).unwrap_err();
        let file::FileError::Faulty { problems, .. } = error else { panic!("{error}") };
        let keys: Vec<_> = problems.iter().map(|p| p.key.as_str()).collect();
        assert_eq!(keys, [key], "{bad}");
    }
}

#[test]
fn beside_a_kernel_uplink_a_tap_has_an_address_in_another_namespace_only() {
    let text = |more: &str| {
        format!(
            "[network.lan]\nuplink = \"kernel\"\n[network.other]\nsubnet = \"10.88.0.0/24\"\n[tap.t]\nnetwork = \"lan\"\n{more}"
        )
    };
    for good in ["", "ip = \"10.87.0.9\"\nnetns = \"ns\"\n", "[tap.u]\nnetwork = \"other\"\nip = \"10.88.0.9\"\n"] {
        file::parse(&text(good), Path::new("x.toml")).unwrap();
    }
    let error = file::parse(&text("ip = \"10.87.0.9\"\n"), Path::new("x.toml")).unwrap_err();
    assert!(error.to_string().contains("tap.t.ip: expected no address for a device of the host"), "{error}");
}

#[test]
fn a_machine_keeps_its_address_when_others_come() {
    let one = "[network.lan]\n[vm.b]\nkernel=\"Cargo.toml\"\n";
    let two = format!("{one}[vm.a]\nkernel=\"Cargo.toml\"\n");
    let read = |text: &str| file::parse(text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("x.toml")).unwrap();
    let address = |f: &file::Fabric| f.machines.iter().find(|m| m.name == "b").unwrap().nics[0].clone();
    let (a, b) = (address(&read(one)), address(&read(&two)));
    assert_eq!(a, b);
    assert!(a.ip.is_some());
}

#[test]
fn the_reference_describes_exactly_the_keys_of_the_schema() {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/fabric-file.md")).unwrap();
    let mut rows = Vec::new();
    let mut section = None;
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("### ") {
            section = file::schema::SECTIONS.iter().find(|s| title.contains(s.form)).map(|s| s.name);
        }
        if let (Some(section), Some(rest)) = (section, line.strip_prefix("| `")) {
            let cells: Vec<_> = rest.split(" | ").map(str::trim).collect();
            rows.push((section, cells[0].trim_end_matches('`').to_string(), rest.to_string()));
        }
    }
    for section in file::schema::SECTIONS {
        for key in section.keys() {
            let row = rows.iter().find(|(s, k, _)| *s == section.name && k == key.name);
            let (_, _, row) =
                row.unwrap_or_else(|| panic!("docs/fabric-file.md lacks `{}` of {}", key.name, section.form));
            for part in [key.expects, key.doc, key.default] {
                assert!(row.contains(part), "`{}` of {}: {part:?} is not in {row:?}", key.name, section.form);
            }
        }
    }
    let known: usize = file::schema::SECTIONS.iter().map(|s| s.keys().count()).sum();
    assert_eq!(rows.len(), known, "docs/fabric-file.md describes keys that the parser does not know");
}

#[test]
fn the_examples_are_right() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "toml") {
            continue;
        }
        count += 1;
        match file::load(&path) {
            Ok(_) => {}
            // Where the cells or the Linux guest are not built, that and nothing else is wrong.
            Err(file::FileError::Faulty { problems, .. }) => {
                let not_built =
                    |p: &file::Problem| p.expected == "the name of a built app" || p.found.contains("build/guest/");
                assert!(problems.iter().all(not_built), "{}: {problems:?}", path.display());
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(count >= 3);
}

#[test]
fn a_link_with_a_service_has_a_seat_for_the_fabric_and_speaks_calls() {
    let text = "[network.lan]\n[vm.a]\nkernel = \"Cargo.toml\"\n[link.sums]\nbetween = [\"a\"]\nservice = \"sums\"\ncallers = \"everybody\"\n\
                [link.asks]\nbetween = [\"a\"]\nto = \"host.sums\"\n[link.own]\nbetween = [\"a\"]\nseats = 2\n";
    let fabric = file::parse(text, Path::new("x.toml")).unwrap();
    let found: Vec<_> = fabric.links.iter().map(|l| (l.is_bridged(), l.seats, l.protocol, l.everybody)).collect();
    // By name: asks, own, sums.
    assert_eq!(found, [(true, 1, 0x4002, false), (false, 2, 0x4001, false), (true, 1, 0x4002, true)]);
    assert_eq!((fabric.links[2].service.as_deref(), fabric.links[0].to.as_deref()), (Some("sums"), Some("host.sums")));
}

/// Every source file below `folder` that may hold a test.
fn sources(folder: &Path, out: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let name = entry.file_name().into_string().unwrap_or_default();
        if path.is_dir() && name != "target" {
            sources(&path, out);
        } else if name.ends_with(".rs") || name.ends_with(".py") {
            out.push_str(&std::fs::read_to_string(&path).unwrap_or_default());
        }
    }
}

#[test]
fn every_test_that_the_threat_model_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let mut all = String::new();
    ["crates", "tests"].iter().for_each(|folder| sources(&root.join(folder), &mut all));
    let promises = text.split("## Promises").nth(1).unwrap().split("## Confinement").next().unwrap();
    let mut named = 0;
    for row in
        promises.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| promise") && !l.starts_with("| ---"))
    {
        let tests = row.trim_end_matches('|').rsplit('|').next().unwrap();
        // In backticks is each second piece.
        for name in tests.split('`').skip(1).step_by(2) {
            // One of a suite for several engines is generic.
            let heads = ["fn NAME(", "fn NAME<", "def NAME("].map(|head| head.replace("NAME", name));
            let there = root.join(name).is_file() || heads.iter().any(|head| all.contains(head));
            assert!(there, "docs/security.md names {name}, which is no test");
            named += 1;
        }
    }
    assert!(named > 25, "{named}");
}

#[test]
fn rules_mirrors_and_isolation_are_read_for_their_networks() {
    use tombolo_switch::policy::{Action, Isolation, Mirror, Protocol, Rule, Who};
    let text = r#"
        [network.lan]
        uplink = "user"
        policy = "deny"
        [network.dmz]
        [tap.web]
        network = "lan"
        ip = "10.87.0.9"
        mac = "02:00:00:00:00:09"
        groups = "front"
        isolated = true
        [tap.app]
        network = "lan"
        groups = ["front", "back"]
        isolated = "apps"
        [tap.ids]
        network = "lan"
        [[rule]]
        action = "allow"
        from = ["front", "192.0.2.0/24", "fd00::7"]
        to = "outside"
        protocol = "tcp"
        ports = [443, "8000-8010"]
        [[rule]]
        action = "deny"
        protocol = 47
        network = "dmz"
        [[mirror]]
        of = "web"
        to = "ids"
        frames = "sent"
        network = "lan"
        [[forward]]
        listen = "127.0.0.1:8080"
        to = "web:80"
    "#;
    let fabric = file::parse(text, Path::new("x.toml")).unwrap();
    let (lan, dmz) = (fabric.policy("lan"), fabric.policy("dmz"));
    let front = Rule {
        action: Action::Allow,
        from: vec![
            Who::Label("front".into()),
            Who::Prefix("192.0.2.0".parse().unwrap(), 24),
            Who::Prefix("fd00::7".parse().unwrap(), 128),
        ],
        to: vec![Who::Label("outside".into())],
        protocol: Protocol::Number(6),
        ports: vec![443..=443, 8000..=8010],
    };
    let forward = Rule {
        from: vec![Who::Label("outside".into())],
        to: vec![Who::Prefix("10.87.0.9".parse().unwrap(), 32)],
        protocol: Protocol::Number(6),
        ports: vec![80..=80],
        ..Rule::default()
    };
    assert_eq!(
        (lan.otherwise, &lan.rules[..]),
        (Action::Deny, &[front.clone(), forward][..]),
        "the forward is allowed"
    );
    let mirror = Mirror { of: vec!["web".into()], to: "ids".into(), sent: true, received: false };
    assert_eq!(lan.mirrors, [mirror]);
    let gre = Rule { action: Action::Deny, protocol: Protocol::Number(47), ..Rule::default() };
    assert_eq!((dmz.otherwise, dmz.rules), (Action::Allow, vec![front, gre]));
    assert!(dmz.mirrors.is_empty());
    let isolation: Vec<_> = fabric.taps.iter().map(|t| (&t.name[..], &t.traffic.isolation)).collect();
    let community = Isolation::Community("apps".into());
    assert!(isolation.contains(&("web", &Isolation::Alone)) && isolation.contains(&("app", &community)));
    assert!(isolation.contains(&("ids", &Isolation::Off)));
}

#[test]
fn vlans_are_read_for_access_ports_and_trunks() {
    use tombolo_switch::vlan::Membership;
    let text = r#"
        [network.lan]
        [tap.plain]
        [tap.camera]
        vlan = 10
        [tap.uplinked]
        trunk = [10, "20-29"]
        native = 1
        [tap.sniffer]
        trunk = "all"
    "#;
    let fabric = file::parse(text, Path::new("x.toml")).unwrap();
    let of = |name: &str| fabric.taps.iter().find(|tap| tap.name == name).unwrap().traffic.vlans.clone();
    assert_eq!(of("plain"), None);
    assert_eq!(of("camera"), Some(Membership::access(10)));
    assert_eq!(of("uplinked"), Some(Membership { native: Some(1), trunk: Some(vec![10..=10, 20..=29]) }));
    assert_eq!(of("sniffer"), Some(Membership { native: None, trunk: Some(vec![1..=4094]) }));
}
