//! The runtime that called the plugin, and whether it is still there.
//!
//! A runtime that is killed leaves the calls that it has made. The next one calls DEL for what they
//! were about, and starts a container again under another name. An ADD that did its work after that
//! DEL would add a port that no one removes before the namespace ends. So ADD asks here once no
//! other call for its attachment can come before it.
//!
//! Where the answer goes to a pipe or a socket, its other end tells whether the caller is there;
//! else the plugin's parent does.

use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
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
        // Where a process reads the answer, that tells: it may have had another one start the
        // plugin, which has ended since.
        let why = match is_for_a_process(io::stdout()) {
            true if is_read(io::stdout()) => return Ok(()),
            true => "no one reads its answer any more",
            false if getppid() == self.parent => return Ok(()),
            false => "the process that called the plugin has ended",
        };
        Err(CniError::Again(format!("{why}, so nothing was added; call ADD again for what is still wanted")))
    }
}

/// Whether what is written goes to a process: by a pipe or a socket.
fn is_for_a_process(output: impl rustix::fd::AsFd) -> bool {
    let kind = fstat(output).map(|stat| FileType::from_raw_mode(stat.st_mode));
    matches!(kind, Ok(FileType::Fifo | FileType::Socket))
}

/// Whether something that is written can still be read. A file can, and so can what cannot be
/// asked.
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
    fn pipes_and_sockets_lead_to_a_process_and_files_do_not() {
        let (_reader, writer) = io::pipe().unwrap();
        let (_other, socket) = UnixStream::pair().unwrap();
        assert!(is_for_a_process(&writer) && is_for_a_process(&socket));
        assert!(!is_for_a_process(tempfile::tempfile().unwrap()));
    }
}
