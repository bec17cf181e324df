//! Which QEMU there is and what it can do, found out by running it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tombolo_shm::environment::variable;

use crate::run::{LIMIT, RunError, run, run_with};

const ROM: &[u8; 4096] = include_bytes!("kvm_probe.bin");
/// Bytes of the image given to QEMU; microvm and q35 both map the last 64 KiB below 4 GiB.
const ROM_BYTES: usize = 65536;
/// What QEMU exits with when the ROM wrote 0x21 to isa-debug-exit.
const ROM_DONE: i32 = (0x21 << 1) | 1;
/// How long the ROM may take under emulation, where it needs about 70 ms: a busy machine that has
/// yet to read QEMU from its disk takes seconds.
const EMULATION_LIMIT: Duration = Duration::from_secs(15);
/// How long it may take under KVM: where that opens and does not run guests, each first start of a
/// fabric waits for so long.
const KVM_LIMIT: Duration = Duration::from_secs(2);

/// A QEMU binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    /// The binary, from $TOMBOLO_QEMU or PATH.
    pub path: PathBuf,
    /// Major, minor, micro.
    pub version: (u32, u32, u32),
}

impl Qemu {
    /// Whether it emulates the memory fences of a guest with one CPU as nothing, so that wake-ups
    /// between the guest and other processes get lost and are found late.
    pub fn drops_fences(&self) -> bool {
        self.version < (8, 1, 0)
    }

    /// Whether virtio-net-pci with MSI-X over vhost-user crashes it under emulation: seen on 7.2,
    /// not on 10.0; the versions between were not to be had, so they are taken for broken.
    pub fn msix_trap(&self) -> bool {
        self.version < (10, 0, 0)
    }

    /// Whether its stream netdev connects again by itself (`reconnect-ms`, since 9.2).
    pub fn stream_reconnects(&self) -> bool {
        self.version >= (9, 2, 0)
    }
}

/// Why there is no QEMU to work with.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ProbeError {
    /// No binary.
    #[error("no QEMU: looked for {tried} in PATH and $TOMBOLO_QEMU; install it (Debian: apt install qemu-system-x86)")]
    NoQemu {
        /// The name looked for.
        tried: &'static str,
    },
    /// It does not say its version.
    #[error("{} --version: expected a line with \"version N.N.N\", found {found:?}; give another with $TOMBOLO_QEMU", path.display())]
    Version {
        path: PathBuf,
        /// Its first line, or the error.
        found: String,
    },
}

const BINARY: &str = "qemu-system-x86_64";

/// The full path of a program in PATH.
pub fn which(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|dir| dir.join(name)).find(|p| p.is_file())
}

/// Finds QEMU: `$TOMBOLO_QEMU`, else the PATH; runs it for its version.
pub fn find() -> Result<Qemu, ProbeError> {
    let path = variable("TOMBOLO_QEMU").map(PathBuf::from).or_else(|| which(BINARY));
    with_version(path.ok_or(ProbeError::NoQemu { tried: BINARY })?, LIMIT)
}

fn with_version(path: PathBuf, limit: Duration) -> Result<Qemu, ProbeError> {
    let text = match run(Command::new(&path).arg("--version"), b"", limit) {
        Ok(out) => String::from_utf8_lossy(&out.stdout).into_owned(),
        Err(error) => error.to_string(),
    };
    match version(&text) {
        Some(version) => Ok(Qemu { path, version }),
        None => Err(ProbeError::Version { path, found: text.lines().next().unwrap_or("").to_string() }),
    }
}

fn version(text: &str) -> Option<(u32, u32, u32)> {
    let word = text.split("version ").nth(1)?.split([' ', '\n', '(']).next()?;
    let mut parts = word.split('.').map(|p| p.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)))
}

/// The rate of a processor's time-stamp counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tsc {
    /// Ticks per millisecond.
    pub khz: u64,
    /// The kernel was told it, by the processor or the hypervisor; one that it measured may be off
    /// a little, which is good enough for a guest that corrects it.
    pub told: bool,
}

/// The rate of this machine's time-stamp counter; `None` where the counter does not keep its pace.
pub fn tsc() -> Option<Tsc> {
    tsc_of(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
}

fn tsc_of(cpuinfo: &str) -> Option<Tsc> {
    let value = |key: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    // arch/x86: bogomips is loops_per_jiffy * HZ / 500000, two decimals, and loops_per_jiffy is the
    // counter's rate per tick.
    let (mega, hundredths) = value("bogomips")?.split_once('.')?;
    let khz = (mega.parse::<u64>().ok()? * 100 + hundredths.parse::<u64>().ok().filter(|h| *h < 100)?) * 5;
    let has = |flag: &str| value("flags").is_some_and(|flags| flags.split(' ').any(|f| f == flag));
    let told = has("tsc_known_freq");
    // Where the pace is not constant the figure is of something else.
    (khz > 0 && (told || has("constant_tsc"))).then_some(Tsc { khz, told })
}

/// Runs the probe's ROM under emulation. `Ok` says how long it took, `Err` what happened instead.
pub fn emulation(qemu: &Path) -> Result<Duration, String> {
    runs_guest(qemu, "tcg", EMULATION_LIMIT)
}

/// Runs the probe's ROM under an accelerator.
fn runs_guest(qemu: &Path, accel: &str, limit: Duration) -> Result<Duration, String> {
    let mut image = vec![0xf4; ROM_BYTES];
    image[ROM_BYTES - ROM.len()..].copy_from_slice(ROM);
    let memory =
        rustix::fs::memfd_create("tombolo-probe", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
    let mut file = std::fs::File::from(memory);
    file.write_all(&image).map_err(|e| e.to_string())?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let start = Instant::now();
    let mut command = Command::new(qemu);
    command
        .args([
            "-M",
            &format!("microvm,accel={accel}"),
            "-m",
            "2",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-bios", &format!("/proc/self/fd/{fd}")]);
    // It may stall for ever, and nothing records it.
    let output = match run_with(&mut command, &[fd], b"", limit) {
        Ok(output) => output,
        Err(RunError::Hangs { .. }) => {
            return Err(format!(
                "it opens, but a guest of a few instructions did not end within {} s",
                limit.as_secs()
            ));
        }
        Err(error) => return Err(format!("starting {}: {error}", qemu.display())),
    };
    match output.status.code() {
        Some(ROM_DONE) => Ok(start.elapsed()),
        code => {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.lines().last().unwrap_or("no word").to_string();
            Err(format!("QEMU ended with {} ({last})", code.map_or("a signal".into(), |c| c.to_string())))
        }
    }
}

/// Whether KVM runs a guest here; `Err` says why not.
pub fn kvm(qemu: &Path) -> Result<Duration, String> {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => runs_guest(qemu, "kvm", KVM_LIMIT),
        Err(error) => Err(format!("/dev/kvm: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_hangs_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        // Written by another process, so that no child of another test holds it open for writing.
        let script = format!("printf '#!/bin/sh\\nexec sleep 1000\\n' > {0}; chmod 755 {0}", program.display());
        assert!(run(Command::new("sh").args(["-c", &script]), b"", LIMIT).unwrap().status.success());
        let error = with_version(program.clone(), Duration::from_millis(500)).unwrap_err().to_string();
        let expected = format!("{} did not end within 0.5 s and was killed", program.display());
        assert!(error.contains(&expected), "{error}");
    }

    #[test]
    fn the_counters_rate_is_read_where_it_keeps_its_pace() {
        let text =
            |flags: &str, bogomips: &str| format!("model name\t: X\nflags\t\t: fpu {flags}\nbogomips\t: {bogomips}\n");
        let of = |flags, bogomips| tsc_of(&text(flags, bogomips)).map(|tsc| (tsc.khz, tsc.told));
        assert_eq!(of("tsc_known_freq pni", "4600.00"), Some((2_300_000, true)));
        assert_eq!(of("constant_tsc tsc_known_freq", "5990.43"), Some((2_995_215, true)));
        assert_eq!(of("constant_tsc", "4589.21"), Some((2_294_605, false)));
        for (flags, bogomips) in [("tsc", "4600.00"), ("tsc_known_freq", "4600"), ("tsc_known_freq", "0.00")] {
            assert_eq!(of(flags, bogomips), None, "{flags} {bogomips}");
        }
        assert_eq!(tsc_of(""), None);
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(version("QEMU emulator version 7.2.22 (Debian 1:7.2)\nCopy"), Some((7, 2, 22)));
        assert_eq!(version("QEMU emulator version 10.0.2\n"), Some((10, 0, 2)));
        assert_eq!(version("nonsense"), None);
        let old = Qemu { path: "q".into(), version: (7, 2, 22) };
        let new = Qemu { path: "q".into(), version: (10, 0, 0) };
        assert!(old.drops_fences() && !new.drops_fences());
        assert!(old.msix_trap() && !new.msix_trap() && !old.stream_reconnects() && new.stream_reconnects());
    }

    #[test]
    fn emulation_runs_the_probe() {
        match find() {
            Ok(qemu) => {
                emulation(&qemu.path).unwrap();
                let nonsense = runs_guest(&qemu.path, "no-such-accelerator", EMULATION_LIMIT).unwrap_err();
                assert!(nonsense.contains("ended with 1"), "{nonsense}");
            }
            Err(error) => tombolo_testing::skip(error),
        }
    }

    #[test]
    fn the_rom_is_what_its_source_says() {
        let (Some(clang), Some(objcopy)) = (which("clang"), which("objcopy")) else {
            return tombolo_testing::skip("it needs clang and objcopy");
        };
        let dir = tempfile::tempdir().unwrap();
        let (object, binary) = (dir.path().join("p.o"), dir.path().join("p.bin"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/qemu/kvm_probe.S");
        let run = |c: &mut Command| assert!(c.status().unwrap().success());
        run(Command::new(clang).args(["-c", "-target", "x86_64-linux-gnu"]).arg(source).arg("-o").arg(&object));
        run(Command::new(objcopy).args(["-O", "binary", "-j", ".text"]).args([&object, &binary]));
        assert_eq!(std::fs::read(binary).unwrap(), ROM);
    }
}
