"""The bench of the bypass where a load dies under it: the rest is measured, and what could not be is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bypass_paths import PROGRAM
from lib import ROOT, Skip, alone, need_program, need_root, timeout

CELLS = "^veth-veth udp64_1$"


def loads(bench):
    """Process numbers of the bench's loads that are at work, in the order of their starts."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            is_load = stat.read_text().rpartition(")")[2].split()[1] == str(bench)
            command = stat.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_load and command[0].endswith(b"/pathload") and command[1] != b"spin":
            found.append(int(stat.parent.name))
    return sorted(found)


def translates(pid):
    """Whether a process's network namespace has a NAT."""
    done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "nft", "list", "tables"], capture_output=True, text=True)
    return "ip nat" in done.stdout


def bench(strike):
    """Runs a short bench of one load; `strike` is called again and again with its process. Gives its exit code, its last line, what it said, and its cells."""
    need_root()
    for name in ("nft", "ethtool", "clang", "gcc", "nsenter"):
        need_program(name)
    if (os.cpu_count() or 1) < 2:
        raise Skip("the bench needs two CPUs")
    command = [sys.executable, ROOT / "bench/bypass.py", "--cells", CELLS, "--rounds", "4", "--no-perf"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, TOMBOLO_PROGRAM=str(PROGRAM)))
    while True:
        try:
            out, said = process.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            strike(process.pid)
    summary = json.loads(out.strip().splitlines()[-1])
    raw = ROOT / summary["raw"]
    cells = [json.loads(line) for line in (raw / "cells.jsonl").read_text().splitlines()]
    shutil.rmtree(raw)
    return process.returncode, summary, said, {cell["cell"]: cell for cell in cells}


@alone
@timeout(300)
def test_a_load_that_dies_is_started_anew_and_everything_is_measured():
    struck = []

    def strike(bench):
        # The kernel's own set-ups and ours come first, so that all of them are at work as soon as the last one is there.
        at_work = loads(bench)
        if not struck and len(at_work) >= 8:
            os.kill(at_work[0], signal.SIGKILL)
            struck.append(at_work[0])

    code, summary, said, cells = bench(strike)
    assert struck and code == 0 and summary["not_measured"] == {}, said
    assert said.count("set up anew") == 1, said
    assert set(cells) == set(summary["table"]) == {"veth-veth udp64_1", "veth-veth udp64_1 nat"}
    assert all(cells[name]["ratio"] == summary["table"][name]["ratio"] for name in cells)


@alone
@timeout(300)
def test_what_cannot_be_measured_is_named_with_the_reason_and_the_rest_is_measured():
    def strike(bench):
        for pid in loads(bench):
            if translates(pid):
                os.kill(pid, signal.SIGKILL)

    code, summary, said, cells = bench(strike)
    name = "veth-veth udp64_1 nat"
    assert code == 1 and set(summary["not_measured"]) == {name}, (code, summary, said)
    assert "the load ended: exit status -9" in summary["not_measured"][name] == cells[name]["not_measured"], (said, cells)
    assert name in said.splitlines()[-1] and set(summary["table"]) == {"veth-veth udp64_1"} and cells["veth-veth udp64_1"]["ratio"] > 0
