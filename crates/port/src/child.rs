//! Child processes: what they inherit. Children that could not be found again die with the process
//! that started them.
//!
//! Machines are found again by their command lines, and passt ends with its stream. A short-lived
//! helper (a probe, nft) has neither: if its parent is killed meanwhile, the kernel has to end it.

use std::os::fd::RawFd;
use std::process::Command;

/// Has the kernel kill the child when the **thread** that starts it ends (`PR_SET_PDEATHSIG`,
/// prctl(2)), however the process ends. So it is for children whose end that thread waits for, and
/// for no others: a child of a thread from a pool would die with its thread.
///
/// A child that changes its user loses the signal (passt does).
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    crate::sys::die_with_parent(command)
}

/// Has the child inherit its standard streams and these descriptors, which have to be open when it
/// starts, and nothing else. Flags of descriptors do not matter: one that came from a peer an
/// instant ago may not be close-on-exec yet.
pub fn inherit_only<'c>(command: &'c mut Command, fds: &[RawFd]) -> &'c mut Command {
    crate::sys::inherit_only(command, fds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Stdio};

    fn waits_for_its_input() -> Child {
        // Its input stays open in this process: only a signal ends it.
        die_with_parent(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null())).spawn().unwrap()
    }

    #[test]
    fn a_child_dies_with_the_thread_that_started_it() {
        let mut child = std::thread::spawn(waits_for_its_input).join().unwrap();
        let input = child.stdin.take();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        drop(input);
    }

    #[test]
    fn a_child_inherits_what_it_is_to_and_nothing_else() {
        let file = std::fs::File::open("/dev/zero").unwrap();
        // The one is inherited unless somebody sees to it, the other is not.
        let (open, closed) = (rustix::io::dup(&file).unwrap(), file.as_raw_fd());
        let script = "for fd in /proc/$$/fd/*; do readlink $fd; done; :";
        let mut command = Command::new("sh");
        let zeros = |command: &mut Command| {
            let output = command.args(["-c", script]).stdin(Stdio::null()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().lines().filter(|target| *target == "/dev/zero").count()
        };
        assert_eq!(zeros(&mut Command::new("sh")), 1);
        assert_eq!(zeros(inherit_only(&mut Command::new("sh"), &[])), 0);
        assert_eq!(zeros(inherit_only(&mut command, &[closed])), 1);
        assert!(zeros(inherit_only(&mut Command::new("sh"), &[closed, open.as_raw_fd()])) == 2);
    }

    #[test]
    fn while_its_thread_lives_a_child_is_left_alone() {
        let child = waits_for_its_input();
        // wait_with_output closes its input: it ends by itself, and not by a signal.
        assert!(child.wait_with_output().unwrap().status.success());
    }
}
