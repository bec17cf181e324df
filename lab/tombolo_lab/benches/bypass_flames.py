"""Flame graphs of a frame's path from tap to tap: with NAT, and with the bypass over the same."""

from __future__ import annotations

import os

from tombolo_lab.benches import Figures, Part
from tombolo_lab.report import flamegraphs
from tombolo_lab.results import Run

PARTS = (Part("bypass-flames"),)


def line(runs: dict[str, Run]) -> dict:
    """CPU time per frame, samples, and where the pictures are."""
    run = runs["bypass-flames"]
    figures = Figures(run)
    paths = run.experiment.factors["path"]
    samples = {
        cell["path"]: stacks.total() for cell, stacks, _ in flamegraphs.stacks_by_cell(run).values()
    }
    pictures = sorted((run.folder / "plots").glob("*.flame.svg"))
    return {
        "ns_per_frame": {path: figures.median("cpu_ns", 0, path=path) for path in paths},
        "samples": {path: samples.get(path, 0) for path in paths},
        "pictures": [os.path.relpath(path) for path in pictures],
    }
