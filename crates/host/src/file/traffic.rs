//! What limits a port: the keys `allow`, `storm` and `rate` of its section, and changes of them
//! while it runs.

use std::path::Path;

use tombolo_switch::class::{Class, Marking};
use tombolo_switch::guard::Roles;
use tombolo_switch::limit::{Limit, Rates, Storm};
use toml::de::{DeTable, DeValue};

use super::model::Traffic;
use super::policy;
use super::problem::{Complaints, FileError, Part, near};
use super::read::{Section, Spots, found, integer};

/// Reads a change of a running port: the key `rate`, as it is in the port's section of a fabric
/// file. Limits that it leaves out are off afterwards. `path` is what complaints show.
///
/// # Errors
/// Every fault of the text; also other keys, which a running port does not take, and a text without
/// `rate`.
pub fn rate_change(text: &str, path: &Path) -> Result<Rates, FileError> {
    let (root, errors) = DeTable::parse_recoverable(text);
    let (mut out, mut spots) = (Complaints::new(text), Spots::default());
    for error in &errors {
        let span = error.span().unwrap_or(text.len()..text.len());
        let there = text.get(span.clone()).and_then(|s| s.lines().next()).unwrap_or_default().trim().to_string();
        let there = if there.is_empty() { "the end of it".to_string() } else { format!("{there:?}") };
        out.say(&span, "", format!("valid TOML ({})", error.message()), there, None);
    }
    let expected = "the key rate, like rate = { send = \"100M\" }";
    let only = "other keys of a port change by `tombolo set`, or with the file by `tombolo apply`";
    for (key, _) in root.get_ref() {
        let name: &str = key.get_ref();
        if name != "rate" {
            out.say(&key.span(), name, expected, format!("the key {name}"), Some(only.into()));
        }
    }
    if errors.is_empty() && root.get_ref().is_empty() {
        out.say(&(0..0), "rate", expected, "nothing", None);
    }
    let change = DeTable::from_iter(
        root.get_ref().iter().filter(|(key, _)| key.get_ref() == "rate").map(|(k, v)| (k.clone(), v.clone())),
    );
    let rates = rates(&mut Section::open("port", String::new(), 0..0, &change, &mut out, &mut spots, &[]));
    let problems = out.finish();
    match problems.is_empty() {
        true => Ok(rates),
        false => Err(FileError::Faulty { path: path.into(), problems, part: Part::Change }),
    }
}

/// The keys of a port or machine that say what it may flood, send and receive.
pub(super) fn traffic(s: &mut Section<'_, '_, '_, '_>) -> Traffic {
    let word = |text: &str| {
        Some(match text {
            "router-advertisements" => Roles { router: true, ..Roles::default() },
            "dhcp-server" => Roles { dhcp_server: true, ..Roles::default() },
            "gateway-addresses" => Roles { gateway: true, ..Roles::default() },
            _ => return None,
        })
    };
    let roles = s.list("allow", true, word).unwrap_or_default().into_iter().fold(Roles::default(), |a, b| Roles {
        router: a.router | b.router,
        dhcp_server: a.dhcp_server | b.dhcp_server,
        gateway: a.gateway | b.gateway,
    });
    Traffic {
        roles,
        storm: storm(s),
        rates: rates(s),
        marking: s.take("class", |value| marking(value.as_str()?)).unwrap_or_default(),
        groups: policy::groups(s),
        isolation: policy::isolation(s),
        vlans: policy::vlans(s),
        ip6_limit: s.number("ip6_limit", 1, 255).map(|n| n as u8),
    }
}

fn marking(word: &str) -> Option<Marking> {
    let fixed = Class::ALL.into_iter().map(Marking::Fixed);
    fixed.chain([Marking::Marks]).find(|marking| class_word(*marking) == word)
}

/// The word for it in the key `class`.
pub(crate) fn class_word(marking: Marking) -> &'static str {
    match marking {
        Marking::Fixed(class) => class.word(),
        Marking::Marks => "marked",
    }
}

/// Each entry of the table `key`, by name; `read` says whether it fits.
pub(super) fn entries(
    s: &mut Section<'_, '_, '_, '_>,
    key: &str,
    names: &[&str],
    mut read: impl FnMut(&str, &DeValue<'_>) -> bool,
) {
    let Some((DeValue::Table(table), _)) = s.raw(key) else { return };
    for (name, value) in table {
        let word: &str = name.get_ref();
        if !names.contains(&word) {
            s.wrong(key, &name.span(), format!("the key {word}"), near(word, names.iter().copied()));
        } else if !read(word, value.get_ref()) {
            s.wrong(key, &value.span(), format!("{} for {word}", found(value.get_ref())), None);
        }
    }
}

const MAX_FRAMES_PER_SECOND: i64 = 100_000_000;

fn storm(s: &mut Section<'_, '_, '_, '_>) -> Storm {
    let mut storm = Storm::default();
    match s.raw("storm") {
        None | Some((DeValue::Boolean(true) | DeValue::Table(_), _)) => {}
        Some((DeValue::Boolean(false), _)) => return Storm::OFF,
        Some((other, span)) => s.wrong("storm", &span, found(other), None),
    }
    entries(s, "storm", &["broadcast", "multicast", "unknown"], |name, value| {
        let limit = match value {
            DeValue::Boolean(false) => None,
            value => match integer(value).filter(|n| (1..=MAX_FRAMES_PER_SECOND).contains(n)) {
                Some(n) => Some(Limit::frames(n as u64)),
                None => return false,
            },
        };
        match name {
            "broadcast" => storm.broadcast = limit,
            "multicast" => storm.multicast = limit,
            _ => storm.unknown = limit,
        }
        true
    });
    storm
}

/// Bits per second: "100M", "1G", "64K", 10000.
fn bits(value: &DeValue<'_>) -> Option<u64> {
    let read = |text: &str| {
        let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let factor = match unit {
            "K" => 1_000,
            "M" => 1_000_000,
            "G" => 1_000_000_000,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(factor)
    };
    let number = integer(value).and_then(|n| u64::try_from(n).ok()).or_else(|| value.as_str().and_then(read));
    number.filter(|n| (1_000..=1_000_000_000_000).contains(n))
}

fn rates(s: &mut Section<'_, '_, '_, '_>) -> Rates {
    let mut rates = Rates::default();
    if let Some((other, span)) = s.raw("rate").filter(|(value, _)| !matches!(value, DeValue::Table(_))) {
        s.wrong("rate", &span, found(other), None);
    }
    let names: Vec<String> = rate_names().collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    entries(s, "rate", &names, |name, value| {
        let frames = || integer(value).filter(|n| (1..=MAX_FRAMES_PER_SECOND).contains(n)).map(|n| n as u64);
        let (name, kind) = match name.rsplit_once('_') {
            Some((name, kind @ ("burst" | "frames"))) => (name, kind),
            _ => (name, "bits"),
        };
        let Some(rate) = rates.named_mut(name) else { return false };
        let (place, read) = match kind {
            "burst" => (&mut rate.burst, bits(value)),
            "frames" => (&mut rate.frames, frames()),
            _ => (&mut rate.bits, bits(value)),
        };
        *place = read;
        place.is_some()
    });
    let alone = rates.named().find(|(_, rate)| rate.burst.is_some() && rate.bits.is_none());
    if let (Some((name, _)), Some((_, span))) = (alone, s.raw("rate")) {
        let hint = format!("give {name} too; {name}_burst says how much of it may pass at once");
        s.wrong("rate", &span, format!("{name}_burst without {name}"), Some(hint));
    }
    rates
}

/// The keys of `rate`: of each direction, and of each class in it, bits and frames per second, and
/// the burst in bits.
pub(super) fn rate_names() -> impl Iterator<Item = String> {
    let names = Rates::default().named().map(|(name, _)| name).collect::<Vec<_>>();
    names.into_iter().flat_map(|name| ["", "_burst", "_frames"].map(|kind| format!("{name}{kind}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_switch::limit::Rate;

    fn change(text: &str) -> Result<Rates, String> {
        rate_change(text, Path::new("request")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_change_has_the_words_of_the_file() {
        let rates = change("rate = { send = \"100M\", receive_frames = 7 }").unwrap();
        let expected = Rates {
            send: Rate { bits: Some(100_000_000), ..Rate::default() },
            receive: Rate { frames: Some(7), ..Rate::default() },
            ..Rates::default()
        };
        assert_eq!(rates, expected);
        assert_eq!(change("rate = {}").unwrap(), Rates::default(), "no limits");
        let rates =
            change("rate = { send_urgent = \"10M\", send_urgent_burst = 5000, receive_high_frames = 3 }").unwrap();
        let set: Vec<_> = rates.named().filter(|(_, rate)| *rate != Rate::default()).collect();
        let urgent = Rate { bits: Some(10_000_000), burst: Some(5_000), frames: None };
        let high = Rate { frames: Some(3), ..Rate::default() };
        assert_eq!(set, [("send_urgent".to_string(), urgent), ("receive_high".to_string(), high)]);
    }

    #[test]
    fn what_a_running_port_does_not_take_is_refused_with_its_place() {
        for (text, expected) in [
            ("", "the key rate"),
            ("mac = \"02:00:00:00:00:01\"", "request:1:1"),
            ("rate = { send = \"100M\" }\nguard = \"off\"", "request:2:1"),
            ("rate = { sent = \"100M\" }", "send"),
            ("rate = { send = \"fast\" }", "\"fast\" for send"),
            ("rate = 5", "the number 5"),
            ("rate = { send_burst = \"1M\", send_frames = 5 }", "send_burst without send"),
            ("rate = { send_urgend = \"1M\" }", "send_urgent"),
            ("rate = { receive_burst_frames = 4 }", "receive_burst_frames"),
            ("rate = {", "valid TOML"),
        ] {
            let why = change(text).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
