//! The runtime that called the plugin, and whether it is still there.
//!
//! A runtime that is killed leaves the calls that it has made. The next one calls DEL for what they were about, and starts a
//! container again under another name. An ADD that did its work after that DEL would add a port that no one removes before
//! the namespace ends. So ADD asks here once no other call for its attachment can come before it.
//!
//! Two things tell that the caller has gone: no one can read the answer, or the plugin has another parent.

use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, getppid};

use crate::error::CniError;

/// Who started this process.
#[derive(Debug)]
pub(crate) struct Caller {
    /// `None` where it is of another PID namespace.
    parent: Option<Pid>,
}

impl Caller {
    /// The one of this moment.
    pub(crate) fn now() -> Caller {
        Caller { parent: getppid() }
    }

    /// # Errors
    /// It has gone.
    pub(crate) fn check(&self) -> Result<(), CniError> {
        let why = match () {
            () if getppid() != self.parent => "the process that called the plugin has ended",
            () if !is_read(io::stdout()) => "no one reads its answer any more",
            () => return Ok(()),
        };
        Err(CniError::Again(format!("{why}, so nothing was added; call ADD again for what is still wanted")))
    }
}

/// Whether something that is written can still be read. A file can, and so can what cannot be asked.
fn is_read(output: impl rustix::fd::AsFd) -> bool {
    let mut asked = [PollFd::new(&output, PollFlags::empty())];
    loop {
        match poll(&mut asked, Some(&Timespec::default())) {
            Err(Errno::INTR) => {}
            Err(_) => return true,
            Ok(_) => return !asked[0].revents().intersects(PollFlags::ERR | PollFlags::HUP),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn an_answer_is_read_while_the_other_end_is_open() {
        let (reader, writer) = io::pipe().unwrap();
        assert!(is_read(&writer));
        drop(reader);
        assert!(!is_read(&writer));
        let (reader, writer) = UnixStream::pair().unwrap();
        assert!(is_read(&writer));
        drop(reader);
        assert!(!is_read(&writer));
        assert!(is_read(tempfile::tempfile().unwrap()));
        assert!(is_read(std::fs::File::options().write(true).open("/dev/null").unwrap()));
    }

    #[test]
    fn a_process_with_another_parent_was_left() {
        let other = Pid::from_raw(i32::MAX);
        assert!(matches!(Caller { parent: other }.check(), Err(CniError::Again(_))));
    }
}
