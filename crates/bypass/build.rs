//! Compiles the eBPF programs with clang, twice: for kernels that give programs typed pointers
//! (Linux 6.2), and for older ones. Each object is the same for every such kernel: places of kernel
//! fields are found when it is loaded. A third object asks a kernel what it can.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

const NEEDED: &str = "clang (14 or later), libbpf's headers and the kernel's; on Debian or Ubuntu: apt-get install clang libbpf-dev linux-libc-dev, \
                      or ./x setup base. CLANG names another compiler";

fn fail(text: &str) -> ! {
    eprintln!("tombolo-bypass: {text}");
    exit(1);
}

fn main() {
    println!("cargo::rerun-if-changed=ebpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    compile(&clang, "bypass.bpf.c", "bypass.bpf.o", &[]);
    compile(&clang, "bypass.bpf.c", "bypass-old.bpf.o", &["-DOLD_KERNEL"]);
    compile(&clang, "ask.bpf.c", "ask.bpf.o", &["-DOLD_KERNEL"]);
}

fn compile(clang: &str, source: &str, object: &str, flags: &[&str]) {
    let target = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo says for which architecture it builds");
    let object = PathBuf::from(env::var_os("OUT_DIR").expect("cargo gives a folder")).join(object);
    let output = Command::new(clang)
        .args(flags)
        .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3"])
        // Where Debian keeps <asm/types.h>, which for this target is in no default path.
        .arg(format!("-I/usr/include/{target}-linux-gnu"))
        // Debug paths of the build machine must not be in the object.
        .arg("-ffile-prefix-map=".to_owned() + &env::var("CARGO_MANIFEST_DIR").unwrap_or_default() + "=.")
        .args(["-c", &format!("ebpf/{source}"), "-o"])
        .arg(&object)
        .output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            fail(&format!("{clang} could not compile the eBPF programs. Needed: {NEEDED}\n{said}"));
        }
        Err(error) => fail(&format!("{clang}: {error}. Needed to compile the eBPF programs: {NEEDED}")),
    }
}
