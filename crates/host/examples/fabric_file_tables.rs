//! Prints the key tables of docs/fabric-file.md from the schema.

fn main() {
    for section in tombolo_host::file::schema::SECTIONS {
        println!("### `{}`\n\n| key | value | if left out | what it does |\n| --- | --- | --- | --- |", section.form);
        for key in section.keys() {
            let default = if key.default.is_empty() { "must be given" } else { key.default };
            println!("| `{}` | {} | {} | {} |", key.name, key.expects, default, key.doc);
        }
        println!();
    }
}
