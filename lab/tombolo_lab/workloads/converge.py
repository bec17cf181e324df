"""How machines agree on who has which member, in a simulation with the code of the control plane.

The program is crates/span/examples/converge.rs. Its clock is virtual and its seed is fixed, so all
but `look_us` is the same in each run, whatever else the machine does.
"""

from __future__ import annotations

import json

from tombolo_lab import harness
from tombolo_lab.workloads import Measure, Parameter, Workload, tools


class Converge(Workload):
    """A number of machines, with or without loss."""

    name = "converge"
    doc = (
        "Simulates machines of 100 members each, whose messages take 0.2 to 2 ms: one more "
        "machine, members that move, a dead machine, and a partition that heals, on a virtual "
        "clock."
    )
    parameters = {
        "machines": Parameter("Machines", int, low=2, high=200, default=100),
        "loss": Parameter("Part of the messages that is lost", float, (0.0, 0.01), default=0.0),
    }
    measures = {
        "join_ms": Measure("From the start of one more machine until all know all", "ms", "lower"),
        "move_ms": Measure("From a member's move until all know it, median of 20", "ms", "lower"),
        "move_max_ms": Measure("… the longest of them", "ms", "lower"),
        "dead_s": Measure("Until all have forgotten a dead machine", "s", "lower"),
        "heal_ms": Measure("From the end of a partition until all agree", "ms", "lower"),
        "bytes_per_change": Measure("Bytes of all messages for a move", "B", "lower"),
        "messages_per_change": Measure("Messages for a move", "", "lower"),
        "idle_bytes_per_s_per_machine": Measure("Bytes of a machine at rest", "B/s", "lower"),
        "state_bytes_per_machine": Measure("What a machine knows of the others", "B", "lower"),
        "look_us": Measure("Real time to compare members with those announced", "µs", "lower"),
    }

    def __init__(self) -> None:
        self._rows: dict[int, list[dict]] = {}

    def check(self, cell: dict) -> None:
        harness.example("converge")

    def setup_seconds(self, cell: dict) -> float:
        return 0

    def seconds(self, cell: dict) -> float:
        # All machines have their messages to all others, over the same virtual time.
        return 0.1 + (cell["machines"] / 100) ** 2 * 25

    def measure(self, setup: object, cell: dict) -> dict:
        machines = cell["machines"]
        if machines not in self._rows:
            # The program gives a line without loss and one with it.
            command = [harness.example("converge"), machines]
            self._rows[machines] = rows_of(tools.bounded(command, 3 * self.seconds(cell) + 50))
        for row in self._rows[machines]:
            if (row["machines"], row["loss"]) == (machines, cell["loss"]):
                return {name: row[name] for name in self.measures}
        raise tools.ToolError(f"converge: no line of {machines} machines, loss {cell['loss']:g}")


def rows_of(done: object) -> list[dict]:
    """The lines of a run that has ended; ToolError where it failed."""
    if done.returncode:
        raise tools.ToolError(f"converge ended with {done.returncode}: {done.stderr[-300:]!r}")
    return [json.loads(line) for line in done.stdout.splitlines()]
