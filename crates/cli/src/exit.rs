//! How the program ends: codes, and what it says when it could not do what it was asked.

use std::io::{self, Write};
use std::process::ExitCode;

use tombolo_host::api::client::ClientError;
use tombolo_host::daemon::DaemonError;
use tombolo_host::fabric::FabricError;
use tombolo_host::file::FileError;
use tombolo_host::rundir::RunDirError;

/// The exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// It failed; nothing, or nothing of use, was done.
    Failed,
    /// It was called wrongly, or given a file that is wrong.
    Misused,
    /// Some of it was done.
    Partly,
    /// As a command in a guest ended, or why there was none.
    Guest(u8),
}

impl Exit {
    /// The number that the shell sees.
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Misused => 2,
            Exit::Partly => 3,
            Exit::Guest(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// Why it was not done.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something to tell the user, and the code to end with.
    Said(Exit, String),
    /// The reader of our output has gone: there is nothing to print.
    Unread,
}

impl Failure {
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Failure::Said(Exit::Failed, text.into())
    }

    pub(crate) fn misused(text: impl Into<String>) -> Self {
        Failure::Said(Exit::Misused, text.into())
    }

    /// Says it on standard error and gives the exit code.
    pub(crate) fn report(&self) -> Exit {
        match self {
            Failure::Said(exit, text) => {
                // A failed write is ignored: if standard error has no reader, there is no other
                // place to report it.
                let _ = writeln!(io::stderr(), "tombolo: {text}");
                *exit
            }
            Failure::Unread => Exit::Done,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Unread,
            _ => Failure::failed(error.to_string()),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Sink(error) => error.into(),
            error if error.is_misuse() => Failure::misused(error.to_string()),
            error => Failure::failed(error.to_string()),
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Failure::misused(error.to_string())
    }
}

impl From<RunDirError> for Failure {
    fn from(error: RunDirError) -> Self {
        Failure::failed(error.to_string())
    }
}

impl From<DaemonError> for Failure {
    fn from(error: DaemonError) -> Self {
        let misused = matches!(error, DaemonError::Fabric(FabricError::File(_) | FabricError::Plan(_)));
        Failure::Said(if misused { Exit::Misused } else { Exit::Failed }, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_no_failure_and_a_full_disk_is() {
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).report(), Exit::Done);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)).report(), Exit::Failed);
        let gone = ClientError::Sink(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(Failure::from(gone).report(), Exit::Done);
    }
}
