#!/usr/bin/env python3
"""Runs the tests of one group: every `test_*` function of tests/GROUP_*.py, each in its own process.

usage: tests/run.py [--jobs N] [--alone with|without|only] GROUP [PART-OF-A-NAME...]

GROUP may be a path, as for the samples of tests/runner_tells.py, or '*' for all. With --jobs N, N tests run at the same time; those marked
`@alone` (tests/lib/machine.py) run after the others, one at a time, and no other test runs beside them, of another stage or
(for root) of another clone; --alone, or TOMBOLO_ALONE, leaves them out or runs no others. Prints one line per test, with its seconds and the CPU time of all that it started and waited for. The last line is 'N passed, N failed,
N skipped', followed by ', N passed on a second run' if there were any. A test must leave no process and no network namespace:
leftovers are found, ended and counted as a failure. The same holds when this program is stopped by SIGTERM or SIGINT, or killed.

With CI=true a skip fails unless tests/expected-skips names it, and a failed test runs once more, alone, when the others are
done (docs/decisions/0016-second-run-in-ci.md).
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from lib.machine import BUILD, SLOW, Skip  # noqa: E402
from lib.process import children  # noqa: E402

# What bounds a test that hangs; none comes near it on a machine that is three times slower than
# those it was written on.
DEFAULT_TIMEOUT_S = 300
# How long what a test has told to end may take for it.
ENDING_S = 3 * SLOW
NETNS = Path("/run/netns")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Where the locks of tests are that run alone: of root's, also beside those of another clone, because
# CPUs and numbers of namespaces are the machine's. A test of this program names another folder.
LOCKS = Path(os.environ.get("TOMBOLO_TEST_LOCKS") or ("/run" if os.geteuid() == 0 else BUILD))
# Set for what a test starts.
IN_TURN = "TOMBOLO_IN_TURN"
# Tests of a group that may pass on a second run only; more of them fail the group.
MOST_SECOND_RUNS = 2
SKIPPED = 77
libc = ctypes.CDLL(None, use_errno=True)


def expected_skips():
    path = HERE / "expected-skips"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.split(":")[0].strip() for line in lines if line.strip() and not line.startswith("#")}


def reap_left():
    """Kills what the test left behind (orphans come to us, the subreaper); gives their names.

    A daemon that has answered `down` ends an instant later, so what ends by itself within `ENDING_S` is not left behind."""
    names = []
    ending = time.monotonic() + ENDING_S
    while time.monotonic() < ending and children(os.getpid()):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)
    deadline = time.monotonic() + 10 * SLOW
    while time.monotonic() < deadline:
        left = children(os.getpid())
        if not left:
            break
        for pid in left:
            try:
                state = Path(f"/proc/{pid}/stat").read_text()
                if state.rsplit(")", 1)[1].split()[0] != "Z":
                    names.append(state.split("(", 1)[1].rsplit(")", 1)[0])
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (OSError, ChildProcessError):
                pass
    return sorted(set(names))


def remove_namespaces(pid):
    """Removes the network namespaces of a process that has ended (lib/netns.py names them by it); gives their names."""
    names = sorted(path.name for path in NETNS.glob(f"tmb{pid}-*"))
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return names


def remove_stale_namespaces():
    """Those of tests whose runner was killed."""
    owners = {match[1] for path in NETNS.glob("tmb*-*") if (match := re.fullmatch(r"tmb(\d+)-\d+", path.name))}
    for pid in owners:
        if not Path("/proc", pid).exists():
            remove_namespaces(pid)


def in_child(test, log, parent):
    """The test's own process: its output goes to the log, its verdict is its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # In a session of its own it would outlive a runner that is killed.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    code = 0
    try:
        test()
    except Skip as reason:
        print(f"SKIP: {reason}")
        code = SKIPPED
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(name, test):
    """Runs one test; gives its verdict ("ok", "FAIL", "skip") and a text."""
    seconds = getattr(test, "timeout_s", DEFAULT_TIMEOUT_S) * SLOW
    with tempfile.TemporaryFile("w+") as log:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            in_child(test, log, parent)
        pidfd = os.pidfd_open(pid)
        try:
            late = not select.select([pidfd], [], [], seconds)[0]
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGKILL)
            reap_left()
            remove_namespaces(pid)
            sys.exit(f"stopped in {name}; what it had started is killed")
        if late:
            # SIGTERM would run no cleanup of ours either; children die with their parent by
            # PDEATHSIG.
            os.kill(pid, signal.SIGKILL)
        # Before it is reaped: then another runner would take them for those of a runner that was
        # killed.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        left = remove_namespaces(pid)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        left += reap_left() + remove_namespaces(pid)
        log.seek(0)
        text = log.read()
    if late:
        return "FAIL", f"{text}\nstill running after {seconds} s"
    code = os.waitstatus_to_exitcode(status)
    if code == SKIPPED:
        return "skip", text.split("SKIP: ")[-1].strip()
    if code:
        return "FAIL", text
    return ("FAIL", f"{text}\nleft behind: {', '.join(left)}") if left else ("ok", text)


def collect(group, parts):
    """The tests of a group by their full names."""
    tests = {}
    folder = HERE / Path(group).parent
    if folder != HERE:
        sys.path.insert(0, str(folder))
    for path in sorted(folder.glob(f"{Path(group).name}_*.py")):
        module = importlib.import_module(path.stem)
        for name, value in vars(module).items():
            if name.startswith("test_") and callable(value):
                full = f"{path.stem}.{name}"
                if not parts or any(part in full for part in parts):
                    tests[full] = value
    if not tests:
        sys.exit(f"no test of group {group} matches {' '.join(parts) or 'anything'}")
    return tests


def is_alone(test):
    return getattr(test, "alone", False)


def stop(*_):
    """The handler of SIGTERM and SIGINT: what runs is ended once, however often it is asked for."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def turn(is_alone):
    """While a test runs: those of other stages (tests/stages.py) may run beside it, but none beside one that is to run alone."""
    if os.environ.get(IN_TURN):
        # The runner is a test's.
        yield
        return
    LOCKS.mkdir(exist_ok=True)
    with (LOCKS / "tombolo-tests-door.lock").open("w") as door, (LOCKS / "tombolo-tests-room.lock").open("w") as room:
        # One that waits to be alone keeps the door, so that no other goes in before it.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        os.environ[IN_TURN] = "1"
        try:
            yield
        finally:
            del os.environ[IN_TURN]
            # By hand: a process of the test may have both files open for longer.
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(door, fcntl.LOCK_UN)


def cpu_s():
    """CPU time of all that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lane(tests, orders, reports, parent):
    """A process that runs one test after the other, as it is told: its orphans are its own, so that it counts nothing of another lane's."""
    # So that it ends its test when the runner is killed.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in orders:
        name, is_alone = json.loads(line)
        with turn(is_alone):
            start, used = time.monotonic(), cpu_s()
            verdict, text = run(name, tests[name])
            took, used = time.monotonic() - start, cpu_s() - used
        reports.write(json.dumps([name, verdict, text, took, used]) + "\n")
        reports.flush()


class Lanes:
    """Processes that run tests side by side. What this program prints stays in one piece per test."""

    def __init__(self, tests, count):
        # Of each: its process, where it is told a test, and where it tells the verdict.
        self.lanes = []
        for _ in range(count):
            (orders, told), (reports, telling) = os.pipe(), os.pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                # Else a lane would not see the end of its orders while another holds the other end.
                for _, other, _ in self.lanes:
                    other.close()
                os.close(told)
                os.close(reports)
                code = 1
                try:
                    with os.fdopen(orders) as orders, os.fdopen(telling, "w") as telling:
                        lane(tests, orders, telling, parent)
                    code = 0
                except SystemExit as end:
                    print(end, file=sys.stderr, flush=True)
                finally:
                    os._exit(code)
            os.close(orders)
            os.close(telling)
            self.lanes.append((pid, os.fdopen(told, "w"), os.fdopen(reports)))

    def run(self, names, alone=()):
        """Yields name, verdict, text, seconds and CPU time of each of these tests as they end; those in `alone` have no other stage's beside them."""
        waiting, busy = list(reversed(names)), {}
        while waiting or busy:
            for _, orders, reports in self.lanes:
                if waiting and reports not in busy:
                    busy[reports] = waiting.pop()
                    orders.write(json.dumps([busy[reports], busy[reports] in alone]) + "\n")
                    orders.flush()
            for reports in select.select(list(busy), [], [])[0]:
                line = reports.readline()
                if not line:
                    sys.exit(f"the process that ran {busy[reports]} ended without a verdict")
                del busy[reports]
                yield json.loads(line)

    def close(self):
        """Ends the lanes, and what they run."""
        for pid, orders, _ in self.lanes:
            with contextlib.suppress(OSError):
                orders.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid, *_ in self.lanes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def tell(name, verdict, text, took, used):
    print(f"{verdict:4} {name}  {took:.1f} s" + (f": {text}" if verdict == "skip" else f", CPU {used:.1f} s"), flush=True)
    if verdict == "FAIL":
        print("\n".join(f"     {line}" for line in text.strip().splitlines()[-60:]), flush=True)


def run_all(tests, jobs, in_ci):
    """Runs all tests; gives the verdict of each by its name, and the names of those that passed on a second run only."""
    verdicts, failed = {}, []
    alone = {name for name, test in tests.items() if is_alone(test)}
    together = [name for name in tests if jobs > 1 and name not in alone]
    one_by_one = [name for name in tests if name not in together]
    for names, count in ((together, jobs), (one_by_one, 1)):
        if not names:
            continue
        lanes = Lanes(tests, min(count, len(names)))
        try:
            for name, verdict, text, *times in lanes.run(names, alone):
                tell(name, verdict, text, *times)
                verdicts[name] = verdict
                if verdict == "FAIL":
                    failed.append(name)
        finally:
            lanes.close()
    second_runs = []
    if in_ci and failed:
        print("once more:", flush=True)
        lanes = Lanes(tests, 1)
        try:
            for name, verdict, text, *times in lanes.run(failed, failed):
                tell(name, verdict, text, *times)
                verdicts[name] = verdict
                if verdict != "FAIL":
                    second_runs.append(name)
        finally:
            lanes.close()
    return verdicts, second_runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tests that run at the same time (1)")
    # Not for what a test starts.
    which = os.environ.pop("TOMBOLO_ALONE", "with")
    parser.add_argument("--alone", choices=("with", "without", "only"), default=which, help="tests that run alone: with the others, not at all, or nothing else (with)")
    parser.add_argument("group")
    parser.add_argument("parts", nargs="*", metavar="PART-OF-A-NAME")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    remove_stale_namespaces()
    tests = collect(options.group, options.parts)
    left_out = [name for name, test in tests.items() if options.alone == ("without" if is_alone(test) else "only")]
    for name in left_out:
        del tests[name]
    if left_out and options.alone == "without":
        print(f"left to the stage of tests that run alone: {', '.join(left_out)}", flush=True)
    in_ci = os.environ.get("CI") == "true"
    try:
        verdicts, second_runs = run_all(tests, options.jobs, in_ci)
    except KeyboardInterrupt:
        sys.exit("stopped; what the tests had started is killed")
    allowed = expected_skips()
    counts = {verdict: sum(found == verdict for found in verdicts.values()) for verdict in ("ok", "FAIL", "skip")}
    unexpected = [name for name, verdict in verdicts.items() if verdict == "skip" and name not in allowed]
    failed = counts["FAIL"] > 0
    if unexpected and in_ci:
        failed = True
        print(f"skipped although CI must not skip: {', '.join(unexpected)} (tests/expected-skips lists what may be)")
    if len(second_runs) > MOST_SECOND_RUNS:
        failed = True
        print(f"too many passed on a second run only, at most {MOST_SECOND_RUNS} may: {', '.join(second_runs)}")
    note = f", {len(second_runs)} passed on a second run" if second_runs else ""
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped{note}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
