#!/usr/bin/env python3
"""Runs the stages of `make test` one after the other and prints a table of their times.

usage: tests/stages.py [STAGE...]

A stage is a recipe of ./x. All run, also after a failure, so that one run shows all there is to mend; output goes to
the terminal and to build/test/STAGE.log. The last line counts stages.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build/test"
# In this order the cheap verdicts come first. Minutes bound a stage that hangs; none comes near its bound, also not on a machine that is three
# times slower.
STAGES = {
    "fmt": 5,
    "paths": 3,
    "unsafe-list": 3,
    "licences": 10,
    "lint": 30,
    "doc": 30,
    "unit": 60,
    "loom": 45,
    "build": 45,
    "bindings": 30,
    "cells": 30,
    "cell-unit": 20,
    "cell-boot": 30,
    "xen": 30,
    "bypass": 30,
    "guests": 60,
    "faults": 60,
}


def run(stage, minutes):
    """True when the stage passed. Its whole process group is ended when it overruns."""
    log = LOGS / f"{stage}.log"
    print(f"\n=== {stage}", flush=True)
    with subprocess.Popen(["bash", "x", stage], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          start_new_session=True) as process, log.open("wb") as file:
        def overrun(*_):
            print(f"{stage}: still running after {minutes} minutes: stopped", flush=True)
            os.killpg(process.pid, signal.SIGKILL)

        signal.signal(signal.SIGALRM, overrun)
        signal.alarm(minutes * 60)
        try:
            for line in process.stdout:
                file.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        code = process.wait()
        signal.alarm(0)
    return code == 0


def main():
    stages = sys.argv[1:] or list(STAGES)
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        sys.exit(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    rows = []
    for stage in stages:
        start = time.monotonic()
        passed = run(stage, STAGES[stage])
        rows.append((stage, passed, time.monotonic() - start))
    print(f"\n{'stage':14} {'verdict':8} {'seconds':>8}")
    for stage, passed, seconds in rows:
        print(f"{stage:14} {'passed' if passed else 'FAILED':8} {seconds:8.1f}")
    print(f"{'all':14} {'':8} {sum(row[2] for row in rows):8.1f}")
    failed = sum(not row[1] for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
