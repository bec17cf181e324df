"""Workloads: what an experiment measures.

A workload declares the parameters it understands and the measures it yields, opens a set-up, and
measures one point at a time. The runner owns order, repetition, disturbance and time limits; a
workload holds none of that.

    class Echo(Workload):
        name = "echo"
        doc = "Sends a datagram to itself over loopback."
        parameters = {"size": Parameter("Payload", int, low=1, high=9000, default=64, unit="B")}
        measures = {"rtt_us": Measure("Time until it is back", "µs", "lower")}

        @contextmanager
        def open(self, cell):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as setup:
                yield setup

        def measure(self, setup, cell):
            return {"rtt_us": ...}

The contract:

- `check` is called once for each cell before anything runs, and by `tombolo lab show`. It takes
  milliseconds, changes nothing, and raises `Skip` with the reason when the cell cannot run here. It
  names every file that is measured or measures, by the functions of `harness` that find one or by
  `harness.measured`: a run is resumed with the same files only.
- `open` is called for each group of cells in a block that agree in all parameters with
  `setup=True`. Everything it makes ends with its `with`, and ends also when this process is killed:
  use `tombolo_lab.harness` for processes, namespaces, folders and kernel settings.
  A measure that it finds itself is named in `opened`: the runner watches the opening, keeps the
  value with one cell of the set-up, and opens it again when other work disturbed it.
- `measure` yields one point. It raises on failure; it never returns a zero for what did not work.
  The runner checks every value against the range of its Measure.
- `open` and `measure` run in the main thread and may be interrupted by an exception at any moment:
  by Ctrl-C, or by `PointTimeout` when a point takes more than 3 × `seconds` + 60 s.
- Traffic stays on this machine. Every load that is started has an end of its own.
- The random order comes from the runner. A workload that needs randomness seeds it by `draw`, never
  by what it counts itself: a run that is resumed, or a set-up that is tried again, draws the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from tombolo_lab import LabError

# Name → "module:Class". A module is imported when an experiment names it, not before.
REGISTRY: dict[str, str] = {
    "budget": "tombolo_lab.workloads.network:Budget",
    "bypass": "tombolo_lab.workloads.bypass:Bypass",
    "calls": "tombolo_lab.workloads.calls:Calls",
    "cell-calls": "tombolo_lab.workloads.calls:CellCalls",
    "converge": "tombolo_lab.workloads.converge:Converge",
    "deadlines": "tombolo_lab.workloads.rpc:Deadlines",
    "direct": "tombolo_lab.workloads.links:Direct",
    "forwarder": "tombolo_lab.workloads.forwarder:Forwarder",
    "guests": "tombolo_lab.workloads.guests:Guests",
    "httpd": "tombolo_lab.workloads.httpd:Httpd",
    "links": "tombolo_lab.workloads.links:Links",
    "machines": "tombolo_lab.workloads.machines:Machines",
    "mesh": "tombolo_lab.workloads.links:MeshOfCells",
    "network": "tombolo_lab.workloads.network:Network",
    "nics": "tombolo_lab.workloads.cards:Nics",
    "restart": "tombolo_lab.workloads.links:Restart",
    "rpc": "tombolo_lab.workloads.rpc:Rpc",
    "scale": "tombolo_lab.workloads.scale:Scale",
    "stress": "tombolo_lab.workloads.network:Stress",
    "trust": "tombolo_lab.workloads.trust:Trust",
    "tuning": "tombolo_lab.workloads.network:Tuning",
    "tunnel": "tombolo_lab.workloads.tunnel:Tunnel",
    "netfront": "tombolo_lab.workloads.netfront:Netfront",
    "xen": "tombolo_lab.workloads.xen:Xen",
}
# What `measure` may return beside measures.
EXTRAS = ("samples", "tools", "disturbed", "notes")
# The key of the notes that says of how many values the samples are a part: measure -> number.
SAMPLES_OF = "samples_of"
# The key of the notes that has what was counted by range: measure -> [[low, high, count]], rising;
# high is None for a range without an end.
HISTOGRAMS = "histograms"
# The key of the notes that says why a point has no value of the primary measure.
UNMEASURED = "unmeasured"
# What paced.c gives of more values; runs of before these notes are known by it.
MOST_VALUES = 2000


class Skip(Exception):
    """A cell that cannot run here. The text is the reason: a program, root or a kernel feature that
    is missing."""


class PointTimeout(Exception):
    """A point or a set-up that took too long. The text says what was waited for."""


class BadPoint(LabError):
    """What `measure` returned breaks the workload's own declaration."""


@dataclass(frozen=True)
class Parameter:
    """A factor or fixed condition that a workload understands. `low` and `high` are inclusive."""

    doc: str
    kind: type  # str, int, float or bool
    choices: tuple | None = None
    low: float | None = None
    high: float | None = None
    default: object = None
    unit: str = ""
    setup: bool = False  # its change needs a new set-up


@dataclass(frozen=True)
class Measure:
    """A quantity that a workload yields. A value outside `low` to `high` fails the point. `top`: the
    parameter up to which it is searched for; a value as high as that may be higher in truth."""

    doc: str
    unit: str
    better: str  # "higher", "lower", or "" for neither
    low: float | None = 0
    high: float | None = None
    top: str = ""


class Workload:
    """The base class. A cell is a dict: defaults, fixed conditions and the levels of the factors.

    An instance lives as long as a run, so it may cache what does not depend on a cell.
    """

    name: ClassVar[str]
    doc: ClassVar[str]
    parameters: ClassVar[dict[str, Parameter]]
    measures: ClassVar[dict[str, Measure]]
    # What it needs in plain words, such as "root" or "iperf3"; `show` prints them.
    needs: ClassVar[tuple[str, ...]] = ()
    # The measures that `open` finds once for all cells of a set-up, such as the time of a start.
    opened: ClassVar[tuple[str, ...]] = ()
    # The experiment's seed and the block; the runner sets them before it opens a set-up.
    seed: int = 0
    block: int = 0

    def draw(self, cell: dict) -> int:
        """A seed of 48 bits for what the set-up of `cell` draws at random. It follows from nothing
        but the experiment's seed, the block, and the parameters with `setup=True`."""
        fixed = {name: cell.get(name) for name, p in self.parameters.items() if p.setup}
        text = json.dumps([self.seed, self.block, fixed], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def check(self, cell: dict) -> None:
        """Raises `Skip` when this cell cannot run on this machine."""

    @contextmanager
    def open(self, cell: dict) -> Iterator[object]:
        """A set-up for all cells that agree with `cell` in every parameter with `setup=True`."""
        yield None

    def measure(self, setup: object, cell: dict) -> dict:
        """One point: measure → float, or None where the measure does not apply to this cell.

        Beside measures it may hold "samples", a dict of raw values by measure (such as all round
        trips), "tools", a dict of versions or commands by name, and "disturbed", the reason why
        this point is to be measured again although the machine looked quiet. "notes" is a dict of
        JSON values that are kept with the point; of "stacks" (stack of functions, outermost first
        and separated by semicolons → samples) the report draws flame graphs.
        """
        raise NotImplementedError

    def seconds(self, cell: dict) -> float:
        """The expected duration of `measure` for this cell."""
        return 1.0

    def setup_seconds(self, cell: dict) -> float:
        """The expected duration of `open` and its end. It may take 3 × this + 60 s."""
        return 5.0


def _bad_value(measure: Measure, value: object) -> str | None:
    """What is wrong with a value, or None. It is a finite number in the measure's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number, found {value!r}"
    if not math.isfinite(value):
        return f"expected a finite number, found {value}"
    if measure.low is not None and value < measure.low:
        return f"expected at least {measure.low:g}, found {value:g}"
    if measure.high is not None and value > measure.high:
        return f"expected at most {measure.high:g}, found {value:g}"
    return None


def _checked_samples(measures: Mapping[str, Measure], samples: object) -> dict[str, list[float]]:
    if not isinstance(samples, Mapping):
        raise BadPoint(f"samples: expected a dict by measure, found {type(samples).__name__}")
    checked = {}
    for name, values in samples.items():
        if name not in measures:
            raise BadPoint(
                f"samples: expected a declared measure ({', '.join(measures)}), found {name!r}"
            )
        checked[name] = [float(value) for value in values]
        for index, value in enumerate(checked[name]):
            if wrong := _bad_value(measures[name], value):
                raise BadPoint(f"samples of {name}, number {index}: {wrong}")
    return checked


def checked_point(
    measures: Mapping[str, Measure], wanted: tuple[str, ...], returned: object
) -> tuple[dict[str, float | None], dict[str, list[float]], dict[str, str]]:
    """What `measure` returned as measures, samples and tools.

    `wanted` are the measures of the experiment; each must be there, as a number or as None.
    BadPoint when one is missing, is NaN or infinite, is outside its range, or is not declared.
    """
    if not isinstance(returned, Mapping):
        raise BadPoint(f"measure: expected a dict, found {type(returned).__name__}")
    values: dict[str, float | None] = {}
    for name, value in returned.items():
        if name in EXTRAS:
            continue
        if name not in measures:
            raise BadPoint(f"expected a declared measure ({', '.join(measures)}), found {name!r}")
        if value is not None:
            # NumPy's scalars become plain numbers, so that JSON takes them.
            value = value.item() if hasattr(value, "item") else value
            if wrong := _bad_value(measures[name], value):
                unit = f" {measures[name].unit}" if measures[name].unit else ""
                raise BadPoint(f"{name}: {wrong}{unit}")
        values[name] = value
    missing = [name for name in wanted if name not in values]
    if missing:
        raise BadPoint(f"no value for {', '.join(missing)}: each measure is a number or None")
    samples = _checked_samples(measures, returned.get("samples") or {})
    tools = {str(name): str(text) for name, text in (returned.get("tools") or {}).items()}
    return values, samples, tools
