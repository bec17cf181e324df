//! Gives libtombolo.so the name that programs look for it by. Its number changes whenever
//! `TOMBOLO_ABI_VERSION` of bindings/include/tombolo.h does, and so does Debian's libtombolo0.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libtombolo.so.0");
}
