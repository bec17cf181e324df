"""Deadlines missed against offered load, on a virtual clock and in real time."""

from __future__ import annotations

import statistics

from tombolo_lab.benches import Figures, Part, files
from tombolo_lab.results import Run

PARTS = (Part("deadlines"), Part("deadlines-real"))
ORDERS = {
    "edf": ("edf", False),
    "edf_admission": ("edf", True),
    "fifo": ("fifo", False),
    "priority": ("priority", False),
}


def missed(run: Run, name: str, load: int) -> float | None:
    """The mean part that an order misses of the tasks "spread"."""
    order, admission = ORDERS[name]
    match = {"order": order, "admission": admission, "load": load, "tasks": "spread"}
    values = Figures(run).values("missed", **match)
    return round(statistics.mean(values), 5) if values else None


def line(runs: dict[str, Run]) -> dict:
    """Mean parts over the seeds; each repetition is a seed."""
    found: dict = {}
    if "deadlines-real" in runs:
        run = runs["deadlines-real"]
        figures = Figures(run)
        served = figures.values("served_us")
        done = [p for p in run.points if "measures" in p]
        tries = sum(int(point["measures"].get("tries") or 1) for point in done)
        found |= {
            "real_work_us": figures.median("work_us", 1),
            "real_charged_us": figures.median("charged_us", 1),
            "real_served_us_median": figures.median("served_us", 1),
            "real_served_us_most": round(max(served), 1) if served else None,
            "real_runs": tries,
            "real_runs_disturbed": tries - len(run.counted()),
        }
    if "deadlines" in runs:
        for name in ORDERS:
            for load in (90, 120):
                found[f"{name}_misses_at_{load / 100:g}"] = missed(runs["deadlines"], name, load)
    if "deadlines-real" in runs:
        for name in ("edf", "fifo", "priority"):
            found[f"real_{name}_misses_at_0.9"] = missed(runs["deadlines-real"], name, 90)
    return {**found, **files(runs.values())}
