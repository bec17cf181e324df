//! Differences of fabric files: each kind of change, and random pairs of files.

use std::path::Path;

use tombolo_testing::Random;

use super::*;
use crate::plan::Facts;
use crate::qemu::probe::Qemu;

fn model(text: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("t.toml");
    let fabric = file::parse(&format!("name = \"demo\"\n{text}"), &path).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let facts = Facts {
        qemu: Ok(Qemu { path: "/usr/bin/qemu".into(), version: (7, 2, 22) }),
        kvm: Err("not here".into()),
        xl: Err("not here".into()),
        runtime: "/run/t/demo".into(),
        tsc: None,
    };
    let plan = plan::plan(&fabric, &facts).unwrap();
    Model { fabric, plan }
}

const FILE: &str = "[network.lan]\nuplink = \"user\"\n[network.ops]\n[cell.web]\nimage = \"Cargo.toml\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:11\"\nip = \"10.87.0.50\"\n\
[vm.db]\nkernel = \"Cargo.toml\"\nnetwork = \"lan\"\n[tap.host]\nnetwork = \"lan\"\nip = \"10.87.0.3\"\n\
[port.guest]\nkind = \"stream\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:07\"\nip = \"10.87.0.9\"\n\
[[forward]]\nlisten = \"127.0.0.1:8080\"\nto = \"web:80\"\n";

/// The only change from `FILE` to the file with `from` replaced by `to`.
fn changed(from: &str, to: &str) -> Vec<Change> {
    let text = FILE.replacen(from, to, 1);
    assert_ne!(text, FILE, "{from}");
    difference(&model(FILE), &model(&text))
}

fn told(changes: &[Change]) -> Vec<String> {
    changes
        .iter()
        .map(|c| {
            let keys: Vec<&str> = c.keys.iter().map(|k| k.key.as_str()).collect();
            format!("{} {} [{}]", c.action.word(), c.section, keys.join(" "))
        })
        .collect()
}

#[test]
fn equal_files_differ_in_nothing() {
    assert_eq!(difference(&model(FILE), &model(FILE)), []);
}

#[test]
fn each_part_is_changed_by_the_least_that_does_it() {
    for (from, to, expected) in [
        ("kernel = \"Cargo.toml\"\n", "kernel = \"Cargo.toml\"\nmemory = \"300M\"\n", "restart vm.db [memory]"),
        ("kernel = \"Cargo.toml\"\n", "kernel = \"Cargo.toml\"\nrestart = \"on-failure\"\n", "change vm.db [restart]"),
        ("kernel = \"Cargo.toml\"\n", "kernel = \"Cargo.toml\"\nrate = { send = \"1M\" }\n", "change vm.db [rate]"),
        ("kernel = \"Cargo.toml\"\n", "kernel = \"Cargo.toml\"\nguard = \"mac\"\n", "change vm.db [guard]"),
        (
            "kernel = \"Cargo.toml\"\nnetwork = \"lan\"",
            "kernel = \"Cargo.toml\"\nnetwork = [\"lan\", \"ops\"]",
            "restart vm.db [network mac ip]",
        ),
        (
            "kind = \"stream\"\n",
            "kind = \"stream\"\nrate = { send = \"1M\" }\nstorm = false\n",
            "change port.guest [storm rate]",
        ),
        ("ip = \"10.87.0.9\"", "ip = \"10.87.0.8\"", "change port.guest [ip]"),
        ("kind = \"stream\"\n", "kind = \"vhost-user\"\n", "restart port.guest [kind]"),
        ("ip = \"10.87.0.3\"", "ip = \"10.87.0.4\"", "restart tap.host [ip]"),
        ("[tap.host]\n", "[tap.host]\nguard = \"mac\"\n", "change tap.host [guard]"),
        ("\"web:80\"", "\"web:81\"", "change network.lan [forward tcp 127.0.0.1:8080]"),
        ("uplink = \"user\"\n", "uplink = \"user\"\ndns = [\"9.9.9.9\"]\n", "change network.lan [dns]"),
        ("[network.ops]\n", "[network.ops]\nsubnet = \"10.99.0.0/24\"\n", "restart network.ops [subnet gateway dhcp]"),
        ("uplink = \"user\"\n", "uplink = \"user\"\nmtu = 1400\n", "refuse network.lan [mtu]"),
        ("[network.ops]\n", "", "remove network.ops []"),
        ("[network.ops]\n", "[network.ops]\n[port.more]\nnetwork = \"ops\"\nkind = \"stream\"\n", "add port.more []"),
        ("[network.lan]\n", "[worker.main]\nbudget = 32\n[network.lan]\n", "change worker.main [budget]"),
    ] {
        let changes = changed(from, to);
        let found = told(&changes);
        assert!(found.iter().any(|c| c == expected), "{from:?} → {to:?}: {found:?}");
        // A network's MTU is in what its members are started with.
        if !expected.starts_with("refuse") {
            assert_eq!(found.len(), 1, "{from:?} → {to:?}: {found:?}");
        }
    }
}

#[test]
fn what_a_running_member_cannot_follow_is_refused_with_the_members() {
    let changes = changed("uplink = \"user\"\n", "uplink = \"user\"\nsubnet = \"10.87.0.0/25\"\n");
    let refused = changes.iter().find(|c| c.action == Action::Refuse).unwrap_or_else(|| panic!("{:?}", told(&changes)));
    assert_eq!(refused.section, "network.lan");
    assert!(
        refused.reason.contains("web, db, host, guest") && refused.reason.contains("`tombolo down`"),
        "{}",
        refused.reason
    );
}

#[test]
fn of_a_refused_network_nothing_is_told_that_follows_for_its_members() {
    let mtu = |text: &str| text.replacen("uplink = \"user\"\n", "uplink = \"user\"\nmtu = 1400\n", 1);
    let sections = |text: &str| {
        let changes = difference(&model(FILE), &model(text));
        super::told(&changes).map(|change| format!("{} {}", change.action.word(), change.section)).collect::<Vec<_>>()
    };
    assert_eq!(sections(&mtu(FILE)), ["refuse network.lan"]);
    // What was asked for besides is told.
    let more = mtu(FILE).replacen("[vm.db]\n", "[vm.db]\nmemory = \"300M\"\n", 1);
    assert_eq!(sections(&more), ["refuse network.lan", "restart vm.db"]);
}

#[test]
fn a_member_whose_guard_alone_differs_says_that_it_follows_its_network() {
    let changes = changed("uplink = \"user\"\n", "uplink = \"user\"\nipv6 = \"fd77::/64\"\n");
    let of =
        |section: &str| changes.iter().find(|c| c.section == section).unwrap_or_else(|| panic!("{:?}", told(&changes)));
    assert_eq!(of("cell.web").reason, "its guard follows network.lan");
    assert!(changes.iter().all(|c| !c.keys.is_empty() || !c.reason.is_empty()), "{changes:?}");
}

#[test]
fn a_link_restarts_its_machines_and_no_other() {
    let link = "[link.pair]\nbetween = [\"web\"]\nseats = 1\n[[forward]]\n";
    let found = told(&changed("[[forward]]\n", link));
    assert_eq!(found, ["restart cell.web []", "add link.pair []"]);
}

#[test]
fn another_service_of_a_link_is_a_change_of_its_bridge_alone() {
    let with = |link: &str| {
        FILE.replacen("[[forward]]\n", &format!("[link.pair]\nbetween = [\"web\"]\n{link}[[forward]]\n"), 1)
    };
    let found = |a: &str, b: &str| difference(&model(&with(a)), &model(&with(b)));
    for (before, after, keys) in [
        ("service = \"a\"\n", "service = \"b\"\n", "[service]"),
        ("service = \"a\"\n", "to = \"a\"\n", "[service to]"),
        ("service = \"a\"\n", "service = \"a\"\ncallers = \"everybody\"\n", "[callers]"),
    ] {
        assert_eq!(told(&found(before, after)), [format!("change link.pair {keys}")]);
    }
    // A seat more is another memory.
    let found = told(&found("seats = 1\n", "seats = 2\n"));
    assert_eq!(found, ["restart cell.web []", "restart link.pair [seats]"]);
}

#[test]
fn a_member_that_changes_its_kind_goes_and_comes() {
    let text = FILE.replace(
        "[tap.host]\nnetwork = \"lan\"\nip = \"10.87.0.3\"\n",
        "[port.host]\nkind = \"stream\"\nnetwork = \"lan\"\n",
    );
    assert_eq!(told(&difference(&model(FILE), &model(&text))), ["add port.host []", "remove tap.host []"]);
}

/// A file that a seed chooses, of few names and values so that two of them have much in common.
fn random_file(random: &mut Random) -> String {
    let mut out = String::new();
    let mut pick = |n: u64| random.below(n);
    let networks = ["lan", "ops", "out"];
    let used: Vec<(usize, &str)> = networks.into_iter().enumerate().filter(|(i, _)| *i == 0 || pick(3) > 0).collect();
    for (i, name) in &used {
        let uplink = ["none", "user", "kernel"][pick(3) as usize];
        let subnet = 10 * i + pick(2) as usize;
        out.push_str(&format!(
            "[network.{name}]\nsubnet = \"10.9.{subnet}.0/24\"\nuplink = \"{uplink}\"\nmtu = {}\n",
            1400 + 100 * pick(2)
        ));
        if uplink != "none" && pick(2) == 0 {
            out.push_str("dns = [\"9.9.9.9\"]\n");
        }
    }
    let any = |n: u64| used[n as usize % used.len()].1;
    for name in ["a", "b", "c"] {
        match pick(6) {
            0 => out.push_str(&format!(
                "[cell.{name}]\nimage = \"Cargo.toml\"\nnetwork = \"{}\"\nmemory = \"{}M\"\n",
                any(pick(9)),
                32 + pick(2)
            )),
            1 => out.push_str(&format!(
                "[vm.{name}]\nkernel = \"Cargo.toml\"\nnetwork = [\"{}\", \"{}\"]\ncpus = {}\n",
                any(pick(9)),
                used[0].1,
                1 + pick(2)
            )),
            2 => out.push_str(&format!(
                "[tap.{name}]\nnetwork = \"{}\"\nguard = \"{}\"\n",
                any(pick(9)),
                ["off", "mac"][pick(2) as usize]
            )),
            3 | 4 => out.push_str(&format!(
                "[port.{name}]\nnetwork = \"{}\"\nkind = \"{}\"\n",
                any(pick(9)),
                ["stream", "vhost-user", "ivshmem"][pick(3) as usize]
            )),
            _ => {}
        }
    }
    if out.contains("[cell.a]") && pick(2) == 0 {
        out.push_str(&format!("[link.l]\nbetween = [\"a\"]\nseats = {}\n", 1 + pick(2)));
    }
    let first = &out[..out.find("mtu").unwrap_or(0)];
    if !first.contains("uplink = \"none\"") {
        for port in 0..pick(3) {
            let host = if out.contains("10.9.0.0") { 0 } else { 1 };
            out.push_str(&format!(
                "[[forward]]\nlisten = \"127.0.0.1:{}\"\nto = \"10.9.{host}.77:{}\"\n",
                8000 + port,
                80 + pick(2)
            ));
        }
    }
    out
}

/// With its lists in an order that does not depend on how it came about.
fn sorted(mut model: Model) -> Model {
    let (fabric, plan) = (&mut model.fabric, &mut model.plan);
    fabric.workers.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.networks.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.machines.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.taps.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.ports.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.links.sort_by(|a, b| a.name.cmp(&b.name));
    fabric.forwards.sort_by(|a, b| (&a.network, a.listen).cmp(&(&b.network, b.listen)));
    plan.ports.sort_by(|a, b| a.name.cmp(&b.name));
    plan.machines.sort_by(|a, b| a.name.cmp(&b.name));
    plan.kernel.sort_by(|a, b| a.network.name.cmp(&b.network.name));
    plan.links.sort_by(|a, b| a.name.cmp(&b.name));
    model
}

#[test]
fn applying_a_difference_gives_the_new_model_whatever_the_order() {
    let mut random = Random::seeded();
    let mut seen = BTreeMap::new();
    for _ in 0..400 {
        let (old, new) = (random_file(&mut random), random_file(&mut random));
        let (a, b) = (model(&old), model(&new));
        let mut changes = difference(&a, &b);
        for change in &changes {
            *seen.entry(change.action).or_insert(0) += 1;
            assert!(change.before != change.after, "{change:?}");
            let (parts, new_parts) = (a.parts(), b.parts());
            assert_eq!(parts.get(&change.section), change.before.as_ref());
            assert_eq!(new_parts.get(&change.section), change.after.as_ref());
        }
        // A name may change its kind: what goes is taken first, as in an apply.
        changes.sort_by_key(|c| c.action != Action::Remove);
        let removed = changes.iter().filter(|c| c.action == Action::Remove).count();
        for i in (removed + 1..changes.len()).rev() {
            changes.swap(i, removed + random.below((i - removed + 1) as u64) as usize);
        }
        let made = changes.iter().fold(a, |model, change| model.with(change));
        assert_eq!(sorted(made), sorted(b), "from:\n{old}\nto:\n{new}");
    }
    // Each kind of change has been there.
    assert_eq!(seen.len(), 5, "{seen:?}");
}

#[test]
fn other_keys_in_the_same_folder_are_a_change_of_the_exports_and_imports_that_use_them() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().display();
    let proof = format!("machine = \"a\"\nkeys = \"{folder}\"\n");
    let text = format!(
        "{FILE}[export.x]\nlisten = \"192.0.2.1:7000\"\n{proof}[import.y]\nfrom = \"b=192.0.2.2:7000\"\n{proof}"
    );
    let digest = |model: &Model| model.fabric.exports[0].proof.as_ref().map(|proof| proof.digest);
    let none = model(&text);
    assert_eq!(digest(&none), Some(0), "no files");
    for name in ["ca.pem", "a.pem", "a.key"] {
        assert_eq!(difference(&none, &model(&text)), []);
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    let before = model(&text);
    assert_ne!(digest(&before), Some(0));
    for name in ["ca.pem", "a.pem", "a.key"] {
        let before = model(&text);
        assert_eq!(difference(&before, &model(&text)), []);
        std::fs::write(dir.path().join(name), format!("another {name}")).unwrap();
        let changes = difference(&before, &model(&text));
        assert_eq!(told(&changes), ["restart export.x [keys]", "restart import.y [keys]"], "{name}");
        assert_eq!(changes[0].keys[0].after, Some(format!("{folder}, other keys")));
    }
}

#[test]
fn rules_and_mirrors_that_come_and_go_are_told_one_by_one() {
    let ports = "[port.ids]\nkind = \"stream\"\nnetwork = \"lan\"\n";
    let file = |rules: &str| model(&format!("{FILE}{ports}{rules}"));
    let deny = "[[rule]]\naction = \"deny\"\nfrom = [\"ids\", \"10.0.0.0/8\"]\nto = \"db\"\n";
    let allow = "[[rule]]\naction = \"allow\"\nprotocol = \"tcp\"\nports = [22, \"80-90\"]\nnetwork = \"lan\"\n";
    let mirror = "[[mirror]]\nof = \"db\"\nto = \"ids\"\n";
    let keys = |a: &Model, b: &Model| -> Vec<(String, Option<String>, Option<String>)> {
        let changes = difference(a, b);
        changes.into_iter().flat_map(|c| c.keys).map(|k| (k.key, k.before, k.after)).collect()
    };
    let (a, b) = (file(&format!("{deny}{mirror}")), file(&format!("{deny}{allow}")));
    let allowed = "allow tcp port 22 or 80-90 in lan";
    let expected = [
        ("rule 2".to_string(), None, Some(allowed.to_string())),
        ("mirror 1".into(), Some("of db to ids".into()), None),
    ];
    assert_eq!(keys(&a, &b), expected);
    assert!(difference(&a, &b)[0].reason.contains("new rules"));
    assert_eq!(difference(&a, &file(deny))[0].reason, "", "mirrors judge no connection");
    let text = "deny from ids or 10.0.0.0/8 to db";
    assert_eq!(keys(&b, &file(allow)), [("rule 1".into(), Some(text.into()), None)]);
    // The first rule that applies decides, so the order counts, also where one comes besides.
    let third = "[[rule]]\naction = \"deny\"\nprotocol = \"udp\"\n";
    let order = ("order of rules".to_string(), Some(format!("{text}; {allowed}")), Some(format!("{allowed}; {text}")));
    assert_eq!(keys(&b, &file(&format!("{allow}{deny}"))), vec![order.clone()]);
    let more = keys(&b, &file(&format!("{allow}{deny}{third}")));
    assert_eq!(more, [("rule 3".into(), None, Some("deny udp".into())), order]);
}
