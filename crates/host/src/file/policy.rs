//! What members may exchange: `[[rule]]`, `[[mirror]]`, and the keys `isolated`, `groups`, `vlan`,
//! `trunk` and `native` of a member's section.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use tombolo_switch::policy::{Action, Isolation, Mirror, Protocol, Rule, Who};
use tombolo_switch::vlan::{HIGHEST, Membership};
use toml::de::DeValue;

use super::check::Check;
use super::model::{Fabric, MirrorDecl, RuleDecl};
use super::parse::words::clean_name;
use super::problem::near;
use super::read::{Section, found, integer};

/// What rules call the port of a network's uplink.
pub const OUTSIDE: &str = "outside";

const ACTIONS: [(&str, Action); 2] = [("allow", Action::Allow), ("deny", Action::Deny)];

/// The key `policy` of a network: what happens to a connection that no rule is about.
pub(super) fn otherwise(s: &mut Section<'_, '_, '_, '_>) -> Action {
    s.word("policy", &ACTIONS).unwrap_or_default()
}

/// The key `isolated`.
pub(super) fn isolation(s: &mut Section<'_, '_, '_, '_>) -> Isolation {
    let read = |value: &DeValue<'_>| match value {
        DeValue::Boolean(true) => Some(Isolation::Alone),
        DeValue::Boolean(false) => Some(Isolation::Off),
        DeValue::String(text) => clean_name(text).map(|name| Isolation::Community(name.into())),
        _ => None,
    };
    s.take("isolated", read).unwrap_or_default()
}

/// The key `groups`.
pub(super) fn groups(s: &mut Section<'_, '_, '_, '_>) -> Vec<String> {
    s.list("groups", true, |name| clean_name(name).filter(|name| name != OUTSIDE)).unwrap_or_default()
}

/// A VLAN, or a range of them.
fn vlan_range(value: &DeValue<'_>) -> Option<RangeInclusive<u16>> {
    let vlan = |n: i64| u16::try_from(n).ok().filter(|n| (1..=HIGHEST).contains(n));
    if let Some(number) = integer(value) {
        return vlan(number).map(|n| n..=n);
    }
    match value.as_str()? {
        "all" => Some(1..=HIGHEST),
        text => {
            let (from, to) = text.split_once('-')?;
            let (from, to) = (vlan(from.trim().parse().ok()?)?, vlan(to.trim().parse().ok()?)?);
            (from <= to).then_some(from..=to)
        }
    }
}

/// The keys `vlan`, `trunk` and `native`.
pub(super) fn vlans(s: &mut Section<'_, '_, '_, '_>) -> Option<Membership> {
    let highest = i64::from(HIGHEST);
    let access = s.number("vlan", 1, highest).map(|vlan| vlan as u16);
    let native = s.number("native", 1, highest).map(|vlan| vlan as u16);
    let given = |s: &Section<'_, '_, '_, '_>, key| s.raw(key).is_some();
    s.applies("trunk", given(s, "trunk").then_some("given"));
    let Some((value, span)) = s.raw("trunk") else { return access.map(Membership::access) };
    if let Some((there, span)) = s.raw("vlan") {
        let hint = "`vlan` is for frames without a tag only; for those of a trunk write `native`, or leave `trunk` out";
        s.wrong("vlan", &span, format!("{} beside `trunk`", found(there)), Some(hint.into()));
    }
    let trunk = ranges(s, "trunk", value, &span, vlan_range);
    Some(Membership { native, trunk: Some(trunk) })
}

/// The values of a key that takes one or a list.
fn ranges(
    s: &mut Section<'_, '_, '_, '_>,
    key: &str,
    value: &DeValue<'_>,
    span: &std::ops::Range<usize>,
    read: impl Fn(&DeValue<'_>) -> Option<RangeInclusive<u16>>,
) -> Vec<RangeInclusive<u16>> {
    let DeValue::Array(array) = value else {
        let one = read(value);
        if one.is_none() {
            s.wrong(key, span, found(value), None);
        }
        return one.into_iter().collect();
    };
    let mut list = Vec::new();
    for item in array.iter() {
        match read(item.get_ref()) {
            Some(range) => list.push(range),
            None => s.wrong(key, &item.span(), format!("{} in the list", found(item.get_ref())), None),
        }
    }
    list
}

/// A member, a group, `outside`, an address or a prefix.
fn who(text: &str) -> Option<Who> {
    if let Some(name) = clean_name(text) {
        return Some(Who::Label(name.into()));
    }
    let (ip, bits) = match text.split_once('/') {
        Some((ip, bits)) => (ip, Some(bits.parse::<u8>().ok()?)),
        None => (text, None),
    };
    let ip: std::net::IpAddr = ip.parse().ok()?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    Some(Who::Prefix(ip, bits.unwrap_or(most))).filter(|_| bits.is_none_or(|bits| bits <= most))
}

fn protocol(value: &DeValue<'_>) -> Option<Protocol> {
    Some(match value.as_str() {
        Some("tcp") => Protocol::Number(6),
        Some("udp") => Protocol::Number(17),
        Some("icmp") => Protocol::Icmp,
        Some(_) => return None,
        None => Protocol::Number(integer(value).and_then(|n| u8::try_from(n).ok())?),
    })
}

/// A port number, or a range like "6000-6010".
fn ports(value: &DeValue<'_>) -> Option<RangeInclusive<u16>> {
    let port = |n: i64| u16::try_from(n).ok().filter(|n| *n != 0);
    if let Some(number) = integer(value) {
        return port(number).map(|n| n..=n);
    }
    let (from, to) = value.as_str()?.split_once('-')?;
    let (from, to) = (port(from.trim().parse().ok()?)?, port(to.trim().parse().ok()?)?);
    (from <= to).then_some(from..=to)
}

/// Reads one section `[[rule]]`.
pub(super) fn rule(s: &mut Section<'_, '_, '_, '_>) -> RuleDecl {
    let action = s.word("action", &ACTIONS);
    if s.raw("action").is_none() {
        s.missing("action");
    }
    let (from, to) = (s.list("from", true, who), s.list("to", true, who));
    let network = s.string("network");
    let by = s.take("protocol", protocol).unwrap_or_default();
    let list = match s.raw("ports") {
        None => Vec::new(),
        Some((value, span)) => ranges(s, "ports", value, &span, ports),
    };
    if let (false, Some((value, span))) = (by.has_ports(), s.raw("ports"))
        && !s.doubted("protocol")
    {
        let hint = Some("ports belong to a protocol: add protocol = \"tcp\" or \"udp\"".into());
        s.wrong("ports", &span, format!("{}, without a protocol that has ports", found(value)), hint);
    }
    let rule = Rule {
        action: action.unwrap_or_default(),
        from: from.unwrap_or_default(),
        to: to.unwrap_or_default(),
        protocol: by,
        ports: list,
    };
    RuleDecl { network, rule }
}

/// Reads one section `[[mirror]]`.
pub(super) fn mirror(s: &mut Section<'_, '_, '_, '_>) -> MirrorDecl {
    let name = |text: &str| clean_name(text).map(Into::into);
    let of = s.list("of", true, name).unwrap_or_default();
    let to = s.text("to", clean_name);
    if s.raw("to").is_none() {
        s.missing("to");
    }
    let network = s.string("network");
    let directions = [("both", (true, true)), ("sent", (true, false)), ("received", (false, true))];
    let (sent, received) = s.word("frames", &directions).unwrap_or((true, true));
    MirrorDecl { network, mirror: Mirror { of, to: to.unwrap_or_default().into(), sent, received } }
}

/// Checks that every name is somebody's, and that groups are not called like members.
pub(super) fn check(check: &mut Check<'_, '_, '_>) {
    let fabric = check.fabric;
    let groups: Vec<&str> = fabric.traffic().flat_map(|(_, t)| t.groups.iter().map(String::as_str)).collect();
    for (at, traffic) in fabric.traffic() {
        if let Some(group) = traffic.groups.iter().find(|group| fabric.members().any(|m| m == *group)) {
            let expected = "a name that no member has";
            check.fault((&at, "groups"), &[], expected, format!("{group:?}, which is a member"), None);
        }
    }
    let names: Vec<&str> = fabric.members().chain(groups).chain([OUTSIDE]).collect();
    let networks: Vec<&str> = fabric.networks.iter().map(|n| n.name.as_str()).collect();
    let network = |check: &mut Check<'_, '_, '_>, at: &str, name: &Option<String>| {
        let Some(name) = name else { return };
        if fabric.network(name).is_none() && !check.refuses("network", name) {
            let expected = format!("the name of a network ({})", networks.join(", "));
            check.fault((at, "network"), &[], expected, format!("{name:?}"), near(name, networks.iter().copied()));
        }
    };
    for (i, decl) in fabric.rules.iter().enumerate() {
        let at = format!("rule[{i}]");
        network(check, &at, &decl.network);
        for (key, side) in [("from", &decl.rule.from), ("to", &decl.rule.to)] {
            for who in side {
                if let Who::Label(label) = who {
                    known(check, (&at, key), label, &names);
                }
            }
        }
    }
    for (i, decl) in fabric.mirrors.iter().enumerate() {
        let at = format!("mirror[{i}]");
        network(check, &at, &decl.network);
        decl.mirror.of.iter().for_each(|label| known(check, (&at, "of"), label, &names));
        let to = &decl.mirror.to;
        if !to.is_empty() && !fabric.members().any(|member| *member == **to) {
            let members: Vec<_> = fabric.members().collect();
            let hint = near(to, members.iter().copied());
            check.fault((&at, "to"), &[], "the name of a member", format!("{to:?}"), hint);
        }
        if decl.mirror.of.contains(to) {
            let found = format!("{to:?}, which gets the copies");
            check.fault((&at, "of"), &[], "members other than the one in `to`", found, None);
        }
    }
}

fn known(check: &mut Check<'_, '_, '_>, spot: (&str, &str), label: &str, names: &[&str]) {
    let refused = super::MEMBERS.iter().any(|word| check.refuses(word, label));
    if !names.contains(&label) && !refused {
        let expected = "the name of a member or a group, \"outside\", an address or a prefix";
        check.fault(spot, &[], expected, format!("{label:?}"), hint(label, names));
    }
}

/// A near name; of a section with `count` the names that it makes.
fn hint(label: &str, names: &[&str]) -> Option<String> {
    let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
    let is_of = |name: &&&str| name.strip_prefix(label).and_then(|rest| rest.strip_prefix('-')).is_some_and(is_number);
    let made: Vec<&str> = names.iter().filter(is_of).copied().collect();
    match made.as_slice() {
        [] => near(label, names.iter().copied()),
        [one] => Some(format!("`count` makes \"{one}\" of it")),
        [first, .., last] => {
            Some(format!("`count` makes \"{first}\" to \"{last}\" of it: name these, or a group of the section"))
        }
    }
}

/// Takes what has gone out of a list. Whether the list still names what it named: one that named
/// nothing means all.
fn keeps<T>(list: &mut Vec<T>, has_gone: impl Fn(&T) -> bool) -> bool {
    let before = list.len();
    list.retain(|name| !has_gone(name));
    before == 0 || !list.is_empty()
}

impl Fabric {
    /// Takes the names of members that have gone out of rules and mirrors. A rule or mirror that
    /// was about no other member goes as a whole. A name that is a group's stays.
    pub(crate) fn forget_in_policies<'n>(&mut self, gone: impl Iterator<Item = &'n str>) {
        let is_group = |name: &str| self.traffic().any(|(_, t)| t.groups.iter().any(|group| group == name));
        let gone: BTreeSet<&str> = gone.filter(|name| !is_group(name)).collect();
        let has_gone = |who: &Who| matches!(who, Who::Label(label) if gone.contains(&**label));
        self.rules.retain_mut(|RuleDecl { rule, .. }| keeps(&mut rule.from, has_gone) && keeps(&mut rule.to, has_gone));
        self.mirrors.retain_mut(|MirrorDecl { mirror, .. }| {
            !gone.contains(&*mirror.to) && keeps(&mut mirror.of, |label| gone.contains(&**label))
        });
    }

    /// The policy of a network as its switch takes it. Forwards of the file are allowed, behind its
    /// rules.
    pub fn policy(&self, network: &str) -> tombolo_switch::policy::Settings {
        let here = |at: &Option<String>| at.as_deref().is_none_or(|at| at == network);
        let mut rules: Vec<Rule> = self.rules.iter().filter(|r| here(&r.network)).map(|r| r.rule.clone()).collect();
        let otherwise = self.network(network).map_or(Action::Allow, |n| n.policy);
        if otherwise == Action::Deny || !rules.is_empty() {
            rules.extend(self.forwards.iter().filter(|f| f.network == network).map(|f| Rule {
                action: Action::Allow,
                from: vec![Who::Label(OUTSIDE.into())],
                to: vec![Who::Prefix(f.ip, if f.ip.is_ipv4() { 32 } else { 128 })],
                protocol: Protocol::Number(if f.proto == super::model::Proto::Tcp { 6 } else { 17 }),
                ports: vec![f.port..=f.port],
            }));
        }
        let mirrors = self.mirrors.iter().filter(|m| here(&m.network)).map(|m| m.mirror.clone()).collect();
        tombolo_switch::policy::Settings { otherwise, rules, mirrors }
    }
}
