//! Processes of machines that are to end, in order and side by side.

use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::Say;
use crate::blocking::{self, on_threads};
use crate::process::Process;
use crate::qemu::{argv, monitor};
use crate::xen::config::Domain;
use crate::xen::toolstack;

/// Time that a guest has to shut down after its power button was pressed.
const SHUTDOWN: Duration = Duration::from_secs(15);
/// Time that a process has to end by itself before it gets a signal, or another one.
const GRACE: Duration = Duration::from_secs(2);

/// A machine that is to end.
pub(crate) struct Ending {
    /// Its process, if it has one still.
    pub(crate) process: Option<Process>,
    /// The monitor through which its guest is asked to shut down first.
    pub(crate) button: Option<PathBuf>,
    /// Its domain of Xen, which does not end with the process.
    pub(crate) domain: Option<Domain>,
}

impl Ending {
    /// A machine that an earlier daemon left; whether it has a disk is on its command line.
    pub(crate) fn left(
        process: Process,
        words: &[String],
        machine: &str,
        runtime: &Path,
        domain: Option<Domain>,
    ) -> Ending {
        let button = argv::has_disk(words).then(|| argv::monitor_path(runtime, machine));
        Ending { process: Some(process), button, domain }
    }
}

/// Destroys domains side by side, since each may take seconds. Those that may run on, and why.
fn destroy<'d>(domains: &[&'d Domain]) -> Vec<(&'d Domain, String)> {
    side_by_side(domains, toolstack::destroy).into_iter().filter_map(|(d, done)| Some((d, done?.err()?))).collect()
}

fn side_by_side<I: Copy + Send, T: Send>(all: &[I], work: impl Fn(I) -> T + Sync) -> Vec<(I, Option<T>)> {
    on_threads(|| Builder::new().name("ending".into()), all, work)
}

/// Ends machines side by side: domains by the toolstack, those with a button by that, if they are
/// off in time; then SIGTERM to all, then SIGKILL to those that do not end within two seconds. Says
/// and returns which domains may run on.
pub(crate) async fn end_all(endings: Vec<Ending>, say: &Say) -> Vec<Domain> {
    if endings.is_empty() {
        return Vec::new();
    }
    let say = say.clone();
    let work = move || {
        // A script that started QEMU and waits for it has the same monitor: the button is pressed
        // once.
        let mut sockets: Vec<&PathBuf> = endings.iter().filter_map(|e| e.button.as_ref()).collect();
        sockets.sort();
        sockets.dedup();
        // Side by side, since each may take seconds. A monitor that does not answer is no reason to
        // wait.
        let pressed = side_by_side(&sockets, |socket| monitor::power_button(socket));
        let answered: Vec<&PathBuf> =
            pressed.into_iter().filter(|(_, done)| matches!(done, Some(Ok(())))).map(|(socket, _)| socket).collect();
        if !answered.is_empty() {
            let limit = SHUTDOWN.as_secs();
            say(&format!("{} machine(s) with disks are asked to shut down and have {limit} s for it", answered.len()));
        }
        let is_pressed = |e: &&Ending| e.button.as_ref().is_some_and(|socket| answered.contains(&socket));
        let (pressed, rest): (Vec<_>, Vec<_>) = endings.iter().partition(is_pressed);
        let deadline = Instant::now() + SHUTDOWN;
        for process in rest.iter().filter(|e| e.domain.is_none()).filter_map(|e| e.process.as_ref()) {
            let _ = process.signal(rustix::process::Signal::TERM);
        }
        // `xl` ends by itself when its domain has gone.
        let domains: Vec<_> = endings.iter().filter_map(|e| e.domain.as_ref()).collect();
        destroy(&domains);
        for process in pressed.iter().filter_map(|e| e.process.as_ref()) {
            if !process.wait(deadline.saturating_duration_since(Instant::now())) {
                let _ = process.signal(rustix::process::Signal::TERM);
            }
        }
        let deadline = Instant::now() + GRACE;
        let left = || deadline.saturating_duration_since(Instant::now());
        for ending in &endings {
            let Some(process) = &ending.process else { continue };
            if ending.domain.is_some() && process.wait(left()) {
                continue;
            }
            // A process that cannot be signalled is no longer ours.
            let _ = process.end(left());
        }
        // An `xl` that had just been started may have made its domain meanwhile.
        let left = destroy(&domains);
        for (domain, why) in &left {
            say(&format!("{}: its domain may run on: {why}; `xl destroy {}` ends it", domain.machine, domain.name));
        }
        left.into_iter().map(|(domain, _)| domain.clone()).collect()
    };
    // The work does not panic.
    blocking::spawn_or_run(work).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_threads_the_work_is_done_one_after_the_other() {
        let work = |n: u32| n * 2;
        let expected: Vec<_> = (0..9).map(|n| (n, Some(n * 2))).collect();
        let all: Vec<u32> = (0..9).collect();
        assert_eq!(side_by_side(&all, work), expected);
        // No address space has room for such a stack.
        let refused = || Builder::new().stack_size(1 << 60);
        assert!(refused().spawn(|| ()).is_err());
        assert_eq!(on_threads(refused, &all, work), expected);
    }
}
