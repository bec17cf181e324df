"""Calls between machines beside a bare TCP connection."""

from __future__ import annotations

import statistics

from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run

PARTS = (Part("machines"),)
RATIOS = {"call_vs_tcp": ("tls", "tcp"), "call_plain_vs_tcp": ("plain", "tcp"), "call_vs_local": ("tls", "local")}


def line(runs: dict[str, Run]) -> dict:
    """Medians of the ratios of each repetition."""
    figures = Figures(runs["machines"])
    found = {}
    for key, (ours, base) in RATIOS.items():
        ratios = figures.paired("p50_us", {"row": ours}, {"row": base})
        found[key] = round(statistics.median(ratios), 2) if ratios else None
    return {"ratios": found, "call_us": figures.median("p50_us", 1, row="tls")}
