//! Every loss has a name, and every name a use: docs/drops.md is generated from the code, and a
//! reason that nothing counts fails here.
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use tombolo_switch::drop::Reason;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn document() -> String {
    let mut text = String::from(
        "# Why a frame was lost\n\n\
         Every frame that is lost goes through one function with one of these reasons. Each is a counter of each port,\n\
         once for frames that came from the port (`rx`) and once for frames that were to go to it (`tx`), in\n\
         `tombolo status`, in the metrics and in captures. This table is generated from `crates/switch/src/drop.rs`;\n\
         `TOMBOLO_REGENERATE=1 cargo test -p tombolo-switch --test drops` rewrites it.\n\n\
         | reason | what happened |\n| --- | --- |\n",
    );
    for reason in Reason::ALL {
        text.push_str(&format!("| `{}` | {} |\n", reason.name(), reason.explanation()));
    }
    text
}

#[test]
fn the_document_is_that_of_the_code() {
    let path = root().join("docs/drops.md");
    if std::env::var_os("TOMBOLO_REGENERATE").is_some() {
        fs::write(&path, document()).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == document(), "docs/drops.md is not what the code says: run this test with TOMBOLO_REGENERATE=1");
}

/// The sources of the workspace without their tests.
fn sources(folder: &Path, into: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if path.is_dir() && !matches!(name, "tests" | "examples" | "target" | "conformance") {
            sources(&path, into);
        } else if name.ends_with(".rs") && name != "drop.rs" && !name.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).unwrap();
            into.push(text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned());
        }
    }
}

#[test]
fn every_reason_is_counted_somewhere() {
    let mut all = Vec::new();
    sources(&root().join("crates"), &mut all);
    assert!(all.len() > 20, "the sources were found");
    let unused: Vec<_> = Reason::ALL
        .iter()
        .map(|reason| format!("Reason::{reason:?}"))
        .filter(|name| !all.iter().any(|text| text.contains(name.as_str())))
        .collect();
    assert!(unused.is_empty(), "nothing counts {unused:?}: remove them from drop.rs, or count them");
}
