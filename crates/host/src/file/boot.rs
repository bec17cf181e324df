//! What clients boot from the network: the key `boot` of networks and members.

use tombolo_switch::gateway::{ARCHITECTURES, BootConfig, MAX_BOOT_BYTES};
use toml::de::DeValue;

use super::problem::near;
use super::read::{Section, found};
use super::traffic::entries;

const WORDS: [&str; 7] = ["server", "file", "arch", "ipxe", "url6", "arch6", "ipxe6"];

/// Reads the key `boot`, if it is there and a table.
pub(super) fn boot(s: &mut Section<'_, '_, '_, '_>) -> Option<BootConfig> {
    let (value, span) = s.raw("boot")?;
    match value {
        DeValue::Table(_) => {}
        // A VM may say no more than that it boots so.
        DeValue::Boolean(_) if s.is_of("vm") => return None,
        other => {
            s.wrong("boot", &span, found(other), None);
            return None;
        }
    }
    let mut out = BootConfig::default();
    entries(s, "boot", &WORDS, |word, value| {
        let (place, needs_url) = match word {
            "server" => {
                out.server = value.as_str().and_then(|t| t.parse().ok());
                return out.server.is_some();
            }
            "file" => (&mut out.file, false),
            "ipxe" => (&mut out.ipxe, false),
            "url6" => (&mut out.url6, true),
            "ipxe6" => (&mut out.ipxe6, true),
            // Read below, entry by entry.
            _ => return value.as_table().is_some(),
        };
        *place = value.as_str().filter(|t| is_sound(t) && (!needs_url || is_url(t))).map(String::from);
        place.is_some()
    });
    let table = value.as_table()?;
    for (word, of) in [("arch", &mut out.architectures), ("arch6", &mut out.architectures6)] {
        for (name, value) in table.get(word).and_then(|v| v.get_ref().as_table()).into_iter().flatten() {
            let name_text: &str = name.get_ref();
            let Some(number) = architecture(name_text) else {
                let hint = near(name_text, ARCHITECTURES.iter().map(|(name, _)| *name));
                let names: Vec<_> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
                let hint = hint.or_else(|| Some(format!("known are {}, and numbers", names.join(", "))));
                s.wrong("boot", &name.span(), format!("the architecture {name_text:?}"), hint);
                continue;
            };
            let needs_url = word == "arch6" || name_text.ends_with("-http");
            match value.get_ref().as_str().filter(|t| is_sound(t) && (!needs_url || is_url(t))) {
                Some(file) => of.push((number, file.to_string())),
                None => {
                    let hint = needs_url.then(|| "give a URL, like \"http://10.0.0.5/ipxe.efi\"".to_string());
                    s.wrong("boot", &value.span(), format!("{} for {name_text}", found(value.get_ref())), hint);
                }
            }
        }
    }
    Some(out)
}

/// The number of an architecture: by its name, or as it is.
fn architecture(name: &str) -> Option<u16> {
    let named = ARCHITECTURES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    named.or_else(|| name.bytes().all(|b| b.is_ascii_digit()).then(|| name.parse().ok())?)
}

/// Whether it fits an option, and holds nothing that a client would read as its end.
fn is_sound(text: &str) -> bool {
    (1..=MAX_BOOT_BYTES).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
}

fn is_url(text: &str) -> bool {
    ["tftp://", "http://", "https://", "nfs://", "iscsi:"].iter().any(|scheme| text.starts_with(scheme))
}

/// The first file of a configuration that needs a `server`, since it is no URL.
pub(super) fn needs_server(config: &BootConfig) -> Option<&str> {
    let all = config.file.iter().chain(config.architectures.iter().map(|(_, file)| file)).chain(&config.ipxe);
    all.map(String::as_str).find(|file| !is_url(file))
}

/// In words, for what has changed.
pub(crate) fn boot_text(config: &BootConfig) -> String {
    let name = |number: &u16| {
        let known = ARCHITECTURES.iter().find(|(_, n)| n == number).map(|(name, _)| name.to_string());
        known.unwrap_or_else(|| number.to_string())
    };
    let list = |word: &str, all: &[(u16, String)]| {
        all.iter().map(|(n, file)| format!("{word} {} {file}", name(n))).collect::<Vec<_>>()
    };
    let one = |word: &str, text: &Option<String>| text.iter().map(|text| format!("{word} {text}")).collect::<Vec<_>>();
    let all = [
        one("server", &config.server.map(|address| address.to_string())),
        one("file", &config.file),
        list("arch", &config.architectures),
        one("ipxe", &config.ipxe),
        one("url6", &config.url6),
        list("arch6", &config.architectures6),
        one("ipxe6", &config.ipxe6),
    ];
    all.concat().join(", ")
}
