//! Child processes that nobody else would find: they die with the one that started them.
//!
//! Machines are found again by their command lines, and passt ends with its stream. A short-lived helper (a probe, nft)
//! has neither: if its parent is killed meanwhile, the kernel has to end it.

use std::process::Command;

/// Has the kernel kill the child when the **thread** that starts it ends (`PR_SET_PDEATHSIG`, prctl(2)), however the
/// process ends. So it is for children whose end that thread waits for, and for no others: a child of a thread from a
/// pool would die with its thread.
///
/// A child that changes its user loses the signal (passt does).
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    crate::sys::die_with_parent(command)
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn while_its_thread_lives_a_child_is_left_alone() {
        let child = waits_for_its_input();
        // wait_with_output closes its input: it ends by itself, and not by a signal.
        assert!(child.wait_with_output().unwrap().status.success());
    }
}
