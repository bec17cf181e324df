//! `xl` on this machine: found, asked for domains, told to destroy them, and read for how one
//! ended.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::config::Domain;
use crate::qemu::probe::which;
use crate::run::{LIMIT, run};

/// How long `xl destroy` may take. It waits 10 s for the backend of each vif, which does not answer
/// while no daemon runs.
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

/// `SHUTDOWN_suspend` of Xen's public interface (sched.h): a domain that waits to be resumed, or
/// whose memory is being saved.
pub(crate) const SUSPENDED: u32 = 2;

/// What a domain is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DomainState {
    /// It runs, or is paused.
    Runs,
    /// It has shut down, for that reason (`SHUTDOWN_*`), and was not destroyed yet.
    ShutDown(u32),
    /// There is none of that number, or it is dying.
    Gone,
}

/// A domain in what `xl list -v` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) id: u32,
    pub(crate) state: DomainState,
    /// Its processors are not run, as before a restore is complete.
    pub(crate) is_paused: bool,
}

/// The domains in lines of name, number, memory, processors, state letters, time, UUID, reason of a
/// shutdown, and label. One that has ended is listed as long as a process has a page of it, beside
/// the next of the same UUID.
fn listed(list: &str) -> impl Iterator<Item = (&str, Listed)> {
    list.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().rev().collect();
        let [_, reason, uuid, _, letters, _, _, id, ..] = words[..] else { return None };
        let state = match (letters.contains('d'), u32::from_str_radix(reason, 16)) {
            (true, _) => DomainState::Gone,
            (false, Ok(reason)) => DomainState::ShutDown(reason),
            (false, Err(_)) => DomainState::Runs,
        };
        Some((uuid, Listed { id: id.parse().ok()?, state, is_paused: letters.contains('p') }))
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

fn list(program: &Path) -> Result<String, String> {
    xl(program, &["list", "-v"], LIMIT)
}

fn program() -> Result<PathBuf, String> {
    which("xl").ok_or_else(|| "no xl in PATH".into())
}

/// The domains of a UUID that are not dying.
fn living(program: &Path, uuid: &str) -> Result<Vec<Listed>, String> {
    let list = list(program)?;
    let own = listed(&list).filter(|(of, one)| *of == uuid && one.state != DomainState::Gone);
    Ok(own.map(|(_, one)| one).collect())
}

/// A domain as it is now; `None` if there is none, or it is dying.
///
/// # Errors
/// What `xl` says, as a sentence.
pub(crate) fn look_up(domain: &Domain) -> Result<Option<Listed>, String> {
    Ok(living(&program()?, &domain.uuid)?.pop())
}

/// What the domain of that number is at.
///
/// # Errors
/// What `xl` says, as a sentence.
pub(crate) fn state_of(id: u32) -> Result<DomainState, String> {
    let list = list(&program()?)?;
    Ok(listed(&list).find(|(_, one)| one.id == id).map_or(DomainState::Gone, |(_, one)| one.state))
}

/// Destroys the domain of that number, if it is there.
///
/// # Errors
/// What `xl` says, as a sentence; the domain may be there still.
pub(crate) fn destroy_number(id: u32) -> Result<(), String> {
    let destroyed = xl(&program()?, &["destroy", &id.to_string()], DESTROY_LIMIT).map(drop);
    // It may end by itself at the same time, or by the `xl` that restored it.
    destroyed.or_else(|why| if state_of(id) == Ok(DomainState::Gone) { Ok(()) } else { Err(why) })
}

/// Destroys a domain and waits until its devices are gone. Whether there was one.
///
/// # Errors
/// What `xl` says, as a sentence; the domain may run on.
pub fn destroy(domain: &Domain) -> Result<bool, String> {
    let program = program()?;
    let there = living(&program, &domain.uuid)?;
    // It may end by itself at the same time: what counts is what is left.
    let tried: Vec<_> = there.iter().map(|one| destroy_number(one.id)).collect();
    match living(&program, &domain.uuid)?.first() {
        None => Ok(!there.is_empty()),
        Some(left) => {
            let why = || format!("domain {} is still there", left.id);
            Err(tried.into_iter().find_map(Result::err).unwrap_or_else(why))
        }
    }
}

/// The number of the domain that the `xl` of this log has created.
pub fn id_in_log(log: &str) -> Option<u32> {
    log.lines().rev().find_map(|line| line.split_once("(domid ")?.1.split_once(')')?.0.parse().ok())
}

/// How a domain ended, by the log of the `xl` that created it: in words, and whether it ended well.
/// `None` where the log tells of no end.
pub fn end_in_log(log: &str) -> Option<(String, bool)> {
    let meaning = |code: u32| match code {
        0 => ("the domain powered off".to_string(), true),
        1 => ("the domain asked for a reboot".into(), false),
        SUSPENDED => ("the domain was saved or migrated; `xl restore` continues it".into(), true),
        3 => ("the domain crashed".into(), false),
        4 => ("the domain's watchdog fired".into(), false),
        code => (format!("the domain shut down for reason {code}"), false),
    };
    log.lines().rev().find_map(|line| match shutdown_reason(line) {
        Some(code) => Some(meaning(code)),
        None => line.contains("has been destroyed").then(|| ("the domain was destroyed".to_string(), false)),
    })
}

/// Whether the log of what watched a domain ends with its suspension: it is saved, is being saved,
/// or goes on unwatched.
pub(crate) fn is_suspended_in_log(log: &str) -> bool {
    log.lines().rev().find_map(shutdown_reason) == Some(SUSPENDED)
}

/// The reason (sched.h of Xen's public interface: `SHUTDOWN_*`) in a line of `xl`'s log about a
/// domain that has shut down.
fn shutdown_reason(line: &str) -> Option<u32> {
    line.split_once("has shut down, reason code ")?.1.split_whitespace().next()?.parse().ok()
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

    /// What xl 4.17 printed, with other numbers.
    const LIST: &str = "Name                                        ID   Mem VCPUs\tState\tTime(s)   UUID                            Reason-Code\tSecurity Label\n\
         Domain-0                                     0   320     1     r-----      12.0 00000000-0000-0000-0000-000000000000        -                -\n\
         (null)                                      12     0     1     --ps-d       0.3 01020304-0506-4708-890a-0b0c0d0e0f10        0                -\n\
         demo.web                                    15    64     1     -b----       0.1 01020304-0506-4708-890a-0b0c0d0e0f10        -                -\n\
         demo.db                                     16    64     1     ---s--       0.1 01020304-0506-4708-890a-0b0c0d0e0f11        2                -\n\
         demo.new                                    17    64     1     --p---       0.1 01020304-0506-4708-890a-0b0c0d0e0f12        -                -\n";

    #[test]
    fn domains_are_listed_with_what_they_are_at() {
        let all: Vec<_> = listed(LIST).map(|(uuid, one)| (&uuid[34..], one.id, one.state, one.is_paused)).collect();
        let expected = [
            ("00", 0, DomainState::Runs, false),
            ("10", 12, DomainState::Gone, true),
            ("10", 15, DomainState::Runs, false),
            ("11", 16, DomainState::ShutDown(SUSPENDED), false),
            ("12", 17, DomainState::Runs, true),
        ];
        assert_eq!(all, expected);
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
        let saved = "Domain 12 has shut down, reason code 2 0x2\nDomain has suspended.\nDone. Exiting now";
        assert!(end(saved).1 && end(saved).0.contains("xl restore"));
        assert!(is_suspended_in_log(saved) && !is_suspended_in_log(crash) && !is_suspended_in_log(begun));
    }
}
