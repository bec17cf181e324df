"""Rows of the calls bench that have a cell at one end: the example link_calls of crates/remote on this machine, the app calc in the cell.

cell_link        a process calls the cell over a direct ivshmem link, woken by doorbells
cell_tcp         a process calls the cell over TCP, through a tap, the switch and virtio
link_process     the cell calls a process over the link; other tasks of the cell may run while it waits
link_process_alone   the same, with nothing else running in the cell meanwhile

Each row is sequential round trips that add two small numbers. The cells run under emulation (accel = "tcg") so that figures
are comparable between machines; the emulator takes most of each round trip.
"""

import contextlib
import json
import subprocess

from common import FIRST, ROOT, BenchError, Process, fabric_of, until
from lib import Namespace

# The first address is the gateway's.
SPACE, HOST, CELL = "10.78.0", "10.78.0.2", "10.78.0.10"
PATIENCE_S = 120
CALLER = ROOT / "target/release/examples/link_calls"

LINK = """\
name = "rpc-bench"
[network.lan]
[cell.calc]
app = "calc"
args = "net=none {args}"
accel = "tcg"
[link.calls]
between = ["calc"]
seats = 1
protocol = 0x4002
"""
NETWORK = """\
name = "rpc-bench"
[network.lan]
subnet = "{prefix}.0/24"
[cell.calc]
app = "calc"
args = "tcp=7000"
ip = "{cell}"
accel = "tcg"
[tap.host]
ip = "{host}"
"""


def figures(row, said, calls):
    """A row of the table, of what link_calls or the cell has said at its end."""
    if said["replied"] < calls * 0.99:
        raise BenchError(f"{row}: {said['replied']} of {calls} calls were replied: {said}")
    trips, way = said["rtt_us"], said["way_us"]
    return {"row": row, "calls": calls, "p50_us": trips["p50"], "p99_us": trips["p99"], "p999_us": trips["p99.9"], "max_us": trips["max"], "way_us": way["p50"]}


def calling(row, to, calls, netns=None):
    """Calls from this machine, after a tenth as many to warm up."""
    def run(count):
        with Process([CALLER, to, "call", "1 + 1", str(count)], name="link_calls", netns=netns, nice=FIRST) as process:
            if process.wait(PATIENCE_S):
                raise BenchError(f"{row}: {process.tail()}")
            return json.loads(process.text.strip().splitlines()[-1])

    run(max(calls // 10, 1))
    return figures(row, run(calls), calls)


def said_by(fabric):
    """The line of JSON with which the cell's calls end."""
    # Whole lines only: the last one may be on its way.
    lines = [line for line in fabric.console("calc").split("\n")[:-1] if line.startswith('{"app":"calc"')]
    return json.loads(lines[0]) if lines else None


def called(row, folder, wait, calls):
    """Calls from a cell."""
    args = f"role=client count={calls} deadline_us=0 timeout_ms=20000 wait={wait}"
    with fabric_of(folder, LINK.format(args=args)) as fabric, Process([CALLER, socket(fabric), "serve"], name="link_calls", nice=FIRST):
        until(f"the end of {calls} calls of the cell's", lambda: said_by(fabric), PATIENCE_S)
        return figures(row, said_by(fabric), calls)


def socket(fabric):
    return str(fabric.folder / "run" / fabric.name / "calls.link.sock")


def rows(folder, calls):
    """All rows, once each."""
    with fabric_of(folder, LINK.format(args="")) as fabric:
        yield calling("cell_link", socket(fabric), calls)
    with contextlib.ExitStack() as stack:
        space = stack.enter_context(Namespace())
        fabric_text = NETWORK.format(prefix=SPACE, cell=CELL, host=HOST)
        stack.enter_context(fabric_of(folder, fabric_text, netns=space))
        until("the cell's answer", lambda: space.pings(CELL), PATIENCE_S)
        yield calling("cell_tcp", f"tcp:{CELL}:7000", calls, netns=space)
    yield called("link_process", folder, "tasks", calls)
    yield called("link_process_alone", folder, "sleep", calls)


def build():
    """What the rows need; the recipe has built the program and the cells."""
    command = ["cargo", "build", "--release", "--quiet", "-p", "tombolo-remote", "--example", "link_calls"]
    subprocess.run(command, cwd=ROOT, check=True)
