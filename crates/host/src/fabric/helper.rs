//! A process that serves the fabric beside the daemon (passt, a bridge), whichever daemon has
//! started it.

use std::process::Child;
use std::time::Duration;

use crate::process::Process;

/// How long a killed helper is waited for. One that the kernel holds longer is reaped when the
/// daemon ends.
const KILLED: Duration = Duration::from_secs(2);

/// A helper that this daemon started, or took over.
pub(super) enum Helper {
    Child(Child),
    Adopted(Process),
}

impl Helper {
    pub(super) fn id(&self) -> u32 {
        match self {
            Helper::Child(child) => child.id(),
            Helper::Adopted(process) => process.pid,
        }
    }

    /// Ends it and reaps it.
    pub(super) fn end(&mut self) {
        match self {
            Helper::Child(child) => {
                // It may have ended by itself.
                let _ = child.kill();
                if Process::open(child.id()).is_none_or(|p| p.wait(KILLED)) {
                    let _ = child.wait();
                }
            }
            Helper::Adopted(process) => {
                let _ = process.signal(rustix::process::Signal::KILL);
                process.wait(KILLED);
            }
        }
    }

    /// How it ended, in words.
    pub(super) fn how(&mut self) -> String {
        match self {
            Helper::Child(child) => child.wait().map_or_else(|e| e.to_string(), |s| s.to_string()),
            Helper::Adopted(_) => "how is not known, since an earlier daemon had started it".into(),
        }
    }
}
