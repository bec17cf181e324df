"""The bench of the bypass where a load dies under it: the rest is measured, and what could not be is named."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from bypass_paths import PROGRAM
from lib import ROOT, Skip, alone, need_program, need_root, timeout

# A slice is long, so that a load that was struck when it was first seen has not had its slice.
CELL = ["ends=veth-veth", "load=udp64_1", "path=ip,bypass,ip_again,nat,bypass_nat,nat_again", "seconds=1.5"]


def loads(bench):
    """Process numbers of the bench's loads that are at work."""
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
    """Runs a short bench of one load; `strike` is called again and again with its process. Gives its exit code, its last line, and what it said."""
    need_root()
    for name in ("nft", "ethtool", "clang", "gcc", "nsenter"):
        need_program(name)
    if (os.cpu_count() or 1) < 2:
        raise Skip("the bench needs two CPUs")
    folder = Path(tempfile.mkdtemp())
    # Debian's libraries are for Debian's interpreter.
    command = ["/usr/bin/python3", "-m", "tombolo_lab.benches", "bypass", "--only", "bypass-matrix", "--repeats", "1", "--into", folder / "run"]
    command += [word for setting in CELL for word in ("--set", setting)]
    env = dict(os.environ, TOMBOLO_PROGRAM=str(PROGRAM), PYTHONPATH=str(ROOT / "lab"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    while True:
        try:
            out, said = process.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            strike(process.pid)
    shutil.rmtree(folder)
    assert out.strip(), said
    return process.returncode, json.loads(out.strip().splitlines()[-1]), out + said


@alone
@timeout(300)
def test_a_load_that_dies_is_started_again_and_everything_is_measured():
    struck = []

    def strike(bench):
        at_work = loads(bench)
        if not struck and at_work:
            os.kill(at_work[0], signal.SIGKILL)
            struck.append(at_work[0])

    code, summary, said = bench(strike)
    assert struck and code == 0 and summary["not_measured"] == {}, said
    assert said.count("tried once more") == 1, said
    assert set(summary["table"]) == {"veth-veth udp64_1", "veth-veth udp64_1 nat"}, summary
    assert all(cell["ratio"] > 0 for cell in summary["table"].values()), summary


@alone
@timeout(300)
def test_what_cannot_be_measured_is_named_with_the_reason_and_the_rest_is_measured():
    def strike(bench):
        for pid in loads(bench):
            if translates(pid):
                os.kill(pid, signal.SIGKILL)

    code, summary, said = bench(strike)
    name = "veth-veth udp64_1 nat"
    assert code == 1 and set(summary["not_measured"]) == {name}, (code, summary, said)
    assert "the load ended: exit status -9" in summary["not_measured"][name], summary
    assert "not measured: bypass-matrix" in said and set(summary["table"]) == {"veth-veth udp64_1"}, said
    assert summary["table"]["veth-veth udp64_1"]["ratio"] > 0, summary
