//! docs/tombolo.schema.json is what the tables of the fabric file give. Validators of others judge
//! it in tests/daytwo_schema.py.

use std::path::Path;

use tombolo_host::file::json_schema::json_schema;

#[test]
fn the_published_schema_is_that_of_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tombolo.schema.json");
    let text = serde_json::to_string_pretty(&json_schema()).unwrap() + "\n";
    if std::env::var_os("TOMBOLO_REGENERATE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == text,
        "docs/tombolo.schema.json is old: TOMBOLO_REGENERATE=1 cargo test -p tombolo-host --test json_schema"
    );
}
