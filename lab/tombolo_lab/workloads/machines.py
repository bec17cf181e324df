"""Calls between two machines, which are namespaces here with a pair of interfaces between them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Workload, tools

SERVER, CLIENT = "10.79.0.1", "10.79.0.2"
PORTS = {"tls": 7000, "plain": 7001}
# What the exporting machine is called; there both names are known.
NAMES = ("server", "client")
MESSAGE_B = 14
PATIENCE_S = 60


class Machines(Workload):
    """One row of calls between machines."""

    name = "machines"
    doc = (
        "Calls that add two small numbers, one after the other, from a process of one machine to a "
        "service of another, by `tombolo service export` and `import`; beside messages over one "
        "TCP connection that come back, and a call within one machine."
    )
    parameters = {
        "row": Parameter(
            "tls: calls to the other machine, with keys; plain: without; local: within the machine "
            "of the service; tcp: sockperf's ping-pong between the machines",
            str,
            ("tls", "plain", "local", "tcp"),
            default="tls",
        ),
        "calls": Parameter("Calls that are timed", int, low=10, high=1_000_000, default=5000),
    }
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "p99_us": Measure("Round trip that 1 % exceed", "µs", "lower"),
        "p999_us": Measure("Round trip that 0.1 % exceed", "µs", "lower"),
    }
    needs = ("root", "sockperf")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.example("calculator")
        harness.need_program("sockperf")

    def setup_seconds(self, cell: dict) -> float:
        return 1

    def seconds(self, cell: dict) -> float:
        return 1.2 if cell["row"] == "tcp" else 0.3 + cell["calls"] * 2e-4

    @contextlib.contextmanager
    def open(self, cell: dict) -> Iterator[object]:
        """Both machines, the service, its exports and imports, and sockperf's server."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(harness.scratch())
            server, client = (stack.enter_context(harness.Namespace()) for _ in NAMES)
            server.ip(
                "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(client)
            )
            for space, address in ((server, SERVER), (client, CLIENT)):
                space.ip("address", "add", f"{address}/24", "dev", "eth0")
                space.ip("link", "set", "eth0", "up")
            program = str(harness.program())
            keys = str(folder / "keys")
            made = [program, "service", "keys", "--keys", keys, *NAMES]
            subprocess.run(made, check=True, capture_output=True)

            def start(space: object, *words: object) -> None:
                environment = {"TOMBOLO_RUNTIME": str(folder / str(space))}
                process = harness.Process(
                    list(words), netns=space, env=environment, nice=harness.FIRST
                )
                stack.callback(process.kill)

            start(server, harness.example("calculator"), "--name", "calc")
            start(server, "sockperf", "server", "--tcp", "-i", SERVER, "-p", tools.SOCKPERF_PORT)
            for row, port in PORTS.items():
                trust = [["--no-tls"], ["--no-tls"]]
                if row == "tls":
                    trust = [["--keys", keys, "--machine", name] for name in NAMES]
                start(server, program, "service", "export", "calc", "--listen", f"{SERVER}:{port}",
                      *trust[0])  # fmt: skip
                start(client, program, "service", "import", "calc", "--as", row, *trust[1],
                      "--from", f"server={SERVER}:{port}")  # fmt: skip
            setup = (folder, server, client)
            for row in PORTS:
                harness.until(f"a call of {row}", lambda row=row: self.called(setup, row, 10))
            yield setup

    @staticmethod
    def called(setup: tuple, row: str, calls: int) -> dict | None:
        """What `tombolo call` says of so many calls; None when it failed."""
        folder, server, client = setup
        space, service = (server, "calc") if row == "local" else (client, row)
        words = ["call", service, "1 + 1", "--repeat", calls, "--json", "--timeout", "20s"]
        command = tools.inside(space, harness.program(), *words)
        environment = {**os.environ, "TOMBOLO_RUNTIME": str(folder / str(space))}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def measure(self, setup: tuple, cell: dict) -> dict:
        if cell["row"] == "tcp":
            found = tools.sockperf(setup[2], SERVER, "tcp", 1, MESSAGE_B, 0)["rtt_us"]
            return {f"{part}_us": found[part] for part in ("p50", "p99", "p999")}
        said = self.called(setup, cell["row"], cell["calls"])
        if said is None:
            raise tools.ToolError(f"`tombolo call` failed over {cell['row']}")
        if said["outcomes"] != {"served": cell["calls"]}:
            raise tools.ToolError(f"not all calls over {cell['row']} were served: {said}")
        return {f"{part}_us": said["times"][f"{part}_ns"] / 1e3 for part in ("p50", "p99", "p999")}
