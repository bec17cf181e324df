"""Calls between processes, and between a process and a cell, beside what they are compared with.

Each row of `Calls` is printed by one of the measuring programs: crates/rpc/examples/rpc_bench.rs
(ours, and what the kernel needs at least) or that of a peer (lab/programs/peers). `CellCalls` has a
cell at one end; the other is crates/remote/examples/link_calls.rs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools

OURS = (
    "futex_blocking", "unix_blocking", "blocking", "futex_one_cpu", "unix_one_cpu",
    "blocking_one_cpu", "adaptive", "adaptive_one_cpu", "spin", "polled", "copy_64k",
    "copy_64k_adaptive", "shared_1gib", "outstanding_16", "futex_16", "outstanding_16_asleep",
    "loaded", "loaded_asleep", "loaded_normal",
)  # fmt: skip
# One run of the program prints all of these.
ORDERS = (
    "order_10k", "order_10k_without_admission", "order_10k_without_shares",
    "order_10k_without_both", "order_10k_binary_heap", "order_10k_btree_map",
)  # fmt: skip
PEER_ROWS = ("blocking", "one_cpu", "64k", "16", "loaded")
# Variant of a peer → its program. What polls has no row on one CPU, nor beside busy loops.
VARIANTS = {
    "iceoryx2": "iceoryx2", "iceoryx2_waitset": "iceoryx2", "iceoryx2_polled": "iceoryx2",
    "capnp": "capnp", "tonic": "tonic", "zenoh": "zenoh",
}  # fmt: skip
PEERS = tuple(dict.fromkeys(VARIANTS.values()))
POLLED = ("blocking", "64k", "16")
PROGRAM_OF = {
    f"{variant}_{row}": program
    for variant, program in VARIANTS.items()
    for row in (POLLED if variant.endswith("_polled") else PEER_ROWS)
}
ROWS = (*OURS, *ORDERS, *PROGRAM_OF)
# What takes milliseconds for a call: one in how many is made, and how many seconds each takes.
SLOW = {"zenoh_loaded": (20, 8e-3)}


def rows_of(command: list[str], seconds: float) -> list[dict]:
    """The JSON objects that a program prints, one a line; ToolError when it fails or takes longer
    than `seconds`. As root it comes before the machine's other work."""
    first = ["nice", "-n", str(harness.FIRST)] if os.geteuid() == 0 else []
    try:
        done = subprocess.run([*first, *command], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise tools.ToolError(f"`{' '.join(command)}` was not done after {seconds:g} s") from None
    if done.returncode:
        last = done.stderr.strip()[-300:]
        raise tools.ToolError(f"`{' '.join(command)}` ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def peer_program(name: str) -> Path:
    """The program of a peer; Skip when it is not built."""
    found = harness.tree() / f"target/peers/release/peer-{name}"
    if not found.is_file():
        raise Skip(f"the peer {name} is not built: `./x bench rpc` builds it")
    harness.measured(found)
    return found


def alone(program: Path) -> list[str]:
    """The command that runs a peer where what it leaves behind (iceoryx2 in /tmp and /dev/shm,
    zenoh in /dev/shm) goes with it."""
    if os.geteuid() != 0:
        return [str(program)]
    mounts = ["mount -t tmpfs peer /dev/shm"]
    if not program.is_relative_to("/tmp"):
        mounts.append("mount -t tmpfs peer /tmp && export TMPDIR=/tmp")
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(program)]


class Calls(Workload):
    """One row of calls."""

    name = "calls"
    doc = (
        "Calls between two processes that are pinned to CPUs, in a closed loop: ours in several "
        "ways to wait, and beside a futex, a Unix socket, a spinning word, and peers. A request "
        "comes back as it is."
    )
    parameters = {
        "row": Parameter(
            "What is called, and how: blocking: both ends asleep; one_cpu: both on one CPU; "
            "adaptive: as the library waits by default; polled; 64k: 64 KiB by copy; 16: so many "
            "outstanding; loaded: a busy loop on each CPU and a real-time class; order: one "
            "request in and out with 10,000 waiting",
            str,
            ROWS,
            default="blocking",
        ),
        "calls": Parameter(
            "Calls of a row with two sleeping ends; others have a multiple of it, and zenoh_loaded "
            "a twentieth", int, low=10, high=10_000_000, default=20_000,
        ),
    }  # fmt: skip
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "p99_us": Measure("Round trip that 1 % exceed", "µs", "lower"),
        "p999_us": Measure("Round trip that 0.1 % exceed", "µs", "lower"),
        "cpu_us": Measure("CPU time of both processes per call", "µs", "lower"),
        "calls_s": Measure("Calls per second", "1/s", "higher"),
    }
    needs = ("two CPUs", "peers that ./x bench rpc builds")

    def check(self, cell: dict) -> None:
        if len(os.sched_getaffinity(0)) < 2:
            raise Skip("needs two CPUs: caller and service are pinned to one each")
        if cell["row"] in PROGRAM_OF:
            peer_program(PROGRAM_OF[cell["row"]])
        else:
            harness.example("rpc_bench")

    def seconds(self, cell: dict) -> float:
        share, each = SLOW.get(cell["row"], (1, 80e-6))
        return 0.2 + cell["calls"] / share * each

    def measure(self, setup: object, cell: dict) -> dict:
        name = cell["row"]
        calls = max(10, cell["calls"] // SLOW.get(name, (1,))[0])
        if name in PROGRAM_OF:
            command, only = alone(peer_program(PROGRAM_OF[name])), name
        else:
            command, only = [str(harness.example("rpc_bench"))], name
        if name in ORDERS:
            only = "order"
        command += ["--calls", str(calls), "--only", only]
        # Ten times what the slowest takes.
        found = {row["row"]: row for row in rows_of(command, 60 + calls * 0.02)}
        if f"{name}_without_rights" in found:
            raise Skip("needs the right to a real-time class (SCHED_FIFO)")
        if name not in found:
            raise tools.ToolError(f"`{' '.join(command)}` printed no row {name}")
        row = found[name]
        keys = ("p50_us", "p99_us", "p999_us", "cpu_us")
        return {**{key: row.get(key) for key in keys}, "calls_s": row.get("rate")}


# ---- calls with a cell at one end ----------------------------------------------------------------
# The first address of the network is the gateway's.
SPACE, HOST, CELL = "10.78.0", "10.78.0.2", "10.78.0.10"
PATIENCE_S = 120
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
NETWORK = f"""\
name = "rpc-bench"
[network.lan]
subnet = "{SPACE}.0/24"
[cell.calc]
app = "calc"
args = "tcp=7000"
ip = "{CELL}"
accel = "tcg"
[tap.host]
ip = "{HOST}"
"""
WAITS = {"link_process": "tasks", "link_process_alone": "sleep"}


def link_socket(fabric: object) -> str:
    return str(fabric.folder / "run" / fabric.name / "calls.link.sock")


class CellCalls(Workload):
    """Calls with a cell at one end."""

    name = "cell-calls"
    doc = (
        "Calls that add two small numbers, one after the other, between a process and a cell under "
        "emulation: over a direct ivshmem link, and over TCP through a tap, the switch and virtio."
    )
    parameters = {
        "row": Parameter(
            "cell_link: a process calls the cell over the link; cell_tcp: over TCP; link_process: "
            "the cell calls a process over the link, and its other tasks may run meanwhile; "
            "link_process_alone: the same with nothing else running in the cell",
            str,
            ("cell_link", "cell_tcp", *WAITS),
            default="cell_link",
            setup=True,
        ),
        "calls": Parameter("Calls that are timed", int, low=10, high=1_000_000, default=2000),
    }
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "p99_us": Measure("Round trip that 1 % exceed", "µs", "lower"),
        "p999_us": Measure("Round trip that 0.1 % exceed", "µs", "lower"),
        "max_us": Measure("Longest round trip", "µs", "lower"),
        "way_us": Measure("Median round trip without the provider's share", "µs", "lower"),
    }
    needs = ("root", "QEMU")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.need_program("qemu-system-x86_64", "qemu-system-x86")
        harness.need_cell("calc")
        harness.example("link_calls")

    def setup_seconds(self, cell: dict) -> float:
        return 1.5

    def seconds(self, cell: dict) -> float:
        return 0.5 + cell["calls"] * 6e-4

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[object]:
        """A fabric whose cell serves; where the cell calls, its fabric is started by the point."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            if cell["row"] in WAITS:
                yield folder
                return
            space, text = None, LINK.format(args="")
            if cell["row"] == "cell_tcp":
                space, text = stack.enter_context(harness.Namespace()), NETWORK
            fabric = stack.enter_context(harness.fabric_of(folder, text, netns=space))
            to = link_socket(fabric)
            if space:
                harness.until("the cell's answer", lambda: space.pings(CELL), PATIENCE_S)
                to = f"tcp:{CELL}:7000"
            yield to, space

    def measure(self, setup: object, cell: dict) -> dict:
        count = cell["calls"]
        said = self.called(setup, cell) if cell["row"] in WAITS else self.calling(setup, count)
        if said["replied"] < count * 0.99:
            raise tools.ToolError(f"{said['replied']} of {count} calls were replied: {said}")
        trips = said["rtt_us"]
        return {
            "p50_us": trips["p50"],
            "p99_us": trips["p99"],
            "p999_us": trips["p99.9"],
            "max_us": trips["max"],
            "way_us": said["way_us"]["p50"],
        }

    @staticmethod
    def calling(setup: tuple, count: int) -> dict:
        """Calls from this machine, after a tenth as many to warm up."""
        to, space = setup
        program = str(harness.example("link_calls"))
        for calls in (max(count // 10, 1), count):
            command = [program, to, "call", "1 + 1", str(calls)]
            with harness.Process(
                command, name="link_calls", netns=space, nice=harness.FIRST
            ) as process:
                if process.wait(PATIENCE_S):
                    raise tools.ToolError(f"link_calls: {process.tail()}")
                said = json.loads(process.text.strip().splitlines()[-1])
        return said

    @staticmethod
    def called(folder: Path, cell: dict) -> dict:
        """Calls from a cell: the line of JSON with which they end."""
        wait = WAITS[cell["row"]]
        args = f"role=client count={cell['calls']} deadline_us=0 timeout_ms=20000 wait={wait}"
        with harness.fabric_of(folder, LINK.format(args=args)) as fabric:
            command = [str(harness.example("link_calls")), link_socket(fabric), "serve"]
            with harness.Process(command, name="link_calls", nice=harness.FIRST):

                def said() -> dict | None:
                    # Whole lines only: the last one may be on its way.
                    lines = fabric.console("calc").split("\n")[:-1]
                    found = [line for line in lines if line.startswith('{"app":"calc"')]
                    return json.loads(found[0]) if found else None

                return harness.until("the end of the cell's calls", said, PATIENCE_S)
