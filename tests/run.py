#!/usr/bin/env python3
"""Runs the tests of one group: every `test_*` function of tests/GROUP_*.py, each in a process of its own.

usage: tests/run.py GROUP [PART-OF-A-NAME...]

One line per test; the last line is 'N passed, N failed, N skipped', with ', N passed on a second run' behind it where there
were any. A test that ends leaves nothing running: what it started is found and killed, and counted against it. The same holds
when this program is stopped by SIGTERM or SIGINT, or killed.

With CI=true a skip fails unless tests/expected-skips names it, and a failed test runs once more
(docs/decisions/0016-second-run-in-ci.md).
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from lib.machine import SLOW, Skip  # noqa: E402
from lib.process import children  # noqa: E402

# What bounds a test that hangs; none comes near it on a machine that is three times slower than those it was written on.
DEFAULT_TIMEOUT_S = 300
# How long what a test has told to end may take for it.
ENDING_S = 3 * SLOW
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
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
            sys.exit(f"stopped in {name}; what it had started is killed")
        if late:
            # SIGTERM would run no cleanup of ours either; children die with their parent by PDEATHSIG.
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        left = reap_left()
        log.seek(0)
        text = log.read()
    if late:
        return "FAIL", f"{text}\nstill running after {seconds} s"
    code = os.waitstatus_to_exitcode(status)
    if code == SKIPPED:
        return "skip", text.split("SKIP: ")[-1].strip()
    if code:
        return "FAIL", text
    return ("FAIL", f"{text}\nleft running: {', '.join(left)}") if left else ("ok", text)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    group, parts = sys.argv[1], sys.argv[2:]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # As Ctrl-C: the test in progress ends, and what it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tests = []
    for path in sorted(HERE.glob(f"{group}_*.py")):
        module = importlib.import_module(path.stem)
        for name, value in vars(module).items():
            if name.startswith("test_") and callable(value):
                full = f"{path.stem}.{name}"
                if not parts or any(part in full for part in parts):
                    tests.append((full, value))
    if not tests:
        sys.exit(f"no test of group {group} matches {' '.join(parts) or 'anything'}")
    in_ci = os.environ.get("CI") == "true"
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    allowed = expected_skips()
    unexpected, second_runs = [], []
    for name, test in tests:
        for attempt in (1, 2):
            start = time.monotonic()
            verdict, text = run(name, test)
            took = time.monotonic() - start
            print(f"{verdict:4} {name}  {took:.1f} s" + (f": {text}" if verdict == "skip" else ""), flush=True)
            if verdict != "FAIL":
                break
            print("\n".join(f"     {line}" for line in text.strip().splitlines()[-60:]), flush=True)
            if not in_ci or attempt == 2:
                break
            print("once more:", flush=True)
        counts[verdict] += 1
        if attempt == 2 and verdict != "FAIL":
            second_runs.append(name)
        if verdict == "skip" and name not in allowed:
            unexpected.append(name)
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
