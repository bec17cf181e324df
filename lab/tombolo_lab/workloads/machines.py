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
# Where each tombolo-span listens.
SPAN_PORT = 7447
# The name of the service at the client, where it is not the row's: tombolo-span gives it no other.
IMPORTED = {"zenoh": "calc"}
MESSAGE_B = 14
PATIENCE_S = 60
# Exit code of `tombolo call` when some of the calls were served.
PARTLY = 3


class Machines(Workload):
    """One row of calls between machines."""

    name = "machines"
    doc = (
        "Calls that add two small numbers, one after the other, from a process of one machine to a "
        "service of another, by `tombolo service export` and `import`, or by `tombolo-span` over "
        "zenoh; beside messages over one TCP connection that come back, and a call within one "
        "machine."
    )
    parameters = {
        "row": Parameter(
            "tls: calls to the other machine, with keys; plain: without; zenoh: with keys, over "
            "zenoh; local: within the machine of the service; tcp: sockperf's ping-pong between "
            "the machines",
            str,
            ("tls", "plain", "zenoh", "local", "tcp"),
            default="tls",
        ),
        "calls": Parameter("Calls that are timed", int, low=10, high=1_000_000, default=5000),
    }
    measures = {
        "p50_us": Measure("Median round trip", "µs", "lower"),
        "p99_us": Measure("Round trip that 1 % exceed", "µs", "lower"),
        "p999_us": Measure("Round trip that 0.1 % exceed", "µs", "lower"),
        "lost_answers": Measure(
            "Calls that the service did not answer, and answers beyond one for each call", "",
            "lower",
        ),
    }  # fmt: skip
    needs = ("root", "sockperf")

    def check(self, cell: dict) -> None:
        harness.need_root()
        harness.program()
        harness.example("calculator")
        if cell["row"] == "zenoh":
            harness.span_program()
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
            rows = tuple(PORTS)
            # The cells that share the set-up do not include the row if the program is not there.
            with contextlib.suppress(harness.skips()):
                span = harness.span_program()
                rows += ("zenoh",)
                own = ("--export", "calc=client"), ("--import", "calc=server")
                ends = zip((server, client), NAMES, (SERVER, CLIENT), own, strict=True)
                for space, name, address, words in ends:
                    other, there = ("client", CLIENT) if name == "server" else ("server", SERVER)
                    # It waits for a fabric of that name, and passes calls on meanwhile.
                    start(space, span, "--fabric", "none", "--machine", name,
                          "--listen", f"{address}:{SPAN_PORT}", "--keys", keys,
                          "--peer", f"{other}={there}:{SPAN_PORT}", *words)  # fmt: skip
            setup = (folder, server, client)
            for row in rows:
                harness.until(f"a call of {row}", lambda row=row: self.called(setup, row, 10))
            yield setup

    @staticmethod
    def said(setup: tuple, space: object, *words: object) -> dict | None:
        """What the program says on a machine in JSON; None when it failed."""
        command = tools.inside(space, harness.program(), *words, "--json")
        environment = {**os.environ, "TOMBOLO_RUNTIME": str(setup[0] / str(space))}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S
        )
        return json.loads(done.stdout) if done.returncode in (0, PARTLY) and done.stdout else None

    def called(self, setup: tuple, row: str, calls: int) -> dict | None:
        """What `tombolo call` says of so many calls; None when none was served."""
        _, server, client = setup
        space, service = (server, "calc") if row == "local" else (client, IMPORTED.get(row, row))
        words = ["call", service, "1 + 1", "--repeat", calls, "--timeout", "20s"]
        return self.said(setup, space, *words)

    def answers(self, setup: tuple) -> int:
        """How many requests the service has answered so far, in any way."""
        found = self.said(setup, setup[1], "service", "stats", "calc")
        if found is None:
            raise tools.ToolError("`tombolo service stats` failed")
        # `overran` are some of those served.
        return sum(count for end, count in found["answers"].items() if end != "overran")

    def measure(self, setup: tuple, cell: dict) -> dict:
        if cell["row"] == "tcp":
            found = tools.sockperf(setup[2], SERVER, "tcp", 1, MESSAGE_B, 0)["rtt_us"]
            return {
                **{f"{part}_us": found[part] for part in ("p50", "p99", "p999")},
                "lost_answers": None,
            }
        before = self.answers(setup)
        said = self.called(setup, cell["row"], cell["calls"])
        if said is None:
            raise tools.ToolError(f"`tombolo call` failed over {cell['row']}")
        return {
            **{f"{p}_us": said["times"][f"{p}_ns"] / 1e3 for p in ("p50", "p99", "p999")},
            "lost_answers": lost(cell["calls"], said["outcomes"], self.answers(setup) - before),
        }


def lost(calls: int, outcomes: dict[str, int], answered: int) -> int:
    """Calls without the service's answer, and answers of the service beyond one for each call.

    `outcomes` is how the calls ended for their caller, `answered` how often the service answered.
    Nothing here cancels a call, refuses one or sets a deadline: each is to be served.
    """
    return calls - outcomes.get("served", 0) + max(0, answered - calls)
