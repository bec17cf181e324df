//! Hands the link script of the cell library to the linker, for the bootable images only.

use std::path::Path;

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let script = Path::new(&here).join("../crates/cell/link.ld");
    println!("cargo:rerun-if-changed={}", script.display());
    for arg in [
        &format!("-T{}", script.display()),
        "--gc-sections",
        "-zmax-page-size=4096",
        "-znoexecstack",
        "--build-id=none",
        "-zseparate-loadable-segments",
    ] {
        println!("cargo:rustc-link-arg-bins={arg}");
    }
}
