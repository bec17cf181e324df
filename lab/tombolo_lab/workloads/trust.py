"""Hostile peers, random faults and handovers: the programs tests/adversary.py, tests/soak.py and
tests/faults_handover.py. Each prints its table, and figures as its last line."""

from __future__ import annotations

import json
import subprocess
import sys

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Workload, tools

PARTS = ("adversary", "soak", "handover")
# Attachments of which the handover's gaps are measured.
GAPS = ("vhost_user", "ivshmem", "stream")


# Part → the program of tests/ that does it.
SCRIPTS = {"adversary": "adversary.py", "soak": "soak.py", "handover": "faults_handover.py"}


class Trust(Workload):
    """One part, from its beginning to its end."""

    name = "trust"
    doc = (
        "adversary: every attack of tests/adversary.py beside neighbours; soak: checked traffic "
        "with a random fault every 20 s; handover: `tombolo up --replace` again and again under "
        "traffic."
    )
    parameters = {
        "part": Parameter("What is done", str, PARTS, default="adversary", setup=True),
        "attacks": Parameter("Only attacks with this in their names; empty: all", str, default=""),
        "minutes": Parameter(
            "Duration of the soak", float, low=0.1, high=10_000, default=60, unit="min"
        ),
        "handovers": Parameter("Handovers", int, low=1, high=10_000, default=100),
        "seed": Parameter("Seed of the faults", int, low=0, default=20261122),
    }
    measures = {
        "attacks": Measure("Attacks", "", ""),
        "escapes": Measure("Attacks that succeeded", "", "lower"),
        "worst_neighbour_p99_ms": Measure("Worst p99 of a neighbour's pings", "ms", "lower"),
        "soak_minutes": Measure("Duration of the soak", "min", ""),
        "manual": Measure("Faults that needed a person", "", "lower"),
        "recovery_median_s": Measure("Median time until all works again", "s", "lower"),
        "recovery_worst_s": Measure("Longest time until all works again", "s", "lower"),
        "lost": Measure("Checks with wrong data, broken transfers and leaks", "", "lower"),
        **{f"gap_{kind}_ms": Measure(f"Largest gap of {kind}", "ms", "lower") for kind in GAPS},
    }
    needs = ("root", "QEMU", "the stock Linux guest")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.need_program("qemu-system-x86_64", "qemu-system-x86")
        images = harness.need_cell("echo").parent
        harness.measured(*(images / app for app in ("httpd", "calc")))
        harness.measured(*(harness.tree() / "tests" / script for script in SCRIPTS.values()))
        if cell["part"] == "soak":
            harness.need_guest()

    def setup_seconds(self, cell: dict) -> float:
        return 0.1

    def seconds(self, cell: dict) -> float:
        whole = {"adversary": 150, "soak": 60 + 60 * cell["minutes"]}
        if cell["part"] == "adversary" and cell["attacks"]:
            return 20
        return whole.get(cell["part"], 30 + 3 * cell["handovers"])

    def measure(self, setup: object, cell: dict) -> dict:
        part = cell["part"]
        found: dict = dict.fromkeys(self.measures)
        if part == "adversary":
            said = last_line(SCRIPTS["adversary"], *([cell["attacks"]] if cell["attacks"] else []))
            keys = ("attacks", "escapes", "worst_neighbour_p99_ms")
            return found | {key: said[key] for key in keys}
        if part == "soak":
            said = last_line(SCRIPTS["soak"], cell["minutes"], "--seed", cell["seed"])
            keys = ("soak_minutes", "manual", "recovery_median_s", "recovery_worst_s")
            lost = said["corrupt"] + len(said["leaks"])
            return found | {key: said[key] for key in keys} | {"lost": lost}
        said = last_line(SCRIPTS["handover"], cell["handovers"])
        gaps = {f"gap_{kind}_ms": value for kind, value in said["upgrade_gap_ms"].items()}
        return found | gaps | {"lost": said["lost"]}


def last_line(script: str, *words: object) -> dict:
    """Runs a program of tests/, passes its output on to standard error, and gives the JSON object
    of its last line. ToolError when there is none: a part that cannot run is no zero."""
    command = [sys.executable, str(harness.tree() / "tests" / script), *map(str, words)]
    line = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
    try:
        return json.loads(line)
    except ValueError:
        named = " ".join([script, *map(str, words)])
        raise tools.ToolError(
            f"`{named}` ended with {process.returncode} and without its JSON line: {line[-300:]!r}"
        ) from None
