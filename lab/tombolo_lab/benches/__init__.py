"""Benches: one or more experiments, and one line of JSON that sums them up.

`./x bench NAME` runs the experiments of a bench one after the other, each into a folder of its own,
and prints the medians of each cell and, as its last line, one JSON object. Its keys are documented
in docs/benches.md, and scripts rely on them. Order, repetition, disturbance, resumption and reports
are the runner's; a bench only names experiments and computes its line from their points.

A bench is a module of this package. It has

    PARTS           the experiments, in the order in which they run
    line(runs)      runs by the experiment's name → the keys of the last line that are its own. A
                    part that was not run is missing; keys that need it are then left out
    prepare(options)    optional: what is built before anything runs; gives notes for the last line
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from tombolo_lab.results import Run

NAMES = (
    "switch",
    "cell",
    "ivshmem",
    "xen",
    "bypass",
    "bypass-flames",
    "rpc",
    "rpc-sweep",
    "rpc-misses",
    "trust",
    "span",
)


@dataclass(frozen=True)
class Part:
    """An experiment of a bench, with settings as those of `tombolo lab run --set`."""

    experiment: str
    settings: tuple[str, ...] = ()


def load(name: str) -> ModuleType:
    """The module of a bench."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


class Figures:
    """The points of a run that count, by factor levels."""

    def __init__(self, run: Run):
        self.run = run

    def by_block(self, measure: str, **match: object) -> dict[int, float]:
        """Block → value, of the cell that `match` names."""
        found = {}
        for point in self.run.counted():
            value = point["measures"].get(measure)
            if value is not None and self._is_of(point["cell"], match):
                found[point["block"]] = value
        return found

    def values(self, measure: str, **match: object) -> list[float]:
        """All values of one measure over the points that match."""
        return [
            value
            for point in self.run.counted()
            if (value := point["measures"].get(measure)) is not None
            and self._is_of(point["cell"], match)
        ]

    def samples(self, measure: str, **match: object) -> list[float]:
        """All raw values of one measure over the points that match."""
        return [
            value
            for point in self.run.counted()
            if self._is_of(point["cell"], match)
            for value in point.get("samples", {}).get(measure, ())
        ]

    def median(self, measure: str, digits: int | None = None, **match: object) -> float | None:
        """The median of `values`, rounded to `digits`; None where there are none."""
        values = self.values(measure, **match)
        if not values:
            return None
        found = statistics.median(values)
        return found if digits is None else round(found, digits)

    def paired(
        self, measure: str, ours: Mapping, base: Mapping, other: str | None = None
    ) -> list[float]:
        """The ratios of two cells, of each block that has both. `other` is the base's measure."""
        one = self.by_block(measure, **ours)
        two = self.by_block(other or measure, **base)
        return [one[block] / two[block] for block in sorted(one.keys() & two.keys()) if two[block]]

    @staticmethod
    def _is_of(cell: Mapping, match: Mapping) -> bool:
        return all(cell.get(name) == level for name, level in match.items())


def ratio(ours: float | None, peer: float | None, digits: int = 3) -> float | None:
    """Ours divided by the peer's; None where either is missing."""
    return round(ours / peer, digits) if ours is not None and peer else None


def files(runs: Iterable[Run]) -> dict:
    """The table of the first run, and the plots of all, as paths below the current folder."""
    runs = list(runs)
    paths = [path for run in runs for path in sorted((run.folder / "plots").glob("[0-9]*.svg"))]
    return {
        "table": os.path.relpath(runs[0].folder / "summary.csv"),
        "plots": [os.path.relpath(path) for path in paths],
    }
