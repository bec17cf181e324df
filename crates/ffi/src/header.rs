//! The header says what the source does: prototypes, constants, layouts. Each is taken from both,
//! and compared.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use tombolo_ring::rpc::entry::Refusal;

use crate::general::ABI_VERSION;
use crate::status::Status;
use crate::types;

const HEADER: &str = include_str!("../../../bindings/include/tombolo.h");
const SOURCES: [&str; 3] = [include_str!("client.rs"), include_str!("general.rs"), include_str!("service.rs")];
/// How the header writes the source's types; handles are apart.
const TYPES: [(&str, &str); 23] = [
    ("*const c_char", "const char *"),
    ("*mut c_char", "char *"),
    ("*mut *mut c_void", "void **"),
    ("*const c_void", "const void *"),
    ("*mut c_void", "void *"),
    ("*const ConnectSettings", "const tombolo_connect_options *"),
    ("*const CallSettings", "const tombolo_call_options *"),
    ("*const ServiceSettings", "const tombolo_service_options *"),
    ("*const RequestInfo", "const tombolo_request *"),
    ("*mut ReplyInfo", "tombolo_reply_info *"),
    ("*mut Stats", "tombolo_stats *"),
    ("*mut End", "tombolo_end *"),
    ("*mut AnswerMark", "tombolo_answer *"),
    ("*mut usize", "size_t *"),
    ("*const u64", "const tombolo_token *"),
    ("*mut u64", "uint64_t *"),
    ("*mut i32", "int32_t *"),
    ("Option<Function>", "tombolo_handler "),
    ("i32", "int32_t "),
    ("u32", "uint32_t "),
    ("u64", "uint64_t "),
    ("usize", "size_t "),
    ("void", "void"),
];

/// The header without comments and line ends, words apart by one space.
fn header() -> String {
    let mut code = String::new();
    let mut rest = HEADER;
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").expect("comments end").1;
    }
    code.push_str(rest);
    let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    code.join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A type of the source as the header writes it, for an argument or a result of that name.
fn c_type(rust: &str, name: &str) -> String {
    match rust {
        "Handle" => format!("tombolo_{name} "),
        "*mut Handle" => format!("tombolo_{name} *"),
        "u64" if name == "token" => "tombolo_token ".into(),
        "*mut u64" if name == "token" => "tombolo_token *".into(),
        _ => TYPES.iter().find(|(known, _)| *known == rust).unwrap_or_else(|| panic!("{rust} is in TYPES")).1.into(),
    }
}

/// The prototypes of what the source exports, by name.
fn exported() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for source in SOURCES {
        for export in source.split("#[unsafe(no_mangle)]").skip(1) {
            let signature = export.split_once('{').expect("a body").0.split_whitespace().collect::<Vec<_>>().join(" ");
            let signature = signature.trim_start_matches("pub unsafe extern").trim_start_matches("pub extern");
            let (name, rest) = signature.trim_start_matches(" \"C\" fn ").split_once('(').expect("arguments");
            let (arguments, result) = rest.rsplit_once(") -> ").expect("a result");
            let mut list = Vec::new();
            for argument in arguments.split(',').map(str::trim).filter(|argument| !argument.is_empty()) {
                let (name, kind) = argument.split_once(": ").expect("a type");
                list.push(format!("{}{name}", c_type(kind, name)));
            }
            let list = if list.is_empty() { "void".into() } else { list.join(", ") };
            found.insert(name.into(), format!("{}{name}({list});", c_type(result.trim(), "")));
        }
    }
    found
}

#[test]
fn the_header_declares_what_is_exported_and_nothing_else() {
    let header = header();
    let exported = exported();
    assert!(exported.len() > 25, "{} exports", exported.len());
    for (name, prototype) in &exported {
        assert!(header.contains(prototype.as_str()), "{name}: the header has not\n{prototype}");
    }
    for (at, _) in header.match_indices("(") {
        let word = header[..at].rsplit([' ', '*']).next().unwrap_or_default();
        if word.starts_with("tombolo_") && word.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
            assert!(exported.contains_key(word), "the header declares {word}, which is not exported");
        }
    }
}

/// The constants of an enumeration of the header, in its order.
fn constants(name: &str) -> Vec<(String, i64)> {
    let header = header();
    let body = header.split_once(&format!("typedef enum {name} {{")).expect("an enumeration").1;
    let body = body.split_once('}').expect("an end").0;
    let pair = |line: &str| {
        let (name, value) = line.split_once(" = ").expect("a value");
        (name.trim().to_owned(), value.trim().parse().expect("a number"))
    };
    body.split(',').map(pair).collect()
}

#[test]
fn statuses_and_refusals_are_those_of_the_header() {
    let of_source = |(status, name): &(Status, &std::ffi::CStr)| {
        let name = name.to_str().unwrap().replace('-', "_").to_uppercase();
        (format!("TOMBOLO_{name}"), *status as i64)
    };
    assert_eq!(constants("tombolo_status"), Status::ALL.iter().map(of_source).collect::<Vec<_>>());
    let mut refusals = vec![("TOMBOLO_REFUSAL_NONE".to_owned(), 0)];
    for (at, refusal) in Refusal::ALL.iter().enumerate() {
        // QueueFull as QUEUE_FULL
        let name = format!("{refusal:?}").chars().fold(String::new(), |mut name, letter| {
            let apart = if letter.is_uppercase() && !name.is_empty() { "_" } else { "" };
            let _ = write!(name, "{apart}{}", letter.to_uppercase());
            name
        });
        refusals.push((format!("TOMBOLO_REFUSAL_{name}"), at as i64 + 1));
    }
    assert_eq!(constants("tombolo_refusal"), refusals);
    assert!(HEADER.contains(&format!("#define TOMBOLO_ABI_VERSION {ABI_VERSION}\n")));
}

/// A C program prints the layouts that a compiler makes of the header; they are the source's.
#[test]
fn structs_are_laid_out_as_in_the_source() {
    let structs = [
        ("tombolo_client", types::Handle::layout()),
        ("tombolo_reply", types::Handle::layout()),
        ("tombolo_loan", types::Handle::layout()),
        ("tombolo_buffer", types::Handle::layout()),
        ("tombolo_service", types::Handle::layout()),
        ("tombolo_connect_options", types::ConnectSettings::layout()),
        ("tombolo_call_options", types::CallSettings::layout()),
        ("tombolo_reply_info", types::ReplyInfo::layout()),
        ("tombolo_end", types::End::layout()),
        ("tombolo_service_options", types::ServiceSettings::layout()),
        ("tombolo_request", types::RequestInfo::layout()),
        ("tombolo_stats", types::Stats::layout()),
    ];
    let mut program = String::from("#include \"tombolo.h\"\n#include <stdio.h>\nint main(void) {\n");
    // The macros that initialise make what their names say.
    for options in ["connect", "call", "service"] {
        let upper = options.to_uppercase();
        let _ = writeln!(
            program,
            "{{ tombolo_{options}_options o = TOMBOLO_{upper}_OPTIONS_INIT; if (o.size != sizeof o) return 1; }}"
        );
    }
    let mut expected = String::new();
    for (name, (size, align, fields)) in &structs {
        let _ = writeln!(program, "struct {name}_align {{ char c; {name} s; }};");
        let _ = writeln!(program, "printf(\"{name} %zu %zu\\n\", sizeof({name}), offsetof(struct {name}_align, s));");
        let _ = writeln!(expected, "{name} {size} {align}");
        for (field, offset) in fields {
            let _ = writeln!(program, "printf(\"{field} %zu\\n\", offsetof({name}, {field}));");
            let _ = writeln!(expected, "{field} {offset}");
        }
        let body = header();
        let body = body.split_once(&format!("typedef struct {name} {{")).expect("a struct").1;
        let body = body.split_once('}').expect("an end").0;
        assert_eq!(body.matches(';').count(), fields.len(), "{name} has as many fields");
    }
    program.push_str("return 0; }\n");
    let dir = tempfile::tempdir().unwrap();
    let (source, binary) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bindings/include");
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(include)
        .arg("-o")
        .arg(&binary)
        .arg(&source);
    let compiled = cc.output().expect("cc runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&binary).output().unwrap();
    assert!(ran.status.success(), "the initialising macros set the size");
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), expected);
}
