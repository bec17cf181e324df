"""Workloads of calls: the time of a call by payload and method, and the deadlines that are missed.

The measuring programs are crates/rpc/examples/rpc_sweep.rs, rpc_bench.rs and misses.rs, the peers'
those of lab/programs/peers. Each runs two processes, pinned to CPUs 0 and 1.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Skip, Workload, tools
from tombolo_lab.workloads.calls import PEERS, alone, peer_program, rows_of

# Method → how it is measured: a way of rpc_sweep, or a row of rpc_bench or of a peer's program.
OURS = {"copy": "copy", "shared": "shared"}
FLOORS = {
    "futex": "futex_blocking",
    "unix": "unix_blocking",
    "word": "spin",
    "polled": "polled",
    "adaptive": "adaptive",
}
SWEEP_BYTES = tuple(1 << log for log in range(31))
LARGEST_COPY = 1 << 20
# The rows of rpc_bench and of the peers have this payload.
ROW_BYTES = 64


class Rpc(Workload):
    """The time of a call."""

    name = "rpc"
    doc = (
        "Round trips of calls between two processes on two CPUs, both asleep while they wait: by "
        "copy and in shared memory by payload, and beside a futex, a Unix socket and peers at 64 B."
    )
    parameters = {
        "method": Parameter(
            "How a call is made: copy and shared are ours; word is a spinning word, the least that "
            "two CPUs need; polled and adaptive are ours with other ways to wait",
            str,
            (*OURS, *FLOORS, *PEERS),
            default="copy",
        ),
        "bytes": Parameter("Payload, a power of two", int, SWEEP_BYTES, default=64, unit="B"),
        "calls": Parameter("Calls that are timed", int, low=10, high=10_000_000, default=2000),
    }
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "p99_us": Measure("Round trip that 1 % exceed", "µs", "lower"),
        "p999_us": Measure("Round trip that 0.1 % exceed", "µs", "lower"),
        "least_us": Measure("Shortest round trip", "µs", "lower"),
        "mean_us": Measure("Mean round trip", "µs", "lower"),
        "cpu_us": Measure("CPU time of both processes per call", "µs", "lower"),
        "calls_s": Measure("Calls per second of one caller", "1/s", "higher"),
    }
    needs = ("two CPUs",)

    def check(self, cell: dict) -> None:
        if len(os.sched_getaffinity(0)) < 2:
            raise Skip("needs two CPUs: caller and service are pinned to one each")
        method = cell["method"]
        if method == "copy" and cell["bytes"] > LARGEST_COPY:
            raise Skip("payloads of more than 1 MiB are handed over in shared memory")
        if method not in OURS and cell["bytes"] != ROW_BYTES:
            raise Skip(f"{method} is measured at {ROW_BYTES} B only")
        if method in PEERS:
            peer_program(method)
        else:
            harness.example("rpc_sweep" if method in OURS else "rpc_bench")

    def seconds(self, cell: dict) -> float:
        return 0.15 + cell["calls"] * 40e-6

    def measure(self, setup: object, cell: dict) -> dict:
        limit = 30 + cell["calls"] * 0.02
        calls = ["--calls", str(cell["calls"])]
        method = cell["method"]
        if method in OURS:
            log = str(int(math.log2(cell["bytes"])))
            words = ["--only", OURS[method], "--smallest", log, "--largest", log]
            rows = rows_of([str(harness.example("rpc_sweep")), *calls, *words], limit)
            return self.of_times(rows, cell)
        if method in PEERS:
            row = f"{method}_blocking"
            command = [*alone(peer_program(method)), "--only", row]
        else:
            command, row = (
                [str(harness.example("rpc_bench")), "--only", FLOORS[method]],
                FLOORS[method],
            )
        found = [line for line in rows_of([*command, *calls], limit) if line["row"] == row]
        if not found:
            raise tools.ToolError(f"{command[-1]} printed no row {row}")
        return self.of_row(found[0])

    @staticmethod
    def of_times(rows: list[dict], cell: dict) -> dict:
        """A point from the time of every call."""
        if len(rows) != 1 or rows[0]["bytes"] != cell["bytes"]:
            raise tools.ToolError(
                f"rpc_sweep: expected one size, {cell['bytes']} B, found {len(rows)}"
            )
        times = sorted(value / 1000 for value in rows[0]["ns"])
        if len(times) != cell["calls"]:
            raise tools.ToolError(f"rpc_sweep: expected {cell['calls']} times, found {len(times)}")

        def at(part: float) -> float:
            return times[max(math.ceil(len(times) * part), 1) - 1]

        mean = math.fsum(times) / len(times)
        return {
            "p50_us": at(0.5),
            "p99_us": at(0.99),
            "p999_us": at(0.999),
            "least_us": times[0],
            "mean_us": mean,
            "cpu_us": None,
            "calls_s": 1e6 / mean,
            "samples": {"p50_us": times},
        }

    @staticmethod
    def of_row(row: dict) -> dict:
        """A point from a program that keeps percentiles only."""
        return {
            "p50_us": row["p50_us"],
            "p99_us": row["p99_us"],
            "p999_us": row["p999_us"],
            "least_us": row.get("min_us"),
            "mean_us": None,
            "cpu_us": row.get("cpu_us"),
            "calls_s": row["rate"],
        }


class Deadlines(Workload):
    """Deadlines missed by load and order."""

    name = "deadlines"
    doc = (
        "Requests with deadlines at a service of one worker, by offered load and order of service: "
        "on a virtual clock, where only the order decides, or in real time."
    )
    parameters = {
        "how": Parameter("The clock", str, ("virtual", "real"), default="virtual", setup=True),
        "load": Parameter(
            "Offered work, in % of what the worker can do", int, low=10, high=200, default=90,
            unit="%", setup=True,
        ),
        "order": Parameter(
            "edf: earliest deadline first; fifo: first come first served; priority: "
            "deadline-monotonic", str, ("edf", "fifo", "priority"), default="edf",
        ),
        "admission": Parameter(
            "Whether requests that cannot be in time are refused at once", bool, default=False
        ),
        "tasks": Parameter(
            "spread: deadlines of 4 to 40 times the work; implicit: each period its deadline; "
            "tight: 1.2 to 3 times the work", str, ("spread", "implicit", "tight"),
            default="spread",
        ),
        "ms": Parameter("Duration in real time", int, low=50, high=60_000, default=500, unit="ms",
                        setup=True),
    }  # fmt: skip
    measures = {
        "missed": Measure("Requests not answered in time, as a part", "", "lower", 0, 1),
        "demanded": Measure("Part that any order misses", "", "", 0, 1),
        "requests": Measure("Requests that arrived", "", ""),
        "tries": Measure("How often a run was made until it was undisturbed", "", "lower"),
        "work_us": Measure("CPU time of the handler, in real time", "µs", ""),
        "charged_us": Measure("What a request is charged, in real time", "µs", ""),
        "served_us": Measure("Mean time of a service, in real time", "µs", "lower"),
    }

    def check(self, cell: dict) -> None:
        harness.example("misses")
        if cell["how"] == "real" and len(os.sched_getaffinity(0)) < 2:
            raise Skip("needs two CPUs: client and worker are pinned to one each")

    def setup_seconds(self, cell: dict) -> float:
        # 18 runs, of each order and set of tasks, with admission and without.
        return 0.2 if cell["how"] == "virtual" else 1 + 18 * (cell["ms"] / 1000 + 0.1)

    def seconds(self, cell: dict) -> float:
        return 0.01

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[list[dict]]:
        """All orders on the same requests. Each set-up has task sets of its own."""
        first = str(self.draw(cell))
        words = ["--seeds", "1", "--first", first, "--loads", str(cell["load"])]
        if cell["how"] == "real":
            words += ["--ms", str(cell["ms"]), "--tries", "3"]
        how = "sim" if cell["how"] == "virtual" else "real"
        limit = 3 * self.setup_seconds(cell) + 60
        yield rows_of([str(harness.example("misses")), how, *words], limit)

    def measure(self, setup: list[dict], cell: dict) -> dict:
        keys = ("tasks", "order", "admission")
        # A disturbed run in real time is printed, and done again: the last one counts.
        rows = [row for row in setup if all(row[key] == cell[key] for key in keys)]
        if not rows:
            raise tools.ToolError(f"misses printed no row of {cell['tasks']}, {cell['order']}")
        row = rows[-1]
        found = {
            "missed": row["missed"] / max(row["requests"], 1),
            "demanded": row["demanded"] / max(row["requests"], 1),
            "requests": row["requests"],
            "tries": len(rows),
            **dict.fromkeys(("work_us", "charged_us", "served_us")),
        }
        if cell["how"] == "real":
            # A run without a service has no time of one.
            for name in ("work", "charged", "served"):
                found[f"{name}_us"] = row[f"{name}_ns"] / 1000 or None
        if row.get("disturbed"):
            found["disturbed"] = "the client was late, or the hypervisor took the CPUs"
        return found
