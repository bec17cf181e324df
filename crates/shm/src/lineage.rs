//! A process and those that it descends from, as /proc has them (proc_pid_stat(5)).

/// Processes of a line that are looked at; a longer one is cut.
const LONGEST: usize = 64;

/// Parent and start time, in clock ticks after boot, of a process.
fn look(pid: u32) -> Option<(u32, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted behind its last parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    Some((parent, fields.nth(17)?.parse().ok()?))
}

/// Start time of a process, in clock ticks after boot: with its number it names a process for good.
pub fn start_ticks(pid: u32) -> Option<u64> {
    look(pid).map(|(_, ticks)| ticks)
}

/// The process and its ancestors, each with its start time, the process first. A process whose
/// parent has ended descends from the process that has adopted it. So the line of a process that
/// means to hide ends there.
pub fn of(pid: u32) -> impl Iterator<Item = (u32, u64)> {
    let mut next = pid;
    std::iter::from_fn(move || {
        let (parent, ticks) = (next != 0).then(|| look(next)).flatten()?;
        let this = std::mem::replace(&mut next, parent);
        Some((this, ticks))
    })
    .take(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_descends_from_this_process_and_nobody_from_the_child() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read x"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let me = std::process::id();
        let line: Vec<u32> = of(child.id()).map(|(pid, _)| pid).collect();
        assert!(line[0] == child.id() && line.contains(&me), "{line:?}");
        assert!(of(me).all(|(pid, _)| pid != child.id()));
        assert_eq!(of(me).next(), Some((me, start_ticks(me).unwrap())));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(of(0).count(), 0);
    }
}
