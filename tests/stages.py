#!/usr/bin/env python3
"""Runs the stages of `make test` in turn and prints a table of their times.

usage: tests/stages.py [STAGE...]

A stage is a recipe of ./x. All stages run, even after a failure, so that one run shows everything that needs fixing. Output
goes to the terminal and to build/test/STAGE.log. At the end come the slowest tests, the output of repeated failures, and a
table: the tests of each stage that passed, were skipped, or passed only on a second run (tests/run.py), and how many CPUs of
the machine were busy meanwhile, with this and all other work. The last line counts stages and skipped tests. A stopped stage
ends all that it has started.
"""

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

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/test"
# How long a stage that is stopped may take to end what it has started.
GRACE_S = 30
# How long the output is read of what a stage has left running.
LEFT_S = 5
# How many of the slowest tests are listed.
SLOWEST = 12
# Lines shown again of a stage that failed otherwise than by a test of tests/run.py.
LAST_LINES = 40
# All stages on a fresh clone write 9 GB below it, and up to 1 GB of scratch at a time.
NEEDED_GB = {ROOT: 10, Path(tempfile.gettempdir()): 2}
TEST = re.compile(r"^(ok  |FAIL|skip) (\S+)  ([\d.]+) s")
COUNTS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped(?:, (\d+) passed on a second run)?$")
# Lines of Python's unittest.
RAN = re.compile(r"^Ran (\d+) tests? in ")
RESULT = re.compile(r"^(?:OK|FAILED) \((.*)\)$")
CARGO_COUNTS = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
# In this order the cheap verdicts come first. Minutes bound a stage that hangs; none comes near its bound, also not on a machine that is three
# times slower.
STAGES = {
    "fmt": 5,
    "paths": 3,
    "unsafe-list": 3,
    "licences": 10,
    "runner": 10,
    "lint": 30,
    "doc": 30,
    "unit": 60,
    "loom": 45,
    "build": 45,
    "bindings": 30,
    "lab-unit": 20,
    "cells": 30,
    # Packages have it too.
    "span-program": 30,
    "package-test": 30,
    "cell-unit": 20,
    "cell-boot": 30,
    "xen": 30,
    "bypass": 30,
    "guests": 60,
    "lab-quick": 30,
    "daytwo": 15,
    "cni": 15,
    "span": 30,
    "faults": 60,
}


def said(process):
    """What a stage prints, until its end. What it has left running may have its output open for longer: that is not waited for."""
    ended = None
    while True:
        if select.select([process.stdout], [], [], 1)[0]:
            text = os.read(process.stdout.fileno(), 1 << 16)
            if not text:
                return
            yield text
        elif process.poll() is not None:
            ended = ended or time.monotonic()
            if time.monotonic() - ended > LEFT_S:
                return


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


def run(stage, minutes):
    """True when the stage passed. One that overruns, or that is interrupted, is asked to end, and killed after `GRACE_S`."""
    log = LOGS / f"{stage}.log"
    print(f"\n=== {stage}", flush=True)
    with subprocess.Popen(["bash", "x", stage], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          start_new_session=True) as process, log.open("wb") as file:
        def stop(why):
            text = f"{stage}: {why}: stopped\n"
            file.write(text.encode())
            print(text, end="", flush=True)
            # tests/run.py ends its test and what that has started.
            os.killpg(process.pid, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
            signal.alarm(GRACE_S)

        signal.signal(signal.SIGALRM, lambda *_: stop(f"still running after {minutes} minutes"))
        signal.alarm(minutes * 60)
        interrupted = None
        while True:
            try:
                for text in said(process):
                    file.write(text)
                    sys.stdout.buffer.write(text)
                    sys.stdout.flush()
                break
            except KeyboardInterrupt as interrupt:
                interrupted = interrupt
                stop("interrupted")
        for pid, name in holders(process.stdout):
            text = f"{stage}: left running: {name}, process {pid}: killed\n"
            file.write(text.encode())
            print(text, end="", flush=True)
            os.kill(pid, signal.SIGKILL)
        code = process.wait()
        signal.alarm(0)
        if interrupted:
            raise interrupted
    return code == 0


def busy_seconds():
    """CPU time that the machine has spent on any work since it was started, in seconds."""
    # proc(5): user, nice, system, idle, iowait, irq, softirq.
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Tests:
    """The tests of a stage, by its log."""

    def __init__(self, stage):
        self.lines = (LOGS / f"{stage}.log").read_text(errors="replace").splitlines()
        self.passed = self.skipped = self.second_runs = 0
        # Seconds and name of each that tells them.
        self.times = []
        for line in self.lines:
            if test := TEST.match(line):
                self.times.append((float(test[3]), test[2]))
            counts = COUNTS.match(line) or CARGO_COUNTS.match(line)
            if counts:
                self.passed += int(counts[1])
                self.skipped += int(counts[3])
                self.second_runs += int(counts[4] or 0) if counts.re is COUNTS else 0
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
    stages = sys.argv[1:] or list(STAGES)
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        sys.exit(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if len(stages) == len(STAGES):
        need_room()
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = []
    for stage in stages:
        start, busy = time.monotonic(), busy_seconds()
        passed = run(stage, STAGES[stage])
        took = time.monotonic() - start
        rows.append((stage, passed, took, (busy_seconds() - busy) / took, Tests(stage)))
    slowest = sorted((test for *_, tests in rows for test in tests.times), reverse=True)[:SLOWEST]
    if slowest:
        print("\nthe slowest tests, in seconds")
        for seconds, name in slowest:
            print(f"{seconds:8.1f} {name}")
    for stage, passed, *_, tests in rows:
        if not passed:
            print(f"\n=== {stage} failed:")
            print("\n".join(tests.failures()))
    print(f"\n{'stage':14} {'verdict':8} {'seconds':>8} {'busy':>5} {'tests':>6} {'skipped':>8} {'second run':>11}")
    for stage, passed, seconds, busy, tests in rows:
        counts = f"{tests.passed:6} {tests.skipped:8} {tests.second_runs:11}" if tests.passed + tests.skipped else ""
        print(f"{stage:14} {'passed' if passed else 'FAILED':8} {seconds:8.1f} {busy:5.2f} {counts}".rstrip())
    print(f"{'all':14} {'':8} {sum(row[2] for row in rows):8.1f}")
    failed = sum(not row[1] for row in rows)
    second_runs = sum(row[-1].second_runs for row in rows)
    note = f", {second_runs} tests passed on a second run" if second_runs else ""
    print(f"{len(rows) - failed} stages passed, {failed} failed; {sum(row[-1].skipped for row in rows)} tests skipped{note}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
