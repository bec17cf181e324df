"""Hostile peers, random faults and handovers."""

from __future__ import annotations

from tombolo_lab.benches import Figures, Part
from tombolo_lab.results import Run
from tombolo_lab.workloads.trust import GAPS

PARTS = (Part("trust"),)


def line(runs: dict[str, Run]) -> dict:
    """Figures of the last repetition; `lost` is the sum of all parts."""
    figures = Figures(runs["trust"])

    def last(measure: str) -> float | None:
        values = figures.values(measure)
        return values[-1] if values else None

    return {
        "attacks": last("attacks"),
        "escapes": last("escapes"),
        "worst_neighbour_p99_ms": last("worst_neighbour_p99_ms"),
        "soak_minutes": last("soak_minutes"),
        "manual": last("manual"),
        "recovery_median_s": last("recovery_median_s"),
        "recovery_worst_s": last("recovery_worst_s"),
        "upgrade_gap_ms": {kind: last(f"gap_{kind}_ms") for kind in GAPS},
        "lost": sum(figures.values("lost")),
    }
