//! `tombolo domain-watch`: the process of a machine whose domain was not created by an `xl` of the
//! fabric, but goes on after a save: it was restored, or only a checkpoint of it was saved.
//!
//! The `xl create` of the domain has no more to do with it: it ends when the domain is suspended.
//! This process does what that did. It copies the console to its standard output, and waits for the
//! end. It writes that into its standard error in the words of `xl`, so the fabric reads one kind
//! of log ([`super::toolstack::end_in_log`]). A domain that has shut down is destroyed, as the
//! configuration of each domain of a fabric has it. A suspended one is left to what suspended it.
//! Where XenStore or `xl` does not answer, that is logged and tried again: the fabric destroys the
//! domain of a watcher that ends.
//!
//! Like `xl`, it runs on without a daemon, and the next daemon finds it by its arguments.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use tombolo_port::xen::{DomainEvent, DomainEvents};

use super::config;
use super::toolstack::{self, DomainState, SUSPENDED};

/// The hidden command of `tombolo` that this is.
pub const COMMAND: &str = "domain-watch";
/// How the log of such a process begins.
pub(crate) const FIRST_WORDS: &str = "Watching domain";
/// How often the console is looked at while the domain is destroyed.
const LOOK: Duration = Duration::from_millis(50);
/// How long an `xl` or XenStore that did not answer is left alone.
const AGAIN: Duration = Duration::from_secs(5);

/// Its arguments, behind the program's name.
pub(crate) fn words(runtime: &Path, machine: &str, domain: u32) -> Vec<String> {
    let path = config::config_path(runtime, machine).display().to_string();
    vec![COMMAND.into(), domain.to_string(), path]
}

/// Whether a process with these arguments watches the domain of a machine.
pub(crate) fn is_watcher(words: &[String], runtime: &Path, machine: &str) -> bool {
    let [_, command, domain, path] = words else { return false };
    let path = Path::new(path);
    command == COMMAND && domain.parse::<u32>().is_ok() && path == config::config_path(runtime, machine)
}

/// A domain's console, copied to the standard output.
#[derive(Default)]
struct Console {
    terminal: Option<File>,
    /// It had one, whose other end was closed.
    is_over: bool,
}

impl Console {
    /// Opens the terminal, once XenStore tells which.
    fn find(&mut self, events: &mut DomainEvents, domain: u32) {
        if self.terminal.is_none()
            && !self.is_over
            && let Some(path) = events.console(domain)
        {
            let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
            // One that cannot be opened is tried again with the next event.
            self.terminal = OpenOptions::new().read(true).custom_flags(flags).open(path).ok();
        }
    }

    /// Copies what is there now.
    fn copy(&mut self) {
        let mut bytes = [0; 4096];
        while let Some(terminal) = &mut self.terminal {
            match terminal.read(&mut bytes) {
                // A file that takes no more is no reason to stop watching.
                Ok(count @ 1..) => drop(io::stdout().write_all(&bytes[..count]).and_then(|()| io::stdout().flush())),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Its other end is closed: the domain is gone.
                Ok(0) | Err(_) => (self.terminal, self.is_over) = (None, true),
            }
        }
    }
}

/// Watches a domain until its end, which it reports. `config` is the file that its machine's `xl`
/// was given.
///
/// # Errors
/// The domain has shut down, and could not be destroyed, as a sentence.
pub fn run(domain: u32, config: &Path) -> Result<(), String> {
    let machine = config.file_stem().unwrap_or_default().to_string_lossy();
    eprintln!("{FIRST_WORDS} of {machine} (domid {domain})");
    let (mut console, mut said) = (Console::default(), String::new());
    let end = loop {
        match wait_for_end(domain, &mut console) {
            Ok(end) => break end,
            Err(why) => {
                // It may go on for long, in a log that is kept.
                if said != why {
                    eprintln!("{why}; looking again every {} s", AGAIN.as_secs());
                }
                said = why;
                let until = Instant::now() + AGAIN;
                while Instant::now() < until {
                    console.copy();
                    std::thread::sleep(LOOK);
                }
            }
        }
    };
    console.copy();
    match end {
        DomainState::ShutDown(reason) => {
            eprintln!("Domain {domain} has shut down, reason code {reason} 0x{reason:x}");
            if reason != SUSPENDED {
                destroy(domain, &mut console)?;
            }
        }
        DomainState::Gone | DomainState::Runs => eprintln!("Domain {domain} has been destroyed."),
    }
    Ok(())
}

/// Waits until a domain runs no more, and copies its console meanwhile; what it is at then. The
/// first look is at once.
///
/// # Errors
/// XenStore or `xl` does not answer, as a sentence: nothing is known of the domain.
fn wait_for_end(domain: u32, console: &mut Console) -> Result<DomainState, String> {
    let store = |error| format!("XenStore: {error}");
    let mut events = DomainEvents::open(&[DomainEvent::Released, DomainEvent::Console(domain)]).map_err(store)?;
    loop {
        if events.take().map_err(store)? {
            console.find(&mut events, domain);
            match toolstack::state_of(domain)? {
                DomainState::Runs => {}
                end => return Ok(end),
            }
        }
        let mut fds = vec![PollFd::new(&events, PollFlags::IN)];
        fds.extend(console.terminal.as_ref().map(|terminal| PollFd::from_borrowed_fd(terminal.as_fd(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(format!("poll: {errno}")),
        }
        console.copy();
    }
}

/// Destroys a domain that has shut down. What xenconsoled had not forwarded comes meanwhile, or
/// after that where the system gives no thread.
fn destroy(domain: u32, console: &mut Console) -> Result<(), String> {
    let thread = std::thread::Builder::new().name("destroy".into());
    let Ok(asked) = thread.spawn(move || toolstack::destroy_number(domain)) else {
        let destroyed = toolstack::destroy_number(domain);
        console.copy();
        return destroyed;
    };
    while !asked.is_finished() {
        console.copy();
        let time = Timespec::try_from(LOOK).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
        let _ = poll(&mut [], Some(&time));
    }
    console.copy();
    match asked.join() {
        Ok(destroyed) => destroyed,
        // That thread does not panic.
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_is_known_by_its_arguments() {
        let runtime = Path::new("/run/t/demo");
        let mut line = vec!["tombolo".to_string()];
        line.extend(words(runtime, "web", 12));
        assert_eq!(line, ["tombolo", "domain-watch", "12", "/run/t/demo/web.xl"]);
        assert!(is_watcher(&line, runtime, "web"));
        assert!(!is_watcher(&line, runtime, "db") && !is_watcher(&line, Path::new("/run/t"), "web"));
        assert!(!is_watcher(&line[..3], runtime, "web"));
        line[2] = "web".into();
        assert!(!is_watcher(&line, runtime, "web"));
    }
}
