//! The fabric file as a JSON Schema (draft 7), for editors: they complete keys, show what they do,
//! and mark faults while the file is being written.
//!
//! It is made from the tables of [`super::schema`], so it has every section, key, condition and
//! text that the parser has. What a value looks like is read from the key's `expects`, the words in
//! which the parser complains.
//!
//! The schema is an approximation from above: it accepts every file that the parser accepts, and
//! refuses many that the parser refuses. It cannot see what depends on the whole file or the
//! machine, such as an address outside its subnet, a network that does not exist or an interface
//! that is missing. `tombolo check` does.

use serde_json::{Map, Value, json};

use super::schema::{CONDITIONS, Condition, Key, SECTIONS, SectionSchema};
use super::traffic::rate_names;

/// Where the schema of the current main branch is published.
pub const ID: &str = "https://raw.githubusercontent.com/tombolo-fabric/tombolo/main/docs/tombolo.schema.json";

const NAME: &str = "^[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?$";
const IPV4: &str = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$";
const IPV6: &str = "^[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(/[0-9]{1,3})?$";
/// Of either version.
const IP: &str = r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$";
/// Printable, without `/` and `:`.
const INTERFACE: &str = r"^[!-.0-9;-~]{1,15}$";
const SIZE: &str = "^[0-9]+(K|KiB|M|MiB|G|GiB)$";
const MAX_FRAMES_PER_SECOND: u32 = 100_000_000;

/// The schema.
pub fn json_schema() -> Value {
    let mut properties = Map::new();
    let mut definitions = Map::new();
    let mut head = json!({});
    for section in SECTIONS {
        if section.name.is_empty() {
            head = described(section);
            continue;
        }
        let refers = json!({ "$ref": format!("#/definitions/{}", section.name) });
        let property = if section.form.starts_with("[[") {
            json!({ "description": section.form, "type": "array", "items": refers })
        } else if !section.form.contains('.') {
            refers
        } else {
            let names = json!({ "pattern": NAME });
            json!({ "description": section.form, "type": "object", "propertyNames": names, "additionalProperties": refers })
        };
        properties.insert(section.name.into(), property);
        definitions.insert(section.name.into(), described(section));
    }
    if let Some(keys) = head["properties"].as_object_mut() {
        properties.append(keys);
    }
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": ID,
        "title": "Fabric file of Tombolo (tombolo.toml)",
        "description": "Networks, machines and ports of a fabric: docs/fabric-file.md, tombolo.toml(5)",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
        "definitions": definitions,
    })
}

fn described(section: &SectionSchema) -> Value {
    let mut properties = Map::new();
    for key in section.keys() {
        properties.insert(key.name.into(), property(section, key));
    }
    let is_conditional = |key: &Key| CONDITIONS.iter().any(|c| c.section == section.name && c.key == key.name);
    let required: Vec<_> =
        section.keys().filter(|k| k.default.is_empty() && !is_conditional(k)).map(|k| k.name).collect();
    let mut all: Vec<Value> = CONDITIONS
        .iter()
        .filter(|c| c.section == section.name)
        .flat_map(|c| {
            let keys = || section.keys();
            let decides = keys().find(|k| k.name == c.on);
            let depends = keys().find(|k| k.name == c.key);
            let (decides, depends) = (decides?, depends?);
            let applies = applies(c, decides.default);
            // One without a default must be given wherever it applies.
            let needed = depends.default.is_empty().then(|| when(having(c), json!({ "required": [c.key] })));
            Some([Some(applies), needed])
        })
        .flatten()
        .flatten()
        .collect();
    // What no table says, since only one section has it.
    match section.name {
        "cell" => all.push(json!({ "not": { "required": ["app", "image"] } })),
        "vm" => all
            .push(json!({ "anyOf": [{ "required": ["kernel"] }, { "required": ["disk"] }, { "required": ["boot"] }] })),
        "port" => {
            all.push(when(json!({ "required": ["ip"] }), json!({ "required": ["mac"] })));
            let connects = json!({ "required": ["connect"], "properties": { "connect": { "const": true } } });
            all.push(when(connects, json!({ "required": ["socket"] })));
        }
        _ => {}
    }
    let mut out = json!({ "type": "object", "additionalProperties": false, "properties": properties });
    if !required.is_empty() {
        out["required"] = json!(required);
    }
    if !all.is_empty() {
        out["allOf"] = json!(all);
    }
    out
}

fn when(condition: Value, then: Value) -> Value {
    json!({ "if": condition, "then": then })
}

/// A value of a condition, as TOML has it.
fn word(text: &str) -> Value {
    match text {
        "true" => json!(true),
        "false" => json!(false),
        text => json!(text),
    }
}

/// A section in which the deciding key has one of the values, by what is written there.
fn having(condition: &Condition) -> Value {
    match condition.values {
        [] => json!({ "required": [condition.on] }),
        values => {
            let values: Vec<_> = values.iter().map(|v| word(v)).collect();
            json!({ "required": [condition.on], "properties": { condition.on: { "enum": values } } })
        }
    }
}

/// A key is there only if the one that decides about it has a value with which it does something.
fn applies(condition: &Condition, default: &str) -> Value {
    let mut then = having(condition);
    if condition.values.contains(&default.trim_matches('"')) {
        then["required"] = json!([]);
    }
    // A value of another form, such as the table of a bridge, is none of the words.
    when(json!({ "required": [condition.key] }), then)
}

fn property(section: &SectionSchema, key: &Key) -> Value {
    let is_machine = matches!(section.name, "cell" | "vm");
    let mut form = form(key.expects).unwrap_or_else(|| panic!("no form of {:?} ({})", key.expects, key.name));
    // One for each network of a machine; and a list of one may be written without brackets.
    if (is_machine && matches!(key.name, "mac" | "ip")) || key.name == "allow" {
        form = one_or_list(form);
    }
    let (plain, default) = match key.default {
        "" => ("it must be given".to_string(), None),
        text => (format!("if left out: {text}"), serde_json::from_str(text).ok()),
    };
    form["description"] = json!(format!("{}\n\nExpected: {}; {plain}.", key.doc, key.expects));
    if let Some(default) = default {
        form["default"] = default;
    }
    form
}

fn one_or_list(one: Value) -> Value {
    match one.get("type").and_then(Value::as_str) {
        Some("array") => json!({ "anyOf": [one["items"], one] }),
        _ => json!({ "anyOf": [one, { "type": "array", "items": one }] }),
    }
}

fn text(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern })
}

fn number(from: u64, to: u64) -> Value {
    json!({ "type": "integer", "minimum": from, "maximum": to })
}

fn list(item: Value) -> Value {
    json!({ "type": "array", "items": item })
}

fn table(properties: Value, required: &[&str]) -> Value {
    json!({ "type": "object", "additionalProperties": false, "properties": properties, "required": required })
}

/// What the words of a complaint ask for; `None` for words that are not known here.
fn form(expects: &str) -> Option<Value> {
    if let Some(form) = special(expects) {
        return Some(form);
    }
    for ending in [", or a list of them", " or a list of them"] {
        if let Some(one) = expects.strip_suffix(ending) {
            return form(one).map(one_or_list);
        }
    }
    if let Some((from, to)) = expects.strip_prefix("a number from ").and_then(|rest| rest.split_once(" to ")) {
        return Some(number(from.parse().ok()?, to.parse().ok()?));
    }
    // `"a", "b" or c`: words in quotes, and other forms.
    let parts = alternatives(expects);
    if !parts.iter().any(|part| part.starts_with('"')) {
        return None;
    }
    let quoted: Vec<_> = parts.iter().filter_map(|p| p.strip_prefix('"')?.strip_suffix('"')).collect();
    let words = json!({ "type": "string", "enum": quoted });
    let others: Vec<_> = parts.iter().filter(|p| !p.starts_with('"')).map(|p| form(p)).collect::<Option<_>>()?;
    Some(if others.is_empty() {
        words
    } else {
        json!({ "anyOf": others.into_iter().chain([words]).collect::<Vec<_>>() })
    })
}

/// Splits at `, ` and ` or ` outside of quotes.
fn alternatives(expects: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    for (i, piece) in expects.split('"').enumerate() {
        let last = out.last_mut().expect("it has one from the start");
        if i % 2 == 1 {
            last.push_str(&format!("\"{piece}\""));
            continue;
        }
        let piece = piece.replace(" or ", ", ");
        let mut parts = piece.split(", ");
        last.push_str(parts.next().unwrap_or_default());
        out.extend(parts.map(String::from));
    }
    out.iter().map(|part| part.trim().to_string()).filter(|part| !part.is_empty()).collect()
}

/// Forms that stand for themselves.
fn special(expects: &str) -> Option<Value> {
    let any = || json!({ "type": "string", "minLength": 1 });
    let ipv4 = || text(IPV4);
    let limit = || json!({ "anyOf": [number(1, MAX_FRAMES_PER_SECOND.into()), { "const": false }] });
    let bits = || json!({ "anyOf": [number(1_000, 1_000_000_000_000), text("^[0-9]+[KMG]$")] });
    Some(match expects {
        "1 to 24 of a-z, 0-9 and -, not services" => {
            json!({ "type": "string", "pattern": NAME, "not": { "const": "services" } })
        }
        "true or false" => json!({ "type": "boolean" }),
        "true, false, or the name of a community" => json!({ "anyOf": [{ "type": "boolean" }, text(NAME)] }),
        "an IP address" | "an IP address of one machine" => text(IP),
        "the name of a machine of the file" => text(NAME),
        "1 to 63 of a-z, 0-9 and -" => text("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"),
        "a number from 0 to 16777215, or { vni = …, udp_port = … }" => {
            let keys = json!({ "vni": number(0, 16_777_215), "udp_port": number(1, 65535) });
            json!({ "anyOf": [number(0, 16_777_215), table(keys, &["vni"])] })
        }
        "a list of IP addresses" => list(text(IP)),
        "a CPU number" => number(0, 4095),
        "microseconds, 0 to 1000000" => number(0, 1_000_000),
        "1 or 2" => number(1, 2),
        "an IPv4 network like \"10.87.0.0/24\", /8 to /29" => text(r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/(0?[89]|[12][0-9])$"),
        "an IPv4 address inside the subnet" | "an IPv4 address inside the network" => ipv4(),
        "true, false, or { from = \"…\", to = \"…\", lease_s = … }" => {
            let range = json!({ "from": ipv4(), "to": ipv4(), "lease_s": number(30, u32::MAX.into()) });
            json!({ "anyOf": [{ "type": "boolean" }, table(range, &[])] })
        }
        "\"none\", \"user\", \"kernel\" or { bridge = \"INTERFACE\" }" => {
            let bridge = table(json!({ "bridge": text(INTERFACE) }), &["bridge"]);
            json!({ "anyOf": [{ "enum": ["none", "user", "kernel"] }, bridge] })
        }
        _ if expects.contains("{ server = ") => {
            let files = json!({ "type": "object", "additionalProperties": any() });
            let boot = table(
                json!({
                    "server": ipv4(), "file": any(), "arch": files, "ipxe": any(),
                    "url6": any(), "arch6": files, "ipxe6": any(),
                }),
                &[],
            );
            match expects.starts_with("true") {
                true => json!({ "anyOf": [{ "type": "boolean" }, boot] }),
                false => boot,
            }
        }
        "a domain name" => text(r"^[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*$"),
        "a list of addresses like \"9.9.9.9\" or \"9.9.9.9:53\"" => list(text(r"^[0-9A-Fa-f.:\[\]]+$")),
        "true, false, or a list of interfaces like [\"eth0\"]" => {
            let interfaces = json!({ "type": "array", "minItems": 1, "items": text(INTERFACE) });
            json!({ "anyOf": [{ "type": "boolean" }, interfaces] })
        }
        "the name of a network, or a list of them (one device each)" => one_or_list(text(NAME)),
        "the name of a network" | "the name of a worker" | "the name of a member" | "the name of a cell or VM" => {
            text(NAME)
        }
        "a member or a group" => text(NAME),
        "a list of names of cells and VMs" => list(text(NAME)),
        "the name of an app, like \"httpd\"" | "the path of a file" | "the path of a folder" | "a path" => any(),
        "a machine's name, 1 to 63 of a-z, 0-9 and -" => text("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"),
        "a text like \"node-2=192.0.2.2:7000\"" => text("^([a-z0-9-]+=)?[^=]+:[0-9]+$"),
        "an address and port like \"192.0.2.1:7000\" or \"[2001:db8::1]:7000\"" => text("^.+:[0-9]+$"),
        "the name or path of a network namespace" => any(),
        "the name of a Xen domain" => text("^[!-.0-~]{1,64}$"),
        "a string" | "a string of words" => json!({ "type": "string" }),
        "a list of strings" => list(json!({ "type": "string" })),
        "a MAC address like \"52:54:00:12:34:56\"" => text("^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$"),
        "a size like \"64M\" or \"1G\"" => text("^[0-9]+(M|MiB|G|GiB)$"),
        "a size like \"64K\" or \"1M\", or \"0\"" => text("^(0|[0-9]+(K|KiB|M|MiB|G|GiB))$"),
        "an interface name" | "an interface name, 1 to 15 characters" => text(INTERFACE),
        "a name of a-z A-Z 0-9 . _ -" => text("^[A-Za-z0-9_-][A-Za-z0-9._-]*$"),
        "a name of 1 to 24 of a-z, 0-9 and -, or a list of them; not \"outside\"" => {
            one_or_list(json!({ "type": "string", "pattern": NAME, "not": { "const": "outside" } }))
        }
        "\"any\", an IPv6 address or prefix like \"fd00::7\" or \"2001:db8:1::/64\", or a list of them" => {
            json!({ "anyOf": [{ "const": "any" }, text(IPV6), list(text(IPV6))] })
        }
        "a list of \"router-advertisements\", \"dhcp-server\" and \"gateway-addresses\"" => {
            list(json!({ "enum": ["router-advertisements", "dhcp-server", "gateway-addresses"] }))
        }
        "false, or { broadcast = …, multicast = …, unknown = … } with frames per second or false" => {
            let limits = json!({ "broadcast": limit(), "multicast": limit(), "unknown": limit() });
            json!({ "anyOf": [{ "type": "boolean" }, table(limits, &[])] })
        }
        _ if expects.starts_with("{ send = \"100M\", send_burst = ") => {
            let limit = |name: String| match name.ends_with("_frames") {
                true => (name, number(1, MAX_FRAMES_PER_SECOND.into())),
                false => (name, bits()),
            };
            table(Value::Object(rate_names().map(limit).collect()), &[])
        }
        "an address and port like \"127.0.0.1:8080\" or \"[::1]:8080\"" => {
            text(r"^([0-9.]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$")
        }
        "a member and port like \"web:80\" or \"[fd00::9]:80\"" => {
            text(r"^([0-9A-Za-z.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$")
        }
        "\"masquerade\", \"routed\", \"off\" or { prefix = \"2001:db8:1:2::/64\" }" => {
            let prefix = table(json!({ "prefix": text("^[0-9A-Fa-f:.]+/64$") }), &["prefix"]);
            json!({ "anyOf": [{ "enum": ["masquerade", "routed", "off"] }, prefix] })
        }
        "a member, a group, \"outside\", an address or a prefix" => text("^[0-9A-Za-z:./-]+$"),
        "a port number, a range like \"6000-6010\", or a list of them" => {
            one_or_list(json!({ "anyOf": [number(1, 65535), text("^ *[0-9]+ *- *[0-9]+ *$")] }))
        }
        _ if expects.starts_with("a power of two from ") => text(SIZE),
        _ if expects.starts_with("a range like ") => text("^ *[0-9]+ *- *[0-9]+ *$"),
        _ if expects.starts_with("an IPv6 prefix like ") => text(IPV6),
        _ if expects.starts_with("text of ") => json!({ "type": "string" }),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_form_and_a_text() {
        let schema = json_schema();
        for section in SECTIONS {
            let of = if section.name.is_empty() { &schema } else { &schema["definitions"][section.name] };
            for key in section.keys() {
                let property = &of["properties"][key.name];
                assert!(form(key.expects).is_some(), "{}.{}: {}", section.name, key.name, key.expects);
                assert!(property["description"].as_str().is_some_and(|d| d.starts_with(key.doc)), "{property}");
            }
        }
        // Each condition is somewhere.
        for condition in CONDITIONS {
            let all = schema["definitions"][condition.section]["allOf"].as_array().unwrap();
            let stands = |v: &Value| v["if"]["required"] == json!([condition.key]);
            assert!(all.iter().any(stands), "{condition:?}");
        }
    }

    #[test]
    fn words_of_complaints_are_read() {
        assert_eq!(form("\"a\", \"b\" or \"c d\""), Some(json!({ "type": "string", "enum": ["a", "b", "c d"] })));
        assert_eq!(form("a number from 1 to 8"), Some(number(1, 8)));
        let mixed = form("\"tcp\", \"udp\", \"icmp\" or a number from 0 to 255").unwrap();
        assert_eq!(mixed["anyOf"][0], number(0, 255));
        assert_eq!(mixed["anyOf"][1]["enum"], json!(["tcp", "udp", "icmp"]));
        let listed = form("the path of a file, or a list of them").unwrap();
        assert_eq!(listed["anyOf"][1]["type"], "array");
        assert_eq!(form("what nobody has thought of"), None);
        assert_eq!(form("\"a\" or what nobody has thought of"), None);
    }

    #[test]
    fn conditions_follow_the_defaults() {
        let schema = json_schema();
        let of = |section: &str, key: &str| {
            let all = schema["definitions"][section]["allOf"].as_array().unwrap();
            all.iter().find(|v| v["if"]["required"] == json!([key])).unwrap()["then"].clone()
        };
        // The default of `attach` is one of them, so it need not be written.
        assert_eq!(of("cell", "accel")["required"], json!([]));
        assert_eq!(of("cell", "xl")["required"], json!(["attach"]));
        assert_eq!(of("vm", "initrd"), json!({ "required": ["kernel"] }));
        assert_eq!(of("link", "seats")["properties"]["plain"]["enum"], json!([false]));
        let port = schema["definitions"]["port"].clone();
        assert_eq!(port["required"], json!(["kind"]));
        let device = json!({ "required": ["device"] });
        assert!(port["allOf"].as_array().unwrap().iter().any(|v| v["then"] == device), "packet needs a device");
    }
}
