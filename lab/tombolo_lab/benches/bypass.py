"""The bypass beside the kernel's paths: every load between every pair of ends.

A cell of the line is a load between two ends, without or with NAT: the bypass's result divided by
that of the same set-up of the kernel, in pairs of one repetition, by rate and by CPU time. Its
value is the midmean of the logarithms, which tolerates disturbed slices as a median does and does
not jump where slices fall into two groups; its interval is the bootstrap's. `equals` is one of two
equal set-ups of the kernel by the other: the noise. `faster` and `slower` are used for results
outside of it only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tombolo_lab import statistics
from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run

PARTS = (Part("bypass-matrix"), Part("bypass-flows"))
# Ours, the kernel's same set-up, that once more, and what is added to the name of the cell.
COMPARED = (("bypass", "ip", "ip_again", ""), ("bypass_nat", "nat", "nat_again", " nat"))
BOUNDS = ("drop", "straight")
SEED = 20261122
RESAMPLES = 1000


def spread(ratios: Sequence[float]) -> dict:
    """The middle of some ratios, and its interval."""
    logs = [math.log(value) for value in ratios]
    found = statistics.interval_bootstrap(logs, statistics.midmean, seed=SEED, resamples=RESAMPLES)
    parts = {"ratio": found.estimate, "low": found.low, "high": found.high}
    # Few ratios have no interval.
    return {k: None if v is None else round(math.exp(v), 3) for k, v in parts.items()}


def verdict(ours: dict, equals: dict) -> str:
    """`faster` or `slower` where the interval of a ratio and that of equals lie apart from each
    other, and ours from 1; else `equal`."""
    if None in (ours["low"], equals["low"]):
        return "equal"
    if ours["low"] > max(1, equals["high"]):
        return "faster"
    if ours["high"] < min(1, equals["low"]):
        return "slower"
    return "equal"


def rate_of(load: str) -> str:
    """The measure that is the rate of a load."""
    return "mbit_s" if load.startswith(("tcp_64", "tcp_16K")) else "frames_s"


class Matrix:
    """The cells of a run of bypass-matrix."""

    def __init__(self, run: Run):
        self.run = run
        # Match of a cell → its points by block; looked up often.
        self.points: dict[tuple, dict[int, dict]] = {}
        for point in run.counted():
            cell = point["cell"]
            key = (cell["ends"], cell["load"], cell["path"])
            self.points.setdefault(key, {})[point["block"]] = point

    def values(self, ends: str, load: str, path: str, measure: str) -> dict[int, float]:
        found = self.points.get((ends, load, path), {})
        return {b: p["measures"][measure] for b, p in found.items() if p["measures"].get(measure)}

    def compare(
        self, ends: str, load: str, paths: Sequence[str], measure: str, power: int = 1
    ) -> dict | None:
        """Ours by the kernel and the noise; `power` is -1 where less is better. None where no
        repetition has all three paths."""
        ours, kernel, again = (self.values(ends, load, path, measure) for path in paths)
        blocks = sorted(ours.keys() & kernel.keys() & again.keys())
        if not blocks:
            return None
        middle = {b: math.sqrt(kernel[b] * again[b]) for b in blocks}
        cell = spread([(ours[b] / middle[b]) ** power for b in blocks])
        equals = spread([(again[b] / kernel[b]) ** power for b in blocks])
        return cell | {"equals": equals, "verdict": verdict(cell, equals)}

    def cell(self, ends: str, load: str, compared: Sequence[str]) -> dict | None:
        paths = compared[:3]
        found = self.compare(ends, load, paths, rate_of(load))
        if found is None:
            return None
        found["by_cpu"] = self.compare(ends, load, paths, "cpu_ns", -1)
        for measure in ("retransmitted", "disordered"):
            sums = {p: sum(self.values(ends, load, p, measure).values()) for p in paths[:2]}
            found[measure] = sums if load.startswith("tcp") else None
        ways = [p.get("notes", {}).get("path") for p in self.of(ends, load, paths[0])]
        found["path"] = next((way for way in reversed(ways) if way), None)
        return found

    def of(self, ends: str, load: str, path: str) -> list[dict]:
        return [p for _, p in sorted(self.points.get((ends, load, path), {}).items())]

    def reason(self, ends: str, load: str, paths: Sequence[str]) -> str:
        """Why a cell could not be measured."""
        for point in self.run.points:
            cell = point["cell"]
            is_of = (cell["ends"], cell["load"]) == (ends, load) and cell["path"] in paths
            if is_of and "failed" in point:
                return point["failed"]
        return "no repetition has all its paths"

    def table(self) -> tuple[dict[str, dict], dict[str, str]]:
        """Name → cell, and name → why there is none."""
        factors = self.run.experiment.factors
        cells, missed = {}, {}
        for ends in factors["ends"]:
            for load in factors["load"]:
                for compared in COMPARED:
                    if not set(compared[:3]) <= set(factors["path"]):
                        continue
                    name = f"{ends} {load}{compared[-1]}"
                    if cell := self.cell(ends, load, compared):
                        cells[name] = cell
                    else:
                        missed[name] = self.reason(ends, load, compared[:3])
        return cells, missed


def many_by_one(run: Run, path: str) -> dict | None:
    """10,000 flows by one, by rate and by CPU time."""
    figures = Figures(run)
    many, one = ({"path": path, "load": load} for load in ("udp64_10000", "udp64_1"))
    rates = figures.paired("frames_s", many, one)
    costs = figures.paired("cpu_ns", one, many)
    return spread(rates) | {"by_cpu": spread(costs)} if rates and costs else None


def line(runs: dict[str, Run]) -> dict:
    """The ratios that the docs name, all cells, bounds, and 10,000 flows by one."""
    found, ratios, flows = {}, {}, {}
    if "bypass-flows" in runs:
        run = runs["bypass-flows"]
        each = {path: many_by_one(run, path) for path in run.experiment.factors["path"]}
        flows = {path: cell for path, cell in each.items() if cell}
    if "bypass-matrix" in runs:
        matrix = Matrix(runs["bypass-matrix"])
        cells, missed = matrix.table()
        words = ("faster", "equal", "slower")
        worst = min(cells, key=lambda name: cells[name]["ratio"], default=None)
        for key, name in (
            ("tap_tap_64", "tap-tap udp64_1"),
            ("tap_tap_64_nat", "tap-tap udp64_1 nat"),
            ("worst_cell", worst),
            ("gso_60k", "tap-tap gso_60k"),
            ("tcp_rr", "veth-veth tcp_rr"),
        ):
            ratios[key] = cells.get(name, {}).get("ratio")
        bounds = {
            bound: matrix.compare("tap-tap", "udp64_1", (bound, "ip", "ip_again"), "frames_s")
            for bound in BOUNDS
        }
        experiment = matrix.run.experiment
        found = {
            "worst_cell_name": worst,
            "worst_cell": cells.get(worst),
            "cells": len(cells),
            "verdicts": {w: sum(cell["verdict"] == w for cell in cells.values()) for w in words},
            "slower": [name for name, cell in cells.items() if cell["verdict"] == "slower"],
            "bounds": {name: cell for name, cell in bounds.items() if cell},
            "not_measured": missed,
            "table": cells,
            "rounds": experiment.repeat.times,
            "seconds": experiment.fixed["seconds"],
        }
    ratios["flows_10k"] = flows.get("bypass", {}).get("ratio")
    ratios["flows_10k_nat"] = flows.get("bypass_nat", {}).get("ratio")
    return {"ratios": ratios, **found, "flows_10000_to_1": flows}
