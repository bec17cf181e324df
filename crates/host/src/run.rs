//! Short-lived programs (nft, `qemu --version`, probes): run to their end, but no longer than a
//! time limit.
//!
//! What a program writes goes into memory files and not into pipes, so that neither a program that
//! writes much nor a child of its own that keeps a pipe open can hold the caller up.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::RawFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tombolo_port::child::{die_with_parent, inherit_only};

use crate::process;

/// What a program may take that has a moment's work, on a machine that is busy.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
/// What is read of a program's words.
const MOST_BYTES: u64 = 1 << 20;

/// Why a program has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// It could not be started or watched.
    #[error("{0}")]
    System(#[from] io::Error),
    /// It took too long.
    #[error(
        "{program} did not end within {} s and was killed; run it by hand to see what it waits for",
        limit.as_secs_f32()
    )]
    Hangs {
        program: String,
        /// The time it had.
        limit: Duration,
    },
}

/// How a program ended, and what it wrote.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// A file in memory that nothing else has.
fn memory(content: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create("tombolo-run", MemfdFlags::CLOEXEC)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file)
}

fn written(mut file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Waits for a child until `limit`; one that is still there then is killed and reaped, and the
/// answer is `None`.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
    let ended = pidfd.and_then(|pidfd| process::ends_within(pidfd, limit));
    match ended {
        Ok(true) => child.wait().map(Some),
        other => {
            child.kill()?;
            child.wait()?;
            other.map(|_| None).map_err(io::Error::from)
        }
    }
}

/// Runs a program with `input` to its end. It dies with the calling thread, and inherits nothing
/// else.
///
/// # Errors
/// [`RunError`].
pub(crate) fn run(command: &mut Command, input: &[u8], limit: Duration) -> Result<Output, RunError> {
    run_with(command, &[], input, limit)
}

/// As [`run`], for a program that inherits these open descriptors as well.
///
/// # Errors
/// [`RunError`].
pub(crate) fn run_with(
    command: &mut Command,
    fds: &[RawFd],
    input: &[u8],
    limit: Duration,
) -> Result<Output, RunError> {
    let (stdout, stderr) = (memory(&[])?, memory(&[])?);
    command.stdin(if input.is_empty() { Stdio::null() } else { memory(input)?.into() });
    command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
    let mut child = inherit_only(die_with_parent(command), fds).spawn()?;
    let Some(status) = wait(&mut child, limit)? else {
        let program = Path::new(command.get_program()).display().to_string();
        return Err(RunError::Hangs { program, limit });
    };
    Ok(Output { status, stdout: written(stdout)?, stderr: written(stderr)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_its_input_and_its_words_are_read() {
        let script = "cat; echo bad >&2; exit 3";
        let output = run(Command::new("sh").args(["-c", script]), b"in", LIMIT).unwrap();
        assert_eq!((output.stdout, output.stderr, output.status.code()), (b"in".to_vec(), b"bad\n".to_vec(), Some(3)));
        assert!(run(&mut Command::new("/nowhere/program"), b"", LIMIT).is_err());
    }

    #[test]
    fn a_program_that_hangs_is_killed_reaped_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("pid");
        let script = format!("trap '' TERM; echo $$ > {}; exec sleep 1000", place.display());
        let begun = std::time::Instant::now();
        let error = run(Command::new("sh").args(["-c", &script]), b"", Duration::from_secs(2)).unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(500), "it was not waited for");
        let text = error.to_string();
        assert!(text.contains("sh did not end within 2 s and was killed"), "{text}");
        let pid: u32 = std::fs::read_to_string(place).unwrap().trim().parse().unwrap();
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "it is reaped");
    }

    #[test]
    fn a_signal_that_this_process_handles_does_not_end_the_child() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _guard = runtime.enter();
        let _handled = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::user_defined1()).unwrap();
        // The number of a thread names its process, and prefers that thread.
        let waiting = rustix::thread::gettid();
        let mut child = Command::new("sleep").arg("0.4").spawn().unwrap();
        let signals = std::thread::spawn(move || {
            for _ in 0..20 {
                rustix::process::kill_process(waiting, rustix::process::Signal::USR1).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let status = wait(&mut child, LIMIT).unwrap().expect("it ends by itself");
        assert!(status.success(), "{status}");
        signals.join().unwrap();
    }
}
