//! `xl` on this machine: found, asked for domains, told to destroy them, and read for how one ended.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::config::Domain;
use crate::qemu::probe::which;
use crate::run::{LIMIT, run};

/// How long `xl destroy` may take. It waits 10 s for the backend of each vif, which does not answer while no daemon runs.
const DESTROY_LIMIT: Duration = Duration::from_secs(60);
/// What an error says that comes from a machine that is no dom0.
const DOCTOR: &str = "`tombolo doctor` says what a Xen host needs";

/// Where Xen says what this system is.
const TYPE: &str = "/sys/hypervisor/type";
const CAPABILITIES: &str = "/proc/xen/capabilities";

/// The `xl` of this machine.
///
/// # Errors
/// Why no domain can be started here, as a sentence.
pub fn find() -> Result<PathBuf, String> {
    let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_string());
    classify_host(read(TYPE).ok().as_deref(), read(CAPABILITIES).map_err(|error| error.to_string()), which("xl"))
}

fn classify_host(
    hypervisor: Option<&str>,
    capabilities: Result<String, String>,
    xl: Option<PathBuf>,
) -> Result<PathBuf, String> {
    if hypervisor != Some("xen") {
        let found = hypervisor.map_or_else(|| "no hypervisor's name".into(), |name| format!("{name:?}"));
        return Err(format!("this is not a Xen host: expected \"xen\" in {TYPE}, found {found}; {DOCTOR}"));
    }
    match capabilities {
        Err(why) => Err(format!(
            "whether this is the dom0 of Xen is not known: {CAPABILITIES}: {why}; run `mount -t xenfs xenfs /proc/xen`"
        )),
        Ok(text) if !text.contains("control_d") => {
            Err("this is a guest of Xen, and only the dom0 starts domains; run `tombolo up` there".into())
        }
        Ok(_) => {
            xl.ok_or_else(|| format!("no xl in PATH: install Xen's tools (Debian: apt install xen-utils); {DOCTOR}"))
        }
    }
}

/// The numbers of the domains of that UUID in what `xl vm-list` says: lines of UUID, number and name. One that has ended is
/// listed as long as somebody has a page of it, beside the next of the same UUID.
fn ids_in(list: &str, uuid: &str) -> Vec<u32> {
    let lines = list.lines().filter(|line| line.split_whitespace().next() == Some(uuid));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect()
}

/// Whether a domain is there and not dying, in what `xl list` says: lines of name, number, memory, processors, state and time.
fn is_living(list: &str, id: u32) -> bool {
    list.lines().any(|line| {
        let words: Vec<_> = line.split_whitespace().rev().collect();
        let [_, state, _, _, number, ..] = words[..] else { return false };
        number.parse() == Ok(id) && !state.contains('d')
    })
}

/// Runs `xl`; what it printed, or what it complained of.
fn xl(program: &Path, words: &[&str], limit: Duration) -> Result<String, String> {
    let out = run(Command::new(program).args(words), b"", limit).map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match out.status.success() {
        true => Ok(text(&out.stdout)),
        false => Err(format!("`xl {}`: {}", words.join(" "), text(&out.stderr))),
    }
}

/// The domains of a UUID that are not dying.
fn living(program: &Path, uuid: &str) -> Result<Vec<u32>, String> {
    let ids = ids_in(&xl(program, &["vm-list"], LIMIT)?, uuid);
    if ids.is_empty() {
        return Ok(ids);
    }
    let list = xl(program, &["list"], LIMIT)?;
    Ok(ids.into_iter().filter(|id| is_living(&list, *id)).collect())
}

/// Destroys a domain and waits until its devices are gone. Whether there was one.
///
/// # Errors
/// What `xl` says, as a sentence; the domain may run on.
pub fn destroy(domain: &Domain) -> Result<bool, String> {
    let program = which("xl").ok_or("no xl in PATH")?;
    let ids = living(&program, &domain.uuid)?;
    // It may end by itself at the same time: what counts is what is left.
    let tried: Vec<_> = ids.iter().map(|id| xl(&program, &["destroy", &id.to_string()], DESTROY_LIMIT)).collect();
    match living(&program, &domain.uuid)?.first() {
        None => Ok(!ids.is_empty()),
        Some(left) => {
            Err(tried.into_iter().find_map(Result::err).unwrap_or_else(|| format!("domain {left} is still there")))
        }
    }
}

/// The number of the domain that the `xl` of this log has created.
pub fn id_in_log(log: &str) -> Option<u32> {
    log.lines().rev().find_map(|line| line.split_once("(domid ")?.1.split_once(')')?.0.parse().ok())
}

/// How a domain ended, by the log of the `xl` that created it: in words, and whether it ended well. `None` where the log
/// tells of no end.
pub fn end_in_log(log: &str) -> Option<(String, bool)> {
    // sched.h of Xen's public interface: SHUTDOWN_*.
    let meaning = |code: u32| match code {
        0 => ("the domain powered off".to_string(), true),
        1 => ("the domain asked for a reboot".into(), false),
        2 => ("the domain was suspended".into(), false),
        3 => ("the domain crashed".into(), false),
        4 => ("the domain's watchdog fired".into(), false),
        code => (format!("the domain shut down for reason {code}"), false),
    };
    let code = |line: &str| -> Option<u32> {
        line.split_once("has shut down, reason code ")?.1.split_whitespace().next()?.parse().ok()
    };
    // The last word counts: a domain that was suspended may go on.
    log.lines().rev().find_map(|line| match code(line) {
        Some(code) => Some(meaning(code)),
        None => line.contains("has been destroyed").then(|| ("the domain was destroyed".to_string(), false)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_xen_or_xl_is_told_what_it_lacks() {
        let xl = || Some(PathBuf::from("/usr/sbin/xl"));
        let dom0 = || Ok("control_d".to_string());
        assert_eq!(classify_host(Some("xen"), dom0(), xl()).unwrap(), Path::new("/usr/sbin/xl"));
        let told = |hypervisor, capabilities, xl| classify_host(hypervisor, capabilities, xl).unwrap_err();
        assert!(
            told(None, dom0(), xl()).starts_with("this is not a Xen host")
                && told(None, dom0(), xl()).contains("doctor")
        );
        assert!(told(Some("xen"), Ok(String::new()), xl()).contains("only the dom0"));
        assert!(told(Some("xen"), Err("not there".into()), xl()).contains("mount -t xenfs"));
        assert!(told(Some("xen"), dom0(), None).contains("apt install xen-utils"));
    }

    /// What xl 4.17 printed.
    const LIST: &str = "UUID                                  ID    name\n\
         00000000-0000-0000-0000-000000000000  0    Domain-0                      \n\
         01020304-0506-4708-890a-0b0c0d0e0f10  12    demo.web                      \n";

    #[test]
    fn domains_are_found_by_their_uuid() {
        let uuid = "01020304-0506-4708-890a-0b0c0d0e0f10";
        assert_eq!(ids_in(LIST, uuid), [12]);
        assert_eq!(ids_in(&format!("{LIST}{uuid}  15    demo.web\n"), uuid), [12, 15]);
        assert!(ids_in(LIST, "01020304-0506-4708-890a-0b0c0d0e0f11").is_empty() && ids_in(LIST, "UUID").is_empty());
    }

    #[test]
    fn a_domain_that_is_dying_is_told_from_one_that_lives() {
        let list = "Name                                        ID   Mem VCPUs\tState\tTime(s)\n\
             Domain-0                                     0   320     1     r-----      41.1\n\
             (null)                                      12     0     1     --ps-d       0.3\n\
             demo.web                                    15    32     1     -b----       0.1\n";
        assert_eq!([0, 12, 15, 16].map(|id| is_living(list, id)), [true, false, true, false]);
    }

    #[test]
    fn the_log_of_xl_tells_the_end() {
        let begun = "Waiting for domain demo.web (domid 12) to die [pid 180]\n";
        assert_eq!(id_in_log(begun), Some(12));
        assert_eq!((id_in_log(""), end_in_log(begun)), (None, None));
        let end = |line: &str| end_in_log(&format!("{begun}{line}\n")).unwrap();
        assert_eq!(end("Domain 12 has shut down, reason code 0 0x0"), ("the domain powered off".into(), true));
        assert_eq!(end("Domain 12 has shut down, reason code 1 0x1"), ("the domain asked for a reboot".into(), false));
        let crash = "Domain 12 has shut down, reason code 3 0x3\nAction for shutdown reason code 3 is destroy\nDomain 12 needs to be cleaned up: destroying the domain\nDone. Exiting now";
        assert_eq!(end(crash), ("the domain crashed".into(), false));
        assert_eq!(end("Domain 12 has been destroyed."), ("the domain was destroyed".into(), false));
    }
}
