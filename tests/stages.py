#!/usr/bin/env python3
"""Runs the stages of `make test` and prints a table of their times.

usage: tests/stages.py [--lanes N] [STAGE...]

A stage is a recipe of ./x. All stages run, even after a failure, so that one run shows everything that needs fixing. N of them
run at the same time (two where there are two CPUs), each after those whose results it uses. Where N is more than one, up to
four more run where the CPUs are idle meanwhile, as tests wait for most of their time. Output goes to build/test/STAGE.log
and, in one piece per stage, to the terminal. At the end come the slowest tests, the output of repeated failures, and a
table: the tests of each stage that passed, were skipped, or passed only on a second run (tests/run.py), and how many CPUs the
stage kept busy. The last line counts stages and skipped tests. A stopped stage ends all that it has started.
"""

import argparse
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/test"
# How long a stage that is stopped may take to end what it has started.
GRACE_S = 30
# How long the output is read of what a stage has left running.
LEFT_S = 5
# How often a stage is looked at that says nothing.
TICK_S = 0.2
# How many more stages may run where so many CPUs were idle on average for so long: it takes a while
# until a stage that has begun shows what it needs.
MORE = 4
IDLE_CPUS = 0.4
LOOK_S = 4
STAT = Path("/proc/stat")
# How many of the slowest tests are listed.
SLOWEST = 12
# Lines shown again of a stage that failed otherwise than by a test of tests/run.py.
LAST_LINES = 40
# All stages on a fresh clone write 9 GB below it, and up to 1 GB of scratch at a time.
NEEDED_GB = {ROOT: 10, Path(tempfile.gettempdir()): 2}
TEST = re.compile(r"^(ok  |FAIL|skip) (\S+)  ([\d.]+) s(?:, CPU ([\d.]+) s)?")
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped(?:, (\d+) passed on a second run)?$")
# A test of cargo's that could not run, or not wholly; the harness counts it among those that passed
# (crates/testing).
CARGO_SKIPPED = re.compile(r"^(?:test .* \.\.\. )?skipped: ")
# Lines of Python's unittest.
RAN = re.compile(r"^Ran (\d+) tests? in ")
RESULT = re.compile(r"^(?:OK|FAILED) \((.*)\)$")
CARGO_COUNTS = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")


class Stage(NamedTuple):
    # Bounds a stage that hangs; none comes near it, also not on a machine that is three times
    # slower.
    minutes: int
    # The stages whose results it uses.
    after: tuple = ()


PROGRAMS = ("build", "cells")
# Those that run tests/run.py. What runs alone there runs behind them, as a stage, so that no test waits for it or holds it up.
TESTS = ("runner", "xen", "bypass", "span", "faults", "guests", "package-test", "daytwo", "cni", "cell-boot", "bindings")
# They begin in this order, the cheap verdicts first.
STAGES = {
    "fmt": Stage(5),
    "paths": Stage(3),
    "unsafe-list": Stage(3),
    "rooms": Stage(3),
    "licences": Stage(10),
    # Most others wait for these three.
    "build": Stage(45),
    "cells": Stage(30),
    "span-program": Stage(45),
    # Those that take long, and mostly wait, before those that fill what CPU time they leave.
    "runner": Stage(15),
    "xen": Stage(45, PROGRAMS),
    "bypass": Stage(45, ("build",)),
    "span": Stage(45, (*PROGRAMS, "span-program")),
    "faults": Stage(60, PROGRAMS),
    "unit": Stage(60),
    "guests": Stage(60, PROGRAMS),
    "package-test": Stage(45, (*PROGRAMS, "span-program")),
    "daytwo": Stage(30, (*PROGRAMS, "span-program")),
    "cni": Stage(30, PROGRAMS),
    "lab-quick": Stage(45, PROGRAMS),
    "cell-boot": Stage(30, PROGRAMS),
    "bindings": Stage(30, ("build",)),
    "alone": Stage(30, TESTS),
    "lint": Stage(45),
    "lab-unit": Stage(30, ("build",)),
    "loom": Stage(45),
    "doc": Stage(30),
    "cell-unit": Stage(30),
}


class Running:
    """A stage while it runs: its process, its log, and what it has said."""

    def __init__(self, name, minutes, environment):
        self.name, self.minutes = name, minutes
        self.started = time.monotonic()
        # Unbuffered, so that the log of a stage that hangs has its last words.
        self.log = (LOGS / f"{name}.log").open("wb", buffering=0)
        self.process = subprocess.Popen(["bash", "x", name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        # When it was asked to end, and when its process had ended.
        self.stopped = self.ended = None
        self.is_closed = False
        self.status = self.cpu_s = self.took = None
        # What the terminal has not shown yet.
        self.unseen = [f"\n=== {name}\n".encode()]

    def say(self, text):
        self.log.write(text)
        self.unseen.append(text)

    def note(self, text):
        self.say(f"{self.name}: {text}\n".encode())

    def show(self):
        for text in self.unseen:
            sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        self.unseen.clear()

    def stop(self, why):
        """Asks it to end; tests/run.py ends its test and what that has started."""
        self.note(f"{why}: stopped")
        self.stopped = time.monotonic()
        # Its process may have ended, where something that it left has its output open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def is_over(self, is_readable):
        """Takes what it says; true at its end. What it has left running may have its output open for longer: that is not waited for."""
        now = time.monotonic()
        if not self.stopped and now - self.started > self.minutes * 60:
            self.stop(f"still running after {self.minutes} minutes")
        if self.stopped and now - self.stopped > GRACE_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if is_readable:
            text = os.read(self.process.stdout.fileno(), 1 << 16)
            self.is_closed = not text
            self.say(text)
        if self.status is None:
            # Its result has the CPU time of all that it has waited for, too.
            pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = self.status = os.waitstatus_to_exitcode(status)
                self.cpu_s, self.ended = used.ru_utime + used.ru_stime, now
        return self.ended is not None and (self.is_closed or now - self.ended > LEFT_S)

    def close(self):
        """Kills what holds its output open."""
        for pid, name in holders(self.process.stdout):
            self.note(f"left running: {name}, process {pid}: killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.took = time.monotonic() - self.started
        self.process.stdout.close()
        self.log.close()


def holders(pipe):
    """Process and name of each other one that has this pipe open."""
    own = os.readlink(f"/proc/self/fd/{pipe.fileno()}")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end while it is looked at.
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and any(os.readlink(fd) == own for fd in folder.glob("fd/*")):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
    return found


def run_all(names, lanes):
    """Runs these stages, so many at a time or more (`MORE`); gives them as they were started. SIGTERM, SIGINT and SIGHUP end those that run, and
    the program. So does an error of its own, such as a terminal that is gone."""
    interrupted, running = [], []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: interrupted.append(True))
    try:
        begun = run_in_lanes(names, lanes, running, interrupted)
    finally:
        end_all(running)
    if interrupted:
        sys.exit("stopped; what the stages had started is ended")
    return begun


def end_all(running):
    """Ends what runs still, without a word."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for stage in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stage.process.pid, number)
        until = time.monotonic() + patience_s
        while any(stage.status is None and os.waitid(os.P_PID, stage.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for stage in running):
            if time.monotonic() > until:
                break
            time.sleep(TICK_S)


class Look:
    """How idle the CPUs are from now on."""

    def __init__(self):
        self.since, self.idle_s = time.monotonic(), idle_s()

    def is_over(self):
        return time.monotonic() - self.since >= LOOK_S

    def idle_cpus(self):
        return (idle_s() - self.idle_s) / (time.monotonic() - self.since)


def idle_s():
    """For how long the CPUs that this program may use have been idle, in seconds since the machine started (proc(5), /proc/stat: in 1/100 s)."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [line.split() for line in STAT.read_text().splitlines()]
    # The fourth number is idle time, the fifth that of waits for a disk.
    return sum(int(row[4]) + int(row[5]) for row in rows if row and row[0] in own) / os.sysconf("SC_CLK_TCK")


def run_in_lanes(names, lanes, running, interrupted):
    waiting, begun = list(names), []
    shown, look = 0, Look()
    environment = os.environ | ({"TOMBOLO_ALONE": "without"} if "alone" in names else {})
    while running or (waiting and not interrupted):
        most = lanes
        if lanes > 1 and look.is_over():
            if look.idle_cpus() > IDLE_CPUS:
                # One at a time: the next look has that in it.
                most = max(lanes, min(len(running) + 1, lanes + MORE))
            look = Look()
        for name in list(waiting):
            unfinished = {*waiting, *(stage.name for stage in running)}
            if len(running) < most and not interrupted and unfinished.isdisjoint(STAGES[name].after):
                waiting.remove(name)
                running.append(Running(name, STAGES[name].minutes, environment))
                begun.append(running[-1])
                look = Look()
        opened = [stage.process.stdout for stage in running if not stage.is_closed]
        readable = select.select(opened, [], [], TICK_S)[0]
        for stage in list(running):
            if interrupted and not stage.stopped:
                stage.stop("interrupted")
            if stage.is_over(stage.process.stdout in readable):
                stage.close()
                running.remove(stage)
        # The terminal has the stages one after the other, as they were started.
        while shown < len(begun):
            begun[shown].show()
            if begun[shown].took is None:
                break
            shown += 1
    return begun


class Tests:
    """The tests of a stage, by its log."""

    def __init__(self, stage):
        self.lines = (LOGS / f"{stage}.log").read_text(errors="replace").splitlines()
        self.passed = self.skipped = self.second_runs = 0
        # Seconds, CPU time and name of each that tells them.
        self.times = []
        for line in self.lines:
            if test := TEST.match(line):
                self.times.append((float(test[3]), float(test[4] or 0), test[2]))
            counts = COUNTS.match(line) or CARGO_COUNTS.match(line)
            if counts:
                self.passed += int(counts[1])
                self.skipped += int(counts[3])
                self.second_runs += int(counts[4] or 0) if counts.re is COUNTS else 0
            if CARGO_SKIPPED.match(line):
                self.skipped += 1
                self.passed -= 1
            if ran := RAN.match(line):
                self.passed += int(ran[1])
            elif result := RESULT.match(line):
                others = dict(re.findall(r"(\w+)=(\d+)", result[1]))
                self.skipped += int(others.get("skipped", 0))
                self.passed -= sum(map(int, others.values()))

    def failures(self):
        """What is to be read about a failure: the tests that failed with their output, or the last lines."""
        shown, is_inside = [], False
        for line in self.lines:
            if test := TEST.match(line):
                is_inside = test[1] == "FAIL"
            if is_inside:
                shown.append(line)
        cargo = [line for line in self.lines if re.match(r"test .* \.\.\. FAILED$|thread '.*panicked at|assertion |  left: | right: |error", line)]
        return shown or cargo or self.lines[-LAST_LINES:]


def need_room():
    """Ends the program where a disk would fill up in the middle of the stages. What was built before counts as free room."""
    built = sum(file.stat().st_size for file in (ROOT / "target").rglob("*") if file.is_file() and not file.is_symlink())
    for folder, needed in NEEDED_GB.items():
        free = shutil.disk_usage(folder).free + (built if folder == ROOT else 0)
        if free < needed * 1e9:
            sys.exit(f"{folder} has room for {free / 1e9:.1f} GB more, and all stages need about {needed} GB there. Make room, or name "
                     "the stages that you want.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=min(2, len(os.sched_getaffinity(0))), metavar="N", help=f"stages that run at the same time (%(default)s); where N is more than 1, up to {MORE} more while CPUs are idle")
    parser.add_argument("stages", nargs="*", metavar="STAGE")
    options = parser.parse_args()
    stages = options.stages or list(STAGES)
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        sys.exit(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if options.lanes < 1:
        sys.exit(f"--lanes: expected at least 1, found {options.lanes}")
    if len(stages) == len(STAGES):
        need_room()
    LOGS.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    rows = [(stage, Tests(stage.name)) for stage in run_all(stages, options.lanes)]
    took = time.monotonic() - start
    slowest = sorted((test for _, tests in rows for test in tests.times), reverse=True)[:SLOWEST]
    if slowest:
        print("\nthe slowest tests: seconds, seconds of CPU time")
        for seconds, cpu_s, name in slowest:
            print(f"{seconds:8.1f} {cpu_s:6.1f} {name}")
    for stage, tests in rows:
        if stage.status:
            print(f"\n=== {stage.name} failed:")
            print("\n".join(tests.failures()))
    print(f"\n{'stage':14} {'verdict':8} {'begins':>8} {'seconds':>8} {'CPUs':>5} {'tests':>6} {'skipped':>8} {'second run':>11}")
    for stage, tests in rows:
        counts = f"{tests.passed:6} {tests.skipped:8} {tests.second_runs:11}" if tests.passed + tests.skipped else ""
        print(f"{stage.name:14} {'FAILED' if stage.status else 'passed':8} {stage.started - start:8.1f} {stage.took:8.1f} {stage.cpu_s / stage.took:5.2f} {counts}".rstrip())
    print(f"{'all':14} {'':8} {'':8} {took:8.1f} {sum(stage.cpu_s for stage, _ in rows) / took:5.2f}")
    failed = sum(stage.status != 0 for stage, _ in rows)
    second_runs = sum(tests.second_runs for _, tests in rows)
    note = f", {second_runs} tests passed on a second run" if second_runs else ""
    print(f"{len(rows) - failed} stages passed, {failed} failed; {sum(tests.skipped for _, tests in rows)} tests skipped{note}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
