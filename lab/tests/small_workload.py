"""A workload that measures within this process in milliseconds, for tests of the runner.

Its values depend on the cell alone. A test changes its behaviour by `hooks`: functions by the name
of the moment ("check", "open", "measure", "close") that get the cell and may raise, wait or return
other values. `events` lists what was called.
"""

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from tombolo_lab import sandbox
from tombolo_lab.workloads import Measure, Parameter, Workload

TARGET = f"{__name__}:Small"

EXPERIMENT = """\
title = "Small"
about = "Takes milliseconds."
workload = "small"
primary = "value"
[factors]
kind = ["red", "green"]
size = [1, 2, 3]
[repeat]
times = 4
[disturbed]
others_cpus = 1000
stolen_cpus = 1000
"""

hooks = {}
events = []


def reset():
    hooks.clear()
    events.clear()


def happens(moment, cell):
    events.append((moment, cell["kind"], cell["size"]))
    return hooks.get(moment, lambda cell: None)(cell)


def value_of(cell):
    """The value of a cell without hooks."""
    return float(cell["size"] * (10 if cell["kind"] == "red" else 7))


class Small(Workload):
    name = "small"
    doc = "Computes a value from the cell."
    parameters = {
        "kind": Parameter("Colour", str, choices=("red", "green", "blue"), setup=True),
        "size": Parameter("Size", int, low=1, high=100, default=1),
        "wait_s": Parameter("Wait in a point", float, default=0.0, unit="s"),
        "trace": Parameter("File that is told what was made", str, default=""),
    }
    measures = {
        "value": Measure("A number", "things", "higher", high=1000),
        "share": Measure("A part", "", "lower", high=1),
    }

    def check(self, cell):
        happens("check", cell)

    @contextmanager
    def open(self, cell):
        made = None
        if cell["trace"]:
            made = self.make(Path(cell["trace"]))
        happens("open", cell)
        try:
            yield "set-up"
        finally:
            happens("close", cell)
            if made:
                made.kill()
                made.wait()

    @staticmethod
    def make(trace):
        """A process that would outlive us, and a file; the trace tells of both."""
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (sandbox.current.folder / "file").write_text("")
        with trace.open("a") as file:
            file.write(f"{process.pid} {sandbox.current.folder} {os.getpid()}\n")
        return process

    def measure(self, setup, cell):
        assert setup == "set-up"
        time.sleep(cell["wait_s"])
        changed = happens("measure", cell)
        return {"value": value_of(cell), "share": 0.5} if changed is None else changed

    def seconds(self, cell):
        return 0.01

    def setup_seconds(self, cell):
        return 0.01
