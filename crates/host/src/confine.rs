//! Confinement: what an attacker who takes over the daemon or a machine's QEMU finds.
//!
//! Purpose: everything here takes something away that the process does not need, and nothing here
//! is needed for a fabric to work. So each part is tried by itself, and one that the kernel does
//! not offer is said and left out. docs/security.md tells for whom what is done, and what is left
//! off and why.
//!
//! # Invariants
//! - [`daemon`] is called before the process has a second thread. What it takes away is gone for
//!   all threads and children.
//! - [`program`] runs in the process that becomes the machine's QEMU, so that the process ID and
//!   the arguments that a machine is found by are QEMU's own.
//! - `TOMBOLO_CONFINE=off` leaves all of it out.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// System calls that neither the daemon nor a program that it starts ever makes: those that change
/// the machine itself, or look into other processes. They fail with EPERM. Numbers of x86-64.
const DENIED: &[(&str, i64)] = &[
    ("ptrace", 101),
    ("syslog", 103),
    ("uselib", 134),
    ("vhangup", 153),
    ("acct", 163),
    ("settimeofday", 164),
    ("swapon", 167),
    ("swapoff", 168),
    ("reboot", 169),
    ("iopl", 172),
    ("ioperm", 173),
    ("init_module", 175),
    ("delete_module", 176),
    ("quotactl", 179),
    ("clock_settime", 227),
    ("kexec_load", 246),
    ("add_key", 248),
    ("request_key", 249),
    ("keyctl", 250),
    ("open_by_handle_at", 304),
    ("clock_adjtime", 305),
    ("process_vm_readv", 310),
    ("process_vm_writev", 311),
    ("finit_module", 313),
    ("kexec_file_load", 320),
];

/// Capabilities that a daemon of root has no use for.
const UNUSED: CapabilitySet = CapabilitySet::SYS_MODULE
    .union(CapabilitySet::SYS_RAWIO)
    .union(CapabilitySet::SYS_BOOT)
    .union(CapabilitySet::SYS_TIME)
    .union(CapabilitySet::SYS_PACCT)
    .union(CapabilitySet::SYS_TTY_CONFIG)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::LEASE)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::MAC_ADMIN)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::SYSLOG)
    .union(CapabilitySet::WAKE_ALARM)
    .union(CapabilitySet::BLOCK_SUSPEND)
    .union(CapabilitySet::AUDIT_CONTROL)
    .union(CapabilitySet::AUDIT_READ);

/// Capabilities that QEMU keeps where root starts it, and bridges: its images, and services that
/// are called, may be other users'.
const OF_QEMU: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// Whether this process is a confined daemon of the program, whose machines can be confined by
/// [`wrap`].
static IS_DAEMON: AtomicBool = AtomicBool::new(false);

/// Whether the user has switched all of it off.
fn is_off() -> bool {
    std::env::var_os("TOMBOLO_CONFINE").is_some_and(|v| v == "off")
}

/// Confines the daemon and all that it starts. Tells in sentences what could not be done.
pub fn daemon() -> Vec<String> {
    if is_off() {
        return vec!["TOMBOLO_CONFINE=off: the daemon and its machines are not confined".into()];
    }
    IS_DAEMON.store(true, Ordering::Relaxed);
    let mut left_out = Vec::new();
    let mut note = |what: &str, result: Result<(), String>| {
        left_out.extend(result.err().map(|why| format!("the daemon is less confined: {what}: {why}")));
    };
    // Where this fails, an unprivileged process may not filter its system calls either.
    note("no new privileges", set_no_new_privs(true).map_err(|e| e.to_string()));
    note("capabilities", drop_capabilities(CapabilitySet::all().difference(UNUSED)));
    note("system calls", filter());
    left_out
}

/// Denies [`DENIED`] to this thread and those that it starts.
fn filter() -> Result<(), String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the list of system calls is that of x86-64".into());
    }
    let rules: BTreeMap<i64, Vec<_>> = DENIED.iter().map(|(_, number)| (*number, vec![])).collect();
    let denied = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error() as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, seccompiler::TargetArch::x86_64);
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(|e| e.to_string())?;
    apply_filter(&program).map_err(|e| e.to_string())
}

/// Gives up all capabilities but `kept`, for good. A user that has none loses nothing.
fn drop_capabilities(kept: CapabilitySet) -> Result<(), String> {
    let text = |e: rustix::io::Errno| e.to_string();
    let have = capabilities(None).map_err(text)?;
    // Without this one the bounding set stays; nor does it then give anything to a user that is not
    // root.
    if have.effective.contains(CapabilitySet::SETPCAP) {
        for one in CapabilitySet::all().difference(kept).iter() {
            // One that the kernel does not know is not in it.
            if capability_is_in_bounding_set(one).unwrap_or(false) {
                remove_capability_from_bounding_set(one).map_err(text)?;
            }
        }
    }
    let sets = CapabilitySets {
        effective: have.effective & kept,
        permitted: have.permitted & kept,
        inheritable: have.inheritable & kept,
    };
    set_capabilities(None, sets).map_err(text)
}

/// What a machine's QEMU may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writes {
    /// The fabric's runtime folder, for the monitor's socket.
    pub runtime: PathBuf,
    /// Files, such as a disk.
    pub files: Vec<PathBuf>,
}

/// The arguments by which the daemon's own program, as `tombolo confine`, becomes that program and
/// confines it first.
pub fn wrap(argv: &[String], writes: &Writes) -> Vec<String> {
    let mut out = vec!["confine".to_string(), "--runtime".into(), writes.runtime.display().to_string()];
    for file in &writes.files {
        out.extend(["--write".into(), file.display().to_string()]);
    }
    out.push("--".into());
    out.extend_from_slice(argv);
    out
}

/// Whether a machine's QEMU can be confined. With the user's own arguments its needs are unknown,
/// and a script that runs before QEMU may do anything.
pub fn fits(qemu: &Path, has_own_arguments: bool) -> bool {
    let is_program = || -> std::io::Result<bool> {
        let mut magic = [0; 4];
        std::io::Read::read_exact(&mut std::fs::File::open(qemu)?, &mut magic)?;
        Ok(magic == *b"\x7fELF")
    };
    !has_own_arguments && is_program().unwrap_or(false)
}

/// The program that starts a machine's QEMU and its arguments: those of `argv`, confined where that
/// is possible.
pub(crate) fn command(argv: &[String], writes: &Writes, has_own_arguments: bool) -> (Command, Vec<String>) {
    if !IS_DAEMON.load(Ordering::Relaxed) || !fits(Path::new(&argv[0]), has_own_arguments) {
        return (Command::new(&argv[0]), argv[1..].to_vec());
    }
    // The program that runs, also if another one is installed by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("tombolo");
    (command, wrap(argv, writes))
}

/// Becomes the program `argv`, which may write nothing but `writes` and devices, and has no
/// capability but to open files that root may. Comes back only with why that did not work; what the
/// kernel does not offer is left out.
pub fn program(argv: &[String], writes: &Writes) -> String {
    // The daemon has told what is missing on this machine.
    let _ = set_no_new_privs(true);
    let _ = restrict_writes(writes);
    let _ = drop_capabilities(OF_QEMU);
    let error = Command::new(&argv[0]).args(&argv[1..]).exec();
    format!("starting {}: {error}", argv[0])
}

/// Confines this process, the bridge of a link, which has no second thread yet: it may write
/// nothing but sockets of services and their lock, in their folder, and has no capability but to
/// open files that root may.
pub fn bridge(services: &Path) {
    if is_off() {
        return;
    }
    // The daemon has told what is missing on this machine.
    let _ = set_no_new_privs(true);
    let rights = AccessFs::MakeSock | AccessFs::MakeReg | AccessFs::WriteFile | AccessFs::RemoveFile;
    let _ = restrict(vec![(services.into(), rights)]);
    let _ = drop_capabilities(OF_QEMU);
}

/// The rights to change what is in a file system, of the first kernels with all of them (6.2);
/// reading and running stay open.
fn write_rights() -> landlock::BitFlags<AccessFs> {
    AccessFs::from_write(ABI::V3)
}

fn restrict_writes(writes: &Writes) -> Result<(), String> {
    let file = AccessFs::WriteFile | AccessFs::Truncate;
    let mut rules: Vec<(PathBuf, landlock::BitFlags<AccessFs>)> = vec![
        (writes.runtime.clone(), AccessFs::MakeSock | AccessFs::RemoveFile),
        // KVM, and where others have their streams.
        ("/dev".into(), AccessFs::WriteFile.into()),
    ];
    rules.extend(writes.files.iter().map(|path| (path.clone(), file)));
    restrict(rules)
}

/// Takes all rights to write from this thread and those that it starts, but these.
fn restrict(rules: Vec<(PathBuf, landlock::BitFlags<AccessFs>)>) -> Result<(), String> {
    let restrict = || -> Result<RulesetStatus, Box<dyn std::error::Error>> {
        let mut ruleset = Ruleset::default().handle_access(write_rights())?.create()?;
        for (path, rights) in rules {
            ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, rights))?;
        }
        Ok(ruleset.restrict_self()?.ruleset)
    };
    match restrict() {
        Ok(RulesetStatus::NotEnforced) => Err("this kernel has no Landlock".into()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether the kernel offers Landlock with all rights to write; why not.
///
/// # Errors
/// In words.
pub fn probe_landlock() -> Result<(), String> {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let made = ruleset.handle_access(write_rights()).and_then(Ruleset::create);
    made.map(drop).map_err(|e| e.to_string())
}

/// Whether the kernel filters system calls.
///
/// # Errors
/// In words.
pub fn probe_seccomp() -> Result<(), String> {
    let known = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").map_err(|e| e.to_string())?;
    let has = known.split_ascii_whitespace().any(|action| action == "errno");
    if has { Ok(()) } else { Err(format!("it knows the actions {}", known.trim())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_and_arguments_of_ones_own_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("qemu");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert!(!fits(&script, false));
        assert!(!fits(&dir.path().join("absent"), false));
        let program = std::env::current_exe().unwrap();
        assert!(fits(&program, false) && !fits(&program, true));
    }

    #[test]
    fn the_programs_own_arguments_stay_behind_those_of_the_wrapper() {
        let writes = Writes { runtime: "/run/t".into(), files: vec!["/d.img".into()] };
        let argv = ["qemu".to_string(), "-name".into(), "tombolo/t/x".into()];
        let wrapped = wrap(&argv, &writes).join(" ");
        assert_eq!(wrapped, "confine --runtime /run/t --write /d.img -- qemu -name tombolo/t/x");
    }

    #[test]
    fn the_denied_calls_are_sorted_and_each_there_once() {
        assert!(DENIED.is_sorted_by(|a, b| a.1 < b.1));
    }
}
